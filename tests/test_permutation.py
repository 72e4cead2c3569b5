"""Random orders: every index once, evenly distributed, and the same in every release.

The orders are functions of a key, so these tests have the same result in every run. Bounds are
five standard deviations. Each check is also shown to reject an order that is not random enough.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from spdl_torch._permutation import key_of, permutation, uniform

from .tiers import sampled

LARGEST_TABLE = 65536
"""Up to this size an order is a table, above it is computed: two ways, the same promises."""

SIZES = [1000, 70_001, 90_000]
"""A table; computed ones, of a prime that no rectangle fits, and of a square."""


# -- each index once ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    [
        *range(1, 20),
        *sampled([256, 97, 257, 1000, 1024, 4095, 4097, 7919], every=4),
        *range(LARGEST_TABLE - 2, LARGEST_TABLE + 4),
        *sampled([257**2, 257**2 - 1, 257**2 + 1, 300**2 - 1, 300**2, 300**2 + 1], every=3),
        *sampled([256 * 257, 256 * 257 + 1, 300 * 301, 300 * 301 + 1], every=2),
        *sampled([104_729, 65539, 2**17 - 1, 2**17, 2**17 + 1, 2**18], every=6),
    ],
)
def test_every_index_comes_once(size):
    for key in (0, 1, key_of(3, 5), 2**64 - 1):
        indices = permutation(size, key)(np.arange(size))
        assert indices.dtype == np.int64
        assert np.array_equal(np.sort(indices), np.arange(size))


@pytest.mark.parametrize("size", [10**9, 2**40 + 1, 2**63 - 1])
def test_large_orders_are_distinct(size):
    """Indices of a large order are in range and distinct."""
    first = np.arange(10_000)
    positions = np.concatenate([first, first + size // 2, size - 10_000 + first])
    indices = permutation(size, 7)(positions)
    assert indices.min() >= 0
    assert indices.max() < size
    assert len(np.unique(indices)) == len(positions)


@pytest.mark.parametrize("size", [10, LARGEST_TABLE, LARGEST_TABLE + 1, 100_000])
def test_an_order_can_be_entered_anywhere(size):
    permute = permutation(size, 11)
    whole = permute(np.arange(size))
    for positions in (
        np.array([size - 1]),
        np.array([3, 0, 9, 3]),
        np.arange(size)[::-7],
        np.array([], dtype=np.int64),
    ):
        assert np.array_equal(permute(positions), whole[positions])


@pytest.mark.parametrize("size", [10, LARGEST_TABLE + 1])
def test_positions_are_not_changed(size):
    positions = np.arange(10)
    permutation(size, 1)(positions)
    uniform(positions, 1)
    assert np.array_equal(positions, np.arange(10))


# -- as likely anywhere ---------------------------------------------------------------------------


def deviation_of_counts(values, num_bins):
    """How many standard deviations chi-square is from what even bins would give.

    Counts that are too even are as far from random as those that are not even enough.
    """
    counts = np.bincount(values, minlength=num_bins)
    expected = len(values) / num_bins
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return abs(chi_square - (num_bins - 1)) / math.sqrt(2 * (num_bins - 1))


def deviation_of_correlation(one, other):
    return abs(np.corrcoef(one, other)[0, 1]) * math.sqrt(len(one))


def width_of(size):
    """The width of a rectangle of that size: where a computed order could show its grain."""
    return -(-size // (math.isqrt(size - 1) + 1))


def landing_places(make, size):
    """Where some positions land under many keys: by the large, by the small, and in pairs."""
    positions = np.array([0, 1, 2, size // 2, size - 1])
    landed = np.array([make(size, key_of(1, number))(positions) for number in range(2000)])
    by_the_large = landed * 20 // size
    by_the_small = landed % 16
    yield from (deviation_of_counts(column, 20) for column in by_the_large.T)
    yield from (deviation_of_counts(column, 16) for column in by_the_small.T)
    coarse = landed * 10 // size
    for one, other in ((0, 1), (1, 2), (0, 4), (3, 4)):
        yield deviation_of_counts(coarse[:, one] * 10 + coarse[:, other], 100)


def differences_of_neighbours(make, size):
    """How far apart, round the end, positions land that are near each other."""
    for key in range(2):
        indices = make(size, key)(np.arange(size))
        for lag in (1, 2, width_of(size), width_of(size) + 1):
            differences = (indices[lag:] - indices[:-lag]) % size
            yield deviation_of_counts(differences * 40 // size, 40)
            yield deviation_of_correlation(indices[lag:], indices[:-lag])


def orders_of_different_keys(make, size):
    """How far apart the same position lands under keys that are near each other."""
    positions = np.arange(size)
    for one, other in (
        (0, 1),
        (1, 2),
        (5, 5 ^ (1 << 32)),
        (0, 1 << 63),
        (key_of(0, 0), key_of(0, 1)),
        (key_of(0, 0), key_of(1, 0)),
        (key_of(0, 1), key_of(1, 0)),
        (key_of(0, 1), key_of(0, 1, 0)),
    ):
        indices, others = make(size, one)(positions), make(size, other)(positions)
        yield deviation_of_counts((indices - others) % size * 40 // size, 40)
        yield deviation_of_correlation(indices, others)
        # As many stay in place as of two unrelated orders: one, give or take one.
        yield abs((indices == others).sum() - 1) / 2


CHECKS = [landing_places, differences_of_neighbours, orders_of_different_keys]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", CHECKS)
def test_an_order_looks_random(check, size):
    assert max(check(permutation, size)) < 5


def rotation(size, key):
    """Begins anywhere, and goes on in ascending order."""
    return lambda positions: (positions + key_of(key) % size) % size


def affine(size, key):
    """Jumps by a fixed step, as a linear congruential generator does."""
    step = key_of(key) % size | 1
    while math.gcd(step, size) > 1:
        step += 2
    return lambda positions: (positions * step + key_of(key, 1) % size) % size


def one_round(size, key):
    """One round of the eight: shifts the rows of a rectangle by what a hash of the column says."""
    width = width_of(size)

    def permute(positions):
        high, low = np.divmod(positions, width)
        shift = (uniform(low, key_of(key)) * (size // width)).astype(np.int64)
        return (high + shift) % (size // width) * width + low

    return permute


def same_for_all_keys(size, key):
    return permutation(size, 0)


@pytest.mark.parametrize("size", [1024, 90_000])  # Squares, so that one round needs no more.
@pytest.mark.parametrize(
    ("check", "make"),
    [
        (landing_places, rotation),
        (landing_places, one_round),
        (landing_places, same_for_all_keys),
        (differences_of_neighbours, rotation),
        (differences_of_neighbours, affine),
        (differences_of_neighbours, one_round),
        (orders_of_different_keys, rotation),
        (orders_of_different_keys, same_for_all_keys),
    ],
)
def test_checks_reject_weak_shuffles(check, make, size):
    """Each statistical check rejects an order that is not random."""
    assert max(check(make, size)) > 10


def small_orders(make):
    """All 120 orders of five indices, under many keys."""
    weights = 5 ** np.arange(5)
    numbers = [int(make(5, key)(np.arange(5)) @ weights) for key in range(9_600)]
    _, ranks = np.unique(numbers, return_inverse=True)
    return deviation_of_counts(ranks, 120)


def test_small_orders_are_equally_likely():
    """All orders of five indices are equally likely."""
    assert small_orders(permutation) < 5
    assert small_orders(affine) > 10


# -- numbers from 0 to 1 --------------------------------------------------------------------------


def draws(make, num_draws=200_000):
    for key in (0, 1, key_of(3, 5)):
        numbers = make(np.arange(num_draws), key)
        # A uniform number has variance 1/12, and the square of its deviation 1/180.
        centred = numbers - 0.5
        yield abs(centred.mean()) * math.sqrt(12 * num_draws)
        yield abs((centred**2).mean() - 1 / 12) * math.sqrt(180 * num_draws)
        yield deviation_of_counts((numbers * 1000).astype(np.int64), 1000)
        for lag in (1, 2, 3, 256):
            yield deviation_of_correlation(numbers[lag:], numbers[:-lag])
        pairs = (numbers * 30).astype(np.int64)
        yield deviation_of_counts(pairs[1::2] * 30 + pairs[::2], 900)


def test_draws_look_random():
    assert max(draws(uniform)) < 5


@pytest.mark.parametrize(
    "make",
    [
        lambda positions, key: np.modf((positions + key % 97) * 0.6180339887498949)[0],
        lambda positions, key: uniform(positions, key) ** 1.05,
        lambda positions, key: 0.02 + 0.98 * uniform(positions, key),
        lambda positions, key: uniform(positions - (positions % 10 == 9), key),
        lambda positions, key: uniform(positions // 2, key),
    ],
    ids=["too even", "leaning to 0", "never near 0", "every tenth twice", "all twice"],
)
def test_check_rejects_weak_draws(make):
    """The statistical check rejects draws that are not random."""
    assert max(draws(make)) > 10


def test_draws_are_in_unit_interval():
    """Draws are at least 0 and below 1."""
    numbers = uniform(np.arange(1_000_000), 1)
    assert numbers.dtype == np.float64
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert numbers.min() < 1e-5
    assert numbers.max() > 1 - 1e-5


def test_draws_of_different_keys_are_unrelated():
    positions = np.arange(100_000)
    for one, other in ((0, 1), (0, 1 << 63), (key_of(0, 0), key_of(0, 1))):
        assert deviation_of_correlation(uniform(positions, one), uniform(positions, other)) < 5
    assert deviation_of_correlation(uniform(positions, 4), uniform(positions, 4)) > 10


def test_draws_can_be_entered_anywhere():
    whole = uniform(np.arange(1000), 5)
    assert np.array_equal(uniform(np.array([999, 3, 500]), 5), whole[[999, 3, 500]])


# -- keys -----------------------------------------------------------------------------------------


def test_key_depends_on_all_parts():
    """A key depends on every part and on their order."""
    parts = [
        (),
        (0,),
        (1,),
        (0, 0),
        (0, 1),
        (1, 0),
        (0, 0, 0),
        (0, 1, 0),
        (1, 0, 0),
        (2**63,),
        (2**64 - 1,),
    ]
    keys = [key_of(*each) for each in parts]
    assert len(set(keys)) == len(parts)
    assert all(0 <= key < 2**64 for key in keys)


def test_keys_are_distinct():
    """Keys of many seeds and epochs are distinct."""
    keys = {key_of(seed, epoch) for seed in range(200) for epoch in range(200)}
    assert len(keys) == 200 * 200


# -- for ever -------------------------------------------------------------------------------------
# A job that resumes from a saved state finds its order by these numbers. If they change, it repeats
# some samples and misses others, without an error.

SPLITMIX64_FROM_0 = [
    0xE220A8397B1DCDAF,
    0x6E789E6AA1B965F4,
    0x06C45D188009454F,
    0xF88BB8A8724C81EC,
    0x1B39896A51A8749B,
]
"""The published first outputs of SplitMix64 for the seed 0."""


def test_hashes_are_those_of_splitmix64():
    expected = [(number >> 11) * 2.0**-53 for number in SPLITMIX64_FROM_0]
    assert uniform(np.arange(5), 0x9E3779B97F4A7C15).tolist() == expected
    assert key_of(0) == SPLITMIX64_FROM_0[0]


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ((0, 0), 12035550249420947055),
        ((1, 2, 3), 15020427595393229491),
        ((2**64 - 1,), 16490336266968443936),
    ],
)
def test_keys_stay_as_they_are(parts, key):
    assert key_of(*parts) == key


@pytest.mark.parametrize(
    ("size", "indices"),
    [
        (10, [1, 8, 9, 5, 2]),
        (65_536, [35562, 30684, 21635, 40013, 24855]),
        (65_537, [9794, 47720, 49172, 24382, 34803]),
        (1_000_000, [626300, 887492, 196780, 992227, 252765]),
        (10**9, [81910592, 377880935, 255534846, 736929134, 803828737]),
        (
            2**63 - 1,
            [
                1567490277038784823,
                1972255820154837467,
                1865180460148810348,
                4612631629501597161,
                2332580729750877960,
            ],
        ),
    ],
)
def test_orders_stay_as_they_are(size, indices):
    positions = np.array([0, 1, 2, size // 2, size - 1])
    assert permutation(size, key_of(0, 0))(positions).tolist() == indices


def test_draws_stay_as_they_are():
    assert uniform(np.array([0, 1, 10**9]), key_of(0, 0)).tolist() == [
        0.7054856102290845,
        0.13870941014555427,
        0.24118288603246973,
    ]
