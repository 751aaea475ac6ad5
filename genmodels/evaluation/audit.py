"""Utterances ranked by how unlikely a model finds their sound given their text: wrong transcripts, clipped clips."""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from genmodels.data.spec import Batch, DataSpec
from genmodels.errors import InputError
from genmodels.evaluation.frame import Frame
from genmodels.evaluation.likelihood import Likelihood
from genmodels.evaluation.mel_pictures import alignments
from genmodels.evaluation.opened import Opened
from genmodels.models.load import weights_of

_SHOWN = 10  # utterances in the notes below a table
_DRAWN = 3  # alignments in the picture
_TOGETHER = 8  # utterances aligned at once


def audit(frame: Frame, likelihood: Likelihood) -> list[dict]:
    """Every utterance that is judged, the least likely for each cell of its mel first.

    Arguments:
        likelihood: of these utterances, in index order.

    Returns for each: rank, index, name and text; frames, nats per dimension, its score against utterances of its
    length, and, where the model aligns, the frames of every token and the token that lasts longest.

    Raises:
        InputError: for data without texts.
    """
    opened = frame.opened
    if opened.spec.text is None:
        raise InputError(f"audit: {opened.spec.name} has no texts that could be wrong")
    nll = -likelihood.nats.double() / likelihood.dims.double()
    frames = likelihood.dims.double() / opened.spec.event_shape[0]
    scores = against_length(nll, frames)
    durations = frame.once("audit", {}, lambda: {"durations": _durations(opened)})["durations"]
    items = getattr(opened.datamodule.split(opened.request.split), "items", None)
    rows = []
    for rank, k in enumerate(nll.nan_to_num(nan=torch.inf).argsort(descending=True, stable=True).tolist(), 1):
        row = {"rank": rank, "index": int(likelihood.index[k]), "frames": int(frames[k]),
               "nats_per_dim": float(nll[k]), "z": None if scores is None else float(scores[k])}
        if items is not None:
            row |= {"name": items[k].name, "text": items[k].text}
        if durations is not None:
            row |= durations[k]
        rows.append(row)
    return rows


def against_length(nll: Tensor, frames: Tensor) -> Tensor | None:
    """How far each value lies above the line through all of them over log length, in deviations from that line.

        z_k = (v_k - a - b log T_k)/s,    a, b by least squares,    s^2 = sum_k (v_k - a - b log T_k)^2/(n - 2)

    Values that are not finite have no part in the line. Short clips hold relatively more silence and differ from long
    ones for no fault of their transcripts; with utterances of one length b is 0.

    Shapes: `nll (n,)`, `frames (n,)`; the scores are `(n,)`, or None for fewer than three finite values, or values that
    all lie on a line.

    Example:
        >>> against_length(torch.tensor([1.0, 1.0, 4.0, 1.0, 1.0]).double(), torch.full((5,), 9.0)).round(decimals=2)
        tensor([-0.3900, -0.3900,  1.5500, -0.3900, -0.3900], dtype=torch.float64)
    """
    usable = nll.isfinite()
    x, y = frames.double().log(), nll.double()
    if int(usable.sum()) < 3:
        return None
    middle, mean = x[usable].mean(), y[usable].mean()
    spread = (x[usable] - middle).square().sum()
    slope = ((x - middle) * (y - mean))[usable].sum() / spread if float(spread) > 1e-12 else 0.0
    rest = y - mean - slope * (x - middle)
    deviation = (rest[usable].square().sum() / (int(usable.sum()) - 2)).sqrt()
    return rest / deviation if float(deviation) > 1e-12 else None


def _durations(opened: Opened) -> list[dict] | None:
    """For each utterance the frames of its tokens on the best alignment, and the longest; None without alignments."""
    if not hasattr(opened.model, "aligned"):
        return None
    request, found = opened.request, []
    loader = opened.datamodule.loader(request.split, _TOGETHER, torch.arange(opened.items))
    for batch in tqdm(loader, desc=f"{opened.model.family} aligns {request.split}", unit="batch", mininterval=0.5):
        aligned = opened.model.aligned(batch.to(opened.model.device), weights_of(request.ema), request.seed)
        found += _of_batch(batch, aligned.durations.cpu(), opened.spec)
    found.sort(key=lambda entry: entry[0])
    return [told for _, told in found]


def _of_batch(batch: Batch, durations: Tensor, spec: DataSpec) -> list[tuple[int, dict]]:
    rows = zip(batch.index.tolist(), batch.cond.tokens, batch.cond.mask[:, 0], durations, strict=True)
    found = []
    for index, tokens, valid, own in rows:
        frames, symbols = own[valid].tolist(), [spec.text["symbols"][t] for t in tokens[valid].tolist()]
        longest = max(range(len(frames)), key=frames.__getitem__)
        found.append((index, {"tokens": symbols, "durations": frames,
                              "longest": {"token": symbols[longest], "position": longest, "frames": frames[longest]}}))
    return found


@torch.no_grad()
def picture_of_audit(opened: Opened, rows: list[dict]) -> Image.Image | None:
    """How the least likely utterances are aligned; None for a model without alignments."""
    if not hasattr(opened.model, "posterior"):
        return None
    index, request = torch.tensor([row["index"] for row in rows[:_DRAWN]]), opened.request
    batch = next(iter(opened.datamodule.loader(request.split, len(index), index))).to(opened.model.device)
    return alignments(opened.model.posterior(batch, weights_of(request.ema), request.seed), batch, opened.spec)


def audit_notes(rows: list[dict]) -> list[str]:
    """The least likely utterances in lines, for the notes below a table.

    Example:
        >>> audit_notes([{"rank": 1, "index": 4, "frames": 90, "nats_per_dim": 1.5, "z": 2.25, "name": "a.wav",
        ...               "text": "a cab", "longest": {"token": "c", "position": 2, "frames": 31}}])[1]
        '  1. 1.500 nats/dim, z +2.25, 90 frames, longest c with 31: a.wav "a cab"'
    """
    lines = [f"audit of {len(rows)} utterances, the least likely first (z: deviations above utterances of that length)"]
    for row in rows[:_SHOWN]:
        score = "" if row["z"] is None else f", z {row['z']:+.2f}"
        longest = f", longest {row['longest']['token']} with {row['longest']['frames']}" if "longest" in row else ""
        what = f"{row['name']} \"{row['text']}\"" if "name" in row else f"item {row['index']}"
        said = f"{row['nats_per_dim']:.3f} nats/dim{score}, {row['frames']} frames{longest}"
        lines.append(f"  {row['rank']}. {said}: {what}")
    return lines
