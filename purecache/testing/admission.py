"""Which waiting requests run next, and in which order: like sglang-jax's schedule policy."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from purecache.testing.caller import Caller
from purecache.testing.stand_ins import Request


@dataclass
class Tally:
    """How often what happened: so that a run that tests nothing can be told from one that does."""

    submitted: int = 0
    finished: int = 0
    aborted: int = 0
    retracted: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    refused_loads: int = 0
    evictions: int = 0
    flushes: int = 0
    waits: int = 0

    def add(self, other: "Tally") -> None:
        """Add what another run has done."""
        for name, number in vars(other).items():
            setattr(self, name, getattr(self, name) + number)


def order(policy: str, waiting: list[Request], caller: Caller) -> None:
    """Sort waiting requests: "fcfs" asks nothing of the cache, "lpm" and "dfs-weight" match every request."""
    if policy == "fcfs":
        return
    for request in waiting:
        match(caller, request, request.adjust_max_prefix_ids())
    if policy == "lpm":
        waiting.sort(key=lambda request: -len(request.prefix_indices))
        return
    by_node: defaultdict[Any, list[Request]] = defaultdict(list)
    for request in waiting:
        by_node[request.last_node].append(request)
    weights: defaultdict[Any, int] = defaultdict(int, {node: len(requests) for node, requests in by_node.items()})
    root, ordered = caller.cache.root_node, []
    try:
        _weigh(root, weights)
        _visit(root, weights, by_node, ordered)
    except RecursionError as error:
        raise AssertionError("the tree below root_node is too deep for the recursion of dfs-weight") from error
    lost = [str(request) for request in waiting if request not in ordered]
    assert not lost, f"a walk from root_node through children doesn't come to last_node of {', '.join(lost)}"
    assert len(ordered) == len(waiting), "a walk from root_node through children came to a node twice"
    waiting[:] = ordered


def match(caller: Caller, request: Request, tokens: list[int], **keywords: Any) -> None:
    """Match a request that waits, and note what was found."""
    found = caller.match(caller.key(tokens, request.extra_key, request.dp_rank), **keywords)
    request.prefix_indices = found.device_indices
    request.last_node, request.last_host_node = found.last_device_node, found.last_host_node
    request.host_hit_length = found.host_hit_length


def _weigh(node: Any, weights: dict[Any, int]) -> None:
    for child in node.children.values():
        _weigh(child, weights)
        weights[node] += weights[child]


def _visit(node: Any, weights: dict[Any, int], by_node: dict[Any, list[Request]], ordered: list[Request]) -> None:
    for child in sorted(node.children.values(), key=lambda child: -weights[child]):
        _visit(child, weights, by_node, ordered)
    ordered.extend(by_node[node])


@dataclass
class Admission:
    """The requests of one prefill batch, and the room left for more.

    `chunk`: tokens that a rank may compute in a batch, or None; `prefill`: tokens that all may, if `chunk` is None.
    `reserved`: per rank, tokens that running requests are expected to need. `ready`: whether storage has ended with it.
    """

    caller: Caller
    tally: Tally
    chunk: int | None
    prefill: int
    reserved: list[float]
    ready: Callable[[Request], bool]
    chosen: list[list[Request]] = field(init=False)
    chunked: list[Request | None] = field(init=False)
    loads: list = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks = self.caller.allocator.dp_size
        self.chosen, self.chunked = [[] for _ in range(ranks)], [None] * ranks
        self.left = [self.chunk] * ranks

    def room(self, rank: int) -> float:
        """Tokens that can still be had on a rank: what is free, and what can be evicted."""
        free = self.caller.allocator.available_size(rank)
        return free + self.caller.size(self.caller.names[0], rank) - self.reserved[rank]

    def fits(self, request: Request) -> bool:
        """Whether there is room in the other pools of the model."""
        return True

    def go_on(self, request: Request) -> Request | None:
        """The next chunk of a request that is being computed; it isn't matched again. Itself, if it isn't the last."""
        request.fill_ids = request.origin_input_ids + request.output_ids
        begin = len(request.prefix_indices)
        request.extend_input_len = len(request.fill_ids) - begin
        left = self.left[request.rank]
        room = int(self.room(request.rank))
        most = room if left is None else min(room, left)
        if most <= 0:
            request.fill_ids = request.fill_ids[:begin]
            return request
        cut = request.extend_input_len > most
        request.extend_input_len = min(request.extend_input_len, most)
        request.fill_ids = request.fill_ids[: begin + request.extend_input_len]
        self._choose(request, request.extend_input_len, last=not cut)
        return request if cut else None

    def add(self, request: Request) -> bool:
        """Admit a request that waits, if there is room: match, lock, and load what is on host."""
        request.fill_ids = request.origin_input_ids + request.output_ids
        match(self.caller, request, request.adjust_max_prefix_ids(), req=request)
        if not self.ready(request):
            self.tally.waits += 1
            return False
        request.last_matched_prefix_len = len(request.prefix_indices)
        request.extend_input_len = len(request.fill_ids) - len(request.prefix_indices)
        total = request.extend_input_len + request.left()
        node = request.last_node
        if total >= self.room(request.rank) or not self.fits(request):
            return False
        lock = self.caller.lock(node)
        try:
            return total < self.room(request.rank) and self.fits(request) and self._add_locked(request)
        finally:
            self.caller.unlock(node, lock.to_dec_params())

    def _add_locked(self, request: Request) -> bool:
        rank, size = request.rank, self.caller.page_size
        left = self.left[rank]
        if left is not None and self._paged(request.extend_input_len) > left and left < size:
            return False
        if request.host_hit_length > 0:
            self._load(request)
        begin = request.last_matched_prefix_len = len(request.prefix_indices)
        length = self._paged(request.extend_input_len)
        if left is None and length >= self.prefill and any(self.chosen):
            return False
        last = left is None or length <= left
        if left is not None and not last:
            length = request.extend_input_len = left // size * size
            if length <= 0:
                return False
            request.fill_ids = request.fill_ids[: begin + length]
            self.chunked[rank] = request
        request.swa_uuid_for_lock = self.caller.lock(request.last_node).swa_uuid_for_lock
        self.tally.prompt_tokens += len(request.fill_ids)
        self.tally.cached_tokens += begin
        self._choose(request, length, last)
        return True

    def _load(self, request: Request) -> None:
        free = self.caller.allocator.available_size(request.rank)
        slots, node, plan = self.caller.load_back(request.last_host_node, request.host_hit_length, free)
        if not len(slots):
            self.tally.refused_loads += 1
            return
        self.loads.extend(plan)
        request.prefix_indices = np.concatenate([request.prefix_indices, slots])
        request.last_node = request.last_host_node = node
        request.host_hit_length -= len(slots)
        request.extend_input_len = len(request.fill_ids) - len(request.prefix_indices)
        self.tally.loaded_tokens += len(slots)

    def _choose(self, request: Request, length: int, last: bool) -> None:
        self.chosen[request.rank].append(request)
        self.tally.chunks += not last
        length = self._paged(length)
        self.reserved[request.rank] += length + (request.left() if last else 0)
        self.prefill -= length
        left = self.left[request.rank]
        if left is not None:
            self.left[request.rank] = left - length

    def _paged(self, tokens: int) -> int:
        return -(-tokens // self.caller.page_size) * self.caller.page_size
