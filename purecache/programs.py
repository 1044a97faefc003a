"""The compiled transitions: one program per transition and size, state donated, command in and reply out as one array.

A call costs microseconds per array that crosses it, so all arguments travel as one int32 vector and so does all that
comes back. XLA's CPU runtime runs a program as a list of steps, each with a price, and may hand them to other threads,
whose wake-ups cost more than the work. A call marked as small becomes one step: a single native function, loops and
branches included. It must contain no scatter and no sort, which that emitter of XLA lacks.
"""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from purecache import program_files
from purecache.entries import Entry, entries
from purecache.meshes import no_mesh
from purecache.state import NONE, CacheState
from purecache.state.layout import Layout

SMALLEST = 16
"""Pages of the smallest program."""


class Program:
    """One compiled transition: `run(leaves, command)` returns the leaves of the new state, and what `answer` reads."""

    def __init__(self, name: str, entry: Entry, layout: Layout, size: int, state: CacheState) -> None:
        """Compile for states like `state`, on the device that holds it; or load, if it was compiled before."""
        self._entry, self._static = entry, (size,) if entry.takes_size else ()
        self._leaves, self._arguments = jax.tree.flatten(entry.arguments(layout, size))
        self._ends = np.cumsum([0, *(math.prod(leaf.shape) for leaf in self._leaves)]).tolist()
        command = jax.ShapeDtypeStruct((self._ends[-1],), np.int32)
        leaves, self._state = jax.tree.flatten(state)
        self._traced, self._whole = jax.jit(self._apply), jax.jit(self._transition)
        where = state.books.sharding
        key = (name, size, layout, [(leaf.shape, leaf.dtype) for leaf in leaves], where)
        found = program_files.load(key, next(iter(where.device_set)) if where else jax.devices("cpu")[0])
        with no_mesh():
            answer = found[1] if found else self._traced.eval_shape(state, command)[1:]
        shapes, self._answer = jax.tree.flatten(answer)
        # Numbers before arrays, so that reading them all is one operation.
        self._order = sorted(range(len(shapes)), key=lambda leaf: bool(shapes[leaf].shape))
        self._back = [self._order.index(leaf) for leaf in range(len(shapes))]
        self._numbers = sum(not leaf.shape for leaf in shapes)
        arrays = [shapes[leaf] for leaf in self._order[self._numbers :]]
        ends = np.cumsum([self._numbers, *(math.prod(leaf.shape) for leaf in arrays)]).tolist()
        self._cuts = [(start, end, leaf.shape) for start, end, leaf in zip(ends, ends[1:], arrays, strict=False)]
        self.called = False
        """Whether it ran before, so that a call of `run` takes the short way, which is one call of C++."""
        # Ahead of time: what a process sets later (a mesh, a default device) can't make it be traced again.
        with no_mesh():
            marked = jax.jit(self._marked, donate_argnums=0, keep_unused=True)
            if found:
                self.compiled = found[0]
            else:
                self.compiled = program_files.compile_and_save(key, marked.lower(leaves, command), answer)
        self.run: Callable[[list[Any], np.ndarray], tuple[list[Any], Any]] = self.compiled
        """Leaves of the state, which are donated, and a command: leaves of the new state, and what `answer` reads."""

    def _apply(self, state: CacheState, command: jax.Array) -> Any:
        parts = [
            command[start:end].reshape(leaf.shape).astype(leaf.dtype)
            for start, end, leaf in zip(self._ends, self._ends[1:], self._leaves, strict=False)
        ]
        return self._entry.function(state, *jax.tree.unflatten(self._arguments, parts), *self._static)

    def _transition(self, leaves: list[jax.Array], command: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        state, effects, reply = self._traced(jax.tree.unflatten(self._state, leaves), command)
        answer = jax.tree.leaves((effects, reply))
        flat = [jnp.ravel(answer[leaf]).astype(jnp.int32) for leaf in self._order]
        return jax.tree.leaves(state), jnp.concatenate(flat)

    def _marked(self, leaves: list[jax.Array], command: jax.Array) -> tuple[list[jax.Array], Any]:
        leaves, answer = self._whole(leaves, command)
        if self._entry.small:
            answer = set_xla_metadata(answer, inlineable="false", xla_cpu_small_call="true")
        return leaves, answer

    def settle(self) -> None:
        """After the first call, leave out the Python around the call of C++: an interrupt in it could lose a state."""
        self.run = getattr(self.compiled, "_call", None) or self.compiled
        self.called = True

    def command(self, *arguments: Any) -> np.ndarray:
        """The arguments as one fresh int32 vector.

        There is one int or int32 array per leaf of what the transition takes; an array that is shorter than the leaf
        is followed by NONE.
        """
        vector = np.empty(self._ends[-1], np.int32)
        for start, end, value in zip(self._ends, self._ends[1:], arguments, strict=False):
            if type(value) is np.ndarray:
                used = start + len(value)
                vector[start:used] = value
                vector[used:end] = NONE
            else:
                vector[start] = value
        return vector

    def answer(self, vector: jax.Array) -> tuple[Any, Any]:
        """Effects and reply, as nested tuples of ints and int32 arrays that alias nothing of the state."""
        flat = np.asarray(vector)
        leaves = flat[: self._numbers].tolist()
        for start, end, shape in self._cuts:
            leaves.append(flat[start:end] if len(shape) == 1 else flat[start:end].reshape(shape))
        return jax.tree.unflatten(self._answer, [leaves[leaf] for leaf in self._back])

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
        self._entries = entries(state.layout)
        self._shape = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
        )
        self._smallest = 1 << (max(1, smallest) - 1).bit_length()
        sizes = [self._layout, *self._layout.tails]
        most = max(self._smallest, *(each.device_pages + each.host_pages for each in sizes))
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
        return sum(len(self.buckets()) if entry.sized else 1 for entry in self._entries.values())

    def get(self, name: str, size: int = 0) -> Program:
        """The program of a transition for a bucket, compiled if need be."""
        program = self._programs.get((name, size))
        if program is None:
            size = size if self._entries[name].sized else 0
            key = (name, size, self._layout, self._shape.books.sharding)
            if key not in _compiled:
                _compiled[key] = Program(name, self._entries[name], self._layout, size, self._shape)
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
            for name in ([name for name in self._entries if self._entries[name].warmed] if names is None else names)
            for size in (self.buckets(pages) if self._entries[name].sized else [0])
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
