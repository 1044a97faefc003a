"""Long seeded lives of the machine that is compared with the oracle, weighted so that every kind of event happens.

The hypothesis machine finds short sequences that no one thinks of; here whole requests follow each other, so that the
pools fill, values go to host and come back, and transfers of every pool end. What happened is counted and asserted.
"""

import random
from collections import Counter

import pytest
from comparison import FAILURES, PROMPTS, SPACES
from hybrid_support import three_tails, window_and_state
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.stateful import MultipleResults
from test_hybrid_oracle import HybridAgainstOracle

from purecache.answers import Load
from purecache.state import Policy, WritePolicy
from purecache.transitions import TransferKind

STEPS = 300
LAW = ["law"] * 3
LONG = [prompt for prompt in PROMPTS if len(prompt) > 1]
WEIGHTS = {
    "serve": 30,
    "match": 14,
    "evict": 14,
    "admit": 6,
    "finish": 6,
    "checkpoint": 5,
    "abort": 2,
    "fork": 5,
    "backup": 4,
    "demote": 6,
    "lock": 2,
    "unlock": 3,
    "allocate": 2,
    "release": 4,
    "tick": 12,
    "weather": 9,
}


class Life:
    """One machine, the bundles of its rules, and what has happened so far."""

    def __init__(self, config, write, seed):
        self.random, self.seen = random.Random(seed), Counter()
        self.machine = machine = HybridAgainstOracle()
        machine.begin(config, Policy.LRU, write)
        self.requests, self.receipts, self.loans = [], [], []
        heard, load_back = machine.journal.heard, machine.load_back

        def count_ended(completions):
            records = machine.journal.records
            for done in completions:
                record = records[done.operation, done.generation]
                self.seen[record.kind.name, record.pool in machine.tails, bool(done.ok.any())] += 1
            return heard(completions)

        def count_loaded(match, usable):
            answer = load_back(match, usable)
            self.seen["load back", isinstance(answer, Load)] += 1
            return answer

        machine.journal.heard, machine.load_back = count_ended, count_loaded

    def run(self, steps):
        names, weights = zip(*WEIGHTS.items(), strict=True)
        for name in self.random.choices(names, weights, k=steps):
            try:
                getattr(self, name)()
            except UnsatisfiedAssumption:
                continue
            self.seen[name] += 1
            self.machine.same_as_oracle()
        self.machine.fair_weather()
        self.machine.teardown()

    def prompt(self):
        return self.random.choice(LONG), self.random.choice([SPACES[0]] * 8 + list(SPACES))

    def some(self, items):
        if not items:
            raise UnsatisfiedAssumption
        return items.pop(self.random.randrange(len(items)))

    def keep(self, items, result):
        if not isinstance(result, MultipleResults):
            items.append(result)

    def coin(self):
        return self.random.random() < 0.5

    # ---- events ----

    def admit(self):
        wanted = [self.random.choice(["law", "law", self.random.randrange(128)]) for _ in LAW]
        self.keep(self.requests, self.machine.admit(*self.prompt(), self.coin(), wanted))

    def serve(self):
        while len(self.requests) > 2:
            self.abort()
        request = self.machine.admit(*self.prompt(), True, LAW)
        if not isinstance(request, MultipleResults):
            self.machine.finish(request, 0, 7, True)

    def finish(self):
        self.machine.finish(self.some(self.requests), self.random.randrange(4), self.random.randint(3, 7), True)

    def checkpoint(self):
        request = self.some(self.requests)
        self.requests.append(request)
        self.machine.checkpoint(request, self.random.randint(1, 7), 0, True)

    def abort(self):
        self.machine.abort(self.some(self.requests), self.coin())

    def match(self):
        self.machine.match(*self.prompt(), False, 0, True)

    def evict(self):
        pool, rank = self.random.randrange(4), self.random.choice([None, 0])
        self.machine.evict(self.random.randint(1, 5), rank, self.random.random() < 0.25, pool)

    def fork(self):
        self.keep(self.loans, self.machine.fork(*self.prompt(), self.random.randrange(2)))

    def backup(self):
        self.machine.backup(*self.prompt(), self.random.randrange(2))

    def demote(self):
        self.machine.demote(*self.prompt(), self.random.randint(1, 3))

    def lock(self):
        self.keep(self.receipts, self.machine.lock(*self.prompt(), self.random.randrange(2)))

    def unlock(self):
        self.machine.unlock(self.some(self.receipts))

    def allocate(self):
        self.keep(self.loans, self.machine.allocate(self.random.randint(1, 3), 0, self.random.randrange(4)))

    def release(self):
        self.machine.release(self.some(self.loans))

    def tick(self):
        self.machine.tick(self.coin())

    def weather(self):
        kind = self.random.choice(["fair", "hold", "fail", "one"])
        pool = self.random.randrange(4)
        if kind == "fair":
            self.machine.fair_weather()
        elif kind == "hold":
            kinds = self.random.choice([{TransferKind.BACKUP}, {TransferKind.LOAD_BACK}, set(TransferKind)])
            self.machine.hold(kinds, pool)
        elif kind == "fail":
            self.machine.fail(self.random.choice(sorted(FAILURES)), pool)
        else:
            self.machine.only_one_fails(self.random.choice(["backups", "loads", "deepest"]), pool)


@pytest.mark.filterwarnings("ignore:Using `assume` outside")
@pytest.mark.parametrize(
    ("config", "write"),
    [
        (window_and_state(), WritePolicy.WRITE_BACK),
        (three_tails(), WritePolicy.WRITE_THROUGH),
        (window_and_state(), WritePolicy.WRITE_THROUGH_SELECTIVE),
    ],
    ids=["window and state, write back", "three tails, write through", "window and state, selective"],
)
def test_long_lives_agree_with_the_oracle(config, write):
    life = Life(config, write, seed=f"{len(config.pools)} {write}")
    life.run(STEPS)
    seen = life.seen
    assert set(WEIGHTS) <= set(seen), set(WEIGHTS) - set(seen)
    assert seen["load back", True] >= 1, seen
    for kind in ("BACKUP", "LOAD_BACK"):
        for tail in (False, True):
            assert seen[kind, tail, True] >= 1, (kind, tail, seen)
    assert sum(count for key, count in seen.items() if len(key) == 3 and key[2] is False) >= 2, seen
