"""The commands as a user types them, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("command", ["train", "sample", "evaluate"])
def test_the_scripts_are_the_commands(command, genmodels, tmp_path):
    words = ["nonsense=1", "ckpt=a"]
    script = subprocess.run([sys.executable, str(REPOSITORY / f"{command}.py"), *words], cwd=tmp_path,
                            capture_output=True, text=True)
    installed = genmodels(command, *words)
    assert script.returncode == installed.returncode == 2
    assert script.stderr == installed.stderr and script.stderr.count("\n") == 1 and "Traceback" not in script.stderr


def test_a_missing_checkpoint_is_one_line(genmodels):
    for command in ("sample", "evaluate"):
        done = genmodels(command, "ckpt=nowhere.ckpt")
        assert done.returncode in (1, 2) and done.stderr.count("\n") == 1 and "nowhere.ckpt" in done.stderr


def test_the_working_directory_is_left_alone(genmodels, tmp_path):
    genmodels("train", "--cfg", "job")
    genmodels("train", "nonsense=1")
    genmodels("train", "-m", "seed=0,x")
    assert list(tmp_path.iterdir()) == []
