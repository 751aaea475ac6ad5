"""Items that samples start from: editing, inpainting and interpolation of items given by number or file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import pad

from genmodels.core.data import Batch, DataSpec, Latents
from genmodels.core.errors import InputError, an
from genmodels.core.files import kind_of, read_text
from genmodels.core.random import KeyedGenerator
from genmodels.data.base import DataModule
from genmodels.data.image_folder import fitted
from genmodels.data.text import to_bytes
from genmodels.models.build import build
from genmodels.models.checkpoint import data_options
from genmodels.models.mels import alone, even_lengths
from genmodels.speech.text import Symbols, ready

_OF_ITEM = ("text_file", "durations", "seconds", "speed", "stream")  # options that an item with a text replaces


def data_of(model, header: dict, ckpt_path: str | Path, trust: Sequence[str] = ()) -> Callable[[], DataModule]:
    """A function that prepares the data which a model was trained on.

    The function raises an InputError for data that have changed since: they may be divided otherwise.
    """

    def prepared() -> DataModule:
        data = build(data_options(header, ckpt_path), trust=trust).prepare()
        require_same_items(model, data, {})
        return data

    return prepared


def require_same_items(model, datamodule: DataModule, changed: dict) -> None:
    """Raise an InputError for columns or classes of other names, and for a data set that has changed since training."""
    trained, found = model.spec, datamodule.spec
    for what in ("columns", *(["class_names"] if model.num_classes is not None else [])):
        then, now = getattr(trained, what), getattr(found, what)
        if then and now and then != now:
            raise InputError(f"these data do not fit the checkpoint: their {what} are {', '.join(now)}, the model was "
                             f"built for {', '.join(then)}")
    other = {"root", "file"} & set(changed) or datamodule.draws_items
    if not other and not found.fingerprint.startswith(trained.fingerprint):
        options = ", ".join(f"data.{key}={value}" for key, value in changed.items())
        raise InputError(f"{found.name} has changed since training ({found.fingerprint}; then {trained.fingerprint}"
                         f"{f'; {options}' if options else ''}), so that its test split may hold items that the "
                         "model was trained on: restore it, or evaluate on data of which it has seen nothing by "
                         "data.root= or data.file=")


def material(
    model, header: dict, named: dict, ckpt_path: Path, trust: list[str], weights: str | float
) -> tuple[dict, list[str]]:
    """The options of `sample` for `inpaint`, `mask` and `edit`, and lines for the user.

    An item with a text adds its text, the durations of its best alignment and its speaker, unless `cond` names another;
    a mel without text its length. With another `text` in place of a mask `inpaint` draws the words that differ.

    Arguments:
        named: `inpaint`, `mask` and `edit`; for a model of speech also the user's options on the text.
        weights: those that align and predict durations: `ema`, `raw`, or one of the decays kept.

    Raises:
        InputError: for a model that cannot start from an item, or items that do not exist.
    """
    asked = next((key for key in ("inpaint", "edit") if named[key] is not None), None)
    if asked is None:
        return {}, []
    for key in ("inpaint", "mask", "edit"):
        if not isinstance(named[key], Integral | str | Path | None):
            raise InputError(f"{key} is a file or the number of an item, not {an(type(named[key]).__name__)}; in "
                             "Python model.network.sample takes tensors as known=, keep= and edit=")
    if {"inpaint": "known", "edit": "edit"}[asked] not in model.own_options():
        raise InputError(f"{asked} is not possible with {an(header['family'])}, which {ckpt_path} holds: leave it out")
    spec, data = model.spec, data_of(model, header, ckpt_path, trust)
    for key in ("inpaint", "mask", "edit"):
        if isinstance(named[key], str) and (spec.encoding is None or named[key].endswith(".txt")):  # else a text itself
            named = named | {key: os.path.expanduser(named[key])}

    def item(key: str) -> Batch:
        if spec.encoding is not None and not isinstance(named[key], Integral):
            return Batch(_bytes_of(str(named[key]), key)[None])
        return read_items([named[key]], data, spec, key)

    text, taken = named.get("text"), [key for key in _OF_ITEM if named.get(key)]
    if taken:
        raise InputError(f"{asked} has the durations of its item: leave out {taken[0]}")
    if text is not None and (asked == "edit" or named["mask"] is not None):
        raise InputError(f"{asked} keeps the text of its item: leave out text; inpaint without mask takes another text")
    batches = {key: item(key) for key in ("edit", "inpaint") if named[key] is not None}
    if spec.text is not None:
        batches = {key: even_lengths(alone(batch, 0)) for key, batch in batches.items()}
    found = {} if spec.mel is None else _speech_options(model, batches[asked], named.get("cond"), weights)
    found |= {"edit": batches["edit"].x[0]} if "edit" in batches else {}
    if "inpaint" not in batches:
        return found, []
    known, mask = batches["inpaint"].x[0], str(named["mask"])
    numbered = isinstance(named["inpaint"], Integral) or (spec.encoding is None and str(named["inpaint"]).isdigit())
    inpainted = f"item {named['inpaint']}" if numbered else named["inpaint"]
    if text is not None:
        return rewritten(model, batches["inpaint"], text, found, inpainted, weights, named.get("on_unknown") or "error")
    if spec.is_image:
        keep, what = read_mask(mask, spec, "mask"), f"pixels of {inpainted}, where {mask} is white"
    elif len(spec.event_shape) != 2:
        raise InputError(f"inpaint keeps a part of an image, a mel or a text; events here are {spec.event_shape}")
    elif spec.encoding is not None:
        known, keep = template(known, mask, spec)
        what = f"bytes of {inpainted}"
    else:
        frames = found.get("lengths", [known.shape[1]])[0]
        keep, what = read_range(mask, frames, "mask"), f"frames of {inpainted}, all but {mask}"
    line = f"kept {int(keep.sum())} of {keep.numel()} {what}"
    keep = pad(keep, (0, known.shape[-1] - keep.shape[-1]), value=True)  # what follows the last frame of a mel
    return found | {"known": known, "keep": keep}, [line]


def _speech_options(model, batch: Batch, speaker: int | str | None, weights: str | float) -> dict:
    """The length of a mel, or the text, durations and speaker of a mel with a text."""
    frames = batch.x.shape[2] if batch.mask is None else int(batch.mask.sum())
    if model.spec.text is None:
        return {"lengths": [frames]}
    text, mel = model.spec.text, model.spec.mel
    tokens = batch.cond.tokens[0, batch.cond.mask[0, 0]].tolist()
    normal = Symbols(tuple(text["symbols"]), text["blanks"]).decode(tokens)
    durations = model.aligned(batch.to(model.device), weights).durations[0].tolist()
    found = {"text": ready(normal, text.get("form", "characters")), "durations": [durations],
             "seconds": _seconds(sum(durations), mel)}  # a text of a given time is not split into sentences
    if speaker is None and batch.cond.speaker is not None:
        speaker = int(batch.cond.speaker[0])
    return found if speaker is None else found | {"cond": speaker}


def _seconds(frames: int, mel: dict) -> float:
    """The time of a mel; with the padding of Tacotron N frames are N - 1 hops."""
    return (frames - (mel.get("padding") == "tacotron")) * mel["hop"] / mel["sample_rate"]


def rewritten(
    model, batch: Batch, text: str, found: dict, item: str, weights: str | float, on_unknown: str = "error"
) -> tuple[dict, list[str]]:
    """The options of `sample` for an item whose text becomes another one, and a line for the user.

    The frames of the first and last words, as far as both texts share them, are kept; the words between are drawn, with
    predicted durations.

    Raises:
        InputError: for a text that is no other one, or has unknown symbols.
    """
    from genmodels.models.text_model import TextReader  # images need no reader of texts

    if not isinstance(text, str):
        raise InputError("inpaint takes one text, in which some words differ from those of its item")
    if "[pause=" in text:
        raise InputError(f"text={text!r}: a text for inpaint is one sentence, leave out [pause=]")
    reader = TextReader(model.spec, on_unknown)
    old, (lasting,) = batch.cond.tokens[0, batch.cond.mask[0, 0]].tolist(), found["durations"]
    new = reader.tokens(text)
    if new == old:
        raise InputError(f"text={text!r} is that of {item}: change some words, or choose frames by mask=from:to")
    first, last = shared_ends(old, new, model.spec.text["symbols"].index(" "))
    said = reader([text], found.get("cond")).to(model.device)
    core, noise = model.weights(weights), KeyedGenerator(0, torch.arange(1, device=model.device), "durations")
    slower = reader.stretch([text])
    predicted = core.tts.latent(said.tokens, said.mask, core.voice(said), generator=noise, temperature=0.0,
                                speed=1.0 if slower is None else 1 / slower.to(model.device)).durations[0]
    drawn = predicted[first : len(new) - last].tolist()
    durations = [*lasting[:first], *drawn, *lasting[len(old) - last :]]
    before, after, total = sum(lasting[:first]), sum(lasting[len(old) - last :]), sum(durations)
    mel = batch.x[0]
    known = torch.cat([mel[:, :before], mel.new_zeros(len(mel), sum(drawn)), mel[:, mel.shape[1] - after :]], dim=1)
    keep = torch.ones(1, total, dtype=torch.bool)
    keep[:, before : total - after] = False
    found = found | {"text": text, "durations": [durations], "seconds": _seconds(total, model.spec.mel)}
    return (found | {"known": known, "keep": keep},
            [f"kept {before + after} of {total} frames of {item}; drawn: {before}:{total - after}"])


def shared_ends(old: Sequence, new: Sequence, space) -> tuple[int, int]:
    """How many tokens at the beginning and at the end two texts share, in whole words; some of the new one remain.

    Example:
        >>> old = "a bad cab"
        >>> [shared_ends(old, new, " ") for new in ("a bag cab", "a bad bag", "a bad bad cab", "a cab")]
        [(2, 4), (6, 0), (5, 4), (0, 4)]
    """
    least = min(len(old), len(new))
    first = next((k for k in range(least) if old[k] != new[k]), least)
    while first and old[first - 1] != space:
        first -= 1
    most = least - first + min(first, 1)  # the space between may be of either
    last = next((k for k in range(most) if old[-1 - k] != new[-1 - k]), most)
    while last and old[-last] != space:
        last -= 1
    if first + last > least:
        first -= 1
    if first + last == len(new):  # words were left out: the one before is drawn anew
        first = max((k for k in range(first) if old[k - 1] == space), default=0)
    return first, last


def read_range(name: str, length: int, key: str) -> Tensor:
    """(1, length) bool, False for the positions `from:to` to draw.

    Raises:
        InputError: for anything but a range within the event.

    Example:
        >>> read_range("1:3", 4, "mask")
        tensor([[ True, False, False,  True]])
    """
    found = re.fullmatch(r"(\d+):(\d+)", name)
    if found is None or not int(found[1]) < int(found[2]) <= length:
        raise InputError(f"{key}={name} must be from:to, the places to draw anew, within 0:{length}, as {key}=0:"
                         f"{max(1, length // 2)}")
    keep = torch.ones(1, length, dtype=torch.bool)
    keep[:, int(found[1]) : int(found[2])] = False
    return keep


def template(known: Tensor, mask: str, spec: DataSpec) -> tuple[Tensor, Tensor]:
    """Bytes (1, L) of a text, padded to a sequence, and whether each is kept.

    Arguments:
        known: the bytes of the text; those after its end are drawn.
        mask: a character that stands for every byte to draw, or a range `from:to`.

    Raises:
        InputError: for a text longer than a sequence, or if nothing is left to draw.

    Example:
        >>> spec = DataSpec("text", (1, 6), levels=256, encoding="utf-8")
        >>> template(to_bytes("a_c"), "_", spec)
        (tensor([[97, 95, 99,  0,  0,  0]], dtype=torch.uint8), tensor([[ True, False,  True, False, False, False]]))
    """
    length = spec.event_shape[1]
    if known.shape[1] > length:
        raise InputError(f"inpaint: the text has {known.shape[1]} bytes, and sequences here have {length}: shorten it")
    one = to_bytes(mask)
    keep = known != one if one.shape[1] == 1 else read_range(mask, known.shape[1], "mask")
    missing = length - known.shape[1]
    known, keep = (torch.nn.functional.pad(part, (0, missing)) for part in (known, keep))
    if bool(keep.all()):
        raise InputError(f"mask={mask}: nothing is left to draw; name a character that stands for what is to be drawn "
                         "(inpaint='The ___ of' mask=_), or a range (mask=10:20)")
    return known, keep


def _bytes_of(name: str, key: str) -> Tensor:
    """The bytes (1, L) of a text file, or of the text itself."""
    if not name.endswith(".txt"):
        if os.path.isfile(name):
            raise InputError(f"{key}={name} is a file, and this is a model of text: give a .txt, or the text itself")
        return to_bytes(name)
    return to_bytes(read_text(name, key))


def read_items(names: list[int | str], datamodule: Callable, spec: DataSpec, key: str) -> Batch:
    """Items as one batch: numbers of the test split, or picture files, resized and cropped to the model's images.

    Arguments:
        names: numbers and paths; the batch has labels if all are numbers.
        datamodule: prepares the data; called only for numbers.
        spec: the data of the model.
        key: the key of the command line, for errors.

    Raises:
        InputError: if an item does not exist or is not a picture, or the model's data are not images.
    """
    items, labels = [], []
    for name in names:
        if isinstance(name, int) or str(name).isdigit():
            batch = datamodule().items("test", [max(-1, min(int(name), 2**63 - 1))])
            if len(names) == 1:
                return batch
            items.append(batch.x)
            labels.append(batch.cond)
        else:
            items.append(_picture(Path(name).expanduser(), spec, key)[None])
            labels.append(None)
    known = all(label is not None for label in labels)
    return Batch(torch.cat(items), torch.cat(labels) if known else None)


def read_mask(name: str, spec: DataSpec, key: str) -> Tensor:
    """(1, H, W) bool from a picture file, True where it is white (over one half).

    Raises:
        InputError: if there is no such picture, or it keeps everything or nothing.
    """
    white = _pixels(Path(name), spec, "L", key)[..., 0] > 127.5
    if bool(white.all()) or not bool(white.any()):
        found = "above one half: nothing is left to draw" if bool(white.all()) else "below one half: nothing is kept"
        raise InputError(f"{key}={name} is everywhere {found}; white is kept, black is drawn")
    return white[None]


def _picture(path: Path, spec: DataSpec, key: str) -> Tensor:
    if not (spec.is_image and spec.levels):
        raise InputError(f"{key}={path}: a file is for models of images; name an item of the test split by its number")
    channels = spec.event_shape[0]
    if channels not in (1, 3):
        raise InputError(f"{key}={path}: a picture has 1 or 3 channels, and items here have {channels}: name an item "
                         "of the test split by its number")
    pixels = _pixels(path, spec, "L" if channels == 1 else "RGB", key).permute(2, 0, 1)
    return (pixels * ((spec.levels - 1) / 255)).round().to(torch.uint8 if spec.levels <= 256 else torch.int64)


def _pixels(path: Path, spec: DataSpec, mode: str, key: str) -> Tensor:
    """(H, W, channels) float32 from 0 to 255, read as for training and resized to the model's images."""
    _, height, width = spec.event_shape
    if path.exists() and not path.is_file():
        raise InputError(f"{key}: {path} is {kind_of(path)}, not a picture")
    try:
        with Image.open(path) as image:
            # Means over boxes, so that an image enlarged by an integer factor is restored exactly.
            how = Image.Resampling.BOX if image.width >= width else Image.Resampling.BILINEAR
            image = fitted(image, (width, height), mode, how)
    except FileNotFoundError as error:
        raise InputError(f"{key}: there is no file {path}") from error
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(f"{key}: {path} is not a picture") from error
    except ValueError as error:
        raise InputError(f"{key}: {path} cannot be used, it {error}") from None
    return torch.from_numpy(np.asarray(image, dtype=np.float32)).reshape(height, width, -1)


