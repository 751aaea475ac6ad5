"""Transformers of patches, the diffusion transformer among them, and a causal one of discrete tokens."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, pad, pixel_shuffle, silu

from genmodels.core.errors import at_least, one_of
from genmodels.core.random import Dropout
from genmodels.core.tensors import hide, wide
from genmodels.nn.attention import Cache, StaticCache
from genmodels.nn.attention_block import AttentionKind, Site, attend, is_for_maps, make_mechanism
from genmodels.nn.blocks import (
    ChannelNorm,
    ConditionEmbedding,
    blocks_to_channels,
    check_channels,
    check_frames,
    run,
    zeroed,
)
from genmodels.nn.transformer import TransformerLayer


def patchify(x: Tensor, patch: int) -> Tensor:
    """`blocks_to_channels` of an event that is padded with zeros to whole patches.

    Shapes: `x (B, C, *space)` to `(B, C patch^dims, *ceil(space / patch))`, one or two spatial dimensions.

    Example:
        >>> patchify(torch.arange(1.0, 6.0).view(1, 1, 5), 2)[0]
        tensor([[1., 3., 5.],
                [2., 4., 0.]])
    """
    return blocks_to_channels(pad(x, [end for n in reversed(x.shape[2:]) for end in (0, -n % patch)]), patch)


def unpatchify(y: Tensor, patch: int, space: tuple[int, ...]) -> Tensor:
    """The inverse of `patchify` for events of that size, without the padding.

    Example:
        >>> x = torch.randn(2, 3, 5, 7)
        >>> torch.equal(unpatchify(patchify(x, 2), 2, (5, 7)), x)
        True
    """
    x = pixel_shuffle(y, patch) if y.dim() == 4 else y.unflatten(1, (-1, patch)).transpose(2, 3).flatten(2)
    return x if tuple(x.shape[2:]) == tuple(space) else x[(..., *map(slice, space))]


class TokenBlock(nn.Module):
    """A transformer block whose norms are modulated, and whose branches are gated, by a condition.

        h = x + g_1 attention((1 + s_1) norm(x) + b_1),    y = h + g_2 mlp((1 + s_2) norm(h) + b_2)
        (s_1, b_1, g_1, s_2, b_2, g_2) = W silu(c) + b,    W = b = 0 at the start (adaLN-zero)

    With a condition the block is the identity at the start. Without one the gates are 1, and each norm has a learned
    scale and shift.

    Arguments:
        width: width D of the tokens.
        mechanism: attention, `(x (B, L, D), mask=(B, 1, L)) -> (y, cache)`, with `space` too if it is for maps; None
            leaves only the perceptron.
        condition: length of c, 0 for none.
        hidden: width of the hidden layer of the perceptron, with GELU (in its tanh form with a condition).
        dropout: probability of dropping a value of either branch.

    Shapes: `x (B, L, D)` to the same, `c (B, condition)`, `mask (B, 1, L)` bool, True = valid: other tokens are not
    attended to.
    Source: Peebles and Xie 2023, section 3.2; without condition Dosovitskiy et al. 2021, equations 2 and 3.

    Example:
        >>> x = torch.randn(2, 5, 8)
        >>> bool((TokenBlock(8, None, condition=4, hidden=16)(x, torch.randn(2, 4)) == x).all())
        True
    """

    def __init__(self, width: int, mechanism: nn.Module | None, *, condition: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.attention = mechanism
        self.norm_1 = None if mechanism is None else TokenNorm(width, condition)
        self.norm_2 = TokenNorm(width, condition)
        self.enter, self.leave = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = Dropout(dropout)
        # As in the papers; on a CPU the exact GELU takes half the time of the tanh form.
        self.activation = nn.GELU(approximate="tanh" if condition else "none")
        for layer in (layer for layer in self.modules() if isinstance(layer, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        self.modulation = zeroed(nn.Linear(condition, 6 * width)) if condition else None

    def forward(
        self, x: Tensor, c: Tensor | None = None, mask: Tensor | None = None, space: tuple[int, int] | None = None
    ) -> Tensor:
        parts = (None,) * 6 if c is None else self.modulation(silu(c))[:, None].chunk(6, dim=-1)
        if self.attention is not None:
            x = self._add(x, parts[2], attend(self.attention, self.norm_1(x, *parts[:2]), mask, space))
        return self._add(x, parts[5], self.leave(self.activation(self.enter(self.norm_2(x, *parts[3:5])))))

    def decode(self, x: Tensor, cache: StaticCache, mask: Tensor | None = None) -> Tensor:
        """The output for new tokens of a causal sequence, of a block without condition; see `Attention.decode`."""
        x = x + self.dropout(self.attention.decode(self.norm_1(x), cache, mask))
        return x + self.dropout(self.leave(self.activation(self.enter(self.norm_2(x)))))

    def _add(self, x: Tensor, gate: Tensor | None, y: Tensor) -> Tensor:
        y = self.dropout(y)
        return x + y if gate is None else torch.addcmul(x, gate.to(x.dtype), y.to(x.dtype))


class TokenNorm(nn.Module):
    """Layer normalisation of each token, with a given 1 + scale and shift, or learned ones without a condition.

    Example:
        >>> TokenNorm(2, condition=1)(torch.tensor([[[1.0, 5.0]]]), torch.ones(1, 1, 2), torch.zeros(1, 1, 2))
        tensor([[[-2.0000,  2.0000]]])
    """

    def __init__(self, width: int, condition: int):
        super().__init__()
        self.width = width
        self.weight = None if condition else nn.Parameter(torch.ones(width))
        self.bias = None if condition else nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        y = layer_norm(x, (self.width,), self.weight, self.bias, 1e-6)
        return y if scale is None else torch.addcmul(shift.to(y.dtype), y, 1 + scale.to(y.dtype))


class TokenTransformer(nn.Module):
    """A linear layer, blocks, and a linear layer that is zero at the start, from tokens to tokens.

        y = W_2 norm(block_n(... block_1(W_1 x + a, c) ..., c), c),    W_2 = 0 at the start

    Arguments:
        in_features, out_features: length of the tokens before and after.
        site: where the attention is used (see `Site`).
        condition: length of c, 0 for none.
        width, depth, heads: width of the blocks, their number, heads of each attention.
        attention: entry of `ATTENTION`.
        expansion: hidden width of the perceptrons over `width`.
        dropout: probability of dropping a value of a branch.
        checkpointing: recompute the blocks in the backward pass instead of storing their activations.

    Shapes: `x (B, L, in)` to `(B, L, out)`, `c (B, condition)`, `mask (B, 1, L)` bool, `space` height and width of a
    map of tokens, `added` broadcastable to `(B, L, width)`.
    Errors: ValueError for numbers below 1, heads that do not divide the width, an unknown attention.
    Source: Peebles and Xie 2023, section 3.2; Dosovitskiy et al. 2021, section 3.1.

    Example:
        >>> TokenTransformer(3, 6, Site(1), width=8, depth=2, heads=2, attention="rope")(torch.randn(2, 5, 3)).shape
        torch.Size([2, 5, 6])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        site: Site,
        condition: int = 0,
        *,
        width: int,
        depth: int,
        heads: int,
        attention: AttentionKind,
        expansion: int = 4,
        dropout: float = 0.0,
        checkpointing: bool = False,
    ):
        super().__init__()
        at_least(1, width=width, depth=depth, heads=heads, expansion=expansion)
        self.checkpointing = checkpointing
        self.enter = nn.Linear(in_features, width)
        self.blocks = nn.ModuleList(
            TokenBlock(width, make_mechanism(attention, width, heads, site), condition=condition,
                       hidden=expansion * width, dropout=dropout)
            for _ in range(depth)
        )  # fmt: skip
        self.norm = TokenNorm(width, condition)
        self.modulation = zeroed(nn.Linear(condition, 2 * width)) if condition else None
        self.leave = zeroed(nn.Linear(width, out_features))

    def forward(
        self, x: Tensor, c: Tensor | None = None, mask: Tensor | None = None, space: tuple[int, int] | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        h = self.enter(x)
        h = h if added is None else h + added
        for block in self.blocks:
            h = run(block, h, c, mask, space, again=self.checkpointing)
        parts = () if c is None else self.modulation(silu(c))[:, None].chunk(2, dim=-1)
        return self.leave(self.norm(h, *parts))

    def static_caches(self, length: int) -> list[StaticCache]:
        """A cache for every block, for `decode`."""
        return [StaticCache(length) for _ in self.blocks]

    def decode(
        self, x: Tensor, caches: list[StaticCache], mask: Tensor | None = None, added: Tensor | None = None
    ) -> Tensor:
        """The output for new tokens of a causal sequence, without condition; see `Attention.decode`."""
        h = self.enter(x)
        h = h if added is None else h + added
        for block, cache in zip(self.blocks, caches, strict=True):
            h = block.decode(h, cache, mask)
        return self.leave(self.norm(h))


class PositionEmbedding(nn.Module):
    """A learned position embedding for each token of a map, zero at the start; larger maps repeat the last row, column.

    With relative positions alone every token of a constant map, such as one of mask tokens, has the same output, so
    that the network could not learn what is typical of a place, such as a black border.

    Arguments:
        width: width of the tokens.
        grid: height and width of the map.

    Shapes: to `(1, width, H, W)` for a map `(H, W)`.

    Example:
        >>> places = PositionEmbedding(2, (1, 2))
        >>> with torch.no_grad(): _ = places.table[0].copy_(torch.tensor([[0.0, 1.0]]))
        >>> places((1, 4))[0, 0].detach()
        tensor([[0., 1., 1., 1.]])
    """

    def __init__(self, width: int, grid: tuple[int, int]):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(width, *grid))

    def forward(self, grid: tuple[int, int]) -> Tensor:
        if grid == tuple(self.table.shape[1:]):
            return self.table[None]
        rows, columns = (torch.arange(n, device=self.table.device).clamp(max=known - 1)
                         for n, known in zip(grid, self.table.shape[1:], strict=True))
        return self.table[None, :, rows[:, None], columns]

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        """Checkpoints of earlier versions have no table, which is the same as zeros."""
        state_dict.setdefault(f"{prefix}table", torch.zeros_like(self.table))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Size(NamedTuple):
    """A published size."""

    depth: int
    width: int
    heads: int


