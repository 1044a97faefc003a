"""Names of objects: read back exactly, another one for any other bytes, and the same objects under any topology."""

import dataclasses
import re
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purecache.stores.names import (
    HeadGroups,
    ObjectName,
    ObjectRecord,
    SglangFiles,
    format_name,
    heads_of_rank,
    heads_per_group,
    objects_of,
    parse_name,
    parse_short,
    parts_of,
    short_name,
)

KEY = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
RECORD = ObjectRecord("org/model", "3f2a", "bfloat16", "page,kv,head,token,layer,dim", 64, (0, 32), (0, 8))
DIGEST = "19d99c7b3528a3d83c77beea50ba5103"
CHANGED = {
    "model": "org-model",
    "revision": "3f2b",
    "kv_dtype": "float8_e4m3fn",
    "layout": "layer,page,kv,token,head,dim",
    "page_size": 32,
    "layers": (0, 31),
    "heads": (0, 4),
    "tp": (0, 2),
    "cp": (0, 2),
    "pool": "draft",
    "format_version": 2,
}
ANY_TEXT = st.text(st.characters(), max_size=8) | st.text(";=:%.s\ud800\udc00\u00e9e\u0301 \n", max_size=8)
POOLS = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=48)
RANGES = st.tuples(st.integers(0, 12), st.integers(1, 12)).map(lambda pair: (pair[0], sum(pair)))
RANKS = st.tuples(st.integers(0, 9), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair)))
RECORDS = st.builds(
    ObjectRecord,
    model=ANY_TEXT,
    revision=ANY_TEXT,
    kv_dtype=ANY_TEXT,
    layout=ANY_TEXT,
    page_size=st.integers(1, 2**31 - 1),
    layers=RANGES,
    heads=RANGES,
    tp=RANKS,
    cp=RANKS,
    pool=POOLS,
    format_version=st.integers(1, 3),
)
PAGE_KEYS = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=118)


@given(ANY_TEXT, RECORDS)
def test_full_names_are_read_back_exactly(page_key, record):
    name = ObjectName(page_key, record)
    text = format_name(name)
    assert parse_name(text) == name
    assert text.isascii()
    assert text.isprintable()
    assert " " not in text


@given(PAGE_KEYS, RECORDS)
def test_short_names_are_keys_of_a_store_and_are_read_back(page_key, record):
    text = ObjectName(page_key, record).short
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,200}", text)
    assert parse_short(text) == (page_key, record.pool, record.digest)


@given(RECORDS, RECORDS, ANY_TEXT, ANY_TEXT)
def test_two_names_never_share_a_text_or_a_digest(left, right, key, other):
    assert (format_name(ObjectName(key, left)) == format_name(ObjectName(other, right))) == (
        (key, left) == (other, right)
    )
    assert (left.digest == right.digest) == (left == right)


@given(RECORDS, st.integers(0, 3), st.integers(0, 3))
def test_text_moved_from_one_field_to_the_next_is_another_record(record, first, second):
    names = ["model", "revision", "kv_dtype", "layout"]
    values = [getattr(record, name) for name in names]
    joined = "".join(values)
    moved = dataclasses.replace(record, **dict.fromkeys(names, "") | {names[first]: joined})
    again = dataclasses.replace(record, **dict.fromkeys(names, "") | {names[second]: joined})
    assert (moved.digest == again.digest) == (first == second or not joined)


def test_every_field_changes_the_digest():
    assert set(CHANGED) == {field.name for field in dataclasses.fields(ObjectRecord)}
    records = [RECORD, *(dataclasses.replace(RECORD, **{name: value}) for name, value in CHANGED.items())]
    assert len({record.digest for record in records}) == len(records)
    assert len({objects_of(KEY, record, (record.pool,)) for record in records}) == len(records)
    texts = ["", "?", "\ud800", "\udc00", "\ud800\udc00", "\U00010000", "\u00e9", "e\u0301", "\0"]
    assert len({dataclasses.replace(RECORD, model=text).digest for text in texts}) == len(texts)


