"""The plain model of a cache with tail pools: the events.

What is not promised, how the values that leave or come together are cut into transfers and in which order these end,
the model is told (`started`, `ended`); which values are on their way, and what is then published, it says itself.

Where several answers would do, the model says which one was chosen:

* Room on host for a KV page is made before that for the values of the same node.
* A load back makes room for KV pages first, then for the values of one pool after the other.
* Values of one transfer become the newest in the opposite of its order.
"""

from oracle_tree import BY_ARRIVAL, DEVICE, HOST, Operation, doomed
from oracle_values import BACKUP, LOAD, Values

from purecache.transitions import Status


class HybridOracle(Values):
    """The events. Their arguments and answers are paths, names of pools, and places: pages of a prompt."""

    # ---- transfers ----

    def start(self, operation):
        """Nothing: how a transfer fares is told when it ends."""

    def started(self, pool, kind, paths):
        """A transfer of the values of `paths`, in its order, was started: it must be one that the model has begun.

        Returns what `ended` takes.
        """
        if pool not in self.tails:
            return next(each for each in self.operations if each.members == paths and each.kind == kind)
        self.sweep()
        group = []
        for path in paths:
            fits = [each for each in self.fresh if (each.kind, each.pool) == (kind, pool) and self.names(path, each)]
            assert len(fits) == 1 or (fits and path is None), (kind, pool, path, "is not to be moved")
            self.fresh.remove(fits[0])
            group.append(fits[0])
        return group

    def names(self, path, moving):
        """Whether a transfer names this value. None: one whose node has gone since, no matter which."""
        waits = self.value(moving.pool, moving.path).incoming is moving
        return moving.path == path if path is not None else not waits

    def all_started(self):
        assert not self.fresh, ("not moved", self.fresh)

    def ended(self, pool, kind, moved, ok):
        if pool in self.tails:
            self.values_ended(moved, ok)
        else:
            moved.ok = ok
            self.operations.remove(moved)
            (self.finish_backup if kind == BACKUP else self.finish_load)(moved)
        self.sweep()

    def values_ended(self, group, ok):
        self.sweep()
        for moving, arrived in reversed(list(zip(group, ok, strict=True))):
            self.moving.remove(moving)
            value, node = self.value(moving.pool, moving.path), self.nodes.get(moving.path)
            if value.incoming is not moving:
                continue  # the node has gone since
            value.incoming = None
            tier = DEVICE if moving.kind == LOAD else HOST
            value.has[tier] |= arrived and (
                node.has[DEVICE] if tier == DEVICE else any(node.has) or bool(node.incoming)
            )
            self.newest(moving.pool, tier, [moving.path])
            if moving.kind == LOAD:
                self.newest(moving.pool, HOST, [moving.path])

    @property
    def moves(self):
        return self.config.policy not in BY_ARRIVAL

    def freed(self, path):
        """As before; values that the lock at `path` locked come back as used."""
        super().freed(path)
        for pool, tail in self.tails.items():
            if tail.in_place:
                self.newest(pool, DEVICE, self.needed(pool, path))

    def backup(self, path, hits, most):
        """Begin backups until none begins, or as many as `most` have begun in each pool."""
        begun = dict.fromkeys(("kv", *self.tails), 0)
        while min(begun.values()) < most:
            step = {"kv": super().backup(path, hits, 1)}
            step |= {pool: self.backup_values(pool, path, hits) for pool in self.tails}
            if not any(step.values()):
                break
            begun = {pool: begun[pool] + step[pool] for pool in begun}

    def backup_values(self, pool, path, hits):
        wanted = self.values_to_back_up(pool, path, hits)
        room = self.make_host_room(pool, path[0], len(wanted))
        for prefix in wanted[:room]:
            self.move(BACKUP, pool, prefix)
        return room

    def values_to_back_up(self, pool, path, hits):
        """Prefixes with values that only the device has, and whose KV page is on host or will be; deepest first."""

        def wanted(prefix):
            value, node = self.value(pool, prefix), self.nodes[prefix]
            bare = value.has[DEVICE] and not value.has[HOST] and value.incoming is None
            return bare and node.hits >= hits and (node.has[HOST] or self.reserved(node, HOST))

        return [prefix for prefix in reversed(self.prefixes(path)) if wanted(prefix)]

    def begin_load(self, path):
        """Start to load what a usable prefix lacks on device, all of it or nothing; returns a status."""
        off = [p for p in reversed(self.prefixes(path)) if not self.nodes[p].has[DEVICE]]
        pages = [p for p in off if self.nodes[p].incoming is None]
        absent = {
            pool: [p for p in reversed(self.needed(pool, path)) if not self.value(pool, p).has[DEVICE]]
            for pool in self.tails
        }
        wanted = {pool: [p for p in paths if not self.on_its_way(pool, p, LOAD)] for pool, paths in absent.items()}
        status = self.load_verdict(path, off, pages, absent, wanted)
        if status == Status.OK:
            self.reserve(path, pages, wanted)
        return status

    def load_verdict(self, path, off, pages, absent, wanted):
        if not off and not any(absent.values()):
            return Status.NOTHING
        if not all(self.nodes[p].has[HOST] for p in off):
            return Status.NOTHING
        if (not pages and not any(wanted.values())) or doomed(off, pages):
            return Status.JOINED
        if not any(wanted.values()) and len(pages) * self.config.page_size < self.config.load_back_threshold:
            return Status.BELOW_THRESHOLD
        rank = path[0]
        on_device = self.prefixes(path[: len(path) - len(off)])
        kept = sum(not self.locked(p, DEVICE) for p in on_device)
        if len(pages) > self.free(DEVICE, rank) + self.evictable(rank) - kept:
            return Status.NO_ROOM
        for pool, paths in wanted.items():
            others = [p for p in self.loose(pool, DEVICE, rank) if p not in self.needed(pool, path)]
            if len(paths) > self.room(pool, DEVICE, rank) + len(others):
                return Status.NO_ROOM
        return Status.OK

    def reserve(self, path, pages, wanted):
        rank, operation = path[0], Operation(LOAD, pages)
        self.nodes[path].loads += 1
        # On device what the prefix needs, on host what is about to be read.
        self.kept = ({pool: self.needed(pool, path) for pool in self.tails}, wanted)
        if pages:
            self.operations.append(operation)
        self.evict(len(pages) - self.free(DEVICE, rank), rank)
        for page in pages:
            self.nodes[page].incoming = operation
        for pool, paths in wanted.items():
            self.evict_values(pool, len(paths) - self.room(pool, DEVICE, rank), rank)
            for prefix in paths:
                self.move(LOAD, pool, prefix)
        self.kept = ({}, {})
        if not pages:  # values alone lock nothing while they come, but the prefix was used
            self.nodes[path].loads -= 1
            self.freed(path)

    def loaded(self, path):
        """Whether all of a prefix is on device, with the values that it needs."""
        there = path in self.nodes and self.nodes[path].has[DEVICE]
        values = [(pool, prefix) for pool in self.tails for prefix in self.needed(pool, path)]
        return there and all(self.value(pool, prefix).has[DEVICE] for pool, prefix in values)

    # ---- requests ----

    def run_of(self, path, has):
        """The leading run of `path` whose nodes have a page, as a path."""
        end = 1
        while end < len(path) and path[: end + 1] in self.nodes and has(self.nodes[path[: end + 1]].has):
            end += 1
        return path[:end]

    def match(self, path, touch=True, lock=None):
        """Returns the device part, the usable part, and the leading run of KV, as paths. `lock`: a receipt for it."""
        run = self.run_of(path, any)
        device = self.deepest_valid(
            self.run_of(path, lambda has: has[DEVICE]), lambda pool, p: self.value(pool, p).has[DEVICE]
        )
        usable = self.deepest_valid(run, lambda pool, p: any(self.value(pool, p).has))
        if touch:
            self.touch_pages(device, usable)
        if lock is not None:
            self.lock(device, lock)
        for pool in self.tails if touch else ():
            self.newest(pool, DEVICE, self.needed(pool, device))
            if len(usable) > len(device):
                self.newest(pool, HOST, self.needed(pool, usable))
        return device, usable, run

    def touch_pages(self, device, usable):
        if self.moves:
            if len(device) > 1:
                self.touch(DEVICE, device)
            if len(usable) > len(device):
                self.touch(HOST, usable)

    def insertable(self, path, offers):
        """The part of `path` that an insert with values at the places `offers[pool]` brings into the tree."""
        known = [p for p in self.prefixes(path) if p in self.nodes]
        loading = [p for p in known if self.reserved(self.nodes[p], DEVICE)]
        inside = path if not loading else loading[0][:-1]
        known = self.run_of(path, lambda has: has[DEVICE])

        def present(pool, prefix):
            there = self.value(pool, prefix).has[DEVICE] or self.on_its_way(pool, prefix, LOAD)
            return there or len(prefix) - 2 in offers[pool]

        return max(known, self.deepest_valid(inside, present), key=len)

    def insert(self, path, counted, priority, offers):
        """Returns the part of `path` that is in the tree now, and per pool the places whose values were adopted."""
        tip = super().insert(self.insertable(path, offers), counted, priority)
        adopted = {pool: [] for pool in self.tails}
        for pool in self.tails:
            for place, prefix in enumerate(self.prefixes(tip)):
                value = self.values[pool][prefix]
                if place in offers[pool] and not value.has[DEVICE]:
                    if self.on_its_way(pool, prefix, LOAD):
                        value.incoming = None
                        self.newest(pool, HOST, [prefix])
                    value.has[DEVICE] = True
                    adopted[pool].append(place)
                    self.given[pool][path[0]] -= 1
                    self.newest(pool, DEVICE, [prefix])
            self.newest(pool, DEVICE, self.needed(pool, tip))
        return tip, adopted

    def write_through(self, tip):
        threshold = self.config.backup_hits
        if threshold > 0:
            nodes = [self.nodes[p] for p in self.prefixes(tip)]
            pages = sum(not n.has[HOST] and n.incoming is None and n.hits >= threshold for n in nodes)
            values = [len(self.values_wanted(pool, tip, threshold)) for pool in self.tails]
            self.backup(tip, threshold, max(pages, *values))

    def values_wanted(self, pool, tip, threshold):
        found = [self.value(pool, p) for p in self.prefixes(tip) if self.nodes[p].hits >= threshold]
        return [v for v in found if v.has[DEVICE] and not v.has[HOST] and v.incoming is None]

    def allocate_values(self, pool, number, rank):
        short = number - self.room(pool, DEVICE, rank)
        if short > len(self.loose(pool, DEVICE, rank)):
            return False
        self.evict_values(pool, short, rank)
        self.given[pool][rank] += number
        return True

    def fork(self, pool, path):
        rank = path[0]
        if not self.value(pool, path).has[DEVICE]:
            return Status.NOTHING
        self.newest(pool, DEVICE, [path])
        if not self.room(pool, DEVICE, rank) and not self.evict_values(pool, 1, rank, [path]):
            self.values[pool][path].has[DEVICE] = False  # handed over
        self.given[pool][rank] += 1
        return Status.OK

    def reset(self):
        super().reset()
        self.forget()
