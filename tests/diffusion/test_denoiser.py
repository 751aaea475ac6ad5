"""The denoiser: what the network is given, what comes back, in which precision."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from genmodels.diffusion import CosineSchedule, Denoiser, V


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


def test_the_room_needs_no_lightning_or_hydra():
    script = (
        "import sys\n"
        "for name in ('pytorch_lightning', 'lightning', 'hydra', 'omegaconf', 'wandb'): sys.modules[name] = None\n"
        "import genmodels.diffusion as d\n"
        "rooms = [m for m in sys.modules if m.startswith('genmodels.') and m.count('.') == 1]\n"
        "assert set(rooms) <= {'genmodels.diffusion', 'genmodels.random', 'genmodels.errors', 'genmodels.nn'}, rooms\n"
        "assert all(hasattr(d, name) for name in d.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
