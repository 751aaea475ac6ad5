"""Neural spline flows and masked autoregressive flows, for vectors."""

from __future__ import annotations

from typing import Literal

import torch

from genmodels.flows.actnorm import ActNorm
from genmodels.flows.autoregressive import MaskedAutoregressive
from genmodels.flows.bijection import Bijection
from genmodels.flows.boundary import one_of
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling
from genmodels.flows.elementwise import Affine
from genmodels.flows.linear import InvertibleLinear
from genmodels.flows.permute import Flip
from genmodels.flows.spline import RationalQuadraticSpline
from genmodels.nn.condition import Condition
from genmodels.nn.made import MADE
from genmodels.nn.perceptron import MLP, ResidualMLP


def neural_spline(
    features: int,
    *,
    layers: int = 8,
    kind: Literal["coupling", "autoregressive"] = "coupling",
    transform: Literal["spline", "affine"] = "spline",
    bins: int = 16,
    bound: float = 5.0,
    hidden: int = 64,
    depth: int = 2,
    residual: bool = False,
    mix: Literal["none", "lu", "actnorm"] = "none",
    cond: Condition | None = None,
    memory: Literal["store", "inverse"] = "store",
    generator: torch.Generator | None = None,
) -> Compose:
    """A flow of rational-quadratic splines (RQ-NSF), with couplings or autoregressive; affine and autoregressive: MAF.

    Arguments:
        features: dimension D of the vectors, for couplings at least 2.
        layers: number of couplings or autoregressive layers; halves, or the order, alternate between them.
        kind: `coupling` (one pass in both directions) or `autoregressive` (D passes to invert).
        transform: `spline`, or `affine`.
        bins: bins K of a spline.
        bound: splines act on [-bound, bound] and leave the rest alone.
        hidden: width of the networks.
        depth: hidden layers, or residual blocks of two layers each with `residual`.
        residual: residual networks.
        mix: what stands before every layer: `none`, a learned linear map (`lu`), or `actnorm`.
        cond: what the networks are conditioned on.
        memory: `store`, or `inverse` to recompute activations in the backward pass.
        generator: source of the random rotations that `lu` starts from.

    Errors: ValueError for an option that is none of its choices, no layers, or couplings of one dimension.
    Source: Durkan, Bekasov, Murray, Papamakarios 2019, "Neural spline flows"; Papamakarios, Pavlakou, Murray 2017,
    "Masked autoregressive flow for density estimation".

    Example:
        >>> flow = neural_spline(2, layers=2)
        >>> x = torch.randn(3, 2)
        >>> bool((flow(x)[0] - x).abs().max() < 1e-5)
        True
    """
    one_of("kind", kind, ("coupling", "autoregressive"))
    one_of("transform", transform, ("spline", "affine"))
    one_of("mix", mix, ("none", "lu", "actnorm"))
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    if features < 2 and kind == "coupling":
        raise ValueError(f"a flow of couplings needs at least 2 dimensions, got {features}: kind=autoregressive takes "
                         "a single one")

    def element(changed: int) -> Affine | RationalQuadraticSpline:
        return RationalQuadraticSpline(bins=bins, bound=bound) if transform == "spline" else Affine(changed)

    def mixing() -> list[Bijection]:
        made = {"none": list, "actnorm": lambda: [ActNorm(features)],
                "lu": lambda: [InvertibleLinear(features, generator=generator)]}
        return made[mix]()

    def coupling(number: int) -> list[Bijection]:
        split = ChannelSplit(features, swap=number % 2 == 1)
        each = element(split.changed)
        network = ResidualMLP if residual else MLP
        net = network(split.kept, each.params_per_dim * split.changed, hidden=hidden, depth=depth, cond=cond)
        return [Coupling(split, each, net)]

    def autoregressive(number: int) -> list[Bijection]:
        each = element(features)
        net = MADE(features, each.params_per_dim, hidden=hidden, depth=depth, residual=residual, cond=cond)
        return [*([Flip(features)] if number else []), MaskedAutoregressive(features, each, net)]

    layer = {"coupling": coupling, "autoregressive": autoregressive}[kind]
    return Compose([one for number in range(layers) for one in [*mixing(), *layer(number)]], (features,), memory=memory)
