"""Host memory of pages: which kind, how much of it there is, and what to do when there is too little."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from purecache.effects.pools import HostMemory, PoolLayout, describe, zero_host_pool

try:
    import resource
except ImportError:  # not on Windows
    resource = None


class HostMemoryError(MemoryError):
    """The host pages could not be allocated."""


def locked_memory_limit() -> int | None:
    """Bytes that this process may lock in memory (`ulimit -l`); None if there is no limit or no such thing."""
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def checked_memory(layout: PoolLayout, staged: bool, kind: HostMemory, force: bool) -> None:
    """Raises ValueError for a kind of host memory that a pool's pages should not be in.

    Pages in unpinned memory have come back changed from a TPU when they were bf16: that takes `force`. And a program
    can't name unpinned memory on an accelerator, so the copies must be staged there.
    """
    if kind not in ("pinned_host", "unpinned_host"):
        raise ValueError(f"host_memory is {kind!r}, expected 'pinned_host' or 'unpinned_host'")
    if kind == "pinned_host":
        return
    if not (layout.on_cpu or staged):
        raise ValueError(f"host_memory 'unpinned_host' needs host_form 'arrays' on {layout.platform}")
    for leaf in layout.leaves:
        if leaf.dtype == jnp.bfloat16 and not force:
            raise ValueError(
                f"{leaf.name} is bfloat16: pages in unpinned host memory have silently come back changed from"
                " accelerators; use 'pinned_host', or force_unpinned=True if you have checked yours"
            )


@contextlib.contextmanager
def explained(layout: PoolLayout, pages: int) -> Iterator[None]:
    """Turn a failed allocation of host pages into a HostMemoryError that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise HostMemoryError(
            f"{pages} host pages of {layout.page_bytes} bytes ({pages * layout.page_bytes / 2**30:.2f} GiB) could not"
            f" be allocated: {_advice()}; or ask for fewer ({type(error).__name__}: {error})"
        ) from error


def fitting_host_pages(
    pool: Any,
    host_pages: int,
    *,
    page_axis: Any = 0,
    device_pages: int,
    ranks: int = 1,
    host_memory: HostMemory = "pinned_host",
    allocate: Callable[[PoolLayout, int], Any] | None = None,
) -> int:
    """How many of `host_pages` pages per rank host memory has room for; warns if that is fewer.

    Tries to allocate slots, and half as many each time that fails; what it allocates is freed. Not on the CPU backend,
    whose memory is not really pinned: the system promises there what it does not have. The rest as for `Interpreter`.
    Raises HostMemoryError if there is not even room for a sixteenth.
    """
    layout, tried = describe(pool, page_axis, ranks * device_pages, ranks, host_memory), host_pages
    if allocate is None and layout.on_cpu:
        return host_pages
    allocate, reason = allocate or zero_host_pool, None
    while True:
        try:
            with explained(layout, ranks * tried):
                allocate(layout, ranks * tried)
        except HostMemoryError as error:
            if tried // 2 < max(1, host_pages // 16):
                raise
            tried, reason = tried // 2, error
            continue
        if tried < host_pages:
            warnings.warn(f"L2 has {tried} pages instead of {host_pages}: {reason}", RuntimeWarning, stacklevel=2)
        return tried


def _advice() -> str:
    limit = locked_memory_limit()
    if limit is None:
        return "there is no limit of locked memory, so the machine has too little"
    return (
        f"this process may lock {limit / 2**20:.0f} MiB (ulimit -l); raise it with `ulimit -l unlimited` or"
        " LimitMEMLOCK=infinity in the service"
    )
