"""Recomputing layers in the backward pass, and the numerical invertibility of a flow, layer by layer."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from genmodels.core.errors import RunError
from genmodels.core.processes import joined
from genmodels.core.tensors import hide
from genmodels.flows.bijection import Bijection
from genmodels.flows.linear import GroupedLinear, InvertibleLinear
from genmodels.flows.scaling import ActNorm


class Autocast(NamedTuple):
    """The state of autocast on one kind of device.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     then = Autocast.now("cpu")
        >>> with then.again():
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.bfloat16
    """

    device_type: str
    dtype: torch.dtype
    enabled: bool

    @classmethod
    def now(cls, device_type: str) -> Autocast:
        """The state in force."""
        return cls(device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type))

    def again(self) -> torch.autocast:
        """That state, for a block of code."""
        # Without the cache: it would hand weights cast without gradients to code that needs them, and hold them all.
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)


class Noise:
    """The states of the global generators of the CPU and of one device.

    Example:
        >>> then = Noise(torch.device("cpu"))
        >>> first = torch.rand(2)
        >>> with then.again():
        ...     print(bool((torch.rand(2) == first).all()))
        True
        >>> then == Noise(torch.device("cpu"))
        False
    """

    def __init__(self, device: torch.device):
        self.device = device
        # Where there is but one device of a kind, its functions take none.
        self._which = (device,) if device.type not in ("cpu", "mps") else ()
        self.states = [torch.get_rng_state()]
        if device.type != "cpu":
            self.states.append(torch.get_device_module(device).get_rng_state(*self._which))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Noise) and all(map(torch.equal, self.states, other.states))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Those states, for a block of code; afterwards the generators go on as if it had not been."""
        now = Noise(self.device)
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        torch.set_rng_state(self.states[0])
        if len(self.states) > 1:
            torch.get_device_module(self.device).set_rng_state(self.states[1], *self._which)


