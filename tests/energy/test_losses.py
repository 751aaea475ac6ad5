"""Score-matching losses: sign, exact values, means, variances, minimisers, order; each check with a mutant."""

from __future__ import annotations

import math

import pytest
import torch

import genmodels.energy.losses as losses_module
from genmodels.core.random import KeyedGenerator
from genmodels.energy import (
    LOSSES,
    PROJECTIONS,
    DenoisingScoreMatching,
    Energy,
    ExactScoreMatching,
    FiniteDifferenceScoreMatching,
    GaussianMixture,
    LogDensity,
    Quadratic,
    Rademacher,
    ScoreNetwork,
    SlicedScoreMatching,
    SlicedScoreMatchingVR,
    log_density_of,
)
from genmodels.nn.energy_nets import EnergyMLP

A = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
X = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
SLICED = [SlicedScoreMatching, SlicedScoreMatchingVR]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Given:
    """A projection that draws the directions it was given."""

    def __init__(self, v):
        self.v = v

    def draw(self, shape, generator, *, dtype, device):
        return self.v.to(dtype).expand(shape)


def with_projection(loss, projection):
    loss.projection = projection
    return loss


def symmetric(dims: int, seed: int = 3) -> torch.Tensor:
    a = torch.randn(dims, dims, generator=seeded(seed), dtype=torch.float64)
    return a + a.T


# ---- the sign ----

SIGNED = {
    "exact": (ExactScoreMatching(), -2.0),
    "sliced": (SlicedScoreMatching(), -2.0),
    "sliced, gaussian": (SlicedScoreMatching(projection="gaussian"), -2.0),
    "sliced, double backward": (SlicedScoreMatching(route="double_backward"), -2.0),
    "sliced_vr": (SlicedScoreMatchingVR(), -2.0),
    "finite_difference": (FiniteDifferenceScoreMatching(), -2.0),
    "denoising": (DenoisingScoreMatching(sigma=0.5), -2.0 * 0.25),
}


def has_the_right_sign(loss, slope):
    """dJ/dk at k = 0 for E = k |x|^2/2 and data N(0, I); then descent must make k positive."""
    x = torch.randn(20_000, 2, generator=seeded(1), dtype=torch.float64)
    energy = Quadratic(torch.zeros(2, 2, dtype=torch.float64))
    values = loss(energy, x, seeded())
    (gradient,) = torch.autograd.grad(values.mean(), energy.matrix)
    k = 0.05  # the slope of each example, for its standard error
    a, b = (loss(Quadratic(s * k * torch.eye(2, dtype=torch.float64)), x, seeded()).detach() for s in (1, -1))
    error = ((a - b) / (2 * k)).std() / math.sqrt(len(x))
    assert abs(float(gradient.trace()) - slope) <= 4 * float(error) + 1e-9
    energy.matrix.data -= 0.1 * gradient
    assert float(energy.matrix.detach().trace()) > 0


@pytest.mark.parametrize("name", SIGNED)
def test_sign(name):
    has_the_right_sign(*SIGNED[name])


@pytest.mark.parametrize("name", SIGNED)
def test_sign_catches_an_inverted_score(name, monkeypatch):
    monkeypatch.setattr("genmodels.energy.function.log_density_of", lambda energy: energy)
    monkeypatch.setattr("genmodels.energy.ground_truth.log_density_of", lambda energy: energy)
    with pytest.raises(AssertionError):
        has_the_right_sign(*SIGNED[name])


@pytest.mark.parametrize("name", ["sliced", "sliced_vr"])
def test_sign_catches_an_added_trace(name, monkeypatch):
    right = losses_module.directional

    def wrong(*args, **options):
        found = right(*args, **options)
        return found._replace(curvature=-found.curvature)

    monkeypatch.setattr(losses_module, "directional", wrong)
    with pytest.raises(AssertionError):
        has_the_right_sign(*SIGNED[name])


