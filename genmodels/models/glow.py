"""Glow (Kingma and Dhariwal 2018) as a model: trained, evaluated and sampled like every other."""

from __future__ import annotations

from typing import Literal

from genmodels.core.data import DataSpec
from genmodels.flows.glow import default_levels, glow
from genmodels.models.flow import FlowModel
from genmodels.nn.attention_block import AttentionKind


class Glow(FlowModel):
    """Glow: actnorm, 1x1 convolutions and couplings over several scales, for images and sequences.

        level = squeeze, K x [actnorm, 1x1, coupling], factor out half of the channels

    Arguments:
        spec: the data set this model is built for.
        levels: number of scales L; null for the most that fit, up to three.
        steps: steps K of each level.
        hidden: width of the coupling networks.
        coupling: element-wise transform of the couplings.
        scale: form of an affine coupling's scale: bounded (`tanh`), or the published `sigmoid`.
        linear: parameterisation of the 1x1 convolutions.
        learned_prior: whether channels that leave early are standardised by a network of those that stay.
        attention: attention block in the coupling networks, `none` for none.
        heads: heads of that block.
        **shared: what all flows take, see `FlowModel`.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> import torch
        >>> from genmodels.core.data import Batch
        >>> model = Glow(DataSpec("digits", (1, 8, 8), levels=17), steps=2, hidden=8)
        >>> model.initialize(Batch(torch.randint(0, 17, (32, 1, 8, 8), dtype=torch.uint8)))
        >>> model.sample(2, temperature=0.7).x.shape
        torch.Size([2, 1, 8, 8])
    """

    family = "glow"

    def __init__(
        self,
        spec: DataSpec,
        *,
        levels: int | None = None,
        steps: int = 16,
        hidden: int = 128,
        coupling: Literal["affine", "additive", "mixture", "spline"] = "affine",
        scale: Literal["tanh", "sigmoid"] = "tanh",
        linear: Literal["lu", "full", "householder"] = "lu",
        learned_prior: bool = True,
        attention: AttentionKind = "none",
        heads: int = 4,
        **shared,
    ):
        super().__init__(spec, **shared)
        self.assemble(glow(
            spec.event_shape, levels=levels, steps=steps, hidden=hidden, coupling=coupling, scale=scale, linear=linear,
            learned_prior=learned_prior, attention=attention, heads=heads, cond=self.condition, memory=self.memory,
        ))
        self.decide(levels=max(1, default_levels(spec.event_shape)) if levels is None else levels)
