"""A flow over continuous data, with the face that `DiscreteFlow` has for integers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.flows.flow import Flow
from genmodels.random import Generator


class ContinuousFlow(nn.Module):
    """An exact density: `log p(x) = log base(f(x)) + log |det df/dx|`.

    Arguments:
        flow: the flow, in the data's own units.

    Shapes: `x (B, *event)`; log-densities `(B,)` in nats.

    Example:
        >>> from genmodels.flows import Flow, StandardNormal, Flip
        >>> density = ContinuousFlow(Flow(Flip(2), StandardNormal((2,))))
        >>> density.log_prob(torch.zeros(1, 2))
        (tensor([-1.8379]), None)
    """

    kind = "exact"

    def __init__(self, flow: Flow):
        super().__init__()
        self.flow = flow

    def initialize(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None,
                   *, generator: Generator | None = None) -> None:
        """Data-dependent initialisation of the bijection; no noise is needed."""
        self.flow.initialize(x, cond, mask)

    def log_prob(
        self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None,
        *, generator: Generator | None = None, samples: int = 1, rows: int | None = None,
    ) -> tuple[Tensor, None]:
        """`(nats (B,), None)`: exact, hence without noise, importance samples or standard error."""
        return self.flow.log_prob(x, cond, mask), None

    def sample(
        self, n: int, cond: Tensor | None = None, *, temperature: float = 1.0, generator: Generator,
        mask: Tensor | None = None,
    ) -> Tensor:
        """`(n, *event)` in the data's own units; of sequences only the frames of the mask."""
        return self.flow.sample(n, cond, temperature=temperature, generator=generator, mask=mask)

    def middle(self, x: Tensor) -> Tensor:
        """The point that stands for an item: itself."""
        return x.to(next((p.dtype for p in self.parameters()), torch.float32))

    def quantise(self, v: Tensor) -> Tensor:
        """The item that a point stands for: itself."""
        return v
