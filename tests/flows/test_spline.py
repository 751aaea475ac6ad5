"""The rational-quadratic spline: numbers worked out by hand, knots, tails, and bins of the least size."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import softmax, softplus

from genmodels.flows.spline import MIN_DERIVATIVE, RationalQuadraticSpline, _inside_bin, neural_spline

X, Y, SLOPES = (-2.0, -1.0, 0.5, 2.0), (-2.0, 0.0, 1.0, 2.0), (1.0, 0.5, 2.0, 1.0)
NUMBERS = [  # x, z, log dz/dx
    (-1.5, -0.9090909091, 1.0678406300),
    (-1.0, 0.0, -0.6931471806),
    (0.0, 0.44, -0.4412995611),
    (1.25, 1.6153846154, -0.8909729239),
    (1.9, 1.9153846154, -0.3269027856),
    (2.5, 2.5, 0.0),
]


def params_for(spline, knots_x, knots_y, slopes):
    """Parameters (1, 3K - 1, 1) that give these knots and inner derivatives."""
    width, least = 2 * spline.bound, spline.min_size

    def logits(knots):
        shares = torch.tensor(knots, dtype=torch.float64).diff() / width
        return ((shares - least) / (1 - spline.bins * least)).log()

    inner = torch.tensor(slopes[1:-1], dtype=torch.float64) - MIN_DERIVATIVE
    derivatives = inner.expm1().log() - math.log(math.expm1(1 - MIN_DERIVATIVE))
    return torch.cat([logits(knots_x), logits(knots_y), derivatives])[None, :, None]


def agrees_with_the_numbers(spline):
    x, z, log_slope = (torch.tensor(column, dtype=torch.float64)[:, None] for column in zip(*NUMBERS, strict=True))
    params = params_for(spline, X, Y, SLOPES).expand(len(x), -1, -1)
    for there, back, sign, method in ((x, z, 1, spline), (z, x, -1, spline.inverse)):
        value, log_derivative = method(there, params)
        assert (value - back).abs().max() < 1e-8 and (log_derivative - sign * log_slope).abs().max() < 1e-8


def test_numbers():
    agrees_with_the_numbers(RationalQuadraticSpline(bins=3, bound=2.0))


def brute_force(spline, x, params):
    """One number at a time, by the formula of the paper and a loop over the bins."""
    k, bound = spline.bins, spline.bound
    if not -bound < x < bound:
        return x, 0.0
    least = spline.min_size

    def knots(raw):
        sizes = 2 * bound * (least + (1 - k * least) * softmax(raw, 0))
        return [-bound + float(sizes[:i].sum()) for i in range(k)] + [bound]

    knots_x, knots_y = knots(params[:k]), knots(params[k : 2 * k])
    inner = 1e-3 + softplus(params[2 * k :] + math.log(math.exp(0.999) - 1))
    d = [1.0, *inner.tolist(), 1.0]
    i = max(i for i in range(k) if knots_x[i] <= x)
    w, h = knots_x[i + 1] - knots_x[i], knots_y[i + 1] - knots_y[i]
    xi, s = (x - knots_x[i]) / w, h / w
    below = s + (d[i + 1] + d[i] - 2 * s) * xi * (1 - xi)
    z = knots_y[i] + h * (s * xi**2 + d[i] * xi * (1 - xi)) / below
    slope = s**2 * (d[i + 1] * xi**2 + 2 * s * xi * (1 - xi) + d[i] * (1 - xi) ** 2) / below**2
    return z, math.log(slope)


def agrees_with_brute_force(spline):
    generator = torch.Generator().manual_seed(0)
    params = 1.5 * torch.randn(3 * spline.bins - 1, generator=generator, dtype=torch.float64)
    x = torch.linspace(-1.2 * spline.bound, 1.2 * spline.bound, 61, dtype=torch.float64)
    z, log_derivative = spline(x[:, None], params[None, :, None].expand(len(x), -1, -1))
    for i, value in enumerate(x.tolist()):
        assert (float(z[i]), float(log_derivative[i])) == pytest.approx(brute_force(spline, value, params), abs=1e-10)


@pytest.mark.parametrize("options", [{}, {"bins": 1}, {"bins": 2, "bound": 0.5}, {"bins": 16, "bound": 5.0}])
def test_brute_force(options):
    agrees_with_brute_force(RationalQuadraticSpline(**options))


class Unpinned(RationalQuadraticSpline):
    """The derivatives at the ends are those of the neighbours."""

    def knots(self, params):
        knots_x, knots_y, derivatives = super().knots(params)
        return knots_x, knots_y, torch.cat([derivatives[:, 1:2], derivatives[:, 1:-1], derivatives[:, -2:-1]], dim=1)


class Shifted(RationalQuadraticSpline):
    """Every x is looked up one bin too far."""

    def _bin(self, v, by, *others):
        return super()._bin(v + 2 * self.bound / self.bins, by, *others)


@pytest.mark.parametrize("bug", [Unpinned, Shifted])
@pytest.mark.parametrize("check", [agrees_with_the_numbers, agrees_with_brute_force])
def test_mutants(check, bug):
    with pytest.raises(AssertionError):
        check(bug(bins=3, bound=2.0))


# ---- knots, ends and tails ----


def random_spline(dtype=torch.float64, spread=2.0, count=400):
    spline = RationalQuadraticSpline()
    generator = torch.Generator().manual_seed(1)
    return spline, (spread * torch.randn(count, spline.params_per_dim, 1, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-4)])
def test_knots_are_hit_from_both_sides(dtype, tolerance):
    spline, params = random_spline(dtype)
    knots_x, knots_y, derivatives = spline.knots(params)
    assert (knots_x[:, 0] == -3).all() and (knots_x[:, -1] == 3).all()
    assert knots_x.diff(dim=1).min() > 0.9 * 6e-3 and knots_y.diff(dim=1).min() > 0.9 * 6e-3
    for i in range(spline.bins + 1):
        z, log_derivative = spline(knots_x[:, i], params)
        assert (z - knots_y[:, i]).abs().max() < tolerance
        assert (log_derivative - derivatives[:, i].log()).abs().max() < tolerance
        x, log_derivative = spline.inverse(knots_y[:, i], params)
        assert (x - knots_x[:, i]).abs().max() < tolerance
        assert (log_derivative + derivatives[:, i].log()).abs().max() < tolerance


def test_ends_are_kept_exactly():
    for dtype in (torch.float32, torch.float64):
        spline, params = random_spline(dtype)
        for end in (-3.0, 3.0, -3.5, 1e9):
            x = torch.full((len(params), 1), end, dtype=dtype)
            for direction in (spline, spline.inverse):
                z, log_derivative = direction(x, params)
                assert torch.equal(z, x) and not log_derivative.any()


def no_gradient_is_lost(spline, params):
    """Far outside, x gets the gradient of the identity, params get zeros, and nothing is NaN."""
    params = params.clone().requires_grad_()
    x = torch.full((len(params), 1), 1e30, dtype=params.dtype).requires_grad_()
    for direction in (spline, spline.inverse):
        z, log_derivative = direction(x, params)
        for_x, for_params = torch.autograd.grad(z.sum() + log_derivative.sum(), (x, params))
        assert (for_x == 1).all() and (for_params == 0).all()


class Unclamped(RationalQuadraticSpline):
    """The formula is evaluated where it does not hold, and the result is thrown away."""

    def forward(self, x, params):
        knots_x, knots_y, derivatives = self.knots(params)
        x_k, w, y_k, h, d, d_next = self._bin(x, knots_x, knots_x, knots_y, derivatives)
        return self._with_tails(x, *_inside_bin((x - x_k) / w, h / w, y_k, h, d, d_next))


def test_no_gradient_is_lost_outside():
    no_gradient_is_lost(*random_spline(torch.float32))


def test_mutant_evaluation_outside():
    with pytest.raises(AssertionError):
        no_gradient_is_lost(Unclamped(), random_spline(torch.float32)[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_round_trip_is_as_good_as_the_slope_allows(dtype):
    """A rounding of z moves x by eps / (dz/dx): no more than a few of these, however steep or flat the bin."""
    spline, _ = random_spline()
    generator = torch.Generator().manual_seed(2)
    x = torch.linspace(-3, 3, 5000, dtype=dtype)[:, None]
    params = (4 * torch.randn(len(x), spline.params_per_dim, 1, generator=generator)).to(dtype)
    z, log_derivative = spline(x, params)
    again, _ = spline.inverse(z, params)
    allowed = torch.finfo(dtype).eps * 4 * (1 + torch.exp(-log_derivative))
    assert ((again - x).abs() <= 20 * allowed).all()


@pytest.mark.parametrize("scale", [1, 5, 10, 30])
def test_an_inverse_stays_in_its_bin(scale):
    """At the knots, one rounding next to them and at values that the map itself gives, whatever the parameters."""
    spline, generator = RationalQuadraticSpline(bins=8), torch.Generator().manual_seed(0)
    params = scale * torch.randn(40_000, spline.params_per_dim, 1, generator=generator)
    knots = spline.knots(params)[1]
    knot = knots.gather(1, torch.randint(9, (len(params), 1, 1), generator=generator))[:, 0]
    x = 3 * (2 * torch.rand(len(params), 1, generator=generator) - 1)
    for z in (spline(x, params)[0], knot, *(knot.nextafter(torch.tensor(end)) for end in (-9.0, 9.0))):
        back, log_derivative = spline.inverse(z, params)
        assert back.isfinite().all() and log_derivative.isfinite().all()
        inside = z.abs() < spline.bound
        k = (z[:, None] >= knots[:, 1:-1]).sum(1, keepdim=True)
        first, last = (spline.knots(params)[0].gather(1, k + end)[:, 0] for end in (0, 1))
        rounding = 4 * torch.finfo(z.dtype).eps * spline.bound
        assert ((back >= first - rounding) & (back <= last + rounding))[inside].all()


def test_order_is_kept():
    spline, params = random_spline(count=1)
    x = torch.linspace(-4, 4, 10001, dtype=torch.float64)[:, None]
    z, _ = spline(x, params.expand(len(x), -1, -1))
    assert (z.diff(dim=0) > 0).all()


def test_extreme_parameters():
    """Huge raw values give bins of the least size and derivatives of the least size, and finite gradients."""
    spline = RationalQuadraticSpline(bins=4)
    for sign in (1.0, -1.0):
        params = torch.zeros(200, 11, 1)
        params[:, 0], params[:, 5], params[:, 8:] = sign * 1e4, sign * 1e4, sign * 1e3
        params.requires_grad_()
        x = torch.linspace(-3.1, 3.1, 200)[:, None].requires_grad_()
        for direction in (spline, spline.inverse):
            z, log_derivative = direction(x, params)
            assert z.isfinite().all() and log_derivative.isfinite().all()
            gradients = torch.autograd.grad(z.sum() + log_derivative.sum(), (x, params))
            assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bins": 10, "min_size": 0.1}, "bins . min_size = 1 must be below 1"),
        ({"bins": 1000}, "below 1"),
        ({"bins": 0}, "at least one bin"),
        ({"bound": 0.0}, "positive, finite bound"),
        ({"min_size": 0.0}, "below 1"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RationalQuadraticSpline(**options)


@pytest.mark.parametrize("layers, moved", [(1, [False, False, True, True]), (2, [True] * 4)])
def test_couplings_change_one_half_and_then_the_other(layers, moved):
    flow = neural_spline(4, layers=layers, mix="none", hidden=8).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in flow.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2)
    x = 2 * torch.rand(20, 4, generator=generator, dtype=torch.float64) - 1
    assert (flow(x)[0] - x).abs().amax(dim=0).gt(1e-3).tolist() == moved
