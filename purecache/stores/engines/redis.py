"""A store in a Redis server (or Valkey, which speaks the same).

It speaks Redis' protocol (RESP2) itself, over plain sockets, and needs no package: the usual client of Python can't
read into a buffer that is given to it, and has timeouts per packet, not per call.
"""

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from purecache.stores.interface import Fetch, Presence, Store
from purecache.stores.options import host_of, take_options

COUNTED = 100_000
"""`stats` counts objects up to here."""

_ROUND_BYTES = 4 << 20
_ROUND_KEYS = 256
_IDLE = 8
_CLEAR_SECONDS = 600.0
_STATS_SECONDS = 2.0
_LONG = 1e6
_KEY = re.compile(rb"[A-Za-z0-9._-]{1,200}")
_LOG = logging.getLogger(__name__)
_Answer = TypeVar("_Answer", Presence, Fetch, bool)


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
    are refused (False). Of a batch, requests for up to 4 MiB are sent before answers are read. Objects go straight
    from the buffers and into them. Raises ValueError for an impossible setting.
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
        self._address = (host, port)
        self._prefix = prefix.encode() + b":"
        self._greeting: list[list[bytes]] = []
        if password is not None:
            self._greeting.append([b"AUTH", *([username.encode()] if username else []), password.encode()])
        elif username:
            raise ValueError("a username needs a password")
        if db:
            self._greeting.append([b"SELECT", b"%d" % db])
        self._counts: dict[str, int] = dict.fromkeys(("hits", "misses", "failures", "puts", "refused"), 0)
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._used: set[_Connection] = set()
        self._closed = False
        self._complained = False

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`. Asking is no use: it does not keep an object."""
        answers = [Presence.UNKNOWN] * len(keys)

        def ask(connection: _Connection) -> None:
            for first in range(0, len(keys), _ROUND_KEYS):
                some = range(first, min(first + _ROUND_KEYS, len(keys)))
                connection.send([part for i in some for part in _command(b"EXISTS", self._name(keys[i]))])
                for i in some:
                    answers[i] = _PRESENCE.get(_number(connection.reply()), Presence.UNKNOWN)

        self._attempt(ask, bool(keys), deadline)
        return answers

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`. Something else than a string under a key is FAILED."""
        _check_lengths(keys, buffers)
        answers = [Fetch.FAILED] * len(keys)

        def ask(connection: _Connection) -> None:
            for some in _rounds(buffers):
                connection.send([part for i in some for part in _command(b"GET", self._name(keys[i]))])
                for i in some:
                    answers[i] = connection.fetch(buffers[i].cast("B"))

        self._attempt(ask, bool(keys), deadline)
        self._count(
            hits=answers.count(Fetch.HIT), misses=answers.count(Fetch.MISSING), failures=answers.count(Fetch.FAILED)
        )
        return answers

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`. Writes also what is there: asking first costs a round trip, and a damaged object is healed.

        One that was given up at the deadline may still be there afterwards, whole.
        """
        _check_lengths(keys, buffers)
        answers = [False] * len(keys)

        def ask(connection: _Connection) -> None:
            for some in _rounds(buffers):
                connection.send([part for i in some for part in _command(b"SET", self._name(keys[i]), buffers[i])])
                for i in some:
                    answers[i] = connection.reply() == b"OK"

        self._attempt(ask, bool(keys), deadline)
        self._count(puts=answers.count(True), refused=answers.count(False))
        return answers

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`."""
        answers = [False] * len(keys)

        def ask(connection: _Connection) -> None:
            for first in range(0, len(keys), _ROUND_KEYS):
                some = range(first, min(first + _ROUND_KEYS, len(keys)))
                connection.send([part for i in some for part in _command(b"UNLINK", self._name(keys[i]))])
                for i in some:
                    answers[i] = _number(connection.reply()) in (0, 1)

        self._attempt(ask, bool(keys), deadline)
        return answers

    def clear(self) -> None:
        """Remove all objects under the prefix; logs a warning where that doesn't work out within ten minutes.

        The server has no list of them: it walks through all its keys. What others put meanwhile may stay.
        """

        def ask(connection: _Connection) -> None:
            for names in self._names(connection):
                if names:
                    connection.send(_command(b"UNLINK", *names))
                    _refuse_errors(connection.reply())

        if not self._attempt(ask, True, time.monotonic() + _CLEAR_SECONDS):
            _LOG.warning("could not remove all objects of the Redis server at %s:%d", *self._address)

    def stats(self) -> dict[str, int]:
        """`objects` under the prefix, counted up to `COUNTED`; -1: the server doesn't tell within 2 s.

        Of the whole server, objects of others too, and only where it tells: `server_bytes`, `server_capacity` (0: no
        limit), `server_evictions`. Of this process: `hits`, `misses`, `failures` of get; `puts`, `refused` of put.
        """
        numbers: dict[str, int] = {}

        def ask(connection: _Connection) -> None:
            found: set[bytes] = set()  # a walk may meet a key twice
            for names in self._names(connection):
                found.update(names)
                if len(found) >= COUNTED:
                    break
            numbers["objects"] = min(len(found), COUNTED)
            connection.send(_command(b"INFO"))
            text = connection.reply()
            for name, ours in _INFO.items():
                match = re.search(rb"^%s:(\d+)\r?$" % name, text, re.MULTILINE) if isinstance(text, bytes) else None
                if match is not None:
                    numbers[ours] = int(match[1])

        self._attempt(ask, True, time.monotonic() + _STATS_SECONDS)
        with self._lock:
            return {"objects": -1, **numbers, **self._counts}

    def close(self) -> None:
        """See `Store.close`. Running calls are broken off and answer as at a deadline."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._used:
                connection.break_off()
        for connection in idle:
            connection.close()

    def _name(self, key: str) -> bytes:
        return self._prefix + key.encode("ascii")

    def _names(self, connection: "_Connection") -> Iterator[list[bytes]]:
        """The names of our objects, in pieces. A prefix may begin with ours and a colon: a key has no colon."""
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._prefix) + b"*"
        cursor = b"0"
        while True:
            connection.send(_command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000"))
            reply = _refuse_errors(connection.reply())
            if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], list):
                raise _Refused(f"SCAN answered {type(reply).__name__}")
            yield [name for name in reply[1] if _KEY.fullmatch(name[len(self._prefix) :])]
            cursor = reply[0]
            if cursor == b"0":
                return

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count

    def _attempt(self, ask: Callable[["_Connection"], None], needed: bool, deadline: float) -> bool:
        """Whether `ask` went through on some connection. What it had answered before a failure stands."""
        if not needed or self._closed or time.monotonic() >= deadline:
            return not needed
        connection: _Connection | None = None
        try:
            connection = self._take(deadline)
            ask(connection)
        except (OSError, ValueError, IndexError) as error:  # the latter: an answer that is not of Redis
            if connection is not None:
                self._drop(connection)
            level = logging.DEBUG if self._complained or self._closed else logging.WARNING
            self._complained = True
            _LOG.log(level, "the Redis server at %s:%d failed (more at level DEBUG): %s", *self._address, error)
            return False
        except BaseException:  # such as KeyboardInterrupt: answers may be left in it
            if connection is not None:
                self._drop(connection)
            raise
        self._give(connection)
        return True

    def _take(self, deadline: float) -> "_Connection":
        """A connection that nobody uses. One that the server has closed meanwhile is replaced."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = _Connection(self._address, deadline)
                fresh = True
            elif connection.is_quiet():
                connection.deadline, fresh = deadline, False
            else:
                connection.close()
                continue
            with self._lock:
                if not self._closed:
                    self._used.add(connection)
                    break
            connection.close()
            raise OSError("the store is closed")
        if fresh:
            try:
                for command in self._greeting:
                    connection.send(_command(*command))
                    reply = connection.reply()
                    if isinstance(reply, _Refused):  # not its text: some servers repeat what they don't understand
                        code = str(reply).partition(" ")[0]
                        raise _Refused(f"it refuses {command[0].decode()} ({code if code in _CODES else 'ERR'})")
            except BaseException:
                self._drop(connection)
                raise
        return connection

    def _give(self, connection: "_Connection") -> None:
        with self._lock:
            self._used.discard(connection)
            if not self._closed and len(self._idle) < _IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _drop(self, connection: "_Connection") -> None:
        with self._lock:
            self._used.discard(connection)
        connection.close()


class _Refused(OSError):
    """An error that the server answered."""


class _Connection:
    """One connection. Every method raises OSError, at `deadline` at the latest; it can't be used afterwards."""

    def __init__(self, address: tuple[str, int], deadline: float) -> None:
        self.deadline = deadline
        self._unread = b""
        error: OSError = OSError("no address")
        for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            self._socket = socket.socket(family, kind, protocol)
            try:
                self._patience()
                self._socket.connect(place)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return
            except OSError as failure:
                self._socket.close()
                error = failure
        raise error

    def send(self, parts: list[bytes | memoryview]) -> None:
        """Send all of these. The answers to what is sent at once must be small, or few: nobody reads meanwhile."""
        for first in range(0, len(parts), 256):
            some = parts[first : first + 256]  # the system takes up to 1024 at once
            while some:
                self._patience()
                sent = self._socket.sendmsg(some)
                while some and sent >= len(some[0]):
                    sent -= len(some[0])
                    del some[0]
                if sent:
                    some[0] = memoryview(some[0])[sent:]

    def reply(self) -> Any:
        """The next answer: bytes, int, None, a list of these, or a `_Refused` that the server answered."""
        kind, rest = self._line()
        if kind == b"+":
            return rest
        if kind == b"-":
            return _Refused(rest.decode("ascii", "replace"))
        if kind == b":":
            return int(rest)
        if kind == b"$":
            if int(rest) < 0:
                return None
            content = bytearray(int(rest))
            self._fill(memoryview(content))
            self._end()
            return bytes(content)
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        raise OSError("what answers is no Redis server")

    def fetch(self, buffer: memoryview) -> Fetch:
        """The next answer, which is to a GET, into a buffer; one of another length is read and thrown away."""
        kind, rest = self._line()
        if kind == b"-":
            return Fetch.FAILED
        if kind != b"$":
            raise OSError("what answers is no Redis server")
        left = int(rest)
        if left < 0:
            return Fetch.MISSING
        if left == len(buffer):
            self._fill(buffer)
            self._end()
            return Fetch.HIT
        scratch = memoryview(bytearray(min(left, 1 << 16)))
        while left:
            piece = scratch[: min(left, len(scratch))]
            self._fill(piece)
            left -= len(piece)
        self._end()
        return Fetch.FAILED

    def is_quiet(self) -> bool:
        """Whether it is open, with nothing to read, so that the next answer is to the next request."""
        if self._unread:
            return False
        self._socket.settimeout(0)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        return False

    def break_off(self) -> None:
        """End what another thread waits for."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it. What the server had not yet read of us it throws away."""
        self._socket.close()

    def _patience(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline is over")
        self._socket.settimeout(min(left, _LONG))

    def _line(self) -> tuple[bytes, bytes]:
        """Its first byte, and the rest."""
        while (end := self._unread.find(b"\r\n")) < 0:
            self._patience()
            more = self._socket.recv(4096)  # little: what is behind the line is copied once more
            if not more:
                raise ConnectionError("the server closed the connection")
            self._unread += more
        line, self._unread = self._unread[:end], self._unread[end + 2 :]
        return line[:1], line[1:]

    def _fill(self, buffer: memoryview) -> None:
        done = min(len(self._unread), len(buffer))
        buffer[:done], self._unread = self._unread[:done], self._unread[done:]
        while done < len(buffer):
            self._patience()
            count = self._socket.recv_into(buffer[done:])
            if count == 0:
                raise ConnectionError("the server closed the connection")
            done += count

    def _end(self) -> None:
        if self._line() != (b"", b""):
            raise OSError("what answers is no Redis server")


_CODES = ("WRONGPASS", "NOAUTH", "NOPERM", "LOADING", "DENIED")
_PRESENCE = {0: Presence.NO, 1: Presence.YES}
_INFO = {b"used_memory": "server_bytes", b"maxmemory": "server_capacity", b"evicted_keys": "server_evictions"}


def _command(*words: bytes | memoryview) -> list[bytes | memoryview]:
    """A request, in parts: long words are not copied."""
    parts: list[bytes | memoryview] = [b"*%d\r\n" % len(words)]
    for word in words:
        if isinstance(word, memoryview):
            parts += [b"$%d\r\n" % word.nbytes, word.cast("B"), b"\r\n"]
        else:
            parts.append(b"$%d\r\n%s\r\n" % (len(word), word))
    return [b"".join(part for part in parts if isinstance(part, bytes))] if len(parts) == len(words) + 1 else parts


def _rounds(buffers: Sequence[memoryview]) -> Iterator[list[int]]:
    """Numbers of the buffers whose objects are asked for before answers are read: the server keeps them all."""
    some: list[int] = []
    size = 0
    for i, buffer in enumerate(buffers):
        if some and (size + buffer.nbytes > _ROUND_BYTES or len(some) >= _ROUND_KEYS):
            yield some
            some, size = [], 0
        some.append(i)
        size += buffer.nbytes
    if some:
        yield some


def _number(reply: Any) -> int:
    return reply if type(reply) is int else -1


def _refuse_errors(reply: Any) -> Any:
    if isinstance(reply, _Refused):
        raise reply
    return reply


def _check_lengths(keys: Sequence[str], buffers: Sequence[memoryview]) -> None:
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys but {len(buffers)} buffers")
