"""Mels as sound, by the vocoder that a user names."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genmodels.errors import InputError
from genmodels.random import KeyedGenerator
from genmodels.speech.hifigan import HiFiGAN
from genmodels.speech.mel import MelConfig
from genmodels.speech.streaming import Vocoder
from genmodels.speech.vocoder import GriffinLim

#: Names of the vocoders as users give them, and as they are told.
SPOKEN = {"griffin_lim": "Griffin-Lim", "hifigan": "HiFi-GAN", "hifigan_universal": "HiFi-GAN of many voices"}
#: A log-mel of silence.
FLOOR = math.log(1e-5)


def vocoder_of(name: str, config: MelConfig) -> Vocoder:
    """The vocoder of that name for mels of these settings.

    Raises:
        InputError: where its weights are not installed, or were made for other mels: each field that differs.

    Example:
        >>> vocoder_of("griffin_lim", MelConfig()).context
        183
    """
    if name == "griffin_lim":
        return GriffinLim(config)
    try:
        return HiFiGAN("universal" if name == "hifigan_universal" else "LJSpeech", config)
    except ValueError as error:
        raise InputError(f"vocoder={name}: {error}") from error


def phases(seed: int) -> KeyedGenerator:
    """The noise that a vocoder begins with: the same for the whole of a mel and for its pieces."""
    return KeyedGenerator(seed, torch.zeros(1, dtype=torch.int64), "phases")


def sound_of(mel: Tensor, vocoder: Vocoder, seed: int, seconds: float | None = None) -> Tensor:
    """The sound (N,) of a mel (n_mels, T), cut to exactly so many seconds.

    Example:
        >>> sound_of(torch.full((80, 30), -3.0), GriffinLim(iterations=2), 0, seconds=0.3).shape
        torch.Size([6615])
    """
    wave = vocoder(mel, phases(seed))
    return wave if seconds is None else wave[: round(seconds * vocoder.config.sample_rate)]


def sounds_of(x: Tensor, mask: Tensor | None, config: MelConfig, *, count: int, seconds: float) -> list[Tensor]:
    """The first mels of a sheet (n, n_mels, T) as sound by Griffin-Lim, each of so many seconds at most.

    Those of which nothing can be heard, since a value is not finite, are left out.

    Example:
        >>> [len(wave) for wave in sounds_of(torch.zeros(3, 80, 9), None, MelConfig(), count=2, seconds=0.05)]
        [1024, 1024]
    """
    found, longest = [], int(seconds * config.sample_rate / config.hop)
    for k, mel in enumerate(x[:count].float().cpu()):
        mel = mel if mask is None else mel[:, mask[k, 0].cpu()]
        mel = mel[:, :longest]
        if bool(mel.isfinite().all()):
            wave = sound_of(mel, GriffinLim(config), 0)
            found += [wave] if bool(wave.isfinite().all()) else []
    return found
