"""Annealed importance sampling against normalising constants that are known."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from genmodels.core.errors import RunError
from genmodels.core.random import KeyedGenerator
from genmodels.energy import (
    HMC,
    MALA,
    ULA,
    AnnealedImportanceSampling,
    DoubleWell,
    GaussianBase,
    GaussianMixture,
    LogDensity,
    LogPartition,
    Quadratic,
    ScoreNetwork,
)
from genmodels.energy.annealed_importance import Bridge, Run

COVARIANCE = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=torch.float64)
NORMAL = Quadratic(torch.linalg.inv(COVARIANCE), torch.tensor([1.0, -1.0], dtype=torch.float64))
TRUTH = 2.08522519
BASE = GaussianBase(torch.zeros(2), 4 * torch.eye(2))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def keyed(rows, seed=0):
    return KeyedGenerator(seed, torch.as_tensor(rows), "ais")


def plain(steps, kind=AnnealedImportanceSampling, **options):
    """Between even inverse temperatures, which are the worse ones for so few."""
    ais = kind(steps=steps, kernel=MALA(step_size=0.3), tune=0, **options)
    ais.betas = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    return ais


def estimate(ais, model=NORMAL, base=BASE, chains=5000, samples=None, seed=0):
    samples = model.sample(chains, seeded(99)) if samples is None else samples
    return ais(model, base, seeded(seed), chains=chains, samples=samples, exact_samples=True, dtype=torch.float64)


def brackets(found, truth):
    assert abs(found.log_z - truth) < 3 * found.stderr
    assert found.lower - 3 * found.lower_stderr <= truth <= found.upper + 3 * found.upper_stderr
    assert found.lower <= found.log_z <= found.upper + 3 * found.stderr


# ---- the vector ----

PUBLISHED = {4: (0.54, 2.69, 2364, 0.015), 32: (1.70, 2.35, 3390, 0.010), 256: (2.03, 2.15, 4488, 0.005)}


@pytest.mark.parametrize("steps", PUBLISHED)
def test_vector(steps):
    assert pytest.approx(TRUTH, abs=1e-8) == NORMAL.log_normaliser
    found = estimate(plain(steps))
    lower, upper, ess, stderr = PUBLISHED[steps]
    brackets(found, TRUTH)
    assert found.lower == pytest.approx(lower, abs=0.06) and found.upper == pytest.approx(upper, abs=0.06)
    assert found.ess == pytest.approx(ess, rel=0.06) and found.stderr == pytest.approx(stderr, rel=0.15)


class AfterTheMove(AnnealedImportanceSampling):
    """Weights evaluated after the move."""

    def forward(self, model, base, generator, chains, sizes, *, cond=None, dtype=torch.float32):
        bridge = Bridge(model, base, cond)
        point = bridge.evaluate(base.sample(chains, generator, dtype=dtype))
        log_w = torch.zeros(chains, dtype=torch.float64)
        for k in range(1, len(self.betas)):
            point, _ = self._move(bridge, point, k, generator, sizes)
            log_w += bridge.energy(point, k - 1, self.betas) - bridge.energy(point, k, self.betas)
        return Run(log_w, 1.0, point.x)


class NotReversed(AnnealedImportanceSampling):
    """The reverse run is a second forward run: from draws of the base, not of the model."""

    def reverse(self, model, base, generator, samples, sizes, *, cond=None):
        return self.forward(model, base, generator, len(samples), sizes, cond=cond, dtype=samples.dtype)


def test_check_catches_weights_after_the_move():
    with pytest.raises(AssertionError):
        brackets(estimate(plain(8, AfterTheMove)), TRUTH)


def test_check_catches_a_path_that_is_not_reversed():
    with pytest.raises(AssertionError):
        brackets(estimate(plain(32, NotReversed)), TRUTH)


@pytest.mark.parametrize("count", [150, 600])
def test_other_numbers_of_samples_than_chains(count):
    ais = AnnealedImportanceSampling(steps=32, kernel=HMC(step_size=0.3))
    found = ais(NORMAL, BASE, keyed(range(300)), chains=300, samples=NORMAL.sample(count, seeded(99)),
                exact_samples=True, dtype=torch.float64)
    brackets(found, TRUTH)


SQUARE = LogDensity(lambda x: torch.where((x.abs() <= 1).all(1), 0.0, -math.inf) + 0 * x.sum(1))


def test_chains_outside_the_support_weigh_nothing():
    """log 4, of a uniform density on a square, where plain importance sampling is right too."""
    ais = AnnealedImportanceSampling(steps=16, kernel=MALA(step_size=0.3), tune=0)
    found = ais(SQUARE, GaussianBase(torch.zeros(2), torch.eye(2)), keyed(range(2000)), chains=2000, reverse=False,
                dtype=torch.float64)
    assert abs(found.log_z - math.log(4)) < 4 * found.stderr < 0.3


@pytest.mark.parametrize("generator", [keyed(range(300)), seeded()])
def test_reverse_chains_start_inside_the_support(generator):
    """Their bound is too high by at least -log of the share of the base inside, and not by much more."""
    ais = AnnealedImportanceSampling(steps=8, kernel=MALA(step_size=0.3), tune=0, reverse_steps=10)
    found = ais(SQUARE, GaussianBase(torch.zeros(2), torch.eye(2)), generator, chains=300, dtype=torch.float64)
    inside = math.erf(math.sqrt(0.5)) ** 2
    assert abs(found.log_z - math.log(4)) < 4 * found.stderr
    assert math.log(4) - math.log(inside) <= found.upper + 3 * found.upper_stderr < math.log(4) - math.log(inside) + 0.2
    assert found.lower == found.least == -math.inf and found.upper < found.most < found.upper + 0.1
    far = LogDensity(lambda x: torch.where(x[:, 0] > 50, 0.0, -math.inf) + 0 * x.sum(1))
    with pytest.raises(RunError, match="infinite at all 10 draws of the base"):
        ais(far, BASE, seeded(), chains=10)


# ---- other densities, kernels, grids ----

MIXTURE = GaussianMixture(
    torch.tensor([0.3, 0.7]).double(), torch.tensor([[-1.5, 0.0], [1.5, 1.0]]).double(), 0.6, log_z=2.0
)


@pytest.mark.parametrize("kernel", [HMC(step_size=0.3), MALA(step_size=0.2)])
def test_mixture(kernel):
    found = estimate(AnnealedImportanceSampling(steps=32, kernel=kernel), MIXTURE, chains=1500)
    brackets(found, 2.0)
    assert found.reverse == "exact"


@pytest.mark.parametrize("dims, truth", [(1, 0.679926243), (2, 1.63517997)])
def test_double_well(dims, truth):
    base = GaussianBase(torch.zeros(dims), 2 * torch.eye(dims))
    samples = _rejection(dims, 1500)
    brackets(estimate(AnnealedImportanceSampling(steps=32), DoubleWell(), base, 1500, samples), truth)


def _rejection(dims, n):
    """Exact draws: uniform points of a box, kept with probability exp(-E)."""
    x = 6 * torch.rand(60 * n, dims, generator=seeded(3), dtype=torch.float64) - 3
    keep = torch.rand(len(x), generator=seeded(4), dtype=torch.float64) < torch.exp(-DoubleWell().energy(x))
    return x[keep][:n]


def test_the_standard_error_is_calibrated():
    """200 estimates of 60 chains each, from one long batch: their z-values have spread one."""
    repeats, chains = 200, 60
    ais = AnnealedImportanceSampling(steps=16, tune=0, kernel=HMC(step_size=0.3, leapfrog_steps=3))
    sizes = ais.step_sizes(MIXTURE, BASE, seeded())
    log_w = ais.forward(MIXTURE, BASE, seeded(5), repeats * chains, sizes, dtype=torch.float64).log_w
    found = [LogPartition.of_weights(w, None, BASE.log_normaliser, dims=2, steps=16) for w in log_w.split(chains)]
    z = torch.tensor([(one.log_z - 2.0) / one.stderr for one in found])
    assert float(z.std()) == pytest.approx(1, abs=0.25)
    assert ((z.abs() > 3).double().mean() < 0.03) and abs(float(z.mean())) < 0.35


COUNTS = (4, 8, 32, 64)
KNOWN = {
    "gaussian": (NORMAL, BASE, TRUTH, lambda n: NORMAL.sample(n, seeded(98)), 60),
    "mixture": (MIXTURE, BASE, 2.0, lambda n: MIXTURE.sample(n, seeded(98)), 60),
    "double well": (DoubleWell(), GaussianBase(torch.zeros(2), 2 * torch.eye(2)), 1.63517997,
                    lambda n: _rejection(2, n), 24),
}


@functools.cache
def log_weights(name):
    """Of 4,096 chains of both directions."""
    model, base, _, exact, steps = KNOWN[name]
    ais = AnnealedImportanceSampling(steps=steps, tune=0, kernel=HMC(step_size=0.3, leapfrog_steps=2))
    sizes = ais.step_sizes(model, base, seeded())
    return (ais.forward(model, base, seeded(5), 4096, sizes, dtype=torch.float64).log_w,
            ais.reverse(model, base, seeded(6), exact(4096).double(), sizes).log_w)


def statements(name):
    """[(chains, log Z, what was found)]: the chains cut into estimates of few chains each."""
    _, base, truth, _, steps = KNOWN[name]
    forward, back = log_weights(name)
    return [(chains, truth, LogPartition.of_weights(w, v, base.log_normaliser, dims=2, steps=steps))
            for chains in COUNTS for w, v in zip(forward.split(chains), back.split(chains), strict=True)]


def is_one_statement(found):
    """For every number of chains: bounds are bounds in the mean; the limits hold the estimate always, and log Z as
    often as they say; so does the error of estimates called reliable. Shares of 0.95, less three standard errors."""
    for chains in COUNTS:
        some = [one for count, _, one in found if count == chains]
        truth = found[0][1]
        for bound, sign in (("lower", 1), ("upper", -1)):
            above = sign * (torch.tensor([getattr(one, bound) for one in some]) - truth)
            assert float(above.mean()) < 3 * float(above.std()) / math.sqrt(len(some)), bound
        limits = [(one.least, one.most) for one in some]  # slow
        for one, (least, most) in zip(some, limits, strict=True):
            assert least <= one.log_z <= most and least <= one.lower and one.upper <= most
        held = [least <= truth <= most for least, most in limits]
        relied = [abs(one.log_z - truth) < 2 * one.stderr for one in some if one.reliable]
        for share in (held, relied):
            spread = math.sqrt(0.95 * 0.05 * len(share))
            assert sum(share) >= 0.95 * len(share) - 3 * spread, (chains, sum(share), len(share))


@pytest.mark.parametrize("name", KNOWN)
def test_estimate_and_bracket_are_one_statement(name):
    found = statements(name)
    is_one_statement(found)
    reliable = {chains: [one.reliable for count, _, one in found if count == chains] for chains in COUNTS}
    assert not any(reliable[4] + reliable[8]) and sum(reliable[64]) > 0.7 * len(reliable[64])


MUTANTS = {
    "ends swapped": {"lower": property(lambda self: vars(self)["upper"]),
                     "upper": property(lambda self: vars(self)["lower"])},
    "ends without errors": {"least": property(lambda self: self.lower), "most": property(lambda self: self.upper)},
    "few chains relied on": {"reliable": True},
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_one_statement_catches(fault):
    kind = type("Mutant", (LogPartition,), MUTANTS[fault])
    found = statements("double well")
    for _, _, one in found:
        object.__setattr__(one, "__class__", kind)
    with pytest.raises(AssertionError):
        is_one_statement(found)


def test_directions_that_disagree_leave_the_bracket_alone():
    """Reverse chains that end a nat below the forward ones: no chance, no point."""
    log_w = 0.3 * torch.randn(64, generator=seeded(), dtype=torch.float64)
    near, far = (LogPartition.of_weights(log_w, log_w - by, 0.0, dims=2, steps=9, reverse="exact") for by in (0.05, 1))
    assert near.consistent and near.reliable and near.log_z > near.upper and near.log_z < near.most
    assert not far.consistent and far.least < far.upper < far.log_z < far.most
    assert far.note == "unreliable: forward and reverse chains disagree: more densities="
    steps = replace(far, kernel="diffusion").note  # of a model whose option has this name
    assert steps == "unreliable: forward and reverse chains disagree: more steps="


def test_an_event_of_any_shape():
    dims = 12
    flat = Quadratic(torch.eye(dims, dtype=torch.float64) * 2.0)
    base = GaussianBase(torch.zeros(3, 2, 2), torch.eye(dims))
    samples = flat.sample(400, seeded(1)).view(400, 3, 2, 2)
    brackets(estimate(AnnealedImportanceSampling(steps=32), flat, base, 400, samples), flat.log_normaliser)


# ---- chains, tuning, labels ----


def addressable(ais):
    def weights(rows):
        sizes = ais.step_sizes(MIXTURE, BASE, keyed(rows), dtype=torch.float64)
        forward = ais.forward(MIXTURE, BASE, keyed(rows), len(rows), sizes, dtype=torch.float64)
        return torch.stack([forward.log_w, ais.reverse(MIXTURE, BASE, keyed(rows), forward.x, sizes).log_w])

    whole = weights(range(12))
    for rows in ([7], [11, 0, 4], list(range(4, 12))):  # the last as many as tune the steps
        assert (weights(rows) - whole[:, rows]).abs().max() < 1e-10


def test_a_chain_is_the_same_alone_and_in_any_batch():
    addressable(AnnealedImportanceSampling(steps=8, tune=8, kernel=HMC(leapfrog_steps=2)))


def test_addressable_catches_steps_tuned_on_the_chains_that_count():
    class Tuned(AnnealedImportanceSampling):
        def step_sizes(self, model, base, generator, **options):
            self.tune = len(generator.index)
            return super().step_sizes(model, base, generator, **options)

    with pytest.raises(AssertionError):
        addressable(Tuned(steps=8, tune=8, kernel=HMC(leapfrog_steps=2)))


def test_tuning_finds_steps_for_every_density():
    narrow = Quadratic(1e4 * torch.eye(2, dtype=torch.float64))
    ais = AnnealedImportanceSampling(steps=60)
    sizes = ais.step_sizes(narrow, BASE, seeded(), dtype=torch.float64)
    assert sizes[0] > 20 * sizes[-1]
    assert ais.forward(narrow, BASE, seeded(1), 200, sizes, dtype=torch.float64).acceptance > 0.4


def test_without_samples_the_upper_side_is_approximate():
    ais = AnnealedImportanceSampling(steps=32, reverse_steps=60, kernel=MALA())
    found = ais(MIXTURE, BASE, keyed(range(300)), chains=300, dtype=torch.float64)
    assert found.reverse == "approximate" and found.note == "reverse, approximate" and found.reliable
    assert abs(found.log_z - 2) < 4 * found.stderr
    once = ais(MIXTURE, BASE, keyed(range(300)), chains=300, reverse=False, dtype=torch.float64)
    assert once.upper is None and not once.reliable and once.note == "unreliable: no upper bound"
    assert once.log_z == found.log_z
    made = found.made()
    assert made["reverse"] == "approximate" and made["log_z"] == found.log_z and made["kernel"] == "MALA"
    assert all(isinstance(v, int | float | str | bool) for v in made.values())


def test_what_is_unreliable_says_so():
    few = estimate(plain(1), Quadratic(400 * torch.eye(2, dtype=torch.float64)), chains=500)
    assert not few.reliable and few.note.startswith("unreliable: ") and "nats apart, at most 1.04" in few.note
    assert "more densities=" in few.note


def test_float32():
    single = GaussianMixture(torch.tensor([0.3, 0.7]), MIXTURE.means.float(), 0.6, log_z=2.0)
    found = AnnealedImportanceSampling(steps=32, reverse_steps=10)(single, BASE, seeded(), chains=400)
    assert abs(found.log_z - 2) < 4 * found.stderr


def test_base():
    x = NORMAL.sample(20_000, seeded())
    base = GaussianBase(x.mean(0), 2 * torch.cov(x.T))
    torch.testing.assert_close(torch.linalg.inv(base.precision), 2 * COVARIANCE, rtol=0.05, atol=0.05)
    normal = torch.distributions.MultivariateNormal(base.mean, precision_matrix=base.precision)
    torch.testing.assert_close(base.log_density(x[:5]) - base.log_normaliser, normal.log_prob(x[:5]))
    draws = base.sample(50_000, seeded(1))
    torch.testing.assert_close(torch.cov(draws.T), 2 * COVARIANCE, rtol=0.05, atol=0.05)
    with pytest.raises(ValueError, match="not positive definite"):
        GaussianBase(torch.zeros(2), torch.zeros(2, 2))


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 1000])
def test_inverse_temperatures(steps):
    betas = AnnealedImportanceSampling(steps=steps).betas
    assert len(betas) == steps + 1 and betas[0] == 0 and betas[-1] == 1 and (betas.diff() > 0).all()


def test_errors():
    with pytest.raises(ValueError, match="ULA inside annealed importance sampling"):
        AnnealedImportanceSampling(kernel=ULA())
    with pytest.raises(ValueError, match="needs an energy"):
        AnnealedImportanceSampling(steps=2)(ScoreNetwork(lambda x: -x), BASE, seeded(), chains=4)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        AnnealedImportanceSampling(steps=0)
    assert math.isinf(LogPartition.of_weights(torch.zeros(1), None, 0.0, dims=2, steps=1).stderr)
