"""What may differ when a run is resumed."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import math
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pytorch_lightning.trainer.connectors import accelerator_connector

from genmodels.cli.main import main
from genmodels.core.checkpoint import read_header
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError
from genmodels.data.toy import Toy
from genmodels.data.vision import Digits
from genmodels.models.checkpoint import read_checkpoint
from genmodels.models.normalizing_flows import NSF
from genmodels.models.optimizer import EMA
from genmodels.training import callbacks, processes, trainer
from genmodels.training.callbacks import FiniteMetrics
from genmodels.training.trainer import FREE, REPORTED, TrainerOptions, check_same, initial_batch, training_stream

HERE = Path("c")
SAME = {"model": {"_target_": "x", "net": {"channels": 8}}, "data": {"root": "/a", "num_workers": 0}, "seed": 0}


def test_only_the_same_run_is_resumed():
    header = {"config": SAME}
    check_same(header, {**SAME, "trainer": {"log_every_n_steps": 9}}, HERE)
    check_same(header, {**SAME, "data": {"root": "/elsewhere", "num_workers": 4}}, HERE)
    for change, said in (
        ({"seed": 1}, "seed is 0 in c but is 1 here"),
        ({"model": {"_target_": "x", "net": {"channels": 9}}}, "model.net.channels is 8"),
        ({"model": {"_target_": "x"}}, "model.net.channels is 8 in c but is not set here"),
        ({"data": {**SAME["data"], "batch_size": 3}}, "data.batch_size is not set in c but is 3"),
    ):
        with pytest.raises(InputError, match=said):
            check_same(header, {**SAME, **change}, HERE)


OTHERS = {"max_steps": 9, "max_epochs": 9, "accelerator": "cpu", "devices": 2, "strategy": "ddp", "num_nodes": 2,
          "precision": "64-true", "compile": True, "accumulate": 2, "validate_every_n_steps": 7, "limit_validation": 7,
          "limit_evaluation": 7, "sample_every_n_steps": 7, "log_every_n_steps": 7, "progress": False,
          "early_stopping": 3, "lr_find": True, "deterministic": True}  # fmt: skip


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(TrainerOptions)])
def test_every_setting_of_the_trainer_is_free_reported_or_refused(key):
    for then, now in (({}, {key: OTHERS[key]}), ({key: OTHERS[key]}, {})):
        header, config = {"config": {**SAME, "trainer": then}}, {**SAME, "trainer": now}
        if f"trainer.{key}" in FREE:
            assert check_same(header, config, HERE) == []
        elif f"trainer.{key}" in REPORTED:
            (line,) = check_same(header, config, HERE)
            assert f"trainer.{key} is" in line and REPORTED[f"trainer.{key}"] in line and "\n" not in line
        else:
            assert key in ("precision", "accumulate")
            with pytest.raises(InputError, match=f"trainer.{key} is"):
                check_same(header, config, HERE)


def test_a_default_that_is_spelt_out_is_no_change():
    config = {**SAME, "trainer": {"precision": "32-true", "accumulate": 1, "devices": 1}}
    assert check_same({"config": SAME}, config, HERE) == check_same({"config": config}, SAME, HERE) == []


def test_another_version_of_torch_is_reported():
    assert check_same({"config": SAME, "torch": torch.__version__}, SAME, HERE) == []
    (line,) = check_same({"config": SAME, "torch": "1.0"}, SAME, HERE)
    assert "torch 1.0" in line and "not bit for bit" in line


def test_tables_name_what_exists_and_do_not_overlap():
    known = {f"trainer.{field.name}" for field in dataclasses.fields(TrainerOptions)}
    assert not FREE & set(REPORTED)
    assert {key for key in FREE | set(REPORTED) if key.startswith("trainer.")} <= known


def indices(done: int, n: int, workers: int = 0) -> list[list[int]]:
    data = Digits(batch_size=300, num_workers=workers).prepare()
    data.order_seed = 5
    return [batch.index.tolist() for batch in itertools.islice(iter(training_stream(data, done)), n)]


@pytest.mark.parametrize("done", [0, 1, 3, 4, 5, 11])
def test_entered_anywhere_it_goes_on(done):
    assert indices(done, 6) == indices(0, 20)[done : done + 6]


def test_it_catches_a_position_that_is_ignored():
    assert indices(0, 6) != indices(0, 20)[3:9]


def test_an_epoch_holds_no_item_twice_and_epochs_differ():
    batches = indices(0, 8)  # 1258 items make 4 batches an epoch
    first, second = (list(itertools.chain(*batches[i : i + 4])) for i in (0, 4))
    assert len(set(first)) == len(first) == 1200 and len(set(second)) == 1200 and first != second


def test_the_initial_batch_spreads_over_the_training_split():
    data = Digits().prepare()
    assert len(initial_batch(data)) == len(data.split("train"))
    some = initial_batch(data, largest=10)
    assert len(some) == 10 and some.index[0] == 0 and int(some.index[-1]) == len(data.split("train")) - 1
    assert torch.equal(some.x, data.split("train").__getitems__(some.index).x)


@pytest.mark.parametrize(
    "options, steps",
    [
        ({}, 10_000),
        ({"max_steps": 7}, 7),
        ({"max_epochs": 3}, 30),
        ({"max_epochs": 3, "max_steps": 20}, 20),
        ({"max_epochs": 3, "accumulate": 4}, 8),
    ],
)
def test_steps(options, steps):
    assert TrainerOptions(**options).steps(batches_per_epoch=10) == steps


@pytest.mark.parametrize(
    "options",
    [{"precision": "16-mixed"}, {"max_steps": 0}, {"accumulate": 0}, {"validate_every_n_steps": -1}, {"num_nodes": 0},
     {"devices": "x"}, {"devices": "1,"}, {"devices": "0"}, {"accelerator": "banana"}, {"strategy": "banana"}],
)
def test_refused(options):
    (key,) = options
    with pytest.raises(ValueError, match=f"trainer.{key}"):
        TrainerOptions(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="trainer: No supported gpu backend found: trainer.accelerator=auto takes"):
        TrainerOptions(accelerator="gpu").build(10, [], str(tmp_path))


def test_devices_as_a_word_are_a_number():
    assert [TrainerOptions(devices=devices).devices for devices in ("2", "-1", "auto", "0,1")] == [2, -1, "auto", "0,1"]


TINY = ["train", "model=nsf", "data=toy", "~preset", "data.batch_size=32", "model.layers=1", "model.hidden=8",
        "logger=csv", "trainer.limit_validation=1", "trainer.sample_every_n_steps=0"]  # fmt: skip


def test_a_run_that_does_not_improve_stops_early(tmp_path, capsys):
    run = tmp_path / "run"
    words = [*TINY, f"run_dir={run}", "trainer.max_steps=20", "trainer.validate_every_n_steps=3",
             "trainer.early_stopping=2", "model.optimizer.lr=0"]
    assert main(words) == 0
    header = read_header(run / "last.ckpt")
    assert header["step"] == 9 and header["finished"] and read_header(run / "best.ckpt")["step"] == 3
    assert "stopped at step 9 of 20, after 2 validations" in capsys.readouterr().out
    assert main([*words, "resume=last"]) == 0 and read_header(run / "last.ckpt")["step"] == 9  # it stays stopped
    assert "stopped at step 9 of 20" in capsys.readouterr().out
    words[-2] = "trainer.early_stopping=3"
    assert main([*words, "resume=last"]) == 0 and read_header(run / "last.ckpt")["step"] == 12  # it goes on counting


def test_a_signal_in_the_last_validation_ends_a_sweep(tmp_path, monkeypatch, capsys):
    def stops(self, *arguments, check=FiniteMetrics.on_validation_end):
        check(self, *arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FiniteMetrics, "on_validation_end", stops)
    words = ["train", "-m", *TINY[1:], "trainer.max_steps=3", "trainer.validate_every_n_steps=3"]
    assert main([*words, "seed=0,1"]) == 130
    (only,) = tmp_path.glob("runs/sweeps/*/*/last.ckpt")
    assert only.parent.name == "seed-0" and read_header(only)["step"] == 3
    assert "interrupted at step 3, saved" in capsys.readouterr().err


def test_the_learning_rate_is_found_once_and_kept_by_a_resumed_run(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    assert main([*TINY, f"run_dir={run}", "trainer.max_steps=2", "trainer.lr_find=true"]) == 0
    rate = read_header(run / "last.ckpt")["config"]["model"]["optimizer"]["lr"]
    printed = capsys.readouterr()
    assert f"note: model.optimizer.lr={rate:g} by" in printed.out and 1e-6 < rate < 1
    assert "Finding" not in printed.err  # Lightning's bar, which is for terminals
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "find_learning_rate", None)
        assert main([*TINY, f"run_dir={run}", "trainer.max_steps=3", "trainer.lr_find=true", "resume=last"]) == 0
    header = read_header(run / "last.ckpt")
    assert header["config"]["model"]["optimizer"]["lr"] == rate and header["step"] == 3
    assert main([*TINY, "trainer.lr_find=true", "trainer.devices=2", f"run_dir={tmp_path}/two"]) == 2
    assert "one process" in capsys.readouterr().err


def test_a_longer_run_has_its_own_rate_from_the_first_step_on(tmp_path):
    """A checkpoint of the last step of a cosine has the rate 0."""
    run, rate = tmp_path / "run", ["model.optimizer.decay=cosine", "model.optimizer.warmup_steps=0"]
    words = [*TINY, *rate, f"run_dir={run}", "trainer.log_every_n_steps=1", "trainer.validate_every_n_steps=0"]
    assert main([*words, "trainer.max_steps=2"]) == 0
    assert main([*words, "trainer.max_steps=4", "resume=last"]) == 0
    with (run / "metrics.csv").open() as file:
        rates = [float(row["train/learning_rate"]) for row in csv.DictReader(file)]
    shape = [0.5 * (1 + math.cos(math.pi * n / total)) for n, total in ((0, 2), (1, 2), (2, 4), (3, 4))]
    assert [each / rates[0] for each in rates] == pytest.approx(shape, rel=1e-6)
    assert "Warning" not in (run / "log.txt").read_text()


def test_the_average_counts_its_updates_from_zero(tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr(EMA, "update", lambda self, source, step: counted.append(step))
    assert main([*TINY, f"run_dir={tmp_path}/run", "trainer.max_steps=3", "trainer.accumulate=2"]) == 0
    assert counted == [0, 1, 2]


@pytest.mark.parametrize("options, said", [
    ({"strategy": "ddp_fork", "devices": 2}, "trainer.strategy=ddp_fork copies this process"),
    ({"strategy": "ddp_spawn", "devices": 2}, "trainer.strategy=ddp_spawn copies this process"),
    ({"early_stopping": 3, "validate_every_n_steps": 0}, "trainer.early_stopping=3 needs validations"),
])  # fmt: skip
def test_refused_when_it_is_built(options, said, tmp_path):
    with pytest.raises(InputError, match=said):
        TrainerOptions(accelerator="cpu", **options).build(10, [], str(tmp_path))


def test_several_processes_are_not_started_from_an_interactive_session(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)  # Lightning has looked when it was imported
    with pytest.raises(InputError, match="not from an interactive session: put the call into a file"):
        TrainerOptions(accelerator="cpu", devices=2).build(10, [], str(tmp_path))
    TrainerOptions(accelerator="cpu").build(10, [], str(tmp_path))


def test_several_processes_make_the_only_training_of_a_script(tmp_path, monkeypatch):
    """Neither before nor after it others can be made; those of one process are as many as it likes."""
    one, two = (TrainerOptions(accelerator="cpu", strategy="ddp", devices=devices) for devices in (1, 2))

    def trains(options):
        with processes.training_of_a_script():
            options.build(10, [], str(tmp_path))

    for first, second, fine in ((one, one, True), (one, two, False), (two, one, False), (two, two, False)):
        monkeypatch.setattr(processes, "_trainings", 0)
        monkeypatch.setattr(processes, "_several", False)
        trains(first)
        with contextlib.nullcontext() if fine else pytest.raises(InputError, match="this one trains more than once"):
            trains(second)
    two.build(10, [], str(tmp_path))  # by a command, in the same process
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")  # whose processes run the script together
    for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(key, "2")
    for key in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(key, "0")
    trains(two)


def test_a_run_in_a_thread_leaves_signals_alone(tmp_path):
    found, handler = [], signal.getsignal(signal.SIGTERM)
    words = [*TINY, f"run_dir={tmp_path}/run", "trainer.max_steps=2"]
    thread = threading.Thread(target=lambda: found.append(main(words)))
    thread.start()
    thread.join()
    assert found == [0] and signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("bad", [4, 6, 7])
def test_an_item_without_finite_loss_is_named_in_any_of_the_accumulated_batches(tmp_path, monkeypatch, capsys, bad):
    wrong = []

    def loss(self, batch, generator, true=NSF.loss):
        found = true(self, batch, generator)
        if self.batches_seen == bad:
            wrong.append(int(batch.index[5]))
            spoilt = found.per_example * torch.tensor(math.nan).where(torch.arange(32) == 5, 1.0)
            return dataclasses.replace(found, value=spoilt.mean(), per_example=spoilt)
        return found

    monkeypatch.setattr(NSF, "loss", loss)
    assert main([*TINY, f"run_dir={tmp_path}/run", "trainer.max_steps=5", "trainer.accumulate=4"]) == 1
    line = capsys.readouterr().err
    assert f"step 1: the loss is not finite for item {wrong[0]} of " in line and "look at that item" in line
    assert set(wrong) == {wrong[0]} and len(wrong) == 2  # the second time with the same noise, to find a layer


@pytest.mark.parametrize("option", ["model.optimizer.warmup_steps=100000000", "model.optimizer.half_life=100000000"])
def test_lengths_beyond_any_run_are_saved(tmp_path, option):
    decay = ["model.optimizer.decay=exponential"] if "half_life" in option else []
    assert main([*TINY, f"run_dir={tmp_path}/run", "trainer.max_steps=1", option, *decay]) == 0
    assert read_header(tmp_path / "run" / "last.ckpt")["step"] == 1


class Diverging:
    """Stands in for Lightning's finder: losses that are finite up to a rate of 0.05."""

    def __init__(self, built):
        pass

    def lr_find(self, network, loader, max_lr, **options):
        if max_lr > 0.05:
            raise RunError("the loss is not finite")
        rates = np.logspace(-6, np.log10(max_lr), 100)
        losses = -np.tanh(np.log10(3 * rates / max_lr))  # falls fastest at a third of max_lr
        return SimpleNamespace(results={"lr": list(rates), "loss": list(running_means(losses))})


