"""Flows over integers against the exact masses of small discrete spaces."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.special import ndtr

from genmodels.core.likelihood import log_mean_exp
from genmodels.core.random import KeyedGenerator
from genmodels.flows.bases import ClassNormal, Logistic, StandardNormal
from genmodels.flows.bijection import Bijection, NotInitialized
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling
from genmodels.flows.dequantize import GaussianNoise, UniformDequantize, VariationalDequantize
from genmodels.flows.discrete import DiscreteFlow, NoisyFlow
from genmodels.flows.elementwise import Affine
from genmodels.flows.flow import Flow
from genmodels.flows.multiscale import FactorOut, MultiScale
from genmodels.flows.scaling import ActNorm, Logit, Scale, Shift
from genmodels.flows.squeeze import Squeeze1d, Squeeze2d
from genmodels.nn.condition import Condition
from genmodels.nn.coupling_networks import ConvNet
from genmodels.nn.perceptron import MLP
from tests.flows.test_dequantize import noise_flow
from tests.parameters import shaken

#: Small enough that no noise of float64 comes near it, so that the cells cover the line to 1e-9.
ALPHA = 1e-12


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def keyed(n, seed=0):
    return KeyedGenerator(seed, torch.arange(n), "test")


class Sheared(Bijection):
    """z_1 = l_1 + 0.3, z_2 = e^h(l_1) l_2 + t(l_1), h = 0.4 sin l_1, t = 0.8 l_1: two dependent dimensions."""

    def _forward(self, x, cond, mask):
        first, second = x.unbind(1)
        h = 0.4 * torch.sin(first)
        return torch.stack([first + 0.3, torch.exp(h) * second + 0.8 * first], 1), h

    def _inverse(self, z, cond, mask):
        first = z[:, 0] - 0.3
        h = 0.4 * torch.sin(first)
        return torch.stack([first, (z[:, 1] - 0.8 * first) * torch.exp(-h)], 1), -h


class Wide(Bijection):
    """Noise that leans on x, with the tails of the logistic, so that weights are bounded and their variance is finite.

        a = m(x) + 1.2 logit(Phi(eps)),    a_2 += tanh(a_1) / 2
    """

    uses_cond = True

    def _forward(self, x, cond, mask):
        below, above = torch.special.log_ndtr(x), torch.special.log_ndtr(-x)
        a = 0.2 - 0.6 * cond + 1.2 * (below - above)
        volume = math.log(1.2) - 0.5 * x.square() - 0.5 * math.log(2 * math.pi) - below - above
        if a.shape[1] == 2:
            a = torch.stack([a[:, 0], a[:, 1] + 0.5 * torch.tanh(a[:, 0])], 1)
        return a, volume.sum(1)


NOISES = {
    "uniform": lambda shape: UniformDequantize(4).double(),
    "variational": lambda shape: VariationalDequantize(4, Wide()).double(),
}


def line(noise="uniform", base=None):
    """v = (x + u)/4, z = logit v + 1/2, z ~ N(0, 1)."""
    bijection = Compose([Logit(ALPHA), Shift(torch.tensor(0.5))], (1,))
    flow = Flow(bijection, StandardNormal((1,)) if base is None else base)
    return DiscreteFlow(NOISES[noise]((1,)), flow).double()


def line_masses():
    edges = torch.tensor([-math.inf, *(math.log(k / (4 - k)) + 0.5 for k in (1, 2, 3)), math.inf], dtype=torch.float64)
    return torch.special.ndtr(edges).diff()


def square(noise="uniform"):
    flow = Flow(Compose([Logit(ALPHA), Sheared()], (2,)), StandardNormal((2,)))
    return DiscreteFlow(NOISES[noise]((2,)), flow).double()


def square_masses():
    """All sixteen masses: a quadrature over l_1, the normal distribution function over l_2."""
    edges = [-40.0, *(math.log(k / (4 - k)) for k in (1, 2, 3)), 40.0]
    masses = torch.zeros(4, 4, dtype=torch.float64)
    for i in range(4):
        low, high = max(edges[i], -9.0), min(edges[i + 1], 9.0)
        first = low + (high - low) * (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
        density = torch.exp(-0.5 * (first + 0.3).square()) / math.sqrt(2 * math.pi) * (high - low) / 20_000
        reach = torch.exp(0.4 * torch.sin(first))
        for j in range(4):
            above, below = (ndtr((reach * edges[j + s] + 0.8 * first).numpy()) for s in (1, 0))
            masses[i, j] = (density * torch.from_numpy(above - below)).sum()
    return masses


def points(dims):
    return torch.cartesian_prod(*[torch.arange(4)] * dims).reshape(-1, dims)


CASES = {"line": (line, line_masses, 1), "square": (square, square_masses, 2)}


# ---- truth ----


def test_known_masses():
    expected = torch.tensor([0.2747157297, 0.4167467316, 0.2535841499, 0.0549533888], dtype=torch.float64)
    torch.testing.assert_close(line_masses(), expected, rtol=0, atol=1e-10)
    assert float(square_masses().sum()) == pytest.approx(1, abs=1e-8)


def weights_average_to_the_mass(model, masses, dims, draws=5000):
    """E exp(w) = P(x), for any noise."""
    x = points(dims).repeat_interleave(draws, 0)
    w = model.log_weights(x, generator=keyed(len(x), seed=3)).exp().view(-1, draws)
    assert bool(((w.mean(1) - masses.flatten()).abs() < 4 * w.std(1) / math.sqrt(draws)).all())


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("case", CASES)
def test_weights_average_to_the_mass(case, noise):
    build, masses, dims = CASES[case]
    weights_average_to_the_mass(build(noise), masses(), dims)


def rises_to_the_mass(model, masses, dims, counts=(1, 2, 8, 64)):
    """Mean bounds rise with K, stay below log P, and at last are within 4 SE of it, but for the known gap."""
    replicates = 1600 // 4**dims
    xs = points(dims)
    rows = xs.repeat_interleave(replicates, 0)
    generator = KeyedGenerator(5, torch.arange(len(rows)), "rise")
    w = model.log_weights(rows, generator=generator, samples=max(counts), rows=20_000)
    truth = masses.flatten().log()
    previous = None
    for count in counts:
        bound = log_mean_exp(w[:, :count])[0].view(len(xs), replicates)
        mean, error = bound.mean(1), bound.std(1) / math.sqrt(replicates)
        assert bool((mean <= truth + 4 * error + 1e-9).all())
        if previous is not None:
            gain = bound - previous
            assert bool((gain.mean(1) >= -4 * gain.std(1) / math.sqrt(replicates) - 1e-9).all())
        previous = bound
    # To second order the gap of K samples is var(w / P) / 2K, with the variance of w as seen.
    ratio = (w.view(len(xs), replicates, -1) - truth[:, None, None]).exp()
    gap = ratio.flatten(1).var(1) / (2 * counts[-1])
    assert bool(((truth - mean - gap).abs() < 4 * error + gap.square() + 0.1 * gap).all())
    return previous


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("case", CASES)
def test_bound_rises_to_the_log_mass(case, noise):
    build, masses, dims = CASES[case]
    rises_to_the_mass(build(noise), masses(), dims)


class NoVolume(UniformDequantize):
    """Leaves out - D log L."""

    def with_noise(self, x, noise, mask=None):
        v, contribution = super().with_noise(x, noise, mask)
        return v, contribution + x[0].numel() * math.log(self.levels)


class SharedNoise(DiscreteFlow):
    """The same noise for all K draws."""

    def _noise(self, x, part, draw, generator):
        return super()._noise(x, part, 0, generator)


class LogQDropped(VariationalDequantize):
    """The density of the noise is forgotten."""

    def _spread(self, x, noise, mask):
        u, log_q = super()._spread(x, noise, mask)
        return u, torch.zeros_like(log_q)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bug", ["no volume", "shared noise", "log q dropped", "mean of logs"])
def test_mutants(case, bug, monkeypatch):
    build, masses, dims = CASES[case]
    model = build("variational" if bug == "log q dropped" else "uniform")
    if bug == "no volume":
        model.dequantize = NoVolume(4).double()
    elif bug == "shared noise":
        model.__class__ = SharedNoise
    elif bug == "log q dropped":
        model.dequantize.__class__ = LogQDropped
    else:
        monkeypatch.setitem(globals(), "log_mean_exp", lambda w: (w.mean(1), None))
    with pytest.raises(AssertionError):
        rises_to_the_mass(model, masses(), dims)


def test_expected_bound_of_a_single_sample():
    """Against quadrature over the noise."""
    expected = torch.tensor([-1.8861257, -0.8779139, -1.4011620, -4.1354663], dtype=torch.float64)
    x = torch.arange(4)[:, None].repeat_interleave(40_000, 0)
    w = line().log_weights(x, generator=source()).view(4, 40_000)
    assert bool(((w.mean(1) - expected).abs() < 4 * w.std(1) / 200).all())


def test_expected_bounds_in_bits():
    """Data drawn from P itself: 1.855, 1.784, 1.772 bits at K = 2, 8, 64."""
    replicates = 4000
    w = line().log_weights(torch.arange(4).repeat_interleave(replicates)[:, None], generator=source(), samples=64,
                           rows=16_000).view(4, replicates, 64)  # fmt: skip
    masses = line_masses()
    for count, expected in {1: 2.1158371, 2: 1.855, 8: 1.784, 64: 1.772}.items():
        bound = -log_mean_exp(w[..., :count].flatten(0, 1))[0].view(4, replicates) / math.log(2)
        error = float((masses.square() * bound.var(1) / replicates).sum().sqrt())
        assert abs(float((masses * bound.mean(1)).sum()) - expected) < 4 * error + 1e-3


# ---- K samples ----


def test_vector_of_log_mean_exp():
    w = torch.tensor([[-10.0, -11.0, -13.0]], dtype=torch.float64)
    nats, stderr = log_mean_exp(w)
    assert float(nats) == pytest.approx(-10.7496000719, abs=1e-9)
    e = w.exp()
    assert float(stderr) == pytest.approx(float(e.std(unbiased=True) / math.sqrt(3) / e.mean()), rel=1e-12)
    assert log_mean_exp(w[:, :1])[1] is None
    far = log_mean_exp(w - 5000)
    assert float(far[0]) == pytest.approx(-5010.7496000719, abs=1e-9) and float(far[1]) == pytest.approx(float(stderr))


def test_standard_error_is_the_spread_of_repetitions():
    """The delta method, where the weights are well behaved: x = 1."""
    replicates, count = 2000, 64
    nats, stderr = line().log_prob(
        torch.ones(replicates, 1).long(), generator=keyed(replicates), samples=count
    )
    assert float(stderr.square().mean().sqrt()) == pytest.approx(float(nats.std()), rel=0.05)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 12, 1000, None])
def test_passes_change_nothing(rows):
    model, x = square("variational"), points(2)[:5]
    expected = torch.stack(
        [torch.stack([model.log_weights(x[i : i + 1], generator=keyed(5).rows(slice(i, i + 1)), samples=4)[0, k]
                      for k in range(4)]) for i in range(5)]
    )  # fmt: skip
    actual = model.log_weights(x, generator=keyed(5), samples=4, rows=rows)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_draws_are_nested_and_fresh():
    model, x = square(), points(2)
    eight = model.log_weights(x, generator=keyed(16), samples=8)
    assert torch.equal(model.log_weights(x, generator=keyed(16), samples=3), eight[:, :3])
    assert len(eight.unique()) == eight.numel()
    assert torch.equal(model.log_prob(x, generator=keyed(16))[0], eight[:, 0])
    assert not torch.equal(model.log_weights(x, generator=keyed(16, seed=1)), eight[:, :1])


def test_the_step_of_training_stays_in_the_key():
    model, x = square(), points(2)
    seen = [model.log_prob(x, generator=keyed(16).at(step))[0] for step in (0, 1)]
    assert not torch.equal(*seen)


def test_gradients_of_the_k_sample_bound():
    """The gradient is the mean of per-sample gradients under normalised weights."""
    model = square()
    shift = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    model.flow.bijection.layers[1] = Moved(shift)
    nats, stderr = model.log_prob(points(2), generator=keyed(16), samples=5)
    (gradient,) = torch.autograd.grad(nats.sum(), shift)
    w = model.log_weights(points(2), generator=keyed(16), samples=5)
    share = w.softmax(1).detach()
    (expected,) = torch.autograd.grad((share * w).sum(), shift)
    torch.testing.assert_close(gradient, expected)
    assert not stderr.requires_grad


class Moved(Bijection):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def _forward(self, x, cond, mask):
        return x + self.shift, x.new_zeros(len(x))


def test_wrong_counts():
    for options in ({"samples": 0}, {"samples": 2, "rows": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            square().log_prob(points(2), generator=source(), **options)
    with pytest.raises(ValueError, match="generator must be a torch.Generator or a KeyedGenerator, got None"):
        square().log_prob(points(2), generator=None)


# ---- samples ----


def samples_have_the_masses(model, masses, dims, n=40_000):
    x = model.sample(n, generator=keyed(n)).long()
    assert x.shape == (n, dims)
    seen = torch.bincount((x * 4 ** torch.arange(dims - 1, -1, -1)).sum(1), minlength=4**dims) / n
    error = (masses.flatten() * (1 - masses.flatten()) / n).sqrt()
    assert bool(((seen - masses.flatten()).abs() < 4 * error).all())


@pytest.mark.parametrize("case", CASES)
def test_samples_have_the_masses(case):
    build, masses, dims = CASES[case]
    samples_have_the_masses(build(), masses(), dims)


class Rounded(DiscreteFlow):
    """Rounds to the nearest integer instead of taking the cell."""

    def quantise(self, v):
        return (v * 4).round().clamp(0, 3).long()


def test_mutant_rounding():
    model = line()
    model.__class__ = Rounded
    with pytest.raises(AssertionError):
        samples_have_the_masses(model, line_masses(), 1)


def test_temperature_and_keys():
    model = square()
    assert model.sample(3, generator=keyed(3), temperature=0.0).unique(dim=0).shape[0] == 1
    whole = model.sample(8, generator=KeyedGenerator(0, torch.arange(8), "s"))
    alone = model.sample(1, generator=KeyedGenerator(0, torch.tensor([5]), "s"))
    assert torch.equal(whole[5:6], alone) and whole.dtype == torch.uint8
    with pytest.raises(ValueError, match="must be a finite number"):
        model.sample(1, generator=source(), temperature=-1)


# ---- classes ----


def test_class_posterior_against_truth():
    base = ClassNormal((1,), num_classes=2).double()
    base.mean.data.copy_(torch.tensor([[-0.5], [1.0]]))
    model = line(base=base)
    edges = torch.tensor([-math.inf, *(math.log(k / (4 - k)) + 0.5 for k in (1, 2, 3)), math.inf]).double()
    masses = torch.stack([torch.special.ndtr(edges - m).diff() for m in (-0.5, 1.0)], dim=1)
    x = torch.arange(4)[:, None]
    for prior in (None, torch.tensor([0.9, 0.1], dtype=torch.float64)):
        posterior = model.class_posterior(x, 2, generator=source(), samples=1000, rows=1000,
                                          log_prior=None if prior is None else prior.log())  # fmt: skip
        torch.testing.assert_close(posterior.sum(1), torch.ones(4).double(), rtol=0, atol=1e-12)
        joint = masses if prior is None else masses * prior
        torch.testing.assert_close(posterior, joint / joint.sum(1, keepdim=True), rtol=0, atol=0.02)


LABELS = Condition("labels", 3)


def couplings(shape, cond):
    channels, dims = shape[0], len(shape) - 1
    split = ChannelSplit(channels)
    element = Affine(split.changed)
    out = element.params_per_dim * split.changed
    net = ConvNet(split.kept, out, hidden=8, dims=dims, cond=cond) if dims else MLP(split.kept, out, cond=cond)
    return Coupling(split, element, net)


def whole_flow(name, cond):
    if name == "vectors":
        body, shape = Compose([couplings((4,), cond)], (4,)), (4,)
    elif name == "images":
        stages = [Compose([Squeeze2d(), couplings((8, 2, 2), cond)], (2, 4, 4)), couplings((4, 2, 2), cond)]
        body, shape = MultiScale(stages, [FactorOut(8, ConvNet(4, 8, hidden=8, cond=cond))], (2, 4, 4)), (2, 4, 4)
    else:
        stages = [Compose([Squeeze1d(), couplings((4, None), cond)], (2, None)), Compose([Squeeze1d()], (2, None))]
        body, shape = MultiScale(stages, [FactorOut(4)], (2, None)), (2, None)
    whole = Compose([Logit(0.05), body], shape)
    return Flow(whole, StandardNormal(whole.shape_after)), shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("noise", ["uniform", "variational"])
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("name", ["vectors", "images", "sequences"])
def test_every_kind_of_event(name, conditional, noise, dtype):
    cond = LABELS if conditional else None
    flow, shape = whole_flow(name, cond)
    if noise == "uniform":
        dequantize = UniformDequantize(17)
    else:
        dequantize = VariationalDequantize(17, noise_flow(shape))
    model = shaken(DiscreteFlow(dequantize, flow), 0.2).to(dtype)
    size = tuple(8 if n is None else n for n in shape)
    x = torch.randint(17, (5, *size), generator=source(), dtype=torch.uint8)
    labels = torch.tensor([0, 1, 2, 0, 1]) if conditional else None
    nats, stderr = model.log_prob(x, labels, generator=keyed(5), samples=3, rows=4)
    assert nats.shape == stderr.shape == (5,) and nats.dtype == torch.float64 and nats.isfinite().all()
    drawn = model.sample(5, labels, generator=keyed(5), length=8 if name == "sequences" else None)
    assert drawn.shape == x.shape and drawn.dtype == torch.uint8 and int(drawn.max()) <= 16
    latents = model.flow.latents(model.centre(x), labels)
    assert torch.equal(model.quantise(model.flow.from_latents(latents, labels)), x)
    if conditional:
        assert not torch.equal(model.log_prob(x, labels.flip(0), generator=keyed(5), samples=3)[0], nats)
        with pytest.raises(ValueError, match="needs cond"):
            model.log_prob(x, generator=keyed(5))
    else:
        with pytest.raises(ValueError, match="leave cond out"):
            model.log_prob(x, torch.zeros(5).long(), generator=keyed(5))


@pytest.mark.parametrize("noise", ["uniform", "variational"])
def test_masked_frames_count_for_nothing(noise):
    flow, shape = whole_flow("sequences", None)
    dequantize = UniformDequantize(5) if noise == "uniform" else VariationalDequantize(5, noise_flow(shape))
    model = shaken(DiscreteFlow(dequantize, flow))
    lengths = [8, 4]
    mask = torch.arange(8)[None, None] < torch.tensor(lengths)[:, None, None]
    x = torch.randint(5, (2, 2, 8), generator=source())
    noise = model.dequantize.noise((2, 2, 8), source(1))

    class Given(DiscreteFlow):
        def _noise(self, x, part, draw, generator):
            return noise[part, :, : x.shape[-1]]

    model.__class__ = Given
    found, _ = model.log_prob(x, None, mask, generator=keyed(2), samples=2, rows=3)
    again, _ = model.log_prob(x.masked_fill(~mask, 4), None, mask, generator=keyed(2), samples=2)
    assert torch.equal(found, again)
    torch.testing.assert_close(found[:1], model.log_prob(x[:1], generator=keyed(1))[0], rtol=0, atol=1e-11)
    noise = noise[1:]
    torch.testing.assert_close(found[1:], model.log_prob(x[1:, :, :4], generator=keyed(1))[0], rtol=0, atol=1e-11)
    drawn = model.sample(2, generator=keyed(2), mask=mask)
    assert drawn.shape == (2, 2, 8)


# ---- initialisation ----


def test_initialisation():
    flow = Flow(Compose([Logit(0.05), ActNorm(2)], (2,)), StandardNormal((2,)))
    model = DiscreteFlow(VariationalDequantize(4, Compose([ActNorm(2), Wide()], (2,))), flow)
    x = torch.randint(4, (200, 2), generator=source())
    with pytest.raises(NotInitialized, match="dequantisation: the layer bijection.layers.0"):
        model.log_prob(x, generator=keyed(200))
    with pytest.raises(NotInitialized, match="Flow.sample: the layer layers.1"):
        model.sample(1, generator=source())
    model.initialize(x, generator=keyed(200))
    v, _ = model.dequantize(x, keyed(200))
    z, _ = flow.bijection(v)
    assert bool((z.mean(0).abs() < 0.3).all()) and bool((z.std(0) - 1).abs().max() < 0.2)
    model.log_prob(x, generator=keyed(200))
    with pytest.raises(RuntimeError, match="initialised already"):
        model.initialize(x, generator=keyed(200))
    model.initialize(x, generator=keyed(200), force=True)


def test_kind_is_that_of_the_dequantisation():
    assert line().kind == "lower_bound"


def test_a_logistic_base_has_masses_by_its_distribution_function():
    """v = sigmoid(z) with z logistic is uniform: every integer has the same mass, and the bound is exact."""
    flow = Flow(Compose([Logit(ALPHA)], (2,)), Logistic((2,)))
    nats, stderr = DiscreteFlow(UniformDequantize(4).double(), flow.double()).log_prob(
        points(2), generator=keyed(16), samples=4
    )
    torch.testing.assert_close(nats, torch.full((16,), -2 * math.log(4)).double(), rtol=0, atol=1e-6)
    assert float(stderr.max()) < 1e-6


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_the_mass_outside_the_levels_is_that_of_the_closed_form(alpha):
    """A Gaussian behind a logit: P(sigmoid(y) not in [alpha, 1 - alpha)) = 2 Phi(logit(alpha))."""
    flow = DiscreteFlow(UniformDequantize(16), Flow(Logit(alpha), StandardNormal((3,))))
    v = flow.points(20_000, generator=torch.Generator().manual_seed(0))
    outside = flow.dequantize.outside(v)
    expected = 2 * torch.special.ndtr(torch.logit(torch.tensor(alpha, dtype=torch.float64)))
    error = outside.std() / math.sqrt(len(outside))
    assert abs(outside.mean() - expected) < 4 * error
    one_end = (v < 0).double().mean()  # a mutant: what lies above the last level is forgotten
    assert abs(one_end - expected) > 4 * error
    assert torch.equal(flow.sample(20_000, generator=torch.Generator().manual_seed(0)), flow.quantise(v))


# ---- noisy data ----


def error_of_the_denoised(sigma=0.3):
    """Of data N(m, s^2), y has the density N(m, s^2 + sigma^2), and E[v | y] = m + s^2/(s^2 + sigma^2) (y - m)."""
    m, s = torch.tensor([0.5, -1.0], dtype=torch.float64), torch.tensor([0.2, 2.0], dtype=torch.float64)
    exact = Compose([Shift(-m), Scale((s**2 + sigma**2).rsqrt())], (2,))
    model = NoisyFlow(GaussianNoise(4, sigma), Flow(exact, StandardNormal((2,)))).double()
    y = 2 * torch.randn(5, 2, generator=source(), dtype=torch.float64)
    expected = m + s**2 / (s**2 + sigma**2) * (y - m)
    return float((model.denoise(y) - expected).abs().max())


def test_denoising_by_the_score_is_the_posterior_mean_of_gaussian_data(monkeypatch):
    assert error_of_the_denoised() < 1e-6  # the values of Shift and Scale are kept in single precision
    wrong = property(lambda self: 0.3**0.5, lambda self, value: None)
    monkeypatch.setattr(GaussianNoise, "sigma", wrong, raising=False)
    assert error_of_the_denoised() > 1e-2


def test_an_empty_batch_has_no_values():
    model = DiscreteFlow(UniformDequantize(4), Flow(Compose([], (2,)), StandardNormal((2,))))
    x = torch.zeros(0, 2, dtype=torch.int64)
    v, contribution = model.dequantize(x, source())
    assert v.shape == (0, 2) and contribution.shape == (0,)
    assert model.log_weights(x, generator=source(), samples=3).shape == (0, 3)
    assert model.log_prob(x, generator=source())[0].shape == (0,)
