"""Between `Store` and the storage interface of sglang's HiCache, in both directions. Needs neither sglang nor torch.

`HiCacheBackend` offers one of our stores to a HiCache controller, `StoreFromHiCache` takes a HiCache storage as one.
Host pools, tensors, enums and transfers are taken by their shape (attributes and methods), not by their class.
"""

import ctypes
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from purecache.stores.envelope import TRAILER, is_intact, seal
from purecache.stores.interface import Fetch, Presence, Store
from purecache.stores.names import Naming, objects_of, parts_of

KV = "kv"
"""Name of the main pool."""

_MARKS = (0x5A, 0xA5)
_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class PoolHitPolicy(str, enum.Enum):  # noqa: UP042 - its text is compared with that of sglang's enum of this shape
    """Which pages of a pool a prefix needs. An unknown policy counts as ALL_PAGES, the strictest."""

    ALL_PAGES = "all_pages"
    """All pages of the prefix."""
    TRAILING_PAGES = "trailing_pages"
    """Its last `len(transfer.keys)` pages, at least one: states of a window or of a recurrent layer."""


@dataclass
class PoolTransfer:
    """Pages of one pool to query or move. `host_indices` are token indices, `page_size` of the pool per key."""

    name: str
    host_indices: Any = None
    device_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: str | None = None


