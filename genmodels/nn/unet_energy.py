"""A U-Net as an energy."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from genmodels.errors import InputError
from genmodels.nn.energy_nets import Confinement
from genmodels.nn.spatial_attention import AttentionKind
from genmodels.nn.unet import UNet


class UNetEnergy(nn.Module):
    """The energy of an image or a sequence by a U-Net f of the same shape.

        E(x) = 1/2 |x - f(x)|^2      form `residual`: low where f reconstructs x
        E(x) = sum x f(x)            form `product`
        both + 1/2 |x|^2/tau^2

    f is zero at the start, so the residual form starts as a normal density.

    Arguments:
        event_shape: (C, H, W) or (C, T).
        num_classes: number of classes, None for an energy without condition.
        form: `residual` or `product`.
        channels: channels of the first level.
        multipliers: one per level.
        blocks: residual blocks per level.
        attention: kind of attention at the lowest level.
        heads: heads of the attention.
        confinement: whether the quadratic term is there.
        spread: tau at the start.

    Shapes: `x (B, *event)`, `cond (B,)` int64 or None, `mask (B, 1, T)` bool or None; the result is `(B,)`.
    Source: Salimans and Ho 2021, "Should EBMs model the energy or the score?", section 3.

    Example:
        >>> import torch
        >>> energy = UNetEnergy((1, 8, 8), channels=8, multipliers=(1, 2), blocks=1, confinement=False)
        >>> energy(torch.ones(2, 1, 8, 8))
        tensor([32., 32.], grad_fn=<MulBackward0>)
    """

    def __init__(
        self,
        event_shape: tuple[int, ...],
        num_classes: int | None = None,
        *,
        form: Literal["residual", "product"] = "residual",
        channels: int = 32,
        multipliers: list[int] | tuple[int, ...] = (1, 2),
        blocks: int = 1,
        attention: AttentionKind = "none",
        heads: int = 4,
        confinement: bool = True,
        spread: float = 1.0,
    ):
        super().__init__()
        if form not in _FORMS:
            raise InputError(f"form = {form!r} is not one of {', '.join(_FORMS)}")
        self.form = form
        self.unet = UNet(
            event_shape, num_classes,
            channels=channels, multipliers=multipliers, blocks=blocks, attention=attention, heads=heads,
        )  # fmt: skip
        self.confinement = Confinement(spread) if confinement else None

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x if mask is None else x.masked_fill(~(mask if x.dim() == 3 else mask[:, :, None]), 0)
        # The fused kernels of attention have no second derivative; the plain one has.
        with sdpa_kernel(SDPBackend.MATH):
            f = self.unet(x, x.new_zeros(len(x)), cond, mask)
        energy = _FORMS[self.form](x, f)
        return energy if self.confinement is None else energy + self.confinement(x)


def _residual(x: Tensor, f: Tensor) -> Tensor:
    return 0.5 * (x - f).square().flatten(1).sum(1)


def _product(x: Tensor, f: Tensor) -> Tensor:
    return (x * f).flatten(1).sum(1)


_FORMS = {"residual": _residual, "product": _product}
