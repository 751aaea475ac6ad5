"""Objectives: expectation against closed form and against the bound itself, and what all of them promise."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.core.tensors import hide
from genmodels.diffusion import (
    OBJECTIVES,
    PARAMETERISATIONS,
    TIME_SAMPLERS,
    CosineSchedule,
    Denoiser,
    Gaussian,
    GaussianDenoiser,
    Hybrid,
    LearnedSchedule,
    LinearSchedule,
    LossAwareTimes,
    Simple,
    V,
    Vlb,
    ddpm_times,
    elbo,
    objectives,
)
from genmodels.diffusion.weighting import WEIGHTING_TIMES
from genmodels.models.ddpm import DDPM


def exact_denoiser(parameterisation="v", schedule=None):
    mean, variance = torch.tensor([0.5, -0.2, 0.1]), torch.tensor([0.25, 0.09, 1.0])
    return GaussianDenoiser(
        schedule or CosineSchedule(), mean, variance, parameterisation=PARAMETERISATIONS[parameterisation]()
    )


def expectation(objective, denoiser, n=6000, seed=0):
    """Mean and standard error (of the batches' means, as antithetic rows are not independent)."""
    values = []
    for batch in range(40):
        generator = torch.Generator().manual_seed(1000 * seed + batch)
        x0 = denoiser.sample(n // 40, generator)
        values.append(objective(denoiser, x0, None, generator).value)
    values = torch.stack(values)
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def simple_is_mmse(parameterisation, objective=None):
    """The error of the exact denoiser: mmse(t) / loss_weight(t), averaged over t and scalars."""
    denoiser = exact_denoiser(parameterisation)
    t = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    log_snr = denoiser.schedule.log_snr(t)
    truth = (denoiser.mmse(log_snr) / denoiser.parameterisation.loss_weight(log_snr)[:, None]).mean()
    mean, error = expectation(objective or Simple(), denoiser)
    assert abs(mean - float(truth)) < 4 * error


@pytest.mark.parametrize("parameterisation", PARAMETERISATIONS)
def test_simple_is_the_mmse_of_the_exact_denoiser(parameterisation):
    simple_is_mmse(parameterisation)


class Summed(Simple):
    def __call__(self, denoiser, x0, *args):
        out = super().__call__(denoiser, x0, *args)
        out.value = out.value * x0[0].numel()
        return out


def test_simple_catches_a_sum_in_place_of_the_mean():
    with pytest.raises(AssertionError):
        simple_is_mmse("v", Summed())


def vlb_is_the_bound(time_sampler, variance="beta"):
    denoiser, times = exact_denoiser(), ddpm_times(12)
    objective = Vlb(Gaussian(), times, variance=variance, time_sampler=time_sampler)
    n = 4000
    x0 = denoiser.sample(n, torch.Generator().manual_seed(0))
    exact = elbo(denoiser, x0, Gaussian(), times, KeyedGenerator(9, torch.arange(n)), variance=variance).total
    mean, error = expectation(objective, denoiser)
    both = math.hypot(error, float(exact.std()) / math.sqrt(n))
    assert abs(mean - float(exact.mean())) < 4 * both


@pytest.mark.parametrize("name", TIME_SAMPLERS)
@pytest.mark.parametrize("variance", ["beta", "beta_tilde"])
def test_vlb_is_unbiased_or_refused(name, variance):
    if issubclass(TIME_SAMPLERS[name], WEIGHTING_TIMES):
        with pytest.raises(InputError, match="weights the loss"):
            vlb_is_the_bound(TIME_SAMPLERS[name](), variance)
    else:
        vlb_is_the_bound(TIME_SAMPLERS[name](), variance)


def test_vlb_is_unbiased_for_times_drawn_by_their_losses():
    """The sampler has seen every term of the bound of another model: its times are far from uniform."""
    times = LossAwareTimes(bins=11, history=10)
    t = torch.rand(400, generator=torch.Generator().manual_seed(0))
    times.update(t, 100 * (1 - t) ** 3)
    assert float(times.probabilities().max() / times.probabilities().min()) > 100
    vlb_is_the_bound(times)


def skewed(weighted):
    def sampler(n, generator, rank=0, world=1):
        u, _ = TIME_SAMPLERS["uniform"]()(n, generator)
        t = u ** (1 / 2)  # density 2 t
        return t, 1 / (2 * t) if weighted else torch.ones_like(t)

    return sampler


def test_vlb_is_unbiased_for_a_weighted_sampler_and_catches_a_missing_weight():
    vlb_is_the_bound(skewed(weighted=True))
    with pytest.raises(AssertionError):
        vlb_is_the_bound(skewed(weighted=False))


def test_vlb_of_a_fixed_path_is_its_three_terms():
    out = Vlb(Gaussian(), ddpm_times(12))(exact_denoiser(), torch.zeros(5, 3), None, KeyedGenerator(0, torch.arange(5)))
    assert list(out.parts) == ["prior_nats", "diffusion_nats", "reconstruction_nats"]
    torch.testing.assert_close(out.per_example, sum(out.parts.values()))
    torch.testing.assert_close(out.value, out.per_example.mean())
    assert ((out.times * 12 - (out.times * 12).round()).abs() < 1e-12).all() and out.times.min() >= 2 / 12


# ---- the interface of every objective ----


class Net(torch.nn.Module):
    """A linear layer that sees the log-SNR, with as many outputs as it is asked for."""

    def __init__(self, outputs=3, inputs=3):
        super().__init__()
        self.layer = torch.nn.Linear(inputs + 1, outputs)

    def forward(self, x, log_snr, cond=None, mask=None):
        out = self.layer(torch.cat([x, log_snr[:, None] / 10], 1))
        return out if cond is None else out + cond[:, None]


def built(name, schedule=None, **options):
    torch.manual_seed(0)
    learned = name == "hybrid"
    given = {"learned_variance": learned} | options
    net = Net(6 if given["learned_variance"] else 3, 6 if given.get("self_conditioning") else 3)
    return Denoiser(net, schedule or CosineSchedule(), V(), **given)


def every(name, **options):
    return OBJECTIVES[name](decoder=Gaussian(), times=ddpm_times(20), **options)


@pytest.mark.parametrize("self_conditioning", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_reach_the_network(name, self_conditioning):
    denoiser = built(name, self_conditioning=self_conditioning)
    out = every(name)(denoiser, torch.randn(8, 3), torch.ones(8), KeyedGenerator(0, torch.arange(8)), 0, 1)
    out.value.backward()
    assert out.value.dim() == 0 and out.per_example.shape == out.times.shape == out.drawn.shape == (8,)
    assert out.integrand.shape == (8,) and not out.integrand.requires_grad
    assert all(part.shape == (8,) for part in out.parts.values())
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in denoiser.parameters())


SCHEDULES = {"cosine": CosineSchedule(), "linear": LinearSchedule(num_steps=100)}


@pytest.mark.parametrize("self_conditioning", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_process_or_two(name, schedule, self_conditioning):
    denoiser, x0 = built(name, schedule, self_conditioning=self_conditioning), torch.randn(8, 3)
    for time_sampler in ("antithetic", "loss_aware"):
        objective = every(name, time_sampler=time_sampler)
        together = objective(denoiser, x0, None, KeyedGenerator(4, torch.arange(8), "train", 7)).per_example
        for rank in range(2):
            rows = torch.arange(4) * 2 + rank
            alone = objective(denoiser, x0[rows], None, KeyedGenerator(4, rows, "train", 7), rank, 2).per_example
            torch.testing.assert_close(alone, together[rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_loss_aware_sampler_gets_the_loss_without_its_weight(name):
    """Given weights w of all times, the contributions move by (w - 1) times what the sampler is shown."""

    def weighed(factor):
        def sampler(n, generator, rank=0, world=1):
            t, weight = TIME_SAMPLERS["antithetic"]()(n, generator, rank, world)
            return t, factor * weight

        return sampler

    denoiser, x0 = built(name), torch.randn(8, 3)
    once, thrice = (
        every(name, time_sampler=weighed(f))(denoiser, x0, None, KeyedGenerator(0, torch.arange(8))) for f in (1, 3)
    )
    torch.testing.assert_close((thrice.per_example - once.per_example) / 2, once.integrand.to(once.per_example))


class Seen(torch.nn.Module):
    """Remembers what came in."""

    def __init__(self):
        super().__init__()
        self.inputs, self.weight = [], torch.nn.Parameter(torch.ones(()))

    def forward(self, x, log_snr, cond=None, mask=None):
        self.inputs.append(x.detach())
        return self.weight * x[:, :3]


def test_self_conditioning_shows_half_of_the_rows_their_own_estimate():
    net = Seen()
    denoiser, n = Denoiser(net, CosineSchedule(), V(), self_conditioning=True), 400
    Simple()(denoiser, torch.randn(n, 3), None, KeyedGenerator(0, torch.arange(n)))
    (first, second), blank = net.inputs, torch.zeros(n, 3)
    assert torch.equal(first[:, 3:], blank) and torch.equal(first[:, :3], second[:, :3])
    conditioned = (second[:, 3:] != 0).any(1)
    assert 0.4 < float(conditioned.float().mean()) < 0.6
    assert torch.equal(second[~conditioned][:, 3:], blank[~conditioned])


def test_self_conditioning_trains_the_weights_under_autocast():
    """The pass without gradient must not leave its cast weights behind for the pass with one."""
    denoiser = built("simple", self_conditioning=True)
    with torch.autocast("cpu", torch.bfloat16):
        Simple()(denoiser, torch.randn(8, 3), None, KeyedGenerator(0, torch.arange(8))).value.backward()
    assert denoiser.net.layer.weight.grad is not None and float(denoiser.net.layer.weight.grad.abs().sum()) > 0


def test_times_of_a_table_are_its_steps():
    denoiser = exact_denoiser(schedule=LinearSchedule(num_steps=50))
    out = Simple()(denoiser, torch.zeros(200, 3), None, torch.Generator().manual_seed(0))
    steps = out.times * 50
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-12)
    assert sorted(set(steps.round().tolist())) == list(range(1, 51))


def test_a_mask_leaves_out_what_it_hides():
    """Values behind the mask change nothing; and with everything visible the mask itself changes nothing."""

    class Rows(torch.nn.Module):
        def forward(self, x, log_snr, cond=None, mask=None):
            return 0.3 * x if x.shape[1] == 2 else x

    visible = (torch.arange(5) < torch.tensor([5, 3, 1])[:, None])[:, None]
    x0 = torch.randn(3, 2, 5, dtype=torch.float64)
    for name in ("simple", "vlb", "continuous"):
        denoiser = Denoiser(Rows(), CosineSchedule(), V())

        def run(data, mask, name=name, denoiser=denoiser):
            generator = KeyedGenerator(0, torch.arange(3))
            return every(name)(denoiser, data, None, generator, mask=mask).per_example

        spoiled = torch.where(visible, x0, 1e3)
        assert torch.equal(run(x0, visible), run(spoiled, visible))
        torch.testing.assert_close(run(x0, torch.ones_like(visible)), run(x0, None))
        assert not torch.allclose(run(x0, visible)[1:], run(x0, None)[1:])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_item_without_valid_frames_counts_nothing(name):
    """Neither its terms nor the gradient of a learned schedule are of 0 / 0."""
    class Frames(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Conv1d(2, 4 if name == "hybrid" else 2, 1)

        def forward(self, x, log_snr, cond=None, mask=None):
            return self.layer(x) * log_snr.mean() / 10

    mask = (torch.arange(5) < torch.tensor([5, 0, 3])[:, None])[:, None]
    schedule = LearnedSchedule(hidden=8) if name == "continuous" else CosineSchedule()
    denoiser = Denoiser(Frames(), schedule, V(), learned_variance=name == "hybrid")
    out = every(name)(denoiser, hide(torch.ones(3, 2, 5), mask), None, KeyedGenerator(0, torch.arange(3)), mask=mask)
    assert out.per_example[1] == 0 and (out.per_example[[0, 2]] != 0).all()
    assert all(part.isfinite().all() for part in out.parts.values())
    out.value.backward()
    assert all(p.grad.isfinite().all() for p in denoiser.parameters() if p.grad is not None)


def test_training_does_not_move_the_cleanest_level_of_a_learned_schedule(monkeypatch):
    """Where the schedule begins below the noise of the decoder: the gradient would make t_0 noisier."""
    seen, first = [], objectives.predict_with_first

    def watched(denoiser, x0, log_snr, ends, *rest):
        seen.append(float(ends[0]))
        return first(denoiser, x0, log_snr, ends, *rest)

    monkeypatch.setattr(objectives, "predict_with_first", watched)
    torch.manual_seed(0)
    model = DDPM(DataSpec("counts", (4,), levels=17), schedule="learned", objective="continuous",
                 log_snr_ends=[12.5, -10.0], net={"hidden": 8, "depth": 1})  # fmt: skip
    items = Batch(torch.randint(0, 17, (6, 4)), index=torch.arange(6))
    before = float(model.core.schedule.log_snr(torch.tensor(0.5)).detach())
    for _ in range(2):
        model.loss(items, KeyedGenerator(0, items.index, "train"))
        for parameter in model.core.schedule.parameters():
            torch.nn.init.normal_(parameter, std=1.0)
    assert abs(float(model.core.schedule.log_snr(torch.tensor(0.5)).detach()) - before) > 0.1
    assert seen == pytest.approx([model.decoder.finest_log_snr] * 2, abs=1e-4)


def test_a_learned_schedule_needs_a_bound():
    for name in ("simple", "hybrid"):
        denoiser = built(name, LearnedSchedule())
        with pytest.raises(ValueError, match="a learned schedule needs the ELBO"):
            every(name)(denoiser, torch.zeros(2, 3), None, KeyedGenerator(0, torch.arange(2)))
    every("vlb").check(built("vlb", LearnedSchedule()))
    every("continuous").check(built("continuous", LearnedSchedule()))


def test_errors():
    with pytest.raises(ValueError, match="uniform, stratified, antithetic"):
        Simple(time_sampler="often")
    with pytest.raises(ValueError, match="none, min_snr, p2"):
        Simple(weighting="heavy")
    for objective in (Vlb, Hybrid):
        with pytest.raises(ValueError, match="decoder and its grid"):
            objective()
    with pytest.raises(ValueError, match="beta, beta_tilde"):
        Vlb(Gaussian(), ddpm_times(3), variance="learnt")
    with pytest.raises(ValueError, match="choose variance = learned"):
        every("hybrid").check(built("simple"))
    with pytest.raises(ValueError, match="plays no part"):
        every("continuous").check(built("hybrid"))
    with pytest.raises(ValueError, match="gives no variance"):
        every("vlb", variance="learned")(built("vlb"), torch.zeros(2, 3), None, KeyedGenerator(0, torch.arange(2)))


def test_weights_that_would_be_broadcast_are_refused(refuses):
    denoiser = Denoiser(lambda x, log_snr, cond: x, CosineSchedule(), V())

    def column(parameterisation, log_snr, rate):
        return torch.ones(len(log_snr), 1)

    refuses(InputError, r"one number for each item, \(4,\), and made losses of shape \(4, 4\)",
            Simple(weighting=column), denoiser, torch.randn(4, 3), None, torch.Generator())
