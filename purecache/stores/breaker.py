"""When to leave a failing store alone: a circuit breaker."""

import time
from collections.abc import Callable


class Breaker:
    """Opens after `failures` failed calls in a row; `cooldown` seconds later it lets one call through, as a probe.

    A success closes it, in whatever state; a failed probe opens it for another `cooldown`. It has no lock: its owner
    calls it under one. `openings` counts how often it opened, failed probes included.
    """

    def __init__(self, failures: int, cooldown: float, clock: Callable[[], float] = time.monotonic) -> None:
        if failures < 1 or cooldown < 0:
            raise ValueError(f"a breaker needs failures >= 1 and cooldown >= 0, not {failures} and {cooldown}")
        self.openings = 0
        self._limit, self._cooldown, self._clock = failures, cooldown, clock
        self._in_a_row = 0
        self._opened: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls are held back, also while a probe is under way."""
        return self._opened is not None

    def allows(self) -> bool:
        """Whether a call may be made now. Where the breaker is open and this is True, that call is the probe."""
        if self._opened is None:
            return True
        if self._probing or self._clock() - self._opened < self._cooldown:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """A call went well."""
        self._in_a_row, self._opened, self._probing = 0, None, False

    def failed(self) -> None:
        """A call failed. Calls that began before the breaker opened don't make it stay open for longer."""
        self._in_a_row += 1
        if self._probing or (self._opened is None and self._in_a_row >= self._limit):
            self._opened, self._probing = self._clock(), False
            self.openings += 1

    def abandoned(self) -> None:
        """The probe taught nothing (it was never made, say): the next call may be the probe."""
        self._probing = False
