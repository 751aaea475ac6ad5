"""Running a layer a second time just as it ran the first time: the same random numbers, the same autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
