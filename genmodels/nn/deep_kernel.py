"""The network of a deep kernel exponential family: an energy that is linear in its last weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.nn.energy_nets import Confinement, _check_event
from genmodels.nn.jet import Jet, propagate
from genmodels.nn.smooth import smooth_activation


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
        """Takes the inducing points from data: `x (L, D)`."""
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
        value, slope, bend = self.kernel_jets(x, v[None])
        return value, slope[0], bend[0]

    def kernel_jets(self, x: Tensor, directions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for M directions (M, B, D) at once: k_l (B, L), and the two derivatives, each (M, B, L).

        With q = |phi(x + t v) - phi(z)|^2 and k = exp(-c q):  q' = 2 (phi - phi_z) . phi',
        q'' = 2 |phi'|^2 + 2 (phi - phi_z) . phi'',  k' = -c q' k,  k'' = ((c q')^2 - c q'') k. The sums of k, c k and
        c^2 k over the widths of the kernels are all that the directions need of them.
        """
        count = len(directions)
        deep = propagate(self.features, Jet.line(x.repeat(count, 1), directions.flatten(0, 1))).triple()
        first, second = deep[1] + self.skip(directions.flatten(0, 1)), deep[2]
        value, centres = _centred(deep[0] + self.skip(x).repeat(count, 1), self._phi(self.points))  # (M B, hidden)
        slope = 2 * ((value * first).sum(1, keepdim=True) - first @ centres.T)
        bend = 2 * (first.square() + value * second).sum(1, keepdim=True) - 2 * second @ centres.T
        slope, bend = slope.view(count, len(x), -1), bend.view(count, len(x), -1)
        squared = _squared_distance(value[: len(x)], centres)
        kernel = [(rho * torch.exp(-c * squared), c) for rho, c in self._kernels()]
        once, twice = sum(c * k for k, c in kernel), sum(c.square() * k for k, c in kernel)
        return sum(k for k, _ in kernel), -slope * once, slope.square() * twice - bend * once

    def _phi(self, x: Tensor) -> Tensor:
        return self.features(x) + self.skip(x)

    def _kernels(self):
        """(rho_r, 1/(2 scale_r^2)) for each kernel."""
        return zip(self.mixture.softmax(0), 0.5 * torch.exp(-2 * self.log_scales), strict=True)


def _centred(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both less the mean of b, which no difference of the two notices: products of what lies far out lose digits."""
    centre = b.detach().mean(0)
    return a - centre, b - centre


def _squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """|a_i - b_j|^2 by products: no (N, M, D) tensor, and smooth also where a_i = b_j."""
    return a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.T
