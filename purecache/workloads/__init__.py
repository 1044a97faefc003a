"""Workloads: requests of recorded traces, or generated ones. Uses nothing of the cache."""

from purecache.workloads.generated import generated
from purecache.workloads.paging import PagedTrace, paged
from purecache.workloads.readers import FORMS, kv_cache_tester, mooncake, qwen, read_trace, token_lines
from purecache.workloads.request import BLOCK, Request, Trace

__all__ = [
    "BLOCK",
    "FORMS",
    "PagedTrace",
    "Request",
    "Trace",
    "generated",
    "kv_cache_tester",
    "mooncake",
    "paged",
    "qwen",
    "read_trace",
    "token_lines",
]
