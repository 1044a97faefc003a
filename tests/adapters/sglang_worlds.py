"""Two worlds that a cache for sglang can live in: stand-ins without torch, and sglang's own classes."""

import importlib
import sys
from array import array
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class FakeTensor:
    """A NumPy array that says where it is, and can't be read from there."""

    def __init__(self, values: np.ndarray, device: str) -> None:
        self.values, self.device = values, device

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> "FakeTensor":
        return FakeTensor(self.values[index], self.device)

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def to(self, device: str) -> "FakeTensor":
        return FakeTensor(self.values.copy(), device)

    def cpu(self) -> "FakeTensor":
        return self.to("cpu")

    def numpy(self) -> np.ndarray:
        assert self.device == "cpu", "the host can't read this device"
        return self.values

    def tolist(self) -> list[int]:
        return self.values.tolist()


def fake_torch() -> ModuleType:
    module = ModuleType("torch")
    module.__dict__.update(int64=np.dtype(np.int64), from_numpy=lambda values: FakeTensor(values, "cpu"))
    return module


class FakeRows:
    def __init__(self, size: int, length: int) -> None:
        self.size = size
        self.req_to_token = FakeTensor(np.zeros((size + 1, length), np.int32), "fake:0")
        self.free_slots = list(range(1, size + 1))

    def write(self, indices: Any, values: FakeTensor) -> None:
        assert values.device == "fake:0"
        self.req_to_token.values[indices] = values.values

    def alloc(self, reqs: list[Any]) -> None:
        for req in reqs:
            req.req_pool_idx = self.free_slots.pop()

    def free(self, req: Any) -> None:
        self.free_slots.append(req.req_pool_idx)
        req.req_pool_idx = None


