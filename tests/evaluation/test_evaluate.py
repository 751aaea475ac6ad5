"""The reference models against brute force."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator

from genmodels.cli.main import main
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError
from genmodels.core.likelihood import Likelihood
from genmodels.core.processes import Ranks
from genmodels.core.random import KeyedGenerator
from genmodels.data.arrays import Arrays
from genmodels.data.speech import Speech
from genmodels.data.text import TextFile
from genmodels.data.toy import Toy, density
from genmodels.data.vision import Digits
from genmodels.energy import LogPartition
from genmodels.evaluation.checkpoint import (
    EvaluationState,
    Opened,
    Request,
    _require_same_division,
    fits,
    require_same_items,
)
from genmodels.evaluation.evaluate import (
    PixelHistogram,
    best_histogram,
    check_options,
    references,
)
from genmodels.evaluation.features import Cache
from genmodels.evaluation.likelihood import LikelihoodStage, row
from genmodels.evaluation.report import faults, notes_on, plain
from genmodels.evaluation.sample_quality import FidelityStage, sample_parts
from genmodels.models.build import build
from genmodels.models.checkpoint import load_model
from genmodels.models.ddpm import DDPM
from genmodels.models.density import extent_of, on_grid
from genmodels.models.energy import EnergyModel
from genmodels.models.energy_sampling import STEPS
from genmodels.models.masked_diffusion import MaskedDiffusionModel
from genmodels.models.mels import NOISE, even_lengths, with_noise
from genmodels.models.normalizing_flows import NSF, RealNVP, TarFlow
from genmodels.models.score import ScoreModel
from genmodels.report import schema
from genmodels.report.compare import _held_in, compare
from genmodels.speech.audio import write_wav
from genmodels.verification.check import run_check
from genmodels.verification.checkpoints import DENSITY_CHECKS
from tests.gaussian_models import GaussianDiffusion, GaussianEnergy, GaussianFlow, log_prob, moments, save
from tests.parameters import scattered
from tests.two_processes import by_forks, fork

pytestmark = pytest.mark.usefixtures("short_pilot")


def test_the_histogram_counts():
    generator = torch.Generator().manual_seed(0)
    train = torch.randint(0, 5, (40, 1, 2, 2), generator=generator)
    test = torch.randint(0, 5, (7, 1, 2, 2), generator=generator)
    model = PixelHistogram(train, levels=5, smoothing=0.5)
    for item, value in zip(test, model.log_prob(test), strict=True):
        expected = 0.0
        for i in range(2):
            for j in range(2):
                count = sum(int(t[0, i, j]) == int(item[0, i, j]) for t in train)
                expected += math.log((count + 0.5) / (40 + 2.5))
        assert math.isclose(float(value), expected, rel_tol=1e-12)


def test_its_masses_sum_to_one():
    train = torch.tensor([[0, 2], [1, 2]])
    every = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    assert math.isclose(float(PixelHistogram(train, 3).log_prob(every).exp().sum()), 1.0, rel_tol=1e-12)


def test_smoothing_is_chosen_on_validation_data():
    train = torch.zeros(50, 1, dtype=torch.long)
    assert best_histogram(train, torch.zeros(9, 1, dtype=torch.long), 2).log_prob(torch.zeros(1, 1)).item() > -0.01
    surprised = best_histogram(train, torch.tensor([[0], [1]]), 2)
    assert surprised.log_prob(torch.ones(1, 1)).item() > math.log(3 / 60)


def test_the_histogram_has_its_error_over_the_items():
    data = Digits().prepare()
    uniform, found = references(data, "test", data.spec, 100)
    train, val, test = (torch.cat([b.x for b in data.loader(name, 4096)]) for name in ("train", "val", "test"))
    bits = -best_histogram(train, val, 17).log_prob(test[:100]) / 64 / math.log(2)
    assert math.isclose(found.value, float(bits.mean()), rel_tol=1e-12)
    assert math.isclose(found.error, float(bits.std() / 10), rel_tol=1e-9) and uniform.error is None


def test_frequencies_of_bytes_against_counting(tmp_path):
    (tmp_path / "a.txt").write_text("abracadabra, abracadabra. " * 12)
    data = TextFile(file=str(tmp_path / "a.txt"), length=8).prepare()
    train, test = (next(iter(data.loader(name, 1000))).x[:, 0].tolist() for name in ("train", "test"))
    uniform, single, pairs = references(data, "test", data.spec)

    def p(b):
        return (sum(row.count(b) for row in train) + 1) / (8 * len(train) + 256)

    def after(a, b):
        both = sum((x, y) == (a, b) for row in train for x, y in zip(row, row[1:], strict=False))
        return (both + 16 * p(b)) / (sum(row[:-1].count(a) for row in train) + 16)

    bits = [-sum(math.log2(p(b)) for b in row) / 8 for row in test]
    assert uniform.value == 8 and single.unit == "bits_per_character"
    assert math.isclose(single.value, sum(bits) / len(bits), rel_tol=1e-12)
    bits = [-(math.log2(p(row[0])) + sum(math.log2(after(*two)) for two in zip(row, row[1:], strict=False))) / 8
            for row in test]
    assert math.isclose(pairs.value, sum(bits) / len(bits), rel_tol=1e-12) and pairs.error > 0


def test_the_reference_of_mels_has_its_error_over_items_of_unlike_length():
    """Against a loop over items: a ratio of sums, and its error by leaving out one item after the other."""
    def cells_of(split):
        for batch in data.loader(split, 1):
            batch = even_lengths(batch)
            noisy = with_noise(batch.x, NOISE, KeyedGenerator(0, batch.index, "likelihood"))
            yield noisy[0, :, batch.mask[0, 0]].double()

    data = Speech().prepare()
    (found,) = references(data, "test", data.spec)
    bands = [torch.cat(rows) for rows in zip(*cells_of("train"), strict=True)]
    moments = [(float(band.mean()), float(band.std(correction=0))) for band in bands]
    costs, cells = [], []
    for noisy in cells_of("test"):
        costs.append(sum(float(((row - m) ** 2 / (2 * s * s)).sum()) + len(row) * math.log(s * math.sqrt(2 * math.pi))
                         for row, (m, s) in zip(noisy, moments, strict=True)))
        cells.append(noisy.numel())
    assert math.isclose(found.value, sum(costs) / sum(cells), rel_tol=1e-6)
    n = len(costs)
    left = torch.tensor([(sum(costs) - c) / (sum(cells) - d) for c, d in zip(costs, cells, strict=True)])
    jackknife = float(((n - 1) / n * (left - left.mean()).square().sum()).sqrt())
    assert n == 4 and len(set(cells)) == 4 and math.isclose(found.error, jackknife, rel_tol=0.25)


MEAN, COVARIANCE = [0.5, -1.0, 2.0], [[1.0, 0.5, 0.0], [0.5, 2.0, -0.3], [0.0, -0.3, 0.5]]
FAMILIES = {"flow": (GaussianFlow, {}), "diffusion": (GaussianDiffusion, {"num_steps": 60, "variance": "beta"}),
            "energy": (GaussianEnergy, {})}
QUICK = ["chains=64", "densities=40", "stages=[likelihood]"]


def evaluate(*words: str, cwd: Path, code: int = 0) -> tuple[str, str]:
    """Standard output and error of a command run in this process."""
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            found = main(["evaluate", *words, "trust=[tests]"])
    finally:
        os.chdir(before)
    assert found == code, err.getvalue()
    return out.getvalue(), err.getvalue()


SCHEMA = Draft202012Validator(schema())


def report(path: Path) -> dict:
    """A report, which keeps to its schema, or a table."""
    found = json.loads(path.read_text())
    if path.name != "table.json":
        SCHEMA.validate(found)
    return found


@pytest.fixture(scope="module")
def gaussians(tmp_path_factory) -> Path:
    """One Gaussian as three checkpoints, and 200 test items drawn from it."""
    folder = tmp_path_factory.mktemp("gaussians")
    x = np.random.default_rng(0).multivariate_normal(MEAN, COVARIANCE, size=1000)
    np.savez(folder / "gauss.npz", x=x.astype("float32"))
    data = {"_target_": "genmodels.data.arrays.Arrays", "file": str(folder / "gauss.npz"), "test_fraction": 0.2,
            "seed": 0}  # fmt: skip
    spec = build(data).prepare().spec
    for name, (kind, options) in FAMILIES.items():
        save(kind(spec, mean=MEAN, covariance=COVARIANCE, **options), folder / name / "best.ckpt", data)
    return folder


@pytest.fixture(scope="module")
def truth(gaussians) -> float:
    data = {"_target_": "genmodels.data.arrays.Arrays", "file": str(gaussians / "gauss.npz"), "test_fraction": 0.2}
    x = next(iter(build(data).prepare().loader("test", 1000))).x
    return -float(log_prob(x, *moments(MEAN, COVARIANCE)).mean())


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


def test_items_that_a_model_was_trained_on_are_not_held_out(gaussians, tmp_path):
    for word in ("data.seed=5", "data.test_fraction=0.3"):
        _, err = evaluate(f"ckpt={gaussians}/flow", word, cwd=tmp_path, code=2)
        assert f"{word} divides gauss anew and would hold out items that the model was trained on" in err
    words = ["data.test_fraction=0.2", "stages=[cost]", f"out={tmp_path}/a.json"]
    evaluate(f"ckpt={gaussians}/flow", *words, cwd=tmp_path)


@pytest.mark.parametrize("rows, order, asked, said", [
    (60, "abc", {}, None), (60, "abc", {"batch_size": 5}, None), (61, "abc", {}, "has changed since training"),
    (61, "abc", {"file": "t.csv"}, None), (60, "abd", {"file": "t.csv"}, "columns are a, b, d.* built for a, b, c"),
    (-60, "abc", {}, "has changed since training"),
])  # fmt: skip
def test_a_table_that_changed_since_training_is_refused(tmp_path, rows, order, asked, said):
    file, x = tmp_path / "t.csv", np.random.default_rng(0).normal(size=(61, 3))

    def data(rows, order):
        chosen = x[:rows] if rows > 0 else x[:-rows][::-1]  # of the same items in another order other ones are held out
        np.savetxt(file, chosen, delimiter=",", header=",".join(order), comments="")
        return Arrays(file=str(file)).prepare()

    trained, found = SimpleNamespace(spec=data(60, "abc").spec, num_classes=None), data(rows, order)
    expected = contextlib.nullcontext() if said is None else pytest.raises(InputError, match=said)
    with expected:
        require_same_items(trained, found, asked)


def test_one_changed_value_of_a_long_table_is_noticed_and_an_earlier_fingerprint_accepted(tmp_path):
    file, x = tmp_path / "t.npy", np.random.default_rng(0).normal(size=(5000, 2)).astype(np.float32)
    np.save(file, x)
    trained = SimpleNamespace(spec=Arrays(file=str(file)).prepare().spec, num_classes=None)
    for changes in (1, 2502, 4998):
        changed = x.copy()
        changed[changes, 1] += 1e-3
        np.save(file, changed)
        with pytest.raises(InputError, match="has changed since training"):
            require_same_items(trained, Arrays(file=str(file)).prepare(), {})
    former = replace(trained.spec, fingerprint=trained.spec.fingerprint.partition(", all of them")[0])
    np.save(file, x)
    require_same_items(SimpleNamespace(spec=former, num_classes=None), Arrays(file=str(file)).prepare(), {})


def clips(folder: Path, lengths: list[int]) -> Path:
    """A manifest of clips of so many samples, by two speakers."""
    lines = []
    for number, length in enumerate(lengths):
        write_wav(folder / f"{number}.wav", 0.1 * torch.randn(length, generator=torch.Generator().manual_seed(number)),
                  16_000)
        lines.append(f"{number}.wav|Say {chr(97 + number % 26)}.|{'anna' if number % 2 else 'ben'}")
    (folder / "list.txt").write_text("\n".join(lines))
    return folder / "list.txt"


def test_options_that_leave_items_out_divide_the_rest_anew_and_are_refused(tmp_path):
    root = clips(tmp_path, [8000 + 1000 * number for number in range(30)])
    trained = Speech(root=str(root), layout="manifest").prepare()
    model = SimpleNamespace(spec=trained.spec, num_classes=None)
    require_same_items(model, Speech(root=str(root), layout="manifest", batch_size=3).prepare(), {"batch_size": 3})
    with pytest.warns(UserWarning, match="left out"):
        fewer = Speech(root=str(root), layout="manifest", max_seconds=1.5, skip_bad=True).prepare()
    items = [{item.name for item in data.split("train").items} for data in (trained, fewer)]
    assert {item.name for name in ("val", "test") for item in fewer.split(name).items} & items[0]  # which is why
    with pytest.raises(InputError, match="has changed since training .*data.max_seconds=1.5"):
        require_same_items(model, fewer, {"max_seconds": 1.5, "skip_bad": True})
    former = replace(trained.spec, fingerprint=trained.spec.fingerprint.partition(", clips")[0])  # of former versions
    require_same_items(SimpleNamespace(spec=former, num_classes=None), trained, {})


@pytest.mark.parametrize("change, said", [
    ({}, None), ({"symbols": "ipa"}, "in other symbols"), ({"blanks": False}, "other symbols"),
    ({"speakers": ["ben", "anna"]}, "speakers is"),
])  # fmt: skip
def test_texts_in_other_symbols_and_of_other_speakers_do_not_fit(tmp_path, change, said):
    root = clips(tmp_path, [8000] * 12)
    trained = Speech(root=str(root), layout="manifest", blanks=True).prepare().spec
    found = replace(trained)
    if "symbols" in change:
        found = replace(trained, text=trained.text | {"symbols": ["a"]})
    elif "blanks" in change:
        found = Speech(root=str(root), layout="manifest", blanks=False).prepare().spec
    elif "speakers" in change:
        found = replace(trained, speakers=("ben", "anna", "zoe"))
    with contextlib.nullcontext() if said is None else pytest.raises(InputError, match=said):
        fits(SimpleNamespace(spec=trained, num_classes=None), found)


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


@pytest.mark.parametrize("words, said", [
    (["features=classifier"], "features=classifier needs labels"),
    (["features=random-conv"], "features=random-conv is for"),
    (["samples=3", "force=true"], "3 items are too few to compare: at least 4"),
])  # fmt: skip
def test_samples_that_cannot_be_compared_are_refused_before_anything_is_computed(gaussians, tmp_path, words, said):
    _, err = evaluate(f"ckpt={gaussians}/flow", *words, "stages=[likelihood,fidelity]", f"out={tmp_path}/r.json",
                      cwd=tmp_path, code=2)
    assert said in err and not (tmp_path / "r.json").exists()


def test_the_cost_is_that_of_the_batch_that_is_named(gaussians, tmp_path):
    evaluations = []
    for size in (8, 64):
        evaluate(f"ckpt={gaussians}/energy", "stages=[cost]", "limit=20", f"batch_size={size}", "steps=5",
                 f"out={tmp_path}/{size}.json", cwd=tmp_path)
        found = report(tmp_path / f"{size}.json")["sampling"]
        assert found["batch_size"] == min(size, 16)
        evaluations.append(found["evaluations"])
    assert evaluations[0] == pytest.approx(evaluations[1], rel=0.05)


class Mirrored(Arrays):
    """A data set that hands its options on, as CIFAR-10 does."""

    def __init__(self, **shared):
        super().__init__(**shared)


@pytest.mark.parametrize("asked, refused", [
    ({"seed": 5}, True), ({"seed": 0}, False), ({"root": "elsewhere"}, False), ({"seed": 5, "file": "b.npz"}, False),
])  # fmt: skip
def test_every_data_set_is_divided_as_in_training(gaussians, asked, refused):
    data = Mirrored(file=str(gaussians / "gauss.npz")).prepare()
    expected = pytest.raises(InputError, match="divides gauss anew") if refused else contextlib.nullcontext()
    with expected:
        _require_same_division(data, {"seed": 0}, asked)
    _require_same_division(Toy(n_train=9, n_val=9, n_test=9).prepare(), {"seed": 0}, {"seed": 5})  # draws other points


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(gaussians, tmp_path, monkeypatch):
    from genmodels.models import checkpoint

    shutil.copytree(gaussians / "flow", tmp_path / "run")
    load = checkpoint.load_model

    def replaced(path, **options):
        found = load(path, **options)
        shutil.copy(gaussians / "diffusion" / "best.ckpt", path)
        return found

    monkeypatch.setattr(checkpoint, "load_model", replaced)
    _, err = evaluate(f"ckpt={tmp_path}/run", "stages=[likelihood]", cwd=tmp_path, code=1)
    assert "was replaced while it was read: evaluate again" in err


def test_samples_are_not_compared_with_training_items(gaussians, tmp_path):
    words = [f"ckpt={gaussians}/flow", "split=train", "stages=[fidelity]", f"out={tmp_path}/a.json"]
    out, _ = evaluate(*words, cwd=tmp_path)
    assert "compared with held-out items: split=test or split=val" in out
    assert "skipped" in report(tmp_path / "a.json")["fidelity"]


def test_one_gaussian_as_flow_diffusion_and_energy_has_one_value(gaussians, truth, tmp_path):
    out, _ = evaluate(f"ckpt=[{gaussians}/flow,{gaussians}/diffusion,{gaussians}/energy]", *QUICK, f"out={tmp_path}/t",
                      cwd=tmp_path)
    table = report(tmp_path / "t" / "table.json")
    lines = {line["kind"]: line for model in table["models"] for line in model["likelihood"]}
    assert set(lines) == {"exact", "lower_bound", "ode", "ais"}
    assert lines["exact"]["nll"] == pytest.approx(truth, abs=1e-5)
    assert lines["ode"]["nll"] == pytest.approx(truth, abs=1e-3)
    assert truth < lines["lower_bound"]["nll"] < truth + 0.3
    assert abs(lines["ais"]["nll"] - truth) < 4 * lines["ais"]["se_log_z"] < 1
    assert lines["ais"]["optimistic"] and lines["ais"]["se_data"] > lines["exact"]["se_data"]
    for cell in ("= 4.", "<= ", "~ 4.", "~? 4.", "optimistic", "not ranked"):
        assert cell in out
    assert [row["cells"][COLUMN["rank"]] for row in table["rows"]] == [""] * 4
    for name in ("table.md", "table.csv", "report.html"):
        assert (tmp_path / "t" / name).stat().st_size > 200


COLUMN = {"rank": 9}


@pytest.mark.parametrize("chains, reliable", [(4, False), (64, True)])
def test_log_z_is_given_in_one_statement(gaussians, tmp_path, chains, reliable):
    """The bracket that is printed holds the estimate that is printed, and too few chains are named everywhere."""
    out, _ = evaluate(f"ckpt={gaussians}/energy", f"chains={chains}", "densities=30", "stages=[likelihood]",
                      f"out={tmp_path}/r.json", cwd=tmp_path)
    z, least, most = map(float, re.search(r"log Z (\S+) \+- \S+, in (\S+) to (\S+) nats", out).groups())
    value = float(re.search(r"~\? ([0-9.]+)\(", out).group(1))
    low, high = map(float, re.search(r"by log Z alone (\S+) to (\S+), at 95 %", out).groups())
    assert least < z < most and low < value < high
    card = re.search(r'<ul class="headline">.*?</ul>', (tmp_path / "r.html").read_text(), re.S).group(0)
    for place in (out, card):
        assert ("nreliable: 4 of 4 chains count, at least 20 should: more chains=" in place) is not reliable
    assert ("ais, optimistic, unreliable" in out) is not reliable


def test_a_value_that_both_directions_deny_is_not_printed(gaussians, tmp_path, monkeypatch):
    """Reverse chains a nat too low: the bracket alone, no rank, and one check that fails."""
    found = LogPartition.of_weights
    monkeypatch.setattr(LogPartition, "of_weights", lambda w, back, *given, **more: found(w, w - 1, *given, **more))
    out, err = evaluate(f"ckpt=[{gaussians}/energy,{gaussians}/flow]", "chains=64", "densities=30", "cache=false",
                        "stages=[likelihood]", "rank=across", f"out={tmp_path}/t", cwd=tmp_path)
    table = report(tmp_path / "t" / "table.json")
    (line,) = table["models"][0]["likelihood"]
    assert line["nll"] is None and line["bracket"]["lower"] < line["bracket"]["upper"] and not table["ranking"]
    shown = f"~? {line['bracket']['lower']:.4f} to {line['bracket']['upper']:.4f}"
    assert shown in out and "log Z in " in out and "forward and reverse chains disagree: more densities=" in out
    assert shown[3:] in (tmp_path / "t" / "report.html").read_text() and not line["worst"]


class TooMuch(GaussianFlow):
    """Mutant: seven percent too much density everywhere."""

    def log_likelihood(self, batch, **options):
        found = super().log_likelihood(batch, **options)
        found.nats += math.log(1.07)
        return found


@pytest.mark.parametrize("correlation", [0.0, 0.99999])
@pytest.mark.parametrize("kind", [GaussianFlow, TooMuch])
def test_a_density_of_the_plane_is_integrated_where_its_mass_is(tmp_path, kind, correlation):
    """Few test items make a small map: the integral is that of the whole density, and it can fail."""
    covariance = [[1.0, correlation], [correlation, 1.0]]
    x = np.random.default_rng(0).multivariate_normal([0, 0], covariance, size=60)
    np.savez(tmp_path / "few.npz", x=x.astype("float32"))
    data = build({"_target_": "genmodels.data.arrays.Arrays", "file": str(tmp_path / "few.npz")}).prepare()
    model = kind(data.spec, mean=[0.0, 0.0], covariance=covariance)
    points = next(iter(data.loader("test", 60))).x
    x0, x1, y0, y1 = extent = extent_of(points)
    inside = float(on_grid(model, extent, 160).exp().sum()) * (x1 - x0) * (y1 - y0) / 160**2
    subject = SimpleNamespace(model=model, points=points, seed=0, weights="raw", options={})
    check = run_check(DENSITY_CHECKS.specs["density integrates to one"], subject)
    assert (inside < 0.96 or correlation) and (check.status == "passed") is (kind is GaussianFlow)


def test_the_bound_of_infinitely_many_steps_has_a_line(gaussians, truth, tmp_path):
    out, _ = evaluate(f"ckpt={gaussians}/diffusion", "bound=both", "draws=14", "ode=false", "stages=[likelihood]",
                      f"out={tmp_path}/r.json", cwd=tmp_path)
    discrete, continuous = report(tmp_path / "r.json")["likelihood"]
    assert "14 of 59 terms" in out and "continuous time, 14 strata" in out
    assert truth < continuous["nll"] + 4 * continuous["se_mc"] and continuous["se_mc"] < 0.3
    assert continuous["nll"] < discrete["nll"] + 4 * math.hypot(continuous["se_mc"], discrete["se_mc"])
    _, err = evaluate(f"ckpt={gaussians}/flow", "bound=both", cwd=tmp_path, code=2)
    assert "bound is for diffusion bounds" in err


def test_the_kinds_that_a_rank_across_mixes_are_named(gaussians, tmp_path):
    out, _ = evaluate(f"ckpt=[{gaussians}/flow,{gaussians}/energy]", *QUICK, "rank=across", cwd=tmp_path)
    assert "ranks mix kinds: ais flatters" in out and "ranks mix kinds: exact" in out


def test_steps_are_for_the_models_of_a_table_that_take_them(gaussians, tmp_path):
    evaluate(f"ckpt=[{gaussians}/flow,{gaussians}/diffusion]", "steps=5", "samples=64", "stages=[fidelity,cost]",
             f"out={tmp_path}/t", cwd=tmp_path)
    table = report(tmp_path / "t" / "table.json")
    assert [model["sampling"]["evaluations"] for model in table["models"]] == [1, 5] and not table["failures"]


def test_the_others_are_evaluated_where_one_cannot_be(gaussians, tmp_path):
    data = {"_target_": "genmodels.data.arrays.Arrays", "file": str(tmp_path / "gone.npz"), "test_fraction": 0.2}
    spec = DataSpec("gauss", (3,))
    save(GaussianFlow(spec, mean=MEAN, covariance=COVARIANCE), tmp_path / "lost" / "best.ckpt", data)
    words = [f"ckpt=[{tmp_path}/lost,{gaussians}/flow]", QUICK[-1], f"out={tmp_path}/t"]
    out, err = evaluate(*words, cwd=tmp_path, code=1)
    assert "= 4." in out and "gone.npz" in err.splitlines()[-1]
    table = report(tmp_path / "t" / "table.json")
    assert len(table["models"]) == 1 and "gone.npz" in table["failures"][0]["message"]
    _, err = evaluate(f"ckpt={tmp_path}/lost", QUICK[-1], cwd=tmp_path, code=2)
    assert "gone.npz" in err


@fork
@pytest.mark.parametrize("family", ["flow", pytest.param("diffusion", marks=pytest.mark.slow)])
def test_figures_do_not_depend_on_batch_size_or_processes(gaussians, tmp_path, family, monkeypatch):
    """The second process is a fork of this one: that `launch` starts new ones is shown by tests/core."""
    by_forks(monkeypatch)
    values = []
    for words in (["batch_size=1"], ["batch_size=64"], ["batch_size=1", "processes=2"]):  # 25 batches to share
        name = "_".join(words).replace("=", "-")
        own = ["draws=3", "ode=false"] if family == "diffusion" else []
        evaluate(f"ckpt={gaussians}/{family}", *words, *own, "limit=25", "stages=[likelihood]", "cache=false",
                 f"out={tmp_path}/{name}.json", cwd=tmp_path)
        with np.load(tmp_path / f"{name}.npz") as arrays:
            values.append(arrays["nats_0"])
    assert np.abs(values[0] - values[1]).max() < 3e-5 and np.abs(values[0] - values[2]).max() < 1e-5


def test_fewer_samples_are_compared_than_shown(gaussians, tmp_path):
    """Of the 64 samples drawn for the grid the closest pairs are among the 20 that are compared."""
    evaluate(f"ckpt={gaussians}/flow", "samples=20", "stages=[fidelity]", f"out={tmp_path}/r.json", cwd=tmp_path)
    found, arrays = report(tmp_path / "r.json"), np.load(tmp_path / "r.npz")
    distance = np.linalg.norm(arrays["neighbours_x"] - arrays["neighbours_train"], axis=1)
    assert found["fidelity"]["n"] == 20 and np.allclose(distance, found["neighbours"]["distance"], atol=1e-5)
    first = arrays["samples_x"][:20]
    assert all((first == x).all(1).any() for x in arrays["neighbours_x"])


def test_only_the_samples_to_show_are_kept(gaussians):
    """A slice of a part would hold the memory of all its samples, and be stored with it."""
    opened = Opened.open(gaussians / "flow" / "best.ckpt", Request(trust=["tests"], cache=False))
    parts = sample_parts(EvaluationState(opened, Cache(None), {}, Ranks()), "key", 200, {}, "")
    assert [len(parts[k]["x"]) for k in sorted(parts)] == [64, 0, 0, 0]
    assert all(part["x"].untyped_storage().nbytes() == part["x"].nbytes for part in parts.values())


def test_checks_of_the_likelihood_are_not_lost_to_the_cache(gaussians, tmp_path, monkeypatch):
    """Checks without the stage of likelihoods, which cannot compare both directions of log Z, are others."""
    monkeypatch.setitem(STEPS, "annealed", 5)  # of the samples that another check draws
    words = [f"ckpt={gaussians}/energy", "normaliser=ais", "chains=16", "densities=8"]
    for stages, expected in (("checks", False), ("likelihood,checks", True)):
        evaluate(*words, f"stages=[{stages}]", f"out={tmp_path}/{len(stages)}.json", cwd=tmp_path)
        names = [check["name"] for check in report(tmp_path / f"{len(stages)}.json")["checks"]]
        assert ("forward log Z <= reverse" in names) == expected


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """An untrained flow of digits conditioned on classes."""
    folder = tmp_path_factory.mktemp("digits")
    data = {"_target_": "genmodels.data.vision.Digits"}
    spec = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
    model = RealNVP(spec, layout=["checkerboard*2"], hidden=4, depth=1, class_conditional=True, ema_decay=0)
    model.initialize(next(iter(build(data).prepare().loader("train", 64))))
    save(model, folder / "best.ckpt", data)
    return folder


def test_other_data_that_are_missing_are_said_before_the_likelihoods(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(LikelihoodStage, "run", lambda stage: pytest.fail("the likelihoods were computed first"))
    _, err = evaluate(f"ckpt={digits}", "ood=arrays", "ood_data.file=nowhere.npz", "device=cpu", cwd=tmp_path, code=2)
    assert err.count("\n") == 1 and "nowhere.npz does not exist" in err


def test_other_data_against_a_single_item(digits, tmp_path):
    out, _ = evaluate(f"ckpt={digits}", "ood=noise", "limit=1", "stages=[likelihood]", f"out={tmp_path}/r.json",
                      cwd=tmp_path)
    found = report(tmp_path / "r.json")["ood"][0]
    assert found["auroc"] is not None and list(found["scores"]) == ["less_complexity"]
    assert found["said"].endswith("no typicality, which needs two items") and "nan" not in out


def labelled(folder, x, y, **options):
    """An untrained flow of a labelled table, conditioned on its classes, in a folder with its data."""
    np.savez(folder / "table.npz", x=x.astype(np.float32), y=y)
    data = {"_target_": "genmodels.data.arrays.Arrays", "file": str(folder / "table.npz")}
    prepared = build(data).prepare()
    model = NSF(prepared.spec, layers=1, hidden=8, class_conditional=True, ema_decay=0, **options)
    model.initialize(next(iter(prepared.loader("train", 64))))
    save(model, folder / "best.ckpt", data)
    return prepared


def test_classes_of_other_frequencies(tmp_path):
    """Samples have the classes of the items that they are compared with; a density of each class has no map."""
    y = np.arange(800) % 10 == 0
    prepared = labelled(tmp_path, np.random.default_rng(0).normal(size=(800, 2)) + 8 * y[:, None], y.astype(int))
    test = prepared.items("test")
    evaluate(f"ckpt={tmp_path}/best.ckpt", "stages=[likelihood,fidelity,checks]", f"samples={len(test)}", "force=true",
             f"out={tmp_path}/r.json", cwd=tmp_path)
    found, arrays = report(tmp_path / "r.json"), np.load(tmp_path / "r.npz")
    classes = arrays["samples_cond"].tolist()
    assert sorted(classes) == sorted(test.cond.tolist()) and classes[:2] == [0, 1]
    assert not found["density"] and not [check for check in found["checks"] if "integrates" in check["name"]]


def test_other_data_in_order_are_not_read_from_their_beginning(digits, tmp_path):
    """Of a test split whose first half is black a sample of the same size is evaluated."""
    x = np.zeros((200, 1, 8, 8), np.uint8)
    x[100:] = Digits().prepare().items("train").x[:100].numpy()
    arrays = {f"{name}_{split}": values for split in ("train", "val", "test")
              for name, values in (("x", x), ("y", np.arange(200) % 10))}
    np.savez(tmp_path / "other.npz", **arrays)
    out, _ = evaluate(f"ckpt={digits}", "ood=arrays", f"ood_data.file={tmp_path}/other.npz", "ood_data.levels=17",
                      "limit=40", "stages=[likelihood]", f"out={tmp_path}/r.json", cwd=tmp_path)
    found = report(tmp_path / "r.json")["ood"][0]
    assert "40 of 200 items, chosen at random" in found["said"]
    black = (np.load(tmp_path / "r.npz")["ood_0_nats"] > -150).sum()
    assert 10 < black < 30


def test_everything_of_one_model(digits, tmp_path, monkeypatch):
    out, _ = evaluate(f"ckpt={digits}", "ood=[noise,shuffled]", "sweeps=[temperature]", "importance_samples=4",
                      f"out={tmp_path}/r.json", cwd=tmp_path)
    found, arrays = report(tmp_path / "r.json"), np.load(tmp_path / "r.npz")
    assert [line["label"] for line in found["likelihood"]] == ["K = 1", "K = 4"]
    assert found["likelihood"][1]["bits_per_dim"] < found["likelihood"][0]["bits_per_dim"]
    fidelity = found["fidelity"]
    assert fidelity["network"]["name"] == "classifier" and fidelity["network"]["accuracy"] > 0.95
    scale = found["scale"]["rows"]
    # Of 180 + 359 held-out items half are compared with the other half.
    assert list(scale) == ["other held-out items", "training items", "noise"]
    assert {row["n"] for row in (fidelity, *scale.values())} == {269}  # distances depend on n
    for key in ("frechet", "kernel"):
        floor, train, noise = ((row[key], row[f"{key}_error"]) for row in scale.values())
        assert abs(floor[0] - train[0]) < 4 * math.hypot(floor[1], train[1])
        assert train[0] < fidelity[key] and train[0] + 5 * noise[1] < noise[0]
    assert fidelity["n"] == 269 and not fidelity["memorisation"]["flagged"]
    assert 0 <= fidelity["class_accuracy"]["accuracy"] < 0.5 and fidelity["likelihood_accuracy"]["n"] == 359
    assert found["sampling"]["evaluations"] == 1 and found["sampling"]["samples_per_second"] > 0
    assert [entry["name"] for entry in found["ood"]] == ["noise", "shuffled"] and found["ood"][0]["auroc"] > 0.9
    assert found["ood"][0]["scores"].keys() == {"typicality", "less_complexity"}
    assert [check["name"] for check in found["checks"] if check["status"] != "passed"] == []
    assert len(found["profile"]["flow"]) > 2 and found["drift"]["first_over"] is None
    assert len(found["sweeps"][0]["frechet"]) == 4
    assert arrays["samples_x"].shape == (64, 1, 8, 8) and arrays["nats_0"].shape == (359,)
    assert arrays["least_x"].shape == arrays["neighbours_train"].shape == (8, 1, 8, 8)
    assert "Fréchet distance in features of classifier, n = 269" in out and "checks passed" in out
    monkeypatch.setattr("genmodels.report.compare.write_page", lambda *given: None)  # which takes the longest
    again, _ = evaluate(f"ckpt={digits}", "ood=[noise,shuffled]", "sweeps=[temperature]", "importance_samples=4",
                        f"out={tmp_path}/again.json", cwd=tmp_path)
    assert report(tmp_path / "again.json")["sampling"] == found["sampling"]  # taken from the cache


def test_a_score_model_is_checked_by_its_ode(tmp_path):
    data = {"_target_": "genmodels.data.toy.Toy", "set": "moons"}
    model = ScoreModel(build(data).prepare().spec, net={"hidden": 8, "depth": 1}, ema_decay=0)
    model.initialize(next(iter(build(data).prepare().loader("train", 64))))
    save(model, tmp_path / "best.ckpt", data)
    evaluate(f"ckpt={tmp_path}/best.ckpt", "ode=true", "ode_options.tolerance=1e-2", "limit=8",
             "stages=[likelihood,checks]", f"out={tmp_path}/r.json", cwd=tmp_path)
    checks = {check["name"]: check["status"] for check in report(tmp_path / "r.json")["checks"]}
    assert checks["same seed, same value"] == checks["batch size 1 against 64"] == "passed"


def test_a_density_of_noisy_data_gives_no_figure_of_items(tmp_path):
    spec = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
    model = TarFlow(spec, patch=4, blocks=2, width=8, depth=1, heads=2, augment=0.1, preprocess="centre",
                    class_conditional=True, ema_decay=0)  # fmt: skip
    data = {"_target_": "genmodels.data.vision.Digits"}
    model.initialize(next(iter(build(data).prepare().loader("train", 64))))
    save(model, tmp_path / "best.ckpt", data)
    out, _ = evaluate(f"ckpt={tmp_path}/best.ckpt", "limit=70", "samples=64", "features=random-conv", "force=true",
                      "stages=[likelihood,fidelity]", f"out={tmp_path}/r.json", cwd=tmp_path)
    found = report(tmp_path / "r.json")
    assert "class of test items" not in out and found["samples"]["outside"]["share"] > 0
    assert "moved to its ends" in out and "leaves that mass out" not in out and "unnormalised" not in out
    assert str(model.log_likelihood(next(iter(build(data).prepare().loader("test", 2))))) == (
        "no likelihood: its density is that of data with noise of 0.1")


def test_guidance_is_of_the_samples_alone(tmp_path):
    """The same likelihoods and other samples, those of sample(guidance=...)."""
    spec = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
    model = DDPM(spec, net={"channels": 8, "multipliers": [1, 2], "blocks": 1, "attention_at": []}, ema_decay=0)
    scattered(model.core.net, seed=0)
    save(model, tmp_path / "best.ckpt", {"_target_": "genmodels.data.vision.Digits"})
    found = []
    for name, words in (("plain", []), ("guided", ["guidance=4"]), ("without", ["guidance=0"])):
        out, _ = evaluate(
            f"ckpt={tmp_path}/best.ckpt", "draws=2", "limit=70", "samples=64", "steps=3", "features=random-conv",
            "force=true", "stages=[likelihood,fidelity]", f"out={tmp_path}/{name}.json", *words, cwd=tmp_path)
        assert ("samples drawn with guidance 4; the likelihood is without it" in out) == (name == "guided")
        found.append(np.load(tmp_path / f"{name}.npz"))
    plain, guided, without = found
    assert not np.array_equal(plain["samples_x"], without["samples_x"])
    assert np.array_equal(plain["nats_0"], guided["nats_0"])
    classes = guided["samples_cond"].tolist()
    expected = model.eval().sample(64, classes, steps=3, guidance=4.0, weights="raw").x
    assert np.abs(guided["samples_x"].astype(int) - expected.numpy().astype(int)).max() <= 1
    assert np.abs(plain["samples_x"].astype(int) - guided["samples_x"].astype(int)).max() > 3


BAD = [
    ("ckpt=FLOW limit=0", 2, "limit must be at least 1"),
    ("ckpt=FLOW processes=0", 2, "processes must be at least 1"),
    ("ckpt=FLOW temperature=-1", 2, "temperature must be a finite number"),
    ("ckpt=[FLOW,ENERGY] temperature=0.7", 2, "temperature=0.7 is a factor on the noise of flows and diffusion, and"),
    ("ckpt=FLOW guidance=2", 2, "guidance is for models of classes with model.cond_drop above 0"),
    ("ckpt=DIGITS guidance=2", 2, "guidance is for models of classes with model.cond_drop above 0"),
    ("ckpt=DIGITS guidance=1e9", 2, "guidance must be a finite number"),
    ("ckpt=DIGITS temperature=nan", 2, "temperature must be a number or null, got 'nan'"),
    ("ckpt=FLOW steps=0", 2, "steps must be at least 1"),
    ("ckpt=FLOW steps=3 stages=[fidelity]", 2, "steps is for models that are sampled in steps"),
    ("ckpt=FLOW importance_samples=0", 2, "importance_samples must be at least 1"),
    ("ckpt=FLOW importance_samples=4", 2, "importance_samples is for flows and energies of integers"),
    ("ckpt=FLOW chains=8", 2, "is for energies"),
    ("ckpt=FLOW draws=3", 2, "is for diffusion bounds"),
    ("ckpt=FLOW replicates=4", 2, "replicates is for diffusion bounds"),
    ("ckpt=ENERGY normaliser=none chains=8", 2, "chains is for normaliser=ais, got normaliser=none"),
    ("ckpt=FLOW stages=[]", 2, "stages=[] is empty"),
    ("ckpt=FLOW stages=[likelihood] samples=100", 2, "samples has no effect with stages=[likelihood]"),
    ("ckpt=FLOW stages=[cost] importance_samples=4", 2, "importance_samples has no effect with stages=[cost]"),
    ("ckpt=FLOW rank=across", 2, "rank=across is for a table of several models"),
    ("ckpt=FLOW ood=noise ood_data.root=x", 2, "ood=noise is none"),
    ("ckpt=FLOW beam=8", 2, "beam is for recognisers"),
    ("ckpt=FLOW beam=8 nbest=2", 2, "nbest is for recognisers"),
    ("ckpt=FLOW beam=8 lm=book.txt rescore=true", 2, "lm is for recognisers"),
    ("ckpt=FLOW beam=8 length=0.5", 2, "length is for recognisers"),
    ("ckpt=FLOW recognizer=run beam=8", 2, "recognizer is for text-to-speech models"),
    ("ckpt=FLOW ode=true", 2, "is for diffusion models"),
    ("ckpt=DIFFUSION ode=true ode_options.tol=0.1", 2, "got 'tol': did you mean 'tolerance'?"),
    ("ckpt=DIFFUSION ode=true ode_options.tolerance=abc", 2, "tolerance must be a positive finite number, got 'abc'"),
    ("ckpt=DIFFUSION ode=true ode_options.steps=3", 2, "steps is for solver=heun and rk4"),
    ("ckpt=DIFFUSION ode=true ode_options.solver=rk4 ode_options.steps=2.5", 2, "steps must be a whole number"),
    ("ckpt=DIFFUSION ode=true ode_options.solver=rk4 ode_options.tolerance=1e-3", 2, "tolerance is for solver=rk45"),
    ("ckpt=DIFFUSION ode=true ode_options.probes=2", 2, "probes is for divergence=hutchinson"),
    ("ckpt=DIFFUSION ode=false ode_options.tolerance=1e-3", 2, "ode_options have no effect, since the ODE of"),
    ("ckpt=FLOW ood=fasion_mnist", 2, "did you mean 'fashion_mnist'"),
    ("ckpt=FLOW ood=digits", 2, "ood=digits: these data do not fit the checkpoint"),
    ("ckpt=FLOW ood_data.root=x", 2, "ood=<name>"),
    ("ckpt=FLOW samples=3 stages=[fidelity]", 2, "at least 4 are needed"),
    ("ckpt=FLOW samples=1000 stages=[fidelity]", 2, "more than the 200 held-out items"),
    ("ckpt=DIGITS features=inception stages=[fidelity]", 2, "at least 4096 are needed"),
    ("ckpt=FLOW features=inception stages=[fidelity]", 2, "for grey or colour images"),
    ("ckpt=FLOW features=classifier stages=[fidelity]", 2, "needs labels"),
    ("ckpt=FLOW features=random-conv stages=[fidelity]", 2, "vectors have features=coordinates"),
    ("ckpt=FLOW stages=[everything]", 2, "likelihood"),
    ("ckpt=FLOW stages=[proofs]", 2, "any of likelihood, fidelity, cost, checks"),
    ("ckpt=FLOW proofs=full", 2, "did you mean 'checks'"),
    ("ckpt=FLOW rank=all", 2, "across"),
    ("ckpt=FLOW seed=x", 2, "seed must be an integer"),
    ("ckpt=[FLOW,ENERGY] out=a.json", 2, "the reports of several checkpoints are a folder: leave out .json"),
    ("ckpt=[FLOW,DIGITS] stages=[likelihood]", 2, "cannot be compared in one table: their data name differ"),
    ("ckpt=DIGITS data._target_=genmodels.data.toy.Toy", 2, "event_shape is (2,), the model was built for (1, 8, 8)"),
    ("ckpt=DIGITS sampler=ddim stages=[fidelity]", 2, "sampler is for models with several samplers"),
]


@pytest.mark.parametrize("words, code, said", BAD, ids=[words for words, _, _ in BAD])
def test_bad_input_is_answered_in_one_line(gaussians, digits, tmp_path, words, code, said):
    for name in ("FLOW", "DIFFUSION", "ENERGY"):
        words = words.replace(name, f"{gaussians}/{name.lower()}")
    words = words.replace("DIGITS", str(digits))
    words = words.split()
    out, err = evaluate(*words, cwd=tmp_path, code=code)
    messages = [line for line in err.splitlines() if line.startswith("genmodels evaluate: ")]
    assert len(messages) == 1 and said in messages[0] and "Traceback" not in err, err
    assert out == "" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("dims, options, refused", [(2, {}, True), (2, {"normaliser": "ais"}, False), (3, {}, False)])
def test_chains_are_refused_where_log_z_is_a_sum_over_a_grid(dims, options, refused):
    model = EnergyModel(DataSpec("points", (dims,)))
    opened = SimpleNamespace(request=Request(chains=8, **options), model=model, spec=model.spec, path="a", items=3,
                             limited=False)
    with contextlib.nullcontext() if not refused else pytest.raises(InputError, match="energies of three or more"):
        check_options([opened])


def test_values_that_are_no_values_of_the_data_are_named(gaussians, tmp_path):
    x = np.random.default_rng(1).normal(size=(1000, 3)).astype("float32")
    x[:, 0] = 1e30  # finite, and of no finite density
    np.savez(tmp_path / "far.npz", x=x)
    words = [f"ckpt={gaussians}/flow", f"data.file={tmp_path}/far.npz", "stages=[likelihood]",
             f"out={tmp_path}/of_far.json"]
    _, err = evaluate(*words, cwd=tmp_path, code=1)
    assert "200 of 200 likelihoods are not finite (first items: 0, 1, 2)" in err
    line = report(tmp_path / "of_far.json")["likelihood"][0]
    assert line["nll"] is None and line["reason"] == "not finite"


def test_a_label_is_missing_or_not_needed(digits, tmp_path):
    x = np.random.default_rng(1).integers(0, 17, (60, 8, 8), dtype="uint8")
    np.savez(tmp_path / "plain.npz", x=x)
    words = [f"ckpt={digits}", "data._target_=genmodels.data.arrays.Arrays", f"data.file={tmp_path}/plain.npz",
             "data.levels=17"]
    _, err = evaluate(*words, cwd=tmp_path, code=2)
    assert "they have no labels, the model is conditioned on 10 classes" in err


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


def test_the_evaluations_of_swept_chains_are_those_of_their_steps(gaussians, tmp_path):
    evaluate(f"ckpt={gaussians}/energy", "stages=[cost]", "sweeps=[steps]", "samples=130", f"out={tmp_path}/s.json",
             cwd=tmp_path)
    (sweep,) = report(tmp_path / "s.json")["sweeps"]
    model, _ = load_model(gaussians / "energy" / "best.ckpt", trust=["tests"])
    expected = [model.sample(4, steps=steps).made["evaluations"] / 4 for steps in sweep["values"]]
    assert sweep["values"] == [10, 40, 160] and sweep["evaluations"] == pytest.approx(expected, rel=0.02)


def test_a_sampler_that_one_model_of_a_table_has_not_is_refused_first(gaussians, digits, tmp_path):
    masked = MaskedDiffusionModel(DataSpec("digits", (1, 8, 8), levels=17, num_classes=10), width=4, ema_decay=0.0,
                                  net={"width": 8, "depth": 1, "heads": 2})
    save(masked, tmp_path / "masked" / "best.ckpt", {"_target_": "genmodels.data.vision.Digits"})
    model = DDPM(DataSpec("digits", (1, 8, 8), levels=17, num_classes=10), net={"channels": 8, "multipliers": [1, 2]})
    save(model, tmp_path / "ddpm" / "best.ckpt", {"_target_": "genmodels.data.vision.Digits"})
    _, err = evaluate(f"ckpt=[{tmp_path}/ddpm,{tmp_path}/masked]", "sampler=ddim", "limit=8", cwd=tmp_path, code=2)
    assert "sampler of " in err and "masked/best.ckpt must be one of ancestral, confidence, got 'ddim'" in err


@pytest.mark.parametrize("ordered", [True, False])
def test_first_items_of_few_classes_are_no_sample_of_the_split(tmp_path, ordered):
    labels = np.repeat(np.arange(10), 30)
    labels = labels if ordered else np.random.default_rng(0).permutation(labels)
    x = labels[:, None] + np.random.default_rng(1).normal(size=(300, 2))
    np.savez(tmp_path / "x.npz", **{f"{split}_{key}": value.astype("float32" if key == "x" else "int64")
                                    for split in ("train", "val", "test")
                                    for key, value in (("x", x), ("labels", labels))})
    data = {"_target_": "genmodels.data.arrays.Arrays", "file": str(tmp_path / "x.npz")}
    save(GaussianFlow(build(data).prepare().spec, mean=[4.5, 4.5], covariance=[[9.0, 8.0], [8.0, 9.0]]),
         tmp_path / "best.ckpt", data)
    for limit, warned in ((60, ordered), (300, False)):
        out, err = evaluate(f"ckpt={tmp_path}/best.ckpt", "stages=[likelihood]", f"limit={limit}",
                            f"out={tmp_path}/r.json", cwd=tmp_path)
        assert ("the first 60 items, which alone are evaluated, are of 2 classes, and" in out + err) == warned


def test_points_of_a_sweep_have_reports_of_their_own(gaussians, tmp_path):
    words = [f"ckpt={gaussians}/flow", "stages=[likelihood]", "limit=20"]
    evaluate("-m", *words, "seed=0,1", cwd=tmp_path, code=0)
    found = [report(path) for path in sorted((gaussians / "flow").glob("report_first20_seed-?.json"))]
    assert len(found) == 2 and found[0]["likelihood"][0]["nll"] == pytest.approx(found[1]["likelihood"][0]["nll"])


def test_a_sweep_of_options_takes_the_number_of_samples(digits, tmp_path):
    words = ["stages=[cost]", "sweeps=[temperature]", "samples=32", "force=true"]
    evaluate(f"ckpt={digits}", *words, f"out={tmp_path}/s.json", cwd=tmp_path)
    assert [sweep["n"] for sweep in report(tmp_path / "s.json")["sweeps"]] == [32]


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


def test_torch_is_limited_when_memory_is_short(gaussians, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(GaussianFlow, "log_likelihood", full)
    _, err = evaluate(f"ckpt={gaussians}/flow", "cache=false", "batch_size=64", cwd=tmp_path, code=1)
    assert "out of memory at batch_size=64: try batch_size=16" in err


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_few_items_of_a_healthy_model_are_no_fault(n):
    """Log-densities lower on average by a tenth of their spread, which pairs exceed by three of their own errors."""
    data = build({"_target_": "genmodels.data.toy.Toy", "n_train": 10, "n_val": 10, "n_test": 6000}).prepare()
    x = next(iter(data.loader("test", 6000))).x
    true = density("moons").log_prob(x.double())
    found = true - 0.02 + 0.2 * torch.randn(6000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = [row(Likelihood(found[k : k + n], "exact", 2), data.spec, "exact", x[k : k + n])
             for k in range(0, 300 * n, n)]
    assert sum(bool(faults(part)) for part in parts) <= 3  # 0.4 expected
    assert n > 3 or sum(part.kl_paired < -3 * part.se_gap for part in parts) > 5


def test_a_better_value_than_the_truth_is_a_fault(tmp_path):
    data = build({"_target_": "genmodels.data.toy.Toy", "n_train": 10, "n_val": 10, "n_test": 500}).prepare()
    x = next(iter(data.loader("test", 500))).x
    true = density("moons").log_prob(x.double())
    honest, wrong = (row(Likelihood(true + extra, "exact", 2), data.spec, "exact", x) for extra in (-0.1, 0.1))
    assert faults(honest) == [] and honest.kl_paired == pytest.approx(0.1)
    assert "a fault of the evaluation" in faults(wrong)[0] and torch.isfinite(true).all()
    assert "kl_paired" in plain(honest) and "bracket" not in plain(honest)  # what does not apply has no key
    honest.made, honest.ess_median = {"importance_samples": 8}, 1.4
    assert notes_on(honest) == ["exact: of 8 importance samples 1.4 count in the median: a loose bound"]
