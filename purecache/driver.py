"""The one owner of the current state: runs transitions, carries out their effects, feeds completions back."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import jax
import numpy as np

from purecache.answers import Node
from purecache.effects import AgreedPlane, Completion, Interpreter, Planes, Transfer, completion_of
from purecache.effects.interrupts import DeferredInterrupts
from purecache.effects.tally import Tally
from purecache.entries import of_pool
from purecache.meshes import no_mesh
from purecache.programs import Program, ProgramTable
from purecache.state import NONE, CacheConfig, CacheState, as_jax, empty_state
from purecache.state.laws import law_checker
from purecache.state.layout import Column, Tier
from purecache.transitions import TransferKind


def control_device() -> Any:
    """The CPU device that the control plane runs on, whatever the default is. Raises RuntimeError if there is none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            "the control plane of the cache runs on the CPU backend, which JAX_PLATFORMS leaves out:"
            " add it, for instance JAX_PLATFORMS=tpu,cpu"
        ) from error


class BookkeepingPlane:
    """Stands in for an interpreter where there are no bytes: every transfer counts as carried out at once."""

    pool = None
    pools: ClassVar[dict[str, Any]] = {}
    in_flight = 0

    def __init__(self) -> None:
        self._done: deque[Completion] = deque()

    def start(self, transfer: Transfer) -> None:
        """Note the transfer as done."""
        ok = np.ones(len(transfer.target), bool)
        self._done.append(completion_of(transfer, ok))

    def copy(self, source: int, target: int, rank: int, pool: int = 0) -> bool:
        """Nothing to copy."""
        return True

    def poll(self) -> list[Completion]:
        """All transfers since the last call."""
        done = list(self._done)
        self._done.clear()
        return done

    drain = poll

    def hurry(self) -> None:
        """Nothing waits."""

    settle = hurry

    def drop_host(self, pages: np.ndarray, rank: int, pool: int = 0) -> None:
        """Nothing to drop."""

    def reset(self) -> None:
        """Forget what was not reported."""
        self._done.clear()

    def warm(self) -> None:
        """Nothing to compile."""

    def programs(self) -> list[dict[str, Any]]:
        """None."""
        return []

    def counters(self) -> dict[str, int]:
        """None."""
        return {}


def _plane_for(config: CacheConfig, plane: Interpreter | Planes | AgreedPlane | None) -> Any:
    """What carries out the transfers. Raises ValueError where a pool has no interpreter."""
    own = plane.plane if isinstance(plane, AgreedPlane) else plane
    if isinstance(own, Planes):
        own.bind(config)
    elif own is not None and config.pools:
        raise ValueError("give Planes({name: Interpreter}), with one for every pool of the configuration")
    return BookkeepingPlane() if plane is None else plane


class Record(Protocol):
    """Takes note of everything that goes into the state machine; see `purecache.replay.Recorder`."""

    def begin(self, config: CacheConfig, smallest: int, look: Callable[[], tuple[list[Any], Any]]) -> None:
        """A cache begins. `look`: the leaves of its state, to be read at once, and the last answer."""
        ...

    def note(self, name: str, size: int, command: np.ndarray, current: tuple[list[Any], Any]) -> None:
        """A transition is about to run on the state `current`, what `look` returns. Must not raise."""
        ...


