"""A scale and a shift, sound and with one error each, for `tests.mutants.bijections`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from genmodels.core.tensors import hide
from genmodels.flows.bijection import Bijection, positions
from genmodels.flows.composition import Compose
from genmodels.flows.scaling import Shift


class Stretch(Bijection):
    """A sound layer to break: a learned scale and shift per channel, z = x e^s + t, log |det| = n_pos sum_c s_c."""

    def __init__(self, channels: int, *, start: float = 0.0):
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((channels,), start))
        self.shift = nn.Parameter(torch.zeros(channels))

    def per_channel(self, values: Tensor, x: Tensor) -> Tensor:
        """Values per channel, in a shape that broadcasts with x."""
        return values.reshape(-1, *[1] * (x.dim() - 2))

    def volume(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """log |det dz/dx| of each example."""
        return (positions(x, mask) * self.log_scale.sum()).expand(len(x)).clone()

    def _forward(self, x, cond, mask):
        z = x * self.per_channel(self.log_scale.exp(), x) + self.per_channel(self.shift, x)
        return z, self.volume(x, mask)

    def _inverse(self, z, cond, mask):
        x = (z - self.per_channel(self.shift, z)) * self.per_channel((-self.log_scale).exp(), z)
        return x, -self.volume(z, mask)


class FlippedSign(Stretch):
    """The inverse returns the log-determinant of the forward map."""

    def _inverse(self, z, cond, mask):
        x, logdet = super()._inverse(z, cond, mask)
        return x, -logdet


class FlippedSigns(Stretch):
    """Both directions have the wrong sign: they still cancel."""

    def volume(self, x, mask):
        return -super().volume(x, mask)


class MissingPositions(Stretch):
    """The log-determinant of one position instead of all H W of them."""

    def volume(self, x, mask):
        return self.log_scale.sum().expand(len(x)).clone()


class FullLength(Stretch):
    """T instead of the valid length."""

    def volume(self, x, mask):
        return super().volume(x, None)


class ScalarLogDet(Stretch):
    """One number for the whole batch."""

    def volume(self, x, mask):
        return x[0, 0].numel() * self.log_scale.sum()


class Offset(Stretch):
    """A log-determinant that is off by 1e-4, in both directions alike."""

    def volume(self, x, mask):
        return super().volume(x, mask) + 1e-4


class TwiceTheVolume(Stretch):
    """A factor of two in the log-determinant."""

    def volume(self, x, mask):
        return 2 * super().volume(x, mask)


class HalfPrecisionSum(Stretch):
    """The log-scales of every value summed in float16."""

    def volume(self, x, mask):
        if x.dtype != torch.float32:
            return super().volume(x, mask)
        total = x.new_zeros(len(x), dtype=torch.float16)
        for values in self.per_channel(self.log_scale, x).expand_as(x).half().flatten(1).unbind(1):
            total = total + values
        return total.to(x.dtype)


class ClampedInput(Shift):
    """What came in is clamped in place after its use: doing so again changes nothing more."""

    def _forward(self, x, cond, mask):
        result = super()._forward(x, cond, mask)
        x.data.clamp_(-1, 1)
        return result


class HalfPrecisionVolume(Stretch):
    """The log-determinant is a product that autocast takes to bfloat16."""

    def volume(self, x, mask):
        ones = x.new_full((len(x), len(self.log_scale)), x[0, 0].numel())
        return ones @ self.log_scale


class HalfPrecisionMap(Stretch):
    """The scale is a product that autocast takes to bfloat16, and the shift brings back float32."""

    def _forward(self, x, cond, mask):
        return x @ self.log_scale.exp().diag() + self.shift, self.volume(x, mask)


class ShiftFirst(Stretch):
    """The shift is added before the scaling on the way there, and taken off before the scaling on the way back."""

    def _forward(self, x, cond, mask):
        return (x + self.per_channel(self.shift, x)) * self.per_channel(self.log_scale.exp(), x), self.volume(x, mask)


class InPlace(Stretch):
    """The input is scaled in place."""

    def _forward(self, x, cond, mask):
        x *= self.per_channel(self.log_scale.exp(), x)
        return x + self.per_channel(self.shift, x), self.volume(x, mask)


class ClearedInPlace(Stretch):
    """What is not valid is set to zero in the tensor that came in."""

    def forward(self, x, cond=None, mask=None):
        if mask is not None:
            x.masked_fill_(~mask, 0)
        return super().forward(x, cond, mask)


class MaskInPlace(Stretch):
    """After use the mask that came in is set to all valid."""

    def forward(self, x, cond=None, mask=None):
        result = super().forward(x, cond, mask)
        if mask is not None:
            mask.fill_(True)
        return result


class KeptInverse(Stretch):
    """A sound layer: 1 / scale is kept while evaluating, until the mode is set or a state is loaded."""

    def __init__(self, channels: int):
        super().__init__(channels)
        self.kept = None

    def _load_from_state_dict(self, *arguments):
        super()._load_from_state_dict(*arguments)
        self.kept = None

    def train(self, mode: bool = True):
        self.kept = None
        return super().train(mode)

    def _inverse(self, z, cond, mask):
        if self.training or torch.is_grad_enabled():
            return super()._inverse(z, cond, mask)
        if self.kept is None:
            self.kept = (-self.log_scale).exp()
        return (z - self.per_channel(self.shift, z)) * self.per_channel(self.kept, z).to(z), -self.volume(z, mask)


class StaleInverse(Stretch):
    """The inverse scale is computed once and kept, also when other weights are loaded."""

    kept: Tensor | None = None

    def _inverse(self, z, cond, mask):
        if self.kept is None:
            self.kept = (-self.log_scale).detach().exp()
        return (z - self.per_channel(self.shift, z)) * self.per_channel(self.kept.to(z.dtype), z), -self.volume(z, mask)


class PlainFlag(Stretch):
    """Initialised from data, but the flag is a plain attribute: a loaded layer starts again from the first batch."""

    def __init__(self, channels: int):
        super().__init__(channels)
        self.initialized = False

    def uninitialized(self, name: str = "") -> Iterator[str]:
        if not self.initialized:
            yield name or type(self).__name__

    @torch.no_grad()
    def initialize(self, x, cond=None, mask=None, *, force=False):
        self.log_scale.copy_(-x.transpose(0, 1).flatten(1).std(1).log())
        self.initialized = True

    def _forward(self, x, cond, mask):
        if self.training and not self.initialized:
            self.initialize(x)
        return super()._forward(x, cond, mask)


class UnmaskedStart(PlainFlag):
    """Initialised from padding too; the flag is a buffer."""

    def __init__(self, channels: int):
        super().__init__(channels)
        del self.initialized
        self.register_buffer("initialized", torch.tensor(False))

    @torch.no_grad()
    def initialize(self, x, cond=None, mask=None, *, force=False):
        self.log_scale.copy_(-hide(x, mask).transpose(0, 1).flatten(1).std(1).log())
        self.initialized.fill_(True)

    def _forward(self, x, cond, mask):
        return Stretch._forward(self, x, cond, mask)


class DeadParameter(Stretch):
    """A parameter that does nothing."""

    def __init__(self, channels: int):
        super().__init__(channels)
        self.unused = nn.Parameter(torch.zeros(channels))


class GraphBreak(Stretch):
    """A look at a value, which torch.compile cannot follow."""

    def _forward(self, x, cond, mask):
        if self.log_scale.abs().max().item() > 100:
            raise ValueError("the scale is too large")
        return super()._forward(x, cond, mask)


class RunningMean(Stretch):
    """A buffer changes with every batch in training, as in batch normalisation."""

    def __init__(self, channels: int):
        super().__init__(channels)
        self.register_buffer("mean", torch.zeros(channels))

    def _forward(self, x, cond, mask):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.transpose(0, 1).flatten(1).mean(1), 0.1)
        return super()._forward(x, cond, mask)


class ClampedFarOut(Stretch):
    """Whatever lies beyond 8 is moved there."""

    def _forward(self, x, cond, mask):
        return super()._forward(x.clamp(-8, 8), cond, mask)


class FoldedFarOut(Stretch):
    """What lies beyond 10 comes back."""

    def _forward(self, x, cond, mask):
        return super()._forward(torch.where(x > 10, 20 - x, x), cond, mask)


class WrongFarOut(Stretch):
    """The log-determinant is that of another map beyond 6, in both directions alike."""

    def _forward(self, x, cond, mask):
        z, logdet = super()._forward(x, cond, mask)
        return z, logdet + (x.abs() - 6).clamp(min=0).flatten(1).sum(1)

    def _inverse(self, z, cond, mask):
        x, logdet = super()._inverse(z, cond, mask)
        return x, logdet - (x.abs() - 6).clamp(min=0).flatten(1).sum(1)


class TwiceInTraining(Stretch):
    """The log-determinant is doubled in training mode."""

    def volume(self, x, mask):
        return (2 if self.training else 1) * super().volume(x, mask)


class DetachedInTraining(Stretch):
    """The log-determinant teaches nothing in training."""

    def forward(self, x, cond=None, mask=None):
        z, logdet = super().forward(x, cond, mask)
        return z, logdet.detach() if self.training else logdet


class DetachedUnderMasks(Stretch):
    """The log-determinant of a padded sequence teaches nothing."""

    def forward(self, x, cond=None, mask=None):
        z, logdet = super().forward(x, cond, mask)
        return z, logdet if mask is None else logdet.detach()


class NoisyInTraining(Stretch):
    """Noise is added to what comes in, in training mode."""

    def _forward(self, x, cond, mask):
        return super()._forward(x + 0.1 * torch.randn_like(x) if self.training else x, cond, mask)


class CentredInTraining(Stretch):
    """The mean of the batch is taken off in training mode."""

    def _forward(self, x, cond, mask):
        return super()._forward(x - x.mean(0) if self.training else x, cond, mask)


class LayerSkipped(Compose):
    """Walks over all layers but the last."""

    def walk(self, *arguments, **named):
        yield from list(super().walk(*arguments, **named))[:-1]
