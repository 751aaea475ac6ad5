"""The loops of the mechanisms, against numbers worked out by hand."""

from __future__ import annotations

import math

import torch
from torch import nn

from genmodels.nn import attention as package
from genmodels.nn.attention import LSH, Attention, LocalDenseSynthesizer, Nystrom, Position, Score, ScoredAttention
from genmodels.verification.mechanism_references import (
    MECHANISM_REFERENCES,
    SCORES,
    _bucket,
    _slices,
    reference_mechanism,
)

DOUBLE = torch.float64


def ones(module):
    """Every weight 1 and every bias 0."""
    for name, parameter in module.named_parameters():
        nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    return module.double().eval()


@torch.no_grad()
def test_additive_by_hand():
    memory = torch.tensor([[[1.0], [-1.0]]], dtype=DOUBLE)
    y = reference_mechanism(ones(ScoredAttention(1, 1)), torch.full((1, 1, 1), 0.5, dtype=DOUBLE), memory)
    assert abs(float(y) - (0.796938 - 0.203062)) < 1e-5


@torch.no_grad()
def test_local_dense_by_hand():
    module, x = ones(LocalDenseSynthesizer(1, 1, c=4, boundary="zero")), torch.arange(1.0, 6, dtype=DOUBLE)
    y = reference_mechanism(module, x.view(1, 5, 1))  # weights of a position are equal, whatever it is
    assert torch.allclose(y.flatten(), torch.tensor([0.75, 1.5, 2.5, 3.5, 3], dtype=DOUBLE))


@torch.no_grad()
def test_shared_attention_of_three_by_hand():
    y = reference_mechanism(ones(LSH(1, 1, buckets=1, chunk=4)), torch.tensor([[[1.0], [2.0], [-1.0]]], dtype=DOUBLE))
    share = 1 / (1 + math.exp(-2))  # of the key 2 for the query 1, next to the key -1
    assert abs(float(y[0, 0]) - (2 * share - (1 - share))) < 1e-12


def test_slices_and_buckets():
    assert _slices(torch.arange(7.0)[:, None], 3).flatten().tolist() == [1, 3.5, 5.5]
    assert len(_slices(torch.ones(2, 1), 5)) == 2
    x, axes = torch.tensor([0.5, -2.0]), torch.eye(2)
    assert _bucket(LSH(2, 1, buckets=4, hash="sign"), x, axes) == 2 and _bucket(LSH(2, 1, buckets=4), x, axes) == 3


@torch.no_grad()
def test_one_landmark_sees_the_mean():
    module, x = ones(Nystrom(1, 1, landmarks=1, iterations=None)), torch.tensor([[[1.0], [3.0]]], dtype=DOUBLE)
    share = 1 / (1 + math.exp(-4))  # softmax of 2 * 1 and 2 * 3
    assert torch.allclose(reference_mechanism(module, x), torch.full((1, 2, 1), 1 + 2 * share, dtype=DOUBLE))


def test_every_exported_mechanism_and_score_has_a_loop():
    modules = {m for m in vars(package).values() if isinstance(m, type) and issubclass(m, nn.Module)}
    scores = {m for m in modules if issubclass(m, Score)}
    assert scores - {Score} <= set(SCORES)
    assert {m for m in modules - scores - {Attention} if not issubclass(m, Position)} == set(MECHANISM_REFERENCES)
