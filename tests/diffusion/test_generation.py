"""Samples of a diffusion model: every sampler by its name, guidance, inpainting, editing, latents."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.random import KeyedGenerator, normal
from genmodels.core.samples import SamplingOptions
from genmodels.diffusion import (
    SAMPLERS,
    CosineSchedule,
    DDIMSampler,
    DDPMSampler,
    DiffusionSampler,
    EulerSampler,
    GaussianDenoiser,
    HeunSampler,
    Inpainting,
    invert,
    make_path,
    noised_start,
    sample,
    times_from,
    uniform_log_snr,
    uniform_t,
)
from genmodels.diffusion.path import kernel_variance, q_sample, renoise
from genmodels.diffusion.samplers import Defaults
from genmodels.diffusion.sampling import log_snrs
from genmodels.evaluation.materials import interpolate
from genmodels.models.ddpm import DDPM
from tests.diffusion.table import INSTANCES, keyed
from tests.parameters import scattered

DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
POINTS = DataSpec("points", (3,), levels=None)
ITEM = torch.randint(0, 17, (1, 8, 8), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
KEEP = torch.zeros(1, 8, 8, dtype=torch.bool)
KEEP[:, :, :4] = True


def small(spec: DataSpec = DIGITS, **options) -> DDPM:
    torch.manual_seed(0)
    if len(spec.event_shape) == 3:
        options = {"net": {"channels": 8, "multipliers": [1, 2], "blocks": 1}} | options
    model = DDPM(spec, **({"num_steps": 12, "ema_decay": 0.0} | options)).eval()
    scattered(model.core, 0.1)
    return model


MODEL = small()


def test_every_sampler_has_a_name_and_its_usual_steps():
    for name in SAMPLERS:
        samples = MODEL.sample(2, sampler=name)
        twice = name in ("heun", "edm", "flow")
        steps = {"flow_map": 4, "consistency": 2}.get(name, 12)
        assert samples.made["sampler"] == name and samples.made["steps"] == steps
        assert samples.made["evaluations"] == (23 if twice else steps)


WAYS = {
    "euler": {"sampler": "euler"},
    "heun": {"sampler": "heun"},
    "edm": {"sampler": "edm", "churn": 4.0},
    "unipc": {"sampler": "unipc"},
    "guided": {"guidance": 3.0, "guidance_rescale": 0.5, "guidance_interval": [-5, 5]},
    "unconditional": {"guidance": 0.0},
    "dynamic": {"clip": "dynamic"},
    "inpainted": {"known": ITEM, "keep": KEEP, "rounds": 2},
    "edited": {"edit": ITEM, "strength": 0.5, "sampler": "ddpm"},
    "edited to a class": {"edit": ITEM, "cond": 3, "guidance": 2.0},
}


@pytest.mark.parametrize("way", WAYS)
def test_sample_k_is_the_same_alone_and_in_any_batch(way):
    options = {"steps": 5, "seed": 5} | WAYS[way]
    whole = MODEL.sample(16, **options)
    assert whole.x.dtype == torch.uint8 and whole.x.shape == (16, 1, 8, 8) and int(whole.x.max()) <= 16
    for k in (0, 11):
        alone = MODEL.sample(1, start=k, **options)
        assert (whole.cond is None) == (alone.cond is None)
        assert (alone.x[0].int() - whole.x[k].int()).abs().max() <= 1
        assert (alone.x[0] == whole.x[k]).float().mean() > 0.98
    assert (MODEL.sample(16, **(options | {"seed": 6})).x == whole.x).float().mean() < 0.95


def test_guidance_one_is_plain_and_nought_is_the_null_class():
    plain = MODEL.sample(4, steps=4, cond=3)
    assert torch.equal(MODEL.sample(4, steps=4, cond=3, guidance=1.0).x, plain.x)
    nought = MODEL.sample(4, steps=4, guidance=0.0)
    assert nought.cond is None and not torch.equal(nought.x, plain.x)
    MODEL.cond_drop, keep = 0.0, MODEL.cond_drop
    try:
        with pytest.raises(ValueError, match="cond_drop=0"):
            MODEL.sample(2, guidance=3.0)
    finally:
        MODEL.cond_drop = keep


def test_the_condition_is_hidden_as_often_as_asked_and_by_key():
    model = small(cond_drop=0.25)
    cond = torch.arange(4000) % 10
    hidden = model._hidden(cond, KeyedGenerator(0, torch.arange(4000), "train"))
    dropped = hidden == 10
    assert abs(float(dropped.float().mean()) - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5
    assert torch.equal(hidden[~dropped], cond[~dropped])
    part = model._hidden(cond[100:200], KeyedGenerator(0, torch.arange(100, 200), "train"))
    assert torch.equal(part, hidden[100:200])
    never = small(cond_drop=0.0)
    assert never._hidden(cond, KeyedGenerator(0, torch.arange(4000), "train")) is cond
    assert small(POINTS)._hidden(None, KeyedGenerator(0, torch.arange(3), "train")) is None
    loss = model.loss(Batch(ITEM[None], torch.tensor([0])), KeyedGenerator(0, torch.arange(1), "train"))
    assert loss.value.isfinite()


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_is_kept_comes_back_bit_for_bit(name):
    samples = MODEL.sample(3, known=ITEM, keep=KEEP, sampler=name, steps=3, rounds=2, path=2)
    assert torch.equal(samples.x[:, KEEP], ITEM[KEEP].expand(3, -1)) and samples.cond is None
    assert torch.equal(samples.path[-1], samples.x)
    assert samples.made["kept"] == 32 and samples.made["rounds"] == 2
    assert not torch.equal(samples.x[:, ~KEEP], ITEM[~KEEP].expand(3, -1))


def test_what_is_kept_of_continuous_data_comes_back_bit_for_bit():
    model = small(POINTS)
    model.location.fill_(3.7)
    model.scale.fill_(0.013)
    known, keep = torch.tensor([0.1, 3.71, -2.0]), torch.tensor([True, False, True])
    x = model.sample(5, known=known, keep=keep, steps=4).x
    assert torch.equal(x[:, keep], known[keep].expand(5, -1)) and x[:, 1].std() > 0


def test_an_edit_changes_the_more_the_stronger_it_is():
    changes = [
        float((MODEL.sample(8, edit=ITEM, strength=s).x.float() - ITEM.float()).abs().mean()) for s in (0.05, 0.5, 1.0)
    ]
    assert changes[0] < changes[1] < changes[2]
    assert MODEL.sample(1, edit=ITEM, strength=0.05, sampler="ddpm").made["evaluations"] == 1


def test_the_strip_of_an_edit_numbers_the_steps_that_were_taken(tmp_path, monkeypatch):
    from genmodels.evaluation import samples as pictures

    drawn = MODEL.sample(1, edit=ITEM, strength=0.4, sampler="ddim", steps=10, path=80)
    named, true = [], pictures.grid
    monkeypatch.setattr(pictures, "grid", lambda *args, names, **more: named.extend(names) or true(
        *args, names=names, **more))
    pictures.write_path(drawn, MODEL.spec, tmp_path / "a.png", 80)
    taken = drawn.made["evaluations"]
    assert 1 < taken < 10 and named == [f"step {k + 1}" for k in range(taken)]


def test_latents_lead_back_and_depend_on_the_class():
    model = small()
    items = Batch(torch.stack([ITEM, ITEM.flip(1)]), torch.tensor([3, 3]))
    z = model.latents(items)
    assert (model.from_latents(z, items.cond).int() - items.x.int()).abs().max() <= 1
    assert not torch.allclose(model.latents(Batch(items.x))[0], z[0])
    strip = interpolate(model, items, 5)
    assert strip.shape == (5, 1, 8, 8) and (strip[[0, -1]].int() - items.x.int()).abs().max() <= 1
    mixed = interpolate(model, Batch(items.x, torch.tensor([3, 4])), 4)  # no common class: under none
    assert (mixed[[0, -1]].int() - items.x.int()).abs().max() <= 1
    with pytest.raises(ValueError, match="one class"):
        interpolate(small(cond_drop=0.0), Batch(items.x, torch.tensor([3, 4])), 4)


@pytest.mark.parametrize("self_conditioning", [False, True])
def test_latents_of_points_lead_back(self_conditioning):
    """Whether the network sees its last estimate or not, which it does not here."""
    model = small(POINTS, num_steps=1000, self_conditioning=self_conditioning, net={"hidden": 16, "depth": 1})
    items = Batch(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    assert (model.from_latents(model.latents(items)) - items.x).abs().max() < 5e-3


@pytest.mark.parametrize(
    "options, said",
    [
        ({"sampler": "ddpm", "eta": 0.5}, "eta is an option of sampler=ddim, not of ddpm"),
        ({"churn": 3.0}, "churn is an option of sampler=edm"),
        ({"guidance_rescale": 0.5}, "go with guidance"),
        ({"guidance": 0.0, "cond": 3}, "leave cond out"),
        ({"clip": "soft"}, "static, dynamic"),
        ({"known": ITEM}, "give both"),
        ({"known": ITEM, "keep": KEEP, "edit": ITEM}, "inpainting .known. and edit exclude each other"),
        ({"known": ITEM[:, :4], "keep": KEEP}, r"got \(1, 4, 8\)"),
        ({"edit": ITEM, "size": [16, 16]}, "leave size out"),
        ({"edit": ITEM, "strength": 0.0}, "strength"),
        ({"known": ITEM, "keep": KEEP, "rounds": 0}, "rounds"),
    ],
)
def test_sampling_errors(options, said):
    with pytest.raises(ValueError, match=said):
        MODEL.sample(2, **options)


def test_guidance_needs_classes():
    with pytest.raises(ValueError, match="model with classes"):
        small(POINTS).sample(2, guidance=2.0)
    with pytest.raises(ValueError, match="cond_drop must be from 0 to below 1"):
        small(cond_drop=1.0)


class Coarse(EulerSampler):
    defaults = Defaults(3, "uniform_t")


def test_a_sampler_is_one_class_and_one_row_of_the_table(monkeypatch):
    monkeypatch.setitem(SAMPLERS, "coarse", Coarse)
    found = MODEL.sample(2, sampler="coarse")
    assert found.made["steps"] == 3 and found.made["spacing"] == "uniform_t"
    assert torch.equal(found.x, MODEL.sample(2, sampler="euler", steps=3, spacing="uniform_t").x)
    with pytest.raises(ValueError, match="eta is an option of sampler=ddim, not of coarse"):
        MODEL.sample(2, sampler="coarse", eta=0.5)


MEAN, SCALE = torch.tensor([0.5, -0.2], dtype=torch.float64), 0.4
EXACT = GaussianDenoiser(CosineSchedule(), MEAN, SCALE**2)
ITEM_OF_EDITING = torch.tensor([1.5, 0.4], dtype=torch.float64)


def test_times_from():
    times = uniform_t(EXACT.schedule, 4)
    assert times_from(times, 0.75).tolist() == [0.75, 0.5, 0.25, 0.0]
    assert times_from(times, 0.1).tolist() == [0.1, 0.0] and torch.equal(times_from(times, 1.0), times)
    for strength in (0.0, -0.1, 1.1):
        with pytest.raises(ValueError, match="strength"):
            times_from(times, strength)


def edited(strength, n=2000):
    generator = keyed(n)
    start = noised_start(EXACT.schedule, ITEM_OF_EDITING.expand(n, 2), strength, generator)
    times = times_from(uniform_log_snr(EXACT.schedule, 200), strength)
    return sample(EXACT, (n, 2), times, DDPMSampler(), generator, dtype=torch.float64, start=start).x


@pytest.mark.parametrize("strength", [0.3, 0.6, 0.95])
def test_an_edit_has_the_distribution_of_data_that_would_look_alike_under_the_noise(strength):
    """E over x_t of p(x_0 | x_t): mean m + g (x - m), variance c^2 (1 - g) + (g sigma/alpha)^2, g the gain."""
    alpha, sigma = (float(v) for v in EXACT.schedule.alpha_sigma(torch.tensor(strength).double()))
    gain = alpha**2 * SCALE**2 / (alpha**2 * SCALE**2 + sigma**2)
    variance = SCALE**2 * (1 - gain) + (gain * sigma / alpha) ** 2
    x = edited(strength)
    assert ((x.mean(0) - MEAN - gain * (ITEM_OF_EDITING - MEAN)).abs() < 4 * math.sqrt(variance / len(x)) + 5e-3).all()
    assert ((x.var(0) / variance - 1).abs() < 4 * math.sqrt(2 / len(x)) + 0.03).all()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_an_edit_from_noise_alone_is_a_sample_of_the_same_temperature(temperature):
    """At t = 1 the linear path has no signal."""
    path, shape = make_path("linear", 1000), (4, 1)
    exact, sampler = GaussianDenoiser(path, torch.tensor([1.0]), 0.25), DiffusionSampler(1000, "beta", name="euler")
    options = SamplingOptions(n=4, steps=20, spacing="uniform_t", temperature=temperature)
    free = sampler(sampler.plan(path, options), exact, shape, options, keyed(4)).x
    item = torch.zeros(1)
    edit = replace(options, edit=item, strength=1.0)
    found = sampler(sampler.plan(path, edit), exact, shape, edit, keyed(4), edit=item[None]).x
    torch.testing.assert_close(found, free)
    assert float(free.std()) == pytest.approx(0, abs=1e-6) if temperature == 0 else float(free.std()) > 0.05


def test_an_edit_is_addressable():
    def run(index):
        generator = KeyedGenerator(3, index, "sample")
        return noised_start(EXACT.schedule, ITEM_OF_EDITING.expand(len(index), 2), 0.5, generator)

    assert torch.equal(run(torch.arange(9))[4:5], run(torch.tensor([4])))


def test_the_latents_of_a_gaussian_are_its_standardised_values():
    x0 = MEAN + SCALE * torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    z = invert(EXACT, x0, uniform_log_snr(EXACT.schedule, 400))
    assert ((z - (x0 - MEAN) / SCALE).abs() < 2e-2).all()


def round_trip(sampler, steps):
    x0 = EXACT.sample(20, keyed(20))
    times = uniform_log_snr(EXACT.schedule, steps, 1000)
    z = invert(EXACT, x0, times, sampler=sampler)
    back = sample(EXACT, x0.shape, times, sampler, keyed(20), dtype=torch.float64, start=z).x
    return float((back - x0).abs().max())


def test_the_way_there_and_back_comes_home():
    assert round_trip(HeunSampler(), 100) < 5e-3
    assert round_trip(EulerSampler(), 100) > 5 * round_trip(HeunSampler(), 100)


# ---- inpainting: what is known comes back bit for bit, and the rest approaches the exact conditional distribution ----


POSITION = torch.arange(6)
COVARIANCE = 0.9 ** (POSITION[:, None] - POSITION).abs().double()
KNOWN = torch.tensor([1.5, 1.0, 0.0, 0.0, -1.0, 0.0], dtype=torch.float64)
MASK = torch.tensor([True, True, False, False, True, False])
CORRELATED = GaussianDenoiser.from_covariance(CosineSchedule(), torch.zeros(6), COVARIANCE)


def exact():
    """Mean and covariance of the unknown given the known."""
    gain = COVARIANCE[~MASK][:, MASK] @ torch.linalg.inv(COVARIANCE[MASK][:, MASK])
    return gain @ KNOWN[MASK], COVARIANCE[~MASK][:, ~MASK] - gain @ COVARIANCE[MASK][:, ~MASK]


def draw(rounds, n, kind=Inpainting, steps=20, inner=None):
    sampler = kind(inner or DDPMSampler(), KNOWN, MASK, rounds=rounds)
    times = uniform_log_snr(CORRELATED.schedule, steps)
    return sample(CORRELATED, (n, 6), times, sampler, keyed(n), dtype=torch.float64).x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", INSTANCES)
def test_the_known_part_is_returned_bit_for_bit(name, dtype):
    sampler = Inpainting(INSTANCES[name], KNOWN, MASK, rounds=2)
    x = sample(CORRELATED, (4, 6), uniform_t(CORRELATED.schedule, 5), sampler, keyed(4), dtype=dtype).x
    assert torch.equal(x[:, MASK], KNOWN[MASK].to(dtype).expand(4, -1)) and x.isfinite().all()


def settles(kind=Inpainting):
    """The error of the mean falls with the rounds, and with many of them mean and covariance are near the truth."""
    n = 1000
    mean, covariance = exact()
    few, some = (draw(rounds, n, kind)[:, ~MASK] for rounds in (1, 10))
    slack = 3 * math.sqrt(float(covariance.diag().max()) / n)
    errors = [float((x.mean(0) - mean).norm()) for x in (few, some)]
    assert errors[1] + slack < errors[0] and errors[1] < 0.25 * errors[0] + slack
    many = draw(20, n, kind)[:, ~MASK]
    assert float((many.mean(0) - mean).norm()) < 0.06 + 3 * math.sqrt(float(covariance.trace()) / n)
    assert (torch.cov(many.T) - covariance).abs().max() < 0.04


def closed_form(variance, steps, rounds, known=1.5, correlation=0.8):
    """Mean and variance of the unknown of a pair with unit variances: RePaint on a Gaussian is linear in every step."""
    covariance = torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=torch.float64)
    denoiser = GaussianDenoiser.from_covariance(CosineSchedule(), torch.zeros(2, dtype=torch.float64), covariance)
    inner, eye = DDPMSampler(variance=variance), torch.eye(2, dtype=torch.float64)
    mean, spread = torch.zeros(2, dtype=torch.float64), eye
    times = uniform_t(denoiser.schedule, steps)
    for t, s in zip(times[:-1], times[1:], strict=True):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        step = inner(denoiser, eye, t, s, None, keyed(2), None, 0.0)[0].T  # linear, without its noise
        clean = bool(s == 0)
        own = 0.0 if clean else float(kernel_variance(inner.variance, None)(log_snr_s, log_snr_t))
        alpha2 = 1.0 if clean else float(torch.sigmoid(log_snr_s))
        shrink = float(torch.sigmoid(log_snr_t)) / alpha2  # alpha_t^2 / alpha_s^2
        for done in range(1 if clean else rounds):
            if done:
                mean, spread = shrink**0.5 * mean, shrink * spread + (1 - shrink) * eye
            mean, spread = step @ mean, step @ spread @ step.T + own * eye
            mean[0], spread[0, :], spread[:, 0] = alpha2**0.5 * known, 0, 0
            spread[0, 0] = 1 - alpha2
    return float(mean[1]), float(spread[1, 1])


class LateNoise(Inpainting):
    """The known part with the noise of t where that of s belongs."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        rounds = 1 if bool(s == 0) else self.rounds
        known = self.known.to(x).expand_as(x)
        for _ in range(rounds):
            drawn, memory = self.sampler(denoiser, x, t, s, None, generator, cond, temperature)
            first, second = (normal(x.shape, generator, dtype=x.dtype) for _ in range(2))
            given = known if bool(s == 0) else q_sample(known, log_snr_t, first)
            drawn = torch.where(self.mask, given, drawn)
            x = drawn if bool(s == 0) else renoise(drawn, log_snr_s, log_snr_t, second)
        return drawn, memory


