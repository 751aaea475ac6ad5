"""Figures of several processes are those of one, no item is lost or counts twice, and finished parts are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from genmodels.core.data import DataSpec
from genmodels.core.errors import RunError
from genmodels.core.likelihood import Likelihood
from genmodels.core.processes import Ranks
from genmodels.data.speech import Speech
from genmodels.evaluation import likelihood, sample_quality
from genmodels.evaluation.checkpoint import Opened, Request
from genmodels.evaluation.evaluate import Evaluation
from genmodels.evaluation.features import Cache
from genmodels.evaluation.report import plain
from genmodels.models.build import build
from genmodels.models.ddpm import DDPM
from tests.gaussian_models import GaussianFlow, save
from tests.two_processes import fork, in_two

MEAN, COVARIANCE = [0.5, -1.0, 2.0], [[1.0, 0.5, 0.0], [0.5, 2.0, -0.3], [0.0, -0.3, 0.5]]
REQUEST = Request(limit=27, batch_size=4, sweeps=["temperature"], trust=["tests"])  # 7 batches, the last one short


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A Gaussian flow and 200 items drawn from it."""
    folder = tmp_path_factory.mktemp("flow")
    x = np.random.default_rng(0).multivariate_normal(MEAN, COVARIANCE, size=1000)
    np.savez(folder / "gauss.npz", x=x.astype("float32"))
    data = {"_target_": "genmodels.data.arrays.Arrays", "file": str(folder / "gauss.npz"), "test_fraction": 0.2}
    save(GaussianFlow(build(data).prepare().spec, mean=MEAN, covariance=COVARIANCE), folder / "best.ckpt", data)
    return folder / "best.ckpt"


def figures(ranks: Ranks, path: Path, cache: Path | None = None) -> dict | str | None:
    """The likelihoods of single items, and every figure of likelihood and samples; what was wrong, in words."""
    evaluation = Evaluation(Opened.open(path, REQUEST), Cache(cache), ranks=ranks)
    if ranks.rank:
        ranks.serve()
        return None
    try:
        evaluation.likelihood.run()
        evaluation.fidelity.run()
        evaluation.fidelity.sweeps()
    except RunError as error:
        return str(error)
    found = plain(evaluation.report)
    line, fidelity, (sweep,) = found["likelihood"][0], found["fidelity"], found["sweeps"]
    return {"nats": evaluation.arrays["nats_0"], "nll": line["nll"], "error": line["se_data"],
            "samples": evaluation.arrays["samples_x"], "copies": evaluation.arrays["neighbours_x"],
            "fidelity": {key: fidelity[key] for key in ("n", "kernel", "kernel_error", "precision", "recall")},
            "sweep": sweep["kernel"], "evaluations": sweep["evaluations"]}


def agree(one: dict, two: dict) -> bool:
    """Whether all figures are the same, float64 sums to 1e-9."""
    same = all(torch.equal(one[key], two[key]) for key in ("nats", "samples", "copies"))
    close = abs(one["nll"] - two["nll"]) < 1e-9 and abs(one["error"] - two["error"]) < 1e-9
    close &= np.allclose(list(one["fidelity"].values()), list(two["fidelity"].values()), rtol=0, atol=1e-9)
    return same and close and np.allclose(one["sweep"], two["sweep"], rtol=0, atol=1e-9)


