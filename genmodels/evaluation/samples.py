"""Samples in batches, with a progress bar, and the files they are written to."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from tqdm import tqdm

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, NotFinite, refusals, require_finite_rows
from genmodels.core.files import kind_of, write_whole
from genmodels.core.samples import COMMON, Samples, SamplingOptions
from genmodels.data.utterances import joined
from genmodels.plots.images import LEGIBLE, class_name, grid, images_of, in_turn, picture_of, stack


def draw(model, options: SamplingOptions, *, batch_size: int = 64, progress: bool = True) -> Samples:
    """The samples of a model that are asked for, `batch_size` at a time; on which they do not depend.

    Raises:
        InputError: for an option this model does not take, or a value it refuses.
        RunError: when a sample is not finite, naming it.
    """
    common = {key: value for key in COMMON if (value := getattr(options, key)) is not None}
    given = options.given() | common
    for key in given:
        if not model.takes(key):
            if key in COMMON:
                raise InputError(f"{type(model).__name__}.sample does not take {key}=, as every model's must "
                                 "(see GenerativeModel.sample)")
            raise InputError(f"{model.family} has no sampling option {key!r}; it has {', '.join(model.own_options())}")
    tells = progress and "progress" in model.own_options()
    parts, bar = [], None
    try:
        end = options.start + options.n
        for first in range(options.start, end, batch_size):
            done_before = bar.n if bar is not None else 0

            def report(done: int, steps: int, before: int = done_before) -> None:
                nonlocal bar
                if bar is None:  # not before the first step: a refused option leaves one line, no bar
                    bar = tqdm(desc="sampling", unit="step", total=-(-options.n // batch_size) * steps)
                bar.update(before + done - bar.n)

            own = {"n": min(batch_size, end - first), "start": first} | ({"progress": report} if tells else {})
            try:
                with refusals():
                    part = model.sample(**given | own)
                require_finite_rows(part.x)
            except NotFinite as error:
                helpful = ["more steps"] if model.takes("steps") else []
                helpful += [] if "inverse_temperature" in model.own_options() else ["a lower temperature"]
                advice = ", ".join([*helpful, "or ema=true"])
                raise NotFinite(error.row, f"sample {first + error.row}", advice) from error
            parts.append(part)
    finally:
        if bar is not None:
            bar.close()
    together = {name: joined([getattr(p, name) for p in parts])
                for name in ("x", "cond", "index", "mask", "durations", "outside")}
    path = None if parts[0].path is None else torch.cat([p.path.cpu() for p in parts], dim=1)
    return Samples(made=dict(parts[0].made), path=path, **together)


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


def write_samples(samples, spec: DataSpec, target: Path, originals: dict[str, torch.Tensor] | None = None) -> list[str]:
    """Write samples to a .png (grid), a .npz (arrays) or a folder (single PNGs); returns what to tell the user.

    Every file carries the checkpoint's hash, seed, indices, sampler and steps, a grid its classes too.

    Arguments:
        samples: what was drawn.
        spec: what they are.
        target: the file or folder.
        originals: images (C, H, W) by name that stand over a grid, what the samples were made from.

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
        if originals:
            sources = images_of(torch.stack(list(originals.values())).to(samples.x.dtype), spec, smallest=LEGIBLE)
            sources = [ImageOps.expand(image, 1, 128) for image in sources]  # a mask is white on white
            picture = stack([grid(sources, len(sources), names=list(originals)), picture])
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
        names, classes = [*names, "class"], [class_name(spec, label) for label in samples.cond.tolist()]
        rows = [[*row, name] for row, name in zip(rows, classes, strict=True)]
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
    from genmodels.plots.images import mel_image
    from genmodels.speech.audio import MelConfig, write_wav
    from genmodels.speech.vocoder import GriffinLim, sound_of

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


