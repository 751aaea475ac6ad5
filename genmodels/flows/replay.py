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
        """The current state."""
        return cls(device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type))

    def again(self) -> torch.autocast:
        """A context with that state."""
        # Without the cache, which would return weights cast without gradients, and keep all of them in memory.
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)


class RandomState:
    """The states of the global random number generators of the CPU and of one device.

    Example:
        >>> then = RandomState(torch.device("cpu"))
        >>> first = torch.rand(2)
        >>> with then.again():
        ...     print(bool((torch.rand(2) == first).all()))
        True
        >>> then == RandomState(torch.device("cpu"))
        False
    """

    def __init__(self, device: torch.device):
        self.device = device
        # The functions of backends with a single device take no device.
        self._device_arguments = (device,) if device.type not in ("cpu", "mps") else ()
        self.states = [torch.get_rng_state()]
        if device.type != "cpu":
            self.states.append(torch.get_device_module(device).get_rng_state(*self._device_arguments))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomState) and all(map(torch.equal, self.states, other.states))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context with those states, which restores the present ones afterwards."""
        now = RandomState(self.device)
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        torch.set_rng_state(self.states[0])
        if len(self.states) > 1:
            torch.get_device_module(self.device).set_rng_state(self.states[1], *self._device_arguments)


@contextlib.contextmanager
def hooks_at_rest(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Disables hooks on the gradients of these tensors, which are to be called once, with the whole gradient.

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
    """A layer, and the exact input of a few examples with their condition and mask."""

    layer: Bijection
    x: Tensor
    cond: Tensor | None = None
    mask: Tensor | None = None

    def __str__(self) -> str:
        return f"{self.layer.place} ({type(self.layer).__name__})"


class DriftGauge(nn.Module):
    """Compares recomputed inputs with the exact ones of a few examples, to find layers with inaccurate inverses.

        drift_i = max |x_i' - x_i| / (1 + max |x_i|)

    x_i' is computed from the output of the whole flow, so the error of one layer reaches all layers before it. Hence a
    layer is blamed when its drift is above the threshold and the drift of the next layer is not. From the next step on
    it stores its input, and recomputation restarts from there. The buffer `switched` is saved in checkpoints; several
    processes decide by the largest drift of all.

    Arguments:
        layers: number of layers.
        threshold: largest drift allowed; `math.inf` disables the gauge.
        examples: number of examples of each batch whose exact inputs are kept, the first ones.

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
        # A model that was trained with memory="store" has no such buffer.
        state_dict.setdefault(prefix + "switched", torch.zeros_like(self.switched))
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self.stores = self.switched.tolist()

    def keep(self, values: Tensor) -> Tensor:
        """A copy of the rows of these examples, since a view would keep the whole batch in memory."""
        return values[: self.examples].detach().clone()

    def blamed(self, drifts: Sequence[float]) -> list[int]:
        """Positions of the layers with inaccurate inverses, from the drifts of consecutive layers."""
        after = [*drifts[1:], 0.0]
        return [k for k, (own, later) in enumerate(zip(drifts, after, strict=True)) if own > self.threshold >= later]

    def switch(self, layers: Sequence[int]) -> None:
        """Let these layers store their input from now on."""
        if layers:
            self.switched[list(layers)] = True
            self.stores = [stored or i in layers for i, stored in enumerate(self.stores)]


class RecomputationErrors:
    """Errors of the recomputed inputs of one backward pass; nothing waits for the device before `finish`.

    Arguments:
        gauge: the gauge.
        first: the gauge's number of the first layer of this pass.
        layers: number of layers of this pass.
        z: output of the last one.
    """

    def __init__(self, gauge: DriftGauge, first: int, layers: int, z: Tensor):
        self.gauge, self.first = gauge, first
        zero = z.new_zeros(())
        self.error, self.size = [zero] * layers, [zero] * layers
        self.extremes = [zero, zero] * layers + list(z.detach().aminmax() if z.numel() else (zero, zero))

    def compare(self, k: int, x: Tensor, true: Tensor) -> None:
        """Record the recomputed input of layer k of this pass, with the exact one of a few examples."""
        if not x.numel():
            return  # this process has no values of the batch; `finish` still takes part in the reduction
        self.error[k] = torch.dist(x[: len(true)], true, torch.inf)
        self.size[k] = torch.linalg.vector_norm(true, torch.inf)
        self.extremes[2 * k : 2 * k + 2] = x.aminmax()

    @torch.no_grad()
    def finish(self, true_input: Callable[[int], LayerInput], training: bool) -> None:
        """Switch the layers with inaccurate inverses, with a warning for each.

        Arguments:
            true_input: returns layer k of this pass with the exact examples.
            training: outside training no layer is switched, and other processes are not involved.

        Raises:
            RunError: naming the layer whose recomputed input is not finite.
        """
        drifts = torch.stack(self.error) / (1 + torch.stack(self.size))
        not_finite = ~torch.isfinite(torch.stack(self.extremes)).view(-1, 2).all(1)
        found = torch.cat([drifts.nan_to_num(0.0), not_finite])
        together = training and joined()
        if together:
            # In the backward pass and not at the next step, so that a checkpoint in between has the decision.
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        found = found.tolist()  # the one synchronisation
        drifts, (*not_finite, overflow) = found[: len(self.error)], found[len(self.error) :]
        if overflow:
            return  # the output of the flow is not finite either, which the loss reports
        for k in reversed(range(len(self.error))):
            if not_finite[k]:
                raise RunError(
                    f"{true_input(k)}: its input, recomputed from its output, is not finite (smallest scale about "
                    f"{smallest_scale(true_input(k)):.1e}); train with memory='store'"
                )
        blamed = self.gauge.blamed(drifts)
        if training:
            self.gauge.switch([self.first + k for k in blamed])
        if together and torch.distributed.get_rank():
            return
        remedy = "from the next step on its input is stored" if training else "memory='store' gives exact ones"
        for k in blamed:
            warnings.warn(
                f"{true_input(k)}: its input, recomputed from its output, is off by {drifts[k]:.1e}, more than "
                f"{self.gauge.threshold:.0e} (smallest scale about {smallest_scale(true_input(k)):.1e}); the gradients "
                f"of this step are not exact, {remedy}",
                stacklevel=2,
            )


