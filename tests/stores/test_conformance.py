"""All stores keep the contract, as `check_store` says; and it catches stores that don't."""

import importlib
import time

import pytest
from faulty import DictStore

from purecache.stores import Fetch, Presence
from purecache.testing import check_store

SIZE = 4096


class BoundedDictStore(DictStore):
    """At most 40 objects; the oldest goes."""

    room = 40

    def put_one(self, key, buffer):
        with self.lock:
            stored = super().put_one(key, buffer)
            while len(self.objects) > self.room:
                del self.objects[next(iter(self.objects))]
        return stored


class FullDictStore(DictStore):
    """At most 40 objects; what doesn't fit is refused."""

    def put_one(self, key, buffer):
        with self.lock:
            return (key in self.objects or len(self.objects) < 40) and super().put_one(key, buffer)


def optional(module, name, *arguments, bounded=True, **settings):
    """A store that needs a package which need not be there: a way to make it, or a skip with the reason."""
    try:
        store = getattr(importlib.import_module(f"purecache.stores.{module}"), name)
    except ImportError as error:
        return pytest.param(None, bounded, id=f"{name}", marks=pytest.mark.skip(reason=str(error)))

    def make(path):
        return store(*[path if argument is PATH else argument for argument in arguments], **settings)

    suffix = "".join(f"-{key}" for key, value in settings.items() if value is True)
    return pytest.param(make, bounded, id=f"{name}{suffix}")


PATH = object()
STORES = [
    pytest.param(lambda path: DictStore(), False, id="DictStore"),
    pytest.param(lambda path: BoundedDictStore(), True, id="BoundedDictStore"),
    pytest.param(lambda path: FullDictStore(), True, id="FullDictStore"),
    optional("memory", "MemoryStore", 50 * SIZE),
    optional("files", "FileStore", PATH, 50 * SIZE),
    optional("local", "LocalStore", PATH, SIZE, 50 * SIZE),
    optional("local", "LocalStore", PATH, SIZE, 50 * SIZE, direct=True),
    optional("objects", "ObjectStore", "memory:///", bounded=False),
]


@pytest.mark.parametrize(("make", "bounded"), STORES)
def test_a_store_keeps_the_contract(make, bounded, tmp_path):
    opened = []

    def fresh():
        opened.append(tmp_path / str(len(opened)))
        return make(opened[-1])

    check_store(fresh, SIZE, bounded=bounded)
    assert len(opened) > 10


def test_objects_may_be_small():
    check_store(DictStore, 16)


BROKEN = []


def broken(message):
    """Register a store with one fault, and what `check_store` is to say about it."""

    def register(store):
        BROKEN.append(pytest.param(store, message, id=store.__name__))
        return store

    return register


@broken("get of 5 keys answered 3 times")
class LeavesOutHoles(DictStore):
    def get(self, keys, buffers, deadline):
        answers = super().get(keys, buffers, deadline)
        return [answer for answer in answers if answer is not Fetch.MISSING] if Fetch.HIT in answers else answers


@broken("after delete, exists of 5 keys, number 1 .* must answer NO, not YES")
class MovesHolesOfExistsToTheEnd(DictStore):
    def exists(self, keys, deadline):
        return sorted(super().exists(keys, deadline), key=lambda answer: answer is Presence.NO)


@broken("doesn't hold the object of key")
class MovesHolesOfGetToTheEnd(DictStore):
    """As a client does that asks for what there is, and fills one buffer after the other."""

    def get(self, keys, buffers, deadline):
        there = [key for key in keys if key in self.objects]
        answers = super().get(there, buffers[: len(there)], deadline)
        return answers + [Fetch.MISSING] * (len(keys) - len(there))


@broken("into buffers of 1 must answer FAILED, not .*MISSING")
class SaysMissingForLargerObjects(DictStore):
    def get_one(self, key, buffer):
        value = self.objects.get(key, b"")
        return Fetch.MISSING if len(value) > len(buffer) else super().get_one(key, buffer)


