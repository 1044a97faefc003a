"""Time and chance of one run: which faults happen, when, and how often they did."""

import enum
import random
from collections import Counter, deque
from collections.abc import Iterable

import numpy as np


class Fault(enum.StrEnum):
    """What a run may inject."""

    DELAY = "delay"
    """Transfers and calls of the store take several ticks."""
    REORDER = "reorder"
    """Later ones overtake earlier ones, as far as the data plane may."""
    FAIL = "fail"
    """A transfer, a copy or a call of the store fails as a whole, or the store raises."""
    PARTIAL = "partial"
    """Some pages of a batch fail."""
    DUPLICATE = "duplicate"
    """A completion comes twice, or after a reset."""
    NEVER = "never"
    """A transfer or a call of the store does not end before its deadline."""
    CORRUPT = "corrupt"
    """Bytes are changed, cut short, lost or those of another page, where checksums and flags can notice it."""
    RESTART = "restart"
    """A process dies with its device and host memory, and starts again on the same store."""


ALL = frozenset(Fault)


class Finding(AssertionError):
    """A check of the simulator failed; `kind` says which one, in a word."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Fate:
    """What all parts of a run share. `begin` starts every operation with a seed of its own.

    So an operation's luck does not depend on which other operations there are, and a run stays the same where those
    that do not matter are taken away.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = frozenset(faults)
        self.injected: Counter[str] = Counter()
        """How often each fault happened."""
        self.seen: Counter[str] = Counter()
        """What else happened that is worth counting, such as pages served."""
        self.now = 0
        """Ticks so far."""
        self.events = 0
        """Calls of the cache, and completions delivered to it."""
        self.trace: deque[tuple[object, ...]] = deque(maxlen=12)
        """The last calls."""
        self._random = random.Random(0)
        self.chance = self._random.random
        self.calm = False
        """Whether nothing fails any more: at the end of a run."""

    def begin(self, seed: int) -> None:
        """Start an operation."""
        self._random.seed(seed)

    def below(self, limit: int) -> int:
        """An int in [0, limit)."""
        return int(self.chance() * limit)

    def coin(self, share: float = 0.5) -> bool:
        """True in that share of cases."""
        return self.chance() < share

    def strikes(self, fault: Fault, share: float) -> bool:
        """Whether a fault happens here; counted. The same chances are drawn whatever faults are switched on."""
        if self.chance() >= share or fault not in self.faults or self.calm:
            return False
        self.injected[fault] += 1
        return True

    def seconds(self) -> float:
        """The time as a clock: a tick is a second."""
        return float(self.now)

    def delay(self) -> int:
        """Ticks until something ends."""
        return 1 + self.below(4) if self.strikes(Fault.DELAY, 0.5) else 0

    def spared(self, number: int) -> np.ndarray:
        """bool[number]: the pages of a batch that arrive."""
        ok = np.ones(number, bool)
        if self.strikes(Fault.FAIL, 0.04):
            ok[:] = False
        if number > 1 and self.strikes(Fault.PARTIAL, 0.08):
            ok &= [self.coin() for _ in range(number)]
        if number and self.strikes(Fault.CORRUPT, 0.02):
            ok[self.below(number)] = False
        return ok
