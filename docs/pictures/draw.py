"""Draws the pictures of the documentation: `python docs/pictures/draw.py`. Words and places are data, below.

Each picture is one SVG with its own background, so that it reads well on light and dark pages alike.
"""

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
STYLE = """
  .page { fill: #fbfcfd; stroke: #cfd8dc }
  text { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #263238 }
  .small { font-size: 12px } .title { font-weight: 600 }
  .mono { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12.5px }
  .faint { fill: #607d8b } .halo { paint-order: stroke; stroke: #fbfcfd; stroke-width: 5px }
  .box { fill: #eceff1; stroke: #78909c; stroke-width: 1.2 }
  .device { fill: #c8e6c9; stroke: #388e3c } .host { fill: #bbdefb; stroke: #1976d2 }
  .storage { fill: #ffe0b2; stroke: #ef6c00 }
  .line { stroke: #546e7a; stroke-width: 1.5; fill: none } .dashed { stroke-dasharray: 5 4 }
  .tip { fill: #546e7a }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1e2329; stroke: #37474f }
    text { fill: #e8edf0 } .faint { fill: #9fb3bd } .halo { stroke: #1e2329 }
    .box { fill: #2b333a; stroke: #78909c }
    .device { fill: #1f4d2b; stroke: #66bb6a } .host { fill: #173f66; stroke: #64b5f6 }
    .storage { fill: #5d3a10; stroke: #ffb74d }
    .line { stroke: #b0bec5 } .tip { fill: #b0bec5 }
  }
"""


class Picture:
    """One SVG, built from boxes, words and arrows. Coordinates are pixels from the upper left corner."""

    def __init__(self, name: str, width: int, height: int, title: str) -> None:
        self.name, self.width, self.height, self.title = name, width, height, title
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, kind: str = "", text: str = "", under: str = ""
    ) -> None:
        """A rounded box with a line of text in its middle, and a smaller one below that."""
        self.parts.append(f'<rect class="box {kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
        middle = y + height / 2 + 5
        if text:
            self.text(x + width / 2, middle - (9 if under else 0), text, "middle", "title" if under else "")
        if under:
            self.text(x + width / 2, middle + 10, under, "middle", "small")

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        """A line of text whose `anchor` (start, middle, end) is at x."""
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, *points: tuple[float, float], kind: str = "", arrow: bool = True) -> None:
        """A line through points, with an arrow at its end."""
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        end = ' marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'<path class="line {kind}" d="{path}"{end}/>')

    def svg(self) -> str:
        """The whole file."""
        tip = '<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" aria-label="{escape(self.title)}">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f'<defs>{tip}<path class="tip" d="M0 0 L10 5 L0 10 z"/></marker></defs>',
                f'<rect class="page" x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def tree() -> Picture:
    """Two prompts that share their beginning, in a tree of pages, and where each page is."""
    p = Picture("tree", 860, 330, "Prompts as paths in a tree of pages, and the tiers that hold them")
    for y, words in (
        (40, "the cat sat | on the mat | and then slept | all day long"),
        (66, "the cat sat | on the mat | but then ran"),
    ):
        p.text(24, y, "prompt:", kind="faint")
        p.text(90, y, words, kind="mono")
    p.text(560, 40, "Pages of three words each.", kind="small faint")
    p.text(560, 58, "A prefix is a path from the root.", kind="small faint")
    p.box(24, 160, 70, 44, "", "root")
    places = {
        "the cat sat": (134, 160, "device"),
        "on the mat": (290, 160, "device"),
        "and then slept": (446, 110, "device"),
        "all day long": (602, 110, "host"),
        "but then ran": (446, 210, "host"),
    }
    under = {"the cat sat": "device 5, host 2", "on the mat": "device 6, host 3", "and then slept": "device 1, host 7"}
    for words, (x, y, kind) in places.items():
        p.box(x, y, 124, 44, kind, words, under.get(words, "host 9" if words == "all day long" else "host 4"))
    p.line((94, 182), (132, 182))
    p.line((258, 182), (288, 182))
    p.line((414, 176), (430, 132), (444, 132))
    p.line((414, 188), (430, 232), (444, 232))
    p.line((570, 132), (600, 132))
    p.box(24, 286, 18, 18, "device")
    p.text(50, 300, "on device (L1), and a copy on host", kind="small")
    p.box(330, 286, 18, 18, "host")
    p.text(356, 300, "on host alone (L2): comes back by a load back", kind="small")
    return p


def life() -> Picture:
    """The states of one page of a prefix, and the transitions between them."""
    p = Picture("life-of-a-page", 860, 412, "The life of a page as a diagram of states")
    p.box(30, 165, 110, 60, "", "absent")
    p.box(250, 165, 130, 60, "device", "device")
    p.box(490, 165, 150, 60, "device", "device + host")
    p.box(490, 310, 150, 60, "host", "host")
    p.box(250, 310, 130, 60, "storage", "on its way", "prefetch")
    p.box(490, 40, 150, 50, "host", "on its way", "backup")
    p.box(700, 238, 130, 50, "device", "on its way", "load back")
    p.line((140, 185), (248, 185))
    p.text(194, 177, "insert", "middle", "small")
    p.line((250, 208), (142, 208))
    p.text(194, 226, "evict", "middle", "small")
    p.line((315, 165), (315, 65), (488, 65))
    p.text(307, 120, "begin backup", "end", "small")
    p.line((565, 90), (565, 163))
    p.text(573, 130, "finish: arrived", kind="small")
    p.line((490, 80), (345, 80), (345, 163), kind="dashed")
    p.text(360, 100, "failed", kind="small faint")
    p.line((545, 225), (545, 308))
    p.text(537, 272, "evict device", "end", "small")
    p.line((640, 340), (765, 340), (765, 290))
    p.text(655, 358, "begin load back", kind="small")
    p.line((765, 238), (765, 195), (642, 195))
    p.text(672, 187, "finish: arrived", kind="small")
    p.line((700, 272), (610, 272), (610, 308), kind="dashed")
    p.text(640, 265, "failed", kind="small faint")
    p.line((85, 225), (85, 340), (248, 340))
    p.text(100, 332, "begin prefetch", kind="small")
    p.line((380, 340), (488, 340))
    p.text(434, 332, "finish", "middle", "small")
    p.line((565, 370), (565, 396), (50, 396), (50, 227))
    p.text(300, 390, "evict host", "middle", "small")
    return p


