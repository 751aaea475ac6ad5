"""Transformer and conformer encoders of sequences, and a streaming encoder of mel-spectrograms."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import glu, pad, relu, silu

from genmodels.core.errors import at_least
from genmodels.core.random import Dropout
from genmodels.core.tensors import hide
from genmodels.nn.attention import Attention, Cache
from genmodels.nn.attention_block import AttentionKind, Site, make_mechanism
from genmodels.nn.blocks import ChannelNorm, run


class TransformerLayer(nn.Module):
    """A pre-norm transformer layer with two convolutions as its feed-forward network.

        h = x + dropout(attention(norm_1(x))),    y = h + dropout(conv_2(dropout(relu(conv_1(norm_2(h))))))

    In the paper the attention is `shaw_zero`: distances up to `window` have relative vectors, larger ones none.

    Arguments:
        channels: channels of the sequence.
        heads: heads of the attention; divides the channels.
        hidden: channels between the convolutions.
        kernel_size: kernel of the convolutions, odd.
        window: largest distance with relative vectors, for the kinds of Shaw; None for their default, 4 or 16.
        dropout: probability of dropping a value, or an attention weight where the kind has dropout.
        attention: entry of `ATTENTION` for sequences, `none` for none.
        causal: whether the attention sees only the past; the whole layer does if `kernel_size` is 1 too.

    Shapes: `x (B, C, T)` to the same, `mask (B, 1, T)` bool, True = valid: the result is zero outside it.
    Errors: ValueError for an even kernel, heads that do not divide the channels, an unknown attention, a window for an
    attention that has none.
    Source: Kim et al. 2020, "Glow-TTS", appendix A.1; norms before as in Xiong et al. 2020.

    Example:
        >>> TransformerLayer(8, 2)(torch.randn(3, 8, 5)).shape
        torch.Size([3, 8, 5])
    """

    kinked = "relu"  # which it calls, for `require_smooth`

    def __init__(
        self,
        channels: int,
        heads: int = 2,
        *,
        hidden: int = 768,
        kernel_size: int = 3,
        window: int | None = None,
        dropout: float = 0.1,
        attention: AttentionKind = "shaw_zero",
        causal: bool = False,
    ):
        super().__init__()
        at_least(1, channels=channels, heads=heads, hidden=hidden, kernel_size=kernel_size)
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size = {kernel_size} must be odd, so that the length stays")
        if window is not None and not attention.startswith("shaw"):
            raise ValueError(f"window = {window} is for attention = shaw, shaw_shared and shaw_zero, not {attention}")
        mechanism = make_mechanism(attention, channels, heads, Site(1, None, dropout, window, causal))
        self.norm_1 = None if mechanism is None else ChannelNorm(channels)
        self.norm_2 = ChannelNorm(channels)
        self.attention = mechanism
        self.conv_1 = nn.Conv1d(channels, hidden, kernel_size, padding=kernel_size // 2)
        self.conv_2 = nn.Conv1d(hidden, channels, kernel_size, padding=kernel_size // 2)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.shape[2] == 0:  # torch's convolutions refuse it
            return x
        h = hide(x, mask)
        if self.attention is not None:
            y, _ = self.attention(self.norm_1(h).transpose(1, 2), mask=mask)
            h = h + self.dropout(y.transpose(1, 2))
        return self._convolved(h, mask)

    def extend(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """The output for new positions of a sequence, and the new cache; `cache` is None at the beginning.

        Only with `kernel_size` 1 and an attention that has a cache.
        """
        rows = self.norm_1(x).transpose(1, 2)
        y, cache = self.attention(rows, cache=self.attention.empty_cache(rows) if cache is None else cache)
        return self._convolved(x + y.transpose(1, 2), None), cache

    def _convolved(self, h: Tensor, mask: Tensor | None) -> Tensor:
        inside = self.dropout(relu(self.conv_1(hide(self.norm_2(h), mask))))
        return hide(h + self.dropout(self.conv_2(hide(inside, mask))), mask)


class Transformer(nn.Module):
    """A stack of `TransformerLayer` with a final norm.

        y = norm(layer_n(... layer_1(x)))

    Arguments:
        channels: channels of the sequence.
        depth: number of layers.
        heads, hidden, kernel_size, window, dropout, attention: see `TransformerLayer`.
        checkpointing: recompute the inside of each layer in the backward pass instead of storing it.

    Shapes: `x (B, C, T)` to the same, `mask (B, 1, T)` bool, True = valid; padding has no influence, and the result is
    zero there.
    Errors: ValueError for x with other channels; see also `TransformerLayer`.
    Source: Kim et al. 2020, "Glow-TTS", appendix A.1: 192 channels, 6 layers, 2 heads, window 4.

    Example:
        >>> x, mask = torch.randn(2, 8, 5), torch.tensor([[[1, 1, 1, 1, 1]], [[1, 1, 0, 0, 0]]]).bool()
        >>> Transformer(8, depth=2, hidden=16)(x, mask)[1, :, 2:].abs().max()
        tensor(0., grad_fn=<MaxBackward1>)
    """

    def __init__(
        self,
        channels: int = 192,
        *,
        depth: int = 6,
        heads: int = 2,
        hidden: int = 768,
        kernel_size: int = 3,
        window: int | None = None,
        dropout: float = 0.1,
        attention: AttentionKind = "shaw_zero",
        checkpointing: bool = False,
    ):
        super().__init__()
        self.channels, self.checkpointing = channels, checkpointing
        self.layers = nn.ModuleList(
            TransformerLayer(channels, heads, hidden=hidden, kernel_size=kernel_size, window=window, dropout=dropout,
                             attention=attention)
            for _ in range(depth)
        )  # fmt: skip
        self.norm = ChannelNorm(channels)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.dim() != 3 or x.shape[1] != self.channels:
            raise ValueError(f"the transformer takes x (B, {self.channels}, T), got {tuple(x.shape)}")
        x = hide(x, mask)
        for layer in self.layers:
            x = run(layer, x, mask, again=self.checkpointing)
        return hide(self.norm(x), mask)


class Subsampling(nn.Module):
    """Convolutions of stride 2, which each halve the number of frames.

        h <- relu(conv(h)),    frame i of conv(h) depends on frames 2i - 1 to 2i + 1 of h

    A frame of the result depends on no frames after its stride, so that chunks of whole strides need no lookahead.

    Arguments:
        n_mels: channels of the mel.
        channels: of the result.
        factor: 2 or 4 frames of the mel for each of the result.

    Shapes: `x (B, n_mels, T)` with `mask (B, 1, T)` to `(B, C, ceil(T / factor))` with the mask of these.

    Example:
        >>> h, _ = Subsampling(4, 8, 4)(torch.zeros(1, 4, 9))
        >>> h.shape
        torch.Size([1, 8, 3])
    """

    kinked = "relu"

    def __init__(self, n_mels: int, channels: int, factor: int):
        super().__init__()
        widths = [n_mels, *[channels] * (factor // 2)]
        self.convolutions = nn.ModuleList(nn.Conv1d(width, channels, 3, stride=2) for width in widths[:-1])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = hide(x, mask)
        for convolution in self.convolutions:
            x = relu(convolution(pad(x, (1, 1))))
            mask = None if mask is None else mask[..., ::2]
            x = hide(x, mask)
        return x, mask

    def extend(self, x: Tensor, before: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same for new frames; `before` are the last input frames of each convolution, None at the beginning."""
        after = []
        for number, convolution in enumerate(self.convolutions):
            last = x.new_zeros(len(x), x.shape[1], 1) if before is None else before[number]
            after.append(x[..., -1:])
            x = relu(convolution(torch.cat([last, pad(x, (0, x.shape[2] % 2))], dim=2)))
        return x, tuple(after)


