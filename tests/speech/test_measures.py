"""Mel-cepstral distortion and pitch: the path against all paths, what they must not see, and what they must."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from scipy.fft import dct

from genmodels.speech import measures as distortion
from genmodels.speech.measures import (
    Outcome,
    alignment_shape,
    compared_pitch,
    duration_error,
    dynamic_time_warping,
    failures_per_100,
    mcd_mel13,
    mel_cepstrum,
    read_faults,
    warping_path,
    words_of_tokens,
)
from genmodels.speech.recognition import WordFaults, spoken_form
from genmodels.speech.text import Symbols


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
                cells = warping_path(costs)
                assert cells.tolist() in [p.tolist() for p in every] and len(cells) == found.steps
                assert costs[cells[:, 0], cells[:, 1]].sum() == pytest.approx(found.total, abs=1e-12)


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
    monkeypatch.setattr(distortion, "mel_cepstrum", lambda m: dct(m.numpy(), axis=0, norm="ortho")[:14].T)
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


def test_duration_error():
    d, other = torch.tensor([[2.0, 4.0, 99.0], [1.0, 1.0, 1.0]]), torch.tensor([[1, 5, 7], [1, 2, 3]])
    mask = torch.tensor([[[True, True, False]], [[True, True, True]]])
    found = duration_error(d, other, mask)
    assert found.tolist() == [1.0, 1.0]
    # Without the mask the padding counts.
    assert duration_error(d, other)[0] > 30
    assert not duration_error(other, other, mask).any()
    with pytest.raises(ValueError, match="item 1 has a reference of no frames"):
        duration_error(d, torch.tensor([[1, 5, 7], [0, 0, 0]]))
    with pytest.raises(ValueError, match=r"\(B, N\)"):
        duration_error(d, other[0])


@pytest.mark.parametrize("blanks", [False, True])
def test_words_of_tokens(blanks):
    text = "the cat's paw - well, yes"
    symbols = Symbols(blanks=blanks)
    words = words_of_tokens(symbols.encode(text), symbols)
    said = spoken_form(text).split()
    assert max(words) + 1 == len(said)
    for k, word in enumerate(said):
        own = [t for t, w in zip(symbols.encode(text), words, strict=True) if w == k]
        assert symbols.decode(own) == word


def looks(tokens: list[int], count: int) -> torch.Tensor:
    """Weights of an attention that looks at these tokens, frame by frame, and a little everywhere."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), count).T + 0.3


@pytest.mark.parametrize(("tokens", "expected"), [
    ([0, 0, 1, 1, 2, 3, 3, 3, 4], (0, 0)),  # tokens 0 1 | 2 | 3 4 are words, 2 is a space between them
    ([0, 0, 1, 1, 2, 2], (1, 0)),  # never came to the second word
    ([3, 3, 3, 4], (1, 0)),
    ([0, 1, 1, 3, 3, 4, 0, 1, 1], (0, 1)),  # went back
    ([0, 1, 1, 3, 0, 3, 3, 4], (0, 0)),  # wavered at the border
    ([0, 0, 0, 3, 3, 3, 1, 1, 1, 4, 4, 4], (0, 2)),  # back and forth
])  # fmt: skip
def test_words_that_were_read(tokens, expected):
    weights, signs = looks(tokens, 5), torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])[:, None]
    assert read_faults(weights, [0, 0, -1, 1, 1]) == read_faults(signs * weights, [0, 0, -1, 1, 1]) == expected


def test_failures():
    fine, ratios = Outcome(), [0.5, 2.0, 0.49, 2.01, math.nan]
    assert [Outcome(length_ratio=r).failures["length"] for r in ratios] == [False, False, True, True, True]
    outcomes = [fine, fine, Outcome(WordFaults(2, 0)), Outcome(WordFaults(1, 1), stopped=False, length_ratio=9.0)]
    assert failures_per_100(outcomes) == {"missing word": 50, "repeated word": 25, "no stop": 25, "length": 25,
                                          "any": 50}
    with pytest.raises(ValueError, match="no utterances"):
        failures_per_100([])
    with pytest.raises(ValueError, match=r"\(3, T\)"):
        read_faults(torch.zeros(2, 5), [0, 0, 1])


