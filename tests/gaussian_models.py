"""One Gaussian as a flow, as a diffusion and as an energy: models without training whose every number is known.

What the evaluation says of them can be held against the truth: the three must agree within the errors they state.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from genmodels.core.data import DataSpec
from genmodels.diffusion import GaussianDenoiser
from genmodels.energy import Energy
from genmodels.flows.bases import StandardNormal
from genmodels.flows.bijection import Bijection
from genmodels.flows.composition import Compose
from genmodels.flows.discrete import ContinuousFlow
from genmodels.flows.flow import Flow
from genmodels.models.base import GenerativeModel
from genmodels.models.ddpm import DDPM
from genmodels.models.energy import EnergyModel
from genmodels.models.flow import FlowModel
from tests.untrained import write


def moments(mean: list, covariance: list) -> tuple[Tensor, Tensor]:
    """Mean (D,) and covariance (D, D), float64."""
    return torch.tensor(mean, dtype=torch.float64), torch.tensor(covariance, dtype=torch.float64)


def log_prob(x: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """(B,) log N(x; mean, covariance), float64."""
    return MultivariateNormal(mean, covariance).log_prob(x.double())


class Whitening(Bijection):
    """z = L^-1 (x - m) with L L' = C, the map of N(m, C) to N(0, I).

    Arguments:
        mean: m (D,).
        covariance: C (D, D).

    Example:
        >>> Whitening(torch.ones(1), 4 * torch.eye(1))(torch.tensor([[3.0]]))[0]
        tensor([[1.]], grad_fn=...)
    """

    constant_logdet = True

    def __init__(self, mean: Tensor, covariance: Tensor):
        super().__init__()
        self.mean = nn.Parameter(mean.float())
        self.lower = nn.Parameter(torch.linalg.cholesky(covariance.double()).float())

    def _volume(self, x: Tensor) -> Tensor:
        return self.lower.diagonal().log().sum().expand(len(x))

    def _forward(self, x, cond, mask):
        lower = self.lower.to(x.dtype)
        return torch.linalg.solve_triangular(lower, (x - self.mean).T, upper=False).T, -self._volume(x)

    def _inverse(self, z, cond, mask):
        return z @ self.lower.T.to(z.dtype) + self.mean, self._volume(z)


class GaussianFlow(FlowModel):
    """N(mean, covariance) as a flow of one linear layer.

    Arguments:
        spec: vectors of continuous data.
        mean, covariance: of the data.
        **shared: what all flows take, see `FlowModel`.

    Example:
        >>> model = GaussianFlow(DataSpec("line", (1,)), mean=[0.0], covariance=[[1.0]])
        >>> model.family
        'gaussian flow'
    """

    family = "gaussian flow"

    def __init__(self, spec: DataSpec, *, mean: list, covariance: list, **shared):
        super().__init__(spec, **{**shared, "ema_decay": 0.0})
        bijection = Compose([Whitening(*moments(mean, covariance))], spec.event_shape)
        self.core = ContinuousFlow(Flow(bijection, StandardNormal(spec.event_shape)))
        self.finish_setup(None, 0.0)


class GaussianDiffusion(DDPM):
    """N(mean, covariance) as a diffusion whose denoiser is the exact one.

    Arguments:
        spec: vectors of continuous data.
        mean, covariance: of the data.
        **shared: what all diffusion models take, see `DDPM`; of the network nothing is used.

    Example:
        >>> model = GaussianDiffusion(DataSpec("line", (1,)), mean=[0.0], covariance=[[1.0]], num_steps=10)
        >>> model.sample(2).x.shape
        torch.Size([2, 1])
    """

    family = "gaussian diffusion"

    def __init__(self, spec: DataSpec, *, mean: list, covariance: list, **shared):
        super().__init__(spec, **{**shared, "ema_decay": 0.0, "net": {"hidden": 4, "depth": 1}})
        self.core = GaussianDenoiser.from_covariance(self.core.schedule, *moments(mean, covariance))


class _Quadratic(nn.Module):
    """1/2 (x - m)' C^-1 (x - m), a network for an energy; it is its own confinement."""

    confinement = True

    def __init__(self, mean: Tensor, covariance: Tensor):
        super().__init__()
        self.mean = nn.Parameter(mean.float())
        self.precision = nn.Parameter(torch.linalg.inv(covariance).float())

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean
        return 0.5 * (centred @ self.precision.to(x.dtype) * centred).sum(1)


class GaussianEnergy(EnergyModel):
    """N(mean, covariance) as an energy whose constant is not given.

    Arguments:
        spec: vectors of continuous data.
        mean, covariance: of the data.
        **shared: what all energies take, see `EnergyModel`; of the network nothing is used.

    Example:
        >>> model = GaussianEnergy(DataSpec("line", (1,)), mean=[0.0], covariance=[[1.0]])
        >>> round(model.normaliser().log_z, 6)  # 1/2 log 2 pi
        0.918939
    """

    family = "gaussian energy"

    def __init__(self, spec: DataSpec, *, mean: list, covariance: list, **shared):
        super().__init__(spec, **{**shared, "ema_decay": 0.0})
        m, c = moments(mean, covariance)
        self.core = Energy(_Quadratic(m, c))
        self.mean.copy_(m.view_as(self.mean))
        self.covariance.copy_(c if self.covariance.dim() == 2 else c.diagonal())


def save(model: GenerativeModel, path: str | Path, data: dict) -> None:
    """Write a model that was never trained as a checkpoint.

    Arguments:
        model: the model.
        path: the file.
        data: which data it is evaluated on, `_target_` and options as in configs/data.
    """
    model.run_config = {"data": data, "logger": {"wandb": "off"}}
    model.finished = True
    write(model, path)
