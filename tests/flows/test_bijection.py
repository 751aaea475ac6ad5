"""The contract of bijections: shapes, masks, conditions, precision; composing, inverting, freezing them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from genmodels.flows.bases import StandardNormal
from genmodels.flows.bijection import (
    Bijection,
    Freeze,
    Inverse,
    NotInitialized,
    at_each_position,
    positions,
)
from genmodels.flows.composition import Compose
from genmodels.flows.flow import Flow
from genmodels.flows.linear import Flip, GroupedLinear, InvertibleLinear, Whitening
from genmodels.flows.scaling import ActNorm, Logit, Scale, Shift
from genmodels.flows.squeeze import Squeeze1d, Squeeze2d
from genmodels.verification.bijections import check_bijection


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lengths(total, *valid):
    return (torch.arange(total) < torch.tensor(valid)[:, None])[:, None]


class Conditional(Bijection):
    """Shifts by a learned multiple of the mean of its condition: a layer with a network, in small."""

    constant_logdet = True
    uses_cond = strict_cond = True

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def _shift(self, x, cond):
        return (self.weight * cond.flatten(1).mean(1)).to(x.dtype).reshape(-1, *[1] * (x.dim() - 1))

    def _forward(self, x, cond, mask):
        return x + self._shift(x, cond), x.new_zeros(len(x))

    def _inverse(self, z, cond, mask):
        return z - self._shift(z, cond), z.new_zeros(len(z))


class Unconditional(Conditional):
    """The same layer built without a condition."""

    uses_cond = False


class NaNOutside(Bijection):
    """Leaves rubbish wherever its input is zero."""

    def _forward(self, x, cond, mask):
        return torch.where(x == 0, torch.nan, x), x.new_zeros(len(x))

    _inverse = _forward


# ---- compose ----


def sequence_flow():
    generator = torch.Generator().manual_seed(0)
    layers = [ActNorm(2), Squeeze1d(), GroupedLinear(4, generator=generator), Flip(4), Inverse(Squeeze1d())]
    return Compose(layers, (2, None))


class LastLogDet(Compose):
    """Hands on the last layer's log-determinant alone."""

    def _forward(self, x, cond, mask):
        for layer in self.layers:
            x, logdet = layer(x)
        return x, logdet


class FirstMask(Compose):
    """Gives every layer the mask of the first."""

    def _forward(self, x, cond, mask):
        logdet = x.new_zeros(len(x))
        for layer in self.layers:
            own = mask if mask is None or mask.shape[-1] == x.shape[-1] else mask[..., : x.shape[-1]]
            x, change = layer(x, None, own)
            logdet = logdet + change
        return x, logdet


@pytest.mark.parametrize("mutant, check", [(LastLogDet, "log-det forward"), (FirstMask, "masked log-det")])
def test_checks_catch_mutants(mutant, check):
    flow = mutant([Scale(2.0), Squeeze1d(), GroupedLinear(4), Scale(0.5)], (2, None))
    assert check in check_bijection(flow, (2, 8), compiler=None).failed


@pytest.mark.parametrize("layers, shape, message", [
    ([Squeeze2d(), ActNorm(3)], (1, 4, 4),
     r"layer 1 \(ActNorm\) does not take what layer 0 \(Squeeze2d\) leaves: ActNorm takes events of shape \(3, ...\), "
     r"got \(4, 2, 2\)"),
    ([Flip(5)], (4,), r"layer 0 \(Flip\) does not take what the input leaves: Flip takes .* got \(4,\)"),
    ([Squeeze1d(), Squeeze1d()], (1, 6), r"layer 1 \(Squeeze1d\) does not take what layer 0 .* got \(2, 3\)"),
    ([ActNorm(3)], (4, None), r"got \(4, T\)"),
])  # fmt: skip
def test_layers_that_do_not_fit(layers, shape, message):
    with pytest.raises(ValueError, match=message):
        Compose(layers, shape)


def test_events_of_another_shape_are_refused_by_the_layer_that_minds():
    flow = Compose([Shift(1.0), ActNorm(2), Squeeze1d()], (2, None))
    for call, shape in ((flow, (3, 4)), (flow, (2, 5)), (flow.inverse, (5, 2)), (flow.inverse, (6, 2))):
        with pytest.raises(ValueError, match="takes events of shape"):
            call(torch.zeros(1, *shape))


