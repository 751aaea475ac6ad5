"""Energy, log-density and score belong together, whoever calls; a flow's score is its own gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from genmodels.core.errors import InputError
from genmodels.energy import (
    DenoisingScoreMatching,
    Energy,
    EnergyFunction,
    ExactScoreMatching,
    LogDensity,
    NoiseConditionalScore,
    Potential,
    Quadratic,
    ScoreFunction,
    ScoreNetwork,
    SlicedScoreMatchingVR,
    Target,
    directional,
    require_energy,
    trace,
)
from genmodels.flows import Affine, ChannelSplit, Compose, Coupling, DiagonalNormal, Flow, StandardNormal
from genmodels.flows.coupling_flows import jet
from genmodels.flows.tarflow import tarflow
from genmodels.nn.energy_nets import EnergyMLP
from genmodels.nn.perceptron import MLP
from tests.parameters import scattered


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(**options):
    torch.manual_seed(0)
    return Energy(EnergyMLP((3,), hidden=(8, 8), **options)).double()


X = torch.randn(5, 3, generator=seeded(), dtype=torch.float64)


def score_is_the_slope(energy):
    for i in range(3):
        e = 1e-5 * torch.eye(3, dtype=torch.float64)[i]
        slope = (energy.log_density(X + e) - energy.log_density(X - e)) / 2e-5
        torch.testing.assert_close(energy.score(X)[:, i], slope, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(energy.log_density(X), -energy.energy(X))


def test_score_is_the_slope_of_the_log_density(monkeypatch):
    score_is_the_slope(model())
    right = Energy.energy_and_score
    monkeypatch.setattr(Energy, "energy_and_score", lambda self, x, cond=None: (lambda e, s: (e, -s))(*right(self, x)))
    with pytest.raises(AssertionError):
        score_is_the_slope(model())


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_callers_without_gradients(off):
    energy, expected = model(), model().score(X)
    with off():
        inside = X * 1.0  # made here: in inference mode such a tensor cannot be kept by autograd
        value, score = energy.energy_and_score(inside)
        assert not inside.requires_grad and not score.requires_grad and not value.requires_grad
    torch.testing.assert_close(score, expected.detach())


def test_x_is_left_as_it_was():
    x, energy = X.clone(), model()
    energy.score(x)
    SlicedScoreMatchingVR()(energy, x, seeded())
    assert not x.requires_grad and x.grad is None and torch.equal(x, X)


def test_the_score_can_be_differentiated():
    energy, x = model(), X.clone().requires_grad_()
    value = energy.score(x).square().sum()
    in_x, in_weight = torch.autograd.grad(value, [x, energy.network.body[1].weight])
    assert in_x.abs().max() > 1e-3 and in_weight.abs().max() > 1e-3


def test_half_precision_becomes_single():
    energy = Energy(EnergyMLP((3,), hidden=(8,)))
    value, score = energy.energy_and_score(X.bfloat16())
    assert value.dtype == torch.float32 and score.isfinite().all()


class AffineFlow(nn.Module):
    """z = sinh^-1(L x): bent, with a log-determinant that depends on x."""

    def __init__(self, with_logdet=True):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.5, 0.0], [0.4, 0.7]], dtype=torch.float64))
        self.with_logdet = with_logdet

    def log_prob(self, x):
        y = x @ self.weight.T
        logdet = self.weight.diagonal().abs().log().sum() - 0.5 * (1 + y.square()).log().sum(1)
        base = -0.5 * torch.asinh(y).square().sum(1) - math.log(2 * math.pi)
        return base + logdet if self.with_logdet else base


def own_gradient(x):
    """The score of the flow above, by hand."""
    weight = AffineFlow().weight.detach()
    y = x @ weight.T
    root = (1 + y.square()).sqrt()
    return (-torch.asinh(y) / root - y / root.square()) @ weight


def test_the_score_of_a_flow_is_its_own_gradient():
    x = X[:, :2]
    torch.testing.assert_close(LogDensity(AffineFlow()).score(x), own_gradient(x), rtol=1e-10, atol=1e-10)
    wrong = LogDensity(AffineFlow(with_logdet=False)).score(x)
    assert (wrong - own_gradient(x)).abs().max() > 1e-3  # mutant: the log-determinant is left out


def flow_of_the_library():
    """Two couplings with a normal base that was moved and widened, in float64."""
    torch.manual_seed(0)
    parts = [ChannelSplit(3, swap=swap) for swap in (False, True)]
    layers = [Coupling(s, Affine(s.changed), MLP(s.kept, 2 * s.changed, hidden=8, depth=2)) for s in parts]
    flow = Flow(Compose(layers, (3,)), DiagonalNormal((3,))).double()
    return scattered(flow, 0.3, seed=5)


def minus_gradient_of_nll(flow, x, logdet_counts=True):
    """From the parts of the flow, each row by itself: latents, Jacobian by autograd, log |det| by its eigenvalues."""
    rows = []
    for row in x:
        row = row.clone().requires_grad_()

        def latent(point):
            return flow.bijection(point[None])[0][0]

        jacobian = torch.autograd.functional.jacobian(latent, row, create_graph=True)
        value = flow.base.log_prob(latent(row)[None])[0]
        value = value + jacobian.slogdet().logabsdet if logdet_counts else value
        rows.append(torch.autograd.grad(value, row)[0])
    return torch.stack(rows)


def test_the_score_of_a_flow_of_the_library_is_minus_the_gradient_of_its_nll():
    flow, x = flow_of_the_library(), torch.randn(5, 3, generator=seeded(6), dtype=torch.float64)
    score = LogDensity(flow).score(x)
    torch.testing.assert_close(score, minus_gradient_of_nll(flow, x), rtol=1e-10, atol=1e-10)
    assert (score - minus_gradient_of_nll(flow, x, logdet_counts=False)).abs().max() > 1e-3  # mutant


def test_a_log_density_is_as_precise_under_autocast():
    flow, x = flow_of_the_library().float(), torch.randn(5, 3, generator=seeded(6))
    model = LogDensity(lambda x: -(x @ torch.full((3, 3), 0.3)).square().sum(1))
    with torch.autocast("cpu", torch.bfloat16):
        for one in (model, LogDensity(flow)):
            found = one.energy(x), one.log_density(x)
            assert all(value.dtype == torch.float32 for value in found)
    half = LogDensity(lambda x: -x.square().sum(1))
    half.model = nn.Linear(3, 1).bfloat16()  # a model that takes nothing wider
    half.model.log_prob = lambda x: half.model(x)[:, 0]
    assert half.score(x.bfloat16()).shape == x.shape
    with torch.autocast("cpu", enabled=False):
        torch.testing.assert_close(found[0], LogDensity(flow).energy(x), rtol=0, atol=0)


@pytest.mark.parametrize("build", [
    lambda: tarflow((1, 4, 4), blocks=2, width=8, depth=1, heads=2),
    lambda: jet((1, 4, 4), couplings=2, patch=2, width=8, depth=1, heads=2)], ids=["tarflow", "jet"])
def test_score_matching_through_a_flow_with_attention(build):
    """The trace of its Jacobian against central differences of its score."""
    bijection = build().double()
    scattered(bijection, 0.3)
    x = torch.randn(2, 1, 4, 4, generator=seeded(1), dtype=torch.float64)
    bijection.initialize(x)
    model = LogDensity(Flow(bijection, StandardNormal(bijection.out_shape((1, 4, 4)))))
    found, step = trace(model, x)[0], 1e-5
    expected = torch.zeros(2, dtype=torch.float64)
    for unit in torch.eye(16, dtype=torch.float64).view(16, 1, 4, 4):
        change = model.score(x + step * unit) - model.score(x - step * unit)
        expected += (change * unit).flatten(1).sum(1) / (2 * step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for loss in (SlicedScoreMatchingVR(), DenoisingScoreMatching(sigma=0.1), ExactScoreMatching()):
        bijection.zero_grad()
        loss(model, x, seeded()).mean().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in bijection.parameters())


class LinearFlow(nn.Module):
    """z = L (x - m) with L lower triangular: any normal density."""

    def __init__(self):
        super().__init__()
        self.log_diagonal, self.below, self.mean = (nn.Parameter(torch.zeros(n).double()) for n in (2, 1, 2))

    def log_prob(self, x):
        scale = self.log_diagonal.exp()
        first = scale[0] * (x[:, 0] - self.mean[0])
        second = scale[1] * (x[:, 1] - self.mean[1]) + self.below * (x[:, 0] - self.mean[0])
        return -0.5 * (first.square() + second.square()) - math.log(2 * math.pi) + self.log_diagonal.sum()


def test_a_flow_trained_by_sliced_score_matching_reaches_the_likelihood():
    truth = Quadratic(torch.tensor([[1.5, 0.5], [0.5, 2.0]]).double(), torch.tensor([1.0, -0.5]).double())
    x, flow = truth.sample(4000, seeded(1)), LinearFlow()
    loss, generator = SlicedScoreMatchingVR(), seeded(2)
    optimizer = torch.optim.Adam(flow.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        loss(LogDensity(flow), x[torch.randint(4000, (512,), generator=generator)], generator).mean().backward()
        optimizer.step()
    with torch.no_grad():
        fresh = truth.sample(20_000, seeded(3))
        best = (truth.log_density(fresh) - truth.log_normaliser).mean()
        assert abs(float(flow.log_prob(fresh).mean() - best)) < 0.02


def test_noise_levels_of_one_network():
    net = NoiseConditionalScore(lambda x, sigma, cond=None: -x / (1 + sigma[:, None] ** 2))
    torch.testing.assert_close(net.at(2.0).score(X), -X / 5)
    torch.testing.assert_close(net.score_at(X, torch.arange(5.0)), -X / (1 + torch.arange(5.0)[:, None] ** 2))


def test_conditions_reach_the_network():
    class Moved(nn.Module):
        def forward(self, x, cond=None):
            return 0.5 * (x - cond[:, None]).square().sum(1)

    cond = torch.arange(5.0).double()
    torch.testing.assert_close(Energy(Moved()).score(X, cond), cond[:, None] - X)


def test_errors():
    with pytest.raises(ValueError, match=r"one number for each row, \(5,\), got shape \(5, 1\)"):
        Energy(nn.Linear(3, 1).double()).energy(X)
    with pytest.raises(ValueError, match="shape of x"):
        ScoreNetwork(nn.Linear(3, 2).double()).score(X)
    for make in (Energy, ScoreNetwork, NoiseConditionalScore, LogDensity):
        with pytest.raises(ValueError, match="layer 1 .BatchNorm1d. mixes the examples"):
            make(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        with pytest.raises(ValueError, match="layer 0 .Dropout. makes the score random"):
            make(nn.Sequential(nn.Dropout(0.1)))
    for make in (Energy, LogDensity):
        with pytest.raises(ValueError, match="layer 0 .ReLU. is not twice differentiable"):
            make(nn.Sequential(nn.ReLU()))
        make(nn.Sequential(nn.ReLU()), second_derivatives=False)
    with pytest.raises(ValueError, match="quadrature needs an energy, but ScoreNetwork has only a score"):
        require_energy(ScoreNetwork(nn.Linear(3, 3)), "quadrature")


@pytest.mark.parametrize("log_prob", [lambda x: x.sum(1, keepdim=True), lambda x: x.sum()])
def test_a_log_density_is_a_number_for_each_row(log_prob, refuses):
    refuses(InputError, r"one number for each row, \(4,\), got", LogDensity(log_prob).energy, torch.randn(4, 2))


class OwnEnergy(EnergyFunction):
    def energy(self, x, cond=None):
        return x.square().sum(1, keepdim=True)


class OwnScore(ScoreFunction):
    def score(self, x, cond=None):
        return -x.sum(1, keepdim=True)


@pytest.mark.parametrize("use", [
    lambda x: OwnEnergy().score(x),
    lambda x: Target(OwnEnergy()).evaluate(x),
    lambda x: Target(OwnScore()).evaluate(x),
    lambda x: directional(OwnScore(), x, torch.ones(1, 4, 2), route="double_backward"),
    lambda x: directional(OwnScore(), x, torch.ones(1, 4, 2), route="forward_over_reverse"),
    lambda x: trace(OwnScore(), x),
    lambda x: Potential(lambda x, log_snr, cond: x[:, :1])(x, torch.zeros(4)),
])
def test_own_functions_of_another_shape_do_not_broadcast(use, refuses):
    refuses(InputError, r"(one number for each row, \(4,\)|has the shape of x, \(4, 2\)), got", use, torch.ones(4, 2))
