"""Where lines, areas and labels of a chart lie. Paths are in a box of SIZE x SIZE that the page stretches."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SIZE = 1000
"""Width and height of the box of paths."""


@dataclass(frozen=True)
class Tick:
    """A mark at an axis."""

    place: float
    """Percent, from the left or from the top."""
    label: str
    anchor: str = "middle"
    minor: bool = False
    """Left out where there is little room."""


def nice_step(span: float, most: int) -> float:
    """A round step (1, 2 or 5 times a power of ten) with which a span has at most `most` steps."""
    least = span / max(most, 1)
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next((power * each for each in (1, 2, 5, 10) if power * each >= least * (1 - 1e-9)), power * 10)


def shorten(value: float) -> str:
    """A number in few characters: 1.2M, 34k, 0.5."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:.3g}{unit}"
    return f"{value:.6g}"


def x_ticks(first: float, last: float, most: int = 8) -> list[Tick]:
    """Ticks of a horizontal axis from `first` to `last`."""
    if last <= first:
        return [Tick(0.0, shorten(first), "start")]
    step = nice_step(last - first, most)
    count = math.floor((last - first) / step + 1e-9)
    begin = math.ceil(first / step - 1e-9) * step
    places = [begin + step * n for n in range(count + 1) if begin + step * n <= last + 1e-9 * step]
    ticks = []
    for number, value in enumerate(places):
        percent = 100 * (value - first) / (last - first)
        anchor = "start" if percent < 2 else "end" if percent > 98 else "middle"
        ticks.append(Tick(round(percent, 3), shorten(round(value, 9)), anchor, minor=number % 2 == 1))
    return ticks


def y_ticks(top: float, most: int = 4, unit: str = "") -> list[Tick]:
    """Ticks of a vertical axis from 0 to `top`."""
    if top <= 0:
        return [Tick(100.0, "0" + unit)]
    step = nice_step(top, most)
    values = [step * n for n in range(math.floor(top / step + 1e-9) + 1)]
    return [Tick(round(100 * (1 - value / top), 3), shorten(round(value, 9)) + unit) for value in values]


def places(at: Sequence[float]) -> list[float]:
    """Where samples lie on the horizontal axis, from 0 to SIZE."""
    span = at[-1] - at[0]
    return [SIZE * (each - at[0]) / span if span else 0.0 for each in at]


def area(x: Sequence[float], low: Sequence[float], high: Sequence[float], top: float) -> str:
    """The path of an area between two lines; `top`: the value at the upper edge."""
    if len(x) == 1:
        x, low, high = [0.0, SIZE], [low[0]] * 2, [high[0]] * 2
    there = [f"{_short(a)},{_short(_down(b, top))}" for a, b in zip(x, high, strict=True)]
    back = [f"{_short(a)},{_short(_down(b, top))}" for a, b in zip(x, low, strict=True)]
    return "M" + "L".join(there) + "L" + "L".join(reversed(back)) + "Z"


def line(x: Sequence[float], values: Sequence[float], top: float) -> str:
    """The path of a line."""
    if len(x) == 1:
        x, values = [0.0, SIZE], [values[0]] * 2
    return "M" + "L".join(f"{_short(a)},{_short(_down(b, top))}" for a, b in zip(x, values, strict=True))


def stacked(x: Sequence[float], lines: Mapping[str, Sequence[float]], top: float) -> dict[str, str]:
    """Paths of areas on top of each other, the first at the bottom."""
    paths, low = {}, [0.0] * len(x)
    for name, values in lines.items():
        high = [a + b for a, b in zip(low, values, strict=True)]
        paths[name] = area(x, low, high, top)
        low = high
    return paths


def _down(value: float, top: float) -> float:
    return SIZE * (1 - value / top) if top else SIZE


def _short(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def window_shares(
    at: Sequence[float], totals: Mapping[str, Sequence[float]], width: float
) -> tuple[dict[str, list[float]], list[float]]:
    """Shares in percent of what came within the last `width` of the axis, by name, and how much that was.

    totals: since the beginning, at every sample. Where nothing came, the shares stay what they were (at first 0).
    """
    shares: dict[str, list[float]] = {name: [] for name in totals}
    amounts = []
    for here, now in enumerate(at):
        before = max(0, min(bisect_right(at, now - width), here) - 1) if here else 0
        came = {name: values[here] - (values[before] if here else 0) for name, values in totals.items()}
        whole = sum(came.values())
        amounts.append(whole)
        for name, share in shares.items():
            share.append(100 * came[name] / whole if whole > 0 else share[-1] if share else 0.0)
    return shares, amounts


def buckets(at: Sequence[float], totals: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """What came in each of at most `most` stretches of the axis of equal length: (their ends, amounts)."""
    if len(at) < 2:
        return [at[0]], [totals[0]]
    count = min(most, len(at) - 1)
    span = at[-1] - at[0]
    ends = [at[0] + span * (n + 1) / count for n in range(count)]
    sums = [totals[min(max(bisect_left(at, end * (1 - 1e-12)), 0), len(at) - 1)] for end in ends[:-1]] + [totals[-1]]
    return ends, [b - a for a, b in zip([totals[0], *sums], sums, strict=False)]
