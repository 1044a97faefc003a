"""Compiled transitions on disk, so that the next process neither traces nor compiles them.

JAX's own cache of compiled programs spares compiling, but not tracing, which takes as long. So where that cache is
switched on (`JAX_COMPILATION_CACHE_DIR`) and is a folder, whole executables are kept in it, too: one file per program,
named by a digest of all that it is made from. As with that cache, who can write there can make this process run their
code. A file that can't be read or written is a miss. What nobody has used for KEPT_DAYS goes when a program is added:
every version of the sources has programs of its own. `PURECACHE_KEEP_PROGRAMS=0` switches it off.
"""

import contextlib
import hashlib
import logging
import os
import pickle
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax.experimental.serialize_executable import deserialize_and_load, serialize

SOURCES = ("state", "transitions", "entries.py", "programs.py", "program_files.py", "meshes.py")
"""What a program is made from, below this folder."""
KEPT_DAYS = 14
LEVEL = "PURECACHE_OPTIMIZATION_LEVEL"
"""Environment variable: how much LLVM optimises transitions, 0 to 3. With 0 they compile sooner, and are slower."""
_log = logging.getLogger(__name__)
_of_thread = threading.local()
_used = os.environ.get("PURECACHE_KEEP_PROGRAMS", "1") != "0"


def _hits() -> int:
    """How many programs JAX has taken out of its cache for this thread."""
    return getattr(_of_thread, "hits", 0)


def _note(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _of_thread.hits = _hits() + 1


jax.monitoring.register_event_listener(_note)


@contextlib.contextmanager
def unused() -> Iterator[None]:
    """Within, nothing is loaded or kept: for programs of transitions that were changed in this process alone."""
    global _used
    before, _used = _used, False
    try:
        yield
    finally:
        _used = before


def folder() -> Path | None:
    """Where programs are kept, or None."""
    if not _used:
        return None
    place = jax.config.values["jax_compilation_cache_dir"]
    if not place or not jax.config.values["jax_enable_compilation_cache"] or "://" in place:
        return None
    return Path(place) / "purecache"


def load(key: Any, device: Any) -> tuple[jax.stages.Compiled, Any] | None:
    """The program saved under `key`, for one device of the CPU backend, and what was saved with it; None without one.

    The device must be the one that it was compiled for: the key says so.
    """
    place = folder()
    if place is None:
        return None
    try:
        file = place / _name(key)
        about, *parts = pickle.loads(file.read_bytes())
        os.utime(file)
        return deserialize_and_load(*parts, backend="cpu", execution_devices=[device]), about
    except FileNotFoundError:
        return None
    except Exception as error:  # of another version, cut short, no permission: it is compiled instead
        _log.debug("a program kept on disk is of no use: %s", error)
        return None


def compile_and_save(key: Any, lowered: jax.stages.Lowered, about: Any) -> jax.stages.Compiled:
    """Compile a program of the CPU backend, and keep it together with what its user wants to know about it.

    One that comes out of JAX's cache is not kept: XLA writes it without its code, which is noticed only when it runs.
    """
    before = _hits()
    options: dict[str, Any] = {}
    if level := os.environ.get(LEVEL):
        options["xla_backend_optimization_level"] = int(level)
    compiled = lowered.compile(options)
    place = folder()
    if place is not None and _hits() == before:
        _save(place, key, compiled, about)
    return compiled


def _save(place: Path, key: Any, compiled: jax.stages.Compiled, about: Any) -> None:
    try:
        content = pickle.dumps((about, *serialize(compiled)))
        place.mkdir(parents=True, exist_ok=True)
        # Renamed when it is whole, so that a reader never sees a part; what fails before that is removed.
        with tempfile.TemporaryDirectory(dir=place) as begun:
            (Path(begun) / "program").write_bytes(content)
            os.replace(Path(begun) / "program", place / _name(key))
        _drop_unused(place)
    except Exception as error:  # a full disk, an executable that can't be written: the next process compiles it
        _log.debug("a program was not kept on disk: %s", error)


def _drop_unused(place: Path) -> None:
    oldest = time.time() - KEPT_DAYS * 86400
    for file in place.iterdir():
        if file.stat().st_mtime < oldest and file.is_file():
            file.unlink(missing_ok=True)


def _name(key: Any) -> str:
    """Name of the file of a program: also of the machine and of the versions, in which it is of use."""
    given = (
        key,
        os.environ.get(LEVEL),
        os.environ.get("XLA_FLAGS"),
        jax.config.values["jax_enable_x64"],
        len(jax.devices("cpu")),
    )
    return hashlib.blake2b(f"{_ORIGIN} {given!r}".encode(), digest_size=20).hexdigest()


def _origin() -> str:
    """Digest of the sources of programs, of the compiler, and of the processor that they are compiled for."""
    digest, home = hashlib.blake2b(digest_size=20), Path(__file__).parent
    for name in SOURCES:
        place = home / name
        for file in sorted(place.glob("*.py")) if place.is_dir() else [place]:
            digest.update(file.read_bytes())
    digest.update(repr((sys.version, jax.__version__, metadata.version("jaxlib"), _processor())).encode())
    return digest.hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return " ".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


_ORIGIN = _origin()
"""Read when the sources are: what is written to them later is not what this process runs."""
