"""Two-dimensional sets whose densities are known in closed form or by quadrature, each with its entropy.

Points are float64, shape (N, 2); entropies are in nats. Densities of noisy curves are integrals of a Gaussian along the
curve, by Gauss-Legendre quadrature on panels so short that only rounding errors remain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, at_least, hint
from genmodels.core.random import seed_of
from genmodels.data.base import SPLITS, DataModule
from genmodels.data.loading import TensorData

_PANEL = 4  # longest quadrature panel in units of the noise scale
_CHUNK = 2**20  # entries of the largest intermediate matrix


class Density(Protocol):
    """The interface of all densities."""

    entropy: float

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """(n, 2) independent draws."""

    def log_prob(self, x: Tensor) -> Tensor:
        """(N,) log-density in nats at (N, 2) points, -inf outside the support."""


def uniform(n: int, generator: torch.Generator, low: float = 0.0, high: float = 1.0) -> Tensor:
    """(n,) draws, uniform between `low` and `high`, float64 on the device of the generator."""
    return low + (high - low) * torch.rand(n, generator=generator, dtype=torch.float64, device=generator.device)


def normal(shape, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """Draws of `shape` from N(0, scale^2), float64 on the device of the generator."""
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)


def _choice(n: int, count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(count, (n,), generator=generator, device=generator.device)


def log_normal(x: Tensor, mean: Tensor | float, scale: float) -> Tensor:
    """log N(x; mean, scale^2) of each number, in nats.

        -(x - mean)^2 / 2 scale^2 - log scale - 1/2 log 2 pi

    Example:
        >>> round(float(log_normal(torch.tensor(1.0), 0.0, 1.0)), 6)
        -1.418939
    """
    return -0.5 * ((x - mean) / scale).square() - math.log(scale) - 0.5 * math.log(2 * math.pi)


def _in_chunks(function: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    """`function` over rows of x in pieces that need `width` numbers per row."""
    x = x.to(torch.float64)
    return torch.cat([function(part) for part in x.split(max(1, _CHUNK // width))]) if len(x) else x.new_zeros(0)


@dataclass(frozen=True)
class Mixture:
    """Equal Gaussians: p(x) = mean_k N(x; centre_k, scale^2 I)."""

    centres: tuple[tuple[float, float], ...]
    scale: float
    entropy: float

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """(n, 2) draws."""
        centres = torch.tensor(self.centres, dtype=torch.float64, device=generator.device)
        return centres[_choice(n, len(centres), generator)] + normal((n, 2), generator, self.scale)

    def log_prob(self, x: Tensor) -> Tensor:
        """(N,) log-density."""
        centres = torch.tensor(self.centres, dtype=torch.float64, device=x.device)

        def part(x):
            return log_normal(x[:, None, :], centres, self.scale).sum(2).logsumexp(1) - math.log(len(centres))

        return _in_chunks(part, x, 2 * len(centres))


@dataclass(frozen=True)
class Rings:
    """Circles of given radii, equally likely, blurred: p = mean_k N_k.

        N_k(x) = exp(-(|x|^2 + R_k^2) / 2 s^2) I_0(|x| R_k / s^2) / (2 pi s^2)

    Radii and scale are multiplied by `factor`.
    """

    radii: tuple[float, ...]
    scale: float
    entropy: float
    factor: float = 1.0

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """(n, 2) draws."""
        radii = torch.tensor(self.radii, dtype=torch.float64, device=generator.device)
        radius, angle = radii[_choice(n, len(radii), generator)], uniform(n, generator, 0, 2 * math.pi)
        curve = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        return self.factor * (curve + normal((n, 2), generator, self.scale))

    def log_prob(self, x: Tensor) -> Tensor:
        """(N,) log-density."""
        rho = x.to(torch.float64).norm(dim=1, keepdim=True)
        radii = self.factor * torch.tensor(self.radii, dtype=torch.float64, device=x.device)
        variance = (self.factor * self.scale) ** 2
        # i0e(z) = exp(-z) I_0(z) leaves the square (rho - R)^2 in the exponent.
        each = -0.5 * (rho - radii).square() / variance + torch.special.i0e(rho * radii / variance).log()
        return each.logsumexp(1) - math.log(2 * math.pi * variance * len(self.radii))


@dataclass(frozen=True)
class Arm:
    """A piece of curve: t in [low, high] with density weight(t), point curve(t), and jitter U(0, width) per coordinate.

    `draw` maps U(0, 1) to t; a negative width jitters downwards.
    """

    low: float
    high: float
    curve: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor], Tensor]
    width: float = 0.0

    def nodes(self, scale: float) -> tuple[Tensor, Tensor]:
        """(K, 2) points and (K,) weights of 16-point Gauss-Legendre panels no longer than four scales each."""
        fine = self.curve(torch.linspace(self.low, self.high, 2001, dtype=torch.float64))
        speed = float((fine[1:] - fine[:-1]).norm(dim=1).max()) * 2000 / (self.high - self.low)
        panels = max(8, math.ceil(speed * (self.high - self.low) / (_PANEL * scale)))
        unit, weight = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(16))
        half = (self.high - self.low) / (2 * panels)
        middle = self.low + half * (2 * torch.arange(panels, dtype=torch.float64) + 1)
        t = (middle[:, None] + half * unit).flatten()
        return self.curve(t), (half * weight).repeat(panels) * self.weight(t)


@dataclass(frozen=True)
class NoisyCurve:
    """Curves with Gaussian noise: p(x) = mean_arms integral weight(t) q(x1 - c1(t)) q(x2 - c2(t)) dt.

    q is N(0, scale^2), convolved with U(0, width) for an arm with jitter.
    """

    arms: tuple[Arm, ...]
    scale: float
    entropy: float

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """(n, 2) draws."""
        which, u = _choice(n, len(self.arms), generator), uniform(n, generator)
        jitter = torch.rand((n, 2), generator=generator, dtype=torch.float64, device=generator.device)
        x = torch.empty_like(jitter)
        for number, arm in enumerate(self.arms):
            rows = which == number
            x[rows] = arm.curve(arm.draw(u[rows])) + arm.width * jitter[rows]
        return x + normal((n, 2), generator, self.scale)

    def log_prob(self, x: Tensor) -> Tensor:
        """(N,) log-density."""
        return torch.stack([self._arm(arm, x) for arm in self.arms]).logsumexp(0) - math.log(len(self.arms))

    def _arm(self, arm: Arm, x: Tensor) -> Tensor:
        nodes, weights = (a.to(x.device) for a in arm.nodes(self.scale))
        precision = self.scale**-2

        def gaussian(x):
            # -|x - c|^2 / 2 = x.c - |c|^2 / 2 - |x|^2 / 2: one matrix product.
            offset = weights.log() - 0.5 * precision * nodes.square().sum(1)
            inner = torch.addmm(offset, x, nodes.T, alpha=precision).logsumexp(1)
            return inner - 0.5 * precision * x.square().sum(1) - math.log(2 * math.pi / precision)

        def jittered(x):
            kernel = _log_blurred_box(arm.width)
            factors = kernel(x[:, None, 0], nodes[:, 0], self.scale) + kernel(x[:, None, 1], nodes[:, 1], self.scale)
            return (factors + weights.log()).logsumexp(1)

        return _in_chunks(jittered if arm.width else gaussian, x, len(nodes))


def _log_blurred_box(width: float):
    """log of U(0, width) convolved with a Gaussian: log[Phi(a) - Phi(b)] - log |width|, without cancellation."""

    def kernel(x, mean, scale):
        a, b = (x - mean - min(0.0, width)) / scale, (x - mean - max(0.0, width)) / scale
        flip = a + b > 0  # Phi(a) - Phi(b) = Phi(-b) - Phi(-a): use the pair in the lower tail
        high, low = torch.where(flip, -b, a), torch.where(flip, -a, b)
        log_high, log_low = torch.special.log_ndtr(high), torch.special.log_ndtr(low)
        return log_high + torch.log(-torch.expm1(log_low - log_high)) - math.log(abs(width))

    return kernel


@dataclass(frozen=True)
class Checkerboard:
    """Uniform on the eight dark squares of side 2 of a 4 x 4 board over [-4, 4]^2, area 32."""

    entropy: float = math.log(32)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """(n, 2) draws."""
        x1 = uniform(n, generator, -2, 2)
        x2 = uniform(n, generator) - 2 * _choice(n, 2, generator) + torch.remainder(x1.floor(), 2)
        return 2 * torch.stack([x1, x2], dim=1)

    def log_prob(self, x: Tensor) -> Tensor:
        """(N,) log-density."""
        half = x.to(torch.float64) / 2
        dark = torch.remainder(half.floor().sum(1), 2) == 0
        inside = ((half >= -2) & (half < 2)).all(1) & dark
        return torch.where(inside, half.new_tensor(-math.log(32)), -math.inf)


@dataclass(frozen=True)
class Graph:
    """x1 from a base density, x2 = function(x1) + N(0, scale^2); `base` draws x1 and gives its log-density."""

    draw: Callable[[int, torch.Generator], Tensor]
    log_base: Callable[[Tensor], Tensor]
    function: Callable[[Tensor], Tensor]
    scale: float
    entropy: float

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """(n, 2) draws."""
        x1 = self.draw(n, generator)
        return torch.stack([x1, self.function(x1) + normal((n,), generator, self.scale)], dim=1)

    def log_prob(self, x: Tensor) -> Tensor:
        """(N,) log-density."""
        x1, x2 = x.to(torch.float64).unbind(1)
        return self.log_base(x1) + log_normal(x2, self.function(x1), self.scale)


@dataclass(frozen=True)
class Pinwheel:
    """Bent arms: r ~ N(1, 0.3^2), tau ~ N(0, 0.1^2); rotate (r, tau) by 2 pi k / arms + rate e^r; times `factor`.

    The map has the Jacobian determinant 1 - rate e^r tau. At radius rho, r = rho cos psi and tau = rho sin psi,
    where psi solves psi + rate exp(rho cos psi) = phi (mod 2 pi / arms), so that

        p(x) = sum over roots of N(r; 1, 0.3) N(tau; 0, 0.1) / (arms |1 - rate e^r tau| factor^2).
    """

    entropy: float
    arms: int = 5
    radial: float = 0.3
    tangential: float = 0.1
    rate: float = 0.25
    factor: float = 2.0

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """(n, 2) draws."""
        r, tau = 1 + normal((n,), generator, self.radial), normal((n,), generator, self.tangential)
        angle = 2 * math.pi / self.arms * _choice(n, self.arms, generator) + self.rate * r.exp()
        cos, sin = angle.cos(), angle.sin()
        return self.factor * torch.stack([r * cos - tau * sin, r * sin + tau * cos], dim=1)

    def log_prob(self, x: Tensor) -> Tensor:
        """(N,) log-density; roots can be missed only where the density is below 1e-7 of its peak."""
        return _in_chunks(self._part, x, 512)

    def _turn(self, psi: Tensor, rho: Tensor) -> Tensor:
        """Angle of the point in units of the angle between arms."""
        return (psi + self.rate * torch.exp(rho * psi.cos())) * (self.arms / (2 * math.pi))

    def _part(self, x: Tensor) -> Tensor:
        rho, phi = x.norm(dim=1) / self.factor, torch.atan2(x[:, 1], x[:, 0]) * (self.arms / (2 * math.pi))
        grid = torch.linspace(-math.pi, math.pi, 257, dtype=x.dtype, device=x.device)
        # Roots are where the excess over phi is a whole number: its floor changes between two points of the grid.
        floor = (self._turn(grid, rho[:, None]) - phi[:, None]).floor()
        row, cell = (floor[:, 1:] != floor[:, :-1]).nonzero(as_tuple=True)
        target = torch.maximum(floor[row, cell], floor[row, cell + 1]) + phi[row]
        rising = floor[row, cell + 1] > floor[row, cell]
        low, high, rho_row = grid[cell], grid[cell + 1], rho[row]
        for _ in range(52):
            middle = (low + high) / 2
            below = (self._turn(middle, rho_row) < target) == rising
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        psi = (low + high) / 2
        r, tau = rho_row * psi.cos(), rho_row * psi.sin()
        each = log_normal(r, 1.0, self.radial) + log_normal(tau, 0.0, self.tangential)
        each = each - (1 - self.rate * r.exp() * tau).abs().log() - math.log(self.arms * self.factor**2)
        top = torch.full_like(rho, -math.inf).scatter_reduce(0, row, each, "amax")
        total = torch.zeros_like(rho).index_add(0, row, torch.exp(each - top[row]))
        return torch.where(total > 0, top + total.log(), -math.inf)


def _moon(upper: bool) -> Arm:
    def curve(t):
        points = (t.cos(), t.sin()) if upper else (1 - t.cos(), 0.5 - t.sin())
        return torch.stack(points, dim=1)

    return Arm(0.0, math.pi, curve, lambda t: torch.full_like(t, 1 / math.pi),
               lambda u: math.pi * u)


def _spiral(sign: float, width: float = 0.0) -> Arm:
    """n = 3 pi sqrt(U), point sign (-n cos n, n sin n) / 3; n has the density 2 n / (3 pi)^2."""
    end = 3 * math.pi

    def curve(n):
        return sign / 3 * torch.stack([-n * n.cos(), n * n.sin()], dim=1)

    return Arm(0.0, end, curve, lambda n: 2 * n / end**2, lambda u: end * u.sqrt(), sign * width)


def _swiss_roll() -> Arm:
    low, high = 1.5 * math.pi, 4.5 * math.pi

    def curve(t):
        return torch.stack([t * t.cos(), t * t.sin()], dim=1) / 5

    return Arm(low, high, curve, lambda t: torch.full_like(t, 1 / (high - low)),
               lambda u: low + (high - low) * u)


def _sine() -> Graph:
    def log_base(x):
        return torch.where(x.abs() <= 2.5, -math.log(5), -math.inf)

    entropy = math.log(5) + 0.5 * math.log(2 * math.pi * math.e * 0.09)
    return Graph(lambda n, generator: uniform(n, generator, -2.5, 2.5), log_base, lambda x: 2.5 * x.sin(), 0.3, entropy)


def _banana() -> Graph:
    entropy = math.log(2 * math.pi * math.e) + math.log(0.5)
    return Graph(lambda n, generator: normal((n,), generator), lambda x: log_normal(x, 0.0, 1.0),
                 lambda x: x.square() / 2, 0.5, entropy)


_SQRT2 = math.sqrt(2)
_OCTAGON = tuple((4 / _SQRT2 * math.cos(k * math.pi / 4), 4 / _SQRT2 * math.sin(k * math.pi / 4)) for k in range(8))
_GRID = tuple((float(x), float(y)) for x in range(-4, 5, 2) for y in range(-4, 5, 2))
_SPIRALS = (_spiral(1.0), _spiral(-1.0))
_JITTERED = (_spiral(1.0, 0.5 / 3), _spiral(-1.0, 0.5 / 3))

#: Every set by name. Entropies that have no closed form are quadratures of the exact density.
DENSITIES: dict[str, Density] = {
    "moons": NoisyCurve((_moon(True), _moon(False)), 0.1, entropy=1.0075848),
    "moons_sharp": NoisyCurve((_moon(True), _moon(False)), 0.05, entropy=0.2892337),
    "circles": Rings((1.0, 0.5), 0.08, entropy=3.2681357, factor=3.0),
    "rings": Rings((3.0, 2.25, 1.5, 0.75), 0.08, entropy=2.6231828),
    "spirals": NoisyCurve(_SPIRALS, 0.1, entropy=2.5406179),
    "spirals_jittered": NoisyCurve(_JITTERED, 0.1, entropy=2.6454503),
    "swiss_roll": NoisyCurve((_swiss_roll(),), 0.2, entropy=2.6696462),
    "pinwheel": Pinwheel(entropy=2.3177880),
    "checkerboard": Checkerboard(),
    "8gaussians": Mixture(_OCTAGON, 0.5 / _SQRT2, entropy=2.8315784),
    "25gaussians": Mixture(_GRID, 0.2, entropy=2.8378743),
    "sine": _sine(),
    "banana": _banana(),
}


def density(name: str) -> Density:
    """The density of a set, by the set's name or by that of its data ("toy_moons").

    Example:
        >>> x = density("checkerboard").sample(5, torch.Generator().manual_seed(0))
        >>> [round(v, 4) for v in density("toy_checkerboard").log_prob(x).tolist()]
        [-3.4657, -3.4657, -3.4657, -3.4657, -3.4657]
    """
    short = name.removeprefix("toy_")
    if short not in DENSITIES:
        raise InputError(f"no two-dimensional set {name!r}: they are {', '.join(DENSITIES)}"
                         f"{hint(short, DENSITIES, ';')}")
    return DENSITIES[short]


class Toy(DataModule):
    """Independent draws from a density in the plane, float32 (2,); the DataSpec has its entropy in nats.

    Arguments:
        set: name of the density.
        n_train, n_val, n_test: number of points of each split.
        batch_size, num_workers, seed: see `DataModule`; `seed` draws the points.

    Example:
        >>> data = Toy(set="moons", n_train=1000, n_val=100, n_test=100).prepare()
        >>> data.spec.name, data.spec.event_shape, round(data.spec.entropy, 4)
        ('toy_moons', (2,), 1.0076)
    """

    name = "toy"
    draws_items = True

    def __init__(
        self,
        *,
        set: Literal[
            "moons", "moons_sharp", "circles", "rings", "spirals", "spirals_jittered", "swiss_roll", "pinwheel",
            "checkerboard", "8gaussians", "25gaussians", "sine", "banana",
        ] = "moons",
        n_train: int = 50000,
        n_val: int = 10000,
        n_test: int = 10000,
        batch_size: int = 256,
        **shared,
    ):
        super().__init__(batch_size=batch_size, **shared)
        self.set, self.density = set, density(set)
        self.sizes = dict(zip(SPLITS, (n_train, n_val, n_test), strict=True))
        at_least(1, **{f"data.n_{name}": size for name, size in self.sizes.items()})

    def load(self):
        """Draw the points of each split from its own keyed generator."""
        splits = {}
        for split, size in self.sizes.items():
            generator = torch.Generator().manual_seed(seed_of(self.seed, "toy", self.set, split))
            splits[split] = TensorData(self.density.sample(size, generator).to(torch.float32))
        return DataSpec(f"toy_{self.set}", (2,), entropy=self.density.entropy), splits
