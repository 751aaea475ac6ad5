"""Self-attention over the positions of a feature map: the plain block, and all kinds of block by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor, nn

from genmodels.nn.attention import (
    LSH,
    Attention,
    LocalDenseSynthesizer,
    MelPosition,
    Nystrom,
    Rotary,
    Rotary2d,
    Swin2d,
    TransformerXL,
)
from genmodels.nn.attention.position import Position, Space
from genmodels.nn.attention_block import AbsoluteAttention, AttentionBlock
from genmodels.nn.norm import GroupNorm

#: What `attention=` may be, see `ATTENTION`.
AttentionKind = Literal[
    "none", "plain", "absolute", "swin2d", "rope2d", "mel", "rope", "xl", "nystrom", "lsh", "local_dense"
]


class SpatialAttention(nn.Module):
    """Every position attends to every other one; content only, no positions.

        y = x + W_O softmax(q k^T / sqrt(d)) v,   (q, k, v) = W groupnorm(x),   W_O = 0 at the start

    Without positions the map is equivariant to any permutation of them, so it takes maps of any size.

    Arguments:
        channels: channels of the map.
        heads: number of heads; must divide the channels.

    Shapes: `x (B, C, *space)` to the same; `mask (B, 1, *1 or space)` bool, True = valid: invalid positions are not
    attended to. Errors: ValueError when `heads` does not divide `channels`.
    Source: DDPM (Ho et al. 2020), appendix B.

    Example:
        >>> import torch
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
        # No bias: a bias of the keys has no effect on a softmax, and the norm before already offers the other two.
        self.project_in = nn.Linear(channels, 3 * channels, bias=False)
        self.project_out = nn.Linear(channels, channels)
        nn.init.zeros_(self.project_out.weight)
        nn.init.zeros_(self.project_out.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, channels, *space = x.shape
        rows = self.norm(x, mask=mask).flatten(2).transpose(1, 2)  # (B, L, C)
        qkv = self.project_in(rows).view(batch, -1, 3, self.heads, channels // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, L, d)
        allowed = None
        if mask is not None:
            allowed = mask.expand(batch, 1, *space).reshape(batch, 1, 1, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        y = self.project_out(y.transpose(1, 2).reshape(batch, -1, channels))
        return x + y.transpose(1, 2).reshape(x.shape)


class Kind(NamedTuple):
    """A kind of attention block: what makes it, and the numbers of spatial dimensions it is for.

    make: `make(channels, heads, dims, space) -> module (x, mask) -> like x`, None for no block; space is the size of
    the maps as far as it is known beforehand, else None.
    """

    make: Callable[[int, int, int, Space | None], nn.Module] | None
    dims: tuple[int, ...] = (1, 2)


def _plain(channels: int, heads: int, dims: int, space: Space | None) -> nn.Module:
    return SpatialAttention(channels, heads)


def _absolute(channels: int, heads: int, dims: int, space: Space | None) -> nn.Module:
    return AttentionBlock(channels, AbsoluteAttention(channels, heads, dims=dims), dims=dims)


def _with(position: Callable[[int, int, Space | None], Position]) -> Callable:
    """The maker of a block around the core with such a position."""

    def make(channels: int, heads: int, dims: int, space: Space | None) -> nn.Module:
        return AttentionBlock(channels, Attention(channels, heads, position(channels, heads, space)), dims=dims)

    return make


def _beside(mechanism: Callable[[int, int], nn.Module]) -> Callable:
    """The maker of a block around a mechanism that stands beside the core."""

    def make(channels: int, heads: int, dims: int, space: Space | None) -> nn.Module:
        return AttentionBlock(channels, mechanism(channels, heads), dims=dims)

    return make


def _swin(channels: int, heads: int, space: Space | None) -> Position:
    # Where the size is not known beforehand, a table for small maps: others get it resampled.
    return Swin2d(channels, heads, size=space or (8, 8))


def _mel(channels: int, heads: int, space: Space | None) -> Position:
    if space is None:
        raise ValueError("attention = 'mel' has one bias for each pair of frequency bands, and a network for maps of "
                         "any height does not know how many: use rope2d")  # fmt: skip
    return MelPosition(channels, heads, n_freq=space[0], time=Rotary(channels, heads))


#: Every kind of attention block. Of a map, all from `rope` on read the positions column by column.
#:   none       no block
#:   plain      content alone; on sequences and maps of any size, equivariant to permutations
#:   absolute   sinusoids of the place added to the content
#:   swin2d     learned bias by offset on the map, resampled for other sizes than the first
#:   rope2d     queries and keys turned by row and column
#:   mel        rows are frequency bands, absolute; columns are time, turned
#:   rope       queries and keys turned by place
#:   xl         sinusoids of the distance
#:   nystrom    content through 32 landmarks, means of stretches; linear in the number of positions
#:   lsh        content within buckets of similar vectors; hashes are drawn once, when the network is built
#:   local_dense    weights over 15 neighbours that each position makes up by itself; linear
ATTENTION: dict[str, Kind] = {
    "none": Kind(None),
    "plain": Kind(_plain),
    "absolute": Kind(_absolute),
    "swin2d": Kind(_with(_swin), (2,)),
    "rope2d": Kind(_with(lambda channels, heads, space: Rotary2d(channels, heads)), (2,)),
    "mel": Kind(_with(_mel), (2,)),
    "rope": Kind(_with(lambda channels, heads, space: Rotary(channels, heads))),
    "xl": Kind(_with(lambda channels, heads, space: TransformerXL(channels, heads))),
    "nystrom": Kind(_beside(lambda channels, heads: Nystrom(channels, heads, landmarks=32))),
    "lsh": Kind(_beside(lambda channels, heads: LSH(channels, heads, buckets=8, chunk=32))),
    "local_dense": Kind(_beside(lambda channels, heads: LocalDenseSynthesizer(channels, heads, c=15))),
}


def check_kind(attention: str, dims: int) -> None:
    """Raise ValueError for a kind of attention that does not exist, or is not for that many dimensions."""
    legal = [name for name, kind in ATTENTION.items() if kind.make is None or dims in kind.dims]
    if attention not in legal:
        where = " for sequences" if dims == 1 and attention in ATTENTION else ""
        raise ValueError(f"attention = {attention!r} is not one of {', '.join(legal)}{where}")


def make_attention(
    attention: str, channels: int, heads: int, *, dims: int, space: tuple[int, ...] | None = None
) -> nn.Module | None:
    """A block of a kind of `ATTENTION`, `(x, mask) -> like x`; None for none.

    Arguments:
        attention: name of the kind.
        channels: channels of the map.
        heads: heads of the attention.
        dims: 1 or 2 spatial dimensions.
        space: size of the maps as far as it is known; every block but `mel` takes other sizes too.

    Errors: ValueError for a kind that does not exist or is not for that many dimensions, heads that do not divide.

    Example:
        >>> import torch
        >>> make_attention("swin2d", 8, 2, dims=2, space=(4, 4))(torch.randn(1, 8, 5, 3)).shape
        torch.Size([1, 8, 5, 3])
    """
    check_kind(attention, dims)
    make = ATTENTION[attention].make
    return None if make is None else make(channels, heads, dims, space if dims == 2 else None)
