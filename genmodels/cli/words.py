"""From a configuration back to the words that compose to it, for whoever has to type them again."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import yaml
from hydra.core.global_hydra import GlobalHydra

from genmodels.cli.compose import Composer, composer
from genmodels.cli.places import CONFIG_DIR, groups
from genmodels.cli.schema import Schema
from genmodels.errors import InputError

#: What a training run is made of, with what stands for nothing said; folders and loggers may differ when it goes on.
PARTS: dict = {"model": {}, "data": {}, "trainer": {}, "seed": 0}
_MANY = 5  # from so many words on a published setting may be nearer
_PLAIN = re.compile(r"[A-Za-z_][\w./*-]*")
_OTHERWISE = ("null", "true", "false", "nan", "inf")  # words that Hydra reads as something else than text


def how_to_resume(config: dict, checkpoint: Path) -> str:
    """What to type so that a run goes on from its checkpoint; where its folder has it, if no words compose to it.

    Arguments:
        config: the run's own configuration, as its checkpoint has it.
        checkpoint: the file.
    """
    words = None if GlobalHydra.instance().is_initialized() else words_of(config)  # a sweep needs its own Hydra
    if words is None:
        return f"its own are in {checkpoint.parent / 'config.yaml'}"
    script = Path(sys.argv[0])
    command = f"python {shlex.quote(str(script))}" if script.name == "train.py" else "genmodels train"
    return f"go on by {command} {shlex.join([*words, f'resume={checkpoint}'])}"


def words_of(config: dict) -> list[str] | None:
    """Few words that `train` composes to this model, data, trainer and seed; None where there are none.

    Example:
        >>> from genmodels.cli.compose import composer
        >>> with composer("train") as hydra:
        ...     config = hydra.compose(["model=glow", "model.levels=1", "seed=3"])
        >>> words_of(config)
        ['model=glow', 'data=digits', 'model.levels=1', 'seed=3']
    """
    wanted, usual = _parts(config), Schema("genmodels.cli.train.run").defaults(config)
    models, sets = (_of_class(group, config.get(group) or {}) for group in ("model", "data"))
    starts = [[f"model={model}", f"data={data}"] for model in models for data in sets]
    published = [[f"experiment={name}"] for name in groups()["experiment"]]
    with composer("train") as hydra:
        found = [[*start, *_differences(hydra.plain(start), wanted, usual)] for start in starts]
        if min(map(len, found), default=_MANY) >= _MANY:  # composing takes a while
            found += [[*start, *_differences(hydra.plain(start), wanted, usual)] for start in published]
        for words in sorted(found, key=len):
            if _composes(hydra, words, wanted, usual):
                return words
    return None


def _of_class(group: str, config: dict) -> list[str]:
    """The choices of a group that configure the same class."""
    files = {name: (CONFIG_DIR / group / f"{name}.yaml").read_text(encoding="utf-8") for name in groups()[group]}
    return [name for name, text in files.items() if yaml.safe_load(text).get("_target_") == config.get("_target_")]


def _differences(plain: dict, wanted: dict, usual: dict) -> list[str]:
    """Words that lead from one composed configuration to another, which may name defaults that the first leaves out."""
    now, then = map(_flat, (_parts(plain), wanted))
    gone = [f"~{key}" for key in now if key not in then]
    return gone + [f"{key}={_shown(value)}" for key, value in then.items()
                   if (now[key] != value if key in now else key not in usual or usual[key] != value)]


def _composes(hydra: Composer, words: list[str], wanted: dict, usual: dict) -> bool:
    try:
        found = hydra.compose(words)
    except InputError:
        return False
    now, then = map(_flat, (_parts(found), wanted))
    left_out = {key: usual[key] for key in then if key not in now and key in usual}
    return now | left_out == then


def _parts(config: dict) -> dict:
    return {part: config.get(part, nothing) for part, nothing in PARTS.items()}


def _flat(config: dict, prefix: str = "") -> dict:
    """Values by dotted key."""
    flat: dict = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        flat |= _flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return flat


def _shown(value) -> str:
    """A value as Hydra reads it.

    Example:
        >>> _shown([1, None, True, "adam", "a b", "null"])
        "[1,null,true,adam,'a b','null']"
    """
    if isinstance(value, list):
        return f"[{','.join(map(_shown, value))}]"
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if not isinstance(value, str):
        return repr(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _OTHERWISE:
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
