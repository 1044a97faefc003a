"""What purecache costs in sglang-jax, beside sglang-jax's own caches in the same run: calls, and the whole Engine.

`make bench-sglang-jax SRC=...` runs it; `ARGS="--quick"` for small sizes.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    """Print all tables; JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--only", choices=["calls", "engine"], help="one of the tables")
    parser.add_argument("--json", metavar="FILE", help="write all rows to FILE")
    options = parser.parse_args()
    if importlib.util.find_spec("sgl_jax") is None:
        print("sglang-jax is not installed here: make bench-sglang-jax SRC=path/to/sglang-jax")
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    found: dict[str, list[dict[str, Any]]] = {}
    if options.only in (None, "calls"):
        found["calls"] = calls_table(options.quick)
    if options.only in (None, "engine"):
        found["engine"] = engine_table(options.quick)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


def calls_table(quick: bool) -> list[dict[str, Any]]:
    """Median microseconds of every call that a scheduler makes, and ours over theirs."""
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as a server whose model runs elsewhere
    import bench_calls

    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, jax {jax.__version__}")
    print(
        "median microseconds                    page  tokens     radix   unified      ours   ours/radix  ours/unified"
    )
    found = []
    for row in bench_calls.rows(quick):
        found.append(row)
        times = [row[name] for name in bench_calls.CACHES]
        print(
            f"{row['operation']:37} {row['page']:5} {row['tokens']:7} {times[0]:9.1f} {times[1]:9.1f} {times[2]:9.1f}"
            f" {times[2] / times[0]:12.2f} {times[2] / times[1]:13.2f}",
            flush=True,
        )
    return found


def engine_table(quick: bool) -> list[dict[str, Any]]:
    """Seconds and cached tokens of conversations; programs were compiled by other conversations of the same shape."""
    import tiny_model
    import workloads

    caches = {
        "none": {"cache": "chunk"},
        "radix": {"cache": "radix"},
        "unified": {"cache": "unified"},
        "purecache": {"cache": "purecache"},
        "hicache, write through": {"cache": "hicache"},
        "hicache, write through, no quota": {"cache": "hicache", "heed_quota": False},
        "purecache + host, write through": {"cache": "purecache_l2"},
        "hicache, write back, no quota": {"cache": "hicache", "heed_quota": False, "write_policy": "write_back"},
        "purecache + host, write back": {"cache": "purecache_l2", "write_policy": "write_back"},
    }
    rows = []
    print("Engine                              page    seconds   cached tokens   prompt tokens")
    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny_model.write_model(Path(folder) / "model"))
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/programs"}
        for page_size in (16,) if quick else (1, 16):
            for name, cache in caches.items():
                work = workloads.conversations(page_size, seeds=(3, 4, 5))
                rows.append(
                    {"cache": name, "page": page_size} | engine_run(work | cache | {"model": model}, environment)
                )
                row = rows[-1]
                print(
                    f"{name:35} {page_size:4} {row['seconds']:10.2f} {row['cached']:15} {row['prompt']:15}", flush=True
                )
    return rows


def engine_run(request: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Totals over the last third of the rounds."""
    script = Path(__file__).with_name("engine_runs.py")
    text = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(request), capture_output=True, text=True, env=environment
    )
    if text.returncode:
        sys.exit(text.stderr[-4000:])
    answer = json.loads(text.stdout)
    first = len(answer["outputs"]) * 2 // 3
    return {
        "seconds": sum(answer["round_seconds"][first:]),
        "cached": sum(map(sum, answer["cached_tokens"][first:])),
        "prompt": sum(map(sum, answer["prompt_tokens"][first:])),
        "start_seconds": answer["start_seconds"],
    }


if __name__ == "__main__":
    main()
