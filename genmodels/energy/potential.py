"""A network made into a scalar, whose gradient stands in for it: scores at every noise level that have an energy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from genmodels.nn.autograd import usable
from genmodels.nn.blocks import hide
from genmodels.nn.precision import wide


class Potential(nn.Module):
    """The gradient of a scalar made of a network f, as the velocity of a diffusion x = alpha x_0 + sigma eps.

        Phi(x) = sum x f(x),    v = grad Phi
        E(x) = 1/2 |x|^2 + (alpha/sigma) Phi(x),    score = -grad E = -x - (alpha/sigma) v

    Any v gives a score; one that is a gradient gives a score with an energy. f is usually zero at the start, where E is
    that of a standard normal density at every noise level. Calls are float32 or wider whatever the autocast, and make
    the graph they need also where the caller has gradients off.

    Arguments:
        network: `(x, log_snr, cond)`, with a mask as fourth argument where there is one, to a tensor like x with second
            derivatives.

    Shapes: `x (B, *event)`, `log_snr (B,)`, `mask (B, 1, T)` bool or None; the gradient is like x, zero where the mask
    is False, energies are `(B,)`.
    Source: the product form of Salimans and Ho 2021, "Should EBMs model the energy or the score?", section 3.

    Example:
        >>> field = Potential(lambda x, log_snr, cond: 2 * x)
        >>> x = torch.tensor([[1.0, 3.0]])
        >>> field(x, torch.zeros(1)).tolist(), field.energy(x, torch.zeros(1)).tolist()
        ([[4.0, 12.0]], [25.0])
    """

    def __init__(self, network: Callable[..., Tensor]):
        super().__init__()
        self.network = network

    def energy(
        self, x: Tensor, log_snr: Tensor, cond: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(B,) E(x), whose differences at one noise level are those of -log p."""
        x = hide(wide(x), mask)
        return 0.5 * x.square().flatten(1).sum(1) + torch.exp(0.5 * log_snr) * self._scalar(x, log_snr, cond, mask)

    def forward(
        self, x: Tensor, log_snr: Tensor, cond: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        training = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            x, log_snr, cond, mask = (usable(value) for value in (wide(x), log_snr, cond, mask))
            x = x if training and x.requires_grad else x.detach().requires_grad_()
            scalar = self._scalar(hide(x, mask), log_snr, cond, mask)
            return torch.autograd.grad(scalar.sum(), x, create_graph=training)[0]

    def _scalar(self, x: Tensor, log_snr: Tensor, cond: Tensor | None, mask: Tensor | None) -> Tensor:
        # The fused kernels of attention have no second derivative; the plain one has.
        with sdpa_kernel(SDPBackend.MATH), torch.autocast(x.device.type, enabled=False):
            f = self.network(x, log_snr, cond, *(() if mask is None else (mask,)))
        return (x * f).flatten(1).sum(1)