def test_agreed_vectors():
    assert RECORD.digest == DIGEST
    assert objects_of(KEY, RECORD) == (f"{KEY}.kv.{DIGEST}",)
    assert format_name(ObjectName(KEY, RECORD)) == (
        f"{KEY};model=s:org%2Fmodel;revision=s:3f2a;kv_dtype=s:bfloat16;layout=s:page%2Ckv%2Chead%2Ctoken%2Clayer%2Cdim"
        ";page_size=i:64;layers=p:0.32;heads=p:0.8;tp=p:0.1;cp=p:0.1;pool=s:kv;format_version=i:1"
    )


@given(st.data())
def test_a_damaged_full_name_is_refused_or_names_itself(data):
    text = format_name(ObjectName(KEY, RECORD))
    place = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:place] + data.draw(st.text(max_size=2)) + text[place + data.draw(st.integers(0, 2)) :]
    try:
        name = parse_name(damaged)
    except ValueError:
        return
    assert format_name(name) == damaged


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("i:64", "i:064"),
        ("i:64", "i:+64"),
        ("i:64", "s:64"),
        ("i:64", "i:6_4"),
        ("p:0.32", "p:0.32.1"),
        ("p:0.32", "p:32.0"),
        ("s:3f2a", "s:%33f2a"),
        ("s:3f2a", "s:%ff"),
        ("org%2Fmodel", "org/model"),
        ("org%2Fmodel", "org%2fmodel"),
        (";pool=s:kv", ""),
        (";pool=s:kv", ";pool=s:kv;pool=s:kv"),
        (";pool=s:kv", ";pool=s:kv;more=s:kv"),
        (";tp=p:0.1;cp=p:0.1", ";cp=p:0.1;tp=p:0.1"),
        ("format_version=i:1", "format_version=i:1 "),
    ],
)
def test_other_spellings_are_refused(old, new):
    text = format_name(ObjectName(KEY, RECORD))
    assert old in text
    with pytest.raises(ValueError, match=r"."):
        parse_name(text.replace(old, new, 1))


@pytest.mark.parametrize(
    "text", ["", "a", "a.kv", f"a.kv.{'0' * 31}", f"a.kv.{'A' * 32}", f".kv.{'0' * 32}", f"a/b.kv.{'0' * 32}"]
)
def test_what_is_no_short_name_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_short(text)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("model", None, TypeError),
        ("page_size", True, TypeError),
        ("page_size", 0, ValueError),
        ("page_size", np.int64(4), TypeError),
        ("layers", [0, 1], TypeError),
        ("layers", (0, 1.0), TypeError),
        ("layers", (0, 1, 2), ValueError),
        ("layers", (1, 1), ValueError),
        ("heads", (-1, 1), ValueError),
        ("tp", (1, 1), ValueError),
        ("cp", (0, 2**31), ValueError),
        ("pool", "a.b", ValueError),
        ("pool", "", ValueError),
        ("pool", "é", ValueError),
        ("format_version", 0, ValueError),
    ],
)
def test_bad_records_are_refused(field, value, error):
    with pytest.raises(error, match=field):
        dataclasses.replace(RECORD, **{field: value})


def test_objects_of_lists_pool_by_pool():
    mamba = dataclasses.replace(RECORD, kv_dtype="float32", heads=(0, 1), pool="mamba")
    both = objects_of(KEY, {"kv": RECORD, "mamba": mamba}, ("kv", "mamba"))
    assert both == (short_name(KEY, "kv", RECORD.digest), short_name(KEY, "mamba", mamba.digest))
    assert objects_of(KEY, mamba, ("kv", "mamba"))[1] == both[1]
    assert objects_of(KEY, mamba, ("kv",)) != both[:1]
    with pytest.raises(KeyError):
        objects_of(KEY, {"kv": RECORD}, ("swa",))
    with pytest.raises(TypeError, match="sequence of names"):
        objects_of(KEY, RECORD, "kv")
    for key in ("", "a/b", "é", "a" * 119):
        with pytest.raises(ValueError, match="page key"):
            objects_of(key, RECORD)


