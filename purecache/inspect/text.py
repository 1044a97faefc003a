"""Sizes, prefixes and locks as lines of text."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from purecache.snapshots import Snapshot
from purecache.state import NONE

SHOWN_TOKENS = 6


def sizes_text(stats: dict[str, Any]) -> str:
    """The pages of a running cache, its pins, and what it is on its way to."""
    lines = [f"{name}: {value}" for name, value in stats["config"].items()]
    for pool, tiers in stats["pages"].items():
        for tier, ranks in tiers.items():
            for rank, accounts in enumerate(ranks):
                shown = ", ".join(f"{pages} {name.replace('_', ' ')}" for name, pages in accounts.items() if pages)
                lines.append(f"rank {rank}, {pool}, {tier}: {shown or 'no pages'}")
    for pin in stats["pins"]:
        left, held = f"{pin['seconds_left']:.0f} s left", f"{pin['device_pages']} of {pin['pages']} pages on device"
        lines.append(f"pin {pin['name']}: {left}, rank {pin['rank']}, {held}")
    lines += [f"on its way to {each}" for each in stats["resizing"]]
    storage = stats["storage"]
    lines.append("no storage attached" if storage is None else f"storage: {storage['in_flight']} in flight")
    return "\n".join(lines)


def hot_text(prefixes: list[dict[str, Any]]) -> str:
    """The hottest prefixes, the hottest first."""
    lines = ["hottest prefixes:"]
    for place, prefix in enumerate(prefixes, 1):
        about = f"{prefix['tokens']} tokens, {prefix['hits']} hits, {prefix['pages_stored']}/{prefix['pages']} stored"
        lines.append(f"{place:4} {about}, namespace {prefix['namespace']}: {_tokens(prefix['first_tokens'])}")
    return "\n".join(lines) if prefixes else "no prefixes"


def locks_text(locks: list[dict[str, Any]]) -> str:
    """Who holds what."""
    lines = ["locks and transfers:"]
    for each in locks:
        where = ""
        if "pages" in each:
            on = ", ".join(f"{pages} on {tier}" for tier, pages in each["on"].items())
            where = f": rank {each['rank']}, {each['pages']} pages ({on}), {_tokens(each['first_tokens'])}"
        lines.append(f"  {each['by']}{where}")
    return "\n".join(lines) if locks else "no locks, no transfers"


def snapshot_tree(snapshot: Snapshot, most: int) -> str:
    """The tree of a snapshot: per line pages in a row without a branch that are alike. s: storage has them."""
    settings = ", ".join(f"{name} {value}" for name, value in snapshot.settings.items())
    lines = [f"{len(snapshot.parents)} pages, {len(snapshot)} prefixes; {settings}"]
    if snapshot.unnamed:
        lines.append(f"{snapshot.unnamed} pages of unknown namespaces are not in it")
    hidden = 0
    for depth, nodes in _runs(snapshot):
        if len(lines) > most:
            hidden += len(nodes)
            continue
        first = nodes[0]
        flags = f"{'s' if snapshot.stored[first] else '-'}  hits {snapshot.hits[first]}"
        flags += f"  priority {snapshot.priorities[first]}" if snapshot.priorities[first] else ""
        text = f"{'  ' * (depth + 1)}{len(nodes)} pages, {_tokens(snapshot.tokens[first].tolist())}  {flags}"
        if snapshot.parents[first] == NONE:
            origin = snapshot.origins_known[snapshot.origins[first]]
            text += f"  rank {snapshot.ranks[first]}  namespace {origin.namespace!r}"
        lines.append(text)
    return "\n".join([*lines, f"  ... and {hidden} pages more"] if hidden else lines)


def _runs(snapshot: Snapshot) -> Iterator[tuple[int, list[int]]]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for node, parent in enumerate(snapshot.parents.tolist()):
        children[parent].append(node)

    def alike(one: int, other: int) -> bool:
        columns = (snapshot.stored, snapshot.hits, snapshot.priorities)
        return all(column[one] == column[other] for column in columns)

    stack = [(0, node) for node in reversed(children[NONE])]
    while stack:
        depth, node = stack.pop()
        nodes = [node]
        while len(below := children[nodes[-1]]) == 1 and alike(node, below[0]):
            nodes.append(below[0])
        yield depth, nodes
        below = children[nodes[-1]]
        stack += [(depth + (len(below) > 1), child) for child in reversed(below)]


def _tokens(tokens: list[int]) -> str:
    return f"tokens {' '.join(map(str, tokens[:SHOWN_TOKENS]))}{' ...' if len(tokens) > SHOWN_TOKENS else ''}"
