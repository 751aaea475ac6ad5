"""The one loop, and what every sampler in it promises: purity, addressable noise, a clean end, its own count."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    SAMPLERS,
    SCHEDULES,
    SPACINGS,
    CosineSchedule,
    DDIMSampler,
    DDPMSampler,
    Denoiser,
    EulerSampler,
    GaussianDenoiser,
    LinearSchedule,
    V,
    karras_sigmas,
    rescale_zero_terminal,
    sample,
    uniform_log_snr,
    uniform_t,
)
from tests.diffusion.table import INSTANCES, calls, keyed, seeded
from tests.mutants.diffusion import NoisyEnd

MEAN = torch.tensor([0.5, -0.2, 1.0], dtype=torch.float64)
every_sampler = pytest.mark.parametrize("name", INSTANCES)


def test_the_table_has_every_sampler():
    assert {type(sampler) for sampler in INSTANCES.values()} == set(SAMPLERS.values())


# ---- the clean end ----


@every_sampler
def test_a_point_mass_is_found_in_one_step(name):
    point = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64)
    denoiser = GaussianDenoiser(CosineSchedule(), point, 0.0)
    out = sample(denoiser, (5, 3), torch.tensor([1.0, 0.0]), INSTANCES[name], keyed(5), dtype=torch.float64)
    assert (out.x - point).abs().max() < 1e-12 and out.evaluations == 1


def last_step_is_the_estimate(sampler):
    denoiser = GaussianDenoiser(CosineSchedule(), MEAN, 0.25)
    kept = []
    out = sample(denoiser, (50, 3), uniform_t(denoiser.schedule, 10), sampler, keyed(50), dtype=torch.float64,
                 callback=lambda i, x, x0: kept.append(x0))  # fmt: skip
    assert (out.x - kept[-1]).abs().max() < 1e-12


@every_sampler
def test_last_step_is_the_estimate(name):
    last_step_is_the_estimate(INSTANCES[name])


def test_noise_at_the_last_step_is_caught():
    with pytest.raises(AssertionError):
        last_step_is_the_estimate(NoisyEnd())


# ---- addressable samples ----


class Net(torch.nn.Module):
    """A small float32 network with a real dependence on x and noise level."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(0.5 * torch.randn(65, 64, generator=generator))

    def forward(self, x, log_snr, cond=None):
        flat = torch.cat([x.flatten(1), log_snr.clamp(-20, 20)[:, None] / 10], 1)
        out = torch.tanh(flat @ self.weight).reshape(x.shape)
        return out if cond is None else out + cond.reshape(-1, 1, 1, 1)


def addressable(sampler, generator_of, steps=15):
    denoiser = Denoiser(Net(), CosineSchedule(), V())
    times = uniform_log_snr(denoiser.schedule, steps)
    index = torch.arange(64)

    def run(rows):
        return sample(denoiser, (len(rows), 1, 8, 8), times, sampler, generator_of(rows)).x

    whole = run(index)
    assert whole.std() > 0.1
    for rows in (index[37:38], index[10:30], index[[5, 63, 0]]):
        assert (run(rows) - whole[rows]).abs().max() < 1e-5


@every_sampler
def test_sample_k_is_the_same_alone_and_in_any_batch(name):
    addressable(INSTANCES[name], lambda rows: KeyedGenerator(3, rows, "sample"))


def test_addressable_catches_a_batch_generator():
    with pytest.raises(AssertionError):
        addressable(DDIMSampler(), lambda rows: seeded(3))


def test_seeds_differ_and_repeat():
    denoiser = GaussianDenoiser(CosineSchedule(), torch.zeros(4), 1.0)
    times = uniform_t(denoiser.schedule, 4)
    a, b, again = (sample(denoiser, (2, 4), times, DDPMSampler(), keyed(2, seed)).x for seed in (0, 1, 0))
    assert torch.equal(a, again) and not torch.allclose(a, b)


# ---- options and interface ----


