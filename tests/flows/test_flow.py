"""A flow: density, samples, latents."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from genmodels.core.data import Latents
from genmodels.core.random import KeyedGenerator
from genmodels.flows.bases import ClassNormal, DiagonalNormal, StandardNormal, Uniform
from genmodels.flows.bijection import Bijection, Freeze, Inverse, NotInitialized
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling
from genmodels.flows.coupling_flows import realnvp_image
from genmodels.flows.elementwise import Affine
from genmodels.flows.flow import Flow, reference
from genmodels.flows.linear import Flip
from genmodels.flows.multiscale import FactorOut, MultiScale
from genmodels.flows.scaling import ActNorm, Scale, Shift
from genmodels.flows.squeeze import Squeeze1d, Squeeze2d
from genmodels.nn import MLP, Condition
from genmodels.nn.coupling_networks import ConvNet
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
