"""Langevin and Hamiltonian steps: stationary distributions, exactness, reversibility, order."""

from __future__ import annotations

import math

import pytest
import torch

import genmodels.energy.kernels as annealed_module
import genmodels.energy.kernels as kernels_module
from genmodels.core.errors import RunError
from genmodels.core.random import KeyedGenerator
from genmodels.core.tensors import hide
from genmodels.energy import (
    HMC,
    MALA,
    ULA,
    DoubleWell,
    EnergyFunction,
    GaussianMixture,
    NoiseConditionalScore,
    Point,
    Quadratic,
    ScoreNetwork,
    Target,
    annealed_langevin,
    leapfrog,
    predictor_corrector,
    quadrature,
    run_chains,
)
from genmodels.energy.kernels import choose, metropolis, noise_like, rows

ONE = torch.ones(1, 1, dtype=torch.float64)
NORMAL = Quadratic(ONE)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(model, kernel, chains, steps, start=None, dims=1, h=None):
    target = Target(model)
    x = torch.zeros(chains, dims, dtype=torch.float64) if start is None else start
    point, generator = target.evaluate(x), seeded(1)
    size = torch.full((chains,), h or kernel.step_size, dtype=torch.float64)
    acceptance = 0.0
    for _ in range(steps):
        point, move = kernel(target, point, generator, size)
        if move.acceptance is not None:
            acceptance += float(move.acceptance.mean()) / steps
    return point.x, acceptance


def z_of_mean(values, expected):
    return float((values.mean() - expected) / (values.std() / math.sqrt(len(values))))


# ---- the unadjusted step ----


def stationary(kernel, chains, steps):
    x, _ = run(NORMAL, kernel, chains, steps, start=torch.randn(chains, 1, generator=seeded(5), dtype=torch.float64))
    assert abs(z_of_mean(x[:, 0].square(), 1 / (1 - kernel.step_size / 2))) < 4


@pytest.mark.parametrize("h, steps", [(0.1, 60), (0.5, 20)])
def test_stationary_variance_of_ula(h, steps):
    stationary(ULA(step_size=h), 200_000, steps)


class RootH(ULA):
    """Noise of sqrt(h) for sqrt(2h)."""

    def __call__(self, target, point, generator, step_size):
        h = rows(step_size, point.x)
        new = target.evaluate(point.x + h * point.score + h.sqrt() * noise_like(point.x, generator))
        return new, kernels_module.Move(None, torch.zeros(len(point.x), dtype=torch.bool))


def test_variance_catches_half_the_noise():
    with pytest.raises(AssertionError):
        stationary(RootH(step_size=0.5), 20_000, 20)


def test_unstable_steps_are_refused():
    x = torch.zeros(4, 2, dtype=torch.float64)
    stiff = Quadratic(torch.diag(torch.tensor([1.0, 10.0], dtype=torch.float64)))
    with pytest.raises(ValueError, match="outside the stability of this energy: use less than 0.2"):
        run_chains(stiff, ULA(step_size=0.21), x, seeded(), steps=1)
    run_chains(stiff, ULA(step_size=0.19), x, seeded(), steps=1)
    with pytest.raises(ValueError, match="use less than 2"):
        run_chains(ScoreNetwork(lambda y: -y), ULA(step_size=2.1), x, seeded(), steps=1)
    # No quadratic: no rule, but what leaves all bounds is reported.
    with pytest.raises(RuntimeError, match="diverged"):
        run_chains(DoubleWell(), ULA(step_size=1.0), x + 2, seeded(), steps=50)


# ---- exactness of the corrected ones ----

WELL = DoubleWell()
WEIGHTS = GaussianMixture(torch.tensor([0.3, 0.7]).double(), torch.tensor([[-1.2], [1.2]]).double(), 0.7)
EXACT = {"mala": MALA(step_size=0.8), "hmc": HMC(step_size=0.5, leapfrog_steps=4)}


