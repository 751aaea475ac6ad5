"""What becomes of a check: its status, its error, what is raised, and how it is shown."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from genmodels.core.errors import InputError, Interrupted, RunError
from genmodels.verification.check import (
    FAILED,
    NOT_APPLICABLE,
    NOT_VERIFIED,
    PASSED,
    Check,
    CheckFailed,
    CheckSet,
    Findings,
    Measured,
    NotApplicable,
    NotVerified,
    Report,
    summary,
)


def check_of(outcome, **options) -> Check:
    """The result of one check of tolerance 1 that measures or raises this."""
    checks = CheckSet()

    @checks.add("finite", 1.0, "the number is small")
    def finite(_):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    (check,) = checks.run(None, **options)
    return check


@pytest.mark.parametrize("outcome, status, error, note", [
    (Measured(1.0, "here"), PASSED, 1.0, "here"),
    (Measured(1.5), FAILED, 1.5, ""),
    (Measured(1.5, tolerance=2.0), PASSED, 1.5, ""),
    (Measured(math.inf), FAILED, math.inf, ""),
    (NotApplicable("no number"), NOT_APPLICABLE, None, "no number"),
    (NotVerified("too large"), NOT_VERIFIED, None, "too large"),
    (NotVerified("a warning", 3.0), NOT_VERIFIED, 3.0, "a warning"),
    (KeyError("x"), FAILED, math.inf, "raised KeyError: 'x'"),
    (RuntimeError("\n one \n two"), FAILED, math.inf, "raised RuntimeError: one"),
    (RunError("not finite"), FAILED, math.inf, "raised RunError: not finite"),
    (InputError("no such layer"), FAILED, math.inf, "raised InputError: no such layer"),
])  # fmt: skip
def test_status(outcome, status, error, note):
    check = check_of(outcome)
    assert (check.status, check.error, check.note) == (status, error, note)
    assert check.failed == (status == FAILED)
    assert Report("number", (check,)).passed == (status in (PASSED, NOT_APPLICABLE))


@pytest.mark.parametrize("bad, note", [
    (math.nan, "there, not finite"), (math.inf, "there, not finite"), (2.0, "there"),
])  # fmt: skip
def test_nan_is_no_pass_and_no_json_number(bad, note):
    check = check_of(Measured(bad, "there"))
    plain = Report("number", (check,)).to_dict()["checks"][0]
    assert check.failed and plain["error"] == (bad if bad == 2.0 else None) and plain["note"] == note


def test_a_tolerance_of_ones_own():
    assert check_of(Measured(2.0), tolerances={"finite": 3.0}).status == PASSED
    with pytest.raises(ValueError, match="no check 'finit': did you mean 'finite'"):
        check_of(Measured(2.0), tolerances={"finit": 3.0})


@pytest.mark.parametrize("raised", [RuntimeError("CUDA out of memory"), MemoryError(), Interrupted("stopped")])
def test_what_is_wrong_with_the_machine_is_not_held_against_the_layer(raised):
    with pytest.raises(type(raised)):
        check_of(raised)


def test_every_check_gets_the_inputs_as_they_were():
    checks, seen = CheckSet(), []
    for name in ("first", "second"):

        @checks.add(name, 0.0, "the input is untouched")
        def spoil(subject):
            seen.append(float(subject.x.sum()))
            subject.x.zero_()
            return Measured(0.0)

    assert all(check.status == PASSED for check in checks.run(SimpleNamespace(x=torch.ones(3)))) and seen == [3.0, 3.0]


def test_sets_are_joined_in_order():
    parts = []
    for name in ("b", "a"):
        parts.append(CheckSet())
        parts[-1].add(name, 0.0, "")(lambda subject: Measured(0.0))
    assert list(CheckSet(*parts).specs) == ["b", "a"] and [spec.name for spec in parts[0].choose()] == ["b"]


def test_rows_and_reports():
    small, large = Check("a", PASSED, 1e-12, 1e-10, "n"), Check("b", FAILED, 2.0, 1.0)
    later, other = Check("c", NOT_VERIFIED, None, 0.0, "no time"), Check("d", NOT_APPLICABLE, None, 0.0, "no mask")
    assert small.row() == ["a", "passed", "1.0e-12", "1e-10", "n"]
    report = Report("layer", (small, large, later, other))
    assert report.headline() == "layer: 1 failed, 1 not verified, 1 passed, 1 not applicable"
    assert (report.failed, report.unverified, report.passed) == (["b"], ["c"], False)
    assert report["b"] is large
    with pytest.raises(KeyError, match="no check 'e': the checks are a, b, c, d"):
        report["e"]
    with pytest.raises(CheckFailed, match="NOT VERIFIED") as raised:
        report.raise_if_failed()
    assert "no mask" not in str(raised.value) and "FAILED" in str(raised.value)
    assert summary([report]) == ("FAILED: b, NOT VERIFIED: c", "b 2e+00 of 1")
    found = Findings([report], [(["x"], [Report("x Flip (3,)", (small,))])])
    assert found.failed == ["b (layer)"] and found.unverified == ["c (layer)"] and not found.passed
    assert found.to_dict()["layers"][0]["alike"] == ["x"] and "no mask" not in found.text()
    assert "no mask" in found.text(verbose=True)
