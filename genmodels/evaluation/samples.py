"""Samples in batches, by one process or several, and the files they are written to."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from genmodels.core.data import DataSpec
from genmodels.core.errors import (
    InputError,
    NotFinite,
    as_input_errors,
    at_least,
    counted,
    progress_bar,
    require_finite_rows,
)
from genmodels.core.files import write_whole
from genmodels.core.processes import Ranks
from genmodels.core.samples import COMMON, Samples, SamplingOptions, merged_record
from genmodels.data.text import write_texts
from genmodels.data.utterances import joined
from genmodels.diffusion.samplers import SAMPLERS
from genmodels.evaluation.features import Cache, code_hash, key_of
from genmodels.plots.images import LEGIBLE, class_name, grid, has_picture, images_of, in_turn, picture_of, stack


def draw(model, options: SamplingOptions, *, batch_size: int = 64, progress: bool = True) -> Samples:
    """The requested samples of a model, drawn `batch_size` at a time, which does not change them.

    Raises:
        InputError: for an option that this model does not take, or a value that it refuses.
        RunError: if a sample is not finite, naming it.
    """
    whole = range(options.start, options.start + options.n)
    return next(draw_parts(model, options, [whole], batch_size=batch_size, progress=progress))


def parts_of(options: SamplingOptions, batch_size: int) -> list[range]:
    """The numbers of the samples in parts of 1 to 16 whole batches, at least 8 parts if there are 8 batches.

    Example:
        >>> [len(parts_of(SamplingOptions(n=n), 64)) for n in (64, 1000, 50_000)]
        [1, 8, 49]
    """
    rows = batch_size * max(1, min(16, -(-options.n // batch_size) // 8))
    end = options.start + options.n
    return [range(first, min(first + rows, end)) for first in range(options.start, end, rows)]


def draw_parts(
    model, options: SamplingOptions, parts: Sequence[range], *, batch_size: int = 64, progress: bool = True
) -> Iterator[Samples]:
    """The samples of each part in order, with one progress bar; see `draw`."""
    common = {key: value for key in COMMON if (value := getattr(options, key)) is not None}
    given = options.given() | common
    model.require_options(key for key in given if key not in COMMON)
    for key in common:
        if not model.takes(key):
            raise InputError(f"{type(model).__name__}.sample does not take {key}=, as every model's must "
                             "(see GenerativeModel.sample)")
    reports = progress and "progress" in model.own_options()
    batches = [[range(k, min(k + batch_size, part.stop)) for k in range(part.start, part.stop, batch_size)]
               for part in parts]
    bar = None
    try:
        for part in batches:
            drawn = []
            for numbers in part:
                done_before = bar.n if bar is not None else 0

                def report(done: int, steps: int, before: int = done_before) -> None:
                    nonlocal bar
                    if bar is None:  # not before the first step, so that an error leaves one line and no bar
                        bar = progress_bar(desc="sampling", unit="step", total=sum(map(len, batches)) * steps)
                    bar.update(before + done - bar.n)

                own = {"n": len(numbers), "start": numbers.start} | ({"progress": report} if reports else {})
                try:
                    with as_input_errors():
                        drawn.append(model.sample(**given | own))
                    require_finite_rows(drawn[-1].x)
                except NotFinite as error:
                    helpful = ["more steps"] if model.takes("steps") else []
                    helpful += ["a lower temperature"] if takes_temperature(model, given.get("sampler")) else []
                    advice = ", ".join([*helpful, "or ema=true"])
                    raise NotFinite(error.row, f"sample {numbers[error.row]}", advice) from error
            yield together(drawn)
    finally:
        if bar is not None:
            bar.close()


def takes_temperature(model, sampler: str | None) -> bool:
    """Whether a sampler (None for the default) scales its noise: chains draw from p^beta, others start from data."""
    if model.spec.source is not None:
        return False
    options = model.own_options()
    return "inverse_temperature" not in options or "eta" in options and sampler in (None, *SAMPLERS)


def together(parts: Sequence[Samples]) -> Samples:
    """The samples of several parts as one."""
    whole = {name: joined([getattr(p, name) for p in parts])
             for name in ("x", "cond", "index", "mask", "durations", "outside", "source")}
    path = None if parts[0].path is None else torch.cat([p.path.cpu() for p in parts], dim=1)
    return Samples(made=merged_record(parts), path=path, **whole)


@dataclass
class Drawing:
    """Samples to be drawn by all processes of a command, and the record of how they were made.

    Arguments:
        model, options, batch_size: what is drawn, and how many at once.
        made: what every file records in addition to the record of the sampler.
        ranks: the processes.
    """

    model: Any
    options: SamplingOptions
    batch_size: int
    made: dict[str, Any]
    ranks: Ranks

    def __post_init__(self):
        self.parts = parts_of(self.options, self.batch_size)
        self.ranks.members.append(self)

    def draw(self, numbers: Sequence[int]) -> Iterator[Samples]:
        """The samples of some of the parts in order."""
        parts = [self.parts[number] for number in numbers]
        for samples in draw_parts(self.model, self.options, parts, batch_size=self.batch_size,
                                  progress=self.ranks.rank == 0):
            samples.made |= self.made
            yield samples

    @property
    def recipe(self) -> dict:
        """Everything that sample number k depends on, in plain types."""
        given = {key: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest() if isinstance(value, Tensor)
                 else value for key, value in self.options.given().items() if key not in ("n", "start")}
        return {**given, **self.made, "code": code_hash()}


def draw_together(drawing: Drawing, cache: Cache) -> Samples:
    """All samples as one, for the first process; parts that a killed command finished are taken from the cache."""
    key = key_of(**drawing.recipe, first=drawing.options.start, n=drawing.options.n, batch_size=drawing.batch_size)
    found: dict[int, dict] = {}
    for some in drawing.ranks.run(_own_parts, drawing, cache, key):
        found |= some
    samples = together([Samples(**found[number]) for number in sorted(found)])
    cache.forget(key)
    return samples


def _own_parts(drawing: Drawing, cache: Cache, key: str) -> dict[int, dict]:
    own = drawing.ranks.share(range(len(drawing.parts)))
    return cache.parts(key, own, lambda missing: zip(missing, map(vars, drawing.draw(missing)), strict=True))


def write_folder(drawing: Drawing, spec: DataSpec, target: Path) -> tuple[dict, list[str]]:
    """Write samples as single files, part by part, by all processes; how they were made, and lines for the user.

    Each file carries a hash of all that its sample depends on, so that files of a killed command are not drawn again.
    """
    drawing.made["recipe"] = key_of(**drawing.recipe)
    parts = drawing.ranks.run(_write_own_parts, drawing, spec, target, drawing.made["recipe"])
    n, drawn = drawing.options.n, sum(count for count, _, _ in parts)
    kept = f", of which {n - drawn} were there" if drawn < n else ""
    what = "single images" if spec.mel is None else ".wav and .png"
    made = next((made for _, made, _ in parts if made), {})
    written = f"{counted(n, 'sample')} as {what}{kept}: {target}"
    return made, [written, *(line for _, _, lines in parts for line in lines)]


def _write_own_parts(drawing: Drawing, spec: DataSpec, target: Path, recipe: str) -> tuple[int, dict, list[str]]:
    own = drawing.ranks.share(range(len(drawing.parts)))
    missing = [n for n in own if any(made_of(sample_file(target, k)).get("recipe") != recipe for k in drawing.parts[n])]
    made, lines = {}, []
    drawing.made["recipe"] = recipe
    for samples in drawing.draw(missing):
        made = samples.made
        lines += (write_images if spec.mel is None else write_sounds)(samples, spec, target)
    return sum(len(drawing.parts[number]) for number in missing), made, lines


def made_of(path: Path) -> dict[str, str]:
    """How a picture of samples, or an animation of their trajectory, was made; empty for another file."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # the pixels of a large grid are not read
    try:
        with Image.open(path) as image:
            if image.format == "GIF":
                made = json.loads(image.info.get("comment", b"{}"))
                return made if isinstance(made, dict) else {}
            return {str(k)[10:]: value for k, value in image.info.items() if str(k).startswith("genmodels.")}
    except (OSError, ValueError):
        return {}
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def sample_file(target: Path, number: int) -> Path:
    """The picture of a sample in a folder of single ones."""
    return target / f"{number:06d}.png"


