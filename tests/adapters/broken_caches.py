"""Prefix caches that break the contract in one way each. `BROKEN` says what the conformance kit must say of them."""

from types import SimpleNamespace

import numpy as np
import pytest
from plain_cache import Match, Node, PlainCache

BROKEN = []


def broken(message, **settings):
    """A cache that `check_prefix_cache(..., **settings)` must refuse with this message (a regular expression)."""

    def note(kind):
        BROKEN.append(pytest.param(kind, message, settings, id=kind.__name__))
        return kind

    return note


TIERED = {"host_pages": 12}


@broken("leaked: .* others, but the cache tells of")
class KeepsDuplicates(PlainCache):
    def insert(self, tokens, extra_key, dp_rank, slots):
        allocator = self.token_to_kv_pool_allocator
        self.token_to_kv_pool_allocator = SimpleNamespace(free=lambda slots, dp_rank: None)
        try:
            return super().insert(tokens, extra_key, dp_rank, slots)
        finally:
            self.token_to_kv_pool_allocator = allocator


@broken("evict freed .* tokens|locked prefix was evicted|into|but request r. reads it")
class EvictsLocked(PlainCache):
    def leaves(self, rank):
        nodes = [node for node in self.nodes() if node.slots is not None and rank in (None, node.rank)]
        return [node for node in nodes if all(child.slots is None for child in node.below.values())]


@broken("freed, but request r. reads it: the cache locks it", page_size=4)
class UnlocksTooEarly(PlainCache):
    def cache_unfinished_req(self, req):
        self.dec_lock_ref(req.last_node)
        self.evict(SimpleNamespace(num_tokens=4, dp_rank=req.dp_rank or 0))
        self.inc_lock_ref(req.last_node)
        super().cache_unfinished_req(req)


@broken("nothing was computed for .*dp_rank=.*those of another namespace", dp_size=2)
class MixesRanks(PlainCache):
    def walk(self, key):
        return super().walk(
            SimpleNamespace(token_ids=key.token_ids, extra_key=key.extra_key, dp_rank=key.dp_rank and 0)
        )


@broken("nothing was computed for extra_key=None, dp_rank=0, .*those of another namespace")
class TakesNoRankForRankZero(PlainCache):
    def walk(self, key):
        return super().walk(SimpleNamespace(**{**vars(key), "dp_rank": key.dp_rank or None}))


@broken("nothing was computed for extra_key='a', .*those of another namespace")
class MixesAdapters(PlainCache):
    def walk(self, key):
        return super().walk(SimpleNamespace(**{**vars(key), "extra_key": None}))


@broken("must cover all 9 tokens of fill_ids, not 8", page_size=4)
class LosesTheTail(PlainCache):
    def cache_unfinished_req(self, req):
        super().cache_unfinished_req(req)
        req.prefix_indices = req.prefix_indices[: req.cache_protected_len]


