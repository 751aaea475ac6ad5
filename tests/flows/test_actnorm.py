"""ActNorm and what starts from data: moments, the flag, one process or two."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from genmodels.flows import actnorm as initialization
from genmodels.flows.actnorm import ActNorm, channel_moments
from genmodels.flows.composition import Compose
from genmodels.flows.linear import Flip
from genmodels.verification.bijections import check_bijection
from tests.two_processes import fork, forked


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


def _share(rank: int, meet: str, out: str, x: torch.Tensor, mask: torch.Tensor) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    warnings.simplefilter("error")
    torch.save(initialized(x, mask).state_dict(), out)
    torch.distributed.destroy_process_group()


def two_processes_agree(tmp_path, x, mask, shares):
    paths = [str(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    meet = str(tmp_path / "meet")
    forked(_share, *((rank, meet, paths[rank], x[rows], mask[rows]) for rank, rows in enumerate(shares)))
    first, second = (torch.load(path, weights_only=True) for path in paths)
    for name, value in initialized(x, mask).state_dict().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value, rtol=1e-6, atol=1e-6)


@fork
def test_two_processes_give_the_start_of_one(tmp_path, monkeypatch):
    scale = torch.tensor([1.0, 30.0, 0.1]).double()[:, None]
    x = gaussian(6, 3, 7) * scale + torch.arange(6.0).double()[:, None, None]
    mask = lengths(7, 7, 5, 2, 6, 1, 0)
    (tmp_path / "a").mkdir()
    two_processes_agree(tmp_path / "a", x, mask, (slice(0, 2), slice(2, 6)))
    # Mutant: every process for itself.
    monkeypatch.setattr(initialization, "summed", lambda values: values)
    (tmp_path / "b").mkdir()
    with pytest.raises(AssertionError):
        two_processes_agree(tmp_path / "b", x, mask, (slice(0, 2), slice(2, 6)))


def test_entropy_of_the_start():
    """Standardising a Gaussian leaves a log-density that averages its negative entropy."""
    x = 3 * gaussian(4000, 2)
    z, logdet = initialized(x)(x)
    log_prob = (-0.5 * z.square() - 0.5 * math.log(2 * math.pi)).sum(1) + logdet
    assert float(-log_prob.mean()) == pytest.approx(math.log(2 * math.pi * math.e * 9), abs=0.1)
