"""The reference models against brute force."""

from __future__ import annotations

import math

import torch

from genmodels.core.random import KeyedGenerator
from genmodels.data.speech import Speech
from genmodels.data.text import TextFile
from genmodels.data.vision import Digits
from genmodels.evaluation.evaluate import (
    PixelHistogram,
    best_histogram,
    references,
)
from genmodels.models.mels import NOISE, even_lengths, with_noise


def test_the_histogram_counts():
    generator = torch.Generator().manual_seed(0)
    train = torch.randint(0, 5, (40, 1, 2, 2), generator=generator)
    test = torch.randint(0, 5, (7, 1, 2, 2), generator=generator)
    model = PixelHistogram(train, levels=5, smoothing=0.5)
    for item, value in zip(test, model.log_prob(test), strict=True):
        expected = 0.0
        for i in range(2):
            for j in range(2):
                count = sum(int(t[0, i, j]) == int(item[0, i, j]) for t in train)
                expected += math.log((count + 0.5) / (40 + 2.5))
        assert math.isclose(float(value), expected, rel_tol=1e-12)


def test_its_masses_sum_to_one():
    train = torch.tensor([[0, 2], [1, 2]])
    every = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    assert math.isclose(float(PixelHistogram(train, 3).log_prob(every).exp().sum()), 1.0, rel_tol=1e-12)


def test_smoothing_is_chosen_on_validation_data():
    train = torch.zeros(50, 1, dtype=torch.long)
    assert best_histogram(train, torch.zeros(9, 1, dtype=torch.long), 2).log_prob(torch.zeros(1, 1)).item() > -0.01
    surprised = best_histogram(train, torch.tensor([[0], [1]]), 2)
    assert surprised.log_prob(torch.ones(1, 1)).item() > math.log(3 / 60)


def test_the_histogram_has_its_error_over_the_items():
    data = Digits().prepare()
    uniform, found = references(data, "test", data.spec, 100)
    train, val, test = (torch.cat([b.x for b in data.loader(name, 4096)]) for name in ("train", "val", "test"))
    bits = -best_histogram(train, val, 17).log_prob(test[:100]) / 64 / math.log(2)
    assert math.isclose(found.value, float(bits.mean()), rel_tol=1e-12)
    assert math.isclose(found.error, float(bits.std() / 10), rel_tol=1e-9) and uniform.error is None


def test_frequencies_of_bytes_against_counting(tmp_path):
    (tmp_path / "a.txt").write_text("abracadabra, abracadabra. " * 12)
    data = TextFile(file=str(tmp_path / "a.txt"), length=8).prepare()
    train, test = (next(iter(data.loader(name, 1000))).x[:, 0].tolist() for name in ("train", "test"))
    uniform, single, pairs = references(data, "test", data.spec)

    def p(b):
        return (sum(row.count(b) for row in train) + 1) / (8 * len(train) + 256)

    def after(a, b):
        both = sum((x, y) == (a, b) for row in train for x, y in zip(row, row[1:], strict=False))
        return (both + 16 * p(b)) / (sum(row[:-1].count(a) for row in train) + 16)

    bits = [-sum(math.log2(p(b)) for b in row) / 8 for row in test]
    assert uniform.value == 8 and single.unit == "bits_per_character"
    assert math.isclose(single.value, sum(bits) / len(bits), rel_tol=1e-12)
    bits = [-(math.log2(p(row[0])) + sum(math.log2(after(*two)) for two in zip(row, row[1:], strict=False))) / 8
            for row in test]
    assert math.isclose(pairs.value, sum(bits) / len(bits), rel_tol=1e-12) and pairs.error > 0


def test_the_reference_of_mels_has_its_error_over_items_of_unlike_length():
    """Against a loop over items: a ratio of sums, and its error by leaving out one item after the other."""
    def cells_of(split):
        for batch in data.loader(split, 1):
            batch = even_lengths(batch)
            noisy = with_noise(batch.x, NOISE, KeyedGenerator(0, batch.index, "likelihood"))
            yield noisy[0, :, batch.mask[0, 0]].double()

    data = Speech().prepare()
    (found,) = references(data, "test", data.spec)
    bands = [torch.cat(rows) for rows in zip(*cells_of("train"), strict=True)]
    moments = [(float(band.mean()), float(band.std(correction=0))) for band in bands]
    costs, cells = [], []
    for noisy in cells_of("test"):
        costs.append(sum(float(((row - m) ** 2 / (2 * s * s)).sum()) + len(row) * math.log(s * math.sqrt(2 * math.pi))
                         for row, (m, s) in zip(noisy, moments, strict=True)))
        cells.append(noisy.numel())
    assert math.isclose(found.value, sum(costs) / sum(cells), rel_tol=1e-6)
    n = len(costs)
    left = torch.tensor([(sum(costs) - c) / (sum(cells) - d) for c, d in zip(costs, cells, strict=True)])
    jackknife = float(((n - 1) / n * (left - left.mean()).square().sum()).sqrt())
    assert n == 4 and len(set(cells)) == 4 and math.isclose(found.error, jackknife, rel_tol=0.25)
