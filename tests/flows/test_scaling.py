"""ActNorm and what starts from data: moments, the flag, one process or two."""

from __future__ import annotations

import copy
import itertools
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from genmodels.core.tensors import event_sum
from genmodels.flows import scaling
from genmodels.flows.composition import Compose
from genmodels.flows.elementwise import per_channel
from genmodels.flows.linear import Flip, Whitening
from genmodels.flows.scaling import ActNorm, Logit, Scale, Shift, Standardise, channel_moments
from genmodels.verification.bijections import check_bijection
from tests.two_processes import fork, forked, joined


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lengths(total, *valid):
    return (torch.arange(total) < torch.tensor(valid)[:, None])[:, None]


def initialized(x, mask=None, layer=None):
    layer = ActNorm(x.shape[1]).double() if layer is None else layer
    layer.initialize(x, mask=mask)
    return layer


# ---- the map ----


class OnePosition(ActNorm):
    """A log-determinant without H W."""

    def _forward(self, x, cond, mask):
        z, logdet = super()._forward(x, cond, mask)
        return z, logdet / x[0, 0].numel()


class ShiftLast(ActNorm):
    """Scales before it shifts, in one direction."""

    def _forward(self, x, cond, mask):
        z, logdet = super()._forward(x, cond, mask)
        shift = self.bias * (1 - self.log_scale().exp())
        return z + shift.reshape(-1, *[1] * (x.dim() - 2)), logdet


class AllFrames(ActNorm):
    """Counts every frame, valid or not."""

    def _forward(self, x, cond, mask):
        return super()._forward(x, cond, None)


@pytest.mark.parametrize("mutant, shape, check", [
    (OnePosition, (3, 2, 4), "log-det forward"),
    (ShiftLast, (3, 2, 4), "round trip"),
    (AllFrames, (3, 6), "masked log-det"),
])  # fmt: skip
def test_checks_catch_mutants(mutant, shape, check):
    assert check in check_bijection(mutant(3), shape, compiler=None).failed


def test_vector():
    """Batch (1, 3), (5, 7) on one channel; then with the 7 masked."""
    x = torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]]], dtype=torch.float64)
    layer = initialized(x)
    z, logdet = layer(x)
    assert layer.bias.tolist() == pytest.approx([-4], abs=1e-8)
    assert layer.log_scale().tolist() == pytest.approx([-0.8047189562], abs=1e-8)
    assert logdet.tolist() == pytest.approx([-1.6094379124] * 2, abs=1e-8)
    assert [z.mean().item(), z.square().mean().item()] == pytest.approx([0, 1], abs=1e-12)
    mask = lengths(2, 2, 1)
    layer = initialized(x, mask)
    assert layer.bias.tolist() == pytest.approx([-3], abs=1e-8)
    assert layer.log_scale().tolist() == pytest.approx([-0.4904146265], abs=1e-8)
    assert layer(x, mask=mask)[1].tolist() == pytest.approx([-0.9808292530, -0.4904146265], abs=1e-8)


def test_log_scales_are_bounded():
    layer = ActNorm(2)
    with torch.no_grad():
        layer.raw_log_scale.copy_(torch.tensor([1e9, -1e9]))
    assert layer.log_scale().tolist() == [10.0, -10.0]
    z, _ = layer(torch.ones(1, 2))
    assert torch.isfinite(z).all() and torch.isfinite(layer.inverse(z)[0]).all()


def test_channels_of_any_width_leave_with_variance_one():
    widths = torch.tensor([1e-2, 1.0, 8e3, 1e6, 1e12], dtype=torch.float64)
    x = gaussian(500, 5) * widths
    layer = initialized(x)
    z, logdet = layer(x)
    torch.testing.assert_close(z.std(0, unbiased=False), torch.ones_like(widths), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.inverse(z)[0], x, rtol=1e-12, atol=0)
    assert float(logdet[0].detach()) == pytest.approx(-float(x.std(0, unbiased=False).log().sum()), rel=1e-6)
    assert (layer.offset == 0).tolist() == [True, True, True, False, False]
    layer.log_scale().sum().backward()
    assert float(layer.raw_log_scale.grad.min()) > 0.15
    copy = ActNorm(5).double()
    copy.load_state_dict(layer.state_dict())
    assert torch.equal(copy(x)[0], z)


