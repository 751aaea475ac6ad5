"""Factor-out and multi-scale flows: Jacobians, masks, temperature at every scale, latents."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from genmodels.core.data import Latents
from genmodels.core.tensors import event_sum
from genmodels.flows.bijection import Bijection, Freeze, Inverse
from genmodels.flows.composition import Compose
from genmodels.flows.linear import Flip
from genmodels.flows.multiscale import FactorOut, MultiScale
from genmodels.flows.scaling import ActNorm, Shift
from genmodels.flows.squeeze import Squeeze1d, Squeeze2d
from genmodels.nn.condition import Condition
from genmodels.nn.coupling_networks import ConvNet
from genmodels.nn.perceptron import MLP
from tests.parameters import shaken


def source(seed=0):
    return torch.Generator().manual_seed(seed)


class Bend(Bijection):
    """A smooth element-wise map with a parameter for each channel, so that stages are not all linear."""

    def __init__(self, channels):
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(channels))

    def _rates(self, x):
        return self.slope.exp().reshape(-1, *[1] * (x.dim() - 2))

    def _forward(self, x, cond, mask):
        rate = self._rates(x)
        return rate * torch.sinh(x), self._sum(torch.log(rate * torch.cosh(x)), mask)

    def _inverse(self, z, cond, mask):
        x = torch.asinh(z / self._rates(z))
        return x, -self._sum(torch.log(self._rates(z) * torch.cosh(x)), mask)

    @staticmethod
    def _sum(volume, mask):
        return event_sum(volume if mask is None else volume.masked_fill(~mask, 0))


def prior(channels, dims, cond=None):
    if dims == 0:
        return MLP(channels // 2, channels, hidden=8, cond=cond)
    return ConvNet(channels // 2, channels, hidden=8, dims=dims, cond=cond)


LABELS = Condition("labels", 3)


def vectors(cond=None):
    stages = [Compose([Bend(8), Flip(8)], (8,)), Bend(4), Flip(2)]
    return MultiScale(stages, [FactorOut(8, prior(8, 0, cond)), FactorOut(4, prior(4, 0, cond))], (8,))


def sequences(cond=None, length=None):
    stages = [Compose([Squeeze1d(), Bend(4)], (2, length)), Compose([Squeeze1d(), Flip(4)], (2, None)), Bend(2)]
    return MultiScale(stages, [FactorOut(4, prior(4, 1, cond)), FactorOut(4, prior(4, 1))], (2, length))


def images(cond=None):
    stages = [Compose([Squeeze2d(), Bend(4)], (1, 4, 4)), Compose([Squeeze2d(order="alternative"), Flip(8)], (2, 2, 2))]
    return MultiScale(stages, [FactorOut(4, prior(4, 2, cond))], (1, 4, 4))


FLOWS = {
    "vectors": (vectors, (8,)),
    "sequences": (sequences, (2, 8)),
    "images": (images, (1, 4, 4)),
    "one stage": (lambda cond=None: MultiScale([Flip(3)], [], (3, 2)), (3, 2)),
    "frozen": (lambda cond=None: Compose([Freeze(vectors(cond))], (8,)), (8,)),
    "inverse": (lambda cond=None: Inverse(vectors(cond)), (8,)),
}


@torch.no_grad()
def checked(flow, x, cond=None):
    """Both directions against autograd's Jacobian; the result has to be the one the shapes announce."""
    z, logdet = flow(x, cond)
    back, inverse_logdet = flow.inverse(z, cond)
    torch.testing.assert_close(back, x, rtol=1e-10, atol=1e-10)
    assert tuple(z.shape[1:]) == flow.out_shape(tuple(x.shape[1:])) and logdet.shape == (len(x),)
    assert tuple(x.shape[1:]) == flow.in_shape(tuple(z.shape[1:]))
    for row in range(len(x)):
        own = None if cond is None else cond[row : row + 1]

        def one(flat, own=own):
            return flow(flat.reshape(1, *x.shape[1:]), own)[0].flatten()

        def back_one(flat, own=own):
            return flow.inverse(flat.reshape(1, *z.shape[1:]), own)[0].flatten()

        for value, function, returned in ((x, one, logdet), (z, back_one, inverse_logdet)):
            jacobian = torch.autograd.functional.jacobian(function, value[row].flatten())
            assert float(returned[row]) == pytest.approx(float(torch.linalg.slogdet(jacobian).logabsdet), abs=1e-8)


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("name", FLOWS)
def test_jacobian_and_round_trip(name, conditional):
    build, shape = FLOWS[name]
    flow = shaken(build(LABELS if conditional else None), 0.3)
    conditional = conditional and flow.uses_cond
    x = torch.randn(3, *shape, generator=source(), dtype=torch.float64)
    cond = torch.tensor([2, 0, 1]) if conditional else None
    checked(flow, x, cond)
    if conditional:
        assert not torch.equal(flow(x, cond)[0], flow(x, cond.flip(0))[0])


