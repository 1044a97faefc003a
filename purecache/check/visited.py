"""Which states were seen, by fingerprint: sorted runs that are merged as they grow."""

import numpy as np


class Visited:
    """A set of 64-bit fingerprints. Eight bytes each."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(len(run) for run in self._runs)

    def are_new(self, fingerprints: np.ndarray) -> np.ndarray:
        """[n] bool for sorted uint64[n]: those that are not in the set."""
        new = np.ones(len(fingerprints), bool)
        for run in self._runs:
            place = np.minimum(np.searchsorted(run, fingerprints), len(run) - 1)
            new &= run[place] != fingerprints
        return new

    def add(self, fingerprints: np.ndarray) -> None:
        """Add sorted fingerprints that are not in the set."""
        if not len(fingerprints):
            return
        run = fingerprints.copy()
        # A run is at least twice as long as the next, so that there are few, and each number is copied log n times.
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = np.concatenate([self._runs.pop(), run])
            run.sort(kind="stable")  # two sorted halves: merged
        self._runs.append(run)
