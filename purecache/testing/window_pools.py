"""Stand-ins for sglang-jax's memory of models with sliding windows: two pools, and one allocator of both.

Slots of full attention are mapped to slots of the window's pool; 0 means none. Where the originals accept a mistake
silently, these raise AssertionError.
"""

import numpy as np

from purecache.testing.pools import KVPool, TokenSlots


class WindowPool:
    """The two pools of a model."""

    def __init__(self, full_kv_pool: KVPool, swa_kv_pool: KVPool) -> None:
        self.full_kv_pool, self.swa_kv_pool = full_kv_pool, swa_kv_pool
        self.page_size, self.dp_size = full_kv_pool.page_size, full_kv_pool.dp_size


class WindowSlots:
    """An allocator of slots of both pools. `full` and `window` keep the two."""

    def __init__(self, full: TokenSlots, window: TokenSlots) -> None:
        self.full_attn_allocator, self.swa_attn_allocator = full, window
        self.page_size, self.dp_size = full.page_size, full.dp_size
        self.size, self.size_per_rank = full.size, full.size_per_rank
        self._kvcache = WindowPool(full.get_kvcache(), window.get_kvcache())
        self._group: list[tuple[int, np.ndarray]] | None = None
        maps = [np.zeros(full.size_per_rank + self.page_size, np.int32) for _ in range(self.dp_size)]
        self.full_to_swa_index_mapping: np.ndarray | list[np.ndarray] = maps[0] if self.dp_size == 1 else maps

    def get_kvcache(self) -> WindowPool:
        """The pools that the slots are in."""
        return self._kvcache

    def map(self, dp_rank: int) -> np.ndarray:
        """int32 [slots]: the map of a rank itself."""
        maps = self.full_to_swa_index_mapping
        return maps[dp_rank] if isinstance(maps, list) else maps

    def full_available_size(self, dp_rank: int = 0) -> int:
        """Free slots of full attention of a rank."""
        return self.full_attn_allocator.available_size(dp_rank)

    def swa_available_size(self, dp_rank: int = 0) -> int:
        """Free window slots of a rank."""
        return self.swa_attn_allocator.available_size(dp_rank)

    def available_size(self, dp_rank: int = 0) -> int:
        """The smaller of the two."""
        return min(self.full_available_size(dp_rank), self.swa_available_size(dp_rank))

    def alloc(self, need_size: int, dp_rank: int = 0) -> np.ndarray | None:
        """As many slots of both, or None."""
        if need_size > self.available_size(dp_rank):
            return None
        full = self.full_attn_allocator.alloc(need_size, dp_rank)
        window = self.swa_attn_allocator.alloc(need_size, dp_rank)
        return self._mapped(full, window, dp_rank)

    def alloc_extend(
        self, prefix_lens: list[int], seq_lens: list[int], last_loc: list[int], extend_num_tokens: int, dp_rank: int = 0
    ) -> np.ndarray | None:
        """Slots of both for sequences that grow, see `PagedSlots.alloc_extend`."""
        known = [int(self.map(dp_rank)[last]) if last >= 0 else -1 for last in last_loc]
        for begin, last in zip(prefix_lens, known, strict=True):
            assert begin % self.page_size == 0 or last > 0, "a page is filled up whose window page was freed"
        sizes = (prefix_lens, seq_lens)
        full = self.full_attn_allocator.alloc_extend(*sizes, last_loc, extend_num_tokens, dp_rank)  # type: ignore[attr-defined]
        window = self.swa_attn_allocator.alloc_extend(*sizes, known, extend_num_tokens, dp_rank)  # type: ignore[attr-defined]
        if full is None or window is None:
            for allocator, slots in ((self.full_attn_allocator, full), (self.swa_attn_allocator, window)):
                assert slots is None or not len(slots), f"{allocator} has too few slots, and the other has given some"
            return None
        return self._mapped(full, window, dp_rank)

    def alloc_decode(self, seq_lens: list[int], last_loc: list[int], dp_rank: int = 0) -> np.ndarray | None:
        """One slot of both for each sequence, whose length with it is given."""
        return self.alloc_extend([length - 1 for length in seq_lens], seq_lens, last_loc, len(seq_lens), dp_rank)

    def free(self, free_index: np.ndarray, dp_rank: int = 0) -> None:
        """Take slots back, and the window slots that they are mapped to."""
        if len(free_index) == 0:
            return
        if self._group is not None:
            self._group.append((dp_rank, np.array(free_index)))
            return
        self.full_attn_allocator.free(free_index, dp_rank)
        self.free_swa(free_index, dp_rank)

    def free_swa(self, free_index: np.ndarray, dp_rank: int = 0) -> None:
        """Take the window slots back that these slots are mapped to, if they are."""
        mapping = self.map(dp_rank)
        slots = mapping[free_index]
        self.swa_attn_allocator.free(slots[slots > 0], dp_rank)
        mapping[free_index] = 0

    def free_group_begin(self) -> None:
        """From now on, `free` waits for the end of the group."""
        self._group = []

    def free_group_end(self) -> None:
        """Free all of the group."""
        group, self._group = self._group or [], None
        for rank, slots in group:
            self.free(slots, rank)

    def clear(self, dp_rank: int | None = None) -> None:
        """Everything is free."""
        self.full_attn_allocator.clear(dp_rank)
        self.swa_attn_allocator.clear(dp_rank)
        for rank in range(self.dp_size) if dp_rank is None else [dp_rank]:
            self.map(rank)[:] = 0

    def _mapped(self, full: np.ndarray | None, window: np.ndarray | None, dp_rank: int) -> np.ndarray:
        assert full is not None, "there were slots of full attention a moment ago"
        assert window is not None, "there were window slots a moment ago"
        mapping = self.map(dp_rank)
        stale = full[mapping[full] != 0]
        assert not len(stale), f"slot {stale[:1]} of rank {dp_rank} is new, but mapped to a window slot already"
        mapping[full] = window
        return full


def check_map(slots: WindowSlots, rank: int) -> np.ndarray:
    """Check the map of a rank: every page of the window's pool that is not free has one page of full attention.

    Returns the slots of full attention that are mapped.
    """
    mapping, width, where = slots.map(rank), slots.page_size, f"rank {rank}"
    mapped = np.flatnonzero(mapping)
    free = np.setdiff1d(mapped, slots.full_attn_allocator.owned(rank))
    assert not len(free), f"{where}: slot {free[:1]} is free, but still mapped to a window slot"
    windows = mapping[mapped]
    assert len(np.unique(windows)) == len(windows), f"{where}: two slots are mapped to one window slot"
    assert (windows % width == mapped % width).all(), f"{where}: a slot is mapped into the middle of another page"
    pages, places = np.unique(windows // width, return_index=True)
    assert (mapped[places[np.searchsorted(pages, windows // width)]] // width == mapped // width).all(), (
        f"{where}: two pages are mapped to one window page"
    )
    owned = np.unique(slots.swa_attn_allocator.owned(rank) // width)
    lost, wrong = np.setdiff1d(owned, pages), np.setdiff1d(pages, owned)
    assert not len(lost), f"{where}: window page {lost[:1]} is not free, but no slot is mapped to it: it is lost"
    assert not len(wrong), f"{where}: window page {wrong[:1]} is free, but a slot is mapped to it"
    return mapped