def smallest_scale(given: LayerInput, rounds: int = 8) -> float:
    """About the smallest absolute eigenvalue of a layer's Jacobian at the given input, by power iteration with J^-T.

        u <- J^-T u / |u|,    scale = 1 / |u|

    Where J is triangular, as in a coupling, this is the smallest scale on its diagonal.

    Example:
        >>> from genmodels.flows.scaling import Scale
        >>> round(smallest_scale(LayerInput(Scale(torch.tensor([0.25, 3.0])), torch.ones(1, 2))), 4)
        0.25
    """
    layer, x, cond, mask = given
    u = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype).to(x.device)
    with RandomState(x.device).again(), torch.enable_grad():  # dropout in a network does not advance the generators
        z = layer(x, cond, mask)[0].detach().requires_grad_()
        x_again, _ = layer.inverse(z, cond, None if mask is None else layer.out_mask(mask))
        for _ in range(rounds):
            u = torch.autograd.grad(x_again, z, (u / u.norm()).view_as(x_again), retain_graph=True)[0]
    return float(1 / u.norm())


@dataclass(frozen=True)
class LayerHealth:
    """One layer: its round-trip error, its largest |log-scale|, and the singular values of its matrix, None without.

    `drift` is max |x' - x| / (1 + max |x|) with x' = inverse(forward(x)) of this layer.
    """

    name: str
    kind: str
    drift: float
    log_scale: float | None
    smallest_singular_value: float | None
    condition: float | None


@dataclass(frozen=True)
class Health:
    """A flow: the round-trip error through all layers, and the health of every layer in order."""

    round_trip: float
    layers: tuple[LayerHealth, ...]

    def first_drifting(self, threshold: float = 1e-3) -> LayerHealth | None:
        """The first layer with a round-trip error above `threshold`, or NaN."""
        return next((layer for layer in self.layers if not layer.drift <= threshold), None)

    def figures(self) -> dict[str, float]:
        """The extremes over the layers: round trip, largest log-scale, smallest singular value, largest condition.

        NaN where that of a layer is.
        """
        found = {"round_trip": self.round_trip, "layer_drift": 0.0}
        extremes = {"drift": torch.amax, "log_scale": torch.amax, "smallest_singular_value": torch.amin,
                    "condition": torch.amax}
        for key, extreme in extremes.items():
            values = [value for layer in self.layers if (value := getattr(layer, key)) is not None]
            if values:
                value = float(extreme(torch.tensor(values, dtype=torch.float64)))  # keeps NaN
                found["layer_drift" if key == "drift" else key] = value
        return found


@torch.no_grad()
def examine(bijection: Bijection, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Health:
    """Numerical invertibility of a flow on a batch, in the precision of `x`.

    Arguments:
        bijection: the flow, which is run layer by layer.
        x: (B, *event), a few examples.
        cond, mask: as for the bijection.

    Example:
        >>> from genmodels.flows import ActNorm, Compose, Flip
        >>> health = examine(Compose([ActNorm(2), Flip(2)], (2,)), torch.randn(4, 2))
        >>> [layer.kind for layer in health.layers], health.first_drifting()
        (['ActNorm', 'Flip'], None)
    """
    if x.numel() == 0:
        raise ValueError(f"examine needs data, got {tuple(x.shape)}")
    x = hide(x, mask)  # padding has no round trip
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
        smallest = condition = None
        if isinstance(step.layer, InvertibleLinear | GroupedLinear):
            values = step.layer.singular_values()
            smallest, condition = float(values[-1]), float(values[0] / values[-1])
        log_scale = max(own, default=None)
        layers.append(LayerHealth(step.name, type(step.layer).__name__, drift, log_scale, smallest, condition))
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
