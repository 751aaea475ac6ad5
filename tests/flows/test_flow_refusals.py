"""What is refused where data enter a flow: masks, labels, integers, precisions, a start and parts that do not fit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from genmodels.flows.bases import ClassNormal, StandardNormal
from genmodels.flows.bijection import Inverse
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling
from genmodels.flows.coupling_flows import TokenNet, dequantisation_flow, realnvp_image, realnvp_vector
from genmodels.flows.dequantize import UniformDequantize, VariationalDequantize, noise_condition
from genmodels.flows.discrete import DiscreteFlow
from genmodels.flows.elementwise import Affine
from genmodels.flows.flow import Flow, frames_together
from genmodels.flows.linear import Flip
from genmodels.flows.multiscale import glow
from genmodels.flows.scaling import Shift
from genmodels.flows.spline import neural_spline
from genmodels.flows.squeeze import PadToMultiple, Squeeze1d
from genmodels.flows.tarflow import tarflow
from genmodels.nn import MADE, MLP, Condition
from genmodels.speech.glow_tts import mel_decoder
from tests.parameters import shaken


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def open_sequences(cond=None):
    bijection = glow((4, None), levels=2, steps=1, hidden=8, cond=cond, generator=source())
    return Flow(bijection, StandardNormal((None,)))


def started():
    flow = open_sequences()
    flow.initialize(torch.randn(16, 4, 8, generator=source(1)))
    return flow


def half_of_two():
    return Coupling(ChannelSplit(2), Affine(1), MLP(1, 2, hidden=16))


def vectors(classes=3):
    return Flow(neural_spline(2, layers=2, hidden=8, cond=Condition("labels", classes)), StandardNormal((2,)))


# ---- masks ----


def frames(*valid):
    return torch.tensor(valid, dtype=torch.bool)[:, None]


UNEVEN = [frames([1] * 8, [1] * 5 + [0] * 3), frames([1] * 8, [0, 1] * 4), frames([1] * 8, [1] * 6 + [0] * 2)]


@pytest.mark.parametrize("mask", UNEVEN, ids=["five", "odd frames", "six"])
@pytest.mark.parametrize("use", ["log_prob", "latents", "sample", "from_latents", "initialize"])
def test_masks_of_parts_of_groups_are_refused(mask, use):
    flow, x = started(), torch.randn(2, 4, 8, generator=source())
    calls = {
        "log_prob": lambda: flow.log_prob(x, mask=mask),
        "latents": lambda: flow.latents(x, mask=mask),
        "sample": lambda: flow.sample(2, mask=mask, generator=source()),
        "from_latents": lambda: flow.from_latents(flow.latents(x), mask=mask),
        "initialize": lambda: flow.initialize(x, mask=mask, force=True),
    }
    with pytest.raises(ValueError, match=r"row 1 .*PadToMultiple\(4\)"):
        calls[use]()


def test_what_the_padding_makes_is_taken():
    flow = started()
    x, mask = PadToMultiple(4)(torch.randn(2, 4, 8, generator=source()), UNEVEN[0])
    assert flow.log_prob(x, mask=mask).isfinite().all()
    holes = frames([1] * 4 + [0] * 4, [0] * 4 + [1] * 4)
    assert flow.log_prob(x, mask=holes).isfinite().all()


def test_masks_of_integers():
    model = DiscreteFlow(UniformDequantize(8), started())
    x = torch.randint(0, 8, (2, 4, 8), generator=source())
    with pytest.raises(ValueError, match="PadToMultiple"):
        model.log_prob(x, mask=UNEVEN[0], generator=source())


# ---- labels and integers ----


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_out_of_range(label):
    x, cond = torch.zeros(3, 2), torch.tensor([0, 1, label])
    message = rf"label {label} in row 2, .*0\.\.2"
    for flow in (vectors(), Flow(Flip(2), ClassNormal((2,), num_classes=3))):
        assert flow.num_classes == 3
        for call in (flow.log_prob, flow.latents, flow.initialize):
            with pytest.raises(ValueError, match=message):
                call(x, cond)
        with pytest.raises(ValueError, match=message):
            flow.sample(3, cond, generator=source())
        with pytest.raises(ValueError, match="from 1 to 3"):
            flow.class_posterior(x, 4)
    with pytest.raises(ValueError, match=message):
        DiscreteFlow(UniformDequantize(4), vectors()).log_prob(x.long(), cond, generator=source())


def test_labels_of_another_number():
    flow = Flow(Flip(2), ClassNormal((2,), num_classes=3))
    with pytest.raises(ValueError, match="a label for each of 4 events, got 1"):
        flow.log_prob(torch.zeros(4, 2), torch.tensor([1]))


@pytest.mark.parametrize("value", [-1, 4])
@pytest.mark.parametrize("use", ["log_prob", "initialize"])
def test_integers_out_of_range(value, use):
    model = DiscreteFlow(UniformDequantize(4), Flow(Shift(-0.5), StandardNormal((2,))))
    with pytest.raises(ValueError, match=rf"integer {value} in row 1, the levels are 0\.\.3"):
        getattr(model, use)(torch.tensor([[0, 3], [3, value]]), generator=source())


def test_narrow_integers_are_compared_without_overflow():
    model = DiscreteFlow(UniformDequantize(256), Flow(Shift(-0.5), StandardNormal((2,))))
    x = torch.tensor([[0, 1]])
    found = [model.log_prob(x.to(kind), generator=source())[0] for kind in (torch.int8, torch.int64)]
    assert torch.equal(*found)


def test_integers_outside_the_mask_do_not_count():
    model = DiscreteFlow(UniformDequantize(4), Flow(Shift(-0.5), StandardNormal((1, None))))
    x = torch.tensor([[[0, 3, 99]]])
    assert model.log_prob(x, mask=frames([1, 1, 0]), generator=source())[0].isfinite().all()


def test_one_wait_for_all_draws(monkeypatch):
    asked = []
    monkeypatch.setattr("genmodels.flows.flow.refuse", asked.append)
    monkeypatch.setattr("genmodels.flows.discrete.refuse", asked.append)
    DiscreteFlow(UniformDequantize(4), vectors()).log_prob(
        torch.zeros(3, 2).long(), torch.zeros(3).long(), generator=source(), samples=5)
    assert len(asked) == 1


# ---- precision, kinds and numbers ----


def test_precision_has_to_be_that_of_the_flow():
    flow = Flow(neural_spline(2, layers=1, hidden=8), StandardNormal((2,)))
    x = torch.zeros(1, 2).double()
    for call in (flow.log_prob, flow.latents):
        with pytest.raises(ValueError, match=r"x is float64, but the flow float32: call flow\.double\(\)"):
            call(x)
    assert flow.double().log_prob(x).dtype == torch.float64
    with pytest.raises(ValueError, match="x is float32, but the flow float64"):
        flow.log_prob(x.float())


def test_arrays_and_numbers_of_samples():
    flow = vectors()
    for call in (flow.log_prob, flow.latents, flow.bijection):
        with pytest.raises(ValueError, match="torch.Tensor, got ndarray"):
            call(np.zeros((1, 2), dtype=np.float32), torch.tensor([0]))
    with pytest.raises(ValueError, match="cond must be a torch.Tensor"):
        flow.log_prob(torch.zeros(1, 2), np.zeros(1))
    with pytest.raises(ValueError, match="mask must be a torch.Tensor"):
        flow.log_prob(torch.zeros(1, 2), torch.tensor([0]), [[True, True]])
    for n in (-1, 2.0):
        with pytest.raises(ValueError, match="n must be (at least 0|a whole number)"):
            flow.sample(n, torch.tensor([0]), generator=source())


@pytest.mark.parametrize("options, words", [
    ({"length": -4}, "length must be at least 0, got -4"),
    ({"length": 4.0}, "length must be a whole number"),
    ({"length": "8"}, "length must be a whole number"),
    ({"mask": torch.ones(2, 8, dtype=torch.bool)}, r"mask must have a row for each of 2 samples, \(2, 1, T\)"),
    ({"mask": torch.ones(3, 1, 8, dtype=torch.bool)}, "mask must have a row for each of 2 samples"),
    ({"mask": torch.ones(2, 1, 8, dtype=torch.bool), "length": 4}, "length=4, but the mask has 8 frames"),
    ({"length": 4, "generator": None}, "generator must be a torch.Generator or a KeyedGenerator, got None"),
    ({"length": 4, "generator": 3}, "generator must be"),
])  # fmt: skip
def test_samples_that_cannot_be_drawn(options, words, refuses):
    flow = Flow(Compose([Squeeze1d(2)], (3, None)), StandardNormal((6, None)))
    refuses(ValueError, words, flow.sample, 2, **{"generator": source(), **options})
    assert flow.sample(np.int64(2), generator=source(), length=4).shape == (2, 3, 4)


def test_squeezes_that_are_undone_do_not_count(refuses):
    lower, upper = Squeeze1d(2), Compose([Squeeze1d(2), Squeeze1d(3)], (6, None))
    there_and_back = [lower, Shift(torch.zeros(6)), upper, Inverse(upper), Inverse(lower)]
    assert frames_together(Compose(there_and_back, (3, None))) == 12
    twice = [Squeeze1d(2), Inverse(Squeeze1d(2)), Squeeze1d(2), Inverse(Squeeze1d(2))]
    assert frames_together(Compose(twice, (3, None))) == 2
    apart = [Squeeze1d(2), Inverse(Squeeze1d(2)), Squeeze1d(3), Inverse(Squeeze1d(3))]
    assert frames_together(Compose(apart, (3, None))) == 6
    assert frames_together(mel_decoder(4, steps=1, hidden=8, depth=1)) == 2
    assert frames_together(Inverse(Compose([Inverse(Squeeze1d(3)), Squeeze1d(2)], (6, None)))) == 3
    flow = Flow(Compose(twice, (3, None)), StandardNormal((3, None)))
    mask = torch.arange(6) < torch.tensor([6, 3])[:, None, None]
    refuses(ValueError, r"row 1 has 3 valid frames of 6.*PadToMultiple\(2\)", flow.log_prob, torch.zeros(2, 3, 6), None,
            mask)


def test_half_precision_and_complex_numbers_are_refused(refuses):
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        flow = Flow(Compose([half_of_two()], (2,)), StandardNormal((2,))).to(dtype)
        refuses(ValueError, f"the flow is {name}, too coarse for an exact density: call flow.float", flow.log_prob,
                torch.zeros(1, 2))
    flow = Flow(Compose([half_of_two()], (2,)), StandardNormal((2,)))
    refuses(ValueError, "x must be real, got complex64", flow.log_prob, torch.zeros(1, 2, dtype=torch.complex64))


def test_latents_and_scales_in_other_forms(refuses):
    bijection = glow((1, 4, 4), levels=2, steps=1, hidden=4)
    flow = Flow(bijection, StandardNormal(bijection.out_shape((1, 4, 4))))
    flow.initialize(torch.randn(9, 1, 4, 4))
    latents = flow.latents(torch.randn(2, 1, 4, 4))
    refuses(ValueError, "from_latents takes Latents, .* got Tensor", flow.from_latents, latents[0])
    by_list, by_iterator = (flow.resample(latents, scales, source()) for scales in ([0], iter([0])))
    assert torch.equal(by_list[0], by_iterator[0]) and not torch.equal(by_list[0], latents[0])


def test_flows_of_integers_in_double_precision_by_default():
    x = torch.randint(0, 4, (9, 2), generator=source())
    wide = build_integers()
    expected = wide.double().log_prob(x, generator=source())[0]
    torch.set_default_dtype(torch.float64)
    try:
        flow = build_integers()
        flow.load_state_dict(wide.state_dict())
        found = flow.log_prob(x, generator=source())[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float64 and torch.allclose(found, expected, atol=1e-12)


def build_integers():
    return DiscreteFlow(UniformDequantize(4), Flow(Compose([half_of_two()], (2,)), StandardNormal((2,))))


def test_masks_of_images_of_integers(refuses):
    flow = DiscreteFlow(UniformDequantize(4), Flow(Compose([], (1, 2, 2)), StandardNormal((1, 2, 2))))
    x, mask = torch.zeros(3, 1, 2, 2, dtype=torch.long), torch.ones(3, 1, 5, dtype=torch.bool)
    refuses(ValueError, r"masks are for sequences \(B, C, T\)", flow.log_prob, x, None, mask, generator=source())


def test_temperatures():
    for temperature in (float("inf"), float("nan"), 1e30, -1.0, "hot"):
        with pytest.raises(ValueError, match="temperature must be a finite number"):
            vectors().sample(1, torch.tensor([0]), temperature=temperature, generator=source())


# ---- initialisation: all or nothing ----


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def unchanged(module, before):
    after = module.state_dict()
    return all(torch.equal(after[name], value) for name, value in before.items())


def test_a_missing_condition_leaves_nothing_half_done():
    flow = open_sequences(Condition("labels", 3))
    x, cond, before = torch.randn(16, 4, 8, generator=source()), torch.arange(16) % 3, state(flow)
    for initialize in (flow.initialize, flow.bijection.initialize):
        with pytest.raises(ValueError, match="needs cond"):
            initialize(x)
        assert unchanged(flow, before)
    flow.initialize(x, cond)
    assert not list(flow.bijection.uninitialized())


def test_a_failure_on_the_way_is_undone():
    flow, x = open_sequences(), torch.randn(16, 4, 8, generator=source())
    coupling = flow.bijection.stages[0].layers[3]
    before, net = state(flow), coupling.net.forward
    coupling.net.forward = lambda *arguments: 1 / 0
    with pytest.raises(ZeroDivisionError):
        flow.initialize(x)
    waiting = list(flow.bijection.uninitialized())
    assert unchanged(flow, before) and len(waiting) == 2
    coupling.net.forward = net
    flow.initialize(x)
    assert not list(flow.bijection.uninitialized())


def test_layers_after_the_last_that_starts_from_data_are_not_evaluated():
    whole, x = shaken(open_sequences().bijection), torch.randn(16, 4, 8, generator=source()).double()
    (first, last), (factor,) = whole.stages, whole.factors
    one_by_one = copy.deepcopy(whole)
    y = one_by_one.factors[0].initialize_forward(one_by_one.stages[0].initialize_forward(x))[:, : factor.kept]
    one_by_one.stages[1].initialize_forward(y)
    assert not list(one_by_one.uninitialized())
    assert first.layers[1].starts_from_data and not last.layers[3].starts_from_data
    last.layers[3].net.forward = lambda *arguments: 1 / 0
    whole.initialize(x)
    assert unchanged(whole, state(one_by_one))


def test_a_failure_of_the_flow_undoes_the_dequantisation():
    class Given(VariationalDequantize):
        def initialize(self, *arguments, **options):
            self.low.fill_(0.0)
            self.bijection.layers[0].transform.log_scale.raw.data.fill_(7.0)

    condition = noise_condition((4, 8))
    assert condition.kind == "map"
    model = DiscreteFlow(Given(8, dequantisation_flow((4, 8), couplings=2, depth=1)), open_sequences())
    model.flow.bijection.stages[0].layers[3].net.forward = lambda *arguments: 1 / 0
    before = state(model)
    with pytest.raises(ZeroDivisionError):
        model.initialize(torch.randint(0, 8, (4, 4, 8), generator=source()), generator=source())
    assert unchanged(model, before)


# ---- construction ----


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: neural_spline(3, transform="cubic"), "transform must be one of spline, affine, got 'cubic'"),
        (lambda: neural_spline(3, kind="ar"), "kind must be one of coupling, autoregressive"),
        (lambda: neural_spline(3, mix="x"), "mix must be one of none, lu, actnorm"),
        (lambda: neural_spline(3, layers=0), "layers must be at least 1"),
        (lambda: neural_spline(1), "at least 2 dimensions.*kind=autoregressive"),
        (lambda: realnvp_vector(3, couplings=0), "couplings must be at least 1"),
        (lambda: realnvp_vector(1), "model=nsf"),
        (lambda: dequantisation_flow((3,), couplings=0), "couplings must be at least 1"),
        (lambda: realnvp_image((1, 8, 8), net="x"), "net must be one of residual, gated"),
        (lambda: realnvp_image((1, 8, 8), heads=8), "heads=8 is for an attention block: leave it out"),
        (lambda: glow((1, 8, 8), heads=8), "heads=8 is for an attention block"),
        (lambda: realnvp_image((1, 8, 8), layout=["squeeze"]), "no couplings"),
        (lambda: realnvp_image((1, 8, 8), layout="checkerboard*4"), "layout is a list"),
        (lambda: realnvp_image((1, 7, 5), hidden=8), r"\(1, 7, 5\).*model.layout"),
        (lambda: glow((1, 8, 8), coupling="x"), "coupling must be one of affine, additive, mixture, spline"),
        (lambda: glow((1, 8, 8), scale="x"), "scale must be one of tanh, sigmoid"),
        (lambda: glow((1, 8, 8), steps=0), "steps must be at least 1, got 0"),
        (lambda: glow((1, 8, 8), levels=0), "levels must be at least 1, got 0"),
        (lambda: glow((1, 12, 12), levels=3), "levels = 3 needs sides that 8 divides.*levels = 2 fits"),
        (lambda: glow((1, 7, 5)), r"even sides.*model=realnvp model.layout=\[checkerboard\*4\].*pad"),
        (lambda: glow((1, 1, 1)), "even sides.*vector"),
        (lambda: glow((4, 7)), r"even sides.*PadToMultiple\(2\)"),
    ],
)
def test_options_that_do_not_exist(build, message):
    with pytest.raises(ValueError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value) and isinstance(caught.value, ValueError)


def test_odd_sides_have_the_way_out_that_the_message_names():
    flow = realnvp_image((1, 7, 5), layout=["checkerboard*4"], hidden=8, depth=1, actnorm=False)
    x = torch.randn(2, 1, 7, 5, generator=source())
    torch.testing.assert_close(flow.inverse(flow(x)[0])[0], x)
    assert glow((1, 2, 2), steps=1, hidden=8)(torch.zeros(1, 1, 2, 2))[0].shape == (1, 4)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Coupling(ChannelSplit(4), Affine(2), nn.Linear(2, 4)), "a Linear has no in_channels, out_channels"),
        (lambda: Coupling(ChannelSplit(4), Affine(2), MLP), "the class MLP has no in_channels"),
        (lambda: Coupling(ChannelSplit(4), Affine, MLP(2, 4, hidden=8)), "got the class Affine"),
        (lambda: Compose([Flip(2), nn.Linear(2, 2)], (2,)), "layer 1 is a Linear"),
        (lambda: Compose([Flip], (2,)), "layer 0 is the class Flip"),
        (lambda: Compose(Flip(2), (2,)), r"put it in \[...\]"),
        (lambda: Compose([Flip(2)], 2), "an event shape is a tuple .* got 2"),
        (lambda: StandardNormal(2), "an event shape is a tuple"),
        (lambda: glow(8), "an event shape is a tuple"),
        (lambda: glow((1, 8, 8), cond=10), r'Condition\("labels", 10\)'),
        (lambda: neural_spline(2, cond=10), r'Condition\("labels", 10\)'),
        (lambda: tarflow((1, 4, 4), cond=10), r'Condition\("labels", 10\)'),
        (lambda: TokenNet(2, 2, width=8, depth=1, heads=2, cond=10), r'Condition\("labels", 10\)'),
    ],
)
def test_parts_of_the_wrong_kind(build, message):
    with pytest.raises(TypeError, match=message):
        build()


@pytest.mark.parametrize("transform", ["spline", "affine"])
def test_one_dimension_is_enough_for_autoregressive_flows(transform):
    """The density integrates to one, and the flow is no longer the identity once its parameters have moved."""
    flow = Flow(neural_spline(1, layers=2, kind="autoregressive", transform=transform, mix="lu", hidden=8, bins=4,
                              generator=source()), StandardNormal((1,))).double()  # fmt: skip
    shaken(flow, 0.3)
    grid = torch.linspace(-12, 12, 4801, dtype=torch.float64)[:, None]
    density = flow.log_prob(grid).exp()
    assert abs(float(torch.trapezoid(density, grid[:, 0])) - 1) < 1e-4
    assert float((density.log() - StandardNormal((1,)).log_prob(grid))[1200:3600].abs().max()) > 1e-2
    torch.testing.assert_close(flow.bijection.inverse(flow.bijection(grid)[0])[0], grid)


def test_made_is_exported():
    assert MADE(3, 2, hidden=8)(torch.zeros(1, 3)).shape == (1, 6)
