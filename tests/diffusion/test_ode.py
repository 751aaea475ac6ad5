"""Divergences against the trace of autograd's Jacobian, for fields of every shape, with and without masks."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    CosineSchedule,
    Denoiser,
    GaussianDenoiser,
    LinearLogSnrSchedule,
    LinearSchedule,
    MixtureDenoiser,
    V,
    alpha_sigma,
    rescale_zero_terminal,
)
from genmodels.diffusion import (
    ode as divergence_module,
)
from genmodels.diffusion import (
    ode as ode_module,
)
from genmodels.diffusion import (
    solvers as solvers_module,
)
from genmodels.diffusion.ode import OdeDensity, exact_divergence, field, hutchinson, rademacher
from genmodels.diffusion.parameterisation import PARAMETERISATIONS

LENGTHS = (5, 2, 3)


def mask_of(event_shape, masked: bool):
    return torch.arange(event_shape[-1]) < torch.tensor(LENGTHS)[:, None, None] if masked else None


class Mixing:
    """f(x) = tanh(W x) * x: every scalar of an example reaches every other, examples stay apart."""

    def __init__(self, dims: int):
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(dims, dims, generator=generator, dtype=torch.float64) / math.sqrt(dims)

    def __call__(self, x):
        return (torch.tanh(x.flatten(1) @ self.weight) * x.flatten(1)).view(x.shape)


def case(event_shape, masked):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, *event_shape, generator=generator, dtype=torch.float64)
    return Mixing(math.prod(event_shape)), x, mask_of(event_shape, masked)


def trace_by_jacobian(field, x, mask):
    """The trace over the valid scalars, where invalid ones are held at zero."""
    valid = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.expand_as(x)
    values = []
    for example, keep in zip(x, valid, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda v: field(v[None])[0], example * keep)
        diagonal = jacobian.reshape(example.numel(), -1).diagonal()
        values.append(diagonal[keep.flatten()].sum())
    return torch.stack(values)


CASES = [((4,), False), ((2, 5), False), ((2, 5), True), ((1, 2, 5), False), ((1, 2, 5), True)]


@pytest.mark.parametrize("event_shape, masked", CASES)
def test_the_exact_divergence_is_the_trace_of_the_jacobian(event_shape, masked):
    field, x, mask = case(event_shape, masked)
    with torch.no_grad():  # the caller's mode does not matter
        value, found = exact_divergence(field, x, mask if mask is None or len(event_shape) > 1 else None)
    assert found.shape == (3, 1) and not found.requires_grad
    assert torch.allclose(found[:, 0], trace_by_jacobian(field, x, _like(mask, x)), atol=1e-12)
    assert mask is None or bool((value.masked_select(~_like(mask, x).expand_as(x)) == 0).all())


def _like(mask, x):
    return None if mask is None else mask.reshape(len(x), *(1,) * (x.dim() - 2), -1)


@pytest.mark.parametrize("event_shape, masked", CASES)
def test_all_pairs_of_signs_make_hutchinson_exact(event_shape, masked):
    """E[e e^T] = I, here as a mean over the rows of a Hadamard matrix, which is that expectation without noise."""
    field, x, mask = case(event_shape, masked)
    signs = _hadamard(16)[:, : x[0].numel()].view(1, 16, *event_shape).expand(3, -1, *[-1] * len(event_shape))
    found = hutchinson(field, x, signs, mask)[1].mean(1)
    assert torch.allclose(found, trace_by_jacobian(field, x, _like(mask, x)), atol=1e-12)


def _hadamard(n):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@pytest.mark.parametrize("masked", [False, True])
def test_hutchinson_is_unbiased_and_its_spread_is_that_of_theory(masked):
    """Var e^T J e = 2 (sum of squares of the symmetric part off the diagonal) for signs."""
    field, x, mask = case((2, 5), masked)
    probes = rademacher((3, 1500, 2, 5), KeyedGenerator(0, torch.arange(3), "test"))
    found = hutchinson(field, x, probes, mask)[1]
    truth = trace_by_jacobian(field, x, _like(mask, x))
    stderr = found.std(1) / math.sqrt(found.shape[1])
    assert ((found.mean(1) - truth).abs() < 4 * stderr).all()
    for row in range(3):
        keep = torch.ones(10, dtype=torch.bool) if mask is None else mask[row].expand(2, 5).flatten()
        start = x[row] * keep.view(2, 5)
        jacobian = torch.autograd.functional.jacobian(lambda v: field(v[None])[0], start).view(10, 10)[keep][:, keep]
        symmetric = (jacobian + jacobian.T) / 2
        variance = 2 * (symmetric.square().sum() - symmetric.diagonal().square().sum())
        assert abs(float(found[row].var() / variance) - 1) < 0.2


@pytest.mark.parametrize("event_shape, masked", [((2, 5), True), ((4,), False)])
def test_those_check_catches_a_sign_and_padding_that_counts(event_shape, masked, monkeypatch):
    field, x, mask = case(event_shape, masked)
    truth = trace_by_jacobian(field, x, _like(mask, x))
    assert not torch.allclose(exact_divergence(lambda v: -field(v), x, mask)[1][:, 0], truth)
    if masked:
        monkeypatch.setattr(divergence_module, "hide", lambda x, mask: x)
        assert not torch.allclose(exact_divergence(field, x, mask)[1][:, 0], truth)


def test_probes_are_signs_keyed_by_the_example():
    whole = rademacher((4, 2, 3), KeyedGenerator(0, torch.arange(4), "probes"))
    alone = rademacher((1, 2, 3), KeyedGenerator(0, torch.tensor([2]), "probes"))
    assert bool((whole.abs() == 1).all()) and torch.equal(whole[2:3], alone) and len(whole.unique()) == 2


def test_an_example_does_not_see_the_others():
    field, x, mask = case((2, 5), True)
    whole = exact_divergence(field, x, mask)[1]
    alone = torch.cat([exact_divergence(field, x[i : i + 1], mask[i : i + 1])[1] for i in range(3)])
    assert torch.allclose(whole, alone, atol=1e-14)


MEAN = torch.tensor([0.5, -0.2, 1.0], dtype=torch.float64)
SPREAD = torch.tensor([[0.3, 0.1, 0.0], [0.1, 0.5, -0.2], [0.0, -0.2, 0.4]], dtype=torch.float64)
VARIANCES = torch.tensor([0.25, 1.0, 0.04], dtype=torch.float64)
MEANS = torch.tensor([[-1.0, 0.5, 0.0], [1.0, 0.0, 0.3]], dtype=torch.float64)
TOP = 10.0


def exact_denoiser(kind, schedule=None):
    schedule = schedule or CosineSchedule()
    if kind == "gaussian":
        return GaussianDenoiser.from_covariance(schedule, MEAN, SPREAD)
    return MixtureDenoiser(schedule, torch.tensor([0.3, 0.7]), MEANS, torch.tensor([0.1, 0.3]))


def points(n=3):
    """Where there is mass: half a standard deviation and more from the means."""
    return MEAN + 0.5 * torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def error(denoiser, truth, x=None, **options):
    """Largest error of log p at log-SNR 10 over some points, with the true marginal as base."""
    x = points() if x is None else x

    def base(z):
        end = torch.tensor([ode_module.last_log_snr(truth.schedule)], dtype=torch.float64)
        return truth.marginal_log_prob(z, truth.schedule.time_of(end))

    found = OdeDensity(**{"tolerance": 1e-8} | options)(denoiser, x, TOP, base=base)
    t = truth.schedule.time_of(torch.full((len(x),), TOP, dtype=torch.float64))
    return float((found.log_prob[:, 0] - truth.marginal_log_prob(x, t)).abs().max())


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tolerance, most", [(1e-5, 7.6e-6), (1e-7, 1.8e-7), (1e-9, 1.5e-9)])
def test_the_error_falls_with_the_tolerance_to_the_known_value(tolerance, most):
    """With the true marginal as base, log p is the exact one; with N(0, I) a known remainder is left."""
    truth = GaussianDenoiser(LinearLogSnrSchedule(), MEAN, VARIANCES)
    x, end = torch.tensor([[0.9, 0.3, 1.1]], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    density = OdeDensity(tolerance=tolerance)
    exact = density(truth, x, 10.0, base=lambda z: truth.marginal_log_prob(z, end)).log_prob.item()
    assert abs(exact - truth.marginal_log_prob(x, 0 * end).item()) < 2 * most
    assert abs(exact + 1.02473604) < 2 * most + 2e-8
    assert abs(density(truth, x, 10.0).log_prob.item() - exact + 5.44e-3) < 1e-5


@pytest.mark.parametrize("kind", ["gaussian", "mixture"])
@pytest.mark.parametrize("options", [
    {}, {"solver": "scipy", "tolerance": 3e-7}, {"solver": "rk4", "steps": 80},
], ids=str)
def test_the_density_is_the_analytic_one(kind, options):
    truth = exact_denoiser(kind)
    assert error(truth, truth, **options) < 1e-5


@pytest.mark.parametrize("name", list(PARAMETERISATIONS))
def test_every_meaning_of_the_output_gives_the_same_density(name):
    truth, parameterisation = exact_denoiser("mixture"), PARAMETERISATIONS[name]()

    def net(x, log_snr, cond, *extra):
        """The output whose x0 is that of the exact denoiser: every meaning is affine in it, two points find it."""
        noisy = x / parameterisation.scale_input(torch.ones_like(x), log_snr.double())
        wanted = truth(noisy, truth.schedule.time_of(log_snr.double())).x0
        zero, one = (
            parameterisation.to_prediction(value, noisy, log_snr.double()).x0
            for value in (torch.zeros_like(noisy), torch.ones_like(noisy))
        )
        return (wanted - zero) / (one - zero)

    assert error(Denoiser(net, truth.schedule, parameterisation), truth, points(2), tolerance=1e-6) < 1e-4


def test_the_standard_normal_base_leaves_a_remainder_that_falls_with_the_noisiest_level():
    """It is of the order of alpha(1) = e^(lambda(1) / 2) for data whose mean is not zero."""
    gaps = []
    for last in (-10.0, -15.0):
        truth = exact_denoiser("gaussian", LinearLogSnrSchedule(log_snr_max=10.0, log_snr_min=last))
        exact = truth.marginal_log_prob(points(), torch.zeros(3, dtype=torch.float64))
        gaps.append(float((OdeDensity(tolerance=1e-7)(truth, points(), TOP).log_prob[:, 0] - exact).abs().max()))
    assert gaps[0] < 2e-2 and gaps[1] < 2e-3 and abs(math.log(gaps[0] / gaps[1]) - 2.5) < 0.3


def test_a_schedule_that_ends_in_nothing_but_noise_is_followed_to_log_snr_minus_20():
    truth = exact_denoiser("gaussian", rescale_zero_terminal(LinearSchedule()))
    assert math.isinf(truth.schedule.end_points[1]) and error(truth, truth, tolerance=1e-6) < 1e-3


def test_the_path_is_the_closed_form_one():
    truth = exact_denoiser("gaussian")
    x = points()
    found = OdeDensity(tolerance=1e-8)(truth, x, TOP).latent
    (alpha_t, sigma_t), (alpha_s, sigma_s) = (
        alpha_sigma(torch.tensor(v, dtype=torch.float64)) for v in (TOP, -15.0)
    )
    ratio = (alpha_s**2 * truth.variance + sigma_s**2) / (alpha_t**2 * truth.variance + sigma_t**2)
    moved = alpha_s * MEAN + ((x - alpha_t * MEAN) @ truth.basis * ratio.sqrt()) @ truth.basis.T
    assert torch.allclose(found, moved, atol=1e-6)


def test_those_check_catches_mutants(monkeypatch):
    truth = exact_denoiser("mixture")
    right = ode_module.exact_divergence
    assert error(truth, truth, tolerance=1e-5) < 1e-3
    with monkeypatch.context() as patch:  # the trace enters with the wrong sign
        patch.setattr(ode_module, "exact_divergence", lambda *a: (right(*a)[0], -right(*a)[1]))
        assert error(truth, truth, tolerance=1e-5) > 1e-2
    with monkeypatch.context() as patch:  # the score has the wrong sign
        patch.setattr(ode_module, "field", lambda *a: -field(*a))
        assert error(truth, truth, tolerance=1e-5) > 1e-2


# ---- Hutchinson ------------------------------------------------------------------------------------------------------


def estimates(probes=4, repetitions=60):
    """log p of one point by `probes` probes, many times; and the exact value."""
    truth, x = exact_denoiser("gaussian"), points(1)
    density = OdeDensity(divergence="hutchinson", probes=probes, tolerance=1e-4)
    generator = KeyedGenerator(0, torch.arange(repetitions), "test")
    found = density(truth, x.expand(repetitions, -1), TOP, generator=generator).log_prob
    return found, OdeDensity(tolerance=1e-6)(truth, x, TOP).log_prob.item()


def test_hutchinson_is_unbiased_and_its_standard_error_is_right():
    found, exact = estimates()
    assert found.shape == (60, 4)
    means = found.mean(1)
    assert abs(float(means.mean()) - exact) < 4 * float(means.std()) / math.sqrt(len(means)) + 1e-4
    returned = found.var(1).mean().div(4).sqrt()
    assert abs(float(returned / means.std()) - 1) < 0.2


def test_that_check_catches_probes_drawn_anew_at_every_step(monkeypatch):
    """Fresh probes make the divergence a noise that the step control chases, if it ever arrives."""
    right, source = ode_module.hutchinson, torch.Generator().manual_seed(0)

    def fresh(f, x, probes, mask):
        signs = torch.randint(0, 2, probes.shape, generator=source).double() * 2 - 1
        return right(f, x, signs, mask)

    steady = OdeDensity(divergence="hutchinson", tolerance=1e-4)
    given = {"generator": KeyedGenerator(0, torch.arange(1), "test")}
    usual = int(steady(exact_denoiser("gaussian"), points(1), TOP, **given).evaluations)
    monkeypatch.setattr(ode_module, "hutchinson", fresh)
    monkeypatch.setattr(solvers_module, "_MOST_STEPS", 100)
    try:
        taken = int(steady(exact_denoiser("gaussian"), points(1), TOP, **given).evaluations)
    except solvers_module.SolverError:
        taken = math.inf
    assert taken > 3 * usual


# ---- shapes, masks, batches ------------------------------------------------------------------------------------------


class Sequences:
    """A denoiser of sequences (2, T) of any length: neighbours in time are mixed by a kernel, as a network would."""

    def __init__(self):
        self.schedule = CosineSchedule()
        self.exact_denoiser = GaussianDenoiser(self.schedule, torch.zeros(1, dtype=torch.float64), 0.5)

    def __call__(self, x, t, cond=None, mask=None):
        hidden = x if mask is None else x.masked_fill(~mask, 0)
        kernel = torch.tensor([0.2, 1.0, -0.1], dtype=torch.float64).expand(2, 1, 3)
        mixed = torch.nn.functional.conv1d(hidden, kernel, padding=1, groups=2)
        return self.exact_denoiser(torch.tanh(mixed), t)


@pytest.mark.parametrize("divergence", ["exact", "hutchinson"])
def test_padding_is_no_part_of_the_density(divergence):
    lengths, size = (7, 3, 5), 7
    x = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.arange(size) < torch.tensor(lengths)[:, None, None]
    dirty = x.masked_fill(~mask, math.nan)
    keyed = KeyedGenerator(0, torch.arange(3), "test")
    if divergence == "exact":
        density = OdeDensity()
        padded = density(Sequences(), dirty, TOP, mask=mask).log_prob
        for row, length in enumerate(lengths):
            alone = density(Sequences(), x[row : row + 1, :, :length], TOP).log_prob
            assert torch.allclose(alone, padded[row], atol=1e-4)
    else:
        fixed = {"divergence": "hutchinson", "probes": 60, "solver": "heun", "steps": 10}
        several = OdeDensity(**fixed)(Sequences(), dirty, TOP, mask=mask, generator=keyed)
        exact = OdeDensity(divergence="exact", solver="heun", steps=10)(Sequences(), dirty, TOP, mask=mask)
        stderr = several.log_prob.std(1) / math.sqrt(60)
        assert ((several.log_prob.mean(1) - exact.log_prob[:, 0]).abs() < 4 * stderr).all()


def test_that_check_catches_a_base_that_counts_padding(monkeypatch):
    monkeypatch.setattr(ode_module, "standard_normal", lambda x, mask: standard(x))
    with pytest.raises(AssertionError):
        test_padding_is_no_part_of_the_density("exact")


def standard(x):
    return -0.5 * (x.square() + math.log(2 * math.pi)).flatten(1).sum(1)


@pytest.mark.parametrize("divergence", ["exact", "hutchinson"])
@pytest.mark.parametrize("solver", ["rk45", "rk4"])
def test_an_example_does_not_depend_on_its_batch(divergence, solver):
    truth, x = exact_denoiser("mixture"), points(5)
    index = torch.arange(5)

    def by(rows, chosen):
        density = OdeDensity(divergence=divergence, probes=2, solver=solver, rows=rows, steps=8, tolerance=1e-4)
        return density(truth, x[chosen], TOP, generator=KeyedGenerator(0, index[chosen], "test"))

    whole = by(256, slice(None))
    for other in (by(2, slice(None)), by(256, [4, 2, 0, 1, 3])):
        order = slice(None) if other.log_prob[0, 0] == whole.log_prob[0, 0] else [2, 3, 1, 4, 0]
        assert torch.allclose(other.log_prob[order], whole.log_prob, atol=1e-10)
        assert torch.equal(other.evaluations[order], whole.evaluations)


def test_the_default_divergence_depends_on_the_size_alone():
    density = OdeDensity(probes=3)
    assert density.made(64)["divergence"] == "exact" and density.made(65) == {
        "divergence": "hutchinson", "probes": 3, "solver": "rk45", "variable": "log_snr", "tolerance": 1e-5
    }


def test_a_network_in_float32_keeps_a_state_in_float64():
    truth = exact_denoiser("gaussian")

    def net(x, log_snr, cond):
        return truth(x.float(), truth.schedule.time_of(log_snr.double())).v.float()

    found = OdeDensity(tolerance=1e-4)(Denoiser(net, truth.schedule, PARAMETERISATIONS["v"]()), points(), TOP)
    assert found.latent.dtype == found.log_prob.dtype == torch.float64
    exact = OdeDensity(tolerance=1e-6)(truth, points(), TOP)
    assert torch.allclose(found.log_prob, exact.log_prob, atol=2e-3)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"divergence": "skilling"}, "must be one of auto, exact, hutchinson"),
        ({"solver": "euler"}, "must be one of rk45, scipy, heun, rk4"),
        ({"probes": 0}, "at least 1"),
        ({"tolerance": 0.0}, "positive"),
        ({"tolerance": math.inf}, "finite"),
        ({"solver": "heun", "steps": 0}, "at least 1"),
    ],
)
def test_unknown_options_are_refused_in_one_line(options, words, refuses):
    refuses(InputError, words, OdeDensity, **options)


@pytest.mark.parametrize("divergence, columns", [("exact", 1), ("hutchinson", 3)])
def test_no_points_have_no_densities(divergence, columns):
    density = OdeDensity(divergence=divergence, probes=3)
    found = density(exact_denoiser("gaussian"), points()[:0], TOP, generator=torch.Generator())
    assert found.log_prob.shape == (0, columns) and found.latent.shape == points()[:0].shape
    assert found.evaluations.shape == (0,)


@pytest.mark.parametrize("divergence", ["exact", "hutchinson"])
@pytest.mark.parametrize("offset", [0.0, torch.zeros(1, requires_grad=True)])
def test_a_velocity_that_does_not_depend_on_x_has_no_divergence(divergence, offset):
    """v = 0 is the exact denoiser of N(0, I), whatever else it depends on."""
    still = Denoiser(lambda x, log_snr, cond: torch.zeros_like(x) + offset, CosineSchedule(), V())
    density = OdeDensity(divergence=divergence, solver="rk4", steps=8)
    x = torch.tensor([[0.5, -1.0]], dtype=torch.float64)
    found = density(still, x, TOP, generator=KeyedGenerator(0, torch.arange(1), "probes")).log_prob
    expected = -0.5 * x.square().sum() - math.log(2 * math.pi)
    assert bool(((found - expected).abs() < 1e-3).all())


def test_probes_need_a_generator():
    with pytest.raises(InputError, match="need a generator"):
        OdeDensity(divergence="hutchinson")(exact_denoiser("gaussian"), points(), TOP)


def test_a_base_that_would_broadcast_is_refused(refuses):
    def base(x):
        return standard(x)[:, None]

    refuses(InputError, r"base is one number for each row, \(3,\)", OdeDensity(), exact_denoiser("gaussian"), points(),
            TOP, base=base)


def test_a_path_that_fails_names_its_row_and_noise_level():
    truth = exact_denoiser("gaussian")

    def net(x, log_snr, cond):
        v = truth(x, truth.schedule.time_of(log_snr)).v
        return torch.where((x[:, :1] > 2.5) & ((log_snr[:, None] - 8.5).abs() < 0.5), math.nan, v)

    broken = Denoiser(net, truth.schedule, PARAMETERISATIONS["v"]())
    x = points()
    x[2] = 3.0
    for variable in ("log_snr", "time"):
        with pytest.raises(solvers_module.SolverError, match="row 2: the ODE failed: .* not finite, at [89]"):
            OdeDensity(rows=2, variable=variable)(broken, x, TOP)