@every_sampler
def test_dtype_evaluations_and_callback(name):
    denoiser = GaussianDenoiser(CosineSchedule(), torch.zeros(4), 1.0)
    for dtype in (torch.float32, torch.float64):
        seen = []

        def keep(i, x, x0, seen=seen):
            seen.append((i, x, x0))

        times = uniform_t(denoiser.schedule, 6)
        out = sample(denoiser, (2, 4), times, INSTANCES[name], keyed(2), dtype=dtype, callback=keep)
        assert out.x.dtype == dtype and out.evaluations == calls(name, 6) and out.x.isfinite().all()
        assert [i for i, *_ in seen] == list(range(6)) and torch.equal(seen[-1][1], out.x)
        assert all(x0.shape == (2, 4) for *_, x0 in seen)


@every_sampler
def test_temperature_zero_is_one_path(name):
    denoiser = GaussianDenoiser(CosineSchedule(), MEAN, 0.25)
    times = uniform_t(denoiser.schedule, 10)
    x = sample(denoiser, (4, 3), times, INSTANCES[name], keyed(4), temperature=0.0, dtype=torch.float64).x
    assert (x - x[:1]).abs().max() == 0
    hot = sample(denoiser, (500, 3), times, INSTANCES[name], keyed(500), temperature=1.5, dtype=torch.float64).x
    cool = sample(denoiser, (500, 3), times, INSTANCES[name], keyed(500), temperature=0.5, dtype=torch.float64).x
    assert float(hot.std(0).mean() / cool.std(0).mean()) == pytest.approx(3, rel=1e-6)  # everything here is linear


def test_condition_reaches_the_network():
    denoiser = Denoiser(Net(), CosineSchedule(), V())
    times = uniform_t(denoiser.schedule, 3)
    a, b = (sample(denoiser, (2, 1, 8, 8), times, DDIMSampler(), keyed(2), cond=torch.full((2,), value)).x
            for value in (0.0, 0.5))  # fmt: skip
    assert (a - b).abs().max() > 0.1


@every_sampler
def test_zero_terminal_snr(name):
    schedule = rescale_zero_terminal(LinearSchedule())
    denoiser = GaussianDenoiser(schedule, MEAN, 0.25)
    x = sample(denoiser, (2000, 3), uniform_t(schedule, 100), INSTANCES[name], keyed(2000), dtype=torch.float64).x
    assert x.isfinite().all()
    assert ((x.mean(0) - MEAN).abs() < 5 * 0.5 / 2000**0.5).all()


