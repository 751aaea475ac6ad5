"""What a flow must keep to beyond its bijection: density, latents, samples, and silence before it has seen data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from genmodels.evaluation.laws import Laws, Measured, NotApplicable
from genmodels.evaluation.laws_of_maps import relative, worst
from genmodels.flows.bijection import NotInitialized
from genmodels.flows.flow import Flow
from genmodels.random import KeyedGenerator

LAWS = Laws()


@dataclass(frozen=True)
class FlowSubject:
    """A flow in float64, a batch of what it takes, and another instance that has seen no data (or None)."""

    flow: Flow
    x: Tensor
    cond: Tensor | None
    blank: Flow | None

    def sample(self, index: Tensor, temperature: float = 1.0) -> Tensor:
        """Samples of these numbers."""
        noise = KeyedGenerator(0, index.to(self.x.device), "verify")
        cond = None if self.cond is None else self.cond[index % len(self.cond)]
        return self.flow.sample(len(index), cond, temperature=temperature, generator=noise)


@LAWS.add("log-density", 1e-12, "log p(x) = log base(z) + log-determinant")
@torch.no_grad()
def log_density(s: FlowSubject) -> Measured:
    """Bijection and base called one by one, against `flow.log_prob`."""
    z, logdet = s.flow.bijection(s.x, s.cond if s.flow.bijection.uses_cond else None)
    base = s.flow.base.log_prob(z, s.cond if s.flow.base.uses_cond else None)
    return Measured(relative(s.flow.log_prob(s.x, s.cond), base + logdet))


@LAWS.add("latents", 1e-9, "from_latents(latents(x)) = x")
@torch.no_grad()
def latents(s: FlowSubject) -> Measured:
    """All scales there and back again."""
    return Measured(relative(s.flow.from_latents(s.flow.latents(s.x, s.cond), s.cond), s.x))


@LAWS.add("samples", 1e-9, "sample k is the same alone and among others, and z(sample at temperature 0) is the mode")
@torch.no_grad()
def samples(s: FlowSubject) -> Measured:
    """Sample 2 of four against itself drawn alone, and the latents of cold samples against the mode of the base."""
    together, alone = s.sample(torch.arange(4)), s.sample(torch.tensor([2]))
    errors = {"sample 2 alone": relative(alone[0], together[2])}
    cold = s.sample(torch.arange(2), temperature=0.0)
    cond = None if s.cond is None else s.cond[:2]
    z = s.flow.bijection(cold, cond if s.flow.bijection.uses_cond else None)[0]
    own = cond if s.flow.base.uses_cond else None
    mode = s.flow.base.sample(2, own, temperature=0.0, generator=KeyedGenerator(1, torch.arange(2).to(z.device)),
                              dtype=z.dtype, device=z.device)
    return worst({**errors, "temperature 0": relative(z, mode.reshape(z.shape))})


@LAWS.add("waits for data", 0.0, "before initialisation densities, samples and latents raise NotInitialized")
@torch.no_grad()
def waits_for_data(s: FlowSubject) -> Measured:
    """On an instance that has seen no data; what answers all the same is named."""
    if s.blank is None or next(iter(s.blank.bijection.uninitialized()), None) is None:
        raise NotApplicable("needs no data to start from")
    generator = KeyedGenerator(0, torch.arange(2).to(s.x.device))
    cond = None if s.cond is None else s.cond[:2]
    x = s.x[:2].float()
    calls = {
        "log_prob": lambda: s.blank.log_prob(x, cond),
        "sample": lambda: s.blank.sample(2, cond, generator=generator),
        "latents": lambda: s.blank.latents(x, cond),
    }
    silent = []
    for name, call in calls.items():
        try:
            call()
        except NotInitialized:
            continue  # as it should
        silent.append(name)
    return Measured(float(len(silent)), ", ".join(silent))
