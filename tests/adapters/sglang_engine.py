"""A scheduler in small, of sglang's manners: it runs requests against a cache and knows whose KV is in which slot."""

from array import array
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

EVERYTHING = 1 << 30


class Engine:
    """The KV of a token depends on all tokens up to it (with EAGLE, on the next one too), so that errors show."""

    def __init__(self, world: Any, cache: Any, is_eagle: bool = False) -> None:
        self.world, self.cache, self.eagle = world, cache, int(is_eagle)
        self.rows, self.allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
        self.page_size = cache.page_size
        self.kv: dict[int, tuple] = {}
        self.running: list[Any] = []
        self._names = count()
        self.room = self.page_size
        """Tokens to evict when there is no page."""

    def row(self, req: Any, end: int) -> list[int]:
        return self.rows.req_to_token[req.req_pool_idx, :end].tolist()

    def key(self, tokens: list[int], extra_key: str | None = None, limit: int | None = None) -> Any:
        return self.world.key(array("q", tokens), extra_key, limit=limit)

    def found(self, tokens: list[int], extra_key: str | None = None, limit: int | None = None) -> Any:
        return self.cache.match_prefix(self.world.match_params(self.key(tokens, extra_key, limit)))

    def length(self, tokens: list[int], extra_key: str | None = None, limit: int | None = None) -> int:
        return len(self.found(tokens, extra_key, limit).device_indices)

    # ---- lives ----

    def match(self, tokens: list[int], **about: Any) -> Any:
        """A request that waits, with its prefix."""
        req = self.world.req(tokens, **about)
        req.rid = f"r{next(self._names)}"
        req.init_next_round_input(self.cache)
        self._expect(req, req.prefix_indices.tolist())
        return req

    def admit(self, req: Any) -> int:
        """Give it a row and a lock; returns the tokens that it has from the cache."""
        held = len(req.prefix_indices)
        with_row = req.req_pool_idx is not None  # sessions keep theirs
        self.cache.inc_lock_ref(req.last_node)
        if not with_row:
            self.rows.alloc([req])
        self.world.write(self.rows, req.req_pool_idx, 0, req.prefix_indices.tolist())
        req.kv_committed_len = req.kv_allocated_len = held
        self.running.append(req)
        return held

    def prefill(self, req: Any, chunk: int | None = None) -> None:
        """Compute up to `chunk` more tokens of the prompt; the rest in further calls."""
        tokens = len(req.full_untruncated_fill_ids)
        end = tokens if chunk is None else min(tokens, len(req.prefix_indices) + chunk)
        req.fill_len = end
        self.world.write(self.rows, req.req_pool_idx, 0, req.prefix_indices.tolist())
        self._compute(req, end)
        self.cache.cache_unfinished_req(req, **({} if end == tokens else {"chunked": True}))
        if end < tokens:  # a chunked request goes on from there
            assert req.prefix_indices.tolist() == self.row(req, end)

    def start(self, tokens: list[int], chunk: int | None = None, **about: Any) -> Any:
        req = self.match(tokens, **about)
        self.admit(req)
        self.prefill(req, chunk)
        while req.fill_len < len(req.full_untruncated_fill_ids):
            self.prefill(req, chunk)
        return req

    def decode(self, req: Any, token: int) -> None:
        """A token comes out of the last forward, and the next one computes its KV."""
        req.output_ids.append(token)
        self._compute(req, req.kv_committed_len + 1)

    def end(self, req: Any, is_insert: bool = True) -> None:
        self._mark(req)
        self.cache.cache_finished_req(req, is_insert=is_insert)
        self.running.remove(req)
        if req.req_pool_idx is None:  # its session keeps it
            return
        first, end = req.pop_overallocated_kv_cache()
        assert first == end
        self.rows.free(req)

    def retract(self, req: Any) -> None:
        self.end(req, is_insert=False)
        req.reset_for_retract()

    def run(self, tokens: list[int], outputs: tuple[int, ...] = (), **about: Any) -> Any:
        """A whole life; the last output has no KV."""
        req = self.start(tokens, **about)
        for token in outputs[:-1]:
            self.decode(req, token)
        req.output_ids.extend(outputs[-1:])
        self.end(req)
        return req

    # ---- room ----

    def evict(self, tokens: int = EVERYTHING) -> int:
        return self.cache.evict(self.world.evict_params(tokens)).num_tokens_evicted

    def sizes(self) -> tuple[int, int, int]:
        return self.allocator.available_size(), self.cache.evictable_size(), self.cache.protected_size()

    def check(self) -> None:
        """Whatever sglang checks while it runs, and that no slot is used twice."""
        rows = {req.req_pool_idx for req in self.running}
        own = sum(self._ceil(req.kv_allocated_len) - req.cache_protected_len for req in self.running)
        held = self.cache.session_held_tokens(rows)
        assert sum(self.sizes()) + held + own == self.allocator.size, (self.sizes(), held, own)
        free = self.allocator.free_pages.tolist()
        assert len(set(free)) == len(free)
        for req in self.running:
            row = self.row(req, req.kv_committed_len)
            assert not {slot // self.page_size for slot in row} & set(free), "a slot in use is free"
            self._expect(req, row[: req.cache_protected_len])

    def check_idle(self) -> None:
        assert not self.running
        self.check()
        assert self.cache.protected_size() == 0

    # ---- inside ----

    def _compute(self, req: Any, end: int) -> None:
        row = self.row(req, req.kv_committed_len)
        for place in range(req.kv_committed_len, end):
            row.append(row[-1] + 1 if place % self.page_size else self._page())
        self.world.write(self.rows, req.req_pool_idx, req.kv_committed_len, row[req.kv_committed_len :])
        req.kv_committed_len = req.kv_allocated_len = end
        self._mark(req)

    def _page(self) -> int:
        slots = self.allocator.alloc(self.page_size)
        if slots is None:
            self.evict(self.room)
            slots = self.allocator.alloc(self.page_size)
        return slots.tolist()[0]

    def _mark(self, req: Any) -> None:
        row, marks = self.row(req, req.kv_committed_len), self._marks(req, req.kv_committed_len)
        self._expect(req, row[: req.cache_protected_len])
        own = req.cache_protected_len
        self.kv.update(zip(row[own:], marks[own:], strict=True))

    def _marks(self, req: Any, end: int) -> list[tuple]:
        tokens = [*req.origin_input_ids, *req.output_ids]
        return [(req.extra_key, *tokens[: place + 1 + self.eagle]) for place in range(end)]

    def _expect(self, req: Any, slots: list[int]) -> None:
        assert [self.kv.get(slot) for slot in slots] == self._marks(req, len(slots)), "the KV of other tokens"

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size


class Lives:
    """The same random requests on each engine; `compare` gets a list of what each of them answered."""

    def __init__(self, engines: list[Engine], seed: int, compare: Callable[[list[Any]], Any]) -> None:
        self.engines, self.random, self.compare = engines, Random(seed), compare
        self.alive: list[list[Any]] = []
        self.waiting: list[list[Any]] = []
        self.longest = 4 * engines[0].page_size

    def run(self, steps: int) -> None:
        acts = {self.submit: 5, self.admit: 5, self.go_on: 9, self.end: 3, self.retract: 1, self.evict: 1}
        for act in self.random.choices(list(acts), list(acts.values()), k=steps):
            act()
            self.check()
        while self.alive:
            self.end()
        self.check()
        for engine in self.engines:
            engine.check_idle()
            engine.evict()
            assert engine.allocator.available_size() == engine.allocator.size

    def check(self) -> None:
        for engine in self.engines:
            engine.check()
        self.compare([engine.sizes() for engine in self.engines])

    def each(self, act: Callable[[Engine, Any], Any], reqs: list[Any]) -> None:
        self.compare([act(engine, req) for engine, req in zip(self.engines, reqs, strict=True)])

    def submit(self) -> None:
        choose = self.random
        begin = choose.choice([[1], [1], [1, 2]]) * self.longest
        tokens = begin[: choose.randint(1, self.longest)] + choose.choices([1, 2], k=choose.randint(0, 2))
        most = choose.choice([None, None, None, choose.randint(0, self.longest)])
        about = {"extra_key": choose.choice([None, None, "a"]), "priority": choose.randint(0, 2), "most": most}
        reqs = [engine.match(tokens, **about) for engine in self.engines]
        self.compare([len(req.prefix_indices) for req in reqs])
        self.waiting = [*self.waiting[-3:], reqs]

    def admit(self) -> None:
        if not self.waiting or len(self.alive) == 2:
            return
        reqs = self.waiting.pop(self.random.randrange(len(self.waiting)))
        for engine, req in zip(self.engines, reqs, strict=True):
            req.init_next_round_input(engine.cache)
        self.each(Engine.admit, reqs)
        self.prefill(reqs)  # in the same step, always
        self.alive.append(reqs)

    def prefill(self, reqs: list[Any]) -> None:
        size = self.engines[0].page_size
        chunk = self.random.choice([None, size, 2 * size + 1])
        self.each(lambda engine, req: engine.prefill(req, chunk), reqs)
        self.compare([(req.cache_protected_len, len(req.prefix_indices)) for req in reqs])

    def go_on(self) -> None:
        """A chunk of a prompt, or a token of an answer."""
        if not self.alive:
            return
        reqs, size = self.random.choice(self.alive), self.engines[0].page_size
        if reqs[0].fill_len < len(reqs[0].full_untruncated_fill_ids):
            self.prefill(reqs)
        elif reqs[0].kv_committed_len < self.longest + 2 * size:
            token = self.random.randint(1, 2)
            self.each(lambda engine, req: engine.decode(req, token), reqs)

    def end(self) -> None:
        if self.alive:
            reqs = self.alive.pop(self.random.randrange(len(self.alive)))
            is_insert = self.random.random() < 0.8
            self.each(lambda engine, req: engine.end(req, is_insert), reqs)

    def retract(self) -> None:
        if self.alive:
            reqs = self.alive.pop(self.random.randrange(len(self.alive)))
            self.each(Engine.retract, reqs)
            self.waiting.append(reqs)

    def evict(self) -> None:
        """Everything, since caches differ in how much more than was asked for they evict."""
        for engine in self.engines:
            engine.evict()