def test_sign_catches_a_target_of_the_other_sign(monkeypatch):
    monkeypatch.setattr("genmodels.energy.denoising.denoising",
                        lambda score, noise, sigma: losses_module.half_square(sigma * score - noise))  # fmt: skip
    with pytest.raises(AssertionError):
        has_the_right_sign(*SIGNED["denoising"])


# ---- exact values ----


def matches_the_quadratic(loss, dims=5):
    matrix, x = symmetric(dims), torch.randn(7, dims, generator=seeded(2), dtype=torch.float64)
    expected = 0.5 * (x @ matrix).square().sum(1) - matrix.trace()
    for shape in ((dims,), (1, dims), (dims, 1, 1)):
        torch.testing.assert_close(loss(Quadratic(matrix), x.view(7, *shape)), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 2, 16])
def test_exact_on_quadratic_energies(chunk):
    matches_the_quadratic(ExactScoreMatching(chunk=chunk))


def test_exactness_catches_a_trace_over_the_last_axis():
    def wrong(model, x):
        s = model.score(x)
        hessian = torch.autograd.functional.jacobian(lambda y: model.score(y).sum(0), x)  # (*event, B, *event)
        shape = x.shape[1:]
        last = sum(hessian[..., :, :][(0,) * (len(shape) - 1) + (i,)][(slice(None),) + (0,) * (len(shape) - 1) + (i,)]
                   for i in range(shape[-1]))  # fmt: skip
        return last + 0.5 * s.square().flatten(1).sum(1)

    with pytest.raises(AssertionError):
        matches_the_quadratic(wrong)


def test_vector():
    energy = Quadratic(A)
    assert energy.score(X).tolist() == [[-1.0, 1.5]]
    assert ExactScoreMatching()(energy, X).tolist() == [-1.375]
    for kind, expected in ((SlicedScoreMatching, (-3.875, 1.125)), (SlicedScoreMatchingVR, (-2.375, -0.375))):
        for v, value in zip(((1.0, 1.0), (1.0, -1.0)), expected, strict=True):
            loss = with_projection(kind(), Given(torch.tensor(v)))
            assert loss(energy, X, seeded()).tolist() == [value]


def test_more_projections_are_the_mean():
    energy, x = Quadratic(symmetric(4)), torch.randn(3, 4, generator=seeded(), dtype=torch.float64)
    for kind in (*SLICED, FiniteDifferenceScoreMatching):
        for chunk in (1, 2, 3):
            many = kind(projections=3, projection="gaussian", projection_chunk=chunk)(energy, x, seeded(5))
            generator = seeded(5)
            each = [kind(projection="gaussian")(energy, x, generator) for _ in range(3)]
            torch.testing.assert_close(many, torch.stack(each).mean(0), rtol=1e-9, atol=1e-9)


# ---- means and variances over directions ----


def one_point(matrix, score):
    """A score with Jacobian -matrix and that value, at the point used below."""
    return ScoreNetwork(lambda x: score - (x - x.detach()) @ matrix.T)


def estimates(kind, projection, matrix, score, draws):
    with torch.no_grad():
        x = torch.zeros(1, len(score), dtype=torch.float64).expand(draws, -1)
        return with_projection(kind(), projection)(one_point(matrix, score), x, seeded(7))


def unbiased(kind, projection, draws=100_000):
    matrix, score = symmetric(3), torch.tensor([0.7, -1.1, 0.4], dtype=torch.float64)
    found = estimates(kind, projection, matrix, score, draws)
    expected = -matrix.trace() + 0.5 * score.square().sum()
    assert abs(found.mean() - expected) < 4 * found.std() / math.sqrt(draws) + 1e-9


@pytest.mark.parametrize("kind", SLICED)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_unbiased(kind, projection):
    unbiased(kind, PROJECTIONS[projection]())


class UnitSphere(PROJECTIONS["sphere"]):
    def draw(self, shape, generator, *, dtype=torch.float32, device=None):
        return super().draw(shape, generator, dtype=dtype, device=device) / math.sqrt(math.prod(shape[1:]))


