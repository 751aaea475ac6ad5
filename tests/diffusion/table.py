"""Every sampler once, for the checks that all of them pass."""

from __future__ import annotations

import torch

from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    ConsistencySampler,
    DDIMSampler,
    DDPMSampler,
    DPMSolverPP2MSampler,
    EDMSampler,
    EulerSampler,
    FlowMapSampler,
    FlowSampler,
    HeunSampler,
    SDESampler,
    UniPCSampler,
)

INSTANCES = {
    "ddpm, beta": DDPMSampler(),
    "ddpm, beta_tilde": DDPMSampler(variance="beta_tilde"),
    "ddim": DDIMSampler(),
    "ddim, eta .5": DDIMSampler(eta=0.5),
    "ddim, eta 1": DDIMSampler(eta=1.0),
    "euler": EulerSampler(),
    "heun": HeunSampler(),
    "edm": EDMSampler(40, churn=10.0),
    "dpmpp_2m": DPMSolverPP2MSampler(),
    "unipc 1": UniPCSampler(order=1),
    "unipc 2": UniPCSampler(),
    "unipc 3": UniPCSampler(order=3),
    "flow": FlowSampler(),
    "sde": SDESampler(),
    "sde, sine": SDESampler(diffusion="sine"),
    "flow_map": FlowMapSampler(),
    "consistency": ConsistencySampler(),
}


def calls(name: str, steps: int) -> int:
    """Network calls of `steps` steps, the last of them to the clean end."""
    return 2 * steps - 1 if name in ("heun", "edm", "flow") else steps


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def keyed(n: int, seed: int = 0) -> KeyedGenerator:
    return KeyedGenerator(seed, torch.arange(n), "sample")