def test_composition_is_a_sum_and_an_order():
    x = torch.tensor([[1.0, 2.0]])
    z, logdet = Compose([Scale(2.0), Shift(3.0)], (2,))(x)
    assert z.tolist() == [[5.0, 7.0]] and logdet.tolist() == pytest.approx([2 * math.log(2)])
    z, logdet = Compose([Shift(3.0), Scale(2.0)], (2,)).inverse(torch.tensor([[8.0, 10.0]]))
    assert z.tolist() == [[1.0, 2.0]] and logdet.tolist() == pytest.approx([-2 * math.log(2)])
    assert Compose([Squeeze2d(), Squeeze2d()], (1, 8, 4)).shape_after == (16, 2, 1)


def test_the_empty_composition_is_the_identity():
    x = torch.randn(2, 3)
    z, logdet = Compose([], (3,))(x)
    assert torch.equal(z, x) and logdet.tolist() == [0.0, 0.0]


def test_static_facts_are_those_of_the_layers():
    class Slow(Flip):
        inverse_cost, exact_inverse = "iterative", False

    class Sequential(Flip):
        inverse_cost = "D passes"

    plain = Compose([Flip(2), Scale(2.0)], (2,))
    assert plain.constant_logdet and plain.exact_inverse and plain.inverse_cost == "same" and not plain.uses_cond
    assert not Compose([Flip(2), Logit()], (2,)).constant_logdet
    assert Compose([Flip(2), Sequential(2)], (2,)).inverse_cost == "D passes"
    slow = Freeze(Inverse(Compose([Slow(2), Sequential(2), Conditional()], (2,))))
    assert slow.inverse_cost == "iterative" and not slow.exact_inverse and slow.uses_cond


# ---- masks ----


@pytest.mark.parametrize("mask, message", [
    (torch.ones(2, 1, 6), "ActNorm: mask must be boolean .*, got torch.float32"),
    (torch.ones(2, 1, 6, dtype=torch.long), "mask must be boolean"),
    (torch.ones(2, 6, dtype=torch.bool), r"mask \(2, 6\) does not fit x \(2, 3, 6\)"),
    (torch.ones(2, 1, 5, dtype=torch.bool), r"mask \(2, 1, 5\) does not fit"),
    (torch.ones(1, 1, 6, dtype=torch.bool), r"mask \(1, 1, 6\) does not fit"),
])  # fmt: skip
def test_masks_that_do_not_fit(mask, message):
    for call in (ActNorm(3), ActNorm(3).inverse):
        with pytest.raises(ValueError, match=message):
            call(torch.ones(2, 3, 6), mask=mask)


def test_images_take_no_sequence_mask():
    with pytest.raises(ValueError, match="masks are for sequences"):
        ActNorm(3)(torch.ones(2, 3, 4, 4), mask=torch.ones(2, 1, 4, dtype=torch.bool))


def test_what_is_masked_is_never_seen_and_leaves_as_zero():
    """Even NaN, on the way in and on the way out."""
    mask, flow = lengths(6, 6, 2, 0), sequence_flow().double()
    x = gaussian(3, 2, 6)
    flow.initialize(x, mask=mask)
    z, logdet = flow(x.masked_fill(~mask, torch.nan), mask=mask)
    clean, clean_logdet = flow(x.masked_fill(~mask, 0), mask=mask)
    assert torch.equal(z, clean) and torch.equal(logdet, clean_logdet) and float(logdet[2].detach()) == 0
    assert (z.masked_select(~mask) == 0).all()
    back, back_logdet = flow.inverse(z.masked_fill(~mask, torch.inf), mask=flow.out_mask(mask))
    torch.testing.assert_close(back, x.masked_fill(~mask, 0), rtol=0, atol=1e-12)
    torch.testing.assert_close(back_logdet, -logdet)
    rubbish = NaNOutside()
    for call in (rubbish, rubbish.inverse):
        assert not call(x, mask=mask)[0].masked_select(~mask).any()


def test_masks_follow_the_shapes():
    flow, mask = Compose([Squeeze1d(), Flip(4), Squeeze1d(3)], (2, None)), lengths(12, 12, 6)
    after = flow.out_mask(mask)
    assert after[:, 0].tolist() == [[True, True], [True, False]]
    assert torch.equal(flow.in_mask(after), mask)
    assert torch.equal(Inverse(flow).out_mask(after), mask) and torch.equal(Freeze(flow).out_mask(mask), after)


# ---- conditions ----


