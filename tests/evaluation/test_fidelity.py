"""Distances between sets of features: vectors by hand, properties, and the errors they must not hide."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import mannwhitneyu

from genmodels.core.errors import InputError
from genmodels.evaluation.features import wilson
from genmodels.evaluation.fidelity import (
    cubic_kernel,
    frechet_distance,
    frechet_with_error,
    gaussian_kernel,
    kernel_distance,
    memorisation,
    nearest,
    precision_recall,
    precision_recall_errors,
    smaller_than,
)
from genmodels.evaluation.sample_quality import class_accuracy, count_for


def features(n: int, dims: int = 6, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(dims, dims, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return torch.randn(n, dims, generator=generator, dtype=torch.float64) @ mix + 1


def rotation(dims: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(dims, dims, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]


def test_the_distance_of_normal_distributions_is_known():
    a, b = features(400), 0.7 * features(300, seed=1) - 0.3
    (m1, c1), (m2, c2) = ((x.mean(0), torch.cov(x.T)) for x in (a, b))
    # The root of C1 C2 by its complex eigenvalues: another way to the same trace.
    root = torch.linalg.eigvals(c1 @ c2).sqrt().sum().real
    truth = float((m1 - m2).square().sum() + c1.trace() + c2.trace() - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(truth, rel=1e-10)


def test_the_distance_of_given_moments():
    corners = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]], dtype=torch.float64) * math.sqrt(3 / 4)  # C = 1
    a = corners @ torch.linalg.cholesky(torch.tensor([[1, 0.5], [0.5, 1]], dtype=torch.float64)).T
    b = corners * torch.tensor([2, 0.5]).double().sqrt() + torch.tensor([1.0, -1.0])
    assert frechet_distance(a, b) == pytest.approx(2.3856102238, abs=1e-10)
    for few in (a[:1], a[:0], a[0]):
        with pytest.raises(InputError, match="n of at least 2"):
            frechet_distance(few, b)


def test_properties_of_the_frechet_distance():
    a, b, turn = features(200), features(250, seed=1) + 0.5, rotation(6)
    value = frechet_distance(a, b)
    assert frechet_distance(b, a) == pytest.approx(value, rel=1e-8)
    assert frechet_distance(a @ turn, b @ turn) == pytest.approx(value, rel=1e-8)
    assert frechet_distance(a, a) < 1e-6
    shuffled = a[torch.randperm(len(a), generator=torch.Generator().manual_seed(0))]
    assert frechet_distance(shuffled, b) == pytest.approx(value, rel=1e-8)
    assert frechet_distance(a[:, :1].expand(-1, 3), b[:, :3]) >= 0  # a singular covariance
    with pytest.raises(InputError, match="6 and of 5"):
        frechet_distance(a, b[:, :5])


@pytest.mark.parametrize("bug", ["n for n - 1", "root of the product"])
def test_mutants_of_the_frechet_distance_are_seen(bug):
    a, b = features(20), features(20, seed=1)
    (m1, c1), (m2, c2) = ((x.mean(0), torch.cov(x.T)) for x in (a, b))
    if bug == "n for n - 1":
        c1 = c1 * 19 / 20
        root = torch.linalg.eigvals(c1 @ c2).sqrt().sum().real
    else:
        root = (c1 @ c2).diagonal().sqrt().sum()  # not symmetrised: no root at all
    wrong = float((m1 - m2).square().sum() + c1.trace() + c2.trace() - 2 * root)
    assert not math.isclose(frechet_distance(a, b), wrong, rel_tol=1e-4)


def test_parity_of_the_frechet_distance_with_torchmetrics():
    fid = pytest.importorskip("torchmetrics.image.fid", reason="torchmetrics is not installed")

    class Flat(torch.nn.Module):
        num_features = 12

        def forward(self, x):
            return x.flatten(1).double()

    real, fake = (torch.rand(64, 3, 2, 2, generator=torch.Generator().manual_seed(k)) * (1 + k) for k in (0, 1))
    try:
        metric = fid.FrechetInceptionDistance(feature=Flat(), normalize=False, input_img_size=(3, 2, 2))
    except (ModuleNotFoundError, TypeError) as error:
        pytest.skip(f"this torchmetrics takes no network of one's own: {error}")
    metric.set_dtype(torch.float64)
    metric.update(real, real=True)
    metric.update(fake, real=False)
    ours = frechet_distance(real.flatten(1).double(), fake.flatten(1).double())
    assert ours == pytest.approx(float(metric.compute()), rel=1e-4)


def gaussians(shift: float, scale: float, n: int, trials: int, dims: int = 4) -> list[tuple]:
    """Pairs of n items of N(0, I) and N(shift, scale^2 I)."""
    x = torch.randn(2, trials, n, dims, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return list(zip(x[0], shift + scale * x[1], strict=True))


@pytest.mark.parametrize("shift, scale", [(0.0, 1.0), (0.3, 1.1), (2.0, 1.5)], ids=["equal", "near", "far"])
@pytest.mark.parametrize("measure", ["frechet", "cubic", "gaussian"])
def test_stated_errors_are_those_of_new_items(measure, shift, scale):
    """Against the spread over 300 new pairs of sets; between equal distributions they may be larger, never smaller."""
    compute = {"frechet": frechet_with_error, "cubic": lambda a, b: kernel_distance(a, b, cubic_kernel),
               "gaussian": lambda a, b: kernel_distance(a, b, gaussian_kernel)}[measure]
    found = [compute(a, b) for a, b in gaussians(shift, scale, 120, 300)]
    values, stated = (torch.tensor(column, dtype=torch.float64) for column in zip(*found, strict=True))
    ratio = float(stated.square().mean().sqrt() / values.std())
    assert 0.85 < ratio < (1.6 if shift < 1 else 1.2), ratio  # a spread of 300 is known to 4 %
    standard_error = float(values.std()) / math.sqrt(300)
    if measure != "frechet":  # no bias
        assert shift or abs(float(values.mean())) < 4 * standard_error
    elif shift:  # the closed form, and a bias of the size of 1/n
        truth = 4 * (shift**2 + (scale - 1) ** 2)
        assert truth < float(values.mean()) < truth + 4 * 4 * (1 + scale**2) / 120


def test_the_error_of_the_frechet_distance_holds_where_covariances_are_singular():
    """Features that are dead or double change nothing."""
    a, b = features(300), 1.2 * features(300, seed=1) + 0.5
    found = frechet_with_error(a, b)
    for dead in (torch.zeros, torch.ones):
        wider = frechet_with_error(*(torch.cat([x, dead(300, 2, dtype=torch.float64)], 1) for x in (a, b)))
        assert wider.value == pytest.approx(found.value, rel=1e-8)
        assert wider.error == pytest.approx(found.error, rel=1e-6)


def test_sums_over_pairs_are_those_of_loops(monkeypatch):
    (a, b), = gaussians(0.4, 1.0, 7, 1)
    monkeypatch.setattr("genmodels.evaluation.fidelity._CHUNK", 14)  # two rows at once
    found = kernel_distance(a, b, gaussian_kernel)
    widths = [2.0**k for k in range(-3, 2)]

    def k(x, y):
        return sum(math.exp(-float((x - y).square().sum()) / (2 * s**2 * 4)) for s in widths) / 5

    h = {(i, j): k(a[i], a[j]) + k(b[i], b[j]) - k(a[i], b[j]) - k(a[j], b[i])
         for i in range(7) for j in range(7) if i != j}
    within = sum(k(x[i], x[j]) for x in (a, b) for i, j in h) / 42
    across = sum(k(x, y) for x in a for y in b) / 49
    assert found.value == pytest.approx(within - 2 * across, rel=1e-10)
    assert abs(found.value - sum(h.values()) / 42) > 1e-3  # the mean of h leaves the pairs (a_i, b_i) out
    unlike = [(h[i, j], h[i, k]) for i, j in h for k in range(7) if k not in (i, j)]
    apart = [h[p] * h[q] for p in h for q in h if len({*p, *q}) == 4]
    squared = sum(apart) / len(apart)
    covariance = max(0.0, sum(x * y for x, y in unlike) / len(unlike) - squared)
    variance = max(0.0, sum(value**2 for value in h.values()) / 42 - squared)
    assert found.error == pytest.approx(math.sqrt((4 * 5 * covariance + 2 * variance) / 42), rel=1e-9)
    with pytest.raises(InputError, match="equally many"):
        kernel_distance(a, b[:5])


def test_the_kernel_distance_of_three_items():
    """(1 + 3.375 + 3.375) / 3 + (1 + 8 + 1) / 3 - 2 * 32.5 / 9; too few for an error."""
    a, b = torch.tensor([[1.0, 0], [0, 1], [1, 1]]), torch.tensor([[2.0, 0], [0, 1], [1, 0]])
    found = kernel_distance(a, b)
    assert found.value == pytest.approx(-1.3055555556, abs=1e-10) and found.error is None


def test_a_missing_mode_lowers_recall_and_noise_lowers_precision():
    generator = torch.Generator().manual_seed(0)
    modes = torch.tensor([[0.0, 0.0], [40.0, 0.0]])
    real = modes[torch.arange(200) % 2] + torch.randn(200, 2, generator=generator)
    one = modes[0] + torch.randn(200, 2, generator=generator)
    precision, recall = precision_recall(real, one)
    assert precision > 0.9 and recall < 0.6
    precision, recall = precision_recall(real, real + 8 * torch.randn(200, 2, generator=generator))
    assert precision < 0.3
    assert precision_recall(real, real) == (1.0, 1.0)
    with pytest.raises(InputError, match="equally many"):
        precision_recall(real, one[:7])


def test_errors_of_precision_and_recall_are_those_over_pairs_of_sets():
    """The binomial error, a mutant, is too small: balls are random too and hold several points."""
    shares, errors, n = [], [], 200
    for pair in range(60):
        x = torch.randn(2, n, 2, generator=torch.Generator().manual_seed(pair))
        shares.append(precision_recall(x[0], x[1]))
        errors += [precision_recall_errors(x[0], x[1])] if pair < 15 else []
    shares, errors = torch.tensor(shares).double(), torch.tensor(errors).double()
    spread = shares.var(0).mean().sqrt()  # precision and recall are alike here
    binomial = (shares * (1 - shares)).mean().div(n).sqrt()
    assert 0.75 < float(errors.square().mean().sqrt() / spread) < 1.33
    assert float(binomial / spread) < 0.8
    assert precision_recall_errors(x[0][:7], x[1][:7]) == (None, None)
    assert precision_recall_errors(x[0][:9], x[0][:9] + 99) == (1.5 / 9, 1.5 / 9)  # nought of nine is no certainty


def test_a_point_is_no_neighbour_of_its_own():
    real, generated = torch.tensor([0.0, 1, 2, 4])[:, None], torch.tensor([0.5, 2.6, 10, 10.5])[:, None]
    distances = torch.cdist(real, real)
    with_itself = distances.kthvalue(1, 1).values  # the mutant: every radius is zero
    assert bool((torch.cdist(generated, real) <= with_itself).any()) is False
    assert precision_recall(real, generated, k=1)[0] == 0.5


def test_few_items_are_refused():
    assert count_for(128, 128, 128, False) == (128, None)
    with pytest.raises(InputError, match="at least 128"):
        count_for(127, 128, 128, False)


def draws(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind, flagged", [("fresh", False), ("copies", True), ("near copies", True)])
def test_copies_are_flagged_and_held_out_items_are_not(kind, flagged):
    train, held = draws(500, 0), draws(300, 1)
    samples = {"fresh": draws(300, 2), "copies": torch.cat([train[:60], draws(240, 2)]),
               "near copies": train[:300] + 1e-3 * draws(300, 2)}[kind]
    found = memorisation(nearest(samples, train), nearest(held, train))
    assert found["flagged"] is flagged
    assert found["duplicates"] == (60 if kind == "copies" else 0)
    assert (found["z"] < -3) is flagged


def test_the_distance_of_few_held_out_items_flags_nothing():
    """The border is then that of a single item."""
    train, held = draws(500, 0), draws(12, 1)
    found = memorisation(nearest(train[:300] + 1e-3 * draws(300, 2), train), nearest(held, train))
    assert found["closer"] == 1.0 and found["flagged"] is False and found["z"] < -3
    copies = memorisation(nearest(train[:60], train), nearest(held, train))
    assert copies["flagged"] is True  # by exact copies


def test_the_nearest_is_the_nearest():
    items, train = draws(40, 0), torch.cat([draws(300, 1), draws(40, 0)[:5]])
    truth = torch.cdist(items.double(), train.double()).min(1)
    found = nearest(items, train)
    assert torch.equal(found.index, truth.indices) and found.distance[:5].tolist() == [0.0] * 5
    assert torch.allclose(found.distance[5:], truth.values[5:])


def test_ranks_are_those_of_scipy_with_ties():
    a, b = (torch.randint(0, 9, (n,), generator=torch.Generator().manual_seed(n)).double() for n in (30, 50))
    z = smaller_than(a, b)
    p = mannwhitneyu(a.numpy(), b.numpy(), use_continuity=False, method="asymptotic", alternative="less").pvalue
    assert float(torch.special.ndtr(torch.tensor(z, dtype=torch.float64))) == pytest.approx(p, rel=1e-9)


def test_classes():
    found = class_accuracy(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 1, 2]), 3, ("a", "b", "c"))
    assert found["confusion"] == [[1, 1, 0], [0, 1, 0], [0, 0, 1]]
    assert [each["accuracy"] for each in found["per_class"]] == [0.5, 1.0, 1.0]
    assert found["per_class"][1]["name"] == "b" and wilson(0, 0) == [0.0, 1.0]


@pytest.mark.parametrize("offset, scale", [((2000.0, 5e4), (1.0, 1.0)), ((1e8, 0.0), (1.0, 1.0)),
                                           ((0.0, 3e9), (1e9, 1e-3))], ids=["offsets", "far", "unlike scales"])
def test_copies_are_found_wherever_the_data_lie(offset, scale):
    generator = torch.Generator().manual_seed(0)
    train = torch.randn(300, 2, generator=generator, dtype=torch.float64) * torch.tensor(scale) + torch.tensor(offset)
    train = torch.cat([train, train[:1] + torch.tensor([0.0, 1e-3])])  # two that are all but equal
    found = nearest(train[:100], train)
    assert found.distance.tolist() == [0.0] * 100 and found.index.tolist() == list(range(100))


def test_many_equal_training_items_and_many_all_but_equal_ones_are_searched_whole():
    train = torch.tensor([[1e9, 0.0]], dtype=torch.float64).repeat(40, 1)
    train[:, 1] = torch.arange(40) * 1e-6  # next to 1e9 no product of float64 holds these
    items = torch.cat([train[[17]], train[[3]] + torch.tensor([1e8, 0.0]), train[[39]]])
    found = nearest(items, torch.cat([train, -train]))
    assert found.index[[0, 2]].tolist() == [17, 39] and found.distance.tolist() == [0.0, 1e8, 0.0]
