"""Stand-ins for sglang-jax's memory: allocators that know what is free, and a pool of KV that can be checked.

Slots are numbered per rank. Page p of P tokens has slots pP to pP + P - 1; page 0 is padding.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_MODULUS = 1 << 24  # whole numbers below are exact in float32
_STRIDE = 104729


def marks_of(tokens: list[int], extra_key: str | None, shifted: bool) -> np.ndarray:
    """A number for each token that depends on `extra_key` and all tokens up to it: int64 below 2**24.

    Not on the rank: models compute the same on all, and storage may be shared by them.
    `shifted`: on the token after it too, like the KV of a draft model. The last token then has none.
    """
    state, marks = zlib.crc32(repr(extra_key).encode()), []
    for token in tokens:
        state = zlib.crc32(token.to_bytes(8, "little"), state)
        marks.append(state % _MODULUS)
    return np.asarray(marks[1:] if shifted else marks, np.int64)


class KVPool:
    """Pages of KV: `kv_buffer` has per layer an array float32 [pages of all ranks, page_size, heads, 1, dim].

    Rank r has pages r * pages_per_rank to (r + 1) * pages_per_rank - 1, the first of them padding. `moment` is called
    whenever someone asks for `kv_buffer`: in a server, a forward may take the arrays at any such moment.
    """

    layer_num, head_num, head_dim, dtype = 2, 2, 4, jnp.float32

    def __init__(self, size: int, page_size: int, dp_size: int = 1) -> None:
        self.size, self.page_size, self.dp_size = size, page_size, dp_size
        self.pages_per_rank = size // dp_size // page_size + 1
        devices = jax.devices()[: dp_size if len(jax.devices()) >= dp_size else 1]
        # As in sglang-jax: shardings are part of the types of these arrays, and whoever writes them must say which.
        self.mesh = Mesh(np.asarray(devices)[:, None], ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
        self.kv_sharding = NamedSharding(self.mesh, PartitionSpec("data", None, "tensor", None, None))
        self.start_layer = 0
        self.attention_data_partition_axis, self.kv_partition_axis = "data", "tensor"
        self.moment: Callable[[], None] = lambda: None
        shape = (self.pages_per_rank * dp_size, page_size, 2 * self.head_num, 1, self.head_dim)
        # All the same wrong number: nothing may be served that was not computed.
        empty = np.full(shape, -1, np.float32)
        self.arrays = [jax.device_put(empty, self.kv_sharding) for _ in range(self.layer_num)]

    @property
    def kv_buffer(self) -> list[jax.Array]:
        """The arrays of now, per layer. A forward deletes them and puts others in their place."""
        self.moment()
        return self.arrays

    def replace_buffer(self, arrays: list[jax.Array]) -> None:
        """Put other arrays in place, one per layer."""
        assert len(arrays) == self.layer_num, f"the pool has {self.layer_num} layers, not {len(arrays)}"
        for old, new in zip(self.arrays, arrays, strict=True):
            assert (new.shape, new.dtype) == (old.shape, old.dtype), f"{new.dtype}{new.shape} cannot be a layer of KV"
        self.arrays[:] = arrays

    def compute(self, writes: list[tuple[int, np.ndarray, np.ndarray]]) -> list[jax.Array]:
        """New arrays, with values (float32, of `expand`) in slots: (rank, slots, values). Those of now are deleted."""
        pages = np.concatenate([slots // self.page_size + rank * self.pages_per_rank for rank, slots, _ in writes])
        offsets = np.concatenate([slots % self.page_size for _, slots, _ in writes])
        values = np.concatenate([values for *_, values in writes])
        # Padding goes to slot 0, like that of a real batch; few sizes, so few programs are compiled.
        pad = max(16, 1 << (len(pages) - 1).bit_length()) - len(pages)
        pages, offsets = (np.pad(each, (0, pad)).astype(np.int32) for each in (pages, offsets))
        values = np.concatenate([values, np.zeros((pad, *values.shape[1:]), np.float32)])
        return _program(self.kv_sharding)(self.arrays, pages, offsets, values)

    def read(self, rank: int) -> np.ndarray:
        """A copy of what is in all slots of a rank now: [slots, layers, heads, 1, dim]."""
        pages = slice(rank * self.pages_per_rank, (rank + 1) * self.pages_per_rank)
        layers = [np.asarray(array)[pages] for array in self.arrays]
        return np.stack(layers, axis=2).reshape(-1, self.layer_num, *layers[0].shape[2:])

    def expand(self, marks: np.ndarray) -> np.ndarray:
        """What tokens with these marks have in the pool: float32 [tokens, layers, heads, 1, dim]."""
        shape = (self.layer_num, *self.arrays[0].shape[2:])
        spread = np.arange(np.prod(shape), dtype=np.int64) * _STRIDE
        return ((marks[:, None] + spread) % _MODULUS).astype(np.float32).reshape(-1, *shape)


@functools.cache
def _program(sharding: NamedSharding) -> Callable[..., list[jax.Array]]:
    @functools.partial(jax.jit, donate_argnums=0)
    def write(arrays: Any, pages: Any, offsets: Any, values: Any) -> Any:
        return [
            array.at[pages, offsets].set(values[:, layer], out_sharding=sharding) for layer, array in enumerate(arrays)
        ]

    return write


class TokenSlots:
    """An allocator of single slots. `on_free(rank, slots)` is called before slots are taken back."""

    page_size = 1

    def __init__(self, size: int, kvcache: KVPool, dp_size: int = 1) -> None:
        self.size, self.dp_size, self.size_per_rank = size, dp_size, size // dp_size
        self.units_per_rank = self.size_per_rank // self.page_size
        self._kvcache = kvcache
        self.on_free: Callable[[int, np.ndarray], None] = lambda rank, slots: None
        self.clear()

    def clear(self, dp_rank: int | None = None) -> None:
        """Everything is free."""
        self._group: list[tuple[int, np.ndarray]] | None = None
        if dp_rank is None:
            self._free: list[list[int]] = [[] for _ in range(self.dp_size)]
            self._owned = np.zeros((self.dp_size, self.units_per_rank + 1), bool)
        for rank in range(self.dp_size) if dp_rank is None else [dp_rank]:
            self._free[rank] = list(range(self.units_per_rank, 0, -1))
            self._owned[rank] = False

    def get_kvcache(self) -> KVPool:
        """The pool that the slots are in."""
        return self._kvcache

    def available_size(self, dp_rank: int = 0) -> int:
        """The number of free slots of a rank."""
        return len(self._free[dp_rank]) * self.page_size

    def owned(self, rank: int) -> np.ndarray:
        """The slots of a rank that are not free."""
        return self._slots(np.flatnonzero(self._owned[rank]))

    def alloc(self, need_size: int, dp_rank: int = 0) -> np.ndarray | None:
        """As many slots, or None if there are too few. int32, but int64 from an allocator of pages."""
        assert need_size % self.page_size == 0, f"{need_size} slots are not whole pages of {self.page_size}"
        units = self._take(need_size // self.page_size, dp_rank)
        return None if units is None else self._slots(units)

    def free(self, free_index: np.ndarray, dp_rank: int = 0) -> None:
        """Take slots back. A page is taken back whole, whichever of its slots are given."""
        assert isinstance(free_index, np.ndarray), f"free takes a NumPy array, not {type(free_index).__name__}"
        assert free_index.ndim == 1, f"free takes one dimension, not shape {free_index.shape}"
        if free_index.size == 0:
            return
        assert np.issubdtype(free_index.dtype, np.integer), f"free takes whole numbers, not {free_index.dtype}"
        assert 0 <= dp_rank < self.dp_size, f"free: there is no rank {dp_rank}"
        slots, counts = np.unique(free_index, return_counts=True)
        where = f"of rank {dp_rank}"
        assert counts.max() == 1, f"slot {slots[counts.argmax()]} {where} is freed twice in one call"
        units = np.unique(slots // self.page_size)
        assert units[0] > 0, f"slot {slots[0]} {where} is freed, but it is padding"
        assert units[-1] <= self.units_per_rank, f"slot {slots[-1]} {where} is freed, but there is none"
        free = units[~self._owned[dp_rank, units]]
        assert not len(free), f"slot {free[0] * self.page_size} {where} is freed, but it is free already"
        self.on_free(dp_rank, self._slots(units))
        self._owned[dp_rank, units] = False
        if self._group is not None:
            self._group.append((dp_rank, units))
        else:
            # Used again at once, so that whoever still reads a slot that was freed finds other bytes.
            self._free[dp_rank].extend(units.tolist())

    def free_group_begin(self) -> None:
        """From now on, slots are taken back, but can't be had again before the group ends."""
        self._group = []

    def free_group_end(self) -> None:
        """The slots of the group can be had again."""
        group, self._group = self._group or [], None
        for rank, units in group:
            self._free[rank].extend(units.tolist())

    def _take(self, number: int, rank: int) -> np.ndarray | None:
        free = self._free[rank]
        if number > len(free):
            return None
        units = np.asarray([free.pop() for _ in range(number)], np.int32)
        self._owned[rank, units] = True
        return units

    def _slots(self, units: np.ndarray) -> np.ndarray:
        return units.astype(np.int32)


