"""Samples in batches, with a progress bar, and the files they are written to."""

from __future__ import annotations

import csv
import inspect
import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from tqdm import tqdm

from genmodels.data.spec import DataSpec
from genmodels.data.utterances import joined
from genmodels.errors import InputError, NotFinite, refusals, require_finite_rows
from genmodels.evaluation.pictures import LEGIBLE, class_name, grid, images_of, in_turn, picture_of, stack
from genmodels.files import write_whole


def draw(model, n: int, *, batch_size: int = 64, start: int = 0, progress: bool = True, **options):
    """`n` samples of a model, `batch_size` at a time; what is drawn does not depend on the batch size.

    Raises:
        InputError: for an option this model does not take, or a value it refuses.
        RunError: when a sample is not finite, naming it.
    """
    from genmodels.models.base import Samples

    for key in ("start", *options):
        if not takes(model.sample, key):
            if key in ("start", "weights", "seed", "temperature"):
                raise InputError(f"{type(model).__name__}.sample does not take {key}=, as every model's must "
                                 "(see GenerativeModel.sample)")
            own = [name for name in inspect.signature(model.sample).parameters if name not in ("n", "start", "weights")]
            raise InputError(f"{model.family} has no sampling option {key!r}; it has {', '.join(own)}")
    tells = "progress" in inspect.signature(model.sample).parameters
    parts, bar = [], None
    try:
        for first in range(start, start + n, batch_size):
            count = min(batch_size, start + n - first)
            done_before = bar.n if bar is not None else 0

            def report(done: int, steps: int, before: int = done_before) -> None:
                nonlocal bar
                if bar is None:  # not before the first step: a refused option leaves one line, no bar
                    bar = tqdm(desc="sampling", unit="step", total=-(-n // batch_size) * steps)
                bar.update(before + done - bar.n)

            hook = {"progress": report} if progress and tells else {}
            try:
                with refusals():
                    part = model.sample(count, start=first, **options, **hook)
                require_finite_rows(part.x)
            except NotFinite as error:
                raise NotFinite(error.row, f"sample {first + error.row}") from error
            parts.append(part)
    finally:
        if bar is not None:
            bar.close()
    together = {name: joined([getattr(p, name) for p in parts])
                for name in ("x", "cond", "index", "mask", "durations")}
    path = None if parts[0].path is None else torch.cat([p.path.cpu() for p in parts], dim=1)
    return Samples(made=dict(parts[0].made), path=path, **together)


def takes(function, name: str) -> bool:
    """Whether a function takes that keyword argument: by its name, or with any other as `**options`.

    Example:
        >>> takes(lambda n, *, steps: n, "steps"), takes(lambda n, **options: n, "steps"), takes(lambda n: n, "steps")
        (True, True, False)
    """
    known = inspect.signature(function).parameters
    return name in known or any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())


def check_target(target: Path, spec: DataSpec) -> str:
    """The suffix of a file for samples.

    Raises:
        InputError: when samples of these data cannot be written in that form.
    """
    suffix = target.suffix.lower()
    if suffix not in (".png", ".npz", ".csv", ""):
        raise InputError(f"out={target}: end it in .png (a grid), .npz (arrays), .csv (a table of vectors), or nothing "
                         "(a folder of single PNGs)")
    drawn = spec.is_image or spec.mel is not None
    if suffix == ".csv":
        if len(spec.event_shape) != 1:
            raise InputError(f"samples of shape {spec.event_shape} are no table: use out=samples.npz")
        return suffix
    if suffix != ".npz" and not drawn and (suffix == "" or spec.event_shape != (2,)):
        raise InputError(f"samples of shape {spec.event_shape} are not pictures: use out=samples.npz")
    return suffix


def write_samples(samples, spec: DataSpec, target: Path, beside: dict[str, torch.Tensor] | None = None) -> list[str]:
    """Write samples to a .png (grid), a .npz (arrays) or a folder (single PNGs); returns what to tell the user.

    Every file carries the checkpoint's hash, seed, indices, sampler and steps, a grid its classes too.

    Arguments:
        samples: what was drawn.
        spec: what they are.
        target: the file or folder.
        beside: images (C, H, W) by name that stand over a grid, what the samples were made from.

    Raises:
        InputError: when the data cannot be drawn as asked.
    """
    suffix = check_target(target, spec)
    if suffix == ".npz":
        arrays = {"x": samples.x.numpy(), "index": samples.index.numpy(), "made": json.dumps(samples.made)}
        if samples.cond is not None:
            arrays["cond"] = samples.cond.numpy()
        write_whole(target, lambda file: np.savez_compressed(file, **arrays))
        return [f"{len(samples.x)} samples {tuple(samples.x.shape[1:])} {samples.x.dtype}: {target}"]
    if suffix == ".csv":
        return write_table(samples, spec, target)
    if suffix == ".png":
        picture = picture_of(samples.x, spec, samples.cond, samples.index)
        if beside:
            sources = images_of(torch.stack(list(beside.values())).to(samples.x.dtype), spec, smallest=LEGIBLE)
            sources = [ImageOps.expand(image, 1, 128) for image in sources]  # a mask is white on white
            picture = stack([grid(sources, len(sources), names=list(beside)), picture])
        save_png(picture, target, samples.made | {"index": _span(samples.index)} | _classes(samples))
        return [f"{len(samples.x)} samples: {target}"]
    if spec.mel is not None:
        return write_sounds(samples, spec, target)
    for k, image in enumerate(images_of(samples.x, spec)):
        label = {} if samples.cond is None else {"cond": int(samples.cond[k])}
        number = int(samples.index[k])
        save_png(image, target / f"{number:06d}.png", samples.made | {"index": number} | label)
    return [f"{len(samples.x)} samples as single images: {target}"]


def write_table(samples, spec: DataSpec, target: Path) -> list[str]:
    """Vectors as a table with the names of its columns, their classes in a last one; how they were made in a .json."""
    names = list(spec.columns) or [f"x{k + 1}" for k in range(spec.dims)]
    rows = [[f"{value:.9g}" for value in row] for row in samples.x.tolist()]  # nine digits are all of float32
    if samples.cond is not None:
        names, told = [*names, "class"], [class_name(spec, label) for label in samples.cond.tolist()]
        rows = [[*row, name] for row, name in zip(rows, told, strict=True)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([names, *rows])
    made = samples.made | {"index": _span(samples.index)} | _classes(samples)
    write_whole(target, lambda file: file.write(text.getvalue()), mode="w")
    write_whole(target.with_suffix(".json"), lambda file: json.dump(made, file, indent=1), mode="w")
    return [f"{len(rows)} samples of {', '.join(names)}: {target} (how they were made: "
            f"{target.with_suffix('.json').name})"]


def write_sounds(samples, spec: DataSpec, target: Path) -> list[str]:
    """Each mel as sound (.wav, by Griffin-Lim) and as a picture (.png) in a folder.

    A mel beyond what numbers of sound can hold, as models make before they have learnt anything, has a picture only,
    and a line that says so.
    """
    from genmodels.evaluation.mel_pictures import mel_image
    from genmodels.evaluation.sounding import sound_of
    from genmodels.speech.audio import write_wav
    from genmodels.speech.mel import MelConfig
    from genmodels.speech.vocoder import GriffinLim

    config, silent = MelConfig(**spec.mel), []
    for k, mel in enumerate(samples.x):
        mel = mel if samples.mask is None else mel[:, samples.mask[k, 0]]
        label = {} if samples.cond is None else {"cond": int(samples.cond[k])}
        number, held = int(samples.index[k]), io.BytesIO()
        wave = sound_of(mel, GriffinLim(config), number) if bool(mel.isfinite().all()) else None
        if wave is None or not bool(wave.isfinite().all()):
            silent.append(f"sample {number} has no .wav: its mel goes up to {float(mel.max()):.4g} in log units, "
                          "louder than any sound; train longer, or lower temperature=")
        else:
            write_wav(held, wave, config.sample_rate)
            write_whole(target / f"{number:06d}.wav", lambda file, held=held: file.write(held.getvalue()))
        save_png(mel_image(mel, 4, 2), target / f"{number:06d}.png", samples.made | {"index": number} | label)
    return [f"{len(samples.x)} samples as .wav and .png: {target}", *silent]


def evenly_changing(path: torch.Tensor, frames: int) -> torch.Tensor:
    """Which of many frames (steps, n, *event) to show so that as much changes from each to the next.

    Change is the distance to the last frame, a mean over the samples, which noise that comes and goes on the way does
    not lengthen; the first and the last frame are always shown.

    Example:
        >>> evenly_changing(torch.tensor([0.0, 0.1, 0.2, 1.0, 3.0, 3.9, 4.0])[:, None, None], 5).tolist()
        [0, 3, 4, 5, 6]
    """
    count, frames = len(path), min(frames, len(path))
    far = torch.stack([(one.float() - path[-1].float()).flatten(1).square().mean(1).sqrt().mean() for one in path])
    far = far.cummin(0).values
    chosen = [int((far <= far[0] * (1 - k / (frames - 1))).int().argmax()) if k else 0 for k in range(frames)]
    chosen[-1] = count - 1 if frames > 1 else 0
    for k in range(1, frames):  # each later than the one before, and early enough for those that follow
        chosen[k] = min(max(chosen[k], chosen[k - 1] + 1), count - frames + k)
    return torch.tensor(chosen)


def write_path(samples, spec: DataSpec, target: Path, frames: int) -> str:
    """Write the way from noise to data as a strip (.png: one row a sample, at most 8) or a film (.gif).

    Of the frames that the samples have, as many are shown as asked for, spaced by how much changes.

    Raises:
        InputError: when the data are not images or points.
    """
    steps = samples.made.get("steps", len(samples.path))
    of_steps = torch.linspace(0, steps - 1, len(samples.path)).round().int() + 1
    chosen = evenly_changing(samples.path, frames)
    frames = samples.path[chosen]
    if target.suffix.lower() == ".gif":
        pictures = [picture_of(frame, spec, samples.cond, samples.index) for frame in frames]
        if pictures[0] is None:
            raise InputError(f"samples of shape {spec.event_shape} have no picture")
        size = (max(p.width for p in pictures), max(p.height for p in pictures))
        pictures = [p.convert("P" if p.mode == "L" else "RGB").resize(size) for p in pictures]
        waits = [120] * (len(pictures) - 1) + [1500]
        first, rest = pictures[0], pictures[1:]
        made = json.dumps(samples.made | {"index": _span(samples.index)} | _classes(samples))
        write_whole(target, lambda file: first.save(file, format="GIF", save_all=True, append_images=rest,
                                                    duration=waits, loop=0, comment=made.encode()))
        return f"path of {frames.shape[1]} samples in {len(frames)} frames: {target}"
    rows = min(8, frames.shape[1])
    tiles = [image for k in range(rows) for image in images_of(frames[:, k], spec, smallest=LEGIBLE)]
    names = [f"step {int(of_steps[k])}" for k in chosen] * rows
    numbers = [int(i) for i in samples.index[:rows] for _ in chosen]
    sheet = grid(tiles, columns=len(frames), names=names, numbers=numbers)
    save_png(sheet, target, samples.made | {"index": _span(samples.index[:rows])} | _classes(samples))
    return f"path of {rows} samples in {len(frames)} steps: {target}"


def _classes(samples) -> dict:
    """The classes of samples, as `cond=` takes them to draw the same again."""
    return {} if samples.cond is None else {"cond": in_turn(samples.cond.tolist(), samples.index.tolist())}


def _span(index: torch.Tensor) -> str:
    return f"{int(index[0])}-{int(index[-1])}"


def save_png(picture: Image.Image, path: Path, made: dict) -> None:
    """A picture as a PNG that carries how it was made."""
    text = PngInfo()
    for key, value in made.items():
        text.add_text(f"genmodels.{key}", str(value))
    write_whole(path, lambda file: picture.save(file, format="PNG", pnginfo=text))
