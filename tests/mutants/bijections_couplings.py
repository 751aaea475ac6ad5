"""Couplings, a spline and maps of neighbours, sound and with one error each, for `tests.mutants.bijections`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from genmodels.core.tensors import event_sum
from genmodels.flows.bijection import Bijection, full_precision
from genmodels.flows.coupling import ChannelSplit
from genmodels.flows.squeeze import Squeeze1d


class Couple(Bijection):
    """A sound coupling to break: vectors whose second half is shifted and scaled by a function of the first."""

    def __init__(self, features: int = 4, cond: int = 0):
        super().__init__()
        self.half, self.uses_cond = features // 2, cond > 0
        self.inner = nn.Linear(self.half + cond, 8)
        self.outer = nn.Linear(8, features)

    def parameters_of(self, kept: Tensor, cond: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log-scale and shift of what is changed."""
        seen = kept if cond is None else torch.cat([kept, cond.to(kept.dtype)], dim=1)
        h, t = self.outer(torch.tanh(self.inner(seen))).to(kept.dtype).chunk(2, dim=1)
        return torch.tanh(h), t

    def _forward(self, x, cond, mask):
        kept, changed = x.split(self.half, dim=1)
        h, t = self.parameters_of(kept, cond)
        return torch.cat([kept, changed * h.exp() + t], dim=1), event_sum(h)

    def _inverse(self, z, cond, mask):
        kept, changed = z.split(self.half, dim=1)
        h, t = self.parameters_of(kept, cond)
        return torch.cat([kept, (changed - t) * (-h).exp()], dim=1), -event_sum(h)


class Dropped(Couple):
    """A sound coupling whose network drops what it sees in training."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(self.inner, nn.Dropout(0.5))


class ForgottenGradient(Couple):
    """The log-scale is right, but cut off from what it was made of."""

    def parameters_of(self, kept, cond):
        h, t = super().parameters_of(kept, cond)
        return h.detach(), t


class KinkedCondition(Couple):
    """A sound coupling whose condition, less that of the check's inputs, goes through a leaky ReLU."""

    def parameters_of(self, kept, cond):
        at = torch.arange(6.0, dtype=cond.dtype).reshape(3, 2) / 4
        near = at[torch.cdist(cond, at).argmin(1)]
        return super().parameters_of(kept, nn.functional.leaky_relu(cond - near, 0.5) + near)


class DetachedCondition(Couple):
    """The log-scale has no gradient by the condition; the shift has."""

    def parameters_of(self, kept, cond):
        return super().parameters_of(kept, cond.detach())[0], super().parameters_of(kept, cond)[1]


class DetachedInverse(Couple):
    """On the way back the shift has no gradient by the parameters."""

    def _inverse(self, z, cond, mask):
        with torch.no_grad():
            x, logdet = super()._inverse(z, cond, mask)
        again, also = super()._inverse(z.detach(), cond, mask)
        known, volume = super()._inverse(z, cond, mask)
        return known - again + x, volume - also + logdet  # the values, with the gradient by z alone


class RoundedScale(Couple):
    """The log-scale goes through bfloat16 and moves in steps."""

    def parameters_of(self, kept, cond):
        h, t = super().parameters_of(kept, cond)
        return h.bfloat16().to(h.dtype), t


class BatchStatistics(Couple):
    """The shift is centred over the batch: a row depends on its neighbours."""

    def parameters_of(self, kept, cond):
        h, t = super().parameters_of(kept, cond)
        return h, t - t.mean(0)


class ConditionDropped(Couple):
    """The inverse forgets the condition."""

    def _inverse(self, z, cond, mask):
        return super()._inverse(z, torch.zeros_like(cond), mask)


class WrongMask(Couple):
    """The forward network sees what it changes, by one entry."""

    def _forward(self, x, cond, mask):
        kept, changed = x.split(self.half, dim=1)
        h, t = self.parameters_of(x[:, 1 : 1 + self.half], cond)
        return torch.cat([kept, changed * h.exp() + t], dim=1), event_sum(h)


