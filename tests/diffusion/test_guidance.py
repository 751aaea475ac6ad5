"""Classifier-free guidance: its two exact ends, one line for every parameterisation, and where it leads."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from genmodels.core.errors import NotFinite
from genmodels.diffusion import (
    EDM,
    THRESHOLDS,
    X0,
    CosineSchedule,
    DDPMSampler,
    Denoiser,
    DPMSolverPP2MSampler,
    Eps,
    Gaussian,
    GaussianDenoiser,
    GuidedDenoiser,
    LinearLogSnrSchedule,
    LinearSchedule,
    ThresholdedDenoiser,
    V,
    continuous_elbo,
    elbo,
    path_terms,
    require_unaltered,
    rescale_zero_terminal,
    sample,
    uniform_log_snr,
    uniform_t,
)
from genmodels.diffusion.denoiser import OnPath
from genmodels.diffusion.ode import OdeDensity
from genmodels.diffusion.path import alpha_sigma, expand
from tests.diffusion.table import INSTANCES, keyed, seeded

PARAMETERISATIONS = {"eps": Eps(), "x0": X0(), "v": V(), "edm": EDM()}
MEANS = torch.tensor([[-1.0, 0.5], [0.4, 1.0], [0.0, 0.0]], dtype=torch.float64)  # the last is the null class
NULL = 2


class Classes(torch.nn.Module):
    """The optimal network for classes N(m_k, c^2), which answers for a batch of them; it counts its calls."""

    def __init__(self, parameterisation, schedule, variance=0.25):
        super().__init__()
        self.denoiser = GaussianDenoiser(schedule, torch.zeros(2), variance, parameterisation=parameterisation)
        self.calls = []

    def forward(self, x, log_snr, cond):
        self.calls.append(cond.clone())
        alpha, _ = (expand(value, x) for value in alpha_sigma(log_snr))
        shift = MEANS[cond].to(x)
        x0, score = self.denoiser._moments(x.double() - (alpha * shift).double(), log_snr)
        eps = -expand(alpha_sigma(log_snr)[1], x).double() * score
        return self.denoiser.parameterisation.target(x0 + shift, eps, log_snr)


def classes(name, schedule=None, **options):
    schedule = schedule or CosineSchedule()
    parameterisation = PARAMETERISATIONS[name]
    return Denoiser(Classes(parameterisation, schedule, **options), schedule, parameterisation)


X = torch.randn(6, 2, generator=seeded(), dtype=torch.float64)
T = torch.tensor([0.001, 0.2, 0.5, 0.7, 0.9, 1.0], dtype=torch.float64)
COND = torch.tensor([0, 1, 0, 1, 0, 1])


def combined(guided, plain, w, with_cond=COND):
    """eps = eps_null + w (eps_cond - eps_null), and the same line for x_0."""
    found = guided(X, T, COND)
    a, b = plain(X, T, with_cond), plain(X, T, torch.full_like(COND, NULL))
    for field in ("eps", "x0", "v"):
        null = getattr(b, field)
        truth = null + w * (getattr(a, field) - null)
        torch.testing.assert_close(getattr(found, field), truth, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", PARAMETERISATIONS)
@pytest.mark.parametrize("w", [-1.0, 0.5, 3.0])
def test_one_line_for_every_parameterisation(name, w):
    combined(GuidedDenoiser(classes(name), w, NULL), classes(name), w)


class Conventional(GuidedDenoiser):
    """The paper's w, which is ours less 1."""

    def __init__(self, denoiser, scale, null):
        super().__init__(denoiser, 1 + scale, null)


class Swapped(GuidedDenoiser):
    """The null condition in front."""

    def forward(self, x, t, cond, mask, **estimate):
        self.scale = 1 - self.scale
        return super().forward(x, t, cond, mask, **estimate)


@pytest.mark.parametrize("bug", [Conventional, Swapped])
def test_the_line_catches(bug):
    with pytest.raises(AssertionError):
        combined(bug(classes("v"), 3.0, NULL), classes("v"), 3.0)