class Seeing(torch.nn.Module):
    """Notes the earlier estimate it is shown, and says that everything is 2."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, log_snr, cond=None):
        self.seen.append(x[:, 2:].clone())
        return torch.full_like(x[:, :2], 2.0)


@every_sampler
def test_a_self_conditioned_network_sees_the_last_estimate(name):
    from genmodels.diffusion import X0

    net = Seeing()
    denoiser = Denoiser(net, CosineSchedule(), X0(), self_conditioning=True)
    sample(denoiser, (3, 2), uniform_t(denoiser.schedule, 3), INSTANCES[name], keyed(3))
    assert (net.seen[0] == 0).all() and all((x == 2).all() for x in net.seen[1:]) and len(net.seen) >= 3


def test_a_mask_goes_to_the_network_and_hides_the_rest():
    seen = []

    def net(x, log_snr, cond, mask):
        seen.append(mask)
        return torch.ones_like(x)

    denoiser = Denoiser(net, CosineSchedule(), V())
    mask = torch.arange(5)[None, None] < torch.tensor([5, 2])[:, None, None]
    x = sample(denoiser, (2, 3, 5), uniform_t(denoiser.schedule, 2), DDIMSampler(), keyed(2), mask=mask).x
    assert all(torch.equal(m, mask) for m in seen)
    assert (x[1, :, 2:] == 0).all() and (x[0] != 0).all() and (x[1, :, :2] != 0).all()


def test_no_graph_is_kept():
    denoiser = Denoiser(Net(), CosineSchedule(), V())
    assert not sample(denoiser, (1, 1, 8, 8), torch.tensor([1.0, 0.0]), DDIMSampler(), keyed(1)).x.requires_grad


@every_sampler
def test_a_step_is_pure(name):
    denoiser = GaussianDenoiser(CosineSchedule(), MEAN, 0.25)
    x = torch.randn(4, 3, generator=seeded(), dtype=torch.float64)
    before = x.clone()
    t, s = torch.tensor([0.5, 0.4], dtype=torch.float64)
    one, memory = INSTANCES[name](denoiser, x, t, s, None, keyed(4))
    INSTANCES[name](denoiser, one, s, s / 2, memory, keyed(4))
    two, _ = INSTANCES[name](denoiser, x, t, s, None, keyed(4))
    assert torch.equal(one, two) and torch.equal(x, before)


@pytest.mark.parametrize(
    "times", [[0.1, 0.9], [1.0, 0.5, 0.5], [1.0], [1.2, 0.5], [0.5, -0.1], [[1.0, 0.0]]]
)
def test_bad_times(times):
    denoiser = GaussianDenoiser(CosineSchedule(), MEAN, 0.25)
    with pytest.raises(ValueError, match="must decrease within"):
        sample(denoiser, (1, 3), torch.tensor(times), DDIMSampler(), keyed(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_steps_in_half_precision_are_refused(dtype):
    denoiser = GaussianDenoiser(CosineSchedule(), MEAN, 0.25)
    with pytest.raises(ValueError, match=f"torch.float32 or torch.float64, got {dtype}"):
        sample(denoiser, (1, 3), torch.tensor([1.0, 0.0]), DDIMSampler(), keyed(1), dtype=dtype)


# ---- spacings of sampling times: all decrease from (nearly) 1 to the clean end, in as many steps as asked ----


SPACED = {name: schedule() for name, schedule in SCHEDULES.items()}
SPACED |= {"zero terminal": rescale_zero_terminal(LinearSchedule()), "narrow": CosineSchedule(log_snr_max=4.0)}


def well_formed(times, steps, starts_at_one):
    assert times.dtype == torch.float64 and times.shape == (steps + 1,)
    assert (times.diff() < 0).all()
    assert float(times[-1]) == 0 and float(times[0]) <= 1
    assert not starts_at_one or float(times[0]) == 1


@pytest.mark.parametrize("schedule", SPACED.values(), ids=SPACED.keys())
@pytest.mark.parametrize("name", SPACINGS)
@pytest.mark.parametrize("steps", [1, 2, 20, 1000])
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
    with pytest.raises(ValueError, match="steps must be at least 1"):
        SPACINGS[name](CosineSchedule(), 0, 100)


@pytest.mark.parametrize("name", ["integer_trailing", "integer_leading"])
def test_integer_spacings_need_T(name):
    with pytest.raises(ValueError, match="num_steps"):
        SPACINGS[name](CosineSchedule(), 10)


def test_what_changes_the_shape_of_samples_is_refused(refuses):
    def narrow(x, log_snr, cond):
        return x

    denoiser = Denoiser(narrow, CosineSchedule(), V())
    times = uniform_t(denoiser.schedule, 3)

    class Wider(EulerSampler):
        def __call__(self, *given, **options):
            x, memory = super().__call__(*given, **options)
            return x.repeat(2, 1), memory

    drawing = (sample, denoiser, (2, 3), times)
    refuses(InputError, r"a step turned samples \(2, 3\) into \(4, 3\)", *drawing, Wider(), seeded())
    words = r"start must have the shape of the samples, \(2, 3\), got \(1, 3\)"
    refuses(InputError, words, *drawing, EulerSampler(), seeded(), start=torch.zeros(1, 3))
    for wrong in (math.nan, -0.1, 1.1):
        refuses(InputError, "must decrease within", sample, denoiser, (2, 3), torch.tensor([0.9, wrong, 0.0]),
                EulerSampler(), seeded())


def test_an_own_sampler_may_leave_out_the_condition():
    class Bare(EulerSampler):
        def __call__(self, denoiser, x, t, s, *rest):
            denoiser(x, t.expand(len(x)))
            return super().__call__(denoiser, x, t, s, *rest)

    denoiser = Denoiser(lambda x, log_snr, cond: x, CosineSchedule(), V())
    assert sample(denoiser, (2, 3), uniform_t(denoiser.schedule, 3), Bare(), seeded()).evaluations == 6