@broken("leaked", page_size=4)
class LeaksTheTail(PlainCache):
    def cache_finished_req(self, req, is_insert=True):
        allocator, size = self.token_to_kv_pool_allocator, self.page_size
        whole = SimpleNamespace(
            free=lambda slots, dp_rank: allocator.free(slots[: len(slots) // size * size], dp_rank=dp_rank)
        )
        self.token_to_kv_pool_allocator = whole
        try:
            super().cache_finished_req(req, is_insert)
        finally:
            self.token_to_kv_pool_allocator = allocator


@broken(r"\[twice\] rank 0: requests use .* slots of the cache")
class UnlocksTwice(PlainCache):
    def cache_finished_req(self, req, is_insert=True):
        if req.kv_committed_freed:
            self.dec_lock_ref(req.last_node)
        super().cache_finished_req(req, is_insert)


@broken("protected: a lock was not undone")
class NeverUnlocks(PlainCache):
    def cache_finished_req(self, req, is_insert=True):
        self.inc_lock_ref(req.last_node)
        super().cache_finished_req(req, is_insert)


@broken("is a view of its row")
class AnswersTheRow(PlainCache):
    def cache_unfinished_req(self, req):
        super().cache_unfinished_req(req)
        req.prefix_indices = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(req.fill_ids)]


@broken("found other slots; or its answer is not a copy|overwritten, and that changed", page_size=4)
class AnswersItsOwnArrays(PlainCache):
    def match_prefix(self, params):
        found = super().match_prefix(params)
        one = len(found.device_indices) == self.page_size
        return found._replace(device_indices=found.last_device_node.slots) if one else found


@broken("device_indices must be int32, not int64")
class AnswersLongIntegers(PlainCache):
    def match_prefix(self, params):
        found = super().match_prefix(params)
        return found._replace(device_indices=found.device_indices.astype(np.int64))


@broken("not whole pages of 4", page_size=4)
class AnswersPartsOfPages(PlainCache):
    def match_prefix(self, params):
        found = super().match_prefix(params)
        return found._replace(device_indices=found.device_indices[: max(len(found.device_indices) - 1, 0)])


@broken("wrong bytes: .* for its token", page_size=4, host=TIERED)
class CopiesAnotherPage(PlainCache):
    def page(self, node):
        return super().page(node) ^ (node.used % 5 == 0)


@broken("wrong bytes: .* for its token .* has", page_size=4, host=TIERED)
class LoadsNothing(PlainCache):
    def finish_load_back(self, plan):
        pass


@broken("must load all or nothing", page_size=4, host=TIERED)
class LoadsAPart(PlainCache):
    def init_load_back(self, node, length, mem_quota=None):
        slots, node, plan = super().init_load_back(node, length, mem_quota)
        return slots[: self.page_size], node, plan[:1]


@broken("init_load_back must answer", page_size=4, host=TIERED)
class AnswersPairs(PlainCache):
    def init_load_back(self, node, length, mem_quota=None):
        return super().init_load_back(node, length, mem_quota)[:2]


@broken("prefix on host, with all of the device free, was not loaded", page_size=4, host=TIERED)
class LoadsNever(PlainCache):
    def init_load_back(self, node, length, mem_quota=None):
        return np.empty(0, np.int32), node, []


@broken("host_hit_length must be 0|nodes of a match must be equal")
class FindsOnNoHost(PlainCache):
    def match_prefix(self, params):
        return super().match_prefix(params)._replace(last_host_node=Node(None, None, None))


@broken("evict.* must not raise; it raised KeyError")
class RaisesInEvict(PlainCache):
    def evict_page(self, node):
        raise KeyError(node.label)


@broken(r"evict\(.*\) freed 0 tokens of rank 0, but . were evictable")
class EvictsLater(PlainCache):
    late = ()

    def free_slots(self, slots, node):
        self.late = [*self.late, (slots, node.rank)]

    def match_prefix(self, params):
        for slots, rank in self.late:
            self.token_to_kv_pool_allocator.free(slots, dp_rank=rank)
        self.late = ()
        return super().match_prefix(params)


@broken("evict.* of rank 0, but|evict of rank . freed .* tokens per rank", dp_size=2, page_size=4)
class EvictsOfAnyRank(PlainCache):
    def leaves(self, rank):
        return super().leaves(None)


@broken("freed, but it is free already", dp_size=2)
class FreesOnAnotherRank(PlainCache):
    def free_slots(self, slots, node):
        self.token_to_kv_pool_allocator.free(slots, dp_rank=0)


@broken("is free|freed, but it is free already", page_size=4)
class AnswersWhatIsFree(PlainCache):
    def evict_page(self, node):
        slots = node.slots
        super().evict_page(node)
        if node.parent is self.root_node and len(self.nodes()) % 2:
            self.add(node).slots = slots


@broken("at most 2 of 3 tokens can be cached, not 3", is_eagle=True)
class IgnoresPairs(PlainCache):
    def labels(self, tokens):
        size = self.page_size
        return [tuple(tokens[at : at + size]) for at in range(0, len(tokens) - size + 1, size)]


@broken("must be true")
class HasALength(PlainCache):
    def __len__(self):
        return self.total_size()


@broken("reset must not free slots")
class FreesInReset(PlainCache):
    def reset(self):
        if self.clock:
            self.evict(SimpleNamespace(num_tokens=1 << 30, dp_rank=None))
        super().reset()


@broken("after reset, .* host pages are free", page_size=4, host=TIERED)
class KeepsHostPages(PlainCache):
    def reset(self):
        kept = getattr(self, "host", None)
        super().reset()
        self.host = kept or self.host


@broken("after reset, free=40, evictable=.*, protected=0")
class ForgetsNothing(PlainCache):
    def reset(self):
        if not self.clock:
            super().reset()


@broken("leaked", page_size=4)
class KeepsRetracted(PlainCache):
    def cache_finished_req(self, req, is_insert=True):
        if is_insert:
            return super().cache_finished_req(req)
        req.pop_committed_kv_cache()
        return self.dec_lock_ref(req.last_node)


@broken("doesn't come to last_node of")
class HidesNodes(PlainCache):
    def add(self, node):
        self.root_node.children = self.root_node.below
        return super().add(node)


@broken("too deep for the recursion of dfs-weight")
class ShowsAChain(PlainCache):
    def add(self, node):
        self.root_node.children, node.children = self.root_node.below, node.below
        return super().add(node)


@broken("must not free the row")
class FreesTheRow(PlainCache):
    def cache_finished_req(self, req, is_insert=True):
        super().cache_finished_req(req, is_insert)
        self.req_to_token_pool.free(req)


@broken("must call pop_committed_kv_cache")
class DoesNotPop(PlainCache):
    def cache_finished_req(self, req, is_insert=True):
        super().cache_finished_req(req, is_insert)
        req.kv_committed_freed = False


@broken("cache_protected_len is .*must be equal|its row has", page_size=4)
class ForgetsWhatIsProtected(PlainCache):
    def cache_unfinished_req(self, req):
        before = req.cache_protected_len
        super().cache_unfinished_req(req)
        req.cache_protected_len = before


@broken("(inc|dec)_lock_ref may only move tokens between evictable and protected")
class CountsWrong(PlainCache):
    def protected_size(self, dp_rank=0):
        return self.page_size * sum(node.locks for node in self.nodes() if node.rank == dp_rank)


@broken("deleted", page_size=4, overlap=True, host=TIERED)
class ReadsWhileAForwardRuns(PlainCache):
    def barrier(self):
        pass


@broken("the pool was written while a forward was under way|deleted", page_size=4, overlap=True, host=TIERED)
class LoadsWhileAForwardRuns(PlainCache):
    def init_load_back(self, node, length, mem_quota=None):
        slots, node, plan = super().init_load_back(node, length, mem_quota)
        self.finish_load_back(plan)
        return slots, node, plan


@broken("inc_lock_ref's answer must have delta")
class AnswersNoDelta(PlainCache):
    def inc_lock_ref(self, node):
        receipt = super().inc_lock_ref(node)
        del receipt.delta
        return receipt


@broken("last_device_node must be hashable")
class AnswersLists(PlainCache):
    def match_prefix(self, params):
        return Match(*super().match_prefix(params))._replace(last_device_node=[])


@broken("wrong bytes", page_size=4, host=TIERED)
class LoadsInAnotherOrder(PlainCache):
    def finish_load_back(self, plan):
        contents = [content for *_, content in plan][::-1]
        super().finish_load_back([(*each[:2], content) for each, content in zip(plan, contents, strict=True)])
