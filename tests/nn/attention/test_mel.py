"""Mel positions: a shift in time changes nothing, one in frequency does."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import (
    ALiBi,
    Attention,
    MelPosition,
    MusicTransformer,
    Rotary,
    Rotary2d,
    Shaw,
    TransformerXL,
)

TIMES = [None, TransformerXL, lambda D, H: Shaw(D, H, K=2), ALiBi, Rotary]


def build(time):
    torch.manual_seed(0)
    position = MelPosition(8, 2, n_freq=4, time=time and time(8, 2))
    attention = Attention(8, 2, position).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention


@torch.no_grad()
def moved(attention, axis):
    """How the output changes when a sound in silence moves by one along an axis (0 frequency, 1 time)."""
    x = torch.zeros(1, 4, 6, 8, dtype=torch.float64)
    x[0, 1:3, 1:4] = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sound = x.any(-1)
    shifted = x.roll(1, axis + 1)

    def run(x, valid):
        return attention(x.flatten(1, 2), mask=valid.flatten(1)[:, None])[0].view_as(x)

    before, after = run(x, sound), run(shifted, sound.roll(1, axis + 1))
    return float((before.roll(1, axis + 1) - after).abs().max())


@pytest.mark.parametrize("time", TIMES)
def test_time_is_relative_and_frequency_is_absolute(time):
    attention = build(time)
    assert moved(attention, 1) < 1e-10
    assert moved(attention, 0) > 1e-3


def test_the_frequency_bias_begins_at_zero():
    assert not MelPosition(8, 2, n_freq=3).F.any()


def test_mel_maps_of_any_duration_but_one_number_of_bands():
    attention = Attention(8, 2, MelPosition(8, 2, n_freq=2, time=Shaw(8, 2, K=2)))
    assert [attention(torch.zeros(1, n, 8))[0].shape[1] for n in (2, 6, 10)] == [2, 6, 10]
    with pytest.raises(ValueError, match="no map of 2 frequency bands"):
        attention(torch.zeros(1, 5, 8))
    with pytest.raises(ValueError, match="built for 2 frequency bands, the map has 3"):
        attention(torch.zeros(1, 6, 8), space=(3, 2))


@pytest.mark.parametrize("make, words", [
    (lambda: MelPosition(8, 2, n_freq=0), "at least 1"),
    (lambda: MelPosition(8, 2, n_freq=2, time=ALiBi(8, 4)), r"\(8, 4\), MelPosition \(8, 2\)"),
    (lambda: MelPosition(8, 2, n_freq=2, time=MusicTransformer(8, 2)), "MusicTransformer is not"),
    (lambda: MelPosition(8, 2, n_freq=2, time=Rotary2d(8, 2)), "Rotary2d is not"),
])  # fmt: skip
def test_errors(make, words):
    with pytest.raises(ValueError, match=words):
        make()
