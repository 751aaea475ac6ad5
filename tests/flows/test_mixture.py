"""The mixture of logistics: numbers, tails, and an inverse that is found by steps and yet has gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import log_expit, logsumexp

from genmodels.flows import elementwise as module
from genmodels.flows.elementwise import LogisticMixture, unbounded

NUMBERS = [  # x, z, log dz/dx for pi (0.3, 0.7), mu (-1, 2), s (0, log 0.5), h 0.2, t -0.1
    (0.0, -1.5627143512, -0.5551199461),
    (2.0, 0.5803958313, 0.6510605898),
    (-30.0, -36.9912156906, 0.2),
    (40.0, 51.4480487885, 0.2),
]


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def agrees_with_the_numbers(transform):
    transform = transform.double().requires_grad_(False)
    transform.affine.log_scale.raw[1] = unbounded(column(0.2), 5.0)[0]
    scales = unbounded(column(1.0, 0.5).log(), 7.0)
    params = torch.cat([column(0.3, 0.7).log(), column(-1.0, 2.0), scales, column(0.0, -0.1)])
    x, z, log_slope = (column(*values) for values in zip(*NUMBERS, strict=True))
    params = params.expand(len(x), -1, -1)
    for there, back, sign, method in ((x, z, 1, transform), (z, x, -1, transform.inverse)):
        value, log_derivative = method(there, params)
        assert (value - back).abs().max() < 1e-8 and (log_derivative - sign * log_slope).abs().max() < 1e-8


def test_numbers():
    agrees_with_the_numbers(LogisticMixture(1, components=2))


class Complement(LogisticMixture):
    """1 - F by subtraction: nothing is left of the upper tail."""

    def forward(self, x, params):
        mixture, affine = self._unpack(params)
        below = module._shares(x, mixture)[0].logsumexp(1)
        v = below - torch.log1p(-below.exp())
        z, h = self.affine(v, affine)
        return z, module.logit(x, mixture)[1] + h


def test_planted_subtraction():
    with pytest.raises(AssertionError):
        agrees_with_the_numbers(Complement(1, components=2))


def random_case(count=200, components=4, spread=2.0, dtype=torch.float64, seed=0):
    """Mixtures whose means lie apart, with scales of all sizes, and x around them."""
    generator = torch.Generator().manual_seed(seed)
    transform = LogisticMixture(1, components=components).to(dtype)
    params = spread * torch.randn(count, 3 * components + 2, 1, generator=generator, dtype=torch.float64)
    x = 4 * torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return transform, x.to(dtype), params.to(dtype)


def test_scipy():
    """Value against scipy's log-sum-exp, inverse against scipy's root finder."""
    transform, x, params = random_case(count=20)
    mixture, _ = transform._unpack(params)
    value, _ = module.logit(x, mixture)
    root = module.solve(x, *mixture)  # x taken as target values
    for i in range(len(x)):
        log_weight, mean, log_scale = (part[i, :, 0].numpy() for part in mixture)

        def logit(at, log_weight=log_weight, mean=mean, log_scale=log_scale):
            u = (at - mean) * np.exp(-log_scale)
            return logsumexp(log_weight + log_expit(u)) - logsumexp(log_weight + log_expit(-u))

        target = float(x[i])
        assert float(value[i]) == pytest.approx(logit(target), abs=1e-10)
        expected = brentq(lambda at, target=target: logit(at) - target, -1e5, 1e5, xtol=1e-12)
        assert float(root[i]) == pytest.approx(expected, abs=1e-9)


# ---- the inverse ----


def solves_everywhere(dtype=torch.float64, tolerance=1e-10):
    """Narrow and wide components, far apart, and targets far in the tails: the root is found to rounding."""
    means = torch.tensor([-100.0, -1.0, 0.0, 90.0])
    scales = torch.tensor([6.9, -6.9, 0.0, -6.9])
    weights = torch.log_softmax(torch.tensor([-5.0, 0.0, 3.0, -20.0]), 0)
    targets = torch.tensor([-50.0, -9.0, -1.0, -1e-30, 0.0, 1e-30, 1.0, 9.0, 50.0])[:, None].to(dtype)
    mixture = module.Mixture(*(part[None, :, None].to(dtype) for part in (weights, means, scales)))
    x = module.solve(targets, *mixture)
    value, log_slope = module.logit(x, mixture)
    # What a rounding of x, or of v, is worth at the slope in that place.
    floor = torch.finfo(dtype).eps * (x.abs() * log_slope.exp() + targets.abs() + 1)
    assert ((value - targets).abs() <= 100 * floor + tolerance).all()


def test_solves_everywhere(monkeypatch):
    solves_everywhere()
    solves_everywhere(torch.float32, 1e-5)
    monkeypatch.setattr(module, "BISECTIONS", 5)
    with pytest.raises(AssertionError):
        solves_everywhere()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-8), (torch.float32, 2e-3)])
def test_round_trip(dtype, tolerance):
    transform, x, params = random_case(spread=1.0, dtype=dtype)
    z, log_derivative = transform(x, params)
    again, log_back = transform.inverse(z, params)
    assert (again - x).abs().max() < tolerance and (log_back + log_derivative).abs().max() < tolerance


def test_number_of_steps_is_fixed(monkeypatch):
    """The same work for every input: no step depends on how far the others have come."""
    calls = []
    shares = module._shares
    monkeypatch.setattr(module, "_shares", lambda x, mixture: calls.append(1) or shares(x, mixture))
    transform, _, params = random_case(count=1)
    counts = set()
    for z in (0.0, 1e-30, 3.0, -50.0, 1e6):
        calls.clear()
        transform.inverse(column(z), params)
        counts.add(len(calls))
    assert counts == {module.BISECTIONS + module.NEWTON_STEPS + 1}


def has_implicit_gradients(inverse, transform, z, params):
    """dx/dz = 1 / (dz/dx) and dx/dparam = -(dz/dparam) / (dz/dx), with the right sides from the forward pass."""
    z = z.clone().requires_grad_()
    own = list(transform.parameters())
    params = params.clone().requires_grad_()
    x, _ = inverse(z, params)
    found = torch.autograd.grad(x.sum(), (z, params, *own))
    x = x.detach().requires_grad_()
    slope = torch.autograd.grad(transform(x, params)[0].sum(), x)[0]
    weights = -1 / slope
    expected = torch.autograd.grad((weights.detach() * transform(x, params)[0]).sum(), (params, *own))
    for a, b in zip(found, (1 / slope, *expected), strict=True):
        assert (a - b).abs().max() <= 1e-8 * (1 + b.abs().max())


def test_implicit_gradients():
    transform, z, params = random_case(spread=1.0)
    has_implicit_gradients(transform.inverse, transform, z, params)


class NoImplicit(LogisticMixture):
    """The root is a constant."""

    def inverse(self, z, params):
        x, log_derivative = super().inverse(z, params)
        return x.detach() + 0 * (z + params.sum(1)) + 0 * self.affine.log_scale.raw.sum(), log_derivative


class ScalesLeftOut(LogisticMixture):
    """The root depends on the scales, but its gradient does not."""

    def inverse(self, z, params):
        frozen = torch.cat([params[:, : 2 * self.components], params[:, 2 * self.components :].detach()], dim=1)
        return super().inverse(z, frozen)


@pytest.mark.parametrize("bug", [NoImplicit, ScalesLeftOut])
def test_planted_gradients(bug):
    _, z, params = random_case(spread=1.0)
    transform = bug(1, components=4).double()
    with pytest.raises(AssertionError):
        has_implicit_gradients(transform.inverse, transform, z, params)


def test_gradient_between_distant_components():
    """Where the density all but vanishes the gradient is large, but it is a number."""
    transform = LogisticMixture(1, components=2)
    params = torch.zeros(3, 8, 1)
    params[:, 2], params[:, 3], params[:, 4:6] = -30.0, 30.0, -1.0
    params.requires_grad_()
    z = torch.tensor([[-1e-30], [0.0], [40.0]], requires_grad=True)
    x, log_derivative = transform.inverse(z, params)
    gradients = torch.autograd.grad(x.sum() + log_derivative.sum(), (z, params))
    assert x.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


# ---- the start ----


def starts_close_to_the_identity(transform):
    start = transform.start(1)
    x = torch.linspace(-5, 5, 201, dtype=torch.float64)[:, None]
    transform = transform.double()
    z, log_derivative = transform(x, start.double().expand(len(x), -1, -1))
    assert (z - x).abs().max() < 0.01 and log_derivative.abs().max() < 0.01
    if transform.components > 1:
        means = start[transform.components : 2 * transform.components, 0]
        assert float(means[0]) == pytest.approx(-0.1) and float(means[-1]) == pytest.approx(0.1)
        assert (means.diff() > 0).all()


@pytest.mark.parametrize("components", [1, 2, 8, 32])
def test_starts_close_to_the_identity(components):
    starts_close_to_the_identity(LogisticMixture(1, components=components))


class Alike(LogisticMixture):
    """All components begin the same, and would stay so."""

    def start(self, channels):
        return torch.zeros(self.params_per_dim, channels)


def test_planted_start():
    with pytest.raises(AssertionError):
        starts_close_to_the_identity(Alike(1))


def test_refused():
    with pytest.raises(ValueError, match="at least one component"):
        LogisticMixture(2, components=0)