def running_means(losses):
    """As Lightning's finder records losses."""
    running, found = 0.0, []
    for step, loss in enumerate(losses, 1):
        running = 0.98 * running + 0.02 * loss
        found.append(running / (1 - 0.98 ** (step + 1)))
    return np.array(found)


def test_smaller_rates_are_tried_where_losses_are_not_finite(monkeypatch):
    monkeypatch.setattr(trainer, "Tuner", Diverging)
    network = NSF(DataSpec("plane", (2,)), layers=1, hidden=8)
    monkeypatch.setattr(TrainerOptions, "build", lambda *_: SimpleNamespace(strategy=SimpleNamespace()))
    found = trainer.find_learning_rate(TrainerOptions(), network, Toy().prepare())
    assert found == pytest.approx(0.01 / 3, rel=0.15)


def test_losses_of_steps_are_those_of_the_training(monkeypatch):
    seen, single = [], []
    loss, of_finder = NSF.training_step, trainer._single_losses

    def step(self, *given):
        out = loss(self, *given)
        seen.append(float(out["loss"] if isinstance(out, dict) else out))
        return out

    monkeypatch.setattr(NSF, "training_step", step)
    monkeypatch.setattr(trainer, "_single_losses", lambda means: single.append(of_finder(means)) or single[-1])
    monkeypatch.setattr(trainer, "_TRIES", 30)
    data = Toy().prepare()
    network = NSF(data.spec, layers=1, hidden=8)
    network.initialize(trainer.initial_batch(data))
    trainer.find_learning_rate(TrainerOptions(), network, data)
    assert seen == pytest.approx(single[0], rel=1e-5)


