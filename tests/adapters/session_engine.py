"""A scheduler in small, with a plain page tree and pools of NumPy arrays, to run sessions in."""

from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np


@dataclass
class Key:
    token_ids: list[int]
    extra_key: str | None = None
    dp_rank: int | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, part: slice) -> "Key":
        return Key(self.token_ids[part], self.extra_key, self.dp_rank)


@dataclass
class MatchParams:
    key: Key
    req: Any = None


class MatchResult(NamedTuple):
    device_indices: np.ndarray
    last_device_node: Any
    last_host_node: Any
    best_match_node: Any
    host_hit_length: int = 0


@dataclass
class EvictParams:
    num_tokens: int
    dp_rank: int = 0


class LockResult(NamedTuple):
    swa_uuid_for_lock: int


class Abort:
    is_error = True


class Stop:
    is_error = False


class Talk:
    """A streaming session as a scheduler knows it."""

    streaming = True

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.told: list[str] = []

    def finish_req(self, req: "Req") -> None:
        self.told.append("finish")

    def abort_req(self) -> None:
        self.told.append("abort")


@dataclass(eq=False)
class Req:
    origin_input_ids: list[int]
    session: Talk | None = None
    extra_key: str | None = None
    dp_rank: int | None = None
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    prefix_indices: Any = ()
    last_node: Any = None
    swa_uuid_for_lock: Any = None
    req_pool_idx: int | None = None
    cache_protected_len: int = 0
    last_matched_prefix_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    finished_reason: Any = None
    to_finish: Any = None

    def pop_committed_kv_cache(self) -> int:
        length, self.kv_committed_len = self.kv_committed_len, 0
        self.popped = length
        return length


