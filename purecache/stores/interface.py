"""What a store of pages is. Third parties implement `Store` and check it with `purecache.testing.check_store`."""

import abc
import enum
from collections.abc import Sequence


class Presence(enum.IntEnum):
    """Whether a store has an object. Only YES is a hit: never test the truth of an answer of a foreign client."""

    NO = 0
    YES = 1
    UNKNOWN = 2
    """The store could not say: it failed, or it was too late."""


class Fetch(enum.IntEnum):
    """How reading one object went."""

    MISSING = 0
    """There is no such object."""
    HIT = 1
    """All of the buffer was filled."""
    FAILED = 2
    """There is one, but it could not be read whole: the buffer may hold anything."""


class Store(abc.ABC):
    """Objects of bytes by key. Objects are small (KiB to a few MiB), and immutable: a key says what the bytes are.

    Every batch answers per key, in the order of the request, with holes wherever they are. A method must not raise for
    what a store may do at any time (miss, refuse, fail, time out); it says so in its answer. It may be called from
    several threads at once. `deadline` is on the clock of `time.monotonic`; a store that can't keep it answers UNKNOWN,
    FAILED or False for the rest. Keys are ASCII text of up to 200 characters out of letters, digits and `._-`.
    """

    @abc.abstractmethod
    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """Whether there is an object of each key."""

    @abc.abstractmethod
    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """Read each object into its buffer (writable, contiguous bytes). An object of another length is FAILED."""

    @abc.abstractmethod
    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """Write each buffer; True where the object can be read now, also where it was there before.

        The buffers are copied before this returns. False is normal: a store may be full, or busy.
        """

    @abc.abstractmethod
    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """Remove objects; True where there is none now."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Remove all objects of this store."""

    @abc.abstractmethod
    def stats(self) -> dict[str, int]:
        """Numbers to watch: at least `objects`; bytes, capacity and evictions where there are such."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of files, connections and threads. A second call does nothing."""

    def resize(self, capacity_bytes: int) -> bool:
        """Hold at most so many bytes from now on; False where a store can't change that while it is open (the default).

        Objects beyond the new capacity go at once, or with the next writes.
        """
        return False

    def register(self, region: memoryview) -> None:  # noqa: B027 - most stores need no registration
        """Make a region known whose parts will be used as buffers, once. For stores that pin or map memory."""


def paired(keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[memoryview]:
    """The buffers, of which there must be one for each key. Raises ValueError otherwise."""
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys but {len(buffers)} buffers")
    return buffers
