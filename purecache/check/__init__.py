"""Exhaustive checking of the real transitions: every state that small worlds can reach.

The pieces: `worlds` (what is explored), `events` (what can happen), `packing` and `fingerprints` (states as bytes, up
to names), `contracts` (what every step must keep), `drain` (that all can be given back), `explorer` (breadth first),
`mutants` (known faults, each of which must be found).
"""

from purecache.check.events import Event, event
from purecache.check.explorer import Explored, Explorer, Failure
from purecache.check.follow import follow, state_after
from purecache.check.worlds import WORLDS, World

__all__ = ["WORLDS", "Event", "Explored", "Explorer", "Failure", "World", "event", "follow", "state_after"]
