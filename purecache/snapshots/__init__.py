"""Which prefixes a cache has, the hottest first, kept for the next process; see `purecache.storage.rewarm`."""

from purecache.snapshots.origins import Origin
from purecache.snapshots.snapshot import Prefix, Snapshot, SnapshotError

__all__ = ["Origin", "Prefix", "Snapshot", "SnapshotError"]
