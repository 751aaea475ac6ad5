"""From words to exit codes: each foreseen failure is one line, everything else keeps its traceback."""

from __future__ import annotations

import errno
import sys
import types

import pytest

from genmodels.cli import main as cli
from genmodels.core.errors import InputError, RunError

FAILURES = [
    (InputError("n must be at least 1"), 2, "n must be at least 1"),
    (RunError("loss is not finite\nat step 3"), 1, "loss is not finite at step 3"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (OSError(errno.ENOSPC, "No space left on device", "runs/a"), 1, "no space left on the disk (runs/a)"),
    (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee docs"), 1, "data.batch_size or the model"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 1, "or the model"),
    (MemoryError(), 1, "data.batch_size or the model"),
    (RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904]"), 1, "out of memory"),
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), 1, "lower data.num_workers"),
    (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4"), 1, "another process of the run has ended"),
    (RuntimeError("operator torchvision::nms does not exist"), 1, "genmodels doctor"),
]


def fail(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(("error", "code", "part"), FAILURES, ids=lambda v: type(v).__name__)
def test_a_foreseen_failure_is_one_line(capsys, error, code, part):
    assert cli.guarded("train", fail(error)) == code
    printed = capsys.readouterr().err
    assert printed.startswith("genmodels train: ") and part in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    "error", [ZeroDivisionError(), ValueError("shape"), RuntimeError("memory format"), OSError(2, "x")]
)
def test_a_programming_error_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        cli.guarded("train", fail(error))


def test_batch_size_is_named_as_the_command_has_it():
    assert "reduce batch_size" in cli.explain("sample", MemoryError())[0]


def test_fewer_validation_items_than_processes_are_refused_before_anything_starts(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "model=nsf", "data=toy", "data.n_val=3", "trainer.devices=4", "trainer.accelerator=cpu"]
    assert cli.main(words) == 2
    printed = capsys.readouterr().err
    assert "3 validation items, fewer than the 4 processes" in printed and printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.fixture
def fake_train(monkeypatch):
    """`genmodels train` with a run that only notes what it was given."""
    given = []
    module = types.ModuleType("genmodels.cli.train")
    module.run = lambda **config: given.append(config)
    monkeypatch.setitem(sys.modules, "genmodels.cli.train", module)
    return given


def test_a_run_gets_the_configuration_as_keywords(fake_train):
    assert cli.main(["train", "seed=3", "model.net.channels=16"]) == 0
    (config,) = fake_train
    assert config["seed"] == 3 and config["model"]["net"]["channels"] == 16
    assert set(config) == {"model", "data", "trainer", "logger", "seed"}


def test_showing_the_configuration_runs_nothing(fake_train, capsys):
    assert cli.main(["train", "--cfg", "job", "seed=3"]) == 0
    assert "seed: 3" in capsys.readouterr().out
    assert cli.main(["train", "--cfg", "job", "--resolve", "run_dir=runs/${seed}", "seed=3"]) == 0
    assert "run_dir: runs/3\n" in capsys.readouterr().out
    assert cli.main(["train", "--keys"]) == 0
    keys = capsys.readouterr().out
    assert "model.optimizer.lr=" in keys and "* data.batch_size=32" in keys and "checkpoint.every_n_steps=" in keys
    assert fake_train == []


def test_keys_are_those_that_can_be_set(fake_train, capsys):
    cli.main(["train", "data=toy", "--keys"])
    listed = capsys.readouterr().out
    assert "data.name=" in listed or "data.kind=" in listed or "data: Toy" in listed
    assert "trainer.max_steps" in listed
    for command, key in (("sample", "steps="), ("push", "licence="), ("corpus", "out=")):
        assert cli.main([command, "--keys"]) == 0 and key in capsys.readouterr().out


WORDS = [
    (["trian"], "did you mean 'train'?"),
    (["train", "--multirn"], "did you mean '--multirun'?"),
    (["train", "--cfg"], "--cfg needs a value"),
    (["train", "--cfg", "hydra"], "only --cfg job"),
    (["train", "--resolve"], "add --cfg job"),
    (["train", "--config-dir", "/nowhere"], "there is no such folder"),
    (["train", "model=dppm"], "unknown model 'dppm'"),
    (["sample"], "ckpt is missing"),
    (["sample", "ckpt=a", "n=abc"], "n must be an integer or null, got 'abc'"),
    (["train", "seed=-1"], "seed must be at least 0, got -1"),
    (["sample", "ckpt=a", "seed=-1"], "seed must be at least 0, got -1"),
    (["evaluate", "ckpt=a", "split=tset"], "did you mean 'test'?"),
    (["info"], "ckpt is missing"),
    (["info", "--ful"], "did you mean '--full'?"),
]


@pytest.mark.parametrize(("words", "part"), WORDS, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_wrong_words_are_one_line_and_exit_code_2(capsys, words, part):
    assert cli.main(words) == 2
    printed = capsys.readouterr().err
    assert part in printed and printed.count("\n") == 1


def test_help_of_every_command(capsys):
    assert cli.main([]) == 0 and cli.main(["--version"]) == 0
    for command in (*cli.CONFIGURED, *cli.PLAIN):
        assert cli.main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"{command}" in text and "examples:" in text
        assert max(map(len, text.splitlines())) <= 130
    cli.main(["train", "--help"])
    text = capsys.readouterr().out
    assert "ddpm (default)" in text and "digits (default)" in text and "checkpoint.every_n_steps=" in text
    assert "  preset      <model>_<data> (default" in text and "glow_mnist" in text


def test_a_warning_is_one_line(monkeypatch, capsys):
    import warnings

    from genmodels.cli import info

    monkeypatch.setattr(info, "main", lambda words: warnings.warn("look\n  at this", stacklevel=1))
    assert cli.main(["info", "x.ckpt"]) == 0
    assert capsys.readouterr().err == "genmodels info: look at this\n"


def test_what_all_processes_refuse_is_said_once_on_each_machine(monkeypatch, capsys):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert cli.main(["trian"]) == 2 and capsys.readouterr().err.count("\n") == lines
