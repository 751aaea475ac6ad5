"""Squeezing of images and sequences, which turns positions into channels; padding before it, and flattening."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from genmodels.core.errors import at_least, one_of
from genmodels.flows.bijection import Bijection, Shape


def _divided(count: int | None, factor: int) -> int | None:
    return None if count is None else count // factor


def _multiplied(count: int | None, factor: int) -> int | None:
    return None if count is None else count * factor


def require_division(patch: int, shape: Shape, name: str = "patch") -> None:
    """Raise ValueError for patches that do not divide the sides of images (C, H, W), or the length of sequences (C, T).

    Arguments:
        patch: side of the patches.
        shape: shape of the event.
        name: the option's name for the message.

    Example:
        >>> require_division(4, (1, 28, 30))
        Traceback (most recent call last):
        ...
        ValueError: patch=4 does not divide the sides of images of 28 x 30; these do: 1, 2
    """
    sides = [side for side in shape[1:] if side is not None]
    if any(side % patch for side in sides):
        what = "length of sequences" if len(shape) == 2 else "sides of images"
        common = math.gcd(*sides)
        raise ValueError(f"{name}={patch} does not divide the {what} of {' x '.join(map(str, sides))}; these do: "
                         + ", ".join(str(k) for k in range(1, common + 1) if common % k == 0))


class _Squeeze(Bijection):
    """Moves values from positions to channels: a subclass defines `_squeeze` and, back again, `_spread`."""

    constant_logdet = True

    def __init__(self, factor: int = 2):
        super().__init__()
        at_least(1, factor=factor)
        self.factor = factor

    def _forward(self, x, cond, mask):
        return self._squeeze(x), x.new_zeros(len(x))

    def _inverse(self, z, cond, mask):
        return self._spread(z), z.new_zeros(len(z))


class Squeeze2d(_Squeeze):
    """Turns each square of an image into one position with more channels.

        (C, H, W) -> (f^2 C, H/f, W/f),    log |det| = 0

    Order `channel`: out channel = f^2 c + f i + j for the offset (i, j) in the square. Order `alternative` (f = 2
    only): out channel = p C + c for the offsets p = (0, 0), (1, 1), (0, 1), (1, 0), so that each half of the channels
    is a checkerboard of all colours. Order `far`: one pixel of each of f x f parts of the image instead of squares of
    neighbours, out channel = f^2 c + f i + j for part (i, j).

    Arguments:
        factor: side f of the square.
        order: order of the values in the channels.

    Shapes: `x (B, C, H, W)`, `z (B, f^2 C, H/f, W/f)`.
    Errors: ValueError for sides that f does not divide, an unknown order, and `alternative` with f other than 2.
    Source: Dinh et al. 2017 (RealNVP), section 3.6.

    Example:
        >>> Squeeze2d(order="alternative")(torch.arange(16.0).reshape(1, 1, 4, 4))[0].flatten(2)
        tensor([[[ 0.,  2.,  8., 10.],
                 [ 5.,  7., 13., 15.],
                 [ 1.,  3.,  9., 11.],
                 [ 4.,  6., 12., 14.]]])
    """

    def __init__(self, factor: int = 2, *, order: Literal["channel", "alternative", "far"] = "channel"):
        super().__init__(factor)
        one_of("order", order, ("channel", "alternative", "far"))
        if order == "alternative" and factor != 2:
            raise ValueError(f"Squeeze2d: the alternative order is one of squares of side 2, got factor={factor}")
        self.order = order

    def out_shape(self, shape: Shape) -> Shape:
        f = self.factor
        if len(shape) != 3 or shape[0] is None or any(side is not None and side % f for side in shape[1:]):
            raise self._misfit(f"(C, H, W) with H and W divisible by {f}", shape)
        return (f * f * shape[0], _divided(shape[1], f), _divided(shape[2], f))

    def in_shape(self, shape: Shape) -> Shape:
        f = self.factor
        if len(shape) != 3 or shape[0] is None or shape[0] % (f * f):
            raise self._misfit(f"(C, H, W) with C divisible by {f * f}", shape)
        return (shape[0] // (f * f), _multiplied(shape[1], f), _multiplied(shape[2], f))

    def out_mask(self, mask: Tensor) -> Tensor:
        return self._squeeze(mask)

    def in_mask(self, mask: Tensor) -> Tensor:
        return self._spread(mask)

    def _squeeze(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        f, rows, columns = self.factor, height // self.factor, width // self.factor
        if self.order == "far":
            parts = x.reshape(batch, channels, f, rows, f, columns).permute(0, 1, 2, 4, 3, 5)
            return parts.reshape(batch, f * f * channels, rows, columns)
        if self.order == "channel":
            squares = x.reshape(batch, channels, rows, f, columns, f).permute(0, 1, 3, 5, 2, 4)
            return squares.reshape(batch, f * f * channels, rows, columns)
        even, odd = x[:, :, ::2], x[:, :, 1::2]
        return torch.cat([even[..., ::2], odd[..., 1::2], even[..., 1::2], odd[..., ::2]], dim=1)

    def _spread(self, z: Tensor) -> Tensor:
        f, (batch, channels, rows, columns) = self.factor, z.shape
        channels //= f * f
        if self.order == "far":
            pixels = z.reshape(batch, channels, f, f, rows, columns).permute(0, 1, 2, 4, 3, 5)
        elif self.order == "channel":
            pixels = z.reshape(batch, channels, f, f, rows, columns).permute(0, 1, 4, 2, 5, 3)
        else:
            upper_left, lower_right, upper_right, lower_left = z.chunk(4, dim=1)
            pairs = (upper_left, upper_right), (lower_left, lower_right)
            pixels = torch.stack([torch.stack(pair, dim=-1) for pair in pairs], dim=3)
        return pixels.reshape(batch, channels, f * rows, f * columns)  # from (B, C, H/f, f, W/f, f)


class Flatten(Bijection):
    """Flattens an event to a vector, row-major.

        z_k = x_(c, i, j),    k = (c H + i) W + j,    log |det| = 0

    Arguments:
        shape: of the events, with every length known.

    Shapes: `x (B, *shape)`, `z (B, D)` with D the product of the shape.
    Errors: ValueError for events of another shape, an open length, and for a mask: a vector has no frames to leave out.

    Example:
        >>> Flatten((1, 2, 2))(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]))
        (tensor([[1., 2., 3., 4.]]), tensor([0.]))
    """

    constant_logdet = True

    def __init__(self, shape: Shape):
        super().__init__()
        if not shape or None in shape:
            raise ValueError(f"Flatten: every length must be known, got {shape}")
        self.shape = tuple(shape)

    def out_shape(self, shape: Shape) -> Shape:
        if tuple(shape) != self.shape:
            raise self._misfit(str(self.shape), shape)
        return (math.prod(self.shape),)

    def in_shape(self, shape: Shape) -> Shape:
        if tuple(shape) != (math.prod(self.shape),):
            raise self._misfit(f"({math.prod(self.shape)},) on its way back", shape)
        return self.shape

    def out_mask(self, mask: Tensor) -> Tensor:
        raise ValueError("Flatten: a vector has no frames that a mask could leave out")

    in_mask = out_mask

    def _forward(self, x, cond, mask):
        return x.flatten(1), x.new_zeros(len(x))

    def _inverse(self, z, cond, mask):
        return z.unflatten(1, self.shape), z.new_zeros(len(z))


class Squeeze1d(_Squeeze):
    """Turns f neighbouring frames of a sequence into one frame with more channels.

        (C, T) -> (f C, T/f),   out channel = j C + c for frame j of the f,    log |det| = 0

    Every f-th entry of the mask is kept, so the valid lengths must be multiples of f: see `PadToMultiple`.

    Arguments:
        factor: number f of frames that become one.

    Shapes: `x (B, C, T)`, `z (B, f C, T/f)`, `mask (B, 1, T)` to `(B, 1, T/f)`.
    Errors: ValueError for T that f does not divide.
    Source: Kim et al. 2020 (Glow-TTS), on the architecture of the decoder.

    Example:
        >>> Squeeze1d()(torch.arange(6.0).reshape(1, 1, 6))[0]
        tensor([[[0., 2., 4.],
                 [1., 3., 5.]]])
    """

    def out_shape(self, shape: Shape) -> Shape:
        f = self.factor
        if len(shape) != 2 or shape[0] is None or (shape[1] is not None and shape[1] % f):
            raise self._misfit(f"(C, T) with T divisible by {f} (PadToMultiple makes it so)", shape)
        return (f * shape[0], _divided(shape[1], f))

    def in_shape(self, shape: Shape) -> Shape:
        f = self.factor
        if len(shape) != 2 or shape[0] is None or shape[0] % f:
            raise self._misfit(f"(C, T) with C divisible by {f}", shape)
        return (shape[0] // f, _multiplied(shape[1], f))

    def out_mask(self, mask: Tensor) -> Tensor:
        return mask[..., :: self.factor] if mask.shape[1] == 1 else self._squeeze(mask)

    def in_mask(self, mask: Tensor) -> Tensor:
        return mask.repeat_interleave(self.factor, dim=-1) if mask.shape[1] == 1 else self._spread(mask)

    def _squeeze(self, x: Tensor) -> Tensor:
        batch, channels, length = x.shape
        frames = x.reshape(batch, channels, length // self.factor, self.factor)
        return frames.permute(0, 3, 1, 2).reshape(batch, self.factor * channels, length // self.factor)

    def _spread(self, z: Tensor) -> Tensor:
        batch, channels, length = z.shape
        frames = z.reshape(batch, self.factor, channels // self.factor, length)
        return frames.permute(0, 2, 3, 1).reshape(batch, channels // self.factor, self.factor * length)


class PadToMultiple:
    """Pads sequences to a multiple of a number of frames, for flows that squeeze them.

    This is not a bijection but a part of the data: the appended frames hold the floor of the log-mel and count as valid
    data, so that the densities of all families include them.

    Arguments:
        factor: every length becomes a multiple of this.
        floor: value of the appended frames; by default log(1e-5), silence in log-mels clamped there.

    Shapes: `x (B, C, T)`, `mask (B, 1, T)` bool, valid frames first, or None; T becomes a multiple of `factor`.
    Errors: ValueError for anything but sequences, and for a mask that is not boolean `(B, 1, T)`.

    Example:
        >>> padding = PadToMultiple(2, floor=-9.0)
        >>> x, mask = padding(torch.ones(2, 1, 3), torch.tensor([[[True, True, True]], [[True, False, False]]]))
        >>> x[:, 0], mask[:, 0]
        (tensor([[ 1.,  1.,  1., -9.],
                 [ 1., -9.,  0.,  0.]]), tensor([[ True,  True,  True,  True],
                 [ True,  True, False, False]]))
        >>> padding.inverse(x, 3).shape
        torch.Size([2, 1, 3])
    """

    def __init__(self, factor: int, *, floor: float = math.log(1e-5)):
        at_least(1, factor=factor)
        self.factor, self.floor = factor, floor

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The longer sequences and their mask; frames that are not valid come out as zeros."""
        if x.dim() != 3:
            raise ValueError(f"PadToMultiple takes sequences (B, C, T), got {tuple(x.shape)}")
        if not x.is_floating_point() and not float(self.floor).is_integer():
            raise ValueError(f"PadToMultiple appends {self.floor:.4g}, which {x.dtype} cannot hold: give floor=0")
        missing = -x.shape[-1] % self.factor
        if mask is None:
            return pad(x, (0, missing), value=self.floor), None
        if mask.dtype != torch.bool or tuple(mask.shape) != (len(x), 1, x.shape[-1]):
            expected = f"boolean of shape {(len(x), 1, x.shape[-1])}"
            raise ValueError(f"PadToMultiple: mask must be {expected}, got {mask.dtype} {tuple(mask.shape)}")
        length = mask.sum(-1, keepdim=True)
        frame = torch.arange(x.shape[-1] + missing, device=x.device)
        longer = frame < (length + self.factor - 1) // self.factor * self.factor  # (B, 1, T')
        x = pad(x, (0, missing)).masked_fill(frame >= length, self.floor)
        return x.masked_fill(~longer, 0), longer

    def inverse(self, x: Tensor, length: int) -> Tensor:
        """The first `length` frames."""
        return x[..., :length]
