"""Shortcut models: their targets against the exact flow map of a Gaussian, and how steps and rows are drawn."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    Denoiser,
    FlowMap,
    FlowMapSampler,
    GaussianDenoiser,
    GuidedDenoiser,
    LinearPath,
    MeanFlow,
    Shortcut,
    ThresholdedDenoiser,
    Velocity,
    sample,
    uniform_t,
)
from genmodels.nn import DiT, MLPDenoiser, UNet
from tests.diffusion.exact_map import MEAN, VARIANCE, exact_map, lead, mean_velocity, on_the_path, velocity
from tests.parameters import scattered


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- flow maps ----


def test_a_flow_map_is_a_denoiser_and_leads_in_one_step():
    """Without `until` all views are those of the exact denoiser; one step of the sampler is the exact flow."""
    exact, t = GaussianDenoiser(LinearPath(), MEAN, VARIANCE, parameterisation=Velocity()), torch.rand(64).double()
    x = on_the_path(t)[0] / LinearPath().scale(t)[:, None]
    for view in ("x0", "eps", "v", "velocity", "output"):
        torch.testing.assert_close(getattr(exact_map()(x, t), view), getattr(exact(x, t), view), rtol=0, atol=1e-10)
    noise = torch.randn(64, 3, generator=seeded(), dtype=torch.float64)
    expected = lead(noise, torch.ones(64).double(), torch.zeros(64).double())
    for steps in (1, 2, 5):
        out = sample(exact_map(), (64, 3), uniform_t(LinearPath(), steps), FlowMapSampler(), seeded(), start=noise,
                     dtype=torch.float64)  # fmt: skip
        assert out.evaluations == steps and (out.x - expected).abs().max() < 1e-12


def test_guidance_and_thresholds_keep_the_length_of_the_step():
    def net(x, times, cond):
        return (times[:, :1] - times[:, 1:]) + cond[:, None] + 0 * x

    t, s, x, cond = torch.ones(2), torch.full((2,), 0.25), torch.zeros(2, 3), torch.tensor([1, 2])
    guided = GuidedDenoiser(FlowMap(net), 3.0, null=0)
    assert guided.takes_until and ThresholdedDenoiser(guided).takes_until
    torch.testing.assert_close(guided(x, t, cond, until=s).output, (0.75 + 3.0 * cond)[:, None].expand(2, 3))
    near = ThresholdedDenoiser(FlowMap(net))(x, t, cond, until=s)  # x0 = x - u, -1.75 and -2.75, clipped
    torch.testing.assert_close(near.x0, -torch.ones(2, 3))


# ---- the target ----


def misses(objective, network):
    """How far the network is from the objective's targets on rows with s < t, in the worst of them."""
    denoiser, index = FlowMap(network), torch.arange(256)
    t, s = objective.ends(torch.rand(256, generator=seeded()).double(), KeyedGenerator(0, index, "train"))
    x_t, x0, noise = on_the_path(t, 256)
    rows = s < t
    x_t, t, s, velocity = x_t[rows], t[rows], s[rows], (noise - x0)[rows]
    target = objective.target(denoiser, x_t, t, s, velocity, None, None)
    return float((target - denoiser.mean_velocity(x_t, t, s)).abs().max())


class TwiceTheSameHalf(Shortcut):
    """The second half step starts where the first did."""

    def target(self, denoiser, x_t, t, s, velocity, cond, mask):
        d = (t - s) / 2
        return (denoiser.mean_velocity(x_t, t, t - d) + denoiser.mean_velocity(x_t, t - d, s)) / 2


def test_the_exact_flow_map_meets_the_target():
    """The shortest steps, which the velocity stands for, are left out by a finest length below them."""

    class Finer(Shortcut):
        def target(self, denoiser, *given):
            self.finest, kept = 10**9, self.finest
            found = super().target(denoiser, *given)
            self.finest = kept
            return found

    assert misses(Finer(share=0.9), mean_velocity) < 1e-10
    assert misses(Shortcut(share=0.9, finest=128), mean_velocity) < 0.05  # Euler's error of a step of 1/128
    assert misses(TwiceTheSameHalf(share=0.9), mean_velocity) > 0.1
    assert misses(Finer(share=0.9), lambda x, times, cond: mean_velocity(x, times[:, :1].expand(-1, 2))) > 0.1


def test_the_loss_is_made_of_both_targets():
    """A network that answers t - s: 0 where it learns the velocity, 2d where two steps of d answer d."""

    class Half(Shortcut):
        def ends(self, u, generator):
            return torch.tensor([0.3, 1.0]).double(), torch.tensor([0.3, 0.5]).double()

    x0, ones = torch.zeros(2, 3, dtype=torch.float64), torch.ones(2)
    far = FlowMap(lambda x, times, cond: (times[:, :1] - times[:, 1:]).expand_as(x))
    out = Half().at_times(far, x0, None, seeded(1), ones, ones, None)
    noise = torch.randn(2, 3, generator=seeded(1), dtype=torch.float64)
    expected = torch.stack([noise[0].square().mean(), torch.tensor((0.25 - 0.5) ** 2).double()])
    torch.testing.assert_close(out.per_example, expected)
    assert float(out.times[1]) == 1


