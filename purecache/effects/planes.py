"""The data plane of a cache with several pools: one interpreter per pool."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from purecache.effects.interpreter import Interpreter
from purecache.effects.transfers import Completion, Transfer, TransferKind, completion_of
from purecache.state import CacheConfig
from purecache.state.pools import ANCHOR


@dataclass
class _Open:
    """A transfer that was not reported yet."""

    transfer: Transfer
    left: int
    """Pools that have not reported it."""
    ok: np.ndarray


class Planes:
    """Interpreters by name of their pools: "kv", tail pools, and side pools, which go along with their anchor.

    A page counts as arrived when it has arrived in its pool and in every side pool of that.
    """

    def __init__(self, planes: Mapping[str, Interpreter]) -> None:
        self.planes = dict(planes)
        self._groups: list[list[str]] = []
        """Names of the interpreters that carry out the transfers of each pool of the control plane."""
        self._open: dict[tuple[int, int], _Open] = {}
        """By operation and generation, in the order of their start."""

    def bind(self, config: CacheConfig) -> None:
        """Learn which pools go together. Raises ValueError unless there is exactly one interpreter per pool, with room
        for its pages."""
        names = [ANCHOR, *(spec.name for spec in config.pools)]
        if sorted(names) != sorted(self.planes):
            raise ValueError(f"the configuration has the pools {names}, but there are planes for {list(self.planes)}")
        self._groups = [[] for _ in config.pool_names]
        for name in names:
            pool = config.pool_of(name)
            self._groups[pool].append(name)
            sizes = config.layout.capacity(0, pool), max(1, config.layout.capacity(1, pool))
            found = self.planes[name].device_pages, self.planes[name].host_pages
            if found != sizes:
                raise ValueError(f"pool {name} has {sizes} device and host pages per rank, but its plane {found}")

    @property
    def pools(self) -> dict[str, Any]:
        """The device pools by name."""
        return {name: plane.pool for name, plane in self.planes.items()}

    @pools.setter
    def pools(self, pools: Mapping[str, Any]) -> None:
        for name, pool in pools.items():
            self.planes[name].pool = pool

    @property
    def pool(self) -> Any:
        """The device pool of the anchor."""
        return self.planes[ANCHOR].pool

    @pool.setter
    def pool(self, pool: Any) -> None:
        self.planes[ANCHOR].pool = pool

    @property
    def in_flight(self) -> int:
        """Transfers started and not reported."""
        return len(self._open)

    def start(self, transfer: Transfer) -> None:
        """Dispatch the copies of `transfer` in every pool that it is about; see `Interpreter.start`."""
        names = self._groups[transfer.pool]
        checked = [self.planes[name].check(transfer) for name in names]  # so that none starts if one can't
        key = (transfer.operation, transfer.generation)
        self._open[key] = _Open(transfer, len(names), np.ones(len(transfer.target), bool))
        for name, each in zip(names, checked, strict=True):
            self.planes[name].launch(each)

    def copy(self, source: int, target: int, rank: int, pool: int = 0) -> bool:
        """Copy a device page within every pool that goes by these ids; whether that went well."""
        done = [self.planes[name].copy(source, target, rank) for name in self._groups[pool]]
        return all(done)

    def poll(self) -> list[Completion]:
        """Transfers that have ended everywhere since the last call, in the order in which they were started.

        A load back is never reported before an older one, whatever their pools.
        """
        return self._collect(lambda plane: plane.poll())

    def drain(self) -> list[Completion]:
        """Wait for everything in flight and report it."""
        return self._collect(lambda plane: plane.drain())

    def _collect(self, ask: Callable[[Interpreter], list[Completion]]) -> list[Completion]:
        for plane in self.planes.values():
            for done in ask(plane):
                each = self._open[done.operation, done.generation]
                each.left, each.ok = each.left - 1, each.ok & done.ok
        ended, loading = [], False
        for key, each in list(self._open.items()):
            # A value is of use once its kv is there, and that was started before it.
            load = each.transfer.kind is TransferKind.LOAD_BACK
            loading |= load and each.left > 0
            if not each.left and not (load and loading):
                ended.append(completion_of(each.transfer, each.ok))
                del self._open[key]
        return ended

    @property
    def commit_alone(self) -> bool:
        """See `Interpreter.commit_alone`."""
        return all(plane.commit_alone for plane in self.planes.values())

    @commit_alone.setter
    def commit_alone(self, alone: bool) -> None:
        for plane in self.planes.values():
            plane.commit_alone = alone

    def hurry(self) -> None:
        """See `Interpreter.hurry`."""
        for plane in self.planes.values():
            plane.hurry()

    def settle(self) -> None:
        """See `Interpreter.settle`."""
        for plane in self.planes.values():
            plane.settle()

    def fetched(self) -> dict[tuple[int, int], bool]:
        """See `Interpreter.fetched`; a load back of several pools waits until all have fetched."""
        found: dict[tuple[int, int], list[bool]] = {}
        for plane in self.planes.values():
            for key, arrived in plane.fetched().items():
                found.setdefault(key, []).append(arrived)
        not_yet = self.fetching()
        return {key: all(arrived) for key, arrived in found.items() if key not in not_yet}

    def fetching(self) -> set[tuple[int, int]]:
        """See `Interpreter.fetching`."""
        return set().union(*(plane.fetching() for plane in self.planes.values()))

    def commit(self, operation: int, generation: int, ok: bool) -> None:
        """See `Interpreter.commit`."""
        for plane in self.planes.values():
            plane.commit(operation, generation, ok)

    def drop_host(self, pages: np.ndarray, rank: int, pool: int = 0) -> None:
        """Give up host pages of a pool; see `Interpreter.drop_host`."""
        for name in self._groups[pool]:
            self.planes[name].drop_host(pages, rank)

    def reset(self) -> None:
        """Forget the transfers in flight and every host page."""
        self._open.clear()
        for plane in self.planes.values():
            plane.reset()

    def warm(self) -> None:
        """Compile every program that can be needed."""
        for plane in self.planes.values():
            plane.warm()

    def programs(self) -> list[dict[str, Any]]:
        """What was compiled, with the name of the pool."""
        return [row | {"pool": name} for name, plane in self.planes.items() for row in plane.programs()]

    def counters(self) -> dict[str, int]:
        """Totals over all pools."""
        each = [plane.counters() for plane in self.planes.values()]
        return {name: sum(counters[name] for counters in each) for name in each[0]}
