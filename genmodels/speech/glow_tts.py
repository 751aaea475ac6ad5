"""Glow-TTS: an exact density of mels conditioned on text, marginal over alignments or along the best one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from genmodels.core.errors import check_temperature
from genmodels.core.random import Generator, normal
from genmodels.core.tensors import hide, wide
from genmodels.flows.bijection import Bijection, Inverse
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling
from genmodels.flows.elementwise import Affine
from genmodels.flows.linear import GroupedLinear
from genmodels.flows.scaling import ActNorm
from genmodels.flows.squeeze import Squeeze1d
from genmodels.nn.attention_block import AttentionKind
from genmodels.nn.condition import Condition
from genmodels.nn.coupling_networks import WaveNet
from genmodels.speech.alignment import integer_durations, log_mean_over_paths, monotonic_alignment_search, path_of
from genmodels.speech.text_encoder import DurationPredictor, TextEncoder, duration_loss

_LONGEST = 2**19  # frames of one text: more than an hour, and gigabytes


def mel_decoder(
    n_mels: int = 80,
    *,
    steps: int = 12,
    hidden: int = 192,
    depth: int = 4,
    kernel_size: int = 5,
    dropout: float = 0.05,
    groups: int = 4,
    attention: AttentionKind = "none",
    heads: int = 2,
    cond: Condition | None = None,
    memory: Literal["store", "inverse"] = "store",
) -> Compose:
    """The flow between mels and latents of the same shape.

        squeeze 2, K x [actnorm, grouped 1x1, affine coupling with a WaveNet], unsqueeze

    Arguments:
        n_mels: channels of the mel.
        steps: K.
        hidden, depth, kernel_size, dropout: of the coupling networks.
        groups: size of the matrix of the 1x1 convolutions.
        attention: entry of `ATTENTION` in the coupling networks, or `none`. `xl_chunks`, `rope_window` and
            `local_dense` have a bounded receptive field, so that the decoder can be streamed
            (`genmodels.speech.streaming`).
        heads: heads of the attention.
        cond: the condition of the networks, such as a speaker embedding.
        memory: `store`, or `inverse` to recompute activations in the backward pass.

    Shapes: `(n_mels, T)` with T even, `mask (B, 1, T)` with valid lengths even.
    Source: Kim et al. 2020 (Glow-TTS), appendix A.1.

    Example:
        >>> flow = mel_decoder(4, steps=1, hidden=8, depth=1)
        >>> flow.initialize(torch.randn(2, 4, 6))
        >>> z, logdet = flow(torch.randn(2, 4, 6))
        >>> z.shape, logdet.shape
        (torch.Size([2, 4, 6]), torch.Size([2]))
    """
    channels = 2 * n_mels
    layers: list[Bijection] = [Squeeze1d(2)]
    for _ in range(steps):
        split = ChannelSplit(channels)
        net = WaveNet(split.kept, 2 * split.changed, hidden=hidden, depth=depth, kernel_size=kernel_size,
                      dropout=dropout, cond=cond, attention=attention, heads=heads)
        layers += [ActNorm(channels), GroupedLinear(channels, groups=groups),
                   Coupling(split, Affine(split.changed), net)]
    return Compose([*layers, Inverse(Squeeze1d(2))], (n_mels, None), memory=memory)


def normal_scores(z: Tensor, mu: Tensor, log_sigma: Tensor) -> Tensor:
    """log N(z_j; mu_i, diag sigma_i^2) of every token i and frame j.

        -1/2 sum_c [log 2 pi + 2 log sigma + (z - mu)^2/sigma^2], the square expanded into matrix products

    Shapes: `z (B, C, T)`, `mu` and `log_sigma (B, C, N)`; the result is `(B, N, T)`, float32 or wider regardless of
    autocast, because half precision would change the alignments.

    Example:
        >>> normal_scores(torch.zeros(1, 2, 3), torch.zeros(1, 2, 1), torch.zeros(1, 2, 1))
        tensor([[[-1.8379, -1.8379, -1.8379]]])
    """
    z, mu, log_sigma = wide(z), wide(mu), wide(log_sigma)
    with torch.autocast(z.device.type, enabled=False):
        precision = torch.exp(-2 * log_sigma)
        own = -(0.5 * math.log(2 * math.pi) + log_sigma + 0.5 * precision * mu.square()).sum(1)  # (B, N)
        return own[:, :, None] + (precision * mu).mT @ z - 0.5 * precision.mT @ z.square()


@dataclass
class Aligned:
    """A batch of mels aligned with its texts.

    Attributes:
        best: log p(y, A* | text) without the prior of alignments, (B,) nats: the flow's density along the best path.
        durations: frames of each token on that path, (B, N).
        path: (B, N, T) bool.
        log_durations: the predictor's, (B, N).
        scores: of every token and frame, (B, N, T).
        logdet: of the flow, (B,).
        mu: means of the tokens, (B, n_mels, N).
    """

    best: Tensor
    durations: Tensor
    path: Tensor
    log_durations: Tensor
    scores: Tensor
    logdet: Tensor
    mu: Tensor


class Latent(NamedTuple):
    """Input of the decoder: z `(B, n_mels, T)`, its mask `(B, 1, T)` with even lengths, and durations (B, N).

    An item of odd length has one frame more than the sum of its durations.
    """

    z: Tensor
    mask: Tensor
    durations: Tensor


class GlowTTS(nn.Module):
    """Text to mel by a flow whose latents are Gaussian, with mean and standard deviation from the token of each frame.

        log p(y | text, A) = sum_j log N(z_j; mu_A(j), sigma_A(j)) + log |det df/dy|,    z = f(y)

    Arguments:
        encoder: symbols to means and standard deviations.
        decoder: the flow f, over mels in the model's units.
        durations: predictor of log durations.

    Shapes: mels `y (B, n_mels, T)` with `mask (B, 1, T)`, even lengths; `tokens (B, N)` with `text_mask (B, 1, N)`.
    Errors: ValueError for more tokens than frames, by item.
    Source: Kim et al. 2020 (Glow-TTS).
    """

    def __init__(self, encoder: TextEncoder, decoder: Compose, durations: DurationPredictor):
        super().__init__()
        self.encoder, self.decoder, self.durations = encoder, decoder, durations

    def align(
        self, y: Tensor, tokens: Tensor, mask: Tensor | None = None, text_mask: Tensor | None = None,
        speaker: Tensor | None = None,
    ) -> Aligned:
        """Latents, scores and the best path; gradients flow through the scores on it, not through its choice."""
        h, mu, log_sigma = self.encoder(tokens, text_mask, speaker)
        z, logdet = self.decoder(y, speaker if self.decoder.uses_cond else None, mask)
        scores = normal_scores(z, mu, log_sigma)
        found = monotonic_alignment_search(scores.detach(), text_mask, mask)
        best = torch.where(found.path, scores, 0).sum((1, 2)) + logdet
        return Aligned(best, found.durations, found.path, self.durations(h, text_mask), scores, logdet, wide(mu))

    @torch.no_grad()
    def text_log_probs(self, y: Tensor, tokens: Tensor, text_mask: Tensor, speaker: Tensor | None = None) -> Tensor:
        """log p(y | text k) of one mel under K texts, (K,) nats, without the log-determinant, which they share.

        Shapes: `y (1, n_mels, T)` without padding, `tokens (K, N)`, `text_mask (K, 1, N)`, `speaker (1, C)`.

        Raises:
            ValueError: for a text of more tokens than y has frames.
        """
        speakers = None if speaker is None else speaker.expand(len(tokens), -1)
        _, mu, log_sigma = self.encoder(tokens, text_mask, speakers)
        z, _ = self.decoder(y, speaker if self.decoder.uses_cond else None)
        return log_mean_over_paths(normal_scores(z.expand(len(tokens), -1, -1), mu, log_sigma), text_mask)

    def loss(self, aligned: Aligned, mask: Tensor | None, text_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Nats per dimension (B,) along the best path, and the error of the log durations (B,).

        In training mode it also updates the correction factor of the duration predictor.
        """
        if self.training:
            self.durations.observe(aligned.log_durations, aligned.durations, text_mask)
        count = aligned.scores.shape[2] if mask is None else mask[:, 0].sum(1)
        dims = self.encoder.n_mels * count
        return -aligned.best / dims, duration_loss(aligned.log_durations, aligned.durations, text_mask)

    def log_prob(
        self, y: Tensor, tokens: Tensor, mask: Tensor | None = None, text_mask: Tensor | None = None,
        speaker: Tensor | None = None, *, alignment: Literal["marginal", "best"] = "marginal",
    ) -> Tensor:
        """log p(y | text) in nats, (B,), under a uniform prior of the alignments.

        `marginal` sums over all alignments: log sum_A p(y | text, A) - log C(T-1, N-1), the exact density. `best` uses
        the best alignment, which depends on y: an optimistic value that is not a density, nor comparable with one.

        Raises:
            ValueError: for another alignment.
        """
        if alignment not in ("marginal", "best"):
            raise ValueError(f"alignment must be marginal or best, got {alignment!r}")
        aligned = self.align(y, tokens, mask, text_mask, speaker)
        if alignment == "best":
            return aligned.best
        return log_mean_over_paths(aligned.scores, text_mask, mask) + aligned.logdet

    @torch.no_grad()
    def sample(
        self, tokens: Tensor, text_mask: Tensor | None = None, speaker: Tensor | None = None, *,
        generator: Generator, temperature: float = 0.667, speed: float | Tensor = 1.0, frames: Tensor | None = None,
        durations: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mels (B, n_mels, T), their mask (B, 1, T) and durations (B, N).

        Arguments:
            temperature: factor on sigma; 0 for the mean latent.
            speed: factor of the speaking rate, above 1 is faster; one for all, or (B, N) one per token.
            frames: total of each item, (B,); default the sum of the predicted durations.
            durations: integer frames (B, N) instead of predicted ones.

        Raises:
            ValueError: for a speed that is not positive, a temperature below 0 or not finite, fewer frames than tokens.
        """
        drawn = self.latent(tokens, text_mask, speaker, generator=generator, temperature=temperature, speed=speed,
                            frames=frames, durations=durations)
        y, _ = self.decoder.inverse(drawn.z, speaker if self.decoder.uses_cond else None, drawn.mask)
        total = drawn.durations.sum(1)
        longest = int(total.max())
        valid = (torch.arange(longest, device=total.device) < total[:, None])[:, None]
        return hide(y[:, :, :longest], valid), valid, drawn.durations

    @torch.no_grad()
    def latent(
        self, tokens: Tensor, text_mask: Tensor | None = None, speaker: Tensor | None = None, *,
        generator: Generator, temperature: float = 0.667, speed: float | Tensor = 1.0, frames: Tensor | None = None,
        durations: Tensor | None = None,
    ) -> Latent:
        """The latents that `sample` decodes, z = mu + temperature sigma eps; same arguments and errors."""
        if not bool((torch.as_tensor(speed) > 0).all()):
            raise ValueError(f"speed must be positive, got {speed}")
        check_temperature(temperature)
        h, mu, log_sigma = self.encoder(tokens, text_mask, speaker)
        if durations is None:
            widths = hide((self.durations.frames(h, text_mask) / speed)[:, None], text_mask)[:, 0]
            durations = integer_durations(widths, frames, text_mask)
        total = durations.sum(1)
        longest = int(total.max())
        if longest > _LONGEST:
            raise ValueError(f"{longest} frames are too many for one text, at most {_LONGEST} are made: raise speed")
        # The flow takes pairs of frames: an odd length gets one more of its last token, removed after decoding.
        even, last = durations.clone(), durations.shape[1] - 1 if text_mask is None else text_mask[:, 0].sum(1) - 1
        even[torch.arange(len(even)), last] += total % 2
        path = path_of(even, longest + longest % 2).to(mu.dtype)
        mask = (torch.arange(path.shape[2], device=total.device) < even.sum(1)[:, None])[:, None]
        noise = normal((len(tokens), mu.shape[1], path.shape[2]), generator, dtype=mu.dtype, device=mu.device)
        z = mu @ path + temperature * torch.exp(log_sigma @ path) * noise
        return Latent(hide(z, mask), mask, durations)