def test_conditions_are_needed_where_they_are_used_and_an_error_elsewhere():
    x, cond = torch.ones(2, 3), torch.ones(2, 4)
    for call in (Conditional(), Inverse(Conditional()), Freeze(Conditional()), Compose([Conditional()], (3,))):
        with pytest.raises(ValueError, match="needs cond"):
            call(x)
        with pytest.raises(ValueError, match="needs cond"):
            call.inverse(x)
        assert call(x, cond)[0].shape == x.shape
    for call in (Unconditional(), Compose([Unconditional()], (3,)), Compose([], (3,)), Inverse(Unconditional())):
        with pytest.raises(ValueError, match="built without a condition: leave cond out"):
            call(x, cond)
    assert torch.equal(Flip(3)(x, cond)[0], Flip(3)(x)[0])


def test_compose_gives_the_condition_to_those_that_use_it():
    flow = Compose([Conditional(), ActNorm(3), Compose([Flip(3)], (3,)), Conditional()], (3,))
    x, cond = gaussian(2, 3), gaussian(2, 4, seed=1).requires_grad_()
    z, _ = flow(x, cond)
    torch.testing.assert_close(z, (x + 4 * cond.mean(1, keepdim=True)).flip(1))
    torch.testing.assert_close(flow.inverse(z, cond)[0], x)
    assert torch.autograd.grad(z.sum(), cond)[0].abs().min() > 0
    flow.initialize(x, cond, force=True)
    assert [step.cond is None for step in flow.walk(x, cond)] == [False, True, True, False]


# ---- precision ----


@pytest.mark.parametrize("given, kept", [
    (torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32), (torch.uint8, torch.float32),
])  # fmt: skip
def test_the_state_is_float32_or_wider(given, kept):
    for call in (Shift(1.0), Shift(1.0).inverse, Compose([Flip(2)], (2,))):
        z, logdet = call(torch.ones(3, 2, dtype=given))
        assert z.dtype == logdet.dtype == kept and logdet.shape == (3,)


# ---- inverse and freeze ----


def test_inverse_swaps_everything():
    squeeze = Squeeze1d()
    layer, x = Inverse(squeeze), gaussian(2, 4, 3)
    assert layer.out_shape((4, 3)) == (2, 6) and layer.in_shape((2, 6)) == (4, 3)
    assert torch.equal(layer(x)[0], squeeze.inverse(x)[0]) and torch.equal(layer.inverse(layer(x)[0])[0], x)
    assert torch.equal(Inverse(Scale(2.0))(x)[1], -Scale(2.0)(x)[1])
    with pytest.raises(ValueError, match=r"Squeeze1d takes .* got \(3, 3\)"):
        layer(gaussian(2, 3, 3))


def test_an_inverse_cannot_start_from_data():
    """The statistics would be those of the other side."""
    layer, x = Inverse(Compose([Flip(2), ActNorm(2)], (2,))), gaussian(4, 2)
    with pytest.raises(RuntimeError, match="bijection.layers.1 is initialised from data in its forward direction"):
        layer.initialize(x)
    layer.bijection.initialize(x)
    layer.initialize(x)
    assert list(layer.uninitialized()) == []


def test_frozen_layers_do_not_train_but_pass_gradients():
    layer = Freeze(InvertibleLinear(3))
    assert not any(p.requires_grad for p in layer.requires_grad_(True).parameters())
    x = torch.randn(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x)[0][:, 0].sum(), x)
    torch.testing.assert_close(gradient, layer.bijection.weight()[0].expand(2, 3))


def test_frozen_layers_start_from_data():
    layer, x = Freeze(ActNorm(2)), 5 + gaussian(8, 2).float()
    assert list(layer.uninitialized("a")) == ["a.bijection"]
    layer.initialize(x)
    assert abs(float(layer(x)[0].mean())) < 1e-6 and list(layer.uninitialized()) == []


# ---- starting from data, names, walking ----


def each_is_standardised(flow, x):
    flow.initialize(x)
    for step in flow.walk(x):
        if isinstance(step.layer, ActNorm):
            z = step.z.transpose(0, 1).flatten(1)
            torch.testing.assert_close(z.mean(1), torch.zeros(len(z)).double(), rtol=0, atol=1e-10)
            torch.testing.assert_close(z.std(1, correction=0), torch.ones(len(z)).double(), rtol=1e-10, atol=0)


