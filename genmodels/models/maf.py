"""The masked autoregressive flow (Papamakarios et al. 2017) as a model, for vectors and small images as vectors."""

from __future__ import annotations

from typing import Literal

from genmodels.core.data import DataSpec
from genmodels.flows.spline import neural_spline
from genmodels.models.flow import FlowModel


class MAF(FlowModel):
    """A masked autoregressive flow: every number standardised by networks of those before it, for vectors.

    Images are taken as vectors of their pixels, line by line.

        z_i = (x_i - m_i(x_1 .. x_{i-1})) exp(-alpha_i(x_1 .. x_{i-1}))

    The density takes one pass, a sample as many as there are dimensions.

    Arguments:
        spec: the data set this model is built for.
        layers: number of layers, the order reversed from one to the next.
        hidden: width of the networks.
        depth: hidden layers, or residual blocks of two layers each with `residual`.
        residual: residual networks.
        mix: what stands before every layer: `none`, a learned linear map (`lu`), or `actnorm`.
        **shared: what all flows take, see `FlowModel`.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> MAF(DataSpec("points", (2,)), layers=2).family
        'maf'
    """

    family = "maf"

    def __init__(
        self,
        spec: DataSpec,
        *,
        layers: int = 8,
        hidden: int = 64,
        depth: int = 2,
        residual: bool = False,
        mix: Literal["none", "lu", "actnorm"] = "actnorm",
        **shared,
    ):
        super().__init__(spec, **shared)
        self.assemble_flat(neural_spline(
            spec.dims, layers=layers, kind="autoregressive", transform="affine", hidden=hidden, depth=depth,
            residual=residual, mix=mix, cond=self.condition, memory=self.memory,
        ))
