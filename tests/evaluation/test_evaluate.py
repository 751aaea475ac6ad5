"""`genmodels evaluate`: its figures against ground truth, its options and its answers to bad input."""

from __future__ import annotations

import contextlib
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.core.likelihood import Likelihood
from genmodels.core.processes import Ranks
from genmodels.data.toy import density
from genmodels.energy import LogPartition
from genmodels.evaluation.checkpoint import (
    EvaluationState,
    Opened,
    Request,
)
from genmodels.evaluation.evaluate import (
    check_options,
)
from genmodels.evaluation.features import Cache
from genmodels.evaluation.likelihood import row
from genmodels.evaluation.report import faults, notes_on, plain
from genmodels.evaluation.sample_quality import sample_parts
from genmodels.models.build import build
from genmodels.models.checkpoint import load_model
from genmodels.models.ddpm import DDPM
from genmodels.models.density import extent_of, on_grid
from genmodels.models.energy import EnergyModel
from genmodels.models.energy_sampling import STEPS
from genmodels.models.masked_diffusion import MaskedDiffusionModel
from genmodels.models.normalizing_flows import TarFlow
from genmodels.models.score import ScoreModel
from genmodels.verification.check import run_check
from genmodels.verification.checkpoints import CHECKS
from tests.evaluation.command import COVARIANCE, MEAN, QUICK, evaluate, report
from tests.gaussian_models import GaussianFlow, save
from tests.parameters import scattered
from tests.two_processes import by_forks, fork

pytestmark = pytest.mark.usefixtures("short_pilot")


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
    check = run_check(CHECKS.specs["density integrates to one"], subject)
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


def test_a_sweep_of_options_takes_the_number_of_samples(digits, tmp_path):
    words = ["stages=[cost]", "sweeps=[temperature]", "samples=32", "force=true"]
    evaluate(f"ckpt={digits}", *words, f"out={tmp_path}/s.json", cwd=tmp_path)
    assert [sweep["n"] for sweep in report(tmp_path / "s.json")["sweeps"]] == [32]


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
