"""Text encoder and duration predictor of the text-to-mel models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from genmodels.core.errors import at_least
from genmodels.core.processes import summed
from genmodels.core.random import Dropout
from genmodels.core.tensors import hide
from genmodels.nn.attention_block import AttentionKind
from genmodels.nn.blocks import ChannelNorm, zeroed
from genmodels.nn.transformer import Transformer

_KEPT = 0.99  # decay of the duration statistics per batch


class Prenet(nn.Module):
    """Convolutions over neighbouring symbols with a residual connection; the identity at the start.

        y = x + W h,    h <- dropout(relu(norm(conv(h)))) three times,    W = 0 at the start

    Shapes: `x (B, C, N)` to the same, `mask (B, 1, N)`.
    Source: Kim et al. 2020 (Glow-TTS), appendix A.1.

    Example:
        >>> Prenet(4)(torch.ones(1, 4, 3)).detach()[0, 0]
        tensor([1., 1., 1.])
    """

    def __init__(self, channels: int, *, depth: int = 3, kernel_size: int = 5, dropout: float = 0.5):
        super().__init__()
        at_least(1, channels=channels, kernel_size=kernel_size)
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size = {kernel_size} must be odd, so that the length stays")
        self.convolutions = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel_size, padding=kernel_size // 2) for _ in range(depth)
        )
        self.norms = nn.ModuleList(ChannelNorm(channels) for _ in range(depth))
        self.dropout = Dropout(dropout)
        self.project = zeroed(nn.Conv1d(channels, channels, 1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = x
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            h = self.dropout(relu(norm(convolution(hide(h, mask)))))
        return hide(x + self.project(h), mask)


class TextEncoder(nn.Module):
    """The encoder shared by all text models: symbols, a prenet, a transformer with relative positions.

        h = transformer(prenet(embedding(tokens))),    mu = W h,    log sigma = 0, or learned

    Arguments:
        symbols: how many symbols there are.
        n_mels: channels of mu and log sigma.
        channels, depth, heads, hidden, window, dropout, attention: of the transformer.
        speaker_channels: length of the speaker embedding, added to every position; 0 without speakers.
        learn_sigma: whether log sigma is learned too.
        checkpointing: recompute the activations of the transformer's layers in the backward pass.

    Shapes: `tokens (B, N)` int64, `mask (B, 1, N)`, `speaker (B, speaker_channels)`; h is `(B, channels, N)`, mu and
        log sigma `(B, n_mels, N)`, all zero outside the mask.
    Errors: ValueError for sizes below 1, and for a speaker where none is expected, or the other way round.
    Source: Kim et al. 2020 (Glow-TTS), appendix A.1.

    Example:
        >>> encoder = TextEncoder(37, channels=16, depth=1, hidden=32)
        >>> h, mu, log_sigma = encoder(torch.tensor([[1, 5, 1]]))
        >>> h.shape, mu.shape, float(log_sigma.abs().max())
        (torch.Size([1, 16, 3]), torch.Size([1, 80, 3]), 0.0)
    """

    def __init__(
        self,
        symbols: int,
        n_mels: int = 80,
        speaker_channels: int = 0,
        *,
        channels: int = 192,
        depth: int = 6,
        heads: int = 2,
        hidden: int = 768,
        window: int | None = None,
        dropout: float = 0.1,
        attention: AttentionKind = "shaw_zero",
        learn_sigma: bool = False,
        checkpointing: bool = False,
    ):
        super().__init__()
        at_least(1, symbols=symbols, n_mels=n_mels, channels=channels, heads=heads, hidden=hidden)
        at_least(0, depth=depth, speaker_channels=speaker_channels)
        self.channels, self.n_mels, self.learn_sigma = channels, n_mels, learn_sigma
        self.embedding = nn.Embedding(symbols, channels)
        nn.init.normal_(self.embedding.weight, 0.0, channels**-0.5)
        self.prenet = Prenet(channels)
        self.transformer = Transformer(
            channels, depth=depth, heads=heads, hidden=hidden, window=window, dropout=dropout, attention=attention,
            checkpointing=checkpointing,
        )  # fmt: skip
        self.head = nn.Conv1d(channels, n_mels * (2 if learn_sigma else 1), 1)
        self.speaker = nn.Linear(speaker_channels, channels) if speaker_channels else None

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, speaker: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if (speaker is None) != (self.speaker is None):
            raise ValueError("the text encoder was built without speakers" if self.speaker is None
                             else "the text encoder was built with speakers: pass speaker=")
        x = self.embedding(tokens).mT * self.channels**0.5
        x = self.prenet(hide(x, mask), mask)
        if speaker is not None:
            x = x + self.speaker(speaker)[:, :, None]
        h = self.transformer(x, mask)
        mu = hide(self.head(h), mask)
        mu, log_sigma = mu.chunk(2, dim=1) if self.learn_sigma else (mu, torch.zeros_like(mu))
        return h, mu, log_sigma


class DurationPredictor(nn.Module):
    """Predicts the log duration of each token in frames, by two convolutions of the encoder's output.

        log d = W h,    h <- dropout(norm(relu(conv(h)))) twice

    The encoder's output is detached, so that durations do not influence the representation of the text. A mean of
    logarithms corresponds to the geometric mean, which is below the mean duration; speech would be too fast by a third.
    `frames` corrects this by one factor for all tokens, estimated in training (Duan's smearing estimate),

        frames = exp(log d) sum d / sum exp(log d),    sums over the last hundred batches or so

    Shapes: `h (B, C, N)`, `mask (B, 1, N)`; the result is `(B, N)`, zero outside the mask.
    Source: Kim et al. 2020 (Glow-TTS), appendix A.1; Ren et al. 2019 (FastSpeech); Duan 1983.

    Example:
        >>> DurationPredictor(8, hidden=4)(torch.zeros(2, 8, 5)).shape
        torch.Size([2, 5])
    """

    def __init__(self, channels: int, *, hidden: int = 256, kernel_size: int = 3, dropout: float = 0.1):
        super().__init__()
        at_least(1, channels=channels, hidden=hidden, kernel_size=kernel_size)
        widths = [channels, hidden]
        self.convolutions = nn.ModuleList(
            nn.Conv1d(width, hidden, kernel_size, padding=kernel_size // 2) for width in widths
        )
        self.norms = nn.ModuleList(ChannelNorm(hidden) for _ in widths)
        self.dropout = Dropout(dropout)
        self.head = nn.Conv1d(hidden, 1, 1)
        self.register_buffer("seen", torch.ones(2))  # running sums of true frames, and of exp(log d)

    def frames(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Expected frames of each token, (B, N), 0 outside the mask."""
        true, predicted = self.seen
        return hide((self(h, mask).exp() * (true / predicted))[:, None], mask)[:, 0]

    @torch.no_grad()
    def observe(self, log_durations: Tensor, durations: Tensor, mask: Tensor | None = None) -> None:
        """Update the running sums with the durations of a training batch, of all processes together."""
        pairs = torch.stack([durations.to(log_durations.dtype), log_durations.exp()], 1)  # (B, 2, N)
        self.seen.mul_(_KEPT).add_(summed(hide(pairs, mask).sum((0, 2)).to(self.seen.dtype)))

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        h = h.detach()
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            h = self.dropout(norm(relu(convolution(hide(h, mask)))))
        return hide(self.head(h), mask)[:, 0]


def duration_loss(log_durations: Tensor, durations: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean squared error (B,) of log durations over an item's tokens, each with at least one frame.

    Example:
        >>> duration_loss(torch.zeros(1, 2), torch.tensor([[1, 1]]))
        tensor([0.])
    """
    squares = (log_durations - durations.clamp(min=1).to(log_durations.dtype).log()).square()
    if mask is None:
        return squares.mean(1)
    return hide(squares[:, None], mask)[:, 0].sum(1) / mask[:, 0].sum(1)
