"""Fixed maps of single numbers: values, volumes, ends, and the statistics of data."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import softplus

from genmodels.flows.bijection import per_example
from genmodels.flows.composition import Compose
from genmodels.flows.scaling import Logit, Scale, Shift, Standardise
from genmodels.verification.bijections import check_bijection


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class WithoutSlope(Logit):
    """Forgets log(1 - 2 alpha)."""

    def _forward(self, v, cond, mask):
        z, logdet = super()._forward(v, cond, mask)
        return z, logdet - v[0].numel() * math.log1p(-2 * self.alpha)


class PaddedVolume(Logit):
    """Counts the volume of padding, where v = 0 too."""

    def _forward(self, v, cond, mask):
        return super()._forward(v, cond, None)


class OneChannel(Scale):
    """Counts a common factor once per position, whatever the number of channels."""

    def _volume(self, x):
        return self.values.to(x.dtype).abs().log().sum()


@pytest.mark.parametrize("mutant, shape, check", [
    (WithoutSlope(0.05), (2, 3), "log-det forward"),
    (PaddedVolume(0.05), (2, 4), "masked log-det"),
    (OneChannel(2.0), (2, 3), "log-det forward"),
])  # fmt: skip
def test_checks_catch_mutants(mutant, shape, check):
    assert check in check_bijection(mutant, shape, compiler=None).failed


# ---- logit ----


def test_vector():
    """256 levels, x = (0, 127, 255), u = 1/2, alpha 0.05."""
    v = (torch.tensor([0.0, 127.0, 255.0], dtype=torch.float64) + 0.5) / 256
    z, logdet = Logit(0.05)(v[None])
    assert z[0].tolist() == pytest.approx([-2.9080345547, -0.0070312790, 2.9080345547], abs=1e-8)
    assert float(logdet) - 3 * math.log(256) == pytest.approx(-9.5366567009, abs=1e-8)
    single = [float(Logit(0.05)(value.reshape(1, 1))[1]) for value in v]
    assert single == pytest.approx([2.9089647137, 1.2809462052, 2.9089647137], abs=1e-8)


def volumes_agree(layer):
    """Both directions' volumes cancel at latents of any size: sp(z) + sp(-z) is more than |z|."""
    z = torch.linspace(-30, 30, 121, dtype=torch.float64)[:, None]
    _, volume = layer.inverse(z)
    expected = math.log1p(-2 * layer.alpha) + z.abs() + 2 * torch.log1p(torch.exp(-z.abs()))
    torch.testing.assert_close(volume, -expected[:, 0], rtol=1e-15, atol=1e-14)


class SoftplusVolume(Logit):
    """Torch's softplus is linear beyond 20."""

    def _inverse(self, z, cond, mask):
        v, _ = super()._inverse(z, cond, mask)
        return v, -per_example(math.log1p(-2 * self.alpha) + softplus(z) + softplus(-z))


def test_volume_of_far_latents():
    volumes_agree(Logit(0.05))
    with pytest.raises(AssertionError):
        volumes_agree(SoftplusVolume(0.05))


@pytest.mark.parametrize("alpha", [0.05, 1e-5])
def test_both_ends_alike_in_float32(alpha):
    """v and 1 - v give opposite latents, and the ends finite ones: 0 and 1 are what dequantisation may hand over."""
    layer = Logit(alpha)
    v = torch.tensor([0.0, 2.0**-20, 2.0**-9, 0.25])
    low, high = layer(v[None])[0], layer(1 - v[None])[0]
    torch.testing.assert_close(low, -high, rtol=1e-6, atol=0)
    assert float(high[0, 0]) == pytest.approx(math.log((1 - alpha) / alpha), rel=1e-6)


def test_the_inverse_does_not_clip():
    latents = torch.tensor([[-6.0, 6.0]], dtype=torch.float64)
    v, _ = Logit(0.05).inverse(latents)
    assert v[0, 0] < 0 and v[0, 1] > 1
    torch.testing.assert_close(Logit(0.05)(v)[0], latents, rtol=1e-12, atol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, -0.1, 0.7, math.nan])
def test_alpha_leaves_room_on_both_sides(alpha):
    with pytest.raises(ValueError, match="alpha must lie between 0 and 1/2"):
        Logit(alpha)


# ---- scale and shift ----


