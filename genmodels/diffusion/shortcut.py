"""Flow maps that learn steps of any length: shortcut models from two own steps, mean flows from a derivative."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from genmodels.core.errors import InputError
from genmodels.core.random import Generator, normal, uniform
from genmodels.core.tensors import event_mean
from genmodels.diffusion.denoiser import FlowMap
from genmodels.diffusion.flow_matching import FlowMatching
from genmodels.diffusion.objectives import ObjectiveOutput
from genmodels.diffusion.path import expand
from genmodels.diffusion.weighting import TimeSamplerName


class FlowMapMatching(FlowMatching):
    """E |u(x_t, t, s) - target|^2 per scalar: on most rows s = t and the target is the path's velocity eps - x_0.

    On a share of the rows s < t, and the target is what a subclass makes of the network itself, without a gradient or
    dropout.

    Arguments:
        coupling, time_sampler: see `FlowMatching`.
        share: probability that a row has s < t.

    Errors: a share outside (0, 1); a denoiser that is no `FlowMap`.
    """

    def __init__(
        self, coupling: Callable[..., Tensor] | None = None, *, share: float,
        time_sampler: TimeSamplerName = "antithetic",
    ):
        super().__init__(coupling, time_sampler=time_sampler)
        if not 0 < share < 1:
            raise InputError(f"share = {share} of the rows that learn steps: choose a number between 0 and 1")
        self.share = share

    def ends(self, u: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """(t, s) (B,) float64, s <= t, of the draws u of the time sampler."""
        raise NotImplementedError

    def target(
        self, denoiser: FlowMap, x_t: Tensor, t: Tensor, s: Tensor, velocity: Tensor, cond: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """What u(x_t, t, s) should be, like x_t, on rows with s < t."""
        raise NotImplementedError

    def weigh(self, mse: Tensor) -> Tensor:
        """(B,) the loss of rows with these mean squared errors."""
        return mse

    def check(self, denoiser) -> None:
        """Raise where this objective cannot train the denoiser."""
        super().check(denoiser)
        if not isinstance(denoiser, FlowMap):
            raise InputError("steps are learned by a network of two times: take a FlowMap as the denoiser")

    def at_times(
        self, denoiser: FlowMap, x0: Tensor, cond: Tensor | None, generator: Generator, u: Tensor, weight: Tensor,
        mask: Tensor | None,
    ) -> ObjectiveOutput:
        noise = self.noise(x0, cond, generator)
        t, s = self.ends(u, generator)
        x_t, velocity = x0 + expand(t, x0) * (noise - x0), noise - x0
        steps = s < t
        rows = steps.nonzero()[:, 0] if bool(steps.any()) else t.new_zeros(1, dtype=torch.long)
        given = (None if part is None else part[rows] for part in (cond, mask))
        training = denoiser.training
        denoiser.eval()  # masks of dropout belong to the rows of whole batches
        with torch.no_grad():  # even of a row that needs none: others may wait for this process' share of the weights
            found = self.target(denoiser, x_t[rows], t[rows], s[rows], velocity[rows], *given)
        denoiser.train(training)
        torch.clear_autocast_cache()  # the weights it cast without a gradient are not for the call below
        found = torch.where(expand(steps[rows], found).bool(), found, velocity[rows])
        target = velocity.index_copy(0, rows, found.to(velocity))
        mse = event_mean((target - denoiser.mean_velocity(x_t, t, s, cond, mask)).square(), mask)
        per_example = weight.to(mse.dtype) * self.weigh(mse)
        return ObjectiveOutput(per_example.mean(), per_example, t, {"mse": mse}, u, per_example.detach())


class Shortcut(FlowMapMatching):
    """A step of length 2d does what two steps of length d do, for d = 1/2, 1/4, .. 1/M.

        target of u(x_t, t, t - 2d) = (u_1 + u_2)/2,   u_1 = u(x_t, t, t - d),   u_2 = u(x_t - d u_1, t - d, t - 2d)

    t is drawn from the multiples of 2d, at which samplers arrive. Steps of 1/M are the velocity itself, s = t.

    Arguments:
        coupling, time_sampler: see `FlowMatching`.
        share: probability that a row learns a step rather than the velocity.
        finest: M, a power of two.

    Errors: an M that is no power of two from 2 on.
    Source: Frans et al., "One step diffusion via shortcut models", 2025, equation 5 and algorithm 1, where the weights
    that make the target are averaged ones.

    Example:
        >>> objective = Shortcut(finest=4)
        >>> t, s = objective.ends(torch.rand(1000).double(), torch.Generator().manual_seed(0))
        >>> (t - s).unique().tolist()
        [0.0, 0.5, 1.0]
    """

    def __init__(
        self, coupling: Callable[..., Tensor] | None = None, *, share: float = 0.25, finest: int = 128,
        time_sampler: TimeSamplerName = "antithetic",
    ):
        super().__init__(coupling, share=share, time_sampler=time_sampler)
        if finest < 2 or finest & (finest - 1):
            raise InputError(f"finest = {finest} steps: choose a power of two, such as 128")
        self.finest = finest

    def ends(self, u: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        chosen, halvings, place = uniform((len(u), 3), generator, dtype=torch.float64, device=u.device).unbind(1)
        length = 0.5 ** (halvings * (self.finest.bit_length() - 1)).floor()  # 2d
        t = length * ((place / length).floor() + 1)
        return torch.where(chosen < self.share, t, u), torch.where(chosen < self.share, t - length, u)

    def target(
        self, denoiser: FlowMap, x_t: Tensor, t: Tensor, s: Tensor, velocity: Tensor, cond: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        d = (t - s) / 2
        step = torch.where(d * self.finest > 1, d, 0)
        first = denoiser.mean_velocity(x_t, t, t - step, cond, mask)
        x = x_t - expand(d, x_t) * first
        return (first + denoiser.mean_velocity(x, t - d, t - d - step, cond, mask)) / 2


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