class ConvolutionModule(nn.Module):
    """The convolution module of a conformer: a gate, a depthwise convolution, and a linear map of the channels.

        y = W_2 silu(norm(depthwise(a * sigmoid(b)))),    (a, b) = W_1 norm(x)

    The second norm is over the channels of each frame and not, as in the source, over the batch, so that neither
    padding nor other items matter.

    Arguments:
        channels: of the sequence.
        kernel_size: length of the filters, odd.
        causal: whether frames depend on no later ones.

    Shapes: `x (B, C, T)` to the same.
    Source: Gulati et al. 2020 (Conformer), section 2.2.

    Example:
        >>> ConvolutionModule(8, 5, causal=False)(torch.zeros(1, 8, 3)).shape
        torch.Size([1, 8, 3])
    """

    def __init__(self, channels: int, kernel_size: int, *, causal: bool):
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"convolution = {kernel_size} must be odd, so that the length stays, or 0 for none")
        side = kernel_size // 2
        self.past, self.future = (2 * side, 0) if causal else (side, side)
        self.norm_1, self.norm_2 = ChannelNorm(channels), ChannelNorm(channels)
        self.enter = nn.Conv1d(channels, 2 * channels, 1)
        self.depthwise = nn.Conv1d(channels, channels, kernel_size, groups=channels)
        self.leave = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        gated = hide(glu(self.enter(self.norm_1(x)), dim=1), mask)
        return self._mixed(pad(gated, (self.past, self.future)))

    def extend(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same, causal, for new frames; `before (B, C, kernel_size - 1)` are gated frames, None for none."""
        gated = glu(self.enter(self.norm_1(x)), dim=1)
        whole = pad(gated, (self.past, 0)) if before is None else torch.cat([before, gated], dim=2)
        return self._mixed(whole), whole[..., whole.shape[2] - self.past :]

    def _mixed(self, gated: Tensor) -> Tensor:
        return self.leave(silu(self.norm_2(self.depthwise(gated))))


class LayerState(NamedTuple):
    """The streaming state of a layer: the attention's cache, and the last frames of the convolution, if any."""

    cache: Cache
    frames: Tensor | None


class ConformerLayer(nn.Module):
    """A conformer layer: attention and a convolution between two feed-forward networks.

        x <- x + F_1(x)/2,    x <- x + attention(norm(x)),    x <- x + convolution(x),    y = norm(x + F_2(x)/2)
        F(x) = W_2 silu(W_1 norm(x))

    The convolution is causal where the attention can be streamed.

    Arguments:
        channels, heads, hidden, dropout, attention: as of `TransformerLayer`.
        convolution: length of the filters, odd.

    Shapes: `x (B, C, T)` to the same, `mask (B, 1, T)` bool, True = valid: the result is zero outside it.
    Errors: ValueError for an even length, heads that do not divide the channels, an unknown attention.
    Source: Gulati et al. 2020 (Conformer), equation 1.

    Example:
        >>> ConformerLayer(8, 2, hidden=16, convolution=3)(torch.randn(1, 8, 5)).shape
        torch.Size([1, 8, 5])
    """

    def __init__(
        self,
        channels: int,
        heads: int = 4,
        *,
        hidden: int = 576,
        convolution: int = 15,
        dropout: float = 0.1,
        attention: AttentionKind = "xl",
    ):
        super().__init__()
        at_least(1, channels=channels, heads=heads, hidden=hidden, convolution=convolution)
        self.attention = make_mechanism(attention, channels, heads, Site(1, None, dropout))
        self.norm = ChannelNorm(channels)
        self.convolution = ConvolutionModule(channels, convolution, causal=streamable(self.attention))
        self.before, self.after = (
            nn.Sequential(ChannelNorm(channels), nn.Conv1d(channels, hidden, 1), nn.SiLU(), Dropout(dropout),
                          nn.Conv1d(hidden, channels, 1), Dropout(dropout))
            for _ in range(2)
        )  # fmt: skip
        self.norm_out, self.dropout = ChannelNorm(channels), Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = hide(x, mask)
        x = x + 0.5 * self.before(x)
        if self.attention is not None:
            y, _ = self.attention(self.norm(x).mT, mask=mask)
            x = x + self.dropout(y.mT)
        x = x + self.dropout(self.convolution(x, mask))
        return hide(self.norm_out(x + 0.5 * self.after(x)), mask)

    def extend(self, x: Tensor, state: LayerState | None) -> tuple[Tensor, LayerState]:
        """The same for new frames of a stream."""
        x = x + 0.5 * self.before(x)
        rows = self.norm(x).mT
        cache, frames = (self.attention.empty_cache(rows), None) if state is None else state
        y, cache = self.attention(rows, cache=cache)
        x = x + y.mT
        y, frames = self.convolution.extend(x, frames)
        x = x + y
        return self.norm_out(x + 0.5 * self.after(x)), LayerState(cache, frames)


def streamable(mechanism: nn.Module | None) -> bool:
    """Whether an attention has no keys after the current chunk.

    Example:
        >>> streamable(Attention(8, 2, chunk=(16, 1))), streamable(Attention(8, 2))
        (True, False)
    """
    return isinstance(mechanism, Attention) and (mechanism.reach.chunk is not None or mechanism.reach.no_future)


class StreamState(NamedTuple):
    """The streaming state of an encoder: the last frames of its subsampling, the states of its layers, and the end.

    After a piece that is not of whole chunks the stream has ended.
    """

    frames: tuple[Tensor, ...]
    layers: tuple[LayerState | Cache, ...]
    ended: bool = False


class SpeechEncoder(nn.Module):
    """An encoder of mel-spectrograms, with one output frame for 2 or 4 input frames.

        h = norm(layer_n(... layer_1(subsampling(x))))

    With attention within chunks (`xl_chunks`: 16 frames of h and the 16 before) `extend` encodes a stream, with the
    same result as for the whole.

    Arguments:
        n_mels: channels of the mel.
        channels: of h.
        depth: number of layers.
        heads: heads of the attention; divides the channels.
        hidden: channels inside the layers' feed-forward networks.
        subsampling: frames of the mel for each of h, 2 or 4. CTC needs a frame of h for each character, two for a
            repeated one.
        convolution: length of the filters of conformer layers, odd; 0 for transformer layers.
        dropout: of the layers.
        attention: entry of `ATTENTION` for sequences.
        checkpointing: recompute the inside of each layer in the backward pass instead of storing it.

    Shapes: `x (B, n_mels, T)` with `mask (B, 1, T)` to `(B, C, ceil(T / subsampling))` with the mask of these; padding
        has no influence.
    Errors: ValueError for another factor; see also the layers.
    Source: transformer layers: Dong et al. 2018 (Speech-Transformer); conformer layers: Gulati et al. 2020; chunks with
        relative positions: Dai et al. 2019 (Transformer-XL).

    Example:
        >>> h, mask = SpeechEncoder(4, channels=8, depth=1, heads=2, hidden=16)(torch.randn(2, 4, 9))
        >>> h.shape
        torch.Size([2, 8, 5])
    """

    def __init__(
        self,
        n_mels: int,
        *,
        channels: int = 144,
        depth: int = 6,
        heads: int = 4,
        hidden: int = 576,
        subsampling: Literal[2, 4] = 2,
        convolution: int = 15,
        dropout: float = 0.1,
        attention: AttentionKind = "xl",
        checkpointing: bool = False,
    ):
        super().__init__()
        at_least(1, n_mels=n_mels, channels=channels, depth=depth)
        if subsampling not in (2, 4):
            raise ValueError(f"subsampling must be 2 or 4, got {subsampling}")
        self.channels, self.subsampling, self.checkpointing = channels, subsampling, checkpointing
        shared = {"hidden": hidden, "dropout": dropout, "attention": attention}
        self.front = Subsampling(n_mels, channels, subsampling)
        self.layers = nn.ModuleList(
            ConformerLayer(channels, heads, convolution=convolution, **shared) if convolution
            else TransformerLayer(channels, heads, kernel_size=1, **shared) for _ in range(depth)
        )
        self.norm = ChannelNorm(channels)

    def frames(self, frames: Tensor) -> Tensor:
        """The number of frames of h, from the number of frames of a mel."""
        return -(-frames // self.subsampling)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        h, mask = self.front(x, mask)
        for layer in self.layers:
            h = run(layer, h, mask, again=self.checkpointing)
        return hide(self.norm(h), mask), mask

    @property
    def chunk(self) -> int | None:
        """The number of mel frames of which streamed chunks are multiples; None if streaming is not possible."""
        first = self.layers[0].attention
        if not streamable(first):
            return None
        return self.subsampling * (1 if first.reach.chunk is None else first.reach.chunk[0])

    def extend(self, x: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState | None]:
        """h of new frames of a mel, and the state for those that follow.

        Arguments:
            x: `(B, n_mels, n)`, n a multiple of `chunk` except at the end; nothing happens for n = 0.
            state: the state after the previous call, None at the beginning.

        Raises:
            ValueError: for an attention that is not streamable, or frames after a piece that was not of whole chunks.
        """
        if self.chunk is None:
            raise ValueError("this attention sees the whole sequence: for streaming use attention = xl_chunks or music")
        if x.shape[2] == 0:
            return x.new_zeros(len(x), self.channels, 0), state
        if state is not None and state.ended:
            raise ValueError(f"only the last piece of a stream may have frames that are not a multiple of {self.chunk}")
        h, frames = self.front.extend(x, None if state is None else state.frames)
        layers = []
        for number, layer in enumerate(self.layers):
            h, after = layer.extend(h, None if state is None else state.layers[number])
            layers.append(after)
        return self.norm(h), StreamState(frames, tuple(layers), x.shape[2] % self.chunk > 0)
