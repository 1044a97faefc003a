"""Kills at any moment, and processes that evict each other's pages under their readers: no wrong byte, no lost slot."""

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from crash_worker import BARE, BATCH, check, open_store

WORKER = Path(__file__).with_name("crash_worker.py")
WRITERS, KILLS = 3, 100


def start(directory, seed, seconds, slots, disk="usual"):
    command = [sys.executable, "-S", str(WORKER), str(directory), str(seed), str(seconds), str(slots), disk]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=BARE)


def read_all(store, slots, times):
    totals = [0, 0, 0]
    for _ in range(times):
        for first in range(0, 3 * slots, BATCH):
            keys = [f"k{number}" for number in range(first, first + BATCH)]
            totals = [total + number for total, number in zip(totals, check(store, keys), strict=True)]
    return totals


def assert_all_accounted(store, slots):
    counts = store.stats()
    assert counts["pending"] == 0
    assert counts["objects"] + counts["free"] == slots
    return counts


def test_killed_writers(tmp_path):
    """103 kills of 3 concurrent writers with constant eviction; a store is open all along, and another one after."""
    chance = random.Random(5)
    slots = 300
    survivor = open_store(tmp_path, slots)
    workers = [start(tmp_path, seed, 600, slots) for seed in range(WRITERS)]
    hits = reclaimed = 0
    for kill in range(KILLS):
        victim = workers.pop(0)
        assert victim.stdout is not None
        if kill % 4:  # else it may die while it opens the store
            reclaimed += int(victim.stdout.readline())
        time.sleep(chance.random() * 0.06)  # the moment of the kill is meant to be any
        victim.kill()
        victim.wait()
        victim.stdout.close()
        workers.append(start(tmp_path, WRITERS + kill, 600, slots))
        some = [f"k{chance.randrange(3 * slots)}" for _ in range(24)]
        found, torn, wrong = check(survivor, some)
        hits += found
        assert (torn, wrong) == (0, 0)
    for worker in workers:
        worker.kill()
        worker.wait()
        assert worker.stdout is not None
        worker.stdout.close()
    reclaimed += survivor.stats()["reclaimed"]
    with contextlib.closing(open_store(tmp_path, slots)) as store:
        reclaimed += store.stats()["reclaimed"]
        counts = assert_all_accounted(store, slots)
        assert counts["objects"] > slots // 2
        assert len(os.listdir(tmp_path / "owners")) == 2  # of the two stores open now
        found, torn, wrong = read_all(store, slots, 20)
        assert (torn, wrong) == (0, 0)
        assert found > 3000
        assert reclaimed > 0  # kills did hit writers
        assert len(list(tmp_path.glob("index-*"))) == 1
    print(f"{KILLS + WRITERS} kills, {hits} + {found} hits, {reclaimed} slots reclaimed, {counts}")
    survivor.close()


def test_two_processes_hammering(tmp_path):
    """Every hit is intact and of its key. Each put takes a third of all slots, so that many reads lose a race."""
    slots = 24
    workers = [start(tmp_path, seed, 6, slots, "slow") for seed in range(2)]
    for worker in workers:
        output, _ = worker.communicate(timeout=50)
        assert worker.returncode == 0
        hits, torn, wrong, evictions, failures = map(int, output.split("\n")[1].split())
        print(f"{hits} hits, {torn} torn, {evictions} evictions")
        assert (torn, wrong, failures) == (0, 0, 0)
        assert hits > 300
        assert evictions > 300
    with contextlib.closing(open_store(tmp_path, slots)) as store:
        assert_all_accounted(store, slots)
        assert read_all(store, slots, 2)[1:] == [0, 0]
