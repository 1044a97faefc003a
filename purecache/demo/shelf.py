"""The third tier of the demo: which store, under which names."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import jax
import xxhash

from purecache.demo.engine import Geometry
from purecache.demo.weights import DemoError, ModelConfig
from purecache.stores import Store
from purecache.stores.envelope import TRAILER
from purecache.stores.names import ObjectRecord
from purecache.stores.registry import open_store

CAPACITY = "512MiB"


def default_url(page_bytes: int) -> str:
    """The local store in the user's cache directory: one per size of page."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return f"local://{base / 'purecache' / f'demo-{page_bytes}'}?capacity={CAPACITY}"


def open_shelf(url: str | None, page_bytes: int, say: Callable[[str], None]) -> Store | None:
    """The store of a URL, by default the local one; None for "none", or if the default can't be opened.

    Raises DemoError for a URL that can't be opened.
    """
    if url == "none":
        return None
    try:
        store = open_store(url or default_url(page_bytes), page_bytes + TRAILER)
    except (ValueError, OSError, ImportError) as problem:
        if url is None:
            say(f"no storage tier: {problem}")
            return None
        raise DemoError(f"--store {url}: {problem} (--store none does without)") from problem
    objects = store.stats()["objects"]
    found = f"warm: it holds {objects} pages of earlier runs" if objects else "cold: it is empty"
    say(f"storage (L3) starts {found}")
    return store


def record_of(path: Path, model: ModelConfig, geometry: Geometry) -> ObjectRecord:
    """What the bytes of a page depend on. Machine and shapes are part of it: their arithmetic may round differently."""
    weights = xxhash.xxh3_128_hexdigest(path.read_bytes())
    machine = f"{platform.machine()}, jax {jax.__version__}"
    return ObjectRecord(
        model=path.name,
        revision=f"{weights}, {machine}, {geometry}",
        kv_dtype="float32",
        layout="keys,values;layer,token,head,dim",
        page_size=geometry.page_size,
        layers=(0, model.layers),
        heads=(0, model.kv_heads),
    )
