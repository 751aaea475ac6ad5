"""Composition of bijections, with activations stored or recomputed from the output in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from genmodels.core.errors import an, one_of
from genmodels.flows.bijection import Bijection, Freeze, Inverse, Shape, Step, as_shape, joined
from genmodels.flows.replay import Autocast, DriftGauge, LayerInput, RandomState, RecomputationErrors, hooks_at_rest


class Compose(Bijection):
    """A composition of bijections; an empty list is the identity.

        z = f_n(... f_1(x)),    log |det| = sum_i log |det f_i|

    Arguments:
        layers: the bijections, in the order of `forward`.
        event_shape: shape of x, None for a length left open; the layers are checked against it.
        memory: `store` keeps activations for the backward pass; `inverse` recomputes them from the outputs (see
            `run_inverting`).

    Errors: ValueError naming both layers and the shape between them when they do not fit.

    Example:
        >>> from genmodels.flows import Flip, Compose
        >>> Compose([Flip(3), Flip(3)], (3,))(torch.tensor([[1.0, 2.0, 3.0]]))
        (tensor([[1., 2., 3.]]), tensor([0.]))
    """

    strict_cond = True
    only_contains = True

    def __init__(self, layers: Iterable[Bijection], event_shape: Shape, *, memory: str = "store"):
        super().__init__()
        if isinstance(layers, nn.Module) and not isinstance(layers, nn.ModuleList):
            raise TypeError(f"Compose takes a list of bijections, got one {type(layers).__name__}: put it in [...]")
        layers = list(layers)
        for number, layer in enumerate(layers):
            # Not by class: a compiled bijection is no Bijection, but acts like one.
            if isinstance(layer, type) or not hasattr(layer, "out_shape"):
                kind = f"the class {layer.__name__}" if isinstance(layer, type) else an(type(layer).__name__)
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
        self._combine(layers)
        self._name_parts()
        self.register_module("gauge", None)
        self.memory = memory

    @property
    def memory(self) -> str:
        """`store` or `inverse`; may be set at any time."""
        return "store" if self.gauge is None else "inverse"

    @memory.setter
    def memory(self, memory: str) -> None:
        one_of("memory", memory, ("store", "inverse"))
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
        # Faster than reversed(ModuleList), which looks up every member by name.
        return list(self.layers)[::-1]

    def _forward(self, x, cond, mask):
        if self.memory == "inverse" and torch.is_grad_enabled():
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
        """Initialise the layers in order, each on the output of those before it; all of them or, on an error, none.

        Layers after the last that starts from data are not evaluated.
        """
        with self._initializing(cond):
            layers = list(self.layers)
            last = max((k for k, layer in enumerate(layers) if layer.starts_from_data), default=-1)
            for layer in layers[: max(last, 0)]:
                x = layer.initialize_forward(x, cond if layer.uses_cond else None, mask, force=force)
                mask = None if mask is None else layer.out_mask(mask)
            if last >= 0:
                layers[last].initialize(x, cond if layers[last].uses_cond else None, mask, force=force)

    @torch.no_grad()
    def initialize_forward(self, x, cond=None, mask=None, *, force=False) -> Tensor:
        with self._initializing(cond):
            for layer in self.layers:
                x = layer.initialize_forward(x, cond if layer.uses_cond else None, mask, force=force)
                mask = None if mask is None else layer.out_mask(mask)
        return x

    def walk(self, x, cond=None, mask=None, name="") -> Iterator[Step]:
        for number, layer in enumerate(self.layers):
            for step in layer.walk(x, cond if layer.uses_cond else None, mask, joined(name, "layers", str(number))):
                yield step
                x = step.z
            mask = None if mask is None else layer.out_mask(mask)


class Recomputes(Protocol):
    """A layer that finds its input and its graph more cheaply than by `inverse` and then `forward`."""

    def recompute(self, z: Tensor, cond: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """`(x, z', logdet)` of a known output z, called with gradients enabled.

        x is computed without a graph and then requires gradients; z' and logdet are `forward(x)` with their graph, z'
        equal to z up to rounding. Unchanged parts may be taken from z, which requires gradients too: the gradients of
        x and z are added. `mask` is the mask of z; masked positions of x and z' are zero.
        """


def flattened(compose: Compose) -> Iterator[Bijection]:
    """The layers of a composition in order, nested compositions expanded."""
    for layer in compose.layers:
        while isinstance(layer, Freeze):
            layer = layer.bijection
        if isinstance(layer, Compose):
            yield from flattened(layer)
        else:
            yield layer


#: Modules with a state that each evaluation in training updates.
_UPDATED = (nn.modules.batchnorm._BatchNorm, parametrizations._SpectralNorm)


def gauge_for(compose: Compose) -> DriftGauge:
    """A gauge for the layers of a composition with `memory="inverse"`.

    Raises:
        ValueError: naming a module with a state that each evaluation updates, as batch and spectral norms.
    """
    layers = list(flattened(compose))
    for layer in layers:
        for name, module in layer.named_modules(prefix=layer.place):
            statistics = getattr(module, "running_mean", None) is not None
            hooks = module._forward_pre_hooks.values()  # the older spectral_norm is one
            if statistics or isinstance(module, _UPDATED) or any(isinstance(hook, SpectralNorm) for hook in hooks):
                raise ValueError(
                    f"memory='inverse' runs every layer twice, and {name} ({type(module).__name__}) updates its state "
                    "each time: use ActNorm, a norm of each example by itself, or memory='store'"
                )
    return DriftGauge(len(layers))


def _submodules(layer: Bijection) -> Iterator[nn.Module]:
    """The modules of `layer.modules()`, without building their names, which would take a tenth of a training step."""
    found = [layer]
    while found:
        module = found.pop()
        yield module
        found.extend(child for child in module._modules.values() if child is not None)


def _recomputes_itself(layer: Bijection) -> bool:
    """Whether a layer recomputes its activations itself, as a MultiScale whose stages do."""
    recomputing = any(isinstance(module, Compose) and module.memory == "inverse" for module in _submodules(layer))
    return recomputing and not isinstance(layer, Inverse)


def _trainable(layer: Bijection) -> list[Parameter]:
    parameters = (p for module in _submodules(layer) for p in module._parameters.values())
    return list({id(p): p for p in parameters if p is not None and p.requires_grad}.values())


@torch.compiler.disable
def run_inverting(compose: Compose, x: Tensor, cond: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`forward` of a composition that stores only its output; the backward pass goes from the last layer to the first:

        x_i = inverse(z_i) without a graph,    z_i, logdet_i = forward(x_i) with one,
        (dL/dx_i, dL/dparameters, dL/dcond) from (dL/dz_i, dL/dlogdet),    z_{i-1} = x_i

    So memory holds the activations of one layer, whatever their number, for one more evaluation of every network (two
    where a layer has no `recompute`). Random numbers and autocast are those of the forward pass. A layer stores its
    input instead where its inverse is an iteration or takes D passes, or where the gauge has found that the inverse
    is too inaccurate (see `DriftGauge`). Only `forward` works this way; `inverse` stores activations.

    Shapes: as for `compose`.
    Errors: RuntimeError on a second derivative and under the transforms of torch.func; RunError from the gauge.
    Source: Gomez et al. 2017, "The Reversible Residual Network", section 3.2.

    Example:
        >>> from genmodels.flows.scaling import Scale
        >>> flow = Compose([Scale(torch.tensor([2.0]))], (1,), memory="inverse")
        >>> x = torch.ones(1, 1, requires_grad=True)
        >>> flow(x)[0].backward()
        >>> x.grad
        tensor([[2.]])
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError("memory='inverse' does not work under torch.func: use memory='store'")
    logdet, number = x.new_zeros(len(x)), 0
    for recomputes_itself, group in groupby(flattened(compose), _recomputes_itself):
        layers = list(group)
        if recomputes_itself:
            for layer in layers:
                x, change = layer(x, cond if layer.uses_cond else None, mask)
                logdet, mask = logdet + change, None if mask is None else layer.out_mask(mask)
        else:
            x, change, mask = _run(_Segment(layers, compose.gauge, number, compose.training), x, cond, mask)
            logdet = logdet + change
        number += len(layers)
    return x, logdet


class _Segment(NamedTuple):
    """Consecutive layers that share one autograd function: numbers first, first + 1, ... of the gauge."""

    layers: list[Bijection]
    gauge: DriftGauge
    first: int
    training: bool

    def stores(self, k: int) -> bool:
        """Whether layer k stores its input instead of recomputing it."""
        return self.layers[k].inverse_cost != "same" or self.gauge.stores[self.first + k]


def _run(
    segment: _Segment, x: Tensor, cond: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    masks = [mask]
    for layer in segment.layers:
        masks.append(None if mask is None else layer.out_mask(masks[-1]))
    owned = [_trainable(layer) for layer in segment.layers]
    parameters = {id(p): p for own in owned for p in own}  # each once, though layers may share it
    z, logdet = _Inverting.apply(segment, owned, masks, x, cond, *parameters.values())
    return z, logdet, masks[-1]


class _Inverting(torch.autograd.Function):
    """The parameters are inputs and their gradients outputs, so that DDP's hooks see each gradient once."""

    @staticmethod
    def forward(ctx, segment: _Segment, owned: list[list[Parameter]], masks: list[Tensor | None], x, cond, *parameters):
        ctx.segment, ctx.owned, ctx.masks, ctx.noise = segment, owned, masks, []
        ctx.autocast = Autocast.now(x.device.type)
        # Per layer: its stored input, or the exact input of the gauge's few examples.
        stored, exact, logdet, noise = [], [], x.new_zeros(len(x)), RandomState(x.device)
        with ctx.autocast.again():
            for k, layer in enumerate(segment.layers):
                stored.append(x if segment.stores(k) else None)
                exact.append(None if segment.stores(k) else segment.gauge.keep(x))
                x, change = layer(x, cond if layer.uses_cond else None, masks[k])
                before, noise = noise, RandomState(x.device)
                ctx.noise.append(None if before == noise else before)
                logdet = logdet + change
        ctx.save_for_backward(x, cond, *stored, *exact, *parameters)
        return x, logdet

    @staticmethod
    def backward(ctx, grad, grad_logdet):
        if torch.is_grad_enabled():
            raise RuntimeError("memory='inverse' has no second derivatives: use memory='store' to train by scores")
        segment, masks, n = ctx.segment, ctx.masks, len(ctx.segment.layers)
        *_, wants_x, wants_cond = ctx.needs_input_grad[:5]
        state, cond, *saved = ctx.saved_tensors
        stored, exact, parameters = saved[:n], saved[n : 2 * n], saved[2 * n :]
        cond = None if cond is None else cond.detach().requires_grad_(wants_cond)
        errors = RecomputationErrors(segment.gauge, segment.first, n, state)
        sums: dict[int, Tensor] = {}  # gradients, added up over the layers that share a tensor
        with ctx.autocast.again(), hooks_at_rest(parameters):
            for k in reversed(range(n)):
                if not (wants_x or wants_cond or any(ctx.owned[: k + 1])):
                    break  # no gradient of the remaining layers is needed
                layer = segment.layers[k]
                own_cond = cond if layer.uses_cond else None
                if [*map(id, _trainable(layer))] != [*map(id, ctx.owned[k])]:  # their gradients would be lost silently
                    raise RuntimeError(f"{layer.place}: its parameters have changed since the forward pass")
                replay = contextlib.nullcontext if ctx.noise[k] is None else ctx.noise[k].again
                # `state` is the layer's output, then its input; rebinding frees the output.
                from_output = stored[k] is None and hasattr(layer, "recompute")
                if stored[k] is not None:
                    state = stored[k]
                elif not from_output:
                    with replay():
                        state, _ = layer.inverse(state, own_cond, masks[k + 1])
                with torch.enable_grad(), replay():
                    rerun = _from_output if from_output else _from_input
                    graph = rerun(layer, state, own_cond, masks[k + from_output])
                state = graph.x.detach()
                if exact[k] is not None:
                    errors.compare(k, state, exact[k])
                others = [*ctx.owned[k], *([own_cond] if wants_cond and own_cond is not None else [])]
                grad, found = graph.pull_back(grad, grad_logdet, others)
                del graph
                for tensor, gradient in zip(others, found, strict=True):
                    if gradient is not None:
                        before = sums.get(id(tensor))
                        sums[id(tensor)] = gradient if before is None else before + gradient

        def true_input(k: int) -> LayerInput:
            layer = segment.layers[k]
            given = cond if layer.uses_cond else None, masks[k]
            return LayerInput(layer, exact[k], *(None if v is None else segment.gauge.keep(v) for v in given))

        errors.finish(true_input, segment.training)
        of_parameters = [sums.get(id(parameter)) for parameter in parameters]
        of_cond = sums.get(id(cond)) if wants_cond else None
        return None, None, None, grad if wants_x else None, of_cond, *of_parameters


