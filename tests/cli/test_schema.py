"""Annotations against values: the table of what passes, what is converted and what is refused."""

from __future__ import annotations

import ast
import math

import pytest

from genmodels.cli.schema import Anything, Choice, Scalar, Schema, fit, kinds, show
from genmodels.cli.signatures import load
from genmodels.core.errors import InputError
from genmodels.core.files import groups

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
    return kinds(ast.parse(annotation, mode="eval").body, load("genmodels.core.errors"))


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
    assert kinds(None, load("genmodels.core.errors")) == (Anything(),)


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


RUN = "genmodels.cli.train.run"


def config(data: str = "digits.Digits") -> dict:
    return {
        "model": {"_target_": "genmodels.models.ddpm.DDPM", "net": {}, "optimizer": {}},
        "data": {"_target_": f"genmodels.data.{data}"},
        "trainer": {}, "logger": {}, "checkpoint": {},
    }  # fmt: skip


def with_value(base: dict, path: str, value) -> dict:
    """A copy of a nested dictionary with one value set."""
    head, _, rest = path.partition(".")
    return {**base, head: with_value(base.get(head) or {}, rest, value) if rest else value}


def leaves(schema: Schema) -> list[tuple[str, object]]:
    """Every settable path whose default is a plain value, with that value."""
    found = []
    for path, _, key in schema.walk(config()):
        if key.default is None or path in ("model", "data"):
            continue
        value = ast.literal_eval(key.default)
        found.append((path, list(value) if isinstance(value, tuple) else value))
    return found


def misspelt(name: str) -> str:
    """The name with two neighbouring letters swapped in the middle."""
    middle = len(name) // 2
    return name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]


