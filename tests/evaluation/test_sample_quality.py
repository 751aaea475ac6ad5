"""What samples are compared with: real items and noise, at the same n, in order; noise in the plane is no data."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.data import DataSpec
from genmodels.core.likelihood import Likelihood
from genmodels.data.toy import Toy
from genmodels.evaluation.features import FeatureNetwork, Items, coordinates
from genmodels.evaluation.likelihood import paired_gap
from genmodels.evaluation.sample_quality import measures_of, scale_of


def split(data: Toy, name: str) -> torch.Tensor:
    return torch.cat([batch.x for batch in data.loader(name, 4096)])


def test_noise_in_the_plane_is_distinguished_from_data_and_real_items_are_not():
    """Noise of the same mean and covariance: a distance of moments would find no difference."""
    data = Toy(set="8gaussians", n_train=2000, n_val=100, n_test=2000).prepare()
    train, test = split(data, "train"), split(data, "test")
    items = Items(data.spec, train, test)
    rows = scale_of(coordinates(items), items, test[:1000], test[1000:])
    assert list(rows) == ["other held-out items", "training items", "noise"]
    assert all(row["n"] == 1000 and row["frechet"] is None for row in rows.values())
    for name in ("other held-out items", "training items"):
        assert abs(rows[name]["kernel"]) < 3 * rows[name]["kernel_error"]
    assert rows["noise"]["kernel"] > 10 * rows["noise"]["kernel_error"]


@pytest.mark.parametrize("n", [130, 600])
def test_the_scale_is_in_order_at_every_n(n):
    """Held-out and training items of one Gaussian score alike, halves of no set score more; noise scores more."""
    generator = torch.Generator().manual_seed(n)
    mix = torch.randn(32, 32, generator=generator) / 8 + torch.eye(32)
    x = torch.randn(3, n, 32, generator=generator) @ mix
    spec = DataSpec("correlated", (32,))
    network = FeatureNetwork("as they are", 32, "", lambda x: x)
    floor, train, noise = scale_of(network, Items(spec, x[0], x[1]), x[1], x[2]).values()
    assert floor["n"] == train["n"] == noise["n"] == n
    assert abs(floor["frechet"] - train["frechet"]) < 3 * math.hypot(floor["frechet_error"], train["frechet_error"])
    assert train["frechet"] + 3 * noise["frechet_error"] < noise["frechet"]
    few = scale_of(network, Items(spec, x[0], x[1]), x[1], x[2][1:])
    assert list(few) == ["training items", "noise"]  # too few others for the same n: not compared at another


def test_every_measure_has_its_error():
    generator = torch.Generator().manual_seed(0)
    real, generated = torch.randn(2, 200, 3, generator=generator)
    found = measures_of(FeatureNetwork("as they are", 3, "", lambda x: x), real, generated + 1)
    for name in ("frechet", "kernel", "precision", "recall"):
        assert getattr(found, f"{name}_error") > 0


def test_one_item_has_no_error_and_so_no_gap():
    one = Likelihood(torch.tensor([-1.0]), "exact", 2, None)
    moons = DataSpec("toy_moons", (2,), entropy=1.5)
    assert paired_gap(one, moons, torch.zeros(1, 2)) == {}
    two = Likelihood(torch.tensor([-1.0, -2.0]), "exact", 2, None)
    assert "kl_paired" in paired_gap(two, moons, torch.zeros(2, 2))
    assert paired_gap(two, DataSpec("toy_moons", (2,)), torch.zeros(2, 2)) == {}  # a file of that name