def test_unbiasedness_catches_unit_length():
    for kind in SLICED:
        with pytest.raises(AssertionError):
            unbiased(kind, UnitSphere())


def test_unbiasedness_catches_a_missing_half(monkeypatch):
    class Whole(SlicedScoreMatching):
        _value = staticmethod(lambda found: (found.curvature + found.slope.square()).mean(0))

    with pytest.raises(AssertionError):
        unbiased(Whole, PROJECTIONS["gaussian"]())


# Of v^T A v for a symmetric A of D rows.
VARIANCES = {
    "rademacher": lambda a: 2 * (a.square().sum() - a.diagonal().square().sum()),
    "gaussian": lambda a: 2 * a.square().sum(),
    "sphere": lambda a: 2 * len(a) / (len(a) + 2) * (a.square().sum() - a.trace().square() / len(a)),
}


def has_variance(kind, projection, of, dims=6, draws=400_000):
    matrix = symmetric(dims)
    score = torch.randn(dims, generator=seeded(9), dtype=torch.float64)
    found = estimates(kind, projection, matrix, score, draws)
    form = -matrix + (0.5 * torch.outer(score, score) if kind is SlicedScoreMatching else 0)
    expected = VARIANCES[of](form)
    assert abs(float(found.var() / expected) - 1) < 0.02


@pytest.mark.parametrize("kind", SLICED)
@pytest.mark.parametrize("name", PROJECTIONS)
def test_variance(kind, name):
    has_variance(kind, PROJECTIONS[name](), name)


def test_variance_catches_another_projection():
    with pytest.raises(AssertionError):
        has_variance(SlicedScoreMatchingVR, PROJECTIONS["gaussian"](), "rademacher")


def test_rademacher_is_exact_on_diagonals():
    matrix = torch.diag(torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64))
    energy, x = Quadratic(matrix), torch.randn(9, 3, generator=seeded(), dtype=torch.float64)
    exact = ExactScoreMatching()(energy, x)
    torch.testing.assert_close(SlicedScoreMatchingVR()(energy, x, seeded()), exact, rtol=0, atol=1e-12)
    # Mutant: Gaussian directions used silently.
    assert (SlicedScoreMatchingVR(projection="gaussian")(energy, x, seeded()) - exact).abs().max() > 0.1


# ---- the minimiser ----

C = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=torch.float64)


def moment_matched(n=4096):
    """Data whose mean is zero and covariance is C to the last digit."""
    z = torch.randn(n, 2, generator=seeded(4), dtype=torch.float64)
    z = z - z.mean(0)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(z.T @ z / n), z.T, upper=False).T
    return white @ torch.linalg.cholesky(C).T


def newton(value, dims=2):
    """The minimiser of a quadratic function of a symmetric matrix, and its value."""
    basis = torch.tensor([[[1.0, 0], [0, 0]], [[0, 0], [0, 1.0]], [[0, 1.0], [1.0, 0]]], dtype=torch.float64)

    def of(coefficients):
        return value((coefficients[:, None, None] * basis).sum(0))

    start = torch.zeros(3, dtype=torch.float64)
    gradient = torch.autograd.functional.jacobian(of, start)
    hessian = torch.autograd.functional.hessian(of, start)
    best = -torch.linalg.solve(hessian, gradient)
    return (best[:, None, None] * basis).sum(0), float(of(best).detach())


def linear_score(matrix):
    return ScoreNetwork(lambda x: -x @ matrix)


def finds_the_precision(loss):
    x = moment_matched()
    matrix, value = newton(lambda a: loss(linear_score(a), x, seeded()).mean())
    expected = torch.tensor([[0.609756, -0.365854], [-0.365854, 1.219512]], dtype=torch.float64)
    torch.testing.assert_close(matrix, torch.linalg.inv(C), rtol=0, atol=1e-8)
    torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-6)
    assert value == pytest.approx(-0.914634146, abs=1e-8)


