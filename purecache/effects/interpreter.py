"""The interpreter of transfers: owns the device pool and the host pages, dispatches copies, reports completions."""

import threading
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from purecache.effects.checks import checked_pages, checked_transfer, positive
from purecache.effects.device_pool import DevicePool
from purecache.effects.flights import Flight, Flights, Part
from purecache.effects.host_arrays import HostArrays
from purecache.effects.host_memory import checked_memory, explained
from purecache.effects.host_slots import HostSlots
from purecache.effects.host_tier import HostTier
from purecache.effects.interrupts import DeferredInterrupts
from purecache.effects.load_backs import LoadBacks
from purecache.effects.pool_copies import PoolCopies
from purecache.effects.pools import HostMemory, describe
from purecache.effects.staged import StagedPages
from purecache.effects.table import choose, trouble
from purecache.effects.transfers import (
    Completion,
    Gate,
    PoolOwner,
    Transfer,
    completion_of,
)
from purecache.transitions import TransferKind

_FORMS: dict[str, Callable[..., HostTier]] = {"slots": HostSlots, "arrays": HostArrays}


class Interpreter:
    """Copies pages between a device pool and its host pages (L2), by the programs that `table` names for its platform.

    Device work of one thread is ordered by data flow: a started backup reads the pool as it is at `start`, whatever is
    donated later, and every program that takes the pool that comes out of a load back sees the loaded bytes. So a load
    back is complete when its last program was dispatched. Where programs are staged, that is at the first `poll` that
    finds its bytes on device, and the pool is not touched before; `hurry` does not wait for that. Backups wait for host
    bytes. Nothing blocks but `drain`, `warm`, a backup beyond `staging_pages`, and the first use of a program that was
    not warmed. Call all of it from one thread.
    """

    def __init__(
        self,
        pool: Any,
        *,
        host_pages: int,
        device_pages: int,
        page_axis: Any = 0,
        ranks: int = 1,
        host_form: Literal["slots", "arrays"] | None = None,
        copies: str | None = None,
        host_memory: HostMemory = "pinned_host",
        force_unpinned: bool = False,
        batch_pages: int = 64,
        staging_pages: int = 128,
        gate: Gate | None = None,
        owner: PoolOwner | None = None,
    ) -> None:
        """Take over `pool` and make room for the host pages.

        pool: pytree of arrays; axis `page_axis` of each (an int, or a pytree of ints) holds at least
            ranks * device_pages pages. Page p of rank r is index r * device_pages + p, on the host r * host_pages + p.
        host_pages, device_pages: per rank. host_form: "slots", one preallocated array per leaf, or "arrays", separate
            arrays per page, whose memory goes back when pages are dropped. copies: names programs of `table.ROUTES`.
            None: what that table says. host_memory, force_unpinned: see `checked_memory`. batch_pages: most pages per
            program ("arrays" takes fewer for a pool of many leaves). staging_pages: most pages on their way in each
            direction, if programs are staged: they take so much device memory (`hurry` takes what it needs). owner: who
            keeps the pool, if somebody else does: it is asked for it before every transfer, and a pool that it can't
            give is a miss. Else assign to `pool`.
        Raises ValueError for a pool or number that does not fit, HostMemoryError for more host pages than there is
        memory for.
        """
        self._device_pages = positive("device_pages", device_pages)
        self._host_pages = positive("host_pages", host_pages)
        self._ranks = positive("ranks", ranks)
        self._layout = describe(pool, page_axis, ranks * device_pages, ranks, host_memory)
        self.route = choose(self._layout, host_form, copies)
        """The row of the table that its copies are made by."""
        if problem := trouble(self._layout, self.route):
            warnings.warn(problem, RuntimeWarning, stacklevel=2)
        checked_memory(self._layout, self.route.staged, host_memory, force_unpinned)
        self._pool = DevicePool(self._layout, pool, owner)
        sizes = ranks * host_pages, positive("batch_pages", batch_pages)
        staging = positive("staging_pages", staging_pages)
        with explained(self._layout, sizes[0]):
            self._tier = _FORMS[self.route.form](self._layout, *sizes, self.route, staging)
        self._batch_pages = batch_pages
        self._copies = PoolCopies(self._layout)
        self._gate = Gate() if gate is None else gate
        self._flights = Flights(self._tier, host_pages, staging)
        self._loads = LoadBacks(self._pool, self._tier, self._flights, device_pages)
        self.commit_alone = True
        """Whether `poll` writes into the pool what has been fetched. False: whoever calls `commit` decides."""
        self._thread: int | None = None
        self._counts = {"transfers_failed": 0, "pages_failed": 0, "pages_backed_up": 0, "pages_loaded_back": 0}

    @property
    def pool(self) -> Any:
        """The device pool. Take it anew after every `start`; put the result of a donating step back by assignment.

        With an `owner`, it is the owner's pool that is read and replaced. Reading raises PoolLostError after a failed
        load back took the pool along. Assigning raises ValueError for another structure, shape, dtype or placement,
        PoolGoneError for deleted arrays; the old pool is kept then.
        """
        return self._pool.get()

    @pool.setter
    def pool(self, pool: Any) -> None:
        self._pool.put(pool)

    @property
    def host_pool(self) -> Any:
        """The host slots as a pytree like the pool, to be listed beside it; read only, and good until the next backup.

        Drop it, and every NumPy view of it, before that: a backup copies what somebody else holds. Raises ValueError
        for the form "arrays", and RuntimeError while the slots are lost.
        """
        if not isinstance(self._tier, HostSlots):
            raise ValueError("host pages are arrays of their own here: there is no host pool (use host_form='slots')")
        return jax.tree.unflatten(self._layout.treedef, self._tier.slots)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all leaves of the pool."""
        return self._layout.page_bytes

    @property
    def in_flight(self) -> int:
        """Transfers started and not reported."""
        return len(self._flights)

    def start(self, transfer: Transfer) -> None:
        """Dispatch the copies of `transfer` now, after those of all earlier calls; `poll` reports how it ended.

        A copy that cannot be dispatched becomes a completion with ok False, and so does the load back of a host page
        whose bytes never arrived. Mistakes of the caller raise before anything is dispatched: ValueError for ids out of
        range, repeated targets or lengths that differ, PoolGoneError if the pool was donated and not put back,
        RuntimeError from a second thread.
        """
        self.launch(self.check(transfer))

    def launch(self, transfer: Transfer) -> None:
        """`start` for what `check` has returned."""
        with DeferredInterrupts():
            flight = self._flights.open(transfer)
            try:
                failing = self._gate.failing(transfer)
            except Exception:
                return
            where = np.arange(len(transfer.target)) if failing is None else np.flatnonzero(~np.asarray(failing, bool))
            if transfer.kind is TransferKind.BACKUP:
                self._pool.use(lambda: self._back_up(flight, where), writes=False)
                return
            self._flights.wait_for(flight, where)
            if self.route.staged:
                self._flights.fetch(whole=not self.commit_alone)
            else:
                self._loads.now(flight)

    def check(self, transfer: Transfer) -> Transfer:
        """Raise what `start` would raise; returns `transfer` with private copies of its ids."""
        self._check_thread()
        checked = checked_transfer(transfer, self._ranks, self._device_pages, self._host_pages)
        if checked.kind is TransferKind.BACKUP or not self.route.staged:
            self._pool.check()
        return checked

    def copy(self, source: int, target: int, rank: int) -> bool:
        """Copy device page `source` to page `target` of a rank now, in the order of dispatch; whether that went well.

        Raises as `start` does.
        """
        self._check_thread()
        pages = checked_pages("device page", [source, target], rank, self._ranks, self._device_pages)
        pages += np.int32(rank * self._device_pages)
        done: list[bool] = []

        def copy() -> None:
            done.append(self._pool.write(lambda arrays: self._copies.copy(arrays, pages[0], pages[1])))

        with DeferredInterrupts():
            return self._pool.use(copy, writes=True) and all(done)

    def poll(self) -> list[Completion]:
        """Completions since the last call, in the order in which their transfers were started. Never blocks.

        Among transfers of one kind, a younger one is never reported before an older one.
        """
        with DeferredInterrupts():
            if self.commit_alone:
                self._loads.commit_arrived()
            self._flights.fetch(whole=not self.commit_alone)
            return [self._completion(flight) for flight in self._flights.ended(self._gate.held)]

    def hurry(self) -> None:
        """Dispatch what is left of all load backs, without waiting for their bytes: the next step waits for them.

        Raises PoolGoneError if the pool was donated and not put back.
        """
        with DeferredInterrupts():
            self._loads.hurry()

    def drain(self) -> list[Completion]:
        """Wait for everything in flight and report it, held or not. For tests and shutdown."""
        if self._pool.is_there:
            self.hurry()
        return [self._completion(flight) for flight in self._flights.clear()]

    def settle(self) -> None:
        """Wait for the bytes of everything in flight, and report nothing: what the next `poll` answers is then sure."""
        self._flights.settle()

    def fetched(self) -> dict[tuple[int, int], bool]:
        """By operation and generation, load backs of which everything has arrived and nothing is in the pool yet.

        The value tells whether every page of them is right. For whoever calls `commit`.
        """
        return self._loads.fetched()

    def fetching(self) -> set[tuple[int, int]]:
        """Operation and generation of the load backs whose bytes are on their way."""
        return self._loads.fetching()

    def commit(self, operation: int, generation: int, ok: bool) -> None:
        """Write into the pool what was fetched for a load back, or give it up.

        Raises PoolGoneError if the pool was donated and not put back.
        """
        with DeferredInterrupts():
            self._loads.commit(operation, generation, ok)
            self._flights.fetch(whole=not self.commit_alone)

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
        self._flights.clear()
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

    def _back_up(self, flight: Flight, where: np.ndarray) -> None:
        transfer, tier = flight.transfer, self._tier
        source = transfer.source + np.int32(transfer.rank * self._device_pages)
        target = transfer.target + np.int32(transfer.rank * self._host_pages)
        first = 0
        for size in tier.sizes(len(where)):
            part = where[first : first + size]
            first += size
            if self._pool.arrays is None:
                return
            try:
                flight.parts.append(Part(part, tier.backup(self._pool.arrays, source[part], target[part]), tier.epoch))
                flight.ok[part] = True
            except Exception:
                continue  # a failed transfer is a miss, whatever failed

    def _completion(self, flight: Flight) -> Completion:
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
