"""The double loop itself, against numbers worked out by hand."""

from __future__ import annotations

import math

import torch

from genmodels.nn import attention as package
from genmodels.nn.attention import ALiBi, Attention, Position, TransformerXL
from genmodels.verification.attention_reference import RULES, encoded_distance, reference_attention, rule_of, t5_bucket


def identity(attention):
    """All projections the identity."""
    with torch.no_grad():
        for layer in (attention.project_q, attention.project_k, attention.project_v, attention.project_out):
            layer.weight.copy_(torch.eye(attention.dim))
            layer.bias.zero_()
    return attention


def test_two_positions_by_hand():
    attention = identity(Attention(1, 1)).double()
    y, a = reference_attention(attention, torch.tensor([[[1.0], [2.0]]], dtype=torch.float64))
    first = 1 / (1 + math.exp(1))  # scores 1 and 2
    second = 1 / (1 + math.exp(2))  # scores 2 and 4
    assert torch.allclose(a[0, 0, :, 0], torch.tensor([first, second], dtype=torch.float64))
    assert abs(float(y[0, 1, 0].detach()) - (second + 2 * (1 - second))) < 1e-12


def test_distance_and_mask_by_hand():
    attention = identity(Attention(1, 1, ALiBi(1, 1))).double()
    x = torch.zeros(1, 3, 1, dtype=torch.float64)
    mask = torch.tensor([[[True, False, True]]])
    y, a = reference_attention(attention, x, mask=mask)
    assert torch.allclose(a[0, 0, 0], torch.tensor([1, 0, math.exp(-2 / 256)], dtype=torch.float64)
                          / (1 + math.exp(-2 / 256)))  # fmt: skip
    assert not a[0, 0, 1].any() and not y[0, 1].any()


def test_encoded_distance():
    assert encoded_distance(0, 6) == [0, 1, 0, 1, 0, 1]
    assert [round(v, 6) for v in encoded_distance(-1, 4)] == [-0.841471, 0.540302, -0.01, 0.99995]


def test_published_buckets():
    assert [t5_bucket(-n, 32, 128, True) for n in (7, 8, 11, 12, 90, 91, 5000)] == [7, 8, 8, 9, 14, 15, 15]


def test_every_exported_scheme_has_a_rule_and_subclasses_inherit_it():
    schemes = {s for s in vars(package).values() if isinstance(s, type) and issubclass(s, Position)}
    assert schemes - {package.DistanceBias} <= set(RULES)

    class Own(TransformerXL):
        pass

    assert rule_of(Own(4, 2)) is RULES[TransformerXL]
