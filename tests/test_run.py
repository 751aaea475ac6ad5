"""The main job through the command line: train, sample, evaluate, and everything that is left in the run folder."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from genmodels.cli.main import main
from genmodels.core.checkpoint import checkpoint_hash, read_header
from tests.commands import ROOT, run, script

LOGGED = ["trainer=smoke", "trainer.max_steps=12", "trainer.validate_every_n_steps=6", "trainer.sample_every_n_steps=6"]
TINY = ["model.net.channels=8", "model.num_steps=30", "trainer.limit_evaluation=null", *LOGGED]
QUICK = ["trainer=smoke", "trainer.max_steps=4", "trainer.validate_every_n_steps=4", "trainer.sample_every_n_steps=4",
         "logger=csv"]


@dataclass
class Done:
    """What a command left behind: exit code, standard output, standard error."""

    returncode: int
    stdout: str
    stderr: str


def genmodels(command: str, *words: str, cwd: Path, code: int = 0) -> Done:
    """Run a command in this process."""
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            returncode = main([command, *words])
    finally:
        os.chdir(before)
    assert returncode == code, err.getvalue()
    return Done(returncode, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One short run of the default model with all loggers, by the script itself."""
    cwd = tmp_path_factory.mktemp("main")
    loggers = ["logger.tensorboard=true"] if _has_tensorboard() else []
    done = script("train", "model=ddpm", *TINY, *loggers, cwd=cwd)
    assert done.returncode == 0, done.stderr
    folder = next((cwd / "runs" / "ddpm-digits").iterdir())
    return cwd, folder, done


def _has_tensorboard() -> bool:
    import importlib.util

    return importlib.util.find_spec("tensorboard") is not None


def test_the_run_folder_is_whole(trained):
    cwd, folder, done = trained
    for name in ("config.yaml", "last.ckpt", "best.ckpt", "metrics.csv", "log.txt", "training.json", "wandb"):
        assert (folder / name).exists(), name
    assert [p.name for p in sorted((folder / "samples").iterdir())] == ["step_000006.png", "step_000012.png"]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["net"]["channels"] == 8 and config["seed"] == 0
    header = read_header(folder / "last.ckpt")
    assert header["step"] == 12 and header["finished"] and header["data"]["levels"] == 17
    assert set(p.name for p in cwd.iterdir()) == {"runs"}  # nothing is written anywhere else


def test_the_last_lines_say_what_to_type_next(trained):
    cwd, folder, done = trained
    lines = done.stdout.strip().splitlines()
    assert re.match(r"result:   step 12, val/bits_per_dim <= \d+\.\d{4}\(\d+\); best", lines[-3]), lines[-3]
    for line, name in ((lines[-2], "sample.py"), (lines[-1], "evaluate.py")):
        words = line.split()
        assert words[1] == "python" and words[2] == str(ROOT / name)
        assert (cwd / words[3].removeprefix("ckpt=")).is_file()


def test_metrics_are_a_table(trained):
    rows = list(csv.DictReader(open(trained[1] / "metrics.csv")))
    assert [int(r["step"]) for r in rows] == sorted(int(r["step"]) for r in rows)
    assert sum(bool(r["val/bits_per_dim"]) for r in rows) == 2


def offline_records(folder: Path) -> list:
    """Every record of the offline W&B files of a run: protobuf messages in LevelDB's log format, after 7 bytes."""
    records = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        records += records_of(path.read_bytes())
    return records


def records_of(data: bytes) -> list:
    """The records of one file."""
    from wandb.proto import wandb_internal_pb2

    position, pieces, records = 7, [], []
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # no record header fits in what is left of a block
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        pieces.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(pieces))
            records.append(record)
            pieces = []
    return records


