"""A store in a Redis server (or Valkey, which speaks the same), by the package `redis` with the parser of `hiredis`."""

import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from logging import DEBUG, WARNING, getLogger
from typing import Any
from urllib.parse import urlsplit

import hiredis  # noqa: F401 - redis takes it where it is there; its parser in Python is far slower
import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from purecache.stores.interface import Fetch, Presence, Store, paired
from purecache.stores.options import host_of, take_options

if int(redis.__version__.partition(".")[0]) < 8:
    raise ImportError(f"the package redis must be 8.0 or newer, not {redis.__version__}")

COUNTED = 100_000
"""`stats` counts objects up to here."""

_ROUND_BYTES = 4 << 20
_ROUND_KEYS = 256
_READ_BYTES = 1 << 17
_CLEAR_SECONDS = 600.0
_STATS_SECONDS = 2.0
_LONG = 1e6
_KEY = re.compile(rb"[A-Za-z0-9._-]{1,200}")
_INFO = {"used_memory": "server_bytes", "maxmemory": "server_capacity", "evicted_keys": "server_evictions"}
_LOG = getLogger(__name__)


def open_url(address: str, object_bytes: int, options: Mapping[str, Any]) -> Store:
    """The store of `redis://host:port`, for the registry. Raises ValueError for what it doesn't understand.

    Options: see `RedisStore`; `password_env` is the name of an environment variable that has the password.
    """
    host, port = host_of(address, 6379)
    parts = urlsplit(address)
    if parts.username is not None or parts.path not in ("", "/") or parts.fragment:
        raise ValueError(f"{address}: only host and port stand here; db, username and prefix are options")
    known = {"db": int, "prefix": str, "username": str, "password": str, "password_env": str}
    settings = take_options(address, options, known)
    variable = settings.pop("password_env", None)
    if variable is not None:
        if "password" in settings:
            raise ValueError(f"{address}: give password or password_env, not both")
        if variable not in os.environ:
            raise ValueError(f"{address}: there is no environment variable {variable} (password_env)")
        settings["password"] = os.environ[variable]
    try:
        return RedisStore(host, port, **settings)
    except ValueError as error:
        raise ValueError(f"{address}: {error}") from None


