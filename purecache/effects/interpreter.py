"""The interpreter of transfers: owns the device pool and the host pages, dispatches copies, reports completions."""

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from purecache.effects.checks import checked_pages, checked_transfer, positive
from purecache.effects.host_arrays import HostArrays
from purecache.effects.host_slots import HostSlots
from purecache.effects.host_tier import HostTier
from purecache.effects.interrupts import DeferredInterrupts
from purecache.effects.pool_copies import PoolCopies
from purecache.effects.pools import any_deleted, describe
from purecache.effects.staged import StagedPages
from purecache.effects.transfers import (
    Completion,
    Gate,
    PoolGoneError,
    PoolLostError,
    PoolOwner,
    Transfer,
    completion_of,
)
from purecache.transitions import TransferKind

_FORMS: dict[str, Callable[..., HostTier]] = {"slots": HostSlots, "arrays": HostArrays}


@dataclass
class _Part:
    """One dispatched program of a backup."""

    where: np.ndarray
    """Positions in the transfer that it copies."""
    token: Any
    """Array that is ready when the bytes are there."""
    epoch: int
    """Of the tier, at dispatch."""


@dataclass
class _Flight:
    """A started transfer that was not reported yet."""

    number: int
    transfer: Transfer
    ok: np.ndarray
    parts: list[_Part] = field(default_factory=list)


