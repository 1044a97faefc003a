"""Values of tail pools in the plain model: which node has one, where, how old it is, and what keeps it there.

A value is a set membership with an age, per pool and tier; there are no page ids. Laws are plain functions of depths.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from oracle import Oracle
from oracle_tree import DEVICE, HOST

from purecache.state import WritePolicy
from purecache.transitions import TransferKind

BACKUP, LOAD = TransferKind.BACKUP, TransferKind.LOAD_BACK


@dataclass(frozen=True)
class Tail:
    """A tail pool as the model sees it."""

    first: Callable[[int], int]
    """First page (0-based) of a prefix of so many pages that needs a value."""
    in_place: bool
    capacity: tuple[int, int]
    """Pages per rank on device and on host."""


@dataclass(eq=False)
class Moving:
    """A value on its way; its page stays reserved even if its node goes."""

    kind: TransferKind
    pool: str
    path: tuple


@dataclass(eq=False)
class Value:
    has: list = field(default_factory=lambda: [False, False])
    """On device, on host."""
    incoming: Moving | None = None
    age: list = field(default_factory=lambda: [0, 0])


class Values(Oracle):
    """The plain model with the values of `tails`: {name: Tail}; what is there, and what leaves."""

    def __init__(self, config, tails):
        super().__init__(config, fails=None)
        self.tails = tails
        self.ages = count(1)
        self.given = {name: [0] * config.ranks for name in tails}
        """Device pages that requests hold."""
        self.forget()

    def forget(self):
        self.values = {name: defaultdict(Value) for name in self.tails}
        self.moving, self.fresh, self.older = [], [], []
        self.kept = ({}, {})
        """By tier, the values that a load back protects from its own evictions."""

    # ---- what there is ----

    def value(self, pool, path):
        return self.values[pool].get(path) or Value()

    def needed(self, pool, path):
        """The prefixes of `path` that need a value for it, shallowest first."""
        return self.prefixes(path)[self.tails[pool].first(len(path) - 1) :]

    def deepest_valid(self, path, present):
        """The longest prefix of `path` that is valid, if `present(pool, prefix)` says where there are values."""
        while len(path) > 1:
            if all(present(pool, prefix) for pool in self.tails for prefix in self.needed(pool, path)):
                break
            path = path[:-1]
        return path

    def on_its_way(self, pool, path, kind):
        moving = self.value(pool, path).incoming
        return moving is not None and moving.kind == kind

    def lock_ends(self):
        """The nodes that receipts and loads of KV lock."""
        loads = [operation.members[0] for operation in self.operations if operation.kind == LOAD]
        return [*self.receipts.values(), *loads]

    def value_locked(self, pool, path):
        return self.tails[pool].in_place and any(
            path in self.needed(pool, end) for end in self.lock_ends() if end[: len(path)] == path
        )

    def may_leave(self, pool, path, tier):
        if path not in self.nodes or not self.value(pool, path).has[tier] or path in self.kept[tier].get(pool, ()):
            return False
        return not (self.value_locked(pool, path) if tier == DEVICE else self.on_its_way(pool, path, LOAD))

    def sweep(self):
        """A value on device needs its KV page there; one on host or on its way needs a KV page anywhere, or coming."""
        for values in self.values.values():
            for path in list(values):
                node = self.nodes.get(path)
                if node is None:
                    del values[path]
                    continue
                values[path].has[DEVICE] &= node.has[DEVICE]
                if not any(node.has) and node.incoming is None:
                    # What is on its way keeps its page until it ends, and then has no use for it.
                    values[path].has[HOST], values[path].incoming = False, None

    def room(self, pool, tier, rank):
        self.sweep()
        kind = LOAD if tier == DEVICE else BACKUP
        held = sum(value.has[tier] for path, value in self.values[pool].items() if path[0] == rank)
        held += sum((each.kind, each.pool, each.path[0]) == (kind, pool, rank) for each in self.moving)
        return self.tails[pool].capacity[tier] - held - (self.given[pool][rank] if tier == DEVICE else 0)

    def loose(self, pool, tier, rank):
        """The values that may be evicted, oldest first."""
        self.sweep()
        found = [path for path in self.values[pool] if path[0] == rank and self.may_leave(pool, path, tier)]
        return sorted(found, key=lambda path: self.values[pool][path].age[tier])

    def newest(self, pool, tier, paths):
        """`paths`, shallowest first, were used: those that may be evicted go last, the deeper the later."""
        for path in paths:
            if self.may_leave(pool, path, tier):
                self.values[pool][path].age[tier] = next(self.ages)

    # ---- leaving ----

    def evict(self, number, rank):
        self.older = list(self.operations)
        return super().evict(number, rank)

    def leave_device(self, path):
        node = self.nodes[path]
        copied_now = node.incoming is not None and node.incoming not in self.older
        kept = node.has[HOST] or node.incoming is not None
        for pool in self.tails:
            if self.value(pool, path).has[DEVICE]:
                self.value_leaves(pool, path, kept and (copied_now or self.writes_back))
        super().leave_device(path)
        self.sweep()

    @property
    def writes_back(self):
        return self.config.write == WritePolicy.WRITE_BACK

    def value_leaves(self, pool, path, copied):
        """A value leaves the device; with `copied` it goes to host, if it is not there and room can be had."""
        value = self.values[pool][path]
        value.has[DEVICE] = False
        if copied and not value.has[HOST] and value.incoming is None and self.make_host_room(pool, path[0], 1):
            self.move(BACKUP, pool, path)

    def make_host_room(self, pool, rank, number):
        """Evict values until `number` have room, oldest first; returns for how many there is room, at most that."""
        while self.room(pool, HOST, rank) < number and (loose := self.loose(pool, HOST, rank)):
            self.values[pool][loose[0]].has[HOST] = False
        return min(number, self.room(pool, HOST, rank))

    def evict_values(self, pool, number, rank, besides=()):
        freed = 0
        while freed < number:
            loose = [path for path in self.loose(pool, DEVICE, rank) if path not in besides]
            if not loose:
                break
            self.value_leaves(pool, loose[0], self.writes_back)
            freed += 1
        return freed

    def evict_host_values(self, pool, number, rank):
        victims = self.loose(pool, HOST, rank)[: max(0, number)]
        for path in victims:
            self.values[pool][path].has[HOST] = False
        return len(victims)

    def move(self, kind, pool, path):
        moving = Moving(kind, pool, path)
        self.values[pool][path].incoming = moving
        self.moving.append(moving)
        self.fresh.append(moving)
