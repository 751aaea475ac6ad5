"""Samples of a noise-conditional score model: through the noise levels, from the largest down."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from genmodels.energy import NoiseConditionalScore, annealed_langevin, predictor_corrector
from genmodels.random import KeyedGenerator


class _Walk(NamedTuple):
    """A sampler: its function, the default number of levels, and its evaluations at each level."""

    function: Callable[..., Tensor]
    steps: int
    evaluations: int


#: Langevin steps at each level of `annealed_langevin`.
_EACH = 10
#: What `sampler=` may be for score models.
SAMPLERS = {
    "predictor_corrector": _Walk(predictor_corrector, 200, 2),
    "annealed_langevin": _Walk(annealed_langevin, 40, _EACH),
}
_FEW = 16  # dimensions up to which a corrector harms: lengths of scores vary too much there


class _Tempered(nn.Module):
    """The scores of p^beta at every level."""

    def __init__(self, model: NoiseConditionalScore, inverse_temperature: float):
        super().__init__()
        self.model, self.inverse_temperature = model, inverse_temperature

    def score_at(self, x: Tensor, sigma: Tensor, cond: Tensor | None = None) -> Tensor:
        return self.inverse_temperature * self.model.score_at(x, sigma, cond)


def walk_levels(
    model: NoiseConditionalScore,
    shape: tuple[int, ...],
    largest: float,
    smallest: float,
    generator: KeyedGenerator,
    *,
    sampler: str,
    steps: int,
    inverse_temperature: float = 1.0,
    cond: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    callback: Callable[[int, Tensor], None],
) -> tuple[Tensor, int]:
    """(samples like `shape`, evaluations of the network), by `steps` levels that fall geometrically.

    It ends with the mean of the clean data given the last point; `callback(number, x)` is called `steps` times.

    Example:
        >>> exact = NoiseConditionalScore(lambda x, sigma, cond=None: (3 - x) / sigma[:, None] ** 2)  # data: 3
        >>> keyed = KeyedGenerator(0, torch.arange(2), "sample")
        >>> x, evaluations = walk_levels(exact, (2, 1), 4.0, 0.1, keyed, sampler="annealed_langevin", steps=5,
        ...                              callback=lambda done, x: None)
        >>> [round(value, 4) for value in x.flatten().tolist()], evaluations
        ([3.0, 3.0], 102)
    """
    walk = SAMPLERS[sampler]
    sigmas = torch.logspace(0, 1, steps, base=smallest / largest, dtype=torch.float64).mul(largest).tolist()
    if sampler == "annealed_langevin":
        options: dict = {"steps_per_level": _EACH}
        evaluations = steps * _EACH + 1
    else:
        corrections = 0 if torch.Size(shape[1:]).numel() <= _FEW else 1
        options = {"corrector_steps": corrections}
        evaluations = (steps - 1) * (1 + corrections) + 1
    z = walk.function(
        _Tempered(model, inverse_temperature), shape, sigmas, generator, denoise=False, cond=cond, dtype=dtype,
        device=device, callback=lambda done, x: callback(done, x) if done < steps - 1 else None, **options,
    )  # fmt: skip
    last = torch.full((len(z),), sigmas[-1], dtype=z.dtype, device=z.device)
    z = z + sigmas[-1] ** 2 * model.score_at(z, last, cond)
    callback(steps - 1, z)
    return z, evaluations * len(z)
