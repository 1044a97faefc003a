"""The device pool of an engine that donates it to every step, lent to the copies of the cache in between."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Arrays = dict[str, list[Any]]
"""Arrays per layer, by the attribute of the engine's pool that lists them."""


class SchedulerPool:
    """Owner of the pool of an engine, for an `Interpreter`.

    Between the moment a step is dispatched and the moment its result replaces the pool, the arrays in the pool are
    deleted. Where another thread dispatches the steps, the scheduler gives a barrier that waits for the end of that
    moment; the thread starts no step while the scheduler is in the cache, since the scheduler has not given it one.
    """

    def __init__(
        self, pool: Any, names: Sequence[str], barrier: Callable[[], Callable[[], None] | None] = lambda: None
    ) -> None:
        """pool: an engine's, such as `MHATokenToKVPool` of sglang-jax. names: of its lists of arrays, one per layer.

        barrier: called for the barrier that is in force, None where one thread does everything.
        """
        self._pool, self._names, self._barrier = pool, tuple(names), barrier

    @contextmanager
    def access(self) -> Iterator[None]:
        """See `PoolOwner`. Also takes the lock that engines with more threads put on the pool (`_donate_lock`)."""
        wait = self._barrier()
        if wait is not None:
            wait()
        lock: AbstractContextManager[Any] = getattr(self._pool, "_donate_lock", None) or nullcontext()
        with lock:
            yield

    def take(self) -> Arrays:
        """The arrays of all layers."""
        return {name: list(getattr(self._pool, name)) for name in self._names}

    def put(self, pool: Arrays) -> None:
        """Replace the arrays of all layers."""
        for name, layers in pool.items():
            getattr(self._pool, name)[:] = layers
