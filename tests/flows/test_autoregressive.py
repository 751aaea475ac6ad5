"""Masked autoregressive flows: triangular Jacobians, D passes back, numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from genmodels.flows.bijection import Inverse
from genmodels.flows.coupling import MaskedAutoregressive
from genmodels.flows.elementwise import Affine, LogisticMixture, MeanScale, unbounded
from genmodels.flows.spline import RationalQuadraticSpline
from genmodels.nn.condition import Condition
from genmodels.nn.perceptron import MADE

ORDER = [2, 0, 3, 1]
LAYERS = {
    "maf": lambda: autoregressive(MeanScale()),
    "maf, shuffled": lambda: autoregressive(MeanScale(), order=ORDER),
    "maf, residual": lambda: autoregressive(MeanScale(), residual=True, order=[3, 2, 1, 0]),
    "affine": lambda: autoregressive(Affine(4)),
    "spline": lambda: autoregressive(RationalQuadraticSpline(bins=4), order=ORDER),
    "mixture": lambda: autoregressive(LogisticMixture(4, components=2)),
    "labels": lambda: autoregressive(MeanScale(), order=ORDER, cond=Condition("labels", 3)),
    "one dimension": lambda: autoregressive(MeanScale(), features=1, cond=Condition("labels", 3)),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def autoregressive(transform, features=4, layer=MaskedAutoregressive, **options):
    return layer(features, transform, MADE(features, transform.params_per_dim, hidden=12, **options))


def ready(make, batch=3, dtype=torch.float64):
    layer = make().to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    x = 1.5 * torch.randn(batch, layer.features, generator=generator, dtype=dtype)
    return layer, x, torch.arange(batch) % 3 if layer.uses_cond else None


def close(a, b, tolerance):
    assert a.isfinite().all() and b.isfinite().all()
    assert (a - b).abs().max() <= tolerance * (1 + b.abs().max())


# ---- the laws ----


def jacobian_is_triangular(make):
    """In the given order nothing depends on what comes later, and the diagonal gives the log-determinant."""
    layer, x, cond = ready(make)
    later = layer.net.order[None, :] > layer.net.order[:, None]
    for direction in (layer, layer.inverse):
        _, logdet = direction(x, cond)
        assert logdet.shape == (len(x),) and logdet.dtype == x.dtype
        for i in range(len(x)):
            own = None if cond is None else cond[i : i + 1]
            jacobian = torch.autograd.functional.jacobian(lambda v, d=direction, c=own: d(v, c)[0], x[i : i + 1])
            jacobian = jacobian.reshape(layer.features, layer.features)
            assert (jacobian[later] == 0).all()
            close(logdet[i], torch.linalg.slogdet(jacobian)[1], 1e-8)


def goes_back(make):
    layer, x, cond = ready(make)
    tolerance = 1e-10 if layer.exact_inverse else 1e-8
    for there, back in ((layer, layer.inverse), (layer.inverse, layer)):
        y, logdet = there(x, cond)
        again, log_back = back(y, cond)
        close(again, x, tolerance)
        close(log_back, -logdet, tolerance)


@every_layer
def test_jacobian_is_triangular(name):
    jacobian_is_triangular(LAYERS[name])


@every_layer
def test_goes_back(name):
    goes_back(LAYERS[name])


@every_layer
def test_rows_are_independent(name):
    layer, x, cond = ready(LAYERS[name])
    for direction in (layer, layer.inverse):
        y, logdet = direction(x, cond)
        alone = direction(x[1:2], None if cond is None else cond[1:2])
        close(alone[0], y[1:2], 1e-10)
        close(alone[1], logdet[1:2], 1e-10)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("mixture", "one dimension")])
def test_starts_as_the_identity(name):
    layer = LAYERS[name]().double()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cond = torch.zeros(5, dtype=torch.long) if layer.uses_cond else None
    for direction in (layer, layer.inverse):
        y, logdet = direction(x, cond)
        close(y, x, 1e-12)
        close(logdet, torch.zeros(5, dtype=torch.float64), 1e-12)


def test_mixture_starts_with_its_means():
    layer = LAYERS["mixture"]()
    assert torch.equal(layer.net.head.bias.view(8, 4), layer.transform.start(4))


@every_layer
def test_gradients_of_both_directions_agree(name):
    """d x / d theta = -(dz/dx)^-1 dz/d theta: the loop of the inverse against the pass forward."""
    layer, z, cond = ready(LAYERS[name], batch=1)
    x, _ = layer.inverse(z, cond)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    found = torch.autograd.grad((weights * x).sum(), parameters)
    x = x.detach()
    jacobian = torch.autograd.functional.jacobian(lambda v: layer(v, cond)[0], x).reshape(z.shape[1], -1)
    pulled = -weights @ torch.linalg.inv(jacobian)
    expected = torch.autograd.grad((pulled.detach() * layer(x, cond)[0]).sum(), parameters)
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1e-8)


@pytest.mark.parametrize(
    "name, direction",
    [
        ("maf", "forward"),
        ("spline", "forward"),
        ("labels", "inverse"),
        pytest.param("spline", "inverse", marks=pytest.mark.slow),
    ],
)
def test_compiles_without_a_break(name, direction):
    layer, x, cond = ready(LAYERS[name], dtype=torch.float32)
    torch._dynamo.reset()
    runs = getattr(layer, direction)
    results = []
    for run in (runs, torch.compile(runs, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        z, logdet = run(inputs, cond)
        (z.square().sum() + logdet.sum()).backward()
        results.append([z, logdet, inputs.grad, *(p.grad for p in layer.parameters())])
    for eager, compiled in zip(*results, strict=True):
        close(compiled, eager, 1e-5)


def test_stays_wide_under_autocast():
    layer, x, _ = ready(LAYERS["maf"], dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [*layer(x), *layer.inverse(x)]
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in results)


# ---- numbers ----


class Given(nn.Module):
    """Stands in for a network: m = (0, x1 / 2, x1 - x2), alpha = (0.3, x1 / 10, x2 / 5)."""

    in_channels, out_channels, uses_cond = 3, 6, False
    order = torch.arange(3)

    def set_output_bias(self, bias):
        self.bias = bias

    def forward(self, x, cond=None):
        a, b, _ = x.unbind(1)
        alpha = torch.stack([torch.full_like(a, 0.3), 0.1 * a, 0.2 * b], dim=1)
        return torch.cat([torch.stack([0 * a, 0.5 * a, a - b], dim=1), unbounded(alpha, 5.0)], dim=1)


def test_numbers():
    layer = MaskedAutoregressive(3, MeanScale(), Given())
    x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    z, logdet = layer(x)
    expected = torch.tensor([[0.7408182207, 1.3572561271, 2.6812801841]], dtype=torch.float64)
    assert (z - expected).abs().max() < 1e-8 and abs(float(logdet) + 0.8) < 1e-8
    # The inverse autoregressive flow is the same map the other way round.
    back, logdet = Inverse(layer)(z)
    assert (back - x).abs().max() < 1e-12 and abs(float(logdet) - 0.8) < 1e-12


# ---- planted bugs ----


class OneOff(MADE):
    """Every dimension sees itself."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.stem.mask.copy_(self.stem.mask.roll(-1, dims=1))


