"""The tree of a state as runs of pages: what the tree map shows."""

from collections.abc import Callable

import numpy as np

from purecache.replay.veil import words_of
from purecache.report.model import Prefix
from purecache.snapshots.taking import by_heat
from purecache.state import NONE, CacheConfig, CacheState
from purecache.state.layout import LOCKS, Column, Stored, Tier

SHOWN_TOKENS = 4
_DEVICE, _HOST, _STORAGE = 1, 2, 4
_TIERS = {_DEVICE: "device", _HOST: "host", _STORAGE: "storage"}


def prefixes_of(state: CacheState, config: CacheConfig, label: Callable[[int], str]) -> tuple[Prefix, ...]:
    """The runs of a state, parents first. `label`: what to say of the tokens of a node."""
    layout, nodes = state.layout, np.asarray(state.nodes)
    live = np.flatnonzero(nodes[Column.PARENT, : layout.nodes] != NONE)
    live = live[np.argsort(nodes[Column.DEPTH, live], kind="stable")]
    parents = nodes[Column.PARENT]
    children = np.bincount(parents[live], minlength=layout.rows)
    where = (nodes[layout.page_row(Tier.DEVICE)] >= 0) * _DEVICE + (nodes[layout.page_row(Tier.HOST)] >= 0) * _HOST
    where = where + (nodes[Column.STORED] == Stored.YES) * _STORAGE
    locked = nodes[LOCKS[0]] + nodes[LOCKS[1]] > 0
    above = parents[live]
    begins = (above >= layout.nodes) | (children[above] != 1) | (where[above] != where[live])
    heat, run_of = _heat(state), np.full(layout.rows, NONE, np.int64)
    runs: list[list[int]] = []
    for node, parent, first in zip(live.tolist(), above.tolist(), begins.tolist(), strict=True):
        if first:
            run_of[node] = len(runs)
            runs.append([])
        else:
            run_of[node] = run_of[parent]
        runs[run_of[node]].append(node)
    return tuple(
        Prefix(
            parent=int(run_of[parents[run[0]]]),
            rank=int(nodes[Column.RANK, run[0]]),
            depth=int(nodes[Column.DEPTH, run[0]]) - 1,
            pages=len(run),
            tiers=tuple(name for bit, name in _TIERS.items() if int(where[run[0]]) & bit),
            hits=int(nodes[Column.HITS, run].max()),
            heat=round(float(heat[run].min()), 4),
            label=label(run[0]),
            locked=bool(locked[run].any()),
        )
        for run in runs
    )


def _heat(state: CacheState) -> np.ndarray:
    """float64[rows]: place of each node in the eviction orders, from 0 (goes last) to 1; that of the hottest below."""
    parents, layout = np.asarray(state.nodes)[Column.PARENT], state.layout
    heat = np.full(layout.rows, np.inf)
    place = 0
    for node in by_heat(state).tolist():
        if heat[node] < np.inf:
            continue
        while node < layout.nodes and heat[node] == np.inf:
            heat[node], node = place, int(parents[node])
        place += 1
    return heat / max(place - 1, 1)


def label_of_tokens(state: CacheState, config: CacheConfig, *, hashed: bool) -> Callable[[int], str]:
    """A label of nodes: the first tokens of their page, or, of a hashed recording, its hash."""
    tokens = np.asarray(state.tokens).reshape(-1, config.page_size)

    def label(node: int) -> str:
        if hashed:
            words = np.ascontiguousarray(tokens[node, : words_of(config.page_size)], "<i4")
            return "hash " + words.tobytes().hex()[:8]
        shown = " ".join(map(str, tokens[node, :SHOWN_TOKENS].tolist()))
        return f"tokens {shown}" + " …" * (config.page_size > SHOWN_TOKENS)

    return label


def label_of_nodes(node: int) -> str:
    """A label that tells nothing of the tokens."""
    return f"node {node}"