def test_the_offline_wandb_run_holds_metrics_configuration_and_pictures(trained):
    records = offline_records(trained[1])
    assert any((r.metric.glob_name, r.metric.step_metric) == ("*", "trainer/global_step") for r in records)
    history, config = {}, {}
    for record in records:
        for item in record.history.item:
            history.setdefault(item.key or ".".join(item.nested_key), []).append(json.loads(item.value_json))
        for update in (*record.run.config.update, *record.config.update):
            config[update.key or ".".join(update.nested_key)] = json.loads(update.value_json)
    assert len(history["val/bits_per_dim"]) == 2
    rows = list(csv.DictReader(open(trained[1] / "metrics.csv")))
    written = [float(r["val/bits_per_dim"]) for r in rows if r["val/bits_per_dim"]]
    assert history["val/bits_per_dim"] == pytest.approx(written)
    assert config["model"]["net"]["channels"] == 8 and config["data"]["_target_"].endswith("Digits")
    pictures = [name for value in history["pictures/samples.filenames"] for name in value]
    media = next((trained[1] / "wandb").glob("offline-run-*")) / "files"
    assert len(pictures) == 2 and all((media / name).is_file() for name in pictures)


def test_the_final_evaluation_reaches_the_same_offline_run(trained):
    cwd, folder, _ = trained
    genmodels("evaluate", f"ckpt={folder}", "draws=3", "stages=[likelihood]", f"out={folder}/other.json", cwd=cwd)
    value = json.loads((folder / "other.json").read_text())["likelihood"][0]["bits_per_dim"]
    records = offline_records(folder)
    assert len({r.run.run_id for r in records if r.run.run_id}) == 1
    logged = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for r in records for i in r.history.item}
    assert logged["evaluation/test/bits_per_dim/lower_bound"] == pytest.approx(value)
    assert logged["evaluation/test._type"] == "table-file" and logged["evaluation/test.nrows"] == 1