class OnePass(MaskedAutoregressive):
    """The inverse with one pass too few."""

    def _inverse(self, z, cond, mask):
        x = log_derivative = torch.zeros_like(z)
        for turn in range(self.features - 1):
            change, log_derivative = self.transform.inverse(z, self._params(x, cond))
            x = torch.where(self.net.order == turn, change, x)
        return x, log_derivative.sum(1)


def test_planted_mask_off_by_one():
    with pytest.raises(AssertionError):
        jacobian_is_triangular(lambda: MaskedAutoregressive(4, MeanScale(), OneOff(4, 2, hidden=12)))


@pytest.mark.parametrize("law", [goes_back, jacobian_is_triangular])
def test_planted_pass_too_few(law):
    with pytest.raises(AssertionError):
        law(lambda: autoregressive(MeanScale(), layer=OnePass))


# ---- robustness, facts, refusals ----


def test_what_has_not_its_turn_is_not_shown():
    """Until then it may be infinite, and a masked weight times infinity is no number."""
    layer, z, _ = ready(LAYERS["maf, shuffled"])
    shown = []
    layer.net.register_forward_hook(lambda module, inputs, output: shown.append(inputs[0]))
    x, _ = layer.inverse(z)
    assert len(shown) == 4
    for turn, seen in enumerate(shown):
        assert torch.equal(seen, x * (layer.net.order < turn))


def test_masked_dimensions_count_for_nothing():
    layer, x, _ = ready(LAYERS["maf"])
    mask = torch.tensor([True, True, False, True]).expand(3, -1)
    z, logdet = layer(x, None, mask)
    other = layer(x.masked_fill(~mask, float("nan")), None, mask)
    assert torch.equal(other[0], z) and torch.equal(other[1], logdet) and (z[:, 2] == 0).all()
    again, log_back = layer.inverse(z, None, mask)
    close(again, x.masked_fill(~mask, 0), 1e-10)
    close(log_back, -logdet, 1e-10)


def test_cost_of_the_inverse():
    assert LAYERS["maf"]().inverse_cost == LAYERS["spline"]().inverse_cost == "D passes"
    mixture = LAYERS["mixture"]()
    assert mixture.inverse_cost == "iterative" and not mixture.exact_inverse


def test_refused():
    with pytest.raises(ValueError, match=r"8 channels out \(2 parameters for each of 4\), got 4"):
        MaskedAutoregressive(4, MeanScale(), MADE(4, 1, hidden=8))
    with pytest.raises(ValueError, match="4 channels in, got 3"):
        MaskedAutoregressive(4, MeanScale(), MADE(3, 2, hidden=8))
    with pytest.raises(ValueError, match="built for 3"):
        MaskedAutoregressive(4, Affine(3), MADE(4, 2, hidden=8))
    with pytest.raises(ValueError, match=r"shape \(4,\), got \(5,\)"):
        LAYERS["maf"]()(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="needs cond"):
        LAYERS["labels"]()(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="leave cond out"):
        LAYERS["maf"]()(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
