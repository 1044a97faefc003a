"""Models ready to serve, as the flags of the demo ask for them: the programs, and a memory without and with a cache."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from purecache.demo.cached import CachedMemory
from purecache.demo.engine import Geometry, Programs
from purecache.demo.gemma import gemma_config, gemma_weights
from purecache.demo.gemma_tokenizer import GemmaTokenizer
from purecache.demo.hybrid_cached import HybridCachedMemory
from purecache.demo.hybrid_config import KV, STATE, WINDOW, HybridConfig, HybridWeights
from purecache.demo.hybrid_engine import HybridPrograms
from purecache.demo.hybrid_memory import HybridPlainMemory, window_law
from purecache.demo.hybrid_sample import sample_config, sample_weights
from purecache.demo.memory import Memory, PlainMemory, pages_for
from purecache.demo.scheduler import Model
from purecache.demo.shelf import open_shelf, record_of
from purecache.demo.tokenizer import ByteTokenizer, ChatTokenizer, Tokenizer
from purecache.demo.weights import ARCHITECTURE, DemoError, find_model, load_weights, model_config, open_model
from purecache.state.config import CacheConfig

SAMPLE = "hybrid"
"""The name, in place of a path, of the model with random weights."""
LEAST_WINDOW_TOKENS = 1024
SIZES = {"small": (1536, 8192), "recorded": (16384, 32768), "hybrid": (4096, 16384)}
"""Tokens of L1 and L2, by what is served."""


class Cached(Memory, Protocol):
    """A memory with a cache, and what the report wants to know of it."""

    @property
    def bytes_to_host(self) -> int:
        """Bytes copied to L2."""
        ...

    @property
    def bytes_to_device(self) -> int:
        """Bytes loaded from L2."""
        ...

    def warm(self, longest: int, progress: Callable[[int, int, str], None]) -> None:
        """Compile the programs of the cache for requests of up to `longest` tokens."""
        ...

    def settle(self) -> dict[str, int]:
        """Wait for copies under way and return the counters of the cache."""
        ...


@dataclass(frozen=True)
class Stage:
    """One model with all that serving it takes."""

    name: str
    tokenizer: Tokenizer
    vocabulary: int
    programs: Model
    plain: Callable[[], Memory]  # makes the memory without a cache
    cached: Callable[[int, bool], Cached]
    """Makes the one with a cache: for requests of up to so many tokens; whether steps overlap with load backs."""
    sizes: Mapping[str, int]  # for the report


def open_stage(options: argparse.Namespace, say: Callable[[str], None]) -> Stage:
    """Read the model that the flags name. Raises DemoError or ConfigError for what is missing or does not fit."""
    geometry = Geometry(options.page_size, options.chunk, options.batch, options.context)
    if options.model == SAMPLE:
        config = sample_config(options.context)
        return _hybrid(options, geometry, SAMPLE, ByteTokenizer(), config, sample_weights(config))
    path = find_model(options.model)
    say(f"reading {path.name}")
    metadata, tensors = open_model(path)
    if metadata[ARCHITECTURE] == "llama":
        return _llama(options, geometry, path, metadata, tensors, say)
    tokenizer = GemmaTokenizer(metadata)
    config = gemma_config(metadata, len(metadata["tokenizer.ggml.tokens"]))
    return _hybrid(options, geometry, path.name, tokenizer, config, gemma_weights(tensors, config))


def cache_config(options: argparse.Namespace, served: str) -> CacheConfig:
    """Turn the flags into the configuration of the kv pool; sizes in tokens become whole pages."""
    device, host = SIZES["recorded" if options.tokens else served]
    device = device if options.device_tokens is None else options.device_tokens
    host = host if options.host_tokens is None else options.host_tokens
    return CacheConfig(
        page_size=options.page_size,
        device_pages=pages_for(device, options.page_size),
        host_pages=pages_for(host, options.page_size),
        policy=options.policy,
        write=options.write,
        load_back_threshold=options.load_back_threshold,
    )


def _llama(
    options: argparse.Namespace,
    geometry: Geometry,
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    say: Callable[[str], None],
) -> Stage:
    config, model = cache_config(options, "small"), model_config(metadata)
    # Runs that are compared must find the same in storage: nothing.
    store = "none" if options.load_back == "both" else options.store
    tokenizer = ChatTokenizer(metadata)
    programs = Programs(load_weights(tensors, model), model, geometry)

    def cached(longest: int, overlap: bool) -> CachedMemory:
        return CachedMemory.build(
            config,
            programs.pool(config.device_pages),
            longest,
            shelf=lambda page_bytes: open_shelf(store, page_bytes, say),
            naming=record_of(path, model, geometry),
            copies=options.copies,
            overlap=overlap,
        )

    return Stage(
        name=path.name,
        tokenizer=tokenizer,
        vocabulary=model.vocabulary,
        programs=programs,
        plain=lambda: PlainMemory(programs.pool(config.device_pages)),
        cached=cached,
        sizes={"device_pages": config.device_pages, "host_pages": config.host_pages},
    )


def _hybrid(
    options: argparse.Namespace,
    geometry: Geometry,
    name: str,
    tokenizer: Tokenizer,
    model: HybridConfig,
    weights: HybridWeights,
) -> Stage:
    if options.store not in (None, "none"):
        raise DemoError(f"--store {options.store}: the demo has no storage tier for hybrid models.")
    if options.snapshot < 1 or options.snapshot % geometry.page_size:
        raise DemoError(
            f"--snapshot must be a multiple of the page size, {geometry.page_size}, not {options.snapshot}."
        )
    config = cache_config(options, "hybrid")
    device = _device_pages(options, geometry, model, config)
    # Host memory is to device memory in every pool as it is in kv.
    host = {pool: pages * config.host_pages // config.device_pages for pool, pages in device.items()}
    programs = HybridPrograms(weights, model, geometry)

    def cached(longest: int, overlap: bool) -> HybridCachedMemory:
        pools = programs.pools(device)
        return HybridCachedMemory.build(
            config,
            model,
            geometry,
            pools,
            host,
            options.snapshot,
            longest,
            copies=options.copies,
            overlap=overlap,
        )

    return Stage(
        name=name,
        tokenizer=tokenizer,
        vocabulary=model.vocabulary,
        programs=programs,
        plain=lambda: HybridPlainMemory(model, geometry, programs.pools(device)),
        cached=cached,
        sizes={
            f"{pool}_{tier}_pages": sizes[pool]
            for tier, sizes in (("device", device), ("host", host))
            for pool in sizes
        },
    )


def _device_pages(
    options: argparse.Namespace, geometry: Geometry, model: HybridConfig, config: CacheConfig
) -> dict[str, int]:
    """Device pages of the pools of a model."""
    window = max(LEAST_WINDOW_TOKENS, 4 * window_law(model, geometry).tokens)
    window = window if options.window_tokens is None else options.window_tokens
    pages = {KV: config.device_pages, WINDOW: pages_for(window, geometry.page_size), STATE: options.states}
    return {name: pages[name] for name in model.pools}
