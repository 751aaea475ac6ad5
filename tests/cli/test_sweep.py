"""Sweeps: nothing starts before all is checked, every point runs alone, a failing one does not stop the others."""

from __future__ import annotations

import json
import logging
import os
import sys
import textwrap
import types
from dataclasses import asdict
from pathlib import Path

import pytest

from genmodels.cli import main as cli
from genmodels.cli.sweep import Point
from genmodels.core.errors import RunError
from genmodels.training.run import Outcome


@pytest.fixture
def points(monkeypatch, tmp_path):
    """Runs `genmodels train` sweeps with a run that notes what it sees; seed 1 fails, seed 2 is a bug."""
    seen = []
    module = types.ModuleType("genmodels.cli.train")

    def run(**config):
        from hydra.core.hydra_config import HydraConfig

        seen.append((config, list(sys.argv), HydraConfig.initialized(), os.environ.get("LOCAL_RANK"), os.getcwd()))
        os.environ["LOCAL_RANK"] = "0"
        if config["seed"] == 1:
            raise RunError("the loss is not finite")
        if config["seed"] == 2:
            raise ZeroDivisionError("a bug")
        return Outcome({"val/nll": f"= {config['seed']}.25(3)"}, config["seed"] + 0.25, 100, config["run_dir"])

    module.run = run
    monkeypatch.setitem(sys.modules, "genmodels.cli.train", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=0,1"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return seen


def test_every_point_runs_and_the_exit_code_tells(points, capsys):
    assert cli.main(["train", "-m", "seed=0,1,2,3", "model.net.channels=8", "trainer.max_steps=1e2"]) == 1
    assert [config["seed"] for config, *_ in points] == [0, 1, 2, 3]
    assert {config["trainer"]["max_steps"] for config, *_ in points} == {100}
    printed = capsys.readouterr()
    assert "failed: seed=1 (the loss is not finite)" in printed.err and "ZeroDivisionError: a bug" in printed.err
    assert "2 of 4 points done" in printed.out
    (folder,) = Path("runs/sweeps").iterdir()
    table = [line.split() for line in printed.out.splitlines()[-9:-3]]
    assert table[0] == ["point", "val/nll", "step", "run"]
    assert table[2] == ["seed=0", "=", "0.25(3)", "100", f"{folder}/seed-0"]
    assert table[3:] == [["seed=1", "failed"], ["seed=2", "failed"], ["seed=3", "=", "3.25(3)", "100",
                                                                      f"{folder}/seed-3"]]
    assert [line.split() for line in (folder / "summary.txt").read_text().splitlines()[:6]] == table


def test_combinations_of_choices_and_keys(points):
    assert cli.main(["train", "-m", "seed=0,3", "data=digits,toy"]) == 0
    assert [(c["seed"], c["data"]["_target_"].rpartition(".")[2]) for c, *_ in points] == [
        (0, "Digits"), (0, "Toy"), (3, "Digits"), (3, "Toy")]  # fmt: skip
    assert "channels" in points[0][0]["model"]["net"] and "hidden" in points[1][0]["model"]["net"]


def test_a_point_is_as_if_it_were_started_by_itself(points, tmp_path):
    assert cli.main(["train", "-m", "seed=0,3"]) == 0
    for (_, argv, in_hydra, rank, folder), seed in zip(points, (0, 3), strict=True):
        assert argv[:2] == ["train.py", f"++seed={seed}"] and argv[2].startswith("++run_dir=runs/sweeps/")
        assert not in_hydra and rank is None and folder == str(tmp_path)
    assert sys.argv == ["train.py", "-m", "seed=0,1"] and "LOCAL_RANK" not in os.environ


def test_a_point_leaves_no_process_group_behind(points, monkeypatch, tmp_path):
    from torch import distributed

    def joins(*, seed, **_):
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/{seed}", rank=0, world_size=1)
        return Outcome({}, 0.0, 1, "")

    monkeypatch.setattr(sys.modules["genmodels.cli.train"], "run", joins)
    assert cli.main(["train", "-m", "seed=0,3"]) == 0
    assert not distributed.is_initialized()


@pytest.mark.parametrize(
    "wrong", ["seed=0,1,x", "model=ddpm,dppm", "model.net.chanels=8,16", "seed=0 trainer.max_steps=abc",
              "seed=0,1 run_dir=here", "run_dir=a,b"]
)
def test_nothing_starts_when_a_point_is_wrong(points, capsys, wrong):
    assert cli.main(["train", "-m", *wrong.split()]) == 2
    assert points == [] and capsys.readouterr().err.count("\n") == 1


def test_the_log_of_a_point_is_kept(points):
    """Hydra's own `disabled` logging would silence every logger that exists, and log.txt with it."""
    logger = logging.getLogger("genmodels")
    assert cli.main(["train", "-m", "seed=0,3"]) == 0
    assert not logger.disabled


def test_interruption_ends_the_sweep(points, monkeypatch, capsys):
    def interrupted(**config):
        points.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["genmodels.cli.train"], "run", interrupted)
    assert cli.main(["train", "-m", "seed=0,1,2"]) == 130
    assert len(points) == 1


