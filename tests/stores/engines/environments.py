"""Make the environments in which the tests of engines run that bring packages of their own, and run them.

AIBrix and LMCache need torch and ask for certain versions of numpy, so that each has an environment in the repository
root. purecache is not installed there: it is found on PYTHONPATH, and what it needs is read from pyproject.toml.
Nothing but the standard library is used here.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
TESTS = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"
INDEX = "PURECACHE_TORCH_INDEX"


@dataclass(frozen=True)
class Engine:
    """What an environment has besides purecache's own requirements, and the tests that run in it."""

    requirements: tuple[str, ...]
    tests: tuple[str, ...]


ENGINES = {
    "aibrix": Engine(("aibrix-kvcache==0.8.0",), ("test_aibrix.py",)),
    "lmcache": Engine(("lmcache==0.5.6",), ("test_lmcache_files.py", "test_lmcache_server.py")),
}


def main() -> None:
    """Make what is asked for, and run the tests where `--run` says so. Exits with 1 where any fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="+", choices=ENGINES, help="environments to make: .venv-<engine>")
    parser.add_argument("--run", action="store_true", help="run the tests; what follows -- goes to pytest")
    parser.add_argument("--python", default=sys.executable, help="interpreter to use (default: this one)")
    parser.add_argument(
        "--torch-index",
        default=os.environ.get(INDEX, ""),
        help=f"package index for torch (default: ${INDEX}, else pip's own), such as the one of builds for CPUs",
    )
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, for_pytest = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    failed = []
    for name in options.engines:
        environment = REPOSITORY / f".venv-{name}"
        make(environment, ENGINES[name], options.python, options.torch_index)
        if options.run and run(environment, ENGINES[name], for_pytest) != 0:
            failed.append(name)
    if failed:
        sys.exit(f"tests failed: {', '.join(failed)}")


def make(environment: Path, engine: Engine, python: str, torch_index: str) -> None:
    """Create the environment, unless this was done before with the same requirements."""
    wanted = [TORCH, *engine.requirements, *requirements()]
    mark = hashlib.sha256("\n".join([python, *wanted]).encode()).hexdigest()
    ready = environment / ".ready"
    if ready.is_file() and ready.read_text() == mark:
        return
    ready.unlink(missing_ok=True)
    print(f"making {environment.name}: a GB or two, a few minutes", flush=True)
    subprocess.check_call([python, "-m", "venv", str(environment)])
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q"]
    if torch_index:
        subprocess.check_call([*pip, "--index-url", torch_index, TORCH])
    subprocess.check_call([*pip, *wanted])
    ready.write_text(mark)


def requirements() -> list[str]:
    """What purecache and its stores need, and what tests need."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    tools = [each for each in project["optional-dependencies"]["test"] if each.startswith(("pytest", "hypothesis"))]
    return [*project["dependencies"], *project["optional-dependencies"]["store"], *tools]


def run(environment: Path, engine: Engine, arguments: list[str]) -> int:
    """Run the engine's tests with the interpreter of the environment; pytest's exit code."""
    tests = [str(TESTS / test) for test in engine.tests]
    found = dict(os.environ, PYTHONPATH=str(REPOSITORY), LMCACHE_TRACK_USAGE="false")
    command = [str(environment / "bin" / "python"), "-m", "pytest", *tests, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=found).returncode


if __name__ == "__main__":
    main()