def leaves_normal_invariant(kernel, chains=40_000, steps=8):
    start = torch.randn(chains, 1, generator=seeded(3), dtype=torch.float64)
    x, acceptance = run(NORMAL, kernel, chains, steps, start)
    assert abs(z_of_mean(x[:, 0].square(), 1.0)) < 4 and abs(z_of_mean(x[:, 0], 0.0)) < 4
    assert abs(z_of_mean(x[:, 0] ** 4, 3.0)) < 4
    return acceptance


@pytest.mark.parametrize("name", EXACT)
def test_exact_on_a_normal_density(name):
    acceptance = leaves_normal_invariant(EXACT[name])
    if name == "mala":
        assert acceptance == pytest.approx(0.84, abs=0.01)


class NoProposalRatio(MALA):
    def __call__(self, target, point, generator, step_size):
        h = rows(step_size, point.x)
        proposal = target.evaluate(point.x + h * point.score + (2 * h).sqrt() * noise_like(point.x, generator))
        return kernels_module.metropolis(point, proposal, point.energy - proposal.energy, generator)


class FullLastStep(HMC):
    """The last momentum step is a whole one."""

    def __call__(self, target, point, generator, step_size):
        e = rows(step_size, point.x)
        p = noise_like(point.x, generator)
        proposal, p_new = leapfrog(target, point, p, step_size, self.leapfrog_steps)
        p_new = p_new + 0.5 * e * proposal.score
        kinetic = 0.5 * (p.square() - p_new.square()).flatten(1).sum(1)
        return kernels_module.metropolis(point, proposal, point.energy - proposal.energy + kinetic, generator)


class KeptMomentum(HMC):
    """One momentum for ever, kept on rejection and not turned round."""

    def __call__(self, target, point, generator, step_size):
        if not hasattr(self, "p"):
            self.p = noise_like(point.x, generator)
        proposal, p_new = leapfrog(target, point, self.p, step_size, self.leapfrog_steps)
        kinetic = 0.5 * (self.p.square() - p_new.square()).flatten(1).sum(1)
        new, move = kernels_module.metropolis(point, proposal, point.energy - proposal.energy + kinetic, generator)
        moved = (new.x == proposal.x).all(1, keepdim=True)
        self.p = torch.where(moved, p_new, self.p)
        return new, move


BUGS = [NoProposalRatio(step_size=0.8), FullLastStep(step_size=0.8, leapfrog_steps=3)]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: type(bug).__name__)
def test_exactness_catches(bug):
    with pytest.raises(AssertionError):
        leaves_normal_invariant(bug)


def test_exactness_catches_momentum_that_is_never_drawn():
    def mixes(kernel):
        """From one point, draws must come to fill both wells evenly."""
        start = torch.full((4000, 1), 0.9, dtype=torch.float64)
        x, _ = run(WELL, kernel, 4000, 60, start)
        assert abs(z_of_mean(x[:, 0].square(), 0.832745487)) < 4
        assert abs(z_of_mean(x[:, 0], 0.0)) < 4

    mixes(HMC(step_size=0.4, leapfrog_steps=4))
    with pytest.raises(AssertionError):
        mixes(KeptMomentum(step_size=0.9, leapfrog_steps=2))


@pytest.mark.parametrize("name", EXACT)
def test_exact_on_a_double_well(name):
    kernel = {"mala": MALA(step_size=0.15), "hmc": HMC(step_size=0.3, leapfrog_steps=4)}[name]
    # Not from the tails: there the score of a quartic overshoots at any fixed step, and MALA stays where it is.
    start = 2.6 * torch.rand(20_000, 1, generator=seeded(2), dtype=torch.float64) - 1.3
    x, _ = run(WELL, kernel, 20_000, 60, start)
    assert abs(z_of_mean(x[:, 0].square(), 0.832745487)) < 4


