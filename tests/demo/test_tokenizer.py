from __future__ import annotations

from pydoc_data.topics import topics

import pytest

from purecache.demo.tokenizer import ChatTokenizer
from purecache.demo.weights import DemoError

# The beginning of a recorded session of an agent, tokenised by the publisher's own tokenizer of the model.
RECORDED = (
    "<pr_description>\nConsider the following PR description:\nsqlmigrate wraps it's outpout in BEGIN/COMMIT even "
    "if the database doesn't support transactional DDL\nDescription\n\t \n\t\t(last modified by Simon Charette)\n\t \n"
    "The migration executor only adds the outer"
)
RECORDED_IDS = [44, 1180, 79, 10079, 46, 198, 16865, 260, 1695, 13163, 5410, 42, 198, 15314, 22757, 2944]
RECORDED_IDS += [34560, 357, 506, 578, 96, 447, 281, 389, 9944, 2113, 31, 29267, 2901, 908, 585, 260]
RECORDED_IDS += [5817, 2761, 982, 1199, 42689, 1107, 422, 11018, 198, 18454, 3354, 216, 3354, 197, 24, 5113]
RECORDED_IDS += [8104, 411, 15399, 678, 15549, 25, 3354, 216, 198, 504, 8529, 46796, 805, 7845, 260, 8379]


def test_ids_equal_recorded_ones(model):
    assert model.tokenizer.encode(RECORDED).tolist() == RECORDED_IDS


def test_digits_stand_alone(model):
    # 216 is a space; the digits of 2024 and 15 are tokens of their own.
    ids = model.tokenizer.encode("Hello, world! 2024 costs 15%").tolist()
    assert ids == [19556, 28, 905, 17, 216, 34, 32, 34, 36, 3499, 216, 33, 37, 21]


def test_chat_markers_are_single_tokens(model):
    ids = model.tokenizer.message("user", "hi").tolist()
    assert ids[0] == 1
    assert ids[-2] == model.tokenizer.stop == 2


@pytest.mark.parametrize("text", ["é漢字 \U0001f600\n\n  tabs\tand spaces ", topics["lambda"], topics["assert"]])
def test_round_trip(model, text):
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text


def test_other_tokenizers_are_refused(model):
    with pytest.raises(DemoError, match="llama-bpe"):
        ChatTokenizer({**model.metadata, "tokenizer.ggml.pre": "llama-bpe"})
