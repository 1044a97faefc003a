"""What the tests of hybrid models share: configurations, pools with recognisable bytes, gates that take notes."""

import hashlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from oracle_values import Tail
from support import WORDS, Script, shared_programs

from purecache.cache import PrefixCache
from purecache.effects import Interpreter, Planes
from purecache.state import NONE, CacheConfig, Checkpoint, Chunk, PoolSpec, Window
from purecache.transitions import TransferKind

_PLANES: dict = {}


@dataclass(frozen=True)
class LastHalf:
    """A law of somebody else: values on the last half of a prefix."""

    in_place: bool = True

    def first_needed(self, depth, page_size):
        return depth // 2


LIMITS = {"levels": 4, "max_operations": 64, "max_receipts": 6, "load_back_threshold": 0}


def window_and_state(**options):
    """Full attention, a window of two pages, a recurrent state; an indexer goes with full attention."""
    pools = (
        PoolSpec("indexer", anchor="kv"),
        PoolSpec("window", Window(3), device_pages=5, host_pages=4),
        PoolSpec("state", Checkpoint(), device_pages=4, host_pages=3),
    )
    values = {"page_size": 2, "device_pages": 8, "host_pages": 6, "ranks": 2, "pools": pools}
    return CacheConfig(**(values | LIMITS | options))


def three_tails(**options):
    """Pages of one token: chunks of three (never on host), the law of somebody else, and a state."""
    pools = (
        PoolSpec("chunk", Chunk(3), device_pages=6),
        PoolSpec("half", LastHalf(), device_pages=6, host_pages=5),
        PoolSpec("state", Checkpoint(), device_pages=4, host_pages=3),
    )
    values = {"page_size": 1, "device_pages": 8, "host_pages": 6, "ranks": 1, "pools": pools}
    return CacheConfig(**(values | LIMITS | options))


def wide_pages(**options):
    """Pages of four tokens and a window of two: one page is more than the window."""
    pools = (PoolSpec("window", Window(2), device_pages=4, host_pages=3),)
    values = {"page_size": 4, "device_pages": 8, "host_pages": 6, "ranks": 1, "pools": pools}
    return CacheConfig(**(values | LIMITS | options))


LAWS = {
    ("window", 2): (lambda depth: max(0, depth - 2), True),
    ("window", 4): (lambda depth: max(0, depth - 1), True),
    ("state", 1): (lambda depth: max(0, depth - 1), False),
    ("state", 2): (lambda depth: max(0, depth - 1), False),
    ("chunk", 1): (lambda depth: 3 * (depth // 3), True),
    ("half", 1): (lambda depth: depth // 2, True),
}
"""The laws of the pools above in plain words, by name and page size: (first page that needs a value, in place)."""


def tails_of(config):
    """{name: Tail} of the tail pools of one of the configurations above."""
    specs = {spec.name: (spec.device_pages, spec.host_pages) for spec in config.pools if spec.law is not None}
    return {name: Tail(*LAWS[name, config.page_size], sizes) for name, sizes in specs.items()}


def sizes_of(config):
    """{name: (device pages, host pages)} of all pools, side pools too, in the order of the planes."""
    sizes = {"kv": (config.device_pages, config.host_pages)}
    for spec in config.pools:
        sizes[spec.name] = sizes[spec.anchor] if spec.anchor else (spec.device_pages, spec.host_pages)
    return sizes


class Watch(Script):
    """A script that tells `note(transfer, failing)` of every transfer that starts."""

    def __init__(self):
        super().__init__()
        self.note = None

    def failing(self, transfer):
        if transfer.kind == TransferKind.COPY:
            return None
        failing = super().failing(transfer)
        if self.note is not None:
            self.note(transfer, failing)
        return failing


def _interpreter(config, name, sizes):
    device, host = sizes
    key = (name, config.ranks, device, host)
    if key not in _PLANES:
        pool = jnp.zeros((config.ranks * device, WORDS), jnp.int32)
        options = {"host_pages": max(host, 1), "device_pages": device, "ranks": config.ranks}
        _PLANES[key] = Interpreter(pool, gate=Watch(), batch_pages=4, **options)
    plane = _PLANES[key]
    plane.drain()
    plane.reset()
    plane._gate.__init__()
    plane.pool = jnp.full((config.ranks * device, WORDS), -1, jnp.int32)
    return plane


def new_hybrid(config, smallest=16):
    """A facade over real interpreters, and the gates of these by name of the pool."""
    planes = {name: _interpreter(config, name, sizes) for name, sizes in sizes_of(config).items()}
    facade = shared_programs(PrefixCache(config, Planes(planes), smallest=smallest), smallest)
    facade.interpreters = planes
    return facade, {name: plane._gate for name, plane in planes.items()}


def settle_all(facade):
    """Wait for the bytes of every transfer in flight, so that the next poll depends on the gates alone."""
    for plane in facade.interpreters.values():
        plane.settle()


def value_of(pool, path):
    """int32[WORDS]: what a pool holds at the end of `path`: a function of the pool, the whole prefix, its namespace."""
    text = repr((pool, path)).encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=4 * WORDS).digest(), np.int32)


@jax.jit
def _write(pool, index, values):
    return pool.at[index].set(values, mode="drop", wrap_negative_indices=False)


def write_values(facade, pool, rank, pages, paths):
    """What an engine does: compute the values at the ends of `paths` into device `pages`, in side pools as well."""
    names = [pool, *(spec.name for spec in facade.config.pools if spec.anchor == pool)]
    for name in names:
        index, values = np.full(16, NONE, np.int32), np.zeros((16, WORDS), np.int32)
        for row, (page, path) in enumerate(zip(pages, paths, strict=True)):
            index[row] = page + rank * sizes_of(facade.config)[name][0]
            values[row] = value_of(name, path)
        facade.pools = {name: _write(facade.pools[name], index, values)}


def check_value(facade, pool, rank, page, path):
    """Assert that a device page, and those of side pools, hold the value of `path`."""
    for name in [pool, *(spec.name for spec in facade.config.pools if spec.anchor == pool)]:
        row = np.array(facade.pools[name])[page + rank * sizes_of(facade.config)[name][0]]
        np.testing.assert_array_equal(row, value_of(name, path), err_msg=f"{name} {path}")
