"""Everything that callers and transfers can do in a world: kinds of events, with their parameters.

An event with a *flaw* is a mistake of the caller, or a completion that comes too late: it must be refused, and
change nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purecache.check.views import View
from purecache.transitions import Status

SOUND, STALE, FOREIGN, TWICE = range(4)
"""Flaws: none; a handle of something that has ended; a page that is not lent; one page given twice."""
ALL_LEFT = 1 << 20
"""What `Kind.left` says of events after which the caller has none of its pages any more."""
FLAWS = ("", "stale", "foreign page", "page given twice")


@dataclass(frozen=True)
class Kind:
    """One transition with every way to call it in a world."""

    name: str
    """As in `purecache.entries.entries`."""
    fields: tuple[str, ...]
    """Names of the parameters; the last one is `flaw`."""
    parameters: np.ndarray
    """int32[number, len(fields)]."""
    enabled: Callable[[View, Any], jax.Array]
    """(view, parameters by name) -> [] bool: whether this can happen now."""
    arguments: Callable[[View, Any], tuple[Any, ...]]
    """(view, parameters by name) -> what the transition takes after the state."""
    function: Callable[..., Any]
    """(state, *arguments) -> Step."""
    refusals: tuple[tuple[int, Status], ...] = ()
    """(flaw, status of the reply to it)."""
    expected: Callable[[View, Any, Any], jax.Array] | None = None
    """(view, parameters, reply) -> [] bool: whether the answer is right."""
    given: Callable[[tuple[Any, ...]], tuple[Any, tuple[jax.Array, ...]]] | None = None
    """arguments -> rank, and per pool the lent pages that the caller hands over."""
    left: Callable[[Any], jax.Array | int] | None = None
    """reply -> how many of the first of these are not the caller's any more if it went well."""
    publishable: Callable[[View, Any], jax.Array] | None = None
    """(view, parameters) -> [] how many pages the end of a transfer may make visible, as they fared."""

    def named(self, parameters: Any) -> SimpleNamespace:
        """The parameters [len(fields)] by name."""
        return SimpleNamespace(**dict(zip(self.fields, parameters, strict=True)))

    def status(self, reply: Any) -> jax.Array:
        """[] the status in a reply; OK where it has none."""
        if hasattr(reply, "locked"):
            return reply.locked.status
        return reply.status if hasattr(reply, "status") else jnp.int32(Status.OK)

    def refused_as(self, flaw: Any) -> jax.Array:
        """[] the status that a flaw must be answered with."""
        status = jnp.int32(Status.OK)
        for number, wanted in self.refusals:
            status = jnp.where(flaw == number, jnp.int32(wanted), status)
        return status


@dataclass(frozen=True)
class Event:
    """One event of a world, as tests and reports name it."""

    kind: str
    values: tuple[tuple[str, int], ...]

    def as_code(self) -> str:
        """The call of `event` that makes it."""
        named = "".join(f", {name}={value}" for name, value in self.values)
        return f'event("{self.kind}"{named})'

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in self.values if name != "flaw"]
        flaw = dict(self.values).get("flaw", 0)
        return f"{self.kind}({', '.join(parts)})" + (f" [{FLAWS[flaw]}]" if flaw else "")


def event(kind: str, **values: int) -> Event:
    """An event by name: `event("allocate", rank=0, number=1, flaw=0)`."""
    return Event(kind, tuple(values.items()))


def table(*columns: Any) -> np.ndarray:
    """int32[number, len(columns)]: every combination of the values of all columns."""
    grid = np.meshgrid(*[np.asarray(list(column)) for column in columns], indexing="ij")
    return np.stack([axis.reshape(-1) for axis in grid], axis=1).astype(np.int32)
