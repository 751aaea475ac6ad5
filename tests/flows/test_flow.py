"""A flow: density, samples, latents, and what it refuses."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from genmodels.core.data import Latents
from genmodels.core.random import KeyedGenerator
from genmodels.flows.bases import ClassNormal, DiagonalNormal, StandardNormal, Uniform
from genmodels.flows.bijection import Bijection, Freeze, Inverse, NotInitialized
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling
from genmodels.flows.coupling_flows import TokenNet, dequantisation_flow, realnvp_image, realnvp_vector
from genmodels.flows.dequantize import UniformDequantize, VariationalDequantize, noise_condition
from genmodels.flows.discrete import DiscreteFlow
from genmodels.flows.elementwise import Affine
from genmodels.flows.flow import Flow, frames_together, reference
from genmodels.flows.linear import Flip
from genmodels.flows.multiscale import FactorOut, MultiScale, glow
from genmodels.flows.scaling import ActNorm, Scale, Shift
from genmodels.flows.spline import neural_spline
from genmodels.flows.squeeze import PadToMultiple, Squeeze1d, Squeeze2d
from genmodels.flows.tarflow import tarflow
from genmodels.nn import MADE, MLP, Condition
from genmodels.nn.coupling_networks import ConvNet
from genmodels.speech.glow_tts import mel_decoder
from tests.parameters import shaken


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def coupling(channels, dims=0, swap=False, cond=None):
    split = ChannelSplit(channels, swap=swap)
    element = Affine(split.changed)
    out = element.params_per_dim * split.changed
    options = {"hidden": 16, "cond": cond}
    net = ConvNet(split.kept, out, dims=dims, **options) if dims else MLP(split.kept, out, **options)
    return Coupling(split, element, net)


def plane(cond=None, base=None):
    """A non-linear flow over the plane, whose mass lies within 10 of its centre."""
    layers = [coupling(2, cond=cond), Flip(2), coupling(2, cond=cond), Scale(torch.tensor([0.5, 2.0]))]
    return shaken(Flow(Compose(layers, (2,)), StandardNormal((2,)) if base is None else base), 0.2)


LABELS = Condition("labels", 3)


def images(cond=None):
    first = Compose([Squeeze2d(), coupling(4, 2, cond=cond), ActNorm(4)], (1, 4, 4))
    second = Compose([Squeeze2d(), coupling(8, 2, swap=True, cond=cond)], (2, 2, 2))
    prior = FactorOut(4, ConvNet(2, 4, hidden=8, cond=cond))
    body = MultiScale([first, second], [prior], (1, 4, 4))
    whole = Compose([Shift(torch.tensor(-0.5)), body], (1, 4, 4))
    return Flow(whole, StandardNormal(whole.shape_after))


def sequences():
    first, second = Compose([Squeeze1d(), coupling(4, 1)], (2, None)), Compose([Squeeze1d(), coupling(4, 1)], (2, None))
    flow = MultiScale([first, second], [FactorOut(4, ConvNet(2, 4, hidden=8, dims=1))], (2, None))
    return shaken(Flow(flow, StandardNormal((None,))), 0.3)


# ---- density ----


def integrates_to_one(flow, cond=None):
    axis = (torch.arange(480, dtype=torch.float64) + 0.5) / 12 - 20
    grid = torch.cartesian_prod(axis, axis)
    labels = None if cond is None else torch.full((len(grid),), cond)
    assert float(flow.log_prob(grid, labels).exp().sum() / 144) == pytest.approx(1, abs=1e-3)


class TwiceTheVolume(Flow):
    def log_prob(self, x, cond=None, mask=None):
        value = super().log_prob(x, cond, mask)
        return value + self.bijection(x)[1]


class WrongConstant(StandardNormal):
    def _entries(self, z, cond):
        return super()._entries(z, cond) + 0.25 * math.log(2 * math.pi)


def test_density_integrates_to_one():
    integrates_to_one(plane())
    integrates_to_one(plane(LABELS), 2)
    integrates_to_one(plane(base=DiagonalNormal((2,))))
    integrates_to_one(plane(base=ClassNormal((2,), num_classes=3)), 1)


def test_mutant_in_the_density():
    good = plane()
    with pytest.raises(AssertionError):
        integrates_to_one(TwiceTheVolume(good.bijection, good.base))
    with pytest.raises(AssertionError):
        integrates_to_one(plane(base=WrongConstant((2,))))


def samples_follow(flow):
    """The means of log p, x_0^2 and x_1^2 over samples are the integrals of p log p, p x_0^2 and p x_1^2."""
    axis = (torch.arange(400, dtype=torch.float64) + 0.5) / 20 - 10
    grid, x = torch.cartesian_prod(axis, axis), flow.sample(20_000, generator=source(3))
    density = flow.log_prob(grid).exp() / 400

    def statistics(points):
        return torch.cat([flow.log_prob(points)[:, None], points.square()], dim=1)

    expected, seen = (density[:, None] * statistics(grid)).sum(0), statistics(x)
    assert ((seen.mean(0) - expected).abs() < 4 * seen.std(0) / math.sqrt(len(seen)) + 1e-3).all()


class ForwardForInverse(Flow):
    def sample(self, n, cond=None, *, temperature=1.0, generator, mask=None, length=None):
        z = self.base.sample(n, generator=generator, dtype=torch.float64)
        return self.bijection(z)[0]


def test_samples_follow_the_density():
    flow = plane()
    samples_follow(flow)
    with pytest.raises(AssertionError):
        samples_follow(ForwardForInverse(flow.bijection, flow.base))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_have_the_precision_of_the_flow(dtype):
    flow = plane().to(dtype)
    assert flow.sample(3, generator=source()).dtype == dtype
    assert flow.log_prob(torch.zeros(1, 2, dtype=dtype)).dtype == dtype
    assert reference(nn.Identity()).dtype == torch.float32


# ---- temperature ----


@pytest.mark.parametrize("temperature", [0.25, 0.7])
def test_temperature_reaches_every_scale(temperature):
    """At the start couplings and priors are affine, so covariance scales by T^2."""
    flow = images()
    flow.initialize(torch.randn(50, 1, 4, 4, generator=source()))
    with torch.no_grad():
        flow.bijection.layers[1].factors[0].prior.head.log_scale.normal_(generator=source(4))
        flow.bijection.layers[1].factors[0].prior.head.bias.normal_(generator=source(4))
    with torch.no_grad():
        warm, cold = (flow.sample(20_000, temperature=t, generator=source(9)).flatten(1).double()
                      for t in (1.0, temperature))  # fmt: skip
    # The same noise in both, so that the ratio is exact up to rounding.
    torch.testing.assert_close(cold.var(0) / warm.var(0), torch.full((16,), temperature**2).double(), rtol=1e-3, atol=0)


def test_temperature_zero_maps_the_mode():
    flow = plane()
    at_zero = flow.sample(2, temperature=0.0, generator=source())
    torch.testing.assert_close(at_zero, flow.bijection.inverse(torch.zeros(2, 2).double())[0])


def test_wrong_temperatures():
    with pytest.raises(ValueError, match="must be a finite number"):
        plane().sample(1, temperature=-1.0, generator=source())
    with pytest.raises(ValueError, match="Uniform has no temperature"):
        plane(base=Uniform((2,))).sample(1, temperature=0.5, generator=source())


def test_a_sample_depends_on_its_index_alone():
    flow = shaken(images(LABELS), 0.3)
    flow.initialize(torch.randn(20, 1, 4, 4, dtype=torch.float64), torch.arange(20) % 3)
    index, labels = torch.tensor([5, 2, 9]), torch.tensor([0, 1, 2])
    whole = flow.sample(3, labels, generator=KeyedGenerator(3, index, "sample"))
    alone = flow.sample(1, labels[1:2], generator=KeyedGenerator(3, index[1:2], "sample"))
    torch.testing.assert_close(whole[1:2], alone, rtol=0, atol=1e-12)
    other = flow.sample(1, labels[1:2], generator=KeyedGenerator(4, index[1:2], "sample"))
    assert (whole[1:2] - other).abs().max() > 0.1


# ---- initialisation ----


def test_not_initialized_names_layer_and_call():
    flow = images()
    x = torch.rand(8, 1, 4, 4)
    latents = Latents((torch.zeros(1, 2, 2, 2), torch.zeros(1, 8, 1, 1)))
    calls = {
        "Flow.log_prob": lambda: flow.log_prob(x),
        "Flow.sample": lambda: flow.sample(1, generator=source()),
        "Flow.latents": lambda: flow.latents(x),
        "Flow.from_latents": lambda: flow.from_latents(latents),
        "Flow.resample": lambda: flow.resample(latents, [0], source()),
    }
    for name, call in calls.items():
        if name == "Flow.resample":
            call()  # only the base is asked
            continue
        with pytest.raises(NotInitialized, match=rf"{name}: .*layers\.1\.stages\.0\.layers\.2.*initialize\(x\)"):
            call()
    flow.initialize(x)
    for call in calls.values():
        call()
    with pytest.raises(RuntimeError, match="initialised already"):
        flow.initialize(x)
    flow.initialize(x, force=True)


def test_loading_initialises():
    flow, fresh = images(), images()
    x = torch.rand(8, 1, 4, 4)
    flow.initialize(x)
    fresh.load_state_dict(flow.state_dict())
    assert torch.equal(flow.log_prob(x), fresh.train().log_prob(x))
    fresh.load_state_dict(images().state_dict())
    with pytest.raises(NotInitialized):
        fresh.log_prob(x)


# ---- latents ----


@pytest.mark.parametrize("name", ["images", "sequences", "plane", "frozen"])
def test_from_latents_is_the_inverse_of_latents(name):
    cond, mask = None, None
    if name == "images":
        flow, x = shaken(images(LABELS), 0.3), torch.randn(3, 1, 4, 4, generator=source(), dtype=torch.float64)
        cond = torch.tensor([0, 2, 1])
        flow.initialize(x, cond)
    elif name == "sequences":
        flow, x = sequences(), torch.randn(3, 2, 12, generator=source(), dtype=torch.float64)
        mask = torch.arange(12)[None, None] < torch.tensor([12, 8, 4])[:, None, None]
        x = x.masked_fill(~mask, 0)
    else:
        flow, x = plane(), torch.randn(3, 2, generator=source(), dtype=torch.float64)
        flow = Flow(Freeze(flow.bijection), flow.base) if name == "frozen" else flow
    latents = flow.latents(x, cond, mask)
    torch.testing.assert_close(flow.from_latents(latents, cond, mask), x, rtol=1e-10, atol=1e-10)
    count = {"images": 2, "sequences": 2}.get(name, 1)
    assert len(latents) == count
    log_normal = -0.5 * latents.flatten().square().sum(1)
    volume = flow.bijection(x, cond, mask)[1]
    dims = x[0].numel() if mask is None else 2 * mask.flatten(1).sum(1).double()
    expected = log_normal - 0.5 * math.log(2 * math.pi) * dims + volume
    torch.testing.assert_close(flow.log_prob(x, cond, mask), expected, rtol=0, atol=1e-10)


def test_resample_replaces_the_chosen_scales_only():
    flow = shaken(images(), 0.3)
    flow.initialize(torch.randn(20, 1, 4, 4, dtype=torch.float64))
    latents = flow.latents(torch.randn(4, 1, 4, 4, generator=source(), dtype=torch.float64))

    def key():
        return KeyedGenerator(0, torch.arange(4), "resample")

    fine = flow.resample(latents, [0], key())
    assert torch.equal(fine[1], latents[1]) and not torch.equal(fine[0], latents[0])
    both = flow.resample(latents, [0, -1], key())
    assert torch.equal(both[0], fine[0]) and not torch.equal(both[1], latents[1])
    assert torch.equal(flow.resample(latents, [], key()).flatten(), latents.flatten())
    cold = flow.resample(latents, [0], key(), 0.5)
    torch.testing.assert_close(cold[0], 0.5 * fine[0])
    assert flow.from_latents(fine).shape == (4, 1, 4, 4)
    with pytest.raises(ValueError, match=r"scales must lie in 0\.\.1"):
        flow.resample(latents, [2], key())


def test_something_after_the_scales_makes_one_latent_of_them():
    body = MultiScale([Flip(4), Flip(2)], [FactorOut(4)], (4,))
    flow = Flow(Compose([body, Flip(4)], (4,)), StandardNormal((4,)))
    latents = flow.latents(torch.zeros(1, 4))
    assert len(latents) == 1
    with pytest.raises(ValueError, match="this flow has one scale of latents, got 2"):
        flow.from_latents(Latents((latents[0], latents[0])))
    assert len(Flow(body, StandardNormal((4,))).latents(torch.zeros(1, 4))) == 2


# ---- sequences ----


def test_log_prob_counts_valid_frames_only():
    flow = sequences()
    x = torch.randn(3, 2, 12, generator=source(), dtype=torch.float64)
    lengths = [12, 8, 4]
    mask = torch.arange(12)[None, None] < torch.tensor(lengths)[:, None, None]
    for content in (0.0, math.nan):
        found = flow.log_prob(x.masked_fill(~mask, content), None, mask)
        alone = torch.cat([flow.log_prob(x[i : i + 1, :, :n]) for i, n in enumerate(lengths)])
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-11)


def test_sampling_sequences():
    flow = sequences()
    assert flow.sample(2, generator=source(), length=8).shape == (2, 2, 8)
    mask = torch.arange(12)[None, None] < torch.tensor([12, 4])[:, None, None]
    x = flow.sample(2, generator=source(), mask=mask)
    assert x.shape == (2, 2, 12) and not x.masked_fill(mask, 0).any() and bool(x[1, :, :4].any())
    with pytest.raises(ValueError, match="give mask or length"):
        flow.sample(2, generator=source())
    with pytest.raises(ValueError, match=r"length=7 is for sequences of an open length, events are \(2,\) here"):
        Flow(Flip(2), StandardNormal((2,))).sample(2, generator=source(), length=7)


def test_maps_condition_every_scale_of_images():
    layout = ("checkerboard*1", "squeeze", "channel*2", "split", "checkerboard*1")
    flow = realnvp_image((1, 4, 4), layout=layout, hidden=4, depth=1, actnorm=False, cond=Condition("map", 2))
    flow = shaken(flow).double()
    x, cond = (torch.randn(3, c, 4, 4, generator=source(), dtype=torch.float64) for c in (1, 2))
    z, logdet = flow(x, cond)
    back, other = flow.inverse(z, cond)
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(other, -logdet)
    assert not torch.allclose(flow(x, cond + 1)[1], logdet)


# ---- conditions ----


def test_class_posterior():
    flow = plane(LABELS)
    x = torch.randn(5, 2, generator=source(), dtype=torch.float64)
    posterior = flow.class_posterior(x, 3)
    torch.testing.assert_close(posterior.sum(1), torch.ones(5).double(), rtol=0, atol=1e-12)
    joint = torch.stack([flow.log_prob(x, torch.full((5,), y)).exp() for y in range(3)], dim=1)
    torch.testing.assert_close(posterior, joint / joint.sum(1, keepdim=True))
    prior = torch.tensor([0.7, 0.2, 0.1]).double()
    with pytest.raises(ValueError, match=r"log_prior must have a value for each of 3 classes, .* got \(2,\)"):
        flow.class_posterior(x, 3, log_prior=torch.zeros(2))
    with pytest.raises(ValueError, match=r"of each of 1 examples if they differ, got \(5, 3\)"):
        flow.class_posterior(x[:1], 3, log_prior=torch.zeros(5, 3))
    weighted = flow.class_posterior(x, 3, log_prior=prior.log())
    torch.testing.assert_close(weighted, joint * prior / (joint * prior).sum(1, keepdim=True))


def test_class_posterior_of_known_gaussians():
    base = ClassNormal((1,), num_classes=2).double()
    base.mean.data.copy_(torch.tensor([[-1.0], [1.0]]))
    x = torch.tensor([[-2.0], [0.0], [0.3]]).double()
    expected = torch.sigmoid(2 * x[:, 0])  # log N(x; 1, 1) - log N(x; -1, 1) = 2x
    posterior = Flow(Compose([], (1,)), base).class_posterior(x, 2)
    torch.testing.assert_close(posterior[:, 1], expected, rtol=0, atol=1e-12)


def test_conditions_are_checked():
    x, y = torch.zeros(1, 2).double(), torch.tensor([0])
    with pytest.raises(ValueError, match="leave cond out"):
        plane().log_prob(x, y)
    with pytest.raises(ValueError, match="leave cond out"):
        plane().sample(1, y, generator=source())
    with pytest.raises(ValueError, match="needs cond"):
        plane(LABELS).log_prob(x)
    with pytest.raises(ValueError, match="needs cond"):
        plane(LABELS).sample(1, generator=source())
    with pytest.raises(ValueError, match="needs cond"):
        plane(base=ClassNormal((2,), num_classes=2)).sample(1, generator=source())
    assert (plane(LABELS).log_prob(x, y) - plane(LABELS).log_prob(x, y + 1)).abs() > 1e-3


def test_gradients_reach_every_parameter_and_the_condition():
    flow = plane(Condition("vector", 4), base=DiagonalNormal((2,))).requires_grad_(True)
    cond = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 2, dtype=torch.float64)
    flow.log_prob(x, cond).sum().backward()
    for name, parameter in (*flow.named_parameters(), ("cond", cond)):
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


# ---- construction ----


@pytest.mark.parametrize(
    "bijection, base",
    [
        (Compose([], (2,)), StandardNormal((3,))),
        (MultiScale([Flip(4), Flip(2)], [FactorOut(4)], (4,)), StandardNormal((5,))),
        (Compose([Squeeze2d()], (1, 4, 4)), StandardNormal((1, 4, 4))),
        (Flip(3), StandardNormal((2,))),
    ],
)
def test_a_base_has_to_fit(bijection, base):
    with pytest.raises(ValueError, match="base"):
        Flow(bijection, base)


def test_event_shape():
    assert images().event_shape == (1, 4, 4) and sequences().event_shape == (2, None)
    assert Flow(Inverse(Squeeze2d()), StandardNormal((1, 4, 4))).event_shape == (4, 2, 2)


def test_compiled_equals_eager():
    torch._dynamo.reset()
    flow, x, cond = plane(LABELS).float(), torch.randn(3, 2), torch.tensor([0, 1, 2])
    compiled = torch.compile(lambda x: flow.log_prob(x, cond), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), flow.log_prob(x, cond), rtol=1e-5, atol=1e-5)


class Forgetful(Bijection):
    """Drops its condition on the way back."""

    uses_cond = True

    def _forward(self, x, cond, mask):
        return x + cond, x.new_zeros(len(x))

    def _inverse(self, z, cond, mask):
        return z, z.new_zeros(len(z))


def test_mutant_condition_dropped_in_the_inverse():
    def round_trip(bijection):
        flow = Flow(bijection, StandardNormal((2,)))
        x, cond = torch.zeros(1, 2), torch.ones(1, 2)
        torch.testing.assert_close(flow.from_latents(flow.latents(x, cond), cond), x)

    class Mindful(Forgetful):
        def _inverse(self, z, cond, mask):
            return z - cond, z.new_zeros(len(z))

    round_trip(Mindful())
    with pytest.raises(AssertionError):
        round_trip(Forgetful())


# ---- what is refused where data enter a flow: masks, labels, integers, precisions; and initialisation that ----


def open_sequences(cond=None):
    bijection = glow((4, None), levels=2, steps=1, hidden=8, cond=cond, generator=source())
    return Flow(bijection, StandardNormal((None,)))


def started():
    flow = open_sequences()
    flow.initialize(torch.randn(16, 4, 8, generator=source(1)))
    return flow


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
        with pytest.raises(ValueError, match="n, the number of samples"):
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
        flow = Flow(Compose([coupling(2)], (2,)), StandardNormal((2,))).to(dtype)
        refuses(ValueError, f"the flow is {name}, too coarse for an exact density: call flow.float", flow.log_prob,
                torch.zeros(1, 2))
    flow = Flow(Compose([coupling(2)], (2,)), StandardNormal((2,)))
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
    return DiscreteFlow(UniformDequantize(4), Flow(Compose([coupling(2)], (2,)), StandardNormal((2,))))


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
