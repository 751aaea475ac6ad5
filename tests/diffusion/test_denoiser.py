"""The denoiser: what the network is given, what comes back, in which precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from genmodels.diffusion import (
    EDM,
    PARAMETERISATIONS,
    SCHEDULES,
    X0,
    CosineSchedule,
    Denoiser,
    Eps,
    LinearPath,
    LinearSchedule,
    OnPath,
    SigmoidSchedule,
    Simple,
    V,
    alpha_sigma,
    q_sample,
    rescale_zero_terminal,
    velocity_of,
)
from genmodels.diffusion.denoiser import AtAnyTime


class OfScale(nn.Module):
    """A network that asks for the scale of its input."""

    takes_scale = True

    def forward(self, x, log_snr, cond=None, scale=None):
        self.noisy = x / scale[:, None]
        return x


@pytest.mark.parametrize("kind, path", [
    (V(), CosineSchedule()), (Eps(), CosineSchedule()), (X0(), LinearSchedule()), (EDM(), CosineSchedule()),
    (EDM(sigma_data=1.7), LinearPath()), (velocity_of(LinearPath()), LinearPath()),
    (velocity_of(CosineSchedule()), CosineSchedule()),
])  # fmt: skip
def test_a_network_can_ask_for_the_scale_of_its_input(kind, path):
    net, x, t = OfScale(), torch.randn(5, 3, dtype=torch.float64), torch.tensor([0.01, 0.2, 0.5, 0.9, 0.99]).double()
    Denoiser(net, path, kind)(x, t)
    torch.testing.assert_close(net.noisy, x, rtol=1e-6, atol=1e-6)


class Recorder(nn.Module):
    """A linear network that remembers what it was given."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=dtype)

    def forward(self, x, log_snr, cond=None, mask=None):
        self.seen = (x, log_snr, cond, mask)
        return self.layer(x)


def test_the_network_sees_log_snr_and_condition():
    net, t = Recorder(), torch.tensor([0.1, 0.9])
    cond, mask = torch.tensor([3, 4]), torch.ones(2, 1, 3, dtype=torch.bool)
    prediction = Denoiser(net, CosineSchedule(), V())(torch.randn(2, 3), t, cond, mask)
    assert torch.equal(net.seen[1], CosineSchedule().log_snr(t).float())
    assert net.seen[2] is cond and net.seen[3] is mask
    assert torch.equal(prediction.v, prediction.output)


@pytest.mark.parametrize("state", [torch.float32, torch.float64])
@pytest.mark.parametrize("inner", [torch.float32, torch.float64, torch.bfloat16])
def test_precision(state, inner):
    net = Recorder(inner)
    prediction = Denoiser(net, CosineSchedule(), V())(torch.randn(2, 3, dtype=state), torch.tensor([0.1, 0.9]))
    assert net.seen[0].dtype == inner
    assert net.seen[1].dtype == (torch.float64 if inner == torch.float64 else torch.float32)
    assert prediction.output.dtype == prediction.x0.dtype == state


def test_autocast_reaches_the_network_only():
    net = Recorder()
    denoiser = Denoiser(net, CosineSchedule(), V())
    x, t = torch.randn(2, 3), torch.tensor([0.1, 0.9])
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x, t).dtype == torch.bfloat16
        prediction = denoiser(x, t)
        x0 = prediction.x0
    assert torch.equal(net.seen[1], CosineSchedule().log_snr(t).float())
    alpha, sigma = (value.float()[:, None] for value in CosineSchedule().alpha_sigma(t))
    assert x0.dtype == torch.float32
    torch.testing.assert_close(x0, alpha * x - sigma * prediction.output, rtol=0, atol=1e-6)


def test_a_network_of_another_shape_is_named():
    denoiser = Denoiser(lambda x, log_snr, cond: torch.cat([x, x], 1), CosineSchedule(), V())
    with pytest.raises(ValueError, match=r"\(2, 3\) into \(2, 6\)"):
        denoiser(torch.zeros(2, 3), torch.zeros(2))


every_parameterisation = pytest.mark.parametrize("name", PARAMETERISATIONS)
LEVELS = [math.inf, 15.0, 3.0, 0.0, -2.5, -10.0, -15.0, -math.inf]
UNDEFINED = {  # parameterisation: {log-SNR: fields that do not exist there}
    "eps": {math.inf: {"score"}, -math.inf: {"x0", "v"}},
    "x0": {math.inf: {"eps", "v", "score"}},
    "v": {math.inf: {"score"}},
    "edm": {math.inf: {"score"}},
    "velocity": {math.inf: {"score"}},
}


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))


