"""Mean flows: their identity on the exact flow map of a Gaussian, and its derivative through our networks."""

from __future__ import annotations

import pytest
import torch

from genmodels.diffusion import FlowMap, MeanFlow
from genmodels.nn import DiT, MLPDenoiser, UNet
from tests.diffusion.exact_map import exact_map, mean_velocity, on_the_path, velocity


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def misses(objective, network=mean_velocity, n=256):
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
    assert misses(MeanFlow()) < 1e-10
    for mutant in (WithoutX(), FromTheEnd()):
        assert misses(mutant) > 0.1
    assert misses(MeanFlow(), lambda x, times, cond: mean_velocity(x, times[:, :1].expand(-1, 2))) > 0.1


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
    net = NETWORKS[name]().double()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn(p.shape))
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
    with pytest.raises(ValueError, match="power from 0 to 1"):
        MeanFlow(power=2.0)
