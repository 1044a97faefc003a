"""What a scheduler does with one request, on a real cache without bytes."""

from dataclasses import dataclass

import jax
import numpy as np

from purecache import PrefixCache
from purecache.answers import Load, Receipt
from purecache.driver import control_device
from purecache.state import as_jax
from purecache.state.layout import TIERS, Account
from purecache.traces.disk import Disk, Reading
from purecache.traces.setting import RunSetting
from purecache.traces.withheld import roomy, width_for, withheld_state
from purecache.workloads import PagedTrace


@dataclass(eq=False)
class Running:
    """A request that holds pages and a lock."""

    request: int
    pages: np.ndarray
    """int32[n]: device pages, those of the prefix first."""
    receipt: Receipt
    device: int
    """Pages of its prompt that were found on device."""
    host: int
    """Pages that were loaded back, and had not come from disk for it."""
    disk: int
    """Pages that a prefetch had brought for it."""


class Engine:
    """A cache of a setting, and requests of a trace that come and go. Call it in the order of time."""

    def __init__(self, trace: PagedTrace, setting: RunSetting) -> None:
        """An empty one."""
        self.trace, self.setting = trace, setting
        config = setting.config(trace.page_tokens)
        large = roomy(config)
        self.cache = PrefixCache(large, smallest=width_for(trace.largest))
        state = as_jax(withheld_state(config, large), control_device())
        self.cache._driver._current[:] = [(jax.tree.leaves(state), None)]
        self.disk = Disk(self.cache, setting.disk_pages) if setting.disk_pages else None
        self._brought: dict[int, int] = {}
        """Pages that a prefetch has brought, by request that has not begun."""

    def queue(self, request: int) -> Reading | None:
        """A request arrives: its prefetch begins, if the disk has something for it."""
        if self.disk is None or self.setting.prefetch == "off":
            return None
        return self.disk.begin(self._prompt(request))

    def arrived(self, request: int, reading: Reading, landed: int) -> None:
        """Its prefetch is over, with the first `landed` pages."""
        assert self.disk is not None
        self._brought[request] = self.disk.end(reading, landed)
        self.cache.tick()

    def begin(self, request: int, extra: int = 0) -> Running | None:
        """Match, load back, lock and allocate: pages of the trace and `extra` ones. None if there is no room."""
        cache, total = self.cache, int(self.trace.sizes[request]) + extra
        match = cache.match(self._prompt(request))
        pages, node = match.device_pages, match.device_node
        if match.host_length and isinstance(load := cache.load_back(match), Load):
            pages, node = np.concatenate([pages, load.pages]), match.node
        receipt = cache.lock(node)
        lent = cache.allocate(total - len(pages))
        if lent is None:
            cache.unlock(receipt)
            return None
        loaded = len(pages) - match.device_length
        disk = min(loaded, self._brought.pop(request, 0))
        return Running(request, np.concatenate([pages, lent]), receipt, match.device_length, loaded - disk, disk)

    def prefilled(self, running: Running) -> None:
        """Its prompt is computed: others may use it, while it goes on with its answer."""
        prompt = self.trace.pages(running.request)[: self.trace.prompt_pages[running.request]]
        inserted = self.cache.checkpoint(prompt, running.pages[: len(prompt)], running.receipt)
        running.pages = np.concatenate([inserted.pages, running.pages[len(inserted.pages) :]])
        self.cache.tick()

    def end(self, running: Running, counted: int = 0) -> None:
        """It has ended: its pages go to the tree, or back. `counted`: pages whose use was counted by `prefilled`."""
        self.cache.finish(self.trace.pages(running.request), running.pages, running.receipt, counted=counted)
        self.cache.tick()

    def pages(self) -> dict[str, dict[str, int]]:
        """Pages by tier and account, for `Moment.pages`."""
        found = {}
        for tier in TIERS:
            accounts = (each for each in Account if each is not Account.WITHHELD)
            here = {each.name.lower(): self.cache.pages(each, tier) for each in accounts}
            found[tier.name.lower()] = here
        used = len(self.disk) if self.disk else 0
        return {**found, "disk": {"free": self.setting.disk_pages - used, "used": used}}

    def _prompt(self, request: int) -> np.ndarray:
        return self.trace.pages(request)[: self.trace.match_pages[request]]
