"""Vocoding: Griffin-Lim, and the choice of a vocoder by name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import fold, pad

from genmodels.core.errors import InputError
from genmodels.core.random import Generator, KeyedGenerator, uniform
from genmodels.speech.audio import MelConfig, filter_bank

if TYPE_CHECKING:
    from genmodels.speech.streaming import Vocoder


class GriffinLim:
    """Sound with a given magnitude spectrogram: consistent phases by alternating projections (Griffin-Lim).

        c_k = STFT(ISTFT(S t_k/|t_k|)),    t_{k+1} = c_k + momentum (c_k - c_{k-1})

    Arguments:
        config: the settings of the mels.
        iterations: number of alternations.
        momentum: 0 for the original algorithm, whose error never rises; near 1 it falls faster.

    Shapes: mels `(n_mels, T)`, sound `(N,)` with N = hop T (`hifigan` padding), float32 or float64 as the mel.
    Errors: ValueError for mels of another number of bands, or not finite.
    Source: Griffin and Lim 1984; Perraudin, Balazs and Sondergaard 2013 (momentum).

    Example:
        >>> from genmodels.speech.audio import log_mel
        >>> tone = torch.sin(torch.arange(8192) / 10)
        >>> GriffinLim(iterations=4)(log_mel(tone)).shape
        torch.Size([8192])
    """

    # Not by librosa: its phases come from one stream of numpy; ours are keyed by frame, so that sound made in pieces
    # (`genmodels.speech.streaming`) is that of the whole mel. It also runs on the mel's device.

    def __init__(self, config: MelConfig | None = None, *, iterations: int = 60, momentum: float = 0.99):
        if iterations < 1 or not 0 <= momentum < 1:
            raise ValueError(f"iterations = {iterations} must be at least 1, momentum = {momentum} in [0, 1)")
        self.config = MelConfig() if config is None else config
        self.iterations, self.momentum = iterations, momentum

    @property
    def context(self) -> int:
        """Frames on either side that the sound of a frame depends on: each iteration adds the overlap of windows."""
        return (self.config.n_fft - 1) // self.config.hop * (self.iterations + 1)

    @torch.no_grad()
    def __call__(self, mel: Tensor, generator: Generator | None = None, *, first_frame: int = 0) -> Tensor:
        """The sound of one mel, from random initial phases.

        Arguments:
            generator: of the phases; a KeyedGenerator has one row, and its noise is keyed by frame.
            first_frame: position of this mel in a longer one, so that it gets the same phases; needs a KeyedGenerator,
                or None for that of seed 0.
        """
        if mel.dim() != 2 or mel.shape[0] != self.config.n_mels or not bool(mel.isfinite().all()):
            raise ValueError(f"a mel is finite and ({self.config.n_mels}, T), got {tuple(mel.shape)}")
        config, frames = self.config, mel.shape[1]
        samples = config.n_fft + (frames - 1) * config.hop - 2 * config.padded
        if samples <= config.padded:  # too short to be reflected: silence is appended and removed afterwards
            mel = pad(mel, (0, config.padded // config.hop + 2), value=math.log(1e-5))
        sound = self.from_magnitudes(magnitudes(mel, config), generator, first_frame=first_frame)
        return sound if mel.shape[1] == frames else sound[:samples]

    @torch.no_grad()
    def from_magnitudes(
        self, magnitude: Tensor, generator: Generator | None = None, *, first_frame: int = 0, report=None
    ) -> Tensor:
        """The sound of magnitudes `(n_fft/2 + 1, T)`; `report` is called with the transform of every iteration."""
        phase = _phases(magnitude, generator, first_frame)
        target, before = torch.polar(torch.ones_like(phase), phase), None
        for _ in range(self.iterations):
            found = self.stft(self.istft(_directed(magnitude, target)))
            target = found if before is None else found + self.momentum * (found - before)
            before = found
            if report is not None:
                report(found)
        return self.istft(_directed(magnitude, target))

    def stft(self, wave: Tensor) -> Tensor:
        """The Fourier transform of sound (N,) as used for its mel, (n_fft/2 + 1, T) complex."""
        padded = pad(wave[None, None], (self.config.padded,) * 2, mode="reflect")[0, 0]
        return torch.stft(padded, self.config.n_fft, self.config.hop, window=self._window(wave), center=False,
                          return_complex=True)

    def istft(self, bins: Tensor) -> Tensor:
        """The sound (N,) whose transform is nearest in least squares, without the padding."""
        config = self.config
        pieces = torch.fft.irfft(bins.mT, config.n_fft)  # (T, n_fft)
        window = self._window(pieces)
        added = _overlapped(pieces * window, config.hop)
        weight = _overlapped(window.square().expand(len(pieces), -1), config.hop)
        return (added / weight.clamp(min=1e-8))[config.padded : len(added) - config.padded]

    def _window(self, like: Tensor) -> Tensor:
        return torch.hann_window(self.config.n_fft, dtype=like.dtype, device=like.device)


def _phases(magnitude: Tensor, generator: Generator | None, first_frame: int) -> Tensor:
    """Random phases with the shape of the magnitudes, drawn frame by frame."""
    bins, frames = magnitude.shape
    if generator is None:
        generator = KeyedGenerator(0, torch.zeros(1, dtype=torch.int64), "phases")
    if isinstance(generator, KeyedGenerator):
        frame = torch.arange(first_frame, first_frame + frames)
        generator = generator.rows(torch.zeros_like(frame)).at(frame)
    elif first_frame:
        raise ValueError("the phases of a part of a mel need a KeyedGenerator, whose noise is keyed by frame")
    return 2 * torch.pi * uniform((frames, bins), generator, dtype=magnitude.dtype, device=magnitude.device).mT


def _overlapped(pieces: Tensor, hop: int) -> Tensor:
    """Overlap-add of frames (T, n), one hop apart."""
    length = pieces.shape[1] + hop * (len(pieces) - 1)
    return fold(pieces.mT[None], (1, length), (1, pieces.shape[1]), stride=(1, hop))[0, 0, 0]


def _directed(magnitude: Tensor, direction: Tensor) -> Tensor:
    """The given magnitudes with the phases of `direction`."""
    return direction * (magnitude / direction.abs().clamp(min=torch.finfo(magnitude.dtype).tiny))


def magnitudes(mel: Tensor, config: MelConfig, iterations: int = 100) -> Tensor:
    """Non-negative magnitudes (n_fft/2 + 1, T) whose bands are nearest to those of a log-mel.

        S <- S * (F' b) / (F' F S),    b = exp(mel)    falls to min_S |F S - b|^2 over S >= 0

    Of the many solutions this finds a dense one, because it starts at the smooth F' b; sparse solutions, as found by
    active-set methods, sound worse.

    Source: Lee and Seung 2001.

    Example:
        >>> found = magnitudes(torch.zeros(80, 2), MelConfig())
        >>> found.shape, bool((found >= 0).all())
        (torch.Size([513, 2]), True)
    """
    bank = torch.tensor(filter_bank(config), dtype=mel.dtype, device=mel.device)
    bands = mel.exp()
    wanted = bank.mT @ bands
    found = wanted
    for _ in range(iterations):
        found = found * wanted / (bank.mT @ (bank @ found)).clamp(min=torch.finfo(mel.dtype).tiny)
    return found


#: Names of the vocoders as options, and in messages.
VOCODERS = {"griffin_lim": "Griffin-Lim", "hifigan": "HiFi-GAN", "hifigan_universal": "HiFi-GAN of many voices"}
#: A log-mel of silence.
FLOOR = math.log(1e-5)


def vocoder_of(name: str, config: MelConfig) -> Vocoder:
    """The vocoder of that name for mels with these settings.

    Raises:
        InputError: if its weights are not installed, or were trained on mels with other settings, naming them.

    Example:
        >>> vocoder_of("griffin_lim", MelConfig()).context
        183
    """
    if name == "griffin_lim":
        return GriffinLim(config)
    from genmodels.speech.hifigan import HiFiGAN

    try:
        return HiFiGAN("universal" if name == "hifigan_universal" else "LJSpeech", config)
    except ValueError as error:
        raise InputError(f"vocoder={name}: {error}") from error


def phases(seed: int) -> KeyedGenerator:
    """The generator of a vocoder's initial phases, the same for a whole mel and for its chunks."""
    return KeyedGenerator(seed, torch.zeros(1, dtype=torch.int64), "phases")


def sound_of(mel: Tensor, vocoder: Vocoder, seed: int, seconds: float | None = None) -> Tensor:
    """The sound (N,) of a mel (n_mels, T), cut to exactly `seconds`.

    Example:
        >>> sound_of(torch.full((80, 30), -3.0), GriffinLim(iterations=2), 0, seconds=0.3).shape
        torch.Size([6615])
    """
    wave = vocoder(mel, phases(seed))
    return wave if seconds is None else wave[: round(seconds * vocoder.config.sample_rate)]


def sounds_of(x: Tensor, mask: Tensor | None, config: MelConfig, *, count: int, seconds: float) -> list[Tensor]:
    """The first `count` mels of (n, n_mels, T) as sound by Griffin-Lim, each at most `seconds` long.

    Mels with non-finite values are left out.

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