@pytest.mark.parametrize("name", PARAMETERISATIONS)
def test_the_ends_are_exact_and_cost_one_call_of_the_batch(name):
    for w, cond in ((1, COND), (0, torch.full_like(COND, NULL))):
        plain = classes(name)
        found = GuidedDenoiser(plain, w, NULL)(X, T, COND)
        assert len(plain.net.calls) == 1 and torch.equal(plain.net.calls[0], cond)
        truth = classes(name)(X, T, cond)
        assert torch.equal(found.output, truth.output) and torch.equal(found.x0, truth.x0)
    plain = classes(name)
    GuidedDenoiser(plain, 2.0, NULL)(X, T, COND)
    assert len(plain.net.calls) == 1 and len(plain.net.calls[0]) == 12


@pytest.mark.parametrize("sampler", [DDPMSampler(), DPMSolverPP2MSampler()], ids=["ddpm", "dpmpp_2m"])
def test_guidance_moves_the_mean_of_a_normal_class_by_its_scale(sampler):
    """Classes of equal variance: the guided score is that of N(m_null + w (m_k - m_null), c^2)."""
    n, w = 2000, 2.5
    denoiser = GuidedDenoiser(classes("v"), w, NULL)
    times = uniform_log_snr(denoiser.schedule, 120)
    first = torch.zeros(n, dtype=torch.int64)
    x = sample(denoiser, (n, 2), times, sampler, keyed(n), cond=first, dtype=torch.float64).x
    error = x.mean(0) - (MEANS[NULL] + w * (MEANS[0] - MEANS[NULL]))
    assert (error.abs() < 4 * 0.5 / math.sqrt(n) + 5e-3).all()
    assert ((x.std(0) - 0.5).abs() < 0.05).all()


def test_where_no_signal_is_left_guidance_still_finds_x0():
    schedule = rescale_zero_terminal(LinearSchedule())
    found = GuidedDenoiser(classes("v", schedule), 3.0, NULL)(X, torch.ones(6), COND)
    torch.testing.assert_close(found.x0, MEANS[NULL] + 3 * (MEANS[COND] - MEANS[NULL]), rtol=0, atol=1e-9)


def test_the_interval_is_of_log_snr_and_costs_nothing_outside():
    plain = classes("v")
    guided = GuidedDenoiser(plain, 3.0, NULL, interval=(-1.0, 2.0))
    log_snr = plain.schedule.log_snr(T)
    inside = (log_snr >= -1) & (log_snr <= 2)
    assert inside.any() and not inside.all()
    found = guided(X, T, COND).x0
    truth = torch.where(inside[:, None], GuidedDenoiser(plain, 3.0, NULL)(X, T, COND).x0, plain(X, T, COND).x0)
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-9)
    plain.net.calls.clear()
    guided(X, torch.full((6,), 0.99), COND)
    assert [len(c) for c in plain.net.calls] == [6]


def test_rescale_restores_the_standard_deviation():
    plain = classes("v")
    found = GuidedDenoiser(plain, 6.0, NULL, rescale=1.0)(X, T, COND).x0
    torch.testing.assert_close(found.std(1), plain(X, T, COND).x0.std(1))
    half, none = (GuidedDenoiser(plain, 6.0, NULL, rescale=r)(X, T, COND).x0 for r in (0.5, 0.0))
    torch.testing.assert_close(half, (found + none) / 2)


class Unclamped(OnPath):
    """Guidance is not told at which level the network was asked."""

    noisiest = -math.inf

    def at_log_snr(self, x, log_snr, *given):
        return self.denoiser.at_log_snr(x, log_snr.clamp(min=self.denoiser.schedule.end_points[1]), *given)


@pytest.mark.parametrize("name", PARAMETERISATIONS)
def test_guidance_between_equals_changes_nothing_on_a_noisier_path(name):
    """Classes that do not differ, on a path that ends in more noise than the network knows."""
    learned = LinearLogSnrSchedule(log_snr_max=10.0, log_snr_min=-4.2)
    exact = GaussianDenoiser(learned, torch.full((2,), 0.5), 0.25, parameterisation=PARAMETERISATIONS[name])
    plain = OnPath(exact, CosineSchedule())
    for field in ("x0", "eps"):
        found, right = (getattr(one(X, T, COND), field) for one in (GuidedDenoiser(plain, 3.0, NULL), plain))
        torch.testing.assert_close(found, right)
    if name == "eps":
        wrong = GuidedDenoiser(Unclamped(exact, CosineSchedule()), 3.0, NULL)(X, T, COND).x0
        assert (wrong - plain(X, T, COND).x0).abs().max() > 1