class HalfCounted(FactorOut):
    """The volume of one channel only."""

    def _volume(self, log_scale, mask):
        return super()._volume(log_scale[:, :1], mask)


class Swapped(MultiScale):
    """Keeps the half that should leave."""

    def _inverse(self, z, cond, mask):
        x, logdet = super()._inverse(z, cond, mask)
        return x.flip(1), logdet


@pytest.mark.parametrize("bug", ["half counted", "swapped"])
def test_mutants(bug):
    flow = vectors()
    if bug == "half counted":
        flow.factors[0] = HalfCounted(8, flow.factors[0].prior)
    else:
        flow.__class__ = Swapped
    with pytest.raises(AssertionError):
        checked(shaken(flow, 0.3), torch.randn(2, 8, generator=source(), dtype=torch.float64))


# ---- factor-out ----


class Constant(nn.Module):
    uses_cond = False

    def __init__(self, mean, log_scale):
        super().__init__()
        self.values = (mean, 5 * math.atanh(log_scale / 5))

    def forward(self, x, cond=None, mask=None):
        return torch.cat([torch.full_like(x, value) for value in self.values], dim=1)


def test_vector_of_the_factor_out():
    factor = FactorOut(2, Constant(0.5, math.log(2)))
    z, logdet = factor(torch.tensor([[0.0, 1.5]], dtype=torch.float64))
    log_normal = -0.5 * z[0, 1].square() - 0.5 * math.log(2 * math.pi) + logdet[0]
    assert float(log_normal) == pytest.approx(-1.7370857138, abs=1e-8)
    sample, _ = factor.inverse(torch.tensor([[0.0, 0.7 * 1.0]], dtype=torch.float64))
    assert float(sample[0, 1]) == pytest.approx(1.9, abs=1e-8)


def test_factor_out_without_prior_is_the_identity():
    x = torch.randn(2, 4, 3)
    assert torch.equal(FactorOut(4)(x)[0], x) and torch.equal(FactorOut(4)(x)[1], torch.zeros(2))
    assert FactorOut(4).constant_logdet and not FactorOut(4, prior(4, 1)).constant_logdet


def test_a_prior_starts_as_the_identity_and_leaves_what_stays_alone():
    x = torch.randn(2, 4, 3, 3, generator=source(), dtype=torch.float64)
    factor = FactorOut(4, prior(4, 2)).double()
    assert torch.equal(factor(x)[0], x)
    assert torch.equal(shaken(factor, 0.3)(x)[0][:, :2], x[:, :2]) and not torch.equal(factor(x)[0], x)


def test_log_scales_are_bounded():
    factor = FactorOut(2, Constant(0.0, 0.0))
    for raw in (-1e9, 1e9):
        factor.prior.values = (0.0, raw)
        z, logdet = factor(torch.ones(1, 2))
        assert abs(float(logdet)) == pytest.approx(5) and z.isfinite().all()


def test_networks_in_half_precision_leave_the_state_alone():
    flow = images()
    with torch.autocast("cpu", torch.bfloat16):
        z, logdet = flow(torch.randn(2, 1, 4, 4))
    assert z.dtype == logdet.dtype == torch.float32 and z.isfinite().all()


# ---- masks ----


