"""Classifier-free guidance, and thresholds on the estimate of the data."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from genmodels.core.errors import InputError, one_of, require_finite_rows
from genmodels.core.tensors import event_mean, event_size, event_sum, spread
from genmodels.diffusion.parameterisation import X0, Prediction


class AlteredDenoiser:
    """A denoiser around another; a subclass defines `forward`.

    Arguments:
        denoiser: a `Denoiser`, or anything called like one, with a schedule and a parameterisation.
    """

    #: The word for it in the error of `require_unaltered`.
    alteration: str

    def __init__(self, denoiser):
        self.denoiser = denoiser
        self.schedule, self.parameterisation = denoiser.schedule, denoiser.parameterisation
        self.self_conditioning = getattr(denoiser, "self_conditioning", False)
        self.takes_until = getattr(denoiser, "takes_until", False)

    def __call__(
        self, x: Tensor, t: Tensor, cond: Tensor | None = None, mask: Tensor | None = None, **estimate: Tensor
    ) -> Prediction:
        return self.forward(x, t, cond, mask, **estimate).along(self.schedule, t)

    def forward(self, x: Tensor, t: Tensor, cond: Tensor | None, mask: Tensor | None, **estimate: Tensor) -> Prediction:
        """The changed prediction."""
        raise NotImplementedError


def require_unaltered(denoiser) -> None:
    """Raise InputError for a denoiser that was changed for sampling, which has no likelihood.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> guided = GuidedDenoiser(GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0), 3.0, null=10)
        >>> require_unaltered(guided)
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: a guided denoiser has no likelihood: ask the denoiser itself
    """
    if isinstance(denoiser, AlteredDenoiser):
        raise InputError(f"a {denoiser.alteration} denoiser has no likelihood: ask the denoiser itself")


class GuidedDenoiser(AlteredDenoiser):
    """A conditional denoiser whose prediction is extrapolated from the null condition through the condition.

        eps = eps_null + w (eps_cond - eps_null)

    x_0, v and the network's output are affine in eps at a given x, so the same holds for each of them; it is applied to
    the output, which exists at every SNR. w = 1 is exactly the condition alone and w = 0 the null condition alone, in
    one call each; otherwise both are computed in one doubled batch.

    Arguments:
        denoiser: trained with its condition dropped at random.
        scale: w.
        null: the null condition, which broadcasts to a condition of the batch: the number of classes, for labels.
        rescale: in [0, 1], how far the standard deviation of each estimate of x_0 is moved back to that of the
            conditional estimate (Lin et al. 2023, section 3.4).
        interval: lowest and highest log-SNR where w applies; elsewhere it is 1 (Kynkaanniemi et al. 2024).

    Errors: a denoiser changed before, a scale that is not finite, a rescale outside [0, 1], an empty interval, a call
        without condition where w is not 0.
    Source: Ho and Salimans, "Classifier-free diffusion guidance", 2022, equation 6, whose w is ours minus 1.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, Denoiser, V
        >>> net = lambda x, log_snr, cond: cond[:, None].to(x) * torch.ones_like(x)
        >>> plain = Denoiser(net, CosineSchedule(), V())
        >>> GuidedDenoiser(plain, 3.0, null=10)(torch.zeros(1, 2), torch.tensor([0.5]), torch.tensor([4])).output
        tensor([[-8., -8.]])
    """

    alteration = "guided"

    def __init__(
        self, denoiser, scale: float, null: Tensor | int, *, rescale: float = 0.0,
        interval: tuple[float, float] = (-math.inf, math.inf),
    ):
        super().__init__(denoiser)
        if isinstance(denoiser, AlteredDenoiser):
            raise InputError(f"guidance needs the network's own output, not a {denoiser.alteration} one: guide first")
        if not 0 <= rescale <= 1:
            raise InputError(f"rescale = {rescale}: choose a share from 0 to 1")
        if not interval[0] < interval[1]:
            raise InputError(f"interval = {list(interval)}: give the lower log-SNR first, then the higher")
        if not math.isfinite(scale):
            raise InputError(f"scale = {scale}: choose a finite number")
        self.scale, self.null, self.rescale, self.interval = scale, null, rescale, interval

    def forward(self, x: Tensor, t: Tensor, cond: Tensor | None, mask: Tensor | None, **estimate: Tensor) -> Prediction:
        log_snr = self.schedule.log_snr(t).to(x.device)
        inside = (log_snr >= self.interval[0]) & (log_snr <= self.interval[1])
        if cond is None and self.scale != 0:
            raise InputError("guidance needs a condition to go towards: give one, or scale = 0")
        if self.scale == 1 or not bool(inside.any()):
            return self.denoiser(x, t, cond, mask, **estimate)
        if cond is None:
            return self.denoiser(x, t, None, mask, **estimate)
        null = torch.as_tensor(self.null, dtype=cond.dtype, device=cond.device).expand_as(cond)
        if self.scale == 0 and bool(inside.all()):
            return self.denoiser(x, t, null, mask, **estimate)
        masks = None if mask is None else torch.cat([mask, mask])
        doubled = {name: torch.cat([value, value]) for name, value in estimate.items()}
        prediction = self.denoiser(torch.cat([x, x]), torch.cat([t, t]), torch.cat([cond, null]), masks, **doubled)
        with_cond, without = prediction.output.chunk(2)
        w = torch.where(inside, self.scale, 1.0).to(x).reshape(-1, *[1] * (x.dim() - 1))
        nu = None if prediction.nu is None else prediction.nu.chunk(2)[0]
        log_snr = log_snr.clamp(min=getattr(self.denoiser, "noisiest", -math.inf))  # where the output was made
        guided = self.parameterisation.to_prediction(without + w * (with_cond - without), x, log_snr, nu)
        if self.rescale == 0:
            return guided
        x0, target = guided.x0, prediction.x0.chunk(2)[0]
        ratio = _standard_deviation(target, mask) / _standard_deviation(x0, mask)
        ratio = torch.where(ratio.isfinite(), ratio, 1.0)  # of one scalar, or of constant events, there is none
        factor = (1 + self.rescale * (ratio - 1)).reshape(w.shape)
        return X0().to_prediction(x0 * factor, x, log_snr, nu)


def _standard_deviation(x: Tensor, mask: Tensor | None) -> Tensor:
    """(B,) the standard deviation over the valid scalars of each example."""
    if mask is None:
        return x.flatten(1).std(1, correction=min(1, x[0].numel() - 1))
    mean = event_mean(x, mask).reshape(-1, *[1] * (x.dim() - 1))
    return (event_sum((x - mean).square(), mask) / (event_size(x, mask) - 1).to(x.dtype)).sqrt()


Threshold = Callable[[Tensor, Tensor | None], Tensor]


def static(x0: Tensor, mask: Tensor | None = None) -> Tensor:
    """Clip to [-1, 1].

    Example:
        >>> static(torch.tensor([[-3.0, 0.5]]))
        tensor([[-1.0000,  0.5000]])
    """
    return x0.clamp(-1, 1)


def dynamic(x0: Tensor, mask: Tensor | None = None, *, percentile: float = 0.995) -> Tensor:
    """Clip to [-s, s] and divide by s, where s is a percentile of |x_0| in each example, at least 1.

    With `mask (B, 1, T)` of sequences it is a percentile of the valid frames; where there are none, s is 1.

    Source: Saharia et al., "Photorealistic text-to-image diffusion models", 2022, section 2.3.

    Example:
        >>> dynamic(torch.tensor([[-3.0, 1.5], [0.5, -0.5]]), percentile=1.0)
        tensor([[-1.0000,  0.5000],
                [ 0.5000, -0.5000]])
    """
    if not len(x0):
        return x0  # torch has no quantile of nothing
    if mask is None:
        s = torch.quantile(x0.flatten(1).abs(), percentile, dim=1)
    else:
        s = torch.nanquantile(x0.masked_fill(~spread(mask, x0), math.nan).flatten(1).abs(), percentile, dim=1)
        s = torch.where(mask.flatten(1).any(1), s, 1.0)
    s = s.clamp(min=1).reshape(-1, *[1] * (x0.dim() - 1))
    return x0.clamp(-s, s) / s


#: Thresholds by name, for data in [-1, 1].
THRESHOLDS: dict[str, Threshold] = {"static": static, "dynamic": dynamic}


class ThresholdedDenoiser(AlteredDenoiser):
    """A denoiser whose estimate of x_0 is kept in range; eps, v and score follow from the new estimate.

    An estimate that is not finite is an error, since clipping would hide it.

    Arguments:
        denoiser: the denoiser.
        threshold: a name in THRESHOLDS, or a function of x_0 (B, *event) and its mask, (B, 1, T) or None.

    Errors: an unknown name; a threshold that changes the shape; NotFinite for an estimate that is not finite.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> far = GaussianDenoiser(CosineSchedule(), torch.full((2,), 3.0), 0.01)
        >>> ThresholdedDenoiser(far, "static")(torch.zeros(1, 2), torch.tensor([1.0])).x0
        tensor([[1., 1.]])
    """

    alteration = "thresholded"

    def __init__(self, denoiser, threshold: str | Threshold = "static"):
        super().__init__(denoiser)
        if not callable(threshold):
            one_of("threshold", threshold, THRESHOLDS)
        self.threshold = threshold if callable(threshold) else THRESHOLDS[threshold]

    def forward(self, x: Tensor, t: Tensor, cond: Tensor | None, mask: Tensor | None, **estimate: Tensor) -> Prediction:
        prediction = self.denoiser(x, t, cond, mask, **estimate)
        x0 = self.threshold(require_finite_rows(prediction.x0), mask)
        if x0.shape != x.shape:
            raise InputError(f"a threshold keeps the shape of x_0, {tuple(x.shape)}, got {tuple(x0.shape)}")
        return X0().to_prediction(x0, x, self.schedule.log_snr(t), prediction.nu)
