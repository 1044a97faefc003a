"""Ctrl-C at a chosen moment: after the n-th point in the code of purecache at which Python lets signals in."""

import dis
import signal
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

CODE = str(Path(__file__).parents[2] / "purecache")
CALLS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME")


@cache
def points_of(code: CodeType) -> frozenset[int]:
    """Offsets of instructions before which signals are let in: behind calls and entries, and where loops begin anew."""
    found, instructions = set(), list(dis.get_instructions(code))
    for each, after in pairwise(instructions):
        if each.opname in CALLS:
            found.add(after.offset)
        if each.opname.startswith("JUMP_BACKWARD"):
            found.add(each.argval)
    return frozenset(found)


class Interrupter:
    """Context that sends SIGINT at point number `at`, counted from 0; None: only counts them, in `points`."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.points = at, 0

    def __enter__(self) -> "Interrupter":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: object) -> object:
        if not frame.f_code.co_filename.startswith(CODE):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> object:
        if event == "opcode" and frame.f_lasti in points_of(frame.f_code):
            self.points += 1
            if self.points - 1 == self.at:
                signal.raise_signal(signal.SIGINT)
        return self._step