def only_sweep() -> Path:
    (folder,) = Path("runs/sweeps").iterdir()
    return folder


def test_resume_runs_only_what_is_missing(points, capsys):
    """A failed point is run again, one that had begun goes on, a finished one is not touched, a new one is added."""
    words = ["train", "-m", "model.net.channels=8"]
    assert cli.main([*words, "seed=0,1,3"]) == 1
    (only_sweep() / "seed-1").mkdir()
    (only_sweep() / "seed-1" / "last.ckpt").touch()
    points.clear()
    assert cli.main([*words, "seed=0,1,3,4", "resume=last"]) == 1
    assert [(config["seed"], config.get("resume")) for config, *_ in points] == [(1, "last"), (4, None)]
    assert points[0][1][-1] == "++resume=last"  # for further processes of this point
    printed = capsys.readouterr().out
    assert "3 of 4 points done (2 of them before)" in printed and "seed=0  = 0.25(3)" in printed
    points.clear()
    assert cli.main([*words, "seed=0,4", f"resume={only_sweep()}"]) == 0 and points == []


def test_a_point_with_a_damaged_result_is_not_finished(tmp_path):
    point, config, outcome = Point("train", ("seed",), str(tmp_path), ()), {"seed": 0}, Outcome({}, 0.25, 100, "a")
    settings = {"model": None, "data": None, "trainer": None, "seed": 0, "init": None}
    whole = json.dumps({"config": settings, "outcome": asdict(outcome)})
    (tmp_path / "seed-0").mkdir()
    found = []
    for text in (whole, whole[:-9], "[]", whole.replace("step", "stop"), whole.replace("0.25", "null")):
        (tmp_path / "seed-0" / "result.json").write_text(text)
        found.append(point.finished(["seed=0"], config))
    assert found == [outcome, None, None, None, None]


def test_a_folder_alone_brings_the_settings_of_its_sweep(points, capsys):
    words = ["train", "-m", "model.net.channels=8", "seed=0,1"]
    assert cli.main(words) == 1
    folder = only_sweep()
    points.clear()
    assert cli.main(["train", "-m", f"resume={folder}"]) == 1
    ((config, *_),) = points  # the one that had failed
    assert config["seed"] == 1 and config["model"]["net"]["channels"] == 8
    assert Path(config["run_dir"]) == folder / "seed-1" and "1 of 2 points done" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {"seed-0", "multirun.yaml", "summary.txt"}
    kept = {name: (folder / name).read_text() for name in ("multirun.yaml", "summary.txt")}
    assert "1 of 2 points done" in kept["summary.txt"]
    assert cli.main(["train", "-m", "seed=1", "model.net.channels=16", f"resume={folder}"]) == 1  # all fail
    assert {name: (folder / name).read_text() for name in kept} == kept
    points.clear()
    assert cli.main(["train", "-m", "trainer.max_steps=200", "seed=0,3", f"resume={folder}"]) == 0
    points.clear()
    assert cli.main(["train", "-m", "trainer.max_steps=300", f"resume={folder}"]) == 0  # with those points
    assert [(config["seed"], config["trainer"]["max_steps"]) for config, *_ in points] == [(0, 300), (3, 300)]
    assert "trainer.max_steps=300" in (folder / "multirun.yaml").read_text()
    (folder / "multirun.yaml").write_text("hydra: 1")
    assert cli.main(["train", "-m", f"resume={folder}"]) == 2 and "holds no settings" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["logger=csv"], ["seed=0,3"], ["model=nsf", "seed=0,3"]])
def test_a_sweep_that_goes_on_keeps_its_model_and_data(words, points, capsys):
    whole = ["train", "-m", "model=nsf", "data=toy", "seed=0,1"]
    assert cli.main(whole) == 1
    folder, missing = only_sweep(), [word for word in ("model=nsf", "data=toy") if word not in words]
    before = (folder / "multirun.yaml").read_text()
    points.clear()
    capsys.readouterr()
    assert cli.main(["train", "-m", *words, f"resume={folder}"]) == 2 and points == []
    assert f"give all settings of the sweep again, also {' '.join(missing)}" in capsys.readouterr().err
    assert (folder / "multirun.yaml").read_text() == before
    assert cli.main([*whole, "logger=csv", f"resume={folder}"]) == 1
    assert [config["model"]["_target_"].rsplit(".")[-1] for config, *_ in points] == ["NSF"]


