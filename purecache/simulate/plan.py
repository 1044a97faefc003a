"""What a run does: settings and a list of operations, all of it made from one seed, before the run."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from purecache.simulate.fate import ALL, Fault
from purecache.simulate.profiles import PROFILES
from purecache.state import CacheConfig, Policy, WritePolicy
from purecache.storage import EndPolicy

WEIGHTS = {
    "admit": 20,
    "extend": 16,
    "decode": 10,
    "checkpoint": 10,
    "finish": 13,
    "tick": 22,
    "loaded": 6,
    "abort": 2,
    "retract": 2,
    "match": 3,
    "lock": 1,
    "unlock": 1,
    "backup": 1,
    "evict": 2,
    "evict_host": 1,
    "prefetch": 8,
    "progress": 6,
    "read": 3,
    "mistake": 1,
    "reset": 0.1,
    "restart": 0.6,
}
"""How often each operation is drawn. `purecache.simulate.operations` has what they do."""
NAMES = list(WEIGHTS)

Operation = tuple[str, int]
"""Its name, and the seed of all that is drawn in it."""


@dataclass(frozen=True)
class Plan:
    """One run. The same plan does the same."""

    seed: int
    profile: str = "small"
    policies: dict[str, Any] = field(default_factory=dict)
    """Arguments of `CacheConfig` that need no program of their own."""
    storage: dict[str, Any] = field(default_factory=dict)
    """Arguments of `StorageOptions`."""
    processes: int = 2
    """Caches that share the store."""
    faults: tuple[str, ...] = ()
    events: int = 5000
    """Calls and completions after which it ends."""
    operations: tuple[Operation, ...] = ()

    @property
    def config(self) -> CacheConfig:
        """The configuration of its caches."""
        return PROFILES[self.profile].config(**self.policies)

    def only(self, operations: Iterable[Operation]) -> Plan:
        """The same with other operations."""
        return replace(self, operations=tuple(operations))

    def to_json(self) -> str:
        """The plan as one line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Plan:
        """A plan that `to_json` wrote. Raises ValueError or TypeError for anything else."""
        values = json.loads(text)
        values["operations"] = tuple((str(name), int(seed)) for name, seed in values["operations"])
        return Plan(**(values | {"faults": tuple(values["faults"])}))


def make_plan(
    seed: int,
    events: int = 5000,
    faults: Iterable[Fault] = ALL,
    processes: int = 2,
    profile: str | None = None,
) -> Plan:
    """The plan of a seed. `profile`: a name in `PROFILES` (default: drawn)."""
    dice = random.Random(seed)
    drawn = dice.choices(list(PROFILES), (3, 3, 2))[0]
    profile = profile or drawn
    policies: dict[str, Any] = {
        "policy": dice.choice([policy.name.lower() for policy in Policy]),
        "write": dice.choice([write.value for write in WritePolicy]),
        "load_back_threshold": dice.choice([0, 0, 4]),
        "bigrams": dice.random() < 0.25 and profile != "hybrid",
        "seed": dice.randrange(1000),
    }
    storage = {
        "threshold": dice.choice([1, 4]),
        "policy": dice.choice([policy.value for policy in EndPolicy]),
        "timeout_base": dice.choice([1.0, 20.0]),
        "staging_pages": dice.randint(2, 8),
        "batch_pages": dice.randint(1, 3),
    }
    sums = list(itertools.accumulate(WEIGHTS.values()))
    # One by one, so that a longer run of a seed begins like a shorter one. Some do nothing, so there are enough.
    operations = tuple((dice.choices(NAMES, cum_weights=sums)[0], dice.getrandbits(32)) for _ in range(2 * events))
    return Plan(seed, profile, policies, storage, processes, tuple(sorted(faults)), events, operations)
