"""Any mechanism of attention as a block of a backbone: normed, over the positions of a map or a sequence, residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
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
    sinusoids,
)
from genmodels.nn.attention.position import Position, Space
from genmodels.nn.blocks import ChannelNorm, GroupNorm, zeroed


class AttentionBlock(nn.Module):
    """A mechanism of attention as a residual branch, silent at the start.

        y = x + mechanism(norm(x)),    W_O of the mechanism = 0 at the start

    A mechanism for maps gets them row by row, with their height and width. One for sequences reads a map column by
    column, place = column H + row: the last axis is time where there is time, so a frame stays in one piece, and what
    is padded at the end of that axis stands at the end of the sequence and moves nothing. What a mechanism draws is
    drawn when it is built: coupling networks must be the same function in both directions, and so in training too.

    Arguments:
        channels: channels of the map.
        mechanism: `(x (B, L, C), mask=(B, 1, L)) -> (y, cache)` with its last layer in `project_out`; one whose
            position is for maps is told `space` too.
        dims: 1 or 2 spatial dimensions; the norm is over groups of channels and all positions of a map, over the
            channels of each position of a sequence.

    Shapes: `x (B, C, *space)` to the same; `mask (B, 1, *1 or space)` bool, True = valid: invalid positions are not
    attended to and pass unchanged.
    Errors: ValueError for a map under a mask with positions that are resampled for the size of the map, since padding
    changes that size.
    Source: Ho et al. 2020, appendix B (the block, around plain attention).

    Example:
        >>> from genmodels.nn.attention import Rotary2d
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
        position = getattr(mechanism, "position", None)
        self.for_maps = getattr(position, "dims", 1) == 2
        self.resampled = isinstance(position, Swin2d)
        self.train()  # modules are in training from the first, without having been told

    def train(self, mode: bool = True) -> AttentionBlock:
        """The mode of training; a mechanism that draws hashes in it stays in that of evaluation."""
        super().train(mode)
        if isinstance(self.mechanism, LSH):
            self.mechanism.eval()
        return self

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and self.resampled:
            raise ValueError("relative biases of maps are resampled for the size of the map, which padding changes: "
                             "with a mask use attention = 'rope2d', 'mel' or 'absolute'")  # fmt: skip
        h = self.norm(x) if mask is None or self.dims == 1 else self.norm(x, mask=mask)
        rows, space = self._rows(h).transpose(1, 2), tuple(x.shape[2:])  # (B, L, C)
        valid = None if mask is None else self._rows(mask.expand(len(x), 1, *space))
        y, _ = self.mechanism(rows, mask=valid, **({"space": space} if self.for_maps else {}))
        y = y.transpose(1, 2)
        if self.dims == 2 and not self.for_maps:
            return x + y.unflatten(2, space[::-1]).transpose(2, 3)
        return x + y.unflatten(2, space)

    def _rows(self, x: Tensor) -> Tensor:
        """The positions in the order of the mechanism, (B, C, L)."""
        return x.flatten(2) if self.dims == 1 or self.for_maps else x.transpose(2, 3).flatten(2)


class AbsoluteAttention(nn.Module):
    """Attention to content and place, where the place is added to the content: no distances.

        y = W_O softmax(q k^T / sqrt(d)) v,    q, k, v of x + W_P [code(row), code(column)]

    The codes are the sinusoids of Vaswani et al., the first half of the channels for the row: they take maps of any
    size, but a map that is shifted is another map.

    Arguments:
        dim: width D of x and y.
        heads: number of heads; divides D.
        dims: 1 or 2 spatial dimensions.

    Shapes: `x (B, L, D)`, row by row in two dimensions, `mask (B, 1, L)` bool, `space` height and width; y like x.
    Errors: ValueError when `heads` does not divide `dim`, for a map without its space.
    Source: Vaswani et al. 2017, section 3.5; one half for each axis as in Parmar et al. 2018, section 3.1.

    Example:
        >>> AbsoluteAttention(8, 2, dims=2)(torch.randn(1, 6, 8), space=(2, 3))[0].shape
        torch.Size([1, 6, 8])
    """

    def __init__(self, dim: int, heads: int, *, dims: int):
        super().__init__()
        self.position = Places(dims)
        self.project_position = nn.Linear(dim, dim, bias=False)
        self.attention = Attention(dim, heads)

    @property
    def project_out(self) -> nn.Linear:
        """W_O."""
        return self.attention.project_out

    def forward(self, x: Tensor, mask: Tensor | None = None, space: Space | None = None) -> tuple[Tensor, None]:
        code = self.position(x.shape[1], x.shape[2], space, x.device)
        return self.attention(x + self.project_position(code.to(x.dtype)), mask=mask)


class Places(nn.Module):
    """Codes of the places of a sequence, or of a map row by row: `(L, D)`.

    Arguments:
        dims: 1 or 2 spatial dimensions.

    Example:
        >>> Places(2)(6, 4, (2, 3), None)[4].float()
        tensor([0.8415, 0.5403, 0.8415, 0.5403])
    """

    def __init__(self, dims: int):
        super().__init__()
        self.dims = dims

    def forward(self, length: int, dim: int, space: Space | None, device) -> Tensor:
        place = torch.arange(length, device=device)
        if self.dims == 1:
            return sinusoids(place, dim)
        if space is None or space[0] * space[1] != length:
            raise ValueError(f"{length} positions need the (height, width) of their map, got space = {space}")
        half = dim // 2
        row, column = torch.div(place, space[1], rounding_mode="floor"), place % space[1]
        return torch.cat([sinusoids(row, half), sinusoids(column, dim - half)], dim=1)


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
