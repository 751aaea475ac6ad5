"""The flow-matching module: one network that is a flow and a denoiser, and the same parts as DDPM around it."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from genmodels.core.data import Batch, DataSpec
from genmodels.core.random import KeyedGenerator
from genmodels.data.transport import Transport
from genmodels.diffusion import SAMPLERS, GaussianDenoiser, MixtureDenoiser, make_path, velocity_of
from genmodels.models import base, diffusion
from genmodels.models.checkpoint import load_model
from genmodels.models.ddpm import DDPM
from genmodels.models.flow_matching import FlowMatchingModel
from genmodels.training.trainer import initial_batch
from tests.parameters import scattered
from tests.untrained import write

SMALL = {"channels": 8, "multipliers": [1, 2], "blocks": 1}
DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)


def small(kind=FlowMatchingModel, spec=DIGITS, **options):
    torch.manual_seed(0)
    model = kind(spec, **({"num_steps": 12, "net": SMALL, "ema_decay": 0.0} | options)).eval()
    scattered(model.core, 0.05)
    return model


def batch(n=6):
    g = torch.Generator().manual_seed(1)
    x = torch.randint(0, 17, (n, 1, 8, 8), generator=g).to(torch.uint8)
    return Batch(x, torch.arange(n) % 10, index=torch.arange(n))


@pytest.mark.parametrize("options", [
    {}, {"sigma_min": 0.01}, {"path": "cosine"}, {"path": "vp_linear"}, {"coupling": "ot"}, {"coupling": "sinkhorn"},
    {"time_sampler": "logit_normal"}, {"time_sampler": "cosmap"}, {"time_sampler": "loss_aware"},
    {"time_sampler": "log_uniform"},
], ids=str)  # fmt: skip
def test_losses_are_keyed_and_have_gradients(options):
    model = small(num_steps=1000, **options)
    losses = [model.loss(batch(), KeyedGenerator(0, torch.arange(6), "train")) for _ in range(2)]
    assert torch.equal(losses[0].per_example, losses[1].per_example) and losses[0].per_example.shape == (6,)
    losses[0].value.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.core.parameters())


@pytest.mark.parametrize("earlier", [False, True])
def test_checkpoints_keep_the_scale_of_their_fourier_features(earlier, tmp_path, monkeypatch):
    """Mutant: one of the version that did not name it and had the input's own scale, read with today's default."""
    of = "input" if earlier else "data"
    model = small(net=SMALL | {"fourier": [2]} | ({"fourier_of": of} if earlier else {}))
    path = write(model, tmp_path / "model.ckpt")
    if earlier:
        model.hparams["net"].pop("fourier_of")
        monkeypatch.setattr(base, "name_former", lambda stored, value: stored)
        path = write(model, tmp_path / "earlier.ckpt")
    found, header = load_model(path, device="cpu")
    assert header["model"]["net"]["fourier_of"] == found.core.net.fourier_of == of
    assert torch.equal(found.eval().sample(2, steps=3).x, model.sample(2, steps=3).x)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_serves_it(sampler):
    x = small().sample(3, sampler=sampler, steps=4).x
    assert x.shape == (3, 1, 8, 8) and x.dtype == torch.uint8


def test_samples_are_those_of_their_number():
    model = small()
    several, one = model.sample(4, steps=3), model.sample(1, steps=3, start=2)
    assert torch.equal(several.x[2], one.x[0]) and several.made["sampler"] == "flow"


def test_guidance_inpainting_editing_and_latents_serve_it():
    model, known = small(), batch().x[0]
    keep = torch.zeros(1, 8, 8, dtype=torch.bool)
    keep[:, :4] = True
    assert model.sample(2, steps=3, guidance=2.0, cond=3).x.shape == (2, 1, 8, 8)
    kept = model.sample(2, steps=3, known=known, keep=keep, rounds=2).x
    assert torch.equal(kept[:, :, :4], known[:, :4].expand(2, 1, 4, 8))
    assert model.sample(2, steps=3, edit=known, strength=0.5).x.shape == (2, 1, 8, 8)
    calm = FlowMatchingModel(DIGITS, net=SMALL, ema_decay=0.0).eval()  # of the zero start: no clipped level
    assert torch.equal(calm.from_latents(calm.latents(batch(), steps=10), batch().cond, steps=10), batch().x)


def test_a_ddpm_is_sampled_as_a_flow_and_the_other_way_round():
    """Along another path the trajectories of the ODE stay the same: many steps end at the same samples."""
    spec = DataSpec("plane", (2,))
    for kind, own, other in ((DDPM, "vp_cosine", "linear"), (FlowMatchingModel, "linear", "vp_cosine")):
        model = small(kind, spec, net={"hidden": 16, "depth": 1}, num_steps=1000)
        here = model.sample(5, sampler="heun", steps=60, along=own).x
        there = model.sample(5, sampler="heun", steps=60, along=other)
        assert (here - there.x).abs().max() < 0.02 and there.made["along"] == other
    with pytest.raises(ValueError, match="along must be one of linear"):
        model.sample(1, along="straight")


def exact(path, location=5.0, scale=0.2):
    """A model whose network is the optimal one for data N(location, scale^2)."""
    model = FlowMatchingModel(DataSpec("gauss", (2,)), path=path, num_steps=400, ema_decay=0.0).double()
    schedule = make_path(path, 400)
    model.core = GaussianDenoiser(schedule, torch.zeros(2), 1.0, parameterisation=velocity_of(schedule))
    model.location.fill_(location)
    model.scale.fill_(scale)
    return model


@pytest.mark.parametrize("path", ["linear", "cosine"])
def test_likelihoods_meet_the_exact_density_in_the_datas_units(path):
    model = exact(path)
    x = 5 + 0.2 * KeyedGenerator(0, torch.arange(200)).normal((200, 2), dtype=torch.float64)
    truth, items = Normal(5.0, 0.2).log_prob(x).sum(1), Batch(x, index=torch.arange(200))
    ode = model.ode_likelihood(items, weights="raw")
    assert ode.kind == "ode" and (ode.nats - truth).abs().max() < 2e-3
    assert ode.solver_change is not None and float(ode.solver_change.nan_to_num().abs().max()) < 1e-2
    bound = model.log_likelihood(items, weights="raw")
    assert bound.profile.edges.isfinite().all() and (bound.profile.edges.diff() < 0).all()  # at t = 1 log SNR is -inf
    gaps = truth - bound.nats
    assert -4 * float(gaps.std()) / math.sqrt(200) <= float(gaps.mean()) < 0.05 + 4 * float(gaps.std()) / math.sqrt(200)


def test_probes_and_dequantisations_have_standard_errors():
    probes = {"divergence": "hutchinson", "probes": 4}
    variational = {"importance_samples": 2, "dequantisation": "diffusion"}
    corner = Batch(batch(2).x[..., :4, :4], torch.arange(2), index=torch.arange(2))  # a divergence of 16 dimensions
    levels = small(spec=DataSpec("digits", (1, 4, 4), levels=17, num_classes=10))
    real, plane = Batch(torch.ones(2, 2)), small(spec=DataSpec("plane", (2,)), net={"hidden": 8, "depth": 1})
    for model, items, options in ((plane, real, probes), (levels, corner, variational)):
        found = model.ode_likelihood(items, solver="heun", steps=4, **options)
        assert found.stderr.shape == (2,) and torch.isfinite(found.nats).all() and bool((found.stderr > 0).all())
    # The spread of the probes of one dequantisation is not the error of a value of integers.
    assert levels.ode_likelihood(corner, solver="heun", steps=4, **probes).stderr is None


# ---- reflow ----


def straightness(model, noise, steps=40):
    """E int |(eps - x_0) - v(x_t, t)|^2 dt along the trajectories of Euler's method."""
    path, t = model.core.schedule, torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    x, velocities = noise, []
    for now, then in zip(t[:-1], t[1:], strict=True):
        u = model.core(x / path.scale(now).to(x), now.expand(len(x))).velocity
        velocities.append(u)
        x = x + (then - now).to(x) * u
    return float(torch.stack([(noise - x - u).square().sum(1) for u in velocities]).mean())


