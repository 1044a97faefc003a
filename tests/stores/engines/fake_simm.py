"""A fake of `simm.kv` (scitix/SiMM: python/simm/kv/__init__.py over src/client/clnt_kv.cc), with memory by address.

Strict: it refuses what the real one refuses, with its codes, and notes in `violations` what the real one would crash on
or let pass, such as memory that is not registered.
"""

import ctypes
import threading
from collections import Counter, OrderedDict
from types import ModuleType

INVALID, TIMEOUT, GET_FAILED, NOT_FOUND, EXISTS = -1000, -1002, -2101, -4003, -4005
FLAGS = {
    "clnt_use_k8s",
    "cm_primary_node_ip",
    "cm_rpc_inter_port",
    "clnt_thread_pool_size",
    "clnt_sync_req_timeout_ms",
    "clnt_log_file",
}
"""Of the flags that the client has, those that may be set here. `cm_primary_node_port` is none of its."""


class FakeCluster:
    """The servers, and the module `simm` that reaches them. `room` objects; the oldest goes first."""

    def __init__(self, room: int = 10**6) -> None:
        self.room = room
        self.objects: OrderedDict[str, bytes] = OrderedDict()
        self.violations: list[str] = []
        self.flags: dict[str, str] = {}
        self.regions: dict[int, tuple[int, int]] = {}
        self.down = False
        """No server answers: every request ends with a code."""
        self.codes: dict[str, int] = {}
        """Key: the code that requests for it end with."""
        self.lengths: dict[str, int] = {}
        """Key: the length that a get tells, whatever it does."""
        self.raising: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.calls: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()
        self.has_codes = True
        """Whether the part below the Python module is there to be asked for codes."""
        self.refuses_memory = False
        self.lock = threading.Lock()

    def modules(self) -> dict[str, ModuleType]:
        package, kv = ModuleType("simm"), ModuleType("simm.kv")
        cluster = self

        class Store:
            def __init__(self):
                assert cluster.flags.get("cm_primary_node_ip"), "the client doesn't know its manager: it would abort"
                if cluster.has_codes:
                    self._impl = FakeNative(cluster)

            def exists(self, key):
                return self.mexists([key])[0]

            def mexists(self, keys):
                return [code == 0 for code in FakeNative(cluster).MExists(keys)]

            def delete(self, key):
                return FakeNative(cluster).Delete(key)

            def mput(self, keys, blocks):
                return FakeNative(cluster).MPut(keys, blocks)

            def mget(self, keys, blocks):
                return FakeNative(cluster).MGet(keys, blocks)

        class BlockView:
            @classmethod
            def from_buffer(cls, buf_ptr, buf_size, mr_ext):
                return FakeView(buf_ptr, buf_size, mr_ext)

        kv.Store, kv.BlockView = Store, BlockView
        kv.set_flag, kv.register_mr, kv.deregister_mr = self.set_flag, self.register_mr, self.deregister_mr
        package.kv = kv
        return {"simm": package, "simm.kv": kv}

    def blame(self, what: str) -> None:
        self.violations.append(what)

    def set_flag(self, name, value):
        assert isinstance(name, str)
        assert isinstance(value, str)
        if name not in FLAGS:
            return False
        self.flags[name] = value
        return True

    def register_mr(self, tensor):
        if self.refuses_memory:
            return None
        handle = FakeRegion()
        self.regions[id(handle)] = (tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return handle

    def deregister_mr(self, mr_ext):
        if self.regions.pop(id(mr_ext), None) is None:
            self.blame("a region was deregistered that is not registered")
        return True

    def region_of(self, view):
        """The region of a view, which must lie in it."""
        region = self.regions.get(id(view.region))
        if region is None:
            self.blame("a view of memory that is not registered")
        elif not region[0] <= view.address <= view.address + view.size <= region[0] + region[1]:
            self.blame("a view that reaches out of its region")
        else:
            return region
        return None


class FakeRegion:
    pass


class FakeView:
    def __init__(self, address, size, region):
        assert (type(address), type(size)) == (int, int)
        self.address, self.size, self.region = address, size, region


class FakeNative:
    """What lies below the Python module: codes instead of booleans."""

    def __init__(self, cluster):
        self.cluster = cluster

    def MExists(self, keys):
        return self._each("MExists", keys, [None] * len(keys), self._exists)

    def MPut(self, keys, views):
        if len(keys) != len(views) or any(view.size > 67088384 for view in views):
            return [INVALID] * len(keys)
        return self._each("MPut", keys, views, self._put)

    def MGet(self, keys, views):
        return self._each("MGet", keys, views, self._get)

    def Delete(self, key):
        return self._each("Delete", [key], [None], self._delete)[0]

    def _each(self, name, keys, views, one):
        assert isinstance(keys, list)
        assert all(isinstance(key, str) for key in keys)
        cluster = self.cluster
        cluster.calls[name] += 1
        cluster.largest[name] = max(cluster.largest[name], len(keys))
        cluster.gate.wait(20)
        if cluster.raising is not None:
            raise cluster.raising
        if len(keys) != len(views) or any(not 1 <= len(key.encode()) <= 256 for key in keys):
            return [INVALID] * len(keys)  # nothing is done for any of them
        with cluster.lock:
            return [self._guarded(key, view, one) for key, view in zip(keys, views, strict=True)]

    def _guarded(self, key, view, one):
        if self.cluster.down:
            return TIMEOUT
        if key in self.cluster.codes:
            return self.cluster.codes[key]
        return one(key, view)

    def _exists(self, key, _):
        return 0 if key in self.cluster.objects else NOT_FOUND

    def _delete(self, key, _):
        return 0 if self.cluster.objects.pop(key, None) is not None else NOT_FOUND

    def _put(self, key, view):
        if self.cluster.region_of(view) is None:
            return INVALID
        if key in self.cluster.objects:
            self.cluster.blame("an object that is there was put: the client removes it first")
        self.cluster.objects.pop(key, None)
        self.cluster.objects[key] = ctypes.string_at(view.address, view.size)
        while len(self.cluster.objects) > self.cluster.room:
            self.cluster.objects.popitem(last=False)
        return 0

    def _get(self, key, view):
        region = self.cluster.region_of(view)
        if region is None:
            return INVALID
        value = self.cluster.objects.get(key)
        # The server is told the length of the region, not of the view, and takes every failure for one.
        if value is None or len(value) > region[1]:
            return GET_FAILED
        if view.address + len(value) > region[0] + region[1]:
            self.cluster.blame("a get wrote behind its region")
            return GET_FAILED
        ctypes.memmove(view.address, value, len(value))
        return self.cluster.lengths.get(key, len(value))
