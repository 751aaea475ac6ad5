"""Checks of denoisers and of diffusion samplers, the latter on a Gaussian with its closed-form solution."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    CosineSchedule,
    GaussianDenoiser,
    LinearSchedule,
    rescale_zero_terminal,
    sample,
    uniform_log_snr,
    uniform_t,
)
from genmodels.diffusion.parameterisation import Prediction
from genmodels.diffusion.path import alpha_sigma, expand
from genmodels.diffusion.sampling import Memory
from genmodels.verification.check import CheckSet, Measured, NotApplicable, Report, largest
from genmodels.verification.densities import changes, errors, without_gradient
from genmodels.verification.maps import relative, worst
from genmodels.verification.subject import cast, device_of, perturb, rolled, slopes_of, training_twin

DENOISER_CHECKS = CheckSet()
_VIEWS = ("x0", "eps", "v", "score")


@dataclass(frozen=True)
class DenoiserSubject:
    """A denoiser in float64, with noisy points x (B, *event), times t (B,), and conditions."""

    denoiser: nn.Module
    x: Tensor
    t: Tensor
    cond: Tensor | None

    def predict(self, rows: slice = slice(None)) -> Prediction:
        """The prediction for some rows."""
        cond = None if self.cond is None else self.cond[rows]
        return self.denoiser(self.x[rows], self.t[rows], cond)

    def alpha_sigma(self) -> tuple[Tensor, Tensor]:
        """alpha and sigma at t, shaped to multiply x."""
        with torch.no_grad():
            alpha, sigma = alpha_sigma(self.denoiser.schedule.log_snr(self.t))
        return expand(alpha, self.x), expand(sigma, self.x)


def check_denoiser(denoiser: nn.Module, shape: Sequence[int], *, cond: Tensor | None = None, seed: int = 0) -> Report:
    """The result of every check of a denoiser, on a copy in float64 whose parameters are moved at random.

    Arguments:
        denoiser: has a `schedule`, and is called as `denoiser(x, t, cond) -> Prediction`.
        shape: event shape of x.
        cond: (5,) or (5, ...) conditions, None for none.
        seed: of points, times and parameters.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, Denoiser, V
        >>> from genmodels.nn import MLPDenoiser
        >>> check_denoiser(Denoiser(MLPDenoiser((2,)), CosineSchedule(), V()), (2,)).passed
        True
    """
    generator = torch.Generator().manual_seed(seed)
    twin = copy.deepcopy(denoiser).double().eval()
    perturb(twin, generator)  # parameters that start at zero hide errors
    rows, device = 5 if cond is None else len(cond), device_of(denoiser)
    if rows < 2:
        raise ValueError(f"at least two conditions are needed to tell whether rows are independent, got {rows}")
    cond = None if cond is None else cast(cond, torch.float64).to(device)
    x = torch.randn(rows, *shape, generator=generator, dtype=torch.float64).to(device)
    t = torch.linspace(0.15, 0.85, rows, dtype=torch.float64, device=device)
    subject = DenoiserSubject(twin, x, t, cond)
    return Report(f"{type(denoiser).__name__}, a denoiser", tuple(DENOISER_CHECKS.run(subject)))


@DENOISER_CHECKS.add("shape and dtype", 0.0, "every view has the shape of x and its dtype")
@torch.no_grad()
def shape(s: DenoiserSubject) -> Measured:
    """x0, eps, v, score and output; names the first that differs from x."""
    found = s.predict()
    for view in (*_VIEWS, "output"):
        value = getattr(found, view)
        if value.shape != s.x.shape or value.dtype != s.x.dtype:
            return Measured(math.inf, f"{view}: {tuple(value.shape)} {value.dtype} for {tuple(s.x.shape)} {s.x.dtype}")
    return Measured(0.0)


def _identity(s: DenoiserSubject, sides: Callable[[Prediction, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Measured:
    with torch.no_grad():
        left, right = sides(s.predict(), *s.alpha_sigma())
    error = errors(left, right).flatten(1).amax(1)
    return Measured(float(error.max()), f"at t = {float(s.t[int(error.argmax())]):.2f}")


@DENOISER_CHECKS.add("signal and noise", 1e-9, "x = alpha x0 + sigma eps")
def signal_and_noise(s: DenoiserSubject) -> Measured:
    """The largest error relative to 1 + |x|, and the time where it is."""
    return _identity(s, lambda p, alpha, sigma: (alpha * p.x0 + sigma * p.eps, s.x))


@DENOISER_CHECKS.add("v", 1e-9, "v = alpha eps - sigma x0")
def velocity(s: DenoiserSubject) -> Measured:
    """The largest error relative to 1 + |v|, and the time where it is."""
    return _identity(s, lambda p, alpha, sigma: (p.v, alpha * p.eps - sigma * p.x0))


@DENOISER_CHECKS.add("score", 1e-9, "score = -eps / sigma")
def score(s: DenoiserSubject) -> Measured:
    """The largest error relative to 1 + |eps / sigma|, and the time where it is."""
    return _identity(s, lambda p, alpha, sigma: (p.score, -p.eps / sigma))


@DENOISER_CHECKS.add("velocity of the path", 1e-9, "velocity = alpha' x0 + sigma' eps")
def path_velocity(s: DenoiserSubject) -> Measured:
    """alpha' and sigma' by autograd; the largest error relative to 1 + |velocity|, and the time where it is."""
    if not hasattr(s.denoiser.schedule, "rates") or s.denoiser.schedule.num_steps is not None:
        raise NotApplicable("a schedule of steps, or without rates")
    with torch.enable_grad():
        t = s.t.clone().requires_grad_()
        parts = s.denoiser.schedule.alpha_sigma(t)
        rates = [torch.autograd.grad(part.sum(), t, retain_graph=True)[0] for part in parts]
    fall, rise = (expand(rate, s.x) for rate in rates)
    return _identity(s, lambda p, alpha, sigma: (p.velocity, fall * p.x0 + rise * p.eps))


@DENOISER_CHECKS.add("training target", 1e-9, "the target of a perfect network is its output")
def target(s: DenoiserSubject) -> Measured:
    """The training target for the predicted x0 and eps, against `output`."""
    parameterisation = getattr(s.denoiser, "parameterisation", None)
    if parameterisation is None:
        raise NotApplicable("has no parameterisation")
    with torch.no_grad():
        log_snr = s.denoiser.schedule.log_snr(s.t)
    return _identity(s, lambda p, alpha, sigma: (p.output, parameterisation.target(p.x0, p.eps, log_snr)))


@DENOISER_CHECKS.add("log-SNR", 1e-9, "a prediction at a time is that at the log-SNR of this time")
@torch.no_grad()
def at_log_snr(s: DenoiserSubject) -> Measured:
    """x0 of a call against x0 of `at_log_snr`, which bounds and objectives use."""
    if not hasattr(s.denoiser, "at_log_snr"):
        raise NotApplicable("has no at_log_snr")
    direct = s.denoiser.at_log_snr(s.x.clone(), s.denoiser.schedule.log_snr(s.t), s.cond).x0
    return Measured(float(errors(replace(s, x=s.x.clone()).predict().x0, direct).max()))


@DENOISER_CHECKS.add("rows independent", 1e-9, "a prediction does not depend on the rest of the batch")
@torch.no_grad()
def rows(s: DenoiserSubject) -> Measured:
    """x0 of every row alone against x0 of the batch."""
    together = s.predict().x0
    alone = torch.cat([s.predict(slice(k, k + 1)).x0 for k in range(len(s.x))])
    return Measured(float(errors(alone, together).max()))


@DENOISER_CHECKS.add("nothing modified", 0.0, "x and the state do not change, and a second prediction is the same")
@torch.no_grad()
def unmodified(s: DenoiserSubject) -> Measured:
    """Two predictions in a row, and x and the state dict before and after them."""
    own = replace(s, x=s.x.clone())
    state = copy.deepcopy(own.denoiser.state_dict())
    first, second = own.predict().x0.clone(), own.predict().x0
    changed = [float((own.x - s.x).abs().max()), float((first - second).abs().max())]
    return Measured(largest(changed + changes(own.denoiser, state)))


@DENOISER_CHECKS.add("both ends", 0.0, "the estimate of x_0 is finite near the data and at t = 1")
@torch.no_grad()
def ends(s: DenoiserSubject) -> Measured:
    """The number of entries that are not finite at t = 0.001 and t = 1."""
    found = torch.cat([replace(s, t=torch.full_like(s.t, t)).predict().x0 for t in (1e-3, 1.0)])
    return Measured(float((~torch.isfinite(found)).sum()))


@DENOISER_CHECKS.add("gradients", 0.0, "every parameter has a gradient of the output's square")
def gradients(s: DenoiserSubject) -> Measured:
    """The number of parameters without one; those of a learned schedule are trained by the ELBO alone."""
    return without_gradient(s.denoiser, lambda: s.predict().output.square().sum(), ignored="schedule.")


@DENOISER_CHECKS.add("condition", 0.0, "the prediction depends on the condition, row by row")
@torch.no_grad()
def denoiser_condition(s: DenoiserSubject) -> Measured:
    """Conditions are rolled by one row: x0 must move in some row whose condition changed, and in no other."""
    if s.cond is None:
        raise NotApplicable("is given no condition")
    other, changed = rolled(s.cond)
    moved = (replace(s, cond=other).predict().x0 - s.predict().x0).abs().flatten(1).amax(1)
    blind = [] if bool(moved[changed].any()) else ["it is ignored"]
    blind += ["rows are mixed"] if bool((moved[~changed] > 1e-9).any()) else []
    return Measured(float(len(blind)), "; ".join(blind))


@DENOISER_CHECKS.add("training mode", 1e-9, "training gives what evaluation gives, apart from dropout")
def denoiser_in_training(s: DenoiserSubject) -> Measured:
    """Predictions at a time and at its log-SNR, and gradients by x and the parameters, of a copy without dropout."""
    twin = replace(s, denoiser=training_twin(s.denoiser))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        if bool((twin.predict().x0 != twin.predict().x0).any()):
            raise NotApplicable("draws in training")
    results = []
    for own in (twin, s):
        x = s.x.clone().requires_grad_()
        found = {"": replace(own, x=x).predict().x0}
        if hasattr(s.denoiser, "at_log_snr"):
            found["at its log-SNR"] = own.denoiser.at_log_snr(x, own.denoiser.schedule.log_snr(s.t), s.cond).x0
        leaves = [x, *(p for p in own.denoiser.parameters() if p.requires_grad)]
        found |= {f"gradients {name}": torch.cat([slope.flatten() for slope in slopes_of(x0.square().sum(), leaves)])
                  for name, x0 in list(found.items())}
        results.append(found)
    return worst({name: relative(trained.detach(), results[1][name].detach()) for name, trained in results[0].items()})


SAMPLER_CHECKS = CheckSet()

_MEAN = torch.tensor([0.5, -0.2, 1.0], dtype=torch.float64)
_VARIANCE = torch.tensor([0.3, 0.5, 0.1], dtype=torch.float64)
_STEPS, _ROWS = 400, 4000
#: Times between which trajectories of a Gaussian are compared with the closed form, before the step to the clean end.
_ENDS = (0.9, 0.1)


@dataclass(frozen=True)
class SamplerSubject:
    """A sampler, and the exact denoiser of a Gaussian in float64."""

    step: Callable
    exact: GaussianDenoiser

    def draw(self, n: int, times: Tensor, *, seed: int = 0, exact: GaussianDenoiser | None = None, **options):
        """`sample` with noise keyed by row."""
        sampler_rows = KeyedGenerator(seed, torch.arange(n), "verify")
        options = {"dtype": torch.float64} | options
        return sample(exact or self.exact, (n, len(_MEAN)), times, self.step, sampler_rows, **options).x


def check_sampler(step: Callable) -> Report:
    """The result of every check of a sampler.

    Arguments:
        step: `step(denoiser, x, t, s, memory, generator, cond, temperature) -> (x, memory)`, a `Sampler`.

    Example:
        >>> from genmodels.diffusion import HeunSampler
        >>> check_sampler(HeunSampler()).passed
        True
    """
    name = getattr(step, "__name__", type(step).__name__)
    exact = GaussianDenoiser(CosineSchedule(), _MEAN, _VARIANCE)
    return Report(f"{name}, a sampler", tuple(SAMPLER_CHECKS.run(SamplerSubject(step, exact))))


def _one_step(s: SamplerSubject, dtype: torch.dtype = torch.float64) -> tuple[Callable[[int], tuple], Tensor, Memory]:
    """A step from t = .5 to .4 as a function of the seed, its x, and its memory."""
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    t, between, later = (torch.tensor(v, dtype=torch.float64) for v in (0.6, 0.5, 0.4))
    x, memory = s.step(s.exact, x, t, between, None, torch.Generator().manual_seed(1), None, 1.0)
    x = x.clone()

    def again(seed: int, temperature: float = 1.0) -> tuple:
        drawn = torch.Generator().manual_seed(seed)
        return s.step(s.exact, x, between, later, memory, drawn, None, temperature)

    return again, x, memory


@SAMPLER_CHECKS.add("pure step", 0.0, "a step with equal arguments gives equal results, and changes none of them")
@torch.no_grad()
def pure(s: SamplerSubject) -> Measured:
    """The second step of a trajectory, which has a memory, taken twice with one seed."""
    again, x, memory = _one_step(s)
    kept = x.clone(), memory.x0.clone(), memory.log_snr.clone()
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noise from the global generator would repeat itself otherwise
        first, _ = again(2)
        second, _ = again(2)
    changed = [float((a - b).abs().max()) for a, b in zip((x, memory.x0, memory.log_snr), kept, strict=True)]
    apart = float((first - second).abs().max())
    where = "x or memory modified" if not largest(changed) <= 0 else "two calls differ" if apart > 0 else ""
    return Measured(largest([apart, *changed]), where)


@SAMPLER_CHECKS.add("dtype", 0.0, "x keeps its shape and dtype")
@torch.no_grad()
def dtype(s: SamplerSubject) -> Measured:
    """In float32 and float64."""
    for kind in (torch.float32, torch.float64):
        again, x, _ = _one_step(s, kind)
        found, _ = again(2)
        if found.shape != x.shape or found.dtype != kind:
            return Measured(math.inf, f"{tuple(found.shape)} {found.dtype} from {tuple(x.shape)} {kind}")
    return Measured(0.0)


@SAMPLER_CHECKS.add("clean end", 1e-9, "the step to s = 0 returns the estimate of x_0 without noise")
def clean_end(s: SamplerSubject) -> Measured:
    """The samples against the last estimate of x_0 passed to the callback."""
    kept: list[Tensor] = []
    found = s.draw(50, uniform_t(s.exact.schedule, 10), callback=lambda i, x, x0: kept.append(x0))
    return Measured(float((found - kept[-1]).abs().max()))


@SAMPLER_CHECKS.add("point mass", 1e-9, "samples of a point mass are that point, in one step and in five")
def point_mass(s: SamplerSubject) -> Measured:
    """The exact denoiser of a Gaussian without variance."""
    exact = GaussianDenoiser(CosineSchedule(), _MEAN, 0.0)
    errors = [(s.draw(5, uniform_t(exact.schedule, n), exact=exact) - _MEAN).abs().max() for n in (1, 5)]
    return Measured(largest(errors))


@SAMPLER_CHECKS.add("rows independent", 1e-9, "a sample alone is that of a batch, with noise keyed by sample")
def sampler_rows(s: SamplerSubject) -> Measured:
    """Sample 4 of six against itself drawn alone, with keyed noise."""
    times, own = uniform_t(s.exact.schedule, 8), KeyedGenerator(0, torch.tensor([4]), "verify")
    together = s.draw(6, times)
    alone = sample(s.exact, (1, 3), times, s.step, own, dtype=torch.float64).x
    return Measured(float((together[4] - alone[0]).abs().max()))


@SAMPLER_CHECKS.add("temperature", 1e-9, "noise is multiplied by the temperature: at 0 a step has none")
@torch.no_grad()
def temperature(s: SamplerSubject) -> Measured:
    """Two seeds at 0 give the same step; one seed at 0.5 goes half the way from there to 1, as in a linear step."""
    again, _, _ = _one_step(s)
    cold, other, half, whole = (again(*given)[0] for given in ((2, 0.0), (3, 0.0), (2, 0.5), (2, 1.0)))
    return worst({"at 0": float((cold - other).abs().max()),
                  "at 0.5": float((2 * (half - cold) - (whole - cold)).abs().max())})


@SAMPLER_CHECKS.add("condition", 0.0, "every call of the denoiser is given the condition")
def condition(s: SamplerSubject) -> Measured:
    """The number of calls without the condition of each sample in its row, in four steps; samples may be repeated."""
    labels, calls = torch.arange(6), []
    exact = copy.deepcopy(s.exact)
    exact.register_forward_pre_hook(with_kwargs=True, hook=lambda module, args, kwargs: calls.append(
        args[2] if len(args) > 2 else kwargs.get("cond")))
    s.draw(6, uniform_t(exact.schedule, 4), exact=exact, cond=labels)
    right = [rows for times in (1, 2, 3, 4) for rows in (labels.repeat(times), labels.repeat_interleave(times))]
    wrong = sum(cond is None or not any(torch.equal(cond, rows) for rows in right) for cond in calls)
    return Measured(float(wrong), f"of {len(calls)} calls" if wrong else "")


@SAMPLER_CHECKS.add("no signal", 0.0, "a first step from zero terminal SNR is finite")
def no_signal(s: SamplerSubject) -> Measured:
    """The linear schedule, rescaled so that no signal is left at t = 1."""
    exact = GaussianDenoiser(rescale_zero_terminal(LinearSchedule()), _MEAN, _VARIANCE)
    found = s.draw(8, uniform_t(exact.schedule, 10), exact=exact)
    return Measured(float((~torch.isfinite(found)).sum()))


@SAMPLER_CHECKS.add("trajectory", 0.3,
                  "without noise, samples of N(m, c^2) follow x_s - alpha_s m = sqrt(V_s / V_t) (x_t - alpha_t m)")
def trajectory(s: SamplerSubject) -> Measured:
    """The error is 1 minus the order of convergence; 0 for an exact sampler."""
    again, _, _ = _one_step(s)
    with torch.no_grad():
        draws_noise = bool((again(2)[0] != again(3)[0]).any())
    if draws_noise:
        raise NotApplicable("draws noise: there is no deterministic trajectory")
    ends = s.exact.schedule.log_snr(torch.tensor(_ENDS, dtype=torch.float64))
    (alpha_t, alpha_s), (sigma_t, sigma_s) = alpha_sigma(ends)
    spread_t, spread_s = ((a**2 * _VARIANCE + d**2).sqrt() for a, d in ((alpha_t, sigma_t), (alpha_s, sigma_s)))
    noise = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = alpha_t * _MEAN + spread_t * noise
    expected = alpha_s * _MEAN + spread_s / spread_t * (x - alpha_t * _MEAN)

    def error(steps: int) -> float:
        between = torch.linspace(float(ends[0]), float(ends[1]), steps + 1, dtype=torch.float64)
        times = s.exact.schedule.time_of(between)
        return float((s.draw(20, times, start=x.clone()) - expected).abs().max())

    coarse, fine = error(32), error(64)
    if fine < 1e-9:
        return Measured(0.0, "exact")
    if not (math.isfinite(coarse) and math.isfinite(fine)):
        return Measured(math.inf, "not finite")
    order = math.log2(coarse / fine)
    return Measured(largest([0.0, 1 - order]), f"order {order:.2f}, error {fine:.1e} in 64 steps")


@SAMPLER_CHECKS.add("spread", 0.05,
                  f"mean and variance of {_ROWS:,} samples of N(m, c^2) in {_STEPS} steps, beyond chance")
def spread(s: SamplerSubject) -> Measured:
    """Relative errors of standard deviations, and of means in units of these, less three standard errors."""
    x = s.draw(_ROWS, uniform_log_snr(s.exact.schedule, _STEPS))
    mean = ((x.mean(0) - _MEAN) / _VARIANCE.sqrt()).abs() - 3 / math.sqrt(_ROWS)
    spread_error = ((x.var(0) / _VARIANCE).sqrt() - 1).abs() - 3 / math.sqrt(2 * _ROWS)
    errors = torch.stack([mean, spread_error])
    if not bool(torch.isfinite(errors).all()):
        return Measured(math.inf, "not finite")
    place = int(errors.flatten().argmax())
    return Measured(max(0.0, float(errors.max())), "mean" if place < len(_MEAN) else "standard deviation")


def is_sampler(maker: Callable) -> bool:
    """Whether this is a sampler or a class of samplers: the first argument is `denoiser`, and one is `memory`.

    Example:
        >>> from genmodels.diffusion import EulerSampler
        >>> is_sampler(EulerSampler), is_sampler(EulerSampler()), is_sampler(torch.nn.Linear)
        (True, True, False)
    """
    try:
        names = list(inspect.signature(maker.__call__ if isinstance(maker, type) else maker).parameters)
    except (TypeError, ValueError):
        return False
    return [name for name in names if name != "self"][:1] == ["denoiser"] and "memory" in names
