"""Pins: prefixes that stay for a time, whoever else asks for room. A pin has a lease, and is gone when that is over."""

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from purecache.answers import CacheError, Node, Receipt
from purecache.cache import PrefixCache
from purecache.effects import AgreedPlane
from purecache.inputs import Tokens
from purecache.namespaces import Namespace
from purecache.state import NONE
from purecache.state.layout import Account, Column, Tier

LONGEST = 86_400.0
"""Seconds of the longest lease, by default."""


class PinError(ValueError):
    """A pin that can't be made, or is not there; the message says why. Nothing was changed."""


@dataclass(frozen=True)
class Pin:
    """One pinned prefix."""

    name: str
    rank: int
    pages: int
    """Pages of the prefix, on device or on host."""
    device_pages: int
    """Those of them that were on device when it was pinned."""
    seconds_left: float


@dataclass
class _Lease:
    receipt: Receipt
    rank: int
    nodes: tuple[int, ...]
    """Deepest first."""
    born: int
    """Clock at which the deepest was: after a reset of the cache, the id is another node's."""
    device_pages: int
    ends: float


class Pins:
    """The pins of one cache; an `Observer` that ends those whose lease is over. Use it on the cache's thread.

    A pinned page is locked as those of a running request are: it stays in the tier where it is, and is neither
    forgotten nor evicted when its tier is made smaller. So pins have bounds: `share` of the pages that a rank has in
    use on device, and as much of those on host; `longest` seconds. A page that several pins hold counts once. They end
    with a reset of the cache.

    Rather give what is precious a higher priority, which yields when there is no other room.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        share: float = 0.25,
        longest: float = LONGEST,
        most: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Observe `cache`. most: pins at a time. clock: steady seconds.

        Raises ValueError for bounds that make no sense, and for a cache that several processes share, whose clocks
        differ.
        """
        if not 0 < share <= 1 or longest <= 0 or most < 1:
            raise ValueError("share must be in (0, 1], longest positive, and most at least 1")
        if isinstance(cache._driver.plane, AgreedPlane):
            raise ValueError("several processes share this cache: their clocks would end leases at different times")
        self._cache, self._longest, self._most, self._clock = cache, longest, most, clock
        self._share = share
        self._leases: dict[str, _Lease] = {}
        self._numbers = itertools.count(1)
        cache.observe(self)

    def pin(
        self,
        tokens: Tokens,
        seconds: float,
        *,
        namespace: Namespace = None,
        rank: int | None = 0,
        name: str | None = None,
    ) -> Pin:
        """Pin what is cached of a prompt, for so many seconds. A pin of the same name ends when the new one is made.

        Raises PinError where nothing is cached, and beyond a bound; CacheError for an unknown rank.
        """
        self._check(seconds)
        self._drop_void()
        match = self._cache.peek(tokens, namespace=namespace, rank=rank)
        if not match.length:
            raise PinError("nothing of this prompt is cached: run it first")
        name = name or self._new_name()
        old = self._leases.get(name)
        if old is None and len(self._leases) >= self._most:
            raise PinError(f"there are {self._most} pins already")
        nodes = self._path(match.node)
        self._check_share(nodes, rank or 0, leave_out=name)
        try:
            receipt = self._cache.lock(match.node)
        except CacheError as error:
            raise PinError(str(error)) from error
        if old is not None:
            self._end(name)
        born = int(self._cache.columns(Column.BORN)[0][nodes[0]])
        ends = self._clock() + seconds
        self._leases[name] = _Lease(receipt, rank or 0, nodes, born, len(match.device_pages), ends)
        return self._shown(name)

    def renew(self, name: str, seconds: float) -> Pin:
        """Let a pin end so many seconds from now. Raises PinError for one that is not there (any more)."""
        self._check(seconds)
        self._known(name).ends = self._clock() + seconds
        return self._shown(name)

    def release(self, name: str) -> None:
        """End a pin. Raises PinError for one that is not there (any more)."""
        self._known(name)
        self._end(name)

    def release_all(self) -> int:
        """End all pins; returns how many there were."""
        names = list(self._leases)
        for name in names:
            self._end(name)
        return len(names)

    def pins(self) -> list[Pin]:
        """All pins, in the order in which they were made."""
        self._drop_void()
        return [self._shown(name) for name in self._leases]

    def holders(self) -> dict[Receipt, str]:
        """The name of the pin behind each receipt."""
        return {lease.receipt: name for name, lease in self._leases.items()}

    def ticked(self, cache: PrefixCache) -> None:
        """End the pins whose lease is over."""
        if not self._leases:
            return
        now = self._clock()
        for name in [name for name, lease in self._leases.items() if lease.ends <= now]:
            self._end(name)

    def close(self) -> None:
        """End all pins and observe no more."""
        self.release_all()
        self._cache.unobserve(self)

    def _check(self, seconds: float) -> None:
        if not 0 < seconds <= self._longest:
            raise PinError(f"a lease is more than 0 and at most {self._longest:g} seconds, not {seconds:g}")

    def _check_share(self, nodes: tuple[int, ...], rank: int, leave_out: str) -> None:
        others = (lease for name, lease in self._leases.items() if lease.rank == rank and name != leave_out)
        held = sorted(set(nodes).union(*(lease.nodes for lease in others)))
        device, host = (column[held] >= 0 for column in self._cache.columns(Column.DEVICE_PAGE, Column.HOST_PAGE))
        for tier, number in ((Tier.DEVICE, int(device.sum())), (Tier.HOST, int((host & ~device).sum()))):
            in_use = self._cache.config.layout.capacity(tier) - self._cache.pages(Account.WITHHELD, tier, rank)
            if number > (limit := int(self._share * in_use)):
                where = f"{limit} pages of rank {rank} on {tier.name.lower()}"
                raise PinError(f"pins may hold {where}, with this one they would hold {number}")

    def _drop_void(self) -> None:
        """Forget pins that a reset of the cache has ended."""
        if self._leases:
            parents, born = self._cache.columns(Column.PARENT, Column.BORN)
            for name, lease in list(self._leases.items()):
                if parents[lease.nodes[0]] == NONE or born[lease.nodes[0]] != lease.born:
                    self._leases.pop(name)

    def _path(self, node: Node) -> tuple[int, ...]:
        """The nodes of a prefix, deepest first."""
        parents, at, path = self._cache.columns(Column.PARENT)[0], node.number, []
        while parents[at] != NONE:
            path.append(at)
            at = int(parents[at])
        return tuple(path)

    def _new_name(self) -> str:
        return next(name for name in (f"pin-{number}" for number in self._numbers) if name not in self._leases)

    def _known(self, name: str) -> _Lease:
        self._drop_void()
        if name not in self._leases:
            raise PinError(f"there is no pin {name!r}: its lease may be over")
        return self._leases[name]

    def _shown(self, name: str) -> Pin:
        lease = self._leases[name]
        return Pin(name, lease.rank, len(lease.nodes), lease.device_pages, max(0.0, lease.ends - self._clock()))

    def _end(self, name: str) -> None:
        lease = self._leases.pop(name)
        with contextlib.suppress(CacheError):  # if the cache was reset meanwhile, all receipts are void
            self._cache.unlock(lease.receipt)
