"""Products of the Jacobian J of a score with directions, by three equivalent routes.

    double_backward       grad of v . s(x): any model; the score costs once for all directions
    forward_over_reverse  the derivative of s(x + t v) in t, by forward-mode differentiation
                          (not for training networks with attention: torch changes its softmax in place there)
    jet                   (v . s, v^T J v) carried through the layers of an energy, without s itself

Only v^T J v is used, so that J need not be symmetric (as for an unconstrained score network).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from genmodels.core.errors import InputError
from genmodels.core.tensors import usable, wide
from genmodels.energy.function import EnergyFunction, ScoreFunction

#: Whether several gradients can be computed in one backward pass. Up to torch 2.11 this gives wrong second derivatives
#: of a group norm, sometimes without an error.
BATCHED = torch.__version__ >= "2.14"

Route = Literal["auto", "double_backward", "forward_over_reverse", "jet"]


class Directional(NamedTuple):
    """The directional derivatives in the sliced losses, for M directions.

    Shapes: `slope (M, B)` v . s, `curvature (M, B)` v^T J v, `score (B, *event)` or None if the route has none.
    """

    slope: Tensor
    curvature: Tensor
    score: Tensor | None


def directional(
    model: ScoreFunction,
    x: Tensor,
    directions: Tensor,
    cond: Tensor | None = None,
    *,
    route: Route = "auto",
    with_score: bool = False,
    chunk: int = 1,
) -> Directional:
    """v . s(x), v^T J(x) v and, if requested, s(x).

    Arguments:
        model: an energy or a score network whose score may be differentiated.
        x: (B, *event).
        directions: (M, B, *event).
        route: how they are computed; auto is `cheapest_route`.
        with_score: whether the score is needed; the jet has none.
        chunk: directions per batch of the jet; fewer need less memory.

    Errors: InputError for a model without second derivatives, or a route it does not support.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> energy = LogDensity(lambda x: -x.square().sum(1))
        >>> x, v = torch.tensor([[1.0, 2.0]]), torch.tensor([[[1.0, 1.0]]])
        >>> [part.item() for part in directional(energy, x, v)[:2]]
        [-6.0, -4.0]
    """
    if not model.smooth:
        raise InputError("this energy was built with second_derivatives=False: exact and sliced losses need them")
    if route == "auto":
        route = cheapest_route(model, with_score=with_score, cond=cond)
        if route != "jet" and not with_score and isinstance(model, EnergyFunction):
            _say_fallback(type(getattr(model, "network", model)).__name__)
    if route not in _ROUTES:
        raise InputError(f"route = {route!r} is not one of auto, {', '.join(_ROUTES)}")
    if route == "jet" and (with_score or cond is not None or not getattr(model, "has_jet", False)):
        raise InputError("the jet is for the sliced loss of an energy with rules for all its layers, without condition")
    training = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        x, directions, cond = usable(wide(x)), usable(directions), usable(cond)
        if route == "jet" and not training:
            with torch.no_grad():
                return _ROUTES[route](model, x, directions, cond, training, chunk)
        leaf = x if training and x.requires_grad else x.detach().requires_grad_(route != "jet")
        result = _ROUTES[route](model, leaf, directions, cond, training, chunk)
    return result if training else Directional(*(None if part is None else part.detach() for part in result))


def cheapest_route(model: ScoreFunction, *, with_score: bool, cond: Tensor | None = None) -> Route:
    """The fastest route for this kind of model, as measured.

    In training and in evaluation, for perceptrons and convolutions, double backward took .5 to .8 of the time of
    forward over reverse, also for score networks; the jet took about .55 of double backward where it exists.

    Example:
        >>> from genmodels.energy import ScoreNetwork
        >>> cheapest_route(ScoreNetwork(torch.nn.Linear(2, 2)), with_score=True)
        'double_backward'
    """
    jet = getattr(model, "has_jet", False) and not with_score and cond is None
    return "jet" if jet else "double_backward"


def trace(model: ScoreFunction, x: Tensor, cond: Tensor | None = None, *, chunk: int = 16) -> tuple[Tensor, Tensor]:
    """(tr J (B,), s (B, *event)), by one backward pass for each of the D coordinates, `chunk` of them at once.

    A model with a cheaper way provides it as a method `trace_and_score(x)`.
    """
    if not model.smooth:
        raise InputError("this energy was built with second_derivatives=False: exact and sliced losses need them")
    training = torch.is_grad_enabled()
    if hasattr(model, "trace_and_score") and cond is None:
        with torch.autocast(x.device.type, enabled=False):
            return model.trace_and_score(wide(x))
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        x, cond = usable(wide(x)), usable(cond)
        leaf = x if training and x.requires_grad else x.detach().requires_grad_()
        score = model.score(leaf, cond)
        batch, dims = len(x), math.prod(x.shape[1:])
        total = score.new_zeros(batch)
        for start in range(0, dims, chunk):
            rows = torch.arange(start, min(start + chunk, dims), device=x.device)
            basis = torch.nn.functional.one_hot(rows, dims).to(score.dtype)  # (rows, D)
            basis = basis[:, None].expand(-1, batch, -1).reshape(len(rows), *score.shape)
            (jacobian,) = _gradients(score, leaf, basis, training)
            total = total + jacobian.flatten(2).gather(2, rows[:, None, None].expand(-1, batch, 1)).sum((0, 2))
    return (total, score) if training else (total.detach(), score.detach())


def curl(model: ScoreFunction, x: Tensor, directions: Tensor, cond: Tensor | None = None) -> Tensor:
    """|J - J^T| / |J| by probes: zero for the score of an energy, up to 2 for a rotation.

    Shapes: `x (B, *event)`, `directions (M, B, *event)`; one number for all of them.

    Example:
        >>> from genmodels.energy import ScoreNetwork
        >>> turn = ScoreNetwork(lambda x: torch.stack([-x[:, 1], x[:, 0]], dim=1))
        >>> x = torch.randn(4, 2)
        >>> round(float(curl(turn, x, torch.randn(1, 4, 2))), 4)
        2.0
    """
    difference = size = 0.0
    with torch.inference_mode(False), torch.enable_grad():
        leaf = usable(wide(x)).detach().requires_grad_()
        for v in directions:
            score, forward = _pushed(model, leaf, v, cond)
            (backward,) = torch.autograd.grad((score * v).sum(), leaf)
            difference = difference + (forward - backward).square().sum()
            size = size + forward.square().sum()
    return (difference / size).sqrt().detach()


@cache
def _say_fallback(network: str) -> None:
    """Log once per class of network that the sliced loss could be cheaper."""
    logging.getLogger(__name__).info(
        "%s has layers without a second-order jet, or a condition: the sliced loss uses double backward", network
    )


def _double_backward(model, leaf, directions, cond, training, chunk) -> Directional:
    score = model.score(leaf, cond)
    slopes, curvatures = [], []
    for i, v in enumerate(directions):
        slope = (score * v).flatten(1).sum(1)
        last = i + 1 == len(directions)
        (product,) = torch.autograd.grad(slope.sum(), leaf, create_graph=training, retain_graph=training or not last)
        slopes.append(slope)
        curvatures.append((product * v).flatten(1).sum(1))
    return Directional(torch.stack(slopes), torch.stack(curvatures), score)


def _forward_over_reverse(model, leaf, directions, cond, training, chunk) -> Directional:
    slopes, curvatures = [], []
    for v in directions:
        score, product = _pushed(model, leaf, v, cond)
        slopes.append((score * v).flatten(1).sum(1))
        curvatures.append((product * v).flatten(1).sum(1))
    return Directional(torch.stack(slopes), torch.stack(curvatures), score)


def _pushed(model, leaf: Tensor, v: Tensor, cond: Tensor | None) -> tuple[Tensor, Tensor]:
    """(s, J v) by forward-mode differentiation."""
    with forward_ad.dual_level():
        score, product = forward_ad.unpack_dual(model.score(forward_ad.make_dual(leaf, v), cond))
    return score, torch.zeros_like(score) if product is None else product


def _jet(model, leaf, directions, cond, training, chunk) -> Directional:
    slopes, curvatures = [], []
    for some in directions.split(chunk):
        x = leaf.expand(len(some), *leaf.shape).flatten(0, 1)
        _, slope, curvature = model.jet(x, some.flatten(0, 1))
        slopes.append(slope.view(len(some), -1))
        curvatures.append(curvature.view(len(some), -1))
    return Directional(torch.cat(slopes), torch.cat(curvatures), None)


_ROUTES: dict[str, Callable[..., Directional]] = {
    "double_backward": _double_backward,
    "forward_over_reverse": _forward_over_reverse,
    "jet": _jet,
}


def _gradients(score: Tensor, leaf: Tensor, basis: Tensor, training: bool) -> tuple[Tensor]:
    """Gradients of `basis[i] . score` for all i, (rows, B, *event)."""
    if len(basis) == 1 or not BATCHED:
        rows = [torch.autograd.grad(score, leaf, v, create_graph=training, retain_graph=True)[0] for v in basis]
        return (torch.stack(rows),)
    return torch.autograd.grad(score, leaf, basis, create_graph=training, retain_graph=True, is_grads_batched=True)
