"""Calls a prefix cache as sglang-jax's scheduler does, and checks what holds for every answer."""

import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from purecache.testing.pools import TokenSlots
from purecache.testing.stand_ins import Request, RequestRows, Vocabulary


class Caller:
    """A cache, and what it shares with the scheduler. `moment` is called before each call: time passes."""

    def __init__(
        self,
        cache: Any,
        rows: RequestRows,
        allocator: TokenSlots,
        vocabulary: Vocabulary,
        is_eagle: bool,
        random: random.Random,
        moment: Callable[[], None],
    ) -> None:
        self.cache, self.rows, self.allocator, self.vocabulary = cache, rows, allocator, vocabulary
        self.is_eagle, self.random, self.moment = is_eagle, random, moment
        self.page_size = allocator.page_size
        self.history: deque[str] = deque(maxlen=8)
        self.with_host = bool(getattr(cache, "hicache_enabled", False))

    def call(self, method: str, *arguments: Any, note: Any = "", **keywords: Any) -> Any:
        """Call a method, which must not raise."""
        self.moment()
        what = f"{method}({note})"
        if not method.endswith("_size"):
            self.history.append(what)
        try:
            return getattr(self.cache, method)(*arguments, **keywords)
        except AssertionError as error:
            raise AssertionError(f"in {what}: {error}") from error
        except Exception as error:
            raise AssertionError(f"{what} must not raise; it raised {error!r}") from error

    # ---- sizes ----

    def size(self, name: str, rank: int) -> int:
        """evictable_size or protected_size of a rank."""
        size = self.call(name, dp_rank=rank, note=rank)
        assert isinstance(size, int | np.integer), f"{name} must be a whole number, not {size!r}"
        assert size >= 0, f"{name} of rank {rank} is {size}"
        return int(size)

    names = ("evictable_size", "protected_size")
    """How the sizes of full attention are asked for."""

    def sizes(self) -> list[tuple[int, int, int]]:
        """Tokens that are free, evictable and protected, per rank."""
        evictable, protected = self.names
        ranks = range(self.allocator.dp_size)
        free = self.allocator.available_size
        return [(free(rank), self.size(evictable, rank), self.size(protected, rank)) for rank in ranks]

    # ---- prefixes ----

    def most(self, length: int) -> int:
        """The longest prefix that a cache can have of a key: whole pages, for EAGLE of pairs of tokens."""
        return max(length - self.is_eagle, 0) // self.page_size * self.page_size

    def key(self, tokens: list[int], extra_key: str | None = None, dp_rank: int | None = None) -> Any:
        """A key as the cache wants it."""
        return self.vocabulary.RadixKey(tokens, extra_key, dp_rank)

    def match(self, key: Any, **keywords: Any) -> Any:
        """Match, sometimes twice, and check the answer."""
        note = f"{len(key)} tokens, extra_key={key.extra_key!r}, dp_rank={key.dp_rank}"
        tokens = list(key.token_ids)
        found = self.call("match_prefix", self.vocabulary.MatchPrefixParams(key=key, **keywords), note=note)
        assert key.token_ids == tokens, "match_prefix must not change the key"
        self._check_match(found, len(key))
        if self.random.random() < 0.3:
            assert found.device_indices.flags.writeable, "device_indices must be a copy of the caller's own: writeable"
            first = found.device_indices.copy()
            found.device_indices[:] = -1
            again = self.call("match_prefix", self.vocabulary.MatchPrefixParams(key=key, **keywords), note=note)
            same = np.array_equal(again.device_indices, first)
            assert same, "match_prefix again found other slots; or its answer is not a copy, and was overwritten"
            self._check_match(again, len(key))
            assert again.host_hit_length >= found.host_hit_length, "match_prefix again found less on host"
            found = again
        return found

    def _check_match(self, found: Any, length: int) -> None:
        slots = found.device_indices
        assert isinstance(slots, np.ndarray), f"device_indices must be a NumPy array, not {type(slots).__name__}"
        assert slots.dtype == np.int32, f"device_indices must be int32, not {slots.dtype}"
        self.check_slots(slots, "device_indices")
        on_host = found.host_hit_length
        assert isinstance(on_host, int | np.integer), f"host_hit_length must be a whole number, not {on_host!r}"
        assert on_host >= 0, f"host_hit_length is {on_host}"
        assert on_host % self.page_size == 0, f"host_hit_length is {on_host}: not whole pages of {self.page_size}"
        total, most = len(slots) + on_host, self.most(length)
        assert total <= most, f"match_prefix found {total} tokens for a key of {length}: at most {most} are possible"
        nodes = {"last_device_node", "last_host_node", "best_match_node"}
        for name in nodes:
            assert isinstance(getattr(found, name), Hashable), f"{name} must be hashable: it is used as a key"
        if not self.with_host:
            assert on_host == 0, f"without a host tier, host_hit_length must be 0, not {on_host}"
            same = all(getattr(found, name) == found.last_device_node for name in nodes)
            assert same, "without a host tier, all nodes of a match must be equal"

    def check_slots(self, slots: np.ndarray, what: str) -> None:
        """Slots of a prefix in the cache: whole pages, each once, and a copy."""
        assert isinstance(slots, np.ndarray), f"{what} must be a NumPy array, not {type(slots).__name__}"
        assert slots.ndim == 1, f"{what} must have one dimension, not shape {slots.shape}"
        assert np.issubdtype(slots.dtype, np.integer), f"{what} must be whole numbers, not {slots.dtype}"
        shared = np.shares_memory(slots, self.rows.req_to_token)
        assert not shared, f"{what} must be a copy, not a view of a row of req_to_token"
        size = self.page_size
        assert len(slots) % size == 0, f"{what} has {len(slots)} slots: not whole pages of {size}"
        pages = slots.reshape(-1, size)
        whole = (pages == pages[:, :1] + np.arange(size)).all() and (pages[:, 0] % size == 0).all()
        assert whole, f"{what} are not the slots of whole pages in order: {slots}"
        assert len(np.unique(slots)) == len(slots), f"{what} has a slot twice: {slots}"
        inside = not len(slots) or (slots.min() >= size and slots.max() < self.allocator.size_per_rank + size)
        assert inside, f"{what} has slots that don't exist: {slots}"

    # ---- locks ----

    def lock(self, node: Any) -> Any:
        """Lock; the answer has what is needed to unlock."""
        before = self.sizes()
        result = self.call("inc_lock_ref", node)
        for name in ("delta", "swa_uuid_for_lock", "skip_lock_node_ids"):
            assert hasattr(result, name), f"inc_lock_ref's answer must have {name}: {result!r}"
        moved = self._check_moved(before, "inc_lock_ref")
        assert min(moved) >= 0, f"inc_lock_ref made protected_size smaller by {-min(moved)}"
        if result.delta is not None:
            assert abs(result.delta) == sum(moved), f"inc_lock_ref's delta is {result.delta}, but {sum(moved)} moved"
        return result

    def unlock(self, node: Any, params: Any = None) -> None:
        """Undo a lock."""
        before = self.sizes()
        self.call("dec_lock_ref", node, *([] if params is None else [params]))
        moved = self._check_moved(before, "dec_lock_ref")
        assert max(moved) <= 0, f"dec_lock_ref made protected_size bigger by {max(moved)}"

    def _check_moved(self, before: list[tuple[int, int, int]], method: str) -> list[int]:
        after = self.sizes()
        for rank, (old, new) in enumerate(zip(before, after, strict=True)):
            moved = f"{method} may only move tokens between evictable and protected"
            assert (old[0], old[1] + old[2]) == (new[0], new[1] + new[2]), f"{moved}; rank {rank}: {old} became {new}"
        return [new[2] - old[2] for old, new in zip(before, after, strict=True)]

    # ---- room ----

    def evict(self, tokens: int, rank: int | None) -> Any:
        """Evict; what can be evicted must be free when the call returns."""
        before = self.sizes()
        params = self.vocabulary.EvictParams(num_tokens=tokens, dp_rank=rank)
        result = self.call("evict", params, note=f"{tokens}, dp_rank={rank}")
        after = self.sizes()
        freed = [new[0] - old[0] for old, new in zip(before, after, strict=True)]
        ranks = range(len(before)) if rank is None else [rank]
        wanted = min(tokens, sum(before[each][1] for each in ranks))
        got = sum(freed[each] for each in ranks)
        assert got >= wanted, f"evict({tokens}) freed {got} tokens of rank {rank}, but {wanted} were evictable"
        assert sum(freed) == got, f"evict of rank {rank} freed {freed} tokens per rank"
        told = result.num_tokens_evicted
        assert told == got, f"evict says that it evicted {told} tokens, but {got} became free"
        for old, new in zip(before, after, strict=True):
            moved = f"evict turned {old} tokens (free, evictable, protected) into {new}"
            assert sum(old) == sum(new), moved
            assert old[2] == new[2], moved
        return result

    # ---- lives of requests ----

    def unfinished(self, request: Request) -> None:
        """The scheduler has computed all `fill_ids`, and goes on with the request."""
        length, before = len(request.fill_ids), request.cache_protected_len
        self.call("cache_unfinished_req", request, note=request)
        indices, protected = request.prefix_indices, request.cache_protected_len
        where = f"after cache_unfinished_req of {request}"
        assert isinstance(indices, np.ndarray), f"{where}, prefix_indices is {type(indices).__name__}"
        covers = f"{where}, prefix_indices must cover all {length} tokens of fill_ids, not {len(indices)}"
        assert len(indices) == length, covers
        assert not np.shares_memory(indices, self.rows.req_to_token), f"{where}, prefix_indices is a view of its row"
        in_row = self.rows.slots(request, 0, length)
        assert np.array_equal(indices, in_row), f"{where}, its row has {in_row}, but prefix_indices {indices}"
        lengths = f"{where}, cache_protected_len is {protected}, last_matched_prefix_len"
        matched = request.last_matched_prefix_len
        assert protected == matched, f"{lengths} is {matched}: they must be equal"
        assert protected % self.page_size == 0, f"{lengths} too: not whole pages"
        most = self.most(length)
        assert protected <= most, f"{where}, at most {most} of {length} tokens can be cached, not {protected}"
        assert protected >= before, f"{lengths} too, but it was {before} before"
        self.check_slots(indices[:protected], f"{where}, the tree's part of prefix_indices")

    def finished(self, request: Request, is_insert: bool, twice: bool) -> None:
        """The request has ended: what the cache doesn't keep is free."""
        for _ in range(1 + twice):
            self.call("cache_finished_req", request, is_insert=is_insert, note=f"{request}, is_insert={is_insert}")
            assert request.kv_committed_freed, "cache_finished_req must call pop_committed_kv_cache"
            assert request.req_pool_idx is not None, "cache_finished_req must not free the row: the scheduler does"
            assert not request.kv_overallocated_freed, "cache_finished_req must not take the over-allocated slots"

    def load_back(self, node: Any, length: int, quota: int) -> tuple[np.ndarray, Any, list]:
        """Bring back what is on host: all of it, or nothing."""
        answer = self.call("init_load_back", node, length, mem_quota=quota, note=f"{length}, mem_quota={quota}")
        assert isinstance(answer, tuple), f"init_load_back must answer (slots, node, plan), not {answer!r}"
        assert len(answer) == 3, f"init_load_back must answer (slots, node, plan), not {answer!r}"
        slots, last, plan = answer
        self.check_slots(slots, "what init_load_back answers")
        assert len(slots) in (0, length), (
            f"init_load_back of {length} tokens must load all or nothing, not {len(slots)}"
        )
        return slots, last, list(plan)
