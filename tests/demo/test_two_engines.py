"""Engines in processes of their own that share nothing but a store: what one has computed, another one decodes from."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from engines import ANSWER, KNOWN, PAGE, PROMPT, answer_without_a_cache, engine

pytestmark = pytest.mark.xdist_group("two engines")


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV one engine has computed, sent to another one, and stored."""

    store: str
    transfer: Path
    answer: list[int]
    """The whole of it, as an engine without a cache gives it."""


@pytest.fixture(scope="module")
def prefilled(tmp_path_factory):
    path = tmp_path_factory.mktemp("engines")
    store, transfer = f"file://{path}/pages?capacity=64MiB", path / "transfer.npz"
    answer = answer_without_a_cache(transfer)
    first = engine("prefill", store, transfer)
    assert first["answer"] == answer[:1]
    assert first["put_hits"] == PROMPT // PAGE
    return Prefilled(store, transfer, answer)


def test_one_engine_prefills_and_another_one_decodes(prefilled):
    second = engine("next", prefilled.store, prefilled.transfer)
    assert second["answer"] == prefilled.answer[KNOWN:]
    assert second["stored"] == PROMPT


def test_what_a_decode_engine_offloads_is_found_by_the_next_turn(prefilled):
    """Disaggregation and storage, both on: the prompt's KV goes from engine to engine, past the cache."""
    decoded = engine("decode", prefilled.store, prefilled.transfer)
    assert decoded["answer"] == prefilled.answer[: ANSWER - 1]
    assert decoded["computed"] == 1  # the token that the prefill engine had sampled; nothing of the prompt
    after = engine("next", prefilled.store, prefilled.transfer)
    assert after["answer"] == prefilled.answer[KNOWN:]
    # Its whole pages but the one of the last token, whose logits are needed.
    assert after["stored"] == (PROMPT + KNOWN - 1) // PAGE * PAGE == PROMPT + 16
