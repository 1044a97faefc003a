from __future__ import annotations

import numpy as np
import pytest

from purecache.demo.conversations import Script, converse
from purecache.demo.memory import PlainMemory
from purecache.demo.scheduler import Engine, Request
from purecache.demo.weights import DemoError

LENGTHS = (23, 41, 6, 34)


def requests(small, limit=9):
    return [Request(str(index), small.prompt(length, index), limit) for index, length in enumerate(LENGTHS)]


def serve(engine, asked):
    """Submit all requests and step until all are finished."""
    for request in asked:
        engine.submit(request)
    finished = []
    while not engine.idle:
        finished += engine.step()
    assert sorted(request.name for request in finished) == sorted(request.name for request in asked)
    return {request.name: request.answer for request in finished}


@pytest.fixture
def alone(small, programs):
    """The answers of an engine that serves one request at a time and has pages to spare."""
    answers = {}
    for request in requests(small):
        answers |= serve(Engine(programs, PlainMemory(programs.pool(40)), stop=-1), [request])
    assert all(len(set(answer)) > 4 for answer in answers.values()), "answers too dull to show a mistake"
    return answers


def test_answers_do_not_depend_on_the_batch(small, programs, alone):
    memory = PlainMemory(programs.pool(40))
    asked = requests(small)
    assert serve(Engine(programs, memory, stop=-1), asked) == alone
    assert not any(request.preempted for request in asked)
    assert memory.free == memory.pages


def test_preempted_requests_give_the_same_answers(small, programs, alone):
    asked = requests(small)
    # Room for the first two prompts (6 and 11 pages) and one page for an answer, but not for both answers.
    memory = PlainMemory(programs.pool(18))
    assert serve(Engine(programs, memory, stop=-1), asked) == alone
    assert sum(request.preempted for request in asked) > 0
    assert memory.free == memory.pages


def test_the_youngest_is_preempted_and_goes_first_again(small, programs):
    first, second, third = requests(small, limit=20)[:3]
    memory = PlainMemory(programs.pool(18))
    engine = Engine(programs, memory, stop=-1)
    for request in (first, second, third):
        engine.submit(request)
    while not second.preempted and not engine.idle:
        engine.step()
    assert first.preempted == 0
    assert engine.queue[0] is second or engine.prefilling is second
    assert third in engine.queue


def test_what_was_computed_adds_up(small, programs):
    request = requests(small)[1]
    serve(Engine(programs, PlainMemory(programs.pool(40)), stop=-1), [request])
    assert (request.computed, request.hit, request.loaded) == (len(request.prompt), 0, 0)
    assert request.repeated == 0
    assert request.filled == len(request.prompt) + 9 - 1


def test_the_stop_token_ends_an_answer_and_is_not_part_of_it(small, programs, alone):
    stop = alone["1"][3]
    request = requests(small)[1]
    assert serve(Engine(programs, PlainMemory(programs.pool(40)), stop=stop), [request]) == {
        "1": alone["1"][: alone["1"].index(stop)]
    }


@pytest.mark.parametrize(
    ("length", "limit", "message"),
    [(0, 4, "needs a prompt"), (4, 0, "needs a prompt"), (255, 4, "raise --context"), (60, 5, "at least 68")],
)
def test_impossible_requests_are_refused(programs, length, limit, message):
    engine = Engine(programs, PlainMemory(programs.pool(16)), stop=-1)
    with pytest.raises(DemoError, match=message):
        engine.submit(Request("x", np.zeros(length, np.int32), limit))
    assert engine.idle


def test_conversations_go_on_with_the_answers(small, programs):
    pieces = (small.prompt(20, 1), small.prompt(9, 2))
    engine = Engine(programs, PlainMemory(programs.pool(60)), stop=-1)
    first, second = converse(engine, [Script("a", pieces, (3, 2), cumulative=True)], lambda request: None)
    expected = [*pieces[0].tolist(), *first.answer, *pieces[1].tolist()]
    assert second.prompt.tolist() == expected
    assert (len(first.answer), len(second.answer)) == (3, 2)
