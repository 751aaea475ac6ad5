"""What speech is like: held-out texts spoken by a model, beside their recordings and under a recogniser's ceilings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from tqdm import tqdm

from genmodels.data.spec import Batch
from genmodels.errors import refusals
from genmodels.evaluation.frame import Frame
from genmodels.evaluation.opened import Opened
from genmodels.models.load import weights_of
from genmodels.models.mels import even_lengths
from genmodels.speech.audio import read_wav
from genmodels.speech.distortion import mcd_mel13
from genmodels.speech.measures import AlignmentShape, Outcome, alignment_shape, duration_error, failures_per_100
from genmodels.speech.mel import MelConfig
from genmodels.speech.phonemes import ready
from genmodels.speech.recognition import PocketSphinx, Recogniser, error_curve
from genmodels.speech.text import Symbols
from genmodels.speech.transcription import WordFaults, character_edits, pooled, word_edits
from genmodels.speech.vocoder import GriffinLim

_UTTERANCES = 16  # spoken where nobody says how many
_HEARD = 20.0  # seconds of recordings that a recogniser hears then, which it does three times over


def speech_of(frame: Frame) -> dict:
    """The figures of a model of texts: distortion, durations, failures, time, and what a recogniser understands."""
    opened, request = frame.opened, frame.request
    count = min(opened.items, _UTTERANCES if request.samples == "auto" else request.samples)
    recogniser, reason = _recogniser(opened.spec.text)

    def compute() -> dict:
        batch = opened.judged(count)
        texts = _texts(batch, opened.spec.text)
        spoken, seconds, outcomes = _spoken(opened, batch, texts)
        found = _beside(opened, batch, spoken, seconds, outcomes)
        if recogniser is None:
            return found | {"recognition": {"skipped": reason}}
        heard = _heard(opened, batch) if request.samples == "auto" else len(batch)
        return found | {"recognition": _recognised(opened, batch.rows(slice(0, heard)), texts[:heard], spoken[:heard],
                                                   recogniser)}

    settings = {"n": count, "temperature": request.temperature, "recogniser": recogniser is not None}
    settings |= {key: value for key in ("sampler", "steps") if (value := getattr(request, key)) is not None}
    return frame.once("speech", settings, compute)


def _recogniser(text: dict) -> tuple[Recogniser | None, str]:
    if text.get("form", "characters") != "characters":
        return None, "a recogniser writes words, and the texts of this model are phonemes"
    try:
        return PocketSphinx(), ""
    except ValueError as error:
        return None, str(error)


def _heard(opened: Opened, batch: Batch) -> int:
    """How many of the items, two at least, are within the seconds that a recogniser hears."""
    seconds = batch.mask.sum((1, 2)) * opened.spec.mel["hop"] / opened.spec.mel["sample_rate"]
    return max(2, int((seconds.cumsum(0) <= _HEARD).sum()))


def _texts(batch: Batch, text: dict) -> list[str]:
    """What is said in each item, in normal form."""
    symbols, form = Symbols(tuple(text["symbols"]), text["blanks"]), text.get("form", "characters")
    rows = zip(batch.cond.tokens, batch.cond.mask[:, 0], strict=True)
    return [ready(symbols.decode(tokens[valid].tolist()), form) for tokens, valid in rows]


def _spoken(opened: Opened, batch: Batch, texts: Sequence[str]) -> tuple[list[dict], list[float], list[Outcome]]:
    """Each text spoken alone, with the seconds it took, and what became of it."""
    request, model = opened.request, opened.model
    options = {"seed": request.seed, "weights": weights_of(request.ema)}
    if request.temperature != 1:  # else the model's own, which for speech is below 1
        options["temperature"] = request.temperature
    options |= opened.sampler_options()
    speakers = [None] * len(texts) if batch.cond.speaker is None else batch.cond.speaker.tolist()
    with refusals():
        model.sample(1, speakers[0], text=texts[0], **options)  # what is made at the first call is not timed
    spoken, seconds, outcomes = [], [], []
    asked = list(zip(texts, speakers, strict=True))
    for k, (text, speaker) in enumerate(tqdm(asked, desc=f"{model.family} speaks", unit="text", mininterval=0.5)):
        began = time.monotonic()
        drawn = model.sample(1, speaker, text=text, **options)
        seconds.append(time.monotonic() - began)
        frames = int(drawn.mask.sum())
        spoken.append({"mel": drawn.x[0, :, :frames].cpu(), "durations": drawn.durations[0].cpu()})
        read = drawn.made.get("words_missing_repeated", [(0, 0)])[0]
        stopped = not drawn.made.get("not_stopped")
        outcomes.append(Outcome(WordFaults(*read), stopped, frames / int(batch.mask[k].sum())))
    return spoken, seconds, outcomes


def _beside(
    opened: Opened, batch: Batch, spoken: Sequence[dict], seconds: Sequence[float], outcomes: Sequence[Outcome]
) -> dict:
    """Figures that need no recogniser."""
    model, mel = opened.model, opened.spec.mel
    distortion = [mcd_mel13(one["mel"], _own(batch, k)) for k, one in enumerate(spoken)]
    sound = [one["mel"].shape[1] * mel["hop"] / mel["sample_rate"] for one in spoken]
    found = {
        "utterances": len(spoken), "mcd_mel13": sum(distortion) / len(distortion), "mcd_each": distortion,
        "length_ratio": sum(o.length_ratio for o in outcomes) / len(outcomes),
        "failures_per_100": failures_per_100(outcomes),
        "real_time_factor": median(s / t for s, t in zip(seconds, sound, strict=True)),
        "seconds": list(seconds), "sound": sound,
    }  # fmt: skip
    if hasattr(model, "aligned"):
        aligned = model.aligned(batch.to(model.device), weights_of(opened.request.ema), opened.request.seed)
        said = torch.zeros_like(batch.cond.tokens)
        for row, one in zip(said, spoken, strict=True):
            row[: len(one["durations"])] = one["durations"]
        error = duration_error(said, aligned.durations.cpu(), batch.cond.mask)
        found["duration_error"] = float(error.mean_absolute.mean())
        if hasattr(model, "posterior"):
            found["alignment"] = _alignment(opened, batch, aligned.durations.cpu())._asdict()
    return found


def _alignment(opened: Opened, batch: Batch, durations: Tensor) -> AlignmentShape:
    whole = even_lengths(batch)
    posterior = opened.model.posterior(batch.to(opened.model.device), weights_of(opened.request.ema),
                                       opened.request.seed).cpu()
    return alignment_shape(posterior, durations, whole.cond.mask, whole.mask)


def _own(batch: Batch, k: int) -> Tensor:
    return batch.x[k, :, : int(batch.mask[k].sum())]


def _recognised(
    opened: Opened, batch: Batch, texts: Sequence[str], spoken: Sequence[dict], recogniser: Recogniser
) -> dict:
    """Errors of characters and words, and the same of recordings and of their mels through the same vocoder."""
    config = MelConfig(**opened.spec.mel)
    vocoder, rate = GriffinLim(config), config.sample_rate
    sounds = {"model": [vocoder(one["mel"]) for one in spoken],
              "recordings' mels vocoded": [vocoder(_own(batch, k)) for k in range(len(batch))]}
    recordings = _recordings(opened, len(batch))
    if recordings is not None:
        sounds["recordings"] = [read_wav(path, rate)[0] for path in recordings]
    heard = {name: [recogniser(wave, rate) for wave in tqdm(waves, desc=f"heard: {name}", mininterval=0.5)]
             for name, waves in sounds.items()}
    edits = {name: [character_edits(*pair) for pair in zip(texts, found, strict=True)] for name, found in heard.items()}
    own = edits.pop("model")
    words = {name: pooled(word_edits(*pair) for pair in zip(texts, found, strict=True)).rate
             for name, found in heard.items()}
    return {"recogniser": type(recogniser).__name__, "vocoder": "Griffin-Lim", "word_error_rate": words,
            "curve": [asdict(part) for part in error_curve(own, edits, seed=opened.request.seed)],
            "claimed": {name: part.claimed for name, part in error_curve(
                own, edits, seed=opened.request.seed)[-1].differences.items()},
            "heard": heard["model"]}


def _recordings(opened: Opened, count: int) -> list[Path] | None:
    """The sound files of the items that are judged, where the data set has them by name."""
    from genmodels.data.clips import read_clips

    items = getattr(opened.datamodule.split(opened.request.split), "items", None)
    layout, root = (getattr(opened.datamodule, name, None) for name in ("layout", "root"))
    if items is None or layout is None:
        return None
    places = {clip.where.split(" (")[0]: clip.path for clip in read_clips(layout, root, allow_partial=True)}
    paths = [places.get(item.name) for item in items[:count]]
    return None if None in paths else paths


def spoken_notes(found: dict) -> list[str]:
    """The figures of a model in a few lines, for the notes below a table."""
    failures = ", ".join(f"{name} {value:.0f}" for name, value in found["failures_per_100"].items())
    lines = [f"{found['utterances']} texts spoken: distortion {found['mcd_mel13']:.2f} dB (mcd_mel13), length "
             f"{found['length_ratio']:.2f} of the recordings', real-time factor {found['real_time_factor']:.3f}"
             + (f", durations off by {found['duration_error']:.2f} frames" if "duration_error" in found else ""),
             f"failures in 100: {failures}"]
    if "alignment" in found:
        shape = found["alignment"]
        lines.append(f"alignments: {100 * shape['off_diagonal']:.1f} % of the text from the diagonal, entropy "
                     f"{shape['entropy']:.2f} nats a frame; {shape['mean']:.1f} +- {shape['deviation']:.1f} frames a "
                     f"token, at most {shape['longest']}, {100 * shape['single']:.0f} % of one frame")
    heard = found["recognition"]
    if "skipped" in heard:
        return [*lines, f"errors of characters were not counted: {heard['skipped']}"]
    whole = heard["curve"][-1]
    lines.append(f"errors of characters in {whole['utterances']} texts by {heard['recogniser']} through "
                 f"{heard['vocoder']}: {_interval(whole['rate'])}"
                 + "".join(f"; {name} {_interval(part)}" for name, part in whole["ceilings"].items()))
    return lines + [f"less {name}: {_interval(part)}" + ("" if heard["claimed"][name] else ", too little to claim")
                    for name, part in whole["differences"].items()]


def _interval(part: dict) -> str:
    """A figure with its interval.

    Example:
        >>> _interval({"value": 0.5, "low": 0.25, "high": 0.75})
        '50.0 % (25.0 to 75.0)'
    """
    return f"{100 * part['value']:.1f} % ({100 * part['low']:.1f} to {100 * part['high']:.1f})"
