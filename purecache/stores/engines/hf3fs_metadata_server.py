"""An index of pages that several machines share: a client of the metadata server that sglang has for 3FS.

The protocol is JSON over HTTP: POST `/<rank>/<call>` with the name of a `namespace`, for the calls `initialize`,
`exists`, `get_page_indices`, `reserve_and_allocate_page_indices`, `confirm_write`, `delete_keys` and `clear`. The
server is taken as it is: pages that a killed writer had reserved are never free again, nor is one of two pages that
were confirmed for one key, and after a restart from an old file it leads keys to pages that others have now. What a
page holds is therefore decided by its head, never by this index.
"""

import contextlib
import http.client
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from purecache.stores.engines.hf3fs_index import PageIndex
from purecache.stores.interface import Presence

_IDLE = 4
_MOST_SECONDS = 10.0
_MOST_BYTES = 64 << 20
_LOG = logging.getLogger(__name__)


class MetadataServerIndex(PageIndex):
    """The pages of `rank` and `namespace` in the server at `url` (`http://host:port`).

    Connects at once. Raises OSError where no server answers, and ValueError for another kind of URL.
    """

    def __init__(self, url: str, pages: int, rank: int = 0, namespace: str = "purecache") -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.username is not None or parts.path not in ("", "/"):
            raise ValueError("metadata: write http://host:port, without a user, a password or a path")
        try:
            self._host, self._port = parts.hostname, parts.port or 80
        except ValueError:
            raise ValueError("metadata: write http://host:port; its port is no number") from None
        self._pages, self._rank, self._namespace = pages, rank, namespace
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._closed = False
        self._seen: dict[str, int] = {}
        self._owner: dict[int, str] = {}
        self._lost = 0
        self._initialize(time.monotonic() + _MOST_SECONDS)

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `PageIndex.exists`."""
        found = self._list("exists", {"keys": list(keys)}, "exists", len(keys), deadline)
        return [Presence.YES if each is True else Presence.NO if each is False else Presence.UNKNOWN for each in found]

    def find(self, keys: Sequence[str], deadline: float) -> list[int | None]:
        """See `PageIndex.find`. Raises OSError too where the server names pages that the file doesn't have."""
        found = self._list("get_page_indices", {"keys": list(keys)}, "indices", len(keys), deadline)
        if any(page is not None and not self._is_page(page) for page in found):
            raise OSError("the metadata server names pages that are not in the file")
        with self._lock:
            for key, page in zip(keys, found, strict=True):
                self._note(key, page)
        return found

    def reserve(self, keys: Sequence[str], deadline: float) -> list[int | bool]:
        """See `PageIndex.reserve`."""
        request = {"keys": [[key, ""] for key in keys]}  # beside each key, that of its prefix, which nobody uses
        name = "reserve_and_allocate_page_indices"
        found = self._list(name, request, "indices", len(keys), deadline)
        answers: list[int | bool] = []
        new: set[int] = set()
        for each in found:
            there: Any = None
            page: Any = None
            if isinstance(each, list) and len(each) == 2:
                there, page = each
            if there is True and self._is_page(page):
                answers.append(True)
            elif there is False and self._is_page(page) and page not in new:
                new.add(page)
                answers.append(page)
            else:  # -1 stands for no room
                answers.append(False)
        with self._lock:
            for page in new:  # whatever it held has been evicted
                self._seen.pop(self._owner.pop(page, ""), None)
        # A full server evicts the oldest page even if the same request has just been told that it is there.
        gone = [isinstance(each, list) and each[0] is True and each[1] in new for each in found]
        return [False if lost else answer for answer, lost in zip(answers, gone, strict=True)]

    def confirm(self, written: Sequence[tuple[str, int]], unused: Sequence[int], deadline: float) -> list[bool]:
        """See `PageIndex.confirm`."""
        try:
            # The server would forget the page of a writer that was faster, which nobody could ever use again.
            there = self.find([key for key, _ in written], deadline) if written else []
            mine = [pair for pair, page in zip(written, there, strict=True) if page is None]
            release = [pair[1] for pair, page in zip(written, there, strict=True) if page not in (None, pair[1])]
            request = {"written_keys_to_confirm": mine, "pages_to_release": [*release, *unused]}
            if mine or release or unused:
                self._post("confirm_write", request, deadline)
        except OSError:
            with self._lock:
                self._lost += len(written) + len(unused)
            raise
        with self._lock:
            for key, page in mine:
                self._note(key, page)
        return [True] * len(written)

    def forget(self, keys: Sequence[str], deadline: float) -> None:
        """See `PageIndex.forget`."""
        self._post("delete_keys", {"keys": list(keys)}, deadline)
        with self._lock:
            for key in keys:
                self._note(key, None)

    def drop(self, key: str, page: int, deadline: float) -> None:
        """See `PageIndex.drop`. The server can't do it in one step: a key that is put meanwhile may be lost."""
        if self.find([key], deadline) == [page]:
            self.forget([key], deadline)

    def clear(self) -> None:
        """See `PageIndex.clear`: of all machines that share the rank and the namespace."""
        self._post("clear", {}, time.monotonic() + _MOST_SECONDS)
        with self._lock:
            self._seen.clear()
            self._owner.clear()

    def counts(self) -> dict[str, int]:
        """`objects` that this process knows of, pages `lost` (reserved, and not given back), `pages` of the file."""
        with self._lock:
            return {"objects": len(self._seen), "lost": self._lost, "pages": self._pages}

    def close(self) -> None:
        """See `PageIndex.close`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _note(self, key: str, page: int | None) -> None:
        before = self._seen.pop(key, None)
        if before is not None and self._owner.get(before) == key:
            del self._owner[before]
        if page is not None:
            self._seen.pop(self._owner.get(page, ""), None)  # two keys with one page: the other one is stale
            self._seen[key], self._owner[page] = page, key

    def _is_page(self, page: Any) -> bool:
        return type(page) is int and 0 <= page < self._pages

    def _list(self, call: str, request: dict[str, Any], name: str, count: int, deadline: float) -> list[Any]:
        answer = self._post(call, request, deadline).get(name)
        if not isinstance(answer, list) or len(answer) != count:
            raise OSError(f"the metadata server answered {call} of {count} keys with something else")
        return answer

    def _initialize(self, deadline: float) -> None:
        status, _ = self._exchange("initialize", {"num_pages": self._pages}, deadline)
        if status not in (200, 204):
            raise OSError(f"the metadata server refused to initialize rank {self._rank}: status {status}")

    def _post(self, call: str, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        """The answer of a call. A server that has lost everything is told about the file again."""
        status, body = self._exchange(call, request, deadline)
        if status == 404:
            self._initialize(deadline)
            status, body = self._exchange(call, request, deadline)
        if status not in (200, 204):
            raise OSError(f"the metadata server answered {call} with status {status}")
        try:
            answer = json.loads(body) if body else {}
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise OSError(f"the metadata server answered {call} with something that is no JSON object")
        return answer

    def _exchange(self, call: str, request: dict[str, Any], deadline: float) -> tuple[int, bytes]:
        body = json.dumps({**request, "namespace": self._namespace}).encode()
        path, headers = f"/{self._rank}/{call}", {"Content-Type": "application/json"}
        while True:
            with self._connection(deadline) as (connection, is_used):
                try:
                    connection.request("POST", path, body, headers)
                    response = connection.getresponse()
                    answer = response.read(_MOST_BYTES)
                    if response.read(1):
                        raise OSError("the metadata server sends more than 64 MiB")
                    return response.status, answer
                except http.client.HTTPException as error:
                    connection.close()
                    if not (is_used and isinstance(error, http.client.RemoteDisconnected)):
                        raise OSError(f"the metadata server broke off {call}: {type(error).__name__}") from error
                except (ConnectionResetError, BrokenPipeError):
                    connection.close()
                    if not is_used:
                        raise
            # It had closed a connection that was idle: another one, which in the end is a new one.

    @contextlib.contextmanager
    def _connection(self, deadline: float) -> Iterator[tuple[http.client.HTTPConnection, bool]]:
        seconds = min(deadline - time.monotonic(), _MOST_SECONDS)
        if seconds <= 0:
            raise TimeoutError("too late to ask the metadata server")
        with self._lock:
            if self._closed:
                raise OSError("the index is closed")
            connection = self._idle.pop() if self._idle else None
        is_used = connection is not None
        if connection is None:
            connection = http.client.HTTPConnection(self._host, self._port)
        connection.timeout = seconds
        if connection.sock is not None:
            connection.sock.settimeout(seconds)
        try:
            yield connection, is_used
        except BaseException:
            connection.close()
            raise
        with self._lock:
            keep = connection.sock is not None and not self._closed and len(self._idle) < _IDLE
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()
