"""Glow: steps of activation normalisation, an invertible 1x1 convolution and a coupling, over several scales."""

from __future__ import annotations

from typing import Literal

import torch

from genmodels.core.errors import one_of
from genmodels.flows.bijection import Bijection, Shape, as_shape
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling
from genmodels.flows.elementwise import Additive, Affine, LogisticMixture
from genmodels.flows.linear import InvertibleLinear
from genmodels.flows.multiscale import FactorOut, MultiScale
from genmodels.flows.scaling import ActNorm
from genmodels.flows.spline import RationalQuadraticSpline
from genmodels.flows.squeeze import Squeeze1d, Squeeze2d
from genmodels.nn.attention_block import AttentionKind
from genmodels.nn.condition import Condition, require_condition
from genmodels.nn.coupling_networks import ConvNet

_SQUEEZE = {1: Squeeze1d, 2: Squeeze2d}
_MOST_LEVELS = 3


def default_levels(event_shape: Shape) -> int:
    """The most levels, up to three, that halve every side evenly and leave it at least 2.

    Example:
        >>> [default_levels((1, n, n)) for n in (8, 28, 32, 7)]
        [2, 2, 3, 0]
    """
    levels = 0
    sides = [n for n in event_shape[1:] if n is not None]
    while levels < _MOST_LEVELS and all(n % 2 == 0 and n >= 4 for n in sides):
        levels, sides = levels + 1, [n // 2 for n in sides]
    return levels


def _check_sides(event_shape: Shape, levels: int) -> None:
    """Raise ValueError, saying what works instead, for sides that `levels` halvings do not divide."""
    sides = [n for n in event_shape[1:] if n is not None]
    if not sides or not any(n % 2**levels for n in sides):
        return
    most = default_levels(event_shape) or int(not any(n % 2 for n in sides))
    if most:
        raise ValueError(f"levels = {levels} needs sides that {2**levels} divides, got {event_shape}: "
                         f"levels = {most} fits")
    if len(sides) == 1:
        instead = "lengthen the sequences by PadToMultiple(2)"
    elif max(sides) == 1:
        instead = "an image of one pixel is a vector: store it as one, for model=nsf"
    else:
        instead = "use model=realnvp model.layout=[checkerboard*4], or pad the images to even sides"
    raise ValueError(f"glow needs even sides, since every level halves them, got events of shape {event_shape}: "
                     f"{instead}")


def glow(
    event_shape: Shape,
    *,
    levels: int | None = None,
    steps: int = 16,
    hidden: int = 128,
    coupling: Literal["affine", "additive", "mixture", "spline"] = "affine",
    scale: Literal["tanh", "sigmoid"] = "tanh",
    linear: Literal["lu", "full", "householder"] = "lu",
    learned_prior: bool = True,
    cond: Condition | None = None,
    attention: AttentionKind = "none",
    heads: int = 4,
    memory: Literal["store", "inverse"] = "store",
    generator: torch.Generator | None = None,
) -> Bijection:
    """The bijection of Glow, for images (C, H, W) or sequences (C, T).

        level = squeeze, K x [actnorm, 1x1, coupling], factor out half of the channels (but not at the last level)

    Arguments:
        event_shape: shape of one example.
        levels: number of scales L; None for the most that fit, up to three.
        steps: steps K of each level.
        hidden: width of the coupling networks.
        coupling: element-wise transform of the couplings.
        scale: form of an affine coupling's scale: bounded (`tanh`), or the published `sigmoid`.
        linear: parameterisation of the 1x1 convolutions.
        learned_prior: whether channels that leave early are standardised by a network of those that stay.
        cond: what the networks are conditioned on.
        attention: attention block in the coupling networks, `none` for none.
        heads: heads of that block.
        memory: `store`, or `inverse` to recompute activations in the backward pass.
        generator: source of the random rotations the 1x1 convolutions start from.

    Errors: ValueError for sides that the levels do not divide.
    Source: Kingma and Dhariwal 2018, "Glow: generative flow with invertible 1x1 convolutions".

    Example:
        >>> from genmodels.flows.scaling import ActNorm
        >>> flow = glow((1, 8, 8), steps=2, hidden=8)
        >>> z, logdet = flow(torch.randn(3, 1, 8, 8))
        >>> z.shape, logdet.shape
        (torch.Size([3, 64]), torch.Size([3]))
    """
    event_shape = as_shape(event_shape)
    require_condition(cond)
    one_of("coupling", coupling, ("affine", "additive", "mixture", "spline"))
    one_of("scale", scale, ("tanh", "sigmoid"))
    dims = len(event_shape) - 1
    if dims not in _SQUEEZE:
        raise ValueError(f"glow takes images (C, H, W) or sequences (C, T), not events of shape {tuple(event_shape)}")
    if steps < 1 or (levels is not None and levels < 1):
        raise ValueError(f"glow needs at least one step and one level, got steps = {steps}, levels = {levels}")
    _check_sides(event_shape, 1 if levels is None else levels)
    levels = max(1, default_levels(event_shape)) if levels is None else levels

    def transform(changed: int) -> Additive | Affine | LogisticMixture | RationalQuadraticSpline:
        made = {
            "affine": lambda: Affine(changed, scale=scale),
            "additive": Additive,
            "mixture": lambda: LogisticMixture(changed, components=32),
            "spline": RationalQuadraticSpline,
        }
        return made[coupling]()

    def step(channels: int, cond: Condition | None) -> list[Bijection]:
        split = ChannelSplit(channels)
        element = transform(split.changed)
        net = ConvNet(split.kept, element.params_per_dim * split.changed, hidden=hidden, dims=dims, cond=cond,
                      attention=attention, heads=heads)
        rotation = InvertibleLinear(channels, kind=linear, generator=generator)
        return [ActNorm(channels), rotation, Coupling(split, element, net)]

    stages, factors, shape = [], [], tuple(event_shape)
    for level in range(levels):
        squeeze = _SQUEEZE[dims]()
        channels = squeeze.out_shape(shape)[0]
        cond = None if cond is None else cond.squeezed()
        layers = [squeeze, *(layer for _ in range(steps) for layer in step(channels, cond))]
        stages.append(Compose(layers, shape, memory=memory))
        shape = stages[-1].shape_after
        if level < levels - 1:
            kept = channels - channels // 2
            prior = None
            if learned_prior:
                prior = ConvNet(kept, 2 * (channels // 2), depth=0, dims=dims, cond=cond)
            factors.append(FactorOut(channels, prior))
            shape = (kept, *shape[1:])
    return MultiScale(stages, factors, event_shape)
