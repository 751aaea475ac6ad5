"""Base distributions: densities against torch's own, samples against densities, temperature, masks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributions as truth

from genmodels.core.random import KeyedGenerator
from genmodels.flows import bases
from genmodels.flows.bases import BASES, ClassNormal, DiagonalNormal, Logistic, Mixture, StandardNormal, Uniform


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def made(name, shape=(1,), seed=3):
    """A base in float64 with random parameters."""
    options = {"class": {"num_classes": 3}, "mixture": {"components": 3}, "uniform": {"low": -1.0, "high": 2.0}}
    base = BASES[name](shape, **options.get(name, {})).double()
    generator = source(seed)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return base


def labels(name, n, label=1):
    return torch.full((n,), label) if name == "class" else None


def reference(name, base):
    """The same distribution of one-dimensional events by torch.distributions."""
    def scale(raw):
        return torch.exp(10 * torch.tanh(raw / 10))

    if name == "normal":
        return truth.Normal(torch.zeros(1).double(), 1.0)
    if name == "diagonal":
        return truth.Normal(base.mean, scale(base.raw_log_scale))
    if name == "class":
        return truth.Normal(base.mean[1], scale(base.raw_log_scale[1]))
    if name == "logistic":
        standard = truth.Uniform(torch.zeros(1).double(), torch.ones(1).double())
        return truth.TransformedDistribution(standard, [truth.SigmoidTransform().inv])
    if name == "uniform":
        return truth.Uniform(torch.tensor([-1.0]).double(), torch.tensor([2.0]).double(), validate_args=False)
    component = truth.Normal(base.mean[:, 0], scale(base.raw_log_scale[:, 0]))
    return truth.MixtureSameFamily(truth.Categorical(logits=base.logits), component)


# ---- densities ----


@pytest.mark.parametrize("name", BASES)
def test_log_prob_is_that_of_torch(name):
    base = made(name)
    z = torch.linspace(-0.99, 1.99, 41, dtype=torch.float64)[:, None]
    expected = reference(name, base).log_prob(z).reshape(-1)
    actual = base.log_prob(z, labels(name, 41))
    assert actual.shape == (41,)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", BASES)
def test_log_prob_sums_over_the_event(name):
    """Independent entries: the sum of one-dimensional log-densities; a mixture: the sum inside each component."""
    base = made(name, (2, 3))
    z = torch.rand(4, 2, 3, generator=source(1), dtype=torch.float64)
    cond = torch.tensor([0, 1, 2, 1]) if name == "class" else None
    total = base.log_prob(z, cond)
    if name == "mixture":
        component = truth.Independent(truth.Normal(base.mean, base.log_scale.exp()), 2)
        mixture = truth.MixtureSameFamily(truth.Categorical(logits=base.logits), component)
        torch.testing.assert_close(total, mixture.log_prob(z), rtol=0, atol=1e-12)
        return
    entries = [[0.0] * 6 for _ in range(4)]
    for row in range(4):
        for entry in range(6):
            i, j = divmod(entry, 3)
            single = BASES[name]((1,), **({"num_classes": 3} if name == "class" else {}))
            single.low, single.high = getattr(base, "low", None), getattr(base, "high", None)
            for (key, own), (_, one) in zip(base.named_parameters(), single.named_parameters(), strict=True):
                one.data = own.data[..., i, j].reshape(one.shape).clone()
                assert key
            given = None if cond is None else cond[row : row + 1]
            entries[row][entry] = single.log_prob(z[row, i, j].reshape(1, 1), given).item()
    torch.testing.assert_close(total, torch.tensor(entries, dtype=torch.float64).sum(1), rtol=0, atol=1e-12)


def test_vector_of_the_standard_normal():
    value = StandardNormal((2,)).log_prob(torch.zeros(1, 2, dtype=torch.float64))
    assert float(value) == pytest.approx(-1.8378770664, abs=1e-8)


@pytest.mark.parametrize("name", BASES)
def test_dtype_and_extreme_values(name):
    base = made(name, (3,)).float()
    z = torch.tensor([[50.0, -50.0, 0.0]]).requires_grad_()
    value = base.log_prob(z, labels(name, 1))
    assert value.dtype == torch.float32
    if name != "uniform":
        (gradient,) = torch.autograd.grad(value.sum(), z)
        assert value.isfinite().all() and gradient.isfinite().all()
    assert base.log_prob(torch.zeros(1, 3).bfloat16(), labels(name, 1)).dtype == torch.float32
    assert base.log_prob(torch.zeros(1, 3).double(), labels(name, 1)).dtype == torch.float64


def test_learned_scales_are_bounded():
    base = DiagonalNormal((1,))
    for raw in (-1e6, 1e6):
        base.raw_log_scale.data.fill_(raw)
        assert float(base.log_scale.detach()) == pytest.approx(math.copysign(10, raw))
        assert base.log_prob(torch.ones(1, 1)).isfinite().all()


# ---- samples ----


def moments(name, base, temperature=1.0, n=40_000):
    z = base.sample(n, labels(name, n), temperature=temperature, generator=source(5), dtype=torch.float64).flatten()
    return z.mean(), z.var(), n


def agrees_with_its_density(name, base):
    """Mean, variance and entropy of samples against quadrature of the density, within 4 standard errors."""
    grid = (torch.arange(160_000, dtype=torch.float64) + 0.5) / 2000 - 40  # midpoints
    mass = base.log_prob(grid[:, None], labels(name, len(grid))).exp() / 2000
    assert float(mass.detach().sum()) == pytest.approx(1, abs=1e-9)
    n = 40_000
    z = base.sample(n, labels(name, n), generator=source(5), dtype=torch.float64)
    for statistic in (lambda v: v[:, 0], lambda v: v[:, 0].square(),
                      lambda v: base.log_prob(v, labels(name, len(v))).clamp(min=-100)):
        seen = statistic(z).detach()
        expected = (mass * statistic(grid[:, None])).sum()
        assert abs(float(seen.mean() - expected)) < 4 * float(seen.std()) / math.sqrt(n) + 1e-9


@pytest.mark.parametrize("name", BASES)
def test_samples_follow_the_density(name):
    agrees_with_its_density(name, made(name))


class VarianceForScale(DiagonalNormal):
    """Noise multiplied by the variance."""

    def _sample(self, shape, cond, temperature, generator, dtype, device):
        eps = super()._sample(shape, cond, temperature, generator, dtype, device) - self.mean
        return self.mean + self.log_scale.exp() * eps


def test_mutant_variance_for_scale():
    bad = VarianceForScale((1,)).double()
    bad.raw_log_scale.data.fill_(0.3)
    with pytest.raises(AssertionError):
        agrees_with_its_density("diagonal", bad)


def scales_with_temperature(name, base, temperature):
    mean, variance, n = moments(name, base)
    cold_mean, cold_variance, _ = moments(name, base, temperature)
    # Kurtosis of the logistic is 4.2, the largest of these: var of a sample variance is (kurtosis - 1) var^2 / n.
    assert abs(float(cold_variance / variance - temperature**2)) < 4 * temperature**2 * math.sqrt(2 * 3.2 / n)
    assert abs(float(cold_mean - mean)) < 4 * float(variance.sqrt()) * (1 + temperature) / math.sqrt(n)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.3])
@pytest.mark.parametrize("name", ["normal", "diagonal", "class", "logistic"])
def test_covariance_scales_by_temperature_squared(name, temperature):
    scales_with_temperature(name, made(name), temperature)


class TemperatureOfVariance(DiagonalNormal):
    """Temperature taken as a factor of the variance."""

    def _sample(self, shape, cond, temperature, generator, dtype, device):
        return super()._sample(shape, cond, math.sqrt(temperature), generator, dtype, device)


class TemperatureOfMean(DiagonalNormal):
    """Temperature multiplies the mean too."""

    def _sample(self, shape, cond, temperature, generator, dtype, device):
        return temperature * super()._sample(shape, cond, 1.0, generator, dtype, device)


@pytest.mark.parametrize("bug", [TemperatureOfVariance, TemperatureOfMean])
def test_mutant_temperatures(bug):
    base = bug((1,)).double()
    base.mean.data.fill_(2.0)
    with pytest.raises(AssertionError):
        scales_with_temperature("diagonal", base, 0.7)


@pytest.mark.parametrize("name", ["normal", "diagonal", "class", "logistic", "mixture"])
@pytest.mark.parametrize("seed", range(4))
def test_temperature_zero_is_the_mode(name, seed):
    base = made(name, (2,), seed)
    mode = base.sample(2, labels(name, 2), temperature=0.0, generator=source(), dtype=torch.float64)
    axis = torch.linspace(-4, 4, 161, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    best = base.log_prob(grid, labels(name, len(grid))).max()
    top = base.log_prob(mode, labels(name, 2))
    assert torch.equal(mode[0], mode[1]) and bool((top >= best - 1e-12).all())


def test_mode_of_overlapping_components_is_no_mean_of_theirs():
    base = Mixture((1,), components=2).double()
    base.mean.data.copy_(torch.tensor([[-0.8], [0.8]]))
    assert float(base.sample(1, temperature=0, generator=source()).abs()) < 1e-5


@pytest.mark.parametrize("name", BASES)
def test_wrong_temperatures(name):
    base = made(name)
    for temperature in (-0.1, math.nan, math.inf, 1e30):
        with pytest.raises(ValueError, match="temperature must be a finite number"):
            base.sample(2, labels(name, 2), temperature=temperature, generator=source())


@pytest.mark.parametrize("temperature", [0, 0.5, 2])
def test_uniform_has_no_temperature(temperature):
    with pytest.raises(ValueError, match="Uniform has no temperature"):
        Uniform((2,)).sample(1, temperature=temperature, generator=source())


@pytest.mark.parametrize("name", BASES)
def test_a_sample_depends_on_its_index_alone(name):
    base, index = made(name, (2, 5)), torch.tensor([7, 0, 3])
    whole = base.sample(3, labels(name, 3), generator=KeyedGenerator(1, index, "s"), dtype=torch.float64)
    alone = base.sample(1, labels(name, 1), generator=KeyedGenerator(1, index[2:], "s"), dtype=torch.float64)
    assert torch.equal(whole[2:], alone) and not torch.equal(whole[0], whole[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("end", [0.0, 1.0])
def test_logistic_noise_is_finite_at_the_ends_of_the_unit_interval(monkeypatch, end, dtype):
    monkeypatch.setattr(bases, "uniform", lambda shape, generator, **options: torch.full(shape, end, dtype=dtype))
    assert Logistic((1,)).sample(1, generator=source(), dtype=dtype).isfinite().all()


# ---- masks, conditions, shapes ----


@pytest.mark.parametrize("name", BASES)
def test_masked_content_changes_nothing(name):
    base = made(name, (2, None))
    z = torch.rand(3, 2, 6, generator=source(2), dtype=torch.float64)
    mask = torch.arange(6)[None, None] < torch.tensor([6, 4, 1])[:, None, None]
    cond = torch.tensor([0, 2, 1]) if name == "class" else None
    expected = [base.log_prob(z[i : i + 1, :, :n], None if cond is None else cond[i : i + 1])
                for i, n in enumerate([6, 4, 1])]  # fmt: skip
    for content in (0.0, 1e30, math.nan, math.inf):
        filled = z.masked_fill(~mask, content).requires_grad_()
        value = base.log_prob(filled, cond, mask)
        torch.testing.assert_close(value, torch.cat(expected), rtol=0, atol=1e-12)
        if name != "uniform":
            (gradient,) = torch.autograd.grad(value.sum(), filled)
            assert gradient.isfinite().all() and not gradient.masked_fill(mask, 0).any()


@pytest.mark.parametrize("name", BASES)
def test_errors(name):
    base = made(name, (2, None))
    with pytest.raises(ValueError, match="has events of shape"):
        base.log_prob(torch.zeros(1, 3, 4), labels(name, 1))
    with pytest.raises(ValueError, match="has events of shape"):
        base.log_prob(torch.zeros(1, 2), labels(name, 1))
    with pytest.raises(ValueError, match="mask must be boolean"):
        base.log_prob(torch.zeros(1, 2, 4), labels(name, 1), torch.ones(1, 1, 4))
    with pytest.raises(ValueError, match="which length"):
        base.sample(1, labels(name, 1), generator=source())
    drawn = base.sample(3, labels(name, 3), generator=source(), event_shape=(2, 5))
    assert drawn.shape == (3, 2, 5) and drawn.dtype == torch.float32


def test_labels():
    base = made("class", (2,))
    with pytest.raises(ValueError, match="needs cond"):
        base.log_prob(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="needs cond"):
        base.sample(1, generator=source())
    with pytest.raises(ValueError, match="integer labels"):
        base.log_prob(torch.zeros(1, 2), torch.zeros(1, 3))
    for dtype in (torch.uint8, torch.int16, torch.bool):  # by which torch does not index
        with pytest.raises(ValueError, match="integer labels"):
            base.log_prob(torch.zeros(1, 2), torch.ones(1, dtype=dtype))
    for label in (-1, 3):
        with pytest.raises(ValueError, match=f"label {label} in row 1, the classes are 0..2"):
            base.log_prob(torch.zeros(2, 2), torch.tensor([0, label]))
    for rows in (1, 3):
        with pytest.raises(ValueError, match="a label for each of 2 events"):
            base.log_prob(torch.zeros(2, 2), torch.zeros(rows).long())
        with pytest.raises(ValueError, match="a label for each of 2 events"):
            base.sample(2, torch.zeros(rows).long(), generator=source())
    with pytest.raises(ValueError, match="num_classes must be at least 1"):
        ClassNormal((2,), num_classes=0)


@pytest.mark.parametrize("name", BASES)
def test_save_and_load(name):
    base, fresh = made(name, (2,)), made(name, (2,), seed=8)
    fresh.load_state_dict(base.state_dict())
    z = torch.rand(3, 2, dtype=torch.float64)
    assert torch.equal(base.log_prob(z, labels(name, 3)), fresh.log_prob(z, labels(name, 3)))


def test_learned_bases_start_as_the_standard_normal():
    z = torch.randn(4, 3, generator=source())
    expected = StandardNormal((3,)).log_prob(z)
    torch.testing.assert_close(DiagonalNormal((3,)).log_prob(z), expected)
    torch.testing.assert_close(ClassNormal((3,), num_classes=2).log_prob(z, torch.tensor([0, 1, 1, 0])), expected)
