"""What mkdocs does besides building pages: the changelog becomes a page, and the command line describes itself."""

import argparse
import importlib
import os
from pathlib import Path
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from purecache.cli import SUBCOMMANDS

MARK = "<!-- help of every command -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the changelog, which lies beside the README."""
    changelog = Path(config.config_file_path).parent / "CHANGELOG.md"
    files.append(File.generated(config, "changelog.md", content=changelog.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write what `--help` prints in the place of its mark."""
    if MARK not in markdown:
        return markdown
    with mock.patch.dict(os.environ, {"COLUMNS": "110"}):
        return markdown.replace(MARK, "\n".join(_help_of(name) for name in SUBCOMMANDS))


def _help_of(name: str) -> str:
    module, text = SUBCOMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"purecache {name}", description=text[0].upper() + text[1:] + ".")
    importlib.import_module(module).add_arguments(parser)
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    tables = [each for action in nested for each in action.choices.values()]
    return "\n\n".join([f"## {name}", *(f"```text\n{each.format_help()}```" for each in (parser, *tables))]) + "\n"