@pytest.mark.parametrize("name", EXACT)
def test_exact_on_the_weights_of_a_mixture(name):
    kernel = {"mala": MALA(step_size=0.4), "hmc": HMC(step_size=0.5, leapfrog_steps=4)}[name]
    # From evenly filled modes, which is wrong: the kernel has to move weight.
    start = torch.where(torch.arange(20_000)[:, None] % 2 == 0, -1.2, 1.2).double()
    x, _ = run(WEIGHTS, kernel, 20_000, 120, start)
    right = math.exp(quadrature(WEIGHTS, [(0, 8)]).log_z - quadrature(WEIGHTS, [(-8, 8)]).log_z)
    assert abs(z_of_mean((x[:, 0] > 0).double(), right)) < 4


def test_mass():
    variance = torch.tensor([0.01, 4.0], dtype=torch.float64)
    model = Quadratic(torch.diag(1 / variance))
    start = variance.sqrt() * torch.randn(20_000, 2, generator=seeded(2), dtype=torch.float64)
    x, acceptance = run(model, HMC(step_size=0.5, inverse_mass=variance), 20_000, 10, start, dims=2)
    assert acceptance > 0.9
    for i in range(2):
        assert abs(z_of_mean(x[:, i].square(), float(variance[i]))) < 4
    # Mutant: the wrong way round, and nothing is accepted.
    _, refused = run(model, HMC(step_size=0.5, inverse_mass=1 / variance), 1000, 2, start[:1000], dims=2)
    assert refused < 0.1


# ---- the integrator ----


def there_and_back(integrate):
    x, p = torch.tensor([[0.3, -0.4]]).double(), torch.tensor([[0.7, 0.2]]).double()
    target = Target(WELL)
    e = torch.tensor([0.1], dtype=torch.float64)
    point, q = integrate(target, target.evaluate(x), p, e, 25)
    assert (point.x - x).abs().max() > 0.1
    back, r = integrate(target, point, -q, e, 25)
    assert (back.x - x).abs().max() < 1e-10 and (r + p).abs().max() < 1e-10


def preserves_volume(integrate):
    def flow(z):
        target = Target(Quadratic(torch.diag(torch.tensor([1.0, 3.0]).double())))
        target.evaluate = lambda x: Point(x, None, -x * torch.tensor([1.0, 3.0]).double() - x**3)
        point, p = integrate(target, target.evaluate(z[None, :2]), z[None, 2:], torch.tensor([0.2]).double(), 7)
        return torch.cat([point.x[0], p[0]])

    z = torch.tensor([0.3, -0.5, 0.7, 0.1], dtype=torch.float64)
    assert abs(float(torch.autograd.functional.jacobian(flow, z).det()) - 1) < 1e-10


def energy_orders(integrate):
    target, found = Target(WELL), []
    x, p = torch.tensor([[0.3]]).double(), torch.tensor([[0.7]]).double()
    start = target.evaluate(x)
    for steps in (10, 20, 40, 80):
        point, q = integrate(target, start, p, torch.tensor([1 / steps]).double(), steps)
        found.append(abs(float(point.energy - start.energy + 0.5 * (q.square() - p.square()).sum())))
    return [math.log2(a / b) for a, b in zip(found[:-1], found[1:], strict=True)]


def euler(target, point, p, step_size, steps):
    e = rows(step_size, point.x)
    for _ in range(steps):
        p, point = p + e * point.score, target.evaluate(point.x + e * p)
    return point, p


def explicit(target, point, p, step_size, steps):
    e = rows(step_size, point.x)
    for _ in range(steps):
        p, point = p + e * point.score, target.evaluate(point.x + e * p + 0 * p)
        p = p + 0.1 * e * p
    return point, p


def test_leapfrog():
    there_and_back(leapfrog)
    preserves_volume(leapfrog)
    assert energy_orders(leapfrog) == pytest.approx([2.08, 2.02, 2.00], abs=0.1)


