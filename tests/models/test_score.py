"""The score model: exact scores in its place, its samplers, and the contract of every model."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.data.toy import density
from genmodels.diffusion import Denoiser
from genmodels.energy import GaussianMixture, NoiseConditionalScore, kernels, predictor_corrector
from genmodels.models import score
from genmodels.models.checkpoint import load_model
from genmodels.models.ddpm import DDPM
from genmodels.models.score import SAMPLERS, ScoreModel, VarianceExplodingScore, sample_levels
from tests.untrained import write

DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
PLANE = DataSpec("plane", (2,))
MODELS = {
    "plane": lambda: ScoreModel(PLANE, net={"hidden": 16, "depth": 1}),
    "not so fine": lambda: ScoreModel(PLANE, net={"hidden": 16, "depth": 1}, smallest=0.1, time_sampler="uniform"),
    "digits": lambda: ScoreModel(DIGITS, net={"channels": 8, "multipliers": [1, 2], "blocks": 1}),
}
# A quarter of the distance between two levels of integers, which is 2/16 in [-1, 1].
SMALLEST = {"plane": 0.01, "not so fine": 0.1, "digits": 2 / 16 / 4}


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
def test_the_levels_cover_the_data_and_the_loss_starts_at_one(name):
    model, batch = made(name)
    x0 = model.encode(batch.x).flatten(1)
    largest, smallest = float(torch.cdist(x0, x0).max()), SMALLEST[name]
    for core in (model.core, model.weights("ema")):
        found = core.schedule.sigma_bar(torch.tensor([0.0, 0.5, 1.0])).tolist()
        assert found == pytest.approx([smallest, (smallest * largest) ** 0.5, largest], rel=1e-5)  # geometric
    loss = model.loss(batch, keyed(64))
    # The network starts at zero, so the loss is the mean square of the noise.
    assert float(loss.value.detach()) == pytest.approx(1.0, abs=0.3)
    loss.value.backward()
    assert any(float(p.grad.abs().sum()) > 0 for p in model.core.parameters() if p.grad is not None)
    copy = MODELS[name]()
    copy.load_state_dict(model.state_dict())
    assert copy.core.schedule.end_points == model.core.schedule.end_points


def test_the_scores_of_a_denoiser_are_those_of_unscaled_data():
    """s(z, sigma) = -f(z / sqrt(1 + sigma^2), -2 log sigma) / sigma, by hand."""
    torch.manual_seed(0)
    model, _ = made("plane")
    nn.init.normal_(model.core.net.head.weight)
    z, sigma = torch.randn(3, 2), torch.tensor([0.01, 1.0, 5.0])
    f = model.core.net(z / (1 + sigma**2).sqrt()[:, None], -2 * sigma.log())
    torch.testing.assert_close(VarianceExplodingScore(model.core).score_at(z, sigma), -f / sigma[:, None])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_exact_scores_of_a_mixture_give_its_samples(sampler):
    weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
    means = torch.tensor([[-1.5, 0.0], [1.5, 0.5]], dtype=torch.float64)
    mixture = GaussianMixture(weights, means, 0.3)
    z, evaluations = sample_levels(
        mixture.with_noise(), (1000, 2), 8.0, 0.01, keyed(1000, "sample"), sampler=sampler, steps=60,
        dtype=torch.float64, callback=lambda done, z: None,
    )  # fmt: skip
    right = z[:, 0] > 0
    assert float(right.double().mean()) == pytest.approx(0.7, abs=0.06)
    assert z[right].mean(0).tolist() == pytest.approx([1.5, 0.5], abs=0.06)
    assert float(z[right].std()) == pytest.approx(float((0.09 + z[right].mean(0).var(unbiased=False)) ** 0.5), abs=0.06)
    assert evaluations == {"predictor_corrector": 60, "annealed_langevin": 601}[sampler]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_last_step_is_to_the_mean_of_the_clean_data(sampler):
    """Where all data are 3, that is 3, whatever noise was left."""
    point = NoiseConditionalScore(lambda z, sigma, cond=None: (3 - z) / sigma[:, None] ** 2)
    z, _ = sample_levels(point, (50, 2), 8.0, 0.5, keyed(50), sampler=sampler, steps=5, dtype=torch.float64,
                         callback=lambda done, z: None)  # fmt: skip
    torch.testing.assert_close(z, torch.full_like(z, 3))


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


def test_pictures_show_the_true_score_too():
    torch.manual_seed(0)
    model = ScoreModel(DataSpec("toy_banana", (2,)), net={"hidden": 16, "depth": 1})
    model.initialize(Batch(density("banana").sample(200, torch.Generator().manual_seed(0)).float()))
    assert model.pictures()["fields"].width >= 300
    assert made("digits")[0].pictures() == {}


def test_the_scores_of_the_picture_are_in_the_datas_units(monkeypatch):
    """Of N(3, 2^2 (1 + s^2)) in each coordinate, s the smallest level."""
    seen = []
    monkeypatch.setattr("genmodels.models.score.picture_of_fields", lambda _, *given: seen.extend(given))
    model, _ = made("not so fine")
    model.location.fill_(3.0)
    model.scale.fill_(2.0)
    for core in (model.core, model.weights("ema")):
        core.net = Standard()
    model.pictures()
    (score, _, location, scale), x = seen, torch.randn(5, 2)
    torch.testing.assert_close(score(x), -(x - 3) / (4 * 1.01))
    assert location.tolist() == [3, 3] and scale.tolist() == [2, 2]


class Standard(nn.Module):
    """The noise prediction of N(0, I)."""

    def forward(self, x, log_snr, cond=None):
        return x * torch.sigmoid(-log_snr).sqrt()[:, None]


def test_a_checkpoint_of_a_former_version_is_refused_with_where_to_read(tmp_path, refuses):
    model, _ = made("plane")
    model.hparams["ratio"] = 1.05
    path = write(model, tmp_path / "former.ckpt")
    refuses(ValueError, "no option 'ratio'.*docs/migration.md", lambda: load_model(path))


def drawn(**options):
    return made("plane")[0].sample(2, **{"sampler": "annealed_langevin"} | options)


BAD = [
    (lambda: ScoreModel(PLANE, smallest=-1.0), "smallest is a noise level above 0"),
    (lambda: MODELS["digits"]().initialize(Batch(torch.ones(9, 1, 8, 8).byte())), "not below the largest distance"),
    (lambda: ScoreModel(PLANE).initialize(Batch(torch.ones(9, 2))), "constant"),
    (lambda: drawn(inverse_temperature=-1.0), "must be a finite number"),
    (lambda: drawn(temperature=0.25), "times 0.25 is inverse_temperature=16"),
    (lambda: drawn(sampler="hmc"), "predictor_corrector"),
    (lambda: drawn(steps=1), "at least 2"),
    (lambda: drawn(eta=0.5), "eta is an option of the other samplers, not of annealed_langevin"),
    (lambda: drawn(sampler="ddim", inverse_temperature=2.0), "of predictor_corrector and annealed_langevin"),
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


class Exact(nn.Module):
    """The noise prediction of that mixture: eps = -sigma s(z, sigma), z = x_t sqrt(1 + sigma^2)."""

    def forward(self, x, log_snr, cond=None):
        sigma = torch.exp(-log_snr / 2).view(-1, 1)
        with torch.enable_grad():
            z = x * (1 + sigma**2).sqrt()
            z = z if z.requires_grad else z.detach().requires_grad_()
            widths = (SPREADS.to(z).square() + sigma[..., None] ** 2).sqrt()
            parts = Normal(MEANS.to(z), widths).log_prob(z[..., None]) + WEIGHTS.to(z).log()
            return -sigma * torch.autograd.grad(parts.logsumexp(-1).sum(), z, create_graph=True)[0]


def model(dims: int = 1, smallest: float = 0.02, largest: float = 600.0) -> ScoreModel:
    made = ScoreModel(DataSpec("x", (dims,)), net={"hidden": 8, "depth": 1}, ema_decay=0.0, smallest=smallest)
    made.core.schedule.reach(largest)
    made.location.fill_(3.0)
    made.scale.fill_(2.0)
    return made.double()


def of_the_mixture() -> ScoreModel:
    made = model(3)
    made.core = Denoiser(Exact(), made.core.schedule, made.core.parameterisation)
    return made


def values(made: ScoreModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and the exact log-densities of points in the data's units, of three independent coordinates."""
    z = mixture().sample((6, 3))
    found = made.ode_likelihood(Batch(3 + 2 * z), weights="raw", tolerance=1e-7)
    return found.nats, mixture(0.02).log_prob(z).sum(1) - 3 * math.log(2)


