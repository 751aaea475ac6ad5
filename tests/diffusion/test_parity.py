"""Step for step the same as diffusers, with one exact denoiser in both; skipped where diffusers is not installed."""

from __future__ import annotations

import pytest
import torch

from genmodels.diffusion import (
    DDIMSampler,
    DDPMSampler,
    DPMSolverPP2MSampler,
    GaussianDenoiser,
    LinearSchedule,
    sample,
    step_to_time,
)

diffusers = pytest.importorskip("diffusers", reason="parity needs diffusers (pip install -e '.[bench]')")

STEPS = [900, 700, 500, 300, 150, 50, 10]
BETAS = {"num_train_timesteps": 1000, "beta_schedule": "linear"}
MEAN = torch.tensor([0.5, -0.3, 0.1, 0.9])


def oracle():
    return GaussianDenoiser(LinearSchedule(), MEAN, torch.tensor([0.25, 0.04, 1.0, 0.5]))


def start():
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def theirs(scheduler, last=0):
    denoiser, x, generator = oracle(), start(), torch.Generator().manual_seed(1)
    steps = scheduler.timesteps
    for i in steps[: len(steps) - last]:
        eps = denoiser(x, step_to_time(i, 1000, zero_based=True).expand(8)).eps
        extra = {} if isinstance(scheduler, diffusers.DPMSolverMultistepScheduler) else {"generator": generator}
        x = scheduler.step(eps, i, x, **extra).prev_sample
    return x


def ours(sampler, steps, to_clean=True):
    times = step_to_time(torch.tensor(steps), 1000, zero_based=True)
    times = torch.cat([times, torch.zeros(1, dtype=torch.float64)]) if to_clean else times
    return sample(oracle(), (8, 4), times, sampler, torch.Generator().manual_seed(1), start=start()).x


def agree(a, b):
    assert (a - b).abs().max() < 1e-5


def test_ddpm_small_variance():
    scheduler = diffusers.DDPMScheduler(**BETAS, clip_sample=False, variance_type="fixed_small")
    scheduler.set_timesteps(timesteps=STEPS)
    agree(ours(DDPMSampler(variance="beta_tilde"), STEPS), theirs(scheduler))


def test_ddpm_large_variance():
    # Their last step adds noise where the step before the clean end is not the first of the chain: stop before it.
    scheduler = diffusers.DDPMScheduler(**BETAS, clip_sample=False, variance_type="fixed_large")
    scheduler.set_timesteps(timesteps=STEPS)
    agree(ours(DDPMSampler(variance="beta"), STEPS, to_clean=False), theirs(scheduler, last=1))


def test_ddpm_catches_the_other_variance():
    scheduler = diffusers.DDPMScheduler(**BETAS, clip_sample=False, variance_type="fixed_small")
    scheduler.set_timesteps(timesteps=STEPS)
    with pytest.raises(AssertionError):
        agree(ours(DDPMSampler(variance="beta"), STEPS), theirs(scheduler))


def test_ddim():
    scheduler = diffusers.DDIMScheduler(**BETAS, clip_sample=False, set_alpha_to_one=True)
    scheduler.set_timesteps(10)
    steps = scheduler.timesteps.tolist()
    assert steps == list(range(900, -1, -100))
    agree(ours(DDIMSampler(), steps), theirs(scheduler))


def test_dpm_solver_multistep():
    scheduler = diffusers.DPMSolverMultistepScheduler(
        **BETAS, algorithm_type="dpmsolver++", solver_order=2, solver_type="midpoint", final_sigmas_type="zero"
    )
    scheduler.set_timesteps(timesteps=STEPS)
    agree(ours(DPMSolverPP2MSampler(), STEPS), theirs(scheduler))


def test_tables():
    for kind, betas in (("fixed_small", None), ("fixed_large", LinearSchedule().betas(1000))):
        scheduler = diffusers.DDPMScheduler(**BETAS, variance_type=kind)
        torch.testing.assert_close(
            scheduler.alphas_cumprod.double(), LinearSchedule().alpha_bars(1000), rtol=2e-5, atol=0
        )
        if betas is not None:
            torch.testing.assert_close(scheduler.betas.double(), betas, rtol=1e-6, atol=0)
