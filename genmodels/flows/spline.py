"""Monotone rational-quadratic splines with linear tails."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad, softmax, softplus

from genmodels.core.errors import at_least, one_of
from genmodels.flows.bijection import Bijection
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, MaskedAutoregressive, couple
from genmodels.flows.elementwise import Affine, ElementTransform
from genmodels.flows.linear import Flip, InvertibleLinear
from genmodels.flows.scaling import ActNorm
from genmodels.nn.condition import Condition
from genmodels.nn.perceptron import MADE, MLP, ResidualMLP

MIN_DERIVATIVE = 1e-3


class RationalQuadraticSpline(ElementTransform):
    """A monotone piecewise rational-quadratic map of [-B, B] onto itself, and the identity outside.

    With knots (x_k, y_k), derivatives d_k there, widths w_k, heights h_k and sl = h_k / w_k, inside bin k

        xi = (x - x_k) / w_k,    D = sl + (d_k+1 + d_k - 2 sl) xi (1 - xi)
        z = y_k + h_k [sl xi^2 + d_k xi (1 - xi)] / D
        log dz/dx = 2 log sl + log[d_k+1 xi^2 + 2 sl xi (1 - xi) + d_k (1 - xi)^2] - 2 log D

    Widths are 2B (w_min + (1 - K w_min) softmax(.)), heights likewise, derivatives 0.001 + softplus(. + c); both ends
    have derivative 1, and c = 0.5397 makes it 1 for parameters of zero, where the map is the identity.

    Arguments:
        bins: number of bins K.
        bound: B.
        min_size: least width and height of a bin, as a share of 2B; below 1 / K.

    Shapes: `params (B, 3K - 1, C, *space)`: K widths, K heights, K - 1 derivatives.
    Errors: ValueError when K bins of the least size do not leave anything, or for fewer than one bin or B <= 0.
    Source: Durkan et al. 2019 (neural spline flows), equations 4 to 8; Gregory and Delbourgo 1982.

    Example:
        >>> spline = RationalQuadraticSpline(bins=4, bound=2.0)
        >>> spline(torch.tensor([[0.5], [9.0]]), torch.zeros(2, 11, 1))[0]
        tensor([[0.5000],
                [9.0000]])
    """

    def __init__(self, *, bins: int = 8, bound: float = 3.0, min_size: float = 1e-3):
        super().__init__()
        if bins < 1 or not 0 < bound < math.inf:
            raise ValueError(f"a spline needs at least one bin and a positive, finite bound, got {bins} and {bound}")
        if not 0 < bins * min_size < 1:
            raise ValueError(
                f"{bins} bins of at least {min_size} of the width leave nothing to learn: "
                f"bins * min_size = {bins * min_size:g} must be below 1"
            )
        self.bins, self.bound, self.min_size = bins, bound, min_size
        self.params_per_dim = 3 * bins - 1

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        # Clamped, since far outside the formula is not finite and its gradient would be NaN.
        inside = x.clamp(-self.bound, self.bound)
        knots_x, knots_y, derivatives = self.knots(params)
        x_k, w, y_k, h, d, d_next = self._bin(inside, knots_x, knots_x, knots_y, derivatives)
        xi, slope = (inside - x_k) / w, h / w
        z, log_derivative = _inside_bin(xi, slope, y_k, h, d, d_next)
        return self._with_tails(x, z, log_derivative)

    def inverse(self, z: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        inside = z.clamp(-self.bound, self.bound)
        knots_x, knots_y, derivatives = self.knots(params)
        x_k, w, y_k, h, d, d_next = self._bin(inside, knots_y, knots_x, knots_y, derivatives)
        slope, rise = h / w, inside - y_k
        q = rise * (d_next + d - 2 * slope)
        a, b, c = h * (slope - d) + q, h * d - q, -slope * rise
        # Positive up to rounding; the floor keeps the gradient of the root finite.
        root = (b.square() - 4 * a * c).clamp(min=torch.finfo(z.dtype).tiny).sqrt()
        # The form of the solution that does not cancel for this sign of b.
        xi = torch.where(b > 0, 2 * c, root - b) / torch.where(b > 0, -b - root, 2 * a)
        xi = xi.clamp(0, 1)  # at a knot rounding may leave the bin
        _, log_derivative = _inside_bin(xi, slope, y_k, h, d, d_next)
        return self._with_tails(z, x_k + w * xi, -log_derivative)

    def knots(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions x and y of the K + 1 knots and the derivatives there, each (B, K + 1, C, *space)."""
        widths, heights, derivatives = params.split((self.bins, self.bins, self.bins - 1), dim=1)
        derivatives = MIN_DERIVATIVE + softplus(derivatives + math.log(math.expm1(1 - MIN_DERIVATIVE)))
        return self._cumulated(widths), self._cumulated(heights), _with_ends(derivatives, 1.0, 1.0)

    def _cumulated(self, sizes: Tensor) -> Tensor:
        sizes = self.min_size + (1 - self.bins * self.min_size) * softmax(sizes, dim=1)
        inner = 2 * self.bound * sizes[:, :-1].cumsum(dim=1) - self.bound
        return _with_ends(inner, -self.bound, self.bound)  # exact, which sums are not

    def _bin(self, v: Tensor, by: Tensor, knots_x: Tensor, knots_y: Tensor, derivatives: Tensor) -> list[Tensor]:
        """x_k, w_k, y_k, h_k, d_k and d_k+1 of the bin of each v among the knots `by`."""
        # Compared with inner knots only, so that the ends (and NaN) are in a bin too.
        index = (v.unsqueeze(1) >= by[:, 1:-1]).sum(dim=1, keepdim=True)

        def at(values: Tensor) -> Tensor:
            return values.gather(1, index).squeeze(1)

        # Sizes are differences of rounded knots, so that neighbouring bins meet exactly.
        left, right = slice(None, -1), slice(1, None)
        return [at(knots_x[:, left]), at(knots_x.diff(dim=1)), at(knots_y[:, left]), at(knots_y.diff(dim=1)),
                at(derivatives[:, left]), at(derivatives[:, right])]

    def _with_tails(self, outside: Tensor, inside: Tensor, log_derivative: Tensor) -> tuple[Tensor, Tensor]:
        tail = outside.abs() >= self.bound
        return torch.where(tail, outside, inside), log_derivative.masked_fill(tail, 0)


