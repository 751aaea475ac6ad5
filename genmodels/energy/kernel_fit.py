"""Deep kernel energies: the last weights in closed form, and the loss that trains the others.

log p = alpha . k(x) - E_0(x) is linear in alpha, so every score-matching loss is quadratic in it:

    J(alpha) = linear . alpha + 1/2 alpha^T gram alpha - alpha . pull + constant
    alpha = (gram + ridge)^-1 (pull - linear)

Half of each batch gives alpha, the loss is evaluated on the other half, and gradients pass through the solution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genmodels.core.errors import InputError
from genmodels.core.processes import averaged
from genmodels.core.random import Generator, KeyedGenerator, child, normal
from genmodels.core.tensors import wide
from genmodels.energy.denoising import DenoisingScoreMatching
from genmodels.energy.function import EnergyFunction, log_density_of
from genmodels.energy.losses import (
    ExactScoreMatching,
    FiniteDifferenceScoreMatching,
    Loss,
    SlicedScoreMatching,
    SlicedScoreMatchingVR,
    draw_directions,
)
from genmodels.nn.energy_nets import DeepKernelEnergy

#: (linear (L,), gram (L, L), pull (L,)), means over a batch.
Design = tuple[Tensor, Tensor, Tensor]


class DeepKernel(EnergyFunction):
    """A deep kernel network as an energy, with its own weights or with given ones.

    Arguments:
        network: the network.
        alpha: (L,) weights in place of the network's.

    Example:
        >>> from genmodels.energy.losses import SlicedScoreMatching
        >>> model = DeepKernel(DeepKernelEnergy((2,), inducing=5))
        >>> x, generator = torch.randn(64, 2), torch.Generator().manual_seed(0)
        >>> before = float(SlicedScoreMatching()(model, x, generator).mean().detach())
        >>> model.fit(x, ExactScoreMatching(), generator)
        >>> bool(model.network.alpha.abs().sum() > 0)
        True
    """

    has_jet = True

    def __init__(self, network: DeepKernelEnergy, alpha: Tensor | None = None):
        super().__init__()
        self.network, self.alpha = network, alpha

    def energy(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        return self.network(x, cond, alpha=self.alpha)

    def jet(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(log_density_of(part) for part in self.network.jet(x, v, alpha=self.alpha))

    def trace_and_score(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(tr J (B,), s (B, D)), by jets along all coordinates, which cost less than D backward passes."""
        basis = _basis(x)
        _, slope, curvature = self.network.kernel_jets(x, basis)
        alpha = self.network.alpha if self.alpha is None else self.alpha
        base = [self.network.confinement.jet(x, v) for v in basis]
        energy_slope = torch.stack([one[1] for one in base]) - slope @ alpha  # (D, B)
        energy_curvature = torch.stack([one[2] for one in base]) - curvature @ alpha
        return log_density_of(energy_curvature).sum(0), log_density_of(energy_slope).T

    def fit(self, x: Tensor, loss: Loss, generator: Generator, *, chunk: int = 1024) -> None:
        """Set the network's weights to the minimiser of that loss on all of x (N, D), at the end of training."""
        with torch.no_grad():
            total: Design | None = None
            for start in range(0, len(x), chunk):
                some, noise = x[start : start + chunk], _rows(generator, slice(start, start + chunk))
                one = tuple(len(some) / len(x) * part for part in design(self.network, some, loss, noise))
                total = one if total is None else tuple(a + b for a, b in zip(total, one, strict=True))
            self.network.alpha.copy_(_solve(total, self.network))


class DeepKernelLoss:
    """A score-matching loss for the deep kernel: weights from one half of the batch, loss on the other.

    Arguments:
        loss: exact, sliced, sliced with reduced variance, finite differences or denoising.

    Shapes: `(model, x (B, D), generator)` to `(B - B // 2,)`.
    Errors: InputError for another loss or model, or fewer than 2 rows.
    Source: Wenliang et al. 2019, section 3.1.

    Example:
        >>> model = DeepKernel(DeepKernelEnergy((2,), inducing=5))
        >>> loss = DeepKernelLoss(loss=SlicedScoreMatchingVR())
        >>> loss(model, torch.randn(9, 2), torch.Generator().manual_seed(0)).shape
        torch.Size([5])
    """

    def __init__(self, *, loss: Loss):
        _design_of(loss)
        self.loss = loss

    def __call__(self, model: DeepKernel, x: Tensor, generator: Generator, cond: Tensor | None = None) -> Tensor:
        if not isinstance(model, DeepKernel):
            raise InputError(f"the closed form is for deep kernel energies, not {type(model).__name__}")
        if len(x) < 2:
            raise InputError("one half of a batch is fitted, the other is for the loss: at least 2 rows are needed")
        half = len(x) // 2
        # The first halves of all processes are together the first half of the global batch.
        found = design(model.network, x[:half], self.loss, child(_rows(generator, slice(None, half)), "fit"))
        alpha = _solve(tuple(averaged(part) for part in found), model.network)
        return self.loss(DeepKernel(model.network, alpha), x[half:], _rows(generator, slice(half, None)), cond)


