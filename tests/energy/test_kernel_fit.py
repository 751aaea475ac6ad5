"""The closed form of the last weights is the minimiser of each loss."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.random import KeyedGenerator
from genmodels.energy import (
    ContrastiveDivergence,
    DeepKernel,
    DeepKernelLoss,
    DenoisingScoreMatching,
    Energy,
    ExactScoreMatching,
    FiniteDifferenceScoreMatching,
    GaussianMixture,
    LogDensity,
    SlicedScoreMatching,
    SlicedScoreMatchingVR,
    trace,
)
from genmodels.energy.kernel_fit import _solve, design
from genmodels.nn.energy_nets import DeepKernelEnergy, EnergyMLP

LOSSES = {
    "exact": ExactScoreMatching(),
    "sliced": SlicedScoreMatching(projections=2, projection="gaussian"),
    "sliced_vr": SlicedScoreMatchingVR(projections=2, projection="gaussian"),
    "finite_difference": FiniteDifferenceScoreMatching(projection="gaussian"),
    "denoising": DenoisingScoreMatching(sigma=0.3),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(inducing=6):
    torch.manual_seed(0)
    return DeepKernelEnergy((3,), inducing=inducing, hidden=5).double()


X = torch.randn(40, 3, generator=seeded(1), dtype=torch.float64)


def is_the_minimiser(name, change=lambda alpha: alpha):
    """The gradient of loss + ridge/2 |alpha|^2 vanishes there."""
    net, loss = network(), LOSSES[name]
    alpha = change(_solve(design(net, X, loss, seeded(3)), net)).detach().requires_grad_()
    value = loss(DeepKernel(net, alpha), X, seeded(3)).mean() + 0.5 * net.log_ridge.exp() * alpha.square().sum()
    (gradient,) = torch.autograd.grad(value, alpha)
    assert gradient.abs().max() < 1e-8 and alpha.abs().max() > 1e-3


@pytest.mark.parametrize("name", LOSSES)
def test_minimiser(name):
    is_the_minimiser(name)


def test_minimiser_catches_a_flipped_sign():
    for name in LOSSES:
        with pytest.raises(AssertionError):
            is_the_minimiser(name, lambda alpha: -alpha)


@pytest.mark.parametrize("name", LOSSES)
def test_training_reaches_every_parameter_and_improves(name):
    truth = GaussianMixture(torch.tensor([0.5, 0.5]).double(), torch.tensor([[-1.0, 0, 0], [1.0, 0, 0]]).double(), 0.5)
    x, net = truth.sample(400, seeded(1)), network(20)
    net.set_points(x[:20])
    model, loss = DeepKernel(net), DeepKernelLoss(loss=LOSSES[name])
    value = loss(model, x, seeded(2))
    assert value.shape == (200,)
    found = torch.autograd.grad(value.mean(), list(net.parameters()))
    assert all(g.abs().max() > 0 for g in found)
    before = float(LOSSES[name](model, x, seeded(4)).mean().detach())
    model.fit(x, LOSSES[name], seeded(3), chunk=150)
    assert float(LOSSES[name](model, x, seeded(4)).mean().detach()) < before


def test_an_example_of_the_batch_has_its_own_noise():
    net = network()
    generator = KeyedGenerator(0, torch.arange(40), "loss", 3)
    loss = DeepKernelLoss(loss=SlicedScoreMatching())
    torch.testing.assert_close(loss(DeepKernel(net), X, generator), loss(DeepKernel(net), X, generator.at(3)))


def test_the_exact_loss_by_jets_is_that_of_autograd():
    model = DeepKernel(network())
    model.fit(X, ExactScoreMatching(), seeded())
    plain = LogDensity(model.log_density)  # which has no way of its own
    parameters = list(model.network.features.parameters())
    found = []
    for one in (model, plain):
        total, score = trace(one, X[:7])
        gradients = torch.autograd.grad((total + score.square().sum(1)).sum(), parameters)
        found.append([total, score, *gradients])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        assert not ExactScoreMatching()(model, X).requires_grad


def test_fitting_in_parts_is_fitting_at_once():
    """Also where every row has noise of its own."""
    models = [DeepKernel(network()) for _ in range(3)]
    keyed = KeyedGenerator(0, torch.arange(40), "fit")
    for model, chunk in zip(models, (40, 16, 7), strict=True):
        model.fit(X, SlicedScoreMatching(), keyed.at(0), chunk=chunk)
        torch.testing.assert_close(model.network.alpha, models[0].network.alpha, rtol=1e-9, atol=1e-9)
    # Mutant: every part takes the noise of the first rows.
    wrong = DeepKernel(network())
    same = KeyedGenerator(0, torch.arange(40) % 20, "fit")
    wrong.fit(X, SlicedScoreMatching(), same, chunk=20)
    assert (wrong.network.alpha - models[0].network.alpha).abs().max() > 1e-6


def test_errors():
    with pytest.raises(ValueError, match="there is no closed form for ContrastiveDivergence"):
        DeepKernelLoss(loss=ContrastiveDivergence((3,)))
    with pytest.raises(ValueError, match="is for deep kernel energies, not Energy"):
        DeepKernelLoss(loss=ExactScoreMatching())(Energy(EnergyMLP((3,))), X, seeded())
    with pytest.raises(ValueError, match="at least 2 rows"):
        DeepKernelLoss(loss=ExactScoreMatching())(DeepKernel(network()), X[:1], seeded())


@pytest.mark.parametrize("name", LOSSES)
def test_the_weights_are_not_solved_for_in_half_precision(name):
    x = torch.randn(8, 3, generator=seeded(1))
    loss = DeepKernelLoss(loss=LOSSES[name])
    with torch.autocast("cpu", torch.bfloat16):
        low = loss(DeepKernel(network().float()), x, seeded(2))
    torch.testing.assert_close(low, loss(DeepKernel(network().float()), x, seeded(2)), rtol=1e-6, atol=1e-6)