def padded_is_unpadded(flow):
    x = torch.randn(3, 2, 16, generator=source(3), dtype=torch.float64)
    lengths = [16, 8, 4]
    mask = torch.arange(16)[None, None] < torch.tensor(lengths)[:, None, None]
    flat = flow.out_mask(mask)
    assert torch.equal(flow.in_mask(flat), mask) and flat.shape == (3, 32)
    for content in (0.0, math.nan):
        filled = x.masked_fill(~mask, content)
        z, logdet = flow(filled, None, mask)
        assert not z.masked_fill(flat, 0).any()
        back, inverse_logdet = flow.inverse(z.masked_fill(~flat, content), None, flat)
        torch.testing.assert_close(back, x.masked_fill(~mask, 0), rtol=1e-10, atol=1e-10)
        for row, length in enumerate(lengths):
            alone, alone_logdet = flow(x[row : row + 1, :, :length])
            torch.testing.assert_close(z[row][flat[row]], alone[0], rtol=0, atol=1e-12)
            torch.testing.assert_close(logdet[row], alone_logdet[0], rtol=0, atol=1e-12)
            torch.testing.assert_close(inverse_logdet[row], -alone_logdet[0], rtol=0, atol=1e-10)


def test_padded_is_unpadded():
    padded_is_unpadded(shaken(sequences(), 0.3))


class CountsPadding(FactorOut):
    """The volume of masked frames too."""

    def _volume(self, log_scale, mask):
        return super()._volume(log_scale, None)


def test_mutant_padding_counts():
    flow = sequences()
    flow.factors[0] = CountsPadding(4, Constant(0.1, 0.4))
    with pytest.raises(AssertionError):
        padded_is_unpadded(shaken(flow, 0.3))


def test_mask_inside_a_composition():
    flow = Compose([Squeeze1d(), MultiScale([Bend(4), Bend(2)], [FactorOut(4)], (4, None))], (2, None)).double()
    mask = torch.arange(6)[None, None] < torch.tensor([6, 2])[:, None, None]
    x = torch.randn(2, 2, 6, dtype=torch.float64)
    z, _ = flow(x, None, mask)
    torch.testing.assert_close(flow.inverse(z, None, flow.out_mask(mask))[0], x.masked_fill(~mask, 0))


# ---- temperature ----


class Linear(Bijection):
    """A fixed mixing of channels."""

    def __init__(self, channels):
        super().__init__()
        matrix = torch.randn(channels, channels, generator=source(5), dtype=torch.float64)
        self.register_buffer("matrix", matrix + 2 * torch.eye(channels))

    def _forward(self, x, cond, mask):
        return x @ self.matrix.T, torch.linalg.slogdet(self.matrix).logabsdet.expand(len(x))

    def _inverse(self, z, cond, mask):
        return torch.linalg.solve(self.matrix, z.T).T, -torch.linalg.slogdet(self.matrix).logabsdet.expand(len(z))


class LinearPrior(nn.Module):
    """The mean is linear in what stays, the scale is constant: the flow stays linear."""

    uses_cond = False

    def forward(self, x, cond=None, mask=None):
        return torch.cat([0.7 * x.flip(1), torch.full_like(x, -0.4)], dim=1)


def covariance_scales(sample, temperature, n=40_000):
    warm, cold = sample(1.0, n), sample(temperature, n)
    expected = temperature**2 * torch.cov(warm.T)
    # Var of a sample covariance of Gaussians: (C_ii C_jj + C_ij^2) / n, and both sides are samples.
    error = ((torch.outer(expected.diag(), expected.diag()) + expected.square()) * 2 / n).sqrt()
    assert bool(((torch.cov(cold.T) - expected).abs() < 4 * error).all())


@pytest.mark.parametrize("temperature", [0.3, 0.7])
def test_temperature_reaches_every_scale(temperature):
    flow = MultiScale([Linear(8), Linear(4)], [FactorOut(8, LinearPrior())], (8,))

    def sample(t, n):
        z = t * torch.randn(n, 8, generator=source(int(10 * t)), dtype=torch.float64)
        return flow.inverse(z)[0]

    def one_scale_only(t, n):
        z = torch.randn(n, 8, generator=source(int(10 * t)), dtype=torch.float64)
        return flow.inverse(torch.cat([z[:, :4], t * z[:, 4:]], dim=1))[0]

    covariance_scales(sample, temperature)
    with pytest.raises(AssertionError):
        covariance_scales(one_scale_only, temperature)


