"""The page of the laws names tests, laws and contracts that exist, and leaves none out."""

import ast
import re

import pytest
from pages import PAGES, ROOT

from purecache.check.contracts import CONTRACTS
from purecache.state import CacheConfig, PoolSpec, Window, empty_state
from purecache.state.laws import broken_laws

PAGE = PAGES["docs/laws.md"].read_text()
NUMBER_OF_LAWS = 31
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
NAMED = set(TEST.findall(PAGE))


def names_in(path):
    """Every test function and class of a file, without importing it."""
    tree = ast.parse((ROOT / path).read_text())
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = (target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets)
    return found | {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.parametrize("path", sorted({path for path, _ in NAMED}))
def test_every_test_that_is_named_exists(path):
    names = names_in(path)
    missing = {name for each, name in NAMED if each == path and name} - names
    assert not missing
    assert any(name.lower().startswith("test") for name in names)


def test_every_law_has_its_number_and_a_test_or_says_that_it_has_none():
    parts = re.split(r"^### (\d+)\. .+$", PAGE, flags=re.MULTILINE)
    assert [int(number) for number in parts[1::2]] == list(range(1, NUMBER_OF_LAWS + 1))
    for number, text in zip(parts[1::2], parts[2::2], strict=True):
        assert TEST.search(text) or "**Not there yet**" in text, f"law {number} names no test"


def test_every_law_of_the_state_is_listed_and_no_other():
    pool = PoolSpec("window", Window(4), device_pages=4, host_pages=4)
    state = empty_state(CacheConfig(page_size=2, device_pages=4, host_pages=4).register_pool(pool))
    laws = {re.sub(r" \(.*\)$", "", law) for law in broken_laws(state)}
    table = PAGE.split("## All laws of a state")[1].split("## All contracts")[0]
    listed = set(re.findall(r"`([^`]+)`", "\n".join(line for line in table.splitlines() if line.startswith("|"))))
    assert listed == laws
    contracts = set(re.findall(r"`([^`]+)`", PAGE.split("## All contracts of a step")[1])) - {"purecache check"}
    assert contracts == set(CONTRACTS)


def test_laws_that_are_named_at_a_number_are_listed():
    numbered = PAGE.split("## Books")[1].split("## All laws")[0]
    judges = "\n".join(line for line in numbered.splitlines() if re.match(r"- (state|step|model):", line))
    named = set(re.findall(r"`([^`]+)`", judges))
    assert named
    assert named <= set(re.findall(r"`([^`]+)`", PAGE.split("## All laws of a state")[1]))
