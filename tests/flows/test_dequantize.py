"""Dequantisation: the volume it counts, the density of its noise, and cells that are never left."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.random import KeyedGenerator
from genmodels.core.tensors import event_sum
from genmodels.flows.bijection import Bijection, Inverse
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling
from genmodels.flows.dequantize import GaussianNoise, OfLevel, UniformDequantize, VariationalDequantize, noise_condition
from genmodels.flows.elementwise import Affine
from genmodels.flows.scaling import ActNorm, Logit, Scale
from genmodels.nn.coupling_networks import ConvNet
from genmodels.nn.perceptron import MLP
from genmodels.verification.bijections import check_bijection
from tests.parameters import shaken

LEVELS = [2, 3, 17, 100, 255, 256, 1000, 65536]


def source(seed=0):
    return torch.Generator().manual_seed(seed)


class Tilt(Bijection):
    """a = (0.3 + 0.5 c) + exp(0.2 c) eps, with c the integer scaled to [-1, 1]: one can see through this flow."""

    uses_cond = True

    def _forward(self, x, cond, mask):
        volume = 0.2 * cond if mask is None else (0.2 * cond).masked_fill(~mask, 0)
        return 0.3 + 0.5 * cond + torch.exp(0.2 * cond) * x, event_sum(volume)


def noise_flow(shape):
    """A conditional flow with networks, the same in whatever order tests run."""
    torch.manual_seed(0)
    channels, dims = shape[0], len(shape) - 1
    layers = []
    for swap in (False, True):
        split = ChannelSplit(channels, swap=swap)
        element = Affine(split.changed)
        out, condition = element.params_per_dim * split.changed, noise_condition(shape)
        if dims:
            net = ConvNet(split.kept, out, hidden=8, dims=dims, cond=condition)
        else:
            net = MLP(split.kept, out, hidden=8, cond=condition)
        layers.append(Coupling(split, element, net))
    return Compose(layers, shape)


EVENTS = {"vectors": (4,), "sequences": (2, 6), "images": (2, 4, 4)}


# ---- uniform ----


def test_vector_of_the_logit_of_dequantised_integers():
    x, half = torch.tensor([[0, 127, 255]]), torch.full((1, 3), 0.5, dtype=torch.float64)
    v, contribution = UniformDequantize(256).double().with_noise(x, half)
    z, logdet = Logit(0.05)(v)
    expected = torch.tensor([[-2.9080345547, -0.0070312790, 2.9080345547]], dtype=torch.float64)
    torch.testing.assert_close(z, expected, rtol=0, atol=1e-8)
    assert float(logdet + contribution) == pytest.approx(-9.5366567009, abs=1e-8)
    terms = torch.cat([Logit(0.05)(v[:, i : i + 1])[1] for i in range(3)])
    expected = torch.tensor([2.9089647137, 1.2809462052, 2.9089647137], dtype=torch.float64)
    torch.testing.assert_close(terms, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_stay_in_their_cells(levels, dtype):
    """Whatever the noise, ends of the interval included, the integers are found again and v < 1."""
    x = torch.arange(levels)[:, None].expand(-1, 8)
    tiny = 2.0**-24 if dtype == torch.float32 else 2.0**-53
    u = torch.tensor([0.0, tiny, 2.0**-17, 0.5, 1 - 2.0**-17, 1 - 2.0**-24, 1 - tiny, 1.0], dtype=dtype)
    dequantize = UniformDequantize(levels).to(dtype)
    v, _ = dequantize.with_noise(x, u.expand(levels, -1))
    assert v.dtype == dtype and bool((v >= 0).all()) and bool((v < 1).all())
    back = dequantize.to_levels(v)
    assert torch.equal(back.long(), x) and back.dtype == (torch.uint8 if levels <= 256 else torch.int64)
    assert torch.equal(dequantize.to_levels(dequantize.centre(x)).long(), x)
    assert bool(torch.isfinite(Logit(0.05)(v)[0]).all())


def test_mutant_without_the_guard():
    """Noise just below one, in float32: the plain formula gives v = 1, or the cell of another integer."""
    u = torch.tensor(1 - 2.0**-17)
    plain = (torch.tensor(255) + u) / 256
    assert float(plain) == 1.0
    v, _ = UniformDequantize(256).with_noise(torch.tensor([[255]]), u.reshape(1, 1))
    assert float(v) == 1 - 2.0**-24
    inside = (torch.tensor(128) + u) / 256
    assert int((inside.double() * 256).floor()) == 129


@pytest.mark.parametrize("kind", ["keyed", "torch"])
def test_noise_is_uniform(kind):
    rows = 20_000
    generator = source() if kind == "torch" else KeyedGenerator(0, torch.arange(rows), "noise")
    v, contribution = UniformDequantize(4)(torch.full((rows, 3), 2), generator)
    u = 4 * v.double() - 2
    n = u.numel()
    assert abs(float(u.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / n)
    assert abs(float((u - 0.5).square().mean()) - 1 / 12) < 4 * math.sqrt((1 / 80 - 1 / 144) / n)
    torch.testing.assert_close(contribution, torch.full((rows,), -3 * math.log(4)))


def test_integers_outside_the_cells_take_the_end_levels():
    v = torch.tensor([-3.0, -1e-9, 1.0, 7.5])
    assert UniformDequantize(17).to_levels(v).tolist() == [0, 0, 16, 16]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_all_kinds_of_integers(dtype):
    x = torch.tensor([[0, 1]]).to(dtype)
    v, _ = UniformDequantize(256)(x, source())
    assert UniformDequantize(256).to_levels(v).tolist() == [[0, 1]]
    top = torch.tensor([[255]], dtype=torch.uint8)
    assert UniformDequantize(256).to_levels(UniformDequantize(256)(top, source())[0]).item() == 255


def test_errors():
    for levels in (0, 1):
        with pytest.raises(ValueError, match="levels must be at least 2"):
            UniformDequantize(levels)
    with pytest.raises(ValueError, match="must be a whole number, got 2.5"):
        UniformDequantize(2.5)
    with pytest.raises(ValueError, match="takes integers 0..3"):
        UniformDequantize(4)(torch.zeros(1, 2), source())
    for value in (-1, 4):
        with pytest.raises((IndexError, RuntimeError)):
            UniformDequantize(4)(torch.full((1, 2), value), source())
    with pytest.raises(ValueError, match="needs a condition"):
        VariationalDequantize(4, ActNorm(2))


# ---- variational ----


def density_is_that_of_the_noise(dequantize):
    """q(u|x) is logit-normal here: its closed form, with u read off the points."""
    x = torch.randint(4, (50, 3), generator=source(1))
    v, contribution = dequantize(x, source(2))
    u = 4 * v - x
    scaled = 2 * x.double() / 3 - 1
    standard = (torch.logit(u) - 0.3 - 0.5 * scaled) * torch.exp(-0.2 * scaled)
    log_q = -0.5 * standard.square() - 0.5 * math.log(2 * math.pi) - 0.2 * scaled - torch.log(u) - torch.log(1 - u)
    torch.testing.assert_close(contribution, -3 * math.log(4) - log_q.sum(1), rtol=0, atol=1e-8)


class SignOfTheLogDet(Tilt):
    def _forward(self, x, cond, mask):
        z, logdet = super()._forward(x, cond, mask)
        return z, -logdet


class NoSigmoid(VariationalDequantize):
    """Leaves out the volume of the sigmoid."""

    def _spread(self, x, noise, mask):
        a, logdet = self.bijection(noise, self._condition(x, mask), mask)
        log_normal = event_sum(-0.5 * noise.square() - 0.5 * math.log(2 * math.pi))
        return torch.sigmoid(a), log_normal - logdet


def test_density_of_the_noise():
    density_is_that_of_the_noise(VariationalDequantize(4, Tilt()).double())
    of_level, scaled = OfLevel(4), torch.linspace(-1, 1, 4, dtype=torch.float64)
    of_level.table.data = torch.stack([0.3 + 0.5 * scaled, 0.2 * scaled])  # the same by a table
    density_is_that_of_the_noise(VariationalDequantize(4, of_level).double())
    for bug in (NoSigmoid(4, Tilt()), VariationalDequantize(4, SignOfTheLogDet())):
        with pytest.raises(AssertionError):
            density_is_that_of_the_noise(bug.double())


def test_the_noise_of_a_level_inverts_and_knows_all_levels():
    layer, cond = shaken(OfLevel(256)), (2 * torch.arange(256).double() / 255 - 1).expand(3, 1, 256)
    eps = torch.randn(3, 1, 256, generator=source(), dtype=torch.float64)
    a, logdet = layer(eps, cond)
    back, reverse = layer.inverse(a, cond)
    torch.testing.assert_close(back, eps, rtol=0, atol=1e-12)
    torch.testing.assert_close(logdet, -reverse, rtol=0, atol=1e-10)
    scaled = 2 * torch.arange(256).float() / 255 - 1  # as float32 has it
    assert torch.equal(layer(torch.zeros_like(eps), scaled.double().expand_as(eps))[0][0, 0], layer.table[0])


class OfTheFirstLevel(OfLevel):
    """Ignores the level."""

    def _of_level(self, cond):
        return super()._of_level(torch.full_like(cond, -1))


def half_of_the_noise_lies_below_the_centre(dequantize):
    x = torch.arange(4)[None].expand(2000, -1)
    below = (dequantize(x, source())[0] < dequantize.centre(x)).double().mean(0)
    assert bool(((below - 0.5).abs() < 5 * math.sqrt(0.25 / len(x))).all()), below


class Middle(VariationalDequantize):
    """A mutant: the middle of the cell, where noise of other shapes may have no density."""

    def centre(self, x, cond=None, mask=None):
        return (x + 0.5) / self.levels


def test_the_centre_is_the_median_of_the_noise():
    for_levels = OfLevel(4)
    with torch.no_grad():
        for_levels.table.copy_(torch.tensor([[-2.0, -0.5, 0.5, 3.0], [0.0, -1.0, 0.5, -2.0]]))
    every = [UniformDequantize(4), GaussianNoise(4, 0.3), VariationalDequantize(4, for_levels)]
    for dequantize in every:
        half_of_the_noise_lies_below_the_centre(dequantize)
    with pytest.raises(AssertionError):
        half_of_the_noise_lies_below_the_centre(Middle(4, for_levels))


def test_every_check_of_bijections_holds_for_the_noise_of_a_level():
    cond = 2 * torch.randint(5, (3, 2, 3, 3), generator=source()) / 4 - 1.0
    for layer in (OfLevel(5), Inverse(OfLevel(5)), Compose([OfLevel(5), Scale(2.0)], (2, 3, 3))):
        check_bijection(layer, (2, 3, 3), cond=cond, compiler="eager").raise_if_failed()
    assert "condition" in check_bijection(OfTheFirstLevel(5), (2, 3, 3), cond=cond, compiler=None).failed
    assert not Compose([OfLevel(5), Tilt()], (2, 3, 3)).rounds_cond  # a gradient is due where any part has one


def averages_to_the_volume(dequantize, shape):
    """E_q [1 / q(u|x)] is the volume of the cube of noise, one: the mean of exp(contribution + D log L)."""
    rows = 20_000
    x = torch.randint(4, (1, *shape), generator=source(3)).expand(rows, *shape)
    _, contribution = dequantize(x, source(4))
    ratio = torch.exp(contribution + math.prod(shape) * math.log(4))
    assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / math.sqrt(rows)


def test_inverse_densities_average_to_the_volume():
    averages_to_the_volume(shaken(VariationalDequantize(4, noise_flow((2,)))), (2,))
    with pytest.raises(AssertionError):
        averages_to_the_volume(NoSigmoid(4, Tilt()).double(), (2,))


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_variational_noise_of_every_kind_of_event(name, dtype):
    shape = EVENTS[name]
    dequantize = shaken(VariationalDequantize(17, noise_flow(shape))).to(dtype)
    x = torch.randint(17, (5, *shape), generator=source(), dtype=torch.uint8)
    v, contribution = dequantize(x, source())
    assert v.dtype == contribution.dtype == dtype and v.shape == x.shape and contribution.shape == (5,)
    assert bool((v < 1).all()) and torch.equal(dequantize.to_levels(v), x)
    other = dequantize.with_noise(x.flip(0), dequantize.noise(tuple(x.shape), source()))[1]
    assert not torch.allclose(other, contribution)  # the noise listens to x


@pytest.mark.parametrize("kind", ["uniform", "variational"])
def test_masked_frames_count_for_nothing(kind):
    shape = (2, 6)
    dequantize = UniformDequantize(5) if kind == "uniform" else VariationalDequantize(5, noise_flow(shape))
    shaken(dequantize)
    lengths = [6, 4, 1]
    mask = torch.arange(6)[None, None] < torch.tensor(lengths)[:, None, None]
    x = torch.randint(5, (3, *shape), generator=source())
    noise = dequantize.noise((3, *shape), source(1))
    for content in (0, 4, 77):  # 77 is no level at all
        v, contribution = dequantize.with_noise(x.masked_fill(~mask, content), noise, mask)
        assert not v.masked_fill(mask, 0).any()
        for row, length in enumerate(lengths):
            alone = dequantize.with_noise(x[row : row + 1, :, :length], noise[row : row + 1, :, :length])
            torch.testing.assert_close(v[row, :, :length], alone[0][0], rtol=0, atol=1e-12)
            torch.testing.assert_close(contribution[row], alone[1][0], rtol=0, atol=1e-12)


def test_gradients_train_the_noise():
    dequantize = shaken(VariationalDequantize(4, noise_flow((2,))))
    dequantize.requires_grad_(True)
    v, contribution = dequantize(torch.randint(4, (64, 2)), source())
    (contribution.sum() + v.square().sum()).backward()
    for name, parameter in dequantize.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_initialisation():
    flow = Compose([ActNorm(2), Tilt()], (2,))
    dequantize = VariationalDequantize(4, flow).double()
    assert list(dequantize.uninitialized()) == ["bijection.layers.0"]
    dequantize.initialize(torch.randint(4, (500, 2), generator=source()), source(1))
    assert not list(dequantize.uninitialized())
    noise = dequantize.noise((500, 2), source(1))
    started, _ = flow.layers[0](noise)
    torch.testing.assert_close(started.mean(0), torch.zeros(2).double(), rtol=0, atol=1e-6)
    assert not list(UniformDequantize(4).uninitialized())


def test_only_learned_tensors_are_saved():
    assert not UniformDequantize(256).state_dict()
    assert all("low" not in key and "high" not in key for key in VariationalDequantize(4, Tilt()).state_dict())
