"""Elementwise maps with parameters from a network: additive, affine, mixture of logistics; bounds of scales."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, logsigmoid, softmax

from genmodels.core.errors import at_least, one_of


def bounded(h: Tensor, limit: float) -> Tensor:
    """A smooth bound on both sides, with slope one at zero: limit tanh(h / limit).

    Example:
        >>> bounded(torch.tensor([-1e9, 0.0, 1.0]), 5.0)
        tensor([-5.0000,  0.0000,  0.9869])
    """
    return torch.tanh(h / limit) * limit


def unbounded(h: Tensor, limit: float) -> Tensor:
    """The inverse of `bounded`, of values clamped to +-0.999 limit, where its slope is 0.002.

    Example:
        >>> unbounded(bounded(torch.tensor([-3.0, 0.0, 1.0]), 10.0), 10.0)
        tensor([-3.,  0.,  1.])
    """
    return torch.atanh((h / limit).clamp(-0.999, 0.999)) * limit


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Values (..., C) in a shape that broadcasts with `like (B, C, *space)`."""
    return values if like.dim() == 2 else values.reshape(*values.shape, *[1] * (like.dim() - 2))


class ElementTransform(nn.Module):
    """An elementwise monotonic map with parameters from a network.

        z = f(x; params),    log_derivative = log |df/dx|

    Attributes:
        params_per_dim: number P of parameters of each element.
        channels: number of channels of its own learned parameters; None without these. Otherwise `inverse` takes as
            `own` the numbers of the channels that z and params hold, all by default.
        exact_inverse: whether the inverse is a formula (and not an iteration).
        inverse_cost: `same` or `iterative`.
        constant_logdet: whether the log-derivative does not depend on x and params.

    Shapes: `x (B, C, *space)`, `params (B, P, C, *space)` of the dtype of x (float32 or wider); both results are like
    x, the log-derivative is of the direction evaluated, not summed.
    """

    params_per_dim: int
    channels: int | None = None
    exact_inverse: bool = True
    inverse_cost: str = "same"
    constant_logdet: bool = False

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """f(x) and log |df/dx| of each element."""
        raise NotImplementedError

    def inverse(self, z: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """The x with f(x) = z, and log |dx/dz| of each element."""
        raise NotImplementedError

    def start(self, channels: int) -> Tensor:
        """The initial parameters (P, C)."""
        return torch.zeros(self.params_per_dim, channels)


class Additive(ElementTransform):
    """A shift.

        z = x + t

    Source: Dinh et al. 2014 (NICE), section 3.2.

    Example:
        >>> Additive()(torch.ones(1, 1), torch.full((1, 1, 1), 2.0))
        (tensor([[3.]]), tensor([[0.]]))
    """

    params_per_dim = 1
    constant_logdet = True

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        return x + params.squeeze(1), torch.zeros_like(x)

    def inverse(self, z: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        return z - params.squeeze(1), torch.zeros_like(z)


def _some(values: Tensor, own: Tensor | None) -> Tensor:
    """Values (..., C) of the channels `own`, of all if None."""
    return values if own is None else values[..., own]


class TanhScale(nn.Module):
    """The log-scale of RealNVP with learned range and centre, |h| < 10.

        h = a tanh(s) + b,    a = 5 tanh(a_raw / 5), b = 5 tanh(b_raw / 5),    initially a_raw = 1, b_raw = 0

    Arguments:
        channels: number of channels C; a and b are one number for each.

    Source: Dinh et al. 2017 (RealNVP), section 3.7.

    Example:
        >>> TanhScale(1)(torch.tensor([[0.0], [9.0]])).detach()
        tensor([[0.0000],
                [0.9869]])
    """

    def __init__(self, channels: int):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor([[1.0], [0.0]]).repeat(1, channels))  # a_raw, b_raw

    def forward(self, s: Tensor, own: Tensor | None = None) -> Tensor:
        a, b = per_channel(bounded(_some(self.raw, own), 5.0), s).unbind()
        # a tanh(s) + b, by tanh(s) = 2 sigmoid(2 s) - 1: on a CPU torch's sigmoid takes a quarter of its tanh's time.
        return torch.addcmul(b - a, a, torch.sigmoid(s + s), value=2)


class TiedScale(nn.Module):
    """A log-scale whose learned range does not change its slope at zero, |h| < 10.

        h = e^f tanh(s e^-f),    f = c tanh(f_raw / c), c = log 10,    initially f_raw = 0

    Arguments:
        channels: number of channels C; f is one number for each.

    Example:
        >>> TiedScale(1)(torch.tensor([[0.0], [1.0]])).detach()
        tensor([[0.0000],
                [0.7616]])
    """

    def __init__(self, channels: int):
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(channels))

    def forward(self, s: Tensor, own: Tensor | None = None) -> Tensor:
        limit = per_channel(bounded(_some(self.raw, own), math.log(10)).exp(), s)
        return limit * torch.tanh(s / limit)