@pytest.mark.parametrize("explodes", [1.0, 1e9, 1e30])
def test_the_rate_of_the_steepest_fall(explodes):
    rates, ours, lightnings = np.logspace(-6, 0, 100), [], []
    for seed in range(5):
        noise = 0.1 * np.random.default_rng(seed).normal(size=100)
        losses = 2 - np.tanh(2 * (np.log10(rates) + 3)) + noise  # falls fastest at 1e-3
        losses[75:80] += explodes
        ours.append(trainer.steepest(rates, trainer._single_losses(running_means(losses))))
        means = running_means(losses)[10:-1]  # Lightning's suggestion, the steepest fall per difference of the rate
        lightnings.append(rates[10:-1][np.gradient(means, rates[10:-1]).argmin()])
    assert np.abs(np.log10(ours) + 3).max() < 0.4 and np.abs(np.log10(lightnings) + 3).max() > 1


def test_no_rate_is_found_where_the_loss_does_not_fall(monkeypatch):
    noise = np.random.default_rng(0).normal(size=100)
    assert trainer.steepest(np.logspace(-6, 0, 100), 0.01 * noise + np.linspace(0, 1, 100)) is None
    monkeypatch.setattr(trainer, "steepest", lambda *_: None)
    data = Toy().prepare()
    network = NSF(data.spec, layers=1, hidden=8)
    network.initialize(trainer.initial_batch(data))
    with pytest.raises(InputError, match="the loss falls at none of them: give model.optimizer.lr"):
        trainer.find_learning_rate(TrainerOptions(), network, data)


