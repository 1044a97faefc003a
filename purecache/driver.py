"""The one owner of the current state: runs transitions, carries out their effects, feeds completions back."""

from collections import deque
from typing import Any

import jax
import numpy as np

from purecache.answers import Node
from purecache.effects import Completion, Interpreter, Transfer
from purecache.effects.interrupts import DeferredInterrupts
from purecache.meshes import no_mesh
from purecache.programs import Program, ProgramTable
from purecache.state import NONE, CacheConfig, CacheState, as_jax, empty_state
from purecache.state.laws import law_checker
from purecache.state.layout import Column
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
    in_flight = 0

    def __init__(self) -> None:
        self._done: deque[Completion] = deque()

    def start(self, transfer: Transfer) -> None:
        """Note the transfer as done."""
        ok = np.ones(len(transfer.target), bool)
        self._done.append(Completion(transfer.operation, transfer.generation, transfer.kind, ok))

    def poll(self) -> list[Completion]:
        """All transfers since the last call."""
        done = list(self._done)
        self._done.clear()
        return done

    drain = poll

    def drop_host(self, pages: np.ndarray, rank: int) -> None:
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


class Driver:
    """Holds the state of one cache. Everybody else gets copies."""

    def __init__(self, config: CacheConfig, plane: Interpreter | None, smallest: int, check_laws: bool) -> None:
        """An empty state on the control device, and a program table for it."""
        self.plane: Any = BookkeepingPlane() if plane is None else plane
        self.storage: Any = None
        """The storage tier, if one is attached."""
        state = as_jax(empty_state(config), control_device())
        leaves, self._structure = jax.tree.flatten(state)
        self._books = next(i for i, leaf in enumerate(leaves) if leaf is state.books)
        self._current: list[tuple[list[Any], Any]] = [(leaves, None)]
        """One entry: leaves of the state, and the answer of the last transition."""
        self._read: tuple[Any, np.ndarray] = None, np.zeros(0, np.int32)
        """The books that were read last, and the copy: schedulers ask for sizes many times between two transitions."""
        self._handled: Any = None
        """The last answer whose transfers were started: an interrupt may come in between."""
        self._program: Any = None
        """The program that answered."""
        self._check_laws = check_laws
        self.programs = ProgramTable(state, smallest)

    def run(self, name: str, size: int, *arguments: Any) -> Any:
        """Run one transition, start its transfers, and return its reply (ints and int32 arrays)."""
        program = self.programs.get(name, size)
        command = program.command(*arguments)
        if self._current[0][1] is not self._handled:
            self._carry_out()  # the last call was interrupted
        self._program = program
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

    def _step(self, program: Program, command: np.ndarray) -> None:
        # Between the donating call and the assignment the state is nobody's: an interrupt there would lose it. Python
        # lets none in within one bytecode, and to assign what `map` calls is one.
        self._current[:] = map(program.run, (self._current[0][0],), (command,))

    def _carry_out(self) -> Any:
        """Start the transfers that the last transition asks for, all of them; returns its reply."""
        vector = self._current[0][1]
        effects, reply = self._program.answer(vector)
        if any(transfers.operation.max() >= 0 for transfers in effects):
            with DeferredInterrupts():
                for transfers in effects:
                    self._start(transfers)
                self._handled = vector
        self._handled = vector
        return reply

    def complete(self, wait: bool = False) -> dict[tuple[int, int], int]:
        """End the operations whose transfers have ended; pages published, by operation and generation."""
        published = {}
        while True:
            for done in self.plane.drain() if wait else self.plane.poll():
                name = "finish_backup" if done.kind == TransferKind.BACKUP else "finish_load_back"
                reply = self.end(name, done.operation, done.generation, done.ok)
                published[done.operation, done.generation] = reply.number
                if self.storage is not None and done.kind == TransferKind.BACKUP and reply.number:
                    self.storage.store(Node(reply.node, reply.clock))
            if not (wait and self.plane.in_flight):
                return published

    def end(self, name: str, operation: int, generation: int, ok: np.ndarray) -> Any:
        """Run a transition that ends an operation; `ok` [n]: how its pages fared, deepest first. Returns the reply."""
        size = self.programs.bucket(len(ok))
        flags = np.zeros(size, np.int32)
        flags[: len(ok)] = ok
        return self.run(name, size, operation, generation, flags)

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

    def books(self) -> np.ndarray:
        """The scalars and accounts, a copy that is read-only. Cheap as long as nothing has happened since."""
        leaf = self._current[0][0][self._books]
        if leaf is not self._read[0]:
            copy = np.array(leaf)
            copy.flags.writeable = False
            self._read = leaf, copy
        return self._read[1]

    def _state(self) -> CacheState:
        return jax.tree.unflatten(self._structure, self._current[0][0])

    def _start(self, transfers: Any) -> None:
        used = np.flatnonzero(transfers.operation != NONE)
        if not len(used):
            return
        operations = transfers.operation[used]
        for part in np.split(used, np.flatnonzero(np.diff(operations)) + 1):
            transfer = Transfer(
                operation=int(transfers.operation[part[0]]),
                generation=int(transfers.generation[part[0]]),
                kind=TransferKind(transfers.kind),
                rank=transfers.rank,
                source=transfers.source[part],
                target=transfers.target[part],
            )
            if transfer.kind == TransferKind.STORE:
                self.storage.write(transfer)
            else:
                self.plane.start(transfer)
