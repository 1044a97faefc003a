"""Several processes, one cache: what ended is agreed on once per tick, so that all of them decide the same.

Each process runs the same transitions on the same inputs. What can differ between them is when a transfer ends, and
how. A plane that agrees reports a transfer once it has ended in all processes, and as arrived only what has arrived in
all of them. Transfers are named by their place in the order in which they were started, which is the same everywhere.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from purecache.effects.checks import positive
from purecache.effects.interpreter import Interpreter
from purecache.effects.interrupts import DeferredInterrupts
from purecache.effects.planes import Planes
from purecache.effects.transfers import Completion, Transfer, TransferKind
from purecache.meshes import no_mesh

Agree = Callable[[np.ndarray], np.ndarray]
"""int32[size] -> the elementwise minimum over all processes, int32[size]. Waits for all of them to call it."""

_HEAD = 2
"""Numbers before the rows: a digest of all that was asked for so far, and its negative."""
_ROW = 3
"""Numbers per transfer: leading and trailing pages that have arrived, -1 before the end; and whether its fetch went
well, -1 before it has ended."""
_UNUSED = np.int32(2**31 - 1)


class DivergedError(RuntimeError):
    """The processes have not asked for the same transfers: their caches have not been given the same inputs."""


def across_processes() -> Agree | None:
    """Agreement of all JAX processes, by a reduction on their CPU devices; None if there is only one process.

    Not on the accelerators: there it would wait behind the steps of the model. Raises RuntimeError where the CPU
    backend does not reach all processes, as without `jax.distributed.initialize` before the first use of JAX.
    """
    number = jax.process_count()
    if number == 1:
        return None
    devices = {device.process_index: device for device in reversed(jax.devices("cpu"))}
    if sorted(devices) != list(range(number)):
        raise RuntimeError(f"the CPU backend reaches the processes {sorted(devices)}, but there are {number}")
    mesh = Mesh(np.array([devices[process] for process in range(number)]), ("processes",))
    apart, same = NamedSharding(mesh, PartitionSpec("processes")), NamedSharding(mesh, PartitionSpec())
    own = devices[jax.process_index()]
    compiled: dict[int, Any] = {}

    def agree(vector: np.ndarray) -> np.ndarray:
        size = len(vector)
        with no_mesh():
            if size not in compiled:
                shape = jax.ShapeDtypeStruct((number, size), jnp.int32, sharding=apart)
                function = jax.jit(lambda rows: jnp.min(rows, axis=0), out_shardings=same)
                compiled[size] = function.lower(shape).compile()
            # A copy: the CPU backend may alias what it is given.
            row = jax.device_put(np.array(vector, np.int32)[None], own)
            rows = jax.make_array_from_single_device_arrays((number, size), apart, [row])
            return np.array(compiled[size](rows).addressable_data(0))

    return agree


@dataclass(eq=False)
class _Open:
    """A transfer that was not reported yet."""

    number: int
    done: Completion | None = None
    """How it ended in this process."""


_Place = tuple[int, dict[tuple[int, int], _Open], tuple[int, int], _Open]
"""Row of a transfer, the open ones of its kind, its operation and generation, and what is known of it."""


class AgreedPlane:
    """A plane whose transfers end at the same time and in the same way in all processes.

    It takes the place of the plane around which it is, in every process. All of them must call `poll`, `drain` and
    `copy` in the same order, as they do if they call the same methods of their caches: each call waits for the others.
    A process that was left alone waits until JAX ends it.
    """

    def __init__(self, plane: Interpreter | Planes, agree: Agree, window: int = 64) -> None:
        """`window`: the oldest transfers of each kind on which one round can agree. The same in all processes."""
        self.plane = plane
        """The plane that carries out the transfers."""
        self._agree, self._window = agree, positive("window", window)
        plane.commit_alone = False
        self._open: dict[TransferKind, dict[tuple[int, int], _Open]] = {
            kind: {} for kind in (TransferKind.BACKUP, TransferKind.LOAD_BACK)
        }
        """In the order in which they were started."""
        self._started = self._digest = 0
        self._counts = {"agreements": 0, "pages_failed_elsewhere": 0}

    # ---- what is agreed on ---------------------------------------------------------------------------------------

    def start(self, transfer: Transfer) -> None:
        """Dispatch the copies of `transfer`, see `Interpreter.start`."""
        self.plane.start(transfer)
        names = transfer.operation, transfer.generation, transfer.kind, transfer.rank, transfer.pool
        self._note(1, *names, *np.asarray(transfer.source), *np.asarray(transfer.target))
        self._open[transfer.kind][transfer.operation, transfer.generation] = _Open(self._started)
        self._started += 1

    def copy(self, source: int, target: int, rank: int, pool: int = 0) -> bool:
        """Copy a device page within a pool now; whether that went well in all processes. One round."""
        done = self.plane.copy(source, target, rank, *_naming(pool))
        self._note(2, source, target, rank, pool)
        rows = self._rows()
        rows[0] = done
        return bool(self._round(rows)[0, 0])

    def poll(self) -> list[Completion]:
        """Transfers that have ended in all processes, in the order in which they were started. One round, always.

        Waits for the other processes to call it, and for nothing else.
        """
        with DeferredInterrupts():  # an interrupted round would be one round less than elsewhere
            self._record(self.plane.poll())
            self._note(3)
            return self._settle()

    def drain(self) -> list[Completion]:
        """Wait for everything in flight in all processes and report it. As many rounds as it takes, maybe none."""
        ended: list[Completion] = []
        while self.in_flight:
            with DeferredInterrupts():
                self._record(self.plane.drain())
                self._note(4)
                ended += self._settle()
        return ended

    def settle(self) -> None:
        """Wait for the bytes of everything in flight in this process; see `Interpreter.settle`."""
        self.plane.settle()

    def hurry(self) -> None:
        """Put every load back into the pool now, see `Interpreter.hurry`; how that ends is agreed on by `poll`."""
        self._note(5)
        self.plane.hurry()

    @property
    def in_flight(self) -> int:
        """Transfers started and not reported: the same number in all processes."""
        return sum(map(len, self._open.values()))

    def reset(self) -> None:
        """Forget the transfers in flight and every host page."""
        self._note(6)
        for each in self._open.values():
            each.clear()
        self.plane.reset()

    def _record(self, completions: list[Completion]) -> None:
        for done in completions:
            self._open[done.kind][done.operation, done.generation].done = done

    def _settle(self) -> list[Completion]:
        """One round: commits what is fetched everywhere, takes out and returns what has ended everywhere."""
        fetched = self.plane.fetched()
        rows, places = self._rows(), list[_Place]()
        for first, opened in zip((0, self._window), self._open.values(), strict=True):
            for row, (key, each) in enumerate(islice(opened.items(), self._window), first):
                rows[row] = _told(each.done, fetched.get(key))
                places.append((row, opened, key, each))
        # Rows are places among what is open: they must be about the same transfers everywhere.
        self._note(6, *(each.number for *_, each in places))
        agreed = self._round(rows).tolist()
        # First what may raise because the pool is not there: nothing is lost then.
        for row, _, key, _ in places:
            if agreed[row][-1] >= 0 and key in fetched:
                self.plane.commit(key[0], key[1], bool(agreed[row][-1]))
        ended: list[tuple[int, Completion]] = []
        for row, opened, key, each in places:
            lead, trail, _ = agreed[row]
            if lead >= 0 and each.done is not None:
                del opened[key]
                ended.append((each.number, self._agreed(each.done, lead, trail)))
        return [done for _, done in sorted(ended, key=lambda each: each[0])]

    def _agreed(self, done: Completion, lead: int, trail: int) -> Completion:
        page = np.arange(len(done.ok))
        ok = (page < lead) | (page >= len(page) - trail)
        self._counts["pages_failed_elsewhere"] += int((done.ok & ~ok).sum())
        return replace(done, ok=ok)

    # ---- rounds --------------------------------------------------------------------------------------------------

    def _rows(self) -> np.ndarray:
        """int32[transfers, _ROW]: those of backups, then those of load backs."""
        return np.full((len(self._open) * self._window, _ROW), _UNUSED, np.int32)

    def _note(self, *numbers: int) -> None:
        """Add to the digest of what this process was asked for."""
        self._digest = zlib.crc32(np.array(numbers, np.int64).tobytes(), self._digest)

    def _round(self, rows: np.ndarray) -> np.ndarray:
        """The rows on which all processes agree. Raises DivergedError, in all processes, if they can't."""
        digest = self._digest >> 1  # 31 bits
        vector = np.concatenate([np.array([digest, -digest], np.int32), rows.reshape(-1)])
        agreed = self._agree(vector)
        self._counts["agreements"] += 1
        if agreed[0] != digest or agreed[1] != -digest:
            raise DivergedError(
                "the processes that share this cache have asked for different transfers or rounds:"
                " call the same methods of it, with the same arguments and in the same order, in all of them"
            )
        return agreed[_HEAD:].reshape(rows.shape)

    # ---- what every process does for itself ----------------------------------------------------------------------

    @property
    def pool(self) -> Any:
        """The device pool of this process; see `Interpreter.pool`."""
        return self.plane.pool

    @pool.setter
    def pool(self, pool: Any) -> None:
        self.plane.pool = pool

    @property
    def pools(self) -> dict[str, Any]:
        """The device pools by name, of `Planes`. Raises AttributeError around an `Interpreter`."""
        return self._planes.pools

    @pools.setter
    def pools(self, pools: dict[str, Any]) -> None:
        self._planes.pools = pools

    @property
    def _planes(self) -> Planes:
        if not isinstance(self.plane, Planes):
            raise AttributeError("an interpreter has one pool, without a name: use `pool`")
        return self.plane

    def drop_host(self, pages: np.ndarray, rank: int, pool: int = 0) -> None:
        """Give up host pages; see `Interpreter.drop_host`."""
        self.plane.drop_host(pages, rank, *_naming(pool))

    def warm(self) -> None:
        """Compile every program that copies pages. That of the rounds is compiled in the first one."""
        self.plane.warm()

    def programs(self) -> list[dict[str, Any]]:
        """What was compiled; see `Interpreter.programs`."""
        return self.plane.programs()

    def counters(self) -> dict[str, int]:
        """Totals of the plane in this process, rounds, and pages that have arrived here and were missed elsewhere."""
        return self.plane.counters() | self._counts


def agreed(plane: Interpreter | Planes, window: int = 64) -> Interpreter | Planes | AgreedPlane:
    """`plane`, agreeing with those of the other JAX processes; `plane` itself if there is only one process."""
    agree = across_processes()
    return plane if agree is None else AgreedPlane(plane, agree, window)


def _naming(pool: int) -> tuple[int, ...]:
    """The pool as a plane is told: an interpreter alone has only one."""
    return (pool,) if pool else ()


def _told(done: Completion | None, fetched: bool | None) -> tuple[int, int, int]:
    """The row of a transfer, as it stands in this process."""
    if done is None:
        return -1, -1, -1 if fetched is None else int(fetched)
    number, failed = len(done.ok), np.flatnonzero(~done.ok)
    lead, trail = (int(failed[0]), int(number - 1 - failed[-1])) if len(failed) else (number, number)
    return lead, trail, 0  # what ended without a commit failed: no other process must commit it
