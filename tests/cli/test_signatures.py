"""Signatures read from source agree with signatures that Python itself reports."""

from __future__ import annotations

import importlib
import inspect
import textwrap

import pytest

from genmodels.cli import signatures
from genmodels.cli.signatures import target

REAL = [
    "genmodels.models.ddpm.DDPM",
    "genmodels.models.few_steps.ProgressiveModel",
    "genmodels.models.normalizing_flows.Glow",
    "genmodels.models.text_to_mel.MelEnergy",
    "genmodels.models.optimizer.Optimizer",
    "genmodels.nn.UNet",
    "genmodels.nn.MLPDenoiser",
    "genmodels.data.vision.Digits",
    "genmodels.data.vision.CIFAR10",
    "genmodels.data.toy.Toy",
    "genmodels.training.trainer.TrainerOptions",
    "genmodels.training.loggers.LoggerOptions",
    "genmodels.cli.train.run",
    "genmodels.cli.info.run",
]


def python_parameters(found) -> list[inspect.Parameter]:
    """The keyword-only parameters of a class or function; before them those that a class passes on to its bases."""
    levels = []
    for one in [base.__init__ for base in found.__mro__] if inspect.isclass(found) else [found]:
        parameters = inspect.signature(one).parameters.values()
        levels.append({p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY})
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list({name: p for level in reversed(levels) for name, p in level.items()}.values())


def agrees_with_python(dotted: str, keys: dict) -> None:
    """The keys read from source are the keyword-only parameters, in order, with equal defaults."""
    place, _, name = dotted.rpartition(".")
    expected = python_parameters(getattr(importlib.import_module(place), name))
    assert list(keys) == [p.name for p in expected]
    for parameter in expected:
        default = keys[parameter.name].default
        assert (default is None) == (parameter.default is inspect.Parameter.empty)
        if default is not None and parameter.default.__class__.__module__ == "builtins":
            assert eval(default) == parameter.default  # our own source text


@pytest.mark.parametrize("dotted", REAL)
def test_keys_are_those_that_python_reports(dotted):
    agrees_with_python(dotted, target(dotted).keys)


def test_options_that_travel_as_a_dataclass_are_keys():
    """Those of sampling, without what a command line cannot hold, and with the command's own in place of its own."""
    keys, fields = target("genmodels.cli.sample.run").keys, target("genmodels.core.samples.SamplingOptions").keys
    assert set(fields) <= set(keys) and not {"weights", "known", "keep", "progress"} & set(keys)
    assert keys["guidance"].default == "1.0" and keys["guidance"].meaning.startswith("scale of classifier-free")
    assert keys["path"].type_text == "str | None" and fields["path"].type_text == "int"


def test_check_catches_a_forgotten_key():
    keys = dict(target("genmodels.nn.MLPDenoiser").keys)
    del keys["depth"]
    with pytest.raises(AssertionError):
        agrees_with_python("genmodels.nn.MLPDenoiser", keys)


def test_check_catches_a_wrong_default():
    keys = dict(target("genmodels.nn.MLPDenoiser").keys)
    keys["depth"] = keys["hidden"]
    with pytest.raises(AssertionError):
        agrees_with_python("genmodels.nn.MLPDenoiser", keys)


def chosen_by_name() -> list[str]:
    """The classes of all models and data sets that `model=` and `data=` choose."""
    configs = signatures.ROOT.parent / "configs"
    files = sorted(path for group in ("model", "data") for path in (configs / group).iterdir())
    return [line.split()[1] for path in files for line in path.read_text().splitlines() if line.startswith("_target_:")]


@pytest.mark.parametrize("dotted", sorted({*REAL, *chosen_by_name()}))
def test_every_key_says_what_it_means_and_of_what_type_it_is(dotted):
    silent = [key.name for key in target(dotted).keys.values() if not key.meaning or key.annotation is None]
    assert silent == []


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A small package with every form of class that a user may write."""
    package = tmp_path / "house"
    package.mkdir()
    sources = {
        "__init__": "from .rooms import Kitchen",
        "rooms": '''
            from dataclasses import dataclass, field
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                from house.walls import Wall as Surface

            class Room:
                """A room.

                Arguments:
                    size: its area.
                    wall: what is around it.
                """
                def __init__(self, spec, *, size: float = 1.0, wall: "Surface | None" = None): ...

            class Bare(Room):
                """Adds nothing."""

            class Passing(Room):
                """Passes on.

                Arguments:
                    size: see `Room`.
                    lamp: light.
                """
                def __init__(self, spec, *, lamp: int, **options): ...

            class Closed(Room):
                def __init__(self, spec, *, door: bool = False): ...

            @dataclass(kw_only=True)
            class Plain:
                a: int = 1
                b: list[int] = field(default_factory=list)

            @dataclass(frozen=True, kw_only=True)
            class More(Plain):
                c: str = "x"

            @dataclass
            class Positional:
                a: int = 1

            class Kitchen(Closed):
                pass
        ''',
        "walls": "class Wall:\n    def __init__(self, *, colour: str = 'white'): ...",
    }
    for name, text in sources.items():
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("house.rooms.Room", ["size", "wall"]),
        ("house.rooms.Bare", ["size", "wall"]),
        ("house.rooms.Passing", ["size", "wall", "lamp"]),
        ("house.rooms.Closed", ["door"]),
        ("house.rooms.Plain", ["a", "b"]),
        ("house.rooms.More", ["c", "a", "b"]),
        ("house.rooms.Positional", []),
        ("house.Kitchen", ["door"]),
        ("house.rooms.Surface", ["colour"]),
    ],
)
def test_every_form_of_class(house, name, keys):
    assert list(target(name).keys) == keys


def test_defaults_required_and_meanings(house):
    keys = target("house.rooms.Passing").keys
    assert keys["lamp"].default is None and keys["size"].default == "1.0"
    assert keys["size"].meaning == "its area." and keys["lamp"].meaning == "light."
    assert target("house.rooms.Plain").keys["b"].default == "list()"
    assert target("house.rooms.Room").file == "house/rooms.py"


@pytest.mark.parametrize("name", ["house.rooms.Nobody", "house.nowhere.Room", "nohouse.Room", "Room", "house", ""])
def test_what_does_not_exist_is_none(house, name):
    assert target(name) is None


def test_a_module_that_appears_or_changes_is_read_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert target("cottage.Room") is None
    for key in ("width", "height"):
        (tmp_path / "cottage.py").write_text(f"class Room:\n    def __init__(self, *, {key}=1.0):\n        pass\n")
        importlib.invalidate_caches()  # the folder's listing, which the interpreter keeps by time stamps
        assert list(target("cottage.Room").keys) == [key]


def test_nothing_is_imported(house):
    import sys

    target("house.rooms.Room")
    assert "house" not in sys.modules


def test_own_package_is_found_from_its_own_folder():
    assert signatures.load("genmodels").path.parent == signatures.ROOT
