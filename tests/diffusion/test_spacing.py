"""Spacings of sampling times: all decrease from (nearly) 1 to the clean end, in as many steps as asked."""

from __future__ import annotations

import pytest
import torch

from genmodels.diffusion import (
    SCHEDULES,
    SPACINGS,
    CosineSchedule,
    LinearSchedule,
    karras_sigmas,
    rescale_zero_terminal,
)

INSTANCES = {name: schedule() for name, schedule in SCHEDULES.items()}
INSTANCES |= {"zero terminal": rescale_zero_terminal(LinearSchedule()), "narrow": CosineSchedule(log_snr_max=4.0)}


def well_formed(times, steps, starts_at_one):
    assert times.dtype == torch.float64 and times.shape == (steps + 1,)
    assert (times.diff() < 0).all()
    assert float(times[-1]) == 0 and float(times[0]) <= 1
    assert not starts_at_one or float(times[0]) == 1


@pytest.mark.parametrize("schedule", INSTANCES.values(), ids=INSTANCES.keys())
@pytest.mark.parametrize("name", SPACINGS)
@pytest.mark.parametrize("steps", [1, 2, 7, 20, 1000])
def test_well_formed(name, schedule, steps):
    times = SPACINGS[name](schedule, steps, 1000)
    well_formed(times, steps, name in ("uniform_t", "uniform_log_snr", "integer_trailing"))


def test_well_formed_catches_a_repeated_time():
    with pytest.raises(AssertionError):
        well_formed(torch.tensor([1.0, 0.5, 0.5, 0.0], dtype=torch.float64), 3, True)


def test_uniform_log_snr_is_uniform():
    schedule = CosineSchedule()
    log_snr = schedule.log_snr(SPACINGS["uniform_log_snr"](schedule, 20, 1000)[:-1])
    torch.testing.assert_close(log_snr.diff(), log_snr.diff().mean().expand(19), rtol=1e-9, atol=0)
    last = schedule.log_snr(torch.tensor(1e-3, dtype=torch.float64))
    assert log_snr[[0, -1]].tolist() == pytest.approx([-15, float(last)], abs=1e-9)


def test_karras_constants():
    expected = [80, 17.5278320, 2.51521898, 0.169752757, 0.002]
    assert karras_sigmas(5, 0.002, 80.0).tolist() == pytest.approx(expected, rel=1e-8)
    schedule = SCHEDULES["linear_continuous"]()
    times = SPACINGS["karras"](schedule, 5, sigma_min=0.02)
    assert schedule.sigma_bar(times[:-1]).tolist() == pytest.approx(karras_sigmas(5, 0.02, 80.0).tolist(), rel=1e-9)


def test_integer_spacings():
    schedule = LinearSchedule()
    assert (SPACINGS["integer_trailing"](schedule, 4) * 1000).round().tolist() == [1000, 750, 500, 250, 0]
    assert (SPACINGS["integer_leading"](schedule, 10) * 1000).round().tolist() == [*range(901, 0, -100), 0]
    for name in ("uniform_t", "integer_trailing", "integer_leading"):
        assert (SPACINGS[name](schedule, 1000) * 1000).round().tolist() == list(range(1000, -1, -1))


@pytest.mark.parametrize("name", SPACINGS)
def test_more_steps_than_T(name):
    for schedule, num_steps in ((CosineSchedule(), 100), (LinearSchedule(num_steps=100), None)):
        with pytest.raises(ValueError, match="T = 100 steps, use steps <= 100"):
            SPACINGS[name](schedule, 101, num_steps)
    with pytest.raises(ValueError, match="positive"):
        SPACINGS[name](CosineSchedule(), 0, 100)


@pytest.mark.parametrize("name", ["integer_trailing", "integer_leading"])
def test_integer_spacings_need_T(name):
    with pytest.raises(ValueError, match="num_steps"):
        SPACINGS[name](CosineSchedule(), 10)