class PagedSlots(TokenSlots):
    """An allocator of pages of slots."""

    def __init__(self, size: int, page_size: int, kvcache: KVPool, dp_size: int = 1) -> None:
        self.page_size = page_size
        super().__init__(size, kvcache, dp_size)

    def alloc_extend(
        self, prefix_lens: list[int], seq_lens: list[int], last_loc: list[int], extend_num_tokens: int, dp_rank: int = 0
    ) -> np.ndarray | None:
        """Slots for sequences that grow: the rest of the page of `last_loc`, then new pages. int32, in order."""
        page = self.page_size
        new = [-(-end // page) - -(-begin // page) for begin, end in zip(prefix_lens, seq_lens, strict=True)]
        units = self._take(sum(new), dp_rank)
        if units is None:
            return None
        parts, taken = [np.empty(0, np.int32)], 0
        for begin, end, last, number in zip(prefix_lens, seq_lens, last_loc, new, strict=True):
            rest = np.arange(last + 1, last + 1 + -begin % page)
            fresh = self._slots(units[taken : taken + number])
            parts.append(np.concatenate([rest, fresh])[: end - begin].astype(np.int32))
            taken += number
        slots = np.concatenate(parts)
        assert len(slots) == extend_num_tokens, f"{len(slots)} slots are needed, not {extend_num_tokens}"
        return slots

    def alloc_decode(self, seq_lens: list[int], last_loc: list[int], dp_rank: int = 0) -> np.ndarray | None:
        """One slot for each sequence, whose length with it is given. int32."""
        return self.alloc_extend([length - 1 for length in seq_lens], seq_lens, last_loc, len(seq_lens), dp_rank)

    def _slots(self, units: np.ndarray) -> np.ndarray:
        return (units[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
