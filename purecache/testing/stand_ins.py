"""Stand-ins for what a prefix cache gets from sglang-jax's scheduler: keys, parameters, requests and their rows.

They have what the call sites of the scheduler and its caches use, and nothing else. Where the originals accept a
mistake silently, they raise AssertionError.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class RadixKey:
    """Tokens and the namespace they are meant in: an adapter or tenant (`extra_key`) and a data-parallel rank."""

    def __init__(self, token_ids: list[int], extra_key: str | None = None, dp_rank: int | None = None) -> None:
        self.token_ids, self.extra_key, self.dp_rank = token_ids, extra_key, dp_rank

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)

    def __getitem__(self, index: int | slice) -> "RadixKey":
        tokens = self.token_ids[index] if isinstance(index, slice) else [self.token_ids[index]]
        return RadixKey(tokens, self.extra_key, self.dp_rank)

    def __repr__(self) -> str:
        return f"RadixKey({self.token_ids}, extra_key={self.extra_key!r}, dp_rank={self.dp_rank})"


@dataclass
class MatchPrefixParams:
    """What `match_prefix` gets."""

    key: Any
    cow_recurrent: bool = False
    req: Any = None
    full_only: bool = False


@dataclass
class InsertParams:
    """What an `insert` would get; the scheduler never calls it."""

    key: Any = None
    value: Any = None
    prev_prefix_len: int = 0
    swa_evicted_seqlen: int = 0
    recurrent_value: Any = None


@dataclass
class EvictParams:
    """What `evict` gets: tokens wanted free, and the rank (None means any)."""

    num_tokens: int = 0
    swa_num_tokens: int = 0
    dp_rank: int | None = None
    recurrent_num: int = 0


@dataclass(frozen=True)
class Vocabulary:
    """The classes that a cache is called with. Any object with these attributes will do, for instance a module."""

    RadixKey: Callable[..., Any] = RadixKey
    MatchPrefixParams: Callable[..., Any] = MatchPrefixParams
    EvictParams: Callable[..., Any] = EvictParams
    InsertParams: Callable[..., Any] = InsertParams


@dataclass
class CacheInitParams:
    """What a factory of caches gets."""

    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    page_size: int
    is_eagle: bool = False
    sliding_window_size: int | None = None
    enable_recurrent_extra_buffer: bool = False
    recurrent_track_interval: int | None = None


def _no_slots() -> np.ndarray:
    return np.empty(0, np.int32)


@dataclass(eq=False)
class Request:
    """A request as caches see it. `future` is its prompt and all that the model will answer; nothing else knows it."""

    rid: str
    origin_input_ids: list[int]
    future: list[int]
    max_new_tokens: int
    extra_key: str | None = None
    dp_rank: int | None = None
    logprob_start_len: int | None = None
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    req_pool_idx: int | None = None
    prefix_indices: Any = field(default_factory=_no_slots)
    extend_input_len: int = 0
    last_node: Any = None
    last_host_node: Any = None
    host_hit_length: int = 0
    last_matched_prefix_len: int = 0
    cache_protected_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    kv_committed_freed: bool = False
    kv_overallocated_freed: bool = False
    is_chunked: int = 0
    decode_batch_idx: int = 0
    is_retracted: bool = False
    swa_uuid_for_lock: Any = None
    swa_evicted_seqlen: int = 0
    recurrent_pool_idx: Any = None
    recurrent_cow_src_index: Any = None
    recurrent_ping_pong_track_buffer: Any = None
    recurrent_next_track_idx: Any = None
    recurrent_last_track_seqlen: Any = None
    to_finish: bool = False
    is_finished: bool = False

    def __repr__(self) -> str:
        return f"request {self.rid}"

    @property
    def rank(self) -> int:
        """The rank whose memory is used: no rank means rank 0."""
        return 0 if self.dp_rank is None else self.dp_rank

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.is_finished

    def left(self) -> int:
        """The tokens that it may still say."""
        return max(self.max_new_tokens - len(self.output_ids), 0)

    def check_finished(self) -> None:
        """End if it was aborted or has said all it may."""
        if self.to_finish or len(self.output_ids) >= self.max_new_tokens:
            self.to_finish, self.is_finished = False, True

    def adjust_max_prefix_ids(self) -> list[int]:
        """The tokens that may come from a cache: at least one must be computed, and all whose logprobs are wanted."""
        self.fill_ids = self.origin_input_ids + self.output_ids
        most = len(self.fill_ids) - 1
        if self.logprob_start_len is not None:
            most = min(most, self.logprob_start_len)
        return self.fill_ids[: max(most, 0)]

    def pop_committed_kv_cache(self) -> int:
        """The number of tokens with KV, once; then 0."""
        if self.kv_committed_freed:
            return 0
        self.kv_committed_freed = True
        return self.kv_committed_len

    def pop_overallocated_kv_cache(self) -> tuple[int, int]:
        """The range of slots allocated beyond the tokens with KV, once; then an empty one."""
        if self.kv_overallocated_freed:
            return 0, 0
        self.kv_overallocated_freed = True
        return self.kv_committed_len, self.kv_allocated_len

    def reset_for_retract(self) -> None:
        """Back to waiting: nothing of it is in memory any more. What it has said stays."""
        self.prefix_indices, self.last_node, self.swa_uuid_for_lock = [], None, None
        self.extend_input_len = self.is_chunked = self.swa_evicted_seqlen = self.decode_batch_idx = 0
        self.kv_allocated_len = self.kv_committed_len = self.cache_protected_len = 0
        self.kv_committed_freed = self.kv_overallocated_freed = False
        self.is_retracted = True


class RequestRows:
    """The table from positions of requests to slots, `req_to_token`: int32 [size, max_context_len].

    Rows keep what was in them. `owners` says which request has which row.
    """

    def __init__(self, size: int, max_context_len: int) -> None:
        self.size, self.max_context_len = size, max_context_len
        self.req_to_token = np.zeros((size, max_context_len), np.int32)
        self.free_slots = list(range(size))
        self.owners: dict[int, Request] = {}

    def read(self, row: int, length: int) -> np.ndarray:
        """A copy of the first `length` slots of a row."""
        return self.req_to_token[row, :length].copy()

    def write(self, indices: tuple[int, slice], values: Any) -> None:
        """Set a range of a row."""
        row, part = indices
        assert row in self.owners, f"row {row} was written, but no request has it"
        span = len(range(*part.indices(self.max_context_len)))
        given = len(values)
        # An assignment of one value to a longer range would spread it: never meant.
        assert given == span, f"{given} values were written to positions {part.start} to {part.stop} of a row"
        self.req_to_token[row, part] = values

    def alloc(self, requests: list[Request]) -> list[int] | None:
        """Give a row to each request that has none, or None if there are too few."""
        new = [request for request in requests if request.req_pool_idx is None]
        if len(new) > len(self.free_slots):
            return None
        for request in new:
            request.req_pool_idx = self.free_slots.pop()
            self.owners[request.req_pool_idx] = request
        return [self.row(request) for request in requests]

    def row(self, request: Request) -> int:
        """The row of a request that has one."""
        assert request.req_pool_idx is not None, f"{request} has no row any more: the cache must not free it"
        return request.req_pool_idx

    def free(self, request: Request) -> None:
        """Take the row back."""
        row = self.row(request)
        assert self.owners.pop(row, None) is request, f"row {row} is not that of {request}: freed twice"
        self.free_slots.append(row)
        request.req_pool_idx = None

    def clear(self) -> None:
        """Take all rows back."""
        self.free_slots = list(range(self.size))
        self.owners = {}

    def slots(self, request: Request, start: int, end: int) -> np.ndarray:
        """A copy of positions start to end of the row of a request."""
        return self.req_to_token[self.row(request), start:end].copy()
