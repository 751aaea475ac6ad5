"""Nystrom attention: a published matrix, landmarks, when it is attention itself, and how far off six iterations are."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from genmodels.nn.attention import LSH, Attention, Nystrom, approximate, rotation_hash, sign_bits, sign_hash
from genmodels.nn.attention.approximate import iterated_inverse, nystrom, pseudo_inverse, segments
from tests.nn.attention.table import DOUBLE, MECHANISM, draw, lengths, worst

EPS = torch.finfo(DOUBLE).eps

#: Queries times keys of two dimensions, five positions; printed by J. Tae (2021) on linear attention in Nystromformer.
PUBLISHED = torch.tensor([
    [2.29571874, -0.7373519, 0.32730778, -0.84730782, -1.16558083],
    [1.4346883, -0.32765206, 0.80095764, -0.39437617, 0.17889744],
    [1.38973136, -0.61066937, -0.53783773, -0.67968999, -1.82523199],
    [-1.80977456, 0.1036656, -2.39735444, 0.18320197, -2.33569844],
    [1.36516091, -0.40695455, 0.33580143, -0.47186895, -0.47836287],
], dtype=DOUBLE)  # fmt: skip


def test_the_published_matrix_from_one_row_and_column():
    A = nystrom(PUBLISHED, torch.tensor([0]))
    assert abs(float((A - PUBLISHED).norm()) - 4.331858909) < 1e-8
    assert worst(A[0], PUBLISHED[0]) < 1e-14 and worst(A[:, 0], PUBLISHED[:, 0]) < 1e-14
    assert abs(float(A[1, 1]) + 0.46080128) < 1e-8


def test_the_published_matrix_is_of_rank_two():
    def error(S, **options):
        return float((nystrom(PUBLISHED, torch.tensor(S), **options) - PUBLISHED).norm())

    assert max(error(S) for S in ([0, 1], [0, 1, 2], [0, 2, 4], [0, 1, 2, 3, 4])) < 1e-7
    # Without a threshold the noise of superfluous landmarks is inverted too.
    assert error([0, 1, 2, 3, 4], rcond=1e-15) > 1e-7


def test_rows_of_landmarks_are_interpolated_and_enough_landmarks_are_exact():
    u, v = draw(4, 9), draw(4, 9, seed=2)
    A = u.T @ v
    for m in (1, 2, 3, 4, 6):
        S = torch.arange(m)
        B = nystrom(A, S)
        assert max(worst(B[S], A[S]), worst(B[:, S], A[:, S])) < 1e-9
        assert (worst(B, A) < 1e-9) == (m >= 4)


def test_the_iteration_converges_to_the_inverse():
    A = draw(2, 3, 4, 4).softmax(-1)
    assert worst(iterated_inverse(A, 25), torch.linalg.pinv(A)) < 1e-6 * float(torch.linalg.pinv(A).abs().max())
    padded = torch.nn.functional.pad(A, (0, 2, 0, 2))
    inverse = iterated_inverse(padded, 12)
    assert worst(inverse[..., :4, :4], iterated_inverse(A, 12)) < 1e-12 and not inverse[..., 4:, :].any()
    assert not iterated_inverse(torch.zeros(3, 3), 6).any()


def test_segments_are_of_valid_positions():
    valid = lengths([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    weights = segments(valid, 3, DOUBLE)
    assert weights[0].tolist() == [[0.5, 0.5, 0, 0, 0, 0], [0, 0, 0.5, 0.5, 0, 0], [0, 0, 0, 0, 0.5, 0.5]]
    assert weights[1].argmax(-1).tolist() == [0, 2, 3] and weights[1].sum().item() == 3
    assert weights[2].sum(-1).tolist() == [1, 0, 0] and not weights[3].any()
    for L in range(1, 9):  # any length, also one that the number of landmarks does not divide
        for m in range(1, L + 1):
            sizes = (segments(torch.ones(1, 1, L, dtype=torch.bool), m)[0] > 0).sum(-1)
            assert int(sizes.sum()) == L and int(sizes.max() - sizes.min()) <= 1


def pair(L, iterations, seed=0, dim=32, heads=2):
    """Attention and its approximation by as many landmarks as positions, of the same parameters."""
    torch.manual_seed(seed)
    full = Attention(dim, heads).double()
    approximate = Nystrom(dim, heads, landmarks=L, iterations=iterations).double()
    approximate.load_state_dict(full.state_dict(), strict=False)
    return full, approximate, draw(2, L, dim, seed=seed) * 3


@torch.no_grad()
def test_with_a_landmark_for_every_position_it_is_attention():
    full, approximate, x = pair(12, None)
    assert worst(full(x)[0], approximate(x)[0]) < 1e-10
    mask = torch.ones(2, 1, 12, dtype=torch.bool)
    mask[1, 0, 7:] = False
    assert worst(full(x, mask=mask)[0], approximate(x, mask=mask)[0]) < 1e-10
    assert worst(full(x, x[:, :5])[0], approximate(x, x[:, :5])[0]) < 1e-10


def gradient_error(scale, seed):
    """Error of the gradients of the exact inverse, which are attention's, over eps * condition * largest gradient."""
    full, approximate, x = pair(5, None, seed, dim=8)
    x = (x[:1, :4] * scale).requires_grad_()  # a landmark more than positions
    exact, found = (
        torch.autograd.grad(module(x)[0].square().sum(), [x, *module.parameters()]) for module in (full, approximate)
    )
    projected = (project(x.detach()).unflatten(-1, (2, 4)) for project in (full.project_q, full.project_k))
    q, k = (value.transpose(1, 2).detach() for value in projected)
    condition = float(torch.linalg.cond((q @ k.mT / 2).softmax(-1)).max())
    return max(map(worst, found, exact)) / (EPS * condition * max(float(g.abs().max()) for g in exact))


