"""Reads recordings: any event, without holding all of them."""

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from purecache.entries import entries
from purecache.replay.arguments import arguments_of, described, sizes_of
from purecache.replay.configs import config_from_json
from purecache.replay.format import Columns, Frame, Unusable, read_frames, read_header, unpack
from purecache.replay.veil import words_of
from purecache.state import NONE, ConfigError, Layout

KEPT_FRAMES = 4
MOST_STATE = 16 << 30
"""Bytes of the largest state that is replayed."""


@dataclass(frozen=True, eq=False)
class Event:
    """One transition that a cache ran."""

    number: int
    """From 1 on."""
    name: str
    size: int
    """Of its program, in pages; 0 where there is one program."""
    arguments: list[np.ndarray]
    """int32 arrays, as they lie in the command; numbers have one entry."""
    digest: bytes
    """Of the answer."""

    @property
    def command(self) -> np.ndarray:
        """What the program takes."""
        return np.concatenate([np.zeros(0, np.int32), *self.arguments])


class Recording:
    """A file that a `Recorder` wrote. Event 1 is the first; after event 0 is before all of them.

    What stands behind damage, or was cut off, is not there; `damage` says so.
    """

    def __init__(self, path: str | os.PathLike[str], *, laws: Mapping[str, type] | None = None) -> None:
        """Open a recording and check the whole file. `laws`: of pools, where they are not purecache's own.

        Raises OSError, or Unusable if it is none or this version can't replay it.
        """
        self.path = os.fspath(path)
        self._file = open(self.path, "rb")  # noqa: SIM115
        try:
            self.header = read_header(self._file)
            self._read_header(laws)
            self._frames, self.end, self.damage = read_frames(self._file)
        except BaseException:
            self._file.close()
            raise
        self._starts = [frame.first for frame in self._frames]
        self._kept: OrderedDict[int, _Opened] = OrderedDict()

    def _read_header(self, laws: Mapping[str, type] | None) -> None:
        header = self.header
        try:
            self.hashed = {"hashed": True, "plain": False}[header["tokens"]]
            self.config = config_from_json(header["config"], laws)
            self.smallest, theirs = int(header["smallest"]), dict(header["programs"])
            self.versions, self.code = dict(header["versions"]), str(header["code"])
        except ConfigError as error:
            raise Unusable(f"its configuration does not work here: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise Unusable(f"its header lacks something: {error!r}") from error
        if (size := _state_bytes(self.config.layout)) > MOST_STATE:
            raise Unusable(f"its state takes {size >> 20} MiB, more than {MOST_STATE >> 20}")
        if not 0 < self.smallest <= 1 << 30:
            raise Unusable(f"its smallest program has {self.smallest} pages")
        ours = described(self.config.layout)
        if ours != theirs or list(ours) != list(theirs):
            other = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            raise Unusable(
                f"it was made by purecache {self.versions.get('purecache')} (code {self.code}), whose transitions take"
                f" other arguments than those here: {', '.join(other[:5]) or 'their order'}"
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Events that can be replayed."""
        return self._frames[-1].first + self._frames[-1].events if self._frames else 0

    def __getitem__(self, number: int) -> Event:
        """Event `number`, from 1 on. Raises IndexError, or Unusable if it makes no sense."""
        if not 1 <= number <= len(self):
            raise IndexError(f"there are events 1 to {len(self)}, not {number}")
        place = bisect_right(self._starts, number - 1) - 1
        return self._opened(place).event(number - 1 - self._starts[place])

    def __iter__(self) -> Iterator[Event]:
        """All events."""
        return (self[number] for number in range(1, len(self) + 1))

    def state_digest(self, number: int) -> bytes | None:
        """Digest of the state after event `number`, if one was recorded there."""
        for place in range(bisect_right(self._starts, number) - 1, -1, -1):
            frame = self._frames[place]
            if frame.first + frame.events < number:
                break
            if (digest := self._opened(place).states.get(number)) is not None:
                return digest
        return None

    def programs(self) -> set[tuple[str, int]]:
        """Names and sizes of all programs that it takes to replay it."""
        return {pair for place in range(len(self._frames)) for pair in self._opened(place).programs}

    def _opened(self, place: int) -> "_Opened":
        if place not in self._kept:
            frame = self._frames[place]
            self._file.seek(frame.offset)
            columns = unpack(self._file.read(frame.length), frame)
            self._kept[place] = _Opened(columns, frame, self.config.layout, self.smallest, self.hashed)
            if len(self._kept) > KEPT_FRAMES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(place)
        return self._kept[place]


class _Opened:
    """An unpacked frame, checked: every event has a program that there is, and arguments that fit."""

    def __init__(self, columns: Columns, frame: Frame, layout: Layout, smallest: int, hashed: bool) -> None:
        self._columns, self._layout, self._hashed, self._first = columns, layout, hashed, frame.first
        where, names = f"the frame at byte {frame.offset}", list(entries(layout))
        self.states = {frame.first + after: digest for after, digest in columns.states}
        if any(after > frame.events for after, _ in columns.states):
            raise Unusable(f"{where} has a state behind its events")
        if frame.events and int(columns.programs.max()) >= len(names):
            raise Unusable(f"{where} names programs that there are not")
        self._keys = [(names[kind], size) for kind, size in zip(columns.programs, columns.sizes.tolist(), strict=True)]
        self.programs = set(self._keys)
        largest = largest_program(layout, smallest)
        for name, size in self.programs:
            if size not in sizes_of(layout, name, 1 << (smallest - 1).bit_length(), largest):
                raise Unusable(f"{where} has a {name} of {size} pages")
        arrays = np.cumsum([0, *(sum(self._arguments(*key).arrays) for key in self._keys)])
        if arrays[-1] != len(columns.lengths):
            raise Unusable(f"{where} has another number of arguments than its programs take")
        self._arrays = arrays
        numbers = [len(self._arguments(*key).arrays) - sum(self._arguments(*key).arrays) for key in self._keys]
        sums = np.concatenate([[0], np.cumsum(columns.lengths, dtype=np.int64)])
        self._words = np.concatenate([[0], np.cumsum(numbers, dtype=np.int64)]) + sums[arrays]
        if self._words[-1] != len(columns.words):
            raise Unusable(f"{where} has more or fewer words than its arguments")

    def _arguments(self, name: str, size: int) -> Any:
        return arguments_of(self._layout, name, size)

    def event(self, index: int) -> Event:
        """One of its events."""
        name, size = self._keys[index]
        arguments = self._arguments(name, size)
        written = iter(self._columns.lengths[self._arrays[index] : self._arrays[index + 1]].tolist())
        at = int(self._words[index])
        prompts = {place.tokens: place for place in arguments.prompts} if self._hashed else {}
        width, short = self._layout.page_size, words_of(self._layout.page_size)
        leaves = []
        for number, (length, is_array) in enumerate(zip(arguments.lengths, arguments.arrays, strict=True)):
            used = next(written) if is_array else 1
            stored = length // width * short if number in prompts else length
            if used > stored:
                raise Unusable(f"event {self._first + index + 1} has longer arguments than its program takes")
            leaf = np.full(stored, NONE, np.int32)
            leaf[:used] = self._columns.words[at : at + used]
            at += used
            if number in prompts:
                wide = np.zeros((length // width, width), np.int32)
                wide[:, :short] = leaf.reshape(-1, short)
                leaf = wide.reshape(-1)
            leaves.append(leaf)
        return Event(self._first + index + 1, name, size, leaves, self._columns.digests[index])


def largest_program(layout: Layout, smallest: int) -> int:
    """Pages of the largest program of a cache, as `ProgramTable.largest`, without a state."""
    sizes = [layout, *layout.tails]
    most = max(1 << (smallest - 1).bit_length(), *(each.device_pages + each.host_pages for each in sizes))
    return 1 << (most - 1).bit_length()


def _state_bytes(layout: Layout) -> int:
    rows = layout.rows
    orders = layout.pools * 2 * 3 * (rows + layout.ranks * layout.levels)
    links, books = layout.links, layout.books
    words = rows * (layout.page_size + layout.columns) + links + orders + 2 * layout.shelf_length + 10 * layout.ledger
    return 4 * (words + books)
