"""sglang-jax's own unit tests of its prefix caches, with purecache's cache in their place.

They come from the checkout in SGLANG_JAX_SRC, or from the installed package if that is a checkout.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("sgl_jax", reason="needs sglang-jax: make test-sglang-jax SRC=...")

SECONDS = 1800.0
FILES = {
    "test_radix_cache.py": ["TestRadixCache", "TestRadixCacheWithRequests"],
    "test_unified_radix_cache.py": ["TestUnifiedRadixCache", "TestUnifiedRadixCacheWithRequests"],
}
"""The classes that are run. Other classes of the second file test parts that purecache leaves to sglang-jax."""
SWAPPED_OUT = {
    "test_radix_cache.py": "radix_cache:RadixCache",
    "test_unified_radix_cache.py": "unified_radix_cache:UnifiedRadixCache",
}
"""Whose place ours takes. The second file compares with `RadixCache`, which stays what it is there."""
EXCLUDED = {
    "test_radix_cache.py": {
        "TestRadixCache::test_reset_functionality": "reads lock_ref of a node",
        "TestRadixCache::test_dp_rank_namespace_isolation": "uses rank 1 of an allocator that has one rank",
        "TestRadixCache::test_combined_extra_key_and_dp_rank": "uses rank 1 of an allocator that has one rank",
    },
    "test_unified_radix_cache.py": {
        "TestUnifiedRadixCache::test_evict_device_leaf_tombstones_and_unlinks": "calls private methods on a node",
        "TestUnifiedRadixCache::test_partial_match_splits_node": "reads the key of a node",
        "TestUnifiedRadixCache::test_equivalence_with_radix_cache_page128": "gives slots that begin within a page",
    },
}
"""Tests that are about the insides of those caches, and why."""


def folder() -> Path:
    """Where the tests are."""
    source = os.environ.get("SGLANG_JAX_SRC")
    if source:
        return Path(source) / "python" / "sgl_jax" / "test" / "mem_cache"
    found = importlib.util.find_spec("sgl_jax")
    assert found is not None
    return Path(next(iter(found.submodule_search_locations or []))) / "test" / "mem_cache"


@pytest.mark.parametrize("file", FILES)
def test_own_tests_pass(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder() / file
    if not path.is_file():
        pytest.skip(f"{path} is not there: set SGLANG_JAX_SRC to a checkout")
    ran = run(path, tmp_path / "report.xml")
    failed = [name for name, passed in ran.items() if not passed]
    with capsys.disabled():
        print(f"\n{file}: {len(ran) - len(failed)} of {len(ran)} pass, {len(EXCLUDED[file])} excluded")
    assert failed == []
    assert len(ran) > 10


@pytest.mark.parametrize("file", FILES)
def test_what_is_excluded_exists(file: str) -> None:
    """A test that was renamed or removed must not hide in the list."""
    path = folder() / file
    if not path.is_file():
        pytest.skip(f"{path} is not there: set SGLANG_JAX_SRC to a checkout")
    text = path.read_text()
    for name in EXCLUDED[file]:
        assert f"def {name.partition('::')[2]}(" in text


def run(path: Path, report: Path) -> dict[str, bool]:
    """Whether each test passed, by class and name. In a process of its own, so that classes are exchanged first."""
    here = Path(__file__).parent
    nodes = [f"{path}::{name}" for name in FILES[path.name]]
    excluded = [f"--deselect={path.name}::{name}" for name in EXCLUDED[path.name]]
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={path.parent}", "-p", "no:cacheprovider"]
    command += ["-p", "swapped_in", "-q", f"--junitxml={report}", *excluded, *nodes]
    paths = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    more = {
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "1",
        "USE_DEVICE_TYPE": "cpu",
        "SWAPPED_OUT": SWAPPED_OUT[path.name],
    }
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | more, timeout=SECONDS)
    if done.returncode not in (0, 1) or not report.exists():
        pytest.fail(f"pytest ended with {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}", pytrace=False)
    if done.returncode == 1:
        print(done.stdout[-20000:])
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": len(case) == 0 for case in cases}
