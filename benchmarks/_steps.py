"""Training and denoising steps of networks, ours and those of diffusers, for the benchmarks that compare them."""

from __future__ import annotations

import torch
from torch import nn


class Unwrapped(nn.Module):
    """A network of diffusers, called as ours: its time an index, its classes by name, its result a plain tensor."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x, t, cond=None):
        return self.network(x, timestep=t, class_labels=cond, return_dict=False)[0]


def training_step(network, arguments, target):
    """A function of no arguments: forward, backward, Adam."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)

    def step():
        optimizer.zero_grad()
        nn.functional.mse_loss(network(*arguments), target).backward()
        optimizer.step()

    return step


def denoising_step(network, arguments):
    """A function of no arguments: forward without gradients, in evaluation mode."""

    @torch.no_grad()
    def step():
        network.eval()(*arguments)
        network.train()

    return step