def round_trip(parameterisation, log_snr):
    x0, eps = draw()
    log_snr = torch.full((4,), log_snr, dtype=torch.float64)
    alpha, sigma = (value[:, None] for value in alpha_sigma(log_snr))
    output = parameterisation.target(x0, eps, log_snr)
    prediction = parameterisation.to_prediction(output, q_sample(x0, log_snr, eps), log_snr)
    truth = {"x0": x0, "eps": eps, "v": alpha * eps - sigma * x0, "score": -eps / sigma}
    undefined = UNDEFINED[parameterisation.name].get(float(log_snr[0]), set())
    for field, value in truth.items():
        if field in undefined:
            with pytest.raises(ValueError, match="undefined where"):
                getattr(prediction, field)
        else:
            # From eps to x0 the rounding error is divided by alpha, from x0 to eps by sigma.
            assert (getattr(prediction, field) - value).abs().max() < 1e-10 * max(1, float(value.abs().max()))


@every_parameterisation
@pytest.mark.parametrize("log_snr", LEVELS)
def test_round_trip(name, log_snr):
    round_trip(PARAMETERISATIONS[name](), log_snr)


class WrongSign(V):
    def target(self, x0, noise, log_snr):
        alpha, sigma = (value[:, None] for value in alpha_sigma(log_snr))
        return alpha * noise + sigma * x0


def test_round_trip_catches_a_wrong_sign_in_v():
    with pytest.raises(AssertionError):
        round_trip(WrongSign(), 0.0)


def error_of_x0(parameterisation, log_snr):
    """loss_weight turns the squared error of the output into that of x0."""
    x0, eps = draw()
    other, _ = draw(1)
    log_snr = torch.full((4,), log_snr, dtype=torch.float64)
    x = q_sample(x0, log_snr, eps)
    wrong = parameterisation.to_prediction(other, x, log_snr)
    own = (parameterisation.target(x0, eps, log_snr) - other).square().sum(1)
    expected = (x0 - wrong.x0).square().sum(1)
    torch.testing.assert_close(parameterisation.loss_weight(log_snr) * own, expected, rtol=1e-9, atol=0)


@every_parameterisation
@pytest.mark.parametrize("log_snr", [12.0, 1.0, -4.0])
def test_loss_weight(name, log_snr):
    error_of_x0(PARAMETERISATIONS[name](), log_snr)


def test_loss_weight_catches_the_inverse_ratio():
    class Inverse(Eps):
        def loss_weight(self, log_snr):
            return torch.exp(log_snr)

    with pytest.raises(AssertionError):
        error_of_x0(Inverse(), 1.0)


def test_edm_is_the_preconditioning_of_its_paper():
    """D(y; s) = c_skip y + c_out F(c_in y) with y = x/alpha, s = sigma/alpha, and the coefficients at s = 1."""
    edm, (x, output) = EDM(), draw()
    log_snr = torch.tensor([3.0, 0.0, -1.0, -8.0], dtype=torch.float64)
    alpha, sigma = (value[:, None] for value in alpha_sigma(log_snr))
    y, s = x / alpha, sigma / alpha
    c_skip, c_out = 0.25 / (s**2 + 0.25), 0.5 * s / (s**2 + 0.25).sqrt()
    torch.testing.assert_close(edm.to_prediction(output, x, log_snr).x0, c_skip * y + c_out * output)
    torch.testing.assert_close(edm.scale_input(x, log_snr), y / (s**2 + 0.25).sqrt())
    none, at_one = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)  # y = 1 where s = 1
    x = none + alpha_sigma(at_one)[0]
    found = [edm.to_prediction(output, at, at_one).x0 for output, at in ((none, x), (none + 1, none))]
    found.append(edm.scale_input(x, at_one))
    assert [float(c) for c in found] == pytest.approx([0.2, 0.447213595, 0.894427191], abs=5e-10)


