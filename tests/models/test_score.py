"""The noise-conditional score model under the contract of every model."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, Normal

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.data.toy import density
from genmodels.diffusion import OdeLikelihood
from genmodels.energy import NoiseConditionalScore, NormalMixture
from genmodels.models.score import SAMPLERS, ScoreAsDenoiser, ScoreModel, sample_levels

DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
PLANE = DataSpec("plane", (2,))
MODELS = {
    "plane": lambda: ScoreModel(PLANE, net={"hidden": 16, "depth": 1}),
    "all levels": lambda: ScoreModel(PLANE, net={"hidden": 16, "depth": 1}, levels="all", ratio=1.5, smallest=0.1),
    "digits": lambda: ScoreModel(DIGITS, net={"channels": 8, "multipliers": [1, 2], "blocks": 1}),
}


def made(name: str) -> tuple[ScoreModel, Batch]:
    torch.manual_seed(0)
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(0)
    if model.spec.levels is None:
        batch = Batch(torch.randn(64, 2, generator=generator) * 3 + 1, index=torch.arange(64))
    else:
        x = torch.randint(0, 17, (64, 1, 8, 8), generator=generator).to(torch.uint8)
        batch = Batch(x, torch.arange(64) % 10, index=torch.arange(64))
    model.initialize(batch)
    return model, batch


def keyed(n: int, stream: str = "test") -> KeyedGenerator:
    return KeyedGenerator(0, torch.arange(n), stream)


@pytest.mark.parametrize("name", MODELS)
def test_the_levels_cover_the_data_and_the_loss_starts_at_one_half(name):
    model, batch = made(name)
    sigmas = model.sigmas
    z, _ = model.encoding(batch.x, keyed(64))
    assert sigmas[0] == pytest.approx(float(torch.cdist(z.flatten(1), z.flatten(1)).max()), rel=0.1)
    assert sigmas[-1] == pytest.approx(model.smallest) and all(a / b <= model.ratio + 1e-6 for a, b in
                                                              zip(sigmas[:-1], sigmas[1:], strict=True))
    loss = model.loss(batch, keyed(64))
    # The network starts at zero, so the loss is half the mean square of the noise.
    assert float(loss.value.detach()) == pytest.approx(0.5, abs=0.15)
    loss.value.backward()
    assert any(float(p.grad.abs().sum()) > 0 for p in model.core.parameters() if p.grad is not None)
    copy = MODELS[name]()
    copy.load_state_dict(model.state_dict())
    assert copy.sigmas == sigmas


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_exact_scores_of_a_mixture_give_its_samples(sampler):
    weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
    means = torch.tensor([[-1.5, 0.0], [1.5, 0.5]], dtype=torch.float64)
    mixture = NormalMixture(weights, means, 0.3)
    z, evaluations = sample_levels(
        mixture.with_noise(), (1000, 2), 8.0, 0.01, keyed(1000, "sample"), sampler=sampler, steps=60,
        dtype=torch.float64, callback=lambda done, z: None,
    )  # fmt: skip
    right = z[:, 0] > 0
    assert float(right.double().mean()) == pytest.approx(0.7, abs=0.06)
    assert z[right].mean(0).tolist() == pytest.approx([1.5, 0.5], abs=0.06)
    assert float(z[right].std()) == pytest.approx(float((0.09 + z[right].mean(0).var(unbiased=False)) ** 0.5), abs=0.06)
    assert evaluations % 1000 == 0


@pytest.mark.parametrize("name", ["plane", "digits"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sample_is_the_same_alone(name, sampler):
    model, _ = made(name)
    with torch.no_grad():
        for parameter in model.core.parameters():
            parameter.add_(0.05)
    options = {"sampler": sampler, "steps": 4, "seed": 3, "weights": "raw"}
    many, alone = model.sample(6, path=2, **options), model.sample(1, start=4, **options)
    tolerance = 1 if name == "digits" else 1e-4
    assert float((many.x[4].double() - alone.x[0].double()).abs().max()) <= tolerance
    assert many.path.shape == (2, *many.x.shape) and many.made["steps"] == 4
    assert (many.cond is None) == (name == "plane")


def test_there_is_no_likelihood_and_it_says_why():
    model, batch = made("plane")
    found = model.log_likelihood(batch)
    assert found.kind == "unnormalised" and "no energy" in found.made["reason"] and bool(found.nats.isnan().all())


def test_pictures_show_the_true_score_too():
    torch.manual_seed(0)
    model = ScoreModel(DataSpec("toy_banana", (2,)), net={"hidden": 16, "depth": 1})
    model.initialize(Batch(density("banana").sample(200, torch.Generator().manual_seed(0)).float()))
    assert model.pictures()["fields"].width >= 300
    assert made("digits")[0].pictures() == {}


BAD = [
    (lambda: ScoreModel(PLANE, ratio=1.0), "ratio"),
    (lambda: ScoreModel(PLANE, smallest=-1.0), "smallest"),
    (lambda: ScoreModel(PLANE).initialize(Batch(torch.ones(9, 2))), "constant"),
    (lambda: made("plane")[0].sample(2, inverse_temperature=-1), "must be a finite number"),
    (lambda: made("plane")[0].sample(2, temperature=0.25), "temperature=0.25 is inverse_temperature=4"),
    (lambda: made("plane")[0].sample(2, sampler="hmc"), "predictor_corrector"),
    (lambda: made("plane")[0].sample(2, steps=1), "at least 2"),
    (lambda: made("digits")[0].sample(2, cond=11), "0..9"),
]


@pytest.mark.parametrize("call, said", BAD, ids=[said for _, said in BAD])
def test_what_cannot_be_is_said(call, said, refuses):
    refuses(ValueError, said, call)


WEIGHTS, MEANS, SPREADS = torch.tensor([0.3, 0.7]), torch.tensor([-1.0, 0.6]), torch.tensor([0.2, 0.4])


def mixture(sigma: float = 0.0) -> MixtureSameFamily:
    """Two Gaussians of one number, with noise on it."""
    widths = (SPREADS.double().square() + sigma**2).sqrt()
    return MixtureSameFamily(Categorical(WEIGHTS.double()), Normal(MEANS.double(), widths))


def exact(y, sigma, cond=None):
    """The score of that mixture at any noise level."""
    with torch.enable_grad():
        y = y if y.requires_grad else y.detach().requires_grad_()
        widths = (SPREADS.to(y).square() + sigma.view(-1, 1, 1).to(y) ** 2).sqrt()
        parts = Normal(MEANS.to(y), widths).log_prob(y[..., None]) + WEIGHTS.to(y).log()
        return torch.autograd.grad(parts.logsumexp(-1).sum(), y, create_graph=True)[0]


def model(dims: int = 1, smallest: float = 0.02) -> ScoreModel:
    made = ScoreModel(DataSpec("x", (dims,)), net={"hidden": 8, "depth": 1}, ema_decay=0.0, smallest=smallest)
    made.largest.fill_(600.0)
    made.encoding.location.fill_(3.0)
    made.encoding.scale.fill_(2.0)
    return made.double()


def of_the_mixture() -> ScoreModel:
    made = model(3)
    made.core = NoiseConditionalScore(exact)
    return made


def values(made: ScoreModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and the exact log-densities of points in the data's units, of three independent coordinates."""
    z = mixture().sample((6, 3))
    found = made.ode_likelihood(Batch(3 + 2 * z), weights="raw", tolerance=1e-7)
    return found.nats, mixture(made.smallest).log_prob(z).sum(1) - 3 * math.log(2)


