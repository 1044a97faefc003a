"""Simple situations of a prefix cache without a host tier, each with what must hold in it.

Their names are those of the functions.
"""

import itertools

import numpy as np

from purecache.testing.steps import EVERYTHING, Situation, Start, complete, find, prompt_of


def _attributes(start: Start) -> None:
    run = start()
    cache = run.cache
    wanted = {
        "page_size": run.page_size,
        "req_to_token_pool": run.rows,
        "token_to_kv_pool_allocator": run.allocator,
        "disable": False,
    }
    for name, value in wanted.items():
        assert hasattr(cache, name), f"the cache must have {name}"
        assert getattr(cache, name) == value, f"{name} must be {value!r}, not {getattr(cache, name)!r}"
    assert hasattr(cache, "root_node"), "the cache must have root_node"
    children = getattr(cache.root_node, "children", None)
    assert hasattr(children, "values"), f"root_node.children must have values(), like a dict: {children!r}"
    assert bool(cache), "an empty cache must be true: the scheduler would stop evicting (no __len__, no __bool__)"
    for method in ("supports_recurrent", "recurrent_extra_buffer_active"):
        assert run.caller.call(method) is False, f"{method} must be False"
    for method in ("pretty_print", "cache_unfinished_req", "cache_finished_req", "reset"):
        assert callable(getattr(cache, method, None)), f"the cache must have a method {method}"


def _empty(start: Start) -> None:
    run = start()
    run.check()
    for tokens in ([], [1], [1] * run.page_size, prompt_of(run, 3)):
        found = find(run, tokens)
        assert not len(found.device_indices), f"an empty cache has {len(found.device_indices)} tokens of {tokens}"
        assert found.last_device_node == run.cache.root_node, "where nothing is found, the node must be root_node"
    run.caller.evict(5, 0)
    run.caller.evict(5, None)
    root = run.cache.root_node
    locks = [run.caller.lock(root) for _ in range(3)]
    for lock in locks:
        run.caller.unlock(root, lock.to_dec_params())
    run.caller.unlock(root)
    run.caller.lock(root)
    complete(run, prompt_of(run, 2))


def _life(start: Start) -> None:
    run = start()
    for rest in range(min(run.page_size, 3)):
        request = complete(run, prompt_of(run, 2, rest + 1, rest + 1), 2)
        computed = (request.origin_input_ids + request.output_ids)[: request.kv_committed_len]
        found, most = len(find(run, computed).device_indices), run.caller.most(len(computed))
        assert found == most, f"of a request with KV for {len(computed)} tokens, {most} must be cached, not {found}"
        longer = [*computed, 5, 6]
        assert len(find(run, longer).device_indices) == most, "a longer key must find the same prefix"
        other = [*computed[: run.page_size + 1], *prompt_of(run, 2, 0, 77)]
        most = run.caller.most(run.page_size + 1)
        found = len(find(run, other).device_indices)
        assert found == most, f"a key with {run.page_size + 1} tokens in common must find {most}, not {found}"


def _chunks(start: Start) -> None:
    run = start(chunk=2 * start().page_size)
    long = prompt_of(run, 9, run.page_size - 1, begin=50)
    request = run.submit(long, 2)
    while not request.output_ids:
        run.step()
        run.check()
    run.drain()
    assert run.tally.chunks >= 4, "the scheduler of the kit has not computed chunks"
    for steps in range(1, 5):
        run.flush()
        request = run.submit(prompt_of(run, 9, run.page_size - 1, begin=50 + steps), 2)
        for _ in range(steps):
            run.step()
            run.check()
        run.abort(request)
        run.drain()


def _spaces(start: Start) -> None:
    run = start()
    prompt = prompt_of(run, 2)
    spaces = list(itertools.product((None, "a", "b"), (None, *range(run.dp_size))))
    for number, (extra_key, rank) in enumerate(spaces):
        found = len(find(run, prompt, extra_key, rank).device_indices)
        mine = f"extra_key={extra_key!r}, dp_rank={rank}"
        others = f"nothing was computed for {mine}, but {found} tokens are found: those of another namespace"
        assert not found, others
        complete(run, prompt, extra_key=extra_key, dp_rank=rank)
        found = len(find(run, prompt, extra_key, rank).device_indices)
        assert found or number >= 3, f"what was computed for {mine} is not found"


def _copies(start: Start) -> None:
    run = start()
    for pages in (1, 3):
        prompt = prompt_of(run, pages)
        complete(run, prompt)
        first = find(run, prompt).device_indices
        right = first.copy()
        first[:] = 0
        second = find(run, prompt).device_indices
        assert np.array_equal(second, right), "what match_prefix answered was overwritten, and that changed the cache"
    request = run.submit([*prompt, 1, 2, 3], 4)
    while not request.output_ids:
        run.step()
    kept, row = request.prefix_indices.copy(), request.req_pool_idx
    run.rows.req_to_token[row] *= -1
    same = np.array_equal(request.prefix_indices, kept)
    run.rows.req_to_token[row] *= -1
    assert same, "prefix_indices changes with the row of req_to_token: it must be a copy"
    request.prefix_indices[:] = 0
    assert np.array_equal(find(run, prompt).device_indices, right), "prefix_indices is the cache's own array"
    request.prefix_indices = kept
    run.drain()


