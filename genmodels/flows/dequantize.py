"""Dequantisation: noise that turns a density on the unit cube into a bound on the probability of integers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from genmodels.core.errors import positive, require_finite_rows
from genmodels.core.random import Generator, normal, uniform
from genmodels.core.tensors import event_mean, event_sum, hide
from genmodels.flows.bijection import Bijection, Shape
from genmodels.nn.condition import Condition


class Dequantize(nn.Module):
    """Adds noise to integers, which are then points of the unit cube.

        v = (x + u) / L,    log P(x) >= E_u [log p(v) - D log L - log q(u | x)]

    A subclass defines `_spread`, which turns `noise` into u and log q(u | x). In float32 x + u may round up to
    x + 1 (one draw in 131,072 at x >= 128), so v is clamped to its cell: v < 1, and `to_levels` always returns x.

    Arguments:
        levels: number of integer levels L.

    Attributes:
        kind: kind of the resulting likelihood, `lower_bound`.
        median: median of what `noise` returns.

    Shapes: `x (B, *event)` integers 0..L-1; `v` like x, in the precision of the module; contribution `(B,)`, over valid
    entries; masked entries of v are zero.
    Errors: ValueError for fewer than two levels, or data that are not integers; an IndexError for values out of range,
    unless a `DiscreteFlow` has refused them before.
    Source: Theis, van den Oord, Bethge 2016, section 3.1.
    """

    kind = "lower_bound"
    median: float = 0.0

    def __init__(self, levels: int):
        super().__init__()
        if isinstance(levels, bool) or not isinstance(levels, int):
            raise ValueError(f"{type(self).__name__}: levels must be a whole number, got {levels!r}")
        if levels < 2:
            raise ValueError(f"{type(self).__name__}: levels must be at least 2, got {levels}")
        self.levels = levels
        low, high = _cells(self.levels)
        precision = torch.get_default_dtype()  # that of the flow; every float32 number is one of float64
        self.register_buffer("low", low.to(precision), persistent=False)
        self.register_buffer("high", high.to(precision), persistent=False)

    def forward(self, x: Tensor, generator: Generator, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`(v, contribution)` with fresh noise: points in [0, 1), and the term to add to their log-density."""
        return self.with_noise(x, self.noise(tuple(x.shape), generator), mask)

    def with_noise(self, x: Tensor, noise: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same with noise from `noise`."""
        x = hide(self._integers(x), mask)
        u, log_q = self._spread(x, noise, mask)
        entries = math.prod(x.shape[1:]) if mask is None else mask.expand_as(x).flatten(1).sum(1).to(log_q.dtype)
        v = torch.clamp((x + u) / self.levels, self._of_cell(self.low, x), self._of_cell(self.high, x))
        return hide(v, mask), -entries * math.log(self.levels) - log_q

    def noise(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        """Fresh noise for a batch of this shape, Gaussian unless a subclass says otherwise."""
        return normal(shape, generator, dtype=self.low.dtype, device=self.low.device)

    def _spread(self, x: Tensor, noise: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """u in [0, 1] like x, and log q(u | x) `(B,)`."""
        raise NotImplementedError

    def centre(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The point of each integer at the median of the noise: of uniform noise (x + 1/2) / L."""
        median = torch.full(x.shape, self.median, dtype=self.low.dtype, device=x.device)
        return self.with_noise(x, median, mask)[0]

    def to_levels(self, v: Tensor) -> Tensor:
        """The integers whose cells hold `v`, clamp(floor(L v), 0, L - 1); uint8 up to 256 levels, else int64.

        Raises:
            NotFinite: where a row of v is not finite.
        """
        kind = torch.uint8 if self.levels <= 256 else torch.int64
        # In float64 the product with a float32 number is exact, so that cells end exactly where v is clamped.
        return (require_finite_rows(v).double() * self.levels).floor().clamp(0, self.levels - 1).to(kind)

    def outside(self, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """The fraction of the valid values of each row outside [0, 1), where there is no cell; (B,) float64.

        `to_levels` moves them to the end levels, which the likelihood does not account for.

        Example:
            >>> UniformDequantize(4).outside(torch.tensor([[0.0, 0.99], [-0.1, 0.5], [1.0, 1.2]]))
            tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
        """
        return event_mean(((v < 0) | (v >= 1)).double(), mask)

    def initialize(self, x: Tensor, generator: Generator, mask: Tensor | None = None, *, force: bool = False) -> None:
        """Data-dependent initialisation from a batch; uniform noise has none."""

    def uninitialized(self) -> Iterator[str]:
        """Names of the layers that are not yet initialised."""
        yield from ()

    def _integers(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            raise ValueError(f"{type(self).__name__} takes integers 0..{self.levels - 1}, got {x.dtype}")
        return x.long()

    def _of_cell(self, ends: Tensor, x: Tensor) -> Tensor:
        # index_select, unlike indexing, refuses a negative level.
        return ends.index_select(0, x.flatten()).view(x.shape)


class UniformDequantize(Dequantize):
    """Uniform noise.

        u ~ U[0, 1)^D,    contribution = -D log L

    Example:
        >>> v, contribution = UniformDequantize(256)(torch.tensor([[0, 255]]), torch.Generator().manual_seed(0))
        >>> bool((v < 1).all()), contribution
        (True, tensor([-11.0904]))
    """

    median = 0.5

    def noise(self, shape, generator):
        return uniform(shape, generator, dtype=self.low.dtype, device=self.low.device)

    def _spread(self, x, noise, mask):
        return noise, noise.new_zeros(len(x))


class GaussianNoise(Dequantize):
    """Gaussian noise about the middle of the cell, not confined to it: the density is a density of noisy data.

        v = (x + 1/2) / L + sigma n,   n ~ N(0, I);    contribution = 0, since this is no bound on a log-mass

    Arguments:
        levels: number of integer levels L.
        sigma: standard deviation of the noise, on the scale on which the data fill [0, 1].

    Attributes:
        kind: kind of the resulting likelihood, `unnormalised`: it cannot be compared.

    Errors: ValueError for a sigma that is not positive.
    Source: Zhai et al. 2024 (TarFlow), section 2.3.

    Example:
        >>> GaussianNoise(4, 0.1).with_noise(torch.tensor([[1, 3]]), torch.tensor([[1.0, -1.0]]))
        (tensor([[0.4750, 0.7750]]), tensor([0.]))
    """

    kind = "unnormalised"

    def __init__(self, levels: int, sigma: float):
        super().__init__(levels)
        self.sigma = positive("sigma", sigma)

    def with_noise(self, x, noise, mask=None):
        v = (self._integers(x).to(self.low.dtype) + 0.5) / self.levels + self.sigma * noise
        return hide(v, mask), v.new_zeros(len(x))


class VariationalDequantize(Dequantize):
    """Noise from a conditional flow that is trained to tighten the ELBO.

        u = sigmoid(a), a = g(eps; x), eps ~ N(0, I),    contribution = -D log L - log q(u | x)
        log q(u | x) = log N(eps) - log |det dg/deps| - sum [log sigmoid(a) + log sigmoid(-a)]

    Arguments:
        levels: number of integer levels L.
        bijection: g, from the event's shape to itself, with the condition of `noise_condition`: x scaled to [-1, 1].

    Errors: ValueError for a bijection without a condition.
    Source: Ho et al. 2019 (Flow++), section 3.1.

    Example:
        >>> class Towards(Bijection):
        ...     uses_cond = True
        ...     def _forward(self, x, cond, mask):
        ...         return x + cond, x.new_zeros(len(x))
        >>> v, contribution = VariationalDequantize(4, Towards())(torch.tensor([[3]]), torch.Generator().manual_seed(0))
        >>> v.shape, contribution.shape
        (torch.Size([1, 1]), torch.Size([1]))
    """

    def __init__(self, levels: int, bijection: Bijection):
        super().__init__(levels)
        if not bijection.uses_cond:
            raise ValueError("VariationalDequantize: the bijection needs a condition, which is made from the integers")
        self.bijection = bijection

    def _spread(self, x, noise, mask):
        noise = hide(noise, mask)
        a, logdet = self.bijection(noise, self._condition(x, mask), mask)
        log_normal = -0.5 * noise.square() - 0.5 * math.log(2 * math.pi)
        log_q = event_sum(log_normal - logsigmoid(a) - logsigmoid(-a), mask) - logdet
        return torch.sigmoid(a), log_q

    def _condition(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return hide(2 * x.to(self.low.dtype) / (self.levels - 1) - 1, mask)

    @torch.no_grad()
    def initialize(self, x, generator, mask=None, *, force=False) -> None:
        """Data-dependent initialisation of g on fresh noise."""
        x = hide(self._integers(x), mask)
        noise = hide(self.noise(tuple(x.shape), generator), mask)
        self.bijection.initialize(noise, self._condition(x, mask), mask, force=force)

    def uninitialized(self):
        yield from self.bijection.uninitialized("bijection")


class OfLevel(Bijection):
    """A scale and shift of the noise for every level: the cheapest g of a `VariationalDequantize`.

        a = m_x + e^(s_x) eps,    m = 0, s = 1/2 at the start, where sigmoid(a) is nearly uniform

    The logit of uniform noise has a long tail at the end levels, which affine flows can only approximate.

    Arguments:
        levels: number of integer levels L.

    Shapes: events of any shape; `cond` like x, integers scaled to [-1, 1] as `VariationalDequantize` does.

    Example:
        >>> OfLevel(4)(torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]))[1]
        tensor([1.], grad_fn=<SumBackward1>)
    """

    uses_cond = strict_cond = rounds_cond = True

    def __init__(self, levels: int):
        super().__init__()
        self.table = nn.Parameter(torch.tensor([[0.0], [0.5]]).repeat(1, levels))

    def _forward(self, x, cond, mask):
        m, s = self._of_level(cond)
        return torch.addcmul(m, s.exp(), x), event_sum(s, mask)

    def _inverse(self, z, cond, mask):
        m, s = self._of_level(cond)
        return (z - m) * (-s).exp(), event_sum(-s, mask)

    def _of_level(self, cond: Tensor) -> tuple[Tensor, ...]:
        """m and s of each number."""
        level = ((cond + 1) * (0.5 * (self.table.shape[1] - 1))).round().long()
        return self.table[:, level].unbind()


def noise_condition(event_shape: Shape) -> Condition:
    """The condition of the bijection of a `VariationalDequantize`.

    Example:
        >>> noise_condition((3, 32, 32))
        Condition(kind='map', size=3, stride=1)
    """
    return Condition("vector" if len(event_shape) == 1 else "map", event_shape[0])


def _cells(levels: int) -> tuple[Tensor, Tensor]:
    """The smallest and the largest float32 number v of each cell, floor(L v) = x."""
    x = torch.arange(levels, dtype=torch.float64)
    low, high = (x / levels).float(), ((x + 1) / levels).float()
    low = torch.where(low.double() * levels < x, torch.nextafter(low, torch.tensor(2.0)), low)
    high = torch.where(high.double() * levels >= x + 1, torch.nextafter(high, torch.tensor(-1.0)), high)
    return low, high