def test_rescale_leaves_events_of_one_scalar():
    plain = GaussianDenoiser(CosineSchedule(), torch.zeros(1), 0.25)
    found = GuidedDenoiser(plain, 3.0, NULL, rescale=0.7)(X[:, :1], T, COND).x0
    torch.testing.assert_close(found, GuidedDenoiser(plain, 3.0, NULL)(X[:, :1], T, COND).x0)


def test_masks_estimates_and_learned_variances_go_through():
    shapes = []

    def net(x, log_snr, cond, mask):
        shapes.append((x.shape, mask.shape))
        return torch.cat([x[:, :1] * cond[:, None, None], cond[:, None, None].expand(len(x), 1, 5).to(x)], 1)

    denoiser = Denoiser(net, CosineSchedule(), V(), learned_variance=True, self_conditioning=True)
    x, mask = torch.randn(2, 1, 5), torch.ones(2, 1, 5, dtype=torch.bool)
    cond = torch.tensor([3, 4])
    out = GuidedDenoiser(denoiser, 2.0, 7)(x, torch.tensor([0.3, 0.6]), cond, mask, estimate=torch.ones(2, 1, 5))
    assert shapes == [((4, 2, 5), (4, 1, 5))]
    assert torch.equal(out.nu[:, 0, 0], (cond + 1) / 2)  # the variance is the conditional one
    assert ThresholdedDenoiser(denoiser)(x, torch.tensor([0.3, 0.6]), cond, mask).nu is not None


def test_an_altered_denoiser_has_no_likelihood():
    x0, times = torch.zeros(2, 2), torch.linspace(0.1, 1, 5)
    plain = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
    for altered in (GuidedDenoiser(plain, 3.0, NULL), ThresholdedDenoiser(plain)):
        with pytest.raises(ValueError, match="has no likelihood"):
            elbo(altered, x0, Gaussian(), times, keyed(2))
        with pytest.raises(ValueError, match="has no likelihood"):
            path_terms(altered, torch.zeros(6, 2, 2), times)
        with pytest.raises(ValueError, match="has no likelihood"):
            continuous_elbo(altered, x0, Gaussian(), 0.01, keyed(2))
        with pytest.raises(ValueError, match="has no likelihood"):
            OdeDensity()(altered, x0, 5.0)
    require_unaltered(plain)


def test_bad_options():
    plain = classes("v")
    with pytest.raises(ValueError, match="scale = nan"):
        GuidedDenoiser(plain, math.nan, NULL)
    with pytest.raises(ValueError, match="rescale = 2"):
        GuidedDenoiser(plain, 3.0, NULL, rescale=2)
    with pytest.raises(ValueError, match="not a thresholded one: guide first"):
        GuidedDenoiser(ThresholdedDenoiser(plain), 3.0, NULL)
    with pytest.raises(ValueError, match="interval"):
        GuidedDenoiser(plain, 3.0, NULL, interval=(2.0, 1.0))
    with pytest.raises(ValueError, match="needs a condition"):
        GuidedDenoiser(plain, 3.0, NULL)(X, T)


FAR = GaussianDenoiser(CosineSchedule(), torch.full((2,), 3.0), 0.01)
NEAR = GaussianDenoiser(CosineSchedule(), torch.zeros(3), 1e-4)


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("name", INSTANCES)
def test_estimates_stay_in_range(name, threshold):
    times, estimates = uniform_t(FAR.schedule, 8), []
    thresholded = ThresholdedDenoiser(FAR, threshold)
    out = sample(thresholded, (3, 2), times, INSTANCES[name], keyed(3), callback=lambda *a: estimates.append(a[2]))
    assert torch.stack(estimates).abs().max() <= 1 and out.x.abs().max() <= 1
    assert sample(FAR, (3, 2), times, INSTANCES[name], keyed(3)).x.mean() > 2


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("name", INSTANCES)
def test_a_threshold_that_does_not_bind_changes_nothing(name, threshold):
    times = uniform_t(NEAR.schedule, 8)
    a, b = (sample(denoiser, (3, 3), times, INSTANCES[name], keyed(3), dtype=torch.float64).x
            for denoiser in (ThresholdedDenoiser(NEAR, threshold), NEAR))  # fmt: skip
    assert (a - b).abs().max() < 1e-11