def test_the_density_is_the_exact_one_in_the_datas_units():
    torch.manual_seed(0)
    ours, truth = values(of_the_mixture())
    assert (ours - truth).abs().max() < 1e-3  # there is mean / largest left at the noisy end


@pytest.mark.parametrize("bug", ["level", "volume"])
def test_that_check_catches(monkeypatch, bug):
    if bug == "level":
        sound = Exact.forward
        monkeypatch.setattr(Exact, "forward", lambda self, x, log_snr, *rest: sound(self, x, 0.98 * log_snr, *rest))
    else:
        monkeypatch.setattr(ScoreModel, "_log_scale", lambda self, mask: torch.zeros(()))
    torch.manual_seed(0)
    ours, truth = values(of_the_mixture())
    assert (ours - truth).abs().max() > 1e-2


def test_the_bound_is_below_the_density_and_near_it():
    """With the exact scores all that it costs are its thousand steps."""
    torch.manual_seed(0)
    made, z = of_the_mixture(), mixture().sample((256, 3))
    found = made.log_likelihood(Batch(3 + 2 * z, index=torch.arange(256)), weights="raw", draws=60)
    truth = mixture().log_prob(z).sum(1) - 3 * math.log(2)
    gap = truth - found.nats
    error = float(gap.std()) / 16
    assert found.kind == "lower_bound" and -4 * error < float(gap.mean()) < 0.1 + 4 * error


