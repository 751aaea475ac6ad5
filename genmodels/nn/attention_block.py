"""Any mechanism of attention as a block of a backbone: normed, over the positions of a map or a sequence, residual."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.nn.attention import LSH, Attention, Swin2d, sinusoids
from genmodels.nn.attention.position import Space
from genmodels.nn.blocks import zeroed
from genmodels.nn.channel_norm import ChannelNorm
from genmodels.nn.norm import GroupNorm


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
