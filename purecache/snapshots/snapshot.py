"""Snapshots: which prefixes a cache has, the hottest first, to be fetched from storage by the next process.

The bytes in device and host memory are gone when a process ends. What is worth keeping are the prefixes themselves:
tokens, namespaces (from both follow the keys in storage) and how recently they were used. `purecache.storage.rewarm`
brings them back.
"""

import hashlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from purecache.namespaces import Namespace
from purecache.snapshots.origins import Origin, origin_as_json, origin_from_json
from purecache.state import NONE

VERSION = 1
MOST_BYTES = 8 << 30
"""Bytes of the largest snapshot that is read, unpacked."""
_ARRAYS = {"parents": 1, "tokens": 2, "origins": 1, "ranks": 1, "hits": 1, "priorities": 1, "stored": 1, "tips": 1}
"""Arrays and their dimensions; all are int32."""

_UNREADABLE = (ValueError, KeyError, TypeError, OSError, EOFError, RecursionError, NotImplementedError, RuntimeError)
_UNREADABLE += (zipfile.BadZipFile, zlib.error)
"""What reading a damaged archive may raise."""


class SnapshotError(ValueError):
    """A file that is no snapshot, or a damaged one."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """One path from the root to where requests ended."""

    tokens: np.ndarray
    """int32[n]: what `match` takes."""
    namespace: Namespace
    rank: int | None
    nodes: np.ndarray
    """int32[pages]: its nodes in the snapshot; prefixes share the first ones."""
    pages_stored: int
    """Pages down to the deepest one that storage had, or was being given."""
    hits: int
    """Of its last page."""
    priority: int


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The prefixes of a cache. Nodes are numbered from the roots down, a parent before its children."""

    settings: dict[str, Any]
    """`page_size`, `bigrams` and `ranks` of the cache."""
    origins_known: tuple[Origin, ...]
    parents: np.ndarray
    """int32[n]: node above, NONE at the top."""
    tokens: np.ndarray
    """int32[n, page_size]."""
    origins: np.ndarray
    """int32[n]: number of the origin of nodes at the top."""
    ranks: np.ndarray
    """int32[n]."""
    hits: np.ndarray
    """int32[n]."""
    priorities: np.ndarray
    """int32[n]."""
    stored: np.ndarray
    """int32[n]: 1 where storage had the page or was being given it, as far as was known."""
    tips: np.ndarray
    """int32[m]: ends of the prefixes, the hottest first."""
    unnamed: int = 0
    """Pages that were left out, since nobody knew the name of their namespace any more."""

    def __len__(self) -> int:
        """How many prefixes there are. A hot one may be the beginning of a colder one, not the other way round."""
        return len(self.tips)

    def prefixes(self) -> Iterator[Prefix]:
        """The prefixes, the hottest first."""
        for tip in self.tips.tolist():
            path = [tip]
            while self.parents[path[-1]] != NONE:
                path.append(int(self.parents[path[-1]]))
            nodes = np.array(path[::-1], np.int32)
            origin = self.origins_known[self.origins[nodes[0]]]
            lead = [] if origin.first_token is None else [origin.first_token]
            found = np.flatnonzero(self.stored[nodes])
            yield Prefix(
                tokens=np.concatenate([np.array(lead, np.int32), self.tokens[nodes].reshape(-1)]),
                namespace=origin.namespace,
                rank=None if origin.no_rank else int(self.ranks[tip]),
                nodes=nodes,
                pages_stored=int(found[-1]) + 1 if len(found) else 0,
                hits=int(self.hits[tip]),
                priority=int(self.priorities[tip]),
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file that takes the place of an older one when it is whole. It holds tokens in the clear.

        A snapshot does not change: another thread may do this while the cache goes on.
        """
        target, content = Path(path), self.to_bytes()
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)

    def to_bytes(self) -> bytes:
        """An npz archive of the arrays, with all else as JSON."""
        arrays = {name: getattr(self, name).astype("<i4") for name in _ARRAYS}
        origins = [origin_as_json(each) for each in self.origins_known]
        about = {"version": VERSION, "settings": self.settings, "origins": origins, "unnamed": self.unnamed}
        about["checksum"] = _checksum(about, arrays)
        out = io.BytesIO()
        np.savez_compressed(out, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)
        return out.getvalue()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Snapshot":
        """Read a file. Raises OSError, or SnapshotError for one that is no snapshot or is damaged."""
        return cls.from_bytes(Path(path).read_bytes())

    @classmethod
    def from_bytes(cls, content: bytes) -> "Snapshot":
        """What `to_bytes` made. Raises SnapshotError for anything else."""
        try:
            about, arrays = _read(content)
            if about.pop("checksum") != _checksum(about, arrays):
                raise SnapshotError("the snapshot is damaged: its checksum is wrong")
            known = tuple(map(origin_from_json, about["origins"]))
            found = cls(dict(about["settings"]), known, unnamed=int(about["unnamed"]), **arrays)
            found._check()
        except SnapshotError:
            raise
        except _UNREADABLE as error:
            raise SnapshotError(f"this is no snapshot, or a damaged one: {error}") from error
        return found

    def _check(self) -> None:
        """Raise SnapshotError for arrays that don't fit together."""
        count, ids = len(self.parents), np.arange(len(self.parents))
        same = all(len(getattr(self, name)) == count for name in _ARRAYS if name != "tips")
        fits = same and self.tokens.shape[1] == self.settings["page_size"]
        fits = fits and bool(((self.parents >= NONE) & (self.parents < ids)).all())
        top = self.origins[self.parents == NONE] if fits else np.zeros(0, np.int32)
        fits = fits and bool(((top >= 0) & (top < len(self.origins_known))).all())
        if not (fits and bool(((self.tips >= 0) & (self.tips < count)).all())):
            raise SnapshotError("the arrays of the snapshot do not fit together")


def _read(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(each.file_size for each in archive.infolist()) > MOST_BYTES:
            raise SnapshotError(f"the snapshot claims to be larger than {MOST_BYTES >> 30} GiB")
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        about = json.loads(archive["about"].tobytes())
        if about["version"] != VERSION:
            raise SnapshotError(f"the snapshot has version {about['version']}, this purecache reads {VERSION}")
        arrays = {name: archive[name] for name in _ARRAYS}
    for name, dimensions in _ARRAYS.items():
        if arrays[name].dtype != np.dtype("<i4") or arrays[name].ndim != dimensions:
            raise SnapshotError(f"the array {name} of the snapshot has another shape or type than it should")
    return about, arrays


def _checksum(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in _ARRAYS:
        digest.update(str(arrays[name].shape).encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()
