"""What an operator may ask of a running cache, from any thread: everything runs between two steps of the scheduler."""

import dataclasses
from collections.abc import Callable, Generator
from typing import Any, Protocol

from purecache.answers import CacheError
from purecache.cache import PrefixCache
from purecache.control.commands import Command, Commands, TooLateError
from purecache.control.flushes import flush
from purecache.control.pins import PinError, Pins
from purecache.control.sizes import Sizes
from purecache.control.storages import Storages
from purecache.control.views import hot_of, locks_of, stats_of
from purecache.inputs import Tokens
from purecache.namespaces import Namespace
from purecache.replay.tree import tree_as_text
from purecache.snapshots import Snapshot
from purecache.snapshots.taking import snapshot_of
from purecache.state import CacheState
from purecache.state.layout import Tier
from purecache.state.pools import ANCHOR
from purecache.stores.interface import Store

SESSION = "session:"
"""First letters of the name of a pin that stands for a session."""


class ControlError(ValueError):
    """What was asked for can't be done; the message says why. Nothing was changed."""


class Sessions(Protocol):
    """A scheduler's own sessions, as `purecache.adapters.sessions.SessionCache` has them."""

    def release_session(self, session_id: str) -> None:
        """Close a session. Called on the cache's thread."""
        ...


class Operator:
    """Commands for one cache. Make it on the cache's thread; then call it from any other one.

    Every method waits until the cache ticks, at most `timeout` seconds, and raises `TooLateError` then. Mistakes raise
    ControlError, PinError or CacheError, and change nothing.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        pins: Pins | None = None,
        sessions: Sessions | None = None,
        storages: Storages | None = None,
        freed: Callable[[], Any] | None = None,
        timeout: float = 10.0,
    ) -> None:
        """Observe `cache`. pins: default `Pins(cache)`. storages: how storage is attached; without it, it can't be.

        freed: called on the cache's thread whenever a command has freed device pages. A cache with an allocator outside
        needs it, to give them to that: `SlotCache.take_free` of its adapter. Raises ValueError where it is missing, and
        for a cache that several processes share.
        """
        if cache.config.external_pages and freed is None:
            raise ValueError(
                "an allocator outside has the device pages: say by `freed` how it gets those that are freed"
            )
        self._config, self._origin_of = cache.config, cache._inputs.origin_of
        self._commands = Commands(cache)
        self._pins = pins or Pins(cache)
        self._sizes = Sizes(cache)
        self._sessions, self._storages, self._timeout = sessions, storages, timeout
        self._freed = freed or (lambda: None)

    def close(self) -> None:
        """End all pins and commands. Call it on the cache's thread."""
        self._commands.close()
        self._pins.close()
        self._sizes.close()

    def _ask(self, command: Command) -> Any:
        return self._commands.ask(command, self._timeout)

    # ---- looking -------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Sizes, counters, pins, and what is being made smaller or larger."""

        def look(cache: PrefixCache) -> dict[str, Any]:
            pins = [dataclasses.asdict(pin) for pin in self._pins.pins()]
            return stats_of(cache) | {"pins": pins, "resizing": self._sizes.wanted()}

        return self._ask(look)

    def tree(self, lines: int = 400) -> str:
        """The tree as text, at most so many lines of it; with the first tokens of each prefix."""
        return tree_as_text(self._copied(lambda cache: cache.state), self._config, most_lines=lines)

    def hot(self, number: int = 20) -> list[dict[str, Any]]:
        """The hottest prefixes, with their first tokens."""
        return hot_of(self.snapshot(), number)

    def snapshot(self) -> Snapshot:
        """Which prefixes there are; see `PrefixCache.snapshot`. It has all tokens in the clear."""
        # Only the copy is made on the cache's thread: going over it takes a while.
        return snapshot_of(self._config, self._copied(lambda cache: cache.state), self._origin_of)

    def locks(self) -> list[dict[str, Any]]:
        """Every lock and unfinished transfer: who holds it, and which prefix."""
        state, holders = self._ask(lambda cache: (cache.state, self._pins.holders()))
        return locks_of(state, self._config, holders)

    def _copied(self, command: Callable[[PrefixCache], CacheState]) -> CacheState:
        return self._ask(command)

    # ---- what is cached ------------------------------------------------------------------------------------------

    def forget(
        self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0, keep: int | None = None
    ) -> dict[str, int]:
        """See `PrefixCache.forget`."""
        options = {"namespace": namespace, "rank": rank, "keep": keep}
        return self._deleting(lambda cache: cache.forget(tokens, **options)._asdict())

    def forget_namespace(self, namespace: Namespace) -> dict[str, int]:
        """See `PrefixCache.forget_namespace`."""
        return self._deleting(lambda cache: cache.forget_namespace(namespace)._asdict())

    def _deleting(self, command: Command) -> Any:
        def delete(cache: PrefixCache) -> Any:
            answer = command(cache)
            self._freed()
            return answer

        return self._ask(delete)

    def offload(self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0) -> dict[str, int]:
        """Begin to copy to host what of a prompt is on device only, whatever the write policy; pages on their way."""

        def begin(cache: PrefixCache) -> dict[str, int]:
            if not cache.config.host_pages:
                raise ControlError("this cache has no host pages")
            match = cache.peek(tokens, namespace=namespace, rank=rank)
            return {"tokens_on_device": match.device_length, "begun": cache.backup(match.device_node)}

        return self._ask(begin)

    def flush(self, tier: str) -> dict[str, int]:
        """Evict all that nothing holds from a tier, "device" or "host"; see `purecache.control.flushes.flush`."""
        tiers = {"device": Tier.DEVICE, "host": Tier.HOST}
        if tier not in tiers:
            raise ControlError(f"a tier is one of {', '.join(tiers)}, not {tier!r}: storage is cleared")

        def work(cache: PrefixCache) -> Generator[None, None, dict[str, int]]:
            parts = flush(cache, tiers[tier])
            while True:
                try:
                    next(parts)
                except StopIteration as end:
                    return end.value
                finally:
                    self._freed()
                yield

        return self._ask(work)

    def reset(self) -> None:
        """Forget every prefix, also those that requests hold: for an idle server, after new weights.

        Raises ControlError where an allocator outside has the device pages, which its scheduler must reset together.
        """
        if self._config.external_pages:
            raise ControlError("the scheduler has the device pages: reset its cache, as it does for new weights")
        self._ask(lambda cache: cache.reset())

    def resize(
        self,
        *,
        device_pages: int | None = None,
        host_pages: int | None = None,
        rank: int | None = None,
        pool: str = ANCHOR,
    ) -> dict[str, Any]:
        """Begin to use so many pages per rank, at most those that the cache was built with; it goes on at every tick.

        Returns the pages in use, and the sizes that are `wanted` still.
        """
        sizes = {"device_pages": device_pages, "host_pages": host_pages}
        return self._ask(lambda cache: self._sizes.resize(**sizes, rank=rank, pool=pool))

    # ---- pins and sessions ---------------------------------------------------------------------------------------

    def pin(
        self,
        tokens: Tokens,
        seconds: float,
        *,
        namespace: Namespace = None,
        rank: int | None = 0,
        name: str | None = None,
    ) -> dict[str, Any]:
        """See `Pins.pin`."""
        options = {"namespace": namespace, "rank": rank, "name": name}
        return dataclasses.asdict(self._ask(lambda cache: self._pins.pin(tokens, seconds, **options)))

    def renew(self, name: str, seconds: float) -> dict[str, Any]:
        """See `Pins.renew`."""
        return dataclasses.asdict(self._ask(lambda cache: self._pins.renew(name, seconds)))

    def release(self, name: str) -> None:
        """See `Pins.release`."""
        self._ask(lambda cache: self._pins.release(name))

    def open_session(
        self, session: str, tokens: Tokens, seconds: float, *, namespace: Namespace = None, rank: int | None = 0
    ) -> dict[str, Any]:
        """Keep what is cached of a conversation until its next turn, at most so many seconds: a pin of its name.

        Called again with the longer conversation, and once more time, it moves on.
        """
        return self.pin(tokens, seconds, namespace=namespace, rank=rank, name=SESSION + session)

    def close_session(self, session: str) -> dict[str, bool]:
        """End the pin of a session, and tell the scheduler's own sessions, if it has any; what of that was done."""

        def end(cache: PrefixCache) -> dict[str, bool]:
            if self._sessions is not None:
                self._sessions.release_session(session)
            try:
                self._pins.release(SESSION + session)
            except PinError:
                return {"pin": False, "scheduler": self._sessions is not None}
            return {"pin": True, "scheduler": self._sessions is not None}

        return self._ask(end)

    # ---- storage -------------------------------------------------------------------------------------------------

    def attach_storage(self, url: str) -> None:
        """Open a store and put it under the cache. Raises ControlError where that can't be."""
        storages = self._configured()
        if self._ask(lambda cache: cache._driver.storage is not None):
            raise ControlError("storage is attached already: detach it first")
        try:
            store = storages.open(url)
        except Exception as error:  # whatever a client of an engine raises is about this URL
            raise ControlError(f"the store was not opened: {error}") from error
        attached: list[bool] = []

        def attach(cache: PrefixCache) -> None:
            storages.attach(cache, store)
            attached.append(True)

        try:
            self._ask(attach)
        except (ValueError, TooLateError) as error:
            if not attached:
                store.close()
            if isinstance(error, TooLateError):
                raise
            raise ControlError(str(error)) from error

    def detach_storage(self) -> bool:
        """Take storage off the cache; whether there was any. What it has stays there."""
        storages = self._configured()
        return self._ask(storages.detach)

    def clear_storage(self) -> dict[str, int]:
        """Remove all objects of the store; waits for it, on the thread that asks. Returns its numbers.

        Pages that the tree takes for stored are not stored again until they come anew.
        """
        store = self._store()
        store.clear()
        return store.stats()

    def resize_storage(self, capacity_bytes: int) -> dict[str, int]:
        """Let the store hold so many bytes. Raises ControlError for one that can't change that while it is open."""
        store = self._store()
        try:
            able = store.resize(capacity_bytes)
        except ValueError as error:
            raise ControlError(str(error)) from error
        if not able:
            raise ControlError(f"a {type(store).__name__} can't change its capacity while it is open")
        return store.stats()

    def _configured(self) -> Storages:
        if self._storages is None:
            raise ControlError("this process does not say how storage is attached (see purecache.control.storages)")
        return self._storages

    def _store(self) -> Store:
        found = self._ask(lambda cache: cache._driver.storage)
        if found is None:
            raise ControlError("no storage is attached")
        return found.guard.store


MISTAKES = (ControlError, PinError, CacheError)
"""What the methods of `Operator` raise for a mistake of who asks."""
