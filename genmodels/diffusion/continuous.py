"""The bound in continuous time: the limit of infinitely many steps, as an objective and as a likelihood.

    -log p(x) <= L = KL(q(x_1|x) || N(0, I)) - 1/2 int lambda'(t) E |eps - eps_hat|^2 dt - E log p(x | x_{t_0})

The integral runs over [t_0, 1] and depends on the schedule through its end points alone (Kingma et al. 2021,
equations 17 and 18).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genmodels.core.errors import InputError
from genmodels.core.random import Generator, KeyedGenerator, normal, uniform
from genmodels.core.tensors import event_size, event_sum
from genmodels.diffusion.bound import ElboTerms, check_grid, prior_term, reconstruction_term, rows_for
from genmodels.diffusion.decoder import Decoder
from genmodels.diffusion.guidance import require_unaltered
from genmodels.diffusion.objectives import Objective, ObjectiveOutput, is_learned, predict, twice
from genmodels.diffusion.process import kernel_variance, q_sample

#: Where the path of a schedule without signal at its end is cut: beyond, an example costs less than 1e-8 nats.
_NOISIEST = -20.0


def rate_term(
    denoiser, output: Tensor, x0: Tensor, noise: Tensor, log_snr: Tensor, rate: Tensor, mask: Tensor | None = None
) -> Tensor:
    """(B,) -1/2 lambda'(t) |eps - eps_hat|^2, from the error of the network's own output; float64.

    |eps - eps_hat|^2 = SNR |x_0 - x0_hat|^2 = SNR loss_weight |target - output|^2. Shapes: output, x0 and noise
    (B, *event), log_snr and rate (B,).
    """
    kind = denoiser.parameterisation
    error = kind.target(x0.double(), noise.double(), log_snr) - output.double()
    weight = torch.exp(log_snr) * kind.loss_weight(log_snr)
    return -rate / 2 * weight * event_sum(error.square(), mask)


class Continuous(Objective):
    """L_infinity: an unbiased estimate of the bound in continuous time, prior + diffusion at one t + reconstruction.

    A learned schedule is trained with it, to lower the variance of the estimate: its parameters get the gradient of the
    mean of squared diffusion terms in bits/dim, everything else that of the mean (Kingma et al. 2021, appendix I.2).
    Both come from one backward pass.

    Arguments:
        decoder: p(x_0 | x_{t_0}).
        times: only the first, t_0, matters.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, Gaussian, GaussianDenoiser, ddpm_times
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(3), 1.0)
        >>> objective = Continuous(Gaussian(), ddpm_times(10))
        >>> list(objective(oracle, torch.zeros(4, 3), None, torch.Generator().manual_seed(0)).parts)
        ['prior_nats', 'diffusion_nats', 'reconstruction_nats']
    """

    in_nats = True

    def check(self, denoiser) -> None:
        """Raise where a variance would not be trained."""
        super().check(denoiser)
        self.need_bound()
        if getattr(denoiser, "learned_variance", False):
            raise InputError("in continuous time the variance of the kernels plays no part: choose beta or beta_tilde")

    def at_times(
        self, denoiser, x0: Tensor, cond: Tensor | None, generator: Generator, u: Tensor, weight: Tensor,
        mask: Tensor | None,
    ) -> ObjectiveOutput:
        schedule, first = denoiser.schedule, float(self.times[0])
        ends = check_grid(schedule, torch.tensor([first, 1.0], dtype=torch.float64)).to(x0.device).detach()
        t = first + (1 - first) * u
        log_snr, rate = schedule.log_snr(t), schedule.log_snr_rate(t)

        both = torch.cat([log_snr, ends[:1].expand(len(x0))])
        noise = [normal(x0.shape, generator, dtype=x0.dtype, device=x0.device) for _ in range(2)]
        x = q_sample(twice(x0), both, torch.cat(noise))
        prediction = predict(denoiser, x, both, twice(cond), twice(mask), generator, copies=2)
        output, x0_hat = prediction.output[: len(x0)], prediction.x0[len(x0) :]

        integrand = (1 - first) * rate_term(denoiser, output, x0, noise[0], log_snr, rate, mask)
        diffusion = weight * integrand
        if is_learned(schedule) and diffusion.requires_grad:
            squared = 2 * diffusion.detach() / (math.log(2) * event_size(x0, mask))
            for value in (log_snr, rate):  # d(L^2) = 2 L dL
                value.register_hook(lambda gradient: gradient * squared)
        parts = {
            "prior_nats": prior_term(x0, ends[1], mask),
            "diffusion_nats": diffusion,
            "reconstruction_nats": reconstruction_term(
                x0, x[len(x0) :], x0_hat, ends[:1], self.decoder, kernel_variance("beta", None), mask
            ),
        }
        per_example = sum(parts.values())
        return ObjectiveOutput(per_example.mean(), per_example, t, parts, u, integrand.detach())


@torch.no_grad()
def continuous_elbo(
    denoiser,
    x0: Tensor,
    decoder: Decoder,
    first: float,
    generator: Generator,
    *,
    cond: Tensor | None = None,
    mask: Tensor | None = None,
    draws: int = 50,
    replicates: int = 2,
    chunk: int | None = None,
) -> ElboTerms:
    """The bound of each example in continuous time: unbiased, from one noise level in each of `draws` strata.

        1/2 int E SNR |x_0 - x0_hat|^2 d lambda,   lambda from the log-SNR at t_0 to that at t = 1

    The strata are equally wide in log-SNR, where an optimal denoiser costs about the same everywhere: far less noise
    than strata in time. They are drawn from `replicates` times, whose spread gives the standard error. The terms of the
    result are the integrals over the strata. A schedule that ends without signal is followed to log-SNR -20, and has
    its prior there.

    Arguments:
        decoder: p(x_0 | x_{t_0}).
        first: t_0, where the reconstruction is read.
        generator: keyed over the items of x0.
        chunk: most rows in one network call; by default as many as suit the device.

    Errors: no noise at t_0, or fewer than two replicates.

    Example:
        >>> from genmodels.diffusion import Gaussian, GaussianDenoiser, LinearLogSnrSchedule
        >>> oracle = GaussianDenoiser(LinearLogSnrSchedule(), torch.zeros(2), 1.0)
        >>> terms = continuous_elbo(oracle, torch.zeros(3, 2), Gaussian(), 0.0, KeyedGenerator(0, torch.arange(3)))
        >>> terms.diffusion.shape, terms.stderr.shape
        (torch.Size([3, 50]), torch.Size([3]))
    """
    if draws < 1 or replicates < 2:
        raise InputError(f"draws = {draws} must be at least 1, and replicates = {replicates} at least 2")
    require_unaltered(denoiser)
    n = len(x0)
    ends = check_grid(denoiser.schedule, torch.tensor([first, 1.0], dtype=torch.float64)).to(x0.device)
    keyed = isinstance(generator, KeyedGenerator)
    ends = ends.clamp(min=_NOISIEST)
    u = uniform((n, replicates, draws), generator.child("strata") if keyed else generator, dtype=torch.float64)
    share = ((torch.arange(draws, device=u.device) + u) / draws).to(x0.device).flatten(1)
    rows = rows_for(x0) if chunk is None else chunk

    # Column 0 is the reconstruction at t_0, the others are the replicates' strata.
    levels = torch.cat([ends[:1].expand(n, 1), ends[0] + (ends[1] - ends[0]) * share], 1)
    values = torch.zeros_like(levels)
    every = torch.cartesian_prod(torch.arange(levels.shape[1]), torch.arange(n))
    for column, item in (part.unbind(1) for part in every.split(rows)):
        source = generator.rows(item.to(generator.index.device)).at(column) if keyed else generator
        noise = normal((len(item), *x0.shape[1:]), source, dtype=x0.dtype, device=x0.device)
        log_snr, data = levels[item, column], x0[item]
        cond_here, valid = (None if value is None else value[item] for value in (cond, mask))
        x = q_sample(data, log_snr, noise)
        prediction = denoiser.at_log_snr(x, log_snr, cond_here, valid)
        rate = (ends[1] - ends[0]).expand(len(data))
        terms = rate_term(denoiser, prediction.output, data, noise, log_snr, rate, valid)
        clean = column == 0
        if bool(clean.any()):
            fixed = kernel_variance("beta", None)
            terms = torch.where(
                clean.to(terms.device),
                reconstruction_term(data, x, prediction.x0, ends[:1], decoder, fixed, valid),
                terms,
            )
        values[item, column] = terms
    drawn = values[:, 1:].view(n, replicates, draws) / draws
    stderr = drawn.sum(2).std(1, unbiased=True) / math.sqrt(replicates)
    middle = ends[0] + (ends[1] - ends[0]) * (torch.arange(draws, dtype=torch.float64, device=x0.device) + 0.5) / draws
    return ElboTerms(prior_term(x0, ends[1], mask), drawn.mean(1), values[:, 0], middle, stderr)