def design(network: DeepKernelEnergy, x: Tensor, loss: Loss, generator: Generator) -> Design:
    """The quadratic form of a loss in alpha, mean over x (B, D); see the docstring of this module."""
    with torch.autocast(x.device.type, enabled=False):
        return _design_of(loss)(network, wide(x), loss, generator)


def _exact(network: DeepKernelEnergy, x: Tensor, loss: ExactScoreMatching, generator: Generator) -> Design:
    gram, pull, curvature = _all_coordinates(network, x)
    return curvature, gram, pull


def _sliced(network: DeepKernelEnergy, x: Tensor, loss: SlicedScoreMatching, generator: Generator) -> Design:
    parts = []
    for v in draw_directions(loss.projection, loss.projections, x, generator):
        _, slope, curvature = network.kernel_jet(x, v)
        parts.append((curvature.mean(0), _outer(slope), _pull(slope, network.confinement.jet(x, v)[1])))
    return _mean(parts)


def _sliced_vr(network: DeepKernelEnergy, x: Tensor, loss: SlicedScoreMatchingVR, generator: Generator) -> Design:
    gram, pull, _ = _all_coordinates(network, x)
    directions = draw_directions(loss.projection, loss.projections, x, generator)
    return torch.stack([network.kernel_jet(x, v)[2].mean(0) for v in directions]).mean(0), gram, pull


def _finite_difference(
    network: DeepKernelEnergy, x: Tensor, loss: FiniteDifferenceScoreMatching, generator: Generator
) -> Design:
    e, parts = loss.step * loss.scale, []
    zero = torch.zeros_like(x)
    for v in draw_directions(loss.projection, loss.projections, x, generator):
        here, ahead, behind = (network.kernel_jet(point, zero)[0] for point in (x, x + e * v, x - e * v))
        slope = (ahead - behind) / (2 * e)
        base = (network.confinement(x + e * v) - network.confinement(x - e * v)) / (2 * e)
        parts.append((((ahead + behind - 2 * here) / e**2).mean(0), _outer(slope), _pull(slope, base)))
    return _mean(parts)


def _denoising(network: DeepKernelEnergy, x: Tensor, loss: DenoisingScoreMatching, generator: Generator) -> Design:
    noise = normal(x.shape, generator, dtype=x.dtype, device=x.device)
    moved, sigma = x + loss.sigma * noise, loss.sigma
    gram, pull, _ = _all_coordinates(network, moved, extra=-noise / sigma)
    return torch.zeros_like(pull), sigma**2 * gram, sigma**2 * pull


_DESIGNS = {
    ExactScoreMatching: _exact,
    SlicedScoreMatching: _sliced,
    SlicedScoreMatchingVR: _sliced_vr,
    FiniteDifferenceScoreMatching: _finite_difference,
    DenoisingScoreMatching: _denoising,
}


def _design_of(loss: Loss):
    if type(loss) not in _DESIGNS:
        raise InputError(f"there is no closed form for {type(loss).__name__}: use a score-matching loss")
    return _DESIGNS[type(loss)]


def _all_coordinates(network: DeepKernelEnergy, x: Tensor, extra: Tensor | None = None) -> Design:
    """(gram, pull, trace) with full gradients, by jets along all coordinates; `extra (B, D)` is added to the base's."""
    basis = _basis(x)
    _, slope, curvature = network.kernel_jets(x, basis)
    base = torch.stack([network.confinement.jet(x, v)[1] for v in basis])  # (D, B)
    base = base if extra is None else base + extra.T
    # Means over the batch, sums over the coordinates.
    dims, slope = len(basis), slope.flatten(0, 1)
    return dims * _outer(slope), dims * _pull(slope, base.flatten()), curvature.sum(0).mean(0)


def _basis(x: Tensor) -> Tensor:
    """(D, B, D): the coordinate directions, each like x."""
    return torch.eye(x.shape[1], dtype=x.dtype, device=x.device)[:, None].expand(-1, *x.shape)


def _outer(slope: Tensor) -> Tensor:
    return slope.T @ slope / len(slope)


def _pull(slope: Tensor, base: Tensor) -> Tensor:
    return (slope * base[:, None]).mean(0)


def _mean(parts: list[Design]) -> Design:
    return tuple(torch.stack(kind).mean(0) for kind in zip(*parts, strict=True))


def _solve(found: Design, network: DeepKernelEnergy) -> Tensor:
    """alpha (L,), in float64 because the matrix is ill-conditioned; NaN if there is no solution."""
    linear, gram, pull = (part.to(torch.float64) for part in found)
    ridge = network.log_ridge.exp().to(torch.float64) * torch.eye(len(linear), dtype=torch.float64, device=gram.device)
    alpha, fault = torch.linalg.solve_ex(gram + ridge, pull - linear)
    return torch.where(fault == 0, alpha, torch.nan).to(network.alpha.dtype)


def _rows(generator: Generator, which: slice) -> Generator:
    """The generator of some rows, if it is keyed."""
    return generator.rows(which) if isinstance(generator, KeyedGenerator) else generator
