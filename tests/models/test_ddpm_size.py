"""Samples of another size than the data, for every kind of attention whose positions mean something there."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.data import DataSpec
from genmodels.models.ddpm import DDPM
from genmodels.nn import ATTENTION
from tests.parameters import scattered

NET = {"channels": 8, "multipliers": [1, 2], "blocks": 1, "heads": 2}


def model(attention, event_shape=(1, 8, 8), levels=17):
    torch.manual_seed(0)
    built = DDPM(DataSpec("x", event_shape, levels=levels), net=NET | {"attention": attention}, num_steps=10).eval()
    scattered(built.core, 0.1)
    return built


@pytest.mark.parametrize("attention", [name for name in ATTENTION if name != "mel"])
@pytest.mark.parametrize("size", [(5, 11), (12, 12)])
def test_pictures_of_another_size(attention, size):
    x = model(attention).sample(2, steps=3, size=size).x
    assert x.shape == (2, 1, *size) and x.dtype == torch.uint8


def test_the_own_size_is_no_other():
    built = model("swin2d")
    assert torch.equal(built.sample(2, steps=3, size=[8, 8]).x, built.sample(2, steps=3).x)


def test_spectrograms_of_another_duration():
    assert model("mel").sample(1, steps=2, size=[8, 13]).x.shape == (1, 1, 8, 13)


def test_sequences_of_another_length():
    long = model("xl", (2, 9)).sample(1, steps=2, size=[17])
    assert long.x.shape == (1, 2, 17) and long.made["size"] == [17]


@pytest.mark.parametrize("make, words", [
    (lambda: model("mel").sample(1, steps=2, size=[9, 8]), "built for 4 frequency bands, the map has 5"),
    (lambda: model("plain").sample(1, steps=2, size=[9]), r"size has 2 numbers of at least 1, got \[9\]"),
    (lambda: model("plain").sample(1, steps=2, size=[1, 8]), "too small for 2 levels"),
    (lambda: model("plain", levels=None).sample(1, steps=2, size=[9, 9]), r"their size is \[8, 8\], not \[9, 9\]"),
    (lambda: DDPM(DataSpec("x", (2,)), num_steps=10).sample(1, steps=2, size=[3]), "vectors have no size"),
])  # fmt: skip
def test_errors_are_one_line(make, words, refuses):
    refuses(ValueError, words, make)
