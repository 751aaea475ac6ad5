"""Gradients of a flow with recomputed and with stored activations, and how far two sets of them are apart."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from genmodels.flows.composition import Compose


def set_memory(module: nn.Module, mode: str) -> nn.Module:
    for inner in module.modules():
        if isinstance(inner, Compose):
            inner.memory = mode
    return module


def gradients(flow, x, cond=None, mask=None, context=contextlib.nullcontext, rows=slice(None)):
    """Of x, of cond if it has any, and of every parameter, for a loss in which every number of z counts differently.

    That of some `rows` is their part of the loss of all.
    """
    torch.manual_seed(5)  # dropout
    flow.zero_grad()
    volumes = torch.linspace(-2, -1, len(x))[rows]
    x, cond, mask = (None if value is None else value.detach()[rows] for value in (x, cond, mask))
    x = x.requires_grad_()
    cond = cond.requires_grad_() if cond is not None and cond.is_floating_point() else cond
    with context():
        z, logdet = flow(x, cond, mask)
    weights = torch.linspace(0.5, 1.5, z.shape[1:].numel(), dtype=z.dtype).view(z.shape[1:])
    loss = ((z.square() / 2 + z.sin()) * weights).flatten(1).sum(1) + logdet * volumes
    loss.sum().backward()
    found = {"x": x.grad} | {name: p.grad for name, p in flow.named_parameters()}
    return found | ({"cond": cond.grad} if cond is not None and cond.is_floating_point() else {})


def worst(found, expected, smallest: float = 0.0) -> float:
    """The largest relative difference of two sets of gradients; a missing gradient is a zero.

    Gradients below `smallest` times the largest of all, zero but for rounding, are compared at that scale.
    """
    assert found.keys() == expected.keys()
    largest = max(float(true.abs().max()) for true in expected.values() if true is not None)
    least = max(smallest * largest, 1e-12)
    errors = [0.0]
    for name, true in expected.items():
        mine = found[name] if found[name] is not None else torch.zeros(())
        true = true if true is not None else torch.zeros(())
        errors.append(float((mine - true).abs().max() / true.abs().max().clamp(min=least)))
    return max(errors)


def both_modes(flow, *inputs, **options):
    """Gradients with recomputed and with stored activations, of one flow."""
    found = gradients(set_memory(flow, "inverse"), *inputs, **options)
    return found, gradients(set_memory(flow, "store"), *inputs, **options)


def alone(flow, x, cond=None):
    """The gradients of every row by itself: one below the other of x and cond, added of the parameters."""
    parts = [gradients(flow, x, cond, rows=slice(i, i + 1)) for i in range(len(x))]
    whole = {name: [part[name] for part in parts] for name in parts[0]}
    return {name: None if given[0] is None else (torch.cat(given) if name in ("x", "cond") else sum(given))
            for name, given in whole.items()}
