"""`genmodels info`: the description of a checkpoint, without loading torch."""

from __future__ import annotations

import datetime
import sys
import webbrowser
from pathlib import Path

from genmodels.cli.schema import Schema, show
from genmodels.core.checkpoint import missing_part, nonfinite_weight, read_header
from genmodels.core.errors import InputError, RunError, hint, printable
from genmodels.core.files import flat, is_exported, located


def main(words: list[str]) -> int:
    """`genmodels info <ckpt> [<ckpt> ...] [--full] [--open]`; 1 if any of the files is damaged.

    Raises:
        InputError: if no file is given.
    """
    files, flags = [], {"full": False, "open": False}
    for word in words:
        key, equals, value = word.partition("=")
        if word in ("--full", "full=true", "--open", "open=true"):
            flags[word.strip("-").removesuffix("=true")] = True
        elif key == "ckpt" and equals:
            value = value[1:-1] if value[:1] in "'\"" and value[:1] == value[-1:] else value
            listed = [value] if Path(value).exists() else value.strip("[]").split(",")
            files += [v.strip() for v in listed if v.strip()]
        elif word.startswith("-") or (equals and not Path(word).exists()):
            near = hint(key, ["--full", "--open", "ckpt", "full", "open"], "")
            raise InputError(f"unknown word {word!r}:{near} give checkpoints, --full for all of their "
                             "settings, --open for their figures")
        else:
            files.append(word)
    if not files:
        raise InputError("ckpt is missing: genmodels info runs/ddpm-digits/<time>/best.ckpt")
    return run(ckpt=files, **flags)


def run(*, ckpt: list[str], full: bool = False, open: bool = False) -> int:
    """Describe checkpoints: family, configuration, data, steps, metrics, and whether the file is intact.

    Arguments:
        ckpt: the files.
        full: print all options of the model and the whole configuration of the run.
        open: show the figures of the run too: the newest picture of each kind, and the report.
    """
    code = 0
    for number, name in enumerate(ckpt):
        try:
            text = describe(name, full)
        except RunError as error:
            print(printable(f"genmodels info: {error}"), file=sys.stderr)
            code = error.exit_code
            continue
        print(("\n" if number else "") + text)
        for figure in figures(Path(name).expanduser()) if open else []:
            webbrowser.open(figure.resolve().as_uri())
    return code


def figures(place: Path) -> list[Path]:
    """The newest picture of each kind in the folder of a run (or of a checkpoint in it), and its report."""
    folder = place if place.is_dir() else place.parent
    pictures = sorted(folder.glob("*/step_*.png"), key=lambda path: (len(path.name), path.name))  # by steps
    newest = {path.parent: path for path in pictures}
    return [*newest.values(), *folder.glob("report.html")]


def describe(ckpt: str | Path, full: bool = False) -> str:
    """The description of one checkpoint, in lines `name: value`.

    Raises:
        RunError: for a file that is missing, truncated, altered or not a checkpoint.
    """
    path, folder = located(ckpt), Path(ckpt).expanduser()
    if not path.is_file() and folder.is_dir():
        path = last if (last := folder / "last.ckpt").is_file() else folder
    header = read_header(path)
    stat = path.stat()
    written = datetime.datetime.fromtimestamp(stat.st_mtime).strftime("%Y-%m-%d %H:%M:%S")
    config = header.get("config") or {}
    lines = [
        ("file", f"{printable(str(path))} ({stat.st_size / 1e6:.1f} MB, written {written})"),
        ("family", header.get("family")),
        ("data", _data(header.get("data") or {})),
        ("parameters", f"{header.get('parameters', 0):,}"),
        ("steps", f"{header.get('step', 0):,}" + ("" if header.get("finished") else " (not finished)")),
        ("seed", header.get("seed", config.get("seed"))),
        *((name, f"{value:.6g}") for name, value in sorted((header.get("figures") or {}).items())),
        ("figures", ("\n" + " " * 15).join(printable(str(figure)) for figure in figures(path))),
        ("settings", _settings(config, header.get("model") or {}, full)),
        ("versions", f"genmodels {header.get('genmodels')}, torch {header.get('torch')}"),
        ("verdict", _verdict(header, nonfinite_weight(path), missing_part(path), is_exported(path))),
    ]
    return "\n".join(f"{name + ':':<14} {value}" for name, value in lines if value not in (None, ""))


def _data(spec: dict) -> str:
    kind = f"{spec['levels']} levels" if spec.get("levels") else "continuous"
    classes = f", {spec['num_classes']} classes" if spec.get("num_classes") else ""
    return f"{printable(spec['name'])}, {' x '.join(map(str, spec.get('event_shape', [])))}, {kind}{classes}"


def _settings(config: dict, model: dict, full: bool) -> str:
    """The settings that differ from the defaults, as on the command line; with `full` all options of the model."""
    shown = {**config, "model": {**(config.get("model") or {}), **model}} if full else config
    usual = Schema("genmodels.cli.train.run").defaults(config)
    pairs = [printable(f"{key}={show(value)}") for key, value in flat(shown).items() if value not in (None, [])
             and (full or not (key.endswith("_target_") or key in usual and usual[key] == value))]
    return ("\n" + " " * 15).join(pairs) if full else " ".join(pairs)


def _verdict(header: dict, nonfinite: str | None, missing: str | None, exported: bool) -> str:
    if missing is not None:
        return f"incomplete: its part {printable(missing)} is missing, copy the folder of its parts too"
    if nonfinite is not None:
        return f"unusable: weight {printable(nonfinite)} is not finite (the file itself is intact)"
    if exported:
        return "intact (checksum matches), weights alone: sample, evaluate, or train from them with init="
    state = "training finished" if header.get("finished") else "training can be continued with resume="
    return f"intact (checksum matches), {state}"
