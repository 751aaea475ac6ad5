"""What is linear in the length, counted and not timed: products, and the largest tensor that a call makes."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from genmodels.nn.attention import (
    LSH,
    Attention,
    LocalDenseSynthesizer,
    MusicTransformer,
    Nystrom,
    Shaw,
    TransformerXL,
)
from tests.mutants.attention_positions import Encoded


class Largest(TorchDispatchMode):
    """Remembers the storage of the largest tensor that anything returns, in bytes."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.size = max([self.size, *sizes])
        return out


def growth(module, L):
    """How many times the products and the largest tensor of a call grow, backward included, when the length doubles."""
    counted = []
    for length in (L, 2 * L):
        torch.manual_seed(0)
        x = torch.randn(1, length, 32, requires_grad=True)
        with FlopCounterMode(display=False) as flops, Largest() as largest:
            module(x)[0].sum().backward()
        counted.append((flops.get_total_flops(), largest.size))
    return max(b / a for a, b in zip(*counted, strict=True))


LINEAR = [
    LocalDenseSynthesizer(32, 2, c=5),
    Nystrom(32, 2, landmarks=8),
    LSH(32, 2, buckets=8, chunk=16),
    LSH(32, 2, buckets=8, chunk=16, hash="sign"),
]


@pytest.mark.parametrize("module", LINEAR, ids=lambda module: type(module).__name__)
def test_cost_is_linear_in_the_length(module):
    assert growth(module, 512) <= 2.1


def test_the_cost_law_catches_a_square():
    assert growth(Attention(32, 2, backend="explicit"), 512) > 2.6


def largest_tensor(position):
    """In units of one score for each head, query and distance, 2 L of them for L queries; forward and backward."""
    L, heads, d = 96, 2, 32
    attention = Attention(heads * d, heads, position(heads * d, heads))
    with Largest() as largest:
        attention(torch.randn(1, L, heads * d, requires_grad=True))[0].sum().backward()
    return largest.size / (4 * heads * L * 2 * L)


@pytest.mark.parametrize("position", [TransformerXL, Shaw, lambda D, H: MusicTransformer(D, H, max_len=96)])
def test_relative_keys_make_nothing_larger_than_the_scores_by_distance(position):
    assert largest_tensor(position) <= 1.1


def test_that_law_catches_a_vector_for_each_pair():
    assert largest_tensor(Encoded) > 10
