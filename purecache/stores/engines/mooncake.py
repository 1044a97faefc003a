"""A store in Mooncake: memory (and disks) that the processes of a cluster lend one another, known to one master."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from mooncake.store import ReplicateConfig, SoftPinAction  # pyright: ignore[reportMissingImports]

from purecache.stores.breaker import Breaker
from purecache.stores.engines.entrance import Entrance
from purecache.stores.engines.mooncake_client import SETUP, connect
from purecache.stores.engines.mooncake_memory import Memory, Work
from purecache.stores.engines.mooncake_objects import (
    NO_MASTER,
    NOT_FOUND,
    Batch,
    Layout,
    cluster_stats,
    fetched,
    presence,
    turns,
)
from purecache.stores.interface import Fetch, Presence, Store, paired
from purecache.stores.options import host_of, parse_flag, parse_size, take_options

PORT = 50051
"""The port of a master, where a URL names none."""
PREFIX = "purecache"
"""Begins the names of all objects, where a URL has no path."""

_CLOSE_SECONDS = 30.0
_NOT_ASKED = -1
_LOG = logging.getLogger(__name__)


class MooncakeStore(Store):
    """Pages as objects of a Mooncake cluster, through a client that has been set up and that is closed with the store.

    One batch is one call of the engine, up to `TRANSFERS` pieces; a write is two: it is confirmed. Buffers inside
    registered regions are read and written where they are, others are copied through an area of `scratch` bytes. When
    the master doesn't answer, calls block for some four seconds; for `cooldown` seconds after such a call all others
    are answered at once, and then one asks again. A call that is in the engine can't be broken off at its deadline.
    `replicas`, `hard_pin`, `soft_pin` (seconds) and `group` (the objects of one page are leased and evicted together,
    as far as that works) go with every write. `metrics`: host and port of the master's HTTP server, for `stats`.
    `on_close` is called once the client is closed.

    Raises ValueError for wrong numbers.
    """

    def __init__(
        self,
        client: Any,
        layout: Layout,
        *,
        object_bytes: int = 1,
        scratch: int = 16 << 20,
        cooldown: float = 5.0,
        replicas: int = 1,
        hard_pin: bool = False,
        soft_pin: float = 0.0,
        group: bool = True,
        metrics: tuple[str, int] | None = None,
        default_tenant: bool = True,
        on_close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if scratch < 1 or replicas < 1 or soft_pin < 0:
            raise ValueError(f"need scratch >= 1, replicas >= 1, soft_pin >= 0, not {scratch}, {replicas}, {soft_pin}")
        self._client, self._layout = client, layout
        self._replicas, self._hard_pin, self._soft_pin, self._group = replicas, hard_pin, soft_pin, group
        self._metrics, self._default_tenant, self._on_close = metrics, default_tenant, on_close
        self._memory = Memory(client, max(scratch, object_bytes), layout.most_pages)
        self._breaker = Breaker(failures=1, cooldown=cooldown, clock=clock)
        self._counts: dict[str, int] = dict.fromkeys(("hits", "misses", "failures", "puts", "refused"), 0)
        self._lock = threading.Lock()
        self._entrance = Entrance()

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`. Each object that is there gets a lease: for some seconds it is neither evicted nor
        removed (`--default_kv_lease_ttl` of the master, ten by default), so that a `get` that follows finds it."""
        return [presence(codes) for codes in self._codes_per_key(keys, deadline, "batch_is_exist")]

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`. A page is read only when all of its objects are, each with exactly its length."""
        answers = [Fetch.FAILED] * len(keys)

        def read(indices: list[int], addresses: list[int]) -> list[int]:
            sizes = [buffers[index].nbytes for index in indices]
            found = self._read([keys[index] for index in indices], sizes, addresses, deadline)
            for index, answer in zip(indices, found, strict=True):
                answers[index] = answer
            return [index for index in indices if answers[index] is Fetch.HIT]

        self._move(keys, buffers, deadline, read, copy_first=False)
        self._count(
            hits=answers.count(Fetch.HIT), misses=answers.count(Fetch.MISSING), failures=answers.count(Fetch.FAILED)
        )
        return answers

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`. Mooncake keeps what is there already; an object of another length is replaced here, one
        of the same length is not: whoever finds it damaged deletes it first."""
        answers = [False] * len(keys)

        def write(indices: list[int], addresses: list[int]) -> list[int]:
            sizes = [buffers[index].nbytes for index in indices]
            done = self._write([keys[index] for index in indices], sizes, addresses, deadline)
            for index, answer in zip(indices, done, strict=True):
                answers[index] = answer
            return []

        self._move(keys, buffers, deadline, write, copy_first=True)
        self._count(puts=answers.count(True), refused=answers.count(False))
        return answers

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`. Leases don't protect: one who is reading the object meanwhile gets a damaged page."""
        found = self._codes_per_key(keys, deadline, "batch_remove", True)
        return [all(code in (0, NOT_FOUND) for code in codes) for codes in found]

    def clear(self) -> None:
        """Remove all objects under the prefix, of whichever process, leased or not; logs a warning where that fails.

        What else is in the cluster stays. The master looks at all of its keys for it.
        """
        with self._entrance.entered() as entered:
            if not entered:
                return
            code = self._ask(float("inf"), "remove_by_regex", self._layout.pattern, True)
        if type(code) is not int or code < 0:
            _LOG.warning("could not remove the objects under %s from Mooncake (code %s)", self._layout.prefix, code)

    def stats(self) -> dict[str, int]:
        """`objects`: pages of this store, whoever wrote them; -1 without `metrics`, and for what else `cluster_stats`
        says. With `metrics` also `cluster_objects`, `bytes` and `capacity` of the whole cluster.

        Of this process: `hits`, `misses`, `failures` of get; `puts` and `refused` of put; `master_down` (1 while calls
        are held back) and `master_losses`.
        """
        found = {"objects": -1}
        if self._metrics and not self._entrance.is_closed:
            found = cluster_stats(self._metrics, self._layout, self._default_tenant)
        with self._lock:
            state = {"master_down": int(self._breaker.is_open), "master_losses": self._breaker.openings}
            return found | self._counts | state

    def register(self, region: memoryview) -> None:
        """See `Store.register`. Buffers in the region are read and written without a copy. It stays registered, and
        alive, until `close`."""
        with self._entrance.entered() as entered:
            if entered:
                self._memory.add(region)

    def close(self) -> None:
        """See `Store.close`. Waits for calls that are in the engine, which takes about five seconds without a master.

        What this process lent to the cluster goes with it. The client's own `close` holds up all threads of Python.
        """
        if not self._entrance.close():
            return
        # The engine crashes the process when it is closed under a call, or called when it is closed.
        if self._entrance.wait(_CLOSE_SECONDS):
            self._memory.release()
            self._client.close()
            self._on_close()
        else:
            _LOG.warning("Mooncake's client is not closed: a call has been in it for %s s", _CLOSE_SECONDS)

    def _move(
        self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float, work: Work, copy_first: bool
    ) -> None:
        """Let `work` handle all buffers, in as few batches as possible, none of which has a key twice."""
        buffers = paired(keys, buffers)
        with self._entrance.entered() as entered:
            for turn in turns(keys) if entered else []:
                self._memory.move(turn, buffers, deadline, work, copy_first)

    def _read(
        self, keys: Sequence[str], sizes: Sequence[int], addresses: Sequence[int], deadline: float
    ) -> list[Fetch]:
        batch = Batch(self._layout, keys, sizes, addresses)
        plain, several = "batch_get_into", "batch_get_into_multi_buffers"
        codes = self._codes(batch.names, deadline, several if batch.in_pieces else plain, *batch.places)
        return batch.per_key(fetched, codes, batch.sizes, without=Fetch.FAILED)

    def _write(
        self, keys: Sequence[str], sizes: Sequence[int], addresses: Sequence[int], deadline: float
    ) -> list[bool]:
        batch = Batch(self._layout, keys, sizes, addresses)
        found = self._write_batch(batch, deadline)
        wrong = [size is not None and size != wanted for size, wanted in zip(found, batch.sizes, strict=True)]
        if any(wrong):
            replaced = batch.only(batch.per_key(lambda each, _: any(each), wrong, batch.sizes, without=False))
            self._codes(replaced.names, deadline, "batch_remove", True)
            later = dict(zip(replaced.names, self._write_batch(replaced, deadline), strict=True))
            found = [later.get(name, size) for name, size in zip(batch.names, found, strict=True)]
        return batch.per_key(lambda each, wanted: list(each) == list(wanted), found, batch.sizes, without=False)

    def _write_batch(self, batch: Batch, deadline: float) -> list[int | None]:
        """Write objects; the length that each has afterwards, None where it couldn't be written or isn't there.

        Success says little: Mooncake also answers it for an object that is there with other bytes, and for one that
        somebody else is just writing, or was writing when it died.
        """
        config = self._config(batch)
        plain, several = "batch_put_from", "batch_put_from_multi_buffers"
        codes = self._codes(batch.names, deadline, several if batch.in_pieces else plain, *batch.places, config)
        good = [name for name, code in zip(batch.names, codes, strict=True) if code == 0]
        lengths = self._lengths(good, deadline)
        return [lengths.get(name) if code == 0 else None for name, code in zip(batch.names, codes, strict=True)]

    def _config(self, batch: Batch) -> Any:
        config = ReplicateConfig()
        config.replica_num, config.with_hard_pin = self._replicas, self._hard_pin
        if self._soft_pin:
            config.soft_pin_action, config.soft_pin_ttl_ms = SoftPinAction.ENABLE, round(self._soft_pin * 1000)
        if self._group and len(self._layout.suffixes) > 1:
            config.group_ids = batch.groups
        return config

    def _lengths(self, names: Sequence[str], deadline: float) -> dict[str, int]:
        """The lengths of those objects that can be read now."""
        found = self._ask(deadline, "batch_get_replica_desc", list(names)) if names else {}
        lengths: dict[str, int] = {}
        for name, replicas in found.items() if isinstance(found, dict) else ():
            kept = next((each for each in replicas if each.is_memory_replica()), None)
            if kept is not None:
                lengths[name] = kept.get_memory_descriptor().buffer_descriptor.size
            elif replicas:  # on a disk: the descriptor of a disk doesn't tell
                size = self._ask(deadline, "get_size", name)
                lengths |= {name: size} if type(size) is int and size > 0 else {}
        return lengths

    def _codes_per_key(self, keys: Sequence[str], deadline: float, method: str, *arguments: Any) -> list[list[int]]:
        names = [name for key in keys for name in self._layout.names(key)]
        with self._entrance.entered() as entered:
            codes = self._codes(names, deadline, method, *arguments) if entered else [_NOT_ASKED] * len(names)
        number = len(self._layout.suffixes)
        return [codes[index : index + number] for index in range(0, len(codes), number)]

    def _codes(self, names: Sequence[str], deadline: float, method: str, *arguments: Any) -> list[int]:
        """What a batch of the engine answers about each name; an error for each where it wasn't asked."""
        answer = self._ask(deadline, method, list(names), *arguments) if names else []
        whole = isinstance(answer, list) and len(answer) == len(names)
        return answer if whole else [_NOT_ASKED] * len(names)

    def _ask(self, deadline: float, method: str, *arguments: Any) -> Any:
        """The answer of the engine, None where it raised, or wasn't asked."""
        with self._lock:
            if self._entrance.is_closed or time.monotonic() >= deadline or not self._breaker.allows():
                return None
            probe = self._breaker.is_open
        answer = None
        try:
            answer = getattr(self._client, method)(*arguments)
        except Exception as error:
            _LOG.warning("Mooncake's client raised in %s: %s", method, error)
        codes = answer if isinstance(answer, list) else [answer]
        with self._lock:
            if answer is None or any(code in NO_MASTER for code in codes if type(code) is int):
                self._breaker.failed()
            elif codes != [{}]:  # which a dead master gives too, where it is asked for a dictionary
                self._breaker.succeeded()
            elif probe:
                self._breaker.abandoned()
        return answer

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count