def _inside_bin(xi: Tensor, slope: Tensor, y_k: Tensor, h: Tensor, d: Tensor, d_next: Tensor) -> tuple[Tensor, Tensor]:
    """z and log dz/dx at the relative position xi in a bin."""
    product = xi * (1 - xi)
    # sl + (d_k+1 + d_k - 2 sl) p, as a sum of terms that are not negative
    denominator = slope * (1 - 2 * product) + (d + d_next) * product
    z = y_k + h * (slope * xi.square() + d * product) / denominator
    numerator = d_next * xi.square() + 2 * slope * product + d * (1 - xi).square()
    return z, 2 * (slope.log() - denominator.log()) + numerator.log()


def _with_ends(inner: Tensor, first: float, last: float) -> Tensor:
    """Values along dimension 1 between two constants."""
    others = (0, 0) * (inner.dim() - 2)
    return pad(pad(inner, (*others, 1, 0), value=first), (*others, 0, 1), value=last)


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
    """A neural spline flow (RQ-NSF) of couplings or autoregressive layers; affine and autoregressive it is MAF.

    Arguments:
        features: dimension D of the vectors, for couplings at least 2.
        layers: number of couplings or autoregressive layers; halves, or the order, alternate between them.
        kind: `coupling` (one pass in both directions) or `autoregressive` (D passes to invert).
        transform: `spline`, or `affine`.
        bins: bins K of a spline.
        bound: splines act on [-bound, bound] and are the identity outside.
        hidden: width of the networks.
        depth: hidden layers, or residual blocks of two layers each with `residual`.
        residual: residual networks.
        mix: layer before each coupling or autoregressive layer: `none`, a learned linear map (`lu`), or `actnorm`.
        cond: what the networks are conditioned on.
        memory: `store`, or `inverse` to recompute activations in the backward pass.
        generator: source of the initial rotations of `lu`.

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
    at_least(1, layers=layers)
    if features < 2 and kind == "coupling":
        raise ValueError(f"a flow of couplings needs at least 2 dimensions, got {features}: kind=autoregressive takes "
                         "a single one")

    def element(changed: int) -> Affine | RationalQuadraticSpline:
        return RationalQuadraticSpline(bins=bins, bound=bound) if transform == "spline" else Affine(changed)

    def mixing() -> list[Bijection]:
        if mix == "lu":
            return [InvertibleLinear(features, generator=generator)]
        return [ActNorm(features)] if mix == "actnorm" else []

    def coupling(number: int) -> list[Bijection]:
        split = ChannelSplit(features, swap=number % 2 == 1)
        net = partial(ResidualMLP if residual else MLP, hidden=hidden, depth=depth, cond=cond)
        return [couple(split, element(split.changed), net)]

    def autoregressive(number: int) -> list[Bijection]:
        each = element(features)
        net = MADE(features, each.params_per_dim, hidden=hidden, depth=depth, residual=residual, cond=cond)
        return [*([Flip(features)] if number else []), MaskedAutoregressive(features, each, net)]

    layer = coupling if kind == "coupling" else autoregressive
    return Compose([one for number in range(layers) for one in [*mixing(), *layer(number)]], (features,), memory=memory)
