"""The compiled transitions: one program per transition and size, state donated, command in and reply out as one array.

A call costs microseconds per array that crosses it, so all arguments travel as one int32 vector and so does all that
comes back. Above eight steps XLA's CPU runtime may hand a program to other threads, whose wake-ups cost more than the
work; a loop of one iteration around the body makes it one step.
"""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import purecache.transitions as t
from purecache.state import CacheState
from purecache.state.layout import Layout

SMALLEST = 16
"""Pages of the smallest program."""
TAIL = 16
"""Pages of the tail that `finish` takes besides the whole pages."""

LANES = (16, 128, 1024)
"""How many prompts one program for many prompts takes."""

Spec = Callable[[Layout, int], tuple[Any, ...]]
"""Shapes of the arguments of a transition, given the size in pages."""


def _vector(length: int) -> Any:
    return jax.ShapeDtypeStruct((length,), np.int32)


_ONE: Any = jax.ShapeDtypeStruct((), np.int32)


def _prompt(layout: Layout, size: int) -> t.Prompt:
    return t.Prompt(_vector(size * layout.page_size), _ONE, _vector(4), _ONE)


def _offer(size: int) -> t.Offer:
    return t.Offer(_vector(size), _ONE, _ONE)


_RECEIPT, _HANDLE = t.ReceiptHandle(_ONE, _ONE), t.Handle(_ONE, _ONE)


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


TABLE: dict[str, Entry] = {
    "match": Entry(t.match, lambda layout, size: (_prompt(layout, size),)),
    "peek": Entry(_peek, lambda layout, size: (_prompt(layout, size),)),
    **{f"match_{lanes}": _many(lanes) for lanes in LANES},
    "admit": Entry(t.admit, lambda layout, size: (_prompt(layout, size),)),
    "insert": Entry(t.insert, lambda layout, size: (_prompt(layout, size), _offer(size))),
    "checkpoint": Entry(t.checkpoint, lambda layout, size: (_prompt(layout, size), _offer(size), _RECEIPT)),
    "finish": Entry(t.finish, lambda layout, size: (_prompt(layout, size), _offer(size), _vector(TAIL), _RECEIPT)),
    "abort": Entry(t.abort, lambda layout, size: (_ONE, _vector(size), _RECEIPT)),
    "lock": Entry(t.lock, lambda layout, size: (_ONE,), sized=False),
    "unlock": Entry(t.unlock, lambda layout, size: (_RECEIPT,), sized=False),
    "allocate": Entry(t.allocate, lambda layout, size: (_ONE, _ONE), takes_size=True),
    "release": Entry(t.release, lambda layout, size: (_ONE, _vector(size))),
    "evict_device": Entry(t.evict_device, lambda layout, size: (_ONE, _ONE), takes_size=True),
    "evict_host": Entry(t.evict_host, lambda layout, size: (_ONE, _ONE), takes_size=True),
    "begin_backup": Entry(t.begin_backup, lambda layout, size: (_ONE, _ONE), takes_size=True),
    "finish_backup": Entry(t.finish_backup, lambda layout, size: (_HANDLE, _flags(size))),
    "begin_load_back": Entry(t.begin_load_back, lambda layout, size: (_ONE,), takes_size=True),
    "finish_load_back": Entry(t.finish_load_back, lambda layout, size: (_HANDLE, _flags(size))),
    "reset": Entry(t.reset, lambda layout, size: (), sized=False),
}


