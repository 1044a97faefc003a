"""The simulator finds mistakes that are made on purpose, and makes the runs that show them short."""

import numpy as np
import pytest

from purecache.answers import Load, Refusal
from purecache.cache import PrefixCache
from purecache.driver import Driver
from purecache.effects import Completion
from purecache.simulate import ALL, make_plan, run
from purecache.simulate.plane import SimulatedPlanes, SimulatedPool
from purecache.simulate.shrink import shrink
from purecache.storage import keytable, tier
from purecache.stores import envelope
from purecache.transitions import TransferKind

pytestmark = pytest.mark.xdist_group("hybrid-tree")  # its programs are compiled once
SEEDS, EVENTS = range(40, 52), 1500


def failed_pages_count_as_arrived(patch):
    whole = SimulatedPool._completions

    def lying(self, ended):
        done = whole(self, ended)
        for each in done:
            each.ok[:] = True
        return done

    patch.setattr(SimulatedPool, "_completions", lying)


def a_transition_publishes_what_failed(patch):
    end = Driver.end

    def careless(self, name, operation, generation, ok, *where):
        loads = name.startswith("finish_load_back")
        return end(self, name, operation, generation, np.ones(len(ok), bool) if loads else ok, *where)

    patch.setattr(Driver, "end", careless)


def a_load_back_ends_before_its_bytes_are_there(patch):
    start = SimulatedPlanes.start

    def hasty(self, transfer):
        start(self, transfer)
        if transfer.kind is TransferKind.LOAD_BACK:
            self._reported.append(Completion(transfer.operation, transfer.generation, transfer.kind, np.ones(len(transfer.target), bool), transfer.pool, transfer.rank, transfer.target))  # fmt: skip # noqa: E501

    def early(self, done):
        done = [*self._reported, *done]
        self._reported.clear()
        return done

    patch.setattr(SimulatedPlanes, "start", hasty)
    patch.setattr(SimulatedPlanes, "_noted", early)


def a_host_page_is_read_after_it_was_given_to_another(patch):
    """A load back does not hold its host pages: another transfer writes into them before they are read."""
    launch = SimulatedPool.launch

    def late(self, transfer):
        launch(self, transfer)
        if transfer.kind is TransferKind.BACKUP:
            for flight in self._flights[TransferKind.LOAD_BACK]:
                flight.source = np.resize(self._flights[TransferKind.BACKUP][-1].target, len(flight.source))
                flight.words = None

    patch.setattr(SimulatedPool, "launch", late)


def checksums_of_stored_pages_are_not_looked_at(patch):
    patch.setattr(envelope, "is_intact", lambda key, buffer: True)


def namespaces_share_keys_in_storage(patch):
    patch.setattr(tier, "seed_of", lambda namespace: None)
    patch.setattr(keytable, "seed_of", lambda namespace: None)


def refusals_are_taken_for_loads(patch):
    loaded = PrefixCache.load_back

    def hopeful(self, match):
        answer = loaded(self, match)
        if isinstance(answer, Refusal) and not self.config.pools:
            return Load(self._driver.pages_above(match.node.number, match.host_length // self.config.page_size))
        return answer

    patch.setattr(PrefixCache, "load_back", hopeful)


def a_completion_gets_lost(patch):
    poll = SimulatedPlanes.poll

    def forgetful(self):
        done = poll(self)
        return done[1:] if len(done) > 1 else done

    patch.setattr(SimulatedPlanes, "poll", forgetful)


def a_checkpoint_forgets_its_lock(patch):
    checkpoint = PrefixCache.checkpoint

    def unlocking(self, tokens, pages, receipt, **options):
        done = checkpoint(self, tokens, pages, receipt, **options)
        self._run("unlock", 0, *receipt)
        return done

    patch.setattr(PrefixCache, "checkpoint", unlocking)


MISTAKES = [
    failed_pages_count_as_arrived,
    a_transition_publishes_what_failed,
    a_load_back_ends_before_its_bytes_are_there,
    a_host_page_is_read_after_it_was_given_to_another,
    checksums_of_stored_pages_are_not_looked_at,
    namespaces_share_keys_in_storage,
    refusals_are_taken_for_loads,
    a_completion_gets_lost,
    a_checkpoint_forgets_its_lock,
]


def first_failure():
    outcomes = (run(make_plan(seed, EVENTS, ALL, 2, "small")) for seed in SEEDS)
    return next((outcome for outcome in outcomes if outcome.failure is not None), None)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_found(mistake, monkeypatch):
    mistake(monkeypatch)
    outcome = first_failure()
    assert outcome is not None
    monkeypatch.undo()
    assert run(outcome.plan).failure is None  # so it was this mistake


@pytest.mark.parametrize("mistake", [failed_pages_count_as_arrived, a_checkpoint_forgets_its_lock])
def test_a_failing_run_shrinks(mistake, monkeypatch):
    mistake(monkeypatch)
    outcome = first_failure()
    small = shrink(outcome, seconds=60)
    assert small.failure is not None
    assert len(small.plan.operations) < 40
    assert run(small.plan, check_every=1).failure is not None
    monkeypatch.undo()
    assert run(small.plan, check_every=1).failure is None
