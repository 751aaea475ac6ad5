"""The flow map of Gaussian data in closed form: what every target of few-step training is met by."""

from __future__ import annotations

import torch

from genmodels.diffusion import FlowMap

MEAN = torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64)
VARIANCE = torch.tensor([0.25, 1.5, 0.01], dtype=torch.float64)


def spread(t):
    """C_t of the straight path to N(MEAN, VARIANCE)."""
    return (1 - t) ** 2 * VARIANCE + t**2


def lead(x_t, t, s):
    """x_s = (1 - s) m + sqrt(C_s/C_t) (x_t - (1 - t) m)."""
    t, s = t[:, None], s[:, None]
    return (1 - s) * MEAN + (spread(s) / spread(t)).sqrt() * (x_t - (1 - t) * MEAN)


def velocity(x_t, t):
    """-m + (t - (1 - t) S)/C_t (x_t - (1 - t) m)."""
    t = t[:, None]
    return -MEAN + (t - (1 - t) * VARIANCE) / spread(t) * (x_t - (1 - t) * MEAN)


def mean_velocity(x_t, times, cond=None):
    """u(x_t, t, s), a network of two times."""
    t, s = times.to(x_t.dtype).unbind(1)
    apart = t > s
    mean = (x_t - lead(x_t, t, s)) / torch.where(apart, t - s, 1)[:, None]
    return torch.where(apart[:, None], mean, velocity(x_t, t))


def exact_map():
    return FlowMap(mean_velocity)


def on_the_path(t, n=64, seed=0):
    """(x_t, x_0, eps) of n items each."""
    g = torch.Generator().manual_seed(seed)
    x0 = MEAN + VARIANCE.sqrt() * torch.randn(n, 3, generator=g, dtype=torch.float64)
    noise = torch.randn(n, 3, generator=g, dtype=torch.float64)
    return (1 - t)[:, None] * x0 + t[:, None] * noise, x0, noise