def open_url(address: str, object_bytes: int, options: Mapping[str, Any]) -> MooncakeStore:
    """The store of `mooncake://master:port/prefix`; docs/stores/mooncake.md tells the options.

    `engine`, only as a keyword: a `mooncake.engine.TransferEngine` of this process, to be used instead of a new one.
    Raises ValueError for what it doesn't understand and for a directory of another store, ConnectionError where no
    master answers or it refuses, and OSError for a directory that can't be used.
    """
    master, prefix = host_of(address, PORT), unquote(urlsplit(address).path).strip("/") or PREFIX
    known: dict[str, Callable[[Any], Any]] = {**SETUP, **_WRITES, **_OTHERS}
    parsed = take_options(address, options, known)
    try:
        layout = Layout(prefix, parsed.pop("objects", "page"), parsed.pop("layers", 1))
    except ValueError as error:
        raise ValueError(f"{address}: {error}") from None
    setup = {name: parsed.pop(name) for name in SETUP if name in parsed}
    client, let_go = connect(master, **setup)
    default_tenant = setup.get("tenant", "default") == "default"
    try:
        return MooncakeStore(
            client, layout, object_bytes=object_bytes, default_tenant=default_tenant, on_close=let_go, **parsed
        )
    except ValueError as error:
        client.close()
        let_go()
        raise ValueError(f"{address}: {error}") from None


def _seconds(text: Any) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError(f"not a number of seconds: {text!r}")
    return number


def _host_and_port(text: str) -> tuple[str, int]:
    return host_of(f"http://{text}")


_WRITES: dict[str, Callable[[Any], Any]] = {
    "replicas": int,
    "hard_pin": parse_flag,
    "soft_pin": _seconds,
    "group": parse_flag,
}
_OTHERS: dict[str, Callable[[Any], Any]] = {
    "objects": str,
    "layers": int,
    "scratch": parse_size,
    "cooldown": _seconds,
    "metrics": _host_and_port,
}
