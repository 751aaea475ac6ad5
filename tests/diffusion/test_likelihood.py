"""The likelihood of diffusion models by their ODE, in the data's units, against exact densities and masses."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, RunError
from genmodels.core.likelihood import Likelihood
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import CosineSchedule, Elbo, Gaussian, GaussianDenoiser, MixtureDenoiser, alpha_sigma
from genmodels.diffusion import likelihood as diffusion_ode
from genmodels.evaluation.likelihood import how
from genmodels.models.ddpm import DDPM
from tests.parameters import scattered

SMALL = {"channels": 8, "multipliers": [1], "blocks": 1, "heads": 2}
MASSES = torch.tensor([0.1, 0.4, 0.2, 0.05, 0.25], dtype=torch.float64)


def gaussian_model(shape=(2,), location=5.0, scale=0.2) -> DDPM:
    """The optimal model of data N(location, scale^2)."""
    net = {"hidden": 8, "depth": 1} if len(shape) == 1 else SMALL
    model = DDPM(DataSpec("gauss", shape, levels=None), ema_decay=0.0, net=net).double()
    model.core = GaussianDenoiser(model.core.schedule, torch.zeros(shape, dtype=torch.float64), 1.0)
    model.location.fill_(location)
    model.scale.fill_(scale)
    return model


def integer_model(levels=5) -> DDPM:
    """The optimal model of one pixel that takes the levels with the masses above."""
    spec = DataSpec("pixel", (1, 1, 1), levels=levels)
    model = DDPM(spec, num_steps=100, ema_decay=0.0, net=SMALL).double()
    centres = torch.linspace(-1, 1, levels, dtype=torch.float64).reshape(levels, 1, 1, 1)
    model.core = MixtureDenoiser(model.core.schedule, MASSES, centres, 1e-12)
    return model


def every_level(levels=5) -> Batch:
    return Batch(torch.arange(levels).reshape(levels, 1, 1, 1).to(torch.uint8), index=torch.arange(levels))


# ---- continuous data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {"tolerance": 1e-7}, {"solver": "rk4", "steps": 120}, {"solver": "rk4", "steps": 40, "variable": "time"},
], ids=str)  # fmt: skip
def test_the_density_is_the_exact_one_in_the_datas_units(options):
    model, distribution = gaussian_model(), Normal(torch.tensor(5.0, dtype=torch.float64), 0.2)
    x = distribution.sample((5, 2))
    found = model.ode_likelihood(Batch(x), weights="raw", **options)
    assert torch.allclose(found.nats, distribution.log_prob(x).sum(1), atol=1e-4)
    assert found.kind == "ode" and found.mark == "~" and found.levels is None and found.stderr is None
    assert found.made["divergence"] == "exact" and (found.evaluations > 0).all()
    assert found.made["log_snr"][1] == -15.0


def test_that_check_catches_a_forgotten_volume(monkeypatch):
    monkeypatch.setattr(DDPM, "_log_scale", lambda self, mask: 0.0)
    with pytest.raises(AssertionError):
        test_the_density_is_the_exact_one_in_the_datas_units({"tolerance": 1e-7})


def test_sequences_of_any_length_are_measured_over_their_own_scalars():
    """A padded sequence has the density of the sequence alone, and its own number of dimensions."""
    model, lengths = gaussian_model((2, 6)), torch.tensor([6, 2, 4])
    mask = torch.arange(6) < lengths[:, None, None]
    distribution = Normal(torch.tensor(5.0, dtype=torch.float64), 0.2)
    x = distribution.sample((3, 2, 6))
    batch = Batch(x.masked_fill(~mask, math.nan), mask=mask, index=torch.arange(3))
    exact = distribution.log_prob(x).masked_fill(~mask, 0).sum((1, 2))
    found = model.ode_likelihood(batch, weights="raw", tolerance=1e-6)
    assert torch.allclose(found.nats, exact, atol=1e-3) and found.dims.tolist() == [12, 4, 8]
    many = Batch(batch.x.repeat(20, 1, 1), mask=mask.repeat(20, 1, 1), index=torch.arange(60))
    bound = model.log_likelihood(many, weights="raw")
    gap = (bound.nats - exact.repeat(20)).view(20, 3)
    assert bound.dims.view(20, 3)[7].tolist() == [12, 4, 8]
    assert (gap.mean(0) < 4 * gap.std(0) / 20**0.5).all() and (gap.mean(0) > -torch.tensor([12.0, 4.0, 8.0])).all()


# ---- integers --------------------------------------------------------------------------------------------------------


def mass_of_the_bins() -> torch.Tensor:
    """Exact masses of the bins under the density that the model has at its cleanest level."""
    model = integer_model()
    alpha, sigma = alpha_sigma(torch.tensor(model.elbo.first_log_snr(model.core.schedule), dtype=torch.float64))
    centres = torch.linspace(-1, 1, 5, dtype=torch.float64)
    distribution = Normal(centres, sigma / alpha)
    return (MASSES * (distribution.cdf(centres[:, None] + 0.25) - distribution.cdf(centres[:, None] - 0.25))).sum(1)


@pytest.mark.parametrize("options", [{"rows": 0}, {"draws": 0}])
def test_sizes_of_the_bound_are_at_least_one(options):
    exact, bound = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0), Elbo(Gaussian(), 10, "beta")
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be at least 1, got 0"):
        bound(exact, torch.zeros(1, 2), bound.times(exact.schedule), KeyedGenerator(0, torch.arange(1)), **options)


def test_many_uniform_draws_find_the_mass_of_the_bin():
    found = integer_model().ode_likelihood(every_level(), weights="raw", importance_samples=300, tolerance=1e-4)
    exact = mass_of_the_bins().log()
    assert ((found.nats - exact).abs() < 4 * found.stderr + 1e-3).all()
    assert found.made["dequantisation"] == "uniform" and found.made["importance_samples"] == 300
    assert float(found.stderr.max()) < 0.1


def test_many_draws_of_the_forward_process_find_the_mass_of_the_level():
    """The decoder knows that noise of a quarter of a level hides little: the sum over levels is near one."""
    options = {"dequantisation": "diffusion", "importance_samples": 300, "tolerance": 1e-4}
    found = integer_model().ode_likelihood(every_level(), weights="raw", **options)
    assert ((found.nats - MASSES.log()).abs() < 4 * found.stderr + 0.06).all()
    assert 0.93 < float(found.nats.exp().sum()) < 1.03


@pytest.mark.parametrize("dequantisation", ["uniform", "diffusion"])
def test_one_draw_is_a_bound_in_the_mean(dequantisation):
    model, draws = integer_model(), 60
    items = every_level()
    many = Batch(items.x.repeat(draws, 1, 1, 1), index=torch.arange(5 * draws))
    options = {"dequantisation": dequantisation, "tolerance": 1e-3}
    one = model.ode_likelihood(many, weights="raw", **options).nats.view(draws, 5)
    stderr = one.std(0) / math.sqrt(draws)
    exact = mass_of_the_bins().log() if dequantisation == "uniform" else MASSES.log()
    assert (one.mean(0) < exact + 4 * stderr).all() and (one.mean(0) > exact - 1).all()


def test_those_check_catches_a_width_or_a_volume_left_out(monkeypatch):
    monkeypatch.setattr(diffusion_ode, "event_size", lambda x, mask=None: torch.zeros(len(x)))
    for check in (test_many_uniform_draws_find_the_mass_of_the_bin,
                test_many_draws_of_the_forward_process_find_the_mass_of_the_level):
        with pytest.raises(AssertionError):
            check()


# ---- the contract ----------------------------------------------------------------------------------------------------


def network_model() -> tuple[DDPM, Batch]:
    model = DDPM(DataSpec("tiny", (1, 3, 3), levels=4, num_classes=3), num_steps=20, net=SMALL, ema_decay=0.5).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (*model.core.parameters(), *model.ema.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    x = torch.randint(0, 4, (3, 1, 3, 3), generator=generator).to(torch.uint8)
    return model, Batch(x, torch.arange(3), index=torch.arange(3))


@pytest.mark.parametrize("options", [{"importance_samples": 2}, {"divergence": "hutchinson", "probes": 2}], ids=str)
def test_an_item_does_not_depend_on_its_batch(options):
    model, items = network_model()
    options |= {"solver": "heun", "steps": 2, "seed": 3}
    whole = model.ode_likelihood(items, **options)
    parts = [model.ode_likelihood(items.rows([i]), **options) for i in (2, 0, 1)]
    joined = Likelihood.concatenate(parts).in_index_order()
    assert torch.allclose(joined.nats, whole.nats, rtol=1e-4)
    # Of integers the error is that of dequantisation too, which one draw does not tell.
    assert (whole.stderr is None) == ("probes" in options)
    assert joined.made == whole.made and joined.evaluations.shape == (3,) and whole.made["given"] == "class"
    few = model.ode_likelihood(items, rows=2, **options)
    assert torch.allclose(few.nats, whole.nats, rtol=1e-4)
    other = model.ode_likelihood(items, **(options | {"seed": 4}))
    assert not torch.allclose(other.nats, whole.nats, rtol=1e-4)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"importance_samples": 0}, "at least 1"),
        ({"importance_samples": 2, "divergence": "hutchinson"}, "need divergence=exact"),
        ({"dequantisation": "logistic"}, "must be one of uniform, diffusion"),
        ({"divergence": "skilling"}, "must be one of auto, exact, hutchinson"),
    ],
)
def test_options_that_mean_nothing_are_refused_in_one_line(options, words, refuses):
    model, items = network_model()
    refuses(InputError, words, model.ode_likelihood, items, **options)


def test_importance_samples_are_for_integers(refuses):
    model = DDPM(DataSpec("plane", (2,)), num_steps=8)
    items = Batch(torch.zeros(1, 2))
    refuses(InputError, "importance_samples=2 is for integers", model.ode_likelihood, items, importance_samples=2)


@pytest.mark.parametrize("dequantisation", ["uniform", "diffusion"])
def test_no_items_have_no_likelihood(dequantisation):
    model, items = network_model()
    nothing = Batch(items.x[:0], items.cond[:0], index=items.index[:0])
    assert model.ode_likelihood(nothing, dequantisation=dequantisation).nats.shape == (0,)


def test_a_path_that_fails_names_the_item():
    model, items = network_model()
    items.index = torch.tensor([7, 4, 9])
    forward = model.ema.average().forward

    def broken(x, t, cond=None, mask=None):
        prediction = forward(x, t, cond, mask)
        bad = (cond == 1)[:, None, None, None]
        prediction.v = torch.where(bad, math.nan, prediction.v)
        return prediction

    model.ema.average().forward = broken
    with pytest.raises(RunError, match="item 4: the ODE failed: the derivative is not finite at log-SNR"):
        model.ode_likelihood(items)


@pytest.fixture(scope="module")
def uneven() -> tuple[DDPM, Batch, torch.Tensor]:
    """A network that was never trained, items, and the log-densities of the first and the last by many small steps."""
    torch.manual_seed(0)
    model = DDPM(DataSpec("plane", (2,)), ema_decay=0.0, net={"hidden": 8, "depth": 1})
    scattered(model.core)
    model.double()
    items = Batch(torch.randn(9, 2, dtype=torch.float64), index=torch.arange(9))
    return model, items, model.ode_likelihood(items.rows(torch.tensor([0, 8])), solver="rk4", steps=75).nats


@pytest.mark.parametrize("options, coarser", [
    ({"solver": "heun", "steps": 32}, {"solver": "heun", "steps": 16}), ({"tolerance": 1e-4}, {"tolerance": 10 * 1e-4}),
])  # fmt: skip
def test_a_coarser_solution_says_how_far_to_trust_the_value(uneven, options, coarser):
    """A network that was never trained varies quickly with the noise level, and coarse steps miss that."""
    model, items, fine = uneven
    found = model.ode_likelihood(items, **options)
    checked = torch.tensor([0, 8])
    assert (~found.solver_change.isnan()).nonzero().flatten().tolist() == checked.tolist()
    rough = model.ode_likelihood(items.rows(checked), **coarser)
    change = found.solver_change[checked]
    assert torch.allclose(change, found.nats[checked] - rough.nats, atol=1e-12)
    error = found.nats[checked] - fine
    assert 0 < float(error.square().mean()) < float(change.square().mean())
    again = Likelihood.concatenate([model.ode_likelihood(items.rows(part), **options) for part in
                                    (torch.arange(4, 9), torch.arange(4))]).in_index_order().cpu()
    # Adaptive steps are accepted or not by the last digit, so that values solved alone differ within the stated change.
    rounding = 1e-12 if "steps" in options else float(change.abs().max())
    assert torch.allclose(again.solver_change, found.solver_change, equal_nan=True, atol=rounding)
    assert "nats an item)" in how(again) and again.made["coarser"].items() <= coarser.items()
