"""Known faults: small changes of the transitions, each of which an exploration must find.

A check that finds nothing is worth what it finds when there is something. Each mutant exchanges one function wherever
the transitions use it.
"""

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import purecache.transitions
from purecache import program_files
from purecache.check.programs import programs_of
from purecache.state.layout import NONE, Column, Ledger
from purecache.transitions.walk import bucket_of


@dataclass(frozen=True)
class Mutant:
    """One fault. `function`: module of the transitions and name, as in "locks.is_good"."""

    name: str
    about: str
    function: str
    change: Callable[[Any], Any]
    """From the right function to the wrong one."""
    world: str = "least"
    """Where it is to be found."""
    only_here: bool = False
    """Whether only the module that `function` names uses the wrong one."""

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The fault is in force within: in programs that are made within."""
        module, _, name = self.function.partition(".")
        home = importlib.import_module(f"purecache.transitions.{module}")
        right = getattr(home, name)
        users = [home] if self.only_here else [each for each in _modules() if getattr(each, name, None) is right]
        wrong = self.change(right)
        self._exchange(users, name, wrong)
        try:
            with program_files.unused():
                yield
        finally:
            self._exchange(users, name, right)

    @staticmethod
    def _exchange(users: list[Any], name: str, function: Any) -> None:
        for user in users:
            setattr(user, name, function)
        programs_of.cache_clear()


def _modules() -> list[Any]:
    package = purecache.transitions
    names = [f"{package.__name__}.{each.name}" for each in pkgutil.iter_modules(package.__path__)]
    return [package, *(importlib.import_module(name) for name in names)]


def _all_members(_: Any) -> Any:
    return lambda token, ok, members: jnp.arange(ok.shape[0]) < members


def _unchanged(_: Any) -> Any:
    return lambda state, *rest, **more: state


def _whatever_generation(right: Any) -> Any:
    def close(state: Any, kind: Any, handle: Any, size: int, pool: int = 0) -> Any:
        number = jnp.clip(handle.operation, 0, state.layout.max_operations - 1)
        generation = state.ledger[Ledger.OPERATION_GENERATION, number]
        return right(state, kind, handle._replace(generation=generation), size, pool)

    return close


def _held_receipt(_: Any) -> Any:
    def is_good(state: Any, handle: Any) -> jax.Array:
        inside = (handle.receipt >= 0) & (handle.receipt < state.layout.max_receipts)
        return inside & (state.ledger[Ledger.RECEIPT_NODE, jnp.where(inside, handle.receipt, 0)] != NONE)

    return is_good


def _any_live_node(_: Any) -> Any:
    def is_live(state: Any, handle: Any) -> jax.Array:
        inside = (handle.node >= 0) & (handle.node < state.layout.nodes + state.layout.ranks)
        node = jnp.where(inside, handle.node, 0)
        return inside & ((node >= state.layout.nodes) | (state.nodes[Column.PARENT, node] != NONE))

    return is_live


def _first_in_chain(_: Any) -> Any:
    def find_child(state: Any, parent: Any, tokens: Any, namespace: Any) -> jax.Array:
        node = state.links[bucket_of(state, parent, tokens, namespace)]
        return jnp.where((node != NONE) & (state.nodes[Column.PARENT, node] == parent), node, NONE)

    return find_child


def _never_doomed(right: Any) -> Any:
    return lambda state, node: right(state, node)._replace(doomed=jnp.bool_(False))


MUTANTS = (
    Mutant("locks-ignored", "locked pages are evicted", "victims._is_locked", lambda _: lambda *_: jnp.bool_(False)),
    Mutant(
        "load-publishes-all",
        "a load back publishes pages that did not arrive",
        "load_back.leading_run",
        _all_members,
        only_here=True,
    ),
    Mutant(
        "backup-publishes-all",
        "a backup publishes pages that did not arrive",
        "backup.leading_run",
        _all_members,
        only_here=True,
    ),
    Mutant(
        "late-completion", "a completion that comes twice counts", "operations.close_operation", _whatever_generation
    ),
    Mutant("receipt-twice", "a receipt is taken back twice", "locks.is_good", _held_receipt),
    Mutant("id-reused", "a node that uses an id again is taken for the old one", "locks.is_live", _any_live_node),
    Mutant("dead-in-hash", "nodes that go stay in the hash table", "nodes.drop_from_hash", _unchanged),
    Mutant(
        "collision", "a page of the same hash is taken for the right one", "walk.find_child", _first_in_chain, "bucket"
    ),
    Mutant(
        "any-page",
        "an insert takes pages that are not the caller's",
        "lend.all_lent_once",
        lambda _: lambda state, *rest: (state, jnp.bool_(True)),
    ),
    Mutant("load-unpinned", "a load back leaves its locks behind", "load_back.unlock_path", _unchanged, only_here=True),
    Mutant(
        "doomed-load",
        "a load back over one that will be rolled back takes its pages",
        "load_back._chain",
        _never_doomed,
        "pair",
    ),
    Mutant("order-forgotten", "what comes to a tier is not listed for eviction", "orders.arrive", _unchanged),
    Mutant("duplicates-kept", "a request's duplicates are not freed", "lend.hand_back", _unchanged),
    Mutant(
        "prefetch-leaks",
        "what a prefetch does not need is not freed",
        "prefetch.give_pages",
        _unchanged,
        "storage",
        True,
    ),
)
"""Every mutant, by what it breaks."""
