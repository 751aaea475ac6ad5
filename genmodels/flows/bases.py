"""Base distributions of flows."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from genmodels.core.errors import at_least, check_temperature
from genmodels.core.random import Generator, normal, uniform
from genmodels.core.tensors import event_sum, hide, wide
from genmodels.flows.bijection import Shape, as_shape, fits
from genmodels.flows.elementwise import bounded

_LIMIT = 10.0  # of learned log-scales


class Distribution(nn.Module):
    """A distribution over events with exact log-densities and samples at a temperature.

    A subclass defines `_sample`, and `_entries` or, where entries depend on one another, `_log_prob`.

    Arguments:
        event_shape: shape of one event; None stands for a length left open.

    Attributes:
        uses_cond: whether a condition is needed; distributions without one ignore it.

    Shapes: `z (B, *event)`, `mask` bool and broadcastable to z, `log_prob (B,)` float32 or wider, over valid entries.
    Errors: ValueError for events of another shape, a missing condition, a mask that is not boolean, labels that are not
    integers or of another number, a temperature below 0 or not finite (for `Uniform`: any but 1), or a length that is
    still open when samples are drawn.
    """

    uses_cond: bool = False

    def __init__(self, event_shape: Shape):
        super().__init__()
        self.event_shape = as_shape(event_shape)

    def log_prob(self, z: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Log-density of each event, (B,)."""
        self._fit(tuple(z.shape[1:]))
        self._check_cond(cond, len(z))
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"{type(self).__name__}: mask must be boolean (True = valid), got {mask.dtype}")
        return self._log_prob(hide(wide(z), mask), cond, mask)

    def sample(
        self, n: int, cond: Tensor | None = None, *, temperature: float = 1.0, generator: Generator,
        event_shape: Shape | None = None, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> Tensor:
        """Events (n, *event); `temperature` multiplies the scale of the noise, 0 gives the mode.

        `event_shape` sets an open length. With a keyed generator, event k depends only on its index.
        """
        check_temperature(temperature)
        shape = self.event_shape if event_shape is None else self._fit(tuple(event_shape))
        if None in shape:
            raise ValueError(f"{type(self).__name__} has events of shape {shape}: say which length to sample")
        self._check_cond(cond, n)
        return self._sample((n, *shape), cond, temperature, generator, dtype, device)

    def _log_prob(self, z: Tensor, cond: Tensor | None, mask: Tensor | None) -> Tensor:
        return event_sum(self._entries(z, cond), mask)

    def _entries(self, z: Tensor, cond: Tensor | None) -> Tensor:
        """Log-density of every entry, like z."""
        raise NotImplementedError

    def _sample(self, shape, cond, temperature, generator, dtype, device) -> Tensor:
        raise NotImplementedError

    def _fit(self, shape: Shape) -> Shape:
        if not fits(self.event_shape, shape):
            raise ValueError(f"{type(self).__name__} has events of shape {self.event_shape}, got {shape}")
        return shape

    def _check_cond(self, cond: Tensor | None, n: int) -> None:
        if self.uses_cond and cond is None:
            raise ValueError(f"{type(self).__name__} needs cond, the condition it was built for")


class StandardNormal(Distribution):
    """Independent standard normal entries.

        log p(z) = -|z|^2 / 2 - D/2 log(2 pi),    z = T eps

    Example:
        >>> StandardNormal((2,)).log_prob(torch.zeros(1, 2))
        tensor([-1.8379])
    """

    def _entries(self, z, cond):
        return -0.5 * z.square() - 0.5 * math.log(2 * math.pi)

    def _sample(self, shape, cond, temperature, generator, dtype, device):
        return temperature * normal(shape, generator, dtype=dtype, device=device)


class _Normals(Distribution):
    """Means and log-scales of one or several Gaussians, the same for all positions along an open length."""

    def _learn(self, *leading: int) -> None:
        shape = (*leading, *(1 if n is None else n for n in self.event_shape))
        self.mean, self.raw_log_scale = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))

    @property
    def log_scale(self) -> Tensor:
        """The log-scales, bounded: 10 tanh(raw / 10)."""
        return bounded(self.raw_log_scale, _LIMIT)

    def _draw(self, rows: Tensor | None, shape, temperature, generator, dtype, device) -> Tensor:
        """Samples of the distributions of these rows, or of the only one."""
        noise = temperature * normal(shape, generator, dtype=dtype, device=device)
        mean, log_scale = self.mean, self.log_scale
        if rows is not None:  # index_select, unlike indexing, refuses a negative label
            mean, log_scale = mean.index_select(0, rows), log_scale.index_select(0, rows)
        return (mean + log_scale.exp() * noise).to(dtype)


