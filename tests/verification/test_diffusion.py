"""The checks of samplers and denoisers: what this package has keeps them, and each notices its mutants."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from genmodels.diffusion import PARAMETERISATIONS, CosineSchedule, Denoiser, HeunSampler, LearnedSchedule, V
from genmodels.nn import MLPDenoiser, UNet
from genmodels.verification.diffusion import DENOISER_CHECKS, SAMPLER_CHECKS, check_denoiser, check_sampler
from tests.diffusion.table import INSTANCES
from tests.mutants.diffusion import MUTANTS

#: Orders of convergence on the path of a Gaussian, of those that draw no noise.
ORDERS = {"ddim": 1, "euler": 1, "heun": 2, "dpmpp_2m": 2, "unipc 1": 2, "unipc 2": 3, "unipc 3": 4, "flow": 2,
          "flow_map": 1}


@pytest.mark.parametrize("name", MUTANTS)
def test_exactly_the_right_checks_fail(name):
    report = MUTANTS[name].run()
    assert set(report.failed) == MUTANTS[name].failing, str(report)


def test_every_check_has_a_mutant():
    noticed = {check for mutant in MUTANTS.values() for check in mutant.failing}
    assert {*SAMPLER_CHECKS.specs, *DENOISER_CHECKS.specs} == noticed


@pytest.mark.parametrize("name", INSTANCES)
def test_every_sampler_passes_the_checks(name):
    report = check_sampler(INSTANCES[name])
    if name == "consistency":  # of a denoiser it draws a blur, which the checks must notice
        assert [check.name for check in report.checks if check.failed] == ["spread"]
        return
    report.raise_if_failed()
    shown = report["trajectory"].note
    assert shown.startswith("order") == (name in ORDERS)
    if name in ORDERS:
        assert abs(float(shown.split()[1].rstrip(",")) - ORDERS[name]) < 0.25


@pytest.mark.parametrize("name", PARAMETERISATIONS)
def test_every_parameterisation_passes_the_checks(name):
    net = UNet((1, 8, 8), 10, channels=8, multipliers=[1, 2])
    denoiser = Denoiser(net, CosineSchedule(), PARAMETERISATIONS[name]())
    check_denoiser(denoiser, (1, 8, 8), cond=torch.arange(5)).raise_if_failed()


def test_a_learned_schedule_passes_the_checks():
    check_denoiser(Denoiser(MLPDenoiser((2,)), LearnedSchedule(), V()), (2,)).raise_if_failed()


def test_a_boolean_buffer_is_part_of_the_state():
    net = MLPDenoiser((2,))
    net.register_buffer("flags", torch.tensor([True, False]))
    report = check_denoiser(Denoiser(net, CosineSchedule(), PARAMETERISATIONS["v"]()), (2,))
    assert report["nothing modified"].error == 0


class Conditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_x, self.of_cond = nn.Linear(2, 2), nn.Linear(3, 2)

    def forward(self, x, log_snr, cond):
        return torch.tanh(self.of_x(x) + self.of_cond(cond) + 0.1 * log_snr[:, None])


def test_denoisers_with_vectors_as_conditions(refuses):
    denoiser = Denoiser(Conditioned(), CosineSchedule(), V())
    assert check_denoiser(denoiser, (2,), cond=torch.randn(5, 3)).passed
    refuses(ValueError, "at least two conditions", check_denoiser, denoiser, (2,), cond=torch.randn(1, 3))


def test_checks_leave_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    check_sampler(HeunSampler())
    assert torch.equal(torch.rand(1), expected)