def test_a_point_of_other_settings_is_not_taken_for_finished(points, capsys):
    assert cli.main(["train", "-m", "seed=0,3", "trainer.max_steps=100"]) == 0
    folder = only_sweep()
    points.clear()
    assert cli.main(["train", "-m", "seed=0,3", "trainer.max_steps=200", "resume=last"]) == 2
    assert points == [] and "resume=last: no sweep with these settings in runs/sweeps" in capsys.readouterr().err
    assert cli.main(["train", "-m", "seed=0,3", "trainer.max_steps=200", f"resume={folder}"]) == 0
    assert [config["seed"] for config, *_ in points] == [0, 3]
    points.clear()
    words = ["train", "-m", "seed=0,3", "trainer.max_steps=200", f"resume={folder}"]
    assert cli.main(words) == 0 and points == []
    assert cli.main([*words, "init=runs/other"]) == 0
    assert [config["init"] for config, *_ in points] == ["runs/other"] * 2


def test_a_checkpoint_to_resume_belongs_to_its_point(points, monkeypatch):
    monkeypatch.setattr(sys.modules["genmodels.cli.train"], "run", lambda **config: points.append(config))
    assert cli.main(["train", "-m", "resume=a.ckpt,b.ckpt"]) == 0
    assert [(config["resume"], config.get("run_dir")) for config in points] == [("a.ckpt", None), ("b.ckpt", None)]


def test_a_folder_of_a_sweep_at_home(points, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cli.main(["train", "-m", "seed=0,3", "hydra.sweep.dir=~/sweep"]) == 0
    assert {Path(config["run_dir"]) for config, *_ in points} == {tmp_path / f"home/sweep/seed-{k}" for k in (0, 3)}
    assert (tmp_path / "home/sweep/multirun.yaml").is_file() and not (tmp_path / "~").exists()
    points.clear()
    for words in (["resume=~/sweep"], ["seed=0,3", "hydra.sweep.dir=~/sweep", "resume=last"]):
        assert cli.main(["train", "-m", *words]) == 0 and points == []


def test_a_named_folder_of_a_sweep(points, capsys):
    words = ["train", "-m", "seed=0,3", "hydra.sweep.dir=büro"]
    assert cli.main(words) == 0 and Path("büro/seed-3/result.json").is_file()
    assert cli.main(words) == 2 and "add resume=last" in capsys.readouterr().err
    points.clear()
    assert cli.main([*words, "resume=last"]) == 0 and points == []


def test_equal_points_run_once(points):
    assert cli.main(["train", "-m", "seed=0,0"]) == 0
    assert len(points) == 1


def test_joblib(tmp_path, monkeypatch, capfd):
    """One point fails; the other is as after a sweep without a launcher."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra scale")
    monkeypatch.chdir(tmp_path)
    words = ["train", *TINY, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert cli.main([*words, "model.optimizer.lr=0.001,1e30"]) == 1
    printed = capfd.readouterr()
    assert "failed: model.optimizer.lr=1e+30 (" in printed.err and "is not finite" in printed.err
    assert "1 of 2 points done" in printed.out
    assert (only_sweep() / "model.optimizer.lr-0.001" / "best.ckpt").is_file()
    assert cli.main([*words, "model.optimizer.lr=0.001,0.001", "resume=last"]) == 0
    assert "2 of 2 points done (1 of them before)" in capfd.readouterr().out


def test_submitit_local(tmp_path, monkeypatch, capfd):
    """What a job gives comes back, here a failure; what it prints is in its log."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra scale")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *TINY, "model.optimizer.lr=1e30", "hydra/launcher=submitit_local"]) == 1
    printed = capfd.readouterr()
    assert "is not finite" in printed.err and "0 of 1 points done" in printed.out
    (log,) = only_sweep().glob(".submitit/*/*.out")
    assert "--- train" in log.read_text()


TINY = ["-m", "model=nsf", "data=toy", "model.layers=1", "trainer.max_steps=3", "trainer.accelerator=cpu",
        "trainer.limit_validation=1", "trainer.progress=false", "trainer.sample_every_n_steps=0"]

