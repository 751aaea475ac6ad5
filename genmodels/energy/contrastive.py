"""Contrastive divergence with a replay buffer: a baseline that is watched, and never reported as a likelihood."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.energy.function import EnergyFunction, require_energy
from genmodels.energy.kernels import ULA, Target, positive
from genmodels.errors import InputError
from genmodels.random import Generator, KeyedGenerator, normal, shared_uniform, uniform


class ContrastiveDivergence(nn.Module):
    """E(x) - E(x') + penalty (E(x)^2 + E(x')^2), x' from short Langevin chains that go on where the last ones ended.

    In the mean over draws x' of the model its gradient is that of -log p(x); short chains only come near. The value
    itself says nothing of the likelihood. The chains live in a buffer that belongs to the state of this module, so that
    a training goes on from a checkpoint as if it had never stopped.

    Arguments:
        event_shape: shape of x.
        size: chains in the buffer.
        restarts: share of chains that begin anew, from noise, at each use.
        steps: Langevin steps of each use.
        step_size: h of these steps.
        penalty: weight of the squared energies, which keeps them from drifting.
        spread: standard deviation of the noise that chains begin with.

    Shapes: `(model, x (B, *event), generator, cond)` to `(B,)`, B at most `size`.
    Errors: InputError for a score without energy, or batches larger than the buffer.
    Source: Tieleman 2008 (persistent chains); Du and Mordatch 2019, "Implicit generation with energy-based models".

    Example:
        >>> from genmodels.energy.known import Quadratic
        >>> loss = ContrastiveDivergence((2,), size=100, steps=2)
        >>> loss(Quadratic(torch.eye(2)), torch.zeros(8, 2), torch.Generator().manual_seed(0)).shape
        torch.Size([8])
    """

    def __init__(
        self,
        event_shape: tuple[int, ...],
        *,
        size: int = 10_000,
        restarts: float = 0.05,
        steps: int = 60,
        step_size: float = 0.01,
        penalty: float = 1e-3,
        spread: float = 1.0,
    ):
        super().__init__()
        if not 0 <= restarts <= 1:
            raise InputError(f"restarts = {restarts} must lie in 0 .. 1")
        self.kernel, self.steps = ULA(step_size=step_size), steps
        self.restarts, self.penalty, self.spread = restarts, penalty, positive("spread", spread)
        noise = KeyedGenerator(0, torch.arange(size), "replay").normal((size, *event_shape))
        self.register_buffer("chains", spread * noise)

    def forward(self, model: EnergyFunction, x: Tensor, generator: Generator, cond: Tensor | None = None) -> Tensor:
        model = require_energy(model, "contrastive divergence")
        model_energy = model.energy(self.sample(model, x, generator, cond), cond)
        data_energy = model.energy(x, cond)
        return data_energy - model_energy + self.penalty * (data_energy.square() + model_energy.square())

    @torch.no_grad()
    def sample(self, model: EnergyFunction, x: Tensor, generator: Generator, cond: Tensor | None = None) -> Tensor:
        """(B, *event) chains, moved on and put back."""
        size = len(self.chains)
        if len(x) > size:
            raise InputError(f"a batch of {len(x)} is larger than the buffer of {size} chains: raise size")
        # A run of neighbours from a random place: no chain is taken twice.
        first = int(shared_uniform(1, generator)[0] * size)
        slots = (first + torch.arange(len(x), device=x.device)) % size
        fresh = self.spread * normal(x.shape, generator, dtype=x.dtype, device=x.device)
        anew = uniform((len(x),), generator, device=x.device) < self.restarts
        start = torch.where(anew.reshape(-1, *(1,) * (x.dim() - 1)), fresh, self.chains[slots].to(x.dtype))
        target = Target(model, cond)
        point = target.evaluate(start)
        size_of_step = torch.full((len(x),), self.kernel.step_size, device=x.device)
        for _ in range(self.steps):
            point, _ = self.kernel(target, point, generator, size_of_step)
        self.chains[slots] = point.x.to(self.chains.dtype)
        return point.x
