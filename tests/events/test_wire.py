"""Payloads as the two engines write and read them, and payloads that are none."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purecache.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, decode, encode, label_of
from purecache.stores.keys import seed_of

STORED = BlockStored([1, -5], None, [1, 2, 3, 4], 2, None, "GPU", "x", "y")
BATCH = Batch(1.5, [STORED, BlockRemoved([7], "CPU_PINNED"), AllBlocksCleared()], 3)


@pytest.mark.parametrize("form", ["maps", "arrays"])
def test_what_is_written_is_read(form):
    assert decode(encode(BATCH, form)) == BATCH
    pairs = Batch(0.0, [BlockStored([1], 2, [(1, 2), (2, 3)], 2, None, None, None)], None)
    assert decode(encode(pairs, form)) == pairs


def test_maps_have_the_fields_that_readers_of_both_engines_require():
    """vLLM's reader wants lora_id, medium and lora_name, sglang's lora_id; both want the batch as an array of three."""
    ts, (stored, removed, cleared), rank = msgspec.msgpack.decode(encode(BATCH))
    assert (ts, rank) == (1.5, 3)
    assert stored == {
        "type": "BlockStored",
        "block_hashes": [1, -5],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "x",
        "cache_salt": "y",
    }
    assert removed == {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU_PINNED"}
    assert cleared == {"type": "AllBlocksCleared"}


def test_arrays_are_in_the_order_of_older_versions():
    _, (stored, removed, cleared), _ = msgspec.msgpack.decode(encode(BATCH, "arrays"))
    assert stored == ["BlockStored", [1, -5], None, [1, 2, 3, 4], 2, None, "GPU", "x", [["x", "y"], ["x"]]]
    assert removed == ["BlockRemoved", [7], "CPU_PINNED"]
    assert cleared == ["AllBlocksCleared"]


def test_what_other_versions_write_is_read():
    pack = msgspec.msgpack.encode
    oldest = decode(pack([1, [["BlockStored", [b"ab"], 4, [1, 2], 2, None], ["BlockRemoved", [b"ab"]]]]))
    assert oldest.events == [BlockStored([b"ab"], 4, [1, 2], 2, None, None, None), BlockRemoved([b"ab"], None)]
    assert oldest.data_parallel_rank is None
    event = {"type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": "GPU", "group_idx": 0, "more": [1]}
    assert decode(pack({"ts": 1.0, "events": [event], "attn_dp_rank": 2})) == Batch(
        1.0, [BlockRemoved([2**64 - 1], "GPU")], 2
    )


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x00", msgspec.msgpack.encode([1, [{"type": "Other"}], 0]), msgspec.msgpack.encode([1, [[]], 0])],
)
def test_what_is_no_batch_is_a_value_error(payload):
    with pytest.raises(ValueError, match="no batch"):
        decode(payload)


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 255))
def test_damaged_payloads_raise_nothing_else(noise, place, value):
    damaged = bytearray(encode(BATCH))
    damaged[place % len(damaged)] = value
    for payload in (noise, bytes(damaged)):
        with contextlib.suppress(ValueError):
            assert isinstance(decode(payload), Batch)


def test_labels():
    assert label_of(None) == (None, None)
    assert label_of("tenant") == (None, "tenant")
    assert label_of((("adapter", "a"), ("salt", "s"))) == ("a", "s")
    assert label_of((("lora_name", "a"),)) == ("a", None)
    for odd in ((("adapter", "a"), ("user", "u")), (("salt", "s"), ("cache_salt", "t")), (("salt", 7),), ("a", "b"), 5):
        assert label_of(odd) == (None, seed_of(odd))
