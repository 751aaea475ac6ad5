"""Mel-cepstral distortion: its path against all paths, what it must not see, and what it must."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from genmodels.speech import distortion
from genmodels.speech.distortion import dynamic_time_warping, mcd_mel13, mel_cepstrum


def paths(rows: int, columns: int):
    """Every path from the first cell to the last."""
    if rows == columns == 1:
        yield [(0, 0)]
        return
    for down, right in ((1, 1), (1, 0), (0, 1)):
        if rows > down and columns > right or (rows - down, columns - right) == (1, 1):
            for path in paths(rows - down, columns - right):
                yield [*path, (rows - 1, columns - 1)]


@pytest.mark.parametrize("whole", [True, False])
def test_the_path_is_the_best_of_all(whole):
    draw = np.random.default_rng(0)
    for rows in range(1, 6):
        for columns in range(1, 6):
            every = [np.array(path) for path in paths(rows, columns)]
            for _ in range(6):
                costs = draw.integers(0, 3, (rows, columns)).astype(float) if whole else draw.random((rows, columns))
                found = dynamic_time_warping(costs)
                sums = [(costs[p[:, 0], p[:, 1]].sum(), len(p)) for p in every]
                total = min(s for s, _ in sums)
                assert found.total == pytest.approx(total, abs=1e-12)
                assert found.steps == min(n for s, n in sums if s <= total + 1e-12)
                assert dynamic_time_warping(costs.T) == pytest.approx(found)


def mel(frames: int = 30, seed: int = 0) -> torch.Tensor:
    return torch.randn(80, frames, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 5


def test_what_it_does_not_see():
    x = mel()
    assert mcd_mel13(x, x) == 0
    assert abs(mcd_mel13(x + 0.7, x)) < 1e-12
    for repeated in (x.repeat_interleave(2, 1), x.repeat_interleave(torch.arange(30) % 3 + 1, 1)):
        assert mcd_mel13(repeated, x) == mcd_mel13(x, repeated) == 0


def test_what_it_sees(monkeypatch):
    x, y = mel(), mel(25, seed=1)
    assert mcd_mel13(x, y) == mcd_mel13(y, x) > 1
    # A path never costs more than the diagonal.
    straight = np.linalg.norm(mel_cepstrum(x[:, :25]) - mel_cepstrum(y), axis=1).mean() * 6.141851
    assert mcd_mel13(x[:, :25], y) <= straight + 1e-4
    late = torch.cat([x[:, :1].expand(-1, 5), x[:, :25]], 1)
    assert mcd_mel13(late, x[:, :25]) == 0
    # Coefficient 0 would see a gain.
    monkeypatch.setattr(distortion, "mel_cepstrum", lambda m: distortion.dct(m.numpy(), axis=0, norm="ortho")[:14].T)
    assert mcd_mel13(x + 0.7, x) > 1


def test_known_values():
    bands = torch.arange(80, dtype=torch.float64)
    for k in (1, 2, 13):
        wave = math.sqrt(2 / 80) * torch.cos(math.pi * k * (bands + 0.5) / 80)
        bent = mel() * 0 + 0.5 * wave[:, None]
        assert mcd_mel13(bent, mel() * 0) == pytest.approx(0.5 * 6.141851, abs=1e-6)
    wave = torch.cos(math.pi * 14 * (bands + 0.5) / 80)
    assert abs(mcd_mel13(wave[:, None], torch.zeros(80, 3))) < 1e-9
    # The mean over the path's cells, not over the frames of either.
    one, two = torch.zeros(80, 1, dtype=torch.float64), torch.zeros(80, 4, dtype=torch.float64)
    two[:, 3] = 0.5 * math.sqrt(2 / 80) * torch.cos(math.pi * (bands + 0.5) / 80)
    assert mcd_mel13(one, two) == pytest.approx(0.5 * 6.141851 / 4, abs=1e-6)


def test_bad_input():
    for wrong in (torch.zeros(13, 4), torch.zeros(80, 0), torch.zeros(80), torch.full((80, 3), torch.nan)):
        with pytest.raises(ValueError, match="finite and"):
            mel_cepstrum(wrong)
    with pytest.raises(ValueError, match="80 and 40 bands"):
        mcd_mel13(torch.zeros(80, 3), torch.zeros(40, 3))
    with pytest.raises(ValueError, match="finite table"):
        dynamic_time_warping(np.zeros((0, 3)))