@dataclass
class PoolTransferResult:
    """What `batch_exists_v2` found: the longest prefix, in pages, that every pool can serve."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int] = field(default_factory=dict)
    """The same number for each pool, as nothing behind it may be used; empty where it is 0."""


class HostPool(Protocol):
    """What is needed of a host pool: where the bytes of its pages are. Its memory must outlive the backend."""

    page_size: int

    def get_page_buffer_meta(self, indices: Any, /) -> tuple[Sequence[int], Sequence[int]]:
        """Addresses and bytes of the parts of each page, page by page, every page in as many parts."""
        ...


class HiCacheBackend:
    """A `Store` in the shape of sglang's HiCacheStorage, v1, v2 and generic. No method raises for what a store does.

    Every object is sealed when it is written and verified when it is read; a page is copied to the host pool only if it
    is whole, and one that is not intact is deleted, so that it can be written anew. `naming` says which objects a page
    has, for all pools or one per pool; with `HeadGroups`, each part of a page must have its heads slowest. `timeout_s`
    is per call; `batch_pages` bounds the staging memory, which is kept per thread.
    """

    def __init__(
        self, store: Store, naming: Naming | Mapping[str, Naming], timeout_s: float = 5.0, batch_pages: int = 32
    ) -> None:
        if batch_pages < 1 or timeout_s <= 0:
            raise ValueError("batch_pages must be at least 1 and timeout_s more than 0")
        self._store = store
        self._naming = naming
        self._timeout = timeout_s
        self._batch = batch_pages
        self._pools: dict[str, HostPool] = {}
        self._scratch = threading.local()
        self._counts = {"errors": 0, "corrupt": 0}
        self._lock = threading.Lock()

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Make the main pool known. Raises TypeError for one that can't say where its pages are."""
        self.register_mem_host_pool_v2(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: Any) -> None:
        """Make a pool known by name. Raises TypeError for one that can't say where its pages are."""
        if not hasattr(host_pool, "get_page_buffer_meta") or not hasattr(host_pool, "page_size"):
            raise TypeError(f"pool {_text(host_pool_name)!r} needs page_size and get_page_buffer_meta(indices)")
        self._pools[_text(host_pool_name)] = host_pool

    def exists(self, key: str) -> bool:
        """Whether the page is there, all its objects."""
        return self._present(KV, [key])[0]

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many pages are there before the first one that is not."""
        return _leading(self._present(KV, keys))

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Iterable[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The longest prefix of `keys` that is there for the main pool and, by its policy, for every other pool."""
        pages = _leading(self._present(KV, keys))
        names, windows = {KV}, []
        for transfer in pool_transfers or ():
            name = _text(transfer.name)
            names.add(name)
            present = self._present(name, keys[:pages]) if pages else []
            if _text(transfer.hit_policy) == PoolHitPolicy.TRAILING_PAGES.value:
                windows.append((present, max(1, len(transfer.keys or ()))))
            else:
                pages = min(pages, _leading(present))
        while pages and not all(all(there[max(0, pages - width) : pages]) for there, width in windows):
            pages -= 1
        return PoolTransferResult(pages, dict.fromkeys(sorted(names), pages) if pages else {})

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the main pool; per key, whether its page is whole. Pages that are not stay as they were."""
        return self._move(KV, keys, host_indices, write=False)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Write pages of the main pool; per key, whether its page can be read now."""
        return self._move(KV, keys, host_indices, write=True)

    def batch_get_v2(self, transfers: Iterable[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """As `batch_get_v1` for several pools; all False for a pool that is not registered."""
        return self._move_all(transfers, write=False)

    def batch_set_v2(self, transfers: Iterable[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """As `batch_set_v1` for several pools; all False for a pool that is not registered."""
        return self._move_all(transfers, write=True)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any | None:
        """Fill `target_location` (array, buffer or CPU tensor, of the page's size) and return it; None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Sequence[Any] | None = None, target_sizes: Any = None
    ) -> list[Any | None]:
        """As `get`, per key. The length of an object isn't known before: without a target it is a miss."""
        targets = _as_many(target_locations, keys)
        views = [self._attempt(_bytes_of, None, target) for target in targets]
        answers = self._run(KV, keys, [None if view is None else [view] for view in views], write=False)
        return [target if ok else None for target, ok in zip(targets, answers, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Write the bytes of `value` (or of `target_location`); whether they can be read now."""
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[Any] | None = None,
        target_locations: Sequence[Any] | None = None,
        target_sizes: Any = None,
    ) -> bool:
        """As `set`; whether all were written. One that fails doesn't stop the rest."""
        sources = _as_many(target_locations if values is None else values, keys)
        whole = [self._attempt(_contiguous, None, source) for source in sources]  # alive as long as their views
        views = [self._attempt(_bytes_of, None, source) for source in whole]
        return all(self._run(KV, keys, [None if view is None else [view] for view in views], write=True))

    def delete(self, key: str) -> bool:
        """Remove a page from all pools; whether there is none now."""
        pools = sorted({KV, *self._pools})
        return self._attempt(
            lambda: all(self._store.delete(objects_of(key, self._naming, pools), self._deadline())), False
        )

    def clear(self) -> bool:
        """Remove everything from the store; whether that went well."""
        return self._attempt(lambda: self._store.clear() is None, False)

    def get_stats(self) -> None:
        """None: a controller takes only its own class here. Numbers are in `stats`."""
        return

    def stats(self) -> dict[str, int]:
        """The store's numbers, and how many `errors` were caught and `corrupt` objects found."""
        return {**self._attempt(self._store.stats, {}), **self._counts}

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout

    def _attempt(self, function: Callable[..., _Answer], otherwise: _Answer, *arguments: Any) -> _Answer:
        """The function's answer. An exception would end the controller's worker thread for good: it is a failure."""
        try:
            return function(*arguments)
        except Exception as error:
            self._count("errors")
            _log.warning("storage call failed: %r", error)
            return otherwise

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _objects(self, key: str, pool: str) -> tuple[str, ...]:
        """() for a key or pool that has no name in a store."""
        return self._attempt(objects_of, (), key, self._naming, (pool,))

    def _present(self, pool: str, keys: Sequence[str]) -> list[bool]:
        named = [self._objects(key, pool) for key in keys]
        flat = [name for names in named for name in names]
        found = self._attempt(lambda: list(self._store.exists(flat, self._deadline())), []) if flat else []
        if len(found) != len(flat):
            return [False] * len(keys)
        ends = np.cumsum([len(names) for names in named]).tolist()
        answers = [found[end - len(names) : end] for names, end in zip(named, ends, strict=True)]
        return [bool(those) and all(answer == Presence.YES for answer in those) for those in answers]

    def _move_all(self, transfers: Iterable[PoolTransfer], write: bool) -> dict[str, list[bool]]:
        answers: dict[str, list[bool]] = {}
        for transfer in transfers:
            name = _text(transfer.name)
            answers.setdefault(name, []).extend(self._move(name, transfer.keys or [], transfer.host_indices, write))
        return answers

    def _move(self, pool: str, keys: Sequence[str], indices: Any, write: bool) -> list[bool]:
        if not keys:
            return []
        return self._run(pool, keys, self._attempt(self._pages, [None] * len(keys), pool, keys, indices), write)

    def _pages(self, pool: str, keys: Sequence[str], indices: Any) -> list[list[np.ndarray] | None]:
        """The parts of each page in the host pool."""
        host = self._pools[pool]
        if len(indices) != len(keys) * host.page_size:
            raise ValueError(f"{len(keys)} pages of {host.page_size} tokens, but {len(indices)} host indices")
        addresses, sizes = host.get_page_buffer_meta(indices)
        count, rest = divmod(len(addresses), len(keys))
        if rest or not count or len(addresses) != len(sizes):
            raise ValueError(f"{len(addresses)} addresses and {len(sizes)} sizes for {len(keys)} pages")
        views = [_view_at(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        return [views[first : first + count] for first in range(0, len(views), count)]

    def _run(self, pool: str, keys: Sequence[str], pages: Sequence[list[np.ndarray] | None], write: bool) -> list[bool]:
        deadline, answers = self._deadline(), []
        for first in range(0, len(keys), self._batch):
            chunk = keys[first : first + self._batch]
            failed = [False] * len(chunk)
            answers += self._attempt(
                self._run_chunk, failed, pool, chunk, pages[first : first + self._batch], write, deadline
            )
        return answers

    def _run_chunk(
        self,
        pool: str,
        keys: Sequence[str],
        pages: Sequence[list[np.ndarray] | None],
        write: bool,
        deadline: float,
    ) -> list[bool]:
        objects: list[tuple[int, str, list[np.ndarray]]] = []
        for number, (key, parts) in enumerate(zip(keys, pages, strict=True)):
            names = self._objects(key, pool) if parts is not None else ()
            cuts = [parts_of(part.size, len(names)) for part in parts or ()] if names else []
            for place, name in enumerate(names):
                objects.append((number, name, [part[cut[place]] for part, cut in zip(parts or (), cuts, strict=True)]))
        buffers = self._buffers([sum(part.size for part in parts) + TRAILER for _, _, parts in objects])
        done = (self._put if write else self._get)([(name, parts) for _, name, parts in objects], buffers, deadline)
        counts, good = np.zeros((2, len(keys)), int)
        for (number, _, _), ok in zip(objects, done, strict=True):
            counts[number] += 1
            good[number] += ok
        answers = [bool(count) and bool(count == ok) for count, ok in zip(counts, good, strict=True)]
        if not write:
            for (number, _, parts), buffer in zip(objects, buffers, strict=True):
                if answers[number]:  # only now, so that a page that is not whole leaves the host pool as it was
                    _scatter(buffer, parts)
        return answers

    def _put(
        self, objects: list[tuple[str, list[np.ndarray]]], buffers: list[np.ndarray], deadline: float
    ) -> list[bool]:
        for (name, parts), buffer in zip(objects, buffers, strict=True):
            np.concatenate(parts, out=buffer[:-TRAILER])
            seal(name, buffer.data)
        stored = self._store.put([name for name, _ in objects], [buffer.data for buffer in buffers], deadline)
        return [answer is True for answer in stored]

    def _get(
        self, objects: list[tuple[str, list[np.ndarray]]], buffers: list[np.ndarray], deadline: float
    ) -> list[bool]:
        names = [name for name, _ in objects]
        for buffer in buffers:  # staging memory may still hold this very object, whole, from an earlier call
            buffer[-TRAILER:] = 0
        fetched = self._store.get(names, [buffer.data for buffer in buffers], deadline)
        hits = [answer == Fetch.HIT for answer in fetched]
        intact = [hit and is_intact(name, buffer.data) for hit, name, buffer in zip(hits, names, buffers, strict=True)]
        corrupt = [name for name, hit, ok in zip(names, hits, intact, strict=True) if hit and not ok]
        for _ in corrupt:
            self._count("corrupt")
        if corrupt:  # else it would stay for ever: what is there already is not written again
            self._attempt(self._store.delete, [], corrupt, deadline)
        return intact

    def _buffers(self, sizes: list[int]) -> list[np.ndarray]:
        """Staging memory of this thread, known to the store, cut into `sizes`."""
        slab = getattr(self._scratch, "slab", None)
        if slab is None or slab.size < sum(sizes):
            slab = self._scratch.slab = np.empty(sum(sizes), np.uint8)
            self._store.register(slab.data)
        ends = np.cumsum(sizes).tolist()
        return [slab[end - size : end] for end, size in zip(ends, sizes, strict=True)]


class StoreFromHiCache(Store):
    """A HiCache storage as a `Store`, key by key through its generic interface, believing no answer.

    `exists` counts only as 1 or 0; a get must deliver as many bytes as asked for; a set must say True. `wrap` makes of
    a NumPy array of bytes what the storage takes, such as `torch.from_numpy`. A deadline is looked at between keys: a
    call that hangs is the caller's to guard. `stats` can't count foreign objects: `objects` is -1.
    """

    def __init__(self, backend: Any, wrap: Callable[[np.ndarray], Any] = lambda array: array) -> None:
        self._backend = backend
        self._wrap = wrap
        self._closed = False

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`."""
        return [self._call(self._look, key, deadline=deadline, otherwise=Presence.UNKNOWN) for key in keys]

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`."""
        pairs = zip(keys, buffers, strict=True)
        return [self._call(self._read, *pair, deadline=deadline, otherwise=Fetch.FAILED) for pair in pairs]

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`."""
        pairs = zip(keys, buffers, strict=True)
        return [self._call(self._write, *pair, deadline=deadline, otherwise=False) for pair in pairs]

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`. A storage without `delete(key)` keeps what it has: True where it says there is none."""
        return [self._call(self._remove, key, deadline=deadline, otherwise=False) for key in keys]

    def clear(self) -> None:
        """See `Store.clear`. Some storages can't, and don't say so."""
        self._call(self._backend.clear, deadline=float("inf"), otherwise=None)

    def stats(self) -> dict[str, int]:
        """See `Store.stats`."""
        return {"objects": -1}

    def close(self) -> None:
        """Close the storage, if it can be closed."""
        if not self._closed and hasattr(self._backend, "close"):
            self._call(self._backend.close, deadline=float("inf"), otherwise=None)
        self._closed = True

    def _call(self, function: Callable[..., _Answer], *arguments: Any, deadline: float, otherwise: _Answer) -> _Answer:
        if self._closed or time.monotonic() >= deadline:
            return otherwise
        try:
            return function(*arguments)
        except Exception as error:
            _log.debug("storage call failed: %r", error)
            return otherwise

    def _look(self, key: str) -> Presence:
        answer = self._backend.exists(key)
        if isinstance(answer, int | np.integer | np.bool_) and answer in (0, 1):  # codes of failure are true, too
            return Presence.YES if answer else Presence.NO
        return Presence.UNKNOWN

    def _write(self, key: str, buffer: memoryview) -> bool:
        # A copy: a storage may keep what it is given. Only a clear yes: 0, None and codes are none.
        answer = self._backend.set(key, self._wrap(np.array(np.frombuffer(buffer, np.uint8))))
        return isinstance(answer, int | np.integer | np.bool_) and bool(answer == 1)

    def _remove(self, key: str) -> bool:
        if hasattr(self._backend, "delete"):
            self._backend.delete(key)
        return self._look(key) == Presence.NO

    def _read(self, key: str, buffer: memoryview) -> Fetch:
        """A short object leaves the last byte as it was; one that ends in the first mark can't end in the second."""
        target = np.frombuffer(buffer, np.uint8)
        for mark in _MARKS:
            target[-1] = mark
            fetch = self._judge(self._backend.get(key, self._wrap(target), target.size), target)
            if fetch != Fetch.HIT or target[-1] != mark:
                return fetch
        return Fetch.FAILED

    def _judge(self, answer: Any, target: np.ndarray) -> Fetch:
        if answer is None or (isinstance(answer, bool | np.bool_) and not answer):
            return Fetch.MISSING
        if isinstance(answer, bool | np.bool_):  # says nothing of the length
            return Fetch.FAILED
        if isinstance(answer, int | np.integer):
            return Fetch.HIT if answer == target.size else Fetch.FAILED
        if isinstance(answer, bytes) and not answer:  # how some say that there is none
            return Fetch.MISSING
        data = _bytes_of(answer)
        if data is None or data.size != target.size:
            return Fetch.FAILED
        if data.ctypes.data != target.ctypes.data:
            target[:] = data
        return Fetch.HIT


def _leading(answers: Sequence[bool]) -> int:
    return next((number for number, ok in enumerate(answers) if not ok), len(answers))


def _text(name: Any) -> str:
    """The text of a name or of an enum's member."""
    return str(getattr(name, "value", name))


def _as_many(things: Sequence[Any] | None, keys: Sequence[str]) -> list[Any]:
    return list(things) if things is not None and len(things) == len(keys) else [None] * len(keys)


def _contiguous(data: Any) -> Any:
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data)
    return data.contiguous() if hasattr(data, "contiguous") else data


def _bytes_of(data: Any) -> np.ndarray | None:
    """The memory of an array, buffer or CPU tensor as uint8[n], shared with it. Raises for what is not contiguous."""
    if data is None:
        return None
    if hasattr(data, "data_ptr"):  # a tensor: NumPy knows not all of its dtypes
        if not data.is_contiguous() or str(data.device) != "cpu":
            raise ValueError("a tensor must be contiguous and on the CPU")
        return _view_at(int(data.data_ptr()), int(data.numel() * data.element_size()))
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError("an array must be contiguous")
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def _view_at(address: int, size: int) -> np.ndarray:
    """uint8[size] at an address; whoever owns the memory must stay alive."""
    if address <= 0 or size <= 0:
        raise ValueError(f"no memory of {size} bytes at {address:#x}")
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _scatter(buffer: np.ndarray, parts: list[np.ndarray]) -> None:
    start = 0
    for part in parts:
        part[:] = buffer[start : start + part.size]
        start += part.size
