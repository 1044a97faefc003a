"""The device pool, whoever keeps it, and the moments in which its arrays may be used."""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from purecache.effects.pools import PoolLayout, any_deleted
from purecache.effects.transfers import PoolGoneError, PoolLostError, PoolOwner


class DevicePool:
    """Keeps the arrays of a pool, or asks their owner for them.

    All copies that read or write the pool run inside `use`, as functions of `arrays`.
    """

    def __init__(self, layout: PoolLayout, pool: Any, owner: PoolOwner | None) -> None:
        """Raises ValueError for a pool that does not fit the layout."""
        self.layout = layout
        leaves = layout.flatten(pool)
        self.arrays: tuple[jax.Array, ...] | None = leaves if owner is None else None
        """One per leaf; None after they were lost, and with an owner outside of `use`. Assign what comes out of a
        program that they were donated to."""
        self._owner = owner

    def get(self) -> Any:
        """The pool as it is now. Raises PoolLostError after a failed load back took it along."""
        if self._owner is not None:
            return self._owner.take()
        if self.arrays is None:
            raise PoolLostError(
                "a load back failed while it owned the device pool, every device page is gone:"
                " reset the cache and assign a new pool"
            )
        return jax.tree.unflatten(self.layout.treedef, self.arrays)

    def put(self, pool: Any) -> None:
        """Keep this pool from now on. Raises ValueError or PoolGoneError, and keeps the old one, if it does not fit."""
        arrays = self.layout.flatten(pool)
        if self._owner is None:
            self.arrays = arrays
        else:
            self._owner.put(pool)

    @property
    def is_there(self) -> bool:
        """Whether the pool may be used now: no step has it, as far as can be seen."""
        return self._owner is not None or self.arrays is None or not any_deleted(self.arrays)

    def check(self) -> None:
        """Raises PoolGoneError if the pool was donated and not put back."""
        if not self.is_there:
            raise PoolGoneError("the device pool was donated to a step: assign the pool that came out of it first")

    def use(self, action: Callable[[], None], writes: bool) -> bool:
        """Run `action` while `arrays` are at hand; `writes`: it may replace them. Whether the pool was there and what
        was written is in it: an owner that fails, whatever it raises, is a warning and a miss.

        Raises PoolGoneError if a pool without an owner was donated and not put back.
        """
        if self._owner is None:
            self.check()
            action()
            return True
        try:
            with self._owner.access():
                self.arrays = self.layout.flatten(self._owner.take())
                action()
                if writes and self.arrays is not None:
                    self._owner.put(jax.tree.unflatten(self.layout.treedef, self.arrays))
            return True
        except Exception as error:
            warnings.warn(f"pages are not copied, because the device pool can't be used: {error}", stacklevel=2)
            return False
        finally:
            self.arrays = None

    def write(self, program: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]) -> bool:
        """Replace the arrays by what `program` makes of them, which may donate them; whether that went well.

        A failed copy is a miss, whatever failed. A pool that it took along must not stay around, though.
        """
        if self.arrays is None:
            return False
        try:
            self.arrays = program(self.arrays)
        except Exception:
            if any_deleted(self.arrays):
                self.arrays = None
            return False
        return True
