"""Metrics of caches for Prometheus, through prometheus-client."""

import threading
from collections.abc import Iterable, Mapping
from typing import Any

try:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("metrics need prometheus-client: pip install purecache[metrics]") from error

from purecache.cache import PrefixCache
from purecache.histograms import Histogram
from purecache.metrics.families import Point, points
from purecache.metrics.samples import Sampler
from purecache.state import CacheConfig

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_TYPES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class Metrics(Collector):
    """Metrics of one or more caches: `metrics.watch(cache)`, then `metrics.serve(9400)` or `metrics.register()`.

    The thread of a cache copies its numbers at every tick; everything else happens on the thread that is scraped.
    """

    def __init__(self, labels: Mapping[str, str] | None = None, *, prefix: str = "sglang") -> None:
        """labels: constant ones of all metrics, such as model_name or tp_rank. prefix: of the names that sglang has
        too; take another one where its own metrics are in the same registry."""
        self._labels, self._prefix = dict(labels or {}), prefix
        self._watched: list[tuple[Sampler, CacheConfig, dict[str, str]]] = []

    def watch(self, cache: PrefixCache, **labels: str) -> None:
        """Observe a cache; `labels` tell it from others. Raises ValueError if another cache has the same labels, or
        labels of other names."""
        known = [each for _, _, each in self._watched]
        if labels in known or (known and set(labels) != set(known[0])):
            raise ValueError(f"caches need labels of the same names and other values: {[*known, labels]}")
        sampler = Sampler()
        cache.observe(sampler)
        self._watched.append((sampler, cache.config, dict(labels)))

    def register(self, registry: prometheus_client.CollectorRegistry = prometheus_client.REGISTRY) -> None:
        """Export them with what else is in a registry. Raises ValueError where a name is taken."""
        registry.register(self)

    def serve(self, port: int, address: str = "127.0.0.1") -> tuple[Any, threading.Thread]:
        """Serve them alone over HTTP; returns the server (`shutdown` and `server_close` end it) and its thread."""
        registry = prometheus_client.CollectorRegistry()
        self.register(registry)
        return prometheus_client.start_http_server(port, address, registry)

    def collect(self) -> Iterable[Family]:
        """What prometheus-client calls at a scrape."""
        families: dict[str, Family] = {}
        for sampler, config, own in self._watched:
            if (sample := sampler.sample) is None:
                continue
            constant = self._labels | own
            for point in points(sample, config, self._prefix):
                labels = constant | point.labels
                if point.name not in families:
                    families[point.name] = _TYPES[point.type](point.name, point.help, labels=list(labels))
                _add(families[point.name], list(labels.values()), point)
        return families.values()


def _add(family: Family, labels: list[str], point: Point) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(point.value, Histogram)
        family.add_metric(labels, _cumulative(point.value), point.value.total)
    else:
        assert not isinstance(point.value, Histogram)
        family.add_metric(labels, point.value)


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Buckets as Prometheus has them: values up to each bound."""
    ends = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    sums = [sum(histogram.counts[: place + 1]) for place in range(len(ends))]
    return list(zip(ends, map(float, sums), strict=True))
