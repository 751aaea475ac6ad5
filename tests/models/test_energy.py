"""The energy model under the contract of every model: encoding, loss, log Z, likelihood, samples, guards."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import pytorch_lightning  # noqa: F401  models have a `trainer` once Lightning is imported
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, RunError
from genmodels.core.random import KeyedGenerator
from genmodels.data.toy import density
from genmodels.energy import LOSSES, Energy, Quadratic
from genmodels.evaluation.likelihood import how
from genmodels.models.energy import EnergyModel
from genmodels.models.energy_sampling import Sampler, base_of, by_annealing, by_quadrature
from genmodels.models.optimizer import explain_nonfinite
from genmodels.models.score_matching import Encoding

DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
PLANE = DataSpec("plane", (2,))
TABLE = DataSpec("table", (4,))
COUNTS = DataSpec("counts", (3,), levels=8)

SMALL = {"hidden": [16, 16]}
KERNEL = {"inducing": 20, "hidden": 8, "depth": 2}
MODELS = {
    "plane": lambda **given: EnergyModel(PLANE, net=SMALL, **given),
    "table, white": lambda **given: EnergyModel(TABLE, net=SMALL, whitening="pca", noise=0.05, **given),
    "deep kernel": lambda **given: EnergyModel(TABLE, network="deep_kernel", net=KERNEL, ema_decay=0.9, **given),
    "counts": lambda **given: EnergyModel(COUNTS, net=SMALL, **given),
    "digits": lambda **given: EnergyModel(DIGITS, net={"channels": [4, 8]}, **given),
    "digits, U-Net": lambda **given: EnergyModel(
        DIGITS, network="unet", net={"channels": 8, "multipliers": [1], "blocks": 1}, **given),
}


pytestmark = pytest.mark.usefixtures("short_pilot")


def batch_of(spec: DataSpec, n: int = 64) -> Batch:
    generator = torch.Generator().manual_seed(0)
    if spec.levels is None:
        mixing = torch.eye(spec.dims) + 0.4
        x = torch.randn(n, *spec.event_shape, generator=generator) @ mixing * 3 + 1
    else:
        x = torch.randint(0, spec.levels, (n, *spec.event_shape), generator=generator).to(torch.uint8)
    return Batch(x, index=torch.arange(n))


def made(name: str, **given) -> tuple[EnergyModel, Batch]:
    torch.manual_seed(0)
    model = MODELS[name](**given)
    batch = batch_of(model.spec)
    model.initialize(batch)
    return model, batch


def keyed(n: int, stream: str = "test") -> KeyedGenerator:
    return KeyedGenerator(0, torch.arange(n), stream)


# ---- encoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"whitening": "pca"}, {"gaps": True}], ids=str)
def test_the_volume_of_an_encoding_is_that_of_its_jacobian(options):
    encoding = Encoding(TABLE, **options).double()
    batch = batch_of(TABLE)
    encoding.fit(batch.x, keyed(64))
    x = batch.x[:3].double()
    z, volume = encoding(x, keyed(3))
    for k in range(3):
        def one(row, k=k):
            return encoding(row[None], KeyedGenerator(0, torch.tensor([k]), "test"))[0][0]

        jacobian = torch.autograd.functional.jacobian(one, x[k])
        assert float(jacobian.slogdet().logabsdet) == pytest.approx(float(volume[k]), abs=1e-6)
    torch.testing.assert_close(encoding.decode(z), x, rtol=0, atol=0.5 if options.get("gaps") else 1e-9)
    whole = encoding(batch.x.double(), keyed(64))[0]
    torch.testing.assert_close(whole.mean(0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-5)
    if options.get("whitening"):
        torch.testing.assert_close(torch.cov(whole.T), torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-5)


def test_integers_come_back_from_their_cells():
    encoding = Encoding(DIGITS)
    batch = batch_of(DIGITS)
    encoding.fit(batch.x, keyed(64))
    z, volume = encoding(batch.x, keyed(64))
    assert torch.equal(encoding.decode(z), batch.x) and volume.shape == (64,)


def test_gaps_are_as_wide_as_the_median_distance_of_values():
    encoding = Encoding(DataSpec("wine", (2,)), gaps=True)
    x = torch.stack([0.5 * torch.arange(40).remainder(7), torch.randn(40)], dim=1)
    encoding.fit(x, keyed(40))
    assert encoding.gap.tolist() == [0.5, 0.0]


# ---- log Z -----------------------------------------------------------------------------------------------------------


def test_both_ways_to_log_z_on_a_known_density():
    energy = Quadratic(torch.tensor([[1.2, 0.3], [0.3, 0.8]]), offset=0.7)
    exact = by_quadrature(energy, (2,))
    assert exact.kind == "exact" and exact.log_z == pytest.approx(energy.log_normaliser, abs=1e-6)
    base = base_of(torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    estimate = by_annealing(energy, base, keyed(128), chains=128, steps=20)
    found = estimate.made
    assert estimate.kind == "ais" and abs(estimate.log_z - energy.log_normaliser) < 4 * found["log_z_stderr"]
    assert found["log_z_lower"] - 4 * found["lower_stderr"] < energy.log_normaliser
    assert energy.log_normaliser < found["log_z_upper"] + 4 * found["upper_stderr"]


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (1, 1, 2)])
def test_events_of_two_numbers_have_an_exact_likelihood(shape):
    torch.manual_seed(0)
    model = EnergyModel(DataSpec("pairs", shape), net={"channels": [4]}, ema_decay=0)
    x = torch.randn(300, *shape)
    model.initialize(Batch(x, index=torch.arange(300)))
    assert model.log_likelihood(Batch(x[:3], index=torch.arange(3))).kind == "exact"
    side = torch.linspace(-12, 12, 121)
    grid = torch.stack(torch.meshgrid(side, side, indexing="ij"), -1).reshape(-1, *shape)
    found = model.log_likelihood(Batch(grid, index=torch.arange(len(grid))))
    assert float(found.nats.exp().sum() * 0.2**2) == pytest.approx(1, abs=0.02)


def test_the_density_of_data_integrates_to_one():
    model, batch = made("plane")
    side = torch.linspace(-40, 40, 401)
    grid = torch.stack(torch.meshgrid(side, side, indexing="ij"), -1).reshape(-1, 2)
    found = model.log_likelihood(Batch(grid, index=torch.arange(len(grid))), rows=50_000)
    assert found.kind == "exact" and float(found.nats.exp().sum() * 0.2**2) == pytest.approx(1, abs=1e-3)


def test_the_masses_of_integers_sum_to_at_most_one_and_the_bound_rises():
    model, _ = made("counts")
    every = torch.cartesian_prod(*[torch.arange(8)] * 3).to(torch.uint8)
    batch = Batch(every, index=torch.arange(512))
    one, many = (model.log_likelihood(batch, importance_samples=k, chains=64, densities=30) for k in (1, 16))
    assert one.kind == "ais" and one.stderr is None and bool((many.stderr >= 0).all())
    assert float(one.nats.mean()) < float(many.nats.mean())
    assert float(many.nats.exp().sum()) == pytest.approx(1, abs=0.15)
    assert {"log_z_lower", "log_z_upper", "log_z_stderr", "ess", "reliable"} <= set(one.made)


def test_noise_in_the_gaps_of_a_table_makes_a_bound_that_rises_with_its_samples():
    x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    x[:, 1] = (2 * x[:, 1]).round().clamp(-3, 3)
    model = EnergyModel(PLANE, gaps=True, net={"hidden": [8]}).eval()
    model.initialize(Batch(x))
    one, other = (model.log_likelihood(Batch(x), seed=seed) for seed in (0, 1))
    many = model.log_likelihood(Batch(x), importance_samples=64)
    assert one.kind == "lower_bound" and float((one.nats - other.nats).std()) > 0.01
    assert one.single_values().noise is None and how(one) == "K = 1, uniform within gaps, log Z by quadrature"
    assert float((many.nats - one.nats).mean()) > 2 * float((many.nats - one.nats).std() / 300**0.5)
    whole = EnergyModel(PLANE, gaps=True, net={"hidden": [8]}).eval()  # no column takes few values
    whole.initialize(Batch(torch.randn(300, 2, generator=torch.Generator().manual_seed(0))))
    whole.encoding.gap.zero_()
    assert whole.log_likelihood(Batch(x)).kind == "exact"


def test_what_has_no_log_z_is_unnormalised_and_says_why():
    model, batch = made("plane")
    assert "not asked for" in model.log_likelihood(batch, normaliser="none").made["reason"]
    free = EnergyModel(PLANE, net={**SMALL, "confinement": False})
    free.initialize(batch)
    found = free.log_likelihood(batch)
    assert found.kind == "unnormalised" and "confinement" in found.made["reason"] and free.pictures() == {}


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_step_learns_and_a_checkpoint_is_plain(name):
    model, batch = made(name)
    loss = model.loss(batch, keyed(64))
    loss.value.backward()
    gradients = [p.grad for p in model.core.parameters() if p.grad is not None]
    assert gradients and all(bool(g.isfinite().all()) for g in gradients) and loss.value.isfinite()
    assert model.header()["model"]["_target_"] == "genmodels.models.energy.EnergyModel"
    copy = MODELS[name]()
    copy.load_state_dict(model.state_dict())
    z = model.points(batch.x[:8], keyed(8))
    torch.testing.assert_close(copy.weights("raw").energy(z), model.weights("raw").energy(z))


@pytest.mark.parametrize("loss", [*LOSSES, "contrastive"])
def test_every_loss_learns_the_width_of_a_normal_density(loss):
    """The one learned number of E = k |z|^2/2 moves from 1/4 towards 1: an inverted sign would move it down."""
    objective = {"size": 512, "steps": 20, "step_size": 0.05} if loss == "contrastive" else {}
    model = EnergyModel(PLANE, net={"hidden": [1], "spread": 2.0}, loss=loss, objective=objective)
    batch = Batch(torch.randn(512, 2, generator=torch.Generator().manual_seed(0)), index=torch.arange(512))
    model.initialize(batch)
    with torch.no_grad():
        for parameter in model.core.network.body.parameters():
            parameter.zero_()
    spread = model.core.network.confinement.log_spread
    model.loss(batch, keyed(512)).value.backward()
    assert float(spread.grad) > 0  # descent makes tau smaller, k larger


def test_a_deep_kernel_solves_for_its_last_weights_when_first_needed():
    model, batch = made("deep kernel")
    assert float(model.core.network.alpha.abs().sum()) == 0
    assert float(model.weights("raw").network.alpha.abs().sum()) > 0
    z = model.points(batch.x, keyed(64))
    before = float(model.score_matching(model.weights("ema"), z, keyed(64)).mean())
    model.weights("ema").network.alpha.zero_()
    assert before < float(model.score_matching(model.weights("ema"), z, keyed(64)).mean())
    assert len(model.loss(batch, keyed(64)).per_example) == 32


def test_nothing_is_left_of_weights_that_were_changed():
    """By a loop of one's own, or by the weights of another run."""
    model, batch = made("table, white")
    options = {"weights": "raw", "chains": 8, "densities": 20}
    before, drawn = model.log_likelihood(batch, **options).nats, model.sample(3, steps=5, weights="raw").x
    with torch.no_grad():
        for parameter in model.core.parameters():
            parameter.add_(0.3)
    fresh = type(model)(model.spec, **model.hparams)
    fresh.load_state_dict(model.state_dict())
    assert not torch.equal(model.log_likelihood(batch, **options).nats, before)
    assert torch.equal(model.log_likelihood(batch, **options).nats, fresh.log_likelihood(batch, **options).nats)
    assert not torch.equal(model.sample(3, steps=5, weights="raw").x, drawn)


