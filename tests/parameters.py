"""Parameters moved away from their start, so that nothing that starts at zero or as the identity hides what it does.

Also what a flow keeps for its backward pass.
"""

from __future__ import annotations

import torch
from torch import nn

from genmodels.flows.bijection import Bijection
from genmodels.models.base import GenerativeModel


@torch.no_grad()
def scattered(module: nn.Module, amount: float = 0.2, seed: int | None = None) -> nn.Module:
    """The same module with amount * N(0, 1) added to every parameter, by this seed or the global generator."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.add_(amount * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return module


def shaken(module: nn.Module, amount: float = 0.4) -> nn.Module:
    """The same in float64 and without gradients."""
    return scattered(module.double(), amount, seed=1).requires_grad_(False)


def scattered_model(model: GenerativeModel, amount: float = 0.1, seed: int | None = None) -> GenerativeModel:
    """The same model with its core's parameters moved, and averages that are those parameters."""
    scattered(model.core, amount, seed)
    for average in model.ema.averages:
        average.load_state_dict(model.core.state_dict())
    return model.eval()


def kept_for_the_backward_pass(flow: Bijection, x: torch.Tensor) -> float:
    """Bytes that a forward pass keeps, parameters and buffers left out, over the bytes of its input."""
    own = {t.untyped_storage().data_ptr() for t in flow.state_dict().values()}
    seen = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kept = flow(x)  # alive until the count is done, so that no address is used twice
        total = sum(seen.values())
    assert kept[0].requires_grad
    return total / (x.numel() * x.element_size())