def test_the_density_is_the_exact_one_in_the_datas_units():
    torch.manual_seed(0)
    ours, truth = values(of_the_mixture())
    assert (ours - truth).abs().max() < 1e-3  # there is mean / largest left at the noisy end


@pytest.mark.parametrize("bug", ["level", "volume"])
def test_that_check_catches(monkeypatch, bug):
    if bug == "level":
        sound = ScoreAsDenoiser.forward
        monkeypatch.setattr(ScoreAsDenoiser, "forward", lambda self, x, t, *rest: sound(self, x, 0.98 * t, *rest))
    else:
        sound = OdeLikelihood.__call__
        monkeypatch.setattr(OdeLikelihood, "__call__", lambda self, *inputs, seed: sound(
            self, *inputs[:-1], inputs[-1] - 2 * math.log(10), seed=seed))  # ten times the smallest noise
    torch.manual_seed(0)
    ours, truth = values(of_the_mixture())
    assert (ours - truth).abs().max() > 1e-2


def test_the_density_of_any_network_integrates_to_one():
    torch.manual_seed(1)
    made = model(smallest=0.2)
    made.largest.fill_(20.0)
    for p in made.core.parameters():
        p.data += 0.3 * torch.randn_like(p)
    x = torch.linspace(-400, 400, 4001, dtype=torch.float64)[:, None]
    found = made.ode_likelihood(Batch(x), weights="raw", solver="rk4", steps=160, rows=4001)
    assert found.kind == "ode" and abs(float(found.nats.exp().sum() * 0.2) - 1) < 0.01


def test_integers_are_bounded_by_importance_samples():
    spec = DataSpec("digits", (1, 4, 4), levels=17, num_classes=10)
    made = ScoreModel(spec, net={"channels": 8, "multipliers": [1], "blocks": 1}, ema_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    batch = Batch(torch.randint(0, 17, (4, 1, 4, 4), generator=generator).to(torch.uint8), torch.arange(4),
                  index=torch.arange(4))  # fmt: skip
    made.initialize(batch)
    few, many = (made.ode_likelihood(batch, weights="raw", importance_samples=k, tolerance=1e-2) for k in (1, 3))
    alone = made.ode_likelihood(batch.rows(slice(3, 4)), weights="raw", tolerance=1e-2)
    assert abs(float(alone.nats[0] - few.nats[3])) < 1e-3
    assert few.levels == 17 and few.made["given"] == "class" and bool((many.evaluations > few.evaluations).all())
    assert few.nats.mean() < many.nats.mean() + 3 * float(many.stderr.square().sum().sqrt()) / 4
    with pytest.raises(InputError, match="choose uniform"):
        made.ode_likelihood(batch, dequantisation="diffusion")
