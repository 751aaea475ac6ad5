"""Denoising score matching with one or many noise levels, energies of all levels, and contrastive divergence."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from genmodels.core.errors import InputError, RunError, at_least, check_number, positive
from genmodels.core.random import Generator, KeyedGenerator, at_step, child, normal, shared_uniform, uniform
from genmodels.energy.annealed_importance import LogPartition, for_rows
from genmodels.energy.function import EnergyFunction, ScoreFunction, log_density_of, require_energy
from genmodels.energy.kernels import ULA, Target, noise_like
from genmodels.energy.losses import half_square


def denoising(score: Tensor, noise: Tensor, sigma: Tensor | float) -> Tensor:
    """1/2 sigma^2 |s(x + sigma n) + n/sigma|^2 = 1/2 |sigma s + n|^2, (B,): the target is the direction back to x.

    Source: Vincent 2011, equation 10; the weight sigma^2 of Song and Ermon 2019, equation 6.

    Example:
        >>> denoising(torch.tensor([[-1.0]]), torch.tensor([[0.5]]), 0.5)
        tensor([0.])
    """
    return half_square(sigma * score + noise)


class DenoisingScoreMatching:
    """1/2 sigma^2 |s(x + sigma n) + n/sigma|^2, n ~ N(0, I).

    The minimiser is the score of the data with noise N(0, sigma^2).

    Arguments:
        sigma: standard deviation of the noise.

    Errors: InputError for a sigma that is not positive and finite.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> narrow = LogDensity(lambda x: -0.5 * x.square().sum(1) / 0.3**2)
        >>> point = torch.zeros(4, 2)
        >>> bool(DenoisingScoreMatching(sigma=0.3)(narrow, point, torch.Generator().manual_seed(0)).max() < 1e-12)
        True
    """

    def __init__(self, *, sigma: float = 0.1):
        self.sigma = positive("sigma", sigma)

    def __call__(self, model: ScoreFunction, x: Tensor, generator: Generator, cond: Tensor | None = None) -> Tensor:
        noise = normal(x.shape, generator, dtype=x.dtype, device=x.device)
        return denoising(model.score(x + self.sigma * noise, cond), noise, self.sigma)


def largest_distance(x: Tensor, chunk: int = 1024) -> float:
    """The largest distance between two events, by which the largest noise level can be chosen.

    Source: Song and Ermon 2020, technique 1.

    Example:
        >>> largest_distance(torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 1.0]]))
        5.0
    """
    rows = x.flatten(1).double()
    rows = rows - rows.mean(0)  # cdist takes products, which round less around zero
    return max(float(torch.cdist(some, rows).max()) for some in rows.split(chunk))


class NoiseLevels(EnergyFunction):
    """The energy of a diffusion at one noise level, and the path of noise levels that leads there from N(0, I).

        x = alpha x_0 + sigma eps,   log SNR = log(alpha^2/sigma^2)

    Arguments:
        network: `network.energy(x, log_snr (B,), cond)` is `(B,)`, as of `Potential`.
        log_snr: log-SNR of the level.

    Example:
        >>> from genmodels.energy import Potential
        >>> level = NoiseLevels(Potential(lambda x, log_snr, cond: torch.zeros_like(x)), 4.0)
        >>> level.energy(torch.ones(1, 2)).tolist(), level.score(torch.ones(1, 2)).tolist()
        ([1.0], [[-1.0, -1.0]])
    """

    def __init__(self, network: nn.Module, log_snr: float):
        super().__init__()
        self.network, self.log_snr = network, float(log_snr)

    def energy(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        return self.network.energy(x, x.new_full((len(x),), self.log_snr), cond)

    def path(self, steps: int) -> list[NoiseLevels]:
        """Levels uniform in log-SNR, the last of them this one; at the first there is hardly any signal left."""
        values = torch.linspace(_NOISIEST, self.log_snr, steps + 1).tolist()
        return [NoiseLevels(self.network, value) for value in values]


_NOISIEST = -8.0  # log-SNR at which the chains start from noise
_LEAST = 0.01  # smallest variance of a step, as a share of that without curvature


class DiffusionImportanceSampling:
    """log Z of an energy at one noise level by importance sampling with the steps of its diffusion, in both directions.

        q(x_{k-1}|x_k) = N(r x_k, v)                            the diffusion, from level k to the noisier k-1
        p(x_k|x_{k-1}) = N((x_{k-1} + v s)/r, v (1 - v g)/r^2)    its reversal, s the score, g the mean of s^2
        w = exp(1/2 |x_0|^2 - E(x_K)) prod_k q(x_{k-1}|x_k)/p(x_k|x_{k-1}),   x_0 ~ N(0, I)

    E[w] = Z (2 pi)^{-D/2}, whatever the energies are; with the scores of one diffusion and many steps w is constant.
    For N chains, in expectation, log mean w + D/2 log(2 pi) is below log Z, and the same with the mean over N chains
    and one more that runs from a draw of the model to noise is above it. Both share the N chains, so they are not
    independent checks.

    Arguments:
        steps: K, the number of noise levels.
        tune: chains of a pilot run that finds g, independent of the chains of the estimate.

    Source: Doucet et al. 2022, "Score-based diffusion meets annealed importance sampling", section 3; g: Bao et al.
    2022, "Analytic-DPM", theorem 1; the upper bound of many chains: Brekelmans et al. 2022, section 3.2.

    Example:
        >>> from genmodels.core.random import KeyedGenerator
        >>> from genmodels.energy import Potential
        >>> normal = NoiseLevels(Potential(lambda x, log_snr, cond: torch.zeros_like(x)), 4.0)
        >>> keyed = KeyedGenerator(0, torch.arange(100), "log Z")
        >>> found = DiffusionImportanceSampling(steps=50)(normal, (2,), keyed, chains=100)
        >>> abs(found.log_z - math.log(2 * math.pi)) < 0.05, found.width < 0.05
        (True, True)
    """

    def __init__(self, *, steps: int = 200, tune: int = 128):
        if min(steps, tune) < 2:
            raise InputError(f"steps = {steps} and tune = {tune} must be at least 2")
        self.steps, self.tune = steps, tune

    @torch.no_grad()
    def __call__(
        self, model: NoiseLevels, event_shape: tuple[int, ...], generator: Generator, *, chains: int,
        samples: Tensor | None = None, cond: Tensor | None = None, dtype=torch.float32,
    ) -> LogPartition:
        """Run both directions and estimate log Z.

        Arguments:
            event_shape: shape of x without the batch.
            generator: keyed by chain, or a torch.Generator.
            chains: number of chains in each direction.
            samples: (B, *event) exact draws of the model; None draws from the forward chains, by their weights.
            cond: (B, ...) condition, the same for all chains.
            dtype: of the points; weights are float64.

        Raises:
            InputError: for fewer than two chains, or a level as noisy as the first of the path.
        """
        if chains < 2:
            raise InputError(f"chains = {chains} must be at least 2: the spread of their weights is the standard error")
        if not model.log_snr > _NOISIEST:
            raise InputError(f"log_snr = {model.log_snr:g} must be above {_NOISIEST:g}, where the chains start from "
                             "noise")  # fmt: skip
        pilot, given = for_rows(self.tune, child(generator, "tune"), cond)
        like = torch.empty(event_shape, dtype=dtype, device=next(model.parameters(), torch.empty(0)).device)
        _, _, curvatures = self._forward(model, like.expand(self.tune, *event_shape), pilot, given, None)
        x, log_w, _ = self._forward(model, like.expand(chains, *event_shape), generator, cond, curvatures)
        label = "approximate" if samples is None else "exact"
        if samples is None:
            u = uniform((chains,), child(generator, "draws"), dtype=torch.float64, device=x.device)
            rows = torch.searchsorted(torch.softmax(log_w, 0).cumsum(0), u).clamp(max=chains - 1)
            samples = x[rows]
        keyed, cond = for_rows(len(samples), child(generator, "reverse"), cond)
        reverse = self._reverse(model, samples, keyed, cond, curvatures)
        dims = math.prod(event_shape)
        base = 0.5 * dims * math.log(2 * math.pi)
        forward = LogPartition.of_weights(log_w, None, base, dims=dims, steps=self.steps, kernel="diffusion")
        upper = torch.logaddexp(reverse, torch.logsumexp(log_w, 0)) - math.log(chains + 1) + base
        error = float(upper.std()) / math.sqrt(len(upper))
        return replace(forward, lower=forward.log_z, lower_stderr=forward.stderr, upper=float(upper.mean()),
                       upper_stderr=math.hypot(error, forward.stderr), grid="log-SNR", reverse=label)

    def _forward(
        self, model: NoiseLevels, like: Tensor, generator: Generator, cond: Tensor | None, curvatures: list | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(x_K, log w, the mean of s^2 at every level) of chains from noise to the model."""
        x, measured, path = noise_like(like, at_step(generator, 0)), [], model.path(self.steps)
        log_w = half_square(x.double())
        for k, (noisier, cleaner) in enumerate(pairwise(path)):
            score = noisier.score(x, cond).double()
            measured.append(score.square().mean(0))
            step = _Step(noisier, cleaner, measured[-1] if curvatures is None else curvatures[k])
            mean = step.mean(x, score)
            x_next = (mean + step.spread * noise_like(x, at_step(generator, 1 + k))).to(x.dtype)
            log_w += step.log_ratio(x, x_next, mean)
            x = x_next
        return x, log_w - model.energy(x, cond).double(), measured

    def _reverse(
        self, model: NoiseLevels, x: Tensor, generator: Generator, cond: Tensor | None, curvatures: list[Tensor]
    ) -> Tensor:
        """log w of chains from the model to noise."""
        log_w = log_density_of(model.energy(x, cond).double())
        levels = list(enumerate(pairwise(model.path(self.steps))))
        for k, (noisier, cleaner) in reversed(levels):
            step = _Step(noisier, cleaner, curvatures[k])
            before = (step.r * x + math.sqrt(step.v) * noise_like(x, at_step(generator, k))).to(x.dtype)
            log_w += step.log_ratio(before, x, step.mean(before, noisier.score(before, cond).double()))
            x = before
        return log_w + half_square(x.double())


