"""Commands that the README and the docs show exist, with these arguments: of purecache, make, and our modules.

Not covered: what a command does and prints (where a page shows it, test_code_blocks.py does), commands of others, and
`python -c` snippets for services that are not here.
"""

import argparse
import importlib.util
import re

import pytest
from pages import PAGES, ROOT, blocks_of, command_lines, flags_of, parser_of

from purecache.cli import SUBCOMMANDS

SHELL = ("", "sh", "console", "bash")
INLINE = re.compile(r"`(purecache [a-z][^`]*)`")
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def commands():
    """(where, words) of every command in a block of code."""
    for name in PAGES:
        for block in blocks_of(name):
            if block.language in SHELL:
                for words in command_lines(block.lines):
                    yield f"{name}:{block.line}", words


COMMANDS = list(commands())
OF_PURECACHE = [(where, words) for where, words in COMMANDS if words[0] == "purecache" and len(words) > 1]
OF_MAKE = [(where, words) for where, words in COMMANDS if words[0] == "make"]
OF_MODULES = [(where, words[2]) for where, words in COMMANDS if words[:2] == ["python", "-m"]]


@pytest.mark.parametrize(("where", "words"), OF_PURECACHE, ids=[where for where, _ in OF_PURECACHE])
def test_a_command_parses(where, words):
    if words[1] == "--help":
        return
    assert words[1] in SUBCOMMANDS
    if "--help" not in words:
        parser_of(words[1]).parse_args(words[2:])


def test_a_flag_that_there_is_not_is_found():
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parser_of("replay").parse_args(["FILE", "--no-such-flag"])


@pytest.mark.parametrize("name", PAGES)
def test_commands_in_the_text_exist(name):
    for words in (command.split() for command in INLINE.findall(PAGES[name].read_text())):
        assert words[1] in SUBCOMMANDS or words[1].isupper(), words
        flags = {word.split("=")[0] for word in words[2:] if word.startswith("--")} - {"--help"}
        assert not flags or flags <= flags_of(parser_of(words[1])), words


def test_targets_of_make_exist():
    inline = [words.split() for name in PAGES for words in re.findall(r"`(make [a-z][^`]*)`", PAGES[name].read_text())]
    used = {words[1] for _, words in OF_MAKE} | {words[1] for words in inline}
    assert used
    assert used <= TARGETS


def test_modules_of_ours_exist():
    ours = {module for _, module in OF_MODULES if module.split(".")[0] in ("purecache", "benchmarks")}
    assert ours
    for module in ours:
        assert importlib.util.find_spec(module) is not None, module