class RedisStore(Store):
    """Objects as strings `<prefix>:<key>` in database `db` of a server. It connects when it is first asked.

    The server bounds it: set its `maxmemory` and the policy `allkeys-lru`. Without a policy, puts into a full server
    are refused (False). Of a batch, requests for up to 4 MiB are sent before answers are read. Raises ValueError for
    an impossible setting.
    """

    def __init__(
        self,
        host: str,
        port: int = 6379,
        *,
        db: int = 0,
        prefix: str = "purecache",
        username: str | None = None,
        password: str | None = None,
    ) -> None:
        if db < 0:
            raise ValueError(f"db must not be negative: {db}")
        if not prefix:
            raise ValueError("prefix must not be empty: it tells our objects from those of others")
        if username and password is None:
            raise ValueError("a username needs a password")
        self._address = (host, port)
        self._prefix = prefix.encode() + b":"
        self._pool = redis.ConnectionPool(
            connection_class=_Connection,
            max_connections=1 << 30,  # one for each call that runs: who calls bounds them
            host=host,
            port=port,
            db=db,
            username=username or None,
            password=password,
            protocol=2,
            driver_info=None,  # otherwise it tells its name, which old servers don't understand
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=self._greet,
            socket_read_size=_READ_BYTES,
            # That of hiredis, which it takes otherwise, copies a long word twice; this one doesn't.
            command_packer=PythonRespSerializer(6000, _encode),
        )
        self._client = redis.Redis(connection_pool=self._pool)
        self._counts: dict[str, int] = dict.fromkeys(("hits", "misses", "failures", "puts", "refused"), 0)
        self._lock = threading.Lock()
        self._closed = False
        self._complained = False

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`. Asking is no use: it does not keep an object."""
        answers = [Presence.UNKNOWN] * len(keys)

        def take(i: int, reply: Any) -> None:
            if reply in (0, 1):
                answers[i] = Presence(reply)

        self._batch(lambda i: (b"EXISTS", self._name(keys[i])), [0] * len(keys), take, deadline)
        return answers

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`. Something else than a string under a key is FAILED."""
        sizes = [buffer.nbytes for buffer in paired(keys, buffers)]
        answers = [Fetch.FAILED] * len(keys)

        def take(i: int, reply: Any) -> None:
            if reply is None:
                answers[i] = Fetch.MISSING
            elif isinstance(reply, bytes) and len(reply) == sizes[i]:
                buffers[i].cast("B")[:] = reply
                answers[i] = Fetch.HIT

        self._batch(lambda i: (b"GET", self._name(keys[i])), sizes, take, deadline)
        self._count(
            hits=answers.count(Fetch.HIT), misses=answers.count(Fetch.MISSING), failures=answers.count(Fetch.FAILED)
        )
        return answers

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`. Writes also what is there: asking first costs a round trip, and a damaged object is healed.

        One that was given up at the deadline may still be there afterwards, whole.
        """
        sizes = [buffer.nbytes for buffer in paired(keys, buffers)]
        answers = [False] * len(keys)

        def take(i: int, reply: Any) -> None:
            answers[i] = reply == b"OK"

        self._batch(lambda i: (b"SET", self._name(keys[i]), buffers[i].cast("B")), sizes, take, deadline)
        self._count(puts=answers.count(True), refused=answers.count(False))
        return answers

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`."""
        answers = [False] * len(keys)

        def take(i: int, reply: Any) -> None:
            answers[i] = reply in (0, 1)

        self._batch(lambda i: (b"UNLINK", self._name(keys[i])), [0] * len(keys), take, deadline)
        return answers

    def clear(self) -> None:
        """Remove all objects under the prefix; logs a warning where that doesn't work out within ten minutes.

        The server has no list of them: it walks through all its keys. What others put meanwhile may stay.
        """

        def work() -> None:
            names: list[bytes] = []
            for name in self._names():
                names.append(name)
                if len(names) == _ROUND_KEYS:
                    self._client.unlink(*names)
                    names = []
            if names:
                self._client.unlink(*names)

        if not self._attempt(work, time.monotonic() + _CLEAR_SECONDS):
            _LOG.warning("could not remove all objects of the Redis server at %s:%d", *self._address)

    def stats(self) -> dict[str, int]:
        """`objects` under the prefix, counted up to `COUNTED`; -1: the server doesn't tell within 2 s.

        Of the whole server, objects of others too, and only where it tells: `server_bytes`, `server_capacity` (0: no
        limit), `server_evictions`. Of this process: `hits`, `misses`, `failures` of get; `puts`, `refused` of put.
        """
        numbers: dict[str, int] = {}

        def work() -> None:
            found: set[bytes] = set()  # a walk may meet a key twice
            for name in self._names():
                found.add(name)
                if len(found) >= COUNTED:
                    break
            numbers["objects"] = len(found)
            told: Any = self._client.info()
            numbers.update({ours: told[name] for name, ours in _INFO.items() if type(told.get(name)) is int})

        self._attempt(work, time.monotonic() + _STATS_SECONDS)
        with self._lock:
            return {"objects": -1, **numbers, **self._counts}

    def close(self) -> None:
        """See `Store.close`. Running calls are broken off and answer as at a deadline."""
        self._closed = True
        self._pool.disconnect()

    def _name(self, key: str) -> bytes:
        return self._prefix + key.encode("ascii")

    def _names(self) -> Iterator[bytes]:
        """The names of our objects. A prefix may begin with ours and a colon: a key has no colon."""
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._prefix) + b"*"
        for name in self._client.scan_iter(match=pattern, count=1000):
            if _KEY.fullmatch(name[len(self._prefix) :]):
                yield name

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count

    def _batch(
        self,
        command: Callable[[int], tuple[bytes | memoryview, ...]],
        sizes: Sequence[int],
        take: Callable[[int, Any], None],
        deadline: float,
    ) -> None:
        """Send `command(i)` for each size, in rounds, and `take` each answer; those before a failure stand."""

        def work() -> None:
            connection = self._pool.get_connection()
            quiet = False
            try:
                for some in _rounds(sizes):
                    connection.send_packed_command(connection.pack_commands([command(i) for i in some]))
                    for i in some:
                        try:
                            take(i, connection.read_response())
                        except redis.ResponseError as error:  # of this key alone, such as WRONGTYPE or OOM
                            take(i, error)
                quiet = True
            finally:
                if not quiet or self._closed:  # no late answer may reach the next call
                    connection.disconnect()
                self._pool.release(connection)

        if sizes:
            self._attempt(work, deadline)

    def _attempt(self, work: Callable[[], None], deadline: float) -> bool:
        """Whether `work` went through; if not, it is logged, without what the server said: that may repeat a secret."""
        if self._closed or time.monotonic() >= deadline:
            return False
        _CALL.deadline = deadline
        try:
            work()
            return True
        except Exception as error:  # also those of a connection that another thread closes, and of nonsense answered
            own = isinstance(error, OSError) or type(error) in (redis.ConnectionError, redis.TimeoutError)
            code = getattr(error, "status_code", None)
            text = error if own and code is None else f"{type(error).__name__} {code or ''}".rstrip()
            level = DEBUG if self._complained or self._closed else WARNING
            self._complained = True
            _LOG.log(level, "the Redis server at %s:%d failed (more at level DEBUG): %s", *self._address, text)
            return False

    def _greet(self, connection: "_Connection") -> None:
        if self._closed:  # a call that `close` broke off would connect anew
            raise redis.ConnectionError("the store is closed")
        connection.on_connect()


class _Call(threading.local):
    """What runs in this thread."""

    deadline: float = math.inf

    def left(self) -> float:
        """Seconds. Raises redis.TimeoutError where there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise redis.TimeoutError("the deadline is over")
        return min(left, _LONG)


_CALL = _Call()


class _Connection(redis.Connection):
    """It keeps the deadline of the call in this thread, but for an answer that drips: a timeout is per packet."""

    def connect(self) -> None:
        self.socket_connect_timeout = self.socket_timeout = _CALL.left()
        super().connect()

    def send_packed_command(self, command: Iterable[Any], check_health: bool = True) -> None:
        super().send_packed_command(self._in_time(command), check_health)

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        self.update_current_socket_timeout(_CALL.left())
        return super().read_response(*arguments, **options)

    def _in_time(self, command: Iterable[Any]) -> Iterator[Any]:
        for piece in command:
            self.update_current_socket_timeout(_CALL.left())
            yield piece


def _encode(word: Any) -> bytes | memoryview:
    return word if isinstance(word, bytes | memoryview) else str(word).encode()


def _rounds(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of the objects that are asked for before answers are read: the server keeps all answers."""
    some: list[int] = []
    total = 0
    for i, size in enumerate(sizes):
        if some and (total + size > _ROUND_BYTES or len(some) >= _ROUND_KEYS):
            yield some
            some, total = [], 0
        some.append(i)
        total += size
    if some:
        yield some
