"""Compiled transitions that are kept on disk: the next process runs them without tracing, and damage is a miss."""

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from support import tiny

from purecache import program_files
from purecache.check.mutants import MUTANTS
from purecache.entries import TABLE
from purecache.programs import Program
from purecache.state import empty_state

CONFIG = tiny(device_pages=3)


@contextlib.contextmanager
def jax_cache_in(place):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", place and str(place))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def compiles():
    """JAX's own cache, from which programs can't be kept, is switched off."""
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    reset_cache()


@pytest.fixture
def place(tmp_path, monkeypatch, compiles):
    monkeypatch.setattr(program_files, "folder", lambda: tmp_path / "programs")
    return tmp_path / "programs"


def made(entry=TABLE["lock"], size=0):
    """A program, and the leaves of a state for it."""
    state = jax.tree.map(jnp.array, empty_state(CONFIG))
    return Program("lock", entry, CONFIG.layout, size, jax.eval_shape(lambda: state)), jax.tree.leaves(state)


def untraceable():
    def fails(*arguments):
        raise AssertionError("it was traced")

    return dataclasses.replace(TABLE["lock"], function=fails)


def outcome(program, leaves):
    """What locking the root of rank 0 does: the new state and the answer."""
    command = program.command(CONFIG.layout.root(0), 0)
    addresses = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    new, answer = program.run(leaves, command)
    assert [leaf.unsafe_buffer_pointer() for leaf in new] == addresses  # in place, loaded or not
    return [np.array(leaf) for leaf in new], program.answer(answer)


def test_a_kept_program_is_not_traced_and_does_the_same(place):
    compiled = outcome(*made())
    assert len(list(place.iterdir())) == 1
    loaded, leaves = made(untraceable())
    jax.tree.map(np.testing.assert_array_equal, outcome(loaded, leaves), compiled)
    assert type(compiled[1][1]).__name__ == "Locked"
    assert loaded.report()["aliased_bytes"] > 0


@pytest.mark.parametrize("damage", [b"", b"not a program", None])
def test_a_damaged_file_is_a_miss(place, damage):
    made()
    (file,) = place.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with pytest.raises(AssertionError, match="traced"):
        made(untraceable())
    assert outcome(*made())[1][1].status == 0
    assert outcome(*made(untraceable()))[1][1].status == 0  # it was written anew


def test_a_disk_that_is_full_leaves_nothing_behind(place, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(program_files.os, "replace", full)
    assert outcome(*made())[1][1].status == 0
    assert list(place.iterdir()) == []


def test_what_nobody_used_for_long_goes(place):
    made()
    (used,) = place.iterdir()
    other = place / "of another version"
    other.touch()
    weeks_ago = time.time() - (program_files.KEPT_DAYS + 1) * 86400
    for file in used, other:
        os.utime(file, (weeks_ago, weeks_ago))
    made(untraceable())  # is used now
    made(size=1)
    assert used in place.iterdir()
    assert len(list(place.iterdir())) == 2


def test_they_can_be_switched_off(tmp_path):
    assert run_life(tmp_path, PURECACHE_KEEP_PROGRAMS="0")[0] == 0


def test_the_digest_covers_all_that_programs_are_made_from():
    """What a source imports of this package is a source itself."""
    home, left, seen = Path(program_files.__file__).parent, ["entries.py"], set()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        imported = re.findall(r"^(?:from|import) purecache\.([\w.]+)", (home / name).read_text(), re.MULTILINE)
        for each in imported:
            path = each.replace(".", "/")
            left.append(f"{path}.py" if (home / f"{path}.py").exists() else f"{path}/__init__.py")
    assert len(seen) > 30
    assert {name.split("/")[0] for name in seen} <= set(program_files.SOURCES)


def test_a_mutant_is_neither_kept_nor_loaded(tmp_path):
    with jax_cache_in(tmp_path):
        assert program_files.folder() == tmp_path / "purecache"
        with MUTANTS[0].applied():
            assert program_files.folder() is None
        assert program_files.folder() == tmp_path / "purecache"


def test_where_nothing_can_be_written_programs_are_compiled(tmp_path, monkeypatch, compiles):
    (tmp_path / "file").touch()
    monkeypatch.setattr(program_files, "folder", lambda: tmp_path / "file" / "programs")
    assert outcome(*made())[1][1].status == 0


def test_other_sources_and_other_flags_of_the_compiler_are_other_programs(place, monkeypatch):
    made()
    for name, value in ((program_files.LEVEL, "1"), ("XLA_FLAGS", "--xla_backend_optimization_level=2")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(AssertionError, match="traced"):
                made(untraceable())
    made(untraceable())
    monkeypatch.setattr(program_files, "_ORIGIN", "another version")
    with pytest.raises(AssertionError, match="traced"):
        made(untraceable())


def test_they_are_kept_where_jax_keeps_compiled_programs(tmp_path):
    for place, expected in ((str(tmp_path), tmp_path / "purecache"), ("gs://bucket/programs", None), (None, None)):
        with jax_cache_in(place):
            assert program_files.folder() == expected


RUN = """
import jax
from purecache import PrefixCache, program_files
from purecache.state import CacheConfig

cache = PrefixCache(CacheConfig(page_size=2, device_pages=4, host_pages=2))
match, receipt = cache.admit([1, 2, 3, 4])
cache.abort([], receipt)
place = program_files.folder()
print(len(list(place.iterdir())) if place and place.exists() else 0, program_files._hits())
"""


def run_life(folder, **environment):
    """How many programs are kept after the life of a request in a new process, and what JAX took out of its cache."""
    options = {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PLATFORMS": "cpu"}
    options |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    command = [sys.executable, "-c", RUN]
    whole = os.environ | options | environment
    done = subprocess.run(command, env=whole, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


def test_what_comes_out_of_jax_s_own_cache_is_not_kept(tmp_path):
    """It would be kept without its code. In processes, as JAX's cache is set up once in each."""
    assert run_life(tmp_path)[0] == 2
    assert run_life(tmp_path)[0] == 2
    shutil.rmtree(tmp_path / "purecache")
    kept, hits = run_life(tmp_path)
    assert kept == 0
    assert hits >= 2
    assert run_life(tmp_path)[0] == 0


def test_a_kept_program_runs_on_one_of_several_devices(tmp_path):
    several = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    assert run_life(tmp_path, **several)[0] == 2
    assert run_life(tmp_path, **several)[0] == 2
