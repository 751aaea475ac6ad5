"""The bound in continuous time: its closed form, the limit it is, one value for all schedules, and how one learns."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    PARAMETERISATIONS,
    Continuous,
    CosineSchedule,
    Denoiser,
    Gaussian,
    GaussianDenoiser,
    LearnedSchedule,
    LinearLogSnrSchedule,
    LinearSchedule,
    SigmoidSchedule,
    V,
    bound,
    continuous_elbo,
    elbo,
)
from genmodels.diffusion import objectives as module

ENDS = {"log_snr_max": 10.0, "log_snr_min": -10.0}
START = torch.tensor([0.0, 1.0], dtype=torch.float64)
#: Whole bounds of N(0, c^2) with a Gaussian decoder, 1/2 log(2 pi e (c^2 + 1/u_0)) up to 1e-9.
WHOLE = {1.0: 1.41896123, 0.25: 0.725882144}


def exact_denoiser(c2=0.25, schedule=None, parameterisation="v", dims=2):
    kind = PARAMETERISATIONS[parameterisation]()
    return GaussianDenoiser(schedule or LinearLogSnrSchedule(), torch.zeros(dims), c2, parameterisation=kind)


# ---- the likelihood ----


def spread(c2, n):
    """(n, 2) data at +c and -c: with as many of each, averages of squares are exact."""
    return math.sqrt(c2) * torch.tensor([1.0, -1.0], dtype=torch.float64)[torch.arange(n) % 2][:, None].expand(n, 2)


def meets_the_closed_form(c2, parameterisation="v", schedule=None):
    n = 1000
    terms = continuous_elbo(
        exact_denoiser(c2, schedule, parameterisation), spread(c2, n), Gaussian(), 0.0,
        KeyedGenerator(0, torch.arange(n)), draws=40,
    )  # fmt: skip
    error = float(terms.total.std()) / math.sqrt(n)
    assert abs(float(terms.total.mean()) / 2 - WHOLE[c2]) < 4 * error / 2 and error < 0.15


@pytest.mark.parametrize("parameterisation", PARAMETERISATIONS)
@pytest.mark.parametrize("c2", WHOLE)
def test_closed_form(c2, parameterisation):
    meets_the_closed_form(c2, parameterisation)


@pytest.mark.parametrize("kind", [CosineSchedule, lambda **ends: LearnedSchedule(hidden=32, **ends)])
def test_closed_form_under_other_schedules(kind):
    meets_the_closed_form(0.25, schedule=kind(**ENDS))


def test_closed_form_catches_a_missing_half(monkeypatch):
    right = bound.rate_term
    monkeypatch.setattr(bound, "rate_term", lambda *a: 2 * right(*a))
    with pytest.raises(AssertionError):
        meets_the_closed_form(0.25, schedule=CosineSchedule(**ENDS))


def test_it_is_the_limit_of_many_steps():
    """The discrete bound comes down to it like 1/T, in every example's mean over the noise."""
    n, denoiser = 2000, exact_denoiser()
    x0 = denoiser.sample(n, torch.Generator().manual_seed(0))
    keyed = KeyedGenerator(0, torch.arange(n))
    limit = continuous_elbo(denoiser, x0, Gaussian(), 0.0, keyed, draws=50).total
    gaps = []
    for steps in (50, 100):
        times = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
        terms = elbo(denoiser, x0, Gaussian(), times, keyed, variance="beta_tilde")
        gap = terms.total - limit
        gaps.append(float(gap.mean()))
        error = float(gap.std()) / math.sqrt(n)
    assert gaps[0] > gaps[1] > 4 * error
    assert gaps[0] / gaps[1] == pytest.approx(2, abs=4 * error / gaps[1] + 0.2)


@pytest.mark.parametrize("first", [0.0, 0.7])
def test_standard_errors_are_those_of_repetition(first):
    """With the noise of the reconstruction, nearly all of it at t_0 = 0.7."""
    n, denoiser = 400, exact_denoiser()
    x0 = denoiser.sample(n, torch.Generator().manual_seed(0))
    runs = [
        continuous_elbo(denoiser, x0, Gaussian(), first, KeyedGenerator(seed, torch.arange(n)), draws=5, replicates=3)
        for seed in range(6)
    ]
    claimed = torch.stack([run.stderr for run in runs]).square().mean().sqrt()
    spread = {name: torch.stack([values(run) for run in runs]).std(0).square().mean().sqrt()
              for name, values in (("all", lambda run: run.total), ("strata", lambda run: run.diffusion.sum(1)))}
    assert float(spread["all"]) == pytest.approx(float(claimed), rel=0.2)
    assert first == 0.0 or spread["strata"] < 0.2 * spread["all"]


def test_neither_batches_nor_chunks_change_it():
    denoiser = exact_denoiser()
    x0 = denoiser.sample(6, torch.Generator().manual_seed(0))
    whole = continuous_elbo(denoiser, x0, Gaussian(), 0.1, KeyedGenerator(0, torch.arange(6)), draws=5)
    rows = torch.tensor([4, 1])
    part = continuous_elbo(denoiser, x0[rows], Gaussian(), 0.1, KeyedGenerator(0, rows), draws=5, chunk=3)
    torch.testing.assert_close(part.total, whole.total[rows])
    assert whole.log_snr.shape == (5,) and (whole.log_snr.diff() < 0).all()


def test_no_signal_at_the_end_is_no_obstacle():
    denoiser = exact_denoiser(schedule=SigmoidSchedule())
    x0 = denoiser.sample(50, torch.Generator().manual_seed(0))
    terms = continuous_elbo(denoiser, x0, Gaussian(), 0.001, KeyedGenerator(0, torch.arange(50)))
    assert terms.total.isfinite().all() and float(terms.prior.abs().max()) < 1e-8
    assert float(terms.log_snr.min()) > -20


