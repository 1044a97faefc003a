"""A store in an object store: S3 and what speaks like it, Google Cloud Storage, Azure, or a local directory."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.store import from_url

from purecache.stores.interface import Fetch, Presence, Store, paired

SUFFIX = ".page"
"""Ends the name of an object, behind its key; `clear` and `stats` see nothing else."""
COUNTED = 1000
"""`stats` counts objects up to here: what one request for a list gives."""

_CLEAR_SECONDS = 600.0
_STATS_SECONDS = 2.0
_LONG = 1e6
_LOG = logging.getLogger(__name__)
_Answer = TypeVar("_Answer", Presence, Fetch, bool)


class ObjectStore(Store):
    """Objects `<prefix>/<key>.page` in a store of the `obstore` library, with up to `concurrency` requests at once.

    `target` is a URL (`s3://bucket/path`, `gs://bucket/path`, `az://container/path`, `file:///path`, `memory:///`) or
    a store that obstore has made. For a URL, `config` has what obstore takes for it (such as `endpoint`, `region`,
    `access_key_id`), a request may take `request_seconds`, connecting `connect_seconds`, and it is tried again
    `retries` times. A store made elsewhere keeps its own settings. Either way a call ends at its deadline.

    There is no capacity here: let the server expire old objects. A put that was given up at the deadline may still
    arrive. Raises ValueError for a URL or a setting that obstore doesn't take.
    """

    def __init__(
        self,
        target: str | Any,
        prefix: str = "",
        *,
        concurrency: int = 32,
        request_seconds: float = 10.0,
        connect_seconds: float = 2.0,
        retries: int = 1,
        **config: Any,
    ) -> None:
        if concurrency < 1 or retries < 0 or request_seconds <= 0 or connect_seconds <= 0:
            raise ValueError("concurrency and the seconds must be positive, and retries must not be negative")
        if isinstance(target, str):
            self._store = _open(target, request_seconds, connect_seconds, retries, config)
        elif config:
            raise ValueError(f"{', '.join(config)}: settings are for a URL; {type(target).__name__} has its own")
        else:
            self._store = target
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._counts: dict[str, int] = dict.fromkeys(("hits", "misses", "failures", "puts", "refused"), 0)
        self._slots = asyncio.Semaphore(concurrency)
        self._requests: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="purecache-objects", daemon=True)
        self._thread.start()

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`."""
        return self._batch(len(keys), lambda i: self._exists(keys[i]), Presence.UNKNOWN, deadline)

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`."""
        buffers = paired(keys, buffers)
        answers = self._batch(len(keys), lambda i: self._get(keys[i], buffers[i]), Fetch.FAILED, deadline)
        self._count(
            hits=answers.count(Fetch.HIT), misses=answers.count(Fetch.MISSING), failures=answers.count(Fetch.FAILED)
        )
        return answers

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`. Writes also what is there: asking first costs as much, and a damaged object is healed."""
        buffers = paired(keys, buffers)
        answers = self._batch(len(keys), lambda i: self._put(keys[i], buffers[i]), False, deadline)
        self._count(puts=answers.count(True), refused=answers.count(False))
        return answers

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`."""
        return self._batch(len(keys), lambda i: self._delete(keys[i]), False, deadline)

    def clear(self) -> None:
        """Remove all objects under the prefix; logs a warning where that doesn't work out within ten minutes."""
        if self._batch(1, lambda _: self._clear(), False, time.monotonic() + _CLEAR_SECONDS) != [True]:
            _LOG.warning("could not remove all objects of the store %s", self._store)

    def stats(self) -> dict[str, int]:
        """`objects`: how many, counted up to `COUNTED` in one request; -1: the store doesn't answer within 2 s.

        Of this process: `hits`, `misses`, `failures` of get; `puts` and `refused` of put.
        """
        found: list[int] = []
        self._batch(1, lambda _: self._number(found), False, time.monotonic() + _STATS_SECONDS)
        with self._lock:
            return {"objects": found[0] if found else -1, **self._counts}

    def close(self) -> None:
        """See `Store.close`. Running calls are broken off and answer as at a deadline."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            stopped = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        stopped.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _name(self, key: str) -> str:
        return f"{self._prefix}{key}{SUFFIX}"

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count

    def _batch(
        self, count: int, start: Callable[[int], Coroutine[Any, Any, _Answer]], failed: _Answer, deadline: float
    ) -> list[_Answer]:
        """An answer for each of `count` requests; `failed` for those that raise, or that the deadline cuts off."""
        with self._lock:
            if count == 0 or self._closed or time.monotonic() >= deadline:
                return [failed] * count
            answers = asyncio.run_coroutine_threadsafe(self._gather(count, start, failed, deadline), self._loop)
        return answers.result()

    async def _gather(
        self, count: int, start: Callable[[int], Coroutine[Any, Any, _Answer]], failed: _Answer, deadline: float
    ) -> list[_Answer]:
        tasks = [asyncio.ensure_future(self._limited(start, i)) for i in range(count)]
        self._requests.update(tasks)
        try:
            _, late = await asyncio.wait(tasks, timeout=min(max(deadline - time.monotonic(), 0.0), _LONG))
            for task in late:
                task.cancel()
            if late:
                # A cancelled request runs no more of our code, so nothing writes into a buffer after the answer.
                await asyncio.wait(late)
        finally:
            self._requests.difference_update(tasks)
        # A panic in obstore is no Exception; a task keeps either.
        return [failed if task.cancelled() or task.exception() is not None else task.result() for task in tasks]

    async def _limited(self, start: Callable[[int], Coroutine[Any, Any, _Answer]], i: int) -> _Answer:
        async with self._slots:
            return await start(i)

    async def _stop(self) -> None:
        """Break off all requests, and let the batches they belong to answer."""
        for task in self._requests:
            task.cancel()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)

    async def _exists(self, key: str) -> Presence:
        try:
            await obstore.head_async(self._store, self._name(key))
        except FileNotFoundError:
            return Presence.NO
        return Presence.YES

    async def _get(self, key: str, buffer: memoryview) -> Fetch:
        try:
            found = await obstore.get_async(self._store, self._name(key))
        except FileNotFoundError:
            return Fetch.MISSING
        if found.meta["size"] != buffer.nbytes:
            return Fetch.FAILED  # before its bytes are fetched
        content = memoryview(await found.bytes_async())
        if content.nbytes != buffer.nbytes:
            return Fetch.FAILED
        buffer[:] = content
        return Fetch.HIT

    async def _put(self, key: str, buffer: memoryview) -> bool:
        # A copy: obstore's memory store keeps the very buffer it was given, and a request that was given up may go on
        # sending from it. Made here, so that there are only as many copies as requests.
        await obstore.put_async(self._store, self._name(key), bytes(buffer), use_multipart=False)
        return True

    async def _delete(self, key: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(self._store, self._name(key))
        return True

    async def _clear(self) -> bool:
        async for chunk in obstore.list(self._store, self._prefix or None, chunk_size=COUNTED):
            names = [item["path"] for item in chunk if self._is_ours(item["path"])]
            if names:
                with contextlib.suppress(FileNotFoundError):
                    await obstore.delete_async(self._store, names)
        return True

    async def _number(self, found: list[int]) -> bool:
        listed: list[str] = []
        async for chunk in obstore.list(self._store, self._prefix or None, chunk_size=COUNTED):
            listed += [item["path"] for item in chunk]
            if len(listed) >= COUNTED:
                break
        found.append(sum(map(self._is_ours, listed[:COUNTED])))
        return True

    def _is_ours(self, path: str) -> bool:
        return path.startswith(self._prefix) and path.endswith(SUFFIX) and "/" not in path[len(self._prefix) :]


def _open(url: str, request_seconds: float, connect_seconds: float, retries: int, config: dict[str, Any]) -> Any:
    """A store of obstore for a URL. Its own patience (minutes by default) is cut down to what a cache can wait for."""
    scheme = url.partition(":")[0]
    options: dict[str, Any] = dict(config)
    if scheme == "file":
        options["mkdir"] = True
    elif scheme != "memory":
        options["client_options"] = {
            "timeout": timedelta(seconds=request_seconds),
            "connect_timeout": timedelta(seconds=connect_seconds),
            "allow_http": str(config.get("endpoint", "")).startswith("http://"),
        }
        options["retry_config"] = {
            "max_retries": retries,
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
            "retry_timeout": timedelta(seconds=request_seconds),
        }
    try:
        return from_url(url, **options)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            raise
        # obstore raises many kinds, a panic among them, with a long dump behind the first paragraph.
        reason = str(error).partition("\n\n")[0]
        raise ValueError(f"can't open {url}: {reason}") from error