def test_a_file_without_offsets_is_read():
    layer = initialized(gaussian(50, 3))
    old = {name: value for name, value in layer.state_dict().items() if name != "offset"}
    copy = ActNorm(3).double()
    copy.load_state_dict(old)
    assert torch.equal(copy.log_scale(), layer.log_scale()) and "offset" not in old


def test_second_derivatives():
    layer, x = initialized(gaussian(4, 2, 3)), gaussian(2, 2, 3, seed=1).requires_grad_()

    def run(x, bias, raw):
        z, logdet = torch.func.functional_call(layer, {"bias": bias, "raw_log_scale": raw}, (x,))
        return z, logdet

    parameters = [p.detach().clone().requires_grad_() for p in (layer.bias, layer.raw_log_scale)]
    assert torch.autograd.gradcheck(run, (x, *parameters)) and torch.autograd.gradgradcheck(run, (x, *parameters))


# ---- moments ----


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (6, 3, 2, 4)])
def test_standardises_the_batch(shape):
    x = gaussian(*shape) * torch.tensor([0.01, 1.0, 300.0]).double().reshape(-1, *[1] * (len(shape) - 2)) + 7
    z, _ = initialized(x)(x)
    axes = [0, *range(2, len(shape))]
    torch.testing.assert_close(z.mean(axes), torch.zeros(3).double(), rtol=0, atol=1e-11)
    torch.testing.assert_close(z.square().mean(axes), torch.ones(3).double(), rtol=1e-11, atol=0)


def test_padding_has_no_say():
    x, mask = gaussian(3, 2, 5), lengths(5, 5, 3, 0)
    valid = torch.cat([x[0], x[1, :, :3]], dim=1)
    x = x.masked_fill(~mask, torch.nan)
    count, mean, std = channel_moments(x, mask)
    assert count == 8
    torch.testing.assert_close(mean, valid.mean(1), rtol=0, atol=1e-14)
    torch.testing.assert_close(std, valid.std(1, correction=0), rtol=0, atol=1e-14)
    assert torch.isfinite(initialized(x, mask).bias).all()


def keeps_digits(moments):
    """Standard deviation one about a mean of 1e6, from a float32 batch."""
    x = (gaussian(400, 1) + 1e6).float()
    _, mean, std = moments(x)
    torch.testing.assert_close(mean, x.double().mean(0), rtol=1e-13, atol=0)
    torch.testing.assert_close(std, x.double().std(0, correction=0), rtol=1e-9, atol=0)


def test_two_passes_in_float64_keep_digits():
    keeps_digits(channel_moments)

    def one_pass(x):
        return len(x), x.double().mean(0), (x.square().mean(0) - x.mean(0).square()).abs().sqrt().double()

    with pytest.raises(AssertionError):
        keeps_digits(one_pass)


def test_constant_channels_are_centred_and_named_once():
    x = gaussian(8, 4, 3)
    x[:, 1], x[:, 3] = 5.0, 2.0 + 1e-4 * x[:, 3]
    flow = Compose([Flip(4), ActNorm(4).double(), ActNorm(4).double()], (4, None))
    with pytest.warns(UserWarning) as caught:
        flow.layers[1].initialize(flow.layers[0](x)[0])
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("layers.1 (ActNorm): channels 0, 2 are constant")
    log_scale = flow.layers[1].log_scale()
    assert log_scale[0] == 0 == log_scale[2] and log_scale[1] != 0 != log_scale[3]
    assert flow.layers[1].bias[2].item() == pytest.approx(-5)


