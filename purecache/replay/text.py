"""Events and what was answered, as text."""

from typing import Any

import jax
import numpy as np

from purecache.entries import entries
from purecache.replay.recording import Event, Recording
from purecache.state import NONE
from purecache.state.layout import TransferKind
from purecache.transitions import Status

SHOWN = 16
"""Entries of an array that are shown."""


def event_name(event: Event) -> str:
    """The number, transition and size of an event."""
    return f"event {event.number}: {event.name}" + (f" ({event.size} pages)" if event.size else "")


def event_as_text(event: Event, recording: Recording) -> str:
    """An event with its arguments, one per line."""
    given = entries(recording.config.layout)[event.name].arguments(recording.config.layout, event.size)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(given)[0]]
    lines = [event_name(event)]
    for path, value in zip(paths, event.arguments, strict=True):
        name = jax.tree_util.keystr(path).lstrip(".") or "argument"
        lines.append(f"  {name}: {_shown(value)}")
    return "\n".join(lines)


def reply_as_text(answer: tuple[Any, Any] | None) -> str:
    """What a transition answered: the reply, and the transfers that it asked for."""
    if answer is None:
        return "no answer"
    effects, reply = answer
    lines = ["reply"]
    for path, value in jax.tree_util.tree_flatten_with_path(reply)[0]:
        name = jax.tree_util.keystr(path).lstrip(".")
        is_status = name.endswith("status") and np.ndim(value) == 0
        text = Status(int(value)).name if is_status else _shown(np.atleast_1d(np.asarray(value)))
        lines.append(f"  {name}: {text}")
    for transfers in effects:
        used = np.flatnonzero(transfers.operation != NONE)
        if len(used):
            pairs = zip(transfers.source[used].tolist(), transfers.target[used].tolist(), strict=True)
            moves = ", ".join(f"{source} to {target}" for source, target in list(pairs)[:SHOWN])
            kind = TransferKind(transfers.kind).name.lower().replace("_", " ")
            more = f" and {len(used) - SHOWN} more" if len(used) > SHOWN else ""
            lines.append(f"transfers: {kind}, pool {transfers.pool}, rank {transfers.rank}, pages {moves}{more}")
    return "\n".join(lines)


def _shown(value: np.ndarray) -> str:
    """The entries of an array without the padding behind them."""
    flat = value.reshape(-1)
    used = np.flatnonzero(flat != NONE)
    flat = flat[: int(used[-1]) + 1 if len(used) else 0]
    if not len(flat):
        return "none" if len(value) > 1 else "-1"
    more = f" ... {len(flat) - SHOWN} more" if len(flat) > SHOWN else ""
    return " ".join(map(str, flat[:SHOWN].tolist())) + more