class FakeAllocator:
    device = "fake:0"

    def __init__(self, size: int, page_size: int) -> None:
        self.size, self.page_size = size, page_size
        self.free_pages = FakeTensor(np.arange(1, size // page_size + 1), self.device)

    def available_size(self) -> int:
        return len(self.free_pages) * self.page_size

    def alloc(self, need_size: int) -> FakeTensor | None:
        number = need_size // self.page_size
        if number > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages.values[:number], self.free_pages[number:]
        return FakeTensor((pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1), self.device)

    def free(self, free_index: FakeTensor) -> None:
        assert free_index.device == self.device, f"slots on {free_index.device}"
        pages = np.unique(free_index.values // self.page_size)
        self.free_pages = FakeTensor(np.concatenate([self.free_pages.values, pages]), self.device)


@dataclass
class FakeKey:
    token_ids: array
    extra_key: str | None = None
    limit: int | None = None

    def raw_token_ids(self) -> array:
        return self.token_ids[: self.limit]


@dataclass(eq=False)
class FakeReq:
    """As sglang's `Req`, as far as a prefix cache sees it."""

    rid: str
    origin_input_ids: array
    extra_key: str | None
    priority: int
    most: int | None
    session: Any = None
    output_ids: array = field(default_factory=lambda: array("q"))
    full_untruncated_fill_ids: array = field(default_factory=lambda: array("q"))
    fill_len: int = 0
    req_pool_idx: int | None = None
    prefix_indices: Any = ()
    last_node: Any = None
    swa_uuid_for_lock: Any = None
    cache_protected_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    freed: bool = False

    def get_fill_ids(self) -> array:
        return self.full_untruncated_fill_ids[: self.fill_len]

    def init_next_round_input(self, cache: Any) -> None:
        tokens = self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids
        limit = len(tokens) - 1 if self.most is None else min(self.most, len(tokens) - 1)
        key = FakeKey(tokens, self.extra_key, limit)
        found = cache.match_prefix(SimpleNamespace(key=key, req=self, cow_mamba=False))
        self.prefix_indices, self.last_node = found.device_indices, found.last_device_node
        self.cache_protected_len = len(self.prefix_indices)

    def pop_committed_kv_cache(self) -> int:
        assert not self.freed
        self.freed = True
        return self.kv_committed_len

    def pop_overallocated_kv_cache(self) -> tuple[int, int]:
        return self.kv_committed_len, self.kv_allocated_len

    def reset_for_retract(self) -> None:
        self.last_node, self.freed = None, False
        self.cache_protected_len = self.kv_committed_len = self.kv_allocated_len = self.fill_len = 0


@dataclass
class InitParams:
    """As `CacheInitParams`, which needs more than a cache does."""

    disable: bool
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    page_size: int
    is_eagle: bool = False
    eviction_policy: str = "lru"
    disable_finished_insert: bool = False
    enable_metrics: bool = False
    enable_kv_cache_events: bool = False


class FakeWorld:
    """Everything that a cache is given, without torch."""

    key, rows = FakeKey, FakeRows

    def match_params(self, key: Any, req: Any = None) -> Any:
        return SimpleNamespace(key=key, req=req, cow_mamba=False)

    def insert_params(self, key: Any, value: Any, priority: int = 0) -> Any:
        return SimpleNamespace(key=key, value=value, priority=priority, chunked=False)

    def evict_params(self, number: int) -> Any:
        return SimpleNamespace(num_tokens=number, swa_num_tokens=0, mamba_num=0)

    def allocator(self, size: int, page_size: int) -> Any:
        return FakeAllocator(size, page_size)

    def slots(self, values: list[int]) -> Any:
        return FakeTensor(np.asarray(values, np.int64), "fake:0")

    def write(self, rows: Any, row: int, first: int, slots: list[int]) -> None:
        rows.req_to_token.values[row, first : first + len(slots)] = slots

    def params(self, page_size: int = 1, size: int = 64, rows: int = 16, **more: Any) -> Any:
        # The length of a row is for prompts beside slots that are not theirs.
        return self.init_params(
            disable=more.pop("disable", False),
            req_to_token_pool=self.rows(rows, 256),
            token_to_kv_pool_allocator=self.allocator(size, page_size),
            page_size=page_size,
            **more,
        )

    init_params = InitParams

    def req(
        self,
        tokens: list[int],
        extra_key: str | None = None,
        priority: int = 0,
        most: int | None = None,
        session: Any = None,
    ) -> Any:
        """most: tokens that may come from a cache."""
        return FakeReq("r", array("q", tokens), extra_key, priority, most, session)


class RealWorld(FakeWorld):
    """The same from sglang and torch. Raises ImportError without them."""

    def __init__(self) -> None:
        def part(module: str) -> Any:
            return importlib.import_module(f"sglang.srt.{module}")

        self.torch = importlib.import_module("torch")
        self.base, self.radix = part("mem_cache.base_prefix_cache"), part("mem_cache.radix_cache")
        self.allocators, self.pool = part("mem_cache.allocator"), part("mem_cache.memory_pool")
        self.init_params = part("mem_cache.cache_init_params").CacheInitParams
        self.batch, self.sampling = part("managers.schedule_batch"), part("sampling.sampling_params")

    def key(self, token_ids: array, extra_key: str | None = None, limit: int | None = None) -> Any:
        return self.radix.RadixKey(token_ids, extra_key, limit=limit)

    def match_params(self, key: Any, req: Any = None) -> Any:
        return self.base.MatchPrefixParams(key=key, req=req)

    def insert_params(self, key: Any, value: Any, priority: int = 0) -> Any:
        return self.base.InsertParams(key=key, value=value, priority=priority)

    def evict_params(self, number: int) -> Any:
        return self.base.EvictParams(num_tokens=number)

    def rows(self, size: int, length: int) -> Any:
        return self.pool.ReqToTokenPool(size, length, "cpu", False)

    def allocator(self, size: int, page_size: int) -> Any:
        dtype = self.torch.float16
        if page_size == 1:
            return self.allocators.TokenToKVPoolAllocator(size, dtype, "cpu", None, False)
        return self.allocators.PagedTokenToKVPoolAllocator(size, page_size, dtype, "cpu", None, False)

    def slots(self, values: list[int]) -> Any:
        return self.torch.tensor(values, dtype=self.torch.int64)

    def write(self, rows: Any, row: int, first: int, slots: list[int]) -> None:
        rows.write((row, slice(first, first + len(slots))), self.slots(slots))

    def req(
        self,
        tokens: list[int],
        extra_key: str | None = None,
        priority: int = 0,
        most: int | None = None,
        session: Any = None,
    ) -> Any:
        req = self.batch.Req(
            "r",
            "",
            array("q", tokens),
            self.sampling.SamplingParams(max_new_tokens=8),
            extra_key=extra_key,
            priority=priority,
            return_logprob=most is not None,
            session=session,
        )
        req.logprob_start_len = -1 if most is None else most
        return req


def world_of(name: str, monkeypatch: Any) -> FakeWorld:
    """A world by its name; the fake one has a fake torch."""
    if name == "real":
        return RealWorld()
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    return FakeWorld()