def chain(kind=Compose):
    inner = [InvertibleLinear(4, generator=torch.Generator().manual_seed(1)), ActNorm(4)]
    layers = [ActNorm(2), Scale(7.0), Squeeze1d(), kind(inner, (4, None)), Shift(3.0), ActNorm(4)]
    return kind(layers, (2, None)).double()


class AllAtOnce(Compose):
    """Initialises every layer on the raw input."""

    def initialize(self, x, cond=None, mask=None, *, force=False):
        for layer in self.layers:
            if x.shape[1] == getattr(layer, "channels", x.shape[1]):
                layer.initialize(x, cond, mask, force=force)
            x = layer(x)[0] if isinstance(layer, Squeeze1d) else x


def test_layers_start_in_order():
    x = gaussian(16, 2, 8) * torch.tensor([3.0, 0.2]).double()[:, None] + 4
    each_is_standardised(chain(), x)
    with pytest.raises(AssertionError):
        each_is_standardised(chain(AllAtOnce), x)


def test_starting_twice_is_an_error_that_names_the_layer():
    flow, x = chain(), gaussian(4, 2, 6)
    assert list(flow.uninitialized()) == ["layers.0", "layers.3.layers.1", "layers.5"]
    flow.initialize(x)
    assert list(flow.uninitialized()) == []
    with pytest.raises(RuntimeError, match=r"layers.0 \(ActNorm\) is initialised already"):
        flow.initialize(x)
    flow.initialize(2 * x + 1, force=True)
    each = [step.layer.ready for step in flow.walk(x) if isinstance(step.layer, ActNorm)]
    assert each == [True, True, True]


def test_a_compiled_layer_waits_for_data_too(refuses):
    flow = Flow(Compose([torch.compile(ActNorm(2), backend="eager")], (2,)), StandardNormal((2,)))
    assert list(flow.bijection.uninitialized()) == ["layers.0"]
    refuses(NotInitialized, r"layers\.0.*has not seen data", flow.log_prob, torch.randn(3, 2))
    flow.initialize(torch.randn(50, 2))
    assert list(flow.bijection.uninitialized()) == []


def test_part_of_another_composition_starts_whole_or_not_at_all():
    inner = Compose([ActNorm(2), Whitening(2)], (2,))
    Compose([inner], (2,))  # which names its parts
    with pytest.raises(ValueError, match="covariance"):
        inner.initialize(torch.randn(5, 2))
    assert list(inner.uninitialized()) == ["layers.0", "layers.1"]
    inner.initialize(torch.randn(50, 2))


def test_what_is_no_tensor_is_named():
    with pytest.raises(ValueError, match="Flip takes a torch.Tensor, got list"):
        Flip(2)([1.0, 2.0])


def test_no_gradient_is_left_by_starting():
    flow = chain()
    flow.initialize(gaussian(4, 2, 6).requires_grad_())
    assert all(p.grad is None and p.requires_grad for p in flow.parameters())


def test_places_are_those_of_the_outermost_composition():
    inner = Compose([Flip(2), Freeze(ActNorm(2))], (2,))
    assert inner.layers[1].bijection.place == "layers.1.bijection"
    outer = Compose([Flip(2), inner], (2,))
    assert inner.layers[1].bijection.place == "layers.1.layers.1.bijection" and outer.place == ""


def test_walking_shows_every_layer_at_work():
    flow, x, mask = chain(), gaussian(3, 2, 6), lengths(6, 6, 4, 2)
    flow.initialize(x, mask=mask)
    steps = list(flow.walk(x, mask=mask))
    assert [step.name for step in steps] == [
        "layers.0", "layers.1", "layers.2", "layers.3.layers.0", "layers.3.layers.1", "layers.4", "layers.5"
    ]  # fmt: skip
    assert steps[0].x is x and all(a.z is b.x for a, b in zip(steps, steps[1:], strict=False))
    z, logdet = flow(x, mask=mask)
    assert torch.equal(steps[-1].z, z)
    torch.testing.assert_close(sum(step.logdet for step in steps), logdet, rtol=1e-14, atol=1e-14)
    for step in steps:
        back, _ = step.layer.inverse(step.z, step.cond, step.layer.out_mask(step.mask))
        torch.testing.assert_close(back, step.x.masked_fill(~step.mask, 0), rtol=0, atol=1e-11)


# ---- small helpers ----


