"""Ranges, compared with a plain set of numbers."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spdl_torch._ranges import Ranges

LARGEST = 40
"""Small enough for ranges to meet, overlap and swallow each other in most examples."""

numbers = st.integers(0, LARGEST)
pairs = st.lists(st.tuples(numbers, numbers), max_size=12)  # Empty and reversed ones too.
from_zero = pairs.map(lambda some_pairs: [(0, 5), *some_pairs])

examples = settings(max_examples=80, deadline=None, derandomize=True)


def model_of(some_pairs):
    return {number for start, stop in some_pairs for number in range(start, stop)}


def is_minimal(ranges):
    """Sorted, none empty, and a gap between any two."""
    ends = [end for pair in ranges for end in pair]
    return all(one < other for one, other in pairwise(ends))


def missing_from(model):
    """The numbers that are not in the set, in order; enough of them for every place asked for."""
    return [number for number in range(4 * LARGEST) if number not in model]


@examples
@given(pairs)
def test_holds_the_added_numbers(some_pairs):
    """The set holds exactly the numbers that were added."""
    assert model_of(Ranges(some_pairs)) == model_of(some_pairs)


@examples
@given(pairs)
def test_ranges_are_minimal(some_pairs):
    """Ranges are sorted and have gaps between them."""
    assert is_minimal(Ranges(some_pairs))


@examples
@given(pairs)
def test_adding_one_by_one(some_pairs):
    """Adding ranges one by one is the same as all at once."""
    ranges = Ranges()
    model = set()
    for start, stop in some_pairs:
        ranges.add(start, stop)
        model |= set(range(start, stop))
        assert model_of(ranges) == model
        assert is_minimal(ranges)
    assert list(ranges) == list(Ranges(some_pairs))


@examples
@given(st.permutations(range(12)))
def test_any_order_becomes_one_range(order):
    """Adjacent numbers become one range in any order."""
    ranges = Ranges((number, number + 1) for number in order)
    assert list(ranges) == [(0, 12)]


@examples
@given(pairs)
def test_true_if_anything_is_in_it(some_pairs):
    assert bool(Ranges(some_pairs)) == bool(model_of(some_pairs))


@examples
@given(pairs, st.integers(-1, LARGEST + 2))
def test_counts_all_numbers_or_those_below(some_pairs, below):
    ranges, model = Ranges(some_pairs), model_of(some_pairs)
    assert ranges.count() == len(model)
    assert ranges.count(below=below) == sum(number < below for number in model)


@examples
@given(st.one_of(pairs, from_zero))
def test_first_missing_number(some_pairs):
    """first_missing is the smallest number that is not in the set."""
    assert Ranges(some_pairs).first_missing == missing_from(model_of(some_pairs))[0]


@examples
@given(st.one_of(pairs, from_zero, from_zero.map(lambda some_pairs: some_pairs[:1])))
def test_is_prefix_without_later_numbers(some_pairs):
    """is_prefix says that the set is range(0, n)."""
    model = model_of(some_pairs)
    assert Ranges(some_pairs).is_prefix == (model == set(range(len(model))))


@examples
@given(pairs, numbers)
def test_missing_at_a_place(some_pairs, place):
    """missing_at() returns the number at a place among the missing ones."""
    found = Ranges(some_pairs).missing_at(place)
    assert type(found) is int
    assert found == missing_from(model_of(some_pairs))[place]


@examples
@given(pairs, st.lists(numbers))
def test_missing_at_an_array(some_pairs, places):
    """missing_at() takes an array, and does not change it."""
    missing = missing_from(model_of(some_pairs))
    array = np.array(places, dtype=np.int64)
    found = Ranges(some_pairs).missing_at(array)
    assert found.dtype == np.int64
    assert found.tolist() == [missing[place] for place in places]
    assert array.tolist() == places


@examples
@given(pairs, pairs)
def test_fills_missing_places(some_pairs, places):
    """filled() adds the numbers at places among the missing ones, and changes only a copy."""
    ranges = Ranges(some_pairs)
    missing = missing_from(model_of(some_pairs))
    found = ranges.filled(places)
    assert model_of(found) == model_of(some_pairs) | {missing[place] for place in model_of(places)}
    assert is_minimal(found)
    assert model_of(ranges) == model_of(some_pairs)


@examples
@given(pairs, st.integers(0, LARGEST + 5))
def test_gaps_are_missing_numbers(some_pairs, stop):
    """gaps() are the missing numbers below a number."""
    found = list(Ranges(some_pairs).gaps(stop))
    expected = [number for number in range(stop) if number not in model_of(some_pairs)]
    assert [number for pair in found for number in range(*pair)] == expected
    assert is_minimal(found)


@examples
@given(pairs)
def test_goes_through_json_and_back(some_pairs):
    ranges = Ranges(some_pairs)
    assert list(Ranges(json.loads(json.dumps(ranges.as_lists())))) == list(ranges)
    assert ranges.as_lists() == [list(pair) for pair in ranges]


def test_long_run_is_one_range():
    """A range of any length is stored as one pair."""
    ranges = Ranges([(0, 10**15)])
    ranges.add(10**15, 10**18)
    assert list(ranges) == [(0, 10**18)]
    assert ranges.count() == 10**18
    assert ranges.count(below=10**17) == 10**17
    assert ranges.missing_at(5) == 10**18 + 5
