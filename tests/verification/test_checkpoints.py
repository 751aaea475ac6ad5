"""Checks of trained models: each has a mutant that fails it, and sound models pass all of them."""

from __future__ import annotations

import time

import pytest
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import Interrupted, RunError
from genmodels.flows.tarflow import MetaBlock, tarflow
from genmodels.models.flow import FlowModel
from genmodels.verification.checkpoints import CHECKS, NO_TIME, ModelSubject, verify_checkpoint
from genmodels.verification.maps import LAYER_CHECKS, TrainedFlow
from tests.mutants.models import MUTANTS, OwnFlow
from tests.parameters import scattered


@pytest.mark.parametrize("name", MUTANTS)
def test_exactly_the_right_checks_fail(name, short_pilot):
    checks = MUTANTS[name].run()
    for status, expected in (("failed", MUTANTS[name].failing), ("not verified", MUTANTS[name].unverified)):
        assert {check.name for check in checks if check.status == status} == expected, checks


def test_every_check_has_a_mutant():
    noticed = set().union(*(mutant.failing | mutant.unverified for mutant in MUTANTS.values()))
    assert noticed == {*LAYER_CHECKS.specs, *CHECKS.specs}


def subject(model, until: float = 60.0) -> ModelSubject:
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    return ModelSubject(model, Batch(x), "raw", 0, {"weights": "raw", "seed": 0}, None, time.monotonic() + until, x)


class LostFrame(MetaBlock):
    """A meta-block whose log-determinant is off by a thousandth."""

    def _forward(self, x, cond, mask):
        z, logdet = super()._forward(x, cond, mask)
        return z, logdet + 1e-3


class Sequences(FlowModel):
    """A flow of masked sequences, with a last layer of this class."""

    family = "sequences"

    def __init__(self, last: type[MetaBlock], levels: int | None = None):
        super().__init__(DataSpec("tracks", (2, 6), levels=levels), ema_decay=0.0)
        self.assemble(tarflow((2, 6), patch=2, blocks=2, width=8, depth=1, heads=2))
        self.core.flow.bijection.layers[1].layers[-1].__class__ = last


@pytest.mark.parametrize("last, wrong", [
    (MetaBlock, set()), (LostFrame, {"log-determinant of each layer", "log-determinant of the whole"}),
])  # fmt: skip
def test_padding_takes_no_part_in_the_checks_of_layers(last, wrong):
    model = Sequences(last)
    mask = torch.arange(6) < torch.tensor([2, 4, 6, 4, 2, 6, 4, 2])[:, None, None]
    x = torch.where(mask, torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(0)), -11.5)  # silence of mels
    model.initialize(Batch(x, mask=mask))
    scattered(model.core, seed=0)
    flow = TrainedFlow(model.eval(), Batch(x, mask=mask), "raw", time.monotonic() + 60)
    found = {check.name: check.status for check in LAYER_CHECKS.run(flow)}
    assert {name for name, status in found.items() if status != "passed"} == wrong and len(found) >= 7


def test_padding_of_integers_is_not_recovered_and_not_missed():
    model = Sequences(MetaBlock, levels=4)
    mask = torch.arange(6) < torch.tensor([2, 4, 6, 4, 2, 6, 4, 2])[:, None, None]
    x = torch.randint(0, 4, (8, 2, 6), generator=torch.Generator().manual_seed(0)).masked_fill(~mask, 3)
    model.initialize(Batch(x, mask=mask))
    flow = TrainedFlow(model.eval(), Batch(x, mask=mask), "raw", time.monotonic() + 60)
    assert next(c for c in LAYER_CHECKS.run(flow) if c.name == "round trip in float32").error == 0.0


def test_without_time_nothing_is_verified():
    checks = verify_checkpoint(subject(OwnFlow(), until=-1.0))
    assert len(checks) == 12 and all(check.status == "not verified" and check.note == NO_TIME for check in checks)


def test_an_error_fails_the_check_it_is_raised_in(monkeypatch):
    model = OwnFlow()
    monkeypatch.setattr(model, "sample", lambda *given, **options: raises(RunError("sample 1 is not finite")))
    failed = [check for check in verify_checkpoint(subject(model)) if check.failed]
    assert [check.name for check in failed] == ["sample 3 alone and in a batch", "density integrates to one"]
    assert failed[0].note == "raised RunError: sample 1 is not finite"
    assert failed[0].to_dict()["error"] is None and failed[0].to_dict()["note"].endswith(", not finite")


def test_stopping_is_no_failure(monkeypatch):
    model = OwnFlow()
    monkeypatch.setattr(model, "sample", lambda *given, **options: raises(Interrupted("stopped")))
    with pytest.raises(Interrupted):
        verify_checkpoint(subject(model))


def raises(error: Exception):
    raise error
