"""The decode side of a disaggregated pair: what it computes goes to storage while it decodes.

purecache takes no part in the transfer from prefill to decode: see docs/disaggregation.md.
"""

from typing import Any

from purecache.adapters.scheduler_cache import SchedulerCache


class DecodeOffload:
    """Gives what running requests have computed to the tree, and so to host memory and storage, as they go.

    The same prefix is then found there under the same key by any engine that shares the store: for the next turn of a
    conversation, or when the request has to start again. Without it, a request's pages are offered when it ends.
    """

    def __init__(self, cache: SchedulerCache, every: int = 256) -> None:
        """`every`: new tokens of a request after which they are offloaded. Raises ValueError for less than a page, and
        for a cache without storage, for which nothing would come of it."""
        width = cache.cache.config.page_size
        if every < width:
            raise ValueError(f"every must be at least a page of {width} tokens, not {every}")
        if cache.prefetches.tier is None:
            raise ValueError("decode offload needs storage: attach a storage backend first")
        self._cache, self._every, self._width = cache, every, width

    def offload_kv_cache(self, req: Any) -> bool:
        """Call it after a decode step: once enough is new, gives the request's whole pages to the tree, which copies
        them to host and on to storage. Whether it was enough. Never waits."""
        committed = int(req.kv_committed_len)
        held = req.last_node.length if hasattr(req.last_node, "length") else 0
        if committed // self._width * self._width - held < self._every:
            return False
        # A scheduler keeps these of the prefill only; the last token was sampled and is not computed yet.
        req.fill_ids = (list(req.origin_input_ids) + list(req.output_ids))[:committed]
        self._cache.cache_unfinished_req(req)
        # Also where the policy copies nothing before a second use, or before an eviction.
        self._cache.cache.backup(req.last_node.node)
        return True

    def check_offload_progress(self) -> None:
        """Call it between steps: moves copies and stores on. Never waits."""
        self._cache.check_hicache_events()
