"""Completion: what may follow, and that bash gets it right around equals signs."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from genmodels.cli import main as cli
from genmodels.cli.completion import candidates

CASES = [
    ("genmodels ", "train ", "model="),
    ("genmodels train ", "model=", "sampler="),
    ("python train.py mod", "model.net.channels=", "data="),
    ("python train.py model=", "model=nsf ", "model=digits "),
    ("python train.py preset=glow_m", "preset=glow_mnist ", "preset=glow_toy "),
    ("genmodels train model=nsf data=toy model.", "model.layers=", "model.num_steps="),
    ("genmodels train model=nonsense model.", "model.num_steps=", "model.layers="),
    ("python3 /somewhere/train.py trainer.precision=", "trainer.precision=bf16-mixed ", "trainer.precision=16 "),
    ("genmodels train -m trainer.progress=", "trainer.progress=false ", "trainer.progress=null "),
    ("genmodels sample ckpt=a.ckpt te", "temperature=", "model="),
    ("genmodels train --", "--keys ", "-m "),
    ("genmodels train -cd own data=image_folder data.r", "data.root=", "data.file="),
    ("genmodels doctor data=", "data=image_folder ", "model="),
    ("genmodels doctor --fix-list bad.txt data=image_folder data.", "data.root=", "data.file="),
    ("genmodels doctor -", "--fix-list ", "--keys "),
]


@pytest.mark.parametrize("line, offered, not_offered", CASES)
def test_candidates(line, offered, not_offered):
    found = candidates(line)
    assert offered in found and not_offered not in found


@pytest.mark.parametrize("line", ["python other.py mod", "python train.py ckpt=runs/", "genmodels info run", "python",
                                  "genmodels train 'text=an open", "python train.py 'model="])
def test_the_shell_offers_files_elsewhere(line):
    assert candidates(line) == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash(tmp_path, capfd):
    """Bash replaces only what follows the last equals sign."""
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "genmodels").write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import sys; from genmodels.cli.main "
                                        "import main; sys.exit(main(sys.argv[1:]))' \"$@\"\n")
    (tmp_path / "genmodels").chmod(0o755)
    script = capfd.readouterr().out + f"PATH={tmp_path}:$PATH\n" + (
        "for COMP_LINE in 'python train.py data=fash' 'python train.py trainer.max_s'; do\n"
        "COMP_POINT=${#COMP_LINE}; _genmodels; printf '<%s>' \"${COMPREPLY[@]}\"; done")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout == "<fashion_mnist ><trainer.max_steps=>", done.stderr


@pytest.mark.parametrize("words", [[], ["fish"], ["bash", "bash"]])
def test_another_shell_is_one_line(words, capsys):
    assert cli.main(["completion", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
