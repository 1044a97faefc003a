"""`purecache inspect FILE|URL`: the tree as text, the hottest prefixes, who holds locks."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from purecache.admin.client import AdminClient, AdminError
from purecache.admin.tokens import TokenError, read_token
from purecache.control.views import hot_of
from purecache.inspect.text import hot_text, locks_text, sizes_text, snapshot_tree
from purecache.snapshots import Snapshot
from purecache.snapshots.snapshot import SnapshotError

PARTS = ("sizes", "tree", "hot", "locks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    parser.add_argument("what", metavar="FILE|URL", help="a snapshot, or the address of an admin server")
    parser.add_argument("--show", nargs="+", choices=PARTS, help="parts to show (default: all there are)")
    parser.add_argument("--lines", type=int, default=100, metavar="N", help="of the tree (default 100)")
    parser.add_argument("--hot", type=int, default=20, metavar="N", help="hottest prefixes (default 20)")
    parser.add_argument("--token-file", type=Path, help="with the token of the server, unless the environment has it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(options: argparse.Namespace) -> int:
    """Print. Returns 0, or 2 for what can't be read or reached."""
    try:
        live = options.what.startswith(("http://", "https://"))
        found = _of_process(options) if live else _of_snapshot(options)
    except (AdminError, TokenError, SnapshotError, OSError) as error:
        print(f"purecache inspect: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(found))
        return 0
    texts = {"sizes": sizes_text, "tree": str, "hot": hot_text, "locks": locks_text}
    print("\n\n".join(texts[part](found[part]) for part in PARTS if part in found))
    return 0


def _wanted(options: argparse.Namespace, there: tuple[str, ...]) -> set[str]:
    return set(there if options.show is None else options.show) & set(there)


def _of_snapshot(options: argparse.Namespace) -> dict[str, Any]:
    """A snapshot knows neither tiers nor locks."""
    snapshot, wanted = Snapshot.load(options.what), _wanted(options, ("tree", "hot"))
    parts: dict[str, Any] = {}
    if "tree" in wanted:
        parts["tree"] = snapshot_tree(snapshot, options.lines)
    if "hot" in wanted:
        parts["hot"] = hot_of(snapshot, options.hot)
    return parts


def _of_process(options: argparse.Namespace) -> dict[str, Any]:
    client = AdminClient(options.what, read_token(options.token_file))
    paths = {
        "sizes": "/v1/stats",
        "tree": f"/v1/tree?lines={options.lines}",
        "hot": f"/v1/hot?number={options.hot}",
        "locks": "/v1/locks",
    }
    return {part: client.get(paths[part]) for part in PARTS if part in _wanted(options, PARTS)}
