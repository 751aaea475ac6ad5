"""The learned schedule: monotone between fixed ends, whatever its parameters become."""

from __future__ import annotations

import pytest
import torch

from genmodels.diffusion import LearnedSchedule


def shaken(schedule, rounds=100):
    """The schedule after random updates of its parameters."""
    torch.manual_seed(0)
    for _ in range(rounds):
        with torch.no_grad():
            for p in schedule.parameters():
                p.add_(0.3 * torch.randn(p.shape))
    return schedule


def ends_hold(schedule):
    """Exactly, alone and among other times, after any update."""
    shaken(schedule)
    assert schedule.end_points == (8.1, -6.3)
    for n in (1, 2, 7, 1000):
        t = torch.cat([torch.rand(n, dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)])
        assert schedule.log_snr(t)[-2:].tolist() == [8.1, -6.3]


def made(kind=LearnedSchedule, **options):
    return kind(log_snr_max=8.1, log_snr_min=-6.3, **options)


def test_ends_hold():
    ends_hold(made())


def test_ends_catch_a_missing_normalisation():
    class Loose(LearnedSchedule):
        def log_snr(self, t):
            rise, _ = self._rise(t)
            return self.first + (self.last - self.first) * rise / 2

    with pytest.raises(AssertionError):
        ends_hold(made(Loose))


def test_it_stays_monotone_and_invertible():
    schedule = shaken(made(hidden=32))
    t = torch.linspace(0, 1, 3001, dtype=torch.float64)
    log_snr = schedule.log_snr(t)
    assert (log_snr.diff() < 0).all() and (schedule.log_snr_rate(t) < 0).all()
    assert (schedule.time_of(log_snr) - t).abs().max() < 1e-10
    assert not schedule.time_of(log_snr).requires_grad


def test_it_starts_near_a_straight_line_and_in_float64():
    t = torch.linspace(0, 1, 11)
    straight = 8.1 + (-6.3 - 8.1) * t.double()
    log_snr = made().log_snr(t)
    assert log_snr.dtype == torch.float64
    assert (log_snr - straight).abs().max() < 1.0


def test_its_rate_has_the_parameters_in_its_graph():
    schedule = made(hidden=8)
    t = torch.rand(5, dtype=torch.float64)
    for value in (schedule.log_snr(t), schedule.log_snr_rate(t)):
        gradients = torch.autograd.grad(value.square().sum(), list(schedule.parameters()))
        assert all(float(g.abs().max()) > 0 for g in gradients)


@pytest.mark.parametrize("options", [{"log_snr_max": -11.0}, {"log_snr_min": -float("inf")}, {"hidden": 0}])
def test_errors(options):
    with pytest.raises(ValueError) as error:
        LearnedSchedule(**options)
    assert "\n" not in str(error.value)
