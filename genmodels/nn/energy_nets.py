"""Networks whose output is one number per example, smooth enough for its second derivatives."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from genmodels.core.errors import InputError, at_least, one_of, positive
from genmodels.core.tensors import hide
from genmodels.nn.attention_block import AttentionKind, check_heads
from genmodels.nn.blocks import CONVOLUTION, GroupNorm, check_channels, run
from genmodels.nn.jet import Jet, has_jet, propagate, smooth_activation
from genmodels.nn.unet import UNet


class Confinement(nn.Module):
    """A learned quadratic term of an energy, which keeps the integral of exp(-E) finite.

        E_0(x) = 1/2 |x|^2 / tau^2,   tau > 0 learned

    Arguments:
        spread: tau at the start.

    Shapes: `x (B, *event)` to `(B,)`.

    Example:
        >>> Confinement(2.0)(torch.tensor([[2.0, 4.0]]))
        tensor([2.5000], grad_fn=<MulBackward0>)
    """

    def __init__(self, spread: float = 1.0):
        super().__init__()
        self.log_spread = nn.Parameter(torch.tensor(math.log(positive("the spread of the confinement", spread))))

    @property
    def spread(self) -> Tensor:
        """tau, the standard deviation of exp(-E_0)."""
        return self.log_spread.exp()

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x.square().flatten(1).sum(1) * torch.exp(-2 * self.log_spread)

    def jet(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(E_0, v . grad E_0, v^T (Hess E_0) v), each (B,)."""
        steepness = torch.exp(-2 * self.log_spread)
        parts = 0.5 * x.square(), x * v, v.square()
        return tuple(part.flatten(1).sum(1) * steepness for part in parts)