class DiagonalNormal(_Normals):
    """Independent normal entries with learned mean and scale.

        log p(z) = sum_i log N(z_i; mu_i, sigma_i^2),    log sigma = 10 tanh(raw / 10),    z = mu + T sigma eps

    Starts as the standard normal.

    Example:
        >>> DiagonalNormal((2,)).log_prob(torch.zeros(1, 2)).detach()
        tensor([-1.8379])
    """

    def __init__(self, event_shape: Shape):
        super().__init__(event_shape)
        self._learn()

    def _entries(self, z, cond):
        return _log_normal(z, self.mean, self.log_scale)

    def _sample(self, shape, cond, temperature, generator, dtype, device):
        return self._draw(None, shape, temperature, generator, dtype, device)


class ClassNormal(_Normals):
    """A Gaussian for every class, which conditions a flow without conditional networks on the class.

        log p(z | y) = sum_i log N(z_i; mu_{y,i}, sigma_{y,i}^2),    log sigma = 10 tanh(raw / 10)

    Arguments:
        event_shape: shape of one event.
        num_classes: number of classes; `cond (B,)` holds labels.

    Example:
        >>> ClassNormal((2,), num_classes=3).log_prob(torch.zeros(1, 2), torch.tensor([2])).detach()
        tensor([-1.8379])
    """

    uses_cond = True

    def __init__(self, event_shape: Shape, *, num_classes: int):
        super().__init__(event_shape)
        at_least(1, num_classes=num_classes)
        self.num_classes = num_classes
        self._learn(num_classes)

    def _check_cond(self, cond, n):
        super()._check_cond(cond, n)
        if cond.dim() != 1 or cond.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ClassNormal takes integer labels (B,), int64 or int32, got {cond.dtype} of shape "
                             f"{tuple(cond.shape)}")
        if len(cond) != n:
            raise ValueError(f"ClassNormal needs a label for each of {n} events, got {len(cond)}")
        # On an accelerator this would wait for the device; there the flow checks all values at once.
        if cond.device.type == "cpu" and not torch.compiler.is_compiling():
            wrong = (cond < 0) | (cond >= self.num_classes)
            if wrong.any():
                row = int(wrong.nonzero()[0, 0])
                last = self.num_classes - 1
                raise ValueError(f"cond: label {int(cond[row])} in row {row}, the classes are 0..{last}")

    def _entries(self, z, cond):
        # index_select, unlike indexing, refuses a negative label.
        return _log_normal(z, self.mean.index_select(0, cond), self.log_scale.index_select(0, cond))

    def _sample(self, shape, cond, temperature, generator, dtype, device):
        return self._draw(cond, shape, temperature, generator, dtype, device)


class Logistic(Distribution):
    """Independent standard logistic entries.

        log p(z) = sum_i log sigmoid(z_i) + log sigmoid(-z_i),    z = T log(u / (1 - u))

    Example:
        >>> Logistic((2,)).log_prob(torch.zeros(1, 2))
        tensor([-2.7726])
    """

    def _entries(self, z, cond):
        return logsigmoid(z) + logsigmoid(-z)

    def _sample(self, shape, cond, temperature, generator, dtype, device):
        u = uniform(shape, generator, dtype=dtype, device=device)
        # A torch.Generator may draw 0 exactly, whose logit is infinite.
        return temperature * torch.logit(u, eps=torch.finfo(dtype).eps / 2)


