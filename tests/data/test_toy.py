"""Exact densities: samples, values, mass and entropy of each set agree with one another."""

from __future__ import annotations

import math
import typing
from dataclasses import replace

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.data.toy import DENSITIES, Toy, density
from genmodels.data.vision import Digits

# Entropies in nats to four digits, and half the width of a square that holds all but a negligible part of the mass.
KNOWN = {
    "moons": (1.0076, 4),
    "moons_sharp": (0.2892, 3),
    "circles": (3.2681, 6),
    "rings": (2.6232, 4.5),
    "spirals": (2.5406, 5),
    "spirals_jittered": (2.6455, 5),
    "swiss_roll": (2.6696, 6),
    "pinwheel": (2.3178, 7),
    "checkerboard": (math.log(32), 5),
    "8gaussians": (2.8316, 6),
    "25gaussians": (2.8379, 6),
    "sine": (math.log(5) + 0.5 * math.log(2 * math.pi * math.e * 0.09), 5),
    "banana": (math.log(2 * math.pi * math.e) + math.log(0.5), None),
}


def draw(instance, n: int, seed: int = 0):
    """n points from a fixed generator."""
    return instance.sample(n, torch.Generator().manual_seed(seed))


def check_entropy(instance, n: int = 100_000) -> None:
    """The stored entropy is the mean of -log p over samples, to four standard errors (and rounding, where it is 0)."""
    value = -instance.log_prob(draw(instance, n))
    assert abs(float(value.mean()) - instance.entropy) < 4 * float(value.std()) / math.sqrt(n) + 1e-6


def check_mass(instance, half: float, points: int = 240) -> None:
    """The density integrates to one, and minus its integral of p log p is the entropy."""
    axis = half * ((2 * torch.arange(points, dtype=torch.float64) + 1) / points - 1)
    log_p = instance.log_prob(torch.cartesian_prod(axis, axis))
    cell, p = (2 * half / points) ** 2, log_p.exp()
    assert float(p.sum()) * cell == pytest.approx(1, abs=1e-3)
    assert -float(torch.xlogy(p, p).sum()) * cell == pytest.approx(instance.entropy, abs=5e-3)


def check_cells(instance, n: int = 40_000) -> None:
    """Counts of samples in the cells of a grid are those that the density predicts (chi-square, 4 SE)."""
    x = draw(instance, n, seed=5)
    low, high = x.min(0).values - 1e-6, x.max(0).values + 1e-6
    cells, fine = 12, 20
    steps = (torch.arange(cells * fine, dtype=torch.float64) + 0.5) / (cells * fine)
    axes = [low[i] + (high[i] - low[i]) * steps for i in (0, 1)]
    area = float((high - low).prod()) / (cells * fine) ** 2
    p = instance.log_prob(torch.cartesian_prod(*axes)).exp().reshape(cells, fine, cells, fine).sum((1, 3)) * area
    at = ((x - low) / (high - low) * cells).long()
    counts = torch.zeros(cells, cells, dtype=torch.float64)
    counts.index_put_((at[:, 0], at[:, 1]), torch.ones(n, dtype=torch.float64), accumulate=True)
    expected = n * p
    used = expected > 20
    chi2 = ((counts - expected)[used] ** 2 / expected[used]).sum()
    freedom = int(used.sum())
    assert float(chi2) < freedom + 4 * math.sqrt(2 * freedom) + 0.05 * freedom
    assert float(counts[expected < 1e-6].sum()) <= n * 1e-3


def test_every_set_is_known():
    assert set(KNOWN) == set(DENSITIES)


@pytest.mark.parametrize("name", KNOWN)
def test_entropies(name):
    assert DENSITIES[name].entropy == pytest.approx(KNOWN[name][0], abs=6e-5)
    # Jittered spirals take a product of normal distribution functions per node.
    check_entropy(DENSITIES[name], 10_000 if name == "spirals_jittered" else 100_000)


@pytest.mark.parametrize("name", [name for name in KNOWN if KNOWN[name][1]])
def test_mass(name):
    if name in ("checkerboard", "sine"):  # edges: the cells of the grid must end there
        check_mass(DENSITIES[name], KNOWN[name][1], 400)
    else:
        check_mass(DENSITIES[name], KNOWN[name][1], {"spirals_jittered": 60, "spirals": 80}.get(name, 240))


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "spirals_jittered"])
def test_samples_follow_the_density(name):
    check_cells(DENSITIES[name])


def test_the_check_catches_wrong_densities():
    moons, ring, wheel = DENSITIES["moons"], DENSITIES["circles"], DENSITIES["pinwheel"]
    with pytest.raises(AssertionError):
        check_entropy(replace(moons, entropy=moons.entropy + 0.02))

    class Wrong:
        """Samples of one density, values of another."""

        def __init__(self, sampled, valued):
            self.sample, self.log_prob, self.entropy = sampled.sample, valued.log_prob, sampled.entropy

    wider = Wrong(ring, replace(ring, scale=0.1))
    turned = Wrong(wheel, replace(wheel, rate=-0.25))
    for check in (check_entropy, check_cells):
        for wrong in (wider, turned):
            with pytest.raises(AssertionError):
                check(wrong)

    class Twice(Wrong):
        def __init__(self, truth):
            super().__init__(truth, truth)
            self.log_prob = lambda x: truth.log_prob(x) + math.log(2)

    with pytest.raises(AssertionError):
        check_mass(Twice(moons), 4)


