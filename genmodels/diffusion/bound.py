"""The evidence lower bound, term by term, and its limit of infinitely many steps.

On a grid of times t_0 < ... < t_K the reconstruction is at t_0, the k-th KL term goes from t_k to t_{k-1}, and the
prior is at t_K. DDPM with T steps has t_0 = 1/T and K = T - 1 (Ho et al. 2020, equation 5);
VDM with T steps has t_0 = 0 and K = T (Kingma et al. 2021, equation 11). In the limit

    -log p(x) <= L = KL(q(x_1|x) || N(0, I)) - 1/2 int lambda'(t) E |eps - eps_hat|^2 dt - E log p(x | x_{t_0})

where the integral over [t_0, 1] depends on the schedule through its end points alone (equations 17 and 18).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from genmodels.core.errors import InputError, at_least
from genmodels.core.random import Generator, KeyedGenerator, child, normal, uniform
from genmodels.core.tensors import event_sum, one_each, rows_for
from genmodels.diffusion.decoder import Decoder, Gaussian
from genmodels.diffusion.guidance import require_unaltered
from genmodels.diffusion.ode import standard_normal
from genmodels.diffusion.path import (
    NOISIEST,
    Path,
    Variance,
    alpha_sigma,
    alpha_ts,
    expand,
    kernel_variance,
    posterior,
    q_sample,
    sigma2_ts,
    variance_function,
)
from genmodels.diffusion.schedule import step_to_time


def prior_term(x0: Tensor, log_snr: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B,) KL(q(x_T | x_0) || N(0, I)): per scalar 1/2 (alpha^2 x^2 + sigma^2 - 1 - log sigma^2).

    Example:
        >>> prior_term(torch.ones(1, 1), torch.tensor(0.0, dtype=torch.float64))  # 1/2 log 2
        tensor([0.3466], dtype=torch.float64)
    """
    log_snr = log_snr.to(x0.device, torch.float64)
    # sigma^2 - 1 = -alpha^2, and log sigma^2 = logsigmoid(-lambda) keeps its digits where alpha^2 is tiny
    alpha2, log_sigma2 = torch.sigmoid(log_snr), torch.nn.functional.logsigmoid(-log_snr)
    per_scalar = (expand(alpha2, x0.double()) * (x0.double().square() - 1) - expand(log_sigma2, x0.double())) / 2
    return event_sum(per_scalar, mask)


def diffusion_term(
    x0: Tensor, x0_hat: Tensor, log_snr_s: Tensor, log_snr_t: Tensor, variance: Variance, mask: Tensor | None = None
) -> Tensor:
    """(B,) KL(q(x_s | x_t, x_0) || p(x_s | x_t)) where x_0 was predicted as x0_hat from x_t.

        per scalar 1/2 (v/s2 - 1 - log(v/s2) + c_0^2 (x_0 - x0_hat)^2 / s2),   s2 the model variance

    With s2 = v this is 1/2 (SNR_s - SNR_t) (x_0 - x0_hat)^2. Shapes: x0 and x0_hat (B, *event), log-SNRs (B,), s2 (B,)
    or (B, *event).
    """
    c_0, _, v = posterior(log_snr_s, log_snr_t)
    error = x0.double() - x0_hat.double()
    c_0, v, s2 = (per_scalar(value, error) for value in (c_0, v, variance(log_snr_s, log_snr_t)))
    excess = v / s2 - 1
    return event_sum(excess - torch.log1p(excess) + (c_0 * error).square() / s2, mask) / 2


def reconstruction_term(
    x0: Tensor, x: Tensor, x0_hat: Tensor, log_snr: Tensor, decoder: Decoder, variance: Variance,
    mask: Tensor | None = None,
) -> Tensor:
    """(B,) -log p(x_0 | x_{t_0}), by a decoder that reads the noisy x = x_{t_0} or the estimate x0_hat."""
    mean, scale = decoder_input(decoder, x, x0_hat, log_snr, variance)
    return event_sum(-decoder.log_prob(x0.double(), mean, scale), mask)


