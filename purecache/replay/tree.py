"""The tree of a state as text."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from purecache.replay.veil import words_of
from purecache.state import NONE, CacheConfig, CacheState
from purecache.state.layout import (
    LOCKS,
    TIERS,
    Account,
    Column,
    Layout,
    Ledger,
    Scalar,
    Stored,
    TailColumn,
    Tier,
    TransferKind,
)

MOST_LINES = 400
SHOWN_TOKENS, SHOWN_NUMBERS = 6, 4
LEGEND = "d, h: on device, on host; >: on its way there; s: in storage; locks: device/host"


def tree_as_text(state: CacheState, config: CacheConfig, *, hashed: bool = False, most_lines: int = MOST_LINES) -> str:
    """The tree of a NumPy state: per line a run of nodes that follow each other and are alike.

    hashed: the tokens are those of a hashed recording. most_lines: of the tree; the rest is counted.
    """
    view = _View(state, config, hashed)
    lines = [f"clock {int(state.books[Scalar.CLOCK])}; {LEGEND}"]
    for rank in range(config.ranks):
        lines += view.rank(rank, most_lines)
    return "\n".join([*lines, *view.operations(), *view.receipts()])


@dataclass(frozen=True)
class _Run:
    """Nodes in a row without branches that have the same flags."""

    nodes: list[int]
    flags: str
    depth: int
    """Branches above it."""


class _View:
    """A state, read for people."""

    def __init__(self, state: CacheState, config: CacheConfig, hashed: bool) -> None:
        self._state, self._config, self._layout, self._hashed = state, config, state.layout, hashed
        self._nodes = np.asarray(state.nodes)
        self._tokens = np.asarray(state.tokens).reshape(-1, config.page_size)

    def rank(self, rank: int, most: int) -> Iterator[str]:
        """The pages of a rank, and the tree below its root."""
        books, layout = self._state.books, self._layout
        for pool, name in enumerate(self._config.pool_names):
            parts = []
            for tier in TIERS:
                counts = {each: int(books[layout.account(each, tier, rank, pool)]) for each in Account}
                shown = [f"{number} {each.name.lower().replace('_', ' ')}" for each, number in counts.items() if number]
                parts.append(f"{tier.name.lower()} {', '.join(shown) or 'none'}")
            yield f"rank {rank}, {name}: {'; '.join(parts)}"
        printed = hidden = 0
        for run in self._runs(layout.root(rank)):
            if printed < most:
                yield self._line(run)
                printed += 1
            else:
                hidden += len(run.nodes)
        if hidden:
            yield f"  ... and {hidden} nodes more"

    def _runs(self, root: int) -> Iterator[_Run]:
        """The tree below a root, children in the order of their ids."""
        stack = [(child, 0) for child in reversed(self._children(root))]
        while stack:
            node, depth = stack.pop()
            nodes, flags = [node], self._flags(node)
            children = self._children(node)
            while len(children) == 1 and self._flags(children[0]) == flags:
                nodes.append(children[0])
                children = self._children(children[0])
            yield _Run(nodes, flags, depth)
            below = depth + (len(children) > 1)
            stack += [(child, below) for child in reversed(children)]

    def _children(self, node: int) -> list[int]:
        found, child = [], int(self._nodes[Column.FIRST_CHILD, node])
        while child != NONE and len(found) < self._layout.nodes:
            found.append(child)
            child = int(self._nodes[Column.NEXT_SIBLING, child])
        return sorted(found)

    def _flags(self, node: int) -> str:
        nodes, layout = self._nodes, self._layout
        parts = []
        for pool, name in enumerate(self._config.pool_names):
            stored = nodes[layout.tail_row(TailColumn.STORED, pool) if pool else Column.STORED, node]
            tiers = _tiers(nodes[:, node], layout, pool, int(stored))
            parts.append(f"{name} {tiers}" if pool else tiers)
        if nodes[LOCKS[0], node] or nodes[LOCKS[1], node]:
            parts.append(f"locks {nodes[LOCKS[0], node]}/{nodes[LOCKS[1], node]}")
        parts.append(f"hits {nodes[Column.HITS, node]}")
        if nodes[Column.PRIORITY, node]:
            parts.append(f"priority {nodes[Column.PRIORITY, node]}")
        return "  ".join(parts)

    def _line(self, run: _Run) -> str:
        first = run.nodes[0]
        pages = f"{len(run.nodes)} page{'s' * (len(run.nodes) > 1)}"
        device = self._pages(run.nodes, Tier.DEVICE) + self._pages(run.nodes, Tier.HOST)
        text = f"{'  ' * (run.depth + 1)}{_row(run.nodes)}: {pages}, {self._content(run.nodes)}  {run.flags}{device}"
        if self._nodes[Column.PARENT, first] >= self._layout.nodes:
            words = self._nodes[Column.NAMESPACE : Column.NAMESPACE + 4, first]
            text += f"  namespace {np.ascontiguousarray(words, '<i4').tobytes()[:4].hex()}"
        return text

    def _pages(self, nodes: list[int], tier: Tier) -> str:
        """Device or host pages of a run, if it has them."""
        pages = self._nodes[self._layout.page_row(tier), nodes]
        if pages[0] < 0:
            return ""
        return f"  {tier.name.lower()} page{'s' * (len(pages) > 1)} {_row(pages.tolist())}"

    def _content(self, nodes: list[int]) -> str:
        if self._hashed:
            words = np.ascontiguousarray(self._tokens[nodes[-1], : words_of(self._config.page_size)], "<i4")
            return f"hash {words.tobytes().hex()}"
        tokens = self._tokens[nodes[: SHOWN_TOKENS + 1]].reshape(-1)
        whole = len(nodes) * self._config.page_size
        shown = " ".join(map(str, tokens[:SHOWN_TOKENS].tolist()))
        return f"tokens {shown}{' ...' if whole > SHOWN_TOKENS else ''}"

    def operations(self) -> Iterator[str]:
        """The operations that have not ended."""
        ledger = self._state.ledger
        for number in np.flatnonzero(ledger[Ledger.OPERATION_KIND, : self._layout.max_operations] != NONE).tolist():
            kind, node, count, generation = ledger[: Ledger.OPERATION_GENERATION + 1, number].tolist()
            pool = self._config.pool_names[max(0, int(ledger[Ledger.OPERATION_POOL, number]))]
            name = TransferKind(kind).name.lower().replace("_", " ")
            yield f"operation {number}.{generation}: {name} of {count} pages of {pool}, down to node {node}"

    def receipts(self) -> Iterator[str]:
        """The locks that are out."""
        ledger = self._state.ledger
        for number in np.flatnonzero(ledger[Ledger.RECEIPT_NODE, : self._layout.max_receipts] != NONE).tolist():
            node, generation = ledger[[Ledger.RECEIPT_NODE, Ledger.RECEIPT_GENERATION], number].tolist()
            yield f"receipt {number}.{generation}: node {node}"


def _row(numbers: list[int]) -> str:
    """Some numbers, the way they go on: `3..7`, or the first few."""
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]}..{numbers[-1]}"
    shown = ",".join(map(str, numbers[:SHOWN_NUMBERS]))
    return shown + (",..." if len(numbers) > SHOWN_NUMBERS else "")


def _tiers(node: np.ndarray, layout: Layout, pool: int, stored: int) -> str:
    """Where the page of a node is, of a pool: see LEGEND."""
    device, host, incoming = (int(node[layout.page_row(tier, pool)]) for tier in Tier)
    coming = incoming >= 0
    on_device = "d" if device >= 0 else ">d" if coming and host >= 0 else "-"
    on_host = "h" if host >= 0 else ">h" if coming else "-"
    in_storage = {int(Stored.YES): "s", int(Stored.NO): "-"}.get(stored, ">s")
    return on_device + on_host + in_storage
