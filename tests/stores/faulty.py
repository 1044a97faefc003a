"""Stores for tests: a right one on a dict, and one that does on command what stores do wrong."""

import threading
from collections import defaultdict, deque

from purecache.stores import Fetch, Presence, Store


class DictStore(Store):
    """The smallest store that keeps the contract, but for its size, which has no bound."""

    def __init__(self):
        self.objects = {}
        self.closed = False
        self.lock = threading.Lock()

    def exists(self, keys, deadline):
        if self.closed:
            return [Presence.UNKNOWN] * len(keys)
        return [Presence(key in self.objects) for key in keys]

    def get(self, keys, buffers, deadline):
        return [self.get_one(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def put(self, keys, buffers, deadline):
        return [self.put_one(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def delete(self, keys, deadline):
        return [self.delete_one(key) for key in keys]

    def get_one(self, key, buffer):
        value = self.objects.get(key)
        if self.closed:
            return Fetch.FAILED
        if value is None:
            return Fetch.MISSING
        if len(value) != len(buffer):
            return Fetch.FAILED
        buffer[:] = value
        return Fetch.HIT

    def put_one(self, key, buffer):
        if not self.closed:
            self.objects.setdefault(key, bytes(buffer))
        return not self.closed

    def delete_one(self, key):
        if not self.closed:
            self.objects.pop(key, None)
        return not self.closed

    def clear(self):
        self.objects.clear()

    def stats(self):
        return {"objects": len(self.objects)}

    def close(self):
        self.closed = True


class Gate:
    """A place where a call stops: `entered` once it is there, and it goes on when `opened` is set."""

    def __init__(self):
        self.entered, self.opened = threading.Event(), threading.Event()
        self.thread = None

    def __call__(self, right):
        """As a fault: do the right thing, but only when told to."""
        self.thread = threading.current_thread()
        self.entered.set()
        assert self.opened.wait(60), "the test left this gate shut"
        return right()


def raising(error):
    """A fault: raise."""

    def fault(right=None):
        raise error

    return fault


def answering(answers):
    """A fault: do nothing, and answer this."""
    return lambda right: answers


def doing_then(change):
    """A fault: do the right thing, but answer what `change` makes of the right answer."""
    return lambda right: change(right())


class FaultyStore(DictStore):
    """Each call takes the next of the faults scripted for its method, and is right without one.

    A fault is a function of a function that does the right thing. `calls` has (method, keys, deadline) of all calls.
    """

    def __init__(self):
        super().__init__()
        self.calls = []
        self.faults = defaultdict(deque)

    def script(self, method, *faults):
        self.faults[method].extend(faults)

    def flip(self, key, bit):
        """Flip a bit of an object."""
        value = bytearray(self.objects[key])
        value[bit // 8] ^= 1 << bit % 8
        self.objects[key] = bytes(value)

    def exists(self, keys, deadline):
        return self._call("exists", keys, deadline, lambda: DictStore.exists(self, keys, deadline))

    def get(self, keys, buffers, deadline):
        return self._call("get", keys, deadline, lambda: DictStore.get(self, keys, buffers, deadline))

    def put(self, keys, buffers, deadline):
        return self._call("put", keys, deadline, lambda: DictStore.put(self, keys, buffers, deadline))

    def delete(self, keys, deadline):
        return self._call("delete", keys, deadline, lambda: DictStore.delete(self, keys, deadline))

    def _call(self, method, keys, deadline, right):
        with self.lock:
            self.calls.append((method, tuple(keys), deadline))
            fault = self.faults[method].popleft() if self.faults[method] else None
        return right() if fault is None else fault(right)
