"""Mutants in samplers and denoisers, each with the checks that must notice it."""

from __future__ import annotations

import torch

from genmodels.diffusion import (
    CosineSchedule,
    DDIMSampler,
    DDPMSampler,
    Denoiser,
    DPMSolverPP2MSampler,
    EulerSampler,
    HeunSampler,
    LinearPath,
    MixtureDenoiser,
    V,
)
from genmodels.diffusion.parameterisation import Prediction
from genmodels.nn import MLPDenoiser
from genmodels.verification.diffusion import check_denoiser, check_sampler
from tests.mutants.densities import Mutant

# ---- samplers ------------------------------------------------------------------------------------------------------


class NoisyEnd(DDPMSampler):
    """Noise at the last step too."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        out, memory = super().__call__(denoiser, x, t, s, memory, generator, cond, temperature)
        if float(s) == 0:
            _, sigma = denoiser.schedule.alpha_sigma(t)
            out = out + temperature * sigma * torch.ones_like(out)
        return out, memory


class GlobalNoise(EulerSampler):
    """Noise from the global generator, of which no seed is kept."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        out, memory = super().__call__(denoiser, x, t, s, memory, generator, cond, temperature)
        return out + (1e-4 * torch.randn_like(out) if float(s) > 0 else 0), memory


class Leaning(DDIMSampler):
    """Every sample is drawn to the first of its batch."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        out, memory = super().__call__(denoiser, x, t, s, memory, generator, cond, temperature)
        return (out + 1e-3 * (x[:1] - x) if float(s) > 0 else out), memory


class InPlace(EulerSampler):
    """The step overwrites the x it was given."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        out, memory = super().__call__(denoiser, x, t, s, memory, generator, cond, temperature)
        return x.copy_(out), memory


class Narrow(DDPMSampler):
    """Seven tenths of the noise."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        mean, memory = super().__call__(denoiser, x, t, s, memory, generator, cond, 0.0)
        out, _ = super().__call__(denoiser, x, t, s, memory, generator, cond, temperature)
        return mean + 0.7 * (out - mean), memory


class Hot(DDPMSampler):
    """The temperature is forgotten."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        return super().__call__(denoiser, x, t, s, memory, generator, cond, 1.0)


class HalfStep(HeunSampler):
    """Each step goes along the slope half as far as it should."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        out, memory = super().__call__(denoiser, x, t, s, memory, generator, cond, temperature)
        if float(s) == 0:
            return out, memory
        alpha_t, _ = denoiser.schedule.alpha_sigma(t)
        alpha_s, _ = denoiser.schedule.alpha_sigma(s)
        return ((out + alpha_s / alpha_t * x) / 2), memory


class Always32(DPMSolverPP2MSampler):
    """Arithmetic in float32, whatever was asked."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        return super().__call__(denoiser, x.float(), t, s, memory, generator, cond, temperature)


class Unconditional(HeunSampler):
    """The condition is left out."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        return super().__call__(denoiser, x, t, s, memory, generator, None, temperature)


class OfAnother(HeunSampler):
    """Each sample is given the condition of another."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        return super().__call__(denoiser, x, t, s, memory, generator, None if cond is None else cond.flip(0),
                                temperature)