@pytest.mark.parametrize(
    "change, message",
    [({"replicates": 1}, "at least 2"), ({"draws": 0}, "at least 1"), ({"chunk": 0}, "chunk must be at least 1"),
     ({"first": 0.0}, "without noise")],
)
def test_errors(change, message):
    denoiser = exact_denoiser(schedule=LinearSchedule())
    options = {"first": 0.001} | change
    with pytest.raises(ValueError, match=message):
        continuous_elbo(
            denoiser, torch.zeros(2, 2), Gaussian(), options.pop("first"), KeyedGenerator(0, torch.arange(2)), **options
        )


# ---- the objective ----


def mean_of_objective(denoiser, batches=60, size=64):
    objective = Continuous(Gaussian(), START)
    values = []
    for seed in range(batches):
        generator = torch.Generator().manual_seed(seed)
        values.append(objective(denoiser, denoiser.sample(size, generator), None, generator).value.detach())
    values = torch.stack(values)
    return float(values.mean()), float(values.std()) / math.sqrt(batches)


@pytest.mark.parametrize(
    "schedule",
    [LinearLogSnrSchedule(), CosineSchedule(**ENDS), LearnedSchedule(hidden=32, **ENDS)],
    ids=["line", "cosine", "learned"],
)
def test_the_objective_is_the_same_bound_under_every_schedule(schedule):
    is_the_same_bound(schedule)


def is_the_same_bound(schedule):
    mean, error = mean_of_objective(exact_denoiser(schedule=schedule))
    assert abs(mean / 2 - WHOLE[0.25]) < 4 * error / 2


def test_that_catches_a_rate_of_another_schedule(monkeypatch):
    right = module.rate_term

    def constant_rate(denoiser, output, x0, noise, log_snr, rate, mask=None):
        return right(denoiser, output, x0, noise, log_snr, torch.full_like(rate, -20), mask)

    monkeypatch.setattr(module, "rate_term", constant_rate)
    with pytest.raises(AssertionError):
        is_the_same_bound(CosineSchedule(**ENDS))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x, log_snr, cond=None, mask=None):
        return self.outer(torch.tanh(self.inner(torch.cat([x, log_snr[:, None].to(x) / 10], 1))))


def learning():
    torch.manual_seed(0)
    return Denoiser(Net().double(), LearnedSchedule(hidden=6, **ENDS), V())


def one_pass_gives_both_gradients(kind):
    """Schedule: the gradient of the mean square of the diffusion terms in bits/dim. Network: that of the mean."""
    x0 = torch.randn(32, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keyed = KeyedGenerator(0, torch.arange(32))
    model = learning()
    (kind(Gaussian(), START)(model, x0, None, keyed).value / (2 * math.log(2))).backward()

    plain = learning()
    schedule = plain.schedule
    frozen = [p.requires_grad_(False) for p in schedule.parameters()]  # no hooks: the objective sees nothing to train
    out = Continuous(Gaussian(), START)(plain, x0, None, KeyedGenerator(0, torch.arange(32)))
    of_net = torch.autograd.grad(out.value / (2 * math.log(2)), list(plain.net.parameters()))
    for p in frozen:
        p.requires_grad_(True)
    monkey = module.is_learned
    module.is_learned = lambda schedule: False
    try:
        out = Continuous(Gaussian(), START)(plain, x0, None, KeyedGenerator(0, torch.arange(32)))
    finally:
        module.is_learned = monkey
    bits = out.parts["diffusion_nats"] / (2 * math.log(2))
    of_schedule = torch.autograd.grad(bits.square().mean(), frozen)
    for p, expected in zip(model.net.parameters(), of_net, strict=True):
        torch.testing.assert_close(p.grad, expected)
    for p, expected in zip(model.schedule.parameters(), of_schedule, strict=True):
        torch.testing.assert_close(p.grad, expected)


def test_one_pass_gives_both_gradients():
    one_pass_gives_both_gradients(Continuous)


def test_that_catches_a_schedule_trained_on_the_mean(monkeypatch):
    class Plain(Continuous):
        def __call__(self, *args):
            with monkeypatch.context() as patch:
                patch.setattr(module, "is_learned", lambda schedule: False)
                return super().__call__(*args)

    with pytest.raises(AssertionError):
        one_pass_gives_both_gradients(Plain)


def test_training_the_schedule_lowers_the_variance_and_keeps_bound_and_ends():
    denoiser = exact_denoiser(schedule=LearnedSchedule(hidden=64, **ENDS), dims=8)
    before = copy.deepcopy(denoiser)
    objective = Continuous(Gaussian(), START, time_sampler="uniform")
    optimizer = torch.optim.Adam(denoiser.schedule.parameters(), lr=0.05)
    for step in range(60):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        objective(denoiser, denoiser.sample(256, generator), None, generator).value.backward()
        optimizer.step()

    def diffusion(model):
        generator = torch.Generator().manual_seed(10_000)
        return objective(model, model.sample(20_000, generator), None, generator).parts["diffusion_nats"].detach()

    first, last = diffusion(before), diffusion(denoiser)
    error = math.hypot(float(first.std()), float(last.std())) / math.sqrt(20_000)
    assert float(last.var()) < 0.8 * float(first.var())
    assert abs(float(last.mean() - first.mean())) < 4 * error
    assert denoiser.schedule.end_points == (10.0, -10.0)