@pytest.mark.skipif(not _has_tensorboard(), reason="the extra `tensorboard` is not installed")
def test_tensorboard_has_them_too(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained[1] / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert "val/bits_per_dim" in events.Tags()["scalars"] and len(events.Images("pictures/samples")) == 2


def test_the_script_of_sampling(trained):
    """In a process of its own; that the three scripts are the commands is shown by tests/test_commands.py."""
    cwd, folder, _ = trained
    sampled = script("sample", f"ckpt={folder}", "n=4", "steps=2", "out=four.npz", cwd=cwd)
    assert sampled.returncode == 0, sampled.stderr
    (cwd / "four.npz").unlink()


def test_sample_writes_a_grid_with_its_provenance(trained):
    cwd, folder, _ = trained
    done = genmodels("sample", f"ckpt={folder / 'best.ckpt'}", "n=20", "steps=3", cwd=cwd)
    path = Path(done.stdout.split(": ")[-1].strip())
    with Image.open(path) as picture:
        assert 10 * 66 + 2 < picture.width < 11 * 66 and 2 * 66 + 2 < picture.height < 2 * 66 + 20
        assert picture.getextrema() == (0, 255)
        assert picture.text["genmodels.checkpoint"] == checkpoint_hash(folder / "best.ckpt")
        found = {key: picture.text[f"genmodels.{key}"] for key in ("seed", "index", "sampler", "steps", "cond")}
        assert found == {"seed": "0", "index": "0-19", "sampler": "dpmpp_2m", "steps": "3", "cond": str([*range(10)])}


def test_samples_are_addressable_through_the_command(trained, tmp_path):
    _, folder, _ = trained
    words = [f"ckpt={folder}", "sampler=ddim", "steps=5", "seed=7"]
    genmodels("sample", *words, "n=12", "batch_size=5", f"out={tmp_path}/a.npz", cwd=tmp_path)
    genmodels("sample", *words, "n=1", "start=9", f"out={tmp_path}/b.npz", cwd=tmp_path)
    whole, alone = np.load(tmp_path / "a.npz"), np.load(tmp_path / "b.npz")
    assert whole["x"].shape == (12, 1, 8, 8) and whole["cond"].tolist() == [*range(10), 0, 1]
    assert np.abs(whole["x"][9].astype(int) - alone["x"][0]).max() <= 1
    assert json.loads(str(whole["made"]))["steps"] == 5


def test_diffusion_samples_of_another_size(trained, tmp_path):
    folder = trained[1]
    genmodels("sample", f"ckpt={folder}", "n=2", "steps=2", "size=[10,13]", "out=wide.npz", cwd=tmp_path)
    assert np.load(tmp_path / "wide.npz")["x"].shape == (2, 1, 10, 13)
    done = genmodels("sample", f"ckpt={folder}", "size=[10]", cwd=tmp_path, code=2)
    assert "size has 2 numbers" in done.stderr


def test_single_pictures_raw_weights_and_the_path(trained, tmp_path):
    _, folder, _ = trained
    words = [f"ckpt={folder / 'last.ckpt'}", "n=3", "steps=4", "cond=3", "ema=false", f"out={tmp_path}/singles"]
    genmodels("sample", *words, f"path={tmp_path}/way.gif", "frames=4", cwd=tmp_path)
    names = sorted(p.name for p in (tmp_path / "singles").iterdir())
    assert names == ["000000.png", "000001.png", "000002.png"]
    with Image.open(tmp_path / "singles" / names[0]) as one:
        assert one.size == (8, 8) and one.text["genmodels.cond"] == "3" and one.text["genmodels.weights"] == "raw"
    with Image.open(tmp_path / "way.gif") as film:
        assert film.n_frames == 4 and json.loads(film.info["comment"])["cond"] == [3]
    genmodels("sample", *words[:3], f"path={tmp_path}/way.png", f"out={tmp_path}/x.png", cwd=tmp_path)
    with Image.open(tmp_path / "way.png") as strip:
        assert 4 * 66 + 2 < strip.width < 5 * 66 and 3 * 66 + 2 < strip.height < 3 * 66 + 20


def test_evaluate_reports_the_likelihood_with_its_kind_and_error(trained):
    cwd, folder, _ = trained
    done = genmodels("evaluate", f"ckpt={folder}", "stages=[likelihood]", cwd=cwd)
    report = json.loads((folder / "report.json").read_text())
    (row,) = report["likelihood"]
    assert row["kind"] == "lower_bound" and row["mark"] == "<=" and row["n"] == report["data"]["items"] == 359
    assert row["made"]["terms"] == 29 and row["se_data"] > 0 and row["se_mc"] is None
    assert f"<= {row['bits_per_dim']:.4f}" in done.stdout and "lower_bound" in done.stdout
    assert len(report["profile"]["diffusion"]["nats"]) == 29
    assert sum(report["profile"]["diffusion"]["nats"]) == pytest.approx(row["parts_nats"]["diffusion"])
    assert report["checkpoint"]["sha256"] == checkpoint_hash(folder / "best.ckpt")
    uniform, histogram = report["references"]
    assert uniform["value"] == pytest.approx(np.log2(17)) and 2.3 < histogram["value"] < 2.6


def test_evaluate_does_not_depend_on_the_batch_size_and_gives_the_error_of_its_draws(trained, tmp_path):
    _, folder, _ = trained
    values = []
    for size in (1, 64):
        words = [f"ckpt={folder / 'best.ckpt'}", "draws=4", "limit=40", f"batch_size={size}", "stages=[likelihood]"]
        genmodels("evaluate", *words, f"out={tmp_path}/{size}.json", cwd=tmp_path)
        report = json.loads((tmp_path / f"{size}.json").read_text())
        values.append(report["likelihood"][0]["bits_per_dim"])
        assert report["likelihood"][0]["se_mc"] > 0 and report["data"]["limited"]
    assert values[0] == pytest.approx(values[1], abs=1e-5)


def test_a_smoke_run_is_evaluated_on_a_few_items_and_says_so(tmp_path):
    words = ["model=ddpm", "model.net.channels=8", "model.num_steps=30", *QUICK, "trainer.limit_evaluation=7"]
    genmodels("train", *words, "run_dir=run", cwd=tmp_path)
    for limit, name, items in (([], "report_first7.json", 7), (["limit=all"], "report.json", 359)):
        genmodels("evaluate", "ckpt=run", "draws=2", *limit, "stages=[likelihood]", cwd=tmp_path)
        data = json.loads((tmp_path / "run" / name).read_text())["data"]
        assert data["items"] == items and data["limited"] == (items == 7)


def test_two_checkpoints_make_one_table_and_a_broken_one_is_named(trained, tmp_path):
    cwd, folder, _ = trained
    broken = tmp_path / "cut" / "best.ckpt"
    broken.parent.mkdir()
    broken.write_bytes((folder / "best.ckpt").read_bytes()[:-50])
    both = f"ckpt=[{folder / 'best.ckpt'},{folder / 'last.ckpt'},{broken}]"
    done = genmodels("evaluate", both, "limit=8", "stages=[likelihood]", f"out={tmp_path}/reports", cwd=cwd, code=1)
    assert done.stdout.count("lower_bound") == 2 and str(broken) in done.stderr
    assert len(list((tmp_path / "reports").rglob("report*.json"))) == 2
    assert (tmp_path / "reports" / "table.md").is_file()


GLOW = ["model=glow", "model.steps=2", "model.hidden=8", *QUICK]


#: What torchrun does, in forks of a process that has imported everything; tests/test_scale.py has torchrun itself.
TORCHRUN = """
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from genmodels.cli.main import main
config = LaunchConfig(1, 1, 2, run_id="none", rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork")
sys.exit(max(elastic_launch(config, main)(["train", *sys.argv[1:]]).values()))
"""
BY_LIGHTNING = [str(ROOT / "train.py"), "trainer.devices=2", "trainer.strategy=ddp"]


@pytest.mark.parametrize("model, by", [
    (["model=ddpm", *TINY], ["-c", TORCHRUN]),
    pytest.param([*GLOW, "model.memory=inverse"], BY_LIGHTNING, marks=pytest.mark.slow),
    pytest.param(GLOW, BY_LIGHTNING, marks=pytest.mark.slow),
    pytest.param(["model=flow_matching", "model.coupling=ot", *TINY], BY_LIGHTNING, marks=pytest.mark.slow),
], ids=["ddpm by torchrun", "glow by inversion", "glow", "flow matching"])  # fmt: skip
def test_training_on_two_processes_is_training_on_one(tmp_path, model, by):
    words = [*model, "logger=csv", "trainer.sample_every_n_steps=0", "trainer.accelerator=cpu"]
    genmodels("train", *words, f"run_dir={tmp_path}/one", cwd=tmp_path)
    done = run(*by, *words, f"run_dir={tmp_path}/two", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained in") == 1
    one, two = (read_header(tmp_path / name / "last.ckpt") for name in ("one", "two"))
    assert one["step"] == two["step"] and one["batches_seen"] == two["batches_seen"]
    assert one["figures"]["val/bits_per_dim"] == pytest.approx(two["figures"]["val/bits_per_dim"], abs=2e-3)
    from genmodels.models.checkpoint import read_checkpoint

    a, b = (read_checkpoint(tmp_path / name / "last.ckpt")["state_dict"] for name in ("one", "two"))
    moved = max(float((a[k] - b[k]).abs().max()) for k in a if a[k].is_floating_point())
    assert moved < 5e-3, moved


FLOWS = {
    "glow": ["model=glow", "model.steps=2", "model.hidden=8"],
    "realnvp": [
        "model=realnvp", "model.layout=[checkerboard*2,squeeze,channel*2]", "model.hidden=8", "model.depth=1",
        "model.dequantisation=variational",
    ],
    "glow of classes": [
        "model=glow", "model.steps=1", "model.hidden=8", "model.class_conditional=true", "model.base=class",
    ],
}


@pytest.mark.parametrize("name", FLOWS)
def test_flows_of_images(tmp_path, name):
    genmodels("train", *FLOWS[name], *QUICK, "run_dir=run", cwd=tmp_path)
    table = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]
    assert all(f"monitor/{figure}" in table for figure in ("round_trip", "layer_drift", "log_scale"))
    genmodels("sample", "ckpt=run", "n=6", "temperature=0.7", "out=six.npz", cwd=tmp_path)
    one = ["n=1", "start=4", "temperature=0.7", "out=one.npz", *(["cond=4"] if "classes" in name else [])]
    genmodels("sample", "ckpt=run", *one, cwd=tmp_path)
    six, alone = (np.load(tmp_path / f"{word}.npz")["x"] for word in ("six", "one"))
    assert np.abs(six[4].astype(int) - alone[0]).max() <= 1  # a level at most, where float32 rounds across a border
    stages = [] if name == "glow" else ["stages=[likelihood]"]
    genmodels("evaluate", "ckpt=run", "importance_samples=[1,4]", "limit=40", *stages, cwd=tmp_path)
    report = json.loads((tmp_path / "run" / "report_first40.json").read_text())
    first, second = report["likelihood"]
    assert first["kind"] == "lower_bound" and [r["made"]["importance_samples"] for r in (first, second)] == [1, 4]
    assert second["bits_per_dim"] < first["bits_per_dim"] and second["se_mc"] > 0 and first["se_mc"] is None


def test_the_way_between_two_items(tmp_path):
    genmodels("train", *FLOWS["glow"], *QUICK, "run_dir=run", cwd=tmp_path)
    done = genmodels("sample", "ckpt=run", "interpolate=[3,17]", "frames=5", "out=strip.png", cwd=tmp_path)
    assert "from item 3 to item 17" in done.stdout
    with Image.open(tmp_path / "strip.png") as strip:
        assert strip.info["genmodels.between"] == "3 and 17" and strip.info["genmodels.family"] == "glow"
        assert strip.size == (5 * 66 + 2, 15 + 68)
        strip.crop((2, 17, 66, 81)).save(tmp_path / "first.png")
    genmodels("sample", "ckpt=run", "interpolate=[first.png,17]", "frames=3", "out=again.png", cwd=tmp_path)
    with Image.open(tmp_path / "strip.png") as strip, Image.open(tmp_path / "again.png") as again:
        assert strip.crop((2, 17, 66, 81)).tobytes() == again.crop((2, 17, 66, 81)).tobytes()
    for words, line in ((["interpolate=[3]"], "two items"), (["interpolate=[3,9999]"], "indices must lie"),
                        (["interpolate=[3,no.png]"], "no file no.png"),
                        (["interpolate=[3,4]", "out=strip.npz"], "end it in .png"), (["cond=[]"], "unconditional"),
                        (["interpolate=[3,4]", "temperature=0.5", "n=5"], "leave out temperature, n"),
                        (["steps=5"], "no sampling option 'steps'")):
        assert line in genmodels("sample", "ckpt=run", *words, cwd=tmp_path, code=2).stderr


@pytest.mark.parametrize("words", [["model=nsf", "model.layers=2", "model.hidden=16", "trainer.precision=64-true"],
                                   ["model=realnvp", "data.set=8gaussians", "model.hidden=16"],
                                   ["model=maf", "model.hidden=16"]])
def test_flows_of_points_have_an_exact_density(tmp_path, words):
    genmodels("train", *words, "data=toy", *QUICK, "run_dir=run", cwd=tmp_path)
    assert (tmp_path / "run" / "samples" / "step_000004.png").is_file()
    assert "KL gap" in genmodels("evaluate", "ckpt=run", "limit=50", "stages=[likelihood,checks]", cwd=tmp_path).stdout
    report = json.loads((tmp_path / "run" / "report_first50.json").read_text())
    assert report["likelihood"][0]["kind"] == "exact" and report["likelihood"][0]["se_mc"] is None


@pytest.mark.parametrize("words", [["data=toy"], ["data=toy", "data.set=checkerboard", "model.objective=vlb"]])
def test_points_in_the_plane(tmp_path, words):
    small = ["model.num_steps=30", "model.net.hidden=16", "model.net.depth=1"]
    genmodels("train", "model=ddpm", *words, *QUICK, *small, "run_dir=run", cwd=tmp_path)
    assert (tmp_path / "run" / "samples" / "step_000004.png").is_file()
    genmodels("sample", "ckpt=run", "n=100", "path=way.gif", "frames=3", cwd=tmp_path)
    done = genmodels("evaluate", "ckpt=run", "limit=50", "stages=[likelihood,checks]", cwd=tmp_path)
    assert "exact entropy" in done.stdout and "nats" in done.stdout
    report = json.loads((tmp_path / "run" / "report_first50.json").read_text())
    assert report["likelihood"][0]["kl_gap"] == pytest.approx(
        report["likelihood"][0]["nll"] - report["likelihood"][0]["entropy"]
    )


def test_vectors_and_images_of_the_users_own(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "vectors.npz", x=rng.normal(size=(300, 7)).astype("float32"))
    np.savez(tmp_path / "images.npz", x=rng.integers(0, 256, (120, 9, 11, 3), dtype="uint8"), y=np.arange(120) % 4)
    common = ["model=ddpm", "data=arrays", "model.num_steps=20", *QUICK, "data.batch_size=32"]
    genmodels("train", *common, "data.file=vectors.npz", "run_dir=v", cwd=tmp_path)
    done = genmodels("sample", "ckpt=v", "n=5", cwd=tmp_path)
    assert np.load(tmp_path / done.stdout.split(": ")[-1].strip())["x"].shape == (5, 7)
    genmodels("train", *common, "data.file=images.npz", "model.net.channels=8", "run_dir=i", cwd=tmp_path)
    genmodels("sample", "ckpt=i", "n=5", "cond=[1,3]", "out=i.png", cwd=tmp_path)
    with Image.open(tmp_path / "i.png") as picture:
        assert picture.mode == "RGB"


BAD = [
    ("train", ["model=dppm"], 2, "did you mean 'ddpm'"),
    ("train", ["model.net.chanels=3"], 2, "did you mean 'channels'"),
    ("train", ["trainer.max_steps=abc"], 2, "trainer.max_steps must be an integer"),
    ("train", ["trainer.max_steps=0"], 2, "trainer.max_steps"),
    ("train", ["data=mnist", "data.root=nowhere", "data.download=false"], 2, "nowhere"),
    ("train", ["data=image_folder", "data.root=empty"], 2, "no images"),
    ("train", ["data=image_folder"], 2, "root"),
    ("train", ["model.num_steps=10", "model.schedule=linear"], 2, "21"),
    ("train", ["data.batch_size=0"], 2, "batch_size"),
    ("train", ["model.net.multipliers=[1,2,4,8,8]"], 2, "levels"),
    ("train", ["trainer.precision=16-mixed"], 2, "bf16-mixed"),
    ("train", ["trainer.accelerator=warp"], 2, "trainer"),
    ("train", ["model.optimizer.lr=-1"], 2, "lr"),
    ("train", ["model._target_=os.system"], 2, "not a class of genmodels"),
    ("sample", [], 2, "ckpt"),
    ("sample", ["ckpt=nowhere.ckpt"], 1, "no such checkpoint"),
    ("sample", ["ckpt=nowhere"], 1, "nowhere: no such checkpoint or run folder"),
    ("train", ["resume=nowhere"], 1, "nowhere: no such checkpoint or run folder"),
    ("sample", ["ckpt=RUN", "n=0"], 2, "n must be at least 1"),
    ("sample", ["ckpt=RUN", "n=many"], 2, "n must be an integer"),
    ("sample", ["ckpt=RUN", "cond=10"], 2, "0..9"),
    ("sample", ["ckpt=RUN", "steps=31"], 2, "1..30"),
    ("sample", ["ckpt=RUN", "sampler=dpm"], 2, "ddpm"),
    ("sample", ["ckpt=RUN", "temperature=-1"], 2, "temperature"),
    ("sample", ["ckpt=RUN", "out=x.jpg"], 2, ".png"),
    ("sample", ["ckpt=RUN", "device=cuda:9"], 2, "device=cuda:9"),
    *([] if torch.backends.mps.is_available() else [("sample", ["ckpt=RUN", "device=mps"], 2, "device=mps is not")]),
    ("sample", ["ckpt=RUN", "ema=0.5"], 2, "0.998"),
    ("sample", ["ckpt=text.ckpt"], 1, "not a genmodels checkpoint"),
    ("evaluate", ["ckpt=RUN", "draws=0"], 2, "draws"),
    ("evaluate", ["ckpt=RUN", "draws=1000"], 2, "29"),
    ("evaluate", ["ckpt=RUN", "split=dev"], 2, "test"),
    ("evaluate", ["ckpt=RUN", "sampler=dpm"], 2, "sampler must be one of ddpm,"),
    ("evaluate", ["ckpt=RUN", "data._target_=genmodels.data.toy.Toy"], 2, "do not fit"),
    ("evaluate", ["ckpt=[]"], 2, "no checkpoint"),
]


@pytest.mark.parametrize("command, words, code, said", BAD, ids=[" ".join([b[0], *b[1]]) for b in BAD])
def test_bad_input_is_one_line(trained, tmp_path, command, words, code, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    words = [w.replace("RUN", str(trained[1])) for w in words]
    done = genmodels(command, *words, cwd=tmp_path, code=code)
    message = done.stderr.strip().splitlines()
    assert len(message) == 1 and said in message[0] and message[0].startswith(f"genmodels {command}: "), done.stderr
    left = {p.name for p in tmp_path.iterdir()} - {"empty", "text.ckpt"}
    assert not left, f"something was left behind: {left}"
