"""Opening a KV cache manager of AIBrix. It can be configured by variables of the process only, so that they are set for
as long as that takes."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CHUNK = 32
"""Most objects of one call into AIBrix: as many as it works on at once. Between the calls the deadline is looked at."""

_IMPORTING = {"AIBRIX_KV_CACHE_OL_TOKEN_VALIDATION_ENABLED": "0"}
_FIXED = {
    "L1_CACHE_ENABLED": "0",  # a cache in memory above it would hide what is stored
    "DEVICE": "cpu:0",  # plain `cpu` means pinned memory, which needs CUDA
    "BLOCK_SIZE": "-1",
    "MAX_SEQ_LEN": "-1",
    "META_SERVICE_BACKEND": "",
    "L2_CACHE_OP_BATCH": str(CHUNK),
    "L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS": "0",  # a put is over when it returns
    # AIBrix reuses the memory of a read that it gave up while a thread may still write into it: it must not give up.
    "L2_CACHE_PER_TOKEN_TIMEOUT_MS": "600000",
}
_ENVIRONMENT = threading.Lock()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the process for a while: AIBrix can be configured in no other way."""
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


_POLICY = asyncio.get_event_loop_policy()
with _environment(_IMPORTING):
    import aibrix_kvcache  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
# AIBrix makes uvloop the event loop of the whole process when it is imported, which is not ours to decide.
asyncio.set_event_loop_policy(_POLICY)


def open_manager(root: Path, backend: str, namespace: str, block_bytes: int, ttl_seconds: int) -> Any:
    """A manager of blocks of at least `block_bytes`, under `root`. Raises what AIBrix raises.

    `ttl_seconds` is the age at which RocksDB may drop a block.
    """
    block = -(-block_bytes // 16) * 16
    settings = {
        "L2_CACHE_BACKEND": backend,
        "L2_CACHE_NAMESPACE": namespace,
        f"{backend}_ROOT": str(root),
        "ROCKSDB_TTL_S": str(ttl_seconds),
        **_FIXED,
    }
    spec = aibrix_kvcache.KVCacheBlockSpec(
        block_ntokens=1,
        block_dtype=torch.uint8,
        block_layout=aibrix_kvcache.KVCacheBlockLayout.NCLD,
        tensor_spec=aibrix_kvcache.KVCacheTensorSpec(heads=[0], layers=[0], head_size=block // 2),
    )
    config = aibrix_kvcache.KVCacheConfig(
        block_spec=spec,
        model_spec=aibrix_kvcache.ModelSpec(max_model_len=CHUNK, max_num_batched_tokens=CHUNK),
    )
    with _environment({f"AIBRIX_KV_CACHE_OL_{name}": value for name, value in settings.items()}):
        return aibrix_kvcache.BaseKVCacheManager(config)


def blocks_of(names: list[str]) -> Any:
    """Names of blocks, as a manager takes them."""
    return aibrix_kvcache.BlockHashes(names, 1)
