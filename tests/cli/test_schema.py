"""Annotations against values: the table of what passes, what is converted and what is refused."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

from genmodels.cli.compose import composer
from genmodels.cli.main import main
from genmodels.cli.schema import Anything, Choice, Scalar, Schema, fit, kinds, show
from genmodels.cli.signatures import load
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError, explain
from genmodels.core.files import check_writable, found_at, groups
from genmodels.core.random import Dropout
from genmodels.models.build import build, construct
from genmodels.speech.audio import MelConfig
from genmodels.speech.text import CHARACTERS
from genmodels.training.callbacks import CheckpointOptions
from genmodels.training.loggers import LoggerOptions
from genmodels.training.trainer import TrainerOptions
from tests.untrained import write

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
    module = load("genmodels.models.diffusion")
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
        line = answer(schema, with_value(config(), full, value))
        assert f"unknown key {full!r} (given): did you mean {name!r}?" in line
        checked += 1
    assert checked > 25


CHECKS = [accepts_all_keys, answers_misspellings]


@pytest.mark.parametrize("check", CHECKS)
def test_check_holds(check):
    check(Schema(RUN))


class LetsAllPass(Schema):
    """Mutant: unknown keys are ignored."""

    def _keys(self, config, takers, path):
        return config


class KnowsTopLevelOnly(Schema):
    """Mutant: an argument's annotation is not followed into its class."""

    def _takers(self, value, alternatives):
        return super()._takers(value, ()) or []


class RefusesNet(Schema):
    """Mutant: a valid key is taken for an unknown one."""

    def _keys(self, config, takers, path):
        if path == "model.net" and config:
            raise InputError(self._unknown(f"{path}.{next(iter(config))}", takers))
        return super()._keys(config, takers, path)


@pytest.mark.parametrize(
    ("check", "wrong"),
    [(answers_misspellings, LetsAllPass), (answers_misspellings, KnowsTopLevelOnly), (accepts_all_keys, RefusesNet)],
)
def test_check_catches_mutants(check, wrong):
    with pytest.raises(BaseException) as caught:
        check(wrong(RUN))
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
    ("model.net", 3, ["model.net must be keys of UNet or keys of DiT or keys of MLPDenoiser or null, got '3'"]),
    ("model.net.multipliers", [1, "b"], ["must be a list of integers, got [1, 'b']"]),
    ("model.optimizer.betas", [0.9], ["a list of 2 numbers"]),
    ("seed", {"a": 1}, ["seed must be an integer"]),
    ("model", 3, ["model must be a group of key: value, got '3'"]),
    ("model._target_", "os.system", ["is not a class of genmodels", "trust=[os]"]),
    ("model._target_", "genmodels.models.ddpm.DDPN", ["there is no such class"]),
    ("data.batch_size", "???", ["data.batch_size is missing, items per optimiser step", "add for example"]),
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


def test_items_of_lists_are_answered_with_the_nearest_choice():
    line = answer(Schema("genmodels.cli.evaluate.run"), {"ckpt": ["a.ckpt"], "stages": ["checks", "likelyhood"]})
    assert "got ['checks', 'likelyhood']" in line and line.endswith(": did you mean 'likelihood'?")


def test_every_literal_of_every_key_is_accepted():
    schema = Schema(RUN)
    for path, _, key in schema.walk(config()):
        for kind in kinds(key.annotation, key.module):
            for value in kind.values if isinstance(kind, Choice) else ():
                assert found_at(schema.check(with_value(config(), path, value)), path) == (value,)
            if kind == Scalar("None"):
                assert found_at(schema.check(with_value(config(), path, None)), path) == (None,)


def test_groups_hold_what_the_tests_name():
    assert "ddpm" in groups()["model"] and "digits" in groups()["data"]


# ---- values that no key can mean, over every key of the schema: each is refused in one line, and none is a ----


