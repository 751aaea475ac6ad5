"""Step for step the same as diffusers, with one exact denoiser in both; skipped where diffusers is not installed."""

from __future__ import annotations

import pytest
import torch

from genmodels.diffusion import (
    DDIMSampler,
    DDPMSampler,
    DPMSolverPP2MSampler,
    EulerSampler,
    GaussianDenoiser,
    HeunSampler,
    LinearSchedule,
    UniPCSampler,
    sample,
    step_to_time,
)

diffusers = pytest.importorskip("diffusers", reason="parity needs diffusers (pip install -e '.[bench]')")

STEPS = [900, 700, 500, 300, 150, 50, 10]
TEN = [950, 850, 700, 550, 400, 300, 200, 100, 40, 5]
BETAS = {"num_train_timesteps": 1000, "beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02}
MEAN = torch.tensor([0.5, -0.3, 0.1, 0.9])


def exact_denoiser():
    return GaussianDenoiser(LinearSchedule(), MEAN, torch.tensor([0.25, 0.04, 1.0, 0.5]))


def start():
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def scheduler_of(name, **options):
    return getattr(diffusers, f"{name}Scheduler")(**BETAS, **options)


def theirs(scheduler, last=0):
    """x after each of their steps."""
    denoiser, x, generator, path = exact_denoiser(), start(), torch.Generator().manual_seed(1), []
    steps = scheduler.timesteps
    draws = isinstance(scheduler, diffusers.DDPMScheduler | diffusers.DDIMScheduler)
    for i in steps[: len(steps) - last]:
        eps = denoiser(x, step_to_time(i, 1000, zero_based=True).expand(8)).eps
        x = scheduler.step(eps, i, x, **({"generator": generator} if draws else {})).prev_sample
        path.append(x)
    return torch.stack(path)


def theirs_scaled(scheduler, calls):
    """The same for their schedulers that live on y = x/alpha, which make `calls` of theirs one step of ours."""
    denoiser, path, sigmas = exact_denoiser(), [], scheduler.sigmas
    y = start() * (1 + sigmas[0] ** 2).sqrt()
    for k, i in enumerate(scheduler.timesteps):
        eps = denoiser(scheduler.scale_model_input(y, i), step_to_time(i, 1000, zero_based=True).expand(8)).eps
        y = scheduler.step(eps, i, y).prev_sample
        if (k + 1) % calls == 0 or k + 1 == len(scheduler.timesteps):
            path.append(y / (1 + sigmas[k + 1] ** 2).sqrt())
    return torch.stack(path)


def ours(sampler, steps, to_clean=True):
    """x after each of our steps."""
    times = step_to_time(torch.tensor(steps), 1000, zero_based=True)
    times, path = torch.cat([times, torch.zeros(1, dtype=torch.float64)]) if to_clean else times, []
    sample(
        exact_denoiser(), (8, 4), times, sampler, torch.Generator().manual_seed(1), start=start(),
        callback=lambda i, x, x0: path.append(x),
    )  # fmt: skip
    return torch.stack(path)


def agree(a, b):
    assert a.shape == b.shape and (a - b).abs().max() < 1e-5


explicit = pytest.mark.parametrize("steps", [STEPS, TEN], ids=["seven", "ten"])


def explicitly(scheduler, steps):
    scheduler.set_timesteps(timesteps=steps)
    return scheduler


@explicit
def test_ddpm_small_variance(steps):
    scheduler = explicitly(scheduler_of("DDPM", clip_sample=False, variance_type="fixed_small"), steps)
    agree(ours(DDPMSampler(variance="beta_tilde"), steps), theirs(scheduler))


@explicit
def test_ddpm_large_variance(steps):
    # Their last step adds noise where the step before the clean end is not the first of the chain: stop before it.
    scheduler = explicitly(scheduler_of("DDPM", clip_sample=False, variance_type="fixed_large"), steps)
    agree(ours(DDPMSampler(variance="beta"), steps, to_clean=False), theirs(scheduler, last=1))


def test_ddpm_catches_the_other_variance():
    scheduler = explicitly(scheduler_of("DDPM", clip_sample=False, variance_type="fixed_small"), STEPS)
    with pytest.raises(AssertionError):
        agree(ours(DDPMSampler(variance="beta"), STEPS), theirs(scheduler))


def test_ddim():
    # It takes no timesteps and infers the step before: equal steps of T/N.
    scheduler = scheduler_of("DDIM", clip_sample=False, set_alpha_to_one=True)
    scheduler.set_timesteps(10)
    steps = scheduler.timesteps.tolist()
    assert steps == list(range(900, -1, -100))
    agree(ours(DDIMSampler(), steps), theirs(scheduler))


@explicit
def test_dpm_solver_multistep(steps):
    options = {"algorithm_type": "dpmsolver++", "solver_type": "midpoint", "final_sigmas_type": "zero"}
    scheduler = explicitly(scheduler_of("DPMSolverMultistep", solver_order=2, **options), steps)
    agree(ours(DPMSolverPP2MSampler(), steps), theirs(scheduler))


def unipc(order, ours_order=None):
    # It takes no timesteps either. Their last step but one has order 2 where the others have 3: stop before it.
    scheduler = scheduler_of("UniPCMultistep", solver_order=order, solver_type="bh2", final_sigmas_type="zero")
    scheduler.set_timesteps(10)
    last = 2 if order == 3 else 0
    path = ours(UniPCSampler(order=ours_order or order), scheduler.timesteps.tolist())
    agree(path[: len(path) - last], theirs(scheduler, last))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_unipc(order):
    unipc(order)


def test_unipc_catches_the_other_order():
    with pytest.raises(AssertionError):
        unipc(2, ours_order=3)


@explicit
def test_euler(steps):
    agree(ours(EulerSampler(), steps), theirs_scaled(explicitly(scheduler_of("EulerDiscrete"), steps), 1))


@explicit
def test_heun(steps):
    agree(ours(HeunSampler(), steps), theirs_scaled(explicitly(scheduler_of("HeunDiscrete"), steps), 2))


def test_heun_catches_euler():
    with pytest.raises(AssertionError):
        agree(ours(EulerSampler(), STEPS), theirs_scaled(explicitly(scheduler_of("HeunDiscrete"), STEPS), 2))


def test_tables():
    for kind, betas in (("fixed_small", None), ("fixed_large", LinearSchedule().betas(1000))):
        scheduler = scheduler_of("DDPM", variance_type=kind)
        torch.testing.assert_close(
            scheduler.alphas_cumprod.double(), LinearSchedule().alpha_bars(1000), rtol=2e-5, atol=0
        )
        if betas is not None:
            torch.testing.assert_close(scheduler.betas.double(), betas, rtol=1e-6, atol=0)