def read_items(names: list[int | str], datamodule: Callable, spec: DataSpec, key: str) -> Batch:
    """Items as one batch: numbers of the test split, or picture files that are resized to the model's images.

    Arguments:
        names: numbers and paths; labels are in the batch when all are numbers.
        datamodule: a function of no arguments that prepares the data, called where there is a number.
        spec: the data of the model.
        key: the key of the command line that errors name.

    Raises:
        InputError: when an item does not exist, is not a picture, or the model's data are none.
    """
    items, labels = [], []
    for name in names:
        if isinstance(name, int) or str(name).isdigit():
            batch = next(iter(datamodule().loader("test", 1, [int(name)])))
            items.append(batch.x)
            labels.append(batch.cond)
        else:
            items.append(_picture(Path(name), spec, key)[None])
            labels.append(None)
    known = all(label is not None for label in labels)
    return Batch(torch.cat(items), torch.cat(labels) if known else None)


def read_mask(name: str, spec: DataSpec, key: str) -> Tensor:
    """(1, H, W) bool from a picture file, True where it is white (over one half).

    Raises:
        InputError: when there is no such picture, or it is of one colour all over.
    """
    grey = _pixels(Path(name), spec, "L", key)[..., 0] > 127.5
    if bool(grey.all()) or not bool(grey.any()):
        colour = "white: nothing is left to draw" if bool(grey.all()) else "black: nothing is kept"
        raise InputError(f"{key}={name} is all {colour}; white is kept, black is drawn")
    return grey[None]


def _picture(path: Path, spec: DataSpec, key: str) -> Tensor:
    if not (spec.is_image and spec.levels):
        raise InputError(f"{key}={path}: these data are no images; name an item of the test split by its number")
    pixels = _pixels(path, spec, "L" if spec.event_shape[0] == 1 else "RGB", key).permute(2, 0, 1)
    return (pixels * ((spec.levels - 1) / 255)).round().to(torch.uint8)


def _pixels(path: Path, spec: DataSpec, mode: str, key: str) -> Tensor:
    """(H, W, channels) float32 of 0 to 255, in the size of the model's images."""
    _, height, width = spec.event_shape
    if path.exists() and not path.is_file():
        raise InputError(f"{key}: {path} is {kind_of(path)}, not a picture")
    try:
        with Image.open(path) as image:
            # Means of whole boxes, so that a picture enlarged by whole pixels comes back as it was.
            how = Image.Resampling.BOX if image.width >= width else Image.Resampling.BILINEAR
            image = image.convert(mode).resize((width, height), how)
    except FileNotFoundError as error:
        raise InputError(f"{key}: there is no file {path}") from error
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(f"{key}: {path} is not a picture") from error
    return torch.from_numpy(np.asarray(image, dtype=np.float32)).reshape(height, width, -1)


def interpolate(model, ends: Batch, frames: int, weights: str | float = "ema") -> Tensor:
    """Items whose latents lie between those of two items, `(frames, *event)`; the first and the last are the ends.

        z(w) = ((1 - w) z_0 + w z_1) / sqrt((1 - w)^2 + w^2)

    Ends of two classes meet under no class, where the model knows that.

    Arguments:
        model: a model with `latents` and `from_latents`.
        ends: a batch of two.
        frames: how many, at least 2.
        weights: `ema`, `raw`, or one of the decays kept.

    Raises:
        InputError: when a model that always needs a class is given ends of two classes.
    """
    cond = None
    if model.num_classes is not None:
        if ends.cond is not None and bool(ends.cond[0] == ends.cond[1]):
            cond = ends.cond[:1].expand(frames)
        elif model.has_null_class:
            ends = Batch(ends.x)
        else:
            wrong = "pictures have no class" if ends.cond is None else "these are of two"
            raise InputError(f"interpolate: this model always needs a class, and {wrong}: choose two items of one "
                             "class of the test split, by number")
    latents = model.latents(ends, weights)
    between = latents.rows(slice(0, 1)).interpolate(latents.rows(slice(1, 2)), torch.linspace(0, 1, frames))
    return model.from_latents(between, cond, weights)


def read_ends(names: list[int | str], datamodule, spec: DataSpec) -> Batch:
    """Two items: numbers of the test split, or picture files.

    Raises:
        InputError: when there are not two, or one cannot be read.
    """
    if len(names) != 2:
        raise InputError(
            f"interpolate takes two items, got {len(names)}: interpolate=[3,17] or interpolate=[a.png,b.png]"
        )
    return read_items(names, datamodule, spec, "interpolate")
