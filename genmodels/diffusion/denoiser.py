"""A network, a noise schedule and the meaning of the output: together, a prediction at any time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.diffusion.parameterisation import Parameterisation, Prediction
from genmodels.diffusion.schedule import NoiseSchedule


class Denoiser(nn.Module):
    """`denoiser(x, t, cond, mask) -> Prediction`: the network sees the noisy x and its log-SNR.

    Shapes: x (B, *event), t (B,) in [0, 1], cond as the network takes it, mask (B, 1, T) or None.

    The schedule is evaluated in float64, which autocast leaves alone. The network runs in the dtype of its parameters
    (or as autocast says) and its output is cast to the dtype of x, float32 at least.

    Arguments:
        net: called as `net(x, log_snr, cond)`, with the mask as fourth argument where there is one; returns a tensor of
            the shape of x. log_snr is (B,), float32 (float64 for float64 networks), and may be infinite.
        schedule: the noise schedule.
        parameterisation: the meaning of the output.

    Errors: a parameterisation that the schedule rules out (eps with zero terminal SNR).

    Example:
        >>> from genmodels.diffusion import CosineSchedule, V
        >>> denoiser = Denoiser(lambda x, log_snr, cond: torch.zeros_like(x), CosineSchedule(), V())
        >>> denoiser(torch.ones(2, 3), torch.tensor([0.0, 0.5])).x0.shape
        torch.Size([2, 3])
    """

    def __init__(self, net: nn.Module, schedule: NoiseSchedule, parameterisation: Parameterisation):
        super().__init__()
        parameterisation.check(schedule)
        self.net, self.schedule, self.parameterisation = net, schedule, parameterisation

    def forward(self, x: Tensor, t: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Prediction:
        log_snr = self.schedule.log_snr(t)
        inner = self._net_dtype(x)
        extra = () if mask is None else (mask,)
        output = self.net(x.to(inner), log_snr.to(torch.promote_types(inner, torch.float32)), cond, *extra)
        if output.shape != x.shape:
            raise ValueError(f"the network turned {tuple(x.shape)} into {tuple(output.shape)}: the shapes must agree")
        output = output.to(torch.promote_types(x.dtype, torch.float32))
        return self.parameterisation.to_prediction(output, x, log_snr)

    def _net_dtype(self, x: Tensor) -> torch.dtype:
        parameters = self.net.parameters() if isinstance(self.net, nn.Module) else iter(())
        return next((p.dtype for p in parameters if p.is_floating_point()), x.dtype)
