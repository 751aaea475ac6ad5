"""Flow matching: regression on the velocity of paths between data and noise, and the coupling of the two."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from genmodels.core.errors import InputError, one_of, positive
from genmodels.core.random import Generator, child, uniform
from genmodels.diffusion.denoiser import Denoiser
from genmodels.diffusion.objectives import Simple
from genmodels.diffusion.parameterisation import Parameterisation, Prediction, V, Velocity
from genmodels.diffusion.path import LinearPath, Path
from genmodels.diffusion.schedule import CosineSchedule, NoiseSchedule
from genmodels.diffusion.schedule_discrete import SCHEDULES, make_schedule
from genmodels.diffusion.weighting import TimeSampler, TimeSamplerName

PathName = Literal[
    "linear", "cosine", "vp_linear", "vp_linear_continuous", "vp_grad_tts", "vp_cosine", "vp_cosine_discrete",
    "vp_sigmoid", "vp_linear_log_snr",
]  # fmt: skip

PATHS = ("linear", "cosine", *(f"vp_{schedule}" for schedule in SCHEDULES if schedule != "learned"))


def make_path(name: PathName, num_steps: int, *, sigma_min: float = 0.0) -> Path:
    """The path of a name: `linear`, `cosine` (alpha = cos(pi t/2), sigma = sin(pi t/2)), or `vp_` and a noise schedule.

    Arguments:
        num_steps: T, the length of a table of betas.
        sigma_min: the noise that `linear` leaves at t = 0.

    Errors: a name that does not exist; a sigma_min with another path than `linear`.

    Example:
        >>> make_path("cosine", 10).alpha_sigma(torch.tensor(1 / 3))[1]  # sin(pi/6)
        tensor(0.5000, dtype=torch.float64)
    """
    one_of("path", name, PATHS)
    if sigma_min and name != "linear":
        raise InputError(f"sigma_min is for path=linear: {name} has its own noise at t = 0")
    if name == "linear":
        return LinearPath(sigma_min=sigma_min)
    if name == "cosine":
        return CosineSchedule(log_snr_max=math.inf, log_snr_min=-math.inf)
    return make_schedule(name.removeprefix("vp_"), num_steps)


def velocity_of(path: Path) -> Parameterisation:
    """The parameterisation that learns the velocity of a path: u, or u/D = v if the path preserves the variance.

    Example:
        >>> [velocity_of(make_path(name, 10)).name for name in ("linear", "cosine")]
        ['velocity', 'v']
    """
    return V() if isinstance(path, NoiseSchedule) else Velocity(path)


CouplingName = Literal["independent", "ot", "sinkhorn"]


class Coupling:
    """Pairs the items of a batch with noise so that squared distances are small, within each class.

        pi = argmin sum_i |x_i - e_pi(i)|^2   (`ot`);   e ~ P(e_j | x_i), P the entropic plan   (`sinkhorn`)

    `independent` leaves the noise as drawn. The marginal distributions of data and noise stay the same, for each class
    too, but the paths between them cross less. `ot` permutes the noise, O(B^3) on the CPU: milliseconds for 256 items,
    seconds for some thousands; `sinkhorn` is O(B^2) on the device.

    Arguments:
        name: `independent`, `ot` or `sinkhorn`.
        whole: from the rows of this process to the rows of the global batch, and the slice of its own among them.
        blur: entropic regularisation of `sinkhorn`, in units of the mean squared distance.

    Errors: an unknown name; a blur that is not positive; a condition other than labels.
    Source: Tong et al., "Improving and generalizing flow-based generative models with minibatch optimal transport",
    2024, section 3.2.

    Example:
        >>> x, e = torch.tensor([[1.0], [5.0], [3.0]]), torch.tensor([[0.3], [0.1], [0.2]])
        >>> Coupling("ot")(x, e, None, torch.Generator()).flatten()
        tensor([0.1000, 0.3000, 0.2000])
    """

    def __init__(
        self, name: CouplingName = "independent", *, blur: float = 0.05,
        whole: Callable[[Tensor], tuple[Tensor, slice]] = lambda rows: (rows, slice(None)),
    ):
        one_of("coupling", name, ("independent", "ot", "sinkhorn"))
        self.name, self.blur, self.whole = name, positive("blur", blur), whole

    @torch.no_grad()
    def __call__(self, x0: Tensor, noise: Tensor, cond: Tensor | None, generator: Generator) -> Tensor:
        """The noise (B, *event) that goes with each x0 (B, *event); cond (B,) are classes, or None."""
        if self.name == "independent":
            return noise
        if cond is not None and cond.dim() != 1:
            raise ValueError(f"coupling={self.name} pairs items within classes: cond must be labels (B,), got "
                             f"{tuple(cond.shape)}; independent takes any condition")
        (x, own), (e, _) = self.whole(x0.flatten(1)), self.whole(noise.flatten(1))
        classes = torch.zeros_like(x[:, 0]) if cond is None else self.whole(cond)[0]
        chosen = torch.zeros(len(x), dtype=torch.long, device=x.device)
        drawn = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        drawn[own] = uniform((len(x0),), child(generator, "coupling"), dtype=torch.float64, device=x.device)
        for one in classes.unique():
            rows = (classes == one).nonzero().flatten()
            chosen[rows] = rows[self._partners(x[rows], e[rows], drawn[rows])]
        return e[chosen[own]].view_as(noise)

    def _partners(self, x: Tensor, e: Tensor, drawn: Tensor) -> Tensor:
        """(n,) the index of the e of each x."""
        distance = torch.cdist(x.double(), e.double()).square()
        if self.name == "ot":
            from scipy.optimize import linear_sum_assignment

            return torch.as_tensor(linear_sum_assignment(distance.cpu().numpy())[1], device=x.device)
        logits = -distance / (self.blur * distance.mean())
        for _ in range(200):  # Sinkhorn's iterations: equal mass of the columns, then of the rows
            logits = (logits - logits.logsumexp(0, keepdim=True)).log_softmax(1)
        within = logits.exp().cumsum(1)
        return torch.searchsorted(within, (drawn * within[:, -1])[:, None]).flatten().clamp(max=len(x) - 1)


class BetweenData(Denoiser):
    """The denoiser of a path that ends in data rather than noise, which has no score.

    Errors: reading the score of a prediction, which is -eps/sigma for Gaussian noise alone.
    """

    def at_log_snr(self, x, log_snr, cond=None, mask=None, estimate=None) -> Prediction:
        found = super().at_log_snr(x, log_snr, cond, mask, estimate)
        found._score = _no_score
        return found


def _no_score() -> Tensor:
    raise InputError("the score is known where the path ends in Gaussian noise, not where it ends in data")


class FlowMatching(Simple):
    """E w(t) |u - v(x_t, t)|^2 per scalar, u = alpha' x_0 + sigma' eps, over pairs of data and noise of a coupling.

    The denoiser has the parameterisation `velocity_of(path)`, so on paths that preserve the variance this is the error
    of v = u/D. w is the density of the time sampler.

    Arguments:
        coupling: how data and noise are paired, a `Coupling` or a function like one.
        time_sampler: a name in TIME_SAMPLERS or a sampler.

    Errors: a coupling but `independent` of sequences of different lengths.
    Source: Lipman et al. 2023, equation 14; Liu et al. 2023, equation 1.

    Example:
        >>> from genmodels.diffusion import GaussianDenoiser
        >>> exact = GaussianDenoiser(LinearPath(), torch.zeros(3), 1.0, parameterisation=Velocity())
        >>> out = FlowMatching(Coupling("ot"))(exact, torch.zeros(4, 3), None, torch.Generator().manual_seed(0))
        >>> out.per_example.shape, list(out.parts)
        (torch.Size([4]), ['mse'])
    """

    def __init__(
        self, coupling: Callable[..., Tensor] | None = None, *,
        time_sampler: TimeSamplerName | TimeSampler = "antithetic",
    ):
        super().__init__(time_sampler=time_sampler)
        self.coupling = coupling or Coupling()

    def __call__(self, denoiser, x0, cond, generator, rank=0, world=1, mask=None):
        pairs = isinstance(self.coupling, Coupling) and self.coupling.name != "independent"
        if pairs and mask is not None and bool((mask != mask[:1]).any()):
            # Long sequences would get wider noise than short ones; samples of any length start from N(0, I).
            raise InputError(f"coupling={self.coupling.name} is for items of one size, not for sequences of different "
                             "lengths: choose independent")
        return super().__call__(denoiser, x0, cond, generator, rank, world, mask)

    def noise(self, x0: Tensor, cond: Tensor | None, generator: Generator) -> Tensor:
        noise = self.coupling(x0, super().noise(x0, cond, generator), cond, generator)
        if noise.shape != x0.shape:
            raise InputError(f"a coupling gives noise like x0 {tuple(x0.shape)}, this one gave {tuple(noise.shape)}")
        return noise