def test_the_shape_of_alignments_against_loops():
    """Random posteriors of unequal sizes, frame by frame; what is padding is full of numbers that must not matter."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(4, 9), (2, 7), (1, 3)]
    p, durations = torch.rand(3, 4, 9, generator=generator), torch.full((3, 4), 77.0)
    text, frames = torch.zeros(3, 1, 4).bool(), torch.zeros(3, 1, 9).bool()
    spans, distances, surprises = [], [], []
    for k, (n, t) in enumerate(sizes):
        p[k, n:] = 0
        p[k, :, :t] /= p[k, :, :t].sum(0)
        text[k, :, :n], frames[k, :, :t] = True, True
        own = [1] * (n - 1) + [t - n + 1]
        durations[k, :n] = torch.tensor(own).float()
        spans += own
        for j in range(t):
            column = p[k, :n, j].tolist()
            at = sum(i * v for i, v in enumerate(column)) / max(1, n - 1)
            distances.append(abs(at - j / (t - 1)))
            surprises.append(-sum(v * math.log(v) for v in column))
    found = alignment_shape(p, durations, text, frames)
    assert (found.longest, found.single) == (max(spans), spans.count(1) / len(spans))
    assert (found.mean, found.std) == pytest.approx((statistics.fmean(spans), statistics.pstdev(spans)))
    assert found.off_diagonal == pytest.approx(statistics.fmean(distances), abs=1e-6)
    assert found.entropy == pytest.approx(statistics.fmean(surprises), abs=1e-6)
    # Padding that counts is seen.
    everywhere = torch.ones_like(frames)
    assert alignment_shape(p, durations, text, everywhere).entropy != pytest.approx(found.entropy, abs=1e-3)


def test_pitch_against_loops():
    """Every pair of frames on the path of the distortion, one after the other; what is unvoiced has no pitch."""
    draw = np.random.default_rng(0)
    mels = [(mel(9, seed=k), mel(7 + k, seed=k + 5)) for k in range(3)]
    own, true = ([draw.normal(80, 3, m[which].shape[1]) for m in mels] for which in (0, 1))
    for track in (*own, *true):
        track[draw.random(len(track)) < 0.3] = np.nan
    own[2][:] = np.nan
    squares, unlike, pairs = [], 0, 0
    for k, (one, other) in enumerate(mels):
        costs = np.array([[math.dist(a, b) for b in mel_cepstrum(other)] for a in mel_cepstrum(one)])
        for i, j in warping_path(costs):
            f, g = own[k][i], true[k][j]
            pairs, unlike = pairs + 1, unlike + (math.isnan(f) != math.isnan(g))
            if not math.isnan(f) and not math.isnan(g):
                squares.append((f - g) ** 2)
    found = compared_pitch([m[0] for m in mels], [m[1] for m in mels], own, true)
    assert found.rmse == pytest.approx(math.sqrt(sum(squares) / len(squares))) and found.voicing == unlike / pairs
    for spread, tracks in ((found.spread, own[:2]), (found.recorded, true)):
        voiced = [track[~np.isnan(track)] for track in tracks]
        total = sum(((track - track.mean()) ** 2).sum() for track in voiced)
        assert spread == pytest.approx(math.sqrt(total / sum(map(len, voiced))))
    silent = compared_pitch([mels[0][0]], [mels[0][1]], [own[2]], [true[0]])
    assert silent.rmse is None and silent.spread is None and silent.recorded > 0
    with pytest.raises(ValueError, match="no utterances"):
        compared_pitch([], [], [], [])


def test_the_pitch_of_an_octave_is_twelve_semitones():
    x, track = mel(20), np.linspace(70, 90, 20)
    found = compared_pitch([x.repeat_interleave(2, 1)], [x], [track.repeat(2) + 12], [track])  # slower by half
    assert found.rmse == pytest.approx(12) and found.voicing == 0
