"""A store in EIC (Elastic Instant Cache of Volcengine), by its Python client.

The client doesn't say how long an object is that it has read. Therefore every object is stored with the trailer of
`stores/envelope.py` behind it, which says so, and passes through memory of our own, which is registered once.
"""

import importlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from purecache.stores.engines.lanes import Lane, LaneStore
from purecache.stores.envelope import TRAILER, is_intact, seal
from purecache.stores.interface import Fetch, Presence, Store
from purecache.stores.options import take_options

try:
    eic: Any = importlib.import_module("eic")  # by name: this very module has the name of the package
except ImportError as _error:
    raise ImportError(f"no client of EIC ({_error}); it comes with Volcengine's images") from None
for _name in ("Client", "InitOption", "IOBuffers", "StringVector", "StatusCode", "MemoryInfo"):
    if not hasattr(eic, _name):
        raise ImportError(f"the package eic that is installed is not the client of EIC: it has no {_name}")

_MISSING = re.compile(r"NOT_?(FOUND|EXIST)|NO_SUCH|NO_?EXIST", re.IGNORECASE)
_LOG = logging.getLogger(__name__)


def open_url(address: str, object_bytes: int, options: Mapping[str, Any]) -> Store:
    """The store of `eic://endpoint?instance=...`, for the registry. Options: see `EicStore`.

    Raises ValueError for what it doesn't understand.
    """
    endpoint = address.partition("://")[2].rstrip("/")
    if not endpoint or "@" in endpoint or "/" in endpoint:
        raise ValueError("eic: write the endpoint and nothing else, as in eic://host:port?instance=...")
    known = {"instance": str, "namespace": str, "batch": int, "lanes": int, "transport": int, "ttl": int}
    more = {"missing": str, "log_dir": str, "log_level": int, "flag_file": str, "interfaces": str}
    settings = take_options(address, options, {**known, **more})
    try:
        return EicStore(endpoint, object_bytes, **settings)
    except ValueError as error:
        raise ValueError(f"{address}: {error}") from None


