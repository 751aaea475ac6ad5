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
_AGAINST = 8  # texts of other utterances that each text is measured against


def audit(frame: Frame, likelihood: Likelihood) -> list[dict]:
    """Every utterance that is judged, the least likely for each cell of its mel first.

    Arguments:
        likelihood: of these utterances, in index order.

    Returns for each: rank, index, name and text; frames, nats per dimension, its score against utterances of its
    length, and, where the model aligns, the frames of every token, the token that lasts longest, and the evidence for
    its text beside those of other utterances, nats a frame.

    Raises:
        InputError: for data without texts.
    """
    opened = frame.opened
    require_texts(opened.spec)
    nll = -likelihood.nats.double() / likelihood.dims.double()
    frames = likelihood.dims.double() / opened.spec.event_shape[0]
    scores = against_length(nll, frames)
    found = frame.once("audit", {"against": _AGAINST}, lambda: {"durations": _durations(opened)})["durations"]
    items = getattr(opened.datamodule.split(opened.request.split), "items", None)
    rows = []
    for rank, k in enumerate(nll.nan_to_num(nan=torch.inf).argsort(descending=True, stable=True).tolist(), 1):
        row = {"rank": rank, "index": int(likelihood.index[k]), "frames": int(frames[k]),
               "nats_per_dim": float(nll[k]), "z": None if scores is None else float(scores[k])}
        if items is not None:
            row |= {"name": items[k].name, "text": items[k].text}
        if found is not None:
            row |= found[k]
        rows.append(row)
    if any("evidence" in row for row in rows):
        for rank, row in enumerate(suspects(rows), 1):
            row["rank_by_evidence"] = rank
    return rows


def require_texts(spec: DataSpec) -> None:
    """Raise InputError for data without texts, before anything is computed."""
    if spec.text is None:
        raise InputError(f"audit: {spec.name} has no texts that could be wrong")


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
    """What alignments say of each utterance: durations, and the evidence for its text; None without alignments."""
    if not hasattr(opened.model, "aligned"):
        return None
    model, request, found, said = opened.model, opened.request, [], {}

    def batches(what: str):
        loader = opened.datamodule.loader(request.split, _TOGETHER, torch.arange(opened.items))
        return tqdm(loader, desc=f"{model.family} {what}", unit="batch", mininterval=0.5)

    for batch in batches(f"aligns {request.split}"):
        aligned = model.aligned(batch.to(model.device), weights_of(request.ema), request.seed)
        found += _of_batch(batch, aligned.durations.cpu(), opened.spec)
        rows = zip(batch.index.tolist(), batch.cond.tokens, batch.cond.mask[:, 0], batch.mask, strict=True)
        said |= {index: (tokens[valid].tolist(), int(mask.sum())) for index, tokens, valid, mask in rows}
    found = dict(found)
    for batch in batches("tries other texts"):
        others = [neighbours(said, index) for index in batch.index.tolist()]
        known = [k for k, texts in enumerate(others) if texts]
        if known:
            part = batch.rows(torch.tensor(known)).to(model.device)
            values = model.evidence(part, [others[k] for k in known], weights_of(request.ema), request.seed)
            for index, value in zip(part.index.tolist(), values.tolist(), strict=True):
                found[index]["evidence"] = value
    return [found[index] for index in sorted(found)]


def neighbours(said: dict[int, tuple[list[int], int]], index: int, count: int = _AGAINST) -> list[list[int]]:
    """The texts of other utterances that are nearest in length to that of one, and that its frames could hold.

    Arguments:
        said: (tokens, frames) of every utterance.

    Example:
        >>> neighbours({0: ([5, 6], 9), 1: ([5, 6], 9), 2: ([7], 9), 3: ([1] * 10, 30), 4: ([8, 9, 9], 9)}, 0)
        [[7], [8, 9, 9]]
    """
    own, frames = said[index]
    texts = {tuple(tokens) for tokens, _ in said.values() if len(tokens) <= frames} - {tuple(own)}
    return [list(text) for text in sorted(texts, key=lambda text: (abs(len(text) - len(own)), text))[:count]]


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
    """How the utterances whose texts fit them least are aligned; None for a model without alignments."""
    if not hasattr(opened.model, "posterior"):
        return None
    index, request = torch.tensor([row["index"] for row in suspects(rows)[:_DRAWN]]), opened.request
    batch = next(iter(opened.datamodule.loader(request.split, len(index), index))).to(opened.model.device)
    return alignments(opened.model.posterior(batch, weights_of(request.ema), request.seed), batch, opened.spec)


def suspects(rows: list[dict]) -> list[dict]:
    """The utterances with the least evidence for their texts first; as they were, where nothing is known of it."""
    return sorted(rows, key=lambda row: row.get("evidence", torch.inf))


def audit_notes(rows: list[dict]) -> list[str]:
    """The least likely utterances in lines, and those whose texts fit least, for the notes below a table.

    Example:
        >>> audit_notes([{"rank": 1, "index": 4, "frames": 90, "nats_per_dim": 1.5, "z": 2.25, "name": "a.wav",
        ...               "text": "a cab", "evidence": 0.5, "longest": {"token": "c", "position": 2, "frames": 31}}])[1]
        '  1. 1.500 nats/dim, z +2.25, 90 frames, longest "c" with 31, evidence +0.50: a.wav "a cab"'
    """
    scored = any(row["z"] is not None for row in rows)
    lines = [f"audit of {len(rows)} utterance{'s' * (len(rows) != 1)}, the least likely first"
             + (" (z: deviations above utterances of that length)" if scored else ""),
             *(_line(row["rank"], row) for row in rows[:_SHOWN])]
    if any("evidence" in row for row in rows):
        lines.append("the same by the evidence for their texts, nats a frame better than texts of other utterances: "
                     "near 0 or below it the text may be another's")
        lines += [_line(number, row) for number, row in enumerate(suspects(rows)[:_SHOWN], 1)]
    elif not any("durations" in row for row in rows):
        lines.append("no evidence for single texts: this model has no monotonic alignments to sum over")
    return lines


def _line(number: int, row: dict) -> str:
    score = "" if row["z"] is None else f", z {row['z']:+.2f}"
    longest = f", longest \"{row['longest']['token']}\" with {row['longest']['frames']}" if "longest" in row else ""
    evidence = f", evidence {row['evidence']:+.2f}" if "evidence" in row else ""
    what = f"{row['name']} \"{row['text']}\"" if "name" in row else f"item {row['index']}"
    return f"  {number}. {row['nats_per_dim']:.3f} nats/dim{score}, {row['frames']} frames{longest}{evidence}: {what}"
