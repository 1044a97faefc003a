"""The staging ring against a plain model, and its memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purecache.stores import envelope
from purecache.stores.staging import ALIGNMENT, StagingRing


def test_slots_are_aligned_and_apart():
    ring = StagingRing(5, 5000)
    slots = ring.acquire(5)
    addresses = sorted(ring.page(slot).ctypes.data for slot in slots)
    assert all(address % ALIGNMENT == 0 for address in addresses)
    assert set(np.diff(addresses)) == {ring.stride}
    assert ring.stride == 2 * ALIGNMENT
    assert len(ring.region) == 5 * ring.stride
    assert np.frombuffer(ring.region, np.uint8).ctypes.data == addresses[0]


@pytest.mark.parametrize(
    ("page_bytes", "stride"),
    [(1, 4096), (4096 - envelope.TRAILER, 4096), (4097 - envelope.TRAILER, 8192), (4096, 8192)],
)
def test_the_trailer_has_room(page_bytes, stride):
    assert StagingRing(1, page_bytes).stride == stride


def test_page_and_sealed_buffer_are_the_same_memory():
    ring = StagingRing(3, 100)
    for slot in ring.acquire(3):
        page, sealed = ring.page(slot), ring.sealed(slot)
        assert (page.dtype, page.shape) == (np.uint8, (100,))
        assert (len(sealed), sealed.readonly, sealed.format) == (100 + envelope.TRAILER, False, "B")
        page[:] = slot + 1
        envelope.seal("key", sealed)
        assert bytes(sealed[:100]) == bytes([slot + 1] * 100)
        assert bytes(page) == bytes([slot + 1] * 100)
    for slot in range(3):
        assert envelope.is_intact("key", ring.sealed(slot))
        start = slot * ring.stride
        assert bytes(ring.region[start : start + 164]) == bytes(ring.sealed(slot))


@given(st.data())
def test_acquire_and_release_against_a_model(data):
    """All or nothing, no slot twice, and nothing changes where a release is refused."""
    total = data.draw(st.integers(1, 9))
    ring, held = StagingRing(total, 10), set()
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()):
            number = data.draw(st.integers(0, total + 1))
            slots = ring.acquire(number)
            if number > total - len(held):
                assert slots is None
            else:
                assert slots is not None
                assert len(slots) == len(set(slots)) == number
                assert held.isdisjoint(slots)
                held.update(slots)
        else:
            slots = data.draw(st.lists(st.integers(-1, total), max_size=4))
            if held.issuperset(slots) and len(set(slots)) == len(slots):
                ring.release(slots)
                held.difference_update(slots)
            else:
                with pytest.raises(ValueError, match="slot"):
                    ring.release(slots)
        assert ring.free == total - len(held)
        for slot in range(-1, total + 1):
            if slot in held:
                assert len(ring.page(slot)) == 10
            else:
                with pytest.raises(ValueError, match="not held"):
                    ring.page(slot)
                with pytest.raises(ValueError, match="not held"):
                    ring.sealed(slot)


def test_what_was_released_last_is_used_first():
    ring = StagingRing(4, 10)
    slots = ring.acquire(4)
    ring.release([slots[2]])
    ring.release([slots[0]])
    assert ring.acquire(1) == [slots[0]]


@pytest.mark.parametrize("shape", [(0, 10), (1, 0), (-1, 10)])
def test_a_ring_needs_room(shape):
    with pytest.raises(ValueError, match="staging ring"):
        StagingRing(*shape)


def test_a_negative_number_is_a_mistake():
    with pytest.raises(ValueError, match="-1"):
        StagingRing(1, 10).acquire(-1)