def bound_terms(
    k: Tensor, x0: Tensor, x: Tensor, x0_hat: Tensor, nu: Tensor | None, log_snr: Tensor, decoder: Decoder,
    variance: Variance | Literal["learned"], mask: Tensor | None = None,
) -> Tensor:
    """(B,) term k (B,) of each example, at its x = x_{t_k}: the KL term, or the reconstruction for k = 0.

    log_snr (K+1,) is the log-SNR of the grid, nu as the network gives it.
    """
    terms = torch.zeros(len(x0), dtype=torch.float64, device=x0.device)
    for rows in (k == 0, k > 0):
        if not bool(rows.any()):
            continue
        step, valid = k[rows], None if mask is None else mask[rows]
        s2 = kernel_variance(variance, None if nu is None else nu[rows], log_snr[1])
        if step[0] == 0:
            found = reconstruction_term(x0[rows], x[rows], x0_hat[rows], log_snr[:1], decoder, s2, valid)
        else:
            found = diffusion_term(x0[rows], x0_hat[rows], log_snr[step - 1], log_snr[step], s2, valid)
        terms = terms.masked_scatter(rows, found)
    return terms


def decoder_input(
    decoder: Decoder, x: Tensor, x0_hat: Tensor, log_snr: Tensor, variance: Variance
) -> tuple[Tensor, Tensor]:
    """Mean and scale for a decoder: x/alpha and sigma/alpha if it `reads_noisy`, else x0_hat and the last kernel's."""
    if getattr(decoder, "reads_noisy", False):
        alpha, _ = alpha_sigma(log_snr.to(x.device))
        return x.double() / expand(alpha, x), expand(torch.exp(-0.5 * log_snr.to(x.device)), x)
    mean = x0_hat.double()
    # The kernel to the clean end: its standard deviation is sigma_t for both fixed variances.
    return mean, per_scalar(variance(torch.full_like(log_snr, torch.inf), log_snr).sqrt(), mean)


def per_scalar(value: Tensor, like: Tensor) -> Tensor:
    """A value per example, (B,) or (), or per scalar, (B, *event), shaped to multiply `like`."""
    return value if value.dim() == like.dim() else expand(value, like)


def ddpm_times(num_steps: int) -> Tensor:
    """(T,) the grid 1/T, 2/T, ..., 1.

    Example:
        >>> ddpm_times(4).tolist()
        [0.25, 0.5, 0.75, 1.0]
    """
    return step_to_time(torch.arange(1, num_steps + 1), num_steps)


def check_grid(schedule: Path, times: Tensor) -> Tensor:
    """The log-SNRs (K+1,) of a grid; raises unless it increases within [0, 1] and has noise at t_0."""
    if times.dim() != 1 or len(times) < 2 or bool((times.diff() <= 0).any()) or times[0] < 0 or times[-1] > 1:
        raise InputError("the times of a bound must increase within [0, 1], at least two of them")
    log_snr = schedule.log_snr(times).to(times.device)
    if bool(log_snr[0].isinf()):
        raise InputError("without noise at the first time the negative ELBO is infinite: start at 1/T (ddpm_times)")
    return log_snr


@dataclass
class ElboTerms:
    """The negative ELBO of each example in nats: -log p(x_0) <= total = prior + diffusion.sum(1) + reconstruction.

    Fields, float64: `prior (B,)`; `diffusion (B, K)`, or (B, S) sums of S strata; `reconstruction (B,)`; `log_snr (K,)`
    or (S,), the log-SNR at t_k of each term (the mean over each stratum); `stderr (B,)`, the standard error of the sum
    over the replicates. It is None when all terms were computed, or strata hold fewer than four on average: most
    replicates then draw the same terms, and share their noise.
    """

    prior: Tensor
    diffusion: Tensor
    reconstruction: Tensor
    log_snr: Tensor
    stderr: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """(B,) L, an upper bound of -log p(x_0)."""
        return self.prior + self.diffusion.sum(1) + self.reconstruction

    @property
    def nats(self) -> Tensor:
        """(B,) -L, a lower bound of log p(x_0)."""
        return -self.total

    @property
    def parts(self) -> dict[str, Tensor]:
        """The summands of L by name, (B,) each."""
        return {"prior": self.prior, "diffusion": self.diffusion.sum(1), "reconstruction": self.reconstruction}


