"""RealNVP: affine couplings of alternating halves, for vectors and, over several scales, for images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from genmodels.core.errors import one_of
from genmodels.flows.bijection import Bijection, Shape, as_shape
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Checkerboard, Coupling
from genmodels.flows.elementwise import Affine, ScaleKind
from genmodels.flows.multiscale import FactorOut, MultiScale
from genmodels.flows.scaling import ActNorm
from genmodels.flows.squeeze import Squeeze2d
from genmodels.nn.attention_block import AttentionKind
from genmodels.nn.condition import Condition
from genmodels.nn.coupling_networks import GatedConvNet, ResidualConvNet
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
    if couplings < 1:
        raise ValueError(f"couplings must be at least 1, got {couplings}")
    layers = []
    for number in range(couplings):
        split = ChannelSplit(features, swap=number % 2 == 1)
        element = Affine(split.changed, scale=scale)
        out = element.params_per_dim * split.changed
        net = MLP(split.kept, out, hidden=hidden, depth=depth, dropout=dropout, cond=cond)
        layers.append(Coupling(split, element, net))
    return Compose(layers, (features,), memory=memory)


def dequantisation_flow(
    event_shape: Shape, *, couplings: int = 4, hidden: int = 16, depth: int = 3, classes: int = 0
) -> Compose:
    """The flow from noise to the logit of the dequantisation noise, conditioned on the item as a map (or vector).

    Arguments:
        event_shape: shape of one example: images or sequences get gated convolutions, vectors an MLP.
        couplings: number of couplings.
        hidden: width of the networks.
        depth: blocks of the networks.
        classes: further channels of the condition, for one-hot classes.

    Source: Ho et al. 2019, "Flow++", section 3.1.

    Example:
        >>> import torch
        >>> g = dequantisation_flow((1, 4, 4))
        >>> g(torch.randn(2, 1, 4, 4), torch.rand(2, 1, 4, 4))[0].shape
        torch.Size([2, 1, 4, 4])
    """
    if couplings < 1:
        raise ValueError(f"couplings must be at least 1, got {couplings}")
    channels, dims = event_shape[0], len(event_shape) - 1
    condition = Condition("map" if dims else "vector", channels + classes)
    layers = []
    for number in range(couplings):
        if dims == 2:
            split: Checkerboard | ChannelSplit = Checkerboard(channels, parity=number % 2)
        else:
            split = ChannelSplit(channels, swap=number % 2 == 1)
        seen = channels if dims == 2 else split.kept
        element = Affine(split.changed, scale="tied")
        out = element.params_per_dim * split.changed
        if dims:
            net = GatedConvNet(seen, out, hidden=hidden, depth=depth, dims=dims, cond=condition)
        else:
            net = MLP(seen, out, hidden=hidden, depth=depth, cond=condition)
        layers.append(Coupling(split, element, net))
    return Compose(layers, event_shape)


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
    """RealNVP for images: checkerboard couplings, a squeeze, channel couplings, half of the channels factored out, ...

    Arguments:
        event_shape: (C, H, W).
        layout: the parts in order: `checkerboard*n` and `channel*n` couplings, `squeeze` and `split`.
        hidden: width of the networks, one for all or one for each group of couplings.
        depth: residual blocks of the networks.
        net: kind of coupling network.
        scale: form of the couplings' scale (see `Affine`).
        actnorm: whether activation normalisation follows every coupling, in place of the paper's batch normalisation.
        dropout: probability of dropping a hidden value, for residual networks.
        cond: what the networks are conditioned on.
        attention: attention block in the coupling networks, `none` for none.
        heads: heads of that block.
        memory: `store`, or `inverse` to recompute activations in the backward pass.

    Errors: ValueError for a part that does not exist, widths that do not match the groups, or dropout in gated
    networks, which have none.
    Source: Dinh, Sohl-Dickstein, Bengio 2017, section 3.6.

    Example:
        >>> import torch
        >>> flow = realnvp_image((3, 8, 8), hidden=8, depth=1)
        >>> flow(torch.randn(2, 3, 8, 8))[0].shape
        torch.Size([2, 192])
    """
    event_shape = as_shape(event_shape)
    one_of("net", net, NETS)
    if isinstance(layout, str):
        raise ValueError(f"layout is a list of parts such as [checkerboard*4], got {layout!r}")
    if dropout and net != "residual":
        raise ValueError(f"dropout is for residual networks, net is {net}")
    groups = sum("*" in part for part in layout)
    if groups == 0:
        raise ValueError(f"layout holds no couplings: {list(layout)}; add checkerboard*n or channel*n")
    widths = [hidden] * groups if isinstance(hidden, int) else list(hidden)
    if len(widths) != groups:
        raise ValueError(f"hidden has {len(widths)} widths, but the layout {groups} groups of couplings")

    def couplings(kind: str, count: int, channels: int, width: int) -> list[Bijection]:
        layers: list[Bijection] = []
        for number in range(count):
            split = Checkerboard(channels, parity=number % 2) if kind == "checkerboard" else (
                ChannelSplit(channels, swap=number % 2 == 1)
            )
            seen = channels if kind == "checkerboard" else split.kept
            element = Affine(split.changed, scale=scale)
            network = NETS[net](seen, element.params_per_dim * split.changed, hidden=width, depth=depth, cond=cond,
                                attention=attention, heads=heads, **({"dropout": dropout} if dropout else {}))
            layers += [Coupling(split, element, network), *([ActNorm(channels)] if actnorm else [])]
        return layers

    stages, factors, shape, layers = [], [], tuple(event_shape), []
    start = shape
    for part in layout:
        found = re.fullmatch(r"(checkerboard|channel)\*([1-9]\d*)", part)
        if found:
            layers += couplings(found[1], int(found[2]), shape[0], widths.pop(0))
        elif part == "squeeze":
            if any(n is not None and n % 2 for n in shape[1:]):
                raise ValueError(f"layout: squeeze halves the sides, but the image is {shape} there: leave it out, for "
                                 "example model.layout=[checkerboard*4], or pad the images to even sides")
            layers.append(Squeeze2d(order="alternative"))
            shape = layers[-1].out_shape(shape)
        elif part == "split":
            stages.append(Compose(layers, start, memory=memory))
            factors.append(FactorOut(shape[0]))
            shape = start = (shape[0] - shape[0] // 2, *shape[1:])
            layers = []
        else:
            raise ValueError(f"layout: {part!r} is none of checkerboard*n, channel*n, squeeze, split")
    stages.append(Compose(layers, start, memory=memory))
    return MultiScale(stages, factors, event_shape)
