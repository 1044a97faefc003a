"""Recording what goes into a cache, and repeating it elsewhere, bit for bit, forward and backward."""

from purecache.replay.format import Unusable
from purecache.replay.player import Difference, Player, Report
from purecache.replay.recorder import Recorder
from purecache.replay.recording import Event, Recording
from purecache.replay.tree import tree_as_text

__all__ = ["Difference", "Event", "Player", "Recorder", "Recording", "Report", "Unusable", "tree_as_text"]
