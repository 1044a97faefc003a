"""A plain prefix cache, written from the contract alone: nothing is fast, everything is easy to see.

One node per page. `host_pages` gives it a host tier (pages in NumPy), `storage` one more below (a dict).
"""

import itertools
from collections import namedtuple
from types import SimpleNamespace

import numpy as np

Match = namedtuple("Match", "device_indices last_device_node last_host_node best_match_node host_hit_length")


class Receipt(SimpleNamespace):
    def to_dec_params(self):
        return SimpleNamespace(swa_uuid_for_lock=None, skip_lock_node_ids={})


class Node:
    def __init__(self, parent, label, space):
        self.parent, self.label, self.space = parent, label, space
        self.rank = (space[1] or 0) if space else None
        self.below, self.slots, self.host, self.locks, self.used = {}, None, None, 0, 0

    children = {}  # noqa: RUF012 (all nodes are shown as children of the root: a chain of pages may be long)

    def path(self):
        """The nodes above and this one, without the root."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def name(self):
        return (self.space, tuple(node.label for node in self.path()))


class PlainCache:
    disable = False

    def __init__(self, params, host_pages=0, write="write_back", storage=False):
        self.req_to_token_pool, self.token_to_kv_pool_allocator = (
            params.req_to_token_pool,
            params.token_to_kv_pool_allocator,
        )
        self.page_size, self.is_eagle = params.page_size, params.is_eagle
        self.pool = self.token_to_kv_pool_allocator.get_kvcache()
        self.hicache_enabled, self.write = host_pages > 0, write
        self.host_pages = host_pages
        self.storage = {} if storage else None
        self._donation_barrier = None
        self.clock = 0
        self.reset()

    def reset(self):
        self.root_node, self.host = Node(None, None, None), [None] * self.host_pages
        self.root_node.children = self.every = {}

    # ---- the tree ----

    def nodes(self):
        return list(self.every.values())

    def labels(self, tokens):
        """One label per page: its tokens, or pairs of them."""
        units = list(itertools.pairwise(tokens)) if self.is_eagle else list(tokens)
        size = self.page_size
        return [tuple(units[at : at + size]) for at in range(0, len(units) - size + 1, size)]

    def walk(self, key):
        self.clock += 1
        space, node, nodes = (key.extra_key, key.dp_rank), self.root_node, []
        for label in self.labels(key.token_ids):
            node = node.below.get((space, label)) or self.from_storage(node, space, label)
            if node is None or (node.slots is None and node.host is None):
                break
            node.used = self.clock
            nodes.append(node)
        return nodes

    def match_prefix(self, params):
        nodes = self.walk(params.key)
        device = nodes[: next((at for at, node in enumerate(nodes) if node.slots is None), len(nodes))]
        slots = np.concatenate([np.empty(0, np.int32), *[node.slots for node in device]])
        last = device[-1] if device else self.root_node
        best = nodes[-1] if nodes else self.root_node
        on_host = (len(nodes) - len(device)) * self.page_size
        return Match(slots.astype(np.int32), last, best, best, on_host)

    def insert(self, tokens, extra_key, dp_rank, slots):
        """Take the slots of whole pages, or free what the tree has already. The slots in the tree, and the node."""
        self.clock += 1
        space, node, size, kept = (extra_key, dp_rank), self.root_node, self.page_size, []
        for at, label in enumerate(self.labels(tokens)):
            child = node.below.get((space, label)) or self.add(Node(node, label, space))
            child.used = self.clock
            own = slots[at * size : (at + 1) * size]
            if child.slots is None:
                child.slots = own.astype(np.int32)
            elif not np.array_equal(child.slots, own):
                self.token_to_kv_pool_allocator.free(own, dp_rank=child.rank)
            kept.append(child.slots)
            node = child
        return np.concatenate([np.empty(0, np.int32), *kept]), node

    def add(self, node):
        node.parent.below[node.space, node.label] = self.every[id(node)] = node
        return node

    def cache_unfinished_req(self, req):
        row, length = req.req_pool_idx, len(req.fill_ids)
        slots = self.req_to_token_pool.read(row, length)
        kept, node = self.insert(req.fill_ids, req.extra_key, req.dp_rank, slots)
        self.req_to_token_pool.write((row, slice(0, len(kept))), kept)
        old, req.last_node = req.last_node, node
        self.inc_lock_ref(node)
        self.dec_lock_ref(old)
        req.prefix_indices = np.concatenate([kept, slots[len(kept) :]])
        req.last_matched_prefix_len = req.cache_protected_len = len(kept)

    def cache_finished_req(self, req, is_insert=True):
        if req.kv_committed_freed:
            return
        length = req.pop_committed_kv_cache()
        slots = self.req_to_token_pool.read(req.req_pool_idx, length)
        kept = req.cache_protected_len
        if is_insert:
            tokens = (req.origin_input_ids + req.output_ids)[:length]
            kept = len(self.insert(tokens, req.extra_key, req.dp_rank, slots)[0])
        self.token_to_kv_pool_allocator.free(slots[kept:], dp_rank=req.dp_rank or 0)
        self.dec_lock_ref(req.last_node)

    # ---- locks and sizes ----

    def inc_lock_ref(self, node):
        before = self.size(True)
        for each in node.path():
            each.locks += 1
        return Receipt(delta=before - self.size(True), swa_uuid_for_lock=None, skip_lock_node_ids={})

    def dec_lock_ref(self, node, params=None):
        for each in node.path():
            each.locks -= 1

    def size(self, locked, rank=None):
        nodes = [node for node in self.nodes() if node.slots is not None and (node.locks > 0) == locked]
        return self.page_size * sum(rank in (None, node.rank) for node in nodes)

    def evictable_size(self, dp_rank=0):
        return self.size(False, dp_rank)

    def protected_size(self, dp_rank=0):
        return self.size(True, dp_rank)

    def total_size(self):
        return self.size(True) + self.size(False)

    # ---- eviction ----

    def leaves(self, rank):
        return [
            node
            for node in self.nodes()
            if node.slots is not None and not node.locks and rank in (None, node.rank)
            if all(child.slots is None for child in node.below.values())
        ]

    def evict(self, params):
        done = 0
        while done < params.num_tokens and (leaves := self.leaves(params.dp_rank)):
            self.evict_page(min(leaves, key=lambda node: node.used))
            done += self.page_size
        return SimpleNamespace(num_tokens_evicted=done)

    def evict_page(self, node):
        if self.hicache_enabled and node.host is None:
            self.back_up(node)
        slots, node.slots = node.slots, None
        self.free_slots(slots, node)
        if node.host is None:
            self.drop(node)

    def free_slots(self, slots, node):
        self.token_to_kv_pool_allocator.free(slots, dp_rank=node.rank)

    def drop(self, node):
        """Forget a page that is nowhere, and what is below it."""
        for child in list(node.below.values()):
            self.drop(child)
        if node.host is not None:
            self.host[node.host] = None
        del node.parent.below[node.space, node.label], self.every[id(node)]

    # ---- host and storage ----

    def page(self, node):
        """The page in the arrays of the pool."""
        ranks = self.token_to_kv_pool_allocator.dp_size
        return int(node.slots[0]) // self.page_size + node.rank * (len(self.pool.kv_buffer[0]) // ranks)

    def barrier(self):
        if self._donation_barrier is not None:
            self._donation_barrier()

    def room(self):
        """A free host page, or None."""
        while None not in self.host:
            leaves = [node for node in self.nodes() if node.host is not None and not node.locks]
            leaves = [node for node in leaves if node.slots is None and not node.below]
            copies = [node for node in self.nodes() if node.host is not None and node.slots is not None]
            if not leaves and not copies:
                return None
            node = min(leaves or copies, key=lambda node: node.used)
            if self.storage is not None:
                self.storage[node.name()] = self.host[node.host]
            self.host[node.host], node.host = None, None
            if node.slots is None:
                self.drop(node)
        return self.host.index(None)

    def back_up(self, node):
        if (page := self.room()) is not None:
            self.barrier()
            self.host[page] = self.copy_page(node)
            node.host = page

    def copy_page(self, node):
        return [np.array(array[self.page(node)]) for array in self.pool.kv_buffer]

    def from_storage(self, parent, space, label):
        if self.storage is None:
            return None
        child = Node(parent, label, space)
        content = self.storage.get(child.name())
        if content is None or (page := self.room()) is None or (parent.parent and parent.slots is parent.host is None):
            return None
        self.host[page], child.host = content, page
        return self.add(child)

    def check_hicache_events(self):
        if self.write == "write_through":
            for node in self.nodes():
                if node.slots is not None and node.host is None and None in self.host:
                    self.back_up(node)

    flush_write_through_acks = check_hicache_events

    def init_load_back(self, node, length, mem_quota=None):
        nodes = [each for each in node.path() if each.slots is None]
        none = np.empty(0, np.int32), node, []
        if len(nodes) * self.page_size != length or not all(each.host is not None for each in nodes):
            return none
        for each in node.path():
            each.locks += 1
        rank, allocator = node.rank, self.token_to_kv_pool_allocator
        missing = length - allocator.available_size(rank)
        if missing > 0:
            self.evict(SimpleNamespace(num_tokens=missing, dp_rank=rank))
        slots = allocator.alloc(length, dp_rank=rank)
        self.dec_lock_ref(node)
        if slots is None:
            return none
        for at, each in enumerate(nodes):
            each.slots = slots[at * self.page_size : (at + 1) * self.page_size].astype(np.int32)
        return slots, node, [(each, self.page(each), self.host[each.host]) for each in nodes]

    def finish_load_back(self, plan):
        arrays = self.pool.kv_buffer
        for _, page, content in plan:
            arrays = [
                array.at[page].set(value, out_sharding=array.sharding)
                for array, value in zip(arrays, content, strict=True)
            ]
        self.pool.replace_buffer(arrays)

    # ---- what other kinds of cache have ----

    def supports_recurrent(self):
        return False

    def recurrent_extra_buffer_active(self):
        return False

    def pretty_print(self):
        pass