def test_standard_deviations_beyond_the_bound_are_exact():
    layer = initialized(torch.tensor([[1e9], [-1e9]], dtype=torch.float64))
    assert torch.isfinite(layer.raw_log_scale).all()
    assert layer.log_scale().item() == pytest.approx(-math.log(1e9), abs=1e-9)


# ---- once, and by training alone ----


def test_a_second_call_raises_unless_forced():
    x, layer = gaussian(4, 2), ActNorm(2).double()
    assert list(layer.uninitialized()) == ["ActNorm"] and list(layer.uninitialized("a.b")) == ["a.b"]
    layer.initialize(x)
    assert layer.ready and bool(layer.initialized) and list(layer.uninitialized()) == []
    with pytest.raises(RuntimeError, match="ActNorm is initialised already; force=True"):
        layer.initialize(3 * x)
    layer.initialize(x + 5, force=True)
    torch.testing.assert_close(layer.bias, -(x + 5).mean(0))


def test_using_it_does_not_initialise_it():
    layer, x = ActNorm(2).double().train(), 3 + gaussian(4, 2)
    assert torch.equal(layer(x)[0], x) and not layer.ready and not layer.initialized


@pytest.mark.parametrize("x, mask, message", [
    (torch.ones(2, 3, 4), torch.zeros(2, 1, 4, dtype=torch.bool), "without a single valid position"),
    (torch.ones(0, 3), None, "without a single valid position"),
    (torch.tensor([[1.0, torch.nan, 3.0], [0.0, 1.0, torch.inf]]), None, "not finite in channels 1, 2"),
    (torch.ones(2, 4), None, r"events of shape \(3, ...\), got \(4,\)"),
    (torch.ones(2, 3, 4), torch.ones(2, 1, 4), "mask must be boolean"),
    (torch.ones(2, 3, 4), torch.ones(2, 3, 4, dtype=torch.bool), r"share one mask \(B, 1, T\)"),
])  # fmt: skip
def test_batches_that_it_cannot_start_from(x, mask, message):
    layer = ActNorm(3)
    with pytest.raises(ValueError, match=message):
        layer.initialize(x, mask=mask)
    assert not layer.ready and torch.equal(layer.bias, torch.zeros(3))


@pytest.mark.parametrize("assign", [False, True])
def test_loading_brings_the_flag_and_never_initialises(assign):
    x = gaussian(4, 2)
    trained, new = nn.Sequential(initialized(x)), nn.Sequential(ActNorm(2).double())
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    new.load_state_dict(state, assign=assign)
    assert new[0].ready and new[0].initialized
    new.train()
    assert torch.equal(new[0](9 * x)[0], trained[0](9 * x)[0])
    with pytest.raises(RuntimeError, match="initialised already"):
        new[0].initialize(x)
    new.load_state_dict(nn.Sequential(ActNorm(2).double()).state_dict())
    assert not new[0].ready and not new[0].initialized
    bare = {name: value for name, value in state.items() if "initialized" not in name}
    assert new.load_state_dict(bare, strict=False).missing_keys == ["0.initialized"] and not new[0].ready


def test_copies_bring_the_flag(tmp_path):
    layer = initialized(gaussian(4, 2))
    assert copy.deepcopy(layer).ready and not copy.deepcopy(ActNorm(2)).ready
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = ActNorm(2).double()
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert other.ready


# ---- several processes ----


