"""Scales and shifts: ActNorm, which is initialised from the first batch, and fixed elementwise maps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, logsigmoid

from genmodels.core.processes import summed
from genmodels.core.tensors import event_sum, hide
from genmodels.flows.bijection import Bijection, Channelwise, Shape, at_each_position, fits, positions
from genmodels.flows.elementwise import bounded, per_channel, unbounded


def channel_moments(x: Tensor, mask: Tensor | None = None) -> tuple[float, Tensor, Tensor]:
    """Number of valid positions, mean and population standard deviation of every channel, in float64.

    Two passes, count and sums, then squares about the mean, are each summed over the processes of a distributed run, so
    that the result does not depend on their number.

    Shapes: `x (B, C, *space)`, `mask (B, 1, T)`; mean and standard deviation `(C,)`. Without positions both are NaN.

    Example:
        >>> channel_moments(torch.tensor([[1.0, 3.0], [5.0, 7.0]])[:, None])
        (4.0, tensor([4.], dtype=torch.float64), tensor([2.2361], dtype=torch.float64))
    """
    values = _by_position(x)
    count = positions(values, mask)
    count = count.sum() if isinstance(count, Tensor) else values.new_tensor(count * len(values))
    total = summed(torch.cat([count[None], hide(values, mask).sum((0, 2))]))
    mean = total[1:] / total[0]
    squares = summed(hide(values - mean[:, None], mask).square().sum((0, 2)))
    return float(total[0]), mean, (squares / total[0]).sqrt()


def _by_position(x: Tensor) -> Tensor:
    """(B, C, N) in float64."""
    return x.to(torch.float64).flatten(2) if x.dim() > 2 else x.to(torch.float64)[..., None]


def channel_covariance(x: Tensor, mask: Tensor | None = None) -> tuple[float, Tensor]:
    """Number of valid positions and population covariance of the channels, in float64; see `channel_moments`.

    Shapes: `x (B, C, *space)`, `mask (B, 1, T)`; covariance `(C, C)`.

    Example:
        >>> channel_covariance(torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
        (2.0, tensor([[1., 1.],
                [1., 1.]], dtype=torch.float64))
    """
    count, mean, _ = channel_moments(x, mask)
    values = hide(_by_position(x) - mean[:, None], mask).transpose(0, 1).flatten(1)  # (C, B N)
    return count, summed(values @ values.mT) / count


class DataInitialized(Channelwise):
    """A bijection of each channel, initialised from the mean and standard deviation of the first batch.

    A subclass defines `_take(mean, std)`; `_is_constant(mean, std)` are the channels that are not scaled. The flag
    `initialized` is a buffer, which is saved; `ready` is its copy in Python, so that reading it never waits for the
    device.

    Arguments:
        channels: number of channels; of dimensions for vectors.

    Errors: `initialize` raises RuntimeError when the layer is initialised already (unless `force`), and ValueError for
    a batch with fewer than `fewest` valid positions or with non-finite values. In a distributed run every process must
    call it.
    """

    constant_logdet = True
    fewest = 1  # valid positions of the batch

    def __init__(self, channels: int):
        super().__init__(channels)
        self.register_buffer("initialized", torch.tensor(False))
        self.ready = False

    def uninitialized(self, name: str = "") -> Iterator[str]:
        if not self.ready:
            yield name or type(self).__name__

    @torch.no_grad()
    def initialize(self, x, cond=None, mask=None, *, force=False) -> None:
        kind = type(self).__name__
        here = f"{self.place} ({kind})" if self.place else kind
        if self.ready and not force:
            raise RuntimeError(f"{here} is initialised already; force=True initialises it again from this batch")
        count, mean, std = channel_moments(self._enter(x, self.out_shape, cond, mask), mask)
        if count == 0:
            raise ValueError(f"{here} cannot be initialised from a batch without a single valid position")
        if count < self.fewest:
            raise ValueError(f"{here} is initialised from the covariance of {self.channels} channels, which takes at "
                             f"least {self.fewest} valid positions: this batch has {count:.0f}, give a larger one")
        wrong = ~(mean.isfinite() & std.isfinite())
        if wrong.any():
            raise ValueError(f"{here}: the batch has values that are not finite in channels {_listed(wrong)}")
        constant = self._is_constant(mean, std)
        if constant.any():
            warnings.warn(
                f"{here}: channels {_listed(constant)} are constant in the batch that initialises them "
                f"(standard deviation down to {float(std.min()):.3g}); they are centred, not scaled",
                stacklevel=2,
            )
        self._take(mean, std.masked_fill(constant, 1.0))
        self.initialized.fill_(True)
        self.ready = True

    def _is_constant(self, mean: Tensor, std: Tensor) -> Tensor:
        return std < 1e-3

    def _take(self, mean: Tensor, std: Tensor) -> None:
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict, prefix, *arguments) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if f"{prefix}initialized" in state_dict:
            self.ready = bool(state_dict[f"{prefix}initialized"])


def _listed(chosen: Tensor) -> str:
    numbers = chosen.nonzero().flatten().tolist()
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


_LIMIT = 10.0
_STEEP = 9.0  # log-scales up to here are left to the bounded parameter: its slope is 0.2 there, and vanishes beyond


class ActNorm(DataInitialized):
    """A learned scale and shift of every channel.

        z = (x + b) exp(s),    log |det| = n_pos sum_c s_c,    s = o + 10 tanh(raw / 10)

    It starts as the identity; `initialize` sets b = -mean and s = -log std, so that its output has mean 0 and variance
    1 over examples and valid positions. Channels with a standard deviation below 1e-3 get s = 0 and a warning. The
    buffer o is the part of an initial |s| that exceeds 9, else 0.

    Arguments:
        channels: number of channels C; of dimensions for vectors.

    Shapes: `x (B, C, *space)`, `mask (B, 1, T)`, `logdet (B,)`.
    Errors: see `DataInitialized`; ValueError for another number of channels.
    Source: Kingma and Dhariwal 2018 (Glow), section 3.1.

    Example:
        >>> layer = ActNorm(1)
        >>> layer.initialize(torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]]]))
        >>> z, logdet = layer(torch.tensor([[[4.0, 5.0]]]))
        >>> z.detach(), logdet.detach()
        (tensor([[[0.0000, 0.4472]]]), tensor([-1.6094]))
    """

    def __init__(self, channels: int):
        super().__init__(channels)
        self.bias = nn.Parameter(torch.zeros(channels))
        self.raw_log_scale = nn.Parameter(torch.zeros(channels))
        self.register_buffer("offset", torch.zeros(channels))

    def log_scale(self) -> Tensor:
        """s, less than 10 from the offset."""
        return self.offset + bounded(self.raw_log_scale, _LIMIT)

    def _take(self, mean: Tensor, std: Tensor) -> None:
        self.bias.copy_(-mean)
        log_scale = -torch.log(std)
        learned = log_scale.clamp(-_STEEP, _STEEP)
        self.offset.copy_(log_scale - learned)
        self.raw_log_scale.copy_(unbounded(learned, _LIMIT))

    def _load_from_state_dict(self, state_dict, prefix, *arguments) -> None:
        state_dict.setdefault(f"{prefix}offset", torch.zeros_like(self.offset))  # files from before there was one
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _forward(self, x, cond, mask):
        bias, log_scale = self.bias.to(x.dtype), self.log_scale().to(x.dtype)
        centred = x + per_channel(bias, x)  # first: x exp(s) + b exp(s) would cancel where a mean is large
        return scaled(centred, torch.exp(log_scale), torch.zeros_like(bias)), at_each_position(log_scale.sum(), x, mask)

    def _inverse(self, z, cond, mask):
        bias, log_scale = self.bias.to(z.dtype), self.log_scale().to(z.dtype)
        return scaled(z, torch.exp(-log_scale), -bias), at_each_position(-log_scale.sum(), z, mask)


def scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`scale x + shift` per channel, in one pass over x and one over its gradient.

    It is a batch norm with the fixed statistics 0 and 1, whose kernel sums the gradients of both parameters in the same
    pass and stores only x.

    Example:
        >>> scaled(torch.ones(1, 2), torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0]))
        tensor([[2., 4.]])
    """
    if x.dim() > 3 and 1 in (len(x), *x.shape[2:]):  # the CPU kernel mixes up the strides of such gradients
        return torch.addcmul(per_channel(shift, x), x, per_channel(scale, x))
    # Some versions of torch refuse eps = 0; 0.75 + 0.25 is exactly one.
    return batch_norm(x, torch.zeros_like(scale), torch.full_like(scale, 0.75), scale, shift, training=False, eps=0.25)


