"""From mel-spectrograms back to sound, without anything learned."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import fold, pad

from genmodels.random import Generator, KeyedGenerator, uniform
from genmodels.speech.mel import MelConfig, filter_bank


class GriffinLim:
    """Sound whose spectrogram is near a given one: phases that a signal can have, found by going back and forth.

        c_k = STFT(ISTFT(S t_k/|t_k|)),    t_{k+1} = c_k + momentum (c_k - c_{k-1})

    Arguments:
        config: the settings of the mels.
        iterations: how often back and forth.
        momentum: 0 for Griffin and Lim's own, whose error never rises; near 1 it falls faster.

    Shapes: mels `(n_mels, T)`, sound `(N,)` with N = hop T (`hifigan` padding), float32 or float64 as the mel.
    Errors: ValueError for mels of another number of bands, or not finite.
    Source: Griffin and Lim 1984; Perraudin, Balazs and Sondergaard 2013 (momentum).

    Example:
        >>> from genmodels.speech.mel import log_mel
        >>> tone = torch.sin(torch.arange(8192) / 10)
        >>> GriffinLim(iterations=4)(log_mel(tone)).shape
        torch.Size([8192])
    """

    def __init__(self, config: MelConfig | None = None, *, iterations: int = 60, momentum: float = 0.99):
        if iterations < 1 or not 0 <= momentum < 1:
            raise ValueError(f"iterations = {iterations} must be at least 1, momentum = {momentum} in [0, 1)")
        self.config = MelConfig() if config is None else config
        self.iterations, self.momentum = iterations, momentum

    @property
    def context(self) -> int:
        """Frames on either side that a frame's sound depends on: every round reaches as far as windows overlap."""
        return (self.config.n_fft - 1) // self.config.hop * (self.iterations + 1)

    @torch.no_grad()
    def __call__(self, mel: Tensor, generator: Generator | None = None, *, first_frame: int = 0) -> Tensor:
        """The sound of one mel; the phases begin at random.

        Arguments:
            generator: of the phases; a KeyedGenerator has one row, and its noise is addressed by frame.
            first_frame: where in a longer mel this one begins, so that it gets that one's phases; needs a
                KeyedGenerator, or None for that of seed 0.
        """
        if mel.dim() != 2 or mel.shape[0] != self.config.n_mels or not bool(mel.isfinite().all()):
            raise ValueError(f"a mel is finite and ({self.config.n_mels}, T), got {tuple(mel.shape)}")
        config, frames = self.config, mel.shape[1]
        samples = config.n_fft + (frames - 1) * config.hop - 2 * config.padded
        if samples <= config.padded:  # too short to be reflected: silence behind it, cut off again
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
        """The transform of sound (N,) as its mel sees it, (n_fft/2 + 1, T) complex."""
        padded = pad(wave[None, None], (self.config.padded,) * 2, mode="reflect")[0, 0]
        return torch.stft(padded, self.config.n_fft, self.config.hop, window=self._window(wave), center=False,
                          return_complex=True)

    def istft(self, bins: Tensor) -> Tensor:
        """The sound (N,) whose transform is nearest in least squares, without the samples of the padding."""
        config = self.config
        pieces = torch.fft.irfft(bins.mT, config.n_fft)  # (T, n_fft)
        window = self._window(pieces)
        added = _overlapped(pieces * window, config.hop)
        weight = _overlapped(window.square().expand(len(pieces), -1), config.hop)
        return (added / weight.clamp(min=1e-8))[config.padded : len(added) - config.padded]

    def _window(self, like: Tensor) -> Tensor:
        return torch.hann_window(self.config.n_fft, dtype=like.dtype, device=like.device)


def _phases(magnitude: Tensor, generator: Generator | None, first_frame: int) -> Tensor:
    """Phases like the magnitudes, drawn frame by frame."""
    bins, frames = magnitude.shape
    if generator is None:
        generator = KeyedGenerator(0, torch.zeros(1, dtype=torch.int64), "phases")
    if isinstance(generator, KeyedGenerator):
        frame = torch.arange(first_frame, first_frame + frames)
        generator = generator.rows(torch.zeros_like(frame)).at(frame)
    elif first_frame:
        raise ValueError("the phases of a part of a mel need a KeyedGenerator, whose noise is addressed by frame")
    return 2 * torch.pi * uniform((frames, bins), generator, dtype=magnitude.dtype, device=magnitude.device).mT


def _overlapped(pieces: Tensor, hop: int) -> Tensor:
    """Frames (T, n) added up, each a hop after the one before."""
    length = pieces.shape[1] + hop * (len(pieces) - 1)
    return fold(pieces.mT[None], (1, length), (1, pieces.shape[1]), stride=(1, hop))[0, 0, 0]


def _directed(magnitude: Tensor, direction: Tensor) -> Tensor:
    """Magnitudes with the phases of something else."""
    return direction * (magnitude / direction.abs().clamp(min=torch.finfo(magnitude.dtype).tiny))


def magnitudes(mel: Tensor, config: MelConfig, iterations: int = 100) -> Tensor:
    """Magnitudes (n_fft/2 + 1, T), none of them negative, whose bands are nearest to those of a log-mel.

        S <- S * (F' b) / (F' F S),    b = exp(mel)    falls to min_S |F S - b|^2 over S >= 0

    Of the many solutions this finds one that is dense, since it starts at the smooth F' b; solutions with many zeros,
    as active sets give them, sound worse.

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
