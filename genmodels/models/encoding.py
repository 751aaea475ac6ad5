"""Between the data's units and those of an energy: dequantisation, logit, whitening, and the volume of all of it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.data.spec import DataSpec
from genmodels.errors import InputError
from genmodels.flows.dequantize import UniformDequantize
from genmodels.flows.scaling import Logit
from genmodels.random import Generator, uniform

#: Beyond this a matrix between all pairs of scalars is not kept.
MOST_PAIRS = 1024


class Encoding(nn.Module):
    """The way from data to the numbers that a score is learned of, and back.

        integers 0..L-1    v = (x + u) / L,   y = logit(alpha + (1 - 2 alpha) v)  or  y = v
        continuous data    y = x, or x + g u where a column takes values g apart
        both               z = W (y - m)

        log p(x) = log p(z) + log |det dz/dx|,    for integers a lower bound of their log-mass, in the mean over u

    W is one number for images and sequences (neighbouring pixels stay alike), one for each column of vectors, or the
    matrix that makes the training data white (`pca`). With `integers="unit"` they stay in [0, 1].

    Arguments:
        spec: the data set.
        integers: map of dequantised integers, `logit` or `unit`.
        alpha: the logit's margin.
        whitening: `scale` or `pca`.
        gaps: whether columns of continuous data that take few values are filled with uniform noise as wide as their
            median gap.

    Shapes: `forward(x (B, *event), generator)` to `(z (B, *event), log |det dz/dx| (B,))`; `decode(z)` to data.
    Errors: InputError for options that do not fit the data, columns that are constant.

    Example:
        >>> encoding = Encoding(DataSpec("table", (2,)))
        >>> encoding.fit(torch.tensor([[1.0, 10.0], [3.0, 30.0]]), torch.Generator().manual_seed(0))
        >>> z, volume = encoding(torch.tensor([[2.0, 20.0]]), torch.Generator().manual_seed(0))
        >>> z, bool((volume[0] + torch.tensor([2.0**0.5, 200**0.5]).log().sum()).abs() < 1e-6)
        (tensor([[0., 0.]]), True)
    """

    def __init__(
        self,
        spec: DataSpec,
        *,
        integers: Literal["logit", "unit"] = "logit",
        alpha: float = 1e-6,
        whitening: Literal["scale", "pca"] = "scale",
        gaps: bool = False,
    ):
        super().__init__()
        if whitening == "pca" and (spec.dims > MOST_PAIRS or len(spec.event_shape) > 1):
            raise InputError(f"whitening=pca is for vectors of at most {MOST_PAIRS} numbers, got {spec.event_shape}")
        if gaps and spec.levels is not None:
            raise InputError("gaps=true is for continuous data: integers are dequantised anyway")
        self.spec, self.whitening = spec, whitening
        self.dequantize = None if spec.levels is None else UniformDequantize(spec.levels)
        self.logit = Logit(alpha) if spec.levels is not None and integers == "logit" else None
        self.fixed = spec.levels is not None and integers == "unit"
        event = spec.event_shape
        self.register_buffer("location", torch.zeros(event))
        self.register_buffer("scale", torch.ones(event))
        self.register_buffer("rotation", torch.eye(spec.dims) if whitening == "pca" else None)
        self.register_buffer("gap", torch.zeros(event) if gaps else None)

    @torch.no_grad()
    def fit(self, x: Tensor, generator: Generator) -> None:
        """Location, scale, rotation and gaps from training items."""
        if self.gap is not None:
            self.gap.copy_(torch.stack([_median_gap(column) for column in x.flatten(1).T]).view_as(self.gap))
        if self.fixed:
            return
        y = self._continuous(x, generator)[0].double()
        # One number for all pixels: what is learned of one place holds at the next.
        together = len(self.spec.event_shape) > 1
        location, deviation = (y.mean(), y.std()) if together else (y.mean(0), y.std(0))
        if not bool((deviation > 0).all()):
            column = self.spec.column(int((deviation <= 0).flatten().nonzero()[0, 0]))
            raise InputError(f"column {column} of {self.spec.name} is constant and has no density: leave it out")
        self.location.copy_(location)
        self.scale.copy_(deviation)
        if self.rotation is not None:
            values, vectors = torch.linalg.eigh(torch.cov(((y - location) / deviation).T).reshape(len(deviation), -1))
            if float(values[0]) < 1e-10 * float(values[-1]):
                raise InputError(f"columns of {self.spec.name} depend on each other linearly: leave one out")
            self.rotation.copy_(vectors / values.sqrt())

    def forward(self, x: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """`(z, log |det dz/dx|)`, with fresh noise where integers or gaps are filled."""
        y, volume = self._continuous(x, generator)
        z = (y - self.location) / self.scale
        if self.rotation is not None:
            z = z @ self.rotation
        return z, volume + self._affine_volume()

    def decode(self, z: Tensor) -> Tensor:
        """The data that z stands for; integers are those of the cell."""
        if self.rotation is not None:
            z = torch.linalg.solve(self.rotation.T, z.T).T
        y = z * self.scale + self.location
        if self.dequantize is None:
            return y
        v = y if self.logit is None else self.logit.inverse(y)[0]
        levels = self.dequantize.to_levels(v)
        return levels.to(torch.uint8) if self.spec.levels <= 256 else levels

    def _continuous(self, x: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        if self.dequantize is not None:
            v, volume = self.dequantize(x, generator)
            if self.logit is None:
                return v, volume
            y, change = self.logit(v)
            return y, volume + change
        y = x.to(self.location.dtype)
        if self.gap is not None:
            y = y + self.gap * (uniform(y.shape, generator, dtype=y.dtype, device=y.device) - 0.5)
        return y, y.new_zeros(len(y))

    def _affine_volume(self) -> Tensor:
        volume = -self.scale.double().log().sum()
        if self.rotation is not None:
            volume = volume + torch.linalg.slogdet(self.rotation.double()).logabsdet
        return volume.to(self.scale.dtype)


def _median_gap(column: Tensor) -> Tensor:
    """The median distance between neighbouring values that occur; 0 where nearly all values differ.

    Example:
        >>> float(_median_gap(torch.tensor([1.0, 1.5, 1.5, 2.0, 1.0, 2.5])))
        0.5
    """
    values = column.unique()
    if len(values) < 2 or len(values) > 0.9 * len(column):
        return column.new_zeros(())
    return values.diff().median()


def covariance_of(z: Tensor) -> Tensor:
    """The covariance (D, D) of rows, or the variances (D,) where D is large; float64.

    Example:
        >>> covariance_of(torch.tensor([[0.0], [2.0]]))
        tensor([[2.]], dtype=torch.float64)
    """
    rows = z.flatten(1).double()
    if rows.shape[1] > MOST_PAIRS:
        return rows.var(0)
    return torch.cov(rows.T).reshape(rows.shape[1], rows.shape[1])


def covariance_shape(dims: int) -> tuple[int, ...]:
    """The shape of `covariance_of`."""
    return (dims,) if dims > MOST_PAIRS else (dims, dims)