def test_edm_keeps_unit_variance_in_and_out():
    generator = torch.Generator().manual_seed(0)
    x0, eps = (torch.randn(20000, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    for level in (9.0, 0.0, -9.0):
        log_snr = torch.full((20000,), level, dtype=torch.float64)
        seen = EDM().scale_input(q_sample(0.5 * x0, log_snr, eps), log_snr)
        target = EDM().target(0.5 * x0, eps, log_snr)
        assert float(seen.var()) == pytest.approx(1, abs=0.05) and float(target.var()) == pytest.approx(1, abs=0.05)


def test_edm_for_data_of_unit_standard_deviation_is_minus_v():
    x0, eps = draw()
    log_snr = torch.tensor([math.inf, 2.0, -1.0, -math.inf], dtype=torch.float64)
    torch.testing.assert_close(EDM(sigma_data=1.0).target(x0, eps, log_snr), -V().target(x0, eps, log_snr))


def test_min_snr_weights_follow():
    """min(u, 5) loss_weight at log-SNR 5, the three numbers of Hang et al. 2023."""
    log_snr = torch.tensor([5.0], dtype=torch.float64)
    for name, value in {"eps": 0.0336897350, "x0": 5.0, "v": 0.0334642546}.items():
        weight = log_snr.exp().clamp(max=5) * PARAMETERISATIONS[name]().loss_weight(log_snr)
        assert float(weight) == pytest.approx(value, rel=1e-8)


@pytest.mark.parametrize(
    "schedule", [SigmoidSchedule(), rescale_zero_terminal(LinearSchedule())], ids=["sigmoid", "zero terminal"]
)
def test_eps_without_signal_is_refused_at_construction(schedule):
    sentence = "eps carries no signal at SNR 0: choose v or x0, or a path with log_snr(1) >= -20, such as vp_linear"
    with pytest.raises(ValueError) as error:
        Denoiser(torch.nn.Identity(), schedule, Eps())
    assert str(error.value) == sentence
    Denoiser(torch.nn.Identity(), schedule, V())


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "sigmoid"])
def test_eps_is_accepted_elsewhere(name):
    denoiser = Denoiser(torch.nn.Identity(), SCHEDULES[name](), Eps())
    assert float(denoiser.schedule.log_snr(torch.ones(1)).detach()) >= -20


def test_an_undefined_field_raises_when_read_not_before():
    log_snr = torch.tensor([torch.inf], dtype=torch.float64)
    prediction = V().to_prediction(torch.ones(1, 2), torch.ones(1, 2), log_snr)
    assert torch.equal(prediction.x0, torch.ones(1, 2))
    with pytest.raises(ValueError, match="score is undefined where sigma = 0"):
        _ = prediction.score


def test_fields_are_computed_once_and_on_demand():
    prediction = Eps().to_prediction(torch.ones(1, 2), torch.ones(1, 2), CosineSchedule().log_snr(torch.tensor([0.5])))
    assert "x0" not in vars(prediction)
    assert prediction.x0 is prediction.x0
    assert prediction.nu is None


class InPlace(nn.Module):
    """Half of x, written into it."""

    def forward(self, x, log_snr, cond=None):
        x *= 0.5
        return x


class Plain(nn.Module):
    def forward(self, x, log_snr, cond=None):
        return x * 0.5


@pytest.mark.parametrize("parameterisation", [V(), Eps(), X0()])
def test_a_network_may_write_to_its_input(parameterisation):
    t, x = torch.tensor([0.3, 0.7]), torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    kept = x.clone()
    found, expected = (Denoiser(net, CosineSchedule(), parameterisation)(x, t) for net in (InPlace(), Plain()))
    assert torch.equal(x, kept)
    assert torch.equal(found.x0, expected.x0) and torch.equal(found.eps, expected.eps)


class Halved(AtAnyTime):
    """The contract of the docstring, and no more."""

    def __init__(self):
        super().__init__()
        self.schedule, self.parameterisation = CosineSchedule(), V()

    def at_log_snr(self, x, log_snr, cond=None, mask=None, estimate=None):
        return self.parameterisation.to_prediction(x * 0.5, x, log_snr)


def test_an_own_denoiser_is_trained_guided_and_bounded():
    x, own = torch.randn(4, 3), Halved()
    twin = Denoiser(Plain(), CosineSchedule(), V())
    losses = [Simple()(each, x, None, torch.Generator().manual_seed(0)).per_example for each in (own, twin)]
    assert torch.equal(*losses)
    straight = [OnPath(each, LinearPath())(x, torch.full((4,), 0.5)).velocity for each in (own, twin)]
    assert torch.equal(*straight)
