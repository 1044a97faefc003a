"""Every block of Python in the README and the docs runs, one session per page, and prints what the page says.

A block that can't run here has a comment with the reason right before it: `<!-- skip: next "reason" -->`. What a page
needs and would only distract from is in `<!-- invisible-code-block: python`.
"""

import ast
import contextlib
import doctest
import io
import sys
import unittest

import pytest
from pages import DOCS, PAGES, blocks_of, command_lines
from sybil import Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from purecache.cli import main

pytestmark = pytest.mark.xdist_group("docs")  # the pages share compiled programs
CODE = (ast.Assign, ast.Import, ast.ImportFrom, ast.Call)
MOST_SKIPPED = 7
"""Blocks of Python that are not run. Each has its reason; a new one is a decision."""


class Python(PythonEvaluator):
    """Runs a block and keeps what it prints for the block of output that follows."""

    def __call__(self, example):
        printed = example.namespace.setdefault("__printed__", io.StringIO())
        with contextlib.redirect_stdout(printed):
            return super().__call__(example)


def run_shell(example):
    """Run the commands of a block if all are of purecache and the page shows what they print."""
    commands = command_lines(tuple(example.parsed.splitlines()))
    document = example.document
    follows = document.text[example.end :].lstrip().startswith("```output")
    if not (follows and all(command[0] == "purecache" for command in commands)):
        return
    printed = example.namespace.setdefault("__printed__", io.StringIO())
    with contextlib.redirect_stdout(printed):
        for command in commands:
            main(command[1:])


def compare(example):
    """What was printed since the last block of output must be in this one. `...` stands for anything."""
    printed = example.namespace.get("__printed__", io.StringIO())
    got, want = printed.getvalue(), example.parsed
    printed.seek(0)
    printed.truncate()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(want, got, flags):
        raise AssertionError(
            f"line {example.line} of {example.path}: the page shows\n{want}\nbut this was printed\n{got}"
        )


SYBIL = Sybil(
    parsers=[
        CodeBlockParser("python", Python()),
        CodeBlockParser("sh", run_shell),
        CodeBlockParser("output", compare),
        SkipParser(),
    ],
    pattern="*.md",
)
WITH_PYTHON = [name for name in PAGES if any(block.language == "python" for block in blocks_of(name))]


@pytest.mark.parametrize("name", WITH_PYTHON)
@pytest.mark.filterwarnings("ignore:a page is 2 tokens")
def test_the_code_of_a_page_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(DOCS / "tutorial")
    document = SYBIL.parse(PAGES[name])
    for example in document.examples():
        with contextlib.suppress(unittest.SkipTest):
            example.evaluate()
    printed = document.namespace.get("__printed__", io.StringIO()).getvalue()
    assert not printed, f"{name} does not show what its last blocks print: {printed}"
    sys.modules.pop("toy_engine", None)


def test_what_is_not_run_says_why_and_is_little():
    python = [block for name in PAGES for block in blocks_of(name) if block.language == "python"]
    skipped = [block for block in python if block.skipped is not None]
    assert len(skipped) <= MOST_SKIPPED, [(block.page, block.line, block.skipped) for block in skipped]
    assert len(python) - len(skipped) >= 30


def test_no_python_hides_in_a_block_without_a_language():
    for block in (block for name in PAGES for block in blocks_of(name) if not block.language):
        with contextlib.suppress(SyntaxError):
            parts = ast.walk(ast.parse("\n".join(block.lines)))
            assert not any(isinstance(part, CODE) for part in parts), f"{block.page}:{block.line}"


def test_a_page_that_shows_something_else_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```output\n3\n```\n")
    code, output = SYBIL.parse(page).examples()
    code.evaluate()
    with pytest.raises(AssertionError, match="the page shows"):
        output.evaluate()
