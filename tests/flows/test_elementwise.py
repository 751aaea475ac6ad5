"""Elementwise maps, every kind of them, against autograd and closed forms."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import log_expit, logsumexp
from torch import nn

from genmodels.flows import elementwise as module
from genmodels.flows.elementwise import (
    SCALES,
    Additive,
    Affine,
    LogisticMixture,
    MeanScale,
    TanhScale,
    TiedScale,
    bounded,
    unbounded,
)
from genmodels.flows.spline import RationalQuadraticSpline

CHANNELS = 2
TRANSFORMS = {
    "additive": Additive,
    "affine": lambda: Affine(CHANNELS),
    "affine sigmoid": lambda: Affine(CHANNELS, scale="sigmoid"),
    "affine tied": lambda: Affine(CHANNELS, scale="tied"),
    "affine plain": lambda: Affine(CHANNELS, scale="plain"),
    "mean and scale": MeanScale,
    "spline": lambda: RationalQuadraticSpline(bins=5),
    "spline, one bin": lambda: RationalQuadraticSpline(bins=1, bound=2.0),
    "mixture": lambda: LogisticMixture(CHANNELS, components=3),
    "mixture, one component": lambda: LogisticMixture(CHANNELS, components=1),
}
SPACES = [(), (3,), (2, 2)]
every_transform = pytest.mark.parametrize("name", TRANSFORMS)


def ready(make, space=(), *, batch=3, seed=0, spread=1.0, dtype=torch.float64):
    """A transform with random parameters of its own, x inside and outside of splines, and params."""
    generator = torch.Generator().manual_seed(seed)
    transform = make().to(dtype)
    with torch.no_grad():
        for parameter in transform.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    x = 2 * torch.randn((batch, CHANNELS, *space), generator=generator, dtype=dtype)
    shape = (batch, transform.params_per_dim, CHANNELS, *space)
    return transform, x, spread * torch.randn(shape, generator=generator, dtype=dtype)


def close(a, b, tolerance):
    assert a.isfinite().all() and b.isfinite().all()
    assert (a - b).abs().max() <= tolerance * (1 + b.abs().max())


# ---- the checks ----


def goes_back(make, space=()):
    transform, x, params = ready(make, space)
    tolerance = 1e-10 if transform.exact_inverse else 1e-8
    for there, back in ((transform, transform.inverse), (transform.inverse, transform)):
        y, log_derivative = there(x, params)
        again, log_back = back(y, params)
        close(again, x, tolerance)
        close(log_back, -log_derivative, tolerance)


def derivative_is_autograds(make, space=()):
    """d z_i / d x_i = exp(log_derivative), and nothing else depends on x_i."""
    transform, x, params = ready(make, space, batch=2)
    for direction in (transform, transform.inverse):
        _, log_derivative = direction(x, params)
        assert log_derivative.shape == x.shape and log_derivative.dtype == x.dtype
        jacobian = torch.autograd.functional.jacobian(lambda x, f=direction: f(x, params)[0], x)
        jacobian = jacobian.reshape(x.numel(), x.numel())
        close(jacobian, torch.diag(jacobian.diagonal()), 0)
        close(jacobian.diagonal().abs().log(), log_derivative.detach().flatten(), 1e-8)


def stays_finite(make):
    """Values and gradients at tiny and at large inputs, at the ends and at the knots."""
    for dtype, spread in ((torch.float64, 3.0), (torch.float32, 1.0), (torch.float32, 0.0)):
        transform, _, params = ready(make, batch=1, spread=spread, dtype=dtype)
        places = [0.0, 1e-30, -1e-30, 50.0, -50.0, 2.0, -2.0, 3.0, -3.0, 3.0 - 1e-7, 1e4, -1e4]
        if isinstance(transform, RationalQuadraticSpline):
            knots_x, knots_y, _ = transform.knots(params)
            places += knots_x[0, :, 0].tolist() + knots_y[0, :, 0].tolist()
        x = torch.tensor(places, dtype=dtype)[:, None].repeat(1, CHANNELS).requires_grad_()
        params = params.repeat(len(x), 1, 1).requires_grad_()
        for direction in (transform, transform.inverse):
            z, log_derivative = direction(x, params)
            assert z.isfinite().all() and log_derivative.isfinite().all()
            learned = [x, params, *transform.parameters()]
            used = z.sum() + log_derivative.sum()
            gradients = torch.autograd.grad(used, learned, allow_unused=True)
            assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)
            assert gradients[0] is not None and gradients[1] is not None


def gradients_are_right(make):
    """First and second derivatives with respect to x, params and what the transform has learned, in both directions."""
    transform, x, params = ready(make, batch=1, spread=0.5)
    names = [name for name, _ in transform.named_parameters()]
    inputs = [x.requires_grad_(), params.requires_grad_(), *transform.parameters()]
    for method in ("forward", "inverse"):

        def run(x, params, *learned, method=method):
            return torch.func.functional_call(
                _Method(transform, method), {f"inside.{n}": v for n, v in zip(names, learned, strict=True)}, (x, params)
            )

        assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-6, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, inputs, eps=1e-6, atol=1e-5, fast_mode=True)


class _Method(nn.Module):
    """A module whose forward is one method of another."""

    def __init__(self, inside, method):
        super().__init__()
        self.inside, self.method = inside, method

    def forward(self, *inputs):
        return getattr(self.inside, self.method)(*inputs)


def single_precision_agrees(make):
    transform, x, params = ready(make, batch=200)
    exact = transform(x, params)
    for a, b in zip(transform.float()(x.float(), params.float()), exact, strict=True):
        assert a.dtype == torch.float32
        close(a.double(), b, 1e-4)


@every_transform
@pytest.mark.parametrize("space", SPACES)
def test_goes_back(name, space):
    goes_back(TRANSFORMS[name], space)


@every_transform
@pytest.mark.parametrize("space", [(), (2, 2)])
def test_derivative_is_autograds(name, space):
    derivative_is_autograds(TRANSFORMS[name], space)


@every_transform
def test_stays_finite(name):
    stays_finite(TRANSFORMS[name])


@every_transform
def test_gradients_are_right(name):
    gradients_are_right(TRANSFORMS[name])


@every_transform
def test_single_precision_agrees(name):
    single_precision_agrees(TRANSFORMS[name])


@every_transform
def test_positions_are_alike(name):
    """A map is its positions, each taken as a vector; and the inputs stay as they are."""
    transform, x, params = ready(TRANSFORMS[name], (2, 3))
    x_before, params_before = x.clone(), params.clone()
    for direction in (transform, transform.inverse):
        whole = direction(x, params)
        for i in range(2):
            for j in range(3):
                alone = direction(x[:, :, i, j].contiguous(), params[:, :, :, i, j].contiguous())
                for a, b in zip(whole, alone, strict=True):
                    close(a[:, :, i, j], b, 1e-12)
    assert torch.equal(x, x_before) and torch.equal(params, params_before)


@pytest.mark.parametrize("name", ["additive", "affine", "affine tied", "mean and scale", "spline", "spline, one bin"])
def test_starts_as_the_identity(name):
    transform = TRANSFORMS[name]().double()
    x = torch.linspace(-6, 6, 50, dtype=torch.float64).reshape(25, CHANNELS)
    params = transform.start(CHANNELS).double().expand(25, -1, -1)
    for direction in (transform, transform.inverse):
        z, log_derivative = direction(x, params)
        close(z, x, 1e-12)
        close(log_derivative, torch.zeros_like(x), 1e-12)


# ---- mutants ----


class ShiftFirst(Affine):
    """Forward adds t before it scales; inverse does not know."""

    def forward(self, x, params):
        s, t = params.unbind(1)
        h = self.log_scale(s)
        return (x + t) * h.exp(), h


class SameSign(Affine):
    """The inverse returns the log-derivative of forward."""

    def inverse(self, z, params):
        x, log_derivative = super().inverse(z, params)
        return x, -log_derivative


class Offset(Affine):
    """A small offset, alike in both directions."""

    def forward(self, x, params):
        z, log_derivative = super().forward(x, params)
        return z, log_derivative + 1e-4

    def inverse(self, z, params):
        x, log_derivative = super().inverse(z, params)
        return x, log_derivative - 1e-4


class Boundless(Affine):
    """An exponential of whatever the network says, and of x itself."""

    def forward(self, x, params):
        s, t = params.unbind(1)
        h = s * x.square()
        return h.exp() * x + t, h


class Detached(MeanScale):
    """A mean that does not learn."""

    def inverse(self, z, params):
        return super().inverse(z, torch.cat([params[:, :1].detach(), params[:, 1:]], dim=1))


class Half(Affine):
    """A scale computed in half precision."""

    def forward(self, x, params):
        return super().forward(x, params.bfloat16().float() if x.dtype == torch.float32 else params)


@pytest.mark.parametrize(
    "check, bug",
    [
        (goes_back, lambda: ShiftFirst(CHANNELS)),
        (goes_back, lambda: SameSign(CHANNELS)),
        (derivative_is_autograds, lambda: SameSign(CHANNELS)),
        (derivative_is_autograds, lambda: Offset(CHANNELS)),
        (derivative_is_autograds, lambda: Boundless(CHANNELS)),
        (stays_finite, lambda: Boundless(CHANNELS)),
        (single_precision_agrees, lambda: Half(CHANNELS)),
    ],
)
def test_mutants(check, bug):
    with pytest.raises(AssertionError):
        check(bug)


def test_mutant_detached_mean():
    with pytest.raises(Exception, match="Jacobian mismatch"):
        gradients_are_right(Detached)


# ---- bounds and numbers ----


@pytest.mark.parametrize("limit", [5.0, 7.0, 10.0])
def test_bounds(limit):
    h = torch.linspace(-0.999 * limit, 0.999 * limit, 101, dtype=torch.float64)
    close(bounded(unbounded(h, limit), limit), h, 1e-12)
    far = torch.tensor([-1e30, 1e30], dtype=torch.float64)
    assert bounded(far, limit).tolist() == [-limit, limit]
    assert bounded(unbounded(far, limit), limit).tolist() == pytest.approx([-0.999 * limit, 0.999 * limit])
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(bounded(zero, limit), zero)[0] == 1


def test_numbers_of_the_affine_map():
    """a 0.5, b 0.1, s 1, t 0.25, x 2."""
    transform = Affine(1).double()
    with torch.no_grad():
        transform.log_scale.raw.copy_(unbounded(torch.tensor([[0.5], [0.1]], dtype=torch.float64), 5.0))
    params = torch.tensor([[[1.0], [0.25]]], dtype=torch.float64)
    transform.requires_grad_(False)
    z, h = transform(torch.full((1, 1), 2.0, dtype=torch.float64), params)
    assert float(h) == pytest.approx(0.4807970780, abs=1e-8)
    assert float(z) == pytest.approx(3.4847261060, abs=1e-8)
    x, h = transform.inverse(z, params)
    assert float(x) == pytest.approx(2, abs=1e-12) and float(h) == pytest.approx(-0.4807970780, abs=1e-8)


@torch.no_grad()
def test_start_of_each_scale():
    zero = torch.zeros(1, 1, dtype=torch.float64)
    assert [float(SCALES[name](1).double()(zero)) for name in ("tanh", "tied")] == [0, 0]
    assert float(SCALES["sigmoid"](1)(zero).exp()) == pytest.approx(0.001 + 0.999 / (1 + math.exp(-2)), abs=1e-12)
    assert float(SCALES["sigmoid"](1)(zero)) == pytest.approx(-0.1268, abs=5e-5)
    assert bounded(TanhScale(1).raw, 5.0).flatten().tolist() == pytest.approx([0.9869, 0], abs=5e-5)


@pytest.mark.parametrize("scale", [TanhScale, TiedScale])
def test_log_scales_are_bounded(scale):
    module = scale(1)
    for raw in (-1e6, 1e6):
        with torch.no_grad():
            module.raw.fill_(raw)
        assert module(torch.tensor([[-1e6], [0.0], [1e6]])).abs().max() <= 10.001


def test_tied_scale_is_its_formula():
    module = TiedScale(1).double()
    with torch.no_grad():
        module.raw.copy_(unbounded(torch.tensor([0.7], dtype=torch.float64), math.log(10)))
    s = torch.tensor([[-3.0], [0.2]], dtype=torch.float64)
    close(module(s), math.exp(0.7) * torch.tanh(s * math.exp(-0.7)), 1e-12)


def test_unknown_scale():
    with pytest.raises(ValueError, match="tanh, sigmoid, tied, plain, got 'exp'"):
        Affine(2, scale="exp")


# ---- the mixture of logistics: numbers, tails, and an inverse that is found by steps and yet has gradients ----


NUMBERS = [  # x, z, log dz/dx for pi (0.3, 0.7), mu (-1, 2), s (0, log 0.5), h 0.2, t -0.1
    (0.0, -1.5627143512, -0.5551199461),
    (2.0, 0.5803958313, 0.6510605898),
    (-30.0, -36.9912156906, 0.2),
    (40.0, 51.4480487885, 0.2),
]


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def agrees_with_the_numbers(transform):
    transform = transform.double().requires_grad_(False)
    transform.affine.log_scale.raw[1] = unbounded(column(0.2), 5.0)[0]
    scales = unbounded(column(1.0, 0.5).log(), 7.0)
    params = torch.cat([column(0.3, 0.7).log(), column(-1.0, 2.0), scales, column(0.0, -0.1)])
    x, z, log_slope = (column(*values) for values in zip(*NUMBERS, strict=True))
    params = params.expand(len(x), -1, -1)
    for there, back, sign, method in ((x, z, 1, transform), (z, x, -1, transform.inverse)):
        value, log_derivative = method(there, params)
        assert (value - back).abs().max() < 1e-8 and (log_derivative - sign * log_slope).abs().max() < 1e-8


def test_numbers():
    agrees_with_the_numbers(LogisticMixture(1, components=2))


class Complement(LogisticMixture):
    """1 - F by subtraction: nothing is left of the upper tail."""

    def forward(self, x, params):
        mixture, affine = self._unpack(params)
        below = module._shares(x, mixture)[0].logsumexp(1)
        v = below - torch.log1p(-below.exp())
        z, h = self.affine(v, affine)
        return z, module.logit(x, mixture)[1] + h


def test_mutant_subtraction():
    with pytest.raises(AssertionError):
        agrees_with_the_numbers(Complement(1, components=2))


def narrow_case():
    """A wide and a narrow component, whose distances from x in its own scale are large numbers."""
    params = torch.zeros(32, 8, 1)
    params[:, 2], params[:, 4] = 8.0, 7 * math.atanh(-6.5 / 7)
    return torch.linspace(-8, 7.5, 32)[:, None], params


def is_accurate(transform):
    x, params = narrow_case()
    found = transform(x, params)
    for one, right in zip(found, copy.deepcopy(transform).double()(x.double(), params.double()), strict=True):
        torch.testing.assert_close(one.double(), right, rtol=3e-6, atol=3e-6)


def test_narrow_components_keep_their_digits(monkeypatch):
    is_accurate(LogisticMixture(1, components=2))

    def joined(x, mixture):
        u = (x.unsqueeze(1) - mixture.mean) * torch.exp(-mixture.log_scale)
        below = mixture.log_weight + torch.nn.functional.logsigmoid(u)
        return below, below - u

    monkeypatch.setattr(module, "_shares", joined)
    with pytest.raises(AssertionError):
        is_accurate(LogisticMixture(1, components=2))


def random_case(count=200, components=4, spread=2.0, dtype=torch.float64, seed=0):
    """Mixtures whose means lie apart, with scales of all sizes, and x around them."""
    generator = torch.Generator().manual_seed(seed)
    transform = LogisticMixture(1, components=components).to(dtype)
    params = spread * torch.randn(count, 3 * components + 2, 1, generator=generator, dtype=torch.float64)
    x = 4 * torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return transform, x.to(dtype), params.to(dtype)


def test_scipy():
    """Value against scipy's log-sum-exp, inverse against scipy's root finder."""
    transform, x, params = random_case(count=20)
    mixture, _ = transform._unpack(params)
    value, _ = module.logit(x, mixture)
    root = module.solve(x, *mixture)  # x taken as target values
    for i in range(len(x)):
        log_weight, mean, log_scale = (part[i, :, 0].numpy() for part in mixture)

        def logit(at, log_weight=log_weight, mean=mean, log_scale=log_scale):
            u = (at - mean) * np.exp(-log_scale)
            return logsumexp(log_weight + log_expit(u)) - logsumexp(log_weight + log_expit(-u))

        target = float(x[i])
        assert float(value[i]) == pytest.approx(logit(target), abs=1e-10)
        expected = brentq(lambda at, target=target: logit(at) - target, -1e5, 1e5, xtol=1e-12)
        assert float(root[i]) == pytest.approx(expected, abs=1e-9)


# ---- the inverse ----


def solves_everywhere(dtype=torch.float64, tolerance=1e-10):
    """Narrow and wide components, far apart, and targets far in the tails: the root is found to rounding."""
    means = torch.tensor([-100.0, -1.0, 0.0, 90.0])
    scales = torch.tensor([6.9, -6.9, 0.0, -6.9])
    weights = torch.log_softmax(torch.tensor([-5.0, 0.0, 3.0, -20.0]), 0)
    targets = torch.tensor([-50.0, -9.0, -1.0, -1e-30, 0.0, 1e-30, 1.0, 9.0, 50.0])[:, None].to(dtype)
    mixture = module.Mixture(*(part[None, :, None].to(dtype) for part in (weights, means, scales)))
    x = module.solve(targets, *mixture)
    value, log_slope = module.logit(x, mixture)
    # What a rounding of x, or of v, is worth at the slope in that place.
    floor = torch.finfo(dtype).eps * (x.abs() * log_slope.exp() + targets.abs() + 1)
    assert ((value - targets).abs() <= 100 * floor + tolerance).all()


def test_solves_everywhere(monkeypatch):
    solves_everywhere()
    solves_everywhere(torch.float32, 1e-5)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        monkeypatch.setattr(module, "bisections", lambda dtype: 15)
        with pytest.raises(AssertionError):
            solves_everywhere(dtype, tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-8), (torch.float32, 2e-3)])
def test_round_trip(dtype, tolerance):
    transform, x, params = random_case(spread=1.0, dtype=dtype)
    z, log_derivative = transform(x, params)
    again, log_back = transform.inverse(z, params)
    assert (again - x).abs().max() < tolerance and (log_back + log_derivative).abs().max() < tolerance


def test_number_of_steps_is_fixed(monkeypatch):
    """The same work for every input: no step depends on how far the others have come."""
    calls = []
    shares = module._shares
    monkeypatch.setattr(module, "_shares", lambda x, mixture: calls.append(1) or shares(x, mixture))
    transform, _, params = random_case(count=1)
    counts = set()
    for z in (0.0, 1e-30, 3.0, -50.0, 1e6):
        calls.clear()
        transform.inverse(column(z), params)
        counts.add(len(calls))
    assert counts == {module.bisections(torch.float64) + module.NEWTON_STEPS + 1}


def has_implicit_gradients(inverse, transform, z, params):
    """dx/dz = 1 / (dz/dx) and dx/dparam = -(dz/dparam) / (dz/dx), with the right sides from the forward pass."""
    z = z.clone().requires_grad_()
    own = list(transform.parameters())
    params = params.clone().requires_grad_()
    x, _ = inverse(z, params)
    found = torch.autograd.grad(x.sum(), (z, params, *own))
    x = x.detach().requires_grad_()
    slope = torch.autograd.grad(transform(x, params)[0].sum(), x)[0]
    weights = -1 / slope
    expected = torch.autograd.grad((weights.detach() * transform(x, params)[0]).sum(), (params, *own))
    for a, b in zip(found, (1 / slope, *expected), strict=True):
        assert (a - b).abs().max() <= 1e-8 * (1 + b.abs().max())


def test_implicit_gradients():
    transform, z, params = random_case(spread=1.0)
    has_implicit_gradients(transform.inverse, transform, z, params)


def test_function_transforms_of_the_inverse():
    transform, z, params = random_case(count=5, spread=1.0)
    right = torch.autograd.functional.jacobian(lambda at: transform.inverse(at, params)[0].sum(), z)
    together = torch.func.grad(lambda at: transform.inverse(at, params)[0].sum())(z)
    each = torch.func.vmap(torch.func.grad(lambda at, given: transform.inverse(at[None], given[None])[0].sum()))
    for found in (together, each(z, params)):
        torch.testing.assert_close(found, right)


def test_forward_mode_of_the_inverse():
    transform, z, params = random_case(count=5, spread=1.0)
    tangents = (torch.ones_like(z), params.sin())
    right = torch.autograd.functional.jvp(transform.inverse, (z, params), tangents)  # by reverse mode, twice
    torch.testing.assert_close(torch.func.jvp(transform.inverse, (z, params), tangents), right)
    each = torch.func.vmap(torch.func.jacfwd(lambda at, given: transform.inverse(at[None], given[None])[0].sum()))
    for_z = torch.autograd.functional.jacobian(lambda at: transform.inverse(at, params)[0].sum(), z)
    torch.testing.assert_close(each(z, params), for_z)


class NoImplicit(LogisticMixture):
    """The root is a constant."""

    def inverse(self, z, params):
        x, log_derivative = super().inverse(z, params)
        return x.detach() + 0 * (z + params.sum(1)) + 0 * self.affine.log_scale.raw.sum(), log_derivative


class ScalesLeftOut(LogisticMixture):
    """The root depends on the scales, but its gradient does not."""

    def inverse(self, z, params):
        frozen = torch.cat([params[:, : 2 * self.components], params[:, 2 * self.components :].detach()], dim=1)
        return super().inverse(z, frozen)


@pytest.mark.parametrize("bug", [NoImplicit, ScalesLeftOut])
def test_mutant_gradients(bug):
    _, z, params = random_case(spread=1.0)
    transform = bug(1, components=4).double()
    with pytest.raises(AssertionError):
        has_implicit_gradients(transform.inverse, transform, z, params)


def test_gradient_between_distant_components():
    """Where the density all but vanishes the gradient is large, but it is a number."""
    transform = LogisticMixture(1, components=2)
    params = torch.zeros(3, 8, 1)
    params[:, 2], params[:, 3], params[:, 4:6] = -30.0, 30.0, -1.0
    params.requires_grad_()
    z = torch.tensor([[-1e-30], [0.0], [40.0]], requires_grad=True)
    x, log_derivative = transform.inverse(z, params)
    gradients = torch.autograd.grad(x.sum() + log_derivative.sum(), (z, params))
    assert x.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


# ---- the start ----


def starts_close_to_the_identity(transform):
    start = transform.start(1)
    x = torch.linspace(-5, 5, 201, dtype=torch.float64)[:, None]
    transform = transform.double()
    z, log_derivative = transform(x, start.double().expand(len(x), -1, -1))
    assert (z - x).abs().max() < 0.01 and log_derivative.abs().max() < 0.01
    if transform.components > 1:
        means = start[transform.components : 2 * transform.components, 0]
        assert float(means[0]) == pytest.approx(-0.1) and float(means[-1]) == pytest.approx(0.1)
        assert (means.diff() > 0).all()


@pytest.mark.parametrize("components", [1, 2, 8, 32])
def test_starts_close_to_the_identity(components):
    starts_close_to_the_identity(LogisticMixture(1, components=components))


class Alike(LogisticMixture):
    """All components begin the same, and would stay so."""

    def start(self, channels):
        return torch.zeros(self.params_per_dim, channels)


def test_mutant_start():
    with pytest.raises(AssertionError):
        starts_close_to_the_identity(Alike(1))


def test_refused():
    with pytest.raises(ValueError, match="components must be at least 1"):
        LogisticMixture(2, components=0)
