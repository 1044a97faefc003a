"""The pages of the documentation, and what is in their blocks of code."""

import argparse
import functools
import importlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from purecache.cli import SUBCOMMANDS

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = {
    page.relative_to(ROOT).as_posix(): page
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
    if not page.is_symlink()
}
"""Path below the project: file, of every page that people write."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: str
    line: int
    """Of its first line of code, from 1."""
    language: str
    """Empty for an indented block."""
    lines: tuple[str, ...]
    skipped: str | None
    """Why it is not run, if a comment right before it says so."""


FENCE = re.compile(r"^```(\w*)\s*$")
SKIP = re.compile(r'^<!-- skip: next "(.+)" -->$')


def blocks_of(name: str) -> list[Block]:
    """Every block of code of a page, fenced or indented."""
    found, lines = [], PAGES[name].read_text().splitlines()
    number, reason = 0, None
    while number < len(lines):
        line = lines[number]
        if skip := SKIP.match(line):
            reason = skip[1]
        elif fence := FENCE.match(line):
            end = next(end for end in range(number + 1, len(lines)) if lines[end] == "```")
            found.append(Block(name, number + 2, fence[1], tuple(lines[number + 1 : end]), reason))
            number, reason = end, None
        elif line.startswith("    ") and (number == 0 or not lines[number - 1]):
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end]):
                end += 1
            found.append(Block(name, number + 1, "", tuple(each[4:] for each in lines[number:end]), reason))
            number, reason = end - 1, None
        number += 1
    return found


def command_lines(lines: tuple[str, ...]) -> list[list[str]]:
    """The commands of a block of shell, as words: continued lines joined, comments and prompts left out."""
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    commands = []
    for line in text.splitlines():
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:
            continue  # a command that goes on over several lines in quotes: not one of ours
        commands += _between(words, ("&&", "|", ";"))
    return commands


def _between(words: list[str], ends: tuple[str, ...]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ends:
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


@functools.cache
def parser_of(subcommand: str) -> argparse.ArgumentParser:
    """The arguments of a subcommand of `purecache`."""
    parser = argparse.ArgumentParser(prog=f"purecache {subcommand}", exit_on_error=False)
    importlib.import_module(SUBCOMMANDS[subcommand][0]).add_arguments(parser)
    return parser


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """All flags of a parser and of its subcommands."""
    flags = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags |= {flag for each in action.choices.values() for flag in flags_of(each)}
    return flags
