"""One peer in a process of its own: `python -m benchmarks.peers.worker JOB` prints what it measured as JSON."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import single, waiting
from benchmarks.peers.replay import Peer, replay

SGLANG = {"rust core": "RustCore", "unified, rust": "UnifiedRust", "unified, python": "UnifiedPython", "radix": "Radix"}
SGLANG_JAX = {"sglang-jax radix": "JaxRadix", "sglang-jax unified": "JaxUnified"}
OURS = {"purecache": "array('q')", "purecache, int32": "int32", "purecache, lists": "list"}
"""Names of peers, and what each stands for."""


def make(name: str, page: int, capacity: int, longest: int) -> Peer:
    """A peer by its name. Raises ImportError where it is not installed."""
    if name in OURS:
        from benchmarks.peers.ours import Purecache

        return Purecache(page, capacity, OURS[name], longest)
    if name in SGLANG_JAX:
        from benchmarks.peers import sglang_jax_peers

        return getattr(sglang_jax_peers, SGLANG_JAX[name])(page, capacity)
    from benchmarks.peers import sglang_peers

    return getattr(sglang_peers, SGLANG[name])(page, capacity)


def run(job: dict[str, Any]) -> Any:
    """What a job asks for."""
    name, kind = job["peer"], job["kind"]
    if kind == "replay":
        workload = job["workload"]
        peer = make(name, workload.page, workload.capacity, int(workload.wholes.max()))
        if job.get("profile"):
            from benchmarks.peers.profile import profiled

            return profiled(peer, workload)
        return replay(peer, workload, job["limit"])
    if kind == "waiting":
        return waiting.rows(make, name, job["quick"])
    if kind == "memory":
        return single.memory(make, name, job["page"])
    if kind == "warm":
        from benchmarks.peers.ours import seconds_to_warm

        return seconds_to_warm(job["quick"])
    return single.rows(make, name, job["quick"])


def main() -> None:
    """Run the job in the file named on the command line."""
    print(json.dumps(run(pickle.loads(Path(sys.argv[1]).read_bytes()))))


if __name__ == "__main__":
    main()
