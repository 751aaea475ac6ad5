"""Addressable noise: published bits, independence of the batch, and the right distribution."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from genmodels.core.random import (
    FrameKeyedGenerator,
    KeyedGenerator,
    at_step,
    normal,
    philox,
    reseed,
    seed_of,
    shared_uniform,
    uniform,
)

# Known-answer vectors of the Random123 library, philox4x32 with 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_philox_gives_the_published_words(counter, key, expected):
    words = philox(tuple(torch.tensor(c) for c in counter), key)
    assert " ".join(f"{int(w):08x}" for w in words) == expected
    fewer = philox(tuple(torch.tensor(c) for c in counter), key, rounds=9)
    assert " ".join(f"{int(w):08x}" for w in fewer) != expected


def test_reseeding_is_that_of_torch_without_its_notes_of_the_caller(monkeypatch):
    expected = torch.rand(3, generator=torch.manual_seed(2**63 - 1))
    torch.manual_seed(0)
    monkeypatch.setattr("traceback.format_stack", None)  # which takes most of a short step of training
    reseed(2**63 - 1, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)


def rows_are_addressable(make) -> bool:
    whole = make(torch.arange(64)).normal((64, 3, 5))
    alone = torch.cat([make(torch.tensor([k])).normal((1, 3, 5)) for k in range(64)])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    return bool((whole == alone).all() and (make(order).normal((64, 3, 5)) == whole[order]).all())


def test_a_row_does_not_depend_on_its_batch():
    assert rows_are_addressable(lambda index: KeyedGenerator(3, index, "sample", 7))


def test_the_check_catches_a_batch_generator():
    class BatchGenerator:
        def __init__(self, index):
            self.source = torch.Generator().manual_seed(0)

        def normal(self, shape):
            return torch.randn(shape, generator=self.source)

    assert not rows_are_addressable(BatchGenerator)


def test_every_part_of_the_key_matters():
    index = torch.arange(4)
    base = KeyedGenerator(0, index, "a", 0)
    others = [
        KeyedGenerator(1, index, "a", 0),
        KeyedGenerator(0, index, "b", 0),
        KeyedGenerator(0, index, "a", 1),
        KeyedGenerator(0, index + 4, "a", 0),
        base.at(5),
        base.child("x"),
    ]
    first = base.normal((4, 8))
    second = base.normal((4, 8))
    for other in [*(g.normal((4, 8)) for g in others), second]:
        assert not torch.isclose(first, other).any()
    assert torch.equal(base.at(0).normal((4, 8)), first)
    assert torch.equal(base.at(0).rows(torch.tensor([2])).normal((1, 8)), first[2:3])


def test_a_step_for_each_row_is_that_row_at_its_step():
    index, steps = torch.arange(5), torch.tensor([3, 0, 3, 9, 1])
    together = KeyedGenerator(0, index, "elbo").at(steps).normal((5, 7))
    for k in range(5):
        alone = KeyedGenerator(0, index[k : k + 1], "elbo", int(steps[k])).normal((1, 7))
        assert torch.equal(together[k : k + 1], alone)
    with pytest.raises(ValueError, match="share"):
        KeyedGenerator(0, index, "elbo", steps).shared_uniform()
    with pytest.raises(ValueError, match="each of 5 rows"):
        KeyedGenerator(0, index, "elbo", steps[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distributions(dtype):
    generator = KeyedGenerator(0, torch.arange(1000))
    z = generator.normal((1000, 200), dtype=dtype)
    u = generator.uniform((1000, 200), dtype=dtype)
    n = z.numel()
    assert z.dtype == u.dtype == dtype
    assert abs(float(z.mean())) < 4 / math.sqrt(n)
    assert abs(float(z.var()) - 1) < 4 * math.sqrt(2 / n)
    assert abs(float((z**4).mean()) - 3) < 4 * math.sqrt(96 / n)
    assert 0 < float(u.min()) and float(u.max()) < 1
    for sample, distribution in ((z.flatten()[:20000], "norm"), (u.flatten()[:20000], "uniform")):
        assert stats.kstest(sample.double().numpy(), distribution).pvalue > 1e-4
    neighbours = torch.corrcoef(torch.stack([z[:-1].flatten(), z[1:].flatten()]))[0, 1]
    assert abs(float(neighbours)) < 4 / math.sqrt(n)


def test_shared_draws_do_not_depend_on_the_rows():
    a = KeyedGenerator(0, torch.arange(3), "t", 9).shared_uniform(5)
    b = KeyedGenerator(0, torch.arange(7, 12), "t", 9).shared_uniform(5)
    assert torch.equal(a, b) and len(a.unique()) == 5


def test_noise_of_frames_keeps_to_its_frames_at_every_step_and_in_every_child():
    whole = FrameKeyedGenerator(0, torch.arange(3), "t")
    steps = torch.tensor([4, 2, 4])
    for made in (lambda g: g.at(steps), lambda g: g.child("a").at(3), lambda g: g.rows(torch.tensor([0, 1, 2]))):
        long, short = made(whole).normal((3, 5, 9)), made(whole).normal((3, 5, 4))
        assert torch.equal(long[:, :, :4], short)
    mixed = whole.at(steps)
    first, second = mixed.normal((3, 5, 9)), mixed.normal((3, 5, 9))
    for k, step in enumerate(steps.tolist()):
        one = whole.rows(torch.tensor([k])).at(step)
        assert torch.equal(one.normal((1, 5, 9))[0], first[k]) and torch.equal(one.normal((1, 5, 9))[0], second[k])
    # Rows that all take the first one's step are caught.
    assert not torch.equal(whole.at(4).normal((3, 5, 9)), first)


def test_either_kind_of_generator_serves():
    plain = torch.Generator().manual_seed(0)
    for function in (normal, uniform):
        assert function((2, 3), plain, dtype=torch.float64).dtype == torch.float64
        assert function((2, 3), KeyedGenerator(0, torch.arange(2))).shape == (2, 3)
    assert shared_uniform(2, plain).shape == (2,)
    assert at_step(plain, 3) is plain


def test_errors():
    with pytest.raises(ValueError, match="4 rows"):
        KeyedGenerator(0, torch.arange(4)).normal((3, 2))
    with pytest.raises(ValueError, match="seed must be a whole number, got 2.5"):
        KeyedGenerator(2.5, torch.arange(2))
    with pytest.raises(ValueError, match="1-D integer"):
        KeyedGenerator(0, torch.zeros(2))
    with pytest.raises(ValueError, match="step"):
        KeyedGenerator(0, torch.arange(2), step=-1)


def test_seeds_of_parts_do_not_collide():
    seeds = {seed_of(a, name, b) for a in range(20) for b in range(20) for name in ("train", "order")}
    assert len(seeds) == 800 and all(0 <= s < 2**63 for s in seeds)
