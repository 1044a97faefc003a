"""Page keys: agreed vectors, one go equals any extension, and namespaces that never share."""

import hashlib
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purecache.namespaces import encoded_namespace
from purecache.stores.keys import KeyChain, event_id, page_keys, seed_of, sglang_seed

FIRST = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
SECOND = "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6"
LORA = "69df3de801c43e60adaa856ad245421b72609a9c94f2c6cc263c4d6c4497c3c5"
LORA_FIRST = "95f516241a2f4cfd4b8054dd01079249a537a98dfdc58aefe8f557cffab628c2"
OWN_PAIR = [
    "dfb09b2c3e21fb77a9f20ef96d989610eaeeed44f60be84da6ac0f598e82ef17",
    "a8cf25507da0255d45c9db0cba68d9cab3f58eaf05b0f5635e33e79b2254ecf9",
]

TOKENS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 3), max_size=40)
PARTS = st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=4) | st.binary(max_size=4)
NAMESPACES = PARTS | st.lists(PARTS | st.tuples(st.text(max_size=3), PARTS), max_size=3).map(tuple)


def reference(tokens, page_size, seed=None, bigrams=False):
    """The rule written down plainly: a list of units, cut into pages, token by token."""
    units = list(pairwise(tokens)) if bigrams else [(token,) for token in tokens]
    prior, keys = seed, []
    for start in range(0, len(units) - page_size + 1, page_size):
        hasher = hashlib.sha256()
        if prior is not None:
            hasher.update(bytes.fromhex(prior))
        for unit in units[start : start + page_size]:
            for token in unit:
                hasher.update(int(token).to_bytes(4, "little"))
        prior = hasher.hexdigest()
        keys.append(prior)
    return keys


def test_agreed_vectors():
    assert page_keys(range(1, 9), 4) == [FIRST, SECOND]
    assert sglang_seed("lora1") == LORA
    assert page_keys([1, 2, 3, 4], 4, LORA) == [LORA_FIRST]
    assert event_id(FIRST) == -3488128144981237669
    assert event_id("0" * 15 + "7" + "f" * 48) == 7


def test_seeds_of_sglang_tag_what_is_absent():
    absent, empty = b"\0", b"\1" + bytes(8)
    domain = b"sglang-cache-namespace-v1"
    assert sglang_seed() is None
    assert sglang_seed("", None) == hashlib.sha256(domain + empty + absent).hexdigest()
    assert sglang_seed(None, "é") == hashlib.sha256(domain + absent + b"\1\2" + bytes(7) + "é".encode()).hexdigest()
    assert sglang_seed("a", None) != sglang_seed(None, "a")
    assert sglang_seed("ab", "c") != sglang_seed("a", "bc")


