"""Bijections made of bijections: one after another, backwards, frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from genmodels.flows.bijection import Bijection, Shape, Step, as_shape, joined


class Compose(Bijection):
    """Bijections one after another; an empty list is the identity.

        z = f_n(... f_1(x)),    log |det| = sum_i log |det f_i|

    Arguments:
        layers: the bijections, in the order of `forward`.
        event_shape: shape of x, None for a length left open; the layers are checked against it.
        memory: `store` keeps activations for the backward pass; `inverse` recomputes them from the outputs (see
            `genmodels.flows.memory`).

    Errors: ValueError naming both layers and the shape between them when they do not fit.

    Example:
        >>> from genmodels.flows import Flip, Compose
        >>> Compose([Flip(3), Flip(3)], (3,))(torch.tensor([[1.0, 2.0, 3.0]]))
        (tensor([[1., 2., 3.]]), tensor([0.]))
    """

    strict_cond = True

    def __init__(self, layers: Sequence[Bijection], event_shape: Shape, *, memory: str = "store"):
        super().__init__()
        if isinstance(layers, nn.Module) and not isinstance(layers, nn.ModuleList):
            raise TypeError(f"Compose takes a list of bijections, got one {type(layers).__name__}: put it in [...]")
        for number, layer in enumerate(layers):
            # Not by class: a compiled bijection is none, but acts like one.
            if isinstance(layer, type) or not hasattr(layer, "out_shape"):
                kind = f"the class {layer.__name__}" if isinstance(layer, type) else f"a {type(layer).__name__}"
                raise TypeError(f"Compose takes bijections (see Bijection), but layer {number} is {kind}")
        self.layers = nn.ModuleList(layers)
        self.event_shape = as_shape(event_shape)
        shape, before = self.event_shape, "the input"
        for number, layer in enumerate(layers):
            here = f"layer {number} ({type(layer).__name__})"
            try:
                shape = layer.out_shape(shape)
            except ValueError as error:
                raise ValueError(f"{here} does not take what {before} leaves: {error}") from error
            before = here
        self.shape_after = shape
        self.constant_logdet = all(layer.constant_logdet for layer in layers)
        self.exact_inverse = all(layer.exact_inverse for layer in layers)
        costs = {layer.inverse_cost for layer in layers}
        self.inverse_cost = next((cost for cost in ("iterative", "D passes") if cost in costs), "same")
        self.uses_cond = any(layer.uses_cond for layer in layers)
        self._name_parts()
        self.register_module("gauge", None)
        self.memory = memory

    @property
    def memory(self) -> str:
        """How the backward pass gets at activations; may be set at any time."""
        return "store" if self.gauge is None else "inverse"

    @memory.setter
    def memory(self, memory: str) -> None:
        from genmodels.flows.memory import gauge_for

        if memory not in ("store", "inverse"):
            raise ValueError(f"memory must be store or inverse, got {memory!r}")
        if memory != self.memory:
            self.gauge = gauge_for(self) if memory == "inverse" else None

    def out_shape(self, shape: Shape) -> Shape:
        for layer in self.layers:
            shape = layer.out_shape(shape)
        return shape

    def in_shape(self, shape: Shape) -> Shape:
        for layer in self._backwards():
            shape = layer.in_shape(shape)
        return shape

    def out_mask(self, mask: Tensor) -> Tensor:
        for layer in self.layers:
            mask = layer.out_mask(mask)
        return mask

    def in_mask(self, mask: Tensor) -> Tensor:
        for layer in self._backwards():
            mask = layer.in_mask(mask)
        return mask

    def _backwards(self) -> list[Bijection]:
        # A ModuleList looks every member up by its name when it is reversed; a list of them does not.
        return list(self.layers)[::-1]

    def _forward(self, x, cond, mask):
        if self.memory == "inverse" and torch.is_grad_enabled():
            from genmodels.flows.memory import run_inverting

            return run_inverting(self, x, cond, mask)
        logdet = x.new_zeros(len(x))
        for layer in self.layers:
            x, change = layer(x, cond if layer.uses_cond else None, mask)
            logdet = logdet + change
            mask = None if mask is None else layer.out_mask(mask)
        return x, logdet

    def _inverse(self, z, cond, mask):
        logdet = z.new_zeros(len(z))
        for layer in self._backwards():
            z, change = layer.inverse(z, cond if layer.uses_cond else None, mask)
            logdet = logdet + change
            mask = None if mask is None else layer.in_mask(mask)
        return z, logdet

    @torch.no_grad()
    def initialize(self, x, cond=None, mask=None, *, force=False) -> None:
        """Initialise the layers in order, each on the output of those before it; all of them or, on an error, none."""
        with self._initializing(cond):
            for layer in self.layers:
                own = cond if layer.uses_cond else None
                layer.initialize(x, own, mask, force=force)
                x, _ = layer(x, own, mask)
                mask = None if mask is None else layer.out_mask(mask)

    def walk(self, x, cond=None, mask=None, name="") -> Iterator[Step]:
        for number, layer in enumerate(self.layers):
            for step in layer.walk(x, cond if layer.uses_cond else None, mask, joined(name, "layers", str(number))):
                yield step
                x = step.z
            mask = None if mask is None else layer.out_mask(mask)


class Around(Bijection):
    """Another bijection at work, with its shapes, masks and static facts; a subclass changes one thing about it.

    Arguments:
        bijection: the map inside.
    """

    def __init__(self, bijection: Bijection):
        super().__init__()
        self.bijection = bijection
        self.constant_logdet, self.uses_cond = bijection.constant_logdet, bijection.uses_cond
        self.exact_inverse, self.inverse_cost = bijection.exact_inverse, bijection.inverse_cost
        self.strict_cond = bijection.strict_cond

    def out_shape(self, shape: Shape) -> Shape:
        return self.bijection.out_shape(shape)

    def in_shape(self, shape: Shape) -> Shape:
        return self.bijection.in_shape(shape)

    def out_mask(self, mask: Tensor) -> Tensor:
        return self.bijection.out_mask(mask)

    def in_mask(self, mask: Tensor) -> Tensor:
        return self.bijection.in_mask(mask)

    def initialize(self, x, cond=None, mask=None, *, force=False) -> None:
        self.bijection.initialize(x, cond, mask, force=force)

    def _forward(self, x, cond, mask):
        return self.bijection(x, cond, mask)

    def _inverse(self, z, cond, mask):
        return self.bijection.inverse(z, cond, mask)


class Inverse(Around):
    """A bijection run backwards: `forward` and `inverse` swapped.

    Arguments:
        bijection: the map to invert.

    Example:
        >>> from genmodels.flows import Shift
        >>> Inverse(Shift(torch.tensor([2.0])))(torch.tensor([[5.0]]))[0]
        tensor([[3.]])
    """

    def out_shape(self, shape: Shape) -> Shape:
        return self.bijection.in_shape(shape)

    def in_shape(self, shape: Shape) -> Shape:
        return self.bijection.out_shape(shape)

    def out_mask(self, mask: Tensor) -> Tensor:
        return self.bijection.in_mask(mask)

    def in_mask(self, mask: Tensor) -> Tensor:
        return self.bijection.out_mask(mask)

    def initialize(self, x, cond=None, mask=None, *, force=False) -> None:
        for name in self.uninitialized(self.place):
            raise RuntimeError(f"Inverse: {name} takes its start from data going forward; initialise it before that")

    def _forward(self, x, cond, mask):
        return self.bijection.inverse(x, cond, mask)

    def _inverse(self, z, cond, mask):
        return self.bijection(z, cond, mask)


class Freeze(Around):
    """A bijection whose parameters do not train; gradients still pass through it.

    Arguments:
        bijection: the map to freeze.

    Example:
        >>> from genmodels.flows import ActNorm
        >>> any(p.requires_grad for p in Freeze(ActNorm(2)).parameters())
        False
    """

    def __init__(self, bijection: Bijection):
        super().__init__(bijection.requires_grad_(False))

    def requires_grad_(self, requires_grad: bool = True) -> Freeze:
        """Stay frozen when asked to train; only a direct change of the parameters thaws them."""
        return self
