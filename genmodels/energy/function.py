"""Energies, log-densities and scores, and the only place with the minus sign between them; products with the Jacobian.

    p(x) = exp(-E(x)) / Z,    score(x) = grad log p(x) = -grad E(x)

Z does not depend on x and is not needed here; `genmodels.energy.ground_truth` and `annealed_importance` estimate it.

Products of the Jacobian J of a score with directions go by three equivalent routes:

    double_backward       grad of v . s(x): any model; the score costs once for all directions
    forward_over_reverse  the derivative of s(x + t v) in t, by forward-mode differentiation
                          (not for training networks with attention: torch changes its softmax in place there)
    jet                   (v . s, v^T J v) carried through the layers of an energy, without s itself

Only v^T J v is used, so that J need not be symmetric (as for an unconstrained score network).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from genmodels.core.errors import InputError
from genmodels.core.tensors import one_each, usable, wide
from genmodels.nn.jet import require_independent, require_smooth


def log_density_of(energy: Tensor) -> Tensor:
    """The logarithm of exp(-energy), also for linear functions of energies; the only minus sign of this package.

    Example:
        >>> log_density_of(torch.tensor(2.0))
        tensor(-2.)
    """
    return -energy


class ScoreFunction(nn.Module):
    """The interface of a score for losses and samplers.

    Subclasses define `score(x, cond=None)`, `(B, *event)` to the same. Where gradients are enabled, the result is
    differentiable with respect to the parameters, and to x if it requires a gradient.

    Attributes:
        smooth: whether the score may be differentiated with respect to x.
        grain: precision in which chains keep positions and acceptances; None for that in which they compute.
    """

    smooth: bool = True
    grain: torch.dtype | None = None

    def score(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        """The score at x: (B, *event) to the same, the gradient of the log-density with respect to x."""
        raise NotImplementedError


class ScoreNetwork(ScoreFunction):
    """A network that outputs the score directly, which need not be the gradient of any function.

    It has no energy, hence no likelihood, no acceptance step and no annealed importance sampling.

    Arguments:
        network: maps `(x)` or `(x, cond)` to a tensor like x.

    Errors: InputError for batch normalisation or dropout, or a result of another shape.

    Example:
        >>> normal = ScoreNetwork(nn.Linear(2, 2, bias=False))
        >>> _ = normal.network.weight.data.copy_(-torch.eye(2))
        >>> normal.score(torch.tensor([[1.0, 2.0]])).tolist()
        [[-1.0, -2.0]]
    """

    def __init__(self, network: Callable[..., Tensor]):
        super().__init__()
        _check(network, False)
        self.network = network

    def score(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        return like(x, self.network(x) if cond is None else self.network(x, cond))


def like(x: Tensor, values: Tensor, what: str = "a score") -> Tensor:
    """Return the values; raises InputError unless they have the shape of x, since others would broadcast."""
    if values.shape != x.shape:
        raise InputError(f"{what} has the shape of x, {tuple(x.shape)}, got {tuple(values.shape)}")
    return values


class EnergyFunction(ScoreFunction):
    """An energy and its score.

    Subclasses define `energy(x, cond=None)`, `(B, *event)` to `(B,)`. Energy and score are float32 or wider regardless
    of autocast. The score can be computed even if the caller has disabled gradients (`no_grad`, inference mode), and x
    is not changed.

    Example:
        >>> class Normal(EnergyFunction):
        ...     def energy(self, x, cond=None):
        ...         return 0.5 * x.square().flatten(1).sum(1)
        >>> Normal().score(torch.tensor([[1.0, -2.0]])).tolist()
        [[-1.0, 2.0]]
    """

    has_jet: bool = False

    def energy(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        """(B,) E(x) for x (B, *event), float32 or wider: the log-density is -E up to a constant."""
        raise NotImplementedError

    def log_density(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        """(B,) log p(x) + log Z."""
        return log_density_of(self.energy(x, cond))

    def energy_and_score(self, x: Tensor, cond: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(E (B,), score (B, *event)), differentiable where gradients are enabled."""
        training = torch.is_grad_enabled()
        with _differentiated(x, twice=training):
            x, cond = usable(x), usable(cond)
            leaf = x if training and x.requires_grad else x.detach().requires_grad_()
            energy = one_each("an energy", self.energy(leaf, cond), x)
            (score,) = torch.autograd.grad(log_density_of(energy).sum(), leaf, create_graph=training)
        return (energy if training else energy.detach()), score

    def score(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        return self.energy_and_score(x, cond)[1]

    def jet(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(log p + log Z, v . score, v^T (d score/dx) v), each (B,), where `has_jet`."""
        raise NotImplementedError


class Energy(EnergyFunction):
    """A network as an energy, after a check of its layers.

    Arguments:
        network: maps `(x)` or `(x, cond)` to `(B,)`; with a method `jet(x, v)` (and no attribute `has_jet` that is
            False) the sliced loss uses jets, which are faster.
        second_derivatives: whether the Hessian is needed; False allows networks with kinks, for the denoising and
            finite-difference losses and for sampling.

    Errors: InputError for batch normalisation, dropout, activations without second derivative, or a result that is not
    (B,).

    Example:
        >>> from genmodels.nn.energy_nets import EnergyMLP
        >>> energy = Energy(EnergyMLP((2,), hidden=(8,)))
        >>> energy.energy(torch.zeros(3, 2)).shape, energy.score(torch.zeros(3, 2)).shape
        (torch.Size([3]), torch.Size([3, 2]))
    """

    def __init__(self, network: Callable[..., Tensor], *, second_derivatives: bool = True):
        super().__init__()
        _check(network, second_derivatives)
        self.network, self.smooth = network, second_derivatives

    @property
    def has_jet(self) -> bool:
        """Whether the network can propagate second-order directional derivatives."""
        return hasattr(self.network, "jet") and getattr(self.network, "has_jet", True)

    def energy(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = wide(x)
            return one_each("an energy", self.network(x) if cond is None else self.network(x, cond), x)

    def jet(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            return tuple(log_density_of(part) for part in self.network.jet(wide(x), wide(v)))


class LogDensity(EnergyFunction):
    """A known log-density, of a flow for instance, as an energy.

    Arguments:
        model: an object with a method `log_prob(x)` or `log_prob(x, cond)` to `(B,)`, or such a function.
        second_derivatives: as for `Energy`.

    Errors: InputError for a model with batch normalisation or dropout, or activations without second derivative.

    Example:
        >>> normal = torch.distributions.Normal(torch.zeros(2), 1.0)
        >>> LogDensity(lambda x: normal.log_prob(x).sum(1)).score(torch.tensor([[1.0, -2.0]])).tolist()
        [[-1.0, 2.0]]
    """

    def __init__(self, model: nn.Module | Callable[..., Tensor], *, second_derivatives: bool = True):
        super().__init__()
        _check(model, second_derivatives)
        self.model, self.smooth = model, second_derivatives

    def energy(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        log_prob = getattr(self.model, "log_prob", self.model)
        with torch.autocast(x.device.type, enabled=False):
            x = x if self._narrow() or not x.is_floating_point() else wide(x)
            found = wide(log_prob(x) if cond is None else log_prob(x, cond))
            # The sign is its own inverse: the energy of a log-density is minus that log-density.
            return log_density_of(one_each("a log-density", found, x))

    def _narrow(self) -> bool:
        """Whether the model itself is in half precision, and takes nothing wider."""
        return any(p.is_floating_point() and p.dtype.itemsize < 4 for p in self.parameters())


class NoiseConditionalScore(nn.Module):
    """The scores of the data with noise N(0, sigma^2), for every sigma, by one network.

    Arguments:
        network: maps `(x, sigma (B,), cond)` to a tensor like x.

    Example:
        >>> def network(x, sigma, cond=None):  # the exact one of a point mass at zero
        ...     return -x / sigma[:, None] ** 2
        >>> NoiseConditionalScore(network).at(2.0).score(torch.tensor([[4.0]]))
        tensor([[-1.]])
    """

    def __init__(self, network: Callable[..., Tensor]):
        super().__init__()
        _check(network, False)
        self.network = network

    def score_at(self, x: Tensor, sigma: Tensor, cond: Tensor | None = None) -> Tensor:
        """The score at noise `sigma (B,)`."""
        return like(x, self.network(x, sigma, cond))

    def at(self, sigma: float) -> ScoreFunction:
        """The score function of one noise level."""
        return _AtOneLevel(self, float(sigma))


class _AtOneLevel(ScoreFunction):
    def __init__(self, model: NoiseConditionalScore, sigma: float):
        super().__init__()
        self.model, self.sigma = model, sigma

    def score(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        return self.model.score_at(x, x.new_full((len(x),), self.sigma), cond)


def require_energy(model: ScoreFunction, what: str) -> EnergyFunction:
    """Return the model; raises InputError if it has only a score."""
    if not isinstance(model, EnergyFunction):
        raise InputError(f"{what} needs an energy, but {type(model).__name__} has only a score: use an energy, or ULA")
    return model


def _require_second_derivatives(model: ScoreFunction) -> None:
    if not model.smooth:
        raise InputError("this energy was built with second_derivatives=False: exact and sliced losses need them")


def _check(network: nn.Module | Callable[..., Tensor], second_derivatives: bool) -> None:
    if isinstance(network, nn.Module):
        require_independent(network)
        if second_derivatives:
            require_smooth(network)


#: Whether several gradients can be computed in one backward pass. Up to torch 2.11 this gives wrong second derivatives
#: of a group norm, sometimes without an error.
BATCHED = torch.__version__ >= "2.14"

Route = Literal["auto", "double_backward", "forward_over_reverse", "jet"]
_ROUTES = get_args(Route)[1:]


class Directional(NamedTuple):
    """The directional derivatives in the sliced losses, for M directions.

    Shapes: `slope (M, B)` v . s, `curvature (M, B)` v^T J v, `score (B, *event)` or None if the route has none.
    """

    slope: Tensor
    curvature: Tensor
    score: Tensor | None


def directional(
    model: ScoreFunction, x: Tensor, directions: Tensor, cond: Tensor | None = None, *, route: Route = "auto",
    with_score: bool = False, chunk: int = 1,
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
    _require_second_derivatives(model)
    if route == "auto":
        route = cheapest_route(model, with_score=with_score, cond=cond)
        if route != "jet" and not with_score and isinstance(model, EnergyFunction):
            _log_fallback(type(getattr(model, "network", model)).__name__)
    if route not in _ROUTES:
        raise InputError(f"route = {route!r} is not one of auto, {', '.join(_ROUTES)}")
    if route == "jet" and (with_score or cond is not None or not getattr(model, "has_jet", False)):
        raise InputError("the jet is for the sliced loss of an energy with rules for all its layers, without condition")
    training = torch.is_grad_enabled()
    with _differentiated(x):
        x, directions, cond = usable(wide(x)), usable(directions), usable(cond)
        leaf = x if training and x.requires_grad else x.detach().requires_grad_(route != "jet")
        if route == "jet":
            with torch.set_grad_enabled(training):
                result = _jet(model, leaf, directions, chunk)
        elif route == "forward_over_reverse":
            result = _forward_over_reverse(model, leaf, directions, cond)
        else:
            result = _double_backward(model, leaf, directions, cond, training)
    return result if training else Directional(*(None if part is None else part.detach() for part in result))


@contextmanager
def _differentiated(x: Tensor, twice: bool = True) -> Iterator[None]:
    """Gradients in full precision; `twice`, those of attention by plain formulas, which alone have second ones."""
    plain = sdpa_kernel(SDPBackend.MATH) if twice else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(x.device.type, enabled=False), plain:
        yield


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
    _require_second_derivatives(model)
    training = torch.is_grad_enabled()
    if hasattr(model, "trace_and_score") and cond is None:
        with torch.autocast(x.device.type, enabled=False):
            return model.trace_and_score(wide(x))
    with _differentiated(x):
        x, cond = usable(wide(x)), usable(cond)
        leaf = x if training and x.requires_grad else x.detach().requires_grad_()
        score = like(leaf, model.score(leaf, cond))
        batch, dims = len(x), math.prod(x.shape[1:])
        total = score.new_zeros(batch)
        for start in range(0, dims, chunk):
            rows = torch.arange(start, min(start + chunk, dims), device=x.device)
            basis = torch.nn.functional.one_hot(rows, dims).to(score.dtype)  # (rows, D)
            basis = basis[:, None].expand(-1, batch, -1).reshape(len(rows), *score.shape)
            jacobian = _gradients(score, leaf, basis, training)
            total = total + jacobian.flatten(2).gather(2, rows[:, None, None].expand(-1, batch, 1)).sum((0, 2))
    return (total, score) if training else (total.detach(), score.detach())


@cache
def _log_fallback(network: str) -> None:
    """Log once per class of network that the sliced loss could be cheaper."""
    logging.getLogger(__name__).info(
        "%s has layers without a second-order jet, or a condition: the sliced loss uses double backward", network
    )


def _double_backward(model, leaf, directions, cond, training) -> Directional:
    score = like(leaf, model.score(leaf, cond))
    slopes, curvatures = [], []
    for i, v in enumerate(directions):
        slope = (score * v).flatten(1).sum(1)
        last = i + 1 == len(directions)
        (product,) = torch.autograd.grad(slope.sum(), leaf, create_graph=training, retain_graph=training or not last)
        slopes.append(slope)
        curvatures.append((product * v).flatten(1).sum(1))
    return Directional(torch.stack(slopes), torch.stack(curvatures), score)


def _forward_over_reverse(model, leaf, directions, cond) -> Directional:
    slopes, curvatures = [], []
    for v in directions:
        with forward_ad.dual_level():
            dual = like(leaf, model.score(forward_ad.make_dual(leaf, v), cond))
            score, product = forward_ad.unpack_dual(dual)  # s, and J v or None for zero
        product = torch.zeros_like(score) if product is None else product
        slopes.append((score * v).flatten(1).sum(1))
        curvatures.append((product * v).flatten(1).sum(1))
    return Directional(torch.stack(slopes), torch.stack(curvatures), score)


def _jet(model, leaf, directions, chunk) -> Directional:
    slopes, curvatures = [], []
    for some in directions.split(chunk):
        x = leaf.expand(len(some), *leaf.shape).flatten(0, 1)
        _, slope, curvature = model.jet(x, some.flatten(0, 1))
        slopes.append(slope.view(len(some), -1))
        curvatures.append(curvature.view(len(some), -1))
    return Directional(torch.cat(slopes), torch.cat(curvatures), None)


def _gradients(score: Tensor, leaf: Tensor, basis: Tensor, training: bool) -> Tensor:
    """Gradients of `basis[i] . score` for all i, (rows, B, *event)."""
    options = {"create_graph": training, "retain_graph": True}
    if len(basis) > 1 and BATCHED:
        return torch.autograd.grad(score, leaf, basis, is_grads_batched=True, **options)[0]
    return torch.stack([torch.autograd.grad(score, leaf, v, **options)[0] for v in basis])
