"""`genmodels push`: a model on the Hugging Face hub, or in a folder, with a card made of its report."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from genmodels import __version__
from genmodels.cli.export import usage
from genmodels.core.checkpoint import checkpoint_hash, origin
from genmodels.core.errors import InputError, RunError, an
from genmodels.core.files import EXPORTED, HUB, located, place_of, typed, write_text
from genmodels.core.likelihood import in_words
from genmodels.core.samples import SamplingOptions
from genmodels.evaluation.samples import draw, write_samples
from genmodels.evaluation.table import UNITS
from genmodels.models.checkpoint import load_model, write_exported
from genmodels.plots.images import has_picture
from genmodels.report.compare import report_target

LIBRARY = "library_name: genmodels"
_NOT_EVALUATED = "Not evaluated yet: `genmodels evaluate` states it with its kind and error."


def run(
    *, ckpt: str, licence: str, to: str | None = None, out: str | None = None, private: bool = False,
    trust: list[str] | None = None,
) -> None:
    """Publish a trained model on the Hugging Face hub, from where ckpt=hf://user/name reads it.

    Nothing is uploaded but the files that are printed: the model with its configuration, which names the folders of its
    data, a card, and a picture of samples. The token is that of `hf auth login` or HF_TOKEN.

    Arguments:
        ckpt: a checkpoint, a run folder or an exported .safetensors.
        licence: the licence of the model, such as mit, apache-2.0 or cc-by-4.0, as the data allow.
        to: the repository on the hub, user/name.
        out: a folder to write the files to; without `to` nothing is uploaded.
        private: make a new repository private.
        trust: further packages whose classes the checkpoint may name.
    """
    to = to.removeprefix(HUB) if to is not None else None
    if to is None and out is None:
        raise InputError("say where: to=user/name uploads the model, out=folder only writes what would be uploaded")
    if to is not None and not re.fullmatch("[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", to):
        raise InputError(f"to={to}: a repository of the hub is user/name")
    if not licence.strip():
        raise InputError("licence is empty: name one, such as mit or cc-by-4.0")
    if not licence.isprintable():
        raise InputError("licence is a name on one line, such as mit or cc-by-4.0")
    place = None if out is None else Path(out).expanduser()
    if place is not None and (place.is_file() or place.suffix[1:].isalpha() and not place.is_dir()):
        raise InputError(f"out={out}: the files of a model are written to a folder")
    with tempfile.TemporaryDirectory() as temporary:
        folder = place or Path(temporary)
        names, used = write_files(ckpt, folder, licence, to, trust or [])
        if out is not None:
            print(f"{', '.join(names)}: {folder}")
        if to is not None:
            print(f"{', '.join(names)}: {upload(folder, names, to, private)}")
            print(f"use:      {used}")


def write_files(ckpt: str, folder: Path, licence: str, to: str | None, trust: list[str]) -> tuple[list[str], str]:
    """Write model.safetensors, README.md and samples.png, where there is a picture; names, and the model's use."""
    text = folder / "README.md"
    if text.is_file() and LIBRARY not in text.read_text(encoding="utf-8", errors="replace"):
        raise InputError(f"{text} is no card of a model of genmodels: choose another folder by out=")
    for taken in () if text.is_file() else (folder / EXPORTED, folder / "samples.png"):
        if taken.exists():
            raise InputError(f"{taken} is there already, with no card: choose another folder by out=")
    model, header = load_model(located(ckpt), device="cpu", trust=trust)
    likelihoods, spec = _likelihoods(ckpt), model.spec
    drawn, names = None, [EXPORTED, "README.md"]
    if spec.text is None and has_picture(spec):
        classes = spec.num_classes
        shown = 64 if classes is None or classes > 32 else 4 * classes  # whole rows of the classes
        drawn = draw(model, SamplingOptions(n=shown), progress=False)
        drawn.made |= origin(located(ckpt), header)
        names.append("samples.png")
    write_text(text, card(model, header, likelihoods, licence, to, names, trust))  # first: it says whose files they are
    write_exported(folder / EXPORTED, {"genmodels": header, "state_dict": model.state_dict()})
    if drawn is not None:
        write_samples(drawn, spec, folder / "samples.png")
    return names, usage(model, _named(f"{HUB}{to}", trust))