def gradient_errors():
    return max(gradient_error(scale, seed) for scale in (0.02, 0.1, 1, 2) for seed in range(4))


def test_the_exact_inverse_has_the_gradients_of_attention():
    """For conditions from 60 to 4e9, to the digits that each leaves; found: up to 4."""
    assert gradient_errors() < 50


def test_the_check_of_gradients_catches_the_square_of_the_condition(monkeypatch):
    """Derivatives of `torch.linalg.pinv` contain terms of null spaces, whose rounding is multiplied by it."""
    monkeypatch.setattr(approximate, "pseudo_inverse", torch.linalg.pinv)
    assert gradient_errors() > 1e4


def test_the_derivatives_of_the_pseudo_inverse():
    """Of regular and singular matrices together, to second order and in forward mode; at constant rank."""
    a, b = draw(2, 4, 4).requires_grad_(), draw(2, 4, 4, seed=3).requires_grad_()
    rank = (torch.arange(4) < torch.tensor([[4], [2]])).to(DOUBLE)[:, None]

    def inverse(a, b):
        return pseudo_inverse(a * rank @ b)

    assert worst(inverse(a, b), torch.linalg.pinv(a * rank @ b)) < 1e-10
    assert torch.autograd.gradcheck(inverse, (a, b), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(inverse, (a, b), fast_mode=True)


@torch.no_grad()
def test_twelve_iterations_are_exact_and_six_are_not():
    """A landmark for each of 8 normal positions of width 64; how many it takes depends on the condition, here 43."""
    q, k, v = (draw(1, 8, 64, seed=s) for s in (1, 2, 3))
    exact = (q @ k.mT / 8).softmax(-1)

    def errors(iterations):
        A = exact @ iterated_inverse(exact, iterations) @ exact
        return worst(A @ v, exact @ v) / float((exact @ v).abs().max()), worst(A.sum(-1), torch.ones(8))

    assert max(errors(12)) < 1e-10
    assert 0.01 < errors(6)[0] < 0.03 and 2e-3 < errors(6)[1] < 6e-3
    assert Nystrom(8, 2).iterations == 6


@pytest.mark.parametrize("L", [1, 5, 7, 13])
@torch.no_grad()
def test_any_length_goes_with_any_number_of_landmarks(L):
    for m in (1, 2, 4, 13, 40):
        for iterations in (6, None):
            y = Nystrom(8, 2, landmarks=m, iterations=iterations).double()(draw(2, L, 8))[0]
            assert y.shape == (2, L, 8) and bool(y.isfinite().all())


def test_options_do_what_they_are_called():
    """Published: an option was read under another name than documented, and did nothing."""
    x = draw(1, 12, 8)
    torch.manual_seed(0)
    reference = Nystrom(8, 2, landmarks=4).double()
    for options in ({"landmarks": 3}, {"landmarks": 4, "iterations": 2}, {"landmarks": 4, "iterations": None}):
        other = Nystrom(8, 2, **options).double()
        other.load_state_dict(reference.state_dict())
        assert worst(other(x)[0], reference(x)[0]) > 1e-9


def test_the_memory_is_linear_and_short_sequences_get_a_warning():
    explain = Nystrom(64, 2, landmarks=16).explain
    growth = explain(4096, 4096).extra_bytes / explain(2048, 2048).extra_bytes
    assert 1.9 < growth <= 2
    assert "slower than full" in explain(32, 32).reason and "slower" not in explain(4096, 4096).reason


@pytest.mark.parametrize("options, words", [({"landmarks": 0}, "landmarks"), ({"iterations": 0}, "iterations")])
def test_what_cannot_be_built(options, words):
    with pytest.raises(ValueError, match=words):
        Nystrom(8, 2, **options)


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
    ({"hash": "minhash"}, "hash must be one of sign, rotation"), ({"dropout": 1.0}, "dropout"),
])  # fmt: skip
def test_what_cannot_be_built_of_lsh(options, words):
    with pytest.raises(ValueError, match=words):
        LSH(8, 2, **options)