@torch.enable_grad()
def fitted(model, loss, steps=150):
    optimizer = torch.optim.Adam(model.core.parameters(), 5e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).value.backward()
        optimizer.step()
    return model


def test_reflow_learns_the_pairs_of_a_checkpoint_and_is_straighter(tmp_path):
    """Two far modes: the first flow bends, its reflow hardly does, and leads each noise to nearly the same place."""
    plane, net = DataSpec("plane", (2,)), {"hidden": 32, "depth": 2}
    index = torch.arange(256)
    data = Batch(torch.randn(256, 2, generator=torch.Generator().manual_seed(0)) * 0.1, index=index)
    data.x[:, 0] += torch.where(index % 2 == 0, -1.0, 1.0)

    def step(model, number):
        return model.loss(data, KeyedGenerator(0, index, "train", step=number))

    torch.manual_seed(0)
    first = FlowMatchingModel(plane, net=net, ema_decay=0.0)
    first.initialize(data)
    fitted(first, step)
    torch.manual_seed(0)
    path = write(first, tmp_path / "first.ckpt")
    second = FlowMatchingModel(plane, net=net, ema_decay=0.0, reflow=path, reflow_pairs=512)
    second.initialize(data)
    drawn = torch.get_rng_state()
    second.loss(data, KeyedGenerator(0, index, "train"))
    assert torch.equal(torch.get_rng_state(), drawn)  # a resumed run, which draws the pairs again, goes on as before
    pairs = second.pairs
    assert (first.follow(pairs.noise[:8], steps=20) - pairs.x0[:8]).abs().max() < 1e-4
    fitted(second, step)
    noise = KeyedGenerator(1, torch.arange(200), "test").normal((200, 2))
    with torch.no_grad():
        assert straightness(second, noise) < 0.3 * straightness(first, noise)
        off = (second.follow(noise, steps=20) - first.follow(noise, steps=20)).square().sum(1)
    assert float(off.median()) < 0.05