@pytest.mark.parametrize("shape, expected", [((2, 3), 1), ((2, 3, 5), 5), ((2, 3, 4, 5), 20), ((0, 3, 4), 4)])
def test_positions(shape, expected):
    assert positions(torch.zeros(shape), None) == expected
    assert at_each_position(torch.tensor(2.0), torch.zeros(shape), None).tolist() == [2.0 * expected] * shape[0]


def test_valid_positions():
    x, mask = torch.zeros(2, 3, 5), lengths(5, 5, 2)
    assert positions(x, mask).tolist() == [5.0, 2.0] and positions(x.double(), mask).dtype == torch.float64
    with pytest.raises(ValueError, match=r"share one mask \(B, 1, T\), got \(2, 3, 5\)"):
        positions(x, mask.expand(2, 3, 5))


def test_a_bijection_must_say_what_it_does():
    for call in (Bijection(), Bijection().inverse):
        with pytest.raises(NotImplementedError):
            call(torch.zeros(1, 1))


class Returning(Bijection):
    """A user's layer with results of the wrong shape."""

    def __init__(self, rows=slice(None), logdet=None):
        super().__init__()
        self.rows, self.logdet = rows, logdet

    def _forward(self, x, cond, mask):
        return x[self.rows], x.new_zeros(len(x)) if self.logdet is None else self.logdet(x)

    _inverse = _forward


@pytest.mark.parametrize("wrong", [
    {"logdet": lambda x: x.new_zeros(len(x), 1)}, {"logdet": torch.zeros_like}, {"logdet": lambda x: x.new_zeros(1)},
    {"rows": slice(0, 1)},
], ids=["column", "each value", "one", "rows"])  # fmt: skip
def test_results_that_would_be_broadcast_are_refused(wrong, refuses):
    layer, x = Returning(**wrong), torch.ones(3, 3)
    for call in (layer, layer.inverse, Compose([layer], (3,))):
        refuses(ValueError, "Returning returned .* one log-determinant, .B,., for each row", call, x)


@pytest.mark.parametrize("logdet", [None, lambda x: x.new_zeros(()), lambda x: 0.0])
def test_a_log_determinant_may_be_one_number(logdet):
    layer = Compose([Returning(logdet=logdet), Scale(torch.full((3,), 2.0))], (3,))
    assert layer(torch.ones(2, 3))[1].tolist() == pytest.approx([3 * math.log(2)] * 2)


class Block(Bijection):
    """A user's layer with parts that start from data."""

    def __init__(self, hold):
        super().__init__()
        self.parts = hold(ActNorm(2))

    @property
    def norm(self):
        return next(part for part in self.parts.modules() if isinstance(part, ActNorm))

    def _forward(self, x, cond, mask):
        return self.norm(x, None, mask)

    def _inverse(self, z, cond, mask):
        return self.norm.inverse(z, None, mask)


class StartingBlock(Block):
    def initialize(self, x, cond=None, mask=None, *, force=False):
        self.norm.initialize(x, cond, mask, force=force)


@pytest.mark.parametrize("hold", [
    lambda layer: layer, lambda layer: nn.ModuleList([layer]), lambda layer: nn.ModuleDict({"a": layer}),
    lambda layer: nn.Sequential(nn.ModuleList([nn.Identity(), layer])),
], ids=["itself", "list", "dict", "nested"])  # fmt: skip
def test_parts_of_own_layers_start_from_data_or_say_so(hold, refuses):
    x = torch.randn(50, 2) * 3 + 1
    flow = Flow(Compose([Block(hold)], (2,)), StandardNormal((2,)))
    refuses(NotInitialized, r"layers\.0\.parts.*has not seen data", flow.log_prob, x)
    refuses(RuntimeError, r"Block has parts that start from data \(layers\.0\.parts.*define its initialize",
            flow.initialize, x)
    refuses(RuntimeError, "define its initialize", flow.initialize, x, force=True)
    own = Flow(Compose([StartingBlock(hold)], (2,)), StandardNormal((2,)))
    own.initialize(x)
    assert torch.allclose(own.bijection(x)[0].std(0, correction=0), torch.ones(2), atol=1e-3)


def test_layers_may_come_from_an_iterator():
    layers = [Scale(torch.full((2,), factor)) for factor in (2.0, 3.0)]
    for given in (reversed(layers), iter(layers), (layer for layer in layers)):
        z, logdet = Compose(given, (2,))(torch.ones(1, 2))
        assert z.tolist() == [[6.0, 6.0]] and float(logdet) == pytest.approx(2 * math.log(6))
