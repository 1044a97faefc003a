"""One run of sglang-jax's Engine with one cache, in a process of its own: a JSON `Run` on stdin, an `Answer` on stdout.

The Engine runs in one process on CPU, so a scheduler that dies (its leak check is fatal) takes this process with it.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from engine_watch import SETTLE_SECONDS, Events, Gate, counters, settle, sizes, watch

CACHES = {
    "chunk": {"disable_radix_cache": True},
    "radix": {},
    "unified": {"enable_unified_radix_tree": True},
    "hicache": {"hicache_storage": "none"},
    "purecache": {},
    "purecache_l2": {"hicache_storage": "none"},
}
"""The arguments of the Engine that choose each cache; the last two are installed by purecache's adapter first."""


@dataclass
class Run:
    """What to run. A round is a list of (conversation, new tokens of the user, tokens to generate), sent together.

    `heed_quota`: let HiCache see the scheduler's quota for load backs, free slots only, with which it loads nothing
    once the pool is full; without, it evicts for a load back, which is the most it can do. `attempt`: tells runs with
    equal requests apart.
    """

    model: str
    cache: str
    rounds: list[list[tuple[str, list[int], int]]]
    write_policy: str = "write_through"
    store: str | None = None
    heed_quota: bool = True
    page_size: int = 1
    pool_tokens: int = 512
    host_ratio: float = 4.0
    running: int = 4
    chunk: int = 64
    context: int = 512
    conservativeness: float = 1.0
    dp_size: int = 1
    overlap: bool = False
    flush: bool = False
    attempt: int = 1


@dataclass
class Answer:
    """Per round and request: generated tokens, prompt length, cached tokens. Sizes are in tokens, one dict per rank."""

    outputs: list[list[list[int]]] = field(default_factory=list)
    prompt_tokens: list[list[int]] = field(default_factory=list)
    cached_tokens: list[list[int]] = field(default_factory=list)
    round_seconds: list[float] = field(default_factory=list)
    start_seconds: float = 0.0
    cache_class: str = ""
    idle: list[dict[str, int]] = field(default_factory=list)
    flushed: list[dict[str, int]] | None = None
    events: dict[str, int] = field(default_factory=dict)
    counters: dict[str, Any] | None = None


def main() -> None:
    """Read the request, run it, and print the answer; whatever else is printed goes to stderr."""
    run = Run(**json.load(sys.stdin))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={run.dp_size}"
    print(json.dumps(asdict(perform(run))), file=answers, flush=True)
    os._exit(0)  # the Engine's threads have no end


def perform(run: Run) -> Answer:
    """Start an Engine and play all rounds; a conversation's prompt is all that was said in it."""
    start = time.perf_counter()
    with installed(run):
        engine = start_engine(run)
        scheduler = engine.scheduler_info["scheduler"]
        events, gate = Events(), Gate(scheduler)
        watch(scheduler, events, run.heed_quota)
        answer = Answer(start_seconds=time.perf_counter() - start, cache_class=type(scheduler.tree_cache).__name__)
        said: dict[str, list[int]] = {}
        for sentences in run.rounds:
            play(engine, gate, sentences, said, answer)
            settle(scheduler, gate)
        answer.events, answer.idle = asdict(events), gate.ask(lambda: sizes(scheduler))
        answer.counters = gate.ask(lambda: counters(scheduler.tree_cache))
        if run.flush:
            engine.flush_cache()
            settle(scheduler, gate)
            answer.flushed = gate.ask(lambda: sizes(scheduler))
        return answer


@contextmanager
def installed(run: Run) -> Iterator[None]:
    """Put purecache in, where the run asks for it; and a stand-in for the TPU kernel that HiCache needs."""
    if not run.cache.startswith("purecache"):
        if run.cache == "hicache":
            replace_tpu_kernel()
        yield
        return
    from purecache.adapters import sglang_jax
    from purecache.storage.tier import StorageOptions

    storage = StorageOptions(threshold=32, policy="wait_complete", timeout_base=SETTLE_SECONDS)
    sglang_jax.install(sglang_jax.Options(store=run.store, storage=storage if run.store else None))
    try:
        yield
    finally:
        sglang_jax.uninstall()


def start_engine(run: Run) -> Any:
    """An Engine with the arguments of `run`. Fixed paddings: one program for prompts, one for decoding."""
    from sgl_jax.srt.entrypoints.engine import Engine

    return Engine(
        model_path=run.model,
        device="cpu",
        dtype="float32",
        enable_single_process=True,
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        disable_precompile=True,
        disable_overlap_schedule=not run.overlap,
        page_size=run.page_size,
        max_total_tokens=run.pool_tokens,
        max_running_requests=run.running,
        context_length=run.context,
        chunked_prefill_size=run.chunk,
        schedule_conservativeness=run.conservativeness,
        hicache_ratio=run.host_ratio,
        hicache_write_policy=run.write_policy,
        precompile_token_paddings=[run.chunk * run.dp_size],
        precompile_bs_paddings=[run.running],
        dp_size=run.dp_size,
        tp_size=run.dp_size,
        random_seed=1,
        **CACHES[run.cache],
    )


def replace_tpu_kernel() -> None:
    """HiCache loads pages back with a kernel for TPU; elsewhere a scatter does the same."""
    import jax
    import jax.numpy as jnp
    from sgl_jax.srt.mem_cache import memory_pool

    def scatter(fused_kv: jax.Array, loc: jax.Array, kv_cache: jax.Array, page_size: int, *_: Any, **__: Any):
        """Write [tokens, 1, heads, packing, dim] to the slots `loc` (-1: none) of [pages, page_size, heads, ...]."""
        slots = jnp.where(loc < 0, kv_cache.size, loc)
        target = kv_cache.at[slots // page_size, slots % page_size]
        return target.set(fused_kv[:, 0], mode="drop", out_sharding=jax.typeof(kv_cache).sharding)

    memory_pool.update_fused_kv_cache_vectorized = scatter


def play(engine: Any, gate: Gate, sentences: list, said: dict[str, list[int]], answer: Answer) -> None:
    """Send one round, wait for all answers and note them."""
    prompts = [said.get(name, []) + tokens for name, tokens, _ in sentences]
    sampling = [{"temperature": 0.0, "max_new_tokens": number} for _, _, number in sentences]
    gate.expected = len(prompts)
    start = time.perf_counter()
    found = engine.generate(input_ids=prompts, sampling_params=sampling)
    answer.round_seconds.append(time.perf_counter() - start)
    for (name, _, _), prompt, one in zip(sentences, prompts, found, strict=True):
        said[name] = prompt + one["output_ids"]
    answer.outputs.append([one["output_ids"] for one in found])
    answer.prompt_tokens.append([one["meta_info"]["prompt_tokens"] for one in found])
    answer.cached_tokens.append([one["meta_info"]["cached_tokens"] for one in found])


if __name__ == "__main__":
    main()