SBATCH = """\
    #!/bin/bash
    # Keeps the script, and runs job 0 of the array; job 1 is killed before it has done anything.
    cp "$1" "$RECORD"
    export SLURM_ARRAY_JOB_ID=123 SLURM_ARRAY_TASK_ID=0 SLURM_JOB_ID=124 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 \\
        SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_NAME=train
    bash "$1" >/dev/null 2>&1 &
    echo Submitted batch job 123
    """
SRUN = """\
    #!/bin/bash
    while [[ $1 == --* ]]; do [[ $1 == --output || $1 == --error ]] && shift; shift; done
    exec "$@"
    """
SACCT = """\
    #!/bin/bash
    printf 'JobID|State|NodeList\\n123_0|RUNNING|a\\n123_1|OUT_OF_MEMORY|a\\n'
    """


def test_slurm(tmp_path, monkeypatch, capfd):
    """With stand-ins for SLURM's programs: what it is asked for, and a job of the array that dies."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra scale")
    from submitit import Job

    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        (tmp_path / name).write_text(textwrap.dedent(text))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("RECORD", str(tmp_path / "script"))
    monkeypatch.setattr(Job, "_results_timeout_s", 0)  # how long files of a finished job may take
    monkeypatch.chdir(tmp_path)
    slurm = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=1",
             "hydra.launcher.timeout_min=90", "hydra.launcher.array_parallelism=8"]
    assert cli.main(["train", *TINY, "seed=0,1", *slurm]) == 1
    script = (tmp_path / "script").read_text()
    for line in ("--array=0-1%2", "--partition=gpu", "--gpus-per-node=1", "--time=90", "--job-name=train"):
        assert f"#SBATCH {line}\n" in script
    printed = capfd.readouterr()
    assert "failed: seed=1 (job 123_1 ended without a result: see " in printed.err
    assert "1 of 2 points done" in printed.out and (only_sweep() / "seed-0" / "best.ckpt").is_file()


def test_no_cluster_is_one_line(points, tmp_path, monkeypatch, capsys):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra scale")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["train", "-m", "seed=0,3", "hydra/launcher=submitit_slurm"]) == 1
    printed = capsys.readouterr().err
    assert "SlurmLauncher: Could not detect" in printed and "Traceback" not in printed


def test_a_missing_launcher_is_one_line(points, capsys):
    assert cli.main(["train", "-m", "seed=0,3", "hydra/launcher=joblip"]) == 2
    assert "pip install 'genmodels[scale]'" in capsys.readouterr().err and points == []
    assert not list(Path("runs").glob("sweeps/*"))


@pytest.mark.parametrize(("ckpt", "swept", "more", "out"), [
    ("a/best.ckpt", ("seed",), {}, "a/report_seed-1.json"),
    ("a/last.ckpt", ("seed",), {"split": "val", "limit": 20}, "a/report_last_val_first20_seed-1.json"),
    ("a/best.ckpt", ("ckpt",), {}, None), (["a/best.ckpt"], ("split",), {}, None),
    (["a/best.ckpt", "b/best.ckpt"], ("split",), {}, "comparison_split-val"),
    ("a/best.ckpt", ("seed",), {"out": "mine.json"}, None),
])  # fmt: skip
def test_every_point_of_an_evaluation_has_a_place_of_its_own(ckpt, swept, more, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    for name in ("best", "last"):
        Path(f"a/{name}.ckpt").touch()
    point = Point("evaluate", swept, "sweep", ("evaluate.py",))
    word = {"seed": "seed=1", "ckpt": "ckpt=a/best.ckpt", "split": "split=val"}[swept[0]]
    assert point.report([word], {"ckpt": ckpt} | more) == ({} if out is None else {"out": out})
    if out == "comparison_split-val":  # the next sweep of other checkpoints
        assert point.report([word], {"ckpt": ckpt}) == {"out": f"{out}_2"}


def test_every_point_of_an_export_has_a_file_of_its_own():
    point = Point("export", ("ema",), "sweep", ("genmodels",))
    assert point.report(["ckpt=a", "ema=false"], {"ckpt": "a"}) == {"out": "model_ema-false.safetensors"}
    assert point.report(["ema=false"], {"ckpt": "a", "out": "mine.onnx"}) == {}


@pytest.mark.parametrize("word", ["seed=range(0)", "seed=range(3,1)", "model.optimizer.lr=glob(*)"])
def test_a_sweep_over_nothing_is_refused(points, capsys, word):
    assert cli.main(["train", "-m", word]) == 2 and points == []
    assert f"{word.partition('=')[0]} has no values: nothing would run" in capsys.readouterr().err
    assert not Path("runs").exists()
