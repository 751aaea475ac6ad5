"""Masked autoregressive flows: every dimension is changed with parameters that the dimensions before it give."""

from __future__ import annotations

import torch
from torch import Tensor

from genmodels.flows.bijection import Bijection, Shape, per_example
from genmodels.flows.coupling import check_network
from genmodels.flows.elementwise import ElementTransform
from genmodels.nn.blocks import hide
from genmodels.nn.made import MADE


class MaskedAutoregressive(Bijection):
    """Each dimension goes through a map whose parameters depend on the dimensions before it.

        z_i = f(x_i; made(x_<i, cond)),    log |det| = sum_i log df/dx_i

    One pass gives z, since all of x is known; the inverse takes D passes, one for each dimension. Its `Inverse` is the
    inverse autoregressive flow (IAF), quick to sample and slow to score.

    Arguments:
        features: number of dimensions D.
        transform: the elementwise map f; `MeanScale` makes the masked autoregressive flow (MAF) of the paper.
        made: masked network from D to `transform.params_per_dim * D` outputs; it knows the order. Its output bias is
            set so that training starts at `transform.start`.

    Shapes: events `(D,)`, `cond` as the network's.
    Errors: ValueError when network and transform do not fit, or for an event of another shape.
    Source: Papamakarios et al. 2017 (MAF), section 3; Kingma et al. 2016 (IAF), section 3.

    Example:
        >>> from genmodels.flows.elementwise import MeanScale
        >>> layer = MaskedAutoregressive(3, MeanScale(), MADE(3, 2, hidden=8))
        >>> layer.inverse(torch.tensor([[1.0, 2.0, 3.0]]))[0].detach()
        tensor([[1., 2., 3.]])
    """

    strict_cond = True

    def __init__(self, features: int, transform: ElementTransform, made: MADE):
        super().__init__()
        check_network(self, made, features, transform.params_per_dim, features, transform.channels)
        self.features, self.transform, self.net = features, transform, made
        self.uses_cond = made.uses_cond
        self.exact_inverse, self.constant_logdet = transform.exact_inverse, transform.constant_logdet
        self.inverse_cost = "D passes" if transform.exact_inverse else "iterative"
        made.set_output_bias(transform.start(features).flatten())

    def out_shape(self, shape: Shape) -> Shape:
        if shape != (self.features,):
            raise self._misfit(f"({self.features},)", shape)
        return shape

    def in_shape(self, shape: Shape) -> Shape:
        return self.out_shape(shape)

    def _params(self, x: Tensor, cond: Tensor | None) -> Tensor:
        params = self.net(x, cond).to(x.dtype)
        return params.view(len(x), self.transform.params_per_dim, self.features)

    def _forward(self, x, cond, mask):
        z, log_derivative = self.transform(x, self._params(x, cond))
        return z, per_example(hide(log_derivative, mask))

    def _inverse(self, z, cond, mask):
        x = log_derivative = torch.zeros_like(z)
        for turn in range(self.features):
            change, log_derivative = self.transform.inverse(z, self._params(x, cond))
            # Dimensions whose turn has not come stay zero: what they are given until then may be anything.
            x = torch.where(self.net.order == turn, hide(change, mask), x)
        # In the last pass every parameter is that of its own turn, since it sees nothing that came later.
        return x, per_example(hide(log_derivative, mask))
