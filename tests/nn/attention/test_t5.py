"""T5: where buckets begin, exactly."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.nn.attention import T5Bias
from genmodels.verification.attention_reference import t5_bucket


def bucket(r, **options):
    return T5Bias(8, 2, **options).bucket(torch.tensor(r)).tolist()


def first_of_each(buckets):
    """The n at which a new bucket begins."""
    return [n for n in range(1, len(buckets)) if buckets[n] != buckets[n - 1]]


def test_two_ways():
    past = bucket([-n for n in range(1000)])
    assert past[:8] == list(range(8))
    assert first_of_each(past)[7:] == [8, 12, 16, 23, 32, 46, 64, 91] and past[91:] == [15] * 909
    assert bucket([1, 8, 128]) == [17, 24, 31]
    assert bucket(list(range(1, 1000))) == [16 + b for b in past[1:]]


def test_one_way():
    past = bucket([-n for n in range(1000)], bidirectional=False)
    assert past[:16] == list(range(16))
    starts = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert first_of_each(past)[15:] == starts and past[113:] == [31] * 887
    assert bucket([1, 5, 900], bidirectional=False) == [0, 0, 0]


@pytest.mark.parametrize("buckets, max_distance, two_ways",
                         [(32, 128, True), (32, 128, False), (8, 6, True), (64, 500, True), (10, 40, False)])
def test_the_published_formula(buckets, max_distance, two_ways):
    r = list(range(-600, 601))
    got = bucket(r, buckets=buckets, max_distance=max_distance, bidirectional=two_ways)
    assert got == [t5_bucket(n, buckets, max_distance, two_ways) for n in r]


@pytest.mark.parametrize("exact, buckets", [(8, 16), (16, 32)])
def test_both_precisions_of_the_logarithm_agree_with_the_integers(exact, buckets):
    n = torch.arange(exact, 128)
    for dtype in (torch.float32, torch.float64):
        far = torch.log(n.to(dtype) / exact) / math.log(128 / exact) * (buckets - exact)
        wanted = (exact + far.long()).clamp(max=buckets - 1)
        got = T5Bias(8, 2, buckets=buckets, bidirectional=False).bucket(-n)
        assert torch.equal(got, wanted)


def test_the_bias_is_not_scaled():
    position = T5Bias(8, 2)
    bias = position.score_bias(torch.zeros(1, 2, 3, 4), 0, 0, 3, 3)
    assert torch.equal(bias[0, :, 0, 1], position.weight[17]) and torch.equal(bias[0, :, 2, 1], position.weight[1])


@pytest.mark.parametrize("options, words", [
    ({"buckets": 7}, "cannot be halved"),
    ({"buckets": 2}, "at least 2 are needed"),
    ({"buckets": 32, "max_distance": 8}, "must exceed the 8 exact"),
])  # fmt: skip
def test_errors(options, words):
    with pytest.raises(ValueError, match=words):
        T5Bias(8, 2, **options)
