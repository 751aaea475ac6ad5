"""Self-attention over the positions of a feature map."""

from __future__ import annotations

from torch import Tensor, nn

from genmodels.nn.norm import GroupNorm


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


#: What `attention=` may be; each entry makes a module `(x, mask) -> like x` for (channels, heads).
ATTENTION = {"none": None, "plain": SpatialAttention}
