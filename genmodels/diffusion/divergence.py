"""The divergence of a vector field, sum_i d f_i / d x_i: exactly, or by random probes.

Every function takes `field(x (B, *event)) -> (B, *event)`, in which row b of the result depends on row b alone, and
gives `(field(x), estimates (B, M))`. Masked positions belong neither to the field nor to its divergence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from genmodels.diffusion.masks import hide, spread
from genmodels.nn.autograd import usable
from genmodels.random import Generator, uniform

Field = Callable[[Tensor], Tensor]


def exact_divergence(field: Field, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The trace of the Jacobian by one vector-Jacobian product for each scalar of the event; one column.

    Example:
        >>> exact_divergence(lambda x: x**2 / 2, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))[1]
        tensor([[3.],
                [7.]])
    """
    with torch.inference_mode(False), torch.enable_grad():
        mask = usable(mask)
        x = hide(usable(x), mask).detach().requires_grad_()
        y = hide(field(x), mask)
    # Where no example is valid at a place there is nothing to add, and its product is saved.
    units = torch.eye(x[0].numel(), dtype=x.dtype, device=x.device)
    used = range(len(units)) if mask is None else _used(x, mask)
    total = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    for i in used:
        (gradient,) = torch.autograd.grad(y, x, units[i].view(x.shape[1:]).expand_as(y), retain_graph=True)
        total += gradient.flatten(1)[:, i]
    return y.detach(), total[:, None]


def hutchinson(field: Field, x: Tensor, probes: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """e^T J e for each probe e: unbiased, since E[e e^T] = I; exact for a J that is diagonal and e of signs.

    Shapes: probes (B, M, *event), the same all along a path; one column a probe.
    Source: Hutchinson 1990; for the likelihood of continuous flows Grathwohl et al. 2019, section 3.1.

    Example:
        >>> x, probes = torch.zeros(1, 2), torch.tensor([[[1.0, -1.0], [1.0, 1.0]]])
        >>> hutchinson(lambda x: torch.stack([x[:, 0] + 3 * x[:, 1], x[:, 1]], 1), x, probes)[1]
        tensor([[-1.,  5.]])
    """
    with torch.inference_mode(False), torch.enable_grad():
        mask = usable(mask)
        x = hide(usable(x), mask).detach().requires_grad_()
        y = hide(field(x), mask)
    probes = probes.to(x.dtype)
    estimates = []
    for probe in probes.unbind(1):
        e = hide(probe, mask)
        (gradient,) = torch.autograd.grad(y, x, e, retain_graph=True)
        estimates.append((gradient * e).flatten(1).sum(1))
    return y.detach(), torch.stack(estimates, 1)


def rademacher(shape: tuple[int, ...], generator: Generator, *, device: torch.device | None = None) -> Tensor:
    """Signs +-1 with equal probability, float64: the probes of least variance among those with independent entries.

    Example:
        >>> rademacher((1, 4), torch.Generator().manual_seed(0)).abs()
        tensor([[1., 1., 1., 1.]], dtype=torch.float64)
    """
    u = uniform(shape, generator, dtype=torch.float64, device=device)
    return torch.where(u < 0.5, -1.0, 1.0).to(torch.float64)


def _used(x: Tensor, mask: Tensor) -> list[int]:
    return spread(mask, x).expand_as(x).flatten(1).any(0).nonzero().flatten().tolist()
