"""A plain model of the cache: sets of prefixes, a counter for recency, no arrays, no page ids.

A node is named by its path: `(rank, (namespace, page), page, ...)`; `(rank,)` is a root. LRU and MRU go by the last
touch of a page or of anything below it, FIFO and FILO by arrival in the tier, deeper first among equals. Of LFU, SLRU,
PRIORITY and RETENTION the model knows what the implementation promises: one list per level; a page enters the list of
its level when a path ends at it; a page that becomes a leaf without being in its list goes to the front of it. Under
RETENTION the earliest deadline of all lists goes first; an insert also lists the last page of every stretch of its path
that is kept longer than what follows. Where several answers would do, the model says which one was chosen:

* What leaves the device arrives on host then and there: that is its age on host, whatever it was on device.
* An unlock touches the deepest page on device of its path, and the deepest one that only host has.
* A page on host that becomes a leaf because a backup below it failed keeps its age, except under MRU: it goes next.
"""

from itertools import pairwise

from oracle_tree import BY_ARRIVAL, DEVICE, HOST, Node, Operation, Tree, doomed

from purecache.state import Policy, WritePolicy
from purecache.transitions import Status, TransferKind


class Oracle(Tree):
    """The events. Their arguments and answers are paths."""

    # ---- leaving ----

    def prune(self, path):
        """Remove an empty node and what becomes empty above it."""
        while len(path) > 1 and path in self.nodes:
            node = self.nodes[path]
            used = any(node.has) or node.incoming or node.receipts or node.loads or self.children(path)
            if used:
                break
            del self.nodes[path]
            path = path[:-1]
            if path in self.nodes and not self.children(path):
                self.became_leaf(HOST, path, by_failure=True)

    def drop_below(self, path):
        for other in sorted(self.below(path), key=len, reverse=True):
            if other != path:
                if not self.locked(other, HOST):
                    self.nodes[other].has[HOST] = False
                self.prune(other)

    def evict_host(self, number, rank):
        freed = 0
        while freed < number and (path := self.victim(HOST, rank)):
            due = self.due_of(HOST, path)
            del self.nodes[path]
            freed += 1
            parent = path[:-1]
            self.prune(parent)
            if parent in self.nodes and not self.children(parent):
                self.became_leaf(HOST, parent, due=due)
        self.look_ahead(HOST, number, rank)
        return freed

    def due_of(self, tier, path):
        return self.nodes[path].age[tier][0] if self.config.policy == Policy.RETENTION else 0

    def look_ahead(self, tier, number, rank):
        """An eviction ends by looking for one more victim."""
        if number > 0 and self.config.policy == Policy.RETENTION:
            self.victim(tier, rank)

    def evict(self, number, rank):
        freed, batch = 0, []
        last, operation = None, None
        while freed < number and (path := self.victim(DEVICE, rank)):
            node = self.nodes[path]
            bare = not node.has[HOST] and node.incoming is None
            least = self.config.backup_threshold or 1
            wanted = (self.config.write == WritePolicy.WRITE_BACK and node.hits >= least) or self.children(path)
            if bare and wanted and self.capacity[HOST]:
                joins = last is not None and last[:-1] == path
                if not self.free(HOST, rank):
                    self.evict_host(1, rank)
                if self.free(HOST, rank) and (joins or self.vacant()):
                    if not joins:
                        operation = Operation(TransferKind.BACKUP, [])
                        self.operations.append(operation)
                        batch.append(operation)
                    operation.members.append(path)
                    node.incoming, last = operation, path
            self.leave_device(path)
            freed += 1
        self.look_ahead(DEVICE, number, rank)
        for operation in batch:
            self.start(operation)
        return freed

    def leave_device(self, path):
        node, due = self.nodes[path], self.due_of(DEVICE, path)
        node.has[DEVICE], node.age[DEVICE] = False, None
        if node.has[HOST]:
            self.arrive(HOST, path, [path])
        elif node.incoming is None:
            self.drop_below(path)
            self.prune(path)
        parent = path[:-1]
        if not any(self.nodes[child].has[DEVICE] for child in self.children(parent)):
            self.became_leaf(DEVICE, parent, due=due)

    # ---- operations ----

    def vacant(self):
        return len(self.operations) < self.config.max_operations

    def start(self, operation):
        failing = self.fails(operation.kind, len(operation.members))
        operation.ok = [not bad for bad in failing]

    def complete(self, held=()):
        """Finish every operation whose kind is not held; returns those."""
        ended = [operation for operation in self.operations if operation.kind not in held]
        for operation in ended:
            self.operations.remove(operation)
            if operation.kind == TransferKind.BACKUP:
                self.finish_backup(operation)
            else:
                self.finish_load(operation)
        return ended

    def arrived(self, operation, anchored):
        """The members whose bytes, and those of all members above them, came: a suffix, since deepest comes first."""
        failed = [index for index, ok in enumerate(operation.ok) if not ok]
        return operation.members[max(failed, default=-1) + 1 :] if anchored else []

    def finish_backup(self, operation):
        above = self.nodes.get(operation.members[-1][:-1])
        arrived = self.arrived(operation, above is None or any(above.has) or above.incoming is not None)
        for path in operation.members:
            self.nodes[path].incoming = None
            self.nodes[path].has[HOST] = path in arrived
        pending = [path for path in operation.members if not self.nodes[path].has[DEVICE]]
        for path in arrived:
            if path in pending:
                self.arrive(HOST, path, [path])
        for path in pending:
            if path not in arrived and path in self.nodes:
                self.drop_below(path)
                self.prune(path)

    def finish_load(self, operation):
        above = self.nodes.get(operation.members[-1][:-1])
        arrived = self.arrived(operation, above is None or above.has[DEVICE])
        for path in operation.members:
            self.nodes[path].incoming = None
            self.nodes[path].has[DEVICE] = path in arrived
        if arrived:
            self.arrive(DEVICE, arrived[0], arrived)
        self.nodes[operation.members[0]].loads -= 1
        operation.published = len(arrived) == len(operation.members)
        self.freed(operation.members[0])
        if self.config.exclusive:
            for path in arrived:
                if not self.locked(path, HOST):
                    self.nodes[path].has[HOST], self.nodes[path].age[HOST] = False, None

    def backup(self, path, hits, most):
        started = 0
        while started < most:
            run = self.missing(path, hits)
            room = len(run) if self.vacant() else 0
            self.evict_host(room - self.free(HOST, path[0]), path[0])
            number = min(room, self.free(HOST, path[0]))
            if not number:
                break
            operation = Operation(TransferKind.BACKUP, run[len(run) - number :])
            self.operations.append(operation)
            for member in operation.members:
                self.nodes[member].incoming = operation
            self.start(operation)
            started += number
        return started

    def missing(self, path, hits):
        run = []
        for prefix in reversed(self.prefixes(path)):
            node = self.nodes[prefix]
            if node.has[DEVICE] and not node.has[HOST] and node.incoming is None and node.hits >= hits:
                run.append(prefix)
            elif run:
                break
        return run

    def load(self, path, held=()):
        """Returns (status, paths that are loaded, shallowest first)."""
        off = [p for p in self.prefixes(path) if not self.nodes[p].has[DEVICE]]
        needed = [p for p in reversed(off) if self.nodes[p].incoming is None]
        status = self.verdict(path, off, needed)
        if status not in (Status.OK, Status.JOINED):
            return status, []
        if status == Status.OK:
            rank, operation = path[0], Operation(TransferKind.LOAD_BACK, needed)
            self.nodes[path].loads += 1
            self.operations.append(operation)
            self.evict(len(needed) - self.free(DEVICE, rank), rank)
            for member in needed:
                self.nodes[member].incoming = operation
            # The write back of the victims starts first.
            self.operations.remove(operation)
            self.operations.append(operation)
            self.start(operation)
        self.complete(held)
        there = path in self.nodes and self.nodes[path].has[DEVICE]
        return (status, off) if there else (Status.STALE, [])

    def verdict(self, path, off, needed):
        if not off or not all(self.nodes[p].has[HOST] for p in off):
            return Status.NOTHING
        if not needed or doomed(off[::-1], needed):
            return Status.JOINED
        if len(needed) * self.config.page_size < self.config.load_back_threshold:
            return Status.BELOW_THRESHOLD
        if not self.vacant():
            return Status.TABLE_FULL
        anchor = off[0][:-1]
        kept = sum(not self.locked(p, DEVICE) for p in self.prefixes(anchor))
        room = self.free(DEVICE, path[0]) + self.evictable(path[0]) - kept
        return Status.OK if len(needed) <= room else Status.NO_ROOM

    # ---- requests ----

    def match(self, path, touch=True):
        """Returns the device part and the usable part, as paths."""
        device = usable = path[:1]
        for prefix in self.prefixes(path):
            node = self.nodes.get(prefix)
            if node is None or not any(node.has):
                break
            usable = prefix
            device = prefix if node.has[DEVICE] else device
        if touch and self.config.policy not in BY_ARRIVAL:
            if len(device) > 1:
                self.touch(DEVICE, device)
            if len(usable) > len(device):
                self.touch(HOST, usable)
        return device, usable

    def insert(self, path, counted=0, priority=0, kept=99):
        """Returns the part of `path` that is in the tree now. `kept`: pages at the front that have the priority."""
        known = [p for p in self.prefixes(path) if p in self.nodes]
        loading = [p for p in known if self.reserved(self.nodes[p], DEVICE)]
        inside = self.prefixes(path) if not loading else self.prefixes(loading[0][:-1])
        new = [p for p in inside if p not in self.nodes or not self.nodes[p].has[DEVICE]]
        for index, prefix in enumerate(inside):
            before = self.uses.get(prefix, 0) if self.config.sketch else 0
            self.uses[prefix] = before + (index >= counted)
            if prefix in self.nodes:
                node = self.nodes[prefix]
                node.hits += index >= counted
                node.priority = max(node.priority, priority if index < kept else min(priority, -1))
            else:
                self.nodes[prefix] = Node(priority if index < kept else min(priority, -1), hits=1 + before)
            self.nodes[prefix].has[DEVICE] = True
        self.lent[path[0]] -= len(new)
        tip = inside[-1] if inside else path[:1]
        for above, below in pairwise(inside):
            if self.config.policy == Policy.RETENTION and self.level(self.nodes[above]) > self.level(self.nodes[below]):
                self.arrive(DEVICE, above)
        if new:
            self.arrive(DEVICE, tip, new)
        elif inside and self.config.policy not in BY_ARRIVAL:
            self.touch(DEVICE, tip)
        return tip

    def write_through(self, tip):
        """What an insert that ended at `tip` starts by itself; after the rest of its transition."""
        threshold = self.config.backup_hits
        nodes = [self.nodes[p] for p in self.prefixes(tip)]
        wanted = [n for n in nodes if not n.has[HOST] and n.incoming is None and n.hits >= threshold > 0]
        self.backup(tip, threshold, len(wanted))

    def lock(self, path, receipt):
        self.receipts[receipt] = path
        if len(path) > 1:
            self.nodes[path].receipts += 1

    def unlock(self, receipt):
        path = self.receipts.pop(receipt)
        if len(path) > 1:
            self.nodes[path].receipts -= 1
            self.freed(path)

    def freed(self, path):
        """A lock at `path` is gone: what is free now comes back as touched."""
        device = self.deepest(path, lambda node: node.has[DEVICE])
        paged = self.deepest(path, lambda node: any(node.has))
        self.prune(path)
        if self.config.policy in BY_ARRIVAL:
            return
        if device and not self.locked(device, DEVICE):
            self.touch(DEVICE, device)
        if paged and paged != device and not self.locked(paged, DEVICE):
            self.touch(HOST, paged)

    def move_lock(self, receipt, path):
        """A checkpoint: the receipt locks `path` from now on."""
        old = self.receipts[receipt]
        self.lock(path, receipt)
        if len(old) > 1:
            self.nodes[old].receipts -= 1
            self.freed(old)

    def allocate(self, number, rank):
        short = number - self.free(DEVICE, rank)
        if short > self.evictable(rank):
            return False
        self.evict(short, rank)
        self.lent[rank] += number
        return True

    def resize(self, tier, pages, rank, copies=()):
        """`copies`: nodes on host in the order in which copies of pages on device go."""
        change = pages - (self.capacity[tier] - self.withheld[tier][rank])
        if change > 0:
            self.withheld[tier][rank] -= change
            return
        short = -change - self.free(tier, rank)
        if tier == DEVICE:
            self.evict(short, rank)
        else:
            self.evict_host(short, rank)
            for path in copies:
                node = self.nodes.get(path)
                spare = node is not None and node.has[DEVICE] and not node.incoming and not self.locked(path, HOST)
                if spare and self.free(HOST, rank) < -change:
                    node.has[HOST] = False
        self.withheld[tier][rank] += min(-change, self.free(tier, rank))

    def forget(self, path, keep=None):
        known = [p for p in self.prefixes(path) if p in self.nodes]
        if keep is None:
            whole = known and (len(known) == len(path) - 1 or not self.children(known[-1]))
            top = known[-1] if whole else None
        else:
            top = known[keep] if keep < len(known) else None
        if top is None:
            return [0, 0, 0]
        tally, above = self.sweep(top), top[:-1]
        while keep is None and len(above) > 1 and self.goes_alone(above):
            self.drop(above, tally)
            above = above[:-1]
        if len(above) > 1:
            self.freed(above)
        return tally

    def goes_alone(self, path):
        node = self.nodes[path]
        held = self.locked(path, DEVICE) or self.locked(path, HOST)
        return not self.children(path) and node.incoming is None and not held

    def sweep(self, top):
        tally = [0, 0, 0]
        for path in sorted(self.below(top), key=len, reverse=True):
            self.drop(path, tally)
        return tally

    def drop(self, path, tally):
        """Take away what a node has, unless a request holds it; what goes and what stays is counted."""
        node = self.nodes[path]
        if not self.locked(path, DEVICE):
            tally[0] += node.has[DEVICE]
            node.has[DEVICE], node.age[DEVICE] = False, None
            if node.incoming is None:
                tally[1] += node.has[HOST]
                node.has[HOST] = False
        tally[2] += any(node.has) or node.incoming is not None
        if not (any(node.has) or node.incoming or node.receipts or node.loads or self.children(path)):
            del self.nodes[path]

    def forget_namespace(self, namespace):
        tops = [path for path in self.nodes if len(path) == 2 and path[1][0][0] == namespace]
        return [sum(each) for each in zip([0, 0, 0], *map(self.sweep, tops), strict=True)]

    def reset(self):
        self.nodes.clear()
        self.uses.clear()
        self.operations.clear()
        self.receipts.clear()
