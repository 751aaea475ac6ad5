"""Multi-scale flows of images, and Glow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.core.data import Latents
from genmodels.core.errors import at_least, none_or_at_least, one_of, only_for
from genmodels.core.tensors import event_sum
from genmodels.flows.bijection import Bijection, Channelwise, Shape, Step, as_shape, fits, joined, shown
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, couple, outputs
from genmodels.flows.elementwise import Additive, Affine, LogisticMixture, bounded
from genmodels.flows.linear import InvertibleLinear
from genmodels.flows.scaling import ActNorm
from genmodels.flows.spline import RationalQuadraticSpline
from genmodels.flows.squeeze import Squeeze1d, Squeeze2d
from genmodels.nn.attention_block import AttentionKind, check_heads
from genmodels.nn.condition import Condition, require_condition
from genmodels.nn.coupling_networks import ConvNet


class FactorOut(Channelwise):
    """Standardises the half of the channels that is factored out, by a network of the half that is kept.

        h, z = x[:C/2], x[C/2:];    (mu, s) = prior(h);    z' = (z - mu) e^-r,   r = 5 tanh(s / 5),   log |det| = -sum r

    So the base distribution is N(0, I) at every scale, and a temperature acts alike on all of them. Without a prior
    this is the identity. `MultiScale` splits the channels.

    Arguments:
        channels: number of channels C, even; the last half is factored out.
        prior: network from C/2 to C channels, mu first, then s; zero at the start.

    Shapes: `(C, *space)` to the same.
    Errors: ValueError for an odd number of channels.
    Source: Dinh et al. 2017 (RealNVP), section 3.6; the learned prior: Kingma and Dhariwal 2018 (Glow).

    Example:
        >>> FactorOut(4)(torch.ones(1, 4))
        (tensor([[1., 1., 1., 1.]]), tensor([0.]))
    """

    strict_cond = True

    def __init__(self, channels: int, prior: nn.Module | None = None):
        if channels < 2 or channels % 2:
            raise ValueError(f"FactorOut: the number of channels must be even, got {channels}")
        super().__init__(channels)
        self.kept, self.prior = channels // 2, prior
        self.constant_logdet = prior is None
        self.uses_cond = prior is not None and prior.uses_cond

    def _forward(self, x, cond, mask):
        if self.prior is None:
            return x, x.new_zeros(len(x))
        kept, leaving = x.split(self.kept, dim=1)
        mean, log_scale = self._statistics(kept, cond, mask)
        leaving = (leaving - mean) * torch.exp(-log_scale)
        return torch.cat([kept, leaving], dim=1), -self._volume(log_scale, mask)

    def _inverse(self, z, cond, mask):
        if self.prior is None:
            return z, z.new_zeros(len(z))
        kept, leaving = z.split(self.kept, dim=1)
        mean, log_scale = self._statistics(kept, cond, mask)
        leaving = leaving * torch.exp(log_scale) + mean
        return torch.cat([kept, leaving], dim=1), self._volume(log_scale, mask)

    def _statistics(self, kept: Tensor, cond: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and log-scale of the channels that are factored out."""
        mean, s = outputs(self.prior, kept, cond, mask, 2 * self.kept).split(self.kept, dim=1)
        return mean, bounded(s, 5.0)

    def _volume(self, log_scale: Tensor, mask: Tensor | None) -> Tensor:
        return event_sum(log_scale, mask)


