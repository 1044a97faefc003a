"""Compiled transitions that are kept on disk: the next process runs them without tracing, and damage is a miss."""

import dataclasses
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from support import tiny

from purecache import program_files
from purecache.entries import TABLE
from purecache.programs import Program
from purecache.state import empty_state

CONFIG = tiny(device_pages=3)


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


def made(entry=TABLE["lock"]):
    """A program, and the leaves of a state for it."""
    state = jax.tree.map(jnp.array, empty_state(CONFIG))
    return Program("lock", entry, CONFIG.layout, 0, jax.eval_shape(lambda: state)), jax.tree.leaves(state)


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
    assert file.read_bytes()[:1] == whole[:1]  # written anew


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
    monkeypatch.setattr(program_files, "_origin", lambda: "another version")
    with pytest.raises(AssertionError, match="traced"):
        made(untraceable())


def test_they_are_kept_where_jax_keeps_compiled_programs(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        for place, expected in ((str(tmp_path), tmp_path / "purecache"), ("gs://bucket/programs", None), (None, None)):
            jax.config.update("jax_compilation_cache_dir", place)
            assert program_files.folder() == expected
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


RUN = """
import jax
from purecache import PrefixCache, program_files
from purecache.state import CacheConfig

cache = PrefixCache(CacheConfig(page_size=2, device_pages=4, host_pages=2))
match, receipt = cache.admit([1, 2, 3, 4])
cache.abort([], receipt)
print(len(list(program_files.folder().iterdir())) if program_files.folder().exists() else 0, program_files._hits())
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