def test_reflow_without_classes_has_the_shares_of_the_data(tmp_path):
    """Where the teacher has learned the data of all classes; else its classes are drawn in turn."""
    step = batch(), KeyedGenerator(0, torch.arange(6), "train")
    for cond_drop, cond in ((0.1, None), (0.0, torch.arange(8) % 10)):
        teacher = small(cond_drop=cond_drop)
        path = write(teacher, tmp_path / f"{cond_drop}.ckpt")
        student = small(class_conditional=False, reflow=path, reflow_pairs=8)
        student.loss(*step)
        assert torch.equal(student.pairs.x0, teacher.follow(student.pairs.noise, cond, steps=20))
        assert student.pairs.cond is None


def test_what_reflow_cannot_learn(tmp_path):
    other = small(spec=DataSpec("other", (1, 4, 4), levels=17))
    with pytest.raises(ValueError, match=r"holds a flow_matching of \(1, 4, 4\)"):
        small(reflow=write(other, tmp_path / "other.ckpt")).loss(batch(), KeyedGenerator(0, torch.arange(6), "train"))
    with pytest.raises(ValueError, match="its pairs are given"):
        small(reflow="x.ckpt", coupling="ot")


def test_options_that_do_not_fit():
    with pytest.raises(ValueError, match="sigma_min is for path=linear"):
        FlowMatchingModel(DIGITS, net=SMALL, path="cosine", sigma_min=0.1)
    with pytest.raises(ValueError, match="coupling must be one of"):
        FlowMatchingModel(DIGITS, net=SMALL, coupling="exact")
    with pytest.raises(ValueError, match="along must be one of linear, cosine, vp_linear"):
        small().sample(1, along="straight")


def validated(model, x):
    model.log = lambda *args, **kwargs: None
    for part in torch.arange(len(x)).split(500):
        model.validation_step(Batch(x[part], index=part), 0)
    model.on_validation_epoch_end()
    return model.validated


def in_the_plane(mixture=False):
    """The exact velocity of a Gaussian, or of two, in the plane, and its density in the data's units."""
    model = small(spec=DataSpec("plane", (2,)), net={"hidden": 8, "depth": 1}, num_steps=1000).double()
    centres = torch.tensor([[-0.9, 0.0], [0.9, 0.0]], dtype=torch.float64) * mixture
    path, shares = model.core.schedule, torch.tensor([0.3, 0.7], dtype=torch.float64)
    model.core = MixtureDenoiser(path, shares, centres, 0.2**2)
    model.scale.fill_(3.0)
    each = Independent(Normal(3 * centres, 0.6), 1)
    return model, MixtureSameFamily(Categorical(shares), each)