def interpolate(model, ends: Batch, frames: int, weights: str | float = "ema") -> Tensor:
    """Items whose latents lie between those of two items, `(frames, *event)`, including both.

        z(w) = m + ((1 - w) (z_0 - m) + w (z_1 - m)) / sqrt((1 - w)^2 + w^2)

    where m is the mean of a flow's Gaussian base, 0 for other models. Items of different classes are interpolated
    without a class, if the model has a null class.

    Arguments:
        model: a model with `latents` and `from_latents`.
        ends: a batch of two.
        frames: their number, at least 2.
        weights: `ema`, `raw`, or one of the decays kept.

    Raises:
        InputError: for two classes and a model without a null class.
    """
    from genmodels.flows.bases import ClassNormal, DiagonalNormal  # not needed to load a model

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
    shapes, mean = [scale.shape[1:] for scale in latents.scales], torch.zeros_like(latents.flatten()[0])
    base = getattr(getattr(model.weights(weights), "flow", None), "base", None)
    if isinstance(base, DiagonalNormal | ClassNormal) and None not in base.event_shape:
        mean = (base.mean if isinstance(base, DiagonalNormal) else base.mean[cond[0]]).flatten()
    one, other = (Latents.unflatten((z - mean)[None], shapes) for z in latents.flatten())
    between = one.interpolate(other, torch.linspace(0, 1, frames)).flatten() + mean
    return model.from_latents(Latents.unflatten(between, shapes), cond, weights)
