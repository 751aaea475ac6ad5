"""Invertible matrices at every position: truth by dense matrices, whitening, precision, and nothing remembered."""

from __future__ import annotations

import math

import numpy
import pytest
import scipy.linalg
import torch

from genmodels.flows.composition import Compose
from genmodels.flows.linear import (
    MATRICES,
    Flip,
    FullMatrix,
    GroupedLinear,
    HouseholderMatrix,
    InvertibleLinear,
    LUMatrix,
    Permute,
    Whitening,
    random_rotation,
)
from genmodels.flows.scaling import channel_covariance
from genmodels.verification.bijections import check_bijection

KINDS = list(MATRICES)
W = torch.tensor([[2.0, 1.0], [1.0, -3.0]], dtype=torch.float64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def made(kind, weight):
    layer = InvertibleLinear(len(weight), kind=kind).double()
    layer.matrix.set_weight(weight)
    return layer


@torch.no_grad()
def moved(layer, amount=0.2, seed=3):
    """The layer in float64, away from its start."""
    layer = layer.double()
    for parameter in layer.parameters():
        parameter.add_(amount * gaussian(*parameter.shape, seed=seed))
    return layer


# ---- the maps ----


class OnePosition(InvertibleLinear):
    """A log-determinant without H W."""

    def _forward(self, x, cond, mask):
        z, logdet = super()._forward(x, cond, mask)
        return z, logdet / x[0, 0].numel()


class OneGroup(GroupedLinear):
    """Counts the determinant once, for however many groups."""

    def _forward(self, x, cond, mask):
        z, logdet = super()._forward(x, cond, mask)
        return z, logdet / self.copies


class CachedInverse(InvertibleLinear):
    """Makes its inverse once."""

    def _inverse(self, z, cond, mask):
        if not hasattr(self, "cache"):
            self.cache = self.matrix.inverse(torch.float64).detach()
        return self._mix(z, self.cache.to(z.dtype)), super()._inverse(z, cond, mask)[1]


@pytest.mark.parametrize("mutant, shape, check", [
    (lambda: OnePosition(4), (4, 2, 3), "log-det forward"),
    (lambda: OneGroup(8), (8, 3), "log-det forward"),
    (lambda: CachedInverse(4), (4, 3), "save and load"),
])  # fmt: skip
def test_checks_catch_mutants(mutant, shape, check):
    assert check in check_bijection(mutant(), shape, compiler=None).failed


@pytest.mark.parametrize("kind", ["lu", "full"])
def test_vector(kind):
    """W = [[2, 1], [1, -3]] on 2x3 positions: the determinant is negative, where a plain logdet gives NaN."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)[None, :, None, None].expand(1, 2, 2, 3)
    z, logdet = made(kind, W)(x)
    torch.testing.assert_close(z[0, :, 1, 2], torch.tensor([4.0, -5.0]).double(), rtol=0, atol=1e-8)
    assert logdet.tolist() == pytest.approx([11.6754608944], abs=1e-8)
    assert math.isnan(6 * float(torch.logdet(W)))


def test_vector_of_factors():
    """P = I, L21 = 0.5, diag (2, -3.5)."""
    matrix = made("lu", W).matrix
    below, upper = matrix._triangles(torch.float64)
    assert matrix.order.tolist() == [0, 1] and matrix.sign.tolist() == [1, -1]
    torch.testing.assert_close(below, torch.tensor([[0.0, 0.0], [0.5, 0.0]]).double(), rtol=0, atol=1e-8)
    torch.testing.assert_close(upper, torch.tensor([[2.0, 1.0], [0.0, -3.5]]).double(), rtol=0, atol=1e-8)


def test_vector_of_reflections():
    """v = (1, 2, 2) alone; the other vectors are zero, and reflect nothing."""
    matrix = HouseholderMatrix(3).double()
    with torch.no_grad():
        matrix.vectors.zero_()
        matrix.vectors[0] = torch.tensor([1.0, 2.0, 2.0])
    expected = torch.tensor([[7.0, -4, -4], [-4, 1, -8], [-4, -8, 1]]).double()
    weight = matrix.weight(torch.float64)
    torch.testing.assert_close(9 * weight, expected, rtol=0, atol=1e-8)
    assert torch.isfinite(torch.autograd.grad(weight.square().sum() + weight[0, 1], matrix.vectors)[0]).all()


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_reflections_are_multiplied_in_order(size, scale):
    """Whatever the lengths of their vectors."""
    matrix = HouseholderMatrix(size, generator()).double()
    expected = torch.eye(size).double()
    for v in matrix.vectors.detach():
        expected = expected @ (torch.eye(size) - 2 * torch.outer(v, v) / v.square().sum())
    with torch.no_grad():
        matrix.vectors.mul_(scale)
    torch.testing.assert_close(matrix.weight(torch.float64), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(matrix.inverse(torch.float64), expected.mT, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_matrices(kind, size):
    """Inverse and log|det| against numpy's ways, away from the start."""
    matrix = moved(MATRICES[kind](size, generator(size)))
    weight = matrix.weight(torch.float64)
    eye = torch.eye(size).double()
    torch.testing.assert_close(matrix.inverse(torch.float64) @ weight, eye, rtol=0, atol=1e-11)
    expected = torch.linalg.slogdet(weight).logabsdet
    torch.testing.assert_close(matrix.log_abs_det(torch.float64), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["lu", "full"])
@pytest.mark.parametrize("seed", range(4))
def test_any_matrix_can_be_set(kind, seed):
    weight = gaussian(5, 5, seed=seed)
    layer = made(kind, weight)
    torch.testing.assert_close(layer.weight(), weight, rtol=0, atol=1e-12)
    x = gaussian(3, 5, 2)
    torch.testing.assert_close(layer(x)[0], torch.einsum("ij,bjt->bit", weight, x), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.inverse(x)[0], torch.linalg.solve(weight, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weight", [
    torch.diag(torch.tensor([1.0, 3e4])), torch.diag(torch.tensor([1.0, 3e-5])), torch.ones(2, 2),
    torch.tensor([[1.0, torch.nan], [0.0, 1.0]]),
])  # fmt: skip
def test_a_matrix_that_lu_cannot_hold_is_refused(weight):
    """Singular, not finite, or with a pivot beyond the bound of l: nothing is brought to the bound in silence."""
    matrix = LUMatrix(2, generator())
    before = matrix.weight(torch.float64)
    with pytest.raises(ValueError, match="pivots .* between 4.6e-05 and 2.2e.04, this matrix has .*: scale it"):
        matrix.set_weight(weight)
    assert torch.equal(matrix.weight(torch.float64), before)


def test_pivots_up_to_the_bound_are_held():
    for value in (2e4, -5e-5):
        weight = torch.tensor([[value, 0.0], [1e-9, 1.0]], dtype=torch.float64)
        matrix = LUMatrix(2, generator()).double()
        matrix.set_weight(weight)
        torch.testing.assert_close(matrix.weight(torch.float64), weight, rtol=1e-9, atol=1e-12)


def test_lu_is_bounded():
    """However far a diagonal entry goes, W stays invertible and its log-determinant finite."""
    matrix = LUMatrix(2).double()
    with torch.no_grad():
        matrix.factors.copy_(torch.tensor([[1e9, 0.0], [0.0, -1e9]]))
    assert matrix.log_diagonal(torch.float64).tolist() == [10.0, -10.0]
    assert float(matrix.log_abs_det(torch.float64).detach()) == 0
    assert torch.isfinite(matrix.inverse(torch.float64)).all()


class WeightAndVolume(torch.nn.Module):
    """Both results that are learned through."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix

    def forward(self):
        matrix, wide = self.matrix, torch.float64
        return matrix.weight(wide), matrix.inverse(wide), matrix.log_abs_det(wide)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind):
    both = WeightAndVolume(moved(MATRICES[kind](3, generator(1))))
    ((name, parameter),) = both.named_parameters()

    def run(value):
        return torch.func.functional_call(both, {name: value}, ())[: 2 if kind == "householder" else 3]

    value = parameter.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (value,)) and torch.autograd.gradgradcheck(run, (value,))


# ---- groups ----


def dense(layer):
    """The whole matrix of a grouped layer, entry by entry: channel = half C/2 + group g/2 + k."""
    channels, size, small = layer.channels, layer.groups, layer.weight().detach()
    whole = torch.zeros(channels, channels).double()
    for group in range(channels // size):
        members = [half * channels // 2 + group * size // 2 + k for half in (0, 1) for k in range(size // 2)]
        for i, row in enumerate(members):
            for j, column in enumerate(members):
                whole[row, column] = small[i, j]
    return whole


@pytest.mark.parametrize("channels, groups", [(4, 4), (8, 4), (12, 2), (12, 6)])
def test_groups_are_blocks_of_one_matrix(channels, groups):
    layer = moved(GroupedLinear(channels, groups=groups, generator=generator()))
    whole, x = dense(layer), gaussian(2, channels, 3)
    z, logdet = layer(x)
    torch.testing.assert_close(z, whole @ x, rtol=0, atol=1e-12)
    expected = 3 * torch.linalg.slogdet(whole).logabsdet
    torch.testing.assert_close(logdet, expected.expand(2), rtol=0, atol=1e-11)
    mask = (torch.arange(3) < torch.tensor([[3], [1]]))[:, None]
    volume = layer(x, mask=mask)[1]
    torch.testing.assert_close(volume, torch.stack([expected, expected / 3]), rtol=0, atol=1e-11)
    # Every channel of one half of a coupling is mixed with channels of the other.
    half = channels // 2
    assert (whole[:half, half:] != 0).any(1).all() and (whole[half:, :half] != 0).any(1).all()


# ---- start ----


@pytest.mark.parametrize("kind", KINDS)
def test_starts_as_a_rotation_from_the_generator(kind):
    before = torch.get_rng_state()
    first, second, third = (InvertibleLinear(6, kind=kind, generator=generator(seed)).weight() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second) and not torch.equal(first, third)
    torch.testing.assert_close(first @ first.mT, torch.eye(6), rtol=0, atol=1e-5)
    assert (first.detach() - torch.eye(6)).abs().max() > 0.1


def test_rotations_are_uniform():
    """Haar measure: entries have mean 0 and variance 1/n, determinants are +1; a bare QR has signs of its own."""
    def measure(draw):
        weights = torch.stack([draw(generator(seed)) for seed in range(2000)])
        standard_error = math.sqrt(1 / 3 / len(weights))
        assert (weights.mean(0).abs() < 5 * standard_error).all()
        assert (weights.square().mean(0) - 1 / 3).abs().max() < 0.05
        torch.testing.assert_close(torch.linalg.det(weights), torch.ones(len(weights)).double())

    measure(lambda source: random_rotation(3, source))
    with pytest.raises(AssertionError):
        measure(lambda source: torch.linalg.qr(torch.randn(3, 3, generator=source, dtype=torch.float64)).Q)


# ---- whitening ----


def correlated(*space, channels=5, rows=60):
    """Channels of unlike means and scales, each a mixture of all."""
    mixture = gaussian(channels, channels, seed=1) * torch.tensor([10.0, 1.0, 0.1, 1.0, 3.0]).double()[:channels, None]
    x = torch.tensordot(gaussian(rows, channels, *space), mixture, dims=([1], [1]))
    return x.movedim(-1, 1) + torch.arange(channels).double().view(-1, *[1] * len(space))


def first_frames(x, *lengths):
    return (torch.arange(x.shape[2]) < torch.tensor(lengths)[:, None])[:, None]


def whitens(make, principal, *space):
    """Mean zero and the identity as covariance; the matrices in closed form, from the root of the correlations."""
    x, layer = correlated(*space), make(5, principal=principal).double()
    layer.initialize(x)
    z, logdet = layer(x)
    columns = z.detach().transpose(0, 1).flatten(1)
    torch.testing.assert_close(columns.mean(1), torch.zeros(5).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.cov(columns, correction=0), torch.eye(5).double(), rtol=0, atol=1e-9)
    flat = x.transpose(0, 1).flatten(1).numpy()
    root = scipy.linalg.sqrtm(numpy.corrcoef(flat))
    matrix = layer.weight().detach().numpy() * flat.std(1)
    if principal:  # W = E^-1/2 Q' D^-1/2, the rows by falling variance, and each with a positive largest entry
        variances = 1 / numpy.square(matrix).sum(1)
        numpy.testing.assert_allclose(matrix.T * variances @ matrix, numpy.eye(5), atol=1e-8)
        assert (numpy.diff(variances) < 0).all()
        assert (matrix[range(5), numpy.abs(matrix).argmax(1)] > 0).all()
    else:
        numpy.testing.assert_allclose(matrix @ root, numpy.eye(5), atol=1e-8)
    half_log_volume = 0.5 * numpy.linalg.slogdet(numpy.cov(flat, bias=True))[1] * math.prod(space)
    assert logdet.tolist() == pytest.approx([-half_log_volume] * len(x), abs=1e-8)


class OfCovariances(Whitening):
    """Takes the root of the covariance where that of the correlations is meant."""

    def _take(self, mean, std):
        super()._take(mean, torch.ones_like(std))


class Transposed(Whitening):
    """Rotates by Q instead of Q'."""

    def initialize(self, x, cond=None, mask=None, *, force=False):
        super().initialize(x, cond, mask, force=force)
        self.matrix.set_weight(self.matrix.weight(torch.float64).mT)


@pytest.mark.parametrize("space", [(), (7,), (3, 4)])
@pytest.mark.parametrize("principal", [False, True])
def test_whitening(principal, space):
    whitens(Whitening, principal, *space)
    for mutant in (OfCovariances, Transposed):
        with pytest.raises(AssertionError):
            whitens(mutant, principal, *space)


def test_padding_has_no_say_in_whitening():
    x = correlated(6)
    mask = first_frames(x, *[6, 3, 0, 1] * 15)
    valid = torch.cat([row[:, keep[0]] for row, keep in zip(x, mask, strict=True)], 1).T
    count, covariance = channel_covariance(x.masked_fill(~mask, torch.nan), mask)
    assert count == 150
    torch.testing.assert_close(covariance, torch.cov(valid.T, correction=0), rtol=1e-10, atol=1e-10)
    whole, masked = Whitening(5).double(), Whitening(5).double()
    whole.initialize(valid)
    masked.initialize(x.masked_fill(~mask, torch.nan), mask=mask)
    torch.testing.assert_close(masked.weight(), whole.weight(), rtol=1e-9, atol=1e-9)


def test_whitening_of_dependent_and_constant_channels():
    """A copy of a channel has no variance of its own, and is scaled by 1,000 at most."""
    x = correlated()
    x[:, 1] = 2 * x[:, 0] + 3
    layer = Whitening(5).double()
    layer.initialize(x)
    of_scaled = layer.weight() * (x.std(0, correction=0) / layer.unit)
    assert torch.linalg.matrix_norm(of_scaled, 2).item() == pytest.approx(1000)
    x[:, 1] = 4.0
    layer = Whitening(5).double()
    with pytest.warns(UserWarning, match="channels 1 are constant"):
        layer.initialize(x)
    z, _ = layer(x)
    torch.testing.assert_close(z[:, 1].detach(), torch.zeros(60).double(), rtol=0, atol=1e-9)
    assert layer.weight()[1, 1].item() == pytest.approx(1)
    torch.testing.assert_close(layer.inverse(z)[0], x, rtol=0, atol=1e-9)


@pytest.mark.parametrize("x", [torch.zeros(49, 5), torch.zeros(7, 5, 7)])
def test_whitening_takes_ten_positions_a_channel(x):
    layer = Whitening(5)
    with pytest.raises(ValueError, match="covariance of 5 channels, .* at least 50 valid positions: this batch has 49"):
        layer.initialize(x)
    assert not layer.ready and torch.equal(layer.weight(), torch.eye(5))


@pytest.mark.parametrize("scale", [1e-2, 1e4, 1e9])
def test_whitening_of_channels_of_any_width(scale):
    """The matrix alone holds scales up to 22,000: dependent channels would leave it."""
    x = scale * correlated()
    x[:, 1] = x[:, 0] + 0.3 * x[:, 1]
    layer = Whitening(5).double()
    layer.initialize(x)
    z, logdet = layer(x)
    torch.testing.assert_close(torch.cov(z.detach().T, correction=0), torch.eye(5).double(), rtol=0, atol=1e-6)
    truth = -0.5 * torch.linalg.slogdet(torch.cov((x / scale).T, correction=0)).logabsdet - 5 * math.log(scale)
    assert logdet.tolist() == pytest.approx([float(truth)] * len(x), abs=1e-6)
    torch.testing.assert_close(layer.inverse(z)[0], x, rtol=0, atol=1e-9 * scale)


def test_an_initialisation_that_fails_leaves_nothing(monkeypatch):
    layer = Whitening(5).double()
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer.initialize(correlated())
    monkeypatch.undo()
    assert not layer.ready and not layer.initialized and torch.equal(layer.weight(), torch.eye(5).double())
    layer.initialize(correlated())


@pytest.mark.slow
def test_large_rotations():
    """The determinant of an orthogonal matrix of 3,072 rows underflows on its way."""
    weight = random_rotation(3072, generator())
    assert weight.square().sum(0).sub(1).abs().max() < 1e-10


# ---- precision, and nothing remembered ----


@pytest.mark.parametrize("make", [lambda: InvertibleLinear(4), lambda: GroupedLinear(4)])
def test_autocast_does_not_touch_the_state(make):
    layer, x = make(), gaussian(3, 4, 5).float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = [layer(x), layer.inverse(x)]
    for (value, logdet), (expected, expected_logdet) in zip(inside, [layer(x), layer.inverse(x)], strict=True):
        assert torch.equal(value, expected) and torch.equal(logdet, expected_logdet)
        assert value.dtype == logdet.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_another_precision(kind):
    layer = InvertibleLinear(4, kind=kind)
    z, logdet = layer(gaussian(3, 4, 5))
    assert z.dtype == logdet.dtype == torch.float64
    half = InvertibleLinear(4, kind=kind).bfloat16()
    z, logdet = half(gaussian(3, 4, 5).float())
    assert z.dtype == logdet.dtype == half.weight().dtype == torch.float32
    assert (half.inverse(z)[0] - gaussian(3, 4, 5)).abs().max() < 1e-4


@torch.no_grad()
def round_trip(make):
    """32 steps in float64, each away from its start and of its own."""
    flow = Compose([moved(make(), 0.05, seed) for seed in range(32)], (6, None))
    x = gaussian(2, 6, 4)
    back, _ = flow.inverse(flow(x)[0])
    assert float((back - x).abs().max() / (1 + x.abs().max())) < 1e-9


class SinglePrecisionInverse(InvertibleLinear):
    """Keeps its inverse in float32."""

    def _inverse(self, z, cond, mask):
        return self._mix(z, self.matrix.inverse(torch.float32).to(z.dtype)), z.new_zeros(len(z))


def test_long_round_trips():
    for kind in KINDS:
        round_trip(lambda kind=kind: InvertibleLinear(6, kind=kind))
    with pytest.raises(AssertionError):
        round_trip(lambda: SinglePrecisionInverse(6))


@pytest.mark.parametrize("kind", KINDS)
def test_the_inverse_follows_the_parameters(kind):
    layer, x = moved(InvertibleLinear(3, kind=kind)), gaussian(2, 3)
    for seed in range(3):
        z, _ = layer(x)
        torch.testing.assert_close(layer.inverse(z)[0], x, rtol=0, atol=1e-11)
        moved(layer, seed=seed)


def test_a_singular_full_matrix_is_noticed():
    layer = made("full", torch.ones(2, 2).double())
    assert layer(torch.ones(1, 2).double())[1].tolist() == [-math.inf]
    assert not torch.isfinite(layer.inverse(torch.ones(1, 2).double())[0]).any()
    assert float(layer.singular_values()[-1]) < 1e-12


# ---- for the monitor, and errors ----


@pytest.mark.parametrize("kind", ["lu", "full"])
def test_singular_values(kind):
    rotation = random_rotation(3, generator())
    layer = made(kind, rotation @ torch.diag(torch.tensor([4.0, 1.0, 0.5]).double()) @ rotation.mT)
    assert layer.singular_values().tolist() == pytest.approx([4, 1, 0.5], abs=1e-12)
    assert InvertibleLinear(3, kind="householder").singular_values().tolist() == pytest.approx([1] * 3, abs=1e-5)


def test_the_condition_of_groups_is_that_of_the_whole():
    layer = moved(GroupedLinear(8))
    values = torch.linalg.svdvals(dense(layer))
    own = layer.singular_values()
    assert (float(own[0]), float(own[-1])) == pytest.approx((float(values[0]), float(values[-1])), abs=1e-12)


@pytest.mark.parametrize("make, message", [
    (lambda: InvertibleLinear(3, kind="cholesky"), "kind must be one of lu, full, householder, got 'cholesky'"),
    (lambda: InvertibleLinear(0), "at least one channel, got 0"),
    (lambda: GroupedLinear(10), "groups must be even and divide the channels, got 4 of 10"),
    (lambda: GroupedLinear(9, groups=3), "got 3 of 9"),
])  # fmt: skip
def test_options_that_do_not_fit(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("layer", [InvertibleLinear(4), GroupedLinear(4)])
def test_another_number_of_channels(layer):
    for call in (layer, layer.inverse):
        with pytest.raises(ValueError, match=rf"{type(layer).__name__} takes events of shape \(4, ...\), got \(3, 5\)"):
            call(torch.zeros(2, 3, 5))


@pytest.mark.parametrize("layer", [InvertibleLinear(4), GroupedLinear(4, groups=2)])
@pytest.mark.parametrize("shape", [(0, 4), (0, 4, 3), (2, 4, 0)])
def test_empty_batches_and_events(layer, shape):
    for call in (layer, layer.inverse):
        z, logdet = call(torch.zeros(shape))
        assert z.shape == shape and logdet.tolist() == [0.0] * shape[0]


def test_masks_with_an_entry_for_every_value_are_refused():
    with pytest.raises(ValueError, match="share one mask"):
        InvertibleLinear(3)(torch.zeros(2, 3, 4), mask=torch.ones(2, 3, 4, dtype=torch.bool))


def test_set_weight_keeps_full_matrices_whole():
    matrix = FullMatrix(2).double()
    matrix.set_weight(W)
    assert torch.equal(matrix.weight(torch.float64), W) and matrix.entries.requires_grad


# ---- fixed orders: where each channel goes, and its way back ----


@pytest.mark.parametrize("layer", [Permute([1, 2, 0]), Flip(3), Permute([0])])
@pytest.mark.parametrize("space", [(), (4,)])
def test_a_mask_of_every_value_is_permuted_too(layer, space):
    x = 1 + torch.arange(1.0, 1 + 2 * layer.channels * max(1, *space, 1)).view(2, layer.channels, *space)
    mask = x % 3 != 0
    z, _ = layer(x, None, mask)
    hidden = x * mask
    assert torch.equal(z, hidden[:, layer.index]) and torch.equal(layer.out_mask(mask), mask[:, layer.index])
    assert torch.equal(layer.inverse(z, None, layer.out_mask(mask))[0], hidden)


class SameIndexBack(Permute):
    """Forgets to invert the order."""

    def _inverse(self, z, cond, mask):
        return z.index_select(1, self.index), z.new_zeros(len(z))


def test_checks_catch_a_mutants():
    assert check_bijection(SameIndexBack([1, 2, 0]), (3,), compiler=None).failed == ["round trip"]


def test_order():
    z, logdet = Permute([2, 0, 1])(torch.tensor([[10.0, 11.0, 12.0]]))
    assert z.tolist() == [[12.0, 10.0, 11.0]] and logdet.tolist() == [0.0]
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(Flip(3)(x)[0], x.flip(1)) and torch.equal(Flip(3).inverse(x)[0], x.flip(1))


def test_random_orders_come_from_the_generator():
    before = torch.get_rng_state()
    orders = [Permute.random(20, generator(seed)).index.tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == list(range(20))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loaded_order_brings_its_inverse():
    one, other = Permute.random(9, generator(0)), Permute.random(9, generator(1))
    x = torch.randn(2, 9, generator=generator())
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(x)[0], one(x)[0]) and torch.equal(other.inverse(other(x)[0])[0], x)
    assert not list(one.parameters())


@pytest.mark.parametrize("index", [[0, 0, 1], [1, 2, 3], [0.0, 1.0], [[0, 1]]])
def test_what_is_no_permutation(index):
    with pytest.raises(ValueError, match="is not a permutation of 0 .. C-1"):
        Permute(index)


def test_another_number_of_channels_of_permute():
    for call in (Flip(3), Flip(3).inverse):
        with pytest.raises(ValueError, match=r"Flip takes events of shape \(3, ...\), got \(4, 5\)"):
            call(torch.zeros(2, 4, 5))