def test_weights_of_another_quantity_are_refused_and_other_options_are_said(tmp_path, capsys):
    small = ["train", "model=ddpm", "model.net.channels=8", "data.batch_size=8", "logger=csv",
             "trainer.max_steps=1", "trainer.limit_validation=1", "trainer.sample_every_n_steps=0"]
    assert main([*small, f"run_dir={tmp_path}/first"]) == 0
    again = [*small, f"init={tmp_path}/first", f"run_dir={tmp_path}/second"]
    assert main([*again, "model.parameterisation=eps"]) == 2
    assert "another quantity: model.parameterisation is 'v' there and 'eps' here" in capsys.readouterr().err
    assert main([*again, "model.schedule=linear"]) == 0
    assert "has other options: model.schedule is 'cosine' there and 'linear' here" in capsys.readouterr().out


def test_a_checkpoint_without_its_folder_brings_its_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(callbacks, "metric_of", lambda model: float(model.global_step))  # worse with every validation
    assert main([*TINY, f"run_dir={tmp_path}/run", "trainer.max_steps=2"]) == 0
    (tmp_path / "copy").mkdir()
    os.replace(tmp_path / "run" / "last.ckpt", tmp_path / "copy" / "my.ckpt")
    assert main(["train", f"resume={tmp_path}/copy/my.ckpt", "trainer.max_steps=4"]) == 0
    header = read_header(tmp_path / "copy" / "last.ckpt")
    assert header["step"] == 4 and header["family"] == "nsf"
    assert read_header(tmp_path / "copy" / "best.ckpt")["step"] == 4  # the better one is in the other folder


