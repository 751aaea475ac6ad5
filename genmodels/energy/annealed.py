"""Sampling from a noise-conditional score, from the largest noise level down to the smallest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from genmodels.core.errors import InputError, check_temperature
from genmodels.core.random import Generator, at_step
from genmodels.energy.function import NoiseConditionalScore
from genmodels.energy.kernels import noise_like

Callback = Callable[[int, Tensor], None]


def annealed_langevin(
    model: NoiseConditionalScore,
    shape,
    sigmas: Sequence[float],
    generator: Generator,
    *,
    steps_per_level: int = 10,
    step: float | None = None,
    temperature: float = 1.0,
    denoise: bool = True,
    start: Tensor | None = None,
    cond: Tensor | None = None,
    dtype=torch.float32,
    device=None,
    callback: Callback | None = None,
) -> Tensor:
    """Annealed Langevin dynamics: unadjusted Langevin steps at each noise level, from the largest to the smallest.

        h_i = c sigma_i^2 / sigma_L^2,   x <- x + h_i s(x, sigma_i) + tau sqrt(2 h_i) xi
        at the end   x <- x + sigma_L^2 s(x, sigma_L)

    The last line is the posterior mean of the clean data given x. There is no correction and no stationary density, so
    that acceptance, effective sample size and R-hat are undefined.

    Arguments:
        shape: (B, *event).
        sigmas: decreasing noise levels, as from `noise_levels`.
        steps_per_level: steps at each of them.
        step: c, the step size at the smallest level; None is a tenth of sigma_L^2 (the alpha of the source is 2h).
        temperature: tau, a factor on the standard deviation of all noise: densities p^(1/tau^2) at every level.
        denoise: whether to end with the posterior mean.
        start: (B, *event) in place of N(0, tau^2 sigma_1^2).
        callback: called after each level as callback(number from 0, x).

    Errors: InputError for levels that do not decrease, a temperature below 0 or not finite.
    Source: Song and Ermon 2019, algorithm 1; the last step is technique 4 of Jolicoeur-Martineau et al. 2021.

    Example:
        >>> model = NoiseConditionalScore(lambda x, sigma, cond=None: (3 - x) / sigma[:, None] ** 2)  # data: 3
        >>> x = annealed_langevin(model, (2, 1), (4.0, 1.0, 0.1), torch.Generator().manual_seed(0))
        >>> x.flatten().tolist()
        [3.0, 3.0]
    """
    require_decreasing(sigmas)
    check_temperature(temperature)
    x = _start(shape, temperature * sigmas[0], generator, start, dtype, device)
    smallest = sigmas[-1]
    c = 0.1 * smallest**2 if step is None else step
    with torch.no_grad():
        for i, sigma in enumerate(sigmas):
            h = c * sigma**2 / smallest**2
            for k in range(steps_per_level):
                noise = noise_like(x, at_step(generator, 1 + i * steps_per_level + k))
                x = x + h * _score(model, x, sigma, cond) + temperature * (2 * h) ** 0.5 * noise
            if callback is not None:
                callback(i, x)
        return x + smallest**2 * _score(model, x, smallest, cond) if denoise else x


def predictor_corrector(
    model: NoiseConditionalScore,
    shape,
    sigmas: Sequence[float],
    generator: Generator,
    *,
    snr: float = 0.16,
    corrector_steps: int = 1,
    denoise: bool = True,
    start: Tensor | None = None,
    cond: Tensor | None = None,
    dtype=torch.float32,
    device=None,
    callback: Callback | None = None,
) -> Tensor:
    """A step of the reverse diffusion between noise levels, then Langevin steps at the new level.

        predictor   x <- x + (sigma_i^2 - sigma_{i+1}^2) s(x, sigma_i) + sqrt(sigma_i^2 - sigma_{i+1}^2) xi
        corrector   x <- x + h s(x, sigma_{i+1}) + sqrt(2h) xi,   h = min((snr |xi| / |s|)^2, sigma_{i+1}^2)

    Norms are those of each example, where the source takes their mean over the batch. The bound on h is ours: if the
    score of an example nearly vanishes, the quotient is unbounded. In few dimensions the quotient varies strongly, and
    the predictor alone (`corrector_steps=0`) is more accurate.

    Arguments:
        shape: (B, *event).
        sigmas: decreasing noise levels.
        snr: ratio of the norms of a corrector's drift and noise, up to a factor.
        corrector_steps: corrections at each level; 0 is the predictor alone.
        denoise: whether to end with the posterior mean of the clean data given x.
        start: (B, *event) in place of N(0, sigma_1^2).
        callback: called after each level as callback(number from 0, x).

    Errors: InputError for levels that do not decrease.
    Source: Song et al. 2021, "Score-based generative modeling through SDEs", algorithms 2 and 4; its epsilon is h.

    Example:
        >>> model = NoiseConditionalScore(lambda x, sigma, cond=None: (3 - x) / sigma[:, None] ** 2)  # data: 3
        >>> x = predictor_corrector(model, (2, 1), (4.0, 1.0, 0.1), torch.Generator().manual_seed(0))
        >>> [round(value, 4) for value in x.flatten().tolist()]
        [3.0, 3.0]
    """
    require_decreasing(sigmas)
    x = _start(shape, sigmas[0], generator, start, dtype, device)
    with torch.no_grad():
        for i, (sigma, smaller) in enumerate(zip(sigmas[:-1], sigmas[1:], strict=True)):
            keyed = at_step(generator, 1 + i)
            gap = sigma**2 - smaller**2
            x = x + gap * _score(model, x, sigma, cond) + gap**0.5 * noise_like(x, keyed)
            for _ in range(corrector_steps):
                score, noise = _score(model, x, smaller, cond), noise_like(x, keyed)
                ratio = _length(noise) / _length(score)
                h = (snr * ratio).square().clamp(max=smaller**2)
                x = x + h * score + (2 * h).sqrt() * noise
            if callback is not None:
                callback(i, x)
        smallest = sigmas[-1]
        return x + smallest**2 * _score(model, x, smallest, cond) if denoise else x


def require_decreasing(sigmas: Sequence[float]) -> None:
    """Raises InputError unless the noise levels are positive and decrease."""
    pairs = zip(sigmas[:-1], sigmas[1:], strict=True)
    if not len(sigmas) or sigmas[-1] <= 0 or any(smaller >= larger for larger, smaller in pairs):
        raise InputError("noise levels must be positive and decrease, from the largest to the smallest")


def _start(shape, sigma: float, generator: Generator, start: Tensor | None, dtype, device) -> Tensor:
    if start is not None:
        return start.to(device=device, dtype=dtype)
    return sigma * noise_like(torch.empty(tuple(shape), dtype=dtype, device=device), at_step(generator, 0))


def _score(model: NoiseConditionalScore, x: Tensor, sigma: float, cond: Tensor | None) -> Tensor:
    return model.score_at(x, x.new_full((len(x),), sigma), cond)


def _length(x: Tensor) -> Tensor:
    """(B, 1, ..., 1) norms of the events."""
    return x.flatten(1).norm(dim=1).reshape(-1, *(1,) * (x.dim() - 1)).clamp(min=torch.finfo(x.dtype).tiny)
