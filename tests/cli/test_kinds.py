"""Annotations against values: the table of what passes, what is converted and what is refused."""

from __future__ import annotations

import ast
import math

import pytest

from genmodels.cli.kinds import Anything, fit, kinds, show
from genmodels.cli.signatures import load

REFUSED = object()
TABLE = [
    ("int", 3, 3), ("int", 1e4, 10_000), ("int", 1.5, REFUSED), ("int", "abc", REFUSED), ("int", True, REFUSED),
    ("int", None, REFUSED), ("int", math.inf, REFUSED), ("int", 2**63, REFUSED), ("int", 1e30, REFUSED),
    ("int", 2**62, 2**62),
    ("float", math.nan, REFUSED), ("float", -math.inf, REFUSED), ("float", 10**400, REFUSED), ("float", 1e30, 1e30),
    ("list[float]", [1.0, math.nan], REFUSED),
    ("float", 3, 3), ("float", 0.5, 0.5), ("float", "0.5x", REFUSED), ("float", False, REFUSED),
    ("bool", True, True), ("bool", 1, REFUSED), ("bool", "true", REFUSED),
    ("str", "a", "a"), ("str", 7, "7"), ("str", 1.5, REFUSED), ("str", None, REFUSED), ("str", True, REFUSED),
    ("str | int", 7, 7), ("int | str", 7, 7), ("int | str", "auto", "auto"), ("str | float", 2.5, 2.5),
    ("str | None", None, None), ("Optional[int]", None, None), ("Optional[int]", "x", REFUSED),
    ("Union[int, bool]", True, True), ("'int | None'", None, None), ("typing.Optional[int]", 2, 2),
    ("Literal['a', 'b']", "a", "a"), ("Literal['a', 'b']", "c", REFUSED), ("Literal[1, 2]", True, REFUSED),
    ("Literal['32', 16]", 16, 16), ("Literal['a'] | float", 0.5, 0.5),
    ("list[int]", [1, 2], [1, 2]), ("list[int]", [1, "b"], REFUSED), ("list[int]", 1, REFUSED), ("list[int]", [], []),
    ("list[str]", ["a", 3], ["a", "3"]), ("list[int | str]", [1, "a"], [1, "a"]), ("list", ["x", 1.5], ["x", 1.5]),
    ("tuple[int, ...]", [1, 2, 3], [1, 2, 3]), ("tuple[float, float]", [0.9, 0.999], [0.9, 0.999]),
    ("tuple[float, float]", [0.9], REFUSED), ("Sequence[int]", [1], [1]), ("list[list[int]]", [[1], [2]], [[1], [2]]),
    ("list[list[int]]", [[1], 2], REFUSED), ("Any", "x", "x"), ("object", 3, 3), ("Path", "a/b", "a/b"),
]  # fmt: skip


def parse(annotation: str):
    return kinds(ast.parse(annotation, mode="eval").body, load("genmodels.errors"))


@pytest.mark.parametrize(("annotation", "value", "expected"), TABLE)
def test_value_against_annotation(annotation, value, expected):
    ok, converted = fit(value, parse(annotation))
    assert ok == (expected is not REFUSED)
    if ok:
        assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize("annotation", ["Unknown", "Unknown[int]", "lambda: 1", "a.b.C"])
def test_what_cannot_be_read_allows_anything(annotation):
    assert parse(annotation) == (Anything(),)


def test_missing_annotation_allows_anything():
    assert kinds(None, load("genmodels.errors")) == (Anything(),)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [("int", "an integer"), ("list[int]", "a list of integers"), ("tuple[float, float]", "a list of 2 numbers"),
     ("Literal['a', 'b']", "one of a, b"), ("list[int | str]", "a list of integers or texts"),
     ("bool", "true or false")],
)  # fmt: skip
def test_kinds_in_words(annotation, text):
    assert [str(kind) for kind in parse(annotation)] == [text]


def test_classes_of_the_package_are_nodes_and_those_of_torch_are_no_choice():
    module = load("genmodels.models.ddpm")
    assert [str(k) for k in kinds(ast.parse("UNet | MLPDenoiser | None", mode="eval").body, module)] == [
        "keys of UNet", "keys of MLPDenoiser", "null"]  # fmt: skip
    assert [str(k) for k in kinds(ast.parse("torch.Tensor | None", mode="eval").body, module)] == ["null"]


def test_values_as_one_would_type_them():
    assert [show(v) for v in (None, True, 0.5, "a", [1])] == ["null", "true", "0.5", "a", "[1]"]