class Plain(Couple):
    """A sound coupling with scales of either sign: z2 = s x2 + t, |det| = prod |s|."""

    def __init__(self):
        super().__init__(4)
        with torch.no_grad():
            self.outer.bias.copy_(torch.tensor([-1.5, 1.5, 0.0, 0.0]))  # s before t

    def scales(self, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """s, log |s| and t."""
        s, t = self.outer(torch.tanh(self.inner(kept))).to(kept.dtype).chunk(2, dim=1)
        return s, s.abs().log(), t

    def _forward(self, x, cond, mask):
        kept, changed = x.split(self.half, dim=1)
        s, log_s, t = self.scales(kept)
        return torch.cat([kept, s * changed + t], dim=1), event_sum(log_s)

    def _inverse(self, z, cond, mask):
        kept, changed = z.split(self.half, dim=1)
        s, log_s, t = self.scales(kept)
        return torch.cat([kept, (changed - t) / s], dim=1), -event_sum(log_s)


class SignLost(Plain):
    """The inverse divides by |s|."""

    def _inverse(self, z, cond, mask):
        kept, changed = z.split(self.half, dim=1)
        s, log_s, t = self.scales(kept)
        return torch.cat([kept, (changed - t) / s.abs()], dim=1), -event_sum(log_s)


class FlooredDeterminant(Plain):
    """The log-determinant is that of scales kept away from zero, the map that of the scales themselves."""

    def scales(self, kept):
        s, _, t = super().scales(kept)
        return s, (s.abs() + 0.5).log(), t


class PerhapsChanged(Couple):
    """What is kept comes out right to fifteen digits, not to the last bit."""

    def __init__(self):
        super().__init__()
        self.split = ChannelSplit(4)

    def _forward(self, x, cond, mask):
        kept, changed = x.split(self.half, dim=1)
        return super()._forward(torch.cat([kept + 1000 - 1000, changed], dim=1), cond, mask)


class FalseConstant(Couple):
    """Says that its log-determinant does not depend on the data."""

    constant_logdet = True


class Neighbours(Bijection):
    """A sound layer of sequences to break: channel 0 is kept, its neighbouring frames shift the other channels."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def seen(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """What shifts each frame."""
        around = pad(x[:, :1], (1, 1))
        return self.weight * (around[..., :-2] + around[..., 2:])

    def _forward(self, x, cond, mask):
        kept, changed = x[:, :1], x[:, 1:]
        return torch.cat([kept, changed + self.seen(x, mask)], dim=1), x.new_zeros(len(x))

    def _inverse(self, z, cond, mask):
        kept, changed = z[:, :1], z[:, 1:]
        return torch.cat([kept, changed - self.seen(z, mask)], dim=1), z.new_zeros(len(z))


class PaddingSeen(Neighbours):
    """What stands outside the mask is looked at."""

    def _enter(self, x, fitting, cond, mask):
        return super()._enter(x, fitting, cond, None)


class MasksForgotten(Squeeze1d):
    """Makes two frames one, but not of the mask."""

    def out_mask(self, mask):
        return mask

    in_mask = out_mask


class MeanOfAllFrames(Neighbours):
    """The mean over T frames, not over the valid ones."""

    def seen(self, x, mask):
        return self.weight * x[:, :1].mean(-1, keepdim=True)


class Forwards(Bijection):
    """Autoregressive in the wrong order: z_i = x_i + w x_(i+1)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("autoregressive_order", torch.arange(4))

    def matrix(self, x: Tensor) -> Tensor:
        """The Jacobian."""
        ones = torch.ones(x.shape[1] - 1, dtype=x.dtype, device=x.device)
        return torch.eye(x.shape[1], dtype=x.dtype, device=x.device) + self.weight * torch.diag(ones, 1)

    def _forward(self, x, cond, mask):
        with full_precision(x):
            return x @ self.matrix(x).T, x.new_zeros(len(x))

    def _inverse(self, z, cond, mask):
        with full_precision(z):
            return z @ torch.linalg.inv(self.matrix(z)).T, z.new_zeros(len(z))


class Bend(Bijection):
    """A sound spline to break: one rational-quadratic bin on [-8, 8], the identity outside.

        xi = (x + 8)/16,  D = 1 + 2(d - 1) xi (1 - xi),   z = -8 + 16 [xi^2 + d xi (1 - xi)] / D
    """

    bound = 8.0

    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor(-1.0))  # log d

    def place(self, x: Tensor) -> Tensor:
        """Where x lies in the bin."""
        return (x.clamp(-self.bound, self.bound) / self.bound + 1) / 2

    def _forward(self, x, cond, mask):
        d, xi = self.raw.exp(), self.place(x)
        product = xi * (1 - xi)
        bottom = 1 + 2 * (d - 1) * product
        z = self.bound * (2 * (xi.square() + d * product) / bottom - 1)
        log_slope = torch.log(d * xi.square() + 2 * product + d * (1 - xi).square()) - 2 * torch.log(bottom)
        inside = x.abs() < self.bound
        return torch.where(inside, z, x), event_sum(torch.where(inside, log_slope, 0.0))

    def _inverse(self, z, cond, mask):
        d, y = self.raw.exp(), self.place(z)
        q = y * (2 * d - 2)
        a, b, c = 1 - d + q, d - q, -y
        xi = 2 * c / (-b - (b.square() - 4 * a * c).sqrt())
        x = torch.where(z.abs() < self.bound, self.bound * (2 * xi - 1), z)
        return x, -self._forward(x, cond, mask)[1]


class Unclamped(Bend):
    """The spline is evaluated outside its bin before the tails are selected."""

    def place(self, x):
        return (x / self.bound + 1) / 2