@fork
def test_two_processes_find_what_one_does(checkpoint, tmp_path, monkeypatch):
    alone = figures(Ranks(), checkpoint)
    together, nothing = in_two(tmp_path / "two", figures, checkpoint)
    assert agree(alone, together) and nothing is None
    assert len(together["nats"]) == 27 and together["evaluations"] == alone["evaluations"] == [1.0] * 4

    # Mutants. A last batch that is padded, as training pads it; batches that only one of two has; sums in float32.
    evaluated = likelihood._likelihood
    monkeypatch.setattr(likelihood, "_likelihood", lambda model, batch, *more: evaluated(
        model, batch.rows(torch.arange(4).clamp(max=len(batch.x) - 1)), *more))
    assert "repeated [26]" in in_two(tmp_path / "padded", figures, checkpoint)[0]
    monkeypatch.undo()
    monkeypatch.setattr(Ranks, "share", lambda ranks, parts: parts[: len(parts) // 2 * 2][ranks.rank :: ranks.size])
    assert "evaluation lost items: missing [24, 25, 26]" in in_two(tmp_path / "lost", figures, checkpoint)[0]
    monkeypatch.undo()
    rough = alone | {"nll": -float(alone["nats"].float().cumsum(0)[-1] / 27)}
    assert not agree(alone, rough)


@fork
def test_samples_of_a_wrong_part_are_seen(checkpoint, tmp_path, monkeypatch):
    alone = figures(Ranks(), checkpoint)
    drawn = sample_quality.draw_parts
    monkeypatch.setattr(sample_quality, "draw_parts", lambda model, options, parts, **more: drawn(
        model, options, [range(0, len(part)) for part in parts], **more))  # every process begins at the first sample
    assert not agree(alone, in_two(tmp_path / "two", figures, checkpoint)[0])


def test_fewer_samples_may_be_compared_than_are_shown(checkpoint):
    """The closest pairs are of the samples that are compared, whatever stands nearer to training items among others."""
    request = replace(REQUEST, samples=9, force=True)
    evaluation = Evaluation(Opened.open(checkpoint, request), Cache(None), ranks=Ranks())
    evaluation.fidelity.run()
    shown, near = evaluation.arrays["samples_x"], evaluation.arrays["neighbours_x"]
    assert evaluation.report.fidelity.n == 9 and len(shown) == 64 and len(near) == 8
    assert all(bool((shown[:9] == one).all(1).any()) for one in near)


def test_what_was_finished_before_a_kill_is_not_computed_again(checkpoint, tmp_path, monkeypatch):
    seen, evaluated = [], likelihood._likelihood

    def count(model, batch, *arguments):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(batch.index.tolist())
        return evaluated(model, batch, *arguments)

    monkeypatch.setattr(likelihood, "_likelihood", count)
    with pytest.raises(KeyboardInterrupt):
        figures(Ranks(), checkpoint, tmp_path / "cache")
    assert len(seen) == 3
    seen[:] = []
    monkeypatch.setattr(likelihood, "_likelihood", lambda *given: seen.append(1) or evaluated(*given))
    found = figures(Ranks(), checkpoint, tmp_path / "cache")
    assert len(seen) == 4 and agree(found, figures(Ranks(), checkpoint))
    assert not list((tmp_path / "cache").glob("*_*.pt"))  # parts are forgotten when the whole is kept


def test_the_bracket_of_mels_is_in_the_unit_of_their_value():
    """Of two mels of one and two frames: log Z from 4 to 6 about 5 moves 120 cells' mean by 1/120."""
    made = {"log_z": 5.0, "log_z_stderr": 0.1, "log_z_least": 4.0, "log_z_most": 6.0, "reliable": True,
            "chains": 4, "steps": 3}
    found = Likelihood(torch.tensor([-100.0, -220.0]), "ais", torch.tensor([80, 160]), made=made)
    line = likelihood.row(found, Speech().prepare().spec)
    assert line.value == line.nll_per_dim == pytest.approx(320 / 240) and line.nll == 160
    assert (line.bracket.lower, line.bracket.upper) == pytest.approx((line.value - 1 / 120, line.value + 1 / 120))


def test_results_of_one_method_are_not_those_of_another():
    lines = [likelihood.Line("", method, {"seed": 0}) for method in ("log_likelihood", "ode_likelihood")]
    assert lines[0].settings != lines[1].settings


def test_only_the_bound_of_single_steps_limits_the_draws():
    model = DDPM(DataSpec("plane", (2,)), num_steps=5)

    def lines(bound: str) -> list:
        return likelihood.lines_of(Opened(Path(), model, {}, None, Request(draws=9, bound=bound, ode=False), 4))[0]

    assert [line.options["draws"] for line in lines("continuous")] == [9]
    for bound in ("auto", "both"):
        with pytest.raises(ValueError, match=r"draws must lie in 1\.\.4"):
            lines(bound)
