"""Reports: written whole, no number that JSON does not know, every value with its mark and its error."""

from __future__ import annotations

import json
import math
from pathlib import Path

from genmodels.evaluation.report import report_target, table, with_error, write_report


def report(**row) -> dict:
    return {
        "checkpoint": {"family": "ddpm", "weights": "ema", "parameters": 1234567, "step": 9, "path": "a/best.ckpt"},
        "data": {"name": "digits", "split": "test", "items": 359, "levels": 17},
        "likelihood": [{
            "mark": "<=", "kind": "lower_bound", "bits_per_dim": 2.0, "se_data": 0.01, "se_mc": None,
            "made": {"terms": 999}, **row,
        }],
        "references": [{"name": "uniform", "unit": "bits_per_dim", "value": math.log2(17)}],
        "seconds": {"likelihood": 1.0},
    }


def test_numbers_that_are_not_finite_become_null(tmp_path):
    write_report({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}}, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


def test_the_table_marks_a_bound_and_says_how_it_was_made():
    text = table([report(), report(made={"terms": 999, "draws": 20}, se_mc=0.002)])
    assert "<= 2.0000(100)" in text and "all of 999 terms" in text and "20 of 999 terms" in text
    assert "0.0020 comes from the draws" in text and "uniform 4.0875" in text
    assert "not finite" in table([report(bits_per_dim=None)])


def test_error_digits():
    assert with_error(1.23456, 0.00042) == "1.2346(4)"


def test_where_reports_go():
    best, other = Path("runs/a/best.ckpt"), Path("runs/a/last.ckpt")
    assert report_target(best, None, False) == Path("runs/a/report.json")
    assert report_target(other, None, False) == Path("runs/a/report_last.json")
    assert report_target(best, "x.json", False) == Path("x.json")
    assert report_target(best, None, False, "val", 5) == Path("runs/a/report_val_first5.json")
    assert report_target(best, "out", True) == Path("out/a/report.json")