class EicStore(LaneStore["_Lane"]):
    """Objects of up to `object_bytes` in the EIC service at `endpoint`, in a namespace of an instance.

    `instance` is the id that the service knows you by; it is told in no error. `lanes` calls run at once, each in steps
    of up to `batch` objects. `transport` is a number of `eic.TransportType`; `ttl` are the seconds that objects live
    (-1: until they are evicted). `missing` are the names of the status codes of an object that is not there, with
    commas between; without it, names with NOT_FOUND, NOT_EXIST and the like are taken. `log_dir`, `log_level`,
    `flag_file` and `interfaces` (local network interfaces) go to the client as they are.

    Raises ValueError for impossible settings, and OSError where the client can't be initialized.
    """

    def __init__(
        self,
        endpoint: str,
        object_bytes: int,
        *,
        instance: str = "",
        namespace: str = "",
        batch: int = 32,
        lanes: int = 2,
        transport: int = 3,
        ttl: int = -1,
        missing: str = "",
        log_dir: str | None = None,
        log_level: int | None = None,
        flag_file: str | None = None,
        interfaces: str | None = None,
    ) -> None:
        if not instance:
            raise ValueError("say which instance: give its id as the option instance")
        if min(object_bytes, batch, lanes) < 1 or ttl == 0 or ttl < -1:
            raise ValueError("object_bytes, batch and lanes must be at least 1, ttl at least 1 or -1")
        self._missing = _codes_of(missing)
        self._namespace, self._ttl = namespace, ttl
        option = eic.InitOption()
        option.transport_type = eic.TransportType(transport)
        if log_level is not None:
            option.log_level = eic.LogLevel(log_level)
        given = {"log_dir": log_dir, "flag_file": flag_file, "multi_net_local_interface_names": interfaces}
        for name, value in given.items():
            if value is not None:
                setattr(option, name, value)
        self._client: Any = eic.Client()
        code = self._client.init(instance, endpoint, option)
        if code != 0:
            raise OSError(f"the client of EIC could not be initialized for {endpoint}: code {code}")
        made = [_Lane(self._client, batch, object_bytes) for _ in range(lanes)]
        self._is_registered = all(lane.is_registered for lane in made)
        super().__init__("EIC", made, object_bytes)

    def stats(self) -> dict[str, int]:
        """`objects`: those that this process has put and has not found missing; -1 after more than `KNOWN` of them.

        `registered`: 1 if the client has registered our memory, 0 if it copies instead.
        """
        return {**super().stats(), "registered": int(self._is_registered)}

    def _let_go(self, lanes: "list[_Lane]") -> None:
        # The client goes before the memory that it has registered.
        self._client = None
        lanes.clear()

    def _read(self, lane: "_Lane", keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Fetch]:
        memories = lane.memories(buffers)
        for memory in memories:  # so that what was read before can't pass for what was not read now
            memory[-TRAILER:] = bytes(TRAILER)
        option = eic.GetOption()
        option.ns = self._namespace
        names, values = _names(keys), lane.values(memories)
        result = self._call(lambda: self._client.mget(names, option, values))
        status, outcome = (result[0], result[2]) if isinstance(result, tuple) and len(result) == 3 else (None, None)
        answers = [Fetch.FAILED] * len(keys)
        for i, is_there in enumerate(self._verdicts(status, outcome, len(keys))):
            if is_there is False:
                answers[i] = Fetch.MISSING
            elif is_there and is_intact(keys[i], memories[i]):
                buffers[i][:] = memories[i][:-TRAILER]
                answers[i] = Fetch.HIT
        return answers

    def _write(self, lane: "_Lane", keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        memories = lane.memories(buffers)
        for key, buffer, memory in zip(keys, buffers, memories, strict=True):
            memory[:-TRAILER] = buffer
            seal(key, memory)
        option = eic.SetOption()
        option.ns = self._namespace
        option.ttl_second = self._ttl
        names, values = _names(keys), lane.values(memories)
        status, outcome = _pair(self._call(lambda: self._client.mset(names, values, option)))
        return [verdict is True for verdict in self._verdicts(status, outcome, len(keys))]

    def _remove(self, keys: Sequence[str], deadline: float) -> list[bool]:
        option = eic.DelOption()
        option.ns = self._namespace
        status, outcome = _pair(self._call(lambda: self._client.mdel(_names(keys), option)))
        gone = [verdict is True for verdict in self._verdicts(status, outcome, len(keys))]
        unsure = [i for i, is_gone in enumerate(gone) if not is_gone]
        for i, presence in zip(unsure, self._ask([keys[i] for i in unsure]), strict=True):
            gone[i] = presence is Presence.NO
        return gone

    def _ask(self, keys: Sequence[str]) -> list[Presence]:
        if not keys:
            return []
        option = eic.ExistOption()
        option.ns = self._namespace
        status, outcome = _pair(self._call(lambda: self._client.mexist(_names(keys), option)))
        known = {True: Presence.YES, False: Presence.NO, None: Presence.UNKNOWN}
        return [known[verdict] for verdict in self._verdicts(status, outcome, len(keys))]

    def _verdicts(self, status: Any, outcome: Any, count: int) -> list[bool | None]:
        """Per key: success, or (False) that it is not there, or (None) anything else.

        The status of a call says nothing of a key. A client whose codes of absence are not known is believed that what
        failed in a call that went through is not there.
        """
        through = status is not None and status in (eic.StatusCode.SUCCESS, eic.StatusCode.PARTIAL_FAILED)
        codes = list(getattr(outcome, "status_codes", ()))
        if not codes and status == eic.StatusCode.SUCCESS:
            return [True] * count
        if len(codes) != count:
            return [None] * count
        verdicts: list[bool | None] = []
        for code in codes:
            if code == eic.StatusCode.SUCCESS:
                verdicts.append(True if through else None)
            elif self._missing:
                verdicts.append(False if code in self._missing else None)
            else:
                verdicts.append(False if through else None)
        return verdicts

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            _LOG.debug("a call of the client of EIC failed: %s", type(error).__name__)
            return None


class _Lane(Lane):
    """Buffers for objects and their trailers, registered as one region if that works."""

    def __init__(self, client: Any, slots: int, nbytes: int) -> None:
        super().__init__(slots, nbytes)
        information = eic.MemoryInfo()
        # What other users of the client say of memory of the host, too: there is no other word for it in public code.
        information.type = eic.MemoryType.MEMORY_CUDA
        information.cuda_id = 0
        region = eic.IOBuffers()
        region.append(min(self.addresses), self.region.nbytes, True)
        self.is_registered = client.register_memory(region, information) is True
        """Otherwise buffers must not be said to be registered: the client would look for them in vain."""

    def memories(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """Room for objects as long as `buffers`, and their trailers."""
        return [self.memory(slot, buffer.nbytes + TRAILER) for slot, buffer in enumerate(buffers)]

    def values(self, memories: Sequence[memoryview]) -> Any:
        """The first buffers, as the client wants them."""
        values = eic.IOBuffers()
        for address, memory in zip(self.addresses, memories, strict=False):
            values.append(address, memory.nbytes, self.is_registered)
        return values


def _names(keys: Iterable[str]) -> Any:
    names = eic.StringVector()
    for key in keys:
        names.append(key)
    return names


def _pair(result: Any) -> tuple[Any, Any]:
    return result if isinstance(result, tuple) and len(result) == 2 else (None, None)


def _codes_of(missing: str) -> list[Any]:
    """The status codes of these names, or of all whose names sound like absence."""
    members: dict[str, Any] = dict(getattr(eic.StatusCode, "__members__", {}))
    wanted = [name.strip() for name in missing.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in members]
    if unknown:
        raise ValueError(f"missing: there is no status code {', '.join(unknown)}; there are {', '.join(members)}")
    return [code for name, code in members.items() if (name in wanted if wanted else _MISSING.search(name))]
