"""Masked autoregressive flows: gradients, D turns back, numbers worked out by hand; mutants."""

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
from genmodels.verification.bijections import check_bijection

ORDER = [2, 0, 3, 1]
LAYERS = {
    "maf": lambda: autoregressive(MeanScale()),
    "maf, shuffled": lambda: autoregressive(MeanScale(), order=ORDER),
    "maf, residual": lambda: autoregressive(MeanScale(), residual=True, order=[3, 2, 1, 0]),
    "affine": lambda: autoregressive(Affine(4), order=ORDER),
    "affine, tied": lambda: autoregressive(Affine(4, scale="tied"), order=ORDER),
    "affine, plain": lambda: autoregressive(Affine(4, scale="plain"), order=ORDER),
    "spline": lambda: autoregressive(RationalQuadraticSpline(bins=4), order=ORDER),
    "mixture": lambda: autoregressive(LogisticMixture(4, components=2), order=ORDER),
    "labels": lambda: autoregressive(MeanScale(), order=ORDER, cond=Condition("labels", 3)),
    "one dimension": lambda: autoregressive(MeanScale(), features=1, cond=Condition("labels", 3)),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def close(a, b, tolerance):
    assert a.isfinite().all() and b.isfinite().all()
    assert (a - b).abs().max() <= tolerance * (1 + b.abs().max())


def autoregressive(transform, features=4, layer=MaskedAutoregressive, **options):
    return layer(features, transform, MADE(features, transform.params_per_dim, hidden=12, **options))


def ready_in_order(make, batch=3, dtype=torch.float64):
    layer = make().to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    x = 1.5 * torch.randn(batch, layer.features, generator=generator, dtype=dtype)
    return layer, x, torch.arange(batch) % 3 if layer.uses_cond else None


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
    layer, z, cond = ready_in_order(LAYERS[name], batch=1)
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


def test_autoregressive_stays_wide_under_autocast():
    layer, x, _ = ready_in_order(LAYERS["maf"], dtype=torch.float32)
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

    def unroll(self, choose, like, cond=None):
        x = torch.zeros_like(like)
        for turn in range(3):
            x[:, turn] = choose(turn, self(x).view(len(x), 2, 3)[:, :, turn])
        return x


def test_numbers():
    layer = MaskedAutoregressive(3, MeanScale(), Given())
    x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    z, logdet = layer(x)
    expected = torch.tensor([[0.7408182207, 1.3572561271, 2.6812801841]], dtype=torch.float64)
    assert (z - expected).abs().max() < 1e-8 and abs(float(logdet) + 0.8) < 1e-8
    # The inverse autoregressive flow is the same map the other way round.
    back, logdet = Inverse(layer)(z)
    assert (back - x).abs().max() < 1e-12 and abs(float(logdet) - 0.8) < 1e-12


# ---- mutants ----


class OneOff(MADE):
    """Every dimension sees itself."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.stem.mask.copy_(self.stem.mask.roll(-1, dims=1))


def test_a_mask_off_by_one_is_caught():
    layer = MaskedAutoregressive(4, MeanScale(), OneOff(4, 2, hidden=12))
    assert "triangular Jacobian" in check_bijection(layer, (4,), compiler=None).failed


def test_hidden_units_a_turn_too_late_are_caught():
    layer = autoregressive(MeanScale())
    layer.net.ends = [0, *layer.net.ends[:-1]]
    assert {"round trip", "log-dets cancel"} <= set(check_bijection(layer, (4,), compiler=None).failed)


class OfTheNext(Affine):
    """In the inverse, the learned numbers of the next dimension."""

    def inverse(self, z, params, own=None):
        return super().inverse(z, params, None if own is None else (own + 1) % self.channels)


class WithoutTheLast(MaskedAutoregressive):
    """The log-derivative of the last dimension is left out of the inverse."""

    def _inverse(self, z, cond, mask):
        x, logdet = super()._inverse(z, cond, mask)
        return x, logdet + self.transform(x, self._params(x, cond))[1][:, -1]


def test_numbers_of_another_dimension_are_caught():
    layer = MaskedAutoregressive(4, OfTheNext(4), MADE(4, 2, hidden=12))
    assert "round trip" in check_bijection(layer, (4,), compiler=None).failed


def test_a_log_derivative_left_out_is_caught():
    layer = autoregressive(MeanScale(), layer=WithoutTheLast)
    assert {"log-det inverse", "log-dets cancel"} <= set(check_bijection(layer, (4,), compiler=None).failed)


# ---- robustness, facts, refusals ----


def test_what_has_not_its_turn_does_not_matter():
    """A masked weight times infinity would be no number."""
    layer, z, _ = ready_in_order(LAYERS["maf, shuffled"])
    z[:, layer.net.order.argmax()] = float("inf")
    x, _ = layer.inverse(z)
    assert torch.equal(x.isfinite(), z.isfinite())


@pytest.mark.parametrize("name", ["maf", "maf, shuffled", "affine"])
def test_masked_dimensions_count_for_nothing(name):
    layer, x, _ = ready_in_order(LAYERS[name])
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
