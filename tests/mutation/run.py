"""A mutation run over `purecache/state` and `purecache/transitions`, with cosmic-ray, in a copy of the project.

    python tests/mutation/run.py --sample 80 --seed 1

Each mutant changes one operator or constant; quick tests of the control plane must fail for it. They take half a minute
per mutant, mostly to compile what changed, so a run takes a random sample (0: all of them, some days). Prints one line
per survivor with its difference, and the score.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
MODULES = ("purecache/state", "purecache/transitions")
TESTS = (
    "tests/state",
    "tests/transitions/test_examples.py",
    "tests/transitions/test_storage.py",
    "tests/test_against_oracle.py",
)
CONFIG = """[cosmic-ray]
module-path = [{modules}]
timeout = {timeout}
excluded-modules = ["**/__init__.py"]
test-command = "{python} -m pytest -x -q -p no:cacheprovider {tests}"

[cosmic-ray.distributor]
name = "local"
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=80, help="mutants to try; 0: all (default 80)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per mutant; one that hangs is killed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder) / "project"
        ignored = shutil.ignore_patterns(".git", ".venv*", ".cache", "__pycache__", "*.egg-info", ".hypothesis")
        shutil.copytree(PROJECT, copy, ignore=ignored)
        return run(copy, options)


def run(copy: Path, options: argparse.Namespace) -> int:
    modules = ", ".join(f'"{module}"' for module in MODULES)
    config = CONFIG.format(modules=modules, timeout=options.timeout, python=sys.executable, tests=" ".join(TESTS))
    (copy / "mutation.toml").write_text(config)
    cache = PROJECT / ".cache" / "jax"
    environment = os.environ | {"PURECACHE_HYPOTHESIS": "mutation", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    environment["PURECACHE_KEEP_PROGRAMS"] = "0"  # every mutant would keep all of its programs

    def cosmic_ray(*arguments: str) -> None:
        command = [sys.executable, "-m", "cosmic_ray.cli", *arguments]
        subprocess.run(command, cwd=copy, env=environment, check=True)

    cosmic_ray("baseline", "mutation.toml")
    cosmic_ray("init", "mutation.toml", "session.sqlite")
    total = choose(copy / "session.sqlite", options.sample, options.seed)
    cosmic_ray("exec", "mutation.toml", "session.sqlite")
    return report(copy / "session.sqlite", total)


def choose(session: Path, sample: int, seed: int) -> int:
    """Keep a random sample of the mutants of a session; returns how many there were."""
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    with use_db(str(session), WorkDB.Mode.open) as database:
        jobs = sorted(item.job_id for item in database.work_items)
        kept = set(random.Random(seed).sample(jobs, min(sample or len(jobs), len(jobs))))
        skipped = [job for job in jobs if job not in kept]
        database.set_multiple_results(skipped, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
        return len(jobs)


def report(session: Path, total: int) -> int:
    """Print survivors and score."""
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome

    killed, survivors = 0, []
    with use_db(str(session), WorkDB.Mode.open) as database:
        for item, result in database.completed_work_items:
            if result.worker_outcome == WorkerOutcome.SKIPPED:
                continue
            if result.test_outcome == TestOutcome.SURVIVED:
                survivors.append((item, result))
            else:
                killed += 1
    for item, result in survivors:
        mutation = item.mutations[0]
        print(f"\nSURVIVED {mutation.module_path}:{mutation.start_pos[0]} {mutation.operator_name}\n{result.diff}")
    tried = killed + len(survivors)
    print(f"\n{killed} of {tried} mutants were killed ({100 * killed / max(1, tried):.0f} %); {total} in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
