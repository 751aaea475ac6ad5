"""`genmodels sample`: samples of a trained model as pictures, arrays, tables or sound."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

from genmodels.core.checkpoint import origin, verify
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, an, counted, none_or_at_least
from genmodels.core.files import cache_folder, check_writable, file_word, located, place_of, short_hash
from genmodels.core.processes import Ranks
from genmodels.core.samples import DEFAULT_NUMBER, SamplingOptions, check_companions, require_partners, says_how
from genmodels.data.text import spans_of
from genmodels.evaluation.features import Cache
from genmodels.evaluation.materials import data_of, material, read_items
from genmodels.evaluation.samples import (
    Drawing,
    check_path,
    check_target,
    draw_together,
    made_of,
    sample_file,
    save_png,
    write_folder,
    write_path,
    write_samples,
)
from genmodels.models.base import GenerativeModel
from genmodels.models.checkpoint import load_model, weights_of
from genmodels.plots.images import LEGIBLE, grid, has_picture, images_of

_FRAMES = 10  # of a trajectory or an interpolation
_LONGEST = 120  # characters of the options in a file's name
_CANDIDATES = 8  # moments of the trajectory recorded for each one shown


def run(
    *,
    ckpt: str,
    n: int | None = None,
    out: str | None = None,
    text_file: str | None = None,
    durations: str | None = None,
    pause: float | None = None,
    vocoder: Literal["griffin_lim", "hifigan", "hifigan_universal"] | None = None,
    stream: bool = False,
    chunk: int | None = None,
    inpaint: int | str | None = None,
    mask: str | None = None,
    edit: int | str | None = None,
    batch_size: int = 64,
    ema: bool | float = True,
    path: str | None = None,
    frames: int | None = None,
    interpolate: list[int | str] | None = None,
    device: str = "auto",
    trust: list[str] | None = None,
    **options: SamplingOptions,
) -> None:
    """Draw samples from a trained model.

    Arguments:
        ckpt: a checkpoint, a run folder (its best.ckpt), an exported .safetensors, or hf://user/name.
        n: number of samples, 64 by default; with text the number of takes, 1 by default.
        out: a .png (one grid), a .npz (arrays), a .csv (a table of vectors), a .txt (samples of text), or a folder (one
            PNG or .txt each); default a grid, text, or a table if the columns of the data have names, in the run
            folder. Of speech a .wav (with the mel as .png and the durations as .json next to it), a .npz, or a folder.
            Long texts are synthesised by sentences.
        text_file: a file of texts, one per line.
        durations: a .json as written next to a .wav, with the frames of every token, instead of predicted durations.
        pause: seconds of silence between sentences, 0.2 by default; [pause=0.5] in a text adds one there.
        vocoder: griffin_lim (the default), or the weights of HiFi-GAN for one voice (hifigan) or many
            (hifigan_universal).
        stream: synthesise in chunks and print the time to first audio; the result is the same.
        chunk: frames per chunk, 64 by default.
        inpaint: a picture file, or the number of a test item, of which a part is kept and the rest drawn; for models of
            text also a .txt, or the text itself.
        mask: what inpaint draws: a picture file, white where the item is kept, black where it is drawn; from:to of the
            frames of a mel or the bytes of a text, such as 20:40; for text also one character that stands for each
            byte to be drawn (inpaint='The ____ of' mask=_). With text= in its place inpaint draws the words of a
            recording that this text changes.
        edit: a picture file, or the number of a test item, to which noise is added and removed again.
        batch_size: samples per batch.
        ema: averaged weights (true), raw ones (false), or the average with one decay.
        path: also write the trajectory from noise to data, to a .png (a strip) or a .gif.
        frames: number of pictures of the trajectory or interpolation, 10 by default.
        interpolate: two items (numbers of the test split, or picture files) to interpolate through their latents, as a
            strip.
        device: auto, cpu, cuda, ...
        trust: further packages whose classes the checkpoint may name.
        options: options of sampling.
    """
    options = {key: value for key, value in options.items() if value is not None}
    asked = SamplingOptions(n=n or DEFAULT_NUMBER, **options)
    none_or_at_least(1, n=n, batch_size=batch_size, chunk=chunk)
    none_or_at_least(2, frames=frames)
    named = {"inpaint": inpaint, "mask": mask, "edit": edit}
    require_partners(options | named | {"chunk": chunk, "stream": stream or None, "frames": frames, "path": path,
                                        "interpolate": interpolate})
    out, path, text_file, durations = (place if place is None else os.path.expanduser(place)
                                       for place in (out, path, text_file, durations))
    for key, place in (("out", out), ("path", path)):
        if place is not None:
            check_writable(key, Path(place))
    if out is not None:
        check_companions(Path(out))

    given = _Trained.load(ckpt, device, trust or [])
    group, spec = Ranks(), given.model.spec
    if group.rank and (spec.text is not None or interpolate is not None):
        group.serve()  # what one process does soon
        return
    synthesis = {"durations": durations, "pause": pause, "vocoder": vocoder}
    synthesis = {key: value for key, value in synthesis.items() if value is not None}
    if spec.text is not None:
        if path is not None or interpolate is not None:
            raise InputError(f"{'path' if interpolate is None else 'interpolate'} is for models without texts: "
                             f"{given.kind}")
        size = (chunk or 64) if stream else None
        print(*_say(given, options, synthesis, named, ema, takes=n, text_file=text_file, out=out, chunk=size), sep="\n")
        return
    of_text = {"text_file": text_file, "stream": stream or None} | synthesis
    of_text |= {key: options.get(key) for key in ("text", "speed", "seconds", "on_unknown")}
    if unused := [key for key, value in of_text.items() if value is not None]:
        raise InputError(f"{unused[0]} is for text-to-speech models: {given.kind}")
    given_options = _not_default(options, named, ema)
    target = Path(out) if out is not None else default_target(given.place, asked, spec, given_options)
    if interpolate is None:
        _check_targets(target, path, spec, range(asked.start, asked.start + asked.n))
    else:
        _check_alone(asked, given_options | {"path": path})
        print(*strip(given, interpolate, frames or _FRAMES, ema, Path(out) if out else None), sep="\n")
        return
    _draw(given, asked, target, named, ema, batch_size, group, path, frames or _FRAMES)


class _Trained(NamedTuple):
    """A trained model.

    Attributes:
        model, header: the model, and the header of its checkpoint.
        path: the file that it was read from.
        place: the path by which its results are named, see `place_of`.
        trust: further packages whose classes the checkpoint may name.
        made: the checkpoint in files of its samples, see `origin`.
    """

    model: GenerativeModel
    header: dict
    path: Path
    place: Path
    trust: list[str]
    made: dict

    @classmethod
    def load(cls, ckpt: str, device: str, trust: list[str]) -> _Trained:
        """Read a checkpoint of a model that has samples."""
        path = located(ckpt)
        verify(path)
        model, header = load_model(path, device=device, trust=trust)
        found = cls(model, header, path, place_of(ckpt), trust, origin(path, header))
        if not model.generates:
            raise InputError(f"{found.kind}, which has no samples: genmodels transcribe ckpt={ckpt} files")
        return found

    @property
    def kind(self) -> str:
        return f"{self.path} holds {an(self.header['family'])}"

    def record(self, named: dict) -> dict:
        """What every file of its results records, with the items that they were made from."""
        return self.made | {key: str(value) for key, value in named.items() if value is not None}

    def material(self, named: dict, ema: bool | float) -> tuple[dict, list[str]]:
        """The items that samples are made from, as options of `sample`, and lines for the user."""
        return material(self.model, self.header, named, self.path, self.trust, weights_of(ema))


def _say(
    given: _Trained, options: dict, synthesis: dict, named: dict, ema: bool | float, *, takes: int | None,
    text_file: str | None, out: str | None, chunk: int | None,
) -> list[str]:
    """Synthesise texts; returns lines for the user."""
    from genmodels.cli.say import say

    asked = options | synthesis | {"text_file": text_file, "stream": chunk is not None} | named
    materials, lines = given.material(asked, ema)
    synthesis |= options | {"weights": weights_of(ema)} | materials
    return lines + say(given.model, given.record(named), given.place, synthesis, item=named if materials else {},
                       of_item=materials, takes=takes, text_file=text_file, out=out, chunk=chunk)  # fmt: skip


def _check_targets(target: Path, path: str | None, spec: DataSpec, numbers: Sequence[int]) -> None:
    """Refuse files that cannot hold such samples, or cannot be written."""
    check_target(target, spec)
    check_replaced(target, spec, numbers)
    if path is not None:
        check_path(Path(path), spec)
        if Path(path).resolve() == target.resolve():
            raise InputError(f"path={path} names the file of the samples: give another")
        place = Path(path).resolve()
        if place.is_file() and place.stat().st_size and not made_of(place):
            raise InputError(f"path={path} exists, is no trajectory and would be replaced: give another name")
        if place.parent == target.resolve() and place in {sample_file(target, k).resolve() for k in numbers}:
            raise InputError(f"path={path} names the file of a sample in out={target}: give another")


def _draw(
    given: _Trained, asked: SamplingOptions, target: Path, named: dict, ema: bool | float, batch_size: int,
    group: Ranks, path: str | None, frames: int,
) -> None:
    """Draw samples, by several processes if there are some; write them and their trajectory."""
    spec = given.model.spec
    single = target.suffix == "" and path is None and spec.encoding is None
    check_memory(asked, spec, batch_size, single)
    materials, lines = given.material(named, ema)
    if path is not None:  # many moments, of which those with equal changes are shown
        materials["path"] = max(frames, min(_CANDIDATES * frames, int(1e9 / (4 * asked.n * spec.dims))))
    made = given.record(named)
    drawing = Drawing(given.model, replace(asked, weights=weights_of(ema), **materials), batch_size, made, group)
    if group.rank:
        group.serve()
        return
    if single:
        made, written = write_folder(drawing, spec, target)
        recipes = {file.name: made_of(file).get("recipe") for file in sorted(target.glob("*.png"))}
        others = [name for name, recipe in recipes.items() if recipe not in (None, drawing.made["recipe"])]
        if others:
            written.append(f"{counted(len(others), 'picture')} there of other samples, such as {others[0]}")
    else:
        samples = draw_together(drawing, Cache(cache_folder() / "samples"))
        made, written = samples.made, write_samples(samples, spec, target, sources(materials, spec))
    print(*lines, *written, *convergence_warnings(made), sep="\n")
    if path is not None:
        print(write_path(samples, spec, Path(path), frames))


def check_replaced(target: Path, spec: DataSpec, numbers: Sequence[int]) -> None:
    """Refuse places that cannot be written, or where files that are not known to be ours would be replaced.

    These are `target` and the files next to it, and in a folder those of samples `numbers`.
    """
    check_writable("out", target)
    check_companions(target)
    ours = made_of if target.suffix.lower() == ".png" else says_how
    if target.is_file() and target.stat().st_size and not ours(target):
        raise InputError(f"out={target} exists, is no file of samples and would be replaced: give another name")
    ending = ".txt" if spec.encoding is not None else ".wav" if spec.mel is not None else ".png"
    if target.suffix or not target.is_dir():
        return
    of_texts = spans_of(target) if ending == ".txt" else {}
    for number in numbers:
        picture = sample_file(target, number)
        for file in (picture, picture.with_suffix(ending)):
            if file.exists() and not made_of(picture) and not any(number in span for span in of_texts.values()):
                raise InputError(f"{file} is no sample and would be replaced: name another folder by out=")
    for file, span in of_texts.items():
        if any(number in span for number in numbers) and not (span[0] in numbers and span[-1] in numbers):
            raise InputError(f"{file} says how samples {span[0]} to {span[-1]} were made, of which only some would be "
                             "replaced: draw all of them, or name another folder by out=")


def _not_default(options: dict, named: dict, ema: bool | float) -> dict:
    """The options that differ from their defaults, for the default name of the file; None for the others."""
    given = {field.name: options.get(field.name) for field in fields(SamplingOptions)}
    temperature = given.pop("temperature")
    return given | {"seed": None, "start": None} | named | {
        "temperature": None if temperature == 1 else temperature, "ema": None if ema is True else ema
    }  # fmt: skip


def _check_alone(asked: SamplingOptions, given: dict) -> None:
    """Refuse options of sampling next to `interpolate`."""
    unused = [key for key, value in given.items() if value is not None and key != "ema"]
    plain = (("n", asked.n, DEFAULT_NUMBER), ("seed", asked.seed, 0), ("start", asked.start, 0))
    unused += [key for key, value, usual in plain if value != usual]
    if unused:
        raise InputError(f"interpolate takes only frames=, ema= and out=: leave out {', '.join(unused)}")


def check_memory(asked: SamplingOptions, spec: DataSpec, batch_size: int, single: bool) -> None:
    """Refuse more than 8 GB: of a batch, or of all samples unless each is written as a single file.

    Raises:
        InputError: naming what to lower.
    """
    n, size = asked.n, asked.size
    values = math.prod(spec.event_shape if size is None else (spec.event_shape[0], *size))
    at_once = min(n, batch_size) * values * 16 / 1e9  # samples, noise, the estimate and a first layer, in float32
    if at_once > 8:
        raise InputError(f"{min(n, batch_size)} samples of {values:,} values at once would take {at_once:,.0f} GB "
                         "or more: lower batch_size" + ("" if size is None else f", or size={list(size)}"))
    gigabytes = n * values * (1 if spec.levels else 4) / 1e9
    if gigabytes > 8 and not single:
        raise InputError(f"n={n} samples would take {gigabytes:.0f} GB: draw them in parts with n= and start=, or as "
                         "single files: out=<folder>")


def sources(materials: dict, spec: DataSpec) -> dict:
    """The inputs of inpainting or editing, as images to show above the samples."""
    if not spec.is_image:
        return {}
    shown = {"original": materials.get("known", materials.get("edit"))}
    if "keep" in materials:
        white = (spec.levels or 2) - 1
        shown["mask"] = materials["keep"].expand(spec.event_shape) * white
    return {name: image for name, image in shown.items() if image is not None}


def convergence_warnings(made: dict) -> list[str]:
    """Warnings about chains that have not converged.

    Example:
        >>> convergence_warnings({"r_hat": 1.01, "divergences": 0})
        []
        >>> convergence_warnings({"r_hat": 22.0, "divergences": 0})
        ['the chains have not mixed (R-hat 22, should be below 1.1): use more steps, or sampler=annealed']
    """
    lines = []
    if made.get("r_hat") is not None and not made["r_hat"] < 1.1:
        lines.append(f"the chains have not mixed (R-hat {made['r_hat']:.3g}, should be below 1.1): use more steps, or "
                     "sampler=annealed")
    if made.get("divergences"):
        lines.append(f"{made['divergences']} proposals of the chains diverged: use a smaller step_size")
    return lines


def between(model, ends: list, frames: int, ema, data):
    """The interpolation of two items through the latents as one row of pictures.

    Raises:
        InputError: for a model without latents, data that are not images, or items that do not exist.
    """
    from genmodels.evaluation.materials import interpolate  # an option of `run` has the same name

    if not hasattr(model, "latents"):
        raise InputError(f"interpolate is for flows and diffusion models: this is {an(model.family)}")
    if not (model.spec.is_image and model.spec.levels):
        raise InputError(f"interpolate shows images; these data have events of shape {model.spec.event_shape}")
    if len(ends) != 2:
        raise InputError(f"interpolate takes two items, got {len(ends)}: interpolate=[3,17], or two picture files")
    batch = read_items(ends, data, model.spec, "interpolate")
    pictures = interpolate(model, batch.to(model.device), frames, weights_of(ema))
    first, last = map(_end_name, ends)
    names = [first, *[""] * (frames - 2), last]
    return grid(images_of(pictures.cpu(), model.spec, smallest=LEGIBLE), columns=frames, names=names)


def _end_name(end: int | str) -> str:
    return f"item {end}" if str(end).isdigit() else Path(end).stem


def strip(given: _Trained, ends: list, frames: int, ema: bool | float, target: Path | None) -> list[str]:
    """Write the interpolation of two items; returns lines for the user.

    Raises:
        InputError: for another file than a .png, and as of `between`.
    """
    if target is not None and target.suffix.lower() != ".png":
        raise InputError(f"out={target}: an interpolation is one strip, end it in .png")
    if not has_picture(given.model.spec):
        raise InputError(f"interpolate draws a strip of pictures, and samples of shape {given.model.spec.event_shape} "
                         "are none")
    if target is not None:
        check_replaced(target, given.model.spec, ())
    sheet = between(given.model, ends, frames, ema, data_of(given.model, given.header, given.path, given.trust))
    if target is None:
        words = "-".join(file_word(str(end).replace(".", "-")) for end in ends)
        words += "" if frames == _FRAMES else f"_frames-{frames}"
        words += "" if ema is True else f"_ema-{ema}"
        target = given.place.parent / "samples" / f"{given.place.stem}_between-{words}.png"
    made = {"between": f"{ends[0]} and {ends[1]}", "frames": frames, "weights": weights_of(ema), **given.made}
    save_png(sheet, target, made)
    return [f"{frames} pictures from {_end_name(ends[0])} to {_end_name(ends[1])}: {target}"]


def default_target(ckpt: Path, asked: SamplingOptions, spec: DataSpec, given: dict) -> Path:
    """The default file of samples, in the folder `samples` of the run; a picture if the data can be drawn.

    The name contains all options, so that no other samples are overwritten.
    """
    picture = ".png" if has_picture(spec) else ".npz"
    suffix = ".txt" if spec.encoding is not None else ".csv" if spec.columns else picture
    words = [f"{key}-{str(value).removesuffix('.png')}" for key, value in given.items() if value is not None]
    if spec.encoding is not None:  # a prompt, of which file_word leaves out marks and spaces
        words += [short_hash(f"{given.get('inpaint')} {given.get('mask')}")] * (given.get("inpaint") is not None)
    given = "_".join(map(file_word, words))
    words = [given if len(given) <= _LONGEST else f"{given[:_LONGEST]}_{short_hash(given)}"] if given else []
    numbers = f"{asked.start}-{asked.start + asked.n - 1}"
    return ckpt.parent / "samples" / ("_".join([ckpt.stem, f"seed{asked.seed}", numbers, *words]) + suffix)
