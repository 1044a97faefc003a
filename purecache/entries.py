"""Which transitions are compiled, with what arguments and sizes."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

import purecache.transitions as t
from purecache.state import CacheState
from purecache.state.layout import Layout

TAIL = 16
"""Pages that `finish` takes besides those of its size: the ones behind the whole pages of a prompt."""

LANES = (16, 128, 1024)
"""How many prompts one program for many prompts takes."""

Spec = Callable[[Layout, int], tuple[Any, ...]]
"""Shapes of the arguments of a transition, given the size in pages."""


def _vector(length: int) -> Any:
    return jax.ShapeDtypeStruct((length,), np.int32)


_ONE: Any = jax.ShapeDtypeStruct((), np.int32)


def _prompt(layout: Layout, size: int) -> t.Prompt:
    return t.Prompt(_vector(size * layout.page_size), _ONE, _vector(4), _ONE)


def _offer(layout: Layout, size: int) -> t.Offer:
    return t.Offer(_vector(size), _ONE, _ONE, _ONE, _values(layout, size))


def _values(layout: Layout, size: int) -> tuple[Any, ...]:
    return tuple(_vector(size) for _ in layout.tails)


_NODE, _RECEIPT, _HANDLE = t.NodeHandle(_ONE, _ONE), t.ReceiptHandle(_ONE, _ONE), t.Handle(_ONE, _ONE)


def _flags(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), np.bool_)


def _peek(state: CacheState, prompt: t.Prompt) -> tuple[CacheState, tuple[()], Any]:
    return state, (), t.peek(state, prompt)


def _prompts(layout: Layout, size: int, lanes: int) -> t.Prompt:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((lanes, *leaf.shape), leaf.dtype), _prompt(layout, size))


def _many(lanes: int) -> "Entry":
    return Entry(t.match_many, lambda layout, size: (_prompts(layout, size, lanes),), warmed=False)


@dataclass(frozen=True)
class Entry:
    """One transition as it is compiled."""

    function: Callable[..., Any]
    arguments: Spec
    takes_size: bool = False
    """Whether the function takes the size as its last, static argument."""
    sized: bool = True
    """Whether there is a program per size."""
    warmed: bool = True
    """Whether `warm` compiles it unasked."""
    small: bool = True
    """Whether it is compiled as one native function. Not if it sorts."""


TABLE: dict[str, Entry] = {
    "match": Entry(t.match, lambda layout, size: (_prompt(layout, size),)),
    "peek": Entry(_peek, lambda layout, size: (_prompt(layout, size),)),
    **{f"match_{lanes}": _many(lanes) for lanes in LANES},
    "admit": Entry(t.admit, lambda layout, size: (_prompt(layout, size),)),
    "insert": Entry(t.insert, lambda layout, size: (_prompt(layout, size), _offer(layout, size))),
    "checkpoint": Entry(t.checkpoint, lambda layout, size: (_prompt(layout, size), _offer(layout, size), _RECEIPT)),
    "finish": Entry(t.finish, lambda layout, size: (_prompt(layout, size), _offer(layout, size + TAIL), _RECEIPT)),
    "abort": Entry(t.abort, lambda layout, size: (_ONE, _vector(size), _RECEIPT, _values(layout, size))),
    "lock": Entry(t.lock, lambda layout, size: (_NODE,), sized=False),
    "unlock": Entry(t.unlock, lambda layout, size: (_RECEIPT,), sized=False),
    "allocate": Entry(t.allocate, lambda layout, size: (_ONE, _ONE), takes_size=True),
    "release": Entry(t.release, lambda layout, size: (_ONE, _vector(size))),
    "evict_device": Entry(t.evict_device, lambda layout, size: (_ONE, _ONE), takes_size=True),
    "evict_host": Entry(t.evict_host, lambda layout, size: (_ONE, _ONE), takes_size=True),
    "begin_backup": Entry(t.begin_backup, lambda layout, size: (_NODE, _ONE), takes_size=True),
    "finish_backup": Entry(t.finish_backup, lambda layout, size: (_HANDLE, _flags(size))),
    "begin_load_back": Entry(t.begin_load_back, lambda layout, size: (_NODE,), takes_size=True),
    "finish_load_back": Entry(t.finish_load_back, lambda layout, size: (_HANDLE, _flags(size))),
    "begin_store": Entry(
        t.begin_store, lambda layout, size: (_NODE, (_ONE,) * layout.pools), takes_size=True, warmed=False
    ),
    "finish_store": Entry(t.finish_store, lambda layout, size: (_HANDLE, _flags(size)), warmed=False),
    "begin_prefetch": Entry(t.begin_prefetch, lambda layout, size: (_NODE, _ONE), takes_size=True, warmed=False),
    "finish_prefetch": Entry(
        t.finish_prefetch,
        lambda layout, size: (_HANDLE, _prompt(layout, size), _ONE, _vector(size), _flags(size)),
        warmed=False,
    ),
    "advance": Entry(t.advance, lambda layout, size: (_ONE,), sized=False, warmed=False),
    "forget": Entry(t.forget, lambda layout, size: (_prompt(layout, size), _ONE), warmed=False),
    "forget_namespace": Entry(
        t.forget_namespace, lambda layout, size: (t.Space(_vector(4)), _ONE), sized=False, warmed=False
    ),
    **{
        name: Entry(getattr(t, name), lambda layout, size: (_ONE, _ONE), takes_size=True, warmed=False)
        for name in ("shrink_device", "shrink_host", "grow_device", "grow_host")
    },
    "reset": Entry(t.reset, lambda layout, size: (), sized=False, small=False),
}

_BEGUN_BY_POOL = (
    "allocate",
    "release",
    "evict_device",
    "evict_host",
    "shrink_device",
    "shrink_host",
    "grow_device",
    "grow_host",
    "begin_prefetch",
)
"""Transitions of `TABLE` that there are for every pool."""
_OF_POOLS: dict[str, Entry] = {
    "fork": Entry(t.fork, lambda layout, size: (_NODE,), sized=False),
    "copy_page": Entry(t.copy_page, lambda layout, size: (_ONE, _ONE, _ONE), sized=False),
    "finish_backup": Entry(t.finish_value_backup, lambda layout, size: (_HANDLE, _ONE, _vector(size), _flags(size))),
    "finish_store": Entry(
        t.finish_value_store, lambda layout, size: (_HANDLE, _vector(size), _flags(size)), warmed=False
    ),
    "finish_prefetch": Entry(
        t.finish_value_prefetch,
        lambda layout, size: (_HANDLE, _prompt(layout, size), _ONE, _vector(size), _flags(size)),
        warmed=False,
    ),
    "finish_load_back": Entry(t.finish_value_load, lambda layout, size: (_HANDLE, _ONE, _vector(size), _flags(size))),
}
"""Transitions of tail pools alone."""


def of_pool(name: str, pool: int) -> str:
    """Name of the program for a pool."""
    return f"{name}@{pool}" if pool else name


@functools.cache
def entries(layout: Layout) -> dict[str, Entry]:
    """Every transition that a cache of this layout may compile."""
    table = dict(TABLE)
    for pool in range(1, layout.pools):
        shared = {name: TABLE[name] for name in _BEGUN_BY_POOL}
        for name, entry in (shared | _OF_POOLS).items():
            table[of_pool(name, pool)] = replace(entry, function=functools.partial(entry.function, pool=pool))
    return table
