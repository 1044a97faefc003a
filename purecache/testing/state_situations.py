"""Simple situations of a prefix cache for a model with recurrent layers, each with what must hold in it."""

import itertools
from typing import Any

from purecache.testing.situations import SITUATIONS
from purecache.testing.steps import EVERYTHING, Situation, Start, complete, find, prompt_of

_FOR_ANY_PREFIX = {"attributes", "life", "spaces", "deep"}
"""Names of situations in which prefixes are found at any page; here only where there is a state."""


def _state_attributes(start: Start) -> None:
    run: Any = start()
    assert run.caller.call("supports_recurrent") is True, "supports_recurrent must be True"
    active, wanted = run.caller.call("recurrent_extra_buffer_active"), run.interval is not None
    assert active is wanted, f"recurrent_extra_buffer_active must be {wanted}, not {active}"
    if wanted:
        interval = run.cache.recurrent_track_interval
        assert interval == run.interval, f"recurrent_track_interval must be {run.interval}, not {interval}"
    run.caller.call("sanity_check")


def _reach(run: Any, length: int) -> int:
    """The tokens of a request with KV for `length` tokens after which there is a state."""
    step = run.interval or 1
    return length // step * step


def _computed(run: Any, prompt: list[int], **keywords: Any) -> list[int]:
    """Run a request; the tokens with KV. With overlap, they are one more than it needed."""
    request = complete(run, prompt, **keywords)
    return (request.origin_input_ids + request.output_ids)[: request.kv_committed_len]


def _state_spaces(start: Start) -> None:
    run: Any = start()
    prompt = prompt_of(run, 2 * (run.interval or 1))
    known: list[list[int]] = []
    for extra_key, rank in itertools.product((None, "a", "b"), (None, *range(run.dp_size))):
        mine = f"extra_key={extra_key!r}, dp_rank={rank}"
        for tokens in (prompt, *known):
            found = len(find(run, tokens, extra_key, rank).device_indices)
            assert not found, f"nothing was computed for {mine}, but {found} tokens are found: of another namespace"
        known.append(_computed(run, prompt, extra_key=extra_key, dp_rank=rank))
        found = len(find(run, known[-1], extra_key, rank).device_indices)
        assert found or len(known) > 3, f"what was computed for {mine} is not found"


def _conversation(start: Start) -> None:
    """A prompt that goes on from an answer begins where the last state was."""
    run: Any = start()
    tokens = prompt_of(run, 3)
    for number in range(4):
        request = complete(run, tokens, 2 * run.page_size)
        computed = (request.origin_input_ids + request.output_ids)[: request.kv_committed_len]
        most, found = _reach(run, len(computed)), len(find(run, computed).device_indices)
        assert found == most, f"of a request with KV for {len(computed)} tokens, {most} must be cached, not {found}"
        before = run.tally.cached_tokens
        tokens = [*computed, 70 + number, 80 + number]
        complete(run, tokens)
        again = run.tally.cached_tokens - before
        assert again >= most, f"a prompt whose first {most} tokens are cached was computed from token {again}"


def _states_evicted(start: Start) -> None:
    """Without its state a prefix is not used; computed again, it is."""
    run: Any = start()
    prompt = prompt_of(run, 6)
    computed = _computed(run, prompt)
    most, full = _reach(run, len(prompt)), run.caller.sizes()[0][1]
    run.evict_states(EVERYTHING, None)
    run.check()
    assert not len(find(run, computed).device_indices), "a prefix was found whose state is gone"
    for _ in range(2):
        found = len(find(run, _computed(run, prompt)).device_indices)
        assert found >= most, f"computed again, {most} tokens must be cached, not {found}"
        twice = run.caller.sizes()[0][1] > full + 4 * run.page_size
        assert not twice, "KV of full attention is cached twice"


def _state_locked(start: Start) -> None:
    """A lock on a prefix protects its state: somebody is going to copy it."""
    run: Any = start()
    prompt = _computed(run, prompt_of(run, 6))
    found = find(run, prompt)
    length, node = len(found.device_indices), found.last_device_node
    locks = [run.caller.lock(node) for _ in range(2)]
    for lock in locks:
        run.evict_states(EVERYTHING, 0)
        run.caller.evict(EVERYTHING, 0)
        again = len(find(run, prompt).device_indices)
        assert again == length, f"of a locked prefix of {length} tokens, {again} are found"
        run.caller.unlock(node, lock.to_dec_params())
    run.evict_states(EVERYTHING, 0)
    run.check()
    assert not len(find(run, prompt).device_indices), "a prefix was found whose state is gone"


def _branches(start: Start) -> None:
    """Where a prompt branches off from a known one there is no state; the cache says how far that is."""
    run: Any = start()
    step = run.interval or run.page_size
    prompt = [number + 1 for number in range(3 * step + 1)]
    complete(run, prompt)
    request = run.submit([*prompt[: 2 * step], 90, 91, 92], 1)
    found = find(run, request.adjust_max_prefix_ids())
    length = len(found.device_indices)
    if length < 2 * step:
        told = found.recurrent_branching_seqlen
        assert told == 2 * step, f"a prompt branches off after {2 * step} tokens, not {told}"
    run.drain()


def _shared_state(start: Start) -> None:
    """Several requests begin from one state at once, and each goes on with its own."""
    run: Any = start()
    prompt = _computed(run, prompt_of(run, 4))
    requests = [run.submit([*prompt, 60 + number], number + 2) for number in range(4)]
    while not run.idle():
        run.step()
        run.check()
    run.drain()
    assert all(request.finished() for request in requests)


STATE_SITUATIONS: tuple[Situation, ...] = (
    *(each for each in SITUATIONS if each.__name__.removeprefix("_") not in _FOR_ANY_PREFIX),
    _state_attributes,
    _state_spaces,
    _conversation,
    _states_evicted,
    _state_locked,
    _branches,
    _shared_state,
)
