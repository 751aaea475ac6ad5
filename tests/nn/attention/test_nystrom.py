"""Nystrom attention: a published matrix, landmarks, when it is attention itself, and how far off six iterations are."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import Attention, Nystrom
from genmodels.nn.attention import nystrom as nystrom_module
from genmodels.nn.attention.nystrom import iterated_inverse, nystrom, pseudo_inverse, segments
from tests.nn.attention.table import DOUBLE, draw, lengths, worst

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
    monkeypatch.setattr(nystrom_module, "pseudo_inverse", torch.linalg.pinv)
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


@pytest.mark.parametrize("options, words", [({"landmarks": 0}, "landmarks"), ({"iterations": 0}, "iterations"),
                                            ({"causal": True}, "no causal form")])  # fmt: skip
def test_what_cannot_be_built(options, words):
    with pytest.raises(ValueError, match=words):
        Nystrom(8, 2, **options)
