"""The one compiled program of a sizing: requests of a trace through a cache whose capacities and policy are data."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purecache.driver import control_device
from purecache.meshes import no_mesh
from purecache.sizing.request import Found, serve
from purecache.state import CacheConfig, CacheState, as_jax, empty_state
from purecache.traces.withheld import power_of_two, roomy, width_for, withheld_state
from purecache.transitions.columns import set_entry
from purecache.transitions.scans import repeat
from purecache.workloads import PagedTrace

STRETCH = 1024
"""Requests of one call: between two of them there is time to show progress."""
LEAST_PAGES = 1 << 17
"""Pages of the prompts of one call that there is room for, at least: most traces share one program."""


class TraceProgram:
    """Compiled for states of one layout. Runs in several threads share it: native code lets go of Python's lock."""

    def __init__(self, trace: PagedTrace, largest: CacheConfig) -> None:
        """Compile. `largest`: as large as any that will be run, in every tier."""
        self._trace, self._large, self._width = trace, roomy(largest), width_for(trace.largest)
        ends = trace.starts[np.minimum(np.arange(0, len(trace), STRETCH) + STRETCH, len(trace))]
        longest = int((ends - trace.starts[: len(trace) : STRETCH]).max())
        self._pages = power_of_two(longest + self._width, LEAST_PAGES)
        key = self._large.layout, self._width, self._pages
        self.compiled = _compiled(*key)

    def run(self, config: CacheConfig) -> Iterator[np.ndarray]:
        """Serve the whole trace with one configuration; int32[n, 3] per stretch of requests: the fields of `Found`."""
        trace, state = self._trace, withheld_state(config, self._large)
        leaves = jax.tree.leaves(as_jax(state, control_device()))
        for first in range(0, len(trace), STRETCH):
            last = min(first + STRETCH, len(trace))
            start, end = trace.starts[[first, last]]
            ids, rows = np.zeros(self._pages, np.int32), np.zeros((3, STRETCH), np.int32)
            ids[: end - start] = trace.ids[start:end]
            rows[0, : last - first] = trace.starts[first:last] - start
            rows[1:, : last - first] = trace.sizes[first:last], trace.match_pages[first:last]
            leaves, found = self.compiled(leaves, ids, rows, np.int32(last - first))
            yield np.asarray(found).reshape(len(Found._fields), STRETCH)[:, : last - first].T


@functools.cache
def _compiled(layout: Any, width: int, pages: int) -> Any:
    """The program for states of a layout, requests of at most `width` pages and `pages` of them in one call."""
    config = CacheConfig(
        page_size=1,
        device_pages=layout.device_pages,
        host_pages=layout.host_pages,
        levels=layout.levels,
        max_operations=layout.max_operations,
        max_receipts=layout.max_receipts,
    )
    shapes = jax.eval_shape(lambda: empty_state(config))
    leaves, structure = jax.tree.flatten(shapes)

    def serve_all(leaves: list[jax.Array], ids: jax.Array, rows: jax.Array, number: jax.Array) -> Any:
        state = jax.tree.unflatten(structure, leaves)

        def one(index: jax.Array, carry: tuple[CacheState, jax.Array]) -> tuple[CacheState, jax.Array]:
            state, answers = carry
            start, size, matched = (rows[row, index] for row in range(3))
            state, found = serve(state, jax.lax.dynamic_slice(ids, (start,), (width,)), size, matched)
            for place, value in enumerate(found):
                answers = set_entry(answers, place * STRETCH + index, value)
            return state, answers

        answers = jnp.broadcast_to(state.token, (len(Found._fields) * STRETCH,))
        state, answers = repeat(state.token, number, one, (state, answers))
        return jax.tree.leaves(state), answers

    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=np.int32)
    with jax.default_device(control_device()), no_mesh():
        program = jax.jit(serve_all, donate_argnums=0, keep_unused=True)
        return program.lower(leaves, int32((pages,)), int32((3, STRETCH)), int32(())).compile()