def test_minimiser_of_the_exact_loss():
    finds_the_precision(ExactScoreMatching())


def test_minimiser_with_all_directions_of_the_plane():
    # Over (1, 1) and (1, -1) the mean of v v^T is the identity, but (v . s)^2 also needs nothing more.
    class Both:
        def __call__(self, model, x, generator):
            projections = [Given(torch.tensor(v)) for v in ((1.0, 1.0), (1.0, -1.0))]
            return sum(with_projection(SlicedScoreMatching(), v)(model, x, generator) for v in projections) / 2

    finds_the_precision(Both())


def test_minimiser_catches_a_missing_half():
    class Whole:
        def __call__(self, model, x, generator):
            return ExactScoreMatching()(model, x) + 0.5 * model.score(x).square().sum(1)

    with pytest.raises(AssertionError):
        finds_the_precision(Whole())


def finds_the_smoothed_precision(sigma_of_loss, sigma=0.5):
    """With noise whose moments are matched too: the data in four copies, moved by +- along each axis."""
    moves = math.sqrt(2) * torch.tensor([[1.0, 0], [-1.0, 0], [0, 1.0], [0, -1.0]], dtype=torch.float64)
    data = moment_matched(512)
    x, noise = data.repeat_interleave(4, 0), moves.repeat(512, 1)

    def value(a):
        from genmodels.energy.denoising import denoising

        return denoising(linear_score(a).score(x + sigma * noise), noise, sigma_of_loss).mean()

    matrix, _ = newton(value)
    torch.testing.assert_close(
        matrix, torch.linalg.inv(C + 0.25 * torch.eye(2, dtype=torch.float64)), rtol=0, atol=1e-8
    )
    expected = torch.tensor([[0.5097, -0.2446], [-0.2446, 0.9174]], dtype=torch.float64)
    torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-4)


def test_minimiser_of_the_denoising_loss():
    finds_the_smoothed_precision(0.5)


def test_denoising_minimiser_catches_sigma_squared():
    with pytest.raises(AssertionError):
        finds_the_smoothed_precision(0.25)


# ---- finite differences ----


def quartic(x):
    return -((x.square() - 1).square().sum(1) + 0.3 * x[:, 0] * x[:, 1])


def order_two(difference):
    x = torch.randn(64, 4, generator=seeded(1), dtype=torch.float64)
    v = torch.randn(64, 4, generator=seeded(2), dtype=torch.float64)
    model = LogDensity(quartic)
    exact = with_projection(SlicedScoreMatching(), Given(v))(model, x, seeded()).detach()
    errors = [(difference(quartic, x, v[None], e) - exact).abs().mean() for e in (0.1, 0.05, 0.025, 0.0125)]
    orders = [math.log2(a / b) for a, b in zip(errors[:-1], errors[1:], strict=True)]
    assert all(abs(order - 2) < 0.05 for order in orders), orders


def test_finite_differences_are_of_second_order():
    order_two(losses_module.finite_difference)


def test_order_catches_a_quarter_for_an_eighth():
    def wrong(log_density, x, v, e):
        right = losses_module.finite_difference(log_density, x, v, e)
        ahead, behind = log_density(x + e * v[0]), log_density(x - e * v[0])
        return right + (ahead - behind).square() / (8 * e**2)

    with pytest.raises(AssertionError):
        order_two(wrong)


def test_small_steps_are_refused_in_float32():
    model, x = LogDensity(quartic), torch.zeros(1, 2)
    with pytest.raises(ValueError, match="too small for float32"):
        FiniteDifferenceScoreMatching(step=0.005)(model, x, seeded())
    FiniteDifferenceScoreMatching(step=0.005)(model, x.double(), seeded())


# ---- invariance ----

NET = Energy(EnergyMLP((6,), hidden=(16, 16))).double()


def reshaped(model, x):
    return LogDensity(lambda y: model.log_density(y.flatten(1))), x.view(len(x), 2, 3)


