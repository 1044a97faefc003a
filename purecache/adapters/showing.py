"""What a server shows of its cache, and what it lets an operator do: metrics, KV events, an admin server.

Each needs packages of an extra, which are imported only where it is asked for.
"""

import importlib
import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass

import jax

from purecache.adapters.slot_cache import SlotCache
from purecache.control import Operator

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Showing:
    """Where a server answers, on this machine alone; None: it doesn't.

    metrics: port for Prometheus (extra `metrics`). events: endpoint on which KV events are published, such as
    `tcp://127.0.0.1:5557` (extra `events`), and events_replay: where they can be asked for again. admin: port of the
    admin server (extra `admin`). Port 0 is any free one; the log says which.
    """

    metrics: int | None = None
    events: str | None = None
    events_replay: str | None = None
    admin: int | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is anything to show."""
        return self != Showing()

    def begin(self, slots: SlotCache, **labels: str) -> ExitStack:
        """Start what is asked for, for the cache of a scheduler; `labels` are those of all metrics.

        Returns what ends it when it is closed. Only the first of several processes that serve one model does it. Raises
        ImportError without the packages, OSError or zmq.ZMQError where nothing can listen; nothing is left then.
        """
        with ExitStack() as begun:
            if jax.process_index() == 0:
                self._begin(slots, labels, begun)
            return begun.pop_all()

    def _begin(self, slots: SlotCache, labels: dict[str, str], begun: ExitStack) -> None:
        if self.metrics is not None:
            exporter = importlib.import_module("purecache.metrics.exporter").Metrics(labels)
            exporter.watch(slots.cache)
            server, _ = exporter.serve(self.metrics)
            begun.callback(server.server_close)
            begun.callback(server.shutdown)
            logger.info("purecache: metrics on http://127.0.0.1:%d", server.server_port)
        if self.events is not None:
            publisher = importlib.import_module("purecache.events.publisher")
            events = begun.enter_context(
                closing(publisher.KvEvents(slots.cache.config, self.events, self.events_replay))
            )
            slots.cache.observe(events)
            begun.callback(slots.cache.unobserve, events)
            logger.info("purecache: KV events on %s", events.address)
        if self.admin is not None:
            operator = begun.enter_context(closing(Operator(slots.cache, freed=slots.take_free)))
            admin = importlib.import_module("purecache.admin.server")
            begun.enter_context(closing(admin.AdminServer(operator, port=self.admin)))
