"""Files of recordings: whatever is cut off or damaged is found, what stands before it is good, nothing is believed."""

import json
import struct
import zlib

import numpy as np
import pytest
from recordings import recorded, verified
from support import tiny

import purecache.replay.format as form
import purecache.replay.recorder as recorder_module
from purecache.replay import Recording, Unusable


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A recording with several frames, and its bytes."""
    monkeypatch.setattr(recorder_module, "FRAME_EVENTS", 6)

    def life(cache):
        for number in range(10):
            cache.release(cache.allocate(1 + number % 2))
            cache.peek([1, 1, 2, number])

    _, found = recorded(tmp_path / "small", life=life, state_every=4)
    content = (tmp_path / "small").read_bytes()
    assert len(found._frames) >= 4
    return found, content


def rebuilt(path, header, frames):
    """A file with good checksums. frames: (tag, payload, raw length, first event, events)."""
    path.write_bytes(form.header_bytes(header) + b"".join(form.frame_bytes(*frame) for frame in frames))
    return path


def frames_of(found, content):
    return [(form.EVENTS, content[f.offset :][: f.length], f.raw_length, f.first, f.events) for f in found._frames]


def test_a_file_that_is_cut_off_anywhere_keeps_what_stands_before(tmp_path, small):
    found, content = small
    whole = [(event.name, event.command.tolist(), event.digest) for event in found]
    ends = [frame.offset + frame.length for frame in found._frames]
    header = len(form.header_bytes(found.header))
    lengths = set()
    for cut in range(len(content)):
        path = tmp_path / "cut"
        path.write_bytes(content[:cut])
        if cut < header:
            with pytest.raises(Unusable):
                Recording(path)
            continue
        part = Recording(path)
        frames = sum(end <= cut for end in ends)
        assert len(part) == sum(frame.events for frame in found._frames[:frames])
        assert part.damage
        assert part.end is None
        if len(part) not in lengths:
            lengths.add(len(part))
            assert [(event.name, event.command.tolist(), event.digest) for event in part] == whole[: len(part)]
        part.close()
    assert len(lengths) > 3


def test_every_damaged_byte_is_found(tmp_path, small):
    found, content = small
    ends = [frame.offset + frame.length for frame in found._frames]
    header = len(form.header_bytes(found.header))
    for place in [*range(0, header, 97), *range(header, len(content))]:
        damaged = bytearray(content)
        damaged[place] ^= 0x10
        path = tmp_path / "damaged"
        path.write_bytes(damaged)
        if place < header:
            with pytest.raises(Unusable):
                Recording(path)
            continue
        part = Recording(path)
        assert len(part) == sum(frame.events for frame, end in zip(found._frames, ends, strict=True) if end <= place)
        assert part.damage
        part.close()


def test_a_damaged_recording_is_replayed_up_to_there(tmp_path, small):
    found, content = small
    cut = found._frames[2].offset + 5
    (tmp_path / "cut").write_bytes(content[:cut])
    part = Recording(tmp_path / "cut")
    assert "cut off" in part.damage
    verified(part)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokens": "secret"}, "header lacks"),
        ({"config": {"page_size": 2}}, "configuration"),
        ({"config": None}, "configuration"),
        ({"smallest": 0}, "smallest"),
        ({"smallest": 1 << 40}, "smallest"),
        ({"programs": {}}, "other arguments"),
        ({"programs": None}, "header lacks"),
        ({"versions": 3}, "header lacks"),
    ],
)
def test_headers_are_not_believed(tmp_path, small, change, problem):
    found, content = small
    path = rebuilt(tmp_path / "other", found.header | change, frames_of(found, content))
    with pytest.raises(Unusable, match=problem):
        Recording(path)


def test_huge_states_are_refused_before_they_are_made(tmp_path, small):
    found, _ = small
    config = found.header["config"] | {"page_size": 1, "device_pages": 50, "host_pages": 0, "max_receipts": 1 << 30}
    path = rebuilt(tmp_path / "other", found.header | {"config": config}, [])
    with pytest.raises(Unusable, match="MiB"):
        Recording(path)


def test_another_version_says_what_is_different(tmp_path, small):
    found, content = small
    programs = found.header["programs"] | {"lock": [1, 1, 1]}
    path = rebuilt(tmp_path / "other", found.header | {"programs": programs}, frames_of(found, content))
    with pytest.raises(Unusable, match=r"purecache .* other arguments .*lock"):
        Recording(path)
    later = bytearray(content)
    later[len(form.MAGIC) - 1] = 9
    (tmp_path / "later").write_bytes(later)
    with pytest.raises(Unusable, match="version 9"):
        Recording(tmp_path / "later")
    (tmp_path / "text").write_text("hello, this is no recording")
    with pytest.raises(Unusable, match="no recording"):
        Recording(tmp_path / "text")
    (tmp_path / "long").write_bytes(form.MAGIC + struct.pack("<I", 1 << 31))
    with pytest.raises(Unusable, match="claims"):
        Recording(tmp_path / "long")


def columns_of(found, content, place=1):
    frame = found._frames[place]
    return frame, form.unpack(content[frame.offset :][: frame.length], frame)


def payload_of(columns):
    """Arrays of columns as a payload."""
    columns.words = [np.asarray(columns.words)]
    return columns.pack()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda c: setattr(c, "programs", np.full(len(c.programs), 999)), "there are not"),
        (lambda c: setattr(c, "sizes", np.full(len(c.sizes), 17)), "of 17 pages"),
        (lambda c: setattr(c, "sizes", np.full(len(c.sizes), 1 << 20)), "pages"),
        (lambda c: setattr(c, "lengths", np.asarray(c.lengths)[1:]), "number of arguments"),
        (lambda c: setattr(c, "words", np.asarray(c.words)[1:]), "words"),
        (lambda c: c.states.append((99, b"12345678")), "behind its events"),
    ],
)
def test_frames_are_not_believed(tmp_path, small, change, problem):
    found, content = small
    frame, columns = columns_of(found, content)
    change(columns)
    payload, raw_length = payload_of(columns)
    frames = frames_of(found, content)[:2]
    frames[1] = (form.EVENTS, payload, raw_length, frame.first, frame.events)
    other = Recording(rebuilt(tmp_path / "other", found.header, frames))
    with pytest.raises(Unusable, match=problem):
        list(other)


def test_arguments_longer_than_their_program_takes_are_refused(tmp_path, small):
    found, content = small
    frame, columns = columns_of(found, content, 0)
    columns.lengths = np.array(columns.lengths)
    columns.lengths[0] += 40
    columns.words = np.concatenate([columns.words, np.zeros(40, np.int32)])
    payload, raw_length = payload_of(columns)
    frames = [(form.EVENTS, payload, raw_length, 0, frame.events)]
    with pytest.raises(Unusable, match="longer arguments"):
        list(Recording(rebuilt(tmp_path / "other", found.header, frames)))


def test_bombs_are_not_unpacked(tmp_path, small):
    found, _ = small
    bomb = zlib.compress(bytes(1 << 24))
    frames = [(form.EVENTS, bomb, 100, 0, 1)]
    with pytest.raises(Unusable, match="length"):
        list(Recording(rebuilt(tmp_path / "bomb", found.header, frames)))
    frames = [(form.EVENTS, bomb, form.MOST_RAW + 1, 0, 1)]
    assert "damaged" in Recording(rebuilt(tmp_path / "bomb", found.header, frames)).damage
    frames = [(form.EVENTS, b"no zlib", 100, 0, 1)]
    with pytest.raises(Unusable, match="unpacked"):
        list(Recording(rebuilt(tmp_path / "bomb", found.header, frames)))


def test_frames_in_another_order_are_damage(tmp_path, small):
    found, content = small
    frames = frames_of(found, content)
    other = Recording(rebuilt(tmp_path / "other", found.header, [frames[0], frames[2], frames[1]]))
    assert "damaged" in other.damage
    assert len(other) == found._frames[0].events


def test_recordings_are_compact(tmp_path):
    def life(cache):
        for number in range(400):
            cache.peek([number % 7] * 16)

    _, found = recorded(tmp_path / "life", tiny(), life)
    size = (tmp_path / "life").stat().st_size - len(json.dumps(found.header))
    assert size / 400 < 16  # 8 of them are the digest of the answer