def _duplicates(start: Start) -> None:
    run = start()
    prompts = [prompt_of(run, 3, 0), prompt_of(run, 2, 0), prompt_of(run, 3, 0)]
    requests = [run.submit(prompt, number + 1) for number, prompt in enumerate(prompts)]
    for _ in range(8):
        run.step()
        run.check()
    run.drain()
    # One whose key ends early, for its logprobs: what it computes is cached already.
    for length in (0, 1, run.page_size + 1):
        run.submit(requests[0].origin_input_ids, 2, logprob_start_len=length)
        run.drain()


def _locks(start: Start) -> None:
    run = start()
    prompt = prompt_of(run, 3)
    complete(run, prompt)
    found = find(run, prompt)
    length, node = len(found.device_indices), found.last_device_node
    locks = [run.caller.lock(node) for _ in range(2)]
    for lock in locks:
        protected = run.caller.size("protected_size", 0)
        assert protected == length, f"a prefix of {length} tokens is locked, but {protected} are protected"
        run.caller.evict(EVERYTHING, 0)
        again = find(run, prompt).device_indices
        assert np.array_equal(again, found.device_indices), "a locked prefix was evicted, or moved"
        run.caller.unlock(node, lock.to_dec_params())
    run.check()
    run.caller.evict(EVERYTHING, 0)
    left = run.caller.size("evictable_size", 0)
    assert not left, f"after everything was evicted, {left} tokens are evictable"


def _running(start: Start) -> None:
    run = start()
    prompt = prompt_of(run, 4)
    request = run.submit(prompt, 5)
    while not request.output_ids:
        run.step()
    run.caller.evict(EVERYTHING, 0)
    run.check()
    run.drain()
    second = run.submit([*prompt, 9], 3)
    run.step()
    run.caller.evict(EVERYTHING, None)
    run.check()
    run.drain()
    assert second.finished()


def _evict(start: Start) -> None:
    run = start()
    for begin, rank in itertools.product((1, 2, 3), range(run.dp_size)):
        complete(run, prompt_of(run, 3, 0, begin), dp_rank=rank)
    for rank in range(run.dp_size):
        for tokens in (1, run.page_size + 1, 0):
            run.caller.evict(tokens, rank)
            run.check()
        run.caller.evict(EVERYTHING, rank)
        left = run.caller.size("evictable_size", rank)
        assert not left, f"after everything of rank {rank} was evicted, {left} tokens are evictable"
    complete(run, prompt_of(run, 3))
    run.caller.evict(EVERYTHING, None)
    run.check()


def _retract(start: Start) -> None:
    run = start()
    prompt = prompt_of(run, 2)
    requests = [run.submit(prompt, 4), run.submit([*prompt, 7], 6), run.submit(prompt_of(run, 3, 0, 5), 5)]
    for _ in range(3):
        run.step()
        run.check()
    run.retract()
    run.check()
    assert sum(run.caller.size("protected_size", rank) for rank in range(run.dp_size)) == 0, (
        "all requests were retracted, but something is still protected"
    )
    run.drain()
    assert all(request.finished() for request in requests)


def _twice(start: Start) -> None:
    run = start(twice=1.0)
    prompt = prompt_of(run, 3)
    first, second = run.submit(prompt, 2), run.submit([*prompt, 1], 9)
    while not first.finished():
        run.step()
        run.check()
    run.caller.evict(EVERYTHING, 0)
    run.check()
    assert not second.finished()
    run.retract()
    run.check()
    run.drain()


def _reset(start: Start) -> None:
    run = start()
    prompt = prompt_of(run, 3)
    for _ in range(3):
        complete(run, prompt)
        assert run.flush()
        found = find(run, prompt)
        on_device = len(found.device_indices)
        assert not on_device, f"after reset, {on_device} tokens of an old prompt are on device"
        run.check()


def _order(start: Start) -> None:
    run = start(policy="dfs-weight", max_running=1)
    prompt = prompt_of(run, 3)
    complete(run, prompt)
    for cut in (1, run.page_size, run.page_size + 1, len(prompt)):
        run.submit([*prompt[:cut], 3, 4], 1)
        run.submit([*prompt[:cut], 5], 2)
    run.drain()


def _deep(start: Start) -> None:
    size = start().page_size
    run = start(tokens=1300 * size, policy="dfs-weight")
    prompt = prompt_of(run, 1200)
    complete(run, prompt)
    complete(run, prompt, 2)


SITUATIONS: tuple[Situation, ...] = (
    _attributes,
    _empty,
    _life,
    _copies,
    _spaces,
    _duplicates,
    _locks,
    _running,
    _evict,
    _retract,
    _chunks,
    _twice,
    _reset,
    _order,
    _deep,
)
