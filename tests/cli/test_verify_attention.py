"""`genmodels verify what=attention`: one's own module, every mechanism, the mutants, and what it refuses."""

from __future__ import annotations

import json
import re
import sys

import pytest

from genmodels.cli.main import main
from genmodels.verification import attention as mechanisms
from genmodels.verification.attention import MECHANISMS

MINE = '''
import torch
from torch import nn


class Mine(nn.Module):
    """Attention by distance through a table that may be cut from the middle."""

    def __init__(self, dim, heads, cut, max_len):
        super().__init__()
        self.project, self.slope = nn.Linear(dim, dim), nn.Parameter(torch.ones(()))
        self.start = max_len // 2 if cut else 0

    def forward(self, x, mask=None):
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError("mask must be boolean")
        x = x if mask is None else x.masked_fill(~mask.mT, 0)
        place = torch.arange(x.shape[1], dtype=x.dtype)
        r = place - place[:, None] + self.start
        s = torch.sin(self.slope * r).expand(len(x), -1, -1)
        if mask is not None:
            s = torch.where(mask | ~mask.any(-1, keepdim=True), s, -torch.inf)
        y = s.softmax(-1).to(x.dtype) @ x
        return self.project(y).to(x.dtype)


def table(dim, heads, cut=False, max_len=100):
    return Mine(dim, heads, cut, max_len)


def number(dim, heads):
    return 3
'''
QUICK = ["compiler=none", "progress=false"]
RELATIVE = "capabilities=[relative]"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A package of the user's in the working directory."""
    (tmp_path / "myattention.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "myattention", raising=False)


def verify(*words):
    return main(["verify", "what=attention", *words, *QUICK])


def own(*words):
    return verify("object=myattention.table", "trust=[myattention]", *words)


def test_a_sound_module(mine, capsys):
    assert own(RELATIVE, "out=results.json") == 0
    shown = capsys.readouterr().out
    assert "Mine: " in shown and "every check passed" in shown
    with open("results.json") as file:
        checks = {check["name"]: check for check in json.load(file)["wholes"][0]["checks"]}
    assert checks["shift"]["status"] == checks["longest length"]["status"] == "passed"
    assert checks["cache"]["status"] == checks["double loop"]["status"] == "not applicable"
    assert checks["longest length"]["error"] == 0


def test_a_broken_module(mine, capsys):
    assert own(RELATIVE, "options.cut=true") == 1
    shown, error = capsys.readouterr()
    assert "longest length" in error and "shift" not in error
    assert "longest length  FAILED" in shown


def test_checks_that_were_not_asked_for_are_not_made(mine, capsys):
    assert own("verbose=true") == 0
    assert "relative is not among its capabilities" in capsys.readouterr().out


def test_every_mechanism(capsys, monkeypatch):
    few = {name: MECHANISMS[name] for name in ("Transformer-XL", "Swin", "local dense")}
    monkeypatch.setattr(mechanisms, "MECHANISMS", few)
    assert verify() == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in few) and "every check passed" in shown


@pytest.mark.parametrize("words, said", [
    (["object=myattention.number", "trust=[myattention]"], "makes a int, not a module"),
    (["object=myattention.absent", "trust=[myattention]"], "object=myattention.absent cannot be found"),
    (["object=myattention.table"], r"object=myattention.table is not of genmodels; .* trust=\[myattention\]"),
    (["object=myattention.table", "trust=[myattention]", "capabilities=[relatve]"], "did you mean 'relative'"),
    (["object=myattention.table", "trust=[myattention]", "capabilities=[2d]"], "says 2d and is tried on a space"),
    (["object=myattention.table", "trust=[myattention]", "shape=[2]"], "shape is that of a map here"),
    (["object=myattention.table", "trust=[myattention]", "options.wide=3"], "unexpected keyword argument 'wide'"),
    (["capabilities=[relative]"], "capabilities goes with object="),
    (["options.dim=16"], "options goes with object="),
])  # fmt: skip
def test_what_is_refused(mine, capsys, words, said):
    assert verify(*words) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert re.search(said, error), error


def test_object_goes_with_attention(mine, capsys):
    assert main(["verify", "model=glow", "object=myattention.table", *QUICK]) == 2
    assert "object goes with what=attention" in capsys.readouterr().err


def test_the_kinds_of_attention_are_spelled_out_and_checked(capsys):
    assert main(["train", "model=ddpm", "--keys"]) == 0
    assert "one of none, plain, absolute, swin2d" in " ".join(capsys.readouterr().out.split())
    for key in ("model=ddpm", "model.net.attention=swin"), ("model=glow", "model.attention=swin"):
        assert main(["train", *key]) == 2
        assert "must be one of none, plain, absolute, swin2d" in capsys.readouterr().err