class Allocator:
    """Slots are local to a rank; page 0 is padding. Raises at a double free."""

    def __init__(self, pages: int, page_size: int, ranks: int) -> None:
        self.page_size, self.dp_size, self.size_per_rank = page_size, ranks, pages * page_size
        self.size = ranks * self.size_per_rank
        self.free_pages = [set(range(1, pages + 1)) for _ in range(ranks)]

    def alloc(self, dp_rank: int) -> int:
        page = min(self.free_pages[dp_rank])
        self.free_pages[dp_rank].remove(page)
        return page * self.page_size

    def free(self, slots: np.ndarray, dp_rank: int = 0) -> None:
        pages = {int(slot) // self.page_size for slot in slots}
        assert not pages & self.free_pages[dp_rank], "freed twice"
        self.free_pages[dp_rank] |= pages

    def available_size(self, dp_rank: int) -> int:
        return len(self.free_pages[dp_rank]) * self.page_size


class Rows:
    def __init__(self, rows: int, length: int) -> None:
        self.size, self.free_slots = rows, list(range(rows))
        self.req_to_token = np.zeros((rows, length), np.int32)

    def read(self, row: int, length: int) -> np.ndarray:
        return self.req_to_token[row, :length].copy()

    def write(self, where: tuple[int, slice], slots: np.ndarray) -> None:
        self.req_to_token[where] = slots


class PlainTree:
    """Whole pages by their prefix. A node is (rank, namespace, tokens)."""

    def __init__(self, rows: Rows, allocator: Allocator) -> None:
        self.req_to_token_pool, self.token_to_kv_pool_allocator = rows, allocator
        self.page_size = allocator.page_size
        self.pages: dict[tuple, int] = {}
        self.locks: dict[int, tuple] = {}
        """Node by receipt."""
        self._receipts = count(1)

    def _path(self, tokens: list[int], extra: str | None, rank: int) -> list[tuple]:
        size = self.page_size
        return [(rank, extra, tuple(tokens[: end + size])) for end in range(0, len(tokens) // size * size, size)]

    def match_prefix(self, params: MatchParams) -> MatchResult:
        key, slots, node = params.key, [], (params.key.dp_rank or 0, params.key.extra_key, ())
        for step in self._path(key.token_ids, key.extra_key, key.dp_rank or 0):
            if step not in self.pages:
                break
            node = step
            slots += range(self.pages[step], self.pages[step] + self.page_size)
        return MatchResult(np.array(slots, np.int32), node, node, node)

    def _insert(self, req: Req, tokens: list[int]) -> tuple:
        """Give the pages from the protected length on to the tree; free those that it has already."""
        rank, row = req.dp_rank or 0, self.req_to_token_pool.req_to_token[req.req_pool_idx]
        node = (rank, req.extra_key, ())
        for number, node in enumerate(self._path(tokens, req.extra_key, rank)):
            start = number * self.page_size
            if node not in self.pages:
                self.pages[node] = int(row[start])
            elif start >= req.cache_protected_len:
                self.token_to_kv_pool_allocator.free(row[start : start + self.page_size], rank)
            row[start : start + self.page_size] = np.arange(self.pages[node], self.pages[node] + self.page_size)
        return node

    def cache_unfinished_req(self, req: Req) -> None:
        node = self._insert(req, req.fill_ids)
        receipt = self.inc_lock_ref(node).swa_uuid_for_lock
        self.dec_lock_ref(req.last_node, req)
        req.last_node, req.cache_protected_len, req.swa_uuid_for_lock = node, len(node[2]), receipt
        req.last_matched_prefix_len = len(node[2])
        req.prefix_indices = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(req.fill_ids)].copy()

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        length, row = req.pop_committed_kv_cache(), self.req_to_token_pool.req_to_token[req.req_pool_idx]
        whole = length // self.page_size * self.page_size
        if is_insert:
            self._insert(req, [*req.origin_input_ids, *req.output_ids][:whole])
        kept = whole if is_insert else req.cache_protected_len
        self.token_to_kv_pool_allocator.free(row[kept:length], req.dp_rank or 0)
        self.dec_lock_ref(req.last_node, req)

    def evict(self, params: EvictParams) -> None:
        """Drop unlocked leaves, one after another."""
        dp_rank = params.dp_rank
        for _ in range(-(-params.num_tokens // self.page_size)):
            inner = {(node[0], node[1], node[2][: -self.page_size]) for node in self.pages}
            held = self._locked()
            leaf = next((n for n in self.pages if n[0] == dp_rank and n not in inner and n not in held), None)
            if leaf is None:
                return
            slot = self.pages.pop(leaf)
            self.token_to_kv_pool_allocator.free(np.array([slot]), dp_rank)

    def inc_lock_ref(self, node: tuple) -> LockResult:
        receipt = next(self._receipts)
        self.locks[receipt] = node
        return LockResult(receipt)

    def dec_lock_ref(self, node: tuple, params: Any) -> None:
        assert self.locks.pop(params.swa_uuid_for_lock) == node, "unlocked twice, or another lock"

    def _locked(self) -> set[tuple]:
        return {step for node in self.locks.values() for step in self._path(list(node[2]), node[1], node[0])}

    def protected_size(self, dp_rank: int = 0) -> int:
        return sum(self.page_size for node in self._locked() if node[0] == dp_rank)

    def evictable_size(self, dp_rank: int = 0) -> int:
        return sum(self.page_size for node in self.pages if node[0] == dp_rank) - PlainTree.protected_size(
            self, dp_rank
        )

    def reset(self) -> None:
        self.pages.clear()
        self.locks.clear()


class Engine:
    """Runs requests against a cache; the KV of a token is the sum of all tokens up to it, so that errors show."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.rows, self.allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
        slots = self.allocator.size_per_rank + self.allocator.page_size
        self.kv = np.zeros((self.allocator.dp_size, slots), np.int64)

    def match(self, req: Req) -> int:
        req.fill_ids = [*req.origin_input_ids, *req.output_ids]
        key = Key(req.fill_ids[:-1], req.extra_key, req.dp_rank)
        found = self.cache.match_prefix(MatchParams(key, req))
        req.prefix_indices, req.last_node = found.device_indices, found.last_device_node
        req.last_matched_prefix_len = len(req.prefix_indices)
        wanted = np.cumsum(req.fill_ids)[: len(req.prefix_indices)]
        np.testing.assert_array_equal(self.kv[req.dp_rank or 0, req.prefix_indices], wanted)
        return len(req.prefix_indices)

    def _write(self, req: Req, first: int, tokens: list[int]) -> None:
        """Compute `tokens`, the whole sequence so far, from position `first` on."""
        rank, row = req.dp_rank or 0, self.rows.req_to_token[req.req_pool_idx]
        for place in range(first, len(tokens)):
            if place % self.allocator.page_size:
                row[place] = row[place - 1] + 1
            else:
                if not self.allocator.available_size(rank):
                    self.cache.evict(EvictParams(self.allocator.page_size, rank))
                row[place] = self.allocator.alloc(rank)
            before = self.kv[rank, row[place - 1]] if place else 0
            self.kv[rank, row[place]] = before + tokens[place]
        req.kv_committed_len = req.kv_allocated_len = len(tokens)

    def start(self, req: Req, chunk: int | None = None) -> None:
        """Admit, prefill in chunks of `chunk` tokens, and keep what there is after each."""
        req.swa_uuid_for_lock = self.cache.inc_lock_ref(req.last_node).swa_uuid_for_lock
        req.req_pool_idx = self.rows.free_slots.pop()
        req.cache_protected_len = req.last_matched_prefix_len
        done, tokens = len(req.prefix_indices), list(req.fill_ids)
        self.rows.req_to_token[req.req_pool_idx, :done] = req.prefix_indices
        while done < len(tokens):
            req.fill_ids = tokens[: done + (chunk or len(tokens))]
            self._write(req, done, req.fill_ids)
            self.cache.cache_unfinished_req(req)
            assert len(req.prefix_indices) == len(req.fill_ids)
            done = len(req.fill_ids)
            self.rows.req_to_token[req.req_pool_idx, :done] = req.prefix_indices

    def decode(self, req: Req, outputs: list[int]) -> None:
        """As a scheduler does: the KV of the last output is not computed."""
        req.output_ids += outputs
        tokens = [*req.origin_input_ids, *req.output_ids][:-1]
        self._write(req, req.kv_committed_len, tokens)

    def end(self, req: Req, reason: Any) -> None:
        """Finish (Stop), abort (Abort) or retract (None)."""
        req.finished_reason = reason
        self.cache.cache_finished_req(req, is_insert=reason is not None)
        start = -(-req.popped // self.allocator.page_size) * self.allocator.page_size
        row = self.rows.req_to_token[req.req_pool_idx]
        self.allocator.free(row[start : req.kv_allocated_len], req.dp_rank or 0)
        self.rows.free_slots.append(req.req_pool_idx)
        row[:] = 0
        req.req_pool_idx, req.kv_allocated_len, req.last_node, req.swa_uuid_for_lock = None, 0, None, None

    def turn(self, req: Req, outputs: list[int], *, chunk: int | None = None) -> int:
        """A whole request; gives the length of its cached prefix."""
        found = self.match(req)
        self.start(req, chunk)
        self.decode(req, outputs)
        self.end(req, Stop())
        return found

    def check_idle(self) -> None:
        """What sglang-jax's scheduler checks when nothing runs."""
        for rank in range(self.allocator.dp_size):
            free, evictable = self.allocator.available_size(rank), self.cache.evictable_size(dp_rank=rank)
            protected = self.cache.protected_size(dp_rank=rank)
            assert free + evictable + protected == self.allocator.size_per_rank, (rank, free, evictable, protected)
        assert len(self.rows.free_slots) == self.rows.size