class Logit(Bijection):
    """The logit of numbers in [0, 1].

        y = alpha + (1 - 2 alpha) v,   z = log y - log(1 - y),   log |det| = sum [log(1 - 2 alpha) + sp(z) + sp(-z)]

    The inverse does not clip: samples outside [0, 1] are clipped where they become levels.

    Arguments:
        alpha: distance of the ends from 0 and 1, in (0, 1/2).

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
        return low - high, event_sum(math.log1p(-2 * self.alpha) - low - high, mask)

    def _inverse(self, z, cond, mask):
        v = (torch.sigmoid(z) - self.alpha) / (1 - 2 * self.alpha)
        volume = math.log1p(-2 * self.alpha) - logsigmoid(z) - logsigmoid(-z)
        return v, -event_sum(volume, mask)


class _PerChannel(Bijection):
    """One number, or one for each channel (of vectors: each dimension), kept as a buffer."""

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

    Location and scale are buffers that `initialize` takes from data. A channel that is constant up to rounding is
    centred, not scaled, with a warning.

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

    of_data = ("location", "scale")  # which a model that starts from the weights of another one keeps

    def __init__(self, event_shape: Shape):
        super().__init__(event_shape[0])
        self.event_shape = tuple(event_shape)
        self.register_buffer("location", torch.zeros(self.channels))
        self.register_buffer("scale", torch.ones(self.channels))

    def out_shape(self, shape: Shape) -> Shape:
        if not fits(self.event_shape, shape):
            raise self._misfit(self.event_shape, shape)
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
