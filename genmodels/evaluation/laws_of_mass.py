"""The density that a bijection of the plane makes of a normal latent must integrate to one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genmodels.evaluation.density import over_the_plane
from genmodels.evaluation.laws import Laws, Measured, NotApplicable
from genmodels.evaluation.subject import Subject

LAWS = Laws()

_SAMPLES = 8192  # samples that place the cells of the integral
_SETTLED = 2e-4
_POINTS = 4_000_000


@LAWS.add("integrates to one", 1e-3, "the density of a normal latent, integrated over the plane, is one")
@torch.no_grad()
def integrates_to_one(s: Subject) -> Measured:
    """On the plane mapped to a square, by cells refined until the sum settles at 2e-4."""
    if s.shape != (2,):
        raise NotApplicable("for events in the plane")
    if not all(math.isinf(end) for end in (*s.x_range, *s.z_range)):
        raise NotApplicable("defined on a part of the plane")
    latents = torch.randn(_SAMPLES, 2, generator=s.generator("plane"), dtype=torch.float64).to(s.x.device)

    def cond(rows: Tensor) -> Tensor | None:
        return None if s.cond is None else s.cond[:1].expand(len(rows), *s.cond.shape[1:])

    def log_density(points: Tensor) -> Tensor:
        z, logdet = s.run(points, cond=cond(points))
        return logdet - z.square().sum(1) / 2 - math.log(2 * math.pi)

    samples, _ = s.run(latents, True, cond=cond(latents))
    mass, doubt, seen = over_the_plane(log_density, samples, settled=_SETTLED, most=_POINTS)
    if doubt > _SETTLED:
        raise NotApplicable(f"{seen} points do not settle this integral (about {mass:.4f})")
    return Measured(abs(mass - 1), f"mass {mass:.6f}, {seen} points")
