"""RealNVP and Jet: flows of couplings, whose networks are convolutional or vision transformers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from genmodels.core.errors import at_least, one_of, only_for
from genmodels.flows.bijection import Bijection, Shape, as_shape
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Checkerboard, TokenSplit, couple
from genmodels.flows.dequantize import noise_condition
from genmodels.flows.elementwise import Affine, ElementTransform, ScaleKind
from genmodels.flows.linear import Permute
from genmodels.flows.multiscale import FactorOut, MultiScale
from genmodels.flows.scaling import ActNorm
from genmodels.flows.squeeze import Squeeze2d, require_division
from genmodels.nn.attention_block import AttentionKind, Site, check_heads, is_for_maps
from genmodels.nn.condition import Condition, require_condition
from genmodels.nn.coupling_networks import GatedConvNet, ResidualConvNet
from genmodels.nn.dit import PositionEmbedding, TokenTransformer
from genmodels.nn.perceptron import MLP

NETS = {"residual": ResidualConvNet, "gated": GatedConvNet}
#: The paper's two scales; `split` sends half of the channels to the latents.
LAYOUT = ("checkerboard*3", "squeeze", "channel*3", "split", "checkerboard*4")


def realnvp_vector(
    features: int,
    *,
    couplings: int = 8,
    hidden: int = 256,
    depth: int = 2,
    scale: ScaleKind = "tanh",
    dropout: float = 0.0,
    cond: Condition | None = None,
    memory: Literal["store", "inverse"] = "store",
) -> Compose:
    """RealNVP for vectors: affine couplings that change the second and the first half in turn.

    Arguments:
        features: dimension D of the vectors, at least 2; the first half has ceil(D/2).
        couplings: number of couplings.
        hidden: width of the networks.
        depth: hidden layers of the networks.
        scale: form of the couplings' scale (see `Affine`).
        dropout: probability of dropping a hidden value.
        cond: what the networks are conditioned on.
        memory: `store`, or `inverse` to recompute activations in the backward pass.

    Source: Dinh, Sohl-Dickstein, Bengio 2017, "Density estimation using Real NVP".

    Example:
        >>> sum(p.numel() for p in realnvp_vector(64).parameters())
        726016
    """
    if features < 2:
        raise ValueError(f"couplings need at least 2 dimensions, got {features}: model=nsf model.kind=autoregressive "
                         "takes a single one")
    at_least(1, couplings=couplings)
    net = partial(MLP, hidden=hidden, depth=depth, dropout=dropout, cond=cond)
    splits = [ChannelSplit(features, swap=number % 2 == 1) for number in range(couplings)]
    layers = [couple(split, Affine(split.changed, scale=scale), net) for split in splits]
    return Compose(layers, (features,), memory=memory)


def _alternating(kind: str, channels: int, number: int) -> Checkerboard | ChannelSplit:
    """The split of coupling `number`: every other one keeps what the one before changes."""
    if kind == "checkerboard":
        return Checkerboard(channels, parity=number % 2)
    return ChannelSplit(channels, swap=number % 2 == 1)


def dequantisation_flow(event_shape: Shape, *, couplings: int = 4, hidden: int = 16, depth: int = 3) -> Compose:
    """The flow from Gaussian noise to the logit of the dequantisation noise, conditioned on the item.

    Arguments:
        event_shape: shape of one example; the networks are gated convolutional ones, or an MLP for vectors.
        couplings: number of couplings.
        hidden: width of the networks.
        depth: blocks of the networks.

    Source: Ho et al. 2019, "Flow++", section 3.1.

    Example:
        >>> g = dequantisation_flow((1, 4, 4))
        >>> g(torch.randn(2, 1, 4, 4), torch.rand(2, 1, 4, 4))[0].shape
        torch.Size([2, 1, 4, 4])
    """
    at_least(1, couplings=couplings)
    channels, dims = event_shape[0], len(event_shape) - 1
    if dims < 2 and channels < 2:
        raise ValueError("variational noise needs at least two columns or channels: give dequantisation=level")
    cond = noise_condition(event_shape)
    net = partial(GatedConvNet, dims=dims) if dims else MLP
    net = partial(net, hidden=hidden, depth=depth, cond=cond)
    kind = "checkerboard" if dims == 2 else "channel"
    splits = [_alternating(kind, channels, number) for number in range(couplings)]
    return Compose([couple(split, Affine(split.changed, scale="tied"), net) for split in splits], event_shape)


def realnvp_image(
    event_shape: Shape,
    *,
    layout: Sequence[str] = LAYOUT,
    hidden: int | Sequence[int] = 64,
    depth: int = 8,
    net: Literal["residual", "gated"] = "residual",
    scale: ScaleKind = "tanh",
    actnorm: bool = True,
    dropout: float = 0.0,
    cond: Condition | None = None,
    attention: AttentionKind = "none",
    heads: int = 4,
    memory: Literal["store", "inverse"] = "store",
) -> MultiScale:
    """RealNVP for images: checkerboard couplings, a squeeze, channel couplings, half of the channels factored out.

    Arguments:
        event_shape: (C, H, W).
        layout: the parts in order: `checkerboard*n` and `channel*n` for n couplings, `squeeze`, `split`.
        hidden: width of the networks, one for all or one for each group of couplings.
        depth: residual blocks of the networks.
        net: kind of coupling network.
        scale: form of the couplings' scale (see `Affine`).
        actnorm: whether an `ActNorm` follows every coupling, in place of the paper's batch normalisation.
        dropout: probability of dropping a hidden value, for residual networks.
        cond: what the networks are conditioned on.
        attention: attention block in the coupling networks, `none` for none.
        heads: heads of that block.
        memory: `store`, or `inverse` to recompute activations in the backward pass.

    Errors: ValueError for a part that does not exist, widths that do not match the groups, or dropout in gated
    networks, which have none.
    Source: Dinh, Sohl-Dickstein, Bengio 2017, section 3.6.

    Example:
        >>> flow = realnvp_image((3, 8, 8), hidden=8, depth=1)
        >>> flow(torch.randn(2, 3, 8, 8))[0].shape
        torch.Size([2, 192])
    """
    event_shape = as_shape(event_shape)
    one_of("net", net, NETS)
    check_heads(attention, heads, 4)
    if isinstance(layout, str) or not all(isinstance(part, str) for part in layout):
        raise ValueError(f"layout is a list of parts such as [checkerboard*4], got {layout!r}")
    if net != "residual":
        only_for(f"residual networks, and net is {net}", dropout=(dropout, 0.0))
    groups = sum("*" in part for part in layout)
    if groups == 0:
        raise ValueError(f"layout holds no couplings: {list(layout)}; add checkerboard*n or channel*n")
    widths = [hidden] * groups if isinstance(hidden, int) else list(hidden)
    if len(widths) != groups:
        raise ValueError(f"hidden has {len(widths)} widths, but the layout {groups} groups of couplings")

    def couplings(kind: str, count: int, channels: int, width: int) -> list[Bijection]:
        layers: list[Bijection] = []
        network = partial(NETS[net], hidden=width, depth=depth, cond=cond, attention=attention, heads=heads,
                          **({"dropout": dropout} if net == "residual" else {}))  # fmt: skip
        for number in range(count):
            split = _alternating(kind, channels, number)
            layers.append(couple(split, Affine(split.changed, scale=scale), network))
            layers += [ActNorm(channels)] if actnorm else []
        return layers

    stages, factors, layers = [], [], []
    shape = start = event_shape
    for part in layout:
        found = re.fullmatch(r"(checkerboard|channel)\*([1-9]\d*)", part)
        if (part == "split" and shape[0] % 2) or (found and found[1] == "channel" and shape[0] < 2):
            needs = "an even number of channels" if part == "split" else "at least two channels"
            raise ValueError(f"layout: {part} needs {needs}, the image has {shape[0]} there: put squeeze before it")
        if found:
            layers += couplings(found[1], int(found[2]), shape[0], widths.pop(0))
        elif part == "squeeze":
            if any(n is not None and n % 2 for n in shape[1:]):
                raise ValueError(f"layout: squeeze halves the sides, but the image is {shape} there: leave it out, for "
                                 "example model.layout=[checkerboard*4], or pad the images to even sides")
            layers.append(Squeeze2d(order="alternative"))
            shape = layers[-1].out_shape(shape)
            cond = None if cond is None else cond.squeezed()
        elif part == "split":
            stages.append(Compose(layers, start, memory=memory))
            factors.append(FactorOut(shape[0]))
            shape = start = (shape[0] - shape[0] // 2, *shape[1:])
            layers = []
        else:
            raise ValueError(f"layout: {part!r} is none of checkerboard*n, channel*n, squeeze, split")
    stages.append(Compose(layers, start, memory=memory))
    return MultiScale(stages, factors, event_shape)


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
        # exp(-s) alone would overflow below s = -88 in float32, and give NaN where z = 0, which is x = -t for any s.
        half = torch.exp((-0.5 * s).clamp(max=math.log(torch.finfo(s.dtype).max) - 1))
        return 0.5 * (z + z * half * half) - t, -math.log(2) - logsigmoid(s)


class TokenNet(nn.Module):
    """A vision transformer from map to map of the same size, with a token for every position, for couplings.

    Arguments:
        in_channels, out_channels: channels before and after.
        width, depth, heads, expansion, attention: see `TokenTransformer`.
        space: height and width of the maps, None where they vary.
        places: add a learned vector to each token of maps of known size (`PositionEmbedding`).
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
        places: bool = True,
        cond: Condition | None = None,
    ):
        super().__init__()
        require_condition(cond)
        if cond is not None and cond.kind != "labels":
            raise ValueError(f"the networks of Jet are conditioned on labels, not on {cond}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.condition, self.uses_cond = cond, cond is not None
        self.transformer = TokenTransformer(in_channels, out_channels, Site(2, space), width=width, depth=depth,
                                            heads=heads, expansion=expansion, attention=attention)
        self.by_row = is_for_maps(self.transformer.blocks[0].attention)
        self.places = PositionEmbedding(width, space) if places and space is not None else None
        self.num_classes = cond.size if self.uses_cond else None
        self.classes = nn.Embedding(cond.size, width) if self.uses_cond else None

    def set_output_bias(self, bias: Tensor) -> None:
        """Set the initial output, (out,)."""
        with torch.no_grad():
            self.transformer.leave.bias.copy_(bias)

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if self.uses_cond:
            self.condition.require(cond, x)
        elif cond is not None:
            raise ValueError("this network was built without a condition: leave cond out")
        if mask is not None:
            raise ValueError("the networks of Jet are for images, which have no mask")
        space = tuple(x.shape[2:])
        added = None if self.places is None else self._tokens(self.places(space))
        if cond is not None:
            added = self.classes(cond)[:, None] + (0 if added is None else added)
        tokens = self._tokens(x)
        y = self.transformer(tokens, space=space, added=added).mT
        return y.unflatten(2, space) if self.by_row else y.unflatten(2, space[::-1]).mT

    def _tokens(self, x: Tensor) -> Tensor:
        return (x if self.by_row else x.mT).flatten(2).mT


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
    places: bool = True,
    cond: Condition | None = None,
    memory: Literal["store", "inverse"] = "store",
    generator: torch.Generator | None = None,
) -> Bijection:
    """Jet: couplings of the randomly permuted channels of patches, and of their positions.

    Arguments:
        event_shape: (C, H, W).
        patch: positions along every side of a patch.
        couplings: number of couplings of each level.
        spatial: every `spatial`-th coupling splits positions: by rows, columns and squares in turn, where the number of
            patches along that side is even; 0 for none.
        levels: number of scales; after each but the last, half of the channels is factored out.
        width, depth, heads, expansion, attention: see `TokenTransformer`.
        places: add a learned vector to each token, so that the networks know where it is.
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
    at_least(1, couplings=couplings, levels=levels, patch=patch)
    at_least(0, spatial=spatial)
    require_division(patch, shape)
    if any(n % (patch * 2 ** (levels - 1)) for n in shape[1:]):
        raise ValueError(f"levels={levels} cannot halve {shape[1] // patch} x {shape[2] // patch} patches that often: "
                         f"give fewer levels, or patches smaller than patch={patch}")
    if shape[0] * patch**2 < 2:
        raise ValueError("patch=1 leaves one channel, and a coupling needs two: give a larger patch that divides both "
                         f"sides of {shape[1]} x {shape[2]}, or model=tarflow")
    if levels > 1 and shape[0] * patch**2 % 2:
        raise ValueError(f"levels={levels} needs an even number of channels to factor out half of them, and patch="
                         f"{patch} has {shape[0] * patch**2}: give levels=1 or patch=2")
    stages, factors, spatial_couplings = [], [], 0
    for level in range(levels):
        squeeze = Squeeze2d(patch if level == 0 else 2)
        channels, *space = squeeze.out_shape(shape)
        kinds = [kind for kind, side in zip(("rows", "columns", "checkerboard"), (0, 1, 1), strict=True)
                 if space[side] % 2 == 0]  # fmt: skip
        spatial_splits = cycle([(kind, parity) for kind in kinds for parity in (0, 1)]) if kinds else None
        layers: list[Bijection] = [squeeze, ActNorm(channels)]
        for number in range(couplings):
            if spatial_splits is not None and spatial and number % spatial == spatial - 1:
                kind, parity = next(spatial_splits)
                spatial_couplings += 1
                split: ChannelSplit | TokenSplit = TokenSplit(channels, kind, parity=parity)
                net_space = tuple(split.take(torch.empty(1, 1, *space))[0].shape[2:])
            else:
                split, net_space = ChannelSplit(channels), tuple(space)
                layers.append(Permute.random(channels, generator=generator))
            net = partial(TokenNet, width=width, depth=depth, heads=heads, expansion=expansion, attention=attention,
                          space=net_space, places=places, cond=cond)  # fmt: skip
            layers.append(couple(split, ShiftScale(), net))
        stages.append(Compose(layers, shape, memory=memory))
        if level + 1 < levels:
            factors.append(FactorOut(channels))
            shape = (channels - channels // 2, *space)
    if spatial and not spatial_couplings:
        why = (f"there are only {couplings} couplings, give a smaller one" if couplings < spatial else "both sides of "
               f"the {space[0]} x {space[1]} patches are odd, give another patch")
        raise ValueError(f"spatial={spatial} leaves no coupling of positions: {why}, or spatial=0")
    return MultiScale(stages, factors, as_shape(event_shape))
