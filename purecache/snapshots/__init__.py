"""Which prefixes a cache has, the hottest first, kept for the next process. `rewarm` fetches them from storage."""

from purecache.snapshots.origins import Origin
from purecache.snapshots.snapshot import Prefix, Snapshot, SnapshotError

__all__ = ["Origin", "Prefix", "Snapshot", "SnapshotError"]