@pytest.mark.parametrize("every, validations", [(0, 1), (2, 2), (3, 2), (500, 1)])
def test_the_end_is_validated_once(tmp_path, monkeypatch, every, validations):
    seen = []
    monkeypatch.setattr(FiniteMetrics, "on_validation_end", lambda *_: seen.append(1))
    words = [*TINY, f"run_dir={tmp_path}", "trainer.max_steps=4", f"trainer.validate_every_n_steps={every}"]
    assert main(words) == 0 and len(seen) == validations


def test_training_starts_from_the_weights_of_another_run(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    words = [*TINY, "trainer.max_steps=20", "model.ema_decay=[0.5,0.9]"]
    assert main([*words, f"run_dir={first}"]) == 0
    still = ["data.set=moons", "model.optimizer.lr=0", f"init={first}/last.ckpt"]
    assert main([*words, *still, f"run_dir={second}", "trainer.lr_find=false"]) == 0
    before, after = (read_checkpoint(run / "last.ckpt") for run in (first, second))
    assert after["genmodels"]["step"] == 20 and after["genmodels"]["config"]["init"] == f"{first}/last.ckpt"
    own = {name: value for name, value in after["state_dict"].items()
           if name.startswith("core.") and name.rpartition(".")[2] not in ("location", "scale")}
    assert own
    for name, value in own.items():  # the average of the smaller decay, as in sampling, also where it is averaged
        wanted = before["state_dict"][name.replace("core.", "ema.averages.0.", 1)]
        for found in (value, *(after["state_dict"][name.replace("core.", f"ema.averages.{k}.", 1)] for k in (0, 1))):
            torch.testing.assert_close(found, wanted)
    assert any(not torch.equal(value, before["state_dict"][name]) for name, value in own.items())  # not the raw ones
    plain = [word for word in still if not word.startswith("init=")]
    assert main([*words, *plain, f"run_dir={second}", "trainer.max_steps=21", "resume=last"]) == 0
    again = read_checkpoint(second / "last.ckpt")["genmodels"]  # which still says what the run began with
    assert again["step"] == 21 and again["config"]["init"] == f"{first}/last.ckpt"
    capsys.readouterr()
    for more, said in ((["model.hidden=9"], "model; model.hidden is 8 there and 9 here\n"),
                       (["init=nowhere.ckpt"], "nowhere.ckpt"),
                       (["model=maf", "~model.layers"], "it holds a nsf, and this is a maf")):
        assert main([*words, *still, f"run_dir={tmp_path}/third", *more]) in (1, 2)
        shown, error = capsys.readouterr()
        assert said in error and len(error.strip().splitlines()) == 1, error
        assert (shown == "") == (said == "nowhere.ckpt")  # a file is looked at before the run begins
        assert not (tmp_path / "third").exists()


@pytest.mark.parametrize(("family", "keys"), [
    ("ddpm", ("location", "scale")), ("score", ("location", "core.schedule.largest")),
    ("nsf", ("core.flow.bijection.layers.0.location", "ema.averages.0.flow.bijection.layers.0.scale")),
])  # fmt: skip
def test_a_run_from_other_weights_has_the_statistics_of_its_own_data(tmp_path, family, keys):
    words = ["train", f"model={family}", "data=toy", "~preset", "data.batch_size=32", "logger=csv",
             "trainer.max_steps=2", "trainer.limit_validation=1", "trainer.sample_every_n_steps=0"]  # fmt: skip
    found = {}
    for name, more in (("first", ["data.set=8gaussians"]), ("own", ["data.set=moons"]),
                       ("second", ["data.set=moons", f"init={tmp_path}/first/last.ckpt"])):
        assert main([*words, *more, f"run_dir={tmp_path}/{name}"]) == 0
        found[name] = read_checkpoint(tmp_path / name / "last.ckpt")["state_dict"]
    for key in keys:
        assert torch.equal(found["second"][key], found["own"][key])
        assert not torch.equal(found["second"][key], found["first"][key])
