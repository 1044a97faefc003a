"""What the tests of the core share: compiled programs, pools with recognisable bytes, a gate with a script."""

import hashlib
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from purecache.cache import PrefixCache
from purecache.effects import Gate, Interpreter
from purecache.inputs import Inputs
from purecache.namespaces import namespace_digest
from purecache.state import NONE, CacheConfig, CacheState
from purecache.state.layout import Column

WORDS = 4
"""int32 words per page of the test pools."""
_TABLES: dict = {}
_PLANES: dict = {}


class Script(Gate):
    """Holds back transfers of the kinds in `holding`; `fails(kind, number)` says which pages fail, deepest first."""

    def __init__(self):
        self.holding = set()
        self.fails = no_failure

    def failing(self, transfer):
        return np.array(self.fails(transfer.kind, len(transfer.target)), bool)

    def held(self, transfer):
        return transfer.kind in self.holding


def no_failure(kind, number):
    return [False] * number


def shared_programs(facade, smallest):
    """Let facades of one layout share their compiled programs."""
    table = _TABLES.setdefault((facade.config.layout, smallest), facade._driver.programs)
    facade._driver.programs = facade._programs = table
    facade._inputs = Inputs(facade.config, table)
    return facade


def new_plane(config):
    """The interpreter of a configuration, emptied: one for all tests with pools of the same size."""
    key = (config.ranks, config.device_pages, config.host_pages)
    if key not in _PLANES:
        pool = jnp.zeros((config.ranks * config.device_pages, WORDS), jnp.int32)
        sizes = {"host_pages": max(config.host_pages, 1), "device_pages": config.device_pages, "ranks": config.ranks}
        _PLANES[key] = Interpreter(pool, gate=Script(), batch_pages=4, **sizes)
    plane = _PLANES[key]
    plane.drain()
    plane.reset()
    plane._gate.__init__()
    plane.pool = jnp.full((config.ranks * config.device_pages, WORDS), -1, jnp.int32)
    return plane


def new_cache(config, smallest=16, check_laws=True, plane=True):
    """A facade over a real interpreter, and the gate of that."""
    plane = new_plane(config) if plane else None
    facade = shared_programs(PrefixCache(config, plane, smallest=smallest, check_laws=check_laws), smallest)
    return facade, plane._gate if plane else None


def settle(facade):
    """Wait for the bytes of every transfer in flight, so that the next poll depends on the gate alone."""
    facade._driver.plane.settle()


def content(path):
    """int32[WORDS]: what the page at the end of `path` holds: a function of the whole prefix and its namespace."""
    return np.frombuffer(hashlib.blake2b(repr(path).encode(), digest_size=4 * WORDS).digest(), np.int32)


@jax.jit
def _write(pool, index, values):
    return pool.at[index].set(values, mode="drop", wrap_negative_indices=False)


def write_pages(facade, rank, pages, paths):
    """What an engine does: compute the pages at the ends of `paths` into device `pages`."""
    index, values = np.full(16, NONE, np.int32), np.zeros((16, WORDS), np.int32)
    for row, (page, path) in enumerate(zip(pages, paths, strict=True)):
        index[row], values[row] = page + rank * facade.config.device_pages, content(path)
    facade.pool = _write(facade.pool, index, values)


def read_page(facade, rank, page):
    """The words of a device page."""
    return np.array(facade.pool)[page + rank * facade.config.device_pages]


def serve(facade, tokens, namespace=None, rank=0):
    """Run a request to its end: match, compute the rest, insert. Returns its Inserted, with duplicates released."""
    path, space = path_of(facade.config, tokens, namespace, rank), {"namespace": namespace, "rank": rank}
    match, receipt = facade.admit(tokens, **space)
    new = facade.allocate(len(path) - 1 - len(match.device_pages), rank=rank)
    assert new is not None
    write_pages(facade, path[0], new, [path[: n + 1] for n in range(len(match.device_pages) + 1, len(path))])
    return facade.finish(tokens, np.concatenate([match.device_pages, new]), receipt, **space)


def path_of(config, tokens, namespace=None, rank=0):
    """(rank, (namespace, page), page, ...) of the whole pages of a prompt."""
    size = config.page_size
    blocks = [tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size)]
    return (rank or 0, *([((namespace, rank is None), blocks[0]), *blocks[1:]] if blocks else []))


@cache
def digest_of(namespace, no_rank):
    return tuple(namespace_digest(namespace, rank=None if no_rank else 0).tolist())


def tree_of(state: CacheState, names):
    """{path: node id} of a state; `names`: digest -> what stands for the namespace in a path."""
    nodes, layout = np.array(state.nodes), state.layout
    tokens = np.array(state.tokens).reshape(layout.rows, layout.page_size)
    paths = {layout.root(rank): (rank,) for rank in range(layout.ranks)}

    def path_of(node):
        if node not in paths:
            above, page = path_of(nodes[Column.PARENT, node]), tuple(tokens[node].tolist())
            if len(above) == 1:
                digest = tuple(nodes[Column.NAMESPACE : Column.NAMESPACE + 4, node].tolist())
                page = (names[digest], page)
            paths[node] = (*above, page)
        return paths[node]

    live = np.flatnonzero(nodes[Column.PARENT, : layout.nodes] != NONE)
    return {path_of(node): int(node) for node in live}


def tiny(**options) -> CacheConfig:
    """The configuration that most tests of the core share, so that they share programs."""
    values = {"page_size": 2, "device_pages": 8, "host_pages": 6, "ranks": 2, "levels": 4}
    limits = {"max_operations": 4, "max_receipts": 6, "load_back_threshold": 0}
    return CacheConfig(**(values | limits | options))
