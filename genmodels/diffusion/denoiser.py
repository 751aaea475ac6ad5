"""Denoisers: a network, a probability path and a parameterisation, which together predict at any time."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from genmodels.core.errors import InputError
from genmodels.core.tensors import module_table, wide
from genmodels.diffusion.parameterisation import Parameterisation, Prediction, Velocity
from genmodels.diffusion.path import LinearPath, Path


class AtAnyTime(nn.Module):
    """Base of all denoisers, learned or exact: a call at a time is a prediction at the log-SNR of its schedule.

    A subclass has a `schedule` and defines `at_log_snr`; objectives also need its `parameterisation`.
    """

    schedule: Path
    learned_variance: bool = False
    self_conditioning: bool = False

    def forward(
        self, x: Tensor, t: Tensor, cond: Tensor | None = None, mask: Tensor | None = None,
        estimate: Tensor | None = None,
    ) -> Prediction:
        return self.at_log_snr(x, self.schedule.log_snr(t), cond, mask, estimate).along(self.schedule, t)

    def at_log_snr(
        self, x: Tensor, log_snr: Tensor, cond: Tensor | None = None, mask: Tensor | None = None,
        estimate: Tensor | None = None,
    ) -> Prediction:
        """The prediction at a log-SNR (B,) instead of a time."""
        raise NotImplementedError


class OnPath(AtAnyTime):
    """A denoiser on another path, where it sees the noisy x of the same log-SNR: x_t of the path, rescaled.

    So a model that was trained on one path can be sampled along any other, on the same probability-flow trajectories.

    Arguments:
        denoiser: learned or exact.
        schedule: the path.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, LinearPath
        >>> straight = OnPath(GaussianDenoiser(CosineSchedule(), torch.ones(1), 0.25), LinearPath())
        >>> x_t = torch.tensor([[1.0]])  # N(1, 1/4) at t = 1/2: u = -1 + (0.5 - 0.125)/0.3125 (x_t - 0.5)
        >>> round(float(straight(x_t / 0.5**0.5, torch.tensor([0.5])).velocity), 4)
        -0.4
    """

    def __init__(self, denoiser: AtAnyTime, schedule: Path):
        super().__init__()
        self.denoiser, self.schedule, self.parameterisation = denoiser, schedule, denoiser.parameterisation
        self.self_conditioning = denoiser.self_conditioning
        self.parameterisation.check(schedule)

    @property
    def noisiest(self) -> float:
        """The lowest log-SNR the network was trained at; it treats noisier x as if at this one."""
        return self.denoiser.schedule.end_points[1]

    def at_log_snr(self, x, log_snr, cond=None, mask=None, estimate=None) -> Prediction:
        return self.denoiser.at_log_snr(x, log_snr.clamp(min=self.noisiest), cond, mask, estimate)


class Denoiser(AtAnyTime):
    """`denoiser(x, t, cond, mask, estimate) -> Prediction`: the network sees the noisy x and its log-SNR.

    Shapes: x (B, *event), t (B,) in [0, 1], cond as the network takes it, mask (B, 1, T) or None, estimate like x.

    The schedule is evaluated in float64, which autocast leaves alone. The network runs in the dtype of its parameters
    (or as autocast says) and its output is cast to the dtype of x, float32 at least.

    Arguments:
        net: called as `net(x, log_snr, cond)`, with the mask as fourth argument where there is one; returns a tensor of
            the shape of x. log_snr is (B,), float32 (float64 for float64 networks), and may be infinite.
        schedule: the noise schedule.
        parameterisation: the meaning of the output.
        learned_variance: the network returns twice the channels; the second half, o, gives nu = (o + 1)/2, from which
            `learned_variance` makes the variance of the kernel (Nichol and Dhariwal 2021, section 3.1).
        self_conditioning: the network also sees an earlier estimate of x_0 as further channels, zeros where there is
            none (Chen et al., "Analog bits", 2023, section 2.2).

    Errors: a parameterisation that the schedule rules out (eps with zero terminal SNR); an output of the wrong shape.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, V
        >>> denoiser = Denoiser(lambda x, log_snr, cond: torch.zeros_like(x), CosineSchedule(), V())
        >>> denoiser(torch.ones(2, 3), torch.tensor([0.0, 0.5])).x0.shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        net: nn.Module,
        schedule: Path,
        parameterisation: Parameterisation,
        *,
        learned_variance: bool = False,
        self_conditioning: bool = False,
    ):
        super().__init__()
        parameterisation.check(schedule)
        self.net, self.schedule, self.parameterisation = net, schedule, parameterisation
        self.learned_variance, self.self_conditioning = learned_variance, self_conditioning

    def _repr_html_(self) -> str:
        return module_table(self, parameterisation=type(self.parameterisation).__name__)

    def at_log_snr(self, x, log_snr, cond=None, mask=None, estimate=None) -> Prediction:
        seen = self.parameterisation.scale_input(x, log_snr)
        if self.self_conditioning:
            seen = torch.cat([seen, torch.zeros_like(x) if estimate is None else estimate.to(seen)], 1)
        # What the input was multiplied by, for networks that ask for it.
        takes = getattr(self.net, "takes_scale", False)
        scale = self.parameterisation.scale_input(torch.ones_like(log_snr), log_snr) if takes else None
        output, nu = self._run(seen, log_snr, cond, mask, x, scale), None
        if self.learned_variance:
            output, nu = output.chunk(2, 1)
            nu = (nu + 1) / 2
        return self.parameterisation.to_prediction(output, x, log_snr, nu)

    def _run(
        self, seen: Tensor, at: Tensor, cond: Tensor | None, mask: Tensor | None, x: Tensor, scale: Tensor | None = None
    ) -> Tensor:
        """The network's output for what it sees, `at` log-SNRs or times; in the dtype of x, float32 at least."""
        parameters = self.net.parameters() if isinstance(self.net, nn.Module) else ()
        inner = next((p.dtype for p in parameters if p.is_floating_point()), x.dtype)
        at = at.to(x.device, torch.promote_types(inner, torch.float32))
        seen = seen.to(inner)
        seen = seen.clone() if seen is x else seen  # a network may write to its input, and x is needed again
        scaled = {} if scale is None else {"scale": scale.to(at)}
        output = self.net(seen, at, cond, *(() if mask is None else (mask,)), **scaled)
        batch, channels, *space = x.shape
        expected = (batch, 2 * channels if self.learned_variance else channels, *space)
        if tuple(output.shape) != expected:
            hint = ": a learned variance needs twice the channels" if self.learned_variance else ""
            raise InputError(
                f"the network turned {tuple(x.shape)} into {tuple(output.shape)}, not into {expected}{hint}"
            )
        return output.to(torch.promote_types(x.dtype, torch.float32))