@broken("HIT for a buffer of 8192 bytes")
class AcceptsShortObjects(DictStore):
    """As `readinto` whose length nobody looks at."""

    def get_one(self, key, buffer):
        value = self.objects.get(key)
        if value is None or len(value) >= len(buffer) or len(buffer) != 2 * len(value):
            return super().get_one(key, buffer)
        buffer[: len(value)] = value
        return Fetch.HIT


@broken("HIT for a buffer of 1 bytes")
class AcceptsShortBuffers(DictStore):
    def get_one(self, key, buffer):
        value = self.objects.get(key)
        if value is None or len(value) <= len(buffer):
            return super().get_one(key, buffer)
        buffer[:] = value[: len(buffer)]
        return Fetch.HIT


@broken("doesn't hold the object of key")
class KeepsTheCallersMemory(DictStore):
    def put_one(self, key, buffer):
        self.objects.setdefault(key, buffer)
        return True


@broken("must not raise, but answer per key; it raised KeyError")
class RaisesOnMissing(DictStore):
    def get_one(self, key, buffer):
        self.objects[key]
        return super().get_one(key, buffer)


@broken("must not raise, but answer per key; it raised TimeoutError")
class RaisesWhenLate(DictStore):
    def exists(self, keys, deadline):
        if time.monotonic() > deadline:
            raise TimeoutError
        return super().exists(keys, deadline)


@broken("put of 0 keys answered 1 times")
class AnswersOnceMore(DictStore):
    def put(self, keys, buffers, deadline):
        return [*super().put(keys, buffers, deadline), True]


@broken("put must answer a list, not None")
class AnswersNothing(DictStore):
    def put(self, keys, buffers, deadline):
        super().put(keys, buffers, deadline)


@broken("put must answer with bool and nothing that resembles it, not 0")
class AnswersWithErrorNumbers(DictStore):
    def put_one(self, key, buffer):
        return 0 if super().put_one(key, buffer) else -200


@broken("exists must answer with Presence and nothing that resembles it, not -1")
class SaysMinusOne(DictStore):
    def exists(self, keys, deadline):
        return [answer if answer is Presence.YES else -1 for answer in super().exists(keys, deadline)]


@broken("exists must answer with Presence and nothing that resembles it, not False")
class SaysFalse(DictStore):
    def exists(self, keys, deadline):
        return [answer is Presence.YES for answer in super().exists(keys, deadline)]


@broken("doesn't hold the object of key")
class SortsKeys(DictStore):
    """Answers in an order of its own, which often is that of the request."""

    def get(self, keys, buffers, deadline):
        return super().get(sorted(keys), buffers, deadline)


@broken("doesn't hold the object of key")
class FillsOneBufferPerKey(DictStore):
    """Of a key that is in a batch several times, only the last buffer is filled."""

    def get(self, keys, buffers, deadline):
        last = dict(zip(keys, buffers, strict=True))
        answers = {key: self.get_one(key, buffer) for key, buffer in last.items()}
        return [answers[key] for key in keys]


@broken("bytes behind the buffer were written")
class WritesBeyondTheBuffer(DictStore):
    def get_one(self, key, buffer):
        answer = super().get_one(key, buffer)
        whole = memoryview(buffer.obj)
        end = whole.nbytes if answer is Fetch.HIT else 0
        whole[end - 1 : end] = b"!" * min(end, 1)
        return answer


@broken("put must not change the buffers")
class EncryptsInPlace(DictStore):
    def put_one(self, key, buffer):
        stored = super().put_one(key, buffer)
        buffer[0] ^= 1
        return stored


@broken("has been changed by a later get")
class KeepsFillingOldBuffers(DictStore):
    def __init__(self):
        super().__init__()
        self.old = None

    def get(self, keys, buffers, deadline):
        answers = super().get(keys, buffers, deadline)
        if len(keys) == 1 and answers == [Fetch.HIT]:
            if self.old is not None:
                self.old[:] = buffers[0]
            self.old = buffers[0]
        return answers


@broken("after delete, exists of 5 keys, number 1")
class DeletesNothing(DictStore):
    def delete_one(self, key):
        return True


