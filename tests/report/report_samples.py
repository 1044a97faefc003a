"""Reports made by hand: all that a page can show, with names that would break a page that does not escape them."""

import math
from html.parser import HTMLParser

from purecache.report import Prefix, Report, Stock, Transfer

NASTY = """</script><script>alert(1)</script><img src=x onerror=alert(2)>"&'</style>"""
COUNTERS = ("backup_pages", "loaded_pages", "stored_pages", "prefetched_pages")
COUNTERS += ("evicted_device_pages", "evicted_host_pages", "dropped_pages", "loads_refused", "backup_failed_pages")
OUTCOMES = ("ok", "part", "failed", "forgotten", "unknown")


def full_report(**changes):
    """Every part, two ranks, two pools, every outcome, prefixes of all kinds."""
    at = tuple(float(10 * n) for n in range(31))
    stocks = []
    for tier, capacity in (("device", 64), ("host", 128)):
        for pool in ("kv", "state"):
            for rank in range(2):
                wave = [int(capacity / 4 * (1 + math.sin(n / 5 + rank))) for n in range(31)]
                accounts = {
                    "free": tuple(capacity // 2 - each for each in wave),
                    "evictable": tuple(wave),
                    "protected": (capacity // 4,) * 31,
                    "in_flight": (capacity // 4,) * 31,
                    "lent": (0,) * 31,
                }
                stocks.append(Stock(tier, pool, rank, capacity, accounts))
    growing = tuple(n * n for n in range(31))
    transfers = [
        Transfer(kind, "kv", number % 2, number + 1, 30.0 * number, 30.0 * number + 25, outcome)
        for kind in ("backup", "load_back", "store", "prefetch")
        for number, outcome in enumerate(OUTCOMES)
    ]
    transfers.append(Transfer("backup", "state", 1, 3, 290.0, None, "open"))
    prefixes = [
        Prefix(-1, 0, 0, 8, ("device", "host", "storage"), 40, 0.0, NASTY, locked=True),
        Prefix(0, 0, 8, 4, ("device",), 9, 0.2, "tokens 1 2 3 4 …"),
        Prefix(0, 0, 8, 2, ("host",), 3, 0.6, "tokens 5 6 7 8 …"),
        Prefix(-1, 1, 0, 6, (), 1, 1.0, "hash 0123abcd"),
    ]
    values = {
        "source": "recording",
        "title": NASTY,
        "axis": "event",
        "at": at,
        "page_size": 16,
        "stocks": tuple(stocks),
        "found": {
            "device": tuple(16 * n for n in growing),
            "host": tuple(4 * n for n in growing),
            "computed": tuple(12 * n for n in growing),
        },
        "counters": {name: tuple(each * (number + 1) for each in growing) for number, name in enumerate(COUNTERS)},
        "transfers": tuple(transfers),
        "transfers_left_out": 7,
        "prefixes": tuple(prefixes),
        "answers": {"admit": {"ok": 12}, "allocate": {"ok": 8, "no room": 3}},
        "figures": {"time to first token": "1.2 s"},
        "settings": {"policy": "lru", "write": "write_through", NASTY: NASTY},
        "made": {"command": NASTY},
        "notes": (NASTY,),
    }
    return Report(**(values | changes))


def bare_report():
    """One sample, and nothing known."""
    return Report(source="run", title="nothing", axis="seconds", at=(0.0,), page_size=1)


class Parsed(HTMLParser):
    """What is in a page: tags with attributes, ids, the text of every element with an id, the cells of tables."""

    VOID = frozenset({"meta", "input", "link", "img", "br", "hr"})

    def __init__(self, html):
        super().__init__()
        self.tags, self.ids, self.open, self.text = [], {}, [], {}
        self.rows = {}
        self.feed(html)
        self.close()
        assert self.open == [], "some element was not closed"

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if "id" in attributes:
            assert attributes["id"] not in self.ids, "an id stands twice"
            self.ids[attributes["id"]] = (tag, attributes)
        if tag not in self.VOID:
            self.open.append((tag, attributes.get("id")))
        table = next((number for name, number in reversed(self.open) if name == "table"), None)
        if tag == "tr":
            self.rows.setdefault(table, []).append([])
        if tag in ("th", "td"):
            self.rows[table][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if any(tag in ("th", "td") for tag, _ in self.open):
            table = next(number for name, number in reversed(self.open) if name == "table")
            self.rows[table][-1][-1] += data
        for _, number in self.open:
            if number is not None:
                self.text[number] = self.text.get(number, "") + data

    def named(self, tag, **attributes):
        """Attributes of all elements with a tag and these attributes (class: one of its classes)."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [
            found
            for name, found in self.tags
            if name == tag
            and all(v in found.get(k, "").split() if k == "class" else found.get(k) == v for k, v in wanted.items())
        ]
