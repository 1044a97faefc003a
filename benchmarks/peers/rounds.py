"""Runs peers in turns: in every round each peer has a process of its own, so that no memory is shared."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


class Rounds:
    """Starts the workers."""

    def __init__(self, python: str, programs: str, more: Mapping[str, str]) -> None:
        """python: interpreter with the peers. programs: folder where compiled programs are kept between rounds.

        more: environment variables for the workers.
        """
        self._python, self._programs, self._more = python, programs, dict(more)

    def run(self, peers: Sequence[str], number: int, **job: Any) -> dict[str, list[Any]]:
        """What each peer measured in each round; a peer that failed is told about, and left out."""
        found: dict[str, list[Any]] = {peer: [] for peer in peers}
        for turn in range(number):
            for peer in [peer for peer in peers if peer in found]:
                about = f"{job['kind']} round {turn + 1}/{number}: {peer} (load {os.getloadavg()[0]:.1f})"
                print(about, file=sys.stderr, flush=True)
                try:
                    found[peer].append(self.one(peer, **job))
                except subprocess.CalledProcessError as error:
                    print(f"{peer} failed:\n{error.stderr[-2000:]}", file=sys.stderr, flush=True)
                    del found[peer]
        return found

    def one(self, peer: str, programs: str | None = None, **job: Any) -> Any:
        """One peer's answer. Raises CalledProcessError."""
        with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
            file.write(pickle.dumps({"peer": peer} | job))
            file.flush()
            command = [self._python, "-m", "benchmarks.peers.worker", file.name]
            own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"} | self._more
            own["JAX_COMPILATION_CACHE_DIR"] = programs or self._programs
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | own,
                check=True,
                capture_output=True,
                text=True,
            )
        return json.loads(done.stdout.splitlines()[-1])


def best(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The round with the least total, with the median of all rounds beside."""
    least = min(results, key=lambda each: each["us"])
    return least | {"us_median": float(np.median([each["us"] for each in results]))}