class Squared(DDPMSampler):
    """The noise is multiplied by the square of the temperature."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        return super().__call__(denoiser, x, t, s, memory, generator, cond, temperature**2)


# ---- denoisers -----------------------------------------------------------------------------------------------------


def _prediction(x, log_snr, output, x0, eps, v, score=None) -> Prediction:
    sigma = torch.sigmoid(-log_snr).sqrt().view(-1, *[1] * (x.dim() - 1)).to(x)
    return Prediction(output, sigma, x0=lambda: x0, eps=lambda: eps, v=lambda: v, score=score)


class Broken(Denoiser):
    """A denoiser of points in the plane that predicts v, to break: `change(prediction, x, log_snr)`."""

    def __init__(self, change=lambda found, x, log_snr: found):
        super().__init__(MLPDenoiser((2,), hidden=8), CosineSchedule(), V())
        self.change = change

    def at_log_snr(self, x, log_snr, cond=None, mask=None, estimate=None):
        return self.change(super().at_log_snr(x, log_snr, cond, mask, estimate), x, log_snr)


def _flipped_noise(p, x, log_snr):
    return _prediction(x, log_snr, p.output, p.x0, -p.eps, p.v, score=lambda: p.score)


def _swapped_v(p, x, log_snr):
    return _prediction(x, log_snr, p.output, p.x0, p.eps, -p.v)


def _unscaled_score(p, x, log_snr):
    return _prediction(x, log_snr, p.output, p.x0, p.eps, p.v, score=lambda: -p.eps)


def _other_output(p, x, log_snr):
    return _prediction(x, log_snr, p.eps, p.x0, p.eps, p.v)


def _centred(p, x, log_snr):
    alpha = torch.sigmoid(log_snr).sqrt()[:, None].to(x)
    sigma = torch.sigmoid(-log_snr).sqrt()[:, None].to(x)
    x0 = p.x0 - p.x0.mean(0)
    eps = (x - alpha * x0) / sigma
    v = alpha * eps - sigma * x0
    return _prediction(x, log_snr, v, x0, eps, v)


def _undefined_at_one(p, x, log_snr):
    alpha = torch.sigmoid(log_snr).sqrt()[:, None].to(x)
    sigma = torch.sigmoid(-log_snr).sqrt()[:, None].to(x)
    alpha = torch.where(alpha < 1e-2, 0.0, alpha)
    x0 = torch.where(alpha > 0, (x - sigma * p.eps) / alpha, torch.nan)
    return _prediction(x, log_snr, p.output, x0, p.eps, p.v)


def _single(p, x, log_snr):
    return _prediction(x, log_snr, p.output.float(), p.x0, p.eps, p.v)


class Counting(Broken):
    """Moves x a little at every call."""

    def at_log_snr(self, x, log_snr, cond=None, mask=None, estimate=None):
        found = super().at_log_snr(x, log_snr, cond, mask, estimate)
        found.x0, found.eps, found.v, found.score  # noqa: B018 - each is computed when it is first read
        x.add_(1e-3)
        return found


class Straight(Broken):
    """The velocity along the straight path, on a path that is another."""

    def forward(self, x, t, cond=None, mask=None, estimate=None):
        return super().forward(x, t, cond, mask, estimate).along(LinearPath(), t)


class Rescaled(Broken):
    """A call at a time that sees another x than a call at a log-SNR."""

    def forward(self, x, t, cond=None, mask=None, estimate=None):
        found = super().forward(0.9 * x, t, cond, mask, estimate)
        log_snr = self.schedule.log_snr(t)
        alpha, sigma = (torch.sigmoid(sign * log_snr).sqrt()[:, None].to(x) for sign in (1, -1))
        eps = (x - alpha * found.x0) / sigma
        v = alpha * eps - sigma * found.x0
        return _prediction(x, log_snr, v, found.x0, eps, v).along(self.schedule, t)


class OfClasses(Denoiser):
    """A sound denoiser of three classes in the plane."""

    def __init__(self):
        super().__init__(MLPDenoiser((2,), 3, hidden=8), CosineSchedule(), V())


class ClassDropped(OfClasses):
    """Every class is taken for the first."""

    def at_log_snr(self, x, log_snr, cond=None, mask=None, estimate=None):
        return super().at_log_snr(x, log_snr, cond * 0, mask, estimate)


class NoisierInTraining(Broken):
    """In training another noise level is seen."""

    def at_log_snr(self, x, log_snr, cond=None, mask=None, estimate=None):
        found = super().at_log_snr(x, log_snr + 1 if self.training else log_snr, cond, mask, estimate)
        alpha, sigma = (torch.sigmoid(sign * log_snr).sqrt()[:, None].to(x) for sign in (1, -1))
        eps = (x - alpha * found.x0) / sigma
        v = alpha * eps - sigma * found.x0
        return _prediction(x, log_snr, v, found.x0, eps, v)


class DetachedInTraining(Broken):
    """In training x0 teaches nothing."""

    def at_log_snr(self, x, log_snr, cond=None, mask=None, estimate=None):
        found = super().at_log_snr(x, log_snr, cond, mask, estimate)
        x0 = found.x0.detach() if self.training else found.x0
        return _prediction(x, log_snr, found.output, x0, found.eps, found.v)


class Idle(Broken):
    """A parameter that nothing depends on."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(3))