@pytest.mark.parametrize("kind", [ExactScoreMatching, *SLICED, FiniteDifferenceScoreMatching, DenoisingScoreMatching])
def test_invariance(kind):
    x = torch.randn(8, 6, generator=seeded(1), dtype=torch.float64)
    index = torch.arange(8)

    def keyed(rows):
        return KeyedGenerator(0, index[rows], "loss")

    whole = kind()(NET, x, keyed(slice(None)))
    tight = {"rtol": 0, "atol": 1e-12} if kind is not FiniteDifferenceScoreMatching else {"rtol": 0, "atol": 1e-10}
    parts = [kind()(NET, x[rows], keyed(rows)) for rows in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(torch.cat(parts), whole, **tight)
    torch.testing.assert_close(kind()(*reshaped(NET, x), keyed(slice(None))), whole, **tight)
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            quiet = kind()(NET, x.clone(), keyed(slice(None)))
        assert not quiet.requires_grad
        torch.testing.assert_close(quiet, whole.detach(), **tight)
    assert not x.requires_grad
    single = Energy(EnergyMLP((6,), hidden=(16, 16)))
    single.load_state_dict(NET.state_dict())
    # The same directions: those of float64, rounded where they are not +-1.
    if kind not in (DenoisingScoreMatching, FiniteDifferenceScoreMatching):
        torch.testing.assert_close(kind()(single, x.float(), keyed(slice(None))).double(), whole, rtol=1e-4, atol=1e-4)


def test_exact_loss_of_a_permuted_event():
    x, order = torch.randn(5, 6, generator=seeded(1), dtype=torch.float64), torch.randperm(6, generator=seeded(2))
    moved = LogDensity(lambda y: NET.log_density(y[:, order.argsort()]))
    torch.testing.assert_close(
        ExactScoreMatching()(moved, x[:, order]), ExactScoreMatching()(NET, x), rtol=0, atol=1e-12
    )


def test_invariance_catches_a_batch_that_mixes():
    x = torch.randn(8, 6, generator=seeded(1), dtype=torch.float64)
    mixing = LogDensity(lambda y: NET.log_density(y - y.mean(0)))
    whole = ExactScoreMatching()(mixing, x)
    parts = torch.cat([ExactScoreMatching()(mixing, x[:3]), ExactScoreMatching()(mixing, x[3:])])
    assert (whole - parts).abs().max() > 1e-3


@pytest.mark.parametrize("kind", [ExactScoreMatching, *SLICED, FiniteDifferenceScoreMatching, DenoisingScoreMatching])
def test_energies_stay_float32_under_autocast(kind):
    model = Energy(EnergyMLP((6,), hidden=(16,)))
    x = torch.randn(4, 6, generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        low = kind()(model, x, seeded(1))
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, kind()(model, x, seeded(1)), rtol=1e-6, atol=1e-6)


# ---- score networks ----


def test_a_score_network_of_a_quadratic_energy_has_its_losses():
    matrix = symmetric(4)
    network = torch.nn.Linear(4, 4, bias=False).double()
    network.weight.data = log_density_of(matrix)
    x = torch.randn(6, 4, generator=seeded(), dtype=torch.float64)
    for kind in (ExactScoreMatching, *SLICED, DenoisingScoreMatching):
        a, b = (kind()(model, x, seeded(1)) for model in (ScoreNetwork(network), Quadratic(matrix)))
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="needs an energy"):
        FiniteDifferenceScoreMatching()(ScoreNetwork(network), x, seeded())


def test_descent_finds_a_mixture():
    """All losses of a free model agree that the truth is better than its neighbours."""
    truth = GaussianMixture(torch.tensor([0.3, 0.7]), torch.tensor([[-1.0, 0.0], [1.0, 0.5]]), 0.5).double()
    x = truth.sample(4000, seeded(1))
    for kind in (ExactScoreMatching, *SLICED):

        def value(shift, kind=kind):
            moved = LogDensity(lambda y: truth.log_density(y + shift))
            return float(kind()(moved, x, seeded(2)).mean().detach())

        assert value(0.0) < min(value(0.3), value(-0.3))