class SigmoidScale(nn.Module):
    """The scale of Glow with a floor, so that sampling cannot explode; 0.8809 at s = 0.

        e^h = 0.001 + 0.999 sigmoid(s + 2)

    Arguments:
        channels: not used, since nothing is learned.

    Source: Kingma and Dhariwal 2018 (Glow), the authors' code, without the floor.

    Example:
        >>> SigmoidScale(1)(torch.tensor([[0.0]]))
        tensor([[-0.1268]])
    """

    def __init__(self, channels: int):
        super().__init__()

    def forward(self, s: Tensor, own: Tensor | None = None) -> Tensor:
        return torch.log(0.001 + 0.999 * torch.sigmoid(s + 2))


_FLOOR = 2.0**-10  # a power of two, so that the start is one exactly


class PlainScale(nn.Module):
    """The scale itself, of either sign, and its logarithm.

        a = s + 2^-10 sign(s),    h = log |a|,    sign(0) = 1;    initially a = 1

    A scale of zero has no inverse, and one near zero an inaccurate one: so |a| is at least 2^-10, about 0.001, and a
    jumps over this gap where s changes sign. There is no upper bound.

    Arguments:
        channels: not used, since nothing is learned.

    Example:
        >>> PlainScale(1).signed(torch.tensor([1.0, -0.5]))
        tensor([ 1.0010, -0.5010])
    """

    start = 1 - _FLOOR

    def __init__(self, channels: int):
        super().__init__()

    def signed(self, s: Tensor) -> Tensor:
        """a."""
        return torch.where(s < 0, s - _FLOOR, s + _FLOOR)

    def forward(self, s: Tensor, own: Tensor | None = None) -> Tensor:
        return torch.log(s.abs() + _FLOOR)


SCALES = {"tanh": TanhScale, "sigmoid": SigmoidScale, "tied": TiedScale, "plain": PlainScale}
ScaleKind = Literal["tanh", "sigmoid", "tied", "plain"]


