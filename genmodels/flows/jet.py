"""Jet: couplings of tokens whose networks are vision transformers."""

from __future__ import annotations

import math
from itertools import cycle
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from genmodels.flows.bijection import Bijection, Shape, as_shape
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling, TokenSplit
from genmodels.flows.elementwise import ElementTransform
from genmodels.flows.linear import Permute
from genmodels.flows.multiscale import FactorOut, MultiScale
from genmodels.flows.scaling import ActNorm
from genmodels.flows.squeeze import Squeeze2d
from genmodels.nn.attention_block import AttentionKind, Site, is_for_maps
from genmodels.nn.condition import Condition
from genmodels.nn.dit import TokenTransformer


class ShiftScale(ElementTransform):
    """A shift, then a scale below 2.

        z = (x + t) a,    log |dz/dx| = log a,    a = 2 sigmoid(s)

    Shapes: `params (B, 2, C, *space)`, s before t.
    Source: Kolesnikov et al. 2024 (Jet), section 3.1.

    Example:
        >>> ShiftScale()(torch.ones(1, 1), torch.tensor([[[0.0], [2.0]]]))
        (tensor([[3.]]), tensor([[0.]]))
    """

    params_per_dim = 2

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        s, t = params.unbind(1)
        return (x + t) * (2 * torch.sigmoid(s)), math.log(2) + logsigmoid(s)

    def inverse(self, z: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        s, t = params.unbind(1)
        return z * (0.5 + 0.5 * torch.exp(-s)) - t, -math.log(2) - logsigmoid(s)


class TokenNet(nn.Module):
    """A vision transformer from map to map of the same size, every position a token, for couplings.

    Arguments:
        in_channels, out_channels: channels before and after.
        width, depth, heads, expansion, attention: see `TokenTransformer`.
        space: height and width of the maps as far as they are known.
        cond: labels, or None: a vector of the class is added to every token.

    Shapes: `x (B, in, H, W)` to `(B, out, H, W)`, zero at the start; `cond (B,)` labels.
    Errors: ValueError for a condition that is no label, or missing, or not expected.

    Example:
        >>> TokenNet(3, 6, width=8, depth=1, heads=2)(torch.randn(2, 3, 4, 5)).shape
        torch.Size([2, 6, 4, 5])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        width: int,
        depth: int,
        heads: int,
        expansion: int = 4,
        attention: AttentionKind = "rope2d",
        space: tuple[int, int] | None = None,
        cond: Condition | None = None,
    ):
        super().__init__()
        if cond is not None and cond.kind != "labels":
            raise ValueError(f"the networks of Jet are conditioned on labels, not on {cond}")
        self.in_channels, self.out_channels, self.uses_cond = in_channels, out_channels, cond is not None
        self.transformer = TokenTransformer(in_channels, out_channels, Site(2, space), width=width, depth=depth,
                                            heads=heads, expansion=expansion, attention=attention)
        self.by_row = is_for_maps(self.transformer.blocks[0].attention)
        self.classes = nn.Embedding(cond.size, width) if self.uses_cond else None

    def set_output_bias(self, bias: Tensor) -> None:
        """What the network answers at the start, (out,)."""
        with torch.no_grad():
            self.transformer.leave.bias.copy_(bias)

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if (cond is not None) != self.uses_cond:
            raise ValueError("this network needs cond: labels" if self.uses_cond else
                             "this network was built without a condition: leave cond out")  # fmt: skip
        if mask is not None:
            raise ValueError("the networks of Jet are for images, which have no mask")
        space = tuple(x.shape[2:])
        tokens = (x if self.by_row else x.mT).flatten(2).mT
        added = None if cond is None else self.classes(cond)[:, None]
        y = self.transformer(tokens, space=space, added=added).mT
        return y.unflatten(2, space) if self.by_row else y.unflatten(2, space[::-1]).mT


def jet(
    event_shape: Shape,
    *,
    patch: int = 2,
    couplings: int = 16,
    spatial: int = 2,
    levels: int = 1,
    width: int = 128,
    depth: int = 2,
    heads: int = 4,
    expansion: int = 4,
    attention: AttentionKind = "rope2d",
    cond: Condition | None = None,
    memory: Literal["store", "inverse"] = "store",
    generator: torch.Generator | None = None,
) -> Bijection:
    """Jet: patches, then couplings of their channels, permuted at random once, and of their positions.

    Arguments:
        event_shape: (C, H, W).
        patch: positions along every side of a patch.
        couplings: number of couplings of each level.
        spatial: every how many-th coupling is one of positions: rows, columns and squares in turn, of those that the
            number of patches can be halved by; 0 for none.
        levels: number of scales; after each but the last half of the channels leave, and the rest is squeezed by 2.
        width, depth, heads, expansion, attention: see `TokenTransformer`.
        cond: labels, or None.
        memory: `store`, or `inverse` to recompute activations in the backward pass.
        generator: source of the permutations.

    Errors: ValueError for events that are no images, sides that the patches do not divide, a single channel.
    Source: Kolesnikov et al. 2024, "Jet: a modern transformer-based normalizing flow", section 3.

    Example:
        >>> flow = jet((1, 8, 8), couplings=4, width=8, depth=1, heads=2)
        >>> flow.initialize(torch.randn(9, 1, 8, 8))
        >>> flow(torch.randn(3, 1, 8, 8))[0].shape
        torch.Size([3, 64])
    """
    shape = as_shape(event_shape)
    if len(shape) != 3:
        raise ValueError(f"jet takes images (C, H, W), not events of shape {shape}: use model=realnvp for vectors and "
                         "model=glow for sequences")  # fmt: skip
    fits = min(couplings, levels, patch, spatial + 1) >= 1
    if not fits or any(n % (patch * 2 ** (levels - 1)) for n in shape[1:]):
        raise ValueError(f"jet needs at least one coupling and one level, and patches that divide the sides of {shape}"
                         f" at every level, got couplings = {couplings}, levels = {levels}, spatial = {spatial}, "
                         f"patch = {patch}")  # fmt: skip
    stages, factors = [], []
    for level in range(levels):
        squeeze = Squeeze2d(patch if level == 0 else 2)
        channels, *space = squeeze.out_shape(shape)
        kinds = [kind for kind, side in zip(("rows", "columns", "checkerboard"), (0, 1, 1), strict=True)
                 if space[side] % 2 == 0]  # fmt: skip
        turns = cycle([(kind, parity) for kind in kinds for parity in (0, 1)]) if kinds else None
        layers: list[Bijection] = [squeeze, ActNorm(channels)]
        for number in range(couplings):
            if turns is not None and spatial and number % spatial == spatial - 1:
                kind, parity = next(turns)
                split: ChannelSplit | TokenSplit = TokenSplit(channels, kind, parity=parity)
                seen = tuple(split.take(torch.empty(1, 1, *space))[0].shape[2:])
            else:
                split, seen = ChannelSplit(channels), tuple(space)
                layers.append(Permute.random(channels, generator=generator))
            net = TokenNet(split.kept, 2 * split.changed, width=width, depth=depth, heads=heads, expansion=expansion,
                           attention=attention, space=seen, cond=cond)
            layers.append(Coupling(split, ShiftScale(), net))
        stages.append(Compose(layers, shape, memory=memory))
        shape = (channels, *space)
        if level + 1 < levels:
            factors.append(FactorOut(channels))
            shape = (channels - channels // 2, *space)
    return MultiScale(stages, factors, as_shape(event_shape))