class Interpreter:
    """Copies pages between a device pool and its host pages (L2).

    Device work of one thread is ordered by data flow: a started backup reads the pool as it is at `start`, whatever is
    donated later, and every program that takes the pool that comes out of a load back sees the loaded bytes. So load
    backs are complete when dispatched; only backups wait, and only for host bytes. Nothing here blocks but `drain`,
    `warm` and the first use of a program that was not warmed. Call `start` from one thread.
    """

    def __init__(
        self,
        pool: Any,
        *,
        host_pages: int,
        device_pages: int,
        page_axis: Any = 0,
        ranks: int = 1,
        host_form: Literal["slots", "arrays"] = "slots",
        batch_pages: int = 64,
        gate: Gate | None = None,
        owner: PoolOwner | None = None,
    ) -> None:
        """Take over `pool` and make room for the host pages.

        pool: pytree of arrays; axis `page_axis` of each (an int, or a pytree of ints) holds at least
            ranks * device_pages pages. Page p of rank r is index r * device_pages + p, on the host r * host_pages + p.
        host_pages, device_pages: per rank. host_form: "slots", one preallocated array per leaf, or "arrays", separate
            arrays per page, whose memory goes back when pages are dropped. batch_pages: most pages per program
            ("arrays" takes fewer for a pool of many leaves). owner: who keeps the pool, if somebody else does: it is
            asked for it before every transfer, and a pool that it can't give is a miss. Else assign to `pool`.
        Raises ValueError for a pool or number that does not fit.
        """
        self._device_pages = positive("device_pages", device_pages)
        self._host_pages = positive("host_pages", host_pages)
        self._ranks = positive("ranks", ranks)
        if host_form not in _FORMS:
            raise ValueError(f"host_form is {host_form!r}, expected one of {sorted(_FORMS)}")
        self._layout = describe(pool, page_axis, ranks * device_pages, ranks)
        leaves = self._layout.flatten(pool)
        self._leaves: tuple[jax.Array, ...] | None = leaves if owner is None else None
        """The arrays of the pool; with an owner, only while a transfer is started."""
        self._tier = _FORMS[host_form](self._layout, ranks * host_pages, positive("batch_pages", batch_pages))
        self._batch_pages = batch_pages
        self._copies = PoolCopies(self._layout)
        self._gate = Gate() if gate is None else gate
        self._owner = owner
        self._flights: dict[TransferKind, deque[_Flight]] = {kind: deque() for kind in TransferKind}
        self._started = 0
        self._thread: int | None = None
        self._counts = {"transfers_failed": 0, "pages_failed": 0, "pages_backed_up": 0, "pages_loaded_back": 0}

    @property
    def pool(self) -> Any:
        """The device pool. Take it anew after every `start`; put the result of a donating step back by assignment.

        With an `owner`, it is the owner's pool that is read and replaced. Reading raises PoolLostError after a failed
        load back took the pool along. Assigning raises ValueError for another structure, shape, dtype or placement,
        PoolGoneError for deleted arrays; the old pool is kept then.
        """
        if self._owner is not None:
            return self._owner.take()
        if self._leaves is None:
            raise PoolLostError(
                "a load back failed while it owned the device pool, every device page is gone:"
                " reset the cache and assign a new pool"
            )
        return jax.tree.unflatten(self._layout.treedef, self._leaves)

    @pool.setter
    def pool(self, pool: Any) -> None:
        leaves = self._layout.flatten(pool)
        if self._owner is None:
            self._leaves = leaves
        else:
            self._owner.put(pool)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all leaves of the pool."""
        return self._layout.page_bytes

    @property
    def in_flight(self) -> int:
        """Transfers started and not reported."""
        return sum(len(flights) for flights in self._flights.values())

    def start(self, transfer: Transfer) -> None:
        """Dispatch the copies of `transfer` now, after those of all earlier calls; `poll` reports how it ended.

        A copy that cannot be dispatched becomes a completion with ok False, and so does the load back of a host page
        whose bytes never arrived. Mistakes of the caller raise before anything is dispatched: ValueError for ids out of
        range, repeated targets or lengths that differ, PoolGoneError if the pool was donated and not put back,
        RuntimeError from a second thread.
        """
        self._check_thread()
        transfer = checked_transfer(transfer, self._ranks, self._device_pages, self._host_pages)
        if self._owner is None:
            if self._leaves is not None and any_deleted(self._leaves):
                raise PoolGoneError(
                    "the device pool was donated to a step: assign the pool that came out of it before `start`"
                )
            self._begin(transfer)
            return
        with self._owner.access():
            self._leaves = self._borrowed(self._owner)
            self._begin(transfer)
            if transfer.kind is TransferKind.LOAD_BACK and self._leaves is not None:
                self._owner.put(jax.tree.unflatten(self._layout.treedef, self._leaves))
            self._leaves = None

    def _borrowed(self, owner: PoolOwner) -> tuple[jax.Array, ...] | None:
        """The arrays of the owner's pool; None, which fails every page of a transfer, if they can't be used."""
        try:
            return self._layout.flatten(owner.take())
        except (ValueError, PoolGoneError) as error:
            warnings.warn(f"pages are not copied, because the device pool can't be used: {error}", stacklevel=2)
            return None

    def _begin(self, transfer: Transfer) -> None:
        flight = _Flight(self._started, transfer, np.zeros(len(transfer.target), bool))
        self._started += 1
        with DeferredInterrupts():
            self._flights[transfer.kind].append(flight)
            try:
                failing = self._gate.failing(transfer)
            except Exception:
                return
            where = np.arange(len(transfer.target)) if failing is None else np.flatnonzero(~np.asarray(failing, bool))
            self._dispatch(flight, where)

    def copy(self, source: int, target: int, rank: int) -> bool:
        """Copy device page `source` to page `target` of a rank now, in the order of dispatch; whether that went well.

        Raises as `start` does.
        """
        self._check_thread()
        pages = checked_pages("device page", [source, target], rank, self._ranks, self._device_pages)
        pages += np.int32(rank * self._device_pages)
        if self._owner is None:
            if self._leaves is not None and any_deleted(self._leaves):
                raise PoolGoneError("the device pool was donated to a step: assign the pool that came out of it first")
            return self._copy(pages)
        with self._owner.access():
            self._leaves = self._borrowed(self._owner)
            done = self._copy(pages)
            if self._leaves is not None:
                self._owner.put(jax.tree.unflatten(self._layout.treedef, self._leaves))
            self._leaves = None
        return done

    def _copy(self, pages: np.ndarray) -> bool:
        if self._leaves is None:
            return False
        with DeferredInterrupts():
            try:
                self._leaves = self._copies.copy(self._leaves, pages[0], pages[1])
            except Exception:
                if any_deleted(self._leaves):
                    self._leaves = None
                return False
        return True

    def poll(self) -> list[Completion]:
        """Completions since the last call, in the order in which their transfers were started. Never blocks.

        Among transfers of one kind, a younger one is never reported before an older one.
        """
        ended = []
        for flights in self._flights.values():
            while flights and self._done(flights[0]) and not self._gate.held(flights[0].transfer):
                ended.append(flights.popleft())
        return self._completions(ended)

    def drain(self) -> list[Completion]:
        """Wait for everything in flight and report it, held or not. For tests and shutdown."""
        ended = [flight for flights in self._flights.values() for flight in flights]
        for flights in self._flights.values():
            flights.clear()
        return self._completions(ended)

    def drop_host(self, pages: np.ndarray, rank: int) -> None:
        """Give up host pages (int32[n], local to `rank`). "arrays": their memory is freed; "slots": nothing happens.

        Raises ValueError for ids out of range.
        """
        local = checked_pages("host page", pages, rank, self._ranks, self._host_pages)
        self._tier.drop(local + np.int32(rank * self._host_pages))

    def staged(self, batch: int, parts: int = 1, head_axis: int = 0) -> StagedPages:
        """Access to the host pages as bytes, up to `batch` per copy. Global ids: rank * host_pages + page."""
        return StagedPages(self._layout, self._tier, min(batch, self._batch_pages), parts, head_axis)

    @property
    def host_pages(self) -> int:
        """Host pages per rank."""
        return self._host_pages

    @property
    def device_pages(self) -> int:
        """Device pages per rank."""
        return self._device_pages

    def reset(self) -> None:
        """Forget the transfers in flight (they are never reported) and every host page. The device pool stays."""
        for flights in self._flights.values():
            flights.clear()
        self._tier.reset()

    def warm(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile every program that can be needed; `progress(done, total, name)` is called after each."""
        self._tier.warm(progress)

    def programs(self) -> list[dict[str, Any]]:
        """What was compiled: name, variant (pages), temp_bytes, aliased_bytes, flops, pool_sized (see `Program`)."""
        return self._tier.programs() + self._copies.programs()

    def counters(self) -> dict[str, int]:
        """Totals of reported transfers: pages and bytes moved each way, pages failed, transfers with a failed page."""
        moved = {"backed_up": self._counts["pages_backed_up"], "loaded_back": self._counts["pages_loaded_back"]}
        return self._counts | {f"bytes_{way}": pages * self.page_bytes for way, pages in moved.items()}

    def _dispatch(self, flight: _Flight, where: np.ndarray) -> None:
        transfer, tier = flight.transfer, self._tier
        device, host = transfer.rank * self._device_pages, transfer.rank * self._host_pages
        backup = transfer.kind is TransferKind.BACKUP
        source = transfer.source + np.int32(device if backup else host)
        target = transfer.target + np.int32(host if backup else device)
        if not backup and not (arrived := tier.valid[source[where]]).all():
            where = where[arrived]
        first = 0
        for size in tier.sizes(len(where)):
            part = where[first : first + size]
            first += size
            if self._leaves is None:
                return
            try:
                if backup:
                    token = tier.backup(self._leaves, source[part], target[part])
                    flight.parts.append(_Part(part, token, tier.epoch))
                else:
                    self._leaves = tier.load_back(self._leaves, source[part], target[part])
                flight.ok[part] = True
            except Exception:
                # A failed transfer is a miss, whatever failed. A deleted pool must not stay around, though.
                if any_deleted(self._leaves):
                    self._leaves = None
                    return

    def _done(self, flight: _Flight) -> bool:
        return all(_ready(part.token) for part in flight.parts)

    def _completions(self, flights: Iterable[_Flight]) -> list[Completion]:
        return [self._completion(flight) for flight in sorted(flights, key=lambda flight: flight.number)]

    def _completion(self, flight: _Flight) -> Completion:
        transfer, tier = flight.transfer, self._tier
        for part in flight.parts:
            try:
                part.token.block_until_ready()  # raises what the program raised while it ran
            except Exception:
                tier.broken(part.epoch)
                tier.valid[transfer.target[part.where] + transfer.rank * self._host_pages] = False
                flight.ok[part.where] = False
            if part.epoch != tier.epoch:
                flight.ok[part.where] = False
        moved = int(flight.ok.sum())
        self._counts["pages_backed_up" if transfer.kind is TransferKind.BACKUP else "pages_loaded_back"] += moved
        self._counts["pages_failed"] += len(flight.ok) - moved
        self._counts["transfers_failed"] += moved < len(flight.ok)
        return completion_of(transfer, flight.ok)

    def _check_thread(self) -> None:
        caller = threading.get_ident()
        if self._thread is None:
            self._thread = caller
        elif self._thread != caller:
            raise RuntimeError("`start` was called from a second thread: one thread dispatches all work on the pool")


def _ready(token: Any) -> bool:
    """Whether waiting for `token` returns at once; a program that failed counts as ready."""
    try:
        return token.is_ready()
    except Exception:
        return True
