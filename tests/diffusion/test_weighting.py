"""Weightings: one weight of x0's error for every meaning of the output, and the constants of their papers."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.diffusion import (
    EDM,
    PARAMETERISATIONS,
    WEIGHTINGS,
    CosineSchedule,
    GaussianDenoiser,
    LinearLogSnrSchedule,
    Simple,
    V,
)
from genmodels.diffusion.weighting import P2, EDMWeighting, MinSNR, SigmoidWeighting, Unweighted

LEVELS = torch.linspace(-10, 10, 21, dtype=torch.float64)
RATES = torch.full_like(LEVELS, -20.0)


def one_weight_of_x0(weighting):
    """weight / loss_weight is the weight of |x0 - x0_hat|^2: the same function of the log-SNR for all outputs."""
    weights = [weighting(kind(), LEVELS, RATES) / kind().loss_weight(LEVELS) for kind in PARAMETERISATIONS.values()]
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", [name for name in WEIGHTINGS if name != "none"])
def test_one_weight_of_x0(name):
    one_weight_of_x0(WEIGHTINGS[name]())


def test_one_weight_of_x0_catches_a_weight_of_the_output():
    with pytest.raises(AssertionError):
        one_weight_of_x0(Unweighted())


FIVE = torch.tensor([5.0], dtype=torch.float64)
TABLE = [  # weighting, parameterisation, weight at log-SNR 5
    (MinSNR(), "eps", 0.0336897350),
    (MinSNR(), "x0", 5.0),
    (MinSNR(), "v", 0.0334642546),
    (P2(), "eps", 1 / (1 + math.exp(5))),
    (P2(k=2.0, gamma=0.5), "eps", (2 + math.exp(5)) ** -0.5),
    (SigmoidWeighting(), "eps", 20 / (1 + math.exp(3))),
    (EDMWeighting(), "edm", 20 * math.exp(-((5 - 2.4) ** 2) / 2 / 2.4**2) / (2.4 * math.sqrt(2 * math.pi))),
]


@pytest.mark.parametrize("weighting, name, value", TABLE)
def test_values(weighting, name, value):
    weight = weighting(PARAMETERISATIONS[name](), FIVE, torch.tensor([-20.0]))
    assert float(weight) == pytest.approx(value, rel=1e-8)


def test_edm_is_a_normal_distribution_of_noise_levels():
    """Over uniform times the weights of F integrate to the mass of N(2.4, 2.4^2) within the schedule's ends."""
    t = (torch.arange(5000, dtype=torch.float64) + 0.5) / 5000
    for schedule in (CosineSchedule(), LinearLogSnrSchedule()):
        mean = EDMWeighting()(EDM(), schedule.log_snr(t), schedule.log_snr_rate(t)).mean()
        first, last = schedule.end_points
        inside = torch.special.ndtr((torch.tensor([first, last]).double() - 2.4) / 2.4)
        assert float(mean) == pytest.approx(float(inside[0] - inside[1]), rel=1e-4)


@pytest.mark.parametrize("name", ["edm", "sigmoid"])
def test_weights_of_the_bound_do_not_depend_on_the_schedule(name):
    """int w(lambda) mse(lambda) d lambda is the same whichever way lambda is run through."""
    values = []
    for schedule in (CosineSchedule(log_snr_max=10, log_snr_min=-10), LinearLogSnrSchedule()):
        t = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
        log_snr = schedule.log_snr(t)
        oracle = GaussianDenoiser(schedule, torch.zeros(1), 0.25)
        error = oracle.mmse(log_snr)[:, 0] / V().loss_weight(log_snr)
        values.append(float((WEIGHTINGS[name]()(V(), log_snr, schedule.log_snr_rate(t)) * error).mean()))
    assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_in_the_objective(name):
    """per_example = weight * mse, with the unweighted error among the parts."""
    oracle, n = GaussianDenoiser(CosineSchedule(), torch.zeros(3), 0.5), 50
    x0 = oracle.sample(n, torch.Generator().manual_seed(0))
    out = Simple(weighting=name)(oracle, x0, None, torch.Generator().manual_seed(1))
    plain = Simple()(oracle, x0, None, torch.Generator().manual_seed(1))
    schedule = oracle.schedule
    weight = WEIGHTINGS[name]()(V(), schedule.log_snr(out.times), schedule.log_snr_rate(out.times))
    torch.testing.assert_close(out.per_example, weight * plain.per_example)
    assert torch.equal(out.parts["mse"], plain.parts["mse"])


@pytest.mark.parametrize(
    "build",
    [lambda: MinSNR(gamma=0), lambda: P2(k=-1), lambda: EDMWeighting(deviation=0), lambda: EDM(data_deviation=0)],
)
def test_errors(build):
    with pytest.raises(ValueError, match="positive"):
        build()