class ByClass(nn.Module):
    """The noise prediction of N(2 y - 1, spread^2) in the network's units, y the class."""

    def __init__(self, spread: float):
        super().__init__()
        self.spread = spread

    def forward(self, x, log_snr, cond):
        sigma = torch.exp(-log_snr / 2).view(-1, 1)
        return sigma * (x * (1 + sigma**2).sqrt() - (2 * cond[:, None] - 1)) / (self.spread**2 + sigma**2)


def of_two_classes() -> ScoreModel:
    """Averages of spread 0.2, raw weights of 0.4, in data units twice that about 3 + 2 (2 y - 1)."""
    made = ScoreModel(DataSpec("x", (1,), num_classes=2), net={"hidden": 8, "depth": 1}, ema_decay=0.9)
    for core, spread in ((made.core, 0.4), (made.weights("ema"), 0.2)):
        core.net = ByClass(spread)
        core.schedule.reach(20.0)
    made.location.fill_(3.0)
    made.scale.fill_(2.0)
    return made.eval()


@pytest.mark.parametrize(("sampler", "evaluations"), [
    ("predictor_corrector", 200), ("annealed_langevin", 401), (None, 100), ("dpmpp_2m", 20),
])  # fmt: skip
def test_samples_are_of_the_class_the_weights_and_the_units(sampler, evaluations):
    made, n = of_two_classes(), 2000
    for weights, spread in (("ema", 0.4), ("raw", 0.8)):
        found = made.sample(n, cond=[0, 1], sampler=sampler, weights=weights, path=2)
        for label in (0, 1):
            x = found.x[found.cond == label, 0]
            assert float(x.mean()) == pytest.approx(3 + 2 * (2 * label - 1), abs=5 * spread / (n / 2) ** 0.5)
            # Langevin steps without correction are too wide by 15 %.
            assert float(x.std()) == pytest.approx(spread, rel=0.2)
        torch.testing.assert_close(found.path[-1], found.x)
        assert found.made["evaluations"] == evaluations
    if sampler in SAMPLERS:
        colder = made.sample(n, cond=[0, 1], sampler=sampler, inverse_temperature=4.0)
        assert float(colder.x[colder.cond == 1].std()) == pytest.approx(0.2, rel=0.3)  # of p^4, not 0.4


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_go_from_the_largest_level_to_the_smallest(sampler, monkeypatch):
    """In many dimensions with a corrector."""
    (model, _), seen, walk = made("digits"), [], getattr(score, sampler)
    model.weights("ema").net = Level()  # only the steps count

    def watched(scores, shape, sigmas, *inputs, **options):
        seen.extend(sigmas)
        return walk(scores, shape, sigmas, *inputs, **options)

    monkeypatch.setattr(score, sampler, watched)
    found = model.sample(2, sampler=sampler)
    assert len(seen) == found.made["steps"] == SAMPLERS[sampler]
    assert [seen[-1], seen[0]] == pytest.approx(model.core.schedule.sigma_bar(torch.tensor([0.0, 1.0])).tolist())
    assert found.made["evaluations"] == {"predictor_corrector": 399, "annealed_langevin": 401}[sampler]