@contextlib.contextmanager
def hooks_at_rest(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Hooks on the gradients of these tensors stay silent: they are to see the whole gradient, later, and once.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> _ = weight.register_hook(lambda gradient: 2 * gradient)
        >>> with hooks_at_rest([weight]):
        ...     torch.autograd.grad(weight.sum(), weight)
        (tensor([1.]),)
        >>> torch.autograd.grad(weight.sum(), weight)
        (tensor([2.]),)
    """
    resting = [(tensor, tensor._backward_hooks) for tensor in tensors if tensor._backward_hooks]
    for tensor, _ in resting:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, hooks in resting:
            tensor._backward_hooks = hooks


class LayerInput(NamedTuple):
    """A layer, and the true input of a few examples with their condition and mask."""

    layer: Bijection
    x: Tensor
    cond: Tensor | None = None
    mask: Tensor | None = None

    def __str__(self) -> str:
        return f"{self.layer.place} ({type(self.layer).__name__})"


class DriftGauge(nn.Module):
    """Compares recomputed inputs with the true ones of a few examples, and names the layers that lose too much.

        drift_i = max |x_i' - x_i| / (1 + max |x_i|)

    x_i' is found from the output of the whole flow, so an error made by one layer reaches all layers before it. Hence
    a layer is blamed when its drift is above the threshold and that of the layer after it is not. From the next step
    on it stores its input, and recomputation starts afresh there. Which layers do so is a buffer, kept in checkpoints;
    several processes decide together, on the largest drift of all of them.

    Arguments:
        layers: number of layers watched.
        threshold: largest drift that is let pass; `math.inf` switches the gauge off.
        examples: how many examples of each batch keep their true inputs, the first ones.

    Attributes:
        switched: (layers,) bool, the layers that store their input.
        stores: the same as a Python list, which costs no synchronisation to read.

    Errors: RunError when recomputed values are not finite though the output of the flow is.

    Example:
        >>> gauge = DriftGauge(3)
        >>> gauge.blamed([2e-3, 2e-3, 0.0])
        [1]
    """

    def __init__(self, layers: int, *, threshold: float = 1e-3, examples: int = 2):
        super().__init__()
        self.threshold, self.examples = threshold, examples
        self.register_buffer("switched", torch.zeros(layers, dtype=torch.bool))
        self.stores = [False] * layers

    def _load_from_state_dict(self, state_dict, prefix, *arguments) -> None:
        # A model that was trained with memory="store" has no switches: none is on.
        state_dict.setdefault(prefix + "switched", torch.zeros_like(self.switched))
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self.stores = self.switched.tolist()

    def keep(self, values: Tensor) -> Tensor:
        """The rows of the examples that are watched, in memory of their own: a view would keep all the others alive."""
        return values[: self.examples].detach().clone()

    def blamed(self, drifts: Sequence[float]) -> list[int]:
        """Positions of the layers that lose too much, from the drifts of layers in a row (nothing follows the last)."""
        after = [*drifts[1:], 0.0]
        return [k for k, (own, later) in enumerate(zip(drifts, after, strict=True)) if own > self.threshold >= later]

    def switch(self, layers: Sequence[int]) -> None:
        """From now on these layers store their input."""
        if layers:
            self.switched[list(layers)] = True
            self.stores = [stored or i in layers for i, stored in enumerate(self.stores)]


class Walk:
    """Errors of the recomputed inputs of one backward pass; nothing is read from the device before `finish`.

    Arguments:
        gauge: the gauge that collects the result.
        first: number of the first layer of this pass among those of the gauge.
        layers: number of layers of this pass.
        z: output of the last one.
    """

    def __init__(self, gauge: DriftGauge, first: int, layers: int, z: Tensor):
        self.gauge, self.first = gauge, first
        nothing = z.new_zeros(())
        self.lost, self.size = [nothing] * layers, [nothing] * layers
        self.extremes = [nothing, nothing] * layers + list(z.detach().aminmax() if len(z) else (nothing, nothing))

    def compare(self, k: int, x: Tensor, true: Tensor) -> None:
        """Note the input that was recomputed for layer k of this pass, and a few true examples to compare it with."""
        if not len(x):
            return  # an empty share of a batch: the other processes still want to hear that nothing is wrong
        self.lost[k] = torch.dist(x[: len(true)], true, torch.inf)
        self.size[k] = torch.linalg.vector_norm(true, torch.inf)
        self.extremes[2 * k : 2 * k + 2] = x.aminmax()

    @torch.no_grad()
    def finish(self, true_input: Callable[[int], LayerInput], training: bool) -> None:
        """Switch the layers that lose too much, with a warning for each, and stop at what is not finite.

        Arguments:
            true_input: gives layer k of this pass with the few true examples.
            training: outside training nothing is switched, and other processes are not asked.

        Raises:
            RunError: naming the layer whose recomputed input is not finite.
        """
        drifts = torch.stack(self.lost) / (1 + torch.stack(self.size))
        broken = ~torch.isfinite(torch.stack(self.extremes)).view(-1, 2).all(1)
        found = torch.cat([drifts.nan_to_num(0.0), broken])
        together = training and joined()
        if together:
            # In the backward pass, not at the next step: a checkpoint written in between holds the decision.
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        found = found.tolist()  # the one synchronisation
        drifts, (*broken, overflow) = found[: len(self.lost)], found[len(self.lost) :]
        if overflow:
            return  # the flow itself is not finite: its loss says so, recomputation is not to blame
        for k in reversed(range(len(self.lost))):
            if broken[k]:
                raise RunError(
                    f"{true_input(k)}: its input, recomputed from its output, is not finite (smallest scale about "
                    f"{smallest_scale(true_input(k)):.1e}); train with memory='store'"
                )
        blamed = self.gauge.blamed(drifts)
        if training:
            self.gauge.switch([self.first + k for k in blamed])
        if together and torch.distributed.get_rank():
            return
        then = "from the next step on its input is stored" if training else "memory='store' gives exact ones"
        for k in blamed:
            warnings.warn(
                f"{true_input(k)}: its input, recomputed from its output, is off by {drifts[k]:.1e}, more than "
                f"{self.gauge.threshold:.0e} (smallest scale about {smallest_scale(true_input(k)):.1e}); the gradients "
                f"of this step are not exact, {then}",
                stacklevel=2,
            )


def smallest_scale(given: LayerInput, rounds: int = 8) -> float:
    """About the least factor by which a layer scales anything at the given input, by power iteration with J^-T.

        u <- J^-T u / |u|,    scale = 1 / |u|

    Where J is triangular, as in a coupling, this is the smallest scale on its diagonal.

    Example:
        >>> from genmodels.flows.scaling import Scale
        >>> round(smallest_scale(LayerInput(Scale(torch.tensor([0.25, 3.0])), torch.ones(1, 2))), 4)
        0.25
    """
    layer, x, cond, mask = given
    u = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype).to(x.device)
    with Noise(x.device).again(), torch.enable_grad():  # dropout in a network draws nothing that others would miss
        z = layer(x, cond, mask)[0].detach().requires_grad_()
        again, _ = layer.inverse(z, cond, None if mask is None else layer.out_mask(mask))
        for _ in range(rounds):
            u = torch.autograd.grad(again, z, (u / u.norm()).view_as(again), retain_graph=True)[0]
    return float(1 / u.norm())


@dataclass(frozen=True)
class LayerHealth:
    """One layer: its round-trip error, the largest |log-scale| it applied, and the singular values of its matrix.

    `drift` is max |x' - x| / (1 + max |x|) with x' = inverse(forward(x)) of this layer alone. What a layer does not
    have is None.
    """

    name: str
    kind: str
    drift: float
    log_scale: float | None
    smallest_singular_value: float | None
    condition: float | None


@dataclass(frozen=True)
class Health:
    """A whole flow: the round-trip error through all layers, and every layer's own figures in order."""

    round_trip: float
    layers: tuple[LayerHealth, ...]

    def first_drifting(self, threshold: float = 1e-3) -> LayerHealth | None:
        """The first layer whose own round trip is off by more than `threshold`, or is not a number."""
        return next((layer for layer in self.layers if not layer.drift <= threshold), None)

    def figures(self) -> dict[str, float]:
        """The extremes over the layers: round trip, largest log-scale, smallest singular value, largest condition."""
        found = {"round_trip": self.round_trip, "layer_drift": max((layer.drift for layer in self.layers), default=0.0)}
        extremes = (("log_scale", max), ("smallest_singular_value", min), ("condition", max))
        for key, extreme in extremes:
            values = [value for layer in self.layers if (value := getattr(layer, key)) is not None]
            if values:
                found[key] = extreme(values)
        return found


@torch.no_grad()
def examine(bijection: Bijection, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Health:
    """Numerical invertibility of a flow on a batch, in the precision of `x`.

    Arguments:
        bijection: the flow; it is run eagerly, layer by layer.
        x: (B, *event) in the units that the bijection takes; a few examples are enough.
        cond, mask: as for the bijection.

    Example:
        >>> from genmodels.flows import ActNorm, Compose, Flip
        >>> health = examine(Compose([ActNorm(2), Flip(2)], (2,)), torch.randn(4, 2))
        >>> [layer.kind for layer in health.layers], health.first_drifting()
        (['ActNorm', 'Flip'], None)
    """
    x = x if mask is None else hide(x, mask)  # what stands in padding is not meant to come back
    scales: dict[nn.Module, float] = {}

    def note(module: nn.Module, _inputs, output) -> None:
        scales[module] = float(output[1].abs().max())

    watched = [module for module in bijection.modules() if hasattr(module, "params_per_dim")]
    handles = [module.register_forward_hook(note) for module in watched]
    try:
        steps = list(bijection.walk(x, cond, mask))
    finally:
        for handle in handles:
            handle.remove()
    layers = []
    for step in steps:
        after = None if step.mask is None else step.layer.out_mask(step.mask)
        drift = relative_error(step.layer.inverse(step.z, step.cond, after)[0], step.x)
        own = [scales[module] for module in step.layer.modules() if module in scales]
        if isinstance(step.layer, ActNorm):
            own.append(float(step.layer.log_scale().abs().max()))
        values = None
        if isinstance(step.layer, InvertibleLinear | GroupedLinear):
            values = step.layer.singular_values()
        layers.append(LayerHealth(
            step.name, type(step.layer).__name__, drift, max(own, default=None),
            None if values is None else float(values[-1]),
            None if values is None else float(values[0] / values[-1]),
        ))
    z, _ = bijection(x, cond, mask)
    back, _ = bijection.inverse(z, cond, None if mask is None else bijection.out_mask(mask))
    return Health(relative_error(back, x), tuple(layers))


def relative_error(found: Tensor, true: Tensor) -> float:
    """max |found - true| / (1 + max |true|); NaN stays NaN.

    Example:
        >>> relative_error(torch.tensor([1.0, 3.5]), torch.tensor([1.0, 4.0]))
        0.10000000149011612
    """
    return float((found - true).abs().max() / (1 + true.abs().max()))
