"""ActNorm: a scale and a shift per channel that start by standardising the first batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from genmodels.core.processes import summed
from genmodels.core.tensors import hide
from genmodels.flows.bijection import Channelwise, at_each_position, positions
from genmodels.flows.elementwise import bounded, unbounded


def channel_moments(x: Tensor, mask: Tensor | None = None) -> tuple[float, Tensor, Tensor]:
    """Number of valid positions, mean and population standard deviation of every channel, in float64.

    Two passes: first count and sums, then squares about the mean, each added up over the processes of a distributed
    run. So one process with the whole batch and several with a part each find the same numbers.

    Shapes: `x (B, C, *space)`, `mask (B, 1, T)`; mean and standard deviation `(C,)`. Without positions both are NaN.

    Example:
        >>> channel_moments(torch.tensor([[1.0, 3.0], [5.0, 7.0]])[:, None])
        (4.0, tensor([4.], dtype=torch.float64), tensor([2.2361], dtype=torch.float64))
    """
    values = x.to(torch.float64).flatten(2) if x.dim() > 2 else x.to(torch.float64)[..., None]  # (B, C, N)
    count = positions(values, mask)
    count = count.sum() if isinstance(count, Tensor) else values.new_tensor(count * len(values))
    total = summed(torch.cat([count[None], hide(values, mask).sum((0, 2))]))
    mean = total[1:] / total[0]
    squares = summed(hide(values - mean[:, None], mask).square().sum((0, 2)))
    return float(total[0]), mean, (squares / total[0]).sqrt()


class DataInitialized(Channelwise):
    """A bijection, channel by channel, whose start is the mean and standard deviation of the first batch.

    A subclass defines `_take(mean, std)` and says by `_is_constant(mean, std)` which channels are not to be scaled.
    Until it has seen data the layer acts as its parameters say. The flag is a buffer, so it is saved and loaded;
    `ready` is its mirror in Python, so that asking for it never waits for the device.

    Arguments:
        channels: number of channels; of dimensions for vectors.

    Errors: `initialize` raises RuntimeError when the layer is initialised already (unless `force`), and ValueError when
    the batch has no valid position or values that are not finite. In a distributed run every process must call it.
    """

    constant_logdet = True

    def __init__(self, channels: int):
        super().__init__(channels)
        self.register_buffer("initialized", torch.tensor(False))
        self.ready = False

    def uninitialized(self, name: str = "") -> Iterator[str]:
        if not self.ready:
            yield name or type(self).__name__

    @torch.no_grad()
    def initialize(
        self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None, *, force: bool = False
    ) -> None:
        kind = type(self).__name__
        here = f"{self.place} ({kind})" if self.place else kind
        if self.ready and not force:
            raise RuntimeError(f"{here} is initialised already; force=True takes its start from this batch instead")
        self.out_shape(tuple(x.shape[1:]))
        count, mean, std = channel_moments(self._enter(x, cond, mask), mask)
        if count == 0:
            raise ValueError(f"{here} cannot be initialised from a batch without a single valid position")
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
        raise NotImplementedError

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

    It starts as the identity; `initialize` sets b = -mean and s = -log std, so that the batch leaves with mean 0 and
    variance 1 over examples and valid positions. Channels with a standard deviation below 1e-3 get s = 0 and are named
    in one warning. The offset o is a buffer: of the log-scales of channels wider than e^9 it takes what exceeds 9, and
    is 0 for others.

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

    def _is_constant(self, mean: Tensor, std: Tensor) -> Tensor:
        return std < 1e-3

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
        scale = torch.exp(log_scale)
        return scaled(x, scale, bias * scale), at_each_position(log_scale.sum(), x, mask)

    def _inverse(self, z, cond, mask):
        bias, log_scale = self.bias.to(z.dtype), self.log_scale().to(z.dtype)
        return scaled(z, torch.exp(-log_scale), -bias), at_each_position(-log_scale.sum(), z, mask)


def scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`scale x + shift` per channel, in one pass over x, and one over the gradient on the way back.

    It is a batch norm with the fixed statistics 0 and 1: its kernel also sums the gradients of both parameters in the
    pass that scales them, and keeps nothing but x.

    Example:
        >>> scaled(torch.ones(1, 2), torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0]))
        tensor([[2., 4.]])
    """
    # Some versions of torch refuse eps = 0; 0.75 + 0.25 is exactly one.
    return batch_norm(x, torch.zeros_like(scale), torch.full_like(scale, 0.75), scale, shift, training=False, eps=0.25)
