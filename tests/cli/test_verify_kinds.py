"""`genmodels verify` on what is no bijection, of a user's own, and on models that are no flows."""

from __future__ import annotations

import pytest

from genmodels.cli.main import main
from genmodels.core.errors import InputError

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

from genmodels.diffusion import CosineSchedule, Denoiser, EulerSampler, V
from genmodels.nn import MLPDenoiser

def euler(denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
    return EulerSampler()(denoiser, x, t, s, memory, generator, cond, temperature)

class Late(EulerSampler):
    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        return super().__call__(denoiser, x, t, 0.9 * s, memory, generator, cond, temperature)

def of_points(classes=None):
    return Denoiser(MLPDenoiser((2,), classes, hidden=8), CosineSchedule(), V())

class Negative(Denoiser):
    def __init__(self):
        super().__init__(MLPDenoiser((2,), hidden=8), CosineSchedule(), V())
    def at_log_snr(self, x, *rest):
        return super().at_log_snr(-x, *rest)
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
    assert "Straight, a noise schedule: 7 passed" in out and "Bowl, an energy: 5 passed" in out
    assert verify("euler") == 0 and verify("of_points", "shape=[2]", "options.classes=4", "cond=labels:4") == 0
    out = capsys.readouterr().out
    assert "euler, a sampler: 9 passed" in out and "order 0.99" in out and "Denoiser, a denoiser: 9 passed" in out


def test_broken_ones_are_named_and_exit_with_one(capsys):
    assert verify("Backwards") == 1 and verify("Uphill", "shape=[3]") == 1
    captured = capsys.readouterr()
    assert "decreasing" in captured.err and "score (Uphill, an energy)" in captured.err
    assert captured.err.count("\n") == 2
    assert verify("Late") == 1 and verify("Negative", "shape=[2]") == 1
    captured = capsys.readouterr()
    assert "trajectory (Late, a sampler)" in captured.err and "signal and noise (Negative, a denoiser)" in captured.err


@pytest.mark.parametrize("words, said", [(["Bowl"], "shape is missing"), (["Straight", "shape=[3]"], "has no shape"),
                                         (["Straight", "options.peak=3"], "peak"),
                                         (["euler", "shape=[3]"], "a sampler has no shape"),
                                         (["of_points"], "shape is missing"),
                                         (["Straight", "cond=labels:3"], "leave cond out")])
def test_bad_input_is_one_line(capsys, words, said):
    assert verify(*words) == InputError.exit_code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words, said", [
    (["model=ddpm", "data=toy", "model.num_steps=20"], ["the whole model: 6 passed", "a denoiser: 9 passed"]),
    (["model=energy", "data=toy"], ["an energy: 7 passed", "density integrates to one"]),
    (["model=score", "data=toy"], ["ScoreModel (2,), the whole model: 1 passed"]),
])
def test_models_that_are_no_flows(capsys, words, said):
    assert main(["verify", *words, "progress=false"]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in said)


def test_a_broken_model_is_named(capsys, monkeypatch):
    from genmodels.models.ddpm import DDPM

    encode = DDPM.encode
    monkeypatch.setattr(DDPM, "encode", lambda model, x: encode(model, x) + 0.1 * x.mean())
    assert main(["verify", "model=ddpm", "data=toy", "model.num_steps=20", "progress=false"]) == 1
    assert "batch size 1 against 64" in capsys.readouterr().err