#: Peebles and Xie 2023, table 1; XL in section 4.
SIZES = {"S": Size(12, 384, 6), "B": Size(12, 768, 12), "L": Size(24, 1024, 16), "XL": Size(28, 1152, 16)}
_SMALL = Size(4, 128, 4)


class DiT(nn.Module):
    """The diffusion transformer, with noise level and class as the condition of its blocks.

        y = unpatchify(transformer(patchify(x), c)),    c = W_2 silu(W_1 sinusoids(log SNR)) + class

    Relative positions enter through the attention, by default rotary embeddings: `rope2d` on maps, `rope` along
    sequences; absolute ones of maps as vectors that are added to the tokens. The output is zero at the start, and each
    block the identity. Events are padded to whole patches.

    Arguments:
        event_shape: (C, H, W) or (C, T); other sizes may be given to `forward`, the channels are fixed.
        num_classes: number of classes, None for an unconditional network; `cond=None` stands for the null class.
        double_output: twice the channels in the output, as learned variances need.
        extra_channels: further input channels after the event's own.
        two_times: in place of the log-SNR the network takes the two times of a flow map, (B, 2).
        size: depth, width and heads by their published name; None for a small one of 4, 128 and 4.
        depth: number of blocks; None takes it from `size`, as do the next two.
        width: width of the tokens.
        heads: heads of each attention.
        patch: positions along every side of a patch.
        attention: kind of attention, an entry of `ATTENTION`; None for rope2d or rope.
        places: add a learned vector to each token of a map (`PositionEmbedding`); sequences, of any length, have none.
        expansion: hidden width of the perceptrons over the width of the tokens.
        dropout: probability of dropping a value of a branch, or an attention weight where the kind has dropout.
        checkpointing: recompute the blocks in the backward pass instead of storing their activations.

    Shapes: `x (B, *event)`, `log_snr (B,)`, `cond (B,)` int64 or None, `mask (B, 1, T)` bool, True = valid, or None,
    with T the last axis of the event; the result is like `x`, zero where the mask is False.
    Errors: ValueError for events that are no maps or sequences, unknown sizes, heads that do not divide.
    Source: Peebles and Xie 2023, section 3; rotary positions: Heo et al. 2024.

    Example:
        >>> net = DiT((1, 7, 9), num_classes=3, width=16, depth=2)
        >>> net(torch.randn(2, 1, 7, 9), torch.zeros(2), torch.tensor([0, 2])).shape
        torch.Size([2, 1, 7, 9])
    """

    def __init__(
        self,
        event_shape: tuple[int, ...],
        num_classes: int | None = None,
        double_output: bool = False,
        extra_channels: int = 0,
        two_times: bool = False,
        *,
        size: Literal["S", "B", "L", "XL"] | None = None,
        depth: int | None = None,
        width: int | None = None,
        heads: int | None = None,
        patch: int = 2,
        attention: AttentionKind | None = None,
        places: bool = True,
        expansion: int = 4,
        dropout: float = 0.0,
        checkpointing: bool = False,
    ):
        super().__init__()
        channels, *space = event_shape
        dims = len(space)
        if dims not in (1, 2):
            raise ValueError(f"the DiT takes events (C, T) or (C, H, W), got {tuple(event_shape)}: use the MLP")
        if size is not None:
            one_of("size", size, SIZES)
        published = SIZES.get(size, _SMALL)
        depth, width, heads = (default if given is None else given
                               for default, given in zip(published, (depth, width, heads), strict=True))  # fmt: skip
        at_least(1, patch=patch, depth=depth, width=width, heads=heads)
        self.dims, self.patch, self.in_channels = dims, patch, channels + extra_channels
        self.embedding = ConditionEmbedding(256, width, width, num_classes, two_times)
        grid = None if dims == 1 else tuple(-(-n // patch) for n in space)
        self.transformer = TokenTransformer(
            self.in_channels * patch**dims, channels * (1 + double_output) * patch**dims, Site(dims, grid, dropout),
            width, width=width, depth=depth, heads=heads, attention=attention or ("rope2d" if dims == 2 else "rope"),
            expansion=expansion, dropout=dropout, checkpointing=checkpointing,
        )  # fmt: skip
        self.places = PositionEmbedding(width, grid) if places and grid is not None else None
        # A mechanism for sequences takes a map column by column, so that padded frames are at the end.
        self.by_row = dims == 1 or is_for_maps(self.transformer.blocks[0].attention)

    def forward(self, x: Tensor, log_snr: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        check_channels("the DiT", x, self.in_channels, self.dims)
        if mask is not None:
            check_frames(mask)
        patches = patchify(hide(x, mask), self.patch)
        grid = tuple(patches.shape[2:])
        tokens = self._transposed(patches).flatten(2).transpose(1, 2)
        added = None if self.places is None else self._transposed(self.places(grid)).flatten(2).transpose(1, 2)
        y = self.transformer(tokens, self.embedding(log_snr, cond), self._valid(mask, grid), grid, added)
        y = self._transposed(y.transpose(1, 2).unflatten(2, grid if self.by_row else grid[::-1]))
        return hide(unpatchify(y, self.patch, tuple(x.shape[2:])), mask).to(x.dtype)

    def _transposed(self, x: Tensor) -> Tensor:
        """The map, transposed for mechanisms of sequences; its own inverse."""
        return x if self.by_row else x.transpose(2, 3)

    def _valid(self, mask: Tensor | None, grid: tuple[int, ...]) -> Tensor | None:
        """Tokens with a valid position, (B, 1, L) bool."""
        if mask is None:
            return None
        valid = pad(mask, (0, -mask.shape[2] % self.patch)).unflatten(2, (-1, self.patch)).any(3)
        if self.dims == 1:
            return valid
        return self._transposed(valid[:, :, None].expand(-1, 1, *grid)).flatten(2)


class CausalTransformer(nn.Module):
    """A causal transformer: the log-probabilities of every token given the tokens before it.

        log p(x_i | x_1, ..., x_{i-1}) = log_softmax(W h_{i-1})_{x_i},    h_0, h_1, ... = transformer(start, x_1, ...)

    Arguments:
        levels: V, the number of tokens; token V is the start.
        channels, heads, hidden, dropout: see `TransformerLayer`.
        depth: number of layers.
        attention: one with a causal form: `rope`, `xl`, `shaw`, `music`, `t5`, `alibi` or `plain`.

    Shapes: `tokens (B, L)` int64; the result is `(B, L, V)`.
    Errors: as for `TransformerLayer`.
    Source: Vaswani et al. 2017, section 3; rotary positions: Su et al. 2021.

    Example:
        >>> network = CausalTransformer(5, channels=8, depth=1, heads=2, hidden=16)
        >>> network(torch.zeros(2, 3).long()).exp().sum(-1).shape
        torch.Size([2, 3])
    """

    def __init__(
        self, levels: int, *, channels: int = 192, depth: int = 4, heads: int = 4, hidden: int = 768,
        dropout: float = 0.1, attention: AttentionKind = "rope",
    ):  # fmt: skip
        super().__init__()
        at_least(1, levels=levels, channels=channels, depth=depth)
        self.levels = levels
        self.embedding = nn.Embedding(levels + 1, channels)
        self.layers = nn.ModuleList(
            TransformerLayer(channels, heads, hidden=hidden, kernel_size=1, dropout=dropout, attention=attention,
                             causal=True) for _ in range(depth))
        self.norm, self.head = ChannelNorm(channels), nn.Linear(channels, levels)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(pad(tokens[:, :-1], (1, 0), value=self.levels)).mT
        for layer in self.layers:
            h = layer(h)
        return self._log_probs(h)[:, : tokens.shape[1]]  # without tokens the start token alone has an output

    def extend(self, tokens: Tensor, state: tuple[Cache, ...] | None = None) -> tuple[Tensor, tuple[Cache, ...]]:
        """log p `(B, n, V)` of the token after each of n new ones, and the state for those that follow.

        Arguments:
            tokens: the next tokens `(B, n)`, at the beginning after the start.
            state: the state after the previous call, None at the beginning.
        """
        first = pad(tokens, (1, 0), value=self.levels) if state is None else tokens
        h, after = self.embedding(first).mT, []
        for number, layer in enumerate(self.layers):
            h, cache = layer.extend(h, None if state is None else state[number])
            after.append(cache)
        return self._log_probs(h), tuple(after)

    def _log_probs(self, h: Tensor) -> Tensor:
        return wide(self.head(self.norm(h).mT)).log_softmax(-1)