class Affine(ElementTransform):
    """A scale and a shift.

        z = a x + t,    log |dz/dx| = h(s),    a = e^h, or with `plain` scales a of either sign and h = log |a|

    Arguments:
        channels: number of channels that it changes.
        scale: how h follows from the network's s: `tanh` (RealNVP), `sigmoid` (Glow), `tied` or `plain`.

    Shapes: `params (B, 2, C, *space)`, s before t.
    Errors: ValueError for an unknown scale.
    Source: Dinh et al. 2017 (RealNVP), equations 4 and 5.

    Example:
        >>> Affine(1)(torch.ones(1, 1), torch.tensor([[[0.0], [2.0]]]))[0].detach()
        tensor([[3.]])
    """

    params_per_dim = 2

    def __init__(self, channels: int, *, scale: ScaleKind = "tanh"):
        super().__init__()
        one_of("scale", scale, SCALES)
        self.channels, self.scale = channels, scale
        self.log_scale = SCALES[scale](channels)

    def start(self, channels: int) -> Tensor:
        """Shift 0 and scale 1, but for `sigmoid` s = 0, as published."""
        params = super().start(channels)
        params[0] = getattr(self.log_scale, "start", 0.0)
        return params

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        s, t = params.unbind(1)
        h = self.log_scale(s)
        a = self.log_scale.signed(s) if self.scale == "plain" else torch.exp(h)
        return torch.addcmul(t, a, x), h

    def inverse(self, z: Tensor, params: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
        s, t = params.unbind(1)
        h = -self.log_scale(s, own)
        return (z - t) / self.log_scale.signed(s) if self.scale == "plain" else (z - t) * torch.exp(h), h


class MeanScale(ElementTransform):
    """Standardisation by a predicted mean and a predicted scale.

        z = (x - m) e^-alpha,    alpha = 5 tanh(alpha_raw / 5),    log dz/dx = -alpha

    Shapes: `params (B, 2, C, *space)`, m before alpha_raw.
    Source: Papamakarios et al. 2017 (MAF), equation 4.

    Example:
        >>> MeanScale()(torch.ones(1, 1), torch.tensor([[[3.0], [0.0]]]))[0]
        tensor([[-2.]])
    """

    params_per_dim = 2

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        m, alpha = params.unbind(1)
        h = -bounded(alpha, 5.0)
        return (x - m) * torch.exp(h), h

    def inverse(self, z: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        m, alpha = params.unbind(1)
        h = bounded(alpha, 5.0)
        return torch.addcmul(m, torch.exp(h), z), h


NEWTON_STEPS = 2


def bisections(dtype: torch.dtype) -> int:
    """Halvings after which a bracket 2^17 times as wide as a root is as narrow as the rounding error of the root."""
    return 17 - round(math.log2(torch.finfo(dtype).eps))


class Mixture(NamedTuple):
    """Parameters of mixtures of logistics: log-weights, means and log-scales, each (B, K, C, *space)."""

    log_weight: Tensor
    mean: Tensor
    log_scale: Tensor


class LogisticMixture(ElementTransform):
    """The logit of a mixture's distribution function, then a scale and a shift.

        F(x) = sum_k pi_k sigmoid((x - mu_k) e^-s_k),    z = e^h (log F - log(1 - F)) + t
        log dz/dx = log f - log F - log(1 - F) + h

    pi is a softmax, s_k = 7 tanh(. / 7), h as in `Affine`. log F and log(1 - F) are both log-sum-exps of log-sigmoids,
    accurate in the tails. The inverse takes 40 bisections in float32, 69 in float64, and two Newton steps where these
    stay in the bracket; its gradient follows from the implicit function theorem.

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
        at_least(1, components=components)
        self.channels, self.components = channels, components
        self.params_per_dim = 3 * components + 2
        self.affine = Affine(channels)

    def start(self, channels: int) -> Tensor:
        """Means spread over [-0.1, 0.1], the rest zero: close to the identity, with components that differ."""
        params = torch.zeros(self.params_per_dim, channels)
        means = torch.linspace(-0.1, 0.1, self.components)[:, None]
        params[self.components : 2 * self.components] = means - means.mean()  # a single one lies at zero
        return params

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        mixture, affine = self._unpack(params)
        v, log_slope = logit(x, mixture)
        z, h = self.affine(v, affine)
        return z, log_slope + h

    def inverse(self, z: Tensor, params: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mixture, affine = self._unpack(params)
        v, h = self.affine.inverse(z, affine, own)
        x = (_Root if torch.compiler.is_compiling() else _EagerRoot).apply(v, *mixture)
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
    log_below = logsigmoid(u)
    return mixture.log_weight + log_below, mixture.log_weight + (log_below - u)  # added to u it would be rounded away


def _density(below: Tensor, above: Tensor, mixture: Mixture) -> Tensor:
    """The logarithm of every component's share of f."""
    return below + above - mixture.log_weight - mixture.log_scale


# One operation to a compiler, which would take minutes to unroll so many steps.
@torch.library.custom_op(
    "genmodels::logistic_mixture_root",
    mutates_args=(),
    schema="(Tensor v, Tensor log_weight, Tensor mean, Tensor log_scale) -> Tensor",
)
def solve(v: Tensor, log_weight: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """The x at which the logit of F is v, by a fixed number of steps."""
    mixture = Mixture(log_weight, mean, log_scale)
    # Where x is below every mu_k + e^s_k v, each component is below sigmoid(v), and so is F; likewise above.
    roots = mixture.mean + mixture.log_scale.exp() * v.unsqueeze(1)
    low, high = roots.amin(1), roots.amax(1)
    for _ in range(bisections(v.dtype)):
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


def _slopes(x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The derivatives of the root x in v and the parameters, differentiable in turn; see `_Root`."""
    mixture = Mixture(*parameters)
    below, above = _shares(x, mixture)
    density = _density(below, above, mixture)
    of_v = torch.exp(below.logsumexp(1) + above.logsumexp(1) - density.logsumexp(1))
    of_mean = softmax(density, dim=1)
    of_weight = of_v.unsqueeze(1) * (softmax(above, dim=1) - softmax(below, dim=1))
    return of_v, of_weight, of_mean, of_mean * (x.unsqueeze(1) - mixture.mean)


class _Root(torch.autograd.Function):
    """x(v, pi, mu, s) with logit F(x) = v, with the gradient of the implicit function.

        dx/dv = 1/G,    dx/dmu_k = r_k,    dx/ds_k = r_k (x - mu_k),    dx/dlog pi_k = -(b_k - a_k) / G

    with G = f / (F (1 - F)) and the shares b, a, r of the components in F, in 1 - F and in f. (The constraint that pi_k
    sum to one is left to the log-softmax, since equal changes of all log pi_k change F and 1 - F alike.)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(v: Tensor, log_weight: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
        return solve(v, log_weight, mean, log_scale)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(output, *inputs[1:])
        ctx.save_for_forward(output, *inputs[1:])

    @staticmethod
    def backward(ctx, gradient: Tensor):
        of_v, *others = _slopes(*ctx.saved_tensors)
        return gradient * of_v, *(gradient.unsqueeze(1) * of for of in others)


class _EagerRoot(_Root):
    """With forward mode too, which torch.compile refuses; `jvp` itself has no forward derivative."""

    @staticmethod
    def jvp(ctx, v: Tensor, *tangents: Tensor) -> Tensor:
        of_v, *others = _slopes(*ctx.saved_tensors)
        return v * of_v + sum((of * tangent).sum(1) for of, tangent in zip(others, tangents, strict=True))
