"""Which program moves pages between device and host: platform x form of the host pages -> programs, in one table.

A *form* is what host memory looks like: "slots", one preallocated array per leaf of the pool, or "arrays", arrays of
their own for every page. *Programs* are the compiled copies between the device pool and that form:

loop      one program per batch: a loop of slice, move between memory spaces, update-slice, over slots.
unrolled  one program per batch, unrolled: the same moves, over separate arrays.
fused     two steps: one gather (or scatter) of the whole batch between the pool and staging arrays on device, and an
          asynchronous `device_put` of these. The pool is free while bytes cross the bus.
dma       the same two steps, with a Pallas kernel that keeps several DMAs in flight over all leaves of the pool.
host_dma  one Pallas kernel between the device pool and slots in pinned host memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

from purecache.effects.pools import PoolLayout, spread_over
from purecache.effects.tpu_shapes import copies_whole_pool, host_dma_fits

FORMS = ("slots", "arrays")
STAGED = ("fused", "dma")
"""Programs between which the bytes travel on their own."""
MEASURED, COMPILED, UNTESTED = "measured", "compiled, never run", "never compiled, never run"


def _any(layout: PoolLayout) -> bool:
    return True


def _within_one_shard(layout: PoolLayout) -> bool:
    """Whether a page is an array of its own on all devices of the pool: its page axis is on each of them as a whole."""
    return not layout.shards and not any(spread_over(leaf.host_sharding, leaf.axis) for leaf in layout.leaves)


def _host_dma(layout: PoolLayout) -> bool:
    return all(host_dma_fits(leaf) for leaf in layout.leaves)


@dataclass(frozen=True)
class Route:
    """One row: what may be used where. See `routes` for which is a pool's default."""

    platform: str
    """What `jax.Device.platform` calls the backend; "*" is any other."""
    form: str
    programs: str
    fits: Callable[[PoolLayout], bool]
    """Whether pools of this layout can use it."""
    standing: str
    """How far it has been proved here."""
    why: str

    @property
    def staged(self) -> bool:
        """Whether the pool is free while bytes cross the bus."""
        return self.programs in STAGED


ROUTES = (
    Route("cpu", "slots", "loop", _any, MEASURED, "in place, no staging, no page faults: nearest to a plain copy"),
    Route(
        "cpu",
        "arrays",
        "unrolled",
        _within_one_shard,
        MEASURED,
        "memory goes back to the system when pages are dropped",
    ),
    Route("cpu", "arrays", "fused", _within_one_shard, MEASURED, "the form of accelerators: loads overlap with steps"),
    Route("tpu", "arrays", "dma", _within_one_shard, COMPILED, "steps go on while pages cross the bus"),
    Route("tpu", "arrays", "fused", _within_one_shard, COMPILED, "for pages that kernels copy whole pools for"),
    Route("tpu", "slots", "loop", _any, COMPILED, "where data-parallel ranks share the page axis; occupies a core"),
    Route("tpu", "slots", "host_dma", _host_dma, COMPILED, "one kernel, for pages that the compiler can address"),
    Route("gpu", "arrays", "fused", _within_one_shard, COMPILED, "slots: openxla/xla#34565 and #47362 are open"),
    Route("gpu", "slots", "loop", _any, UNTESTED, "where data-parallel ranks share the page axis"),
    Route("*", "slots", "loop", _any, UNTESTED, "plain slices, which every backend has"),
)


def routes(layout: PoolLayout) -> tuple[Route, ...]:
    """The rows for the platform of a pool that fit it, the default first: those without `trouble` before the others."""
    rows = [row for row in _rows(layout) if row.fits(layout)]
    return tuple(sorted(rows, key=lambda row: trouble(layout, row) is not None))


def choose(layout: PoolLayout, form: str | None = None, programs: str | None = None) -> Route:
    """The route of a pool: the first of `routes` among those of a form or programs, if given.

    Raises ValueError if there is none, with the rows that there are.
    """
    if form not in (None, *FORMS):
        raise ValueError(f"host_form is {form!r}, expected one of {', '.join(FORMS)}")
    for row in routes(layout):
        if form in (None, row.form) and programs in (None, row.programs):
            return row
    wanted = f"host_form {form or 'any'} and copies {programs or 'any'}"
    names = (
        f"{row.form} by {row.programs}{'' if row.fits(layout) else ' (not for this pool)'}" for row in _rows(layout)
    )
    raise ValueError(f"no programs for {wanted} on {layout.platform}: there are {', '.join(names)}")


def trouble(layout: PoolLayout, route: Route) -> str | None:
    """Why the programs of a route would copy whole arrays of this pool in every call, and what to do about it."""
    if layout.platform != "tpu":
        return None
    programs = "dma" if route.programs == "host_dma" else route.programs
    return next((each for leaf in layout.leaves if (each := copies_whole_pool(leaf, programs))), None)


def _rows(layout: PoolLayout) -> list[Route]:
    platform = "gpu" if layout.platform in ("cuda", "rocm") else layout.platform
    return [row for row in ROUTES if row.platform == platform] or [row for row in ROUTES if row.platform == "*"]