def test_one_number_or_one_per_channel():
    x = gaussian(2, 3, 4)
    z, logdet = Scale(torch.tensor([2.0, -4.0, 0.5]))(x)
    torch.testing.assert_close(z, x * torch.tensor([2.0, -4.0, 0.5]).double()[:, None])
    assert logdet.tolist() == pytest.approx([4 * math.log(4)] * 2)
    assert Scale(2.0)(x)[1].tolist() == pytest.approx([12 * math.log(2)] * 2)
    mask = (torch.arange(4) < torch.tensor([[4], [1]]))[:, None]
    assert Scale(2.0)(x, mask=mask)[1].tolist() == pytest.approx([12 * math.log(2), 3 * math.log(2)])
    shifted, logdet = Shift(torch.tensor([1.0, 2.0, 3.0]))(x, mask=mask)
    assert torch.equal(shifted[1, :, 1:], torch.zeros(3, 3).double()) and logdet.tolist() == [0, 0]
    assert torch.equal(Shift(torch.tensor(-0.5))(x)[0], x - 0.5)


def test_they_are_saved_and_do_not_train():
    layer, other = Scale(torch.tensor([2.0, 3.0])), Scale(torch.tensor([1.0, 1.0]))
    other.load_state_dict(layer.state_dict())
    assert other(torch.ones(1, 2))[0].tolist() == [[2.0, 3.0]] and not list(layer.parameters())


@pytest.mark.parametrize("make, message", [
    (lambda: Scale(0.0), "zero cannot be undone"),
    (lambda: Scale(torch.tensor([1.0, 0.0])), "zero cannot be undone"),
    (lambda: Scale(math.inf), "Scale takes a finite number"),
    (lambda: Shift(torch.zeros(2, 2)), "Shift takes a finite number, or one per channel"),
    (lambda: Shift(torch.tensor([1, 2])), "Shift takes a finite number"),
    (lambda: Scale(torch.ones(2))(torch.ones(1, 3)), r"Scale takes events of shape \(2, ...\), got \(3,\)"),
    (lambda: Standardise((2, None))(torch.ones(1, 2)), r"Standardise takes events of shape \(2, T\), got \(2,\)"),
    (lambda: Standardise((2, 4, 4))(torch.ones(1, 2, 4, 5)), r"shape \(2, 4, 4\), got \(2, 4, 5\)"),
])  # fmt: skip
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- statistics of the training data ----


@pytest.mark.parametrize("shape", [(3,), (3, 6), (3, 2, 4)])
def test_standardise(shape):
    spread = torch.tensor([1e-5, 1.0, 1e5]).double().reshape(-1, *[1] * (len(shape) - 1))
    x = spread * (gaussian(20, *shape) + 5)
    layer = Standardise((3, None) if len(shape) == 2 else shape).double()
    assert list(layer.uninitialized()) == ["Standardise"]
    layer.initialize(x)
    z, logdet = layer(x)
    axes = [0, *range(2, len(shape) + 1)]
    torch.testing.assert_close(z.mean(axes), torch.zeros(3).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(z.std(axes, correction=0), torch.ones(3).double(), rtol=1e-12, atol=0)
    expected = -math.prod(shape[1:]) * float(x.std(axes, correction=0).log().sum())
    assert logdet.tolist() == pytest.approx([expected] * 20, rel=1e-12)
    assert not list(layer.parameters()) and not list(layer.uninitialized())
    with pytest.raises(RuntimeError, match="initialised already"):
        layer.initialize(x)


def test_a_constant_channel_is_centred():
    x = gaussian(8, 2)
    x[:, 1] = 0.1
    flow = Compose([Shift(0.0), Standardise((2,)).double()], (2,))
    with pytest.warns(UserWarning, match=r"layers.1 \(Standardise\): channels 1 are constant"):
        flow.initialize(x)
    z, _ = flow(x)
    assert torch.isfinite(z).all() and z[:, 1].abs().max() < 1e-12 and flow.layers[1].scale[1] == 1


def test_loading_brings_statistics_and_flag():
    layer, other = Standardise((2,)), Standardise((2,))
    layer.initialize(gaussian(8, 2) * 3 + 1)
    other.load_state_dict(layer.state_dict())
    x = gaussian(3, 2, seed=1).float()
    assert other.ready and torch.equal(other(x)[0], layer(x)[0])