class Program:
    """One compiled transition: `run(leaves, command)` returns the leaves of the new state, and what `answer` reads."""

    def __init__(self, entry: Entry, layout: Layout, size: int, state: CacheState) -> None:
        """Compile for states like `state`, on the device that holds it."""
        self._leaves = jax.tree.leaves(entry.arguments(layout, size))
        arguments = jax.tree.structure(entry.arguments(layout, size))
        lengths = [math.prod(leaf.shape) for leaf in self._leaves]
        self._ends = np.cumsum([1, *lengths]).tolist()
        self._transition = entry.function
        self._static = (size,) if entry.takes_size else ()
        self._arguments = arguments
        command = jax.ShapeDtypeStruct((self._ends[-1],), np.int32)
        answer = jax.eval_shape(lambda state, command: self._apply(state, command)[1:], state, command)
        self._answer = jax.tree.structure(answer)
        self._shapes = [leaf.shape for leaf in jax.tree.leaves(answer)]
        self._length = sum(math.prod(shape) for shape in self._shapes)
        leaves, self._state = jax.tree.flatten(state)
        # Compiled ahead of time to be examined; calling the jitted function finds that program, and is faster.
        self.run = jax.jit(self._once, donate_argnums=0)
        self.compiled = self.run.lower(leaves, command).compile()

    def _apply(self, state: CacheState, command: jax.Array) -> Any:
        parts = [
            command[start:end].reshape(leaf.shape).astype(leaf.dtype)
            for start, end, leaf in zip(self._ends, self._ends[1:], self._leaves, strict=False)
        ]
        return self._transition(state, *jax.tree.unflatten(self._arguments, parts), *self._static)

    def _once(self, leaves: list[jax.Array], command: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def body(_: Any, carry: tuple[CacheState, jax.Array]) -> tuple[CacheState, jax.Array]:
            state, effects, reply = self._apply(carry[0], command)
            flat = [jnp.ravel(leaf).astype(jnp.int32) for leaf in jax.tree.leaves((effects, reply))]
            return state, jnp.concatenate(flat)

        start = (jax.tree.unflatten(self._state, leaves), jnp.zeros(self._length, jnp.int32))
        state, answer = lax.fori_loop(0, command[0], body, start)
        return jax.tree.leaves(state), answer

    def command(self, *arguments: Any) -> np.ndarray:
        """The arguments as one fresh int32 vector; the first entry is the number of iterations, one."""
        vector = np.empty(self._ends[-1], np.int32)
        vector[0] = 1
        for start, end, value in zip(self._ends, self._ends[1:], jax.tree.leaves(arguments), strict=False):
            vector[start:end] = value if value.ndim < 2 else value.reshape(-1)
        return vector

    def answer(self, vector: jax.Array) -> tuple[Any, Any]:
        """Effects and reply, as nested tuples of ints and int32 arrays that alias nothing of the state."""
        flat, start, leaves = np.asarray(vector), 0, []
        for shape in self._shapes:
            end = start + math.prod(shape)
            leaves.append(flat[start:end].reshape(shape) if shape else int(flat[start]))
            start = end
        return jax.tree.unflatten(self._answer, leaves)

    def report(self) -> dict[str, int]:
        """Bytes of temporary memory and bytes that the program updates in place."""
        memory = self.compiled.memory_analysis()
        if memory is None:
            return {}
        return {"temp_bytes": memory.temp_size_in_bytes, "aliased_bytes": memory.alias_size_in_bytes}


_compiled: dict[tuple[Any, ...], Program] = {}
"""Every program of this process: caches of one layout share them."""


class ProgramTable:
    """The programs of one cache, compiled when first used or by `warm`. Sizes are powers of two."""

    def __init__(self, state: CacheState, smallest: int = SMALLEST) -> None:
        """For states like `state`; prompts of up to `smallest` pages share the smallest program."""
        self._layout = state.layout
        self._shape = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
        )
        self._smallest = 1 << (max(1, smallest) - 1).bit_length()
        most = max(self._smallest, self._layout.device_pages + self._layout.host_pages)
        self._largest = 1 << (most - 1).bit_length()
        self._programs: dict[tuple[str, int], Program] = {}

    @property
    def largest(self) -> int:
        """Pages of the largest program: no prompt has more pages in the tree."""
        return self._largest

    def bucket(self, pages: int) -> int:
        """Size of the program for so many pages."""
        return min(max(self._smallest, 1 << (max(1, pages) - 1).bit_length()), self._largest)

    def buckets(self, pages: int | None = None) -> list[int]:
        """All sizes up to the one for `pages` (default: all)."""
        last = self._largest if pages is None else self.bucket(pages)
        return [1 << power for power in range(self._smallest.bit_length() - 1, last.bit_length())]

    def bound(self) -> int:
        """Most programs that can ever be compiled."""
        return sum(len(self.buckets()) if entry.sized else 1 for entry in TABLE.values())

    def get(self, name: str, size: int = 0) -> Program:
        """The program of a transition for a bucket, compiled if need be."""
        size = size if TABLE[name].sized else 0
        program = self._programs.get((name, size))
        if program is None:
            key = (name, size, self._layout, self._shape.books.sharding)
            if key not in _compiled:
                _compiled[key] = Program(TABLE[name], self._layout, size, self._shape)
            program = self._programs[name, size] = _compiled[key]
        return program

    def warm(
        self, pages: int, names: Iterable[str] | None = None, progress: Callable[[int, int, str], None] | None = None
    ) -> int:
        """Compile the programs named (default: all) for prompts of up to `pages` pages; returns how many were new.

        Two at a time; `progress(done, total, name)` is called after each.
        """
        wanted = [
            (name, size)
            for name in ([name for name in TABLE if TABLE[name].warmed] if names is None else names)
            for size in (self.buckets(pages) if TABLE[name].sized else [0])
            if (name, size) not in self._programs
        ]
        with ThreadPoolExecutor(2) as pool:
            for done, (name, _) in enumerate(pool.map(lambda key: (key[0], self.get(*key)), wanted), 1):
                if progress is not None:
                    progress(done, len(wanted), name)
        return len(wanted)

    def report(self) -> list[dict[str, Any]]:
        """One row per compiled program: name, size in pages, temp_bytes, aliased_bytes."""
        return [
            {"name": name, "size": size} | program.report() for (name, size), program in sorted(self._programs.items())
        ]