class EnergyMLP(nn.Module):
    """A perceptron from an event of any shape to its energy.

        h_1 = act(W_1 x + b_1),   h_{i+1} = act(W_{i+1} h_i + b_{i+1}),   E = w . h + b + 1/2 |x|^2/tau^2

    Arguments:
        event_shape: any shape; the event is flattened.
        hidden: widths of the hidden layers.
        activation: `softplus`, `silu` or `tanh`.
        confinement: whether the quadratic term is there; without it exp(-E) may have no finite integral.
        spread: tau at the start.
        input_gain: factor on the initial first layer; above 1 for details much finer than the spread of the data, which
            training is slow to find.
        checkpointing: recompute the inside of each layer in the backward pass instead of storing it.

    Shapes: `x (B, *event)` to `(B,)`.
    Errors: InputError for an activation without second derivative; ValueError for another event shape or a condition.

    Example:
        >>> EnergyMLP((2,), hidden=(16, 16))(torch.zeros(5, 2)).shape
        torch.Size([5])
    """

    def __init__(
        self,
        event_shape: tuple[int, ...],
        *,
        hidden: tuple[int, ...] | list[int] = (300, 300),
        activation: Literal["silu", "softplus", "tanh"] = "softplus",
        confinement: bool = True,
        spread: float = 1.0,
        input_gain: float = 1.0,
        checkpointing: bool = False,
    ):
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise InputError(f"hidden = {list(hidden)} must list the widths of at least one layer")
        positive("input_gain", input_gain)
        self.event_shape, self.checkpointing = tuple(event_shape), checkpointing
        widths = [math.prod(event_shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in zip(widths[:-1], widths[1:], strict=True):
            layers += [nn.Linear(before, after), smooth_activation(activation)]
        with torch.no_grad():
            for parameter in layers[1].parameters():
                parameter *= input_gain
        self.body = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
        self.confinement = Confinement(spread) if confinement else None

    def forward(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        _check_event(self, x, cond)
        energy = _apply_body(self, x).squeeze(1)
        return energy if self.confinement is None else energy + self.confinement(x)

    def jet(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(E, v . grad E, v^T (Hess E) v), each (B,), in about three forward passes."""
        _check_event(self, x, None)
        return _jet(self, x, v)


class EnergyConv(nn.Module):
    """A convolutional network from an image or a sequence to its energy, for any size.

        h_1 = act(norm(conv(x))),   h_{i+1} = act(norm(conv(h_i) at every second position))
        E = w . mean over positions of h + b + 1/2 |x|^2/tau^2

    Arguments:
        event_shape: (C, H, W) or (C, T); other sizes may be given to `forward`, the channels are fixed.
        channels: channels of the convolutions: the first keeps the positions, every further one halves them.
        activation: `silu`, `softplus` or `tanh`.
        group_norm: whether the maps are normalised by groups of channels; second-order jets then fall back to autograd.
        spectral_norm: whether the largest singular value of every weight is kept at one.
        confinement: whether the quadratic term is there.
        spread: tau at the start.
        checkpointing: recompute the inside of each layer in the backward pass instead of storing it.

    Shapes: `x (B, *event)` to `(B,)`; `mask (B, 1, T)` bool for sequences, True = valid: other frames have no effect.
    Errors: InputError for an activation without second derivative; ValueError for another kind of event or a condition.

    Example:
        >>> EnergyConv((1, 8, 8), channels=(8, 16))(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3])
    """

    def __init__(
        self,
        event_shape: tuple[int, ...],
        *,
        channels: tuple[int, ...] | list[int] = (64, 64, 128),
        activation: Literal["silu", "softplus", "tanh"] = "silu",
        group_norm: bool = False,
        spectral_norm: bool = False,
        confinement: bool = True,
        spread: float = 1.0,
        checkpointing: bool = False,
    ):
        super().__init__()
        in_channels, *space = event_shape
        if len(space) not in CONVOLUTION:
            raise InputError(f"a convolutional energy takes events (C, T) or (C, H, W), got {tuple(event_shape)}")
        if not channels or min(channels) < 1:
            raise InputError(f"channels = {list(channels)} must list the channels of at least one layer")
        if spectral_norm and checkpointing:
            raise InputError("spectral_norm = true does not go with checkpointing = true, which would compute the "
                             "weights again, and other ones, in the backward pass: leave one of the two out")
        self.event_shape, self.dims, self.checkpointing = tuple(event_shape), len(space), checkpointing
        widths = [in_channels, *channels]
        self.strides = [1] + [2] * (len(channels) - 1)
        stages = []
        for before, after, stride in zip(widths[:-1], widths[1:], self.strides, strict=True):
            convolution = CONVOLUTION[self.dims](before, after, 3, stride=stride, padding=1)
            if spectral_norm:
                nn.utils.parametrizations.spectral_norm(convolution)
            norm = [GroupNorm(after)] if group_norm else []
            stages.append(nn.Sequential(convolution, *norm, smooth_activation(activation)))
        pool = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d}[self.dims](1)
        head = nn.Linear(widths[-1], 1)
        if spectral_norm:
            nn.utils.parametrizations.spectral_norm(head)
        self.body = nn.Sequential(*stages, nn.Sequential(pool, nn.Flatten(), head))
        self.confinement = Confinement(spread) if confinement else None

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        _check_channels(self, x, cond)
        x, energy = (x, _apply_body(self, x)) if mask is None else self._masked(x, mask)
        energy = energy.squeeze(1)
        return energy if self.confinement is None else energy + self.confinement(x)

    def jet(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(E, v . grad E, v^T (Hess E) v), each (B,), in about three forward passes."""
        _check_channels(self, x, None)
        return _jet(self, x, v)

    @property
    def has_jet(self) -> bool:
        """Whether `jet` works: not with group normalisation."""
        return has_jet(self.body)

    def _masked(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.dims != 1 or mask.dtype != torch.bool or mask.shape != (len(x), 1, x.shape[-1]):
            raise ValueError(f"a mask is bool (B, 1, T), for sequences, got {mask.dtype} of shape {tuple(mask.shape)}")
        h = x = hide(x, mask)
        *stages, (_, flatten, head) = self.body
        for stride, stage in zip(self.strides, stages, strict=True):
            mask = mask[..., ::stride]
            h = run(_masked_stage, stage, h, mask, again=self.checkpointing)
        count = mask.sum(-1, keepdim=True).clamp(min=1)
        return x, head(flatten(h.sum(-1, keepdim=True) / count))


def _masked_stage(stage: nn.Sequential, h: Tensor, mask: Tensor) -> Tensor:
    for layer in stage:
        h = hide(layer(h, mask=mask) if isinstance(layer, GroupNorm) else layer(h), mask)
    return h


def _stages(body: nn.Sequential) -> list[nn.Module]:
    """The units that are checkpointed: each linear layer with its activation, or each stage of `EnergyConv`."""
    if isinstance(body[0], nn.Sequential):
        return list(body)
    return [body[:3], *(body[k : k + 2] for k in range(3, len(body), 2))]


def _apply_body(network: EnergyMLP | EnergyConv, x: Tensor) -> Tensor:
    for stage in _stages(network.body):
        x = run(stage, x, again=network.checkpointing)
    return x


def _jet(network: EnergyMLP | EnergyConv, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    jet = Jet.line(x, v)
    for stage in _stages(network.body):
        jet = run(propagate, stage, jet, again=network.checkpointing)
    triple = tuple(part.squeeze(1) for part in jet.triple())
    if network.confinement is None:
        return triple
    return tuple(a + b for a, b in zip(triple, network.confinement.jet(x, v), strict=True))


def _check_event(network: nn.Module, x: Tensor, cond: Tensor | None) -> None:
    if tuple(x.shape[1:]) != network.event_shape:
        raise ValueError(f"the energy was built for events of shape {network.event_shape}, got {tuple(x.shape[1:])}")
    _refuse(cond)


def _check_channels(network: nn.Module, x: Tensor, cond: Tensor | None) -> None:
    check_channels("the energy", x, network.event_shape[0], network.dims)
    _refuse(cond)


def _refuse(cond: Tensor | None) -> None:
    if cond is not None:
        raise ValueError("this energy was built without a condition: leave cond out")


class UNetEnergy(nn.Module):
    """The energy of an image or a sequence by a U-Net f of the same shape.

        E(x) = 1/2 |x - f(x)|^2      form `residual`: low where f reconstructs x
        E(x) = sum x f(x)            form `product`
        both + 1/2 |x|^2/tau^2

    f is zero at the start, so the residual form starts as a Gaussian.

    Arguments:
        event_shape: (C, H, W) or (C, T).
        num_classes: number of classes, None for an energy without condition.
        form: `residual` or `product`.
        channels: channels of the first level.
        multipliers: one per level.
        blocks: residual blocks per level.
        attention: kind of attention at the lowest level; not `hard`, whose gradient in training is a surrogate.
        heads: heads of the attention.
        confinement: whether the quadratic term is there.
        spread: tau at the start.

    Shapes: `x (B, *event)`, `cond (B,)` int64 or None, `mask (B, 1, T)` bool or None; the result is `(B,)`.
    Source: Salimans and Ho 2021, "Should EBMs model the energy or the score?", section 3.

    Example:
        >>> energy = UNetEnergy((1, 8, 8), channels=8, multipliers=(1, 2), blocks=1, confinement=False)
        >>> energy(torch.ones(2, 1, 8, 8)).tolist()
        [32.0, 32.0]
    """

    def __init__(
        self,
        event_shape: tuple[int, ...],
        num_classes: int | None = None,
        *,
        form: Literal["residual", "product"] = "residual",
        channels: int = 32,
        multipliers: list[int] | tuple[int, ...] = (1, 2),
        blocks: int = 1,
        attention: AttentionKind = "none",
        heads: int = 4,
        confinement: bool = True,
        spread: float = 1.0,
    ):
        super().__init__()
        one_of("form", form, ("residual", "product"))
        check_heads(attention, heads, 4)
        if attention == "hard":
            raise InputError("attention = hard has in training the gradient of a softmax, not its own: the score of an "
                             "energy would not be its gradient")
        self.form = form
        self.unet = UNet(
            event_shape, num_classes,
            channels=channels, multipliers=multipliers, blocks=blocks, attention=attention, heads=heads,
        )  # fmt: skip
        self.confinement = Confinement(spread) if confinement else None

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = hide(x, mask)
        # The fused kernels of attention have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            f = self.unet(x, x.new_zeros(len(x)), cond, mask)
        parts = 0.5 * (x - f).square() if self.form == "residual" else x * f
        energy = parts.flatten(1).sum(1)
        return energy if self.confinement is None else energy + self.confinement(x)


class DeepKernelEnergy(nn.Module):
    """An energy made of Gaussian kernels between learned features of x and of inducing points z_l.

        E(x) = - sum_l alpha_l k_l(x) + 1/2 |x|^2/tau^2,
        k_l(x) = sum_r rho_r exp(-|phi(x) - phi(z_l)|^2 / (2 scale_r^2)),   rho = softmax

    phi is a perceptron with a linear skip. E is linear in alpha and its score loss is quadratic in alpha, so the best
    alpha is a linear system (see `genmodels.energy.kernel_fit`); phi, z, rho, scales and tau are learned by gradients.

    Arguments:
        event_shape: (D,).
        inducing: number L of inducing points.
        scales: widths of the kernels at the start.
        hidden: width of the hidden layers of phi, and of its output.
        depth: number of layers of phi.
        spread: tau at the start.
        ridge: weight of |alpha|^2/2 in the linear system, at the start; learned.

    Shapes: `x (B, D)` to `(B,)`; `alpha (L,)`.
    Errors: ValueError for events that are no vectors, numbers below 1, scales or a ridge that are not positive.
    Source: Wenliang et al. 2019, "Learning deep kernels for exponential family densities"; Song et al. 2019,
        section 5.1.

    Example:
        >>> energy = DeepKernelEnergy((2,), inducing=5)
        >>> energy(torch.ones(3, 2))  # alpha = 0: the base alone
        tensor([1., 1., 1.], grad_fn=<SubBackward0>)
    """

    def __init__(
        self,
        event_shape: tuple[int, ...],
        *,
        inducing: int = 200,
        scales: tuple[float, ...] | list[float] = (1.0, 3.3, 10.0),
        hidden: int = 30,
        depth: int = 3,
        spread: float = 1.0,
        ridge: float = 0.01,
    ):
        super().__init__()
        if len(event_shape) != 1:
            raise ValueError(f"a deep kernel takes vectors (D,), got events of shape {tuple(event_shape)}")
        at_least(1, inducing=inducing, hidden=hidden, depth=depth)
        if not scales or not all(value > 0 for value in (*scales, ridge)):
            raise ValueError(f"scales = {list(scales)} and ridge = {ridge} must be positive, with at least one scale")
        self.event_shape, (dims,) = tuple(event_shape), event_shape
        layers: list[nn.Module] = []
        for i in range(depth):
            layers += [nn.Linear(dims if i == 0 else hidden, hidden)]
            layers += [smooth_activation("softplus")] if i + 1 < depth else []
        self.features = nn.Sequential(*layers)
        self.skip = nn.Linear(dims, hidden, bias=False)
        self.points = nn.Parameter(torch.randn(inducing, dims))
        self.log_scales = nn.Parameter(torch.tensor(scales).log())
        self.mixture = nn.Parameter(torch.zeros(len(scales)))
        self.log_ridge = nn.Parameter(torch.tensor(ridge).log())
        self.confinement = Confinement(spread)
        self.register_buffer("alpha", torch.zeros(inducing))

    def set_points(self, x: Tensor) -> None:
        """Sets the inducing points `x (L, D)`."""
        with torch.no_grad():
            self.points.copy_(x)

    def forward(self, x: Tensor, cond: Tensor | None = None, *, alpha: Tensor | None = None) -> Tensor:
        _check_event(self, x, cond)
        squared = _squared_distance(*_centred(self._phi(x), self._phi(self.points)))
        kernel = sum(rho * torch.exp(-c * squared) for rho, c in self._kernels())
        return self.confinement(x) - kernel @ (self.alpha if alpha is None else alpha)

    def jet(self, x: Tensor, v: Tensor, *, alpha: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(E, v . grad E, v^T (Hess E) v), each (B,)."""
        alpha = self.alpha if alpha is None else alpha
        pairs = zip(self.confinement.jet(x, v), self.kernel_jet(x, v), strict=True)
        return tuple(base - kernel @ alpha for base, kernel in pairs)

    def kernel_jet(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(k_l, v . grad k_l, v^T (Hess k_l) v) for all inducing points, each (B, L)."""
        value, slope, curvature = self.kernel_jets(x, v[None])
        return value, slope[0], curvature[0]

    def kernel_jets(self, x: Tensor, directions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for M directions (M, B, D) at once: k_l (B, L), and the two derivatives, each (M, B, L).

        With q = |phi(x + t v) - phi(z)|^2 and k = exp(-c q):  q' = 2 (phi - phi_z) . phi',
        q'' = 2 |phi'|^2 + 2 (phi - phi_z) . phi'',  k' = -c q' k,  k'' = ((c q')^2 - c q'') k. All directions share
        the sums of k, c k and c^2 k over the widths of the kernels.
        """
        count = len(directions)
        deep = propagate(self.features, Jet.line(x.repeat(count, 1), directions.flatten(0, 1))).triple()
        first, second = deep[1] + self.skip(directions.flatten(0, 1)), deep[2]
        value, centres = _centred(deep[0] + self.skip(x).repeat(count, 1), self._phi(self.points))  # (M B, hidden)
        slope = 2 * ((value * first).sum(1, keepdim=True) - first @ centres.T)
        curvature = 2 * (first.square() + value * second).sum(1, keepdim=True) - 2 * second @ centres.T
        slope, curvature = slope.view(count, len(x), -1), curvature.view(count, len(x), -1)
        squared = _squared_distance(value[: len(x)], centres)
        kernel = [(rho * torch.exp(-c * squared), c) for rho, c in self._kernels()]
        once, twice = sum(c * k for k, c in kernel), sum(c.square() * k for k, c in kernel)
        return sum(k for k, _ in kernel), -slope * once, slope.square() * twice - curvature * once

    def _phi(self, x: Tensor) -> Tensor:
        return self.features(x) + self.skip(x)

    def _kernels(self):
        """(rho_r, 1/(2 scale_r^2)) for each kernel."""
        return zip(self.mixture.softmax(0), 0.5 * torch.exp(-2 * self.log_scales), strict=True)


def _centred(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both minus the mean of b: their differences are the same, and products more accurate."""
    centre = b.detach().mean(0)
    return a - centre, b - centre


def _squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """|a_i - b_j|^2 by products: no (N, M, D) tensor, and smooth also where a_i = b_j."""
    return a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.T
