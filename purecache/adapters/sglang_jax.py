"""purecache in sglang-jax.

In a process of your own:

    from purecache.adapters import sglang_jax
    sglang_jax.install()            # before Engine(...)

As a server, with the arguments of `python -m sgl_jax.launch_server`:

    python -m purecache.adapters.sglang_jax --model-path ... --hicache-storage none \\
        --purecache-store 'local:///kv?capacity=20GiB'
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence

import jax

from purecache.adapters.sglang_jax_cache import MatchResult, SglangJaxCache
from purecache.adapters.sglang_jax_install import Options, install, uninstall
from purecache.adapters.showing import Showing
from purecache.effects import HostOptions

__all__ = ["MatchResult", "Options", "SglangJaxCache", "Showing", "install", "main", "uninstall"]

INHERITED = "PURECACHE_SGLANG_JAX"
"""Environment variable that takes the arguments of this module to the processes of the server, as JSON."""


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """The options of this module, and the arguments that are left for the server."""
    parser = argparse.ArgumentParser(
        prog="python -m purecache.adapters.sglang_jax",
        description="The server of sglang-jax with purecache as its prefix cache; all other arguments are its own.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--purecache-store", help="storage tier, such as local:///path?capacity=20GiB")
    parser.add_argument("--purecache-revision", help="which weights these are, for names in storage")
    parser.add_argument("--purecache-load-back-threshold", type=int, default=Options.load_back_threshold)
    parser.add_argument("--purecache-warm", type=int, help="compile for prompts of so many tokens before serving")
    parser.add_argument("--purecache-record", metavar="FOLDER", help="record the cache, for `purecache replay`")
    parser.add_argument("--purecache-metrics", type=int, metavar="PORT", help="serve metrics for Prometheus")
    parser.add_argument("--purecache-events", metavar="ENDPOINT", help="publish KV events, tcp://127.0.0.1:5557")
    parser.add_argument("--purecache-events-replay", metavar="ENDPOINT", help="where they can be asked for again")
    parser.add_argument("--purecache-admin", type=int, metavar="PORT", help="serve an operator's commands")
    parser.add_argument("--purecache-host-form", choices=["slots", "arrays"], help="how host pages are kept")
    parser.add_argument("--purecache-copies", help="programs that copy them, as `purecache doctor` names them")
    parser.add_argument("--purecache-host-memory", choices=["pinned_host", "unpinned_host"], default="pinned_host")
    parser.add_argument("--purecache-force-unpinned", action="store_true", help="bfloat16 in unpinned memory, too")
    known, rest = parser.parse_known_args(list(arguments))
    if {"-h", "--help"} & set(rest):
        parser.print_help()
    options = Options(
        store=known.purecache_store,
        revision=known.purecache_revision,
        load_back_threshold=known.purecache_load_back_threshold,
        warm=known.purecache_warm,
        record=known.purecache_record,
        show=Showing(
            known.purecache_metrics, known.purecache_events, known.purecache_events_replay, known.purecache_admin
        ),
        host=HostOptions(
            host_form=known.purecache_host_form,
            copies=known.purecache_copies,
            host_memory=known.purecache_host_memory,
            force_unpinned=known.purecache_force_unpinned,
        ),
    )
    return options, rest


def _serve(options: Options) -> None:
    """Install the cache in a process of the server."""
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        # The CPU backend serves the cache alone then, whose calls are too short to be worth another thread.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    install(options)


def main() -> None:
    """Install the cache and start the server."""
    options, rest = parse(sys.argv[1:])
    os.environ[INHERITED] = json.dumps(sys.argv[1:])
    _serve(options)
    sys.argv[1:] = rest
    importlib.import_module("sgl_jax.launch_server").main()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and INHERITED in os.environ:
    # The server starts its scheduler as a new process, which imports this module first.
    _serve(parse(json.loads(os.environ[INHERITED]))[0])
