"""The cumulative distribution of a mixture of logistics as an elementwise map, inverted by bisection."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid, softmax

from genmodels.flows.elementwise import Affine, ElementTransform, bounded

BISECTIONS = 60
NEWTON_STEPS = 2


class Mixture(NamedTuple):
    """Parameters of mixtures of logistics: log-weights, means and log-scales, each (B, K, C, *space)."""

    log_weight: Tensor
    mean: Tensor
    log_scale: Tensor


class LogisticMixture(ElementTransform):
    """The logit of a mixture's distribution function, then a scale and a shift.

        F(x) = sum_k pi_k sigmoid((x - mu_k) e^-s_k),    z = e^h (log F - log(1 - F)) + t
        log dz/dx = log f - log F - log(1 - F) + h

    pi is a softmax, s_k = 7 tanh(. / 7), h as in `Affine`. Log F is a log-sum-exp of log-sigmoids, and so is
    log(1 - F), a mixture of the mirrored sigmoids: the tails keep their digits. The inverse brackets its root, halves
    the bracket 60 times and takes two Newton steps where they stay inside; its gradient follows from the equation.

    Arguments:
        channels: number of channels that it changes.
        components: K.

    Shapes: `params (B, 3K + 2, C, *space)`: K logits of pi, K mu, K raw s, then the s and the t of `Affine`.
    Errors: ValueError for fewer than one component.
    Source: Ho et al. 2019 (Flow++), section 3.2.

    Example:
        >>> mixture = LogisticMixture(1, components=4)
        >>> z, _ = mixture(torch.tensor([[1.5]]), mixture.start(1)[None])
        >>> z.detach(), mixture.inverse(z, mixture.start(1)[None])[0].detach()
        (tensor([[1.4982]]), tensor([[1.5000]]))
    """

    exact_inverse = False
    inverse_cost = "iterative"

    def __init__(self, channels: int, *, components: int = 8):
        super().__init__()
        if components < 1:
            raise ValueError(f"a mixture needs at least one component, got {components}")
        self.channels, self.components = channels, components
        self.params_per_dim = 3 * components + 2
        self.affine = Affine(channels)

    def start(self, channels: int) -> Tensor:
        """Means spread over [-0.1, 0.1], the rest zero: close to the identity, yet no two components are the same."""
        params = torch.zeros(self.params_per_dim, channels)
        means = torch.linspace(-0.1, 0.1, self.components)[:, None]
        params[self.components : 2 * self.components] = means - means.mean()  # a single one lies at zero
        return params

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        mixture, affine = self._unpack(params)
        v, log_slope = logit(x, mixture)
        z, h = self.affine(v, affine)
        return z, log_slope + h

    def inverse(self, z: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        mixture, affine = self._unpack(params)
        v, h = self.affine.inverse(z, affine)
        x = _Root.apply(v, *mixture)
        return x, h - logit(x, mixture)[1]

    def _unpack(self, params: Tensor) -> tuple[Mixture, Tensor]:
        k = self.components
        weights, means, scales, affine = params.split((k, k, k, 2), dim=1)
        return Mixture(log_softmax(weights, dim=1), means, bounded(scales, 7.0)), affine


def logit(x: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """log F - log(1 - F) of the mixture's distribution function, and the logarithm of its slope."""
    below, above = _shares(x, mixture)
    log_below, log_above = below.logsumexp(1), above.logsumexp(1)
    log_density = _density(below, above, mixture).logsumexp(1)
    return log_below - log_above, log_density - log_below - log_above


def _shares(x: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """The logarithms of every component's share of F and of 1 - F."""
    u = (x.unsqueeze(1) - mixture.mean) * torch.exp(-mixture.log_scale)
    below = mixture.log_weight + logsigmoid(u)
    return below, below - u


def _density(below: Tensor, above: Tensor, mixture: Mixture) -> Tensor:
    """The logarithm of every component's share of f."""
    return below + above - mixture.log_weight - mixture.log_scale


# One operation to a compiler, which would take minutes to write out sixty steps as one kernel.
@torch.library.custom_op(
    "genmodels::logistic_mixture_root",
    mutates_args=(),
    schema="(Tensor v, Tensor log_weight, Tensor mean, Tensor log_scale) -> Tensor",
)
def solve(v: Tensor, log_weight: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """The x at which the logit of F is v, by a number of steps that does not depend on the data."""
    mixture = Mixture(log_weight, mean, log_scale)
    # Where x is below every mu_k + e^s_k v, each component is below sigmoid(v), and so is F; likewise above.
    roots = mixture.mean + mixture.log_scale.exp() * v.unsqueeze(1)
    low, high = roots.amin(1), roots.amax(1)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        below, above = _shares(middle, mixture)
        beyond = below.logsumexp(1) - above.logsumexp(1) >= v
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    x = 0.5 * (low + high)
    for _ in range(NEWTON_STEPS):
        value, log_slope = logit(x, mixture)
        step = x - (value - v) * torch.exp(-log_slope)
        x = torch.where((step >= low) & (step <= high), step, x)
    return x.contiguous()


@solve.register_fake
def _like(v: Tensor, log_weight: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


class _Root(torch.autograd.Function):
    """x(v, pi, mu, s) with logit F(x) = v; the gradient follows from the equation, not from the steps to its solution.

        dx/dv = 1/G,    dx/dmu_k = r_k,    dx/ds_k = r_k (x - mu_k),    dx/dlog pi_k = -(b_k - a_k) / G

    with G = f / (F (1 - F)) and the shares b, a, r of the components in F, in 1 - F and in f. (A change of all log pi_k
    alike changes F and 1 - F alike, so it may be left to the log-softmax that they sum to one.)
    """

    @staticmethod
    def forward(ctx, v: Tensor, log_weight: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
        x = solve(v, log_weight, mean, log_scale)
        ctx.save_for_backward(x, log_weight, mean, log_scale)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor):
        # Made of differentiable steps from what was saved, inputs and the output: so it can be differentiated again.
        x, *parameters = ctx.saved_tensors
        mixture = Mixture(*parameters)
        below, above = _shares(x, mixture)
        density = _density(below, above, mixture)
        log_slope = density.logsumexp(1) - below.logsumexp(1) - above.logsumexp(1)
        for_v = gradient * torch.exp(-log_slope)
        for_mean = gradient.unsqueeze(1) * softmax(density, dim=1)
        for_weight = -for_v.unsqueeze(1) * (softmax(below, dim=1) - softmax(above, dim=1))
        return for_v, for_weight, for_mean, for_mean * (x.unsqueeze(1) - mixture.mean)
