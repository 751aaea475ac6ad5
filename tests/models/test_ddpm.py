"""The DDPM module against closed forms, and the promises of its contract."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.likelihood import Likelihood
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import GaussianDenoiser
from genmodels.diffusion.path import VARIANCES, posterior
from genmodels.models.ddpm import DDPM
from tests.parameters import scattered

SMALL = {"channels": 8, "multipliers": [1, 2], "blocks": 1}
DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)


def small(spec: DataSpec = DIGITS, **options) -> DDPM:
    torch.manual_seed(0)
    if len(spec.event_shape) == 3:
        options = {"net": SMALL} | options
    model = DDPM(spec, **({"num_steps": 12} | options)).eval()
    scattered(model.core, 0.05)
    model.ema.update(model.core, 0)
    scattered(model.core, 0.01)  # averages differ from the raw weights
    return model


def batch(n: int = 6, spec: DataSpec = DIGITS) -> Batch:
    g = torch.Generator().manual_seed(1)
    if spec.levels is None:
        x = torch.randn(n, *spec.event_shape, generator=g)
    else:
        x = torch.randint(0, spec.levels, (n, *spec.event_shape), generator=g).to(torch.uint8)
    cond = None if spec.num_classes is None else torch.arange(n) % spec.num_classes
    return Batch(x, cond, index=torch.arange(n))


@pytest.mark.parametrize("levels", [2, 17, 256])
def test_levels_survive_the_way_there_and_back(levels):
    model = small(DataSpec("x", (1, 8, 8), levels=levels))
    x = torch.arange(levels).repeat(64)[: 64 * (levels // 64 + 1)].reshape(-1, 1, 8, 8).to(torch.uint8)
    inside = model.encode(x)
    assert float(inside.min()) >= -1 and float(inside.max()) <= 1
    assert torch.equal(model.decode(inside), x)


@pytest.mark.parametrize(
    "label, cond_drop, right", [(-1, 0.1, False), (11, 0.1, False), (10, 0.0, False), (10, 0.1, True)]
)
def test_labels_of_no_class_are_refused(label, cond_drop, right):
    """The last label is the null class of a model that has learned it."""
    model, items = small(cond_drop=cond_drop), batch(2)
    items.cond[1] = label
    latents = model.latents(batch(2), steps=2)
    for use in (lambda: model.log_likelihood(items), lambda: model.latents(items, steps=2),
                lambda: model.from_latents(latents, items.cond, steps=2)):
        said = rf"class {label} does not exist, classes are 0\.\.9"
        with contextlib.nullcontext() if right else pytest.raises(InputError, match=said):
            use()


def gaussian_model(location: float, scale: float) -> DDPM:
    """A DDPM whose network is the optimal one for data N(location, scale^2)."""
    spec = DataSpec("gauss", (2,), levels=None)
    model = DDPM(spec, num_steps=400, schedule="linear_log_snr", ema_decay=0.0).double()
    model.core = GaussianDenoiser(model.core.schedule, torch.zeros(2, dtype=torch.float64), 1.0)
    model.location.fill_(location)
    model.scale.fill_(scale)
    return model


def gap_to_exact(model: DDPM, location: float, scale: float) -> tuple[float, float]:
    """Mean of exact minus bound on data from the true distribution, and its standard error."""
    distribution = Normal(torch.tensor(location, dtype=torch.float64), scale)
    x = location + scale * KeyedGenerator(0, torch.arange(400)).normal((400, 2), dtype=torch.float64)
    bound = model.log_likelihood(Batch(x, index=torch.arange(400)), weights="raw").nats
    gaps = distribution.log_prob(x).sum(1) - bound
    return float(gaps.mean()), float(gaps.std() / math.sqrt(len(gaps)))


@pytest.mark.parametrize("location, scale", [(0.0, 1.0), (5.0, 0.2), (-3.0, 40.0)])
def test_the_bound_of_the_optimal_model_meets_the_exact_density_in_the_datas_units(location, scale):
    gap, error = gap_to_exact(gaussian_model(location, scale), location, scale)
    assert -4 * error <= gap < 0.05 + 4 * error, (gap, error)


def test_that_check_catches_a_forgotten_volume():
    model = gaussian_model(5.0, 0.2)
    encode = model.encode
    model.encode = lambda x: encode(x) if x.dtype.is_floating_point else x
    model.scale = torch.ones(2, dtype=torch.float64)  # the log of the scale is lost
    model.encode = lambda x: (x - 5.0) / 0.2
    gap, error = gap_to_exact(model, 5.0, 0.2)
    assert not -4 * error <= gap < 0.05 + 4 * error


def excess(model, variance: float) -> float:
    """Nats a scalar by which the bound of the best denoiser of N(0, variance) exceeds the entropy; closed form."""
    log_snr = model.core.schedule.log_snr(model.elbo.times(model.core.schedule)).detach()
    error = variance / (1 + variance * torch.exp(log_snr))  # E |x_0 - x0_hat|^2
    s, t, first, last = log_snr[:-1], log_snr[1:], log_snr[0], log_snr[-1]
    c_0, _, v = posterior(s, t)
    kernel = VARIANCES[model.variance]
    ratio = v / kernel(s, t)
    diffusion = (ratio - 1 - ratio.log() + c_0.square() * error[1:] / kernel(s, t)).sum() / 2
    read = kernel(torch.full_like(first, math.inf), first)
    reconstruction = (error[0] / read + torch.log(2 * math.pi * read)) / 2
    alpha2, sigma2 = torch.sigmoid(last), torch.sigmoid(-last)
    prior = (alpha2 * variance + sigma2 - 1 - sigma2.log()) / 2
    return float(prior + diffusion + reconstruction) - math.log(2 * math.pi * math.e * variance) / 2


@pytest.mark.parametrize("variance", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("shape", [(2,), (1, 8, 8)])
def test_the_default_bound_of_continuous_data_is_within_two_hundredths_of_a_nat_of_the_entropy(shape, variance):
    spec = DataSpec("gauss", shape, levels=None)
    assert -1e-3 < excess(DDPM(spec, net=SMALL if len(shape) > 1 else None), variance) < 0.02


def test_steps_even_in_log_snr_cost_little_under_either_variance_and_steps_even_in_time_much():
    model = DDPM(DataSpec("gauss", (2,), levels=None), variance="beta_tilde")
    assert excess(model, 1.0) < 0.08
    model.elbo.times = model.elbo.steps
    assert excess(model, 1.0) > 0.7


def test_the_default_variance_is_that_of_the_kind_of_data():
    kinds = {"beta_tilde": DIGITS, "beta": DataSpec("v", (3,), levels=None)}
    for expected, spec in kinds.items():
        model = small(spec)
        found = model.log_likelihood(batch(spec=spec), weights="raw")
        assert model.variance == expected == found.made["variance"]


def test_initialize_takes_mean_and_standard_deviation_of_continuous_data_only():
    model = small(DataSpec("v", (3,), levels=None))
    data = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0, 0.1]) + 7
    model.initialize(Batch(data))
    z = model.encode(data)
    assert torch.allclose(z.mean(0), torch.zeros(3), atol=1e-3) and torch.allclose(z.std(0), torch.ones(3), atol=1e-3)
    assert torch.allclose(model.decode(z), data, atol=1e-4)
    digits = small()
    digits.initialize(batch())
    assert float(digits.location.abs().max()) == 0 and float(digits.scale.min()) == 1


def test_a_constant_column_is_refused():
    model = small(DataSpec("v", (3,), levels=None))
    with pytest.raises(ValueError, match="column 2 of v is constant"):
        model.initialize(Batch(torch.tensor([[1.0, 2.0, 3.0], [2.0, 2.0, 4.0]])))


@pytest.mark.parametrize("clip", [True, "static", "dynamic"])
def test_continuous_data_have_no_range_to_clip_to(clip):
    with pytest.raises(InputError, match="clip is for integers"):
        small(DataSpec("v", (3,), levels=None)).sample(2, steps=2, clip=clip)
    assert small(DIGITS).sample(2, steps=2, clip=clip).made["clip"] == ("dynamic" if clip == "dynamic" else "static")


@pytest.mark.filterwarnings("ignore:std:UserWarning")
def test_a_single_continuous_item_is_refused():
    with pytest.raises(ValueError, match="column 1 of v is constant"):
        small(DataSpec("v", (3,), levels=None)).initialize(Batch(torch.tensor([[1.0, 2.0, 3.0]])))


def test_the_likelihood_does_not_depend_on_the_batch():
    model, items = small(), batch()
    whole = model.log_likelihood(items)
    parts = [model.log_likelihood(items.rows(slice(i, i + 1))) for i in (3, 0, 5, 1, 4, 2)]
    joined = Likelihood.concatenate(parts).in_index_order()
    assert torch.allclose(joined.nats, whole.nats, rtol=1e-5)
    few_rows = model.log_likelihood(items, rows=3)
    assert torch.allclose(few_rows.nats, whole.nats, rtol=1e-5)


def test_its_parts_and_profile_add_up():
    model, items = small(), batch()
    for options in ({}, {"draws": 4, "replicates": 3}):
        result = model.log_likelihood(items, **options)
        assert torch.allclose(-sum(result.parts.values()), result.nats, rtol=1e-9)
        assert math.isclose(float(result.profile.nats.sum()), float(result.parts["diffusion"].sum()), rel_tol=1e-9)
        assert result.profile.items == len(items) and (result.profile.edges.diff() < 0).all()
        assert len(result.profile.edges) == len(result.profile.nats) + 1


def test_stratified_terms_agree_with_all_of_them():
    model, items = small(num_steps=40), batch(60)
    every = model.log_likelihood(items)
    some = [model.log_likelihood(items, draws=6, replicates=4, seed=seed) for seed in range(4)]
    difference = torch.stack([s.nats for s in some]).mean(0) - every.nats
    assert abs(float(difference.mean())) < 4 * float(difference.std() / math.sqrt(len(items)))
    returned = torch.stack([s.stderr for s in some]).square().mean().sqrt()
    spread = torch.stack([s.nats for s in some]).std(0).square().mean().sqrt()
    assert 0.6 < float(returned / spread) < 1.6


def test_a_fresh_network_is_near_the_uniform_scale_and_weights_are_told_apart():
    model, items = small(), batch()
    ema, raw = (model.log_likelihood(items, weights=w) for w in ("ema", "raw"))
    assert ema.made["weights"] == "ema" and not torch.allclose(ema.nats, raw.nats)
    assert ema.kind == "lower_bound" and ema.levels == 17 and (ema.dims == 64).all()


SAMPLERS = [("ddpm", {}), ("ddim", {"eta": 0.5}), ("ddim", {}), ("dpmpp_2m", {})]


@pytest.mark.parametrize("sampler, options", SAMPLERS)
def test_sample_k_is_the_same_alone_and_in_any_batch(sampler, options):
    model = small()
    options = {"sampler": sampler, "steps": 6, "seed": 5} | options
    whole = model.sample(64, **options)
    assert whole.x.dtype == torch.uint8 and whole.x.shape == (64, 1, 8, 8)
    for k in (0, 31, 63):
        alone = model.sample(1, start=k, **options)
        assert int(alone.cond[0]) == int(whole.cond[k])
        assert (alone.x[0].int() - whole.x[k].int()).abs().max() <= 1
        assert (alone.x[0] == whole.x[k]).float().mean() > 0.98
    other = model.sample(64, **{**options, "seed": 6})
    assert (other.x == whole.x).float().mean() < 0.9


def test_sampling_counts_and_keeps_the_path():
    model = small()
    out = model.sample(3, sampler="ddpm", path=4)
    assert out.made["evaluations"] == out.made["steps"] == 12
    assert out.path.shape == (4, 3, 1, 8, 8) and torch.equal(out.path[-1], out.x)
    calls = []
    model.sample(2, steps=5, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(k, 5) for k in range(1, 6)]


def test_temperature_zero_is_one_sample():
    spec = DataSpec("v", (3,), levels=None)
    model = small(spec)
    x = model.sample(5, temperature=0.0, sampler="ddpm").x
    assert torch.allclose(x, x[:1].expand_as(x), atol=1e-5)
    assert float(model.sample(5, sampler="ddpm").x.std()) > 0.01


def test_labels():
    named = DataSpec("c", (1, 8, 8), levels=17, num_classes=3, class_names=("cat", "dog", "emu"))
    model = small(named)
    index = torch.arange(5)
    assert model.labels(None, index).tolist() == [0, 1, 2, 0, 1]
    assert model.labels(2, index).tolist() == [2] * 5
    assert model.labels([0, "emu"], index).tolist() == [0, 2, 0, 2, 0]
    assert model.labels([np.int64(1), torch.tensor(2)], index).tolist() == [1, 2, 1, 2, 1]
    unconditional = small(named, class_conditional=False)
    assert unconditional.labels(None, index) is None and unconditional.sample(2, steps=2).cond is None


@pytest.mark.parametrize(
    "options, said",
    [
        ({"n": 0}, "n must be at least 1"),
        ({"steps": 13}, r"1\.\.12"),
        ({"steps": 0}, r"1\.\.12"),
        ({"sampler": "rk45"}, "ddpm, ddim, euler, heun, edm, dpmpp_2m, unipc"),
        ({"temperature": -1.0}, "temperature"),
        ({"cond": 10}, r"classes are 0\.\.9"),
        ({"cond": "seven"}, "seven"),
        ({"spacing": "square"}, "uniform_t"),
        ({"sampler": "ddim", "eta": 2.0}, "eta"),
    ],
)
def test_sampling_errors(options, said):
    with pytest.raises(ValueError, match=said):
        small().sample(**({"n": 2} | options))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"num_steps": 1}, "num_steps"),
        ({"noise": float("nan")}, "noise must be a finite number from 0"),
        ({"net": {"chanels": 3}}, "did you mean 'channels'"),
        ({"net": {"multipliers": [1, 2, 2, 2, 2]}}, "levels"),
        ({"schedule": "linear", "num_steps": 10}, "linear"),
    ],
)
def test_construction_errors(options, said):
    with pytest.raises(ValueError, match=said):
        DDPM(DIGITS, **options)


def test_a_class_condition_changes_the_answer():
    model, items = small(), batch()
    other = Batch(items.x, (items.cond + 1) % 10, index=items.index)
    assert not torch.allclose(model.log_likelihood(items).nats, model.log_likelihood(other).nats)


@pytest.mark.parametrize("objective", ["simple", "vlb"])
@pytest.mark.parametrize("spec", [DIGITS, DataSpec("v", (3,), levels=None)])
def test_the_loss_reaches_every_parameter_and_names_its_parts(objective, spec):
    model = small(spec, objective=objective)
    loss = model.loss(batch(8, spec), KeyedGenerator(0, torch.arange(8), "train"))
    loss.value.backward()
    assert loss.per_example.shape == (8,) and all(v.shape == (8,) for v in loss.parts.values())
    unused = [n for n, p in model.core.named_parameters() if p.grad is None]
    assert not unused, unused


def test_two_halves_of_a_batch_are_the_batch(monkeypatch):
    """What each of two processes computes: the noise of an example is keyed by its place in the global batch."""
    model, items = small(), batch(8)
    whole = model.loss(items, KeyedGenerator(0, torch.arange(8), "train", 3)).per_example
    for rank in (0, 1):
        mine = torch.arange(rank, 8, 2)
        monkeypatch.setattr("genmodels.models.diffusion.rank_world", lambda rank=rank: (rank, 2))
        half = model.loss(items.rows(mine), KeyedGenerator(0, mine, "train", 3)).per_example
        assert torch.allclose(half, whole[mine], rtol=1e-5)
