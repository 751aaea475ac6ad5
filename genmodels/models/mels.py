"""Log-mels as input of models: noise that gives them a density, whitening and its volume, lengths and masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec, TextCondition
from genmodels.core.errors import InputError, check_number
from genmodels.core.random import FrameKeyedGenerator, KeyedGenerator, uniform
from genmodels.core.tensors import hide, spread

#: Default width of the noise, in log units.
NOISE = 0.05


def with_noise(x: Tensor, width: float, generator: KeyedGenerator) -> Tensor:
    """Mels (B, C, T) with uniform noise of that width, the same for an item whatever it is padded to.

        x + w (u - 1/2),    u uniform on (0, 1)

    Mels are clipped at log 1e-5, so that this value has positive probability and a density there could grow without
    bound. The density of the noisy mel cannot: the mean of -log p is at least log w nats per cell.

    Example:
        >>> keyed = KeyedGenerator(0, torch.arange(1), "train")
        >>> bool((with_noise(torch.zeros(1, 2, 3), 0.05, keyed).abs() < 0.025).all())
        True
    """
    if width == 0:
        return x
    keyed = FrameKeyedGenerator(generator.seed, generator.index, f"{generator.stream}/mel", generator.step)
    return x + width * (uniform(x.shape, keyed, dtype=x.dtype, device=x.device) - 0.5)


class MelUnits(nn.Module):
    """Log-mels to whitened ones and back, by the statistics of the training data that the DataSpec carries.

        u = (x + w (r - 1/2) - m) / s,    log p(x) = log p(u) - D log s

    Arguments:
        spec: the data; its `statistics` give m and s, one for all cells or one for each band.
        noise: width w.

    Shapes: `x (B, n_mels, T)`, `mask (B, 1, T)`; outside the mask u is zero.
    Errors: InputError for data that are not mels, or a negative width.

    Example:
        >>> spec = DataSpec("speech", (2, 4), mel={}, statistics={"mean": -5.0, "std": 2.0})
        >>> units = MelUnits(spec, noise=0.0)
        >>> u, volume = units(Batch(torch.full((1, 2, 4), -3.0)), KeyedGenerator(0, torch.arange(1)))
        >>> float(u[0, 0, 0]), round(float(volume), 4)
        (1.0, -5.5452)
    """

    def __init__(self, spec: DataSpec, *, noise: float = NOISE):
        super().__init__()
        if spec.mel is None or spec.statistics is None:
            raise InputError(f"{spec.name} holds no mel-spectrograms: this model is for data=speech")
        check_number("noise", noise, 0)
        self.noise = noise
        for name, key in (("location", "mean"), ("scale", "std")):
            self.register_buffer(name, torch.tensor(spec.statistics[key], dtype=torch.float32).view(-1, 1))
        if not bool((self.scale > 0).all()):
            raise InputError(f"a band of {spec.name} is constant and has no density: use other settings of data.mel")

    def forward(self, batch: Batch, generator: KeyedGenerator) -> tuple[Tensor, Tensor]:
        """`(u, log |det du/dx| (B,))`."""
        x = with_noise(batch.x.to(self.scale.dtype), self.noise, generator)
        u = hide((x - self.location) / self.scale, batch.mask)
        frames = batch.x.new_full((len(x),), x.shape[2]) if batch.mask is None else batch.mask.sum((1, 2))
        each = self.scale.double().log().expand(x.shape[1], 1).sum()
        return u, -(frames * each).to(u.dtype)

    def inverse(self, u: Tensor) -> Tensor:
        """Log-mels of whitened ones."""
        return u * self.scale + self.location


def even_lengths(batch: Batch) -> Batch:
    """The batch with even lengths, for a squeeze by two; the added frames are silence and count as data.

    Example:
        >>> longer = even_lengths(Batch(torch.zeros(1, 2, 3), mask=torch.ones(1, 1, 3, dtype=torch.bool)))
        >>> longer.x.shape, int(longer.mask.sum())
        (torch.Size([1, 2, 4]), 4)
    """
    mask = batch.mask
    if mask is None:
        mask = torch.ones(len(batch), 1, batch.x.shape[2], dtype=torch.bool, device=batch.x.device)
    if batch.x.shape[2] % 2 == 0 and not bool((mask.sum(2) % 2).any()):
        return Batch(batch.x, batch.cond, mask, batch.index)
    from genmodels.flows.squeeze import PadToMultiple  # here, since only flows of mels need it

    x, mask = PadToMultiple(2, floor=math.log(1e-5))(batch.x, mask)
    return Batch(x, batch.cond, mask, batch.index)


def alone(batch: Batch, k: int) -> Batch:
    """Item k of mels with texts as a batch, without padding.

    Example:
        >>> said = TextCondition(torch.ones(1, 3).long(), torch.tensor([[[True, True, False]]]))
        >>> one = alone(Batch(torch.zeros(1, 2, 5), said, torch.arange(5)[None, None] < 4), 0)
        >>> one.x.shape, one.cond.tokens.shape
        (torch.Size([1, 2, 4]), torch.Size([1, 2]))
    """
    one = batch.rows(slice(k, k + 1))
    frames, tokens = int(one.mask.sum()), int(one.cond.mask.sum())
    said = TextCondition(one.cond.tokens[:, :tokens], one.cond.mask[..., :tokens], one.cond.speaker)
    return Batch(one.x[..., :frames], said, one.mask[..., :frames], one.index)


def frames_of(lengths: list[int] | None, index: Tensor, spec: DataSpec) -> Tensor | None:
    """The mask (n, 1, T) of samples of these lengths, in turn; without lengths, of mels, their usual length.

    Raises:
        ValueError: for data that are not sequences, or lengths out of range.

    Example:
        >>> spec = DataSpec("digits", (80, 4), statistics={"frames": 2}, mel={})
        >>> frames_of(None, torch.arange(1), spec)
        tensor([[[ True,  True, False, False]]])
    """
    if lengths is None and spec.mel is None:
        return None
    if len(spec.event_shape) != 2:
        raise ValueError(f"lengths are for sequences, and {spec.name} has events of shape {tuple(spec.event_shape)}")
    lengths = [spec.statistics["frames"]] if lengths is None else lengths
    longest = spec.event_shape[-1]
    if not lengths or not all(1 <= length <= longest for length in lengths):
        raise ValueError(f"lengths are numbers of frames from 1 to {longest} of sequences, got {lengths}")
    wanted = torch.tensor(lengths, device=index.device)[index % len(lengths)]
    return torch.arange(longest, device=index.device) < wanted[:, None, None]


def silent_beyond(x: Tensor, mask: Tensor | None, spec: DataSpec) -> Tensor:
    """Samples with silence (of other sequences: zeros) where the mask is False."""
    return x if mask is None else x.masked_fill(~mask, math.log(1e-5) if spec.mel is not None else 0.0)


def moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every scalar, or of the valid ones of each channel, broadcastable to the event."""
    if mask is None:
        return x.mean(0), x.std(0)
    axes = [0, *range(2, x.dim())]
    valid = spread(mask, x).expand_as(x)
    count = valid.sum(axes, keepdim=True)
    mean = hide(x, mask).sum(axes, keepdim=True) / count
    variance = hide((x - mean).square(), mask).sum(axes, keepdim=True) / (count - 1).clamp(min=1)
    return mean[0], variance.sqrt()[0]
