"""Flow matching: its loss against the definition, and how items are paired with noise."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    TIME_SAMPLERS,
    Coupling,
    Denoiser,
    FlowMatching,
    GaussianDenoiser,
    LinearPath,
    Velocity,
    make_path,
    velocity_of,
)
from genmodels.diffusion.bound import rate_term
from genmodels.diffusion.weighting import LogUniformTimes


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


class Times:
    """The same times at every call."""

    def __init__(self, t):
        self.t = t

    def __call__(self, n, generator, rank=0, world=1):
        return self.t, torch.ones_like(self.t)


@pytest.mark.parametrize("sigma_min", [0.0, 0.1])
def test_the_loss_is_the_squared_error_of_the_velocity(sigma_min):
    """A network that sees the path's own x_t and answers 2 x_t, against |u - 2 x_t|^2 written out."""
    t, x0, path = torch.tensor([0.0, 0.2, 0.7, 1.0], dtype=torch.float64), draw(4, 3), LinearPath(sigma_min=sigma_min)
    denoiser = Denoiser(lambda x, log_snr, cond: 2 * x, path, Velocity(path))
    out = FlowMatching(time_sampler=Times(t))(denoiser, x0, None, seeded(1))
    noise = torch.randn(4, 3, generator=seeded(1), dtype=torch.float64)
    x_t = (1 - t)[:, None] * x0 + (sigma_min + (1 - sigma_min) * t)[:, None] * noise
    u = (1 - sigma_min) * noise - x0
    torch.testing.assert_close(out.per_example, (u - 2 * x_t).square().mean(1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["linear", "cosine", "vp_linear_continuous"])
def test_the_loss_in_the_currency_of_the_bound(name):
    """|u - v|^2 = (D/alpha)^2 |e - e_hat|^2, and -dlambda/dt = 2 D/(alpha sigma): both from the error of the output."""
    path, t = make_path(name, 1000), torch.tensor([0.3, 0.6], dtype=torch.float64)
    x0, noise, output = (draw(2, 3, seed=seed) for seed in range(3))
    denoiser = Denoiser(lambda x, log_snr, cond: output, path, velocity_of(path))
    (a, s), (da, ds) = path.alpha_sigma(t), path.rates(t)
    d, r, log_snr = a * ds - da * s, path.scale(t), path.log_snr(t)
    x = (a[:, None] * x0 + s[:, None] * noise) / r[:, None]
    prediction = denoiser(x, t)
    u = da[:, None] * x0 + ds[:, None] * noise
    of_eps = (noise - prediction.eps).square().sum(1)
    torch.testing.assert_close((u - prediction.velocity).square().sum(1), (d / a).square() * of_eps, rtol=1e-8, atol=0)
    rate = path.log_snr_rate(t)
    torch.testing.assert_close(-rate, 2 * d / (a * s), rtol=1e-8, atol=0)
    found = rate_term(denoiser, output, x0, noise, log_snr, rate)
    torch.testing.assert_close(found, -rate / 2 * of_eps, rtol=1e-8, atol=0)


def test_the_exact_velocity_has_the_least_loss():
    x0 = 0.5 * draw(4000, 1) + 1
    exact = GaussianDenoiser(LinearPath(), torch.ones(1), 0.25, parameterisation=Velocity())
    least = FlowMatching()(exact, x0, None, seeded()).value
    for mean, variance in ((1.2, 0.25), (1.0, 0.4)):
        other = GaussianDenoiser(LinearPath(), torch.full((1,), mean), variance, parameterisation=Velocity())
        assert FlowMatching()(other, x0, None, seeded()).value > least


# ---- times ----


DENSITIES = [
    ("logit_normal", lambda t: torch.exp(-torch.logit(t).square() / 2) / ((2 * torch.pi) ** 0.5 * t * (1 - t))),
    ("cosmap", lambda t: 2 / (torch.pi * (1 - 2 * t + 2 * t * t))),
    ("log_uniform", lambda t: (t > 1e-3) / (t * math.log(1000))),
]  # fmt: skip


def has_density(sampler, density):
    t, weight = sampler(20000, seeded())
    assert torch.equal(weight, torch.ones_like(t)) and float(t.min()) >= 0 and float(t.max()) <= 1
    fine = (torch.arange(200000, dtype=torch.float64) + 0.5) / 200000
    expected = density(fine).view(20, -1).mean(1) / 20
    assert (torch.histc(t, 20, 0, 1) / 20000 - expected).abs().max() < 1e-3


@pytest.mark.parametrize("name, density", DENSITIES)
def test_times_have_their_density(name, density):
    has_density(TIME_SAMPLERS[name](), density)


@pytest.mark.parametrize("name, density", DENSITIES)
def test_other_times_have_another_density(name, density):
    for other in TIME_SAMPLERS.keys() - {name, "loss_aware"}:
        with pytest.raises(AssertionError):
            has_density(TIME_SAMPLERS[other](), density)


def test_the_bound_weights_velocities_as_log_uniform_times_do():
    t = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    path, density = LinearPath(), dict(DENSITIES)["log_uniform"]
    of_x0 = -path.log_snr_rate(t) * torch.exp(path.log_snr(t)) / 2  # nats for each squared error of x_0
    assert torch.allclose(of_x0 * t.square(), (1 - t) * density(t) * math.log(1000))  # x_0 = x_t - t v


@pytest.mark.parametrize("least", [0, 1, -1, math.nan])
def test_the_least_time_is_one(least, refuses):
    refuses(InputError, "give a time between 0 and 1", LogUniformTimes, least=least)


# ---- couplings ----


def test_the_assignment_is_the_cheapest():
    x, e = draw(6, 2), draw(6, 2, seed=1)
    paired = Coupling("ot")(x, e, None, seeded())
    costs = [(x - e[list(order)]).square().sum() for order in itertools.permutations(range(6))]
    assert float((x - paired).square().sum()) == pytest.approx(float(min(costs)))


def test_the_noise_is_only_reordered():
    x, e = draw(64, 3), draw(64, 3, seed=1)
    paired = Coupling("ot")(x, e, None, seeded())
    assert torch.equal(paired.sort(0).values, e.sort(0).values) and not torch.equal(paired, e)
    assert torch.equal(Coupling()(x, e, None, seeded()), e)


def of_each_class(coupling):
    """The noise of each class is that which its items drew."""
    x, e, cond = draw(40, 1), draw(40, 1, seed=1), torch.arange(40) % 3
    x = x + 5 * cond[:, None]
    paired = coupling(x, e, cond, seeded())
    for one in range(3):
        assert torch.equal(paired[cond == one].sort(0).values, e[cond == one].sort(0).values)


def test_each_class_is_paired_by_itself():
    of_each_class(Coupling("ot"))
    with pytest.raises(AssertionError):
        of_each_class(lambda x, e, cond, generator: Coupling("ot")(x, e, None, generator))


def test_sinkhorn_is_near_the_assignment_and_keeps_the_noise():
    x, e = draw(256, 2), draw(256, 2, seed=1)
    cost = {name: float((x - Coupling(name, blur=0.02)(x, e, None, seeded())).square().sum(1).mean())
            for name in ("independent", "ot", "sinkhorn")}  # fmt: skip
    assert cost["ot"] < cost["sinkhorn"] < cost["ot"] + 0.15 * (cost["independent"] - cost["ot"])
    # Over many draws each e is drawn once: its count has mean 1.
    x, e, counts = x[:16], e[:16], torch.zeros(16)
    for seed in range(200):
        counts += torch.bincount(torch.cdist(Coupling("sinkhorn")(x, e, None, seeded(seed)), e).argmin(1), minlength=16)
    assert (counts / 200 - 1).abs().max() < 5 / 200**0.5


def test_the_pairs_of_the_global_batch_whatever_the_processes():
    """Two processes with every second row each come to the pairs of one with all rows."""
    x, e, cond = draw(20, 2), draw(20, 2, seed=1), torch.arange(20) % 2
    for name in ("ot", "sinkhorn"):
        together = Coupling(name)(x, e, cond, KeyedGenerator(0, torch.arange(20), "train"))
        for rank in range(2):
            own = slice(rank, None, 2)

            def whole(rows, own=own):
                every = next(v for v in (x, e, cond) if v[own].shape == rows.shape and torch.equal(v[own], rows))
                return every, own

            keyed = KeyedGenerator(0, torch.arange(20)[own], "train")
            assert torch.equal(Coupling(name, whole=whole)(x[own], e[own], cond[own], keyed), together[own])


def test_unknown_names_are_answered():
    with pytest.raises(ValueError, match="coupling must be one of"):
        Coupling("optimal")
    for blur in (0, math.inf):
        with pytest.raises(ValueError, match=f"blur must be a positive finite number, got {blur}"):
            Coupling("sinkhorn", blur=blur)
    with pytest.raises(ValueError, match=r"coupling=ot pairs items within classes: cond must be labels \(B,\)"):
        Coupling("ot")(torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(4, 3), seeded())
    with pytest.raises(ValueError, match="path must be one of linear, cosine, vp_linear"):
        make_path("straight", 10)
    with pytest.raises(ValueError, match="sigma_min is for path=linear"):
        make_path("cosine", 10, sigma_min=0.1)


def test_a_coupling_gives_noise_for_each_item(refuses):
    denoiser = Denoiser(lambda x, log_snr, cond: x, LinearPath(), Velocity())
    objective = FlowMatching(coupling=lambda x0, noise, cond, generator: noise[:1])
    refuses(InputError, r"a coupling gives noise like x0 \(4, 3\), this one gave \(1, 3\)", objective, denoiser,
            torch.randn(4, 3), None, torch.Generator())


@pytest.mark.parametrize("name", ["ot", "sinkhorn"])
def test_sequences_of_different_lengths_are_not_paired_by_distance(refuses, name):
    """Mutant: the noise of long ones, which lie further out, has a variance above one."""
    lengths, x = torch.arange(32) % 2 * 2 + 2, 3 * torch.randn(32, 1, 4, generator=seeded())
    mask = (torch.arange(4) < lengths[:, None])[:, None]
    noise = torch.randn(32, 1, 4, generator=seeded(1))
    paired = Coupling(name)(x * mask, noise, None, seeded())
    assert paired[lengths == 4].var() > 1.2 > 1 > paired[lengths == 2][..., :2].var()
    denoiser = Denoiser(lambda x, log_snr, cond, mask: x, LinearPath(), Velocity())
    objective = FlowMatching(Coupling(name))
    assert objective(denoiser, x, None, seeded(), mask=mask[1::2].repeat(2, 1, 1)).value.isfinite()
    refuses(InputError, f"coupling={name} is for items of one size, not for sequences of different lengths", objective,
            denoiser, x, None, seeded(), 0, 1, mask)
