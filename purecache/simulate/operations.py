"""The operations of a plan: each draws what it needs, and does nothing where there is nothing to do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

import purecache.simulate.requests as requests
from purecache.answers import CacheError, Refusal
from purecache.simulate.fate import Fault, Finding
from purecache.simulate.plan import NAMES
from purecache.simulate.process import Process
from purecache.simulate.request import Request
from purecache.state.pools import ANCHOR
from purecache.storage import Progress

NAMESPACES = (None, None, "a")
MANY_REQUESTS = 12


def stems_of(seed: int, longest: int) -> list[list[int]]:
    """The prompts that a run's conversations begin with: many share their beginnings."""
    dice, stems = random.Random(seed), [[]]
    for _ in range(9):
        base = dice.choice(stems)
        shared = base[: dice.randint(0, len(base))]
        length = dice.randint(len(shared), longest)
        stems.append(shared + [dice.randrange(3) for _ in range(length - len(shared))])
    return stems[1:]


class Workload:
    """What schedulers do with the caches of a run."""

    def __init__(self, processes: list[Process], seed: int) -> None:
        self.processes, self.fate = processes, processes[0].fate
        self.longest = processes[0].profile.longest
        self.stems = stems_of(seed, self.longest)
        for process in processes:
            process.history = processes[0].history  # a conversation may go on elsewhere

    def act(self, name: str, seed: int) -> Process:
        """Carry out one operation of a plan; returns the process it was about."""
        self.fate.begin(seed)
        process = self.processes[self.fate.below(len(self.processes))]
        _TABLE[name](self, process)
        return process

    # ---- prompts -------------------------------------------------------------------------------------------------

    def prompt(self, process: Process) -> tuple[list[int], dict[str, Any]]:
        """Tokens and their namespace and rank: the beginning of a stem or of an earlier answer, and something new."""
        fate = self.fate
        bases = process.history if process.history and fate.coin(0.3) else self.stems
        base = bases[fate.below(len(bases))]
        tokens = base[: 1 + fate.below(len(base))] if base and fate.coin(0.4) else list(base)
        tokens = tokens + [fate.below(3) for _ in range(1 + fate.below(process.page_size + 1))]
        rank = None if fate.coin(0.05) else fate.below(process.config.ranks)
        return tokens[: self.longest], {"namespace": NAMESPACES[fate.below(3)], "rank": rank}

    def pick(self, process: Process) -> Request | None:
        """One of the running requests."""
        return process.requests[self.fate.below(len(process.requests))] if process.requests else None

    def _admit(self, process: Process) -> None:
        if process.receipts_left < 2 or len(process.requests) >= MANY_REQUESTS:
            return
        if process.queue and self.fate.coin(0.6):
            tokens, space = process.queue.pop(0)
        else:
            tokens, space = self.prompt(process)
        requests.admit(process, tokens, space)

    def _loaded(self, process: Process) -> None:
        loadings = process.books.loadings
        if not loadings:
            return
        request, match, loading = loadings[self.fate.below(len(loadings))]
        if process.receipts_left < 1:
            return
        answer = process.call("loaded", loading)
        if answer is not None:
            loadings.remove((request, match, loading))
            requests.loaded(process, request, match, answer)

    def _extend(self, process: Process) -> None:
        if (request := self.pick(process)) is not None:
            requests.extend(process, request, 1 + self.fate.below(3 * process.page_size))

    def _decode(self, process: Process) -> None:
        request = self.pick(process)
        if request is not None and request.filled == len(request.tokens) < self.longest:
            request.tokens = [*request.tokens, self.fate.below(3)]
            requests.extend(process, request, 1)

    def _checkpoint(self, process: Process) -> None:
        request = self.pick(process)
        if request is not None and process.pages_of(request.filled):
            requests.checkpoint(process, request)

    def _finish(self, process: Process) -> None:
        if (request := self.pick(process)) is not None:
            requests.read(process, request)
            requests.finish(process, request)

    def _abort(self, process: Process) -> None:
        if (request := self.pick(process)) is not None:
            requests.take_off(process, request, again=False)

    def _retract(self, process: Process) -> None:
        if (request := self.pick(process)) is not None:
            requests.take_off(process, request, again=True)

    def _read(self, process: Process) -> None:
        if (request := self.pick(process)) is not None:
            requests.read(process, request)

    def _match(self, process: Process) -> None:
        tokens, space = self.prompt(process)
        match = process.call("match" if self.fate.coin() else "peek", tokens, **space)
        process.check_match("match", space["rank"] or 0, match, process.prints(space["namespace"]).of(tokens))
        if self.fate.coin(0.1):
            self._match_many(process, space)

    def _match_many(self, process: Process, space: dict[str, Any]) -> None:
        prompts = [self.prompt(process)[0] for _ in range(1 + self.fate.below(4))]
        for tokens, match in zip(prompts, process.call("match_many", prompts, **space), strict=True):
            words = process.prints(space["namespace"]).of(tokens)
            process.check_match("match_many", space["rank"] or 0, match, words)

    # ---- the cache -----------------------------------------------------------------------------------------------

    def _tick(self, process: Process) -> None:
        self.fate.now += 1
        process.call("tick")

    def _lock(self, process: Process) -> None:
        if process.receipts_left > 2:
            tokens, space = self.prompt(process)
            node = process.call("peek", tokens, **space).device_node
            process.books.locks.append(process.call("lock", node))

    def _unlock(self, process: Process) -> None:
        if locks := process.books.locks:
            receipt = locks.pop(self.fate.below(len(locks)))
            process.call("unlock", receipt)
            process.books.void.append(receipt)

    def _backup(self, process: Process) -> None:
        tokens, space = self.prompt(process)
        process.call("backup", process.call("peek", tokens, **space).node)

    def _evict(self, process: Process) -> None:
        self._evict_from(process, "evict")

    def _evict_host(self, process: Process) -> None:
        self._evict_from(process, "evict_host")

    def _evict_from(self, process: Process, name: str) -> None:
        fate, pools = self.fate, process.config.pool_names
        pool = pools[fate.below(len(pools))] if fate.coin() else ANCHOR
        process.call(name, 1 + fate.below(4), rank=fate.below(process.config.ranks), pool=pool)

    def _mistake(self, process: Process) -> None:
        """What a caller must not do raises, and changes nothing."""
        fate, void = self.fate, process.books.void
        tokens, _ = self.prompt(process)
        calls: list[Callable[[], Any]] = [
            lambda: process.call("release", np.array([fate.below(8)] * 2, np.int32)),
            lambda: process.call("release", np.array([1 << 20], np.int32)),
            lambda: process.call("admit", tokens, namespace=None, rank=process.config.ranks),
        ]
        if void:
            calls += [lambda: process.call("unlock", void[-1]), lambda: process.call("abort", [], void[0])]
        try:
            calls[fate.below(len(calls))]()
        except CacheError:
            return
        raise Finding("mistake", "a mistake of the caller did not raise")

    def _reset(self, process: Process) -> None:
        """Forget every prefix; requests keep their pages until they give them back one by one."""
        process.call("reset")
        books = process.books
        self.fate.seen["resets"] += 1
        books.void += [each.receipt for each in process.requests] + books.locks
        for request in process.requests:
            self._give_back(process, request)
        process.requests.clear()
        books.loadings, books.locks, books.prefetches = [], [], []
        del books.void[:-6]

    def _give_back(self, process: Process, request: Request) -> None:
        lent = {ANCHOR: request.pages[request.shared :]}
        lent |= {pool: sorted(pages) for pool, pages in request.own.items()}
        lent |= {pool: [slot] for pool, slot in request.slots.items()}
        for pool, pages in lent.items():
            process.call("release", np.array(pages, np.int32), rank=request.rank, pool=pool)

    def _restart(self, process: Process) -> None:
        """The process dies: nobody is told."""
        if Fault.RESTART in self.fate.faults:
            self.fate.injected[Fault.RESTART] += 1
            process.start()

    # ---- storage -------------------------------------------------------------------------------------------------

    def _prefetch(self, process: Process) -> None:
        tokens, space = self.prompt(process)
        if process.history and self.fate.coin():
            tokens = process.history[self.fate.below(len(process.history))]
        self.fate.events += 1
        started = process.tier.prefetch(tokens, **space)
        if not isinstance(started, Refusal):
            process.books.prefetches.append((started, tokens, space))

    def _progress(self, process: Process) -> None:
        prefetches = process.books.prefetches
        if not prefetches:
            return
        self.fate.events += 1
        entry = prefetches[self.fate.below(len(prefetches))]
        prefetch, tokens, space = entry
        if self.fate.coin(0.1):
            process.tier.abort(prefetch)
        if process.tier.progress(prefetch, self.fate.seconds()) is not Progress.NOT_YET:
            self.fate.seen["tokens_prefetched"] += prefetch.loaded
            prefetches.remove(entry)
            process.queue.append((tokens, space))  # what was waited for is asked for
            del process.queue[:-8]

    # ---- the end -------------------------------------------------------------------------------------------------

    def end(self, drained: bool) -> None:
        """Check all laws; then, if `drained`, end everything in good weather, and check that nothing is left."""
        for process in self.processes:
            process.check_laws()
        if not drained:
            return
        self.fate.begin(0)
        self.fate.calm = True
        for process in self.processes:
            books = process.books
            for request in list(process.requests):
                requests.read(process, request)
                requests.finish(process, request)
            for request, _, _ in books.loadings:
                process.call("abort", [], request.receipt, rank=request.rank)
            for receipt in books.locks:
                process.call("unlock", receipt)
            books.loadings, books.locks = [], []
            for prefetch, _, _ in books.prefetches:
                process.tier.abort(prefetch)
            process.check_empty()


_TABLE: dict[str, Callable[[Workload, Process], None]] = {name: getattr(Workload, f"_{name}") for name in NAMES}
