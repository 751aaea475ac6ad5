"""Digits and the two-dimensional sets as data."""

from __future__ import annotations

import typing

import pytest
import torch

from genmodels.data.densities import DENSITIES
from genmodels.data.digits import Digits
from genmodels.data.toy import Toy
from genmodels.errors import InputError


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
