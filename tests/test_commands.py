"""The commands as a user types them, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from genmodels.cli import main as cli
from tests.commands import run

REPOSITORY = Path(__file__).resolve().parents[1]

HEAVY = ("torch", "pytorch_lightning", "torchvision", "numpy", "scipy", "wandb")


def modules_after(*words: str) -> tuple[int, set[str]]:
    """The exit code of a command and the heavy modules it imported."""
    code = "import sys; from genmodels.cli.main import main; code = main(sys.argv[1:]); print(code, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=REPOSITORY)
    number, *names = done.stdout.splitlines()[-1].split()
    return int(number), set(names)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["train", "model.net.chanels=3"], 2),
        (["train", "model=dppm"], 2),
        (["train", "trainer.max_steps=abc"], 2),
        (["train", "--cfg", "job"], 0),
        (["train", "--keys"], 0),
        (["train", "-m", "seed=0,x"], 2),
        (["sample", "ckpt=a", "n=abc"], 2),
        (["evaluate"], 2),
    ],
    ids=str,
)
def test_nothing_heavy_before_the_configuration_is_valid(words, code):
    got, names = modules_after(*words)
    assert got == code and not names & set(HEAVY)


def test_help_does_not_even_need_hydra():
    got, names = modules_after("train", "--help")
    assert got == 0 and not names & {"hydra", "omegaconf", *HEAVY}


@pytest.mark.parametrize("missing", [["hydra", "omegaconf", "torch"], ["torch"]], ids=" ".join)
@pytest.mark.parametrize("program", ["train.py", "sample.py", "evaluate.py", "genmodels/__main__.py"])
def test_missing_requirements_are_one_line(program, missing, tmp_path):
    words = [*(["evaluate"] if "main" in program else []), *([] if program == "train.py" else [f"ckpt={tmp_path}"])]
    code = ("import runpy, sys; sys.modules.update(dict.fromkeys(sys.argv[1].split(','))); "
            "sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')")
    for folder, where in ((REPOSITORY, "."), (tmp_path, REPOSITORY)):
        done = subprocess.run([sys.executable, "-c", code, ",".join(missing), str(REPOSITORY / program), *words],
                              capture_output=True, text=True, cwd=folder)
        assert done.returncode == 1 and done.stdout == ""
        command = {"genmodels/__main__.py": "evaluate"}.get(program, program.removesuffix(".py"))
        line = f"genmodels {command}: not installed: {', '.join(missing)}. Run pip install -e {where}\n"
        assert done.stderr == line


@pytest.mark.parametrize("command", ["train", "sample", "evaluate"])
def test_the_scripts_are_the_commands(command, genmodels, tmp_path):
    words = ["nonsense=1", "ckpt=a"]
    script = subprocess.run([sys.executable, str(REPOSITORY / f"{command}.py"), *words], cwd=tmp_path,
                            capture_output=True, text=True)
    installed = genmodels(command, *words)
    assert script.returncode == installed.returncode == 2
    assert script.stderr == installed.stderr and script.stderr.count("\n") == 1 and "Traceback" not in script.stderr


@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_a_missing_checkpoint_is_one_line(command, capsys):
    assert cli.main([command, "ckpt=nowhere.ckpt"]) in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nowhere.ckpt" in error


def test_the_working_directory_is_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, code in ((["--cfg", "job"], 0), (["nonsense=1"], 2), (["-m", "seed=0,x"], 2)):
        assert cli.main(["train", *words]) == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words, errors", [
    ("--help", False), ("--help", True), ("train --keys", False), ("train model=nowhere", False),
    ("train model=nowhere", True),
    *(pytest.param(words, errors, marks=pytest.mark.slow) for words in ("doctor", "sample --help", "verify --keys")
      for errors in (False, True)),
])  # fmt: skip
def test_a_reader_that_leaves_ends_a_command_quietly(words, errors, tmp_path):
    """`genmodels ... | head -1`: no traceback, and the exit code of a program ended by SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run([sys.executable, "-m", "genmodels", *words.split()], stdout=writer, cwd=tmp_path, env=env,
                              stderr=writer if errors else subprocess.PIPE, text=True, timeout=300)
    finally:
        os.close(writer)
    refused = words.endswith("nowhere") and not errors  # nothing but the line on stderr
    assert done.returncode == (2 if refused else 141)
    assert errors or done.stderr.count("\n") <= 1 and "rror" not in done.stderr


def test_a_reader_that_leaves_ends_a_training_quietly(tmp_path):
    """In a process that has everything imported, with a pipe in place of its output."""
    words = "train data=toy model=realnvp model.hidden=8 data.n_val=9 logger=csv trainer.max_steps=2 run_dir=a"
    program = f"""
import os, sys
from genmodels.cli.main import main

reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
sys.stdout = open(1, "w")
sys.exit(main({words.split()!r}))
"""
    done = run("-c", program, cwd=tmp_path)
    assert done.returncode == 141 and "rror" not in done.stderr, done.stderr


def test_an_own_broken_pipe_keeps_its_traceback(monkeypatch):
    def broken(argv):
        raise BrokenPipeError

    monkeypatch.setattr(cli, "_command", broken)
    with pytest.raises(BrokenPipeError):
        cli.main([])
