"""Stack distances against a plain LRU stack, for random prompts, and the curve that follows from them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from purecache.sizing.advice import knee_of
from purecache.sizing.distances import NEVER, LruCurve, stack_distances
from purecache.workloads import BLOCK, Request, Trace, generated, paged

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=20)


def plain_distances(trace):
    """Places in a stack of pages, used last on top; the front of a prompt is used after its end."""
    stack, found = [], []
    for request in range(len(trace)):
        ids = trace.pages(request).tolist()
        found += [stack.index(each) + 1 if each in stack else NEVER for each in ids]
        stack = ids + [each for each in stack if each not in ids]
    return found


@given(PROMPTS)
def test_distances_are_places_in_the_stack(prompts):
    trace = paged(Trace("t", 1, [Request(len(each) + 1, each) for each in prompts]), 1)
    assert stack_distances(trace).tolist() == plain_distances(trace)


def test_the_curve_is_that_of_plain_caches():
    trace = paged(Trace("generated", BLOCK, list(generated(150, seed=2))))
    curve = LruCurve(trace)
    for capacity in (trace.largest, 100, 300, trace.distinct):
        stack, found = [], []
        for request in range(len(trace)):
            ids = trace.pages(request).tolist()
            here = [each in stack for each in ids[: trace.match_pages[request]]]
            found.append([*here, False].index(False))
            stack = (ids + [each for each in stack if each not in ids])[:capacity]
        assert curve.by_request(capacity).tolist() == found
        assert curve.pages(np.array([capacity]))[0] == sum(found)
    capacities = curve.capacities(30)
    assert (capacities[0], capacities[-1]) == (trace.largest, trace.distinct)
    assert np.all(np.diff(curve.pages(capacities)) >= 0)


def test_the_knee_is_where_the_slope_becomes_that_of_the_whole():
    capacities = np.arange(1, 101)
    rates = np.minimum(capacities, 20) * 0.04 + np.maximum(capacities - 20, 0) * 0.001
    knee = knee_of(capacities, rates)
    assert knee.pages == 20
    assert (round(knee.rate, 6), round(knee.most, 6)) == (0.8, 0.88)
    assert knee_of(capacities, np.zeros(100)).most == 0
