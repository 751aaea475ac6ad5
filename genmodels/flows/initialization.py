"""Layers that take their start from data: moments over all processes, and the flag that says it has happened."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, distributed

from genmodels.flows.bijection import Channelwise, positions
from genmodels.nn.blocks import hide


def channel_moments(x: Tensor, mask: Tensor | None = None) -> tuple[float, Tensor, Tensor]:
    """Number of valid positions, mean and population standard deviation of every channel, in float64.

    Two passes: first count and sums, then squares about the mean, each added up over the processes of a distributed
    run. So one process with the whole batch and several with a part each find the same numbers.

    Shapes: `x (B, C, *space)`, `mask (B, 1, T)`; mean and deviation `(C,)`. Without positions both are NaN.

    Example:
        >>> channel_moments(torch.tensor([[1.0, 3.0], [5.0, 7.0]])[:, None])
        (4.0, tensor([4.], dtype=torch.float64), tensor([2.2361], dtype=torch.float64))
    """
    values = x.to(torch.float64).flatten(2) if x.dim() > 2 else x.to(torch.float64)[..., None]  # (B, C, N)
    count = positions(values, mask)
    count = count.sum() if isinstance(count, Tensor) else values.new_tensor(count * len(values))
    total = _over_processes(torch.cat([count[None], hide(values, mask).sum((0, 2))]))
    mean = total[1:] / total[0]
    squares = _over_processes(hide(values - mean[:, None], mask).square().sum((0, 2)))
    return float(total[0]), mean, (squares / total[0]).sqrt()


def _over_processes(values: Tensor) -> Tensor:
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(values)
    return values


class DataInitialized(Channelwise):
    """A bijection, channel by channel, whose start is the mean and deviation of the first batch.

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
                f"(deviation down to {float(std.min()):.3g}); they are centred, not scaled",
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