# ---- structure ----


class NeedsData(Bijection):
    """Divides by the largest value it was initialised with."""

    def __init__(self):
        super().__init__()
        self.most, self.ready = 1.0, False

    def uninitialized(self, name=""):
        if not self.ready:
            yield name

    def initialize(self, x, cond=None, mask=None, *, force=False):
        self.most, self.ready = float(x.abs().max()), True

    def _forward(self, x, cond, mask):
        return x / self.most, x.new_full((len(x),), -x[0].numel() * math.log(self.most))


def test_initialisation_runs_in_order():
    flow = MultiScale([NeedsData(), Compose([Bend(2), NeedsData()], (2,))], [FactorOut(4)], (4,))
    assert list(flow.uninitialized()) == ["stages.0", "stages.1.layers.1"]
    x = torch.tensor([[3.0, 1.5, 6.0, 0.0]])
    flow.initialize(x)
    assert not list(flow.uninitialized())
    assert flow.stages[0].most == 6.0 and flow.stages[1].layers[1].most == pytest.approx(math.sinh(0.5))


@pytest.mark.parametrize("name", ["vectors", "sequences", "images"])
def test_walk_shows_every_layer_and_ends_with_the_result(name):
    build, shape = FLOWS[name]
    flow = shaken(build(LABELS), 0.3)
    x, cond = torch.randn(2, *shape, dtype=torch.float64), torch.tensor([1, 2])
    mask = torch.arange(8)[None, None] < torch.tensor([8, 4])[:, None, None] if name == "sequences" else None
    z, logdet = flow(x, cond, mask)
    steps = list(flow.walk(x, cond, mask, "top"))
    assert torch.equal(steps[-1].z, z)
    torch.testing.assert_close(sum(step.logdet for step in steps), logdet, rtol=0, atol=1e-12)
    for step in steps:
        again, _ = step.layer(step.x, step.cond, step.mask)
        assert torch.equal(again, step.z) and step.name.startswith("top.")
        if step.name != "top.latents":
            assert dict(flow.named_modules())[step.name.removeprefix("top.")] is step.layer


def test_static_facts():
    assert vectors().uses_cond is False and vectors(LABELS).uses_cond is True
    flow = MultiScale([Flip(4), Flip(2)], [FactorOut(4)], (4,))
    assert flow.constant_logdet and flow.exact_inverse and flow.inverse_cost == "same"
    assert not vectors().constant_logdet
    flow.stages[0].inverse_cost, flow.stages[0].exact_inverse = "iterative", False
    again = MultiScale(list(flow.stages), list(flow.factors), (4,))
    assert again.inverse_cost == "iterative" and not again.exact_inverse


