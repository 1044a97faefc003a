"""What tests of engines share: objects whose bytes their keys tell, calls with them, and clients that are fakes."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from purecache.stores.guard import Guard, Kind, Request
from purecache.stores.interface import Fetch, Presence, Store

YES, NO, UNKNOWN = Presence.YES, Presence.NO, Presence.UNKNOWN
HIT, MISSING, FAILED = Fetch.HIT, Fetch.MISSING, Fetch.FAILED
_BEFORE = b"\xee"


def soon(seconds: float = 60.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


class Objects:
    """Objects of `size` bytes, unless told otherwise.

    Where an engine is `careful`, a buffer that is no hit must be as it was; the contract lets it hold anything.
    """

    def __init__(self, size: int, careful: bool = True):
        self.size, self.careful = size, careful

    def content(self, key: str, size: int | None = None) -> memoryview:
        size = self.size if size is None else size
        return memoryview(bytearray((key.encode() * size)[:size]))

    def put(self, store: Store, *keys: str, seconds: float = 60.0, size: int | None = None) -> list[bool]:
        return store.put(keys, [self.content(key, size) for key in keys], soon(seconds))

    def get(self, store: Store, *keys: str, seconds: float = 60.0, size: int | None = None) -> list[Fetch]:
        """What the store answers; every hit is the right object."""
        size = self.size if size is None else size
        buffers = [memoryview(bytearray(_BEFORE * size)) for _ in keys]
        answers = store.get(keys, buffers, soon(seconds))
        for key, buffer, answer in zip(keys, buffers, answers, strict=True):
            if answer is HIT:
                assert buffer == self.content(key, size), (key, answer)
            elif self.careful:
                assert buffer == _BEFORE * size, (key, answer)
        return answers

    def check_holes(self, store: Store, number: int = 40) -> tuple[list[str], list[Fetch]]:
        """Of so many keys every third is missing. The keys, and what `get` says of them."""
        keys = [f"k{i}" for i in range(number)]
        there = [i % 3 != 1 for i in range(number)]
        assert all(self.put(store, *(key for key, is_there in zip(keys, there, strict=True) if is_there)))
        assert store.exists(keys, soon()) == [YES if is_there else NO for is_there in there]
        found = [HIT if is_there else MISSING for is_there in there]
        assert self.get(store, *keys) == found
        return keys, found

    def check_lengths(self, store: Store) -> None:
        """Objects `a`, `b` and `c` of 1, 100 and `size` bytes are read as they are, and a longer one is refused."""
        keys, sizes = ["a", "b", "c"], [1, 100, self.size]
        contents = [self.content(key, size) for key, size in zip(keys, sizes, strict=True)]
        assert store.put(keys, contents, soon()) == [True] * 3
        buffers = [memoryview(bytearray(size)) for size in sizes]
        assert store.get(keys, buffers, soon()) == [HIT] * 3
        assert buffers == contents
        longer = self.content("d", self.size + 1)
        assert store.put(["d", "e"], [longer, self.content("e")], soon()) == [False, True]

    def check_that_damage_is_healed(self, store: Store, damage: Callable[[], None]) -> None:
        """Through the guard, as in a cache: engines call flipped bits a hit. `damage` flips one of the only object."""
        guard = Guard(store, workers=1)
        buffer = memoryview(bytearray(self.size))
        assert ask(guard, Kind.PUT, ["a"], [buffer]) == [True]
        damage()
        assert ask(guard, Kind.GET, ["a"], [buffer]) == [FAILED]
        assert guard.stats()["get_corrupt"] == 1
        assert ask(guard, Kind.EXISTS, ["a"]) == [NO]
        assert ask(guard, Kind.PUT, ["a"], [buffer]) == [True]
        assert ask(guard, Kind.GET, ["a"], [buffer]) == [HIT]
        guard.close(10)


def ask(guard: Guard, kind: Kind, keys: Sequence[str], buffers: Sequence[memoryview] = ()) -> Sequence[int]:
    """What comes of one request, the only one that the guard has."""
    assert guard.start(Request(kind, 1, keys, buffers))
    assert guard.wait(20)
    (done,) = guard.poll()
    return done.answers


def flip(path: Path, offset: int) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@contextlib.contextmanager
def over_clients(clients: Mapping[str, ModuleType | None], *engine: str) -> Iterator[None]:
    """Have these modules (None: not installed) imported by those of an engine, which are forgotten afterwards."""
    names = [*clients, *engine]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    modules: dict[str, Any] = sys.modules
    modules.update(clients)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
