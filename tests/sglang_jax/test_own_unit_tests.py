"""sglang-jax's own unit tests of its prefix caches, with purecache's cache in their place.

They come from the checkout in SGLANG_JAX_SRC, or from the installed package if that is a checkout.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("sgl_jax", reason="needs sglang-jax: make test-sglang-jax SRC=...")

SECONDS = 1800.0


@dataclass(frozen=True)
class Suite:
    """Tests of one of sglang-jax's caches. `swapped`: whose place ours takes, `module:name` in its `mem_cache`."""

    file: str
    swapped: str
    classes: tuple[str, ...]
    excluded: dict[str, str]
    """Tests that are about the insides of that cache, and why."""


_NODE, _PRIVATE = "reads what a node has inside", "calls private methods on a node"
_RANK, _PAGE = "uses rank 1 of an allocator that has one rank", "gives slots that begin within a page"
_LEAVES, _UNUSED = "wants states at leaves only", "wants KV in the tree that nobody can use without a state"
SUITES = {
    "radix": Suite(
        "test_radix_cache.py",
        "radix_cache:RadixCache",
        ("TestRadixCache", "TestRadixCacheWithRequests"),
        {
            "TestRadixCache::test_reset_functionality": _NODE,
            "TestRadixCache::test_dp_rank_namespace_isolation": _RANK,
            "TestRadixCache::test_combined_extra_key_and_dp_rank": _RANK,
        },
    ),
    # It compares with `RadixCache`, which stays what it is there.
    "unified": Suite(
        "test_unified_radix_cache.py",
        "unified_radix_cache:UnifiedRadixCache",
        ("TestUnifiedRadixCache", "TestUnifiedRadixCacheWithRequests"),
        {
            "TestUnifiedRadixCache::test_evict_device_leaf_tombstones_and_unlinks": _PRIVATE,
            "TestUnifiedRadixCache::test_partial_match_splits_node": _NODE,
            "TestUnifiedRadixCache::test_equivalence_with_radix_cache_page128": _PAGE,
        },
    ),
    "recurrent": Suite(
        "test_unified_radix_cache.py",
        "unified_radix_cache:UnifiedRadixCache",
        ("TestUnifiedRadixCacheRecurrent",),
        {
            "TestUnifiedRadixCacheRecurrent::test_copy_slots_multi_dp_locality": "copies states without the cache",
            "TestUnifiedRadixCacheRecurrent::test_hicache_tombstone_blocks_recurrent_match": _NODE,
            "TestUnifiedRadixCacheRecurrent::test_internal_transition_while_locked_frees_on_unlock": _LEAVES,
            "TestUnifiedRadixCacheRecurrent::test_longer_prefix_after_shorter_frees_parent": _LEAVES,
            "TestUnifiedRadixCacheRecurrent::test_match_reaches_snapshot_past_snapshotless_interior_node": _LEAVES,
            "TestUnifiedRadixCacheRecurrent::test_shorter_prefix_after_longer_skips_internal": _LEAVES,
            "TestUnifiedRadixCacheRecurrent"
            "::test_page1_running_recurrent_chunked_continuation_full_only_preserves_prefix": _UNUSED,
        },
    ),
    "windows": Suite(
        "test_swa_radix_cache.py",
        "swa_radix_cache:SWARadixCache",
        ("TestSWARadixCache",),
        {
            "TestSWARadixCache::test_tombstone_creation": _NODE,
            "TestSWARadixCache::test_tombstone_healing_branch1": _NODE,
            "TestSWARadixCache::test_tombstone_healing_branch2": _NODE,
            "TestSWARadixCache::test_tombstone_healing_branch3": _NODE,
            "TestSWARadixCache::test_tombstone_reset_unconditional": _NODE,
            "TestSWARadixCache::test_new_node_tombstone_split": _NODE,
            "TestSWARadixCache::test_delete_leaf_uses_child_key_fn": _PRIVATE,
            "TestSWARadixCache::test_delete_tombstone_leaf_uses_child_key_fn": _PRIVATE,
            "TestSWARadixCache::test_swa_evicted_seqlen_page_alignment_assertion": _PAGE,
            "TestSWARadixCache::test_paged_match_aligns_to_page_size": _PAGE,
            "TestSWARadixCache::test_dp_rank_namespace_isolation": _RANK,
            "TestSWARadixCache::test_combined_extra_key_and_dp_rank": _RANK,
        },
    ),
}
"""Other classes of these files test parts that purecache leaves to sglang-jax."""


def folder() -> Path:
    """Where the tests are."""
    source = os.environ.get("SGLANG_JAX_SRC")
    if source:
        return Path(source) / "python" / "sgl_jax" / "test" / "mem_cache"
    found = importlib.util.find_spec("sgl_jax")
    assert found is not None
    return Path(next(iter(found.submodule_search_locations or []))) / "test" / "mem_cache"


@pytest.mark.parametrize("name", SUITES)
def test_own_tests_pass(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = SUITES[name]
    path = folder() / suite.file
    if not path.is_file():
        pytest.skip(f"{path} is not there: set SGLANG_JAX_SRC to a checkout")
    ran = run(suite, path, tmp_path / "report.xml")
    failed = [test for test, passed in ran.items() if not passed]
    with capsys.disabled():
        print(f"\n{name}: {len(ran) - len(failed)} of {len(ran)} pass, {len(suite.excluded)} excluded")
    assert failed == []
    assert len(ran) > 5


@pytest.mark.parametrize("name", SUITES)
def test_what_is_excluded_exists(name: str) -> None:
    """A test that was renamed or removed must not hide in the list."""
    path = folder() / SUITES[name].file
    if not path.is_file():
        pytest.skip(f"{path} is not there: set SGLANG_JAX_SRC to a checkout")
    text = path.read_text()
    for test in SUITES[name].excluded:
        assert f"def {test.partition('::')[2]}(" in text


def run(suite: Suite, path: Path, report: Path) -> dict[str, bool]:
    """Whether each test passed, by class and name. In a process of its own, so that classes are exchanged first."""
    here = Path(__file__).parent
    nodes = [f"{path}::{name}" for name in suite.classes]
    excluded = [f"--deselect={path.name}::{name}" for name in suite.excluded]
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={path.parent}", "-p", "no:cacheprovider"]
    command += ["-p", "swapped_in", "-q", f"--junitxml={report}", *excluded, *nodes]
    paths = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    more = {
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "1",
        "USE_DEVICE_TYPE": "cpu",
        "SWAPPED_OUT": suite.swapped,
        "SUITE": "+".join(suite.classes),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | more, timeout=SECONDS)
    if done.returncode not in (0, 1) or not report.exists():
        pytest.fail(f"pytest ended with {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}", pytrace=False)
    if done.returncode == 1:
        print(done.stdout[-20000:])
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": len(case) == 0 for case in cases}