@pytest.mark.parametrize("sampler", [*SAMPLERS, "ddpm"])
def test_mels_end_with_their_lengths(sampler):
    """What stands in the frames beyond influences nothing."""
    mel = {"sample_rate": 8000, "hop": 64, "floor": 1e-5}
    spec = DataSpec("clips", (4, 16), mel=mel)
    torch.manual_seed(0)
    model = ScoreModel(spec, net={"channels": 8, "multipliers": [1, 2], "blocks": 1})
    mask = (torch.arange(16) < torch.tensor([16, 6, 9, 12])[:, None])[:, None]
    model.initialize(Batch(torch.randn(4, 4, 16), mask=mask))
    for parameter in model.core.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    found = model.sample(3, sampler=sampler, lengths=[6, 16, 10], steps=5, weights="raw")
    assert found.mask[:, 0].sum(1).tolist() == [6, 16, 10]
    silence = found.x[0, :, 6:]
    assert bool((silence == silence[:, :1]).all()) and bool((found.x[2, :, 10:] == silence[:, :1]).all())
    assert float(found.x[1].std()) > 0


def test_the_corrector_is_of_the_valid_frames_alone():
    """Its step is a ratio of norms: noise beyond the mask would lengthen it."""
    def network(x, sigma, cond=None):
        return -x * mask / (1 + sigma.view(-1, 1, 1) ** 2)

    mask, given = torch.zeros(4, 1, 8, dtype=torch.bool), (6.0, 2.0, 0.5, 0.1)
    mask[:, :, :2] = True
    found = []
    for frames in (8, 2):
        mask = mask[:, :, :frames]
        start = torch.ones(4, 3, frames, dtype=torch.float64)
        noises = iter(torch.randn(20, 4, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "noise_like", lambda x, _, noises=noises: next(noises)[:, :, : x.shape[2]])
            found.append(predictor_corrector(NoiseConditionalScore(network), start.shape, given, torch.Generator(),
                                             start=start, mask=mask)[:, :, :2])  # fmt: skip
    torch.testing.assert_close(*found)


def test_a_model_can_be_pickled():
    model, _ = made("digits")
    again = pickle.loads(pickle.dumps(model.core))
    assert float(again.schedule.largest) == float(model.core.schedule.largest)


def test_the_score_of_no_class_is_shown_only_where_it_was_learned():
    spec = DataSpec("blobs", (2,), num_classes=2)
    for drop, shown in ((0.0, False), (0.1, True)):
        model = ScoreModel(spec, net={"hidden": 8, "depth": 1}, cond_drop=drop)
        x, cond = torch.randn(32, 2), torch.arange(32) % 2
        model.initialize(Batch(x, cond))
        assert bool(model.pictures()) is shown
        if not shown:
            with pytest.raises(InputError, match="cond_drop=0 and always needs a class"):
                model.log_likelihood(Batch(x))


def test_defaults():
    vectors, images = made("plane")[0], made("digits")[0]
    assert vectors.validates_by_ode and vectors.sample(2).made["sampler"] == "ddpm"
    known = {"known": torch.zeros(1, 8, 8), "keep": torch.ones(1, 8, 8, dtype=torch.bool)}
    ddpm = DDPM(DIGITS, net={"channels": 8, "multipliers": [1, 2], "blocks": 1})
    for core in (images.weights("ema"), ddpm.weights("ema")):
        core.net = Level()  # only the steps count
    found = [one.sample(1, **known).made for one in (images, ddpm)]
    assert [made["steps"] for made in found] == [50, 50] and found[0]["evaluations"] == found[1]["evaluations"]
    assert (vectors.elbo.variance, images.elbo.variance) == ("beta", "beta_tilde")
    assert type(MODELS["not so fine"]().objective.time_sampler) is not type(vectors.objective.time_sampler)


class Level(nn.Module):
    """The noise prediction of one of two levels of integers, -1 and 1, the upper with probability 0.8."""

    def forward(self, x, log_snr, cond=None):
        sigma = torch.exp(-log_snr / 2).view(-1, *[1] * (x.dim() - 1))
        z = x * (1 + sigma**2).sqrt()
        mean = 2 * torch.sigmoid(2 * z / sigma**2 + math.log(0.8 / 0.2)) - 1
        return (z - mean) / sigma


@pytest.mark.parametrize("how", ["bound", "flow"])
def test_the_mass_of_integers(how):
    """Within 0.02 bits/dim of the entropy, by the bound and by the flow with the noise of the model."""
    spec = DataSpec("coins", (1, 2, 2), levels=2)
    made = ScoreModel(spec, net={"channels": 8, "multipliers": [1], "blocks": 1}, ema_decay=0.0)
    made.core.net = Level()
    made.core.schedule.reach(20.0)
    x = (torch.rand(400, 1, 2, 2, generator=torch.Generator().manual_seed(0)) < 0.8).to(torch.uint8)
    batch = Batch(x, index=torch.arange(400))
    if how == "bound":
        found = made.log_likelihood(batch, weights="raw", draws=100)
    else:
        found = made.ode_likelihood(batch, weights="raw", dequantisation="diffusion", tolerance=1e-4)
    truth = (x * math.log(0.8) + (1 - x.double()) * math.log(0.2)).flatten(1).sum(1)
    gap = (truth - found.nats) / (4 * math.log(2))
    error = float(gap.std()) / 20
    assert -4 * error < float(gap.mean()) < 0.02 + 4 * error and error < 0.02


def test_the_density_of_any_network_integrates_to_one():
    torch.manual_seed(1)
    made = model(smallest=0.2, largest=5.0)
    for p in made.core.parameters():
        p.data += 0.1 * torch.randn_like(p)  # of larger weights the density has peaks that need more points
    x = torch.linspace(-50, 50, 2001, dtype=torch.float64)[:, None]
    found = made.ode_likelihood(Batch(x), weights="raw", solver="rk4", steps=40, rows=2001)
    assert found.kind == "ode" and abs(float(found.nats.exp().sum() * 0.05) - 1) < 0.005