def test_steps_are_drawn_evenly_and_end_on_their_grid():
    objective, index = Shortcut(share=0.25, finest=16), torch.arange(8000)
    t, s = objective.ends(torch.full((8000,), 0.123, dtype=torch.float64), KeyedGenerator(0, index, "train"))
    length = t - s
    steps = length > 0
    assert abs(float(steps.double().mean()) - 0.25) < 5 * (0.25 * 0.75 / 8000) ** 0.5
    assert bool((t[~steps] == 0.123).all()) and length[steps].unique().tolist() == [0.125, 0.25, 0.5, 1.0]
    counts = torch.stack([(length == one).sum() for one in length[steps].unique()]).double() / steps.sum()
    assert (counts - 0.25).abs().max() < 5 * (0.25 * 0.75 / 2000) ** 0.5
    for one in length[steps].unique():
        ends = (t[length == one] / one).unique()
        assert ends.tolist() == list(range(1, round(1 / float(one)) + 1))


def test_what_it_refuses():
    with pytest.raises(ValueError, match="power of two"):
        Shortcut(finest=100)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Shortcut(share=0.0)
    plain = Denoiser(lambda x, log_snr, cond: x, LinearPath(), Velocity())
    with pytest.raises(ValueError, match="network of two times"):
        Shortcut()(plain, torch.zeros(2, 3), None, seeded())


def misses_of_mean_flow(objective, network=mean_velocity, n=256):
    """The largest distance of a network from its targets, given the exact velocity, the mean of eps - x_0."""
    t, s = objective.ends(torch.zeros(n, dtype=torch.float64), seeded())
    x_t, *_ = on_the_path(t, n)
    denoiser = FlowMap(network)
    target = objective.target(denoiser, x_t, t, s, velocity(x_t, t), None, None)
    return float((target - denoiser.mean_velocity(x_t, t, s)).abs().max())


class WithoutX(MeanFlow):
    """The derivative in time alone."""

    def target(self, denoiser, x_t, t, s, velocity, cond, mask):
        still = super().target(denoiser, x_t, t, s, torch.zeros_like(velocity), cond, mask)
        return velocity + still


class FromTheEnd(MeanFlow):
    """v + (t - s) d/dt u."""

    def target(self, denoiser, x_t, t, s, velocity, cond, mask):
        return 2 * velocity - super().target(denoiser, x_t, t, s, velocity, cond, mask)


def test_the_exact_flow_map_meets_the_identity():
    assert misses_of_mean_flow(MeanFlow()) < 1e-10
    for mutant in (WithoutX(), FromTheEnd()):
        assert misses_of_mean_flow(mutant) > 0.1
    assert misses_of_mean_flow(MeanFlow(), lambda x, times, cond: mean_velocity(x, times[:, :1].expand(-1, 2))) > 0.1


def test_the_sampled_velocity_has_the_target_as_its_mean():
    """The target is affine in v, so the mean over x_0 given x_t is the target of the exact velocity."""
    t, s = torch.full((2,), 0.7).double(), torch.full((2,), 0.2).double()
    x_t, *_ = on_the_path(t, 2)
    one, other = torch.randn(2, 2, 3, generator=seeded(), dtype=torch.float64)
    made = [MeanFlow().target(exact_map(), x_t, t, s, v, None, None) for v in (one, other, (one + other) / 2)]
    torch.testing.assert_close((made[0] + made[1]) / 2, made[2], rtol=0, atol=1e-12)


NETWORKS = {
    "unet": lambda: UNet((1, 8, 8), None, False, 0, True, channels=8, multipliers=(1, 2), blocks=1),
    "dit": lambda: DiT((1, 8, 8), None, False, 0, True, width=16, depth=1, heads=2, checkpointing=True),
    "mlp": lambda: MLPDenoiser((1, 8, 8), None, False, 0, True, hidden=16, depth=1),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_derivative_through_networks(name):
    """Against central differences along (v, 1, 0), fused attention, masks of norms and checkpoints included."""
    torch.manual_seed(0)
    net = scattered(NETWORKS[name](), 0.1).double()
    x, v = torch.randn(2, 2, 1, 8, 8, generator=seeded(), dtype=torch.float64)
    t, s, h = torch.tensor([0.9, 0.5]).double(), torch.tensor([0.1, 0.4]).double(), 1e-5
    denoiser = FlowMap(net)
    with torch.no_grad():  # as in training
        target = MeanFlow().target(denoiser, x, t, s, v, None, None)
        ahead, behind = (denoiser.mean_velocity(x + e * v, t + e, s) for e in (h, -h))
    rate = (ahead - behind) / (2 * h)
    assert rate.abs().max() > 1e-3
    torch.testing.assert_close(target, v - (t - s)[:, None, None, None] * rate, rtol=1e-6, atol=1e-7)


def test_the_weight_has_no_gradient():
    mse = torch.tensor([0.5, 4.0], requires_grad=True)
    MeanFlow(power=1.0, c=1e-3).weigh(mse).sum().backward()
    torch.testing.assert_close(mse.grad, 1 / torch.tensor([0.501, 4.001]))
    assert torch.equal(MeanFlow(power=0.0).weigh(mse), mse)
    for wrong in ({"power": 2.0}, {"c": float("inf")}):
        with pytest.raises(ValueError, match="power from 0 to 1"):
            MeanFlow(**wrong)


@pytest.mark.parametrize("fails", [False, True])
def test_parts_keep_their_mode(fails):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.free = nn.Dropout(0.5).eval(), nn.Dropout(0.5)

        def forward(self, x, times, cond=None):
            if fails and not self.free.training:
                raise RuntimeError("out of memory")
            return self.free(x)

    denoiser = FlowMap(Net())
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        Shortcut(finest=4, share=0.9)(denoiser, torch.randn(8, 2), None, torch.Generator().manual_seed(0))
    assert not denoiser.net.frozen.training and denoiser.net.free.training and denoiser.training