@broken("delete must answer True where there is nothing now")
class DeletesOnlyWhatIsThere(DictStore):
    def delete_one(self, key):
        return self.objects.pop(key, None) is not None or self.closed


@broken("after the key 'a' was deleted")
class DeletesByPrefix(DictStore):
    def delete_one(self, key):
        for name in [name for name in self.objects if name.startswith(key)]:
            super().delete_one(name)
        return not self.closed


@broken("with unusual keys")
class FoldsCase(DictStore):
    def put_one(self, key, buffer):
        return super().put_one(key.lower(), buffer)

    def get_one(self, key, buffer):
        return super().get_one(key.lower(), buffer)


@broken("put into an idle store with room must answer True")
class PutsOnlyOnce(DictStore):
    def put_one(self, key, buffer):
        return key not in self.objects and super().put_one(key, buffer)


@broken("after clear, exists")
class ClearsNothing(DictStore):
    def clear(self):
        pass


@broken("must not say what isn't so")
class SaysMissingWhenLate(DictStore):
    def get(self, keys, buffers, deadline):
        if time.monotonic() > deadline:
            return [Fetch.MISSING] * len(keys)
        return super().get(keys, buffers, deadline)


@broken("with calls from two threads")
class HasOneBufferForAll(DictStore):
    """Correct, but for two threads at once."""

    def __init__(self):
        super().__init__()
        self.between = b""

    def get_one(self, key, buffer):
        self.between = self.objects.get(key)
        time.sleep(0.0001)
        value = self.between
        if value is None or self.closed or len(value) != len(buffer):
            return super().get_one(key, buffer)
        buffer[:] = value
        return Fetch.HIT


@broken("after close, calls must answer")
class WorksAfterClose(DictStore):
    def close(self):
        pass


@broken("close must not raise; it raised RuntimeError")
class ClosesOnce(DictStore):
    def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        super().close()


@broken("must have a whole number `objects`")
class CountsNothing(DictStore):
    def stats(self):
        return {"bytes": 0}


@broken(r"after 10 objects were put, stats\(\)\['objects'\] is 0")
class CountsZero(DictStore):
    def stats(self):
        return {"objects": 0}


@pytest.mark.parametrize(("store", "message"), BROKEN)
def test_a_broken_store_is_caught(store, message):
    with pytest.raises(AssertionError, match=message):
        check_store(store, SIZE)


class ForgetsTheBound(BoundedDictStore):
    room = 2000


class EvictsEverything(BoundedDictStore):
    def put_one(self, key, buffer):
        if len(self.objects) >= self.room:
            self.objects.clear()
            return True
        return super().put_one(key, buffer)


class RecyclesUnderItsIndex(BoundedDictStore):
    """The place of an object is given to another one, but its key still leads there."""

    def put_one(self, key, buffer):
        if len(self.objects) >= self.room and key not in self.objects:
            self.objects[next(iter(self.objects))] = bytes(buffer)
            return True
        return super().put_one(key, buffer)


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (ForgetsTheBound, r"after 256 objects were put, stats\(\)\['objects'\] is 256"),
        (EvictsEverything, "holds only|after put into a store that has been full"),
        (RecyclesUnderItsIndex, "doesn't hold the object of key"),
    ],
)
def test_a_broken_bound_is_caught(store, message):
    check_store(store, SIZE)  # nothing else is wrong with it
    with pytest.raises(AssertionError, match=message):
        check_store(store, SIZE, bounded=True)


def test_a_store_is_closed_also_where_it_is_broken():
    opened = []

    class Noting(RaisesOnMissing):
        def __init__(self):
            super().__init__()
            opened.append(self)

        def close(self):
            super().close()
            raise OSError("not this error, but the one before is what matters")

    with pytest.raises(AssertionError, match="KeyError"):
        check_store(Noting, SIZE)
    assert [store.closed for store in opened] == [True]


def test_objects_must_not_be_tiny():
    with pytest.raises(ValueError, match="at least 16"):
        check_store(DictStore, 15)