class _LayerGraph(NamedTuple):
    """A layer's input x, and its output with a graph from x and from `leaf`, which may be x itself."""

    x: Tensor
    leaf: Tensor
    z: Tensor
    logdet: Tensor

    def pull_back(self, grad: Tensor, grad_logdet: Tensor, others: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of x and of others, from the gradients of z and the log-determinant; frees the graph."""
        starts = [self.x] if self.leaf is self.x else [self.x, self.leaf]
        ends = [(end, g) for end, g in ((self.z, grad), (self.logdet, grad_logdet)) if end.requires_grad]
        outputs, gradients = zip(*ends, strict=True)
        found = torch.autograd.grad(outputs, [*starts, *others], gradients, allow_unused=True)
        of_x = [g for g in found[: len(starts)] if g is not None]
        return sum(of_x[1:], of_x[0]), list(found[len(starts) :])


def _from_input(layer: Bijection, x: Tensor, cond: Tensor | None, mask: Tensor | None) -> _LayerGraph:
    x = x.detach().requires_grad_()
    return _LayerGraph(x, x, *layer(x, cond, mask))


def _from_output(layer: Recomputes, z: Tensor, cond: Tensor | None, mask: Tensor | None) -> _LayerGraph:
    z = z.detach().requires_grad_()
    x, recomputed, logdet = layer.recompute(z, cond, mask)
    return _LayerGraph(x, z, recomputed, logdet)
