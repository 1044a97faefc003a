"""The prefixes that the oracle keeps, with their locks and ages, and who is the next victim."""

from dataclasses import dataclass, field
from itertools import count

from purecache.state import Policy
from purecache.transitions import TransferKind

DEVICE, HOST = 0, 1
BY_TOUCH, BY_ARRIVAL = (Policy.LRU, Policy.MRU), (Policy.FIFO, Policy.FILO)
LAST_FIRST = (Policy.MRU, Policy.FILO)


def doomed(deepest_first, needed):
    """Whether, of pages off the device, one is being loaded below one that is not: that load will be rolled back."""
    return needed != deepest_first[: len(needed)]


@dataclass(eq=False)
class Operation:
    kind: TransferKind
    members: list
    """Paths, deepest first."""
    ok: list = field(default_factory=list)


@dataclass(eq=False)
class Node:
    priority: int
    hits: int = 1
    has: list = field(default_factory=lambda: [False, False])
    """On device, on host."""
    incoming: Operation | None = None
    receipts: int = 0
    loads: int = 0
    age: list = field(default_factory=lambda: [None, None])
    """Per tier: when it was touched or arrived, or (level, when), or (deadline, level, when)."""


class Tree:
    """The prefixes, their locks and ages; nothing here is an event."""

    def __init__(self, config, fails):
        """`fails(kind, number)`: which of `number` pages of a transfer that starts now fail, deepest first."""
        self.config, self.fails = config, fails
        self.capacity = (config.device_pages, config.host_pages)
        self.clock, self.fronts = count(1), count(-1, -1)
        self.nodes, self.operations, self.receipts = {}, [], {}
        self.lent = [0] * config.ranks
        self.time = 0
        self.uses = {}
        """Of every prefix, since the last reset: what a sketch that is large enough remembers."""
        self.withheld = [[0] * config.ranks for _ in self.capacity]

    # ---- what there is ----

    def children(self, path):
        return [other for other in self.nodes if len(other) == len(path) + 1 and other[:-1] == path]

    def below(self, path):
        return [other for other in self.nodes if other[: len(path)] == path]

    def locked(self, path, tier):
        """Device locks come from receipts and loads at or below a node, host locks from loads."""
        nodes = [self.nodes[other] for other in self.below(path)]
        return any(node.loads or (node.receipts and tier == DEVICE) for node in nodes)

    def free(self, tier, rank):
        held = sum(node.has[tier] + self.reserved(node, tier) for path, node in self.nodes.items() if path[0] == rank)
        out = self.withheld[tier][rank] + (self.lent[rank] if tier == DEVICE else 0)
        return self.capacity[tier] - held - out

    def reserved(self, node, tier):
        kind = TransferKind.LOAD_BACK if tier == DEVICE else TransferKind.BACKUP
        return node.incoming is not None and node.incoming.kind == kind

    def evictable(self, rank):
        return sum(
            node.has[DEVICE] and path[0] == rank and not self.locked(path, DEVICE) for path, node in self.nodes.items()
        )

    def prefixes(self, path):
        return [path[:length] for length in range(2, len(path) + 1)]

    def deepest(self, path, good):
        """The deepest node of a path that is `good`, or None."""
        return next((p for p in reversed(self.prefixes(path)) if p in self.nodes and good(self.nodes[p])), None)

    # ---- orders ----

    def level(self, node):
        top = self.config.levels - 1
        by_hits = min(max(node.hits - 1, 0), top)
        levels = {
            Policy.LFU: by_hits,
            Policy.SLRU: min(by_hits, 1),
            Policy.PRIORITY: min(max(node.priority, 0), top),
            Policy.RETENTION: min(max(node.priority + 1, 0), top),
        }
        return levels[self.config.policy]

    def arrive(self, tier, path, new=()):
        """`path` was used and its `new` pages came to `tier`."""
        now, policy = next(self.clock), self.config.policy
        if policy in BY_TOUCH:
            for prefix in self.prefixes(path):
                self.nodes[prefix].age[tier] = now
        elif policy in BY_ARRIVAL:
            for prefix in new:
                self.nodes[prefix].age[tier] = now
        elif policy == Policy.RETENTION:
            level = self.level(self.nodes[path])
            due = self.time + self.config.retention_of_levels[level]
            self.nodes[path].age[tier] = (due, level, now)
        else:
            self.nodes[path].age[tier] = (self.level(self.nodes[path]), now)

    touch = arrive

    def became_leaf(self, tier, path, by_failure=False, due=0):
        """`due`: under RETENTION, the deadline of the page below that has gone."""
        node = self.nodes.get(path)
        if node is None:
            return
        if self.config.policy == Policy.RETENTION:
            if node.age[tier] is None:
                node.age[tier] = (due, self.level(node), next(self.fronts))
        elif by_failure and self.config.policy == Policy.MRU:
            node.age[tier] = next(self.clock)
        elif self.config.policy not in BY_TOUCH + BY_ARRIVAL:
            level = self.level(node)
            if node.age[tier] is None or node.age[tier][0] != level:
                node.age[tier] = (level, next(self.fronts))

    def victim(self, tier, rank):
        def may_go(path, node):
            if path[0] != rank or not node.has[tier] or self.locked(path, DEVICE) or self.locked(path, HOST):
                return False
            if tier == DEVICE:
                return not any(self.nodes[child].has[DEVICE] for child in self.children(path))
            return not node.has[DEVICE] and node.incoming is None and not self.children(path)

        choice = [path for path, node in self.nodes.items() if may_go(path, node)]
        pick = max if self.config.policy in LAST_FIRST else min
        found = pick(choice, key=lambda path: self.nodes[path].age[tier], default=None)
        if self.config.policy == Policy.RETENTION:
            # Entries before it, of pages that can't go, are dropped: such a page is listed again when it can.
            for path, node in self.nodes.items():
                if path[0] == rank and node.age[tier] and (not found or node.age[tier] < self.nodes[found].age[tier]):
                    node.age[tier] = None
        return found
