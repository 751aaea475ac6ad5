"""The laws of samplers and denoisers: what this package has keeps them, and each notices the errors planted."""

from __future__ import annotations

import pytest
import torch

from genmodels.diffusion import PARAMETERISATIONS, CosineSchedule, Denoiser
from genmodels.nn import UNet
from genmodels.verification.diffusion import LAWS as DENOISER_LAWS
from genmodels.verification.diffusion import SAMPLER_LAWS, check_denoiser, check_sampler
from tests.diffusion.table import INSTANCES
from tests.mutants.diffusion import PLANTED

#: Orders of convergence on the path of a Gaussian, of those that draw no noise.
ORDERS = {"ddim": 1, "euler": 1, "heun": 2, "dpmpp_2m": 2, "unipc 1": 2, "unipc 2": 3, "unipc 3": 4}


@pytest.mark.parametrize("name", PLANTED)
def test_exactly_the_right_laws_are_broken(name):
    report = PLANTED[name].judge()
    assert set(report.broken) == PLANTED[name].broken, str(report)


def test_every_law_notices_something():
    noticed = {law for planted in PLANTED.values() for law in planted.broken}
    assert {*SAMPLER_LAWS.laws, *DENOISER_LAWS.laws} == noticed


@pytest.mark.parametrize("name", INSTANCES)
def test_every_sampler_keeps_the_laws(name):
    report = check_sampler(INSTANCES[name]).raise_if_failed()
    told = report["path"].note
    assert told.startswith("order") == (name in ORDERS)
    if name in ORDERS:
        assert abs(float(told.split()[1].rstrip(",")) - ORDERS[name]) < 0.25


@pytest.mark.parametrize("name", PARAMETERISATIONS)
def test_every_parameterisation_keeps_the_laws(name):
    net = UNet((1, 8, 8), 10, channels=8, multipliers=[1, 2])
    denoiser = Denoiser(net, CosineSchedule(), PARAMETERISATIONS[name]())
    check_denoiser(denoiser, (1, 8, 8), cond=torch.arange(5)).raise_if_failed()
