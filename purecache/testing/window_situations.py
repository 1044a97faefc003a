"""Simple situations of a prefix cache for a model with sliding windows, each with what must hold in it."""

from typing import Any

from purecache.testing.situations import SITUATIONS
from purecache.testing.steps import EVERYTHING, Situation, Start, complete, find, prompt_of

_OF_ONE_POOL = {"attributes", "deep"}
"""Names of situations that make no sense here."""


def _window_attributes(start: Start) -> None:
    run: Any = start()
    cache = run.cache
    assert cache.token_to_kv_pool_allocator is run.windows, "token_to_kv_pool_allocator must be the one of both pools"
    size = cache.sliding_window_size
    assert size == run.window, f"sliding_window_size must be {run.window}, not {size}"
    assert run.caller.call("supports_swa") is True, "supports_swa must be True"
    sizes = [run.caller.call(name) for name in ("full_lru_list_evictable_size", "swa_lru_list_evictable_size")]
    assert sizes == [0, 0], f"an empty cache has {sizes} tokens to evict"
    total = run.caller.call("total_size")
    assert total == (0, 0), f"total_size must be the tokens of both pools, not {total!r}"
    run.caller.call("sanity_check")


def _long_answer(start: Start) -> None:
    """What leaves the window of a request is freed while it decodes, and its prefix is found nevertheless."""
    run: Any = start()
    prompt = prompt_of(run, 2)
    request = run.submit(prompt, run.window + 4 * run.interval + 4 * run.page_size)
    while not request.finished():
        run.step()
        run.check()
    run.drain()
    assert run.slid > 0, "the scheduler of the kit has freed nothing that left a window"
    computed = (request.origin_input_ids + request.output_ids)[: request.kv_committed_len]
    found, most = len(find(run, computed).device_indices), run.caller.most(len(computed))
    assert found == most, f"of a request with KV for {len(computed)} tokens, {most} must be cached, not {found}"
    complete(run, [*computed, 7, 8, 9], 2)
    assert run.tally.cached_tokens >= most, "a prompt that goes on from a long answer was computed from the beginning"


def _windows_evicted(start: Start) -> None:
    """Without its window a prefix is not used; computed again, it is, with the KV of full attention there was."""
    run: Any = start()
    prompt = prompt_of(run, 6)
    complete(run, prompt)
    full = run.caller.sizes()[0][1]
    run.caller.evict_both(0, EVERYTHING, None)
    assert run.caller.sizes()[0][1] == full, "KV of full attention was evicted, but there was no need for it"
    assert not len(find(run, prompt).device_indices), "a prefix was found whose window is gone"
    run.check()
    for _ in range(2):
        complete(run, prompt)
        found, most = len(find(run, prompt).device_indices), run.caller.most(len(prompt))
        assert found == most, f"computed again, {most} tokens must be cached, not {found}"
        # Answers differ, and with overlap some of their KV is cached too.
        twice = run.caller.sizes()[0][1] > full + 4 * run.page_size
        assert not twice, "KV of full attention is cached twice"


def _windows_one_by_one(start: Start) -> None:
    """The oldest part of a window goes first; whatever is left, what is found has its window."""
    run: Any = start()
    prompts = [prompt_of(run, 5), prompt_of(run, 3) + prompt_of(run, 2, 1, 9), prompt_of(run, 4, 1, 5)]
    for prompt in prompts:
        complete(run, prompt)
    while run.caller.window_sizes()[0][1]:
        run.caller.evict_both(0, 1, 0)
        run.check()
    for prompt in prompts[::-1]:
        complete(run, prompt)
        complete(run, prompt[: 2 * run.page_size + 1])


def _window_locked(start: Start) -> None:
    """A lock on a prefix protects the window at its end, and no more of it."""
    run: Any = start()
    prompt = prompt_of(run, 6)
    complete(run, prompt)
    found = find(run, prompt)
    length, node = len(found.device_indices), found.last_device_node
    locks = [run.caller.lock(node) for _ in range(2)]
    for lock in locks:
        least = min(length, run.window - 1)
        protected = run.caller.window_sizes()[0][2]
        assert protected >= least, f"a window of {run.window} tokens is locked, but {protected} are protected"
        most = -(-run.window // run.page_size) * run.page_size + run.page_size
        assert protected <= most, f"a window of {run.window} tokens is locked, but {protected} are protected"
        run.caller.evict_both(EVERYTHING, EVERYTHING, 0)
        again = find(run, prompt).device_indices
        assert len(again) == length, f"of a locked prefix of {length} tokens, {len(again)} are found"
        run.caller.unlock(node, lock.to_dec_params())
    run.check()
    run.caller.evict_both(EVERYTHING, EVERYTHING, 0)
    assert [each[1:] for each in (run.caller.sizes()[0], run.caller.window_sizes()[0])] == [(0, 0)] * 2


def _running_windows(start: Start) -> None:
    """Evictions of both pools, step by step, while requests share a prefix that has lost its windows."""
    run: Any = start(max_running=3)
    prompt = prompt_of(run, 4)
    complete(run, prompt)
    for number in range(3):
        run.submit([*prompt[: (number + 2) * run.page_size], 50 + number], 2 * run.interval + number)
    while not run.idle():
        run.step()
        run.caller.evict_both(0, EVERYTHING, None)
        run.check()
    run.drain()


WINDOW_SITUATIONS: tuple[Situation, ...] = (
    *(each for each in SITUATIONS if each.__name__.removeprefix("_") not in _OF_ONE_POOL),
    _window_attributes,
    _long_answer,
    _windows_evicted,
    _windows_one_by_one,
    _window_locked,
    _running_windows,
)
