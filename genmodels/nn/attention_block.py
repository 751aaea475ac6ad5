"""Attention as a residual block of a network, and the table of all kinds of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from genmodels.core.errors import hint, only_for
from genmodels.core.tensors import hide
from genmodels.nn.attention import (
    LSH,
    Additive,
    ALiBi,
    Attention,
    HardAttention,
    LocalDenseSynthesizer,
    LocalMonotonic,
    Location,
    MelPosition,
    MusicTransformer,
    Nystrom,
    Rotary,
    Rotary2d,
    ScaledDot,
    Score,
    ScoredAttention,
    Shaw,
    Swin2d,
    T5Bias,
    TransformerXL,
    sinusoids,
)
from genmodels.nn.attention.position import Position, Space
from genmodels.nn.blocks import ChannelNorm, GroupNorm, zeroed


class AttentionBlock(nn.Module):
    """A mechanism of attention as a residual branch, zero at the start.

        y = x + mechanism(norm(x)),    W_O of the mechanism = 0 at the start

    A mechanism for maps takes them in row-major order, with their height and width. One for sequences takes a map
    column by column, index = column H + row, since the last axis may be time: then frames stay together, and padded
    ones are at the end of the sequence. Random hashes are drawn at construction, since coupling networks must be the
    same function in both directions.

    Arguments:
        channels: channels of the map.
        mechanism: `(x (B, L, C), mask=(B, 1, L)) -> (y, cache)` with its last layer in `project_out`; one with
            positions of maps takes `space` too.
        dims: 1 or 2 spatial dimensions; a `ChannelNorm` for sequences, a `GroupNorm` for maps.

    Shapes: `x (B, C, *space)` to the same; `mask (B, 1, *1 or space)` bool, True = valid: invalid positions are not
    attended to and pass unchanged.
    Errors: ValueError for a mask with `Swin2d`, whose biases depend on the size of the map, which padding changes.
    Source: Ho et al. 2020, appendix B (the block, around plain attention).

    Example:
        >>> x = torch.randn(2, 8, 3, 5)
        >>> bool((AttentionBlock(8, Attention(8, 2, Rotary2d(8, 2)), dims=2)(x) == x).all())
        True
    """

    def __init__(self, channels: int, mechanism: nn.Module, *, dims: int):
        super().__init__()
        self.dims = dims
        self.norm = GroupNorm(channels) if dims == 2 else ChannelNorm(channels)
        self.mechanism = mechanism
        zeroed(mechanism.project_out)
        self.for_maps = is_for_maps(mechanism)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.dims == 1:
            h = self.norm(hide(x, mask))  # else NaN in the padding gives NaN gradients
        else:
            h = self.norm(x) if mask is None else self.norm(x, mask=mask)
        rows, space = self._rows(h).transpose(1, 2), tuple(x.shape[2:])  # (B, L, C)
        valid = None if mask is None else self._rows(mask.expand(len(x), 1, *space))
        y = attend(self.mechanism, rows, valid, space).transpose(1, 2)
        if self.dims == 2 and not self.for_maps:
            return x + y.unflatten(2, space[::-1]).transpose(2, 3)
        return x + y.unflatten(2, space)

    def _rows(self, x: Tensor) -> Tensor:
        """The positions in the order of the mechanism, (B, C, L)."""
        return x.flatten(2) if self.dims == 1 or self.for_maps else x.transpose(2, 3).flatten(2)


def is_for_maps(mechanism: nn.Module) -> bool:
    """Whether a mechanism takes maps in row-major order, with their height and width; others take sequences."""
    return getattr(getattr(mechanism, "position", mechanism), "dims", 1) == 2


def attend(mechanism: nn.Module, x: Tensor, mask: Tensor | None = None, space: Space | None = None) -> Tensor:
    """The output of a mechanism for `x (B, L, C)`, `mask (B, 1, L)` and, of maps, `space`.

    Errors: ValueError for a mask with `Swin2d`.
    """
    if mask is not None and isinstance(getattr(mechanism, "position", None), Swin2d):
        raise ValueError("relative biases of maps are resampled for the size of the map, which padding changes: "
                         "with a mask use attention = 'rope2d', 'mel' or 'absolute'")  # fmt: skip
    y, _ = mechanism(x, mask=mask, **({"space": space} if is_for_maps(mechanism) else {}))
    return y


class AbsoluteAttention(nn.Module):
    """Attention with absolute positions, which are added to the content.

        y = W_O softmax(q k^T / sqrt(d)) v,    q, k, v of x + W_P [code(row), code(column)]

    The codes are the sinusoids of Vaswani et al., half of the channels for each axis of a map of any size.

    Arguments:
        dim, heads, dropout: see `Attention`.
        dims: 1 or 2 spatial dimensions.

    Shapes: `x (B, L, D)`, row by row in two dimensions, `mask (B, 1, L)` bool, `space` height and width; y like x.
    Errors: ValueError when `heads` does not divide `dim`, or for a map without `space`.
    Source: Vaswani et al. 2017, section 3.5; one half for each axis as in Parmar et al. 2018, section 3.1.

    Example:
        >>> AbsoluteAttention(8, 2, dims=2)(torch.randn(1, 6, 8), space=(2, 3))[0].shape
        torch.Size([1, 6, 8])
    """

    def __init__(self, dim: int, heads: int, *, dims: int, dropout: float = 0.0):
        super().__init__()
        self.dims = dims
        self.project_position = nn.Linear(dim, dim, bias=False)
        self.attention = Attention(dim, heads, dropout=dropout)

    @property
    def project_out(self) -> nn.Linear:
        """W_O."""
        return self.attention.project_out

    def forward(self, x: Tensor, mask: Tensor | None = None, space: Space | None = None) -> tuple[Tensor, None]:
        code = self._code(*x.shape[1:], space, x.device)
        return self.attention(x + self.project_position(code.to(x.dtype)), mask=mask)

    def _code(self, length: int, dim: int, space: Space | None, device) -> Tensor:
        """The sinusoids of the positions, (L, D) float64."""
        place = torch.arange(length, device=device)
        if self.dims == 1:
            return sinusoids(place, dim)
        if space is None or space[0] * space[1] != length:
            raise ValueError(f"{length} positions need the (height, width) of their map, got space = {space}")
        half = dim // 2
        row, column = torch.div(place, space[1], rounding_mode="floor"), place % space[1]
        return torch.cat([sinusoids(row, half), sinusoids(column, dim - half)], dim=1)


class SpatialAttention(nn.Module):
    """Attention of all positions to all others by content, without positions.

        y = x + W_O softmax(q k^T / sqrt(d)) v,   (q, k, v) = W groupnorm(x),   W_O = 0 at the start

    It is equivariant to permutations of the positions, of maps of any size.

    Arguments:
        channels: channels of the map.
        heads: number of heads; must divide the channels.

    Shapes: `x (B, C, *space)` to the same; `mask (B, 1, *1 or space)` bool, True = valid: invalid positions are not
    attended to.
    Errors: ValueError when `heads` does not divide `channels`.
    Source: DDPM (Ho et al. 2020), appendix B.

    Example:
        >>> x = torch.randn(2, 8, 4, 4)
        >>> bool((SpatialAttention(8, 2)(x) == x).all())
        True
    """

    def __init__(self, channels: int, heads: int):
        super().__init__()
        if heads < 1 or channels % heads:
            legal = ", ".join(str(n) for n in range(1, min(channels, 16) + 1) if channels % n == 0)
            raise ValueError(f"heads = {heads} does not divide {channels} channels: use one of {legal}")
        self.heads = heads
        self.norm = GroupNorm(channels)
        # No bias: a bias of the keys has no effect on a softmax, and the norm's bias serves queries and values.
        self.project_in = nn.Linear(channels, 3 * channels, bias=False)
        self.project_out = zeroed(nn.Linear(channels, channels))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, channels, *space = x.shape
        rows = self.norm(x, mask=mask).flatten(2).transpose(1, 2)  # (B, L, C)
        qkv = self.project_in(rows).view(batch, rows.shape[1], 3, self.heads, channels // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, L, d)
        allowed = None
        if mask is not None:
            allowed = mask.expand(batch, 1, *space).reshape(batch, 1, 1, rows.shape[1])
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        y = self.project_out(y.transpose(1, 2).reshape(batch, rows.shape[1], channels))
        return x + y.transpose(1, 2).reshape(x.shape)


#: What `attention=` may be, see `ATTENTION`.
AttentionKind = Literal[
    "none", "plain", "absolute", "swin2d", "rope2d", "mel", "rope", "rope_window", "xl", "xl_chunks", "shaw",
    "shaw_shared", "shaw_zero", "music", "music_shared", "t5", "alibi", "nystrom", "lsh", "local_dense", "additive",
    "location", "location_previous", "scaled_dot", "hard", "local_monotonic"
]  # fmt: skip


class Site(NamedTuple):
    """The context in which an attention is used.

    Attributes:
        dims: 1 or 2 spatial dimensions.
        space: height and width of the maps, None if unknown.
        dropout: probability of dropping a weight, for mechanisms with dropout.
        window: the largest distance with a vector of its own, for the kinds of Shaw; None for their default.
        causal: whether later positions are masked; for the core with positions of sequences.
    """

    dims: int
    space: Space | None = None
    dropout: float = 0.0
    window: int | None = None
    causal: bool = False


class Kind(NamedTuple):
    """A kind of attention: `make(dim, heads, site) -> mechanism`, None for none, and its spatial dimensions."""

    make: Callable[[int, int, Site], nn.Module] | None
    dims: tuple[int, ...] = (1, 2)


def _core(position: Callable[[int, int, Site], Position] | None = None, **reach) -> Callable:
    """A constructor of the core with this position."""

    def make(dim: int, heads: int, site: Site) -> nn.Module:
        chosen = None if position is None else position(dim, heads, site)
        return Attention(dim, heads, chosen, causal=site.causal, dropout=site.dropout, **reach)

    return make


def _scored(score: Callable[[int, int], Score]) -> Callable:
    """A constructor of an attention with this score function."""
    return lambda dim, heads, site: ScoredAttention(dim, heads, score(dim, heads), dropout=site.dropout)


def _shaw(default: int, **options) -> Callable:
    def position(dim: int, heads: int, site: Site) -> Position:
        return Shaw(dim, heads, K=default if site.window is None else site.window, **options)

    return _core(position)


def _mel(dim: int, heads: int, site: Site) -> Position:
    if site.space is None:
        raise ValueError("attention = 'mel' has one bias for each pair of frequency bands, and this network takes maps "
                         "of any height: use rope2d")  # fmt: skip
    return MelPosition(dim, heads, n_freq=site.space[0], time=Rotary(dim, heads))


#: Every kind of attention. All from `rope` on take a map column by column.
#:   none       no attention
#:   plain      content only; equivariant to permutations of the positions
#:   absolute   sinusoids of the position added to the content
#:   swin2d     learned bias by offset on the map (8 x 8 if unknown), resampled for other sizes
#:   rope2d     queries and keys rotated by row and column
#:   mel        learned bias by pair of rows (frequency bands), rotation by column (time)
#:   rope       queries and keys rotated by position
#:   rope_window    the same, over the 16 positions before and after each; linear
#:   xl         sinusoids of the distance
#:   xl_chunks  the same within a chunk of 16 positions and the chunk before it; linear, for streaming
#:   shaw       learned keys and values for distances up to 16, larger ones share the last; `shaw_shared`: one table
#:              for all heads; `shaw_zero`: one table, distances up to 4, larger ones add nothing (Glow-TTS)
#:   music      learned keys for the 512 nearest positions of the past, causal; `music_shared`: one E for all heads
#:   t5         learned bias by bucket of the distance
#:   alibi      penalty linear in the distance, not learned
#:   nystrom    content through 32 landmarks, the means of segments; linear
#:   lsh        content within buckets of similar vectors; hashes are drawn once, at construction
#:   local_dense    weights over 15 neighbours, computed from each position; linear
#:   additive, scaled_dot   scores of a decoder, as self-attention; additive takes a hidden layer for each pair
#:   location   additive, with features of the last and of all earlier weights, sequential; `location_previous`:
#:              without the sum of all earlier weights
#:   hard       the key with the largest score; trained with the gradient of the softmax
#:   local_monotonic    a Gaussian window that every position moves forward
ATTENTION: dict[str, Kind] = {
    "none": Kind(None),
    "plain": Kind(_core()),
    "absolute": Kind(lambda dim, heads, site: AbsoluteAttention(dim, heads, dims=site.dims, dropout=site.dropout)),
    "swin2d": Kind(
        _core(lambda dim, heads, site: Swin2d(dim, heads, size=site.space or (8, 8))), (2,)
    ),
    "rope2d": Kind(_core(lambda dim, heads, site: Rotary2d(dim, heads)), (2,)),
    "mel": Kind(_core(_mel), (2,)),
    "rope": Kind(_core(lambda dim, heads, site: Rotary(dim, heads))),
    "rope_window": Kind(_core(lambda dim, heads, site: Rotary(dim, heads), window=(16, 16))),
    "xl": Kind(_core(lambda dim, heads, site: TransformerXL(dim, heads))),
    "xl_chunks": Kind(_core(lambda dim, heads, site: TransformerXL(dim, heads), chunk=(16, 1))),
    "shaw": Kind(_shaw(16)),
    "shaw_shared": Kind(_shaw(16, shared=True)),
    "shaw_zero": Kind(_shaw(4, outside="zero", shared=True)),
    "music": Kind(_core(lambda dim, heads, site: MusicTransformer(dim, heads))),
    "music_shared": Kind(_core(lambda dim, heads, site: MusicTransformer(dim, heads, shared=True))),
    "t5": Kind(_core(lambda dim, heads, site: T5Bias(dim, heads))),
    "alibi": Kind(_core(lambda dim, heads, site: ALiBi(dim, heads))),
    "nystrom": Kind(lambda dim, heads, site: Nystrom(dim, heads, landmarks=32)),
    "lsh": Kind(lambda dim, heads, site: LSH(dim, heads, buckets=8, chunk=32, redraw=False, dropout=site.dropout)),
    "local_dense": Kind(lambda dim, heads, site: LocalDenseSynthesizer(dim, heads, c=15, dropout=site.dropout)),
    "additive": Kind(_scored(Additive)),
    "location": Kind(_scored(Location)),
    "location_previous": Kind(_scored(lambda dim, heads: Location(dim, heads, cumulative=False))),
    "scaled_dot": Kind(_scored(ScaledDot)),
    "hard": Kind(lambda dim, heads, site: HardAttention(dim, heads)),
    "local_monotonic": Kind(lambda dim, heads, site: LocalMonotonic(dim, heads, max_step=2.0)),
}


#: The kinds with a causal form.
CAUSAL = ("rope", "xl", "shaw", "shaw_shared", "shaw_zero", "music", "music_shared", "t5", "alibi", "plain")


def check_kind(attention: str, dims: int) -> None:
    """Raise ValueError for an unknown kind of attention, or one for other spatial dimensions."""
    legal = [name for name, kind in ATTENTION.items() if kind.make is None or dims in kind.dims]
    if attention not in legal:
        where = " for sequences" if dims == 1 and attention in ATTENTION else ""
        raise ValueError(f"attention = {attention!r} is not one of {', '.join(legal)}{where}"
                         f"{hint(attention, legal, ';')}")


def check_heads(attention: str | None, heads: int | None, default: int | None) -> None:
    """Raise ValueError if the number of heads was changed from its default although there is no attention."""
    if attention == "none":
        only_for("an attention block", heads=(heads, default))


def make_mechanism(attention: str, dim: int, heads: int, site: Site) -> nn.Module | None:
    """The mechanism of a kind of `ATTENTION`, `(x (B, L, dim), mask=(B, 1, L)) -> (y, cache)`; None for none.

    Errors: ValueError for an unknown kind, one for other spatial dimensions, or heads that do not divide `dim`.
    """
    if site.causal and attention not in CAUSAL:
        raise ValueError(f"attention = {attention!r} has no causal form: use {', '.join(CAUSAL)}")
    check_kind(attention, site.dims)
    make = ATTENTION[attention].make
    return None if make is None else make(dim, heads, site)


def make_attention(
    attention: str, channels: int, heads: int, *, dims: int, space: tuple[int, ...] | None = None
) -> nn.Module | None:
    """A residual block of a kind of `ATTENTION`, `(x, mask) -> like x`; None for none.

    Arguments:
        attention: name of the kind.
        channels: channels of the map.
        heads: heads of the attention.
        dims: 1 or 2 spatial dimensions.
        space: size of the maps, None if unknown; every block but `mel` takes other sizes too.

    Errors: as of `make_mechanism`.

    Example:
        >>> make_attention("swin2d", 8, 2, dims=2, space=(4, 4))(torch.randn(1, 8, 5, 3)).shape
        torch.Size([1, 8, 5, 3])
    """
    if attention == "plain":  # one product for queries, keys and values, without biases
        return SpatialAttention(channels, heads)
    mechanism = make_mechanism(attention, channels, heads, Site(dims, space if dims == 2 else None))
    return None if mechanism is None else AttentionBlock(channels, mechanism, dims=dims)
