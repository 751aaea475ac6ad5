"""Energies, log-densities and scores, and the only place with the minus sign between them.

    p(x) = exp(-E(x)) / Z,    score(x) = grad log p(x) = -grad E(x)

Z does not depend on x and is not needed here; `genmodels.energy.ground_truth` and `annealed_importance` estimate it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from genmodels.core.errors import InputError
from genmodels.core.tensors import usable, wide
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
        score = self.network(x) if cond is None else self.network(x, cond)
        if score.shape != x.shape:
            raise InputError(f"a score has the shape of x, {tuple(x.shape)}, got {tuple(score.shape)}")
        return score


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
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            x, cond = usable(x), usable(cond)
            leaf = x if training and x.requires_grad else x.detach().requires_grad_()
            energy = self.energy(leaf, cond)
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
            energy = self.network(x) if cond is None else self.network(x, cond)
        if energy.shape != x.shape[:1]:
            raise InputError(f"an energy is one number per example, ({len(x)},), got shape {tuple(energy.shape)}")
        return energy

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
        # The sign is its own inverse: the energy of a log-density is minus that log-density.
        return log_density_of(log_prob(x) if cond is None else log_prob(x, cond))


class NoiseConditionalScore(nn.Module):
    """The scores of the data with noise N(0, sigma^2), for every sigma, by one network.

    Arguments:
        network: maps `(x, sigma (B,), cond)` to a tensor like x, as `genmodels.models.score.NoiseConditionalNet`.

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
        score = self.network(x, sigma, cond)
        if score.shape != x.shape:
            raise InputError(f"a score has the shape of x, {tuple(x.shape)}, got {tuple(score.shape)}")
        return score

    def at(self, sigma: float) -> ScoreFunction:
        """The score function of one noise level."""
        return _AtOneLevel(self, float(sigma))


class _AtOneLevel(ScoreFunction):
    def __init__(self, model: NoiseConditionalScore, sigma: float):
        super().__init__()
        self.model, self.sigma = model, sigma

    def score(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        return self.model.score_at(x, torch.full_like(x.flatten(1)[:, 0], self.sigma), cond)


def require_energy(model: ScoreFunction, what: str) -> EnergyFunction:
    """Return the model; raises InputError if it has only a score."""
    if not isinstance(model, EnergyFunction):
        raise InputError(f"{what} needs an energy, but {type(model).__name__} has only a score: use an energy, or ULA")
    return model


def _check(network: nn.Module | Callable[..., Tensor], second_derivatives: bool) -> None:
    if isinstance(network, nn.Module):
        require_independent(network)
        if second_derivatives:
            require_smooth(network)