class Driver:
    """Holds the state of one cache. Everybody else gets copies."""

    def __init__(
        self,
        config: CacheConfig,
        plane: Interpreter | Planes | AgreedPlane | None,
        smallest: int,
        check_laws: bool,
        record: Record | None = None,
    ) -> None:
        """An empty state on the control device, and a program table for it."""
        self.plane: Any = _plane_for(config, plane)
        self.copied = True
        """Whether the copies within a pool that the last transition asked for were dispatched."""
        self.storage: Any = None
        """The storage tier, if one is attached."""
        self.tally = Tally()
        """Pages and seconds of the transfers between device and host."""
        self._layout = config.layout
        state = as_jax(empty_state(config), control_device())
        leaves, self._structure = jax.tree.flatten(state)
        self._books = next(i for i, leaf in enumerate(leaves) if leaf is state.books)
        self._current: list[tuple[list[Any], Any]] = [(leaves, None)]
        """One entry: leaves of the state, and the answer of the last transition."""
        self._read: tuple[Any, np.ndarray] = None, np.zeros(0, np.int32)
        """The books that were read last, and the copy: schedulers ask for sizes many times between two transitions."""
        self._handled: Any = None
        """The last answer whose transfers were started: an interrupt, or an error of the plane, may come in between."""
        self._planned: tuple[Any, deque[Transfer]] = None, deque()
        """The answer whose transfers are being started, and those that are left."""
        self._program: Any = None
        """The program that answered."""
        self._check_laws = check_laws
        self._process = os.getpid()
        self.programs = ProgramTable(state, smallest)
        self._record = record
        if record is not None:
            record.begin(config, smallest, lambda: self._current[0])

    def run(self, name: str, size: int, *arguments: Any) -> Any:
        """Run one transition, start its transfers, and return its reply (ints and int32 arrays).

        Raises RuntimeError in a forked process.
        """
        self._check_process()
        program = self.programs.get(name, size)
        command = program.command(*arguments)
        if self._current[0][1] is not self._handled:
            self._carry_out()  # the last call was interrupted
        self._program = program
        if self._record is not None:
            self._record.note(name, size, command, self._current[0])
        if program.called:
            self._step(program, command)
        else:
            with DeferredInterrupts():
                self._step(program, command)
            program.settle()
        reply = self._carry_out()
        if self._check_laws:
            with no_mesh():
                law_checker()(self._state())
        return reply

    def _check_process(self) -> None:
        # Of a fork, only the calling thread lives on: a program or a copy that waits for another one would never end.
        if os.getpid() != self._process:
            raise RuntimeError("a cache can't be used in a forked process: start processes by spawn")

    def _step(self, program: Program, command: np.ndarray) -> None:
        # Between the donating call and the assignment the state is nobody's: an interrupt there would lose it. Python
        # lets none in within one bytecode, and to assign what `map` calls is one.
        self._current[:] = map(program.run, (self._current[0][0],), (command,))

    def _carry_out(self) -> Any:
        """Start the transfers that the last transition asks for, all of them; returns its reply."""
        vector = self._current[0][1]
        effects, reply = self._program.answer(vector)
        if vector is not self._planned[0]:
            self.copied = True
        if any(transfers.operation.max() >= 0 for transfers in effects):
            with DeferredInterrupts():
                if vector is not self._planned[0]:
                    self._planned = vector, deque(each for transfers in effects for each in self._listed(transfers))
                left = self._planned[1]
                while left:
                    self._start(left[0])  # what it raises is a mistake of the caller: the next call begins here
                    left.popleft()
        self._handled = vector
        return reply

    def complete(self, wait: bool = False) -> dict[tuple[int, int], int]:
        """End the operations whose transfers have ended; pages published, by operation and generation."""
        self._check_process()
        published: dict[tuple[int, int], int] = {}
        while True:
            if wait:
                self.plane.settle()  # the one wait; what it waited for must not get lost by an interrupt
            with DeferredInterrupts():
                completions = self.plane.drain() if wait else self.plane.poll()
                for done in completions:
                    published[done.operation, done.generation] = self._ended(done)
            if not (wait and completions and self.plane.in_flight):
                return published

    def _ended(self, done: Completion) -> int:
        """End one operation; returns the pages published."""
        self.tally.ended(done)
        kind = "finish_backup" if done.kind == TransferKind.BACKUP else "finish_load_back"
        where = (done.rank, done.pages) if done.pool else ()
        reply = self.end(of_pool(kind, done.pool), done.operation, done.generation, done.ok, *where)
        if self.storage is not None and done.kind == TransferKind.BACKUP and reply.number:
            self.storage.store(Node(reply.node, reply.clock))
        return reply.number

    def hurry(self) -> None:
        """Put every load back that was begun into the device pool now, and end it."""
        self.plane.hurry()
        self.complete()

    def end(self, name: str, operation: int, generation: int, ok: np.ndarray, *where: Any) -> Any:
        """Run a transition that ends an operation; `ok` [n]: how its pages fared, deepest first. Returns the reply.

        where: of a tail pool, its rank and pages.
        """
        size = self.programs.bucket(len(ok))
        flags = np.zeros(size, np.int32)
        flags[: len(ok)] = ok
        return self.run(name, size, operation, generation, *where, flags)

    def views(self) -> tuple[np.ndarray, np.ndarray]:
        """Columns and tokens of the nodes, read-only. Drop them before the next transition, which would copy them."""
        state = self._state()
        return np.asarray(state.nodes), np.asarray(state.tokens)

    def copy_state(self) -> CacheState:
        """A copy of the state, on the control device."""
        return as_jax(self._state(), control_device())

    def on_device(self, node: int) -> bool:
        """Whether a node's page is on device."""
        nodes, _ = self.views()
        return int(nodes[Column.DEVICE_PAGE, node]) >= 0

    def is_same(self, node: Node) -> bool:
        """Whether the prefix that was seen as `node` is in the tree."""
        nodes, _ = self.views()
        root = node.number >= self._layout.nodes
        there = nodes[Column.PARENT, node.number] != NONE and nodes[Column.BORN, node.number] <= node.clock
        return root or bool(there)

    def is_loading(self, node: Node, number: int) -> bool:
        """Whether a page of `node` or of the `number` - 1 nodes above it is on its way to the device, in any pool."""
        if not self.is_same(node):
            return False
        nodes, _ = self.views()
        path, at = np.empty(number, np.int32), node.number
        for place in range(number):
            path[place], at = at, int(nodes[Column.PARENT, at])
        # What is on its way to host is not there yet.
        rows = (
            (self._layout.page_row(Tier.INCOMING, pool), self._layout.page_row(Tier.HOST, pool))
            for pool in range(len(self._layout.tails) + 1)
        )
        return any(bool(((nodes[coming, path] >= 0) & (nodes[host, path] >= 0)).any()) for coming, host in rows)

    def rank_of(self, node: int) -> int:
        """Rank of a node."""
        nodes, _ = self.views()
        return int(nodes[Column.RANK, node])

    def drop_host(self, pages: np.ndarray, rank: int, pool: int = 0) -> None:
        """Tell the data plane that host pages were given up."""
        self.plane.drop_host(pages, rank, *self._naming(pool))

    @staticmethod
    def _naming(pool: int) -> tuple[int, ...]:
        """The pool as a plane is told: an interpreter alone has only one."""
        return (pool,) if pool else ()

    def pages_above(self, node: int, number: int, pool: int = 0) -> np.ndarray:
        """int32[number]: device pages, of a pool, of `node` and the nodes above it, shallowest first."""
        nodes, _ = self.views()
        parents, column = nodes[Column.PARENT], nodes[self._layout.page_row(Tier.DEVICE, pool)]
        pages = np.full(number, NONE, np.int32)
        for place in range(number - 1, -1, -1):
            pages[place], node = column[node], int(parents[node])
        return pages

    def books(self) -> np.ndarray:
        """The scalars and accounts, a copy that is read-only. Cheap as long as nothing has happened since."""
        leaf = self._current[0][0][self._books]
        if leaf is not self._read[0]:
            copy = np.array(leaf)
            copy.flags.writeable = False
            self._read = leaf, copy
        return self._read[1]

    def operations(self) -> np.ndarray:
        """int32[rows of `Ledger`, max_operations]: the table of unfinished operations, a copy."""
        return np.array(np.asarray(self._state().ledger)[:, : self._layout.max_operations])

    def _state(self) -> CacheState:
        return jax.tree.unflatten(self._structure, self._current[0][0])

    def _listed(self, transfers: Any) -> Iterator[Transfer]:
        """The transfers of one effect: one per operation, or per page that is copied within a pool."""
        used = np.flatnonzero(transfers.operation != NONE)
        operations = transfers.operation[used]
        for part in np.split(used, np.flatnonzero(np.diff(operations)) + 1) if len(used) else ():
            yield Transfer(
                operation=int(transfers.operation[part[0]]),
                generation=int(transfers.generation[part[0]]),
                kind=TransferKind(transfers.kind),
                rank=transfers.rank,
                source=transfers.source[part],
                target=transfers.target[part],
                pool=transfers.pool,
            )

    def _start(self, transfer: Transfer) -> None:
        if transfer.kind == TransferKind.COPY:
            source, target = int(transfer.source[0]), int(transfer.target[0])
            self.copied &= self.plane.copy(source, target, transfer.rank, *self._naming(transfer.pool))
        elif transfer.kind == TransferKind.STORE:
            self.storage.write(transfer)
        else:
            self.tally.began(transfer)
            self.plane.start(transfer)