class _Step:
    """The kernels q and p between two neighbouring levels, see `DiffusionImportanceSampling`."""

    def __init__(self, noisier: NoiseLevels, cleaner: NoiseLevels, curvature: Tensor):
        before, after = (1 / (1 + math.exp(-level.log_snr)) for level in (noisier, cleaner))  # alpha^2
        self.r = math.sqrt(before / after)
        self.v = 1 - before - self.r**2 * (1 - after)
        self.spread = (self.v / self.r**2 * (1 - self.v * curvature).clamp(min=_LEAST)).sqrt()

    def mean(self, x: Tensor, score: Tensor) -> Tensor:
        """The mean of p(x_k|x_{k-1} = x)."""
        return (x + self.v * score) / self.r

    def log_ratio(self, x: Tensor, x_next: Tensor, mean: Tensor) -> Tensor:
        """(B,) log q(x|x_next) - log p(x_next|x)."""
        back, ahead = (x.double() - self.r * x_next.double()) / math.sqrt(self.v), (x_next - mean) / self.spread
        return half_square(ahead) - half_square(back) + (self.spread / math.sqrt(self.v)).log().sum()


class ContrastiveDivergence(nn.Module):
    """E(x) - E(x') + penalty (E(x)^2 + E(x')^2), x' from short persistent Langevin chains.

    For exact samples x' of the model the expected gradient of E(x) - E(x') is that of -log p(x); short chains
    approximate it. The value itself is unrelated to the likelihood. The chains are in a buffer of this module's state,
    so that training resumes exactly from a checkpoint.

    Arguments:
        event_shape: shape of x.
        size: chains in the buffer.
        restarts: share of chains that restart from noise at each use.
        steps: Langevin steps per use.
        step_size: h of these steps.
        penalty: weight of the squared energies, which keeps them from drifting.
        spread: standard deviation of the initial noise.

    Shapes: `(model, x (B, *event), generator, cond)` to `(B,)`, B at most `size`.
    Errors: InputError for a score without energy, or batches larger than the buffer; ValueError for options out of
    range.
    Source: Tieleman 2008 (persistent chains); Du and Mordatch 2019, "Implicit generation with energy-based models".

    Example:
        >>> from genmodels.energy.ground_truth import Quadratic
        >>> loss = ContrastiveDivergence((2,), size=100, steps=2)
        >>> loss(Quadratic(torch.eye(2)), torch.zeros(8, 2), torch.Generator().manual_seed(0)).shape
        torch.Size([8])
    """

    def __init__(
        self, event_shape: tuple[int, ...], *, size: int = 10_000, restarts: float = 0.05, steps: int = 60,
        step_size: float = 0.01, penalty: float = 1e-3, spread: float = 1.0,
    ):
        super().__init__()
        at_least(1, size=size, steps=steps)
        check_number("restarts", restarts, 0, 1)
        check_number("penalty", penalty, 0)
        self.kernel, self.steps = ULA(step_size=step_size), steps
        self.restarts, self.penalty, self.spread = restarts, penalty, positive("spread", spread)
        noise = KeyedGenerator(0, torch.arange(size), "replay").normal((size, *event_shape))
        self.register_buffer("chains", spread * noise)

    def forward(self, model: EnergyFunction, x: Tensor, generator: Generator, cond: Tensor | None = None) -> Tensor:
        model = require_energy(model, "contrastive divergence")
        model_energy = model.energy(self.sample(model, x, generator, cond), cond)
        data_energy = model.energy(x, cond)
        return data_energy - model_energy + self.penalty * (data_energy.square() + model_energy.square())

    @torch.no_grad()
    def sample(self, model: EnergyFunction, x: Tensor, generator: Generator, cond: Tensor | None = None) -> Tensor:
        """(B, *event) chains after `steps` steps, also stored in the buffer."""
        size = len(self.chains)
        if len(x) > size:
            raise InputError(f"a batch of {len(x)} is larger than the buffer of {size} chains: give a larger size")
        # Consecutive chains from a random position, so that no chain is used twice.
        first = int(shared_uniform(1, generator)[0] * size)
        slots = (first + torch.arange(len(x), device=x.device)) % size
        fresh = self.spread * normal(x.shape, generator, dtype=x.dtype, device=x.device)
        restarted = uniform((len(x),), generator, device=x.device) < self.restarts
        start = torch.where(restarted.reshape(-1, *(1,) * (x.dim() - 1)), fresh, self.chains[slots].to(x.dtype))
        target = Target(model, cond)
        point = target.evaluate(start)
        step_size = torch.full((len(x),), self.kernel.step_size, device=x.device)
        for _ in range(self.steps):
            point, _ = self.kernel(target, point, generator, step_size)
        if not bool(point.x.isfinite().all()):
            raise RunError("a chain of contrastive divergence left all bounds; the buffer is as before: take a smaller "
                           "step_size")
        self.chains[slots] = point.x.to(self.chains.dtype)
        return point.x