# ---- velocities ----------------------------------------------------------------------------------------------------


class EqualShares(MixtureDenoiser):
    """The velocity of a mixture with the shares of its weights, whatever x is."""

    def _moments(self, x, log_snr):
        joint, offset, variance, alpha = self._parts(x, log_snr)
        share = self.log_weights.exp().view(-1, *[1] * (x.dim() - 1))
        white = offset / variance
        return (share * (self.means + alpha * self.variances * white)).sum(1), -(share * white).sum(1)


def _sampler(make, *failing: str) -> Mutant:
    return Mutant(make, check_sampler, frozenset(failing))


def _denoiser(change, *failing: str) -> Mutant:
    make = change if isinstance(change, type) else lambda: Broken(change)
    return Mutant(make, lambda made: check_denoiser(made, (2,)), frozenset(failing))


def _of_classes(make, *failing: str) -> Mutant:
    return Mutant(make, lambda made: check_denoiser(made, (2,), cond=torch.arange(5) % 3), frozenset(failing))


#: A sound denoiser, and one mutant after the other; tests/diffusion/table.py has the sound samplers.
MUTANTS: dict[str, Mutant] = {
    "noise at the end": _sampler(NoisyEnd, "clean end", "point mass"),
    "noise without a seed": _sampler(GlobalNoise, "pure step", "rows independent", "temperature"),
    "samples lean on the first": _sampler(Leaning, "rows independent", "trajectory", "spread"),
    "x overwritten": _sampler(InPlace, "pure step"),
    "too little noise": _sampler(Narrow, "spread"),
    "temperature forgotten": _sampler(Hot, "temperature"),
    "half a step": _sampler(HalfStep, "no signal", "trajectory", "spread"),
    "float32 always": _sampler(Always32, "dtype", "point mass"),
    "condition left out": _sampler(Unconditional, "condition"),
    "condition of another sample": _sampler(OfAnother, "condition"),
    "temperature squared": _sampler(Squared, "temperature"),
    "nothing (denoiser)": _denoiser(Broken),
    "nothing (denoiser of classes)": _of_classes(OfClasses),
    "class dropped": _of_classes(ClassDropped, "condition"),
    "another noise level in training": _denoiser(NoisierInTraining, "training mode"),
    "x0 detached in training": _denoiser(DetachedInTraining, "training mode"),
    "sign of the noise": _denoiser(_flipped_noise, "signal and noise", "v", "score", "training target"),
    "sign of v": _denoiser(_swapped_v, "v"),
    "velocity of another path (denoiser)": _denoiser(Straight, "velocity of the path"),
    "score without sigma": _denoiser(_unscaled_score, "score"),
    "output of another meaning": _denoiser(_other_output, "training target"),
    "mean of the batch (denoiser)": _denoiser(_centred, "rows independent"),
    "no estimate at t = 1": _denoiser(_undefined_at_one, "both ends"),
    "output in float32": _denoiser(_single, "shape and dtype", "training target"),
    "x moved": _denoiser(Counting, "nothing modified", "signal and noise", "rows independent"),
    "calls that see another x": _denoiser(Rescaled, "log-SNR"),
    "dead parameter of a denoiser": _denoiser(Idle, "gradients"),
}
