"""Score matching: losses whose minimiser is the score of the data, without the normalising constant.

With s the score of the model, J its Jacobian, and v a direction with E[v v^T] = I, per example,

    exact               tr J + 1/2 |s|^2
    sliced              v^T J v + 1/2 (v . s)^2
    sliced_vr           v^T J v + 1/2 |s|^2
    finite_difference   (l(x + e v) + l(x - e v) - 2 l(x)) / e^2 + 1/8 (l(x + e v) - l(x - e v))^2 / e^2,  l = log p

All equal 1/2 E|s_data - s|^2 up to a constant of the data, finite_difference up to order e^2. In terms of the energy
J = -Hess E, so the first is E[-tr Hess E + 1/2 |grad E|^2]: with + tr Hess E it would fit the inverted energy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from genmodels.core.errors import InputError, RunError, at_least, one_of
from genmodels.core.random import Generator, normal, uniform
from genmodels.core.tensors import wide
from genmodels.energy.function import Directional, EnergyFunction, ScoreFunction, directional, require_energy, trace


class Projection(Protocol):
    """A distribution of random directions."""

    def draw(self, shape, generator: Generator, *, dtype=torch.float32, device=None) -> Tensor:
        """(B, *event) directions, independent over the batch."""


class Rademacher:
    """Every coordinate is +1 or -1 with probability one half: the trace of a diagonal matrix is exact.

    Source: Hutchinson 1990.

    Example:
        >>> v = Rademacher().draw((2, 3), torch.Generator().manual_seed(0))
        >>> bool((v.abs() == 1).all())
        True
    """

    def draw(self, shape, generator: Generator, *, dtype=torch.float32, device=None) -> Tensor:
        """(B, *event) coordinates of +1 and -1, independent."""
        side = uniform(shape, generator, dtype=torch.float32, device=device) < 0.5
        return 1 - 2 * side.to(dtype)


class Gaussian:
    """Standard normal coordinates."""

    def draw(self, shape, generator: Generator, *, dtype=torch.float32, device=None) -> Tensor:
        """(B, *event) standard normal coordinates, independent."""
        return normal(shape, generator, dtype=dtype, device=device)


class Sphere:
    """sqrt(D) times a uniform direction of the whole event.

    Example:
        >>> v = Sphere().draw((2, 3, 4), torch.Generator().manual_seed(0))
        >>> [round(float(length), 4) for length in v.flatten(1).square().sum(1)]
        [12.0, 12.0]
    """

    def draw(self, shape, generator: Generator, *, dtype=torch.float32, device=None) -> Tensor:
        """(B, *event) directions of length sqrt(D), D the scalars of an event."""
        v = normal(shape, generator, dtype=dtype, device=device)
        length = v.flatten(1).norm(dim=1).reshape(-1, *(1,) * (v.dim() - 1))
        return v * (math.sqrt(math.prod(shape[1:])) / length)


#: The values of `projection=`.
PROJECTIONS: dict[str, type[Projection]] = {"rademacher": Rademacher, "gaussian": Gaussian, "sphere": Sphere}


class Loss(Protocol):
    """A loss of a score: `(model, x (B, *event), generator, cond)` to `(B,)`; the caller takes the mean."""

    def __call__(self, model: ScoreFunction, x: Tensor, generator: Generator, cond: Tensor | None = None) -> Tensor: ...


def half_square(score: Tensor) -> Tensor:
    """1/2 |s|^2 over the whole event, (B,)."""
    return 0.5 * score.square().flatten(1).sum(1)


def finite_difference(
    log_density: Callable[[Tensor], Tensor], x: Tensor, directions: Tensor, step: float, *, chunk: int = 1
) -> Tensor:
    """Two differences of the log-density along each direction, mean over directions, (B,).

    The values at x are shared by the `chunk` directions that are evaluated in one batch.

    Source: Pang et al. 2020, "Efficient learning of generative models via finite-difference score matching",
        equation 9.
    """
    total = 0.0
    for some in directions.split(chunk):
        moved = step * some
        points = torch.cat([x[None], x + moved, x - moved])  # (1 + 2 chunk, B, *event)
        values = log_density(points.flatten(0, 1)).view(len(points), len(x))
        ahead, behind = values[1:].chunk(2)
        curvature = (ahead + behind - 2 * values[:1]) / step**2
        total = total + (curvature + (ahead - behind).square() / (8 * step**2)).sum(0)
    return total / len(directions)


class ExactScoreMatching:
    """tr J + 1/2 |s|^2, with D backward passes.

    Arguments:
        chunk: coordinates whose backward passes run at once; fewer need less memory.
        confirm: allow more than 1024 dimensions.

    Errors: InputError for events of more than 1024 dimensions, unless confirmed.
    Source: Hyvarinen 2005, theorem 1.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> normal = LogDensity(lambda x: -0.5 * x.square().sum(1))
        >>> ExactScoreMatching()(normal, torch.tensor([[1.0, 2.0]])).tolist()
        [0.5]
    """

    def __init__(self, *, chunk: int = 16, confirm: bool = False):
        self.chunk, self.confirm = chunk, confirm

    def __call__(
        self, model: ScoreFunction, x: Tensor, generator: Generator | None = None, cond: Tensor | None = None
    ) -> Tensor:
        dims = math.prod(x.shape[1:])
        if dims > _MOST_EXACT and not self.confirm:
            raise InputError(
                f"exact score matching in {dims} dimensions costs about {(4 + 8 * dims) // 3} plain steps: use "
                "sliced_vr, or set confirm=true"
            )
        total, score = trace(model, x, cond, chunk=self.chunk)
        return total + half_square(score)


class SlicedScoreMatching:
    """v^T J v + 1/2 (v . s)^2, with new directions in every step.

    Arguments:
        projection: distribution of the directions.
        projections: number of directions to average over.
        route: how the products are computed.
        projection_chunk: directions computed at once, if the route supports it; fewer need less memory.

    Errors: InputError for fewer than one direction.
    Source: Song et al. 2019, "Sliced score matching", equation 7.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> normal = LogDensity(lambda x: -0.5 * x.square().sum(1))
        >>> SlicedScoreMatching()(normal, torch.tensor([[2.0, 0.0]]), torch.Generator().manual_seed(0)).tolist()
        [0.0]
    """

    _with_score = False

    def __init__(
        self,
        *,
        projection: Literal["rademacher", "gaussian", "sphere"] = "rademacher",
        projections: int = 1,
        route: Literal["auto", "double_backward", "forward_over_reverse", "jet"] = "auto",
        projection_chunk: int = 1,
    ):
        at_least(1, projections=projections, projection_chunk=projection_chunk)
        one_of("projection", projection, PROJECTIONS)
        self.projection, self.projections = PROJECTIONS[projection](), projections
        self.route, self.projection_chunk = route, projection_chunk

    def __call__(self, model: ScoreFunction, x: Tensor, generator: Generator, cond: Tensor | None = None) -> Tensor:
        x = wide(x)
        directions = draw_directions(self.projection, self.projections, x, generator)
        return self._value(directional(model, x, directions, cond, route=self.route,
                                       with_score=self._with_score, chunk=self.projection_chunk))

    def _value(self, found: Directional) -> Tensor:
        """(B,) over the directions."""
        return (found.curvature + 0.5 * found.slope.square()).mean(0)


class SlicedScoreMatchingVR(SlicedScoreMatching):
    """v^T J v + 1/2 |s|^2: the sliced loss without the variance of its second term.

    With Rademacher directions it is exact if J is diagonal. The arguments are those of `SlicedScoreMatching`, but the
    route `jet`, which has no score, is refused.

    Source: Song et al. 2019, equation 8.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> normal = LogDensity(lambda x: -0.5 * x.square().sum(1))
        >>> SlicedScoreMatchingVR()(normal, torch.tensor([[1.0, 2.0]]), torch.Generator().manual_seed(0)).tolist()
        [0.5]
    """

    _with_score = True

    def _value(self, found: Directional) -> Tensor:
        return found.curvature.mean(0) + half_square(found.score)


class FiniteDifferenceScoreMatching:
    """The sliced loss by differences of the energy along a direction, to second order: no second derivatives.

    Arguments:
        projection: distribution of the directions.
        projections: number of directions to average over.
        step: e, in units of `scale`.
        scale: standard deviation of the data.
        projection_chunk: directions evaluated in one batch.

    Errors: InputError for a score without energy, or a step below 0.01 in float32, where rounding errors, which grow as
    1/e^2, exceed the differences.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> normal = LogDensity(lambda x: -0.5 * x.square().sum(1))
        >>> x, generator = torch.tensor([[2.0, 0.0]], dtype=torch.float64), torch.Generator().manual_seed(0)
        >>> round(FiniteDifferenceScoreMatching()(normal, x, generator).item(), 9)
        0.0
    """

    def __init__(
        self,
        *,
        projection: Literal["rademacher", "gaussian", "sphere"] = "rademacher",
        projections: int = 1,
        step: float = 0.1,
        scale: float = 1.0,
        projection_chunk: int = 1,
    ):
        if not (0 < step < math.inf and 0 < scale < math.inf):
            raise InputError(f"step = {step} and scale = {scale} must be positive and finite")
        at_least(1, projections=projections, projection_chunk=projection_chunk)
        one_of("projection", projection, PROJECTIONS)
        self.projection, self.projections = PROJECTIONS[projection](), projections
        self.step, self.scale = step, scale
        self.projection_chunk = projection_chunk

    def __call__(self, model: EnergyFunction, x: Tensor, generator: Generator, cond: Tensor | None = None) -> Tensor:
        model, x = require_energy(model, "finite-difference score matching"), wide(x)
        if x.dtype == torch.float32 and self.step < _SMALLEST_STEP:
            raise InputError(
                f"step = {self.step} is too small for float32, where rounding grows as 1/step^2: use at least "
                f"{_SMALLEST_STEP}, or float64"
            )

        def log_density(points: Tensor) -> Tensor:
            repeated = None if cond is None else cond.repeat(len(points) // len(x), *(1,) * (cond.dim() - 1))
            with torch.autocast(points.device.type, enabled=False):
                return model.log_density(points, repeated)

        directions = draw_directions(self.projection, self.projections, x, generator)
        return finite_difference(log_density, x, directions, self.step * self.scale, chunk=self.projection_chunk)


_MOST_EXACT = 1024
_SMALLEST_STEP = 0.01


def draw_directions(projection: Projection, count: int, x: Tensor, generator: Generator) -> Tensor:
    """(count, *x.shape) directions, drawn one after the other."""
    return torch.stack([projection.draw(x.shape, generator, dtype=x.dtype, device=x.device) for _ in range(count)])


class DivergenceGuard:
    """Stop training when the energy diverges: loss below -1000 D, or mean |E| above a million for 100 steps.

    Arguments:
        dims: D.
        patience: number of consecutive steps with large energies that are tolerated.

    Errors: RunError, from `check`.

    Example:
        >>> guard = DivergenceGuard(2)
        >>> guard.check(0, torch.tensor([-1.0]), torch.tensor([3.0]))
        >>> guard.check(1, torch.tensor([-1e9]), torch.tensor([3.0]))
        Traceback (most recent call last):
        ...
        genmodels.core.errors.RunError: energy diverges at step 1: add noise or confinement, ...
    """

    def __init__(self, dims: int, *, patience: int = 100):
        self.dims, self.patience, self.large = dims, patience, 0

    def check(self, step: int, loss: Tensor, energy: Tensor | None = None) -> None:
        """Check the losses (B,) and energies (B,) of a step."""
        large = energy is not None and float(energy.detach().abs().mean()) > 1e6
        self.large = self.large + 1 if large else 0
        if float(loss.detach().mean()) < -1e3 * self.dims or self.large >= self.patience:
            raise RunError(f"energy diverges at step {step}: add noise or confinement, or lower the learning rate "
                           "(model.noise, model.net.confinement, model.optimizer.lr)")
