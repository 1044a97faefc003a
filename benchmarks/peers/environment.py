"""Makes the environment that peers are measured in: sglang's wheel without its dependencies, torch, and this project.

Nothing but the standard library is used here.
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
"""Its CPU build is enough: where pip's index would give one for CUDA, set PIP_INDEX_URL to one that has CPU builds."""
IMPORTED = ("numpy==2.4.6", "msgspec==0.21.1", "packaging==26.0")
"""What sglang's caches import and use. All else that they import has a stand-in: `stubs.py`."""
PEERS = ("sglang==0.5.23",)


def make(environment: Path, python: str = sys.executable) -> Path:
    """Create the environment unless it is there as wanted; returns its interpreter."""
    interpreter, ready = environment / "bin" / "python", environment / ".ready"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    if ready.is_file() and ready.read_text() == wanted:
        return interpreter
    ready.unlink(missing_ok=True)
    subprocess.check_call([python, "-m", "venv", str(environment)])
    pip = [str(interpreter), "-m", "pip", "install", "-q"]
    subprocess.check_call([*pip, TORCH, *IMPORTED])
    subprocess.check_call([*pip, "-e", str(ROOT)])
    subprocess.check_call([*pip, "--no-deps", *PEERS])
    ready.write_text(wanted)
    return interpreter


def versions(interpreter: Path) -> dict[str, str]:
    """What is in it."""
    names = ["sglang", "torch", "numpy", "jax", "jaxlib", "purecache"]
    code = f"import importlib.metadata as m, sys; print(sys.version.split()[0], *map(m.version, {names}))"
    text = subprocess.check_output([str(interpreter), "-c", code], text=True).split()
    return dict(zip(["Python", *names], text, strict=True))


def main() -> None:
    """Make it, and say what is there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.environment", description=__doc__)
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-peers", help="folder to make")
    parser.add_argument("--python", default=sys.executable, help="interpreter: one that sglang's wheel was built for")
    options = parser.parse_args()
    found = versions(make(options.environment, options.python))
    print(", ".join(f"{name} {version}" for name, version in found.items()), flush=True)


if __name__ == "__main__":
    main()