def tiers() -> Picture:
    """The three tiers, what moves between them and who waits for it."""
    p = Picture("tiers", 860, 300, "Device, host and storage, and the transfers between them")
    for x, kind, name, what, scope in (
        (30, "device", "L1: device memory", "the engine's own pool", "one process"),
        (335, "host", "L2: host memory", "pinned, several times larger", "one process"),
        (640, "storage", "L3: storage", "disk, bucket, cluster", "shared, survives"),
    ):
        p.box(x, 70, 190, 130, kind)
        for y, text, style in ((105, name, "title"), (135, what, "small"), (160, scope, "small")):
            p.text(x + 95, y, text, "middle", style)
    for x, right, left in ((220, "backup", "load back"), (525, "store", "prefetch")):
        p.line((x, 110), (x + 113, 110))
        p.text(x + 56, 102, right, "middle", "small")
        p.line((x + 115, 165), (x + 2, 165))
        p.text(x + 56, 183, left, "middle", "small")
    p.text(
        30,
        40,
        "Pages move by begin and finish. What fails is a miss; nobody waits but who asks for it.",
        kind="small faint",
    )
    p.line((125, 200), (125, 240), kind="", arrow=True)
    p.text(125, 258, "evicted: free at once if host has it", "middle", "small")
    p.line((430, 200), (430, 240))
    p.text(430, 258, "evicted: the oldest that only host has", "middle", "small")
    p.line((735, 200), (735, 240))
    p.text(735, 258, "evicted by the store", "middle", "small")
    return p


def layers() -> Picture:
    """Which part of the code may use which, and where values flow."""
    p = Picture("layers", 860, 330, "The layers of the code: each uses only what is below it")
    rows = (
        ("command lines, servers", "purecache replay, check, demo ...; adapters for sglang-jax and sglang", "box"),
        ("storage", "what is written after a backup, prefetches; stores of pages by key", "storage"),
        ("facade: PrefixCache", "checks what callers pass, owns the current state", "box"),
        ("effects: Interpreter", "carries out copies of pages, reports how they ended", "host"),
        ("transitions", "pure, jitted: (state, inputs) to (state, effects, reply)", "device"),
        ("state: CacheState", "one immutable value: tree, books, locks, operations", "device"),
    )
    for row, (name, what, kind) in enumerate(rows):
        y = 24 + 48 * row
        p.box(30, y, 210, 36, kind, name)
        p.text(260, y + 23, what, kind="small")
    p.line((790, 30), (790, 290))
    p.text(800, 165, "uses", kind="small faint")
    p.text(772, 318, "imports point down only", "end", "small faint")
    return p


def request() -> Picture:
    """One request from its arrival to its end, as calls between engine, cache and tiers."""
    p = Picture("request", 860, 560, "One request: calls between scheduler, cache, device pool and storage")
    actors = {"engine": 110, "PrefixCache": 350, "device and host": 570, "storage": 770}
    kinds = {"engine": "", "PrefixCache": "", "device and host": "device", "storage": "storage"}
    for name, x in actors.items():
        p.box(x - 75, 20, 150, 34, kinds[name], name)
        p.line((x, 54), (x, 540), kind="dashed", arrow=False)
    engine, cache, copies, store = actors.values()
    steps = (
        (90, engine, cache, "tier.prefetch(prompt)"),
        (115, cache, store, "what of it is there?"),
        (140, store, cache, "pages into reserved host pages"),
        (185, engine, cache, "admit(prompt[:-1])"),
        (210, cache, engine, "match and receipt (locked)"),
        (245, engine, cache, "load_back(match)"),
        (270, cache, copies, "copy host to device"),
        (295, cache, engine, "pages, or a refusal"),
        (330, engine, cache, "allocate(n)"),
        (355, cache, engine, "lent pages, or None"),
        (432, engine, cache, "finish(prompt, pages, receipt)"),
        (457, cache, copies, "copy device to host"),
        (495, engine, cache, "tick(), once per step"),
        (520, cache, store, "store what has arrived on host"),
    )
    for y, start, end, text in steps:
        side = 6 if end > start else -6
        p.line((start + side / 2, y), (end - side, y))
        p.text((start + end) / 2, y - 6, text, "middle", "small halo")
    p.box(engine - 75, 372, 150, 34, "", "computes the rest")
    return p


PICTURES = (tree, life, tiers, layers, request)


def main() -> None:
    """Write all pictures beside this file."""
    for draw in PICTURES:
        picture = draw()
        (FOLDER / f"{picture.name}.svg").write_text(picture.svg())


if __name__ == "__main__":
    main()