def test_leapfrog_checks_catch():
    with pytest.raises(AssertionError):
        there_and_back(euler)
    with pytest.raises(AssertionError):
        preserves_volume(explicit)
    assert energy_orders(euler)[-1] < 1.5


# ---- details ----


def test_a_rejected_chain_stays_with_all_it_knew():
    old, new = (
        Point(torch.full((2, 3), v), torch.full((2,), v), torch.full((2, 3), v), (torch.full((2,), v),))
        for v in (0.0, 1.0)
    )
    mixed = choose(torch.tensor([True, False]), new, old)
    for part in (mixed.x, mixed.energy, mixed.score, mixed.parts[0]):
        assert (part[0] == 1).all() and (part[1] == 0).all()


def test_values_that_are_no_numbers_are_refused_and_counted():
    class Hole(DoubleWell):
        def energy(self, x, cond=None):
            return torch.where(x[:, 0] > 0.5, torch.nan, super().energy(x))

    x = torch.zeros(200, 1, dtype=torch.float64)
    for kernel in (MALA(step_size=0.5), HMC(step_size=0.5)):
        result = run_chains(Hole(), kernel, x, seeded(), steps=20)
        assert (result.samples <= 0.5).all() and result.divergences.sum() > 0
    cliff = Quadratic(1e5 * ONE)
    result = run_chains(cliff, HMC(step_size=1.0), x + 1, seeded(), steps=3)
    assert (result.divergences == 3).all() and (result.samples == 1).all()


class Ball(EnergyFunction):
    """A normal density cut off at radius 1.5; what is outside has no energy, or one without bound."""

    def __init__(self, outside):
        super().__init__()
        self.outside = outside

    def energy(self, x, cond=None):
        square = x.square().sum(1)
        return torch.where(square < 1.5**2, 0.5 * square, self.outside)