def answer(schema: Schema, given: dict) -> str:
    with pytest.raises(InputError) as caught:
        schema.check(given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def accepts_all_keys(schema: Schema) -> None:
    for path, value in leaves(schema):
        assert with_value({}, path, value)  # the path can be written
        schema.check(with_value(config(), path, value))


def answers_misspellings(schema: Schema) -> None:
    checked = 0
    names = {path.rpartition(".")[2] for path, _ in leaves(schema)}
    for path, value in leaves(schema):
        parent, _, name = path.rpartition(".")
        wrong = misspelt(name)
        if len(name) < 5 or wrong == name or wrong in names:
            continue
        full = f"{parent}.{wrong}" if parent else wrong
        told = answer(schema, with_value(config(), full, value))
        assert f"unknown key {full!r} (given): did you mean {name!r}?" in told
        checked += 1
    assert checked > 25


LAWS = [accepts_all_keys, answers_misspellings]


@pytest.mark.parametrize("law", LAWS)
def test_law_holds(law):
    law(Schema(RUN))


class LetsAllPass(Schema):
    """Planted: unknown keys are ignored."""

    def _keys(self, config, takers, path):
        return config


class KnowsTopLevelOnly(Schema):
    """Planted: an argument's annotation is not followed into its class."""

    def _takers(self, value, alternatives):
        return super()._takers(value, ()) or []


class RefusesNet(Schema):
    """Planted: a valid key is taken for an unknown one."""

    def _keys(self, config, takers, path):
        if path == "model.net" and config:
            raise InputError(self._unknown(f"{path}.{next(iter(config))}", takers))
        return super()._keys(config, takers, path)


@pytest.mark.parametrize(
    ("law", "wrong"),
    [(answers_misspellings, LetsAllPass), (answers_misspellings, KnowsTopLevelOnly), (accepts_all_keys, RefusesNet)],
)
def test_law_catches_planted_bug(law, wrong):
    with pytest.raises(BaseException) as caught:
        law(wrong(RUN))
    assert isinstance(caught.value, AssertionError | InputError | pytest.fail.Exception)


ANSWERS = [
    ("model.net.chanels", 3, ["unknown key 'model.net.chanels'", "'channels'", "UNet takes", "genmodels/nn/unet.py"]),
    ("model.net.hiden", 3, ["'hidden'", "MLPDenoiser takes", "genmodels/nn/perceptron.py"]),
    ("max_steps", 3, ["did you mean 'trainer.max_steps'?"]),
    ("model.channels", 3, ["did you mean 'model.net.channels'?", "has it)"]),
    ("model.chanels", 3, ["did you mean 'model.net.channels'?", "has it)"]),
    ("lr", 0.1, ["did you mean 'model.optimizer.lr'?"]),
    ("zzzzzz", 3, ["unknown key 'zzzzzz' (given): this command takes model, data"]),
    ("trainer.max_steps", "abc", ["trainer.max_steps must be an integer or null, got 'abc' (given)"]),
    ("trainer.precision", "bf16", ["one of 32-true, 64-true, bf16-mixed", "did you mean 'bf16-mixed'?"]),
    ("model.schedule", "cosin", ["did you mean 'cosine'?"]),
    ("model.net", 3, ["model.net must be keys of UNet or keys of MLPDenoiser or null, got '3'"]),
    ("model.net.multipliers", [1, "b"], ["must be a list of integers, got"]),
    ("model.optimizer.betas", [0.9], ["a list of 2 numbers"]),
    ("seed", {"a": 1}, ["seed must be an integer"]),
    ("model", 3, ["model must be a group of key: value, got '3'"]),
    ("model._target_", "os.system", ["is not a class of genmodels", "trust=[os]"]),
    ("model._target_", "genmodels.models.ddpm.DDPN", ["there is no such class"]),
    ("data.batch_size", "???", ["data.batch_size is missing, items per optimisation step", "add for example"]),
]


@pytest.mark.parametrize(("path", "value", "parts"), ANSWERS)
def test_one_line_that_says_what_to_do(path, value, parts):
    line = answer(Schema(RUN), with_value(config(), path, value))
    for part in parts:
        assert part in line


def test_missing_keys_are_named_with_an_example_and_after_misspelt_ones():
    folder = config("image_folder.ImageFolder")
    assert answer(Schema(RUN), folder).startswith("data.root is missing")
    assert "did you mean 'root'?" in answer(Schema(RUN), with_value(folder, "data.rot", "a"))
    assert answer(Schema("genmodels.cli.info.run"), {}).endswith("ckpt=runs/ddpm-digits/<time>/best.ckpt")


def test_trusted_packages_may_be_named():
    named = with_value(config(), "model._target_", "json.JSONDecoder")
    assert "trust=[json]" in answer(Schema(RUN), named)
    trusting = Schema(RUN, trust=["json"])
    trusting.check({**named, "model": {"_target_": "json.JSONDecoder", "strict": True}})
    assert "JSONDecoder takes object_hook" in answer(trusting, with_value(named, "model.strikt", True))


def test_values_arrive_in_the_type_of_their_annotation():
    checked = Schema(RUN).check(with_value(config(), "trainer.max_steps", 1e3) | {"run_dir": 7})
    assert checked["trainer"]["max_steps"] == 1000 and isinstance(checked["trainer"]["max_steps"], int)
    assert checked["run_dir"] == "7"


def test_the_place_is_asked_for_the_path_that_is_wrong():
    asked = []
    schema = Schema(RUN, lambda path: asked.append(path) or f"<{path}>")
    assert "(<model.net.chanels>)" in answer(schema, with_value(config(), "model.net.chanels", 3))
    assert asked == ["model.net.chanels"]


def test_every_literal_of_every_key_is_accepted():
    schema = Schema(RUN)
    for path, _, key in schema.walk(config()):
        for kind in kinds(key.annotation, key.module):
            for value in kind.values if isinstance(kind, Choice) else ():
                schema.check(with_value(config(), path, value))
            if kind == Scalar("None"):
                schema.check(with_value(config(), path, None))


def test_groups_hold_what_the_tests_name():
    assert "ddpm" in groups()["model"] and "digits" in groups()["data"]