BAD = [math.nan, math.inf, -math.inf, -1, 0, -0.5, 10**30, "x", "", [], [1], [2, 3], [math.nan, math.nan], {"a": 1},
       True, None]  # fmt: skip
NEVER = (math.nan, math.inf, -math.inf, 10**30, "")
DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
PLANE = DataSpec("toy_moons", (2,))
SPEECH = DataSpec("speech", (80, 64), mel=dict(vars(MelConfig())), statistics={"mean": -5.0, "std": 2.0}, text={
    "symbols": list(CHARACTERS), "blanks": True, "language": "en", "examples": ["a cab"]})  # fmt: skip
SPECS = {"digits": DIGITS, "toy": PLANE, "speech": SPEECH}
SMALL = {
    "ddpm": ("digits", ["model.net.channels=4", "model.net.multipliers=[1]", "model.net.blocks=1"]),
    "realnvp": ("digits", ["model.hidden=4", "model.depth=1"]),
    "glow": ("digits", ["model.hidden=4", "model.levels=1", "model.steps=1"]),
    "nsf": ("toy", ["model.hidden=4", "model.layers=1"]),
    "maf": ("toy", ["model.hidden=4", "model.layers=1"]),
    "tarflow": ("digits", ["model.width=4", "model.heads=2", "model.blocks=1", "model.depth=1"]),
    "masked_diffusion": ("digits", ["model.net.width=8", "model.net.heads=2", "model.net.depth=1", "model.width=4"]),
    "jet": ("digits", ["model.width=8", "model.heads=2", "model.couplings=1", "model.depth=1"]),
    "energy": ("toy", ["model.net.hidden=[4]"]),
    "score": ("toy", ["model.net.hidden=4"]),
}
SPEAKER = ["model.steps=1", "model.hidden=8", "model.depth=1", "model.encoder.channels=8", "model.encoder.depth=1",
           "model.encoder.hidden=8"]  # fmt: skip
SETS = {"toy": [], "arrays": ["data.file=x.npz"], "image_folder": ["data.root=x"], "mnist": [], "cifar10": [],
        "shards": ["data.root=x"], "speech": [], "text": ["data.file=x.txt"]}  # fmt: skip


def built(config: dict, part: str) -> None:
    """What a run makes of a part of its configuration before it reads data."""
    checked = Schema(RUN).check(config)
    if part == "model":
        model = build(checked["model"], DIGITS if "digits" in str(config["data"]) else PLANE)
        model.optimizer_options.build(model.core.parameters(), 10)
    elif part == "data":
        build(checked["data"])
    elif part == "trainer":
        options = construct(TrainerOptions, **checked["trainer"])
        options.build(options.steps(10), [], ".")
    elif part in ("logger", "checkpoint"):
        construct({"logger": LoggerOptions, "checkpoint": CheckpointOptions}[part], **checked[part])


def faults(config: dict, parts: tuple[str, ...]) -> list[str]:
    """Bad values that end in a traceback, in several lines, or are taken although no key can mean them."""
    found, tried = [], 0
    for path, taker, _ in list(Schema(RUN).walk(config)):
        part = path.split(".")[0]
        if part not in parts or path == part:
            continue
        for bad in BAD:
            tried += 1
            try:
                built(with_value(config, path, bad), part)
                if any(bad is value or bad == value for value in NEVER) and "str" not in str(taker.keys[
                        path.rpartition(".")[2]].type_text):
                    found.append(f"{path}={bad!r} is taken")
            except (InputError, RunError) as error:
                if "\n" in str(error).strip():
                    found.append(f"{path}={bad!r}: {error}")
            except Exception as error:
                if explain("train", error) is None:
                    found.append(f"{path}={bad!r}: {type(error).__name__}: {error}")
    assert tried > 50
    return found


def config_of(*words: str) -> dict:
    with composer("train") as hydra:
        return hydra.compose(list(words))


@pytest.mark.filterwarnings("ignore")
def test_of_the_run():
    config = config_of("model=score", "data=toy", "model.net.hidden=4")
    assert faults(config, ("trainer", "logger", "checkpoint")) == []


