"""Run by `test_gpu_compile`: compiles the staged copies for an NVIDIA H100 that is not there, and prints what came out.

The first argument is a directory with JAX's CUDA plugin. XLA:GPU compiles for a described device; nothing is run.
"""

import json
import math
import sys
from functools import partial

sys.path.insert(0, sys.argv[1])

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from purecache.effects.page_arrays import gather_pages, groups_of, scatter_pages
from purecache.effects.pools import Leaf
from purecache.effects.programs import pool_sized_instructions

# The published numbers of an H100 SXM, as XLA reads them.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
runtime_version { major: 12 minor: 8 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
LAYERS, PAGES, BATCH, SHAPE = 4, 128, 8, (16, 16, 128)
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def row(name, devices, dtype, lowered):
    compiled = lowered.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    entry = text[text.index("ENTRY") :]
    local = PAGES * math.prod(SHAPE) // devices
    return {
        "program": name,
        "devices": devices,
        "dtype": dtype,
        "pool_bytes": LAYERS * local * np.dtype(dtype).itemsize,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "fusions": entry.count(" fusion("),
        "collectives": [each for each in COLLECTIVES if each in text],
        "pool_sized": list(pool_sized_instructions(text, {local})),
    }


def rows():
    for devices in (1, 4):
        topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology=f"1x1x{devices}")
        heads = NamedSharding(Mesh(np.array(topology.devices), ("tensor",)), PartitionSpec(None, None, "tensor", None))
        for dtype in ("bfloat16", "float8_e4m3fn"):
            kind = np.dtype(getattr(jnp, dtype))
            leaves = tuple(Leaf(f"{k}", 0, (PAGES, *SHAPE), kind, kind, heads, heads) for k in range(LAYERS))
            groups = groups_of(leaves)
            pool = tuple(jax.ShapeDtypeStruct(leaf.shape, kind, sharding=heads) for leaf in leaves)
            page = (jax.ShapeDtypeStruct(leaves[0].with_pages(LAYERS), kind, sharding=heads),)
            ids = jax.ShapeDtypeStruct((BATCH,), np.int32)
            gather, scatter = (partial(copy, leaves=leaves, groups=groups) for copy in (gather_pages, scatter_pages))
            out = (((heads,),) * BATCH, None)
            yield row("gather", devices, dtype, jax.jit(gather, out_shardings=out).lower(pool, ids))
            jitted = jax.jit(scatter, donate_argnums=0, out_shardings=((heads,) * LAYERS, None))
            yield row("scatter", devices, dtype, jitted.lower(pool, (page,) * BATCH, ids))


print(json.dumps(list(rows())))
