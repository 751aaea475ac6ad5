"""Distances between sets of features: vectors by hand, laws, and the errors they must not hide."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.errors import InputError
from genmodels.evaluation.fidelity import (
    Moments,
    check_count,
    frechet_distance,
    kernel_distance,
    kernel_distance_of_subsets,
    precision_recall,
)


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


def test_laws_of_the_frechet_distance():
    a, b, turn = features(200), features(250, seed=1) + 0.5, rotation(6)
    value = frechet_distance(a, b)
    assert frechet_distance(b, a) == pytest.approx(value, rel=1e-8)
    assert frechet_distance(a @ turn, b @ turn) == pytest.approx(value, rel=1e-8)
    assert frechet_distance(a, a) < 1e-6
    shuffled = a[torch.randperm(len(a), generator=torch.Generator().manual_seed(0))]
    assert frechet_distance(shuffled, b) == pytest.approx(value, rel=1e-8)
    split = sum((Moments.of(part) for part in a.split(37)[1:]), Moments.of(a[:37]))
    assert frechet_distance(split, b) == pytest.approx(value, rel=1e-8)
    assert frechet_distance(a[:, :1].expand(-1, 3), b[:, :3]) >= 0  # a singular covariance
    with pytest.raises(InputError, match="6 and of 5"):
        frechet_distance(a, b[:, :5])


@pytest.mark.parametrize("bug", ["n for n - 1", "root of the product"])
def test_planted_errors_of_the_frechet_distance_are_seen(bug):
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


def test_the_kernel_distance_is_unbiased():
    a = features(60)
    pairs = [kernel_distance(a[i::12], a[j::12]) for i in range(12) for j in range(i)]
    spread = torch.tensor(pairs, dtype=torch.float64)
    assert abs(float(spread.mean())) < 4 * float(spread.std()) / math.sqrt(len(pairs) / 6)
    mean, deviation = kernel_distance_of_subsets(features(300), features(300, seed=1) + 2, subsets=20)
    assert mean > 3 * deviation > 0
    assert kernel_distance_of_subsets(a, a + 1, seed=3) == kernel_distance_of_subsets(a, a + 1, seed=3)


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


def test_a_point_is_no_neighbour_of_its_own():
    real, generated = torch.tensor([0.0, 1, 2, 4])[:, None], torch.tensor([0.5, 2.6, 10, 10.5])[:, None]
    distances = torch.cdist(real, real)
    with_itself = distances.kthvalue(1, 1).values  # the planted error: every radius is zero
    assert bool((torch.cdist(generated, real) <= with_itself).any()) is False
    assert precision_recall(real, generated, k=1)[0] == 0.5


def test_few_items_are_refused():
    check_count(128, 64)
    with pytest.raises(InputError, match="at least 128"):
        check_count(127, 64)
