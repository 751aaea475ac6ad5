"""Reports: written whole, no number that JSON does not know, every value with its mark and its error."""

from __future__ import annotations

import json
import math
from pathlib import Path

from genmodels.core.likelihood import with_error
from genmodels.report.compare import report_target, write_report


def test_numbers_that_are_not_finite_become_null(tmp_path):
    write_report({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}}, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


def test_error_digits():
    assert with_error(1.23456, 0.00042) == "1.2346(4)"


def test_where_reports_go():
    best, other = Path("runs/a/best.ckpt"), Path("runs/a/last.ckpt")
    assert report_target(best, None, False) == Path("runs/a/report.json")
    assert report_target(other, None, False) == Path("runs/a/report_last.json")
    assert report_target(best, "x.json", False) == Path("x.json")
    assert report_target(best, None, False, "val", 5) == Path("runs/a/report_val_first5.json")
    assert report_target(best, "out", True) == Path("out/a/report.json")
