"""Simple situations of a prefix cache with a host tier; others have nothing to do in them."""

from purecache.testing.steps import EVERYTHING, Situation, Start, complete, find, prompt_of


def _host(start: Start) -> None:
    run = start()
    if not run.caller.with_host:
        return
    prompt = prompt_of(run, 3)
    for _ in range(2):
        complete(run, prompt)
    run.caller.call("check_hicache_events")
    run.check()
    run.caller.evict(EVERYTHING, None)
    run.check()
    found = find(run, prompt)
    assert not len(found.device_indices), "everything was evicted, but something is on device"
    assert found.host_hit_length, "a prefix that was computed twice and then evicted is not on host"
    loaded = run.tally.loaded_tokens
    complete(run, prompt)
    assert run.tally.loaded_tokens > loaded, "a prefix on host, with all of the device free, was not loaded"


def _full(start: Start) -> None:
    run = start()
    if not run.caller.with_host:
        return
    prompt = prompt_of(run, 8)
    for _ in range(2):
        complete(run, prompt)
    run.caller.call("check_hicache_events")
    run.check()
    run.caller.evict(EVERYTHING, None)
    complete(run, prompt_of(run, run.allocator.size_per_rank // run.page_size - 6, begin=2))
    found = find(run, prompt).host_hit_length
    free, evictable, _ = run.caller.sizes()[0]
    assert found > free, f"{found} tokens of a prefix that was computed twice and then evicted are on host"
    loaded = run.tally.loaded_tokens
    complete(run, prompt)
    room = f"with {free} slots free and {evictable} evictable"
    assert run.tally.loaded_tokens > loaded, f"{room}, a prefix of {found} tokens on host was not loaded"


def _overlap(start: Start) -> None:
    for seed in range(4):
        run = start(seed=seed)
        if not (run.overlap and run.caller.with_host):
            return
        prompts = [prompt_of(run, 4, 1, begin) for begin in range(1, 5)]
        for prompt in (*prompts, prompts[0]):
            complete(run, prompt)
        for number in range(6):
            # While the first batch is on its way, the second is prepared: something goes to the host, and comes back.
            run.submit(prompt_of(run, 2, 1, 10 + number), 2)
            run.step()
            run.submit([*prompts[number % 4], 1], 2)
            run.step()
            run.check()
            run.drain()


TIER_SITUATIONS: tuple[Situation, ...] = (_host, _full, _overlap)