@pytest.mark.parametrize("mixture", [False, True])
def test_validation_in_the_plane_solves_the_ode(mixture):
    """Within a few thousandths of the exact density, as the solver's own change says; of the first thousand items."""
    model, exact = in_the_plane(mixture)
    torch.manual_seed(0)
    x = exact.sample((1200,))
    found = validated(model, x)
    assert found.kind == "ode" and len(found) == 1000 and found.made["divergence"] == "exact"
    off = found.nats - exact.log_prob(x[:1000])
    assert abs(float(off.mean())) < 0.01 and float(off.abs().max()) < 0.5
    assert model.figures["val/nll"] == -found.mean_nats() and abs(float(found.solver_change.nanmean())) < 0.05


def test_that_check_catches_half_the_steps(monkeypatch):
    monkeypatch.setitem(diffusion._VALIDATION_ODE, "steps", 3)
    with pytest.raises(AssertionError):
        test_validation_in_the_plane_solves_the_ode(True)


def test_validation_of_integers_stays_a_bound():
    assert validated(small(), batch().x).kind == "lower_bound"


# ---- from another data set -------------------------------------------------------------------------------------------

BETWEEN = DataSpec("from_a_to_b", (2,), source={"name": "a", "levels": None})


class Formula(torch.nn.Module):
    """A formula in place of a network."""

    def __init__(self, formula):
        super().__init__()
        self.forward = formula


def transporting(**options):
    return small(spec=BETWEEN, net={"hidden": 16, "depth": 1}, num_steps=1000, **options)


def test_the_flow_between_two_gaussians_is_the_exact_map():
    """Of independent x ~ N(5, 2^2) and e ~ N(-3, 0.5^2) the flow maps e to 5 + 4 (e + 3)."""
    model = transporting().double()
    x, e = (centre + width * torch.randn(20000, 2, dtype=torch.float64) for centre, width in ((5.0, 2.0), (-3.0, 0.5)))
    model.initialize(Batch(x, source=e))
    exact = GaussianDenoiser(model.core.schedule, torch.zeros(2, dtype=torch.float64), 1.0)
    model.core.net = Formula(lambda x_t, log_snr, cond: unit_velocity(exact, x_t, log_snr))
    start = torch.tensor([[-3.0, -2.5], [-4.0, -3.2]])
    found = model.sample(3, source=start, steps=50)
    assert torch.allclose(found.x[:2], 5 + 4 * (start.double() + 3), atol=0.1)
    assert torch.equal(found.source[2], start[0]) and found.made["sampler"] == "flow"


def test_a_class_without_items_to_start_from_is_named():
    spec = DataSpec("from_a_to_b", (2,), num_classes=2, source={"name": "a", "levels": None})
    model = small(spec=spec, net={"hidden": 16, "depth": 1})
    model._held_out["test"] = Batch(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    assert model.sample(2, cond=0).x.shape == (2, 2)
    with pytest.raises(ValueError, match="a has no items of class 1 in its test split: choose other classes"):
        model.sample(2)


def unit_velocity(exact, x_t, log_snr):
    t = exact.schedule.time_of(log_snr)
    return exact(x_t / exact.schedule.scale(t)[:, None], t).velocity


@pytest.mark.parametrize("coupling", ["independent", "ot", "sinkhorn"])
def test_what_is_learned_between_data_sets_is_the_difference_of_a_pair(coupling):
    model, n = transporting(coupling=coupling), 6
    g = torch.Generator().manual_seed(2)
    both = Batch(torch.randn(n, 2, generator=g), index=torch.arange(n), source=torch.randn(n, 2, generator=g))
    seen = {}

    def predict(x_t, log_snr, cond):
        seen["x_t"], seen["t"] = x_t, model.core.schedule.time_of(log_snr)[:, None]
        return torch.zeros_like(x_t)

    model.core.net = Formula(predict)
    losses = [model.loss(both, KeyedGenerator(0, torch.arange(n), "train")).per_example for _ in range(2)]
    partner = (seen["x_t"] - (1 - seen["t"]) * both.x) / seen["t"]
    off = torch.cdist(partner.float(), both.source)
    assert torch.equal(losses[0], losses[1]) and float(off.min(1).values.max()) < 1e-3
    assert torch.allclose(losses[0], (partner - both.x).square().mean(1).float(), rtol=1e-3)
    if coupling == "ot":
        assert off.argmin(1).unique().numel() == n
    if coupling == "independent":
        assert torch.equal(off.argmin(1), torch.arange(n))


def test_validation_between_data_sets_is_an_energy_distance():
    model = transporting()
    model.log = lambda *args, **kwargs: None
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(3))
    model.core.net = Formula(lambda x_t, log_snr, cond: torch.zeros_like(x_t))  # stays where it is
    for shift in (0.0, 3.0):
        model.validation_step(Batch(x + shift, index=torch.arange(400), source=x.flip(0)), 0)
        model.on_validation_epoch_end()
        assert (shift == 0) == (abs(model.figures["val/energy_distance"]) < 0.02)


