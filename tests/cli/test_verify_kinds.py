"""`genmodels verify` on noise schedules and energies of a user's own."""

from __future__ import annotations

import pytest

from genmodels.cli.main import main
from genmodels.errors import InputError

MINE = """
import torch
from genmodels.diffusion.schedule import NoiseSchedule
from genmodels.energy import EnergyFunction

class Straight(NoiseSchedule):
    def __init__(self, *, top: float = 8.0):
        super().__init__()
        self.top = top
    def log_snr(self, t):
        return self.top * (1 - 2 * torch.as_tensor(t, dtype=torch.float64))

class Backwards(Straight):
    def log_snr(self, t):
        return -super().log_snr(t)

class Bowl(EnergyFunction):
    def energy(self, x, cond=None):
        return x.flatten(1).square().sum(1)

class Uphill(Bowl):
    def score(self, x, cond=None):
        return 2 * x
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_own_kinds.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def verify(name: str, *words: str) -> int:
    return main(["verify", f"what=my_own_kinds:{name}", "trust=[my_own_kinds]", *words])


def test_sound_ones_pass(capsys):
    assert verify("Straight", "options.top=5") == 0 and verify("Bowl", "shape=[3]") == 0
    out = capsys.readouterr().out
    assert "Straight, a noise schedule: 7 laws hold" in out and "Bowl, an energy: 5 laws hold" in out


def test_broken_ones_are_told_and_exit_with_one(capsys):
    assert verify("Backwards") == 1 and verify("Uphill", "shape=[3]") == 1
    captured = capsys.readouterr()
    assert "decreasing" in captured.err and "score (Uphill, an energy)" in captured.err
    assert captured.err.count("\n") == 2


@pytest.mark.parametrize("words, said", [(["Bowl"], "shape is missing"), (["Straight", "shape=[3]"], "has no shape"),
                                         (["Straight", "options.peak=3"], "peak")])
def test_bad_input_is_one_line(capsys, words, said):
    assert verify(*words) == InputError.exit_code
    assert said in capsys.readouterr().err