@pytest.mark.parametrize("outside", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kernel", [MALA(step_size=0.5), HMC(step_size=0.5)], ids=["mala", "hmc"])
def test_chains_stay_where_the_energy_is_finite_and_have_the_density_there(kernel, outside):
    start = torch.zeros(400, 2, dtype=torch.float64)
    result = run_chains(Ball(outside), kernel, start, seeded(), steps=300, keep_every=10)
    squares = result.draws[10:].square().sum(2)
    assert squares.max() < 1.5**2 and result.divergences.sum() > 100
    # r^2/2 is exponential, cut off at b: its mean is 1 - b/(e^b - 1)
    b = 1.5**2 / 2
    assert squares.mean() / 2 == pytest.approx(1 - b / (math.exp(b) - 1), abs=0.02)


@pytest.mark.parametrize("outside", [torch.nan, torch.inf, -torch.inf])
def test_a_chain_without_energy_is_named_in_one_line(outside):
    inside, beyond = torch.zeros(3, 2, dtype=torch.float64), torch.tensor([[0.0, 0], [3, 0], [0, 0]]).double()
    for kernel in (ULA(step_size=0.1), MALA(), HMC()):
        with pytest.raises(RunError, match="^chain 1 starts where its energy is not finite: start where both are"):
            run_chains(Ball(outside), kernel, beyond, seeded(), steps=5)
    with pytest.raises(RunError, match=r"^chain \d diverged at step \d+: its energy is not finite: use"):
        run_chains(Ball(outside), ULA(step_size=0.5), inside, seeded(), steps=200)


def test_an_energy_of_minus_infinity_is_never_taken():
    old, new = (Point(torch.zeros(1, 1), torch.tensor([e]), torch.zeros(1, 1)) for e in (0.0, -torch.inf))
    moved, move = metropolis(old, new, torch.tensor([torch.inf]), seeded())
    assert moved.energy == 0 and move.acceptance == 0 and move.divergent.all()


def test_options():
    assert (HMC(step_size=0.1).wanted_acceptance, HMC(step_size=0.5).wanted_acceptance) == (0.65, 0.8)
    for make in (lambda: ULA(step_size=0), lambda: MALA(step_size=-1), lambda: HMC(leapfrog_steps=0),
                 lambda: HMC(jitter=1.0), lambda: HMC(inverse_mass=torch.zeros(2)),
                 lambda: HMC(inverse_mass=torch.tensor([1.0, math.inf]))):  # fmt: skip
        with pytest.raises(ValueError, match="must"):
            make()


# Two modes five standard deviations apart on either side.
MIXTURE = GaussianMixture(torch.tensor([0.3, 0.7]).double(), torch.tensor([[-2.5, 0.0], [2.5, 0.0]]).double(), 0.5)
LEVELS = torch.logspace(1, -1, 19).tolist()
SAMPLERS = {"annealed": annealed_langevin, "predictor-corrector": predictor_corrector}


def keyed(rows, seed=0):
    return KeyedGenerator(seed, rows, "sample")


def finds_the_weights(sample, levels=LEVELS, n=2000, mixture=MIXTURE):
    dims = mixture.means.shape[1]
    x = sample(mixture.with_noise(), (n, dims), levels, keyed(torch.arange(n)), dtype=torch.float64)
    assert abs(float((x[:, 0] < 0).double().mean()) - 0.3) < 0.05
    nearest = (x[:, None] - mixture.means).norm(dim=2).min(1).values
    assert float(nearest.square().mean() / dims) == pytest.approx(0.25, abs=0.06)  # the spread inside a mode


def with_more_steps(model, shape, levels, generator, **options):
    return annealed_langevin(model, shape, levels, generator, steps_per_level=20, step=0.002, **options)


def test_annealed_langevin():
    finds_the_weights(with_more_steps)


def test_predictor_corrector():
    means = torch.zeros(2, 16, dtype=torch.float64)
    means[:, 0] = MIXTURE.means[:, 0]
    wide = GaussianMixture(torch.tensor([0.3, 0.7]).double(), means, 0.5)
    levels = torch.logspace(1, math.log10(0.02), 67).tolist()
    finds_the_weights(predictor_corrector, levels, mixture=wide)
    finds_the_weights(lambda *a, **o: predictor_corrector(*a, corrector_steps=0, **o), levels)


def test_scores_beyond_the_mask_do_not_set_the_step():
    mask = torch.tensor([True, True, False, False])[None, None].expand(2, -1, -1)
    found = [predictor_corrector(NoiseConditionalScore(lambda x, sigma, cond=None, beyond=beyond: torch.where(
        mask, -x / (1 + sigma[:, None, None] ** 2), beyond)), (2, 3, 4), (2.0, 1.0, 0.5), keyed(torch.arange(2)),
        mask=mask) for beyond in (0.0, 30.0)]
    torch.testing.assert_close(*(x[..., :2] for x in found), rtol=0, atol=0)


OF_NORMAL = NoiseConditionalScore(lambda x, sigma, cond=None: -x / (1 + sigma[:, None] ** 2))


def test_the_predictor_has_the_variance_of_its_recursion():
    """That of samples is too large, and this is what the steps as published make of it."""
    levels = torch.logspace(1, -2, 50, dtype=torch.float64).tolist()
    variance = levels[0] ** 2
    for sigma, smaller in zip(levels, [*levels[1:], 0.0], strict=True):
        gap = sigma**2 - smaller**2  # the last step, to the posterior mean, is without noise
        variance = (1 - gap / (1 + sigma**2)) ** 2 * variance + (gap if smaller else 0)
    x = predictor_corrector(OF_NORMAL, (2000, 16), levels, keyed(torch.arange(2000)), corrector_steps=0)
    assert float(x.square().mean().sqrt()) == pytest.approx(variance**0.5, abs=4 * (2 * x.numel()) ** -0.5)
    assert variance**0.5 == pytest.approx(1.07, abs=0.01)


def test_the_step_of_the_corrector_does_not_depend_on_its_noise(monkeypatch):
    """So its result is linear in the noise; samples of 16 dimensions would else be 6 % too wide."""
    found, direction = [], torch.linspace(-1, 2, 16)[None]
    for factor in (0.0, 1.0, 2.0):
        noises = iter([torch.zeros(1, 16), factor * direction])  # of predictor and corrector
        monkeypatch.setattr(kernels_module, "noise_like", lambda x, _, noises=noises: next(noises))
        found.append(predictor_corrector(OF_NORMAL, (1, 16), (2.0, 1.0), seeded(), start=torch.ones(1, 16)))
    torch.testing.assert_close(found[2] - found[1], found[1] - found[0])
    assert (found[1] - found[0]).abs().max() > 0.1


def test_the_corrector_leaves_items_without_valid_frames_finite():
    mask = (torch.arange(4) < torch.tensor([4, 0])[:, None])[:, None]
    network = NoiseConditionalScore(lambda x, sigma, cond=None: hide(-x / sigma[:, None, None] ** 2, mask))
    assert predictor_corrector(network, (2, 3, 4), (4.0, 1.0, 0.1), seeded(), mask=mask).isfinite().all()


def test_check_catches_rising_levels(monkeypatch):
    with pytest.raises(ValueError, match="from the largest to the smallest"):
        annealed_langevin(MIXTURE.with_noise(), (4, 2), LEVELS[::-1], keyed(torch.arange(4)))
    for step in (-0.1, 0.0, math.nan):
        with pytest.raises(ValueError, match="step must be a positive finite number"):
            annealed_langevin(MIXTURE.with_noise(), (4, 2), LEVELS, keyed(torch.arange(4)), step=step)
    monkeypatch.setattr(annealed_module, "require_decreasing", lambda sigmas: None)
    with pytest.raises(AssertionError):
        finds_the_weights(with_more_steps, LEVELS[::-1], 500)


def test_plain_langevin_stays_in_its_mode():
    start = MIXTURE.means[:1].expand(300, 2)
    x = run_chains(MIXTURE, ULA(step_size=0.02), start, keyed(torch.arange(300)), steps=200, keep_every=0).samples
    assert (x[:, 0] < 0).all()


def addressable(sample, generator_of):
    model, index = MIXTURE.with_noise(), torch.arange(10)

    def run(rows):
        return sample(model, (len(rows), 2), LEVELS[::4], generator_of(rows), dtype=torch.float64)

    whole = run(index)
    for some in (index[7:8], index[2:9], index[[5, 9, 0]]):
        assert (run(some) - whole[some]).abs().max() < 1e-10


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sample_is_the_same_alone_and_in_any_batch(name):
    addressable(SAMPLERS[name], keyed)


def test_addressable_catches_lengths_of_the_batch(monkeypatch):
    each = annealed_module._length
    monkeypatch.setattr(annealed_module, "_length", lambda x: each(x).mean(0, keepdim=True))
    with pytest.raises(AssertionError):
        addressable(predictor_corrector, keyed)


@pytest.mark.parametrize("name", SAMPLERS)
def test_options_of_annealed(name):
    point = NoiseConditionalScore(lambda x, sigma, cond=None: (cond[:, None] - x) / sigma[:, None] ** 2)
    cond, seen = torch.tensor([3.0, -1.0]), []
    x = SAMPLERS[name](point, (2, 1), LEVELS, keyed(torch.arange(2)), cond=cond, callback=lambda i, x: seen.append(i))
    torch.testing.assert_close(x[:, 0], cond)
    assert seen == list(range(len(LEVELS) - (name != "annealed"))) and x.dtype == torch.float32
    noisy = SAMPLERS[name](point, (2, 1), LEVELS, keyed(torch.arange(2)), cond=cond, denoise=False,
                           start=torch.zeros(2, 1))  # fmt: skip
    assert 1e-4 < float((noisy[:, 0] - cond).abs().max()) < 1