def test_a_constant_source_is_refused():
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(3))
    with pytest.raises(ValueError, match="the source, is constant"):
        transporting().initialize(Batch(x, source=torch.cat([x[:, :1], torch.ones(9, 1)], 1)))


def test_what_needs_noise_is_refused_between_data_sets():
    model = transporting()
    assert not model.has_ode_likelihood and not hasattr(model, "elbo")
    with pytest.raises(ValueError, match="transforms a density that is not known"):
        model.ode_likelihood(Batch(torch.zeros(2, 2)))
    found = model.log_likelihood(Batch(torch.zeros(2, 2)))
    assert found.kind == "unnormalised" and "density that is not known" in found.made["reason"]
    with pytest.raises(ValueError, match="the score is known where"):
        _ = model.core(torch.zeros(1, 2), torch.tensor([0.5])).score
    for options, message in (({"sampler": "ddpm"}, "must be one of flow, euler, heun"), ({"temperature": 0.5}, "noise"),
                             ({}, "give source="), ({"source": torch.zeros(1, 3)}, r"not of \(2,\)")):
        with pytest.raises(ValueError, match=message):
            model.sample(2, **options)
    with pytest.raises(ValueError, match="take linear or cosine"):
        transporting(path="vp_linear")
    with pytest.raises(ValueError, match="begins at another data set, and a ddpm at noise"):
        DDPM(BETWEEN)


def test_samples_and_pairs_of_reflow_start_from_items_of_the_source(tmp_path):
    """Number k of the samples from item k of the test split, pair k from item k of the training split."""
    config = {"_target_": "genmodels.data.transport.Transport", "source": "moons", "target": "banana"}
    data = Transport(source="moons", target="banana").prepare()

    def made(**options):
        model = small(spec=data.spec, net={"hidden": 16, "depth": 1}, num_steps=1000, **options)
        model.run_config = {"data": config}
        model.initialize(initial_batch(data, 1000))
        return model

    first = made()
    items = data.sources("test").x
    whole, part = first.sample(4, steps=5), first.sample(2, start=2, steps=5)
    assert torch.equal(whole.source, items[:4]) and torch.allclose(part.x, whole.x[2:], atol=1e-5)
    assert not torch.equal(whole.x, first.sample(4, steps=5, source=items[4:8]).x)
    path = write(first, tmp_path / "first.ckpt")
    second = made(reflow=path, reflow_pairs=8)
    second.loss(Batch(items[:4], index=torch.arange(4), source=items[:4]), KeyedGenerator(0, torch.arange(4), "train"))
    start = second.encode_source(data.sources("train").x[:8])
    assert torch.equal(second.pairs.noise, start)
    assert torch.allclose(second.pairs.x0, first.follow(start, steps=20), atol=1e-4)
    with pytest.raises(ValueError, match="starts from toy_moons, and this model from noise"):
        small(spec=DataSpec("plane", (2,)), net={"hidden": 16, "depth": 1}, reflow=path).loss(
            Batch(items[:4], index=torch.arange(4)), KeyedGenerator(0, torch.arange(4), "train"))
