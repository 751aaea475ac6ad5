"""Fixed maps of single numbers: pixels in [0, 1] to the whole line (logit), scale, shift, standardisation."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from genmodels.core.tensors import hide
from genmodels.flows.actnorm import DataInitialized
from genmodels.flows.bijection import Bijection, Shape, at_each_position, per_example
from genmodels.flows.elementwise import per_channel


class Logit(Bijection):
    """Numbers in [0, 1] to the whole line.

        y = alpha + (1 - 2 alpha) v,   z = log y - log(1 - y),   log |det| = sum [log(1 - 2 alpha) + sp(z) + sp(-z)]

    The inverse does not clip: alpha leaves room on both sides of [0, 1], and what a flow samples there is clipped where
    values become levels.

    Arguments:
        alpha: how far the ends stay from 0 and 1, in (0, 1/2).

    Shapes: any event.
    Errors: ValueError for alpha outside (0, 1/2).
    Source: Dinh et al. 2017 (RealNVP), section 4.1.

    Example:
        >>> z, logdet = Logit(0.05)(torch.tensor([[0.5, 127.5, 255.5]]) / 256)
        >>> z, logdet
        (tensor([[-2.9080, -0.0070,  2.9080]]), tensor([7.0989]))
    """

    def __init__(self, alpha: float = 0.05):
        super().__init__()
        if not 0 < alpha < 0.5:
            raise ValueError(f"Logit: alpha must lie between 0 and 1/2, got {alpha}")
        self.alpha = alpha

    def _forward(self, v, cond, mask):
        low = torch.log(self.alpha + (1 - 2 * self.alpha) * v)  # log y = -sp(-z)
        high = torch.log(self.alpha + (1 - 2 * self.alpha) * (1 - v))  # log(1 - y) = -sp(z), no digit of 1 - v lost
        return low - high, per_example(hide(math.log1p(-2 * self.alpha) - low - high, mask))

    def _inverse(self, z, cond, mask):
        v = (torch.sigmoid(z) - self.alpha) / (1 - 2 * self.alpha)
        volume = math.log1p(-2 * self.alpha) - logsigmoid(z) - logsigmoid(-z)
        return v, -per_example(hide(volume, mask))


class _PerChannel(Bijection):
    """One number for everything, or one for each channel (of vectors: each dimension), kept as a buffer."""

    constant_logdet = True

    def __init__(self, values: float | Tensor):
        super().__init__()
        values = torch.as_tensor(values, dtype=None if isinstance(values, Tensor) else torch.get_default_dtype())
        if values.dim() > 1 or not values.is_floating_point() or not values.isfinite().all():
            raise ValueError(f"{type(self).__name__} takes a finite number, or one per channel, got {values}")
        self.register_buffer("values", values.clone())

    def out_shape(self, shape: Shape) -> Shape:
        if len(shape) == 0 or (self.values.dim() and shape[0] != len(self.values)):
            raise self._misfit(f"({len(self.values) if self.values.dim() else 'C'}, ...)", shape)
        return shape

    def in_shape(self, shape: Shape) -> Shape:
        return self.out_shape(shape)


class Scale(_PerChannel):
    """A fixed factor.

        z = s x,    log |det| = n_pos sum_c log |s_c|

    Arguments:
        values: s, a number or one per channel (C,); of vectors, per dimension.

    Shapes: `x (B, C, *space)`.
    Errors: ValueError for a factor of zero, and for another number of channels.

    Example:
        >>> Scale(-2.0)(torch.tensor([[1.0, 3.0]]))
        (tensor([[-2., -6.]]), tensor([1.3863]))
    """

    def __init__(self, values: float | Tensor):
        super().__init__(values)
        if (self.values == 0).any():
            raise ValueError("Scale: a factor of zero cannot be undone")

    def _forward(self, x, cond, mask):
        return x * per_channel(self.values.to(x.dtype), x), at_each_position(self._volume(x), x, mask)

    def _inverse(self, z, cond, mask):
        return z / per_channel(self.values.to(z.dtype), z), at_each_position(-self._volume(z), z, mask)

    def _volume(self, x: Tensor) -> Tensor:
        """log |det| at one position."""
        return self.values.to(x.dtype).abs().log().expand(x.shape[1]).sum()


class Shift(_PerChannel):
    """A fixed shift.

        z = x + t,    log |det| = 0

    Arguments:
        values: t, a number or one per channel (C,); of vectors, per dimension.

    Shapes: `x (B, C, *space)`.
    Errors: ValueError for another number of channels.

    Example:
        >>> Shift(-0.5)(torch.tensor([[1.0, 3.0]]))
        (tensor([[0.5000, 2.5000]]), tensor([0.]))
    """

    def _forward(self, x, cond, mask):
        return x + per_channel(self.values.to(x.dtype), x), x.new_zeros(len(x))

    def _inverse(self, z, cond, mask):
        return z - per_channel(self.values.to(z.dtype), z), z.new_zeros(len(z))


class Standardise(DataInitialized):
    """Mean zero and standard deviation one in every channel of the training data.

        z = (x - location) / scale,    log |det| = -n_pos sum_c log scale_c

    Location and scale are buffers, not parameters: `initialize` takes them from data, once. A channel that is constant
    up to rounding is centred, not scaled, and named in one warning.

    Arguments:
        event_shape: shape of x, None for a length left open; one location and scale per channel, its first entry
            (of vectors: per dimension).

    Shapes: `x (B, *event_shape)`.
    Errors: see `DataInitialized`; ValueError for another event shape.

    Example:
        >>> layer = Standardise((2,))
        >>> layer.initialize(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))
        >>> layer(torch.tensor([[3.0, 20.0]]))
        (tensor([[1., 0.]]), tensor([-2.3026]))
    """

    def __init__(self, event_shape: Shape):
        super().__init__(event_shape[0])
        self.event_shape = tuple(event_shape)
        self.register_buffer("location", torch.zeros(self.channels))
        self.register_buffer("scale", torch.ones(self.channels))

    def out_shape(self, shape: Shape) -> Shape:
        expected = self.event_shape
        if len(shape) != len(expected) or any(
            a is not None and b is not None and a != b for a, b in zip(shape, expected, strict=True)
        ):
            raise self._misfit(f"({', '.join('T' if n is None else str(n) for n in expected)})", shape)
        return shape

    def _is_constant(self, mean: Tensor, std: Tensor) -> Tensor:
        return std <= 1e-6 * mean.abs()

    def _take(self, mean: Tensor, std: Tensor) -> None:
        self.location.copy_(mean)
        self.scale.copy_(std)

    def _forward(self, x, cond, mask):
        z = (x - per_channel(self.location.to(x.dtype), x)) / per_channel(self.scale.to(x.dtype), x)
        return z, at_each_position(-self.scale.to(x.dtype).log().sum(), x, mask)

    def _inverse(self, z, cond, mask):
        x = z * per_channel(self.scale.to(z.dtype), z) + per_channel(self.location.to(z.dtype), z)
        return x, at_each_position(self.scale.to(z.dtype).log().sum(), z, mask)