class MultiScale(Bijection):
    """Stages one after another; half of the channels is factored out after each but the last.

        h_0 = x;    y_i = factor_i(stage_i(h_i)),  h_{i+1} = y_i[:C/2],  z_i = y_i[C/2:];    z_last = stage_last(h_last)
        z = [z_0, z_1, ..., z_last], flattened: fine to coarse

    Arguments:
        stages: the bijections of the scales.
        factors: a FactorOut for each stage but the last.
        event_shape: shape of x; one length may be left open (None).

    Shapes: `x (B, *event)` to `z (B, D)`; a mask `(B, 1, T)` of x becomes a mask `(B, D)` of z.
    Errors: ValueError naming stage or factor and the shape it does not take.
    Source: Dinh et al. 2017 (RealNVP), section 3.6.

    Example:
        >>> flow = MultiScale([Squeeze2d(), Squeeze2d()], [FactorOut(4)], (1, 4, 4))
        >>> flow.scale_shapes((1, 4, 4)), flow(torch.zeros(2, 1, 4, 4))[0].shape
        ([(2, 2, 2), (8, 1, 1)], torch.Size([2, 16]))
    """

    strict_cond = True
    only_contains = True

    def __init__(self, stages: Sequence[Bijection], factors: Sequence[FactorOut], event_shape: Shape):
        super().__init__()
        self.event_shape = as_shape(event_shape)
        if len(stages) != len(factors) + 1:
            raise ValueError(f"MultiScale: {len(stages)} stages need one factor-out fewer, got {len(factors)}")
        if not self.event_shape or self.event_shape[0] is None or self.event_shape.count(None) > 1:
            raise ValueError(f"MultiScale: one length may be open, but not the channels, got {self.event_shape}")
        self.stages, self.factors = nn.ModuleList(stages), nn.ModuleList(factors)
        self.latents = Compose([], (None,))  # the joined scales, as a last step of `walk`
        self._combine([*stages, *factors])
        self.scale_shapes(self.event_shape)
        self._name_parts()

    def scale_shapes(self, shape: Shape) -> list[Shape]:
        """Shapes of the scales of an event, fine to coarse."""
        if not fits(self.event_shape, shape):
            raise self._misfit(self.event_shape, shape)
        shapes = []
        for number, stage in enumerate(self.stages):
            part = f"stage {number}"
            try:
                shape = stage.out_shape(shape)
                if number < len(self.factors):
                    part = f"factor {number}"
                    factor = self.factors[number]
                    channels, *space = factor.out_shape(shape)
                    shapes.append((channels - factor.kept, *space))
                    shape = (factor.kept, *space)
            except ValueError as error:
                raise ValueError(f"MultiScale: {part} does not take {shown(shape)}: {error}") from error
        return [*shapes, shape]

    def out_shape(self, shape: Shape) -> Shape:
        shapes = self.scale_shapes(shape)
        return (None,) if None in shape else (sum(math.prod(scale) for scale in shapes),)

    def in_shape(self, shape: Shape) -> Shape:
        if len(shape) == 1:
            if shape[0] is None or None not in self.event_shape:
                whole = self.event_shape
            else:
                fixed = math.prod([n for n in self.event_shape if n is not None])
                whole = tuple(shape[0] // fixed if n is None else n for n in self.event_shape)
            if self.out_shape(whole) == tuple(shape):
                return whole
        raise self._misfit(self.out_shape(self.event_shape), shape)

    def out_mask(self, mask: Tensor) -> Tensor:
        channels = [shape[0] for shape in self.scale_shapes(self.event_shape)]
        pairs = zip(self._scale_masks(mask), channels, strict=True)
        return torch.cat([each.expand(-1, count, -1).flatten(1) for each, count in pairs], dim=1)

    def in_mask(self, mask: Tensor) -> Tensor:
        # The mask of the coarsest scale determines the others: squeezed frames are valid together.
        coarse = self.scale_shapes(self.in_shape(tuple(mask.shape[1:])))[-1]
        mask = mask[:, -math.prod(coarse) :].unflatten(1, coarse)[:, :1]
        for stage in reversed(self.stages):
            mask = stage.in_mask(mask)
        return mask

    def _forward(self, x, cond, mask):
        scales, logdet = [], x.new_zeros(len(x))
        for number, stage in enumerate(self.stages):
            x, change = stage(x, cond if stage.uses_cond else None, mask)
            logdet = logdet + change
            mask = None if mask is None else stage.out_mask(mask)
            if number < len(self.factors):
                factor = self.factors[number]
                x, change = factor(x, cond if factor.uses_cond else None, mask)
                logdet = logdet + change
                x, leaving = x.split(factor.kept, dim=1)
                scales.append(leaving)
        return Latents((*scales, x)).flatten(), logdet

    def _inverse(self, z, cond, mask):
        scales = Latents.unflatten(z, self.scale_shapes(self.in_shape(tuple(z.shape[1:])))).scales
        masks = [None] * len(scales) if mask is None else self._scale_masks(self.in_mask(mask))
        x, logdet = scales[-1], z.new_zeros(len(z))
        for number in reversed(range(len(self.stages))):
            stage, mask = self.stages[number], masks[number]
            if number < len(self.factors):
                factor = self.factors[number]
                x = torch.cat([x, scales[number]], dim=1)
                x, change = factor.inverse(x, cond if factor.uses_cond else None, mask)
                logdet = logdet + change
            x, change = stage.inverse(x, cond if stage.uses_cond else None, mask)
            logdet = logdet + change
        return x, logdet

    def _scale_masks(self, mask: Tensor) -> list[Tensor]:
        """The masks (B, 1, T_i) after each stage."""
        masks = []
        for stage in self.stages:
            mask = stage.out_mask(mask)
            masks.append(mask)
        return masks

    @torch.no_grad()
    def initialize(self, x, cond=None, mask=None, *, force=False) -> None:
        """Initialise stages and factor-outs, each on the output of those before it; all or, on an error, none."""
        with self._initializing(cond):
            *before, last = self.stages
            for stage, factor in zip(before, self.factors, strict=True):
                for layer in (stage, factor):
                    x = layer.initialize_forward(x, cond if layer.uses_cond else None, mask, force=force)
                    mask = None if mask is None else layer.out_mask(mask)
                x = x[:, : factor.kept]
            last.initialize(x, cond if last.uses_cond else None, mask, force=force)  # nothing needs its output

    def walk(self, x, cond=None, mask=None, name="") -> Iterator[Step]:
        scales, flat = [], None if mask is None else self.out_mask(mask)
        for number, stage in enumerate(self.stages):
            named = [("stages", stage), *(("factors", factor) for factor in self.factors[number : number + 1])]
            for kind, layer in named:
                own = cond if layer.uses_cond else None
                for step in layer.walk(x, own, mask, joined(name, kind, str(number))):
                    yield step
                    x = step.z
                mask = None if mask is None else layer.out_mask(mask)
            if number < len(self.factors):
                x, leaving = x.split(self.factors[number].kept, dim=1)
                scales.append(leaving)
                continue
            z = Latents((*scales, x)).flatten()
            yield Step(joined(name, "latents"), self.latents, z, z, z.new_zeros(len(z)), None, flat)


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
    """Raise ValueError, with an alternative, for sides that `levels` halvings do not divide."""
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
        learned_prior: whether channels that are factored out are standardised by a network of those that are kept.
        cond: what the networks are conditioned on.
        attention: attention block in the coupling networks, `none` for none.
        heads: heads of that block.
        memory: `store`, or `inverse` to recompute activations in the backward pass.
        generator: source of the initial rotations of the 1x1 convolutions.

    Errors: ValueError for sides that the levels do not divide.
    Source: Kingma and Dhariwal 2018, "Glow: generative flow with invertible 1x1 convolutions".

    Example:
        >>> flow = glow((1, 8, 8), steps=2, hidden=8)
        >>> z, logdet = flow(torch.randn(3, 1, 8, 8))
        >>> z.shape, logdet.shape
        (torch.Size([3, 64]), torch.Size([3]))
    """
    event_shape = as_shape(event_shape)
    require_condition(cond)
    one_of("coupling", coupling, ("affine", "additive", "mixture", "spline"))
    one_of("scale", scale, ("tanh", "sigmoid"))
    if coupling != "affine":
        only_for("coupling=affine", scale=(scale, "tanh"))
    check_heads(attention, heads, 4)
    dims = len(event_shape) - 1
    if dims not in _SQUEEZE:
        raise ValueError(f"glow takes images (C, H, W) or sequences (C, T), not events of shape {tuple(event_shape)}")
    at_least(1, steps=steps)
    none_or_at_least(1, levels=levels)
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
        net = partial(ConvNet, hidden=hidden, dims=dims, cond=cond, attention=attention, heads=heads)
        coupled = couple(split, transform(split.changed), net)
        return [ActNorm(channels), InvertibleLinear(channels, kind=linear, generator=generator), coupled]

    stages, factors, shape = [], [], event_shape
    for level in range(levels):
        squeeze = _SQUEEZE[dims]()
        channels = squeeze.out_shape(shape)[0]
        cond = None if cond is None else cond.squeezed()
        layers = [squeeze, *(layer for _ in range(steps) for layer in step(channels, cond))]
        stages.append(Compose(layers, shape, memory=memory))
        shape = stages[-1].shape_after
        if level < levels - 1:
            kept = channels // 2
            prior = ConvNet(kept, channels, depth=0, dims=dims, cond=cond) if learned_prior else None
            factors.append(FactorOut(channels, prior))
            shape = (kept, *shape[1:])
    return MultiScale(stages, factors, event_shape)
