"""What objects a page is in Mooncake, and what a master tells of itself."""

import contextlib
import http.client
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from purecache.stores.envelope import TRAILER
from purecache.stores.interface import Fetch, Presence

NOT_FOUND = -704
"""Mooncake's code for an object that is not there."""
NO_MASTER = (-900, -901)
"""Mooncake's codes for a master that did not answer, or too late."""
LISTED = 20_000
"""Objects of the whole cluster up to which those of one store are counted: the master lists them all, in one text."""

TRANSFERS = 512
"""Pieces that one call of the engine moves at most, as far as one page has no more. Over TCP it queues 2048 for one
peer, all callers together; what is beyond that fails, or keeps the call waiting for 60 seconds."""

_SUFFIXES = {"page": ("",), "k": ("_k",), "k_v": ("_k", "_v")}
_SECONDS = 2.0
_Answer = TypeVar("_Answer")


class Layout:
    """The objects of a page: their names, and which pieces of its bytes are theirs.

    - `page`: one object, `<prefix>/<key>`.
    - `k`: one object, `<prefix>/<key>_k`, as sglang names the pages of MLA models.
    - `k_v`: two, `<prefix>/<key>_k` and `<prefix>/<key>_v`, as it names those of others. In the page, the K and the V
      of each of `layers` layers lie one behind the other: with 1, K is the first half of the page and V the second.
      The trailer belongs to V, and so does what doesn't divide.

    Raises ValueError for another kind, for layers that are no whole number above 0 (or above 1 without `k_v`), and for
    a prefix of other than letters, digits and `._-/`.
    """

    def __init__(self, prefix: str, kind: str = "page", layers: int = 1) -> None:
        if kind not in _SUFFIXES:
            raise ValueError(f"there are no objects {kind!r}; there are {', '.join(_SUFFIXES)}")
        if layers < 1 or (layers > 1 and kind != "k_v"):
            raise ValueError(f"layers must be at least 1, and 1 without objects=k_v, not {layers}")
        if not re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", prefix):
            raise ValueError(f"a prefix has letters, digits, dots, hyphens, underscores and slashes, not {prefix!r}")
        self.prefix, self.suffixes, self.layers = prefix, _SUFFIXES[kind], layers

    @property
    def pattern(self) -> str:
        """A regular expression (of the master, which searches) for the names of all objects under the prefix."""
        return f"^{self.prefix.replace('.', '[.]')}/[^/]*$"

    @property
    def most_pages(self) -> int:
        """How many pages one call of the engine may move."""
        return max(1, TRANSFERS // (len(self.suffixes) * self.layers))

    def names(self, key: str) -> list[str]:
        """The names of the objects of a page."""
        return [f"{self.prefix}/{key}{suffix}" for suffix in self.suffixes]

    def pieces(self, size: int) -> list[list[tuple[int, int]]]:
        """For each object of a page of `size` bytes, trailer included: (start, length) of its pieces, in order.

        Empty where a page is too small: an object must have at least one byte.
        """
        if len(self.suffixes) == 1:
            return [[(0, size)]] if size else []
        half = (size - TRAILER if size > TRAILER else size) // (2 * self.layers)
        if not half:
            return []
        keys = [(2 * layer * half, half) for layer in range(self.layers)]
        values = [(start + half, half) for start, _ in keys]
        last = values[-1][0]
        values[-1] = (last, size - last)
        return [keys, values]

    def count(self, names: Sequence[str]) -> int:
        """How many pages of this store are whole among the objects of a cluster."""
        start = f"{self.prefix}/"
        ours = {name for name in names if name.startswith(start) and "/" not in name[len(start) :]}
        last = self.suffixes[-1]
        keys = (name[len(start) : len(name) - len(last)] for name in ours if name.endswith(last))
        return sum(all(name in ours for name in self.names(key)) for key in keys)


def presence(codes: Sequence[int]) -> Presence:
    """Of a page, from the answers about its objects. Errors are negative, and true in Python: only 1 is there."""
    if any(code == 0 for code in codes):
        return Presence.NO
    return Presence.YES if codes and all(code == 1 for code in codes) else Presence.UNKNOWN


def fetched(codes: Sequence[int], sizes: Sequence[int]) -> Fetch:
    """Of a page, from what was read of its objects. A shorter object is read without an error, with its own length."""
    if any(code == NOT_FOUND for code in codes):
        return Fetch.MISSING
    return Fetch.HIT if codes and list(codes) == list(sizes) else Fetch.FAILED


def turns(keys: Sequence[str]) -> list[list[int]]:
    """Indices of `keys` in as few groups as have no key twice.

    A batch of the engine that names a key twice answers success for both, and fills one of the buffers.
    """
    found: list[list[int]] = []
    seen: dict[str, int] = {}
    for index, key in enumerate(keys):
        turn = seen[key] = seen.get(key, -1) + 1
        if turn == len(found):
            found.append([])
        found[turn].append(index)
    return found


class Batch:
    """Objects of pages at addresses, as the engine takes them: `names`, and `places` (pointers and lengths)."""

    def __init__(self, layout: Layout, keys: Sequence[str], sizes: Sequence[int], addresses: Sequence[int]) -> None:
        self._layout, self._keys, self._page_sizes, self._addresses = layout, keys, sizes, addresses
        self.in_pieces = layout.layers > 1
        self.names: list[str] = []
        self.groups: list[str] = []
        self.sizes: list[int] = []
        pointers: list[list[int]] = []
        lengths: list[list[int]] = []
        self._ends: list[int] = []
        for key, size, address in zip(keys, sizes, addresses, strict=True):
            for name, pieces in zip(layout.names(key), layout.pieces(size), strict=False):
                self.names.append(name)
                self.groups.append(f"{layout.prefix}/{key}")
                pointers.append([address + start for start, _ in pieces])
                lengths.append([length for _, length in pieces])
                self.sizes.append(sum(lengths[-1]))
            self._ends.append(len(self.names))
        self.places: tuple[list[Any], list[Any]] = (pointers, lengths)
        if not self.in_pieces:
            self.places = [each[0] for each in pointers], [each[0] for each in lengths]

    def per_key(
        self,
        judge: Callable[[Sequence[Any], Sequence[int]], _Answer],
        values: Sequence[Any],
        sizes: Sequence[int],
        without: _Answer,
    ) -> list[_Answer]:
        """What `judge` makes of the values and sizes of each page's objects; `without`, where it has none."""
        starts = [0, *self._ends]
        parts = [slice(start, end) for start, end in zip(starts, self._ends, strict=False)]
        return [judge(values[part], sizes[part]) if part.stop > part.start else without for part in parts]

    def only(self, chosen: Sequence[bool]) -> "Batch":
        """The batch of some of the pages."""
        rest = [
            each
            for each, is_chosen in zip(
                zip(self._keys, self._page_sizes, self._addresses, strict=True), chosen, strict=True
            )
            if is_chosen
        ]
        return Batch(self._layout, [each[0] for each in rest], [each[1] for each in rest], [each[2] for each in rest])


def cluster_stats(master: tuple[str, int], layout: Layout, default_tenant: bool) -> dict[str, int]:
    """What the HTTP port of a master tells; -1 for what it doesn't within two seconds.

    `objects`: pages of this store, where the cluster has at most `LISTED` objects and the tenant is the default one
    (the master lists no other). `cluster_objects`, `bytes`, `capacity`: of the whole cluster.
    """
    found = {"objects": -1, "cluster_objects": -1, "bytes": -1, "capacity": -1}
    names = {"master_key_count": "cluster_objects", "master_allocated_bytes": "bytes"}
    names["master_total_capacity_bytes"] = "capacity"
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        for line in _page(master, "/metrics").splitlines():
            name, _, value = line.partition(" ")
            if name in names:
                found[names[name]] = int(float(value))
        if default_tenant and 0 <= found["cluster_objects"] <= LISTED:
            found["objects"] = layout.count(_page(master, "/get_all_keys").splitlines())
    return found


def _page(master: tuple[str, int], path: str) -> str:
    connection = http.client.HTTPConnection(*master, timeout=_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"{path}: {answer.status}")
        return answer.read().decode()
    finally:
        connection.close()
