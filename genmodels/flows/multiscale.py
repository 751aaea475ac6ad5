"""Multi-scale flows: part of the state leaves early, and a latent is a list of scales."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from genmodels.core.data import Latents
from genmodels.flows.bijection import Bijection, Shape, Step, as_shape, per_example
from genmodels.flows.composition import Compose
from genmodels.flows.elementwise import bounded


class FactorOut(Bijection):
    """The step before half of the channels leaves: what leaves is standardised by a network of what stays.

        h, z = x[:C/2], x[C/2:];    (mu, s) = prior(h);    z' = (z - mu) e^-c5(s),    log |det| = -sum c5(s)

    So the base distribution is N(0, I) at every scale, and a temperature reaches all of them alike. Without a prior
    this is the identity. `MultiScale` does the splitting.

    Arguments:
        channels: number of channels C, even; the last half leaves.
        prior: network from C/2 to C channels, mu first, then s; zero at the start.

    Shapes: `(C, *space)` to the same.
    Errors: ValueError for an odd number of channels.
    Source: Dinh et al. 2017 (RealNVP), section 3.6; the learned prior is that of Kingma and Dhariwal 2018 (Glow).

    Example:
        >>> FactorOut(4)(torch.ones(1, 4))
        (tensor([[1., 1., 1., 1.]]), tensor([0.]))
    """

    strict_cond = True

    def __init__(self, channels: int, prior: nn.Module | None = None):
        super().__init__()
        if channels < 2 or channels % 2:
            raise ValueError(f"FactorOut sends half of the channels away: their number must be even, got {channels}")
        self.channels, self.kept, self.prior = channels, channels // 2, prior
        self.constant_logdet = prior is None
        self.uses_cond = prior is not None and prior.uses_cond

    def out_shape(self, shape: Shape) -> Shape:
        if not shape or shape[0] != self.channels:
            raise self._misfit(f"({self.channels}, ...)", shape)
        return shape

    in_shape = out_shape

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
        """Mean and log-scale of what leaves."""
        mean, s = self.prior(kept, cond, mask).to(kept.dtype).split(self.kept, dim=1)
        return mean, bounded(s, 5.0)

    def _volume(self, log_scale: Tensor, mask: Tensor | None) -> Tensor:
        return per_example(log_scale if mask is None else log_scale.masked_fill(~mask, 0))


class MultiScale(Bijection):
    """Stages one after another, half of the channels leaving after each but the last.

        h_0 = x;    y_i = factor_i(stage_i(h_i)),  h_{i+1} = y_i[:C/2],  z_i = y_i[C/2:];    z_last = stage_last(h_last)
        z = [z_0, z_1, ..., z_last], flattened: fine to coarse

    Arguments:
        stages: the bijections of the scales, each given a shape that keeps the number of values.
        factors: a FactorOut for each stage but the last.
        event_shape: shape of x; one length may be left open (None).

    Shapes: `x (B, *event)` to `z (B, D)`; a mask `(B, 1, T)` of x becomes a mask `(B, D)` of z.
    Errors: ValueError naming stage or factor and the shape it does not take.
    Source: Dinh et al. 2017 (RealNVP), section 3.6.

    Example:
        >>> from genmodels.flows.squeeze import Squeeze2d
        >>> flow = MultiScale([Squeeze2d(), Squeeze2d()], [FactorOut(4)], (1, 4, 4))
        >>> flow.scale_shapes((1, 4, 4)), flow(torch.zeros(2, 1, 4, 4))[0].shape
        ([(2, 2, 2), (8, 1, 1)], torch.Size([2, 16]))
    """

    strict_cond = True

    def __init__(self, stages: Sequence[Bijection], factors: Sequence[FactorOut], event_shape: Shape):
        super().__init__()
        self.event_shape = as_shape(event_shape)
        if len(stages) != len(factors) + 1:
            raise ValueError(f"MultiScale: {len(stages)} stages need one factor-out fewer, got {len(factors)}")
        if not self.event_shape or self.event_shape[0] is None or self.event_shape.count(None) > 1:
            raise ValueError(f"MultiScale: one length may be open, but not the channels, got {self.event_shape}")
        self.stages, self.factors = nn.ModuleList(stages), nn.ModuleList(factors)
        self.latents = Compose([], (None,))  # the joined scales, as a last step of `walk`
        parts = [*stages, *factors]
        self.constant_logdet = all(part.constant_logdet for part in parts)
        self.exact_inverse = all(part.exact_inverse for part in parts)
        costs = {part.inverse_cost for part in parts}
        self.inverse_cost = next((cost for cost in ("iterative", "D passes") if cost in costs), "same")
        self.uses_cond = any(part.uses_cond for part in parts)
        self.scale_shapes(self.event_shape)
        self._name_parts()

    def scale_shapes(self, shape: Shape) -> list[Shape]:
        """Shapes of the scales of an event, fine to coarse."""
        if not fits(self.event_shape, shape):
            raise self._misfit(_shown(self.event_shape), shape)
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
                raise ValueError(f"MultiScale: {part} does not take {_shown(shape)}: {error}") from error
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
        raise self._misfit(_shown(self.out_shape(self.event_shape)), shape)

    def out_mask(self, mask: Tensor) -> Tensor:
        channels = [shape[0] for shape in self.scale_shapes(self.event_shape)]
        pairs = zip(self._scale_masks(mask), channels, strict=True)
        return torch.cat([each.expand(-1, count, -1).flatten(1) for each, count in pairs], dim=1)

    def in_mask(self, mask: Tensor) -> Tensor:
        # The coarsest scale knows the lengths: squeezed frames are valid together.
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
            for number, stage in enumerate(self.stages):
                for layer in [stage, *self.factors[number : number + 1]]:
                    own = cond if layer.uses_cond else None
                    layer.initialize(x, own, mask, force=force)
                    x, _ = layer(x, own, mask)
                    mask = None if mask is None else layer.out_mask(mask)
                x = x[:, : self.factors[number].kept] if number < len(self.factors) else x

    def walk(self, x, cond=None, mask=None, name="") -> Iterator[Step]:
        scales, flat = [], None if mask is None else self.out_mask(mask)
        for number, stage in enumerate(self.stages):
            named = [("stages", stage), *(("factors", factor) for factor in self.factors[number : number + 1])]
            for kind, layer in named:
                own = cond if layer.uses_cond else None
                for step in layer.walk(x, own, mask, ".".join(filter(None, [name, kind, str(number)]))):
                    yield step
                    x = step.z
                mask = None if mask is None else layer.out_mask(mask)
            if number < len(self.factors):
                x, leaving = x.split(self.factors[number].kept, dim=1)
                scales.append(leaving)
                continue
            z = Latents((*scales, x)).flatten()
            yield Step(".".join(filter(None, [name, "latents"])), self.latents, z, z, z.new_zeros(len(z)), None, flat)


def fits(expected: Shape, shape: Shape) -> bool:
    """Whether two event shapes agree, None standing for any length."""
    same = len(expected) == len(shape)
    return same and all(n is None or given is None or n == given for n, given in zip(expected, shape, strict=True))


def _shown(shape: Shape) -> str:
    inside = ", ".join("T" if n is None else str(n) for n in shape)
    return f"({inside},)" if len(shape) == 1 else f"({inside})"
