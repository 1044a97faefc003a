"""A simulator: caches under seeded faults, with every served byte checked against what a fault-free model computes."""

from purecache.simulate.fate import ALL, Fault, Finding
from purecache.simulate.plan import Plan, make_plan
from purecache.simulate.run import Failure, Outcome, run

__all__ = ["ALL", "Failure", "Fault", "Finding", "Outcome", "Plan", "make_plan", "run"]