def test_conditions_are_checked():
    x = torch.zeros(1, 8)
    with pytest.raises(ValueError, match="needs cond"):
        vectors(LABELS)(x)
    with pytest.raises(ValueError, match="leave cond out"):
        vectors()(x, torch.tensor([0]))


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: FactorOut(3), "must be even, got 3"),
        (lambda: FactorOut(0), "must be even, got 0"),
        (lambda: MultiScale([Flip(4)], [FactorOut(4)], (4,)), "1 stages need one factor-out fewer, got 1"),
        (lambda: MultiScale([Flip(4), Flip(4)], [FactorOut(4)], (4,)), r"stage 1 does not take \(2,\)"),
        (lambda: MultiScale([Flip(4), Flip(2)], [FactorOut(6)], (4,)), r"factor 0 does not take \(4,\)"),
        (lambda: MultiScale([Flip(4)], [], (4, None, None)), "one length may be open"),
        (lambda: vectors().out_shape((9,)), r"takes events of shape \(8,\), got \(9,\)"),
        (lambda: images().inverse(torch.zeros(1, 15)), r"takes events of shape \(16,\), got \(15,\)"),
        (lambda: sequences().inverse(torch.zeros(1, 18)), "multiple|divisible|does not take|takes events"),
        (lambda: sequences()(torch.zeros(1, 2, 6)), "stage 1 does not take"),
    ],
)
def test_misfits(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_open_lengths():
    flow = sequences()
    assert flow.out_shape((2, None)) == (None,) and flow.in_shape((None,)) == (2, None)
    assert flow.out_shape((2, 12)) == (24,) and flow.in_shape((24,)) == (2, 12)
    assert flow.scale_shapes((2, 8)) == [(2, 4), (2, 2), (2, 2)]
    assert sequences(length=8).out_shape((2, 8)) == (16,) and sequences(length=8).in_shape((16,)) == (2, 8)
    with pytest.raises(ValueError, match="takes events of shape"):
        flow.in_shape((23,))


# ---- latents ----


def test_latents_are_the_scales_fine_to_coarse():
    flow = shaken(images(), 0.3)
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    z, _ = flow(x)
    latents = Latents.unflatten(z, flow.scale_shapes((1, 4, 4)))
    assert [scale.shape[1:] for scale in latents.scales] == [(2, 2, 2), (8, 1, 1)]
    assert torch.equal(latents.flatten(), z) and len(latents) == 2
    y, _ = flow.factors[0](flow.stages[0](x)[0])
    assert torch.equal(latents[0], y[:, 2:]) and torch.equal(latents[1], flow.stages[1](y[:, :2])[0])
    assert torch.equal(latents.rows(slice(1, 2))[0], latents[0][1:])
    with pytest.raises(ValueError, match="hold 5 values"):
        Latents.unflatten(z, [(5,)])


def drawn(seed, n=1):
    return Latents((torch.randn(n, 3, 2, generator=source(seed)), torch.randn(n, 5, generator=source(seed + 50))))


def test_interpolation_ends_are_exact():
    start, end = drawn(1, 4), drawn(2, 4)
    strip = start.interpolate(end, torch.linspace(0, 1, 5))
    assert strip[0].shape == (20, 3, 2) and strip[1].shape == (20, 5)
    for scale in range(2):
        frames = strip[scale].unflatten(0, (4, 5))
        assert torch.equal(frames[:, 0], start[scale]) and torch.equal(frames[:, -1], end[scale])
    middle = start.interpolate(end, 0.5)
    torch.testing.assert_close(middle[1], (start[1] + end[1]) / math.sqrt(2))
    torch.testing.assert_close(middle[0], strip[0].unflatten(0, (4, 5))[:, 2])


def keeps_the_norm(between):
    start, end = drawn(3, 4000), drawn(4, 4000)
    for w in (0.1, 0.35, 0.5, 0.8):
        z = between(start, end, w).flatten()
        assert abs(float(z.var()) - 1) < 4 * math.sqrt(2 / z.numel())


def test_interpolation_keeps_the_norm():
    keeps_the_norm(Latents.interpolate)

    def straight(start, end, w):
        return Latents(tuple((1 - w) * a + w * b for a, b in zip(start.scales, end.scales, strict=True)))

    with pytest.raises(AssertionError):
        keeps_the_norm(straight)


def test_interpolation_needs_like_shapes():
    with pytest.raises(ValueError, match="different shapes"):
        drawn(1).interpolate(Latents((torch.zeros(1, 3, 2),)), 0.5)


def test_initialisation_computes_every_layer_once_however_deep_it_is_nested():
    calls = []

    class Counted(Shift):
        def _forward(self, x, cond, mask):
            calls.append(1)
            return super()._forward(x, cond, mask)

    counted = Counted(torch.zeros(2))
    stage = Compose([Compose([Compose([counted, ActNorm(2)], (2, 2, 2))], (2, 2, 2))], (2, 2, 2))
    flow = MultiScale([stage], [], (2, 2, 2))
    flow.initialize(torch.randn(8, 2, 2, 2, generator=torch.Generator().manual_seed(0)))
    assert len(calls) == 1 and not list(flow.uninitialized())
