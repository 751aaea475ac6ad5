"""Neural spline flows (Durkan et al. 2019) as a model, for vectors and for small images taken as vectors."""

from __future__ import annotations

from typing import Literal

from genmodels.core.data import DataSpec
from genmodels.flows.spline import neural_spline
from genmodels.models.flow import FlowModel


class NSF(FlowModel):
    """A neural spline flow: monotone rational-quadratic splines, in couplings or autoregressive, for vectors.

    Images are taken as vectors of their pixels: their networks know nothing of neighbours.

        z_2 = spline(x_2; net(x_1)),   or   z_i = spline(x_i; net(x_1 .. x_{i-1}))

    Arguments:
        spec: the data set this model is built for.
        layers: number of couplings or autoregressive layers.
        kind: `coupling` (one pass in both directions) or `autoregressive` (D passes to sample).
        transform: `spline`, or `affine`; affine and autoregressive is MAF.
        bins: bins K of a spline.
        bound: splines act on [-bound, bound] and leave the rest alone.
        hidden: width of the networks.
        depth: hidden layers, or residual blocks of two layers each with `residual`.
        residual: residual networks.
        mix: what stands before every layer: `none`, a learned linear map (`lu`), or `actnorm`.
        **shared: what all flows take, see `FlowModel`.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> NSF(DataSpec("points", (2,)), layers=2, bins=4).family
        'nsf'
    """

    family = "nsf"

    def __init__(
        self,
        spec: DataSpec,
        *,
        layers: int = 8,
        kind: Literal["coupling", "autoregressive"] = "coupling",
        transform: Literal["spline", "affine"] = "spline",
        bins: int = 16,
        bound: float = 5.0,
        hidden: int = 64,
        depth: int = 2,
        residual: bool = False,
        mix: Literal["none", "lu", "actnorm"] = "none",
        **shared,
    ):
        super().__init__(spec, **shared)
        self.assemble_flat(neural_spline(
            spec.dims, layers=layers, kind=kind, transform=transform, bins=bins, bound=bound, hidden=hidden,
            depth=depth, residual=residual, mix=mix, cond=self.condition, memory=self.memory,
        ))
