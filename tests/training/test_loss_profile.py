"""The loss profile: exact means and variances by log-SNR, in any order, resumed or not, and what a run logs of it."""

from __future__ import annotations

import csv
import math

import pytest
import torch

from genmodels.cli.main import main
from genmodels.training.loss_profile import LossProfile

CASES = {
    "inside": ([14.0, 13.6, 1.0, -0.1, -14.9], [1.0, 3.0, 5.0, 7.0, 11.0], 20),
    "beyond both ends": ([math.inf, 99.0, -99.0, -math.inf], [1.0, 2.0, 4.0, 8.0], 20),
    "on the edges": ([15.0, 0.0, -15.0], [1.0, 2.0, 4.0], 2),
    "one bin": ([3.0, -3.0, 0.0], [0.1, 0.2, 0.4], 1),
}


def brute_force(log_snr: list[float], losses: list[float], bins: int) -> dict[str, float]:
    """Figure by figure, with plain Python."""
    width, found = 30.0 / bins, {}
    for k in range(1, bins + 1):
        top, bottom = 15.0 - (k - 1) * width, 15.0 - k * width
        here = [
            loss for at, loss in zip(log_snr, losses, strict=True)
            if (at <= top or k == 1) and (at > bottom or k == bins)
        ]  # fmt: skip
        if here:
            mean = sum(here) / len(here)
            found[f"train_noise/{k}_of_{bins}"] = mean
            if len(here) > 1:
                found[f"train_noise_variance/{k}_of_{bins}"] = sum((x - mean) ** 2 for x in here) / len(here)
    return found


def forgetful(profile: LossProfile, log_snr, losses):
    """A planted bug: within one call a bin keeps its last loss only, as indexed assignment does."""
    share = ((15.0 - log_snr.double()) / 30.0).clamp(0, 1)
    chosen = (share * profile.bins).long().clamp(max=profile.bins - 1)
    profile.sums[:, chosen] += torch.stack([torch.ones_like(losses), losses, losses.square()]).double()


@pytest.mark.parametrize("case", CASES)
def test_figures_are_those_of_brute_force(case):
    log_snr, losses, bins = CASES[case]
    profile = LossProfile(bins)
    for part in (slice(0, 1), slice(1, None)):
        profile.add(torch.tensor(log_snr[part]), torch.tensor(losses[part], dtype=torch.float64))
    assert profile.figures() == pytest.approx(brute_force(log_snr, losses, bins), rel=1e-12, abs=1e-12)


def test_planted_bug_is_caught():
    log_snr, losses, bins = CASES["inside"]
    profile = LossProfile(bins)
    forgetful(profile, torch.tensor(log_snr), torch.tensor(losses, dtype=torch.float64))
    assert profile.figures() != pytest.approx(brute_force(log_snr, losses, bins), rel=1e-6)


def test_state_goes_on_where_it_stopped():
    log_snr, losses, bins = CASES["inside"]
    first, second = LossProfile(bins), LossProfile(bins)
    first.add(torch.tensor(log_snr[:2]), torch.tensor(losses[:2]))
    second.load_state_dict(first.state_dict())
    second.add(torch.tensor(log_snr[2:]), torch.tensor(losses[2:]))
    assert second.figures() == pytest.approx(brute_force(log_snr, losses, bins))


OBJECTIVES = {
    "simple": [],
    "vlb": ["model.objective=vlb"],
    "continuous, learned schedule": ["model.objective=continuous", "model.schedule=learned"],
    "hybrid": ["model.objective=hybrid", "model.variance=learned"],
    "no signal at the end": ["model.zero_terminal_snr=true"],
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_logs_it_and_its_mean_is_the_mean_loss(objective, tmp_path, monkeypatch):
    """Over all bins the losses counted between two validations are those that the run logged step by step."""
    seen, figures = [], LossProfile.figures
    monkeypatch.setattr(LossProfile, "figures", lambda self, sums: seen.append(sums.cpu()) or figures(self, sums))
    words = ["model=ddpm", "data=toy", "trainer=smoke", "trainer.max_steps=6", "trainer.validate_every_n_steps=3",
             "trainer.log_every_n_steps=1", "trainer.progress=false", "trainer.sample_every_n_steps=0",
             "data.n_train=64", "data.n_val=32", "data.n_test=32", "data.batch_size=32", "model.net.hidden=8",
             "logger=csv", f"run_dir={tmp_path / 'run'}"]  # fmt: skip
    assert main(["train", *words, *OBJECTIVES[objective]]) == 0
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert len(losses) == 6 and len(seen) == 2
    for sums, three in zip(seen, (losses[:3], losses[3:]), strict=True):
        assert int(sums[0].sum()) == 96
        assert float(sums[1].sum()) / 96 == pytest.approx(sum(three) / 3, rel=1e-5)
    logged = [{k: float(v) for k, v in row.items() if k.startswith("train_noise") and v} for row in rows]
    logged = [row for row in logged if row]
    assert len(logged) == 2
    for row, sums in zip(logged, seen, strict=True):
        assert row == pytest.approx(figures(LossProfile(), sums), rel=1e-5, abs=1e-5)
