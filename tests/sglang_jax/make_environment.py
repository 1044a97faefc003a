"""Make the environment in which `make test-sglang-jax` runs: sglang-jax from a checkout, its pinned JAX, and purecache.

The checkout is copied, and only the copy is touched. sglang-jax asks for Python 3.12; the only thing in it that 3.11
cannot read is the syntax of one generic class, so without a 3.12 that class is written in the old way in the copy.
Nothing but the standard library is used here.
"""

import argparse
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
GENERIC = re.compile(r"^class (\w+)\[(\w+)\]:$", re.MULTILINE)
SUITABLE = "import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))"


def main() -> None:
    """Copy, create, install, and say what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, help="checkout of sglang-jax")
    parser.add_argument("--environment", type=Path, required=True, help="folder to make")
    parser.add_argument("--python", default="", help="interpreter to use (default: a 3.12 or 3.13)")
    options = parser.parse_args()
    source = Path(options.source)
    if not options.source or not (source / "python" / "pyproject.toml").is_file():
        sys.exit(
            f"{options.source or 'SRC'} is not a checkout of sglang-jax (it has no python/pyproject.toml):"
            " make test-sglang-jax SRC=path/to/sglang-jax"
        )
    python = options.python or find_python()
    old = python_version(python) < (3, 12)
    if old:
        print("note: no Python 3.12 found, which sglang-jax asks for: one class of the copy is rewritten for 3.11")
    copy = options.environment / "source" / "python"
    copy_source(source / "python", copy, old)
    install(python, options.environment, copy, commit_of(source))
    print_versions(options.environment, commit_of(source))


def find_python() -> str:
    """The first interpreter that sglang-jax supports, else this one."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    pythons = ["python3.12", "python3.13", *sorted(glob.glob(f"{pyenv}/versions/3.1[23]*/bin/python"))]
    for python in [sys.executable, *pythons]:
        path = shutil.which(python)
        if path and subprocess.run([path, "-c", SUITABLE], capture_output=True).returncode == 0:
            return path
    return sys.executable


def python_version(python: str) -> tuple[int, ...]:
    """(major, minor)."""
    text = subprocess.check_output([python, "-c", "import sys; print(*sys.version_info[:2])"], text=True)
    return tuple(map(int, text.split()))


def commit_of(source: Path) -> str:
    """The commit that is checked out, or `unknown`."""
    found = subprocess.run(["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def copy_source(source: Path, copy: Path, old: bool) -> None:
    """Copy the package anew, and make it readable by Python 3.11 if `old`."""
    if copy.exists():
        shutil.rmtree(copy)
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc"))
    if old:
        rewrite_for_311(copy)


def rewrite_for_311(copy: Path) -> None:
    """Write `class X[T]:` as `class X(Generic[T]):`, and let Python 3.11 install the package."""
    project = copy / "pyproject.toml"
    project.write_text(re.sub(r'requires-python = ">=3\.12', 'requires-python = ">=3.11', project.read_text()))
    file = copy / "sgl_jax" / "srt" / "managers" / "tokenizer_manager.py"
    old_way = r'import typing\n\n\2 = typing.TypeVar("\2")\n\n\nclass \1(typing.Generic[\2]):'
    file.write_text(GENERIC.sub(old_way, file.read_text()))


def install(python: str, environment: Path, copy: Path, commit: str) -> None:
    """Create the environment and install both packages, unless this was done before with the same requirements."""
    requirements = [copy / "pyproject.toml", REPOSITORY / "pyproject.toml", Path(__file__)]
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in requirements) + python.encode()).hexdigest()
    ready = environment / ".ready"
    if ready.is_file() and ready.read_text() == wanted:
        return
    ready.unlink(missing_ok=True)
    subprocess.check_call([python, "-m", "venv", str(environment)])
    # The copy has no history to take its version from.
    named = {"SETUPTOOLS_SCM_PRETEND_VERSION": f"0.0.0+g{commit[:9]}"}
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.check_call([*pip, "-e", f"{copy}[cpu]"], env=os.environ | named)
    subprocess.check_call([*pip, "-e", f"{REPOSITORY}[store]", "pytest>=8", "hypothesis>=6.130"])
    ready.write_text(wanted)


def print_versions(environment: Path, commit: str) -> None:
    """What the tests are about to run with."""
    names = ["sglang-jax", "jax", "jaxlib", "purecache"]
    code = f"import importlib.metadata as m, sys; print(sys.version.split()[0], *map(m.version, {names}))"
    found = subprocess.check_output([str(environment / "bin" / "python"), "-c", code], text=True).split()
    text = ", ".join(f"{name} {version}" for name, version in zip(["Python", *names], found, strict=True))
    print(f"{text}; sglang-jax commit {commit}, purecache commit {commit_of(REPOSITORY)}", flush=True)


if __name__ == "__main__":
    main()
