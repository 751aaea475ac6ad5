"""Locality-sensitive hashing: collisions, worked hashes, and attention within buckets."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from genmodels.nn.attention import LSH, rotation_hash, sign_bits, sign_hash
from tests.nn.attention.table import DOUBLE, MECHANISM, draw, lengths, worst

EYE = torch.eye(2, dtype=DOUBLE)

#: Ten points in the plane, half above and left of the origin and half below and right, near the axes named.
POINTS = torch.tensor([[-0.3, 1.2], [0.4, -0.9], [-0.6, 0.7], [1.1, -0.2], [0.5, -1.4],
                       [0.1, -0.8], [-1.3, 0.6], [-0.2, 0.9], [0.7, -0.5], [-0.8, 1.0]], dtype=DOUBLE)  # fmt: skip


def test_points_fall_into_the_buckets_of_their_signs():
    found = {}
    for i, bits in enumerate(sign_bits(POINTS, EYE).int().tolist()):
        found.setdefault(tuple(bits), []).append(i)
    assert found == {(0, 1): [0, 2, 6, 7, 9], (1, 0): [1, 3, 4, 5, 8]}
    assert sign_hash(POINTS, EYE).unique().tolist() == [1, 2]  # two buckets, however many points


def test_points_fall_to_the_nearest_axis():
    points = torch.tensor([(1, 0), (0, 1), (-1, 0), (0, -1), (2, 1), (-1, -3)], dtype=DOUBLE)
    assert rotation_hash(points, EYE).tolist() == [0, 1, 2, 3, 0, 3]
    assert rotation_hash(POINTS, EYE).tolist() == [1, 3, 1, 0, 3, 3, 2, 1, 0, 1]


def test_exactly_zero_is_bit_zero():
    assert not sign_bits(torch.zeros(3, 2), torch.randn(2, 4)).any()
    assert sign_hash(torch.tensor([[1.0, 2, 3]]), torch.eye(3)).tolist() == [7]


def collisions(hash_bits, degrees, draws=20000):
    """Shares of draws in which two vectors have their first bit, and both bits, in common; in standard errors."""
    angle = math.radians(degrees)
    x = torch.tensor([[1.0, 0, 0], [math.cos(angle), math.sin(angle), 0]], dtype=DOUBLE)
    planes = torch.randn(draws, 3, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    bits = hash_bits(x, planes)  # (draws, 2, 2)
    same = bits[:, 0] == bits[:, 1]
    one, both, p = same[:, 0].double().mean(), same.all(-1).double().mean(), 1 - degrees / 180
    return [abs(float(share) - q) / math.sqrt(q * (1 - q) / draws) for share, q in ((one, p), (both, p * p))]


@pytest.mark.parametrize("degrees", [60, 20, 135])
def test_bits_collide_in_proportion_to_the_angle(degrees):
    assert max(collisions(sign_bits, degrees)) < 3


def test_the_collision_check_catches_an_offset_hash():
    assert max(collisions(lambda x, planes: x @ planes + 0.5 > 0, 60)) > 3


# --- attention --------------------------------------------------------------------------------------------------------


def shared_attention(module, x, mask=None):
    """Full softmax attention of one projection for queries and keys, to itself only where there is nobody else."""
    qk = module.project_qk(x).unflatten(-1, (module.heads, -1)).transpose(1, 2)
    v = module.project_v(x).unflatten(-1, (module.heads, -1)).transpose(1, 2)
    scores = qk @ torch.nn.functional.normalize(qk, dim=-1).mT / math.sqrt(module.head_dim)
    L = x.shape[1]
    allowed = ~torch.eye(L, dtype=torch.bool) & (torch.ones(1, 1, 1, L) > 0 if mask is None else mask[:, :, None])
    allowed = torch.where(allowed.any(-1, keepdim=True), allowed, torch.eye(L, dtype=torch.bool))
    y = scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v
    y = module.project_out(y.transpose(1, 2).flatten(2))
    return y if mask is None else y.masked_fill(~mask.transpose(1, 2), 0)


@pytest.mark.parametrize("hash", ["sign", "rotation"])
@torch.no_grad()
def test_one_bucket_in_one_chunk_is_full_attention(hash):
    for L, rounds in [(1, 1), (2, 1), (7, 1), (16, 3)]:
        module = LSH(8, 2, buckets=1, chunk=16, rounds=rounds, hash=hash).double().eval()
        assert worst(module(draw(2, L, 8))[0], shared_attention(module, draw(2, L, 8))) < 1e-5
    mask = lengths([[1] * 16, [1, 1, 1, 0, 1] + [0] * 11, [1] + [0] * 15])
    assert worst(module(draw(3, 16, 8), mask=mask)[0], shared_attention(module, draw(3, 16, 8), mask)) < 1e-5


class SelfToo(LSH):
    """A fault: a position attends to itself, which for unit keys outweighs all others."""

    def _within(self, arranged, values, drop):
        keep = torch.eye
        try:
            torch.eye = lambda n, dtype=None, device=None: torch.zeros(n, n, dtype=dtype, device=device)
            return super()._within(arranged, values, drop)
        finally:
            torch.eye = keep


def test_that_check_catches_attention_to_oneself():
    module = SelfToo(8, 2, buckets=1, chunk=16).double().eval()
    assert worst(module(draw(2, 7, 8))[0], shared_attention(module, draw(2, 7, 8))) > 1e-3


@torch.no_grad()
def test_only_positions_of_one_bucket_attend():
    module, x = MECHANISM["lsh sign"].build(), draw(1, 30, 8)
    qk = module.project_qk(x).unflatten(-1, (2, 4)).transpose(1, 2)
    bucket = module.hashes(qk)  # (1, H, R, L)
    met = (bucket[..., :, None] == bucket[..., None, :]).any(2)
    a = module.weights(x)
    assert not a[~met].any() and bool((a.sum(-1) - 1).abs().max() < 1e-12)


@torch.no_grad()
def test_a_chunk_sees_itself_and_one_back():
    """One bucket keeps the order: position i is in chunk i // 3."""
    module = LSH(8, 2, buckets=1, chunk=3, rounds=1).double().eval()
    chunk = torch.arange(11) // 3
    back = chunk[:, None] - chunk
    near = ((back == 0) | (back == 1)) & ~torch.eye(11, dtype=torch.bool)
    assert torch.equal(module.weights(draw(1, 11, 8))[0, 0] > 0, near)