def test_dynamic_keeps_what_the_percentile_says():
    x0 = torch.randn(4, 1, 20, 20, generator=seeded()) * torch.tensor([0.2, 1.0, 3.0, 9.0])[:, None, None, None]
    out = THRESHOLDS["dynamic"](x0)
    assert THRESHOLDS["dynamic"](x0[:0]).shape == (0, 1, 20, 20)
    assert torch.equal(out[0], x0[0])  # within range already
    saturated = (out.abs() >= 1).flatten(1).float().mean(1)
    assert ((saturated[1:] > 0.002) & (saturated[1:] < 0.008)).all()
    inner = x0[3].abs() < 9  # the rest is the same picture with less contrast
    ratio = out[3][inner] / x0[3][inner]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


def test_statistics_are_those_of_the_valid_frames():
    """A padded sequence is changed as the sequence alone, whatever the network says of the padding."""
    def net(x, log_snr, cond, mask=None):
        return x + (3 + cond[:, None, None].to(x)) * x.square()

    x, t, cond = torch.randn(2, 3, 7, generator=seeded()).double(), torch.full((2,), 0.5).double(), torch.tensor([0, 1])
    mask = torch.arange(7) < torch.tensor([7, 4])[:, None, None]
    x[1, :, 4:] = 50.0
    plain = Denoiser(net, CosineSchedule(), X0())
    lower = partial(THRESHOLDS["dynamic"], percentile=0.9)
    for changed in (ThresholdedDenoiser(plain, "dynamic"), ThresholdedDenoiser(plain, lower),
                    GuidedDenoiser(plain, 3.0, 2, rescale=0.7)):
        found, alone = changed(x, t, cond, mask).x0, changed(x[1:, :, :4], t[1:], cond[1:]).x0
        torch.testing.assert_close(found[1:, :, :4], alone)
        torch.testing.assert_close(found[:1], changed(x[:1], t[:1], cond[:1]).x0)
        mask[1] = False
        assert changed(x, t, cond, mask).x0.isfinite().all()
        mask[1, :, :4] = True
    assert not THRESHOLDS["dynamic"](torch.full((2, 3, 7), math.inf), mask).isfinite().any()  # nothing is hidden


def consistent(prediction, x, alpha, sigma):
    torch.testing.assert_close(alpha * prediction.x0 + sigma * prediction.eps, x)
    torch.testing.assert_close(prediction.score, -prediction.eps / sigma)
    torch.testing.assert_close(prediction.v, alpha * prediction.eps - sigma * prediction.x0)


def test_the_other_fields_follow_the_estimate():
    x, t = torch.randn(5, 2, generator=seeded(), dtype=torch.float64), torch.full((5,), 0.4, dtype=torch.float64)
    alpha, sigma = FAR.schedule.alpha_sigma(t[0])
    prediction = ThresholdedDenoiser(FAR, "static")(x, t)
    consistent(prediction, x, alpha, sigma)
    prediction.eps = FAR(x, t).eps  # as if x_0 alone had been clipped
    with pytest.raises(AssertionError):
        consistent(prediction, x, alpha, sigma)


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_estimate_that_is_not_finite_is_not_clipped_into_a_sample(value, threshold):
    def net(x, log_snr, cond):
        return torch.stack([torch.zeros(2), torch.tensor([0.5, value])])

    denoiser = ThresholdedDenoiser(Denoiser(net, CosineSchedule(), X0()), threshold)
    with pytest.raises(NotFinite, match="row 1 is not finite"):
        denoiser(torch.zeros(2, 2), torch.tensor([0.5, 0.5]))


def test_a_threshold_that_would_broadcast_is_refused():
    denoiser = ThresholdedDenoiser(FAR, lambda x0, mask: x0.mean(1, keepdim=True))
    with pytest.raises(ValueError, match=r"keeps the shape of x_0, \(1, 2\), got \(1, 1\)"):
        denoiser(torch.zeros(1, 2), torch.tensor([0.5]))


def test_an_unknown_threshold():
    with pytest.raises(ValueError, match="static, dynamic"):
        ThresholdedDenoiser(FAR, "soft")
