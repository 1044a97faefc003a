"""A tree map: every run of pages is a rectangle whose area is its pages, next to what follows it in the tree."""

import heapq
from dataclasses import dataclass

import squarify

from purecache.report.model import Prefix


@dataclass(frozen=True)
class Cell:
    """A rectangle; all in percent of the map."""

    x: float
    y: float
    width: float
    height: float
    prefix: int
    """Index of the run, or of the one above those that were joined."""
    pages: int
    joined: int = 0
    """Runs that were too small or too many to be drawn, together in this cell. 0: it is a run."""


def tree_map(prefixes: tuple[Prefix, ...], width: float, height: float, most: int) -> list[Cell]:
    """The cells of a map of so many pixels: at most `most` runs, the hottest, and the others joined below their parent.

    A run has its own part at the left or the top of its rectangle; what follows it fills the rest.
    """
    if not prefixes:
        return []
    below: dict[int, list[int]] = {}
    whole = [prefix.pages for prefix in prefixes]
    heat = [prefix.pages * max(prefix.hits, 1) for prefix in prefixes]
    for number in range(len(prefixes) - 1, -1, -1):
        parent = prefixes[number].parent
        below.setdefault(parent, []).append(number)
        if parent >= 0:
            whole[parent] += whole[number]
            heat[parent] += heat[number]
    chosen = _hottest(below, heat, most)
    return _Map(prefixes, below, whole, chosen, width, height).cells()


def _hottest(below: dict[int, list[int]], heat: list[int], most: int) -> set[int]:
    """The runs with the most pages times hits in and below them, each with all that is above it."""
    chosen: set[int] = set()
    waiting = [(-heat[each], each) for each in below[-1]]
    heapq.heapify(waiting)
    while waiting and len(chosen) < most:
        _, number = heapq.heappop(waiting)
        chosen.add(number)
        for each in below.get(number, ()):
            heapq.heappush(waiting, (-heat[each], each))
    return chosen


class _Map:
    """Lays out one map."""

    def __init__(
        self,
        prefixes: tuple[Prefix, ...],
        below: dict[int, list[int]],
        whole: list[int],
        chosen: set[int],
        width: float,
        height: float,
    ) -> None:
        self._prefixes, self._below, self._whole, self._chosen = prefixes, below, whole, chosen
        self._width, self._height = width, height
        self._cells: list[Cell] = []

    def cells(self) -> list[Cell]:
        """All cells, each before what follows it in the tree."""
        todo = [(-1, (0.0, 0.0, self._width, self._height))]
        while todo:
            number, (x, y, width, height) = todo.pop()
            own = self._prefixes[number].pages if number >= 0 else 0
            share = own / (self._whole[number] if number >= 0 else 1)
            if number >= 0:
                across = width >= height
                part = (x, y, width * share, height) if across else (x, y, width, height * share)
                self._add(part, number, own)
                if across:
                    x, width = x + width * share, width * (1 - share)
                else:
                    y, height = y + height * share, height * (1 - share)
            todo += self._inside(number, x, y, width, height)
        return self._cells

    def _inside(
        self, parent: int, x: float, y: float, width: float, height: float
    ) -> list[tuple[int, tuple[float, float, float, float]]]:
        """Lay out what follows a run: the rectangles that are left to be filled; those joined become a cell."""
        drawn = [each for each in self._below.get(parent, ()) if each in self._chosen]
        others = [each for each in self._below.get(parent, ()) if each not in self._chosen]
        sizes = [(self._whole[each], each) for each in drawn]
        if others:
            sizes.append((sum(self._whole[each] for each in others), -1))
        if not sizes or width <= 0 or height <= 0:
            return []
        sizes.sort(key=lambda each: (-each[0], each[1]))
        scaled = squarify.normalize_sizes([size for size, _ in sizes], width, height)
        left = []
        for (size, number), box in zip(sizes, squarify.squarify(scaled, x, y, width, height), strict=True):
            rectangle = (box["x"], box["y"], box["dx"], box["dy"])
            if number >= 0:
                left.append((number, rectangle))
            else:
                self._add(rectangle, parent, size, joined=sum(map(self._runs, others)))
        return left[::-1]

    def _runs(self, number: int) -> int:
        """Runs in and below one."""
        count, todo = 0, [number]
        while todo:
            count += 1
            todo += self._below.get(todo.pop(), ())
        return count

    def _add(self, part: tuple[float, float, float, float], prefix: int, pages: int, joined: int = 0) -> None:
        x, y, width, height = part
        across, down = 100 / self._width, 100 / self._height
        place = (round(x * across, 3), round(y * down, 3), round(width * across, 3), round(height * down, 3))
        self._cells.append(Cell(*place, prefix, pages, joined))
