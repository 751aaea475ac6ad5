"""What a denoiser must be: one prediction in all its views, row by row, finite at both ends, trainable."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from genmodels.diffusion.parameterisation import Prediction
from genmodels.diffusion.process import alpha_sigma, expand
from genmodels.evaluation.laws import Laws, Measured, NotApplicable, Report
from genmodels.evaluation.subject import perturb

LAWS = Laws()
_VIEWS = ("x0", "eps", "v", "score")


@dataclass(frozen=True)
class DenoiserSubject:
    """A denoiser under judgement in float64; noisy points x (B, *event), times t (B,), and conditions."""

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
            found = alpha_sigma(self.denoiser.schedule.log_snr(self.t))
        alpha, sigma = (expand(value, self.x) for value in found)
        return alpha, sigma


def check_denoiser(denoiser: nn.Module, shape: Sequence[int], *, cond: Tensor | None = None, seed: int = 0) -> Report:
    """The verdict of every law on a denoiser; it is copied, made float64, and its parameters are moved at random.

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
    perturb(twin, generator)  # what starts at zero hides what it does
    rows = 5 if cond is None else len(cond)
    x = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    t = torch.linspace(0.15, 0.85, rows, dtype=torch.float64)
    subject = DenoiserSubject(twin, x, t, cond)
    return Report(f"{type(denoiser).__name__}, a denoiser", tuple(LAWS.judge(subject)))


@LAWS.add("shape and dtype", 0.0, "every view has the shape of x and its dtype")
@torch.no_grad()
def shape(s: DenoiserSubject) -> Measured:
    """x0, eps, v, score and output; the first that is unlike x is named."""
    found = s.predict()
    for view in (*_VIEWS, "output"):
        value = getattr(found, view)
        if value.shape != s.x.shape or value.dtype != s.x.dtype:
            return Measured(math.inf, f"{view}: {tuple(value.shape)} {value.dtype} for {tuple(s.x.shape)} {s.x.dtype}")
    return Measured(0.0)


def _identity(s: DenoiserSubject, truth: Callable[[Prediction, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Measured:
    with torch.no_grad():
        left, right = truth(s.predict(), *s.alpha_sigma())
    error = ((left - right).abs() / (1 + right.abs())).flatten(1).amax(1)
    return Measured(float(error.max()), f"at t = {float(s.t[int(error.argmax())]):.2f}")


@LAWS.add("signal and noise", 1e-9, "x = alpha x0 + sigma eps")
def signal_and_noise(s: DenoiserSubject) -> Measured:
    """The largest error relative to 1 + |x|, and the time where it is."""
    return _identity(s, lambda p, alpha, sigma: (alpha * p.x0 + sigma * p.eps, s.x))


@LAWS.add("v", 1e-9, "v = alpha eps - sigma x0")
def velocity(s: DenoiserSubject) -> Measured:
    """The largest error relative to 1 + |v|, and the time where it is."""
    return _identity(s, lambda p, alpha, sigma: (p.v, alpha * p.eps - sigma * p.x0))


@LAWS.add("score", 1e-9, "score = -eps / sigma")
def score(s: DenoiserSubject) -> Measured:
    """The largest error relative to 1 + |eps / sigma|, and the time where it is."""
    return _identity(s, lambda p, alpha, sigma: (p.score, -p.eps / sigma))


@LAWS.add("training target", 1e-9, "the target of a network that is right is what it returns")
def target(s: DenoiserSubject) -> Measured:
    """What training would ask for, made of the predicted x0 and eps, against `output`."""
    known = getattr(s.denoiser, "parameterisation", None)
    if known is None:
        raise NotApplicable("has no parameterisation")
    with torch.no_grad():
        log_snr = s.denoiser.schedule.log_snr(s.t)
    return _identity(s, lambda p, alpha, sigma: (p.output, known.target(p.x0, p.eps, log_snr)))


@LAWS.add("rows independent", 1e-9, "a prediction does not depend on the rest of the batch")
@torch.no_grad()
def rows(s: DenoiserSubject) -> Measured:
    """x0 of every row alone against x0 of the batch."""
    together = s.predict().x0
    alone = torch.cat([s.predict(slice(k, k + 1)).x0 for k in range(len(s.x))])
    return Measured(float(((alone - together).abs() / (1 + together.abs())).max()))


@LAWS.add("nothing modified", 0.0, "x and the state stay as they were, and the same prediction comes again")
@torch.no_grad()
def unmodified(s: DenoiserSubject) -> Measured:
    """Two predictions in a row, and x and the state dict before and after them."""
    own = replace(s, x=s.x.clone())
    state = copy.deepcopy(own.denoiser.state_dict())
    first, second = own.predict().x0.clone(), own.predict().x0
    changed = [float((own.x - s.x).abs().max()), float((first - second).abs().max())]
    changed += [float((own.denoiser.state_dict()[k] - v).abs().max()) for k, v in state.items() if v.numel()]
    return Measured(max(changed))


@LAWS.add("both ends", 0.0, "the estimate of x_0 is finite near the data and at t = 1")
@torch.no_grad()
def ends(s: DenoiserSubject) -> Measured:
    """The number of entries that are not finite at t = 0.001 and t = 1."""
    bad = 0
    for t in (1e-3, 1.0):
        found = replace(s, t=torch.full_like(s.t, t)).predict().x0
        bad += int((~torch.isfinite(found)).sum())
    return Measured(float(bad))


@LAWS.add("gradients", 0.0, "every parameter has a gradient of the output's square")
def gradients(s: DenoiserSubject) -> Measured:
    """The number of parameters without one; those of a learned schedule are trained by the bound alone."""
    named = [(name, p) for name, p in s.denoiser.named_parameters() if p.requires_grad]
    if not named:
        raise NotApplicable("no parameters")
    with torch.enable_grad():
        slopes = torch.autograd.grad(s.predict().output.square().sum(), [p for _, p in named], allow_unused=True)
    # A learned schedule has gradients of the bound only: the level is an input of the network, not its output.
    dead = [name for (name, _), slope in zip(named, slopes, strict=True)
            if slope is None and not name.startswith("schedule.")]
    return Measured(float(len(dead)), ", ".join(dead[:3]))