# ---- errors ----


def test_errors():
    with pytest.raises(ValueError, match="costs about .* use sliced_vr"):
        ExactScoreMatching()(Quadratic(torch.eye(1100)), torch.zeros(1, 1100))
    with pytest.raises(ValueError, match="projections must be at least 1"):
        SlicedScoreMatching(projections=0)
    with pytest.raises(ValueError, match="must be one of rademacher"):
        SlicedScoreMatching(projection="unit")
    with pytest.raises(ValueError, match="second_derivatives=False"):
        kinked = Energy(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Flatten(0)),
                        second_derivatives=False)  # fmt: skip
        SlicedScoreMatching()(kinked, torch.zeros(1, 2), seeded())
    with pytest.raises(ValueError, match="the jet is for the sliced loss"):
        SlicedScoreMatchingVR(route="jet")(NET, torch.zeros(1, 6, dtype=torch.float64), seeded())
    assert set(LOSSES) == {"exact", "sliced", "sliced_vr", "finite_difference", "denoising"}


@pytest.mark.parametrize("event", [(2,), (1, 3, 3)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_batch_has_an_empty_loss(name, event):
    model = LogDensity(lambda x: -0.5 * x.square().flatten(1).sum(1))
    assert LOSSES[name]()(model, torch.zeros(0, *event), seeded()).shape == (0,)


SHAPES = [(5,), (2, 2, 3), (3, 4)]


def white(projection, shape, draws=100_000):
    v = projection.draw((draws, *shape), torch.Generator().manual_seed(0), dtype=torch.float64).flatten(1)
    dims = v.shape[1]
    products = v[:, :, None] * v[:, None, :]
    error = products.std(0) / math.sqrt(draws) + 1e-12
    assert ((products.mean(0) - torch.eye(dims, dtype=torch.float64)).abs() < 5 * error).all()
    assert (v.mean(0).abs() < 5 / math.sqrt(draws)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PROJECTIONS)
def test_white(name, shape):
    white(PROJECTIONS[name](), shape)


class RowsOfUnitLength:
    """The sphere of every row of the event by itself, with the radius of the whole."""

    def draw(self, shape, generator, *, dtype):
        v = torch.randn(shape, generator=generator, dtype=dtype)
        return v / v.norm(dim=-1, keepdim=True) * math.sqrt(math.prod(shape[1:]))


class CorrelatedRows:
    def draw(self, shape, generator, *, dtype):
        return torch.randn((shape[0], *shape[1:-1], 1), generator=generator, dtype=dtype).expand(shape)


@pytest.mark.parametrize("bug", [RowsOfUnitLength(), CorrelatedRows()])
def test_check_catches(bug):
    with pytest.raises(AssertionError):
        white(bug, (3, 4), draws=20_000)


def test_the_sphere_has_one_radius():
    v = PROJECTIONS["sphere"]().draw((50, 3, 4), torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(v.flatten(1).square().sum(1), torch.full((50,), 12.0, dtype=torch.float64))


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_direction_is_the_same_alone_and_in_a_batch(name):
    projection = PROJECTIONS[name]()
    whole = projection.draw((8, 2, 3), KeyedGenerator(0, torch.arange(8), "v", 3))
    alone = projection.draw((1, 2, 3), KeyedGenerator(0, torch.tensor([5]), "v", 3))
    assert torch.equal(whole[5:6], alone)
    again = KeyedGenerator(0, torch.arange(8), "v", 3)
    assert not torch.equal(projection.draw((8, 2, 3), again), projection.draw((8, 2, 3), again))


def test_rademacher_in_half_precision():
    v = Rademacher().draw((4, 3), torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    assert v.dtype == torch.bfloat16 and (v.abs() == 1).all()