@torch.no_grad()
def test_a_position_alone_in_every_round_attends_to_itself():
    module = LSH(4, 1, buckets=4, chunk=8, rounds=2).double().eval()
    module.directions.copy_(torch.eye(4)[:, :2])
    module.project_qk.weight.copy_(torch.eye(4))
    module.project_qk.bias.zero_()
    x = torch.tensor([[[1.0, 0, 0, 0], [0, 1, 0, 0], [2, 0, 0, 0]]], dtype=DOUBLE)
    assert worst(module.weights(x)[0, 0], torch.tensor([[0, 0, 1], [0, 1, 0], [1, 0, 0]])) < 1e-12


@torch.no_grad()
def test_any_length_goes():
    """Published: the length had to divide by twice the bucket."""
    for L in range(1, 14):
        module = LSH(8, 2, buckets=4, chunk=4).double().eval()
        assert module(draw(2, L, 8))[0].shape == (2, L, 8)
        assert worst(module.weights(draw(2, L, 8)).sum(-1), torch.ones(2, 2, L)) < 1e-12


@torch.no_grad()
def test_hashes_are_drawn_in_training_and_fixed_in_evaluation():
    def build():
        torch.manual_seed(0)
        return LSH(16, 2, buckets=8, chunk=4, rounds=1, generator=torch.Generator().manual_seed(3)).double()

    module, x = build(), draw(1, 24, 16)
    first, second = module(x)[0], module(x)[0]
    assert worst(first, second) > 1e-6
    again = build()
    assert torch.equal(again(x)[0], first) and torch.equal(again(x)[0], second)
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0]) and torch.equal(copy.deepcopy(module)(x)[0], module(x)[0])
    other = LSH(16, 2, buckets=8, chunk=4, rounds=1).double().eval()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x)[0], module(x)[0])


def test_gradients_flow_through_the_order_and_back():
    module, x = MECHANISM["lsh rotation"].build(), draw(1, 9, 8).requires_grad_()
    gradients = torch.autograd.grad(module(x)[0].sin().sum(), [x, *module.parameters()])
    assert all(float(g.abs().max()) > 0 and bool(g.isfinite().all()) for g in gradients)


def test_dropout_acts_on_the_weights_in_training_only():
    module, x = LSH(8, 2, buckets=1, chunk=8, dropout=0.5), draw(1, 6, 8, dtype=torch.float32)
    assert worst(module(x)[0], module(x)[0]) > 1e-3
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])


def test_short_sequences_get_a_warning_that_it_does_not_pay():
    explain = LSH(8, 2).explain
    assert "slower than full attention below" in explain(512, 512).reason
    assert "slower" not in explain(4096, 4096).reason
    assert explain(8192, 8192).extra_bytes == 2 * explain(4096, 4096).extra_bytes


@pytest.mark.parametrize("options, words", [
    ({"buckets": 5, "hash": "sign"}, "power of 2"), ({"buckets": 0, "hash": "sign"}, "power of 2"),
    ({"buckets": 5}, "even number"), ({"buckets": 0}, "even number"),
    ({"chunk": 0}, "chunk"), ({"rounds": 0}, "rounds"),
    ({"hash": "minhash"}, "sign or rotation"), ({"dropout": 1.0}, "dropout"),
])  # fmt: skip
def test_what_cannot_be_built(options, words):
    with pytest.raises(ValueError, match=words):
        LSH(8, 2, **options)