TOPOLOGIES = st.integers(1, 24).flatmap(
    lambda heads: st.tuples(
        st.just(heads),
        st.lists(st.sampled_from([n for n in range(1, 49) if not heads % n or not n % heads]), min_size=2, max_size=3),
    )
)


@given(TOPOLOGIES)
def test_any_topology_has_the_same_objects_and_its_byte_ranges_line_up(topology):
    heads, sizes = topology
    group = heads_per_group(heads, sizes)
    head_bytes = 3
    page = np.arange(heads * head_bytes)
    objects: dict[str, list] = {}
    for ranks in sizes:
        of_size = []
        for rank in range(ranks):
            first, end = heads_of_rank(heads, rank, ranks)
            record = dataclasses.replace(RECORD, heads=(first, end), tp=(rank, ranks))
            naming = HeadGroups(record, group)
            names = objects_of(KEY, naming)
            mine = page[first * head_bytes : end * head_bytes]
            ranges = naming.byte_ranges(len(mine))
            assert len(names) == len(ranges) == len(naming)
            assert np.array_equal(np.concatenate([mine[part] for part in ranges]), mine)
            for name, part in zip(names, ranges, strict=True):
                assert objects.setdefault(name, mine[part].tolist()) == mine[part].tolist()
            of_size += names
        assert set(of_size) == set(objects)  # of every size the same ones, and all of them
        assert len(of_size) == len(set(of_size)) * max(1, ranks // heads)
    assert len(objects) == heads // group


def test_tp4_reads_what_tp8_wrote_and_a_rank_bound_name_does_not():
    group = heads_per_group(8, (4, 8))
    eight = [dataclasses.replace(RECORD, heads=heads_of_rank(8, rank, 8), tp=(rank, 8)) for rank in range(8)]
    four = [dataclasses.replace(RECORD, heads=heads_of_rank(8, rank, 4), tp=(rank, 4)) for rank in range(4)]
    assert group == 1
    written = [objects_of(KEY, HeadGroups(record, group)) for record in eight]
    assert objects_of(KEY, HeadGroups(four[1], group)) == written[2] + written[3]
    assert HeadGroups(four[1], group).byte_ranges(200) == (slice(0, 100), slice(100, 200))
    assert not {objects_of(KEY, record) for record in eight} & {objects_of(KEY, record) for record in four}
    assert objects_of(KEY, HeadGroups(four[0], 2)) != objects_of(KEY, HeadGroups(eight[0], 1))


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="not made of groups"):
        HeadGroups(dataclasses.replace(RECORD, heads=(1, 3)), 2)
    with pytest.raises(ValueError, match="not made of groups"):
        HeadGroups(RECORD, 0)
    with pytest.raises(ValueError, match="can't be shared"):
        heads_per_group(8, (3,))
    with pytest.raises(ValueError, match="rank must be"):
        heads_of_rank(8, 4, 4)
    with pytest.raises(ValueError, match="equal parts"):
        parts_of(10, 4)
    assert heads_per_group(24, (8, 12)) == 1
    assert heads_per_group(24, (2, 4)) == 6
    assert heads_of_rank(2, 5, 8) == (1, 2)


def test_file_names_of_sglang():
    def names(pool="kv", **options):
        return objects_of(KEY, SglangFiles("org/my/model", **options), (pool,))

    assert names(tp=(3, 8)) == (f"{KEY}_org-my-model_3_8.bin",)
    assert names("mamba", tp=(3, 8)) == (f"{KEY}.mamba_org-my-model_3_8.bin",)
    assert names(tp=(3, 8), mla=True) == (f"{KEY}_org-my-model.bin",)
    assert names(tp=(3, 8), pp=(1, 2)) == (f"{KEY}_org-my-model_3_8_2_1.bin",)
    assert names(tp=(0, 1), pp=(1, 2), cp=(2, 4)) == (f"{KEY}_org-my-model_0_1_2_1_cp2_4.bin",)
    assert names("indexer", cp=(2, 4), mla=True) == (f"{KEY}.indexer_org-my-model_cp2_4.bin",)
    for model in ("m" * 100, "mödel", "a model"):
        with pytest.raises(ValueError, match="no key for a store"):
            SglangFiles(model)