@pytest.mark.parametrize("name", SMALL)
def test_of_models(name):
    data, words = SMALL[name]
    assert faults(config_of(f"model={name}", f"data={data}", "~preset", *words), ("model",)) == []


@pytest.mark.parametrize("name", SETS)
def test_of_data_sets(name):
    model = "glow_tts" if name == "speech" else "nsf"
    assert faults(config_of(f"model={model}", f"data={name}", "~preset", *SETS[name]), ("data",)) == []


def test_the_table_finds_what_is_taken_and_what_is_a_traceback(monkeypatch):
    config = config_of("model=score", "data=toy", "~preset", "model.net.hidden=4")
    monkeypatch.setattr("genmodels.cli.schema.usable", lambda value: True)
    monkeypatch.setattr(Dropout, "__init__", lambda self, p=0.5: torch.nn.Dropout.__init__(self, p))
    found = faults(config, ("model",))
    assert "model.net.dropout=nan is taken" in found


@pytest.mark.parametrize(("words", "code", "said"), [
    (["run_dir="], 2, "run_dir= is empty"), (["resume="], 2, "resume= is empty"),
    (["trainer=[1]"], 2, "unknown trainer"), (["data=[toy,toy]"], 2, "unknown data"), (["trainer=[]"], 2, "unknown"),
    (["trainer.devices=-7"], 2, "trainer.devices must be at least 1"), (["trainer.devices=x"], 2, "as in 0,1, got 'x'"),
    (["model.optimizer.lr=inf"], 2, "numbers are finite"), (["seed=99999999999999999999"], 2, "at most 64 bits"),
    (["model.optimizer.betas=[2,3]"], 2, "betas must be two numbers in [0, 1)"),
    (["model.net.dropout=nan"], 2, "numbers are finite"), (["model.net.dropout=1"], 2, "dropout must lie in [0, 1)"),
    (["run_dir=/proc"], 1, "cannot write in the run folder /proc"), (["run_dir=file/x"], 1, "Not a directory"),
    (["-cd", "broken"], 2, "is not YAML"),
])  # fmt: skip
def test_a_bad_run_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, words, code, said):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("broken").mkdir()
    Path("broken/train.yaml").write_text("a: [1")
    plain = ["model=score", "data=toy", "data.n_train=200", "model.net.hidden=4", "logger=csv", "trainer.max_steps=1"]
    assert main(["train", *plain, "trainer.progress=false", *words]) == code
    message = capsys.readouterr().err.strip()
    assert said in message.splitlines()[-1] and "Traceback" not in message
    assert sorted(place.name for place in tmp_path.iterdir()) == ["broken", "file"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A run folder of a small untrained model of each family."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("ddpm", "nsf", "energy", "score", "glow_tts"):
        data, words = SMALL.get(name, ("speech", SPEAKER))
        config = config_of(f"model={name}", f"data={data}", "~preset", *words)
        torch.manual_seed(0)
        model = build(config["model"], SPECS[data])
        model.run_config = config
        write(model, folder / name / "best.ckpt")
    return folder


REFUSED_OPTIONS = {
    ("sample", "ddpm"): [
        "steps=0", "steps=-1", "steps=x", "steps=2.5", "n=0", "n=-1", "batch_size=0", "start=-1", "frames=1",
        "guidance=1e38 cond=3",
        "guidance=nan", "guidance=inf", "guidance_rescale=-1", "guidance_rescale=2", "guidance_interval=[1]",
        "guidance_interval=[nan,1]",
        "guidance_interval=[3,-3]", "temperature=-1", "temperature=nan", "sampler=dpm", "sampler=hmc", "spacing=even",
        "eta=0.5", "eta=nan sampler=ddim", "eta=-1 sampler=ddim", "churn=-1 sampler=edm", "churn=nan sampler=edm",
        "clip=often", "cond=10", "cond=-1", "cond=x", "inpaint=3", "rounds=2", "rounds=0 inpaint=3 mask=none.png",
        "edit=3 strength=2", "edit=3 strength=nan", "edit=99999", "strength=0.5", "size=[0,8]", "size=[8]",
        "size=[100000,100000]", "size=[-8,8]", "step_size=0.1", "speed=1", "text=hello", "stream=true",
        "inverse_temperature=2", "ema=2", "ema=-1", "ema=0.5", "seed=-1", "seed=x", "device=nowhere", "device=meta",
        "path=a.txt", "out=a.txt"],
    ("sample", "nsf"): ["steps=5", "sampler=ddim", "guidance=2", "temperature=-1", "size=[3]", "cond=0", "path=a.png"],
    ("sample", "energy"): [
        "steps=0", "step_size=-1", "step_size=nan", "step_size=0", "inverse_temperature=0", "inverse_temperature=-1",
        "inverse_temperature=nan", "temperature=0.5", "sampler=ddim", "guidance=2"],
    ("sample", "score"): ["steps=0", "steps=-3", "inverse_temperature=nan", "temperature=-1", "sampler=hmc"],
    ("sample", "glow_tts"): [
        f"text=hello {word}" for word in (
            "speed=-1", "speed=0", "speed=nan", "speed=inf", "speed=x", "pause=-1", "pause=nan", "pause=inf",
            "seconds=0",
            "seconds=-1", "seconds=nan", "temperature=-1", "temperature=nan", "vocoder=nice", "chunk=0",
            "chunk=5", "stream=true chunk=-1", "on_unknown=maybe", "durations=none.json", "cond=3", "n=0", "steps=5",
            "sampler=ddim", "out=a.txt", "text_file=none.txt", "ema=2")
        ] + ["text=", "text_file=none.txt"],
    ("evaluate", "ddpm"): [
        "importance_samples=[8]",
        "draws=0", "draws=-1", "draws=1.5", "draws=many", "replicates=1", "replicates=0", "limit=-1", "limit=0",
        "limit=some", "samples=0", "samples=-5", "samples=1", "batch_size=0", "processes=0", "processes=-1", "steps=0",
        "temperature=nan", "temperature=-1"],
    ("evaluate", "energy"): ["chains=0", "chains=1", "chains=-1", "chains=1.5", "densities=0", "densities=-1",
                             "normaliser=x", "draws=5"],
    ("evaluate", "nsf"): ["importance_samples=0", "importance_samples=-1", "importance_samples=[]", "draws=5",
                          "ode=true"],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("command", "family"), REFUSED_OPTIONS)
def test_bad_options_of_a_command_are_one_line(checkpoints, tmp_path, monkeypatch, capsys, command, family, every):
    """Each loads a checkpoint, so the fast suite takes every fourth row."""
    monkeypatch.chdir(tmp_path)
    wrong = []
    for words in REFUSED_OPTIONS[command, family][::every]:
        text = ["text=hello"] if words.startswith("text=hello ") else []
        try:
            code = main([command, f"ckpt={checkpoints / family}", *text, *words.removeprefix("text=hello ").split()])
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
        said = capsys.readouterr().err.strip().splitlines()
        if code != 2 or len(said) != 1:
            wrong.append((words, code, said[-3:]))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_place_that_cannot_be_written_is_found_beforehand(tmp_path):
    (tmp_path / "file").touch()
    for target, error in (("file/x.png", InputError), ("file/a/x.png", InputError), ("folder.png", InputError)):
        (tmp_path / "folder.png").mkdir(exist_ok=True)
        with pytest.raises(error, match="out="):
            check_writable("out", tmp_path / target)
    with pytest.raises(RunError, match="cannot be written"):
        check_writable("out", Path("/proc/x.png"))
    check_writable("out", tmp_path / "new" / "folder" / "x.png")
    assert sorted(place.name for place in tmp_path.iterdir()) == ["file", "folder.png"]