class Uniform(Distribution):
    """Independent uniform entries; for tests, since it has neither gradient nor temperature.

        log p(z) = -D log(high - low) inside, -inf outside

    Arguments:
        event_shape: shape of one event.
        low, high: ends of the interval.

    Example:
        >>> Uniform((2,), low=-1.0).log_prob(torch.tensor([[0.0, 0.5], [0.0, 1.5]]))
        tensor([-1.3863,    -inf])
    """

    def __init__(self, event_shape: Shape, *, low: float = 0.0, high: float = 1.0):
        super().__init__(event_shape)
        if not low < high:
            raise ValueError(f"Uniform: low = {low} must be below high = {high}")
        self.low, self.high = low, high

    def _entries(self, z, cond):
        inside = (z >= self.low) & (z <= self.high)
        return torch.full_like(z, -math.log(self.high - self.low)).masked_fill(~inside, -math.inf)

    def _sample(self, shape, cond, temperature, generator, dtype, device):
        if temperature != 1:
            raise ValueError(f"Uniform has no temperature: it must be 1, got {temperature}")
        return self.low + (self.high - self.low) * uniform(shape, generator, dtype=dtype, device=device)


class Mixture(_Normals):
    """A mixture of Gaussians with learned weights, means and diagonal scales.

        log p(z) = log sum_k pi_k N(z; mu_k, sigma_k^2),    z = mu_k + T sigma_k eps with probability pi_k

    At temperature 0 the sample is the mode, found by ascent from the mean of every component.

    Arguments:
        event_shape: shape of one event.
        components: number K of components.
        generator: source of the initial means (equal ones would stay equal); a fixed seed without one.

    Source: the ascent: Carreira-Perpinan 2000, "Mode-finding for mixtures of Gaussian distributions".

    Example:
        >>> Mixture((2,), components=3).sample(4, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([4, 2])
    """

    def __init__(self, event_shape: Shape, *, components: int = 8, generator: torch.Generator | None = None):
        super().__init__(event_shape)
        at_least(1, components=components)
        self._learn(components)
        self.logits = nn.Parameter(torch.zeros(components))
        nn.init.normal_(self.mean, generator=torch.Generator().manual_seed(0) if generator is None else generator)

    def _log_joint(self, z: Tensor, mask: Tensor | None) -> Tensor:
        """log pi_k + log N(z; mu_k, sigma_k^2), (B, K)."""
        each = _log_normal(z[:, None], self.mean, self.log_scale)  # (B, K, *event)
        return self.logits.log_softmax(0) + hide(each, None if mask is None else mask[:, None]).flatten(2).sum(2)

    def _log_prob(self, z, cond, mask):
        return self._log_joint(z, mask).logsumexp(1)

    def _sample(self, shape, cond, temperature, generator, dtype, device):
        if temperature == 0:
            return self.mode(shape[1:]).to(dtype).to(device).expand(shape).clone()
        u = uniform((shape[0], 1), generator, dtype=torch.float64, device=device)
        # Without the last sum, which rounding may keep below u.
        chosen = (u > self.logits.double().softmax(0).cumsum(0)[:-1]).sum(1)
        return self._draw(chosen, shape, temperature, generator, dtype, device)

    @torch.no_grad()
    def mode(self, event_shape: tuple[int, ...], *, steps: int = 1000) -> Tensor:
        """The highest of the maxima that the ascent finds, (*event).

            z <- sum_k r_k(z) mu_k / sigma_k^2 / sum_k r_k(z) / sigma_k^2,    r_k the posterior of component k
        """
        z = self.mean.expand(-1, *event_shape).contiguous()
        precision = (-2 * self.log_scale).exp()
        for _ in range(steps):
            share = self._log_joint(z, None).softmax(1).reshape(*z.shape[:1], -1, *[1] * len(event_shape))  # (B, K, ..)
            z = (share * precision * self.mean).sum(1) / (share * precision).sum(1)
        return z[self._log_joint(z, None).logsumexp(1).argmax()]


def _log_normal(z: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """log N(z; mean, exp(log_scale)^2), entry by entry."""
    return -0.5 * ((z - mean) * torch.exp(-log_scale)).square() - log_scale - 0.5 * math.log(2 * math.pi)


#: Bases by name; `model.base` offers the Gaussian ones, `normal`, `diagonal` and `class`.
BASES = {
    "normal": StandardNormal,
    "diagonal": DiagonalNormal,
    "class": ClassNormal,
    "logistic": Logistic,
    "uniform": Uniform,
    "mixture": Mixture,
}