def check_target(target: Path, spec: DataSpec) -> str:
    """The suffix of a file for samples.

    Raises:
        InputError: if samples of these data cannot be written in that form.
    """
    suffix = target.suffix.lower()
    if spec.encoding is not None:
        if suffix not in (".txt", ".npz", ""):
            raise InputError(f"out={target}: end it in .txt (all samples of text), .npz (arrays), or nothing (a folder "
                             "of single .txt)")
        return suffix
    if suffix not in (".png", ".npz", ".csv", ""):
        raise InputError(f"out={target}: end it in .png (a grid), .npz (arrays), .csv (a table of vectors), or nothing "
                         "(a folder of single PNGs)")
    if suffix == ".csv" and len(spec.event_shape) != 1:
        raise InputError(f"samples of shape {spec.event_shape} are no table: use out=samples.npz")
    if suffix in (".png", "") and (not has_picture(spec) or (suffix == "" and spec.event_shape == (2,))):
        raise InputError(f"samples of shape {spec.event_shape} are not pictures: use out=samples.npz")
    return suffix


def write_samples(samples, spec: DataSpec, target: Path, originals: dict[str, Tensor] | None = None) -> list[str]:
    """Write samples in the form of the target (`check_target`), with how they were made; returns lines for the user.

    Arguments:
        samples: what was drawn.
        spec: of the data.
        target: the file or folder.
        originals: images (C, H, W) by name that the samples were made from, shown above a grid.

    Raises:
        InputError: if samples of these data cannot be written in that form.
    """
    suffix = check_target(target, spec)
    if suffix == ".npz":
        arrays = {"x": samples.x.numpy(), "index": samples.index.numpy(), "made": json.dumps(samples.made)}
        for name in ("cond", "source", "mask"):
            if getattr(samples, name) is not None:
                arrays[name] = getattr(samples, name).numpy()
        write_whole(target, lambda file: np.savez_compressed(file, **arrays))
        return [f"{counted(len(samples.x), 'sample')} {tuple(samples.x.shape[1:])} {samples.x.dtype}: {target}"]
    if spec.encoding is not None:
        return write_texts(samples, target)
    if suffix == ".csv":
        return write_table(samples, spec, target)
    if suffix == ".png":
        picture = picture_of(samples.x, spec, samples.cond, samples.index)
        if samples.source is not None:
            before = replace(spec, levels=spec.source["levels"])
            picture = stack([picture_of(samples.source, before, samples.cond, samples.index), picture], across=True)
        if originals:
            sources = images_of(torch.stack(list(originals.values())).to(samples.x.dtype), spec, smallest=LEGIBLE)
            sources = [ImageOps.expand(image, 1, 128) for image in sources]  # a mask is white on white
            picture = stack([grid(sources, len(sources), names=list(originals)), picture])
        save_png(picture, target, _recorded(samples, spec))
        return [f"{counted(len(samples.x), 'sample')}: {target}"]
    if spec.mel is not None:
        return [f"{counted(len(samples.x), 'sample')} as .wav and .png: {target}", *write_sounds(samples, spec, target)]
    return [f"{counted(len(samples.x), 'sample')} as single images: {target}", *write_images(samples, spec, target)]


