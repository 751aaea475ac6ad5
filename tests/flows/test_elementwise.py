"""Laws of elementwise maps, every kind of them, against autograd and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

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


# ---- the laws ----


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


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if "one" not in name])
@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_compiles_without_a_break(name, direction):
    transform, x, params = ready(TRANSFORMS[name], dtype=torch.float32, spread=0.5)
    runs = _Method(transform, direction)
    torch._dynamo.reset()
    results = []
    for run in (runs, torch.compile(runs, fullgraph=True, backend="aot_eager")):
        transform.zero_grad()
        inputs = [x.clone().requires_grad_(), params.clone().requires_grad_()]
        z, log_derivative = run(*inputs)
        (z.square().sum() + log_derivative.sum()).backward()
        learned = [*inputs, *transform.parameters()]
        results.append([z, log_derivative, *(p.grad for p in learned if p.grad is not None)])
    for eager, compiled in zip(*results, strict=True):
        close(compiled, eager, 1e-5)


@pytest.mark.parametrize("name", ["additive", "affine", "affine tied", "mean and scale", "spline", "spline, one bin"])
def test_starts_as_the_identity(name):
    transform = TRANSFORMS[name]().double()
    x = torch.linspace(-6, 6, 50, dtype=torch.float64).reshape(25, CHANNELS)
    params = transform.start(CHANNELS).double().expand(25, -1, -1)
    for direction in (transform, transform.inverse):
        z, log_derivative = direction(x, params)
        close(z, x, 1e-12)
        close(log_derivative, torch.zeros_like(x), 1e-12)


# ---- planted bugs ----


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
    "law, bug",
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
def test_planted_bugs(law, bug):
    with pytest.raises(AssertionError):
        law(bug)


def test_planted_detached_mean():
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
