"""Forward, backward, anywhere: the state is always that of the cache at that event; differences and laws are found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recordings import AB, live, recorded, recording, same_arrays
from support import new_cache, serve, settle, tiny

import purecache.replay.player as player_module
import purecache.replay.recorder as recorder_module
from purecache.replay import Player, Recorder, Recording, Report, tree_as_text
from purecache.replay.digests import NAMES, state_digest
from purecache.state.layout import Account, Column, Tier

SHELVES = NAMES.index("shelves")


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A recording, and the state that the cache really had after each of its events."""
    path = tmp_path_factory.mktemp("known") / "life"
    cache, _ = new_cache(tiny(), check_laws=False)
    driver, states = cache._driver, [jax.tree.map(np.asarray, cache.state)]
    step = driver._step

    def stepped(program, command):
        step(program, command)
        states.append(jax.tree.map(np.asarray, cache.state))

    driver._step = stepped
    recorder = recording(cache, Recorder(path, tokens="plain", state_every=7))
    live(cache)
    assert recorder.close()
    return Recording(path), states


def test_every_state_is_found_again_in_any_order(known, monkeypatch):
    monkeypatch.setattr(player_module, "FIRST_GAP", 5)
    found, states = known
    player = Player(found, kept_bytes=1)
    assert len(states) == len(found) + 1
    order = [*range(len(states)), *reversed(range(len(states))), *np.random.default_rng(0).permutation(len(states))]
    for number in order:
        player.goto(int(number))
        assert player.at == number
        same_arrays(player.state, states[number], hashed=False)
        assert len(player._kept) <= 2


def test_steps_back_undo_steps_forward(known):
    found, states = known
    player = Player(found)
    assert player.event is None
    assert player.answer() is None
    with pytest.raises(IndexError):
        player.back()
    while player.at < len(found):
        assert player.forward()
        assert player.event.number == player.at
    with pytest.raises(IndexError):
        player.forward()
    player.back()
    player.back()
    same_arrays(player.state, states[-3], hashed=False)
    _, reply = player.answer()
    assert player.at == len(found) - 2
    assert reply is not None


def test_the_answer_at_an_event_is_what_the_cache_was_told(known):
    found, _ = known
    number = next(event.number for event in found if event.name == "allocate")
    player = Player(found)
    player.goto(number)
    _, reply = player.answer()
    assert reply.status == 0
    assert (reply.pages >= 0).sum() == found[number].arguments[1][0]


def test_one_wrong_answer_is_found(known, monkeypatch):
    found, _ = known
    player, event = Player(found), found[9]
    real = Recording.__getitem__
    broken = type(event)(event.number, event.name, event.size, event.arguments, b"\0" * 8)
    monkeypatch.setattr(Recording, "__getitem__", lambda self, n: broken if n == 9 else real(self, n))
    report = player.verify()
    assert (report.difference.event, report.difference.what, report.events) == (9, "answer", 9)


def test_one_wrong_bit_of_the_state_is_found(tmp_path, monkeypatch):
    """A bit that no answer shows flips in the recorded cache: the next digest of the state tells."""
    cache, _ = new_cache(tiny(), check_laws=False)
    recorder = recording(cache, Recorder(tmp_path / "life", state_every=4))
    serve(cache, AB)
    settle(cache)
    cache.drain()
    leaves, answer = cache._driver._current[0]
    shelves = np.array(leaves[SHELVES])
    shelves[0, 0] ^= 1
    leaves[SHELVES] = jax.device_put(jnp.array(shelves), leaves[SHELVES].sharding)
    cache._driver._current[:] = [(leaves, answer)]
    for _ in range(8):
        cache.peek([9, 9])
    assert recorder.close()
    report = Player(Recording(tmp_path / "life")).verify()
    assert report.difference.what == "state"
    assert 0 <= report.difference.equal_until < report.difference.event <= report.difference.equal_until + 4


def test_the_first_event_that_breaks_a_law_is_found(known, monkeypatch):
    found, _ = known
    assert Player(found).first_violation() is None
    bad = 23
    real = Player.violations
    monkeypatch.setattr(Player, "violations", lambda self: ["broken"] if self.at >= bad else real(self))
    for every in (1, 4, 1000):
        player = Player(found)
        assert player.first_violation(every) == (bad, ["broken"])
        assert player.at == bad


def test_laws_are_looked_for_in_the_replayed_state(known):
    found, _ = known
    player = Player(found)
    player.goto(12)
    leaves = [np.array(leaf) for leaf in player._leaves]
    layout = found.config.layout
    leaves[6][layout.account(Account.FREE, Tier.DEVICE, 0)] += 1
    player._leaves = leaves
    assert any("accounts are true" in law for law in player.violations())


def test_digests_of_states_see_every_array(known):
    found, states = known
    state, layout = states[20], found.config.layout
    leaves = [np.array(getattr(state, name)) for name in NAMES]
    for hashed in (False, True):
        digest = state_digest(leaves, layout, hashed=hashed)
        for number, leaf in enumerate(leaves):
            changed = [each.copy() for each in leaves]
            changed[number].reshape(-1)[0] += 1
            same = state_digest(changed, layout, hashed=hashed) == digest
            assert same == (hashed and number in (0, 2)), (number, leaf.shape)
        secret = [each.copy() for each in leaves]
        secret[1][Column.NAMESPACE + 3] += 1
        secret[6][-1] += 1
        assert (state_digest(secret, layout, hashed=hashed) == digest) == hashed
        secret[1][Column.FREE_NODES, 0] += 1
        assert state_digest(secret, layout, hashed=hashed) != digest


def test_trees_as_text(known):
    found, states = known
    sizes = []
    for state in states:
        text = tree_as_text(state, found.config)
        nodes = int((np.asarray(state.nodes)[Column.PARENT, : found.config.layout.nodes] >= 0).sum())
        assert sum(int(line.split(" page")[0].split()[-1]) for line in text.splitlines() if "tokens" in line) == nodes
        sizes.append(nodes)
    assert max(sizes) > 3
    busiest = states[int(np.argmax(sizes))]
    assert "nodes more" in tree_as_text(busiest, found.config, most_lines=1)
    assert "receipt" in "".join(tree_as_text(state, found.config) for state in states)
    assert "operation" in "".join(tree_as_text(state, found.config) for state in states)


def test_nothing_is_lost_between_programs_of_one_size(tmp_path, monkeypatch):
    """Events that fill frames to the brim."""
    monkeypatch.setattr(recorder_module, "FRAME_EVENTS", 1)
    _, found = recorded(tmp_path / "life", state_every=1)
    report = Player(found).verify()
    assert report == Report(report.events, len(found) + 1, report.seconds, report.by_name, None)
    assert sum(report.by_name.values()) == len(found)
