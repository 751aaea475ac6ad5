"""Mean flows: a flow map that learns from the derivative of its own mean velocity along the flow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from genmodels.core.errors import InputError
from genmodels.core.random import Generator, normal
from genmodels.diffusion.denoiser import FlowMap
from genmodels.diffusion.process import expand
from genmodels.diffusion.shortcut import FlowMapMatching


class MeanFlow(FlowMapMatching):
    """The identity between a mean velocity and the velocity, from (t - s) u = int_s^t v, differentiated in t.

        target of u(x_t, t, s) = v - (t - s) d/dt u,   d/dt u = (v grad_x + d_t) u(x_t, t, s),   v = eps - x_0

    d/dt u is one product of the Jacobian with (v, 1, 0), in forward mode and without a gradient. Fused attention and
    compiled networks have no forward mode: plain formulas, uncompiled, take their place there.

        loss = mse / (mse + c)^p,   the divisor without a gradient

    Arguments:
        coupling: see `FlowMatching`.
        share: probability that a row has s < t.
        mean, std: of the logits of the two times of such a row, of which t is the later; of the one of other rows.
        power: p, 0 for the mean squared error itself; above 0 large errors count less.
        c: least divisor, to the power of p.

    Errors: a power outside [0, 1], a c or std that is not positive.
    Source: Geng et al., "Mean flows for one-step generative modeling", 2025, equations 6 to 11 and 22; the logits' mean
    and standard deviation of table 1d.

    Example:
        >>> objective = MeanFlow(share=0.5)
        >>> t, s = objective.ends(torch.tensor([0.2, 0.7]), torch.Generator().manual_seed(0))
        >>> (s < t).tolist()
        [True, False]
    """

    def __init__(
        self, coupling: Callable[..., Tensor] | None = None, *, share: float = 0.25, mean: float = -0.4,
        std: float = 1.0, power: float = 1.0, c: float = 1e-3,
    ):
        super().__init__(coupling, share=share)
        if not 0 <= power <= 1 or not c > 0 or not std > 0:
            raise InputError(f"power = {power}, c = {c}, std = {std}: choose a power from 0 to 1, c and std above 0")
        self.mean, self.std, self.power, self.c = mean, std, power, c

    def ends(self, u: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        logits = self.mean + self.std * normal((len(u), 2), generator, dtype=torch.float64, device=u.device)
        one, other = torch.sigmoid(logits).unbind(1)
        apart = u < self.share  # of antithetic draws the same number in every batch
        t = torch.where(apart, torch.maximum(one, other), one)
        return t, torch.where(apart, torch.minimum(one, other), one)

    def target(
        self, denoiser: FlowMap, x_t: Tensor, t: Tensor, s: Tensor, velocity: Tensor, cond: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        def u(x: Tensor, at: Tensor) -> Tensor:
            return denoiser.mean_velocity(x, at, s, cond, mask)

        with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
            _, rate = jvp(u, (x_t, t), (velocity, torch.ones_like(t)))
        return velocity - expand(t - s, x_t) * rate

    def weigh(self, mse: Tensor) -> Tensor:
        return mse / (mse.detach() + self.c) ** self.power
