"""What an evaluation writes, keeps and replaces."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from genmodels.core.errors import RunError
from genmodels.core.processes import Ranks
from genmodels.evaluation.checkpoint import (
    Request,
)
from genmodels.evaluation.sample_quality import FidelityStage
from genmodels.report.compare import _held_in, compare
from tests.evaluation.command import evaluate, report
from tests.gaussian_models import GaussianFlow

pytestmark = pytest.mark.usefixtures("short_pilot")


def test_a_fuller_report_is_not_lost(gaussians, tmp_path):
    words = [f"ckpt={gaussians}/flow", f"out={tmp_path}/a.json"]
    evaluate(*words, "stages=[likelihood,cost]", cwd=tmp_path)
    full = report(tmp_path / "a.json")
    out, _ = evaluate(*words, "stages=[likelihood]", cwd=tmp_path)
    assert "a.json held cost too: kept as a_before.json" in out
    kept = report(tmp_path / "a_before.json")
    assert full["sampling"] == kept["sampling"] and not report(tmp_path / "a.json")["sampling"]
    assert kept["arrays"] == "a_before.npz" and all((tmp_path / f"a_before.{end}").exists() for end in ("npz", "html"))
    out, _ = evaluate(*words, "stages=[likelihood]", cwd=tmp_path)
    assert "kept as" not in out and report(tmp_path / "a_before.json") == kept


@pytest.mark.parametrize("name", ["a.json", "a.npz", "a.html"])
def test_files_next_to_a_report_that_are_of_none_are_kept(gaussians, tmp_path, name):
    (tmp_path / name).write_bytes(b"mine")
    _, err = evaluate(f"ckpt={gaussians}/flow", f"out={tmp_path}/a.json", "stages=[likelihood]", cwd=tmp_path, code=2)
    assert f"{name} is of no evaluation and would be replaced" in err
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, b"mine")]


@pytest.mark.parametrize("name", ["mine.npz", "mine.html"])
def test_files_next_to_a_table_that_are_of_no_evaluation_are_kept_too(gaussians, tmp_path, name):
    (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "table.json").write_text('{"rows": [], "models": []}')
    words = [f"ckpt={gaussians}/flow", f"out={tmp_path}/mine.json", "stages=[likelihood]"]
    _, err = evaluate(*words, cwd=tmp_path, code=2)
    assert f"{name} is of no evaluation and would be replaced" in err and (tmp_path / name).read_bytes() == b"mine"


def test_a_report_is_kept_for_a_likelihood_or_measures_of_samples_that_the_new_one_lacks(gaussians, tmp_path):
    words = [f"ckpt={gaussians}/diffusion", f"out={tmp_path}/a.json", "draws=2", "samples=4", "ode=false",
             "stages=[likelihood,fidelity]"]  # fmt: skip
    evaluate(*words, "bound=both", cwd=tmp_path)
    out, _ = evaluate(*words, "bound=discrete", cwd=tmp_path)
    assert "a.json held likelihood: bound, continuous time too: kept as a_before.json" in out
    out, _ = evaluate(*words, "bound=discrete", "seed=1", cwd=tmp_path)
    assert "kept as" not in out
    full = report(tmp_path / "a.json")
    measured, skipped = (_held_in(found) for found in (full, full | {"fidelity": {"skipped": "too few"}}))
    assert measured.beyond(skipped) == "fidelity too" and skipped.beyond(measured) == ""
    none = _held_in(full | {"likelihood": [], "seconds": {"fidelity": 1.0}})
    assert measured.beyond(none) == "likelihood too"


@pytest.mark.parametrize("name", ["table.csv", "table.json", "table.md", "report.html"])
def test_files_where_a_table_goes_that_are_of_none_are_kept(gaussians, tmp_path, name):
    shutil.copytree(gaussians / "flow", tmp_path / "again")
    words = [f"ckpt=[{gaussians}/flow,again]", "out=c", "stages=[likelihood]"]
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / name).write_bytes(b"\xe4,b,c\n1,2,3\n")
    _, err = evaluate(*words, cwd=tmp_path, code=2)
    assert f"{name} is of no evaluation and would be replaced: give out=<folder>" in err
    assert [path.name for path in (tmp_path / "c").iterdir()] == [name]
    (tmp_path / "c" / name).unlink()
    for _ in range(2):  # those of a table are replaced
        evaluate(*words, cwd=tmp_path)
    assert {path.name for path in (tmp_path / "c").iterdir()} >= {"table.csv", "table.json", "table.md", "report.html"}


def test_no_report_is_lost_to_parts_or_to_other_items(gaussians, tmp_path):
    words = [f"ckpt={gaussians}/flow", f"out={tmp_path}/a.json"]
    for stages in ("likelihood,cost", "likelihood", "cost"):
        evaluate(*words, f"stages=[{stages}]", cwd=tmp_path)
    held = {path.name: set(report(path)["seconds"]) for path in tmp_path.glob("*.json")}
    assert held == {"a.json": {"cost"}, "a_before.json": {"likelihood", "cost"}, "a_before2.json": {"likelihood"}}
    np.savez(tmp_path / "other.npz", x=np.random.default_rng(1).normal(size=(50, 3)).astype("float32"))
    other = [f"data.file={tmp_path}/other.npz", "data.test_fraction=0.5"]
    out, _ = evaluate(*words, "stages=[cost]", *other, cwd=tmp_path)
    assert "a.json held results of other items: kept as a_before3.json" in out
    assert report(tmp_path / "a.json")["data"]["name"] == "other" and "other, test split, 25 items" in out


def test_a_likelihood_is_kept_when_the_samples_fail(gaussians, tmp_path, monkeypatch, capsys):
    """And an earlier report is renamed, which the user is told."""
    def fail(self):
        raise RunError("sample 3 is not finite")

    (tmp_path / "r.json").write_text(json.dumps({"seconds": {"cost": 1.0}, "data": {"item_hash": "other items"}}))
    with monkeypatch.context() as patched:
        patched.setattr(FidelityStage, "run", fail)
        with pytest.raises(RunError, match="sample 3 is not finite .*what was done before is in .*r.json"):
            asked = Request(stages=["likelihood", "fidelity"], out=str(tmp_path / "r.json"), trust=["tests"], limit=20)
            compare([gaussians / "flow/best.ckpt"], asked, Ranks(), several=False, failures={})
    assert report(tmp_path / "r.json")["likelihood"][0]["kind"] == "exact"
    assert "held results of other items: kept as r_before.json" in capsys.readouterr().err


def test_an_interrupted_evaluation_keeps_what_is_finished(gaussians, tmp_path, monkeypatch):
    from genmodels.evaluation import cost

    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cost, "measure", stop)
    _, err = evaluate(f"ckpt={gaussians}/flow", "cache=false", f"out={tmp_path}/r.json", cwd=tmp_path, code=130)
    found = report(tmp_path / "r.json")
    assert found["partial"] and found["likelihood"][0]["nll"] > 0 and abs(found["fidelity"]["kernel"]) < 0.1
    assert found["sampling"] == {} and "interrupted" in err


def test_an_evaluation_interrupted_in_its_first_stage_leaves_the_report_as_it_was(gaussians, tmp_path, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    words = [f"ckpt={gaussians}/flow", "cache=false", "stages=[likelihood]", f"out={tmp_path}/r.json"]
    evaluate(*words, cwd=tmp_path, code=0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(GaussianFlow, "log_likelihood", stop)
    _, err = evaluate(*words, cwd=tmp_path, code=130)
    assert "interrupted: no stage was finished" in err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before and "r.json" in before


def test_tables_are_kept_like_reports(gaussians, tmp_path):
    words, out = [f"ckpt=[{gaussians}/flow,{gaussians}/diffusion]", "draws=2"], tmp_path / "t"
    evaluate(*words, "stages=[likelihood]", f"out={out}", cwd=tmp_path, code=0)
    names = ("table.json", "table.md", "table.csv", "report.html")
    first = {name: (out / name).read_bytes() for name in names}
    assert "test split, 200 items" in (out / "table.md").read_text().splitlines()[0]
    printed, _ = evaluate(*words, "stages=[likelihood]", "limit=20", f"out={out}", cwd=tmp_path, code=0)
    assert f"{out / 'table.json'} held results of other items: kept as table_before.json" in printed
    assert first == {name: (out / name.replace(".", "_before.")).read_bytes() for name in names}
    assert "test split, 20 items" in (out / "table.md").read_text()
    printed, _ = evaluate(*words, "stages=[likelihood,checks]", "limit=20", f"out={out}", cwd=tmp_path, code=0)
    assert "kept as" not in printed  # the same items and models, and one stage more
    shutil.copytree(gaussians / "flow", tmp_path / "copy")
    words = [f"ckpt=[{gaussians}/flow,{tmp_path}/copy]"]
    printed, _ = evaluate(*words, "stages=[likelihood,checks]", "limit=20", f"out={out}", cwd=tmp_path, code=0)
    assert "table.json held" in printed and "diffusion" in printed and "kept as table_before2.json" in printed
    assert first["table.json"] == (out / "table_before.json").read_bytes()


def test_reports_that_would_share_a_file_are_numbered(gaussians, tmp_path):
    for place in ("a", "b", "c"):
        shutil.copytree(gaussians / "flow", tmp_path / place / "run")
    checkpoints = ",".join(f"{tmp_path}/{place}/run" for place in "abc")
    evaluate(f"ckpt=[{checkpoints}]", "stages=[likelihood]", "limit=20", f"out={tmp_path}/t", cwd=tmp_path, code=0)
    found = sorted(file.name for file in (tmp_path / "t" / "run").glob("*.json"))
    assert found == ["report_first20.json", "report_first20_2.json", "report_first20_3.json"]


def test_a_table_of_one_run_leaves_its_page(gaussians, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(gaussians / "flow", run)
    shutil.copy(run / "best.ckpt", run / "last.ckpt")
    words = ["stages=[likelihood]", "limit=20"]
    evaluate(f"ckpt={run}", "stages=[likelihood]", cwd=tmp_path, code=0)
    page = (run / "report.html").read_bytes()
    printed, _ = evaluate(f"ckpt=[{run}/best.ckpt,{run}/last.ckpt]", *words, cwd=tmp_path, code=0)
    assert (run / "report.html").read_bytes() == page
    assert f"table: {run / 'comparison' / 'table.md'}" in printed and (run / "comparison" / "report.html").exists()
    assert (run / "report_first20.json").exists() and (run / "report_last_first20.json").exists()


def test_a_table_renews_the_pages_of_its_models(gaussians, tmp_path):
    """The report is replaced, and its page would show other values."""
    for place in ("a", "b"):
        shutil.copytree(gaussians / "flow", tmp_path / place, ignore=shutil.ignore_patterns("report*"))
    evaluate(f"ckpt={tmp_path}/a", "stages=[likelihood]", cwd=tmp_path)
    page = tmp_path / "a" / "report.html"
    before = page.read_text()
    page.write_text("of older weights")
    evaluate(f"ckpt=[{tmp_path}/a,{tmp_path}/b]", "stages=[likelihood]", cwd=tmp_path)
    assert len(page.read_text()) > 0.9 * len(before) and "<html" in page.read_text()
    assert not (tmp_path / "b" / "report.html").exists() and (tmp_path / "report.html").exists()


def test_points_of_a_sweep_have_reports_of_their_own(gaussians, tmp_path):
    words = [f"ckpt={gaussians}/flow", "stages=[likelihood]", "limit=20"]
    evaluate("-m", *words, "seed=0,1", cwd=tmp_path, code=0)
    found = [report(path) for path in sorted((gaussians / "flow").glob("report_first20_seed-?.json"))]
    assert len(found) == 2 and found[0]["likelihood"][0]["nll"] == pytest.approx(found[1]["likelihood"][0]["nll"])


def test_an_interruption_keeps_the_models_before(gaussians, tmp_path, monkeypatch):
    from genmodels.evaluation import cost

    measure, calls = cost.measure, []

    def stop_at_the_second(*arguments, **options):
        calls.append(arguments)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(cost, "measure", stop_at_the_second)
    words = [f"ckpt=[{gaussians}/flow,{gaussians}/diffusion]", "cache=false", f"out={tmp_path}/r"]
    evaluate(*words, "stages=[cost]", cwd=tmp_path, code=130)
    assert report(tmp_path / "r" / "flow" / "report.json")["sampling"]
