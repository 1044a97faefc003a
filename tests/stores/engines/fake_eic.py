"""A fake of the client of EIC, with memory by address. It knows of EIC what public callers of it show.

Those are sglang's python/sglang/srt/mem_cache/storage/eic/eic_storage.py and its test_unit.py: the calls, the options
and that a status of a call and a code per key come back. How the names of the codes of absence read is a guess, so that
tests run with other names, too. Strict: what no caller does is noted in `violations`.
"""

import ctypes
import enum
import threading
from collections import Counter
from types import ModuleType

GUESSED = {"SUCCESS": 0, "PARTIAL_FAILED": 1, "FAILED": 2, "KEY_NOT_EXIST": 3, "TIMEOUT": 4}


class FakeService:
    """The servers, and the module `eic` that reaches them."""

    def __init__(self, names=None, missing="KEY_NOT_EXIST"):
        self.codes = enum.Enum("StatusCode", names or GUESSED)
        self.missing = self.codes[missing]
        self.objects: dict[tuple[str, str], bytes] = {}
        self.ttl: dict[tuple[str, str], int] = {}
        self.violations: list[str] = []
        self.regions: list[tuple[int, int]] = []
        self.clients = 0
        self.key_codes: dict[str, str] = {}
        """Key: the name of the code that requests for it end with."""
        self.status: str | None = None
        """The status that calls end with, without doing anything; the codes of the keys then say SUCCESS."""
        self.silent = False
        """Success without codes per key, as some version of the client answers it."""
        self.empty = False
        """Success of a get that fills nothing."""
        self.scripted: dict[str, object] = {}
        """Call: what it answers, whatever it is asked."""
        self.raising: Exception | None = None
        self.register_answer = True
        self.init_answer = 0
        self.init: tuple[str, str, dict] | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.calls: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()
        self.lock = threading.Lock()

    def blame(self, what):
        self.violations.append(what)

    def modules(self):
        module, service = ModuleType("eic"), self

        class Client(FakeClient):
            def __init__(self):
                super().__init__(service)

        module.Client = Client
        module.StatusCode = self.codes
        module.TransportType = enum.IntEnum("TransportType", {"TRANSPORT_TCP": 1, "TRANSPORT_RDMA": 2, "OTHER": 3})
        module.LogLevel = enum.IntEnum("LogLevel", {"DEBUG": 1, "INFO": 2})
        module.MemoryType = enum.IntEnum("MemoryType", {"MEMORY_CUDA": 1})
        module.StringVector, module.IOBuffers, module.MemoryInfo = FakeStrings, FakeBuffers, _option("type", "cuda_id")
        module.InitOption = _option("log_dir", "log_level", "transport_type", "flag_file", _INTERFACES)
        module.GetOption, module.DelOption, module.ExistOption = _option("ns"), _option("ns"), _option("ns")
        module.SetOption = _option("ns", "ttl_second")
        return {"eic": module}


_INTERFACES = "multi_net_local_interface_names"


def _option(*names):
    """A class whose objects take these attributes and no others."""
    return type("FakeOption", (), {"__slots__": names})


class FakeStrings:
    def __init__(self):
        self.items = []

    def append(self, text):
        assert isinstance(text, str)
        self.items.append(text)


class FakeBuffers:
    def __init__(self):
        self.items = []

    def append(self, pointer, length, registered):
        assert (type(pointer), type(length), type(registered)) == (int, int, bool)
        self.items.append((pointer, length, registered))


class FakeOutcome:
    def __init__(self, codes):
        self.status_codes = codes


class FakeClient:
    def __init__(self, service):
        self.service, self.ready = service, False

    def __del__(self):
        self.service.clients -= self.ready

    def init(self, instance, endpoint, option):
        assert isinstance(instance, str)
        told = {name: getattr(option, name) for name in option.__slots__ if hasattr(option, name)}
        assert isinstance(told["transport_type"], enum.IntEnum), "the transport is a member of TransportType"
        self.service.init = (instance, endpoint, told)
        self.ready = self.service.init_answer == 0
        self.service.clients += self.ready
        return self.service.init_answer

    def register_memory(self, buffers, information):
        assert (information.type.name, information.cuda_id) == ("MEMORY_CUDA", 0)
        for pointer, length, registered in buffers.items:
            assert registered
            ctypes.string_at(pointer, length)
            if self.service.register_answer is True:
                self.service.regions.append((pointer, length))
        return self.service.register_answer

    def mexist(self, keys, option):
        if "mexist" in self.service.scripted:
            return self.service.scripted["mexist"]
        return self._each("mexist", keys, option, [None] * len(keys.items), self._exist)

    def mdel(self, keys, option):
        if "mdel" in self.service.scripted:
            return self.service.scripted["mdel"]
        return self._each("mdel", keys, option, [None] * len(keys.items), self._delete)

    def mset(self, keys, buffers, option):
        assert type(option.ttl_second) is int
        if len(set(keys.items)) != len(keys.items):
            self.service.blame("a key twice in a batch of mset")
        if "mset" in self.service.scripted:
            return self.service.scripted["mset"]
        return self._each("mset", keys, option, buffers.items, self._set)

    def mget(self, keys, option, buffers):
        if "mget" in self.service.scripted:
            return self.service.scripted["mget"]
        status, outcome = self._each("mget", keys, option, buffers.items, self._get)
        return status, buffers, outcome

    def _each(self, name, keys, option, buffers, one):
        service, codes = self.service, self.service.codes
        assert isinstance(keys, FakeStrings)
        assert len(keys.items) == len(buffers) > 0
        if not self.ready:
            service.blame("a client was used that is not initialized")
        service.calls[name] += 1
        service.largest[name] = max(service.largest[name], len(keys.items))
        service.gate.wait(20)
        if service.raising is not None:
            raise service.raising
        if service.status is not None:
            return codes[service.status], FakeOutcome([codes.SUCCESS] * len(keys.items))
        for buffer in buffers:
            self._check_memory(buffer)
        with service.lock:
            found = [self._one(key, option, buffer, one) for key, buffer in zip(keys.items, buffers, strict=True)]
        if all(code is codes.SUCCESS for code in found):
            return codes.SUCCESS, FakeOutcome([] if service.silent else found)
        return codes.PARTIAL_FAILED, FakeOutcome(found)

    def _one(self, key, option, buffer, one):
        if key in self.service.key_codes:
            return self.service.codes[self.service.key_codes[key]]
        return one((option.ns, key), buffer, option)

    def _check_memory(self, buffer):
        if buffer is None:
            return
        pointer, length, registered = buffer
        inside = any(start <= pointer and pointer + length <= start + size for start, size in self.service.regions)
        if registered and not inside:
            self.service.blame("memory is said to be registered that is not")

    def _exist(self, name, _, __):
        return self.service.codes.SUCCESS if name in self.service.objects else self.service.missing

    def _delete(self, name, _, __):
        found = self.service.objects.pop(name, None)
        return self.service.missing if found is None else self.service.codes.SUCCESS

    def _set(self, name, buffer, option):
        self.service.objects[name] = ctypes.string_at(buffer[0], buffer[1])
        self.service.ttl[name] = option.ttl_second
        return self.service.codes.SUCCESS

    def _get(self, name, buffer, _):
        value = self.service.objects.get(name)
        if value is None:
            return self.service.missing
        if not self.service.empty:
            ctypes.memmove(buffer[0], value, min(len(value), buffer[1]))  # whatever fits, and not a word of its length
        return self.service.codes.SUCCESS
