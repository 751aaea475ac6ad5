"""What may differ when a run goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from genmodels.errors import InputError
from genmodels.training.resume import FREE, TOLD, check_same
from genmodels.training.trainer import TrainerOptions

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
          "deterministic": True}  # fmt: skip


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(TrainerOptions)])
def test_every_setting_of_the_trainer_is_free_told_or_refused(key):
    for then, now in (({}, {key: OTHERS[key]}), ({key: OTHERS[key]}, {})):
        header, config = {"config": {**SAME, "trainer": then}}, {**SAME, "trainer": now}
        if f"trainer.{key}" in FREE:
            assert check_same(header, config, HERE) == []
        elif f"trainer.{key}" in TOLD:
            (line,) = check_same(header, config, HERE)
            assert f"trainer.{key} is" in line and TOLD[f"trainer.{key}"] in line and "\n" not in line
        else:
            assert key in ("precision", "accumulate")
            with pytest.raises(InputError, match=f"trainer.{key} is"):
                check_same(header, config, HERE)


def test_a_default_that_is_spelt_out_is_no_change():
    config = {**SAME, "trainer": {"precision": "32-true", "accumulate": 1, "devices": 1}}
    assert check_same({"config": SAME}, config, HERE) == check_same({"config": config}, SAME, HERE) == []


def test_another_version_of_torch_is_told():
    assert check_same({"config": SAME, "torch": torch.__version__}, SAME, HERE) == []
    (line,) = check_same({"config": SAME, "torch": "1.0"}, SAME, HERE)
    assert "torch 1.0" in line and "not bit for bit" in line


def test_tables_name_what_exists_and_do_not_overlap():
    known = {f"trainer.{field.name}" for field in dataclasses.fields(TrainerOptions)}
    assert not FREE & set(TOLD)
    assert {key for key in FREE | set(TOLD) if key.startswith("trainer.")} <= known