class FlowMap(Denoiser):
    """A network of two times that leads from one to the other in one step, along the straight path.

        x_s = x_t - (t - s) u(x_t, t, s),   u the mean of the velocity between s and t

    u(x_t, t, t) is the velocity itself: without `until`, this is a denoiser like any other, for every sampler, the
    ELBO and the ODE likelihood. With `until` = s, x0 and eps are the ends of the straight line through x_t and x_s,
    not estimates of data and noise.

    Arguments:
        net: called as `net(x_t, times, cond)`, with the mask as fourth argument where there is one; times (B, 2) are t
            and s, and the result is u.

    Shapes: as of `Denoiser`; until (B,) in [0, t].
    Source: Frans et al., "One step diffusion via shortcut models", 2025; Geng et al., "Mean flows", 2025.

    Example:
        >>> half = FlowMap(lambda x, times, cond: x * (times[:, :1] + times[:, 1:]) / 2)
        >>> t, s, x = torch.tensor([1.0]), torch.tensor([0.0]), torch.ones(1, 2)
        >>> half(x, t, until=s).velocity, half(x, t).velocity
        (tensor([[0.5000, 0.5000]]), tensor([[1., 1.]]))
    """

    #: Tells samplers that calls take `until`.
    takes_until = True

    def __init__(self, net: nn.Module):
        super().__init__(net, LinearPath(), Velocity())

    def forward(
        self, x: Tensor, t: Tensor, cond: Tensor | None = None, mask: Tensor | None = None,
        until: Tensor | None = None,
    ) -> Prediction:
        x_t = self.parameterisation.scale_input(x, log_snr := self.schedule.log_snr(t))
        output = self.mean_velocity(x_t, t, t if until is None else until, cond, mask)
        return self.parameterisation.to_prediction(output, x, log_snr).along(self.schedule, t)

    def at_log_snr(self, x, log_snr, cond=None, mask=None, estimate=None) -> Prediction:
        return self(x, self.schedule.time_of(log_snr), cond, mask)

    def mean_velocity(
        self, x_t: Tensor, t: Tensor, s: Tensor, cond: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """u(x_t, t, s) (B, *event) at the path's own x_t; t and s are (B,)."""
        return self._run(x_t, torch.stack([t, s], 1), cond, mask, x_t)


class TokenDenoiser(nn.Module):
    """log p of every token given those that are not masked: an embedding, a denoiser's network, and a linear layer.

    With `ordered` levels both layers are initialised to cosines of the level, so that neighbouring levels are alike;
    otherwise to independent Gaussians. The network is given no time, on which log p does not depend.

    Arguments:
        net: network of C `width` channels, called as `net(x, log_snr, cond)`.
        levels: V, the number of values; token V is the mask.
        width: channels for each scalar of the data.
        ordered: whether neighbouring levels are similar, as grey levels are and bytes of text are not.

    Shapes: `tokens (B, C, *space)` int64, `cond (B,)` int64 or None; the result is `(B, C, *space, V)`.

    Example:
        >>> from genmodels.nn import DiT
        >>> network = TokenDenoiser(DiT((4, 6, 6), width=16, depth=1), levels=5, width=4)
        >>> network(torch.full((2, 1, 6, 6), 5)).exp().sum(-1).shape
        torch.Size([2, 1, 6, 6])
    """

    def __init__(self, net: nn.Module, levels: int, width: int, ordered: bool = True):
        super().__init__()
        self.net, self.width = net, width
        self.enter, self.leave = nn.Embedding(levels + 1, width), nn.Linear(width, levels)
        place = (torch.arange(levels)[:, None] + 0.5) * torch.arange(1, width + 1) / levels
        begun = torch.cos(math.pi * place) if ordered else torch.randn(levels, width)
        with torch.no_grad():
            self.enter.weight[:levels] = self.leave.weight.copy_(begun)
            self.enter.weight[levels] = 0
            self.leave.bias.zero_()

    def forward(self, tokens: Tensor, cond: Tensor | None = None) -> Tensor:
        x = self.enter(tokens).movedim(-1, 2).flatten(1, 2)
        y = self.net(x, torch.zeros(len(x), device=x.device), cond)
        return wide(self.leave(y.unflatten(1, (-1, self.width)).movedim(2, -1))).log_softmax(-1)