@torch.no_grad()
def elbo(
    denoiser,
    x0: Tensor,
    decoder: Decoder,
    times: Tensor,
    generator: Generator,
    *,
    cond: Tensor | None = None,
    mask: Tensor | None = None,
    variance: Literal["beta", "beta_tilde", "learned"] | Variance = "beta",
    mode: Literal["all", "stratified"] = "all",
    draws: int = 50,
    replicates: int = 2,
    chunk: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ElboTerms:
    """The variational bound of each example; x0 is never clipped, the prior never dropped.

    `mode="all"` computes all K terms. `mode="stratified"` splits 1..K into `draws` strata and draws one term of each,
    for every example and each of `replicates` rounds: an unbiased estimate of "all", with the standard error over the
    rounds, each with a reconstruction of its own.

    Shapes: x0 (B, *event) in the model's units, times (K+1,) increasing, cond (B,) or (B, F), mask (B, 1, T).

    Arguments:
        decoder: p(x_0 | x_{t_0}).
        generator: keyed over the items of x0: the noise of term k comes from its step k (the reconstruction is step 0),
            so that neither batches nor `mode` change it. A torch.Generator is drawn from in order.
        variance: variance of the model's kernels.
        chunk: most rows in one network call; by default as many as suit the device.
        progress: called as progress(rows done, rows in all) after each network call.

    Errors: a grid that does not increase within [0, 1] or has no noise at t_0; more draws than terms.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, Gaussian, GaussianDenoiser
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> generator = KeyedGenerator(0, torch.arange(3), "evaluate")
        >>> terms = elbo(exact, torch.zeros(3, 2), Gaussian(), ddpm_times(10), generator)
        >>> terms.diffusion.shape, terms.total.shape
        (torch.Size([3, 9]), torch.Size([3]))
    """
    require_unaltered(denoiser)
    times = times.to(x0.device, torch.float64)
    log_snr = check_grid(denoiser.schedule, times)
    model_variance = variance_function(variance)
    num_terms = len(times) - 1
    if mode == "stratified":
        if not 1 <= draws <= num_terms:
            raise InputError(f"draws = {draws}: the ELBO has {num_terms} terms, use 1 <= draws <= {num_terms}")
        at_least(2, replicates=replicates)
        bounds = torch.arange(draws + 1) * num_terms // draws
        u, width = draws_in_strata((len(x0), replicates, draws), generator).cpu(), bounds.diff()
        chosen = bounds[:-1] + (u * width).long().clamp(max=width - 1)
    elif mode == "all":
        chosen = torch.arange(num_terms).expand(len(x0), 1, num_terms)
    else:
        raise InputError(f"mode = {mode!r}: choose all or stratified")

    # Column 0 is the reconstruction, column k the k-th KL term, and with an error the last ones are the reconstruction
    # in the further rounds; `wanted` marks the terms that some round needs.
    further, each = chosen.shape[1] - 1, num_terms / chosen.shape[2]
    spread, end = further > 0 and each >= 4, num_terms + 1
    wanted = torch.zeros(len(x0), end + further * spread, dtype=torch.bool)
    wanted.scatter_(1, chosen.flatten(1) + 1, True)
    wanted[:, [0, *range(end, wanted.shape[1])]] = True
    values = torch.zeros(wanted.shape, dtype=torch.float64, device=x0.device)
    done, in_all = 0, int(wanted.sum())
    for item, k, source in packed(wanted, generator, rows_for(x0) if chunk is None else chunk):
        item, column, data = item.to(x0.device), k.to(x0.device), x0[item]
        k = column.where(column < end, 0)
        x = q_sample(data, log_snr[k], normal(data.shape, source, dtype=x0.dtype, device=x0.device))
        cond_here, valid = (None if value is None else value[item] for value in (cond, mask))
        prediction = denoiser(x, times[k], cond_here, valid)
        values[item, column] = bound_terms(
            k, data, x, prediction.x0, prediction.nu, log_snr, decoder, model_variance, valid
        )
        done += len(item)
        if progress is not None:
            progress(done, in_all)

    diffusion, levels, stderr = values[:, 1:end], log_snr[1:], None
    reconstruction = torch.cat([values[:, :1], values[:, end:]], 1)
    if mode == "stratified":
        width = bounds.diff().to(values)
        drawn = diffusion[:, None].expand(-1, replicates, -1).gather(2, chosen.to(x0.device)) * width  # (B, R, S)
        if spread:
            # At most: of two rounds a share of 1 / each has the same term, and with it the same noise.
            shared = (1 + further / each) / (1 - 1 / each)
            stderr = (drawn.sum(2) + reconstruction).std(1, unbiased=True) * math.sqrt(shared / replicates)
        diffusion = drawn.mean(1)
        levels = torch.stack([part.mean() for part in levels.split(bounds.diff().tolist())])
    return ElboTerms(prior_term(x0, log_snr[-1], mask), diffusion, reconstruction.mean(1), levels, stderr)


@dataclass
class PathTerms:
    """The path form of the negative ELBO on one path: total = prior + transitions.sum(1), in nats.

    `prior (B,)` is -log p(x_T); `transitions (B, T)` are log q(x_i | x_{i-1}) - log p(x_{i-1} | x_i), i = 1..T.
    """

    prior: Tensor
    transitions: Tensor

    @property
    def total(self) -> Tensor:
        """(B,) L on this path; its mean over q is the negative ELBO."""
        return self.prior + self.transitions.sum(1)


@torch.no_grad()
def path_terms(
    denoiser, path: list[Tensor] | Tensor, times: Tensor, *, decoder: Decoder | None = None,
    prior: Callable[[Tensor], Tensor] | None = None, cond: Tensor | None = None,
    variance: Literal["beta", "beta_tilde", "learned"] | Variance = "beta",
) -> PathTerms:
    """The negative ELBO before any expectation is taken, on a given path x_0, ..., x_T.

        L = -log p(x_T) - sum_{i >= 1} log p(x_{i-1} | x_i) / q(x_i | x_{i-1})

    Arguments:
        path: T + 1 tensors (B, *event): the data, then x at each of the T `times` (increasing, as for `elbo`).
        decoder: p(x_0 | x_1), a density by default.
        prior: log p(x_T) (B, *event) -> (B,), standard normal by default.
        variance: variance of the model's kernels.

    Source: Ho et al. 2020, equation 3.

    Example:
        >>> from genmodels.diffusion import GaussianDenoiser, LinearLogSnrSchedule
        >>> denoiser = GaussianDenoiser(LinearLogSnrSchedule(), torch.zeros(1), 1.0)
        >>> path = torch.randn(4, 5, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # any path
        >>> times = torch.tensor([0.2, 0.6, 1.0])
        >>> terms = path_terms(denoiser, path, times, variance=denoiser.reverse_variance)
        >>> bool((terms.total + denoiser.log_prob(path[0])).abs().max() < 1e-9)
        True
    """
    require_unaltered(denoiser)
    decoder, gaussian = decoder or Gaussian(), Gaussian()
    times = times.to(path[0].device, torch.float64)
    log_snr = check_grid(denoiser.schedule, times)
    if len(path) != len(times) + 1:
        raise InputError(f"a path over {len(times)} times has {len(times) + 1} points, not {len(path)}")
    model_variance = variance_function(variance)
    last = path[-1].double()
    log_prior = standard_normal(last) if prior is None else one_each("prior", prior(path[-1]), last)
    transitions = []
    for i in range(1, len(path)):
        before, x = path[i - 1].double(), path[i].double()
        t = log_snr[i - 1 : i]
        s = log_snr[i - 2 : i - 1] if i > 1 else torch.full_like(t, torch.inf)
        prediction = denoiser(path[i], times[i - 1].expand(len(x)), cond)
        x0_hat, s2 = prediction.x0.double(), kernel_variance(model_variance, prediction.nu, log_snr[1])
        forward = _log_prob(gaussian, x, expand(alpha_ts(s, t), x) * before, sigma2_ts(s, t).sqrt())
        if i == 1:
            backward = _log_prob(decoder, before, *decoder_input(decoder, x, x0_hat, t, s2))
        else:
            c_0, c_t, _ = posterior(s, t)
            mean = expand(c_0, x) * x0_hat + expand(c_t, x) * x
            backward = _log_prob(gaussian, before, mean, s2(s, t).sqrt())
        transitions.append(forward - backward)
    return PathTerms(-log_prior.double(), torch.stack(transitions, 1))


def _log_prob(decoder: Decoder, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return event_sum(decoder.log_prob(x, mean.to(x), per_scalar(scale, x)))


def draws_in_strata(shape: tuple[int, int, int], generator: Generator, device: torch.device | None = None) -> Tensor:
    """(B, replicates, draws) float64, a uniform draw within each stratum."""
    return uniform(shape, child(generator, "strata"), dtype=torch.float64, device=device)


def packed(wanted: Tensor, generator: Generator, rows: int) -> Iterator[tuple[Tensor, Tensor, Generator]]:
    """(item, column, generator), at most `rows` rows each, of the wanted (item, column) in the order of the columns.

    The columns are the steps of a keyed generator.
    """
    at_least(1, chunk=rows)
    columns, items = wanted.T.nonzero(as_tuple=True)
    for column, item in zip(columns.split(int(rows)), items.split(int(rows)), strict=True):
        keyed = isinstance(generator, KeyedGenerator)
        yield item, column, generator.rows(item.to(generator.index.device)).at(column) if keyed else generator


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
    """The negative ELBO of each example in continuous time: unbiased, from one noise level in each of `draws` strata.

        1/2 int E SNR |x_0 - x0_hat|^2 d lambda,   lambda from the log-SNR at t = 1 up to that at t_0

    The strata are equally wide in log-SNR, where the integrand of an optimal denoiser varies little: far less noise
    than with strata in time. The standard error is over `replicates` rounds of draws. The terms of the result are the
    integrals over the strata. A schedule that ends without signal is cut at log-SNR -20, where its prior is taken.

    Arguments:
        decoder: p(x_0 | x_{t_0}).
        first: t_0, where the reconstruction is read.
        generator: keyed over the items of x0.
        chunk: most rows in one network call; by default as many as suit the device.

    Errors: no noise at t_0, or fewer than two replicates.

    Example:
        >>> from genmodels.diffusion import Gaussian, GaussianDenoiser, LinearLogSnrSchedule
        >>> exact = GaussianDenoiser(LinearLogSnrSchedule(), torch.zeros(2), 1.0)
        >>> terms = continuous_elbo(exact, torch.zeros(3, 2), Gaussian(), 0.0, KeyedGenerator(0, torch.arange(3)))
        >>> terms.diffusion.shape, terms.stderr.shape
        (torch.Size([3, 50]), torch.Size([3]))
    """
    at_least(1, draws=draws)
    at_least(2, replicates=replicates)
    require_unaltered(denoiser)
    n = len(x0)
    ends = check_grid(denoiser.schedule, torch.tensor([first, 1.0], dtype=torch.float64)).to(x0.device)
    ends = ends.clamp(min=NOISIEST)
    span = ends[1] - ends[0]
    strata = torch.arange(draws, dtype=torch.float64, device=x0.device)
    share = ((strata + draws_in_strata((n, replicates, draws), generator, x0.device)) / draws).flatten(1)

    # The first column and the last ones are the replicates' reconstructions at t_0, the others their strata.
    levels = torch.cat([ends[:1].expand(n, 1), ends[0] + span * share, ends[:1].expand(n, replicates - 1)], 1)
    values = torch.zeros_like(levels)
    every = torch.ones(levels.shape, dtype=torch.bool)
    for item, column, source in packed(every, generator, rows_for(x0) if chunk is None else chunk):
        log_snr, data = levels[item, column], x0[item]
        noise = normal(data.shape, source, dtype=x0.dtype, device=x0.device)
        cond_here, valid = (None if value is None else value[item] for value in (cond, mask))
        x = q_sample(data, log_snr, noise)
        prediction = denoiser.at_log_snr(x, log_snr, cond_here, valid)
        terms = rate_term(denoiser, prediction.output, data, noise, log_snr, span.expand(len(data)), valid)
        clean = (column == 0) | (column > share.shape[1])
        if bool(clean.any()):
            fixed = kernel_variance("beta", None)
            reconstruction = reconstruction_term(data, x, prediction.x0, ends[:1], decoder, fixed, valid)
            terms = torch.where(clean.to(terms.device), reconstruction, terms)
        values[item, column] = terms
    strata_end = 1 + share.shape[1]
    drawn = values[:, 1:strata_end].view(n, replicates, draws) / draws
    reconstruction = torch.cat([values[:, :1], values[:, strata_end:]], 1)
    stderr = (drawn.sum(2) + reconstruction).std(1, unbiased=True) / math.sqrt(replicates)
    middle = ends[0] + span * (strata + 0.5) / draws
    return ElboTerms(prior_term(x0, ends[1], mask), drawn.mean(1), reconstruction.mean(1), middle, stderr)