def test_keys_are_the_same_in_another_process():
    chain = KeyChain(2, seed_of((("adapter", "a"), ("salt", 7))))
    code = (
        "from purecache.stores.keys import page_keys, seed_of\n"
        "print(*page_keys([1, 2, 3, 4], 2, seed_of((('adapter', 'a'), ('salt', 7)))))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert chain.extend([1, 2, 3, 4]) == other
    assert other == OWN_PAIR


@given(TOKENS, st.integers(1, 9), st.booleans(), st.none() | st.just(LORA), st.data())
def test_any_extension_equals_one_go_and_the_plain_rule(tokens, page_size, bigrams, seed, data):
    expected = reference(tokens, page_size, seed, bigrams)
    assert page_keys(tokens, page_size, seed, bigrams) == expected
    chain, fresh = KeyChain(page_size, seed, bigrams), []
    while chain.fed < len(tokens):
        step = data.draw(st.integers(0, len(tokens)))
        fresh += chain.extend(np.array(tokens[chain.fed :][:step], np.int64))
        assert len(chain) == len(fresh)
    assert fresh == chain.keys() == expected


@given(TOKENS, TOKENS, st.integers(1, 5), st.booleans())
def test_keys_agree_exactly_as_far_as_the_tokens_do(left, right, page_size, bigrams):
    common = next((i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
    common = min(len(left), len(right)) if common is None else common
    shared = max(common - bigrams, 0) // page_size
    keys, others = page_keys(left, page_size, None, bigrams), page_keys(right, page_size, None, bigrams)
    assert keys[:shared] == others[:shared]
    assert not set(keys[shared:]) & set(others[shared:])
    assert len(set(keys)) == len(keys)


@given(TOKENS, TOKENS, st.integers(1, 5), st.booleans(), st.data())
def test_a_cut_chain_goes_on_as_if_it_had_never_been_longer(tokens, others, page_size, bigrams, data):
    chain = KeyChain(page_size, LORA, bigrams)
    chain.extend(tokens)
    kept = chain.keys()
    pages = data.draw(st.integers(0, len(chain)))
    branch = chain.clone(pages)
    base = tokens[: branch.fed]
    assert len(base) == (pages * page_size + bigrams if pages else 0)
    branch.extend(others)
    assert branch.keys() == reference(base + others, page_size, LORA, bigrams)
    assert chain.keys() == kept  # of its own
    copy = chain.clone()
    assert copy.fed == len(tokens)
    assert copy.extend(others) == chain.extend(others)
    assert chain.keys() == reference(tokens + others, page_size, LORA, bigrams)
    chain.truncate(pages)
    assert (chain.keys(), chain.fed) == (kept[:pages], len(base))


@given(NAMESPACES, NAMESPACES, st.none() | st.text(max_size=4), st.none() | st.text(max_size=4))
def test_namespaces_never_share_a_key(left, right, extra_key, cache_salt):
    same = (repr(left) == repr(right)) and encoded_namespace(left) == encoded_namespace(right)
    keys = page_keys([1, 2, 3, 4], 2, seed_of(left))
    others = page_keys([1, 2, 3, 4], 2, seed_of(right))
    assert (keys == others) == same
    assert same or not set(keys) & set(others)
    foreign = sglang_seed(extra_key, cache_salt)
    assert seed_of(left) != foreign or left is foreign is None


def test_namespaces_that_look_alike_are_apart():
    alike = [None, "", (), b"", ("",), (b"",), (None,), "1", 1, True, b"1", ("1",), ("a", "b"), (("a", "b"),), ("ab",)]
    seeds = [seed_of(namespace) for namespace in alike]
    assert seeds[0] is None
    assert len(set(seeds)) == len(alike)
    record = hashlib.sha256(b"s" + (1).to_bytes(8, "little") + b"1").digest()
    assert seed_of("1") == hashlib.sha256(b"purecache-namespace-seed-v1" + record).hexdigest()
    with pytest.raises(TypeError, match="a namespace is made of"):
        seed_of(1.5)  # type: ignore[arg-type]


def test_bigrams_and_tokens_are_apart():
    tokens = [1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert not set(page_keys(tokens, 4)) & set(page_keys(tokens, 4, bigrams=True))
    assert page_keys([5], 1, bigrams=True) == []
    assert page_keys([5, 6], 1, bigrams=True) == page_keys([5, 6], 2)  # why the page size is in the object's name


def test_the_caller_may_reuse_its_tokens_at_once():
    tokens = np.array([1, 2, 3], np.int32)
    chain = KeyChain(4)
    chain.extend(tokens)
    tokens[:] = 0
    assert chain.extend([4]) == [FIRST]
    first = chain.keys()
    first.clear()
    assert chain.keys() == [FIRST]


@pytest.mark.parametrize(
    "tokens", [[-1], [2**32], [2**64], [1.0], ["1"], [[1, 2]], 3, [None], [True], np.array([1.5], np.float32)]
)
def test_bad_tokens_are_refused_without_a_change(tokens):
    chain = KeyChain(2)
    chain.extend([1])
    with pytest.raises(ValueError, match="one axis of integers"):
        chain.extend(tokens)
    assert chain.fed == 1
    assert chain.extend([2]) == reference([1, 2], 2)


def test_bad_chains_are_refused():
    with pytest.raises(ValueError, match="page_size"):
        KeyChain(0)
    for seed in ("00", "x" * 64):
        with pytest.raises(ValueError, match=r"seed|hexadecimal"):
            KeyChain(1, seed)
    with pytest.raises(ValueError, match="can't be cut"):
        KeyChain(1).truncate(1)
    with pytest.raises(ValueError, match="can't be cut"):
        KeyChain(1).clone(-1)