def write_images(samples, spec: DataSpec, target: Path) -> list[str]:
    """Each image as a PNG in a folder."""
    for k, image in enumerate(images_of(samples.x, spec)):
        _save_single(image, samples, k, spec, target)
    return []


def write_table(samples, spec: DataSpec, target: Path) -> list[str]:
    """Vectors as a table with named columns, classes in the last one; how they were made in a .json."""
    names = list(spec.columns) or [f"x{k + 1}" for k in range(spec.dims)]
    rows = [[f"{value:.9g}" for value in row] for row in samples.x.tolist()]  # nine digits identify a float32
    if samples.cond is not None:
        names, classes = [*names, "class"], [class_name(spec, label) for label in samples.cond.tolist()]
        rows = [[*row, name] for row, name in zip(rows, classes, strict=True)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([names, *rows])
    made = _recorded(samples, spec)
    write_whole(target, lambda file: file.write(text.getvalue()), mode="w")
    write_whole(target.with_suffix(".json"), lambda file: json.dump(made, file, indent=1), mode="w")
    return [f"{counted(len(rows), 'sample')} of {', '.join(names)}: {target} (how they were made: "
            f"{target.with_suffix('.json').name})"]


def write_sounds(samples, spec: DataSpec, target: Path) -> list[str]:
    """Each mel as sound (.wav, by Griffin-Lim) and as a picture (.png) in a folder.

    A mel that is too loud for sound, as from an untrained model, is written as a picture only, and named in a line.
    """
    from genmodels.plots.images import mel_image
    from genmodels.speech.audio import MelConfig, write_wav
    from genmodels.speech.vocoder import GriffinLim, sound_of

    config, silent = MelConfig(**spec.mel), []
    for k, mel in enumerate(samples.x):
        mel = mel if samples.mask is None else mel[:, samples.mask[k, 0]]
        number = int(samples.index[k])
        wave = sound_of(mel, GriffinLim(config), number) if bool(mel.isfinite().all()) else None
        if wave is None or not bool(wave.isfinite().all()):
            silent.append(f"sample {number} has no .wav: its mel goes up to {float(mel.max()):.4g} in log units, "
                          "louder than any sound; train longer, or lower temperature=")
        else:
            place = target / f"{number:06d}.wav"
            write_whole(place, lambda file, wave=wave: write_wav(file, wave, config.sample_rate))
        _save_single(mel_image(mel, 4, 2), samples, k, spec, target)
    return silent


_LONGEST, _CLASSES = 10.0, 10  # seconds of sound, and classes, in report.html


def playable(wave: Tensor, rate: int) -> Tensor:
    """The first ten seconds of sound (N,) as int16; empty where it is not finite, as of a mel louder than any sound.

    Example:
        >>> playable(torch.zeros(99), 8).shape, playable(torch.full((9,), torch.inf), 8).shape
        (torch.Size([80]), torch.Size([0]))
    """
    from genmodels.speech.audio import sixteen_bits

    wave = wave[: round(_LONGEST * rate)]
    return sixteen_bits(wave if bool(wave.isfinite().all()) else wave[:0])[0]


def sounds_by_class(x: Tensor, cond: Tensor | None, spec: DataSpec) -> dict[str, Tensor]:
    """The sound of mels (n, n_mels, T): the first of each class, ten at most; without classes the first three.

    The sound of row k is `sound_k`, by Griffin-Lim; frames of silence at the end are left out.
    """
    from genmodels.speech.audio import MelConfig
    from genmodels.speech.vocoder import FLOOR, GriffinLim

    labels = list(range(min(len(x), 3))) if cond is None else cond.tolist()
    vocoder = GriffinLim(MelConfig(**spec.mel))
    found = {}
    for label in sorted(set(labels[: len(x)]))[:_CLASSES]:
        row = labels.index(label)
        sounding = (x[row] > FLOOR + 1e-4).any(0).nonzero().flatten().tolist() or [0]
        mel = x[row, :, : sounding[-1] + 1].float()
        wave = vocoder(mel) if bool(mel.isfinite().all()) else mel[0]
        found[f"sound_{row}"] = playable(wave, vocoder.config.sample_rate)
    return found


def evenly_changing(path: Tensor, frames: int) -> Tensor:
    """Indices of the frames (steps, n, *event) to show, so that the change between neighbours is even.

    Change is measured by the distance to the last frame, averaged over the samples, to which noise that is added and
    removed along the trajectory does not contribute. The first and the last frame are always shown.

    Example:
        >>> evenly_changing(torch.tensor([0.0, 0.1, 0.2, 1.0, 3.0, 3.9, 4.0])[:, None, None], 5).tolist()
        [0, 3, 4, 5, 6]
    """
    count, frames = len(path), min(frames, len(path))
    far = torch.stack([(one.float() - path[-1].float()).flatten(1).square().mean(1).sqrt().mean() for one in path])
    far = far.cummin(0).values
    chosen = [int((far <= far[0] * (1 - k / (frames - 1))).int().argmax()) if k else 0 for k in range(frames)]
    chosen[-1] = count - 1 if frames > 1 else 0
    for k in range(1, frames):  # after the one before, and early enough for those that follow
        chosen[k] = min(max(chosen[k], chosen[k - 1] + 1), count - frames + k)
    return torch.tensor(chosen)


def check_path(target: Path, spec: DataSpec) -> None:
    """Raise InputError if trajectories of these data have no picture, or no strip, or for another form of file."""
    if target.suffix.lower() not in (".png", ".gif"):
        raise InputError(f"path={target}: the trajectory is written to a .png (a strip) or a .gif")
    if not has_picture(spec):
        raise InputError(f"path: samples of shape {spec.event_shape} have no picture: leave path out")
    if target.suffix.lower() == ".png" and not spec.is_image:
        raise InputError("path: a strip shows images, a .gif points too")


def write_path(samples, spec: DataSpec, target: Path, frames: int) -> str:
    """Write the trajectories as a strip (.png, one row per sample, at most 8) or an animation (.gif).

    The frames shown are chosen by `evenly_changing`.

    Raises:
        InputError: for data that are neither images nor points.
    """
    check_path(target, spec)
    at_least(2, frames=frames)
    steps = samples.made.get("steps_taken", samples.made.get("steps", len(samples.path)))
    of_steps = torch.linspace(0, steps - 1, len(samples.path)).round().int() + 1
    chosen = evenly_changing(samples.path, frames)
    shown = samples.path[chosen]
    if target.suffix.lower() == ".gif":
        pictures = [picture_of(frame, spec, samples.cond, samples.index) for frame in shown]
        size = (max(p.width for p in pictures), max(p.height for p in pictures))
        first, *rest = (p.convert("P" if p.mode == "L" else "RGB").resize(size) for p in pictures)
        milliseconds = [120] * len(rest) + [1500]
        made = json.dumps(_recorded(samples, spec))
        write_whole(target, lambda file: first.save(file, format="GIF", save_all=True, append_images=rest,
                                                    duration=milliseconds, loop=0, comment=made.encode()))
        return f"trajectory of {counted(shown.shape[1], 'sample')} in {len(shown)} frames: {target}"
    rows = min(8, shown.shape[1])
    tiles = [image for k in range(rows) for image in images_of(shown[:, k], spec, smallest=LEGIBLE)]
    names = [f"step {int(of_steps[k])}" for k in chosen] * rows
    labels = [] if samples.cond is None else spec.as_given(samples.cond.tolist())
    classes = [f" ({label})" for label in labels] or [""] * rows
    numbers = [f"{i}{classes[k]}" for k, i in enumerate(samples.index[:rows].tolist()) for _ in chosen]
    sheet = grid(tiles, columns=len(shown), names=names, numbers=numbers)
    save_png(sheet, target, _recorded(samples, spec, rows))
    return f"trajectory of {counted(rows, 'sample')} in {len(shown)} frames: {target}"


def _recorded(samples, spec: DataSpec, count: int | None = None) -> dict:
    """How samples were made, with the numbers of the first `count` and the classes as `cond=` takes them."""
    index = samples.index.tolist()
    classes = {} if samples.cond is None else {"cond": spec.as_given(in_turn(samples.cond.tolist(), index))}
    return samples.made | {"index": f"{index[0]}-{index[:count][-1]}"} | classes


def _save_single(picture: Image.Image, samples, k: int, spec: DataSpec, target: Path) -> None:
    """Write the picture of sample k in a folder of single ones."""
    label = {} if samples.cond is None else {"cond": spec.as_given([int(samples.cond[k])])[0]}
    number = int(samples.index[k])
    save_png(picture, sample_file(target, number), samples.made | {"index": number} | label)


def save_png(picture: Image.Image, path: Path, made: dict) -> None:
    """Write a picture as a PNG with `made` in its metadata."""
    text = PngInfo()
    for key, value in made.items():
        text.add_text(f"genmodels.{key}", str(value))
    write_whole(path, lambda file: picture.save(file, format="PNG", pnginfo=text))