def test_an_energy_learns_a_mixture():
    """Two blobs in 250 steps: much nearer to the truth than the normal density of their mean and covariance."""
    torch.manual_seed(0)
    model = EnergyModel(PLANE, net={"hidden": [32, 32]}, ema_decay=0.9)
    generator = torch.Generator().manual_seed(0)
    side = torch.randint(0, 2, (2000, 1), generator=generator) * 2.0 - 1
    x = 0.5 * torch.randn(2000, 2, generator=generator) + side * torch.tensor([1.5, 0.0])
    x, held = x[:1500], x[1500:]
    model.initialize(Batch(x))
    optimizer = torch.optim.Adam(model.core.parameters(), lr=1e-2)
    for step in range(250):
        rows = torch.randint(0, 1500, (128,), generator=generator)
        optimizer.zero_grad()
        model.loss(Batch(x[rows]), KeyedGenerator(0, torch.arange(128), "train", step)).value.backward()
        optimizer.step()
    truth = math.log(2 * math.pi * math.e * 0.25) + math.log(2)
    normal = math.log(2 * math.pi * math.e) + 0.5 * math.log(0.25 * 2.5)
    reached = -model.log_likelihood(Batch(held, index=torch.arange(500)), weights="raw").mean_nats()
    assert abs(reached - truth) < 0.4 * (normal - truth)