class Stale(Inpainting):
    """Each round starts from the same x: the new noise is never used."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        for _ in range(self.rounds):
            out = Inpainting(self.sampler, self.known, self.mask, rounds=1)(
                denoiser, x, t, s, memory, generator, cond, temperature
            )
        return out


def test_the_unknown_part_settles_to_its_conditional_distribution():
    settles()


def test_the_check_catches_rounds_that_begin_anew():
    with pytest.raises(AssertionError):
        settles(Stale)


def as_noisy_as_the_step_says(kind, n=4000):
    """Half way down the known part is a draw of q(x_s | x_0)."""
    times = torch.tensor([0.8, 0.5], dtype=torch.float64)
    x = sample(CORRELATED, (n, 6), times, kind(DDIMSampler(), KNOWN, MASK, rounds=2), keyed(n), dtype=torch.float64).x
    alpha, sigma = CORRELATED.schedule.alpha_sigma(times[1])
    z = (x[:, MASK] - alpha * KNOWN[MASK]) / sigma
    assert (z.mean(0).abs() < 4 / math.sqrt(n)).all() and ((z.var(0) - 1).abs() < 4 * math.sqrt(2 / n)).all()


def test_the_known_part_has_the_noise_of_the_time_it_is_put_in():
    as_noisy_as_the_step_says(Inpainting)
    with pytest.raises(AssertionError):
        as_noisy_as_the_step_says(LateNoise)


def test_nothing_known_is_plain_sampling():
    nothing = torch.zeros(6, dtype=torch.bool)
    times = uniform_log_snr(CORRELATED.schedule, 12)
    a, b = (sample(CORRELATED, (5, 6), times, s, keyed(5), dtype=torch.float64).x
            for s in (Inpainting(DDIMSampler(), KNOWN, nothing, rounds=1), DDIMSampler()))  # fmt: skip
    assert torch.equal(a, b)


def test_sample_k_is_the_same_alone_and_in_any_batch_of_editing():
    times = uniform_log_snr(CORRELATED.schedule, 8)

    def run(index):
        sampler = Inpainting(DDPMSampler(), KNOWN, MASK, rounds=3)
        return sample(CORRELATED, (len(index), 6), times, sampler, KeyedGenerator(1, index, "sample")).x

    whole = run(torch.arange(20))
    for index in (torch.tensor([7]), torch.tensor([19, 0])):
        assert (run(index) - whole[index]).abs().max() < 1e-5
    assert not torch.allclose(whole[0], whole[1])


def test_bad_options():
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        Inpainting(DDPMSampler(), KNOWN, MASK, rounds=0)
    with pytest.raises(ValueError, match="must be boolean"):
        Inpainting(DDPMSampler(), KNOWN, MASK.float())


#: (variance of the inner kernel, steps, rounds): (mean, variance) of what is drawn; the truth is 1.2 and 0.36.
BIAS = {
    ("beta", 25, 1): (0.717, 0.525), ("beta", 25, 10): (1.132, 0.383), ("beta", 50, 1): (0.733, 0.510),
    ("beta", 50, 10): (1.145, 0.377), ("beta", 50, 30): (1.180, 0.367), ("beta_tilde", 50, 10): (1.145, 0.291),
    ("beta_tilde", 50, 30): (1.180, 0.258),
}  # fmt: skip


@pytest.mark.parametrize("variance, steps, rounds", BIAS)
def test_the_bias_that_is_documented(variance, steps, rounds):
    assert closed_form(variance, steps, rounds) == pytest.approx(BIAS[variance, steps, rounds], abs=6e-4)


def test_samples_have_the_bias_of_the_closed_form():
    """Both the wide and the narrow kernel, 5 rounds of 25 steps, within four standard errors."""
    n, pair = 4000, torch.tensor([[1.0, 0.8], [0.8, 1.0]], dtype=torch.float64)
    denoiser = GaussianDenoiser.from_covariance(CosineSchedule(), torch.zeros(2, dtype=torch.float64), pair)
    known, mask = torch.tensor([1.5, 0.0], dtype=torch.float64), torch.tensor([True, False])
    for variance in ("beta", "beta_tilde"):
        sampler = Inpainting(DDPMSampler(variance=variance), known, mask, rounds=5)
        x = sample(denoiser, (n, 2), uniform_t(denoiser.schedule, 25), sampler, keyed(n), dtype=torch.float64).x[:, 1]
        mean, spread = closed_form(variance, 25, 5)
        assert abs(float(x.mean()) - mean) < 4 * math.sqrt(spread / n)
        assert abs(float(x.var()) - spread) < 4 * spread * math.sqrt(2 / n)


def test_many_rounds_and_steps_are_exact():
    """The errors of mean and variance fall with the rounds, and further with the steps; one without the other stays."""
    errors = [[abs(v - w) for v, w in zip(closed_form("beta", *how), (1.2, 0.36), strict=True)]
              for how in ((25, 1), (25, 10), (25, 60), (100, 60))]
    for worse, better in zip(errors[:-1], errors[1:], strict=True):
        assert better[0] < worse[0] and better[1] < worse[1]
    assert errors[-1][0] < 0.012 and errors[-1][1] < 0.005