def test_quadrature_over_the_curve_is_that_of_a_double_loop():
    moons = DENSITIES["moons"]
    x = draw(moons, 5)
    t = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000 * math.pi
    arms = [torch.stack([t.cos(), t.sin()], 1), torch.stack([1 - t.cos(), 0.5 - t.sin()], 1)]
    for point, value in zip(x, moons.log_prob(x), strict=True):
        p = sum(float(torch.exp(-((point - arm) ** 2).sum(1) / 0.02).mean()) for arm in arms) / 2 / (2 * math.pi * 0.01)
        assert float(value) == pytest.approx(math.log(p), abs=1e-7)


def test_closed_forms_at_single_points():
    zero = torch.zeros(1, 2, dtype=torch.float64)
    board = DENSITIES["checkerboard"].log_prob(torch.tensor([[1.0, 1.0], [1.0, 3.0], [1.0, 5.0], [-1.0, -1.0]]))
    assert board.tolist() == pytest.approx([-math.log(32), -math.inf, -math.inf, -math.log(32)])
    eight = math.log(math.exp(-64 / 2) / (2 * math.pi * 0.125))  # all eight centres are 8 scales away
    assert float(DENSITIES["8gaussians"].log_prob(zero)) == pytest.approx(eight)
    banana = -math.log(2 * math.pi) - math.log(0.5)
    assert float(DENSITIES["banana"].log_prob(zero)) == pytest.approx(banana)
    assert float(DENSITIES["sine"].log_prob(zero + 2.6)) == -math.inf


def test_values_do_not_depend_on_the_batch_and_accept_float32():
    for name, instance in DENSITIES.items():
        x = draw(instance, 7)
        alone = torch.cat([instance.log_prob(x[i : i + 1]) for i in range(7)])
        torch.testing.assert_close(instance.log_prob(x), alone, rtol=1e-10, atol=1e-10, msg=name)
        assert instance.log_prob(x.float()).dtype == torch.float64
        assert instance.log_prob(x[:0]).shape == (0,)


def test_lookup():
    assert density("toy_moons") is density("moons")
    with pytest.raises(InputError, match="no two-dimensional set 'mons'.*did you mean 'moons'"):
        density("mons")


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    module = Digits().prepare()
    assert (module.spec.event_shape, module.spec.levels, module.spec.num_classes) == ((1, 8, 8), 17, 10)
    served = {(x.numpy().tobytes(), int(y)) for s in ("train", "val", "test")
              for batch in module.loader(s, 64) for x, y in zip(batch.x, batch.cond, strict=True)}
    table = load_digits()
    truth = {(x.astype("uint8").tobytes(), int(y)) for x, y in zip(table.images, table.target, strict=True)}
    assert served == truth
    for split, share in (("val", 0.1), ("test", 0.2)):
        counts = torch.cat([batch.cond for batch in module.loader(split, 64)]).bincount(minlength=10)
        assert (counts - share * torch.from_numpy(table.target).bincount()).abs().max() <= 1


@pytest.mark.parametrize("name", DENSITIES)
def test_toy_sets_carry_their_truth(name):
    module = Toy(set=name, n_train=500, n_val=20, n_test=30).prepare()
    spec = module.spec
    assert (spec.name, spec.event_shape, spec.levels) == (f"toy_{name}", (2,), None)
    assert spec.entropy == DENSITIES[name].entropy and module.density is DENSITIES[name]
    x = next(iter(module.loader("train", 500))).x
    assert x.dtype == torch.float32 and torch.isfinite(module.density.log_prob(x)).all()
    assert module.problems() == []


def test_sizes_and_seeds():
    module = Toy(n_train=30, n_val=20, n_test=10).prepare()
    assert [len(module.split(s)) for s in ("train", "val", "test")] == [30, 20, 10]
    x = {seed: Toy(n_train=30, n_val=20, n_test=10, seed=seed).prepare().split("train").x for seed in (0, 1)}
    assert torch.equal(x[0], module.split("train").x) and not torch.equal(x[0], x[1])
    assert torch.equal(Toy(n_train=30, n_val=9, n_test=9).prepare().split("train").x, x[0])


def test_every_set_can_be_chosen():
    annotation = typing.get_type_hints(Toy.__init__)["set"]
    assert set(typing.get_args(annotation)) == set(DENSITIES)


def test_bad_options():
    with pytest.raises(InputError, match="did you mean 'pinwheel'"):
        Toy(set="pinweel")
    with pytest.raises(InputError, match="data.n_val must be at least 1, got 0"):
        Toy(n_val=0)
    with pytest.raises(InputError, match="data.seed must be at least 0, got -1"):
        Toy(seed=-1)