# ---- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["annealed", "hmc", "mala", "ula"])
def test_chains_draw_from_the_density(sampler):
    energy = Quadratic(torch.tensor([[2.0, 0.5], [0.5, 1.0]]), torch.tensor([0.5, -0.5]))
    base = base_of(torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    steps, size = {"annealed": (20, None), "hmc": (40, None), "mala": (60, None), "ula": (150, 0.03)}[sampler]
    chains = Sampler(energy, base, name=sampler, steps=steps, step_size=size)
    z, found = chains(1500, keyed(1500, "sample"), lambda done, z: None)
    covariance = torch.linalg.inv(energy.matrix.detach()).double()
    torch.testing.assert_close(z.mean(0), torch.tensor([0.5, -0.5], dtype=torch.float64), rtol=0, atol=0.12)
    torch.testing.assert_close(torch.cov(z.T), covariance, rtol=0, atol=0.15)
    assert found["evaluations"] > 0 and (sampler == "ula") == (found["acceptance"] is None)


@pytest.mark.parametrize("sampler", ["annealed", "hmc", "mala"])
def test_the_inverse_temperature_is_the_power_of_the_density(sampler):
    """Of a Gaussian with precision A, p^beta has precision beta A: variances within five standard errors."""
    energy = Quadratic(torch.tensor([[2.0, 0.5], [0.5, 1.0]]))
    base = base_of(torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    steps = {"annealed": 20, "hmc": 40, "mala": 80}[sampler]
    chains = Sampler(energy, base, name=sampler, steps=steps, inverse_temperature=4.0)
    z, _ = chains(1500, keyed(1500, "sample"), lambda done, z: None)
    variances = torch.linalg.inv(4.0 * energy.matrix.detach()).double().diagonal()
    assert ((z.var(0) - variances).abs() < 5 * variances * math.sqrt(2 / 1500)).all()


@pytest.mark.parametrize("name", ["plane", "counts"])
@pytest.mark.parametrize("sampler", ["annealed", "mala"])
def test_a_sample_is_the_same_alone_and_a_low_temperature_narrows(name, sampler):
    model, _ = made(name)
    options = {"sampler": sampler, "steps": 12, "seed": 3}
    many = model.sample(6, **options, path=3)
    alone = model.sample(1, start=4, **options)
    torch.testing.assert_close(many.x[4].double(), alone.x[0].double(), rtol=1e-5, atol=1e-5)
    assert many.path.shape == (3, *many.x.shape) and many.made["sampler"] == sampler
    cold = model.sample(64, inverse_temperature=10.0, **options).x.double()
    assert float(cold.std()) < float(model.sample(64, **options).x.double().std())


@pytest.mark.parametrize("sampler", ["annealed", "mala"])
def test_the_check_of_samples_catches_noise_of_the_batch(sampler, monkeypatch):
    """Mutant: rows are numbered from the head of the batch, not from the number of the sample."""
    model, _ = made("plane")
    options = {"sampler": sampler, "steps": 12, "seed": 3}
    many = model.sample(6, **options)

    def of_the_batch(seed, index, stream, step=0):
        return KeyedGenerator(seed, torch.arange(len(index)), stream, step)

    monkeypatch.setattr("genmodels.models.energy.KeyedGenerator", of_the_batch)
    alone = model.sample(1, start=4, **options)
    assert float((many.x[4] - alone.x[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_a_loss_that_is_not_finite_is_explained(name):
    """Also where watching the layers closes the way that the loss goes, as with the second derivatives of a kernel."""
    model, batch = made(name)
    batch = replace(batch, index=batch.index + 100)
    model._trainer = SimpleNamespace(global_step=7, global_rank=0, world_size=1)
    with torch.no_grad():
        next(model.core.parameters()).fill_(math.nan)
    for index, said in ((batch.index, "for item 1"), (None, "")):
        loss = model.loss(replace(batch, index=index), model.training_generator(len(batch)))
        model.batches_seen = 1
        line = explain_nonfinite(model, [(replace(batch, index=index), loss)])
        assert model.batches_seen == 1 and line.startswith(f"step 7: the loss is not finite{' ' * bool(said)}{said}")
        assert ("look at that item" in line) == ("for item" in line) == bool(said)


def test_a_loss_that_cannot_be_computed_is_one_line(monkeypatch):
    model, batch = made("deep kernel")
    model._trainer = SimpleNamespace(global_step=7, global_rank=0, world_size=1)
    monkeypatch.setattr(model, "loss", lambda batch, generator: torch.linalg.cholesky(-torch.eye(2)))
    with pytest.raises(RunError, match=r"step 7: the loss cannot be computed \(linalg.cholesky: .*weights were not"):
        model.training_step(batch, 0)


def test_a_kernel_without_a_solution_is_not_finite():
    model, batch = made("deep kernel")
    core = model.core.network
    with torch.no_grad():
        core.log_ridge.fill_(-1e6)
        for raw in core.parameters():
            if raw.dim() > 1:
                raw.zero_()
    assert not model.loss(batch, keyed(len(batch))).value.isfinite()


BAD = [
    *((lambda noise=noise: EnergyModel(PLANE, noise=noise), "noise must be a finite number from 0")
      for noise in (-1, math.nan, math.inf)),
    (lambda: EnergyModel(DIGITS, gaps=True), "continuous"),
    (lambda: EnergyModel(DataSpec("clips", (4, 16), mel={"sample_rate": 8000})), "the silence that pads mels"),
    (lambda: EnergyModel(DIGITS, whitening="pca"), "vectors"),
    (lambda: EnergyModel(PLANE, objective={"projektions": 2}), "projections"),
    (lambda: EnergyModel(PLANE, net={"activation": "relu"}), "relu"),
    (lambda: EnergyModel(TABLE, network="deep_kernel", loss="contrastive"), "deep_kernel"),
    (lambda: made("plane")[0].sample(2, inverse_temperature=0), "positive"),
    (lambda: made("plane")[0].sample(2, inverse_temperature=math.inf), "must be a finite number"),
    (lambda: made("plane")[0].sample(2, temperature=0.5), "times 0.5 is inverse_temperature=4"),
    (lambda: made("plane")[0].sample(2, temperature=math.nan), "temperature must be a finite number"),
    (lambda: made("plane")[0].sample(2, sampler="ddpm"), "annealed"),
    (lambda: made("plane")[0].sample(2, cond=1), "unconditional"),
    (lambda: made("table, white")[0].log_likelihood(batch_of(TABLE), normaliser="quadrature"), "two dimensions"),
    (lambda: made("plane")[0].log_likelihood(batch_of(PLANE), normaliser="ase"), "normaliser must be one of"),
    (lambda: made("table, white")[0].normaliser(method="ase"), "normaliser must be one of"),
    (lambda: EnergyModel(TABLE).initialize(Batch(torch.randn(50, 4) * torch.tensor([1.0, 1, 0, 1]))), "constant"),
    (lambda: EnergyModel(TABLE).initialize(Batch(torch.randn(300, 4).round())), "gaps=true"),
    (lambda: EnergyModel(TABLE, whitening="pca").initialize(Batch(torch.randn(50, 4)[:, [0, 1, 2, 1]])),
     "table: columns 2, 4 depend on each other linearly: leave one out$"),
    (lambda: EnergyModel(TABLE, whitening="pca").initialize(Batch(torch.randn(4, 4))), "has 4 training rows for 4 col"),
    (lambda: EnergyModel(TABLE, alpha=0.05), "alpha=0.05 is for integers"),
    (lambda: made("plane")[0].log_likelihood(batch_of(PLANE), importance_samples=2), "importance_samples=2 is for int"),
]


@pytest.mark.parametrize("call, said", BAD, ids=[said for _, said in BAD])
def test_what_cannot_be_is_said(call, said, refuses):
    refuses(ValueError, said, call)


def test_pictures_show_the_ground_truth_too():
    torch.manual_seed(0)
    model = EnergyModel(DataSpec("toy_banana", (2,)), net=SMALL)
    model.initialize(Batch(density("banana").sample(200, torch.Generator().manual_seed(0)).float()))
    picture = model.pictures()["fields"]
    assert picture.width >= 600 and len(picture.getcolors(100_000)) > 50
    assert isinstance(model.core, Energy) and isinstance(model.core.network(torch.zeros(1, 2)), torch.Tensor)
    with pytest.raises(InputError):
        model.sample(1, step_size=-1.0)


def test_options_of_a_preset_for_another_network_are_named_as_such():
    with pytest.raises(InputError, match="no option 'activation'.*; ~preset leaves out .* for network=mlp"):
        EnergyModel(PLANE, network="deep_kernel", net={"hidden": 8, "activation": "silu"})


class Uneven(torch.nn.Module):
    """A rough energy that rounds in another way for another number of rows, as products of matrices do."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(9.0))

    def forward(self, x):
        rounded = x * (1 + 4e-16 * (len(x) % 7))
        return 0.5 * x.square().sum(1) + torch.sin(self.scale * rounded).sum(1)


@pytest.mark.parametrize(("sampler", "steps"), [("annealed", 40), ("hmc", 60), ("mala", 300)])
def test_what_the_batch_rounds_differently_does_not_grow(sampler, steps):
    base = base_of(torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    chains = Sampler(Energy(Uneven()), base, name=sampler, steps=steps)
    many, _ = chains(6, keyed(6, "sample"), lambda done, z: None)
    alone, _ = chains(1, KeyedGenerator(0, torch.tensor([4]), "sample"), lambda done, z: None)
    torch.testing.assert_close(many[4:5], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("finite", [True, False])
def test_a_validation_without_some_likelihoods_has_none(monkeypatch, finite):
    """The mean over the other items would be too good, and that of the last validation is of other weights."""
    model, batch = made("plane")
    logged, given = {}, EnergyModel._likelihood
    monkeypatch.setattr(model, "log", lambda name, value, **_: logged.update({name: value}))
    monkeypatch.setattr(model, "_likelihood", lambda part: given(model, part) if finite or part.index[0] == 0 else [])
    model.figures["val/nll"] = 1.0
    for number, part in enumerate((batch.rows(torch.arange(32)), batch.rows(torch.arange(32, 64)))):
        model.validation_step(part, number)
    model.on_validation_epoch_end()
    assert ("val/nll" in logged) == ("val/nll" in model.figures) == (model.validated is not None) == finite
    assert list(model.figures)[0] == "val/score_matching"
