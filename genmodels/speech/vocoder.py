"""From mel-spectrograms back to sound, without anything learned."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import fold, pad

from genmodels.random import Generator, uniform
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

    @torch.no_grad()
    def __call__(self, mel: Tensor, generator: Generator | None = None) -> Tensor:
        """The sound of one mel; the phases begin at random."""
        if mel.dim() != 2 or mel.shape[0] != self.config.n_mels or not bool(mel.isfinite().all()):
            raise ValueError(f"a mel is finite and ({self.config.n_mels}, T), got {tuple(mel.shape)}")
        return self.from_magnitudes(magnitudes(mel, self.config), generator)

    @torch.no_grad()
    def from_magnitudes(self, magnitude: Tensor, generator: Generator | None = None, report=None) -> Tensor:
        """The sound of magnitudes `(n_fft/2 + 1, T)`; `report` is called with the transform of every iteration."""
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        phase = 2 * torch.pi * uniform(magnitude.shape, generator, dtype=magnitude.dtype, device=magnitude.device)
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