def _share(rank: int, meet: str, out: str, layer: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> None:
    with joined(meet, rank):
        warnings.simplefilter("error")
        torch.save(initialized(x, mask, layer).state_dict(), out)


def two_processes_agree(tmp_path, layer, x, mask, shares):
    paths = [str(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    meet = str(tmp_path / "meet")
    forked(_share, *((rank, meet, paths[rank], layer, x[rows], mask[rows]) for rank, rows in enumerate(shares)))
    first, second = (torch.load(path, weights_only=True) for path in paths)
    for name, value in initialized(x, mask, layer).state_dict().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value, rtol=1e-6, atol=1e-6)


@fork
@pytest.mark.parametrize("layer", [ActNorm(3), Whitening(3)])
def test_two_processes_give_the_start_of_one(tmp_path, monkeypatch, layer):
    layer = layer.double()
    scale = torch.tensor([1.0, 30.0, 0.1]).double()[:, None]
    x = gaussian(6, 3, 12) * scale + torch.arange(6.0).double()[:, None, None]
    mask = lengths(12, 12, 8, 4, 10, 2, 0)
    (tmp_path / "a").mkdir()
    two_processes_agree(tmp_path / "a", copy.deepcopy(layer), x, mask, (slice(0, 2), slice(2, 6)))
    # Mutant: every process for itself.
    monkeypatch.setattr(scaling, "summed", lambda values: values)
    (tmp_path / "b").mkdir()
    with pytest.raises(AssertionError):
        two_processes_agree(tmp_path / "b", copy.deepcopy(layer), x, mask, (slice(0, 2), slice(2, 6)))


def test_entropy_of_the_start():
    """Standardising a Gaussian leaves a log-density that averages its negative entropy."""
    x = 3 * gaussian(4000, 2)
    z, logdet = initialized(x)(x)
    log_prob = (-0.5 * z.square() - 0.5 * math.log(2 * math.pi)).sum(1) + logdet
    assert float(-log_prob.mean()) == pytest.approx(math.log(2 * math.pi * math.e * 9), abs=0.1)


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
def test_checks_catch_mutants_of_scaling(mutant, shape, check):
    assert check in check_bijection(mutant, shape, compiler=None).failed


# ---- logit ----


def test_vector_of_scaling():
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
        return v, -event_sum(math.log1p(-2 * self.alpha) + softplus(z) + softplus(-z))


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


def error_of_gradients(function, shape, most=None) -> float:
    """Of x, scale and shift, for every layout in memory of x and of the gradient, or the first of them, against those
    of the formula."""
    dims, worst = range(len(shape)), 0.0
    scale, shift = (gaussian(shape[1], seed=seed).requires_grad_() for seed in (1, 2))
    for of_x, of_g in itertools.islice(itertools.product(itertools.permutations(dims), repeat=2), most):
        x, g = (gaussian(*[shape[k] for k in order], seed=3).permute([order.index(k) for k in dims])
                for order in (of_x, of_g))  # fmt: skip
        x = x.requires_grad_()
        found = torch.autograd.grad(function(x, scale, shift), (x, scale, shift), g)
        plain = per_channel(scale, x) * x + per_channel(shift, x)
        expected = torch.autograd.grad(plain, (x, scale, shift), g)
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)))
    return worst


@pytest.mark.parametrize("shape", [(3, 2), (3, 2, 1), (1, 2, 3), *itertools.product((1, 3), (2,), (1, 4), (1, 5))])
def test_gradients_in_any_layout(shape):
    assert error_of_gradients(scaling.scaled, shape) < 1e-12
    added = lambda x, scale, shift: scaling.scaled(x, scale, shift + scale - scale.detach())  # noqa: E731
    assert error_of_gradients(added, shape, most=1) > 1e-3


@pytest.mark.parametrize("mean", [1e3, 1e5])
def test_float32_keeps_the_digits_of_data_far_from_zero(mean):
    """x + b is exact there, x exp(s) + b exp(s) loses what the mean takes."""
    x = (mean + gaussian(64, 3)).float()
    layer = ActNorm(3)
    layer.initialize(x)
    z, wide = layer(x)[0], copy.deepcopy(layer).double()(x.double())[0]
    torch.testing.assert_close(z.double(), wide, rtol=1e-5, atol=1e-5)