def card(
    model, header: dict, likelihoods: list[str], licence: str, to: str | None, names: list[str],
    trust: Sequence[str] = (),
) -> str:
    """The model card, as the hub reads it: Markdown after a few lines of YAML.

    Arguments:
        model: the model.
        header: of its checkpoint.
        likelihoods: lines about them.
        licence: named in the YAML.
        to: the repository.
        names: files next to it, of which samples.png is shown.
        trust: further packages whose classes it needs.
    """
    spec, family, name = model.spec, header["family"], f"hf://{to}" if to else "<this folder>"
    named = _named(name, trust)
    use = usage(model, named)
    trusting = f", trust={list(trust)}" if trust else ""
    python = ["```python", "import genmodels as gm", "",
              f'gm.load("{name}"{trusting}).sample({"" if spec.text else 16}).show()', "```", ""]
    needed = [f"Its classes are those of {' and '.join(trust)}, which have to be importable.", ""] if trust else []
    kind = "continuous values" if spec.levels is None else f"integers of {spec.levels} levels"
    classes = "" if spec.num_classes is None else f", {spec.num_classes} classes"
    heading = yaml.safe_dump({"license": licence.strip()}, width=math.inf, allow_unicode=True).strip()
    lines = [
        "---", heading, LIBRARY, f"tags: [genmodels, {family}]", "---",
        "", f"# {family} of {spec.name}", "",
        f"{an(family).capitalize()} with {header['parameters']:,} parameters, trained for {header['step']:,} steps on "
        f"{spec.name}: {' x '.join(map(str, spec.event_shape))}, {kind}{classes}. Made with genmodels "
        f"{header['genmodels']}.", "",
    ]
    if "samples.png" in names:
        lines += ["![samples](samples.png)", ""]
    lines += ["## Likelihood", "", *likelihoods, "", "## Use", "", "```sh", "pip install 'genmodels[hub]'",
              use, f"genmodels evaluate {named}", "```", "", *needed, *(python if model.generates else []),
              f"Written by genmodels {__version__}; the file carries its configuration and a checksum."]
    return "\n".join(lines) + "\n"


def _named(name: str, trust: Sequence[str]) -> str:
    """The settings that name a published model."""
    return f"ckpt={name}" + (f" {typed('trust', list(trust))}" if trust else "")


def _likelihoods(ckpt: str) -> list[str]:
    """The report of a checkpoint as a table of Markdown.

    Raises:
        InputError: for a file that is no report, or one of other weights.
    """
    found, weights = report_target(place_of(ckpt), None, several=False), checkpoint_hash(located(ckpt))
    if not found.is_file():
        found = _largest_part(found, weights)
        if found is None:
            return [_NOT_EVALUATED]
    try:
        report = json.loads(found.read_text(encoding="utf-8"))
        lines, of = _listed(report), report["checkpoint"]["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{found} is no report of genmodels evaluate ({type(error).__name__}): evaluate again"
                         ) from error
    if of != weights:
        raise InputError(f"{found} is of other weights than {ckpt}: evaluate again, or remove it")
    return lines


def _largest_part(whole: Path, weights: str) -> Path | None:
    """Of the reports of the first items, where there is none of the whole split, that of the most, by these weights."""
    items = {}
    for path in whole.parent.glob("*.json"):
        match = re.fullmatch(rf"{re.escape(whole.stem)}_first(\d+)", path.stem)
        with suppress(OSError, ValueError, KeyError, TypeError):  # a report that is broken is none of these weights
            if match and json.loads(path.read_text(encoding="utf-8"))["checkpoint"]["sha256"] == weights:
                items[path] = int(match[1])
    return max(items, key=items.get, default=None)


def _listed(report: dict) -> list[str]:
    """A table of Markdown: each value with its mark, its standard error, its kind and how it was computed."""
    rows = ["| value | unit | kind | how |", "|---|---|---|---|"]
    if not report["likelihood"]:
        return [_NOT_EVALUATED]
    for line in report["likelihood"]:
        shown, kind = in_words(line)
        rows.append(f"| `{shown}` | {UNITS[line['unit']]} | {kind} | {line['how']} |")
    data, weights = report["data"], report["checkpoint"]["weights"]
    by = {"ema": "", "raw": ", by the raw weights (ema=false)"}.get(weights, f", by the average with ema={weights}")
    return [*rows, "", f"On {data['items']:,} items of the {data['split']} split of {data['name']}"
            f"{' (not all)' if data['limited'] else ''}{by}. `=` is exact, `<=` a bound (the true value is at most "
            "this), `~` computed by an ODE solver, `~?` estimated by annealed importance sampling; in brackets one "
            "standard error in the last digits."]


def upload(folder: Path, names: list[str], to: str, private: bool) -> str:
    """Put files into a repository of the hub, made where it is missing, in one commit; its address.

    Raises:
        InputError: without huggingface_hub.
        RunError: for what the hub or the network refuses.
    """
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
    except ImportError:
        raise InputError("push needs the package huggingface_hub: pip install 'genmodels[hub]'; out=folder without "
                         "to= writes the files alone") from None
    api = HfApi()
    try:
        api.create_repo(to, private=private, exist_ok=True)
        added = [CommitOperationAdd(name, str(folder / name)) for name in names]
        return str(api.create_commit(to, added, commit_message="genmodels push").commit_url)
    except Exception as error:  # of the hub, of the network, of its client: each has its own classes
        raise RunError(f"to={to}: {' '.join(str(error).split())[:300]}") from error
