"""Quality of speech: held-out texts synthesised by a model, compared with recordings; CER and WER with toplines."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, as_input_errors, counted, progress_bar
from genmodels.core.files import located
from genmodels.evaluation.checkpoint import EvaluationState, Opened, Request
from genmodels.evaluation.report import Skipped, SpeechFigures, Transcription, Utterance
from genmodels.evaluation.samples import playable
from genmodels.models.checkpoint import weights_of
from genmodels.models.glow_tts import stream_text
from genmodels.models.mels import even_lengths
from genmodels.models.transcription import TrainedRecogniser, search_of
from genmodels.speech.audio import MelConfig, log_pitch, read_wav
from genmodels.speech.decoding import oracle
from genmodels.speech.measures import (
    Outcome,
    Pitch,
    SpokenAt,
    alignment_shape,
    compared_pitch,
    duration_error,
    failures_per_100,
    mcd_mel13,
)
from genmodels.speech.recognition import (
    PocketSphinx,
    Recogniser,
    Recognition,
    WordFaults,
    character_edits,
    error_curve,
    pooled,
    word_edits,
)
from genmodels.speech.streaming import stream_sound
from genmodels.speech.text import Symbols, ready
from genmodels.speech.vocoder import GriffinLim, phases

_UTTERANCES = 16  # texts synthesised by default
_HEARD = 20.0  # seconds of recordings recognised by default, three times: synthesised, vocoded, and as recorded
_VOCODED = "recordings' mels vocoded"
_NO_PITCH = "it needs librosa: pip install 'genmodels[speech]'"
_TEMPERATURES, _STEPS = (0.0, 0.333, 0.667, 1.0), (2, 4, 10, 20)  # of sweeps
_PLAYED, _WORST = 3, 5  # texts whose sound is in the page: the first, and of a recogniser those with the most errors
_TOGETHER = 8  # utterances in a batch
_LISTED = 10  # utterances in the notes below a table


def speech_of(state: EvaluationState) -> SpeechFigures:
    """The metrics of a text-to-speech model: distortion, durations, failures, time, and recognition."""
    opened, request = state.opened, state.request
    count = min(opened.items, _UTTERANCES if request.samples == "auto" else request.samples)
    recogniser, reason = _recogniser(request, opened.spec.text)
    audible = find_spec("librosa") is not None

    def compute() -> dict:
        batch = opened.evaluated(count)
        texts = _texts(batch, opened.spec.text)
        synthesised, seconds, outcomes = _synthesised(opened, batch, texts)
        found = _against_recordings(opened, batch, synthesised, seconds, outcomes)
        heard = _heard(opened, batch) if request.samples == "auto" else len(batch)
        sounds = _vocoded(opened, batch, synthesised, max(heard, _PLAYED))
        if audible:
            some = slice(0, heard)
            true = _tracks(opened, sounds[_VOCODED][some])
            found.pitch = _pitch(opened, batch, synthesised[some], sounds["model"][some], true)
        found.first_audio, found.streamed = _first_audio(opened, batch.rows(slice(0, _PLAYED)), texts[:_PLAYED])
        if recogniser is not None:
            waves = {name: some[:heard] for name, some in sounds.items()}
            found.recognition = _recognised(opened, texts[:heard], waves, recogniser)
        found.played, rate = texts[:_PLAYED], opened.spec.mel["sample_rate"]
        arrays = {f"{kind}_{k}": playable(wave, rate)
                  for kind, waves in (("sound", sounds["model"]), ("vocoded", sounds[_VOCODED]))
                  for k, wave in enumerate(waves[:_PLAYED])}
        return {"figures": asdict(found), "arrays": arrays}

    settings = {"n": count, "temperature": request.temperature, "recogniser": recogniser is not None,
                "all_heard": request.samples != "auto", "pitch": audible}
    settings |= {} if request.recognizer is None else {"by": recogniser.name}
    settings |= {key: value for key in ("sampler", "steps") if (value := getattr(request, key)) is not None}
    done = state.once("speech", settings, compute)
    state.arrays |= done["arrays"]
    found = TypeAdapter(SpeechFigures).validate_python(done["figures"])
    if not audible:
        found.pitch = Skipped(_NO_PITCH)
    if found.recognition is None:
        found.recognition = Skipped(reason)
    return found


def transcription_of(state: EvaluationState) -> Transcription:
    """The transcripts of the evaluated items by a recogniser, compared with their texts."""
    opened, request, model = state.opened, state.request, state.opened.model
    how = search_of(model, request, request.trust)
    search = "greedy" if request.beam == 1 else f"beam {request.beam}"
    search += f", length normalisation {request.length:g}" if request.length else ""
    if request.lm is not None:
        search += f", {'rescored by' if request.rescore else 'with'} {request.lm}, weight {how.weight:g}"

    def compute() -> dict:
        loader = opened.datamodule.loader(request.split, _TOGETHER, torch.arange(opened.items))
        pairs, best, frames, began = {}, [], 0, time.monotonic()
        for batch in progress_bar(loader, desc=f"{model.family} transcribes {request.split}", unit="batch"):
            found = model.transcribe(batch.to(model.device), how, weights=weights_of(request.ema))
            heard, said = (model.written(one[0]) for one in found), model.said(batch)
            pairs |= dict(zip(batch.index.tolist(), zip(said, heard, strict=True), strict=True))
            best += [oracle(text, [model.written(one) for one in some[: request.nbest]])
                     for text, some in zip(said, found, strict=True)]
            frames += int(batch.mask.sum())
        took = time.monotonic() - began
        pairs = [pairs[k] for k in sorted(pairs)]
        edits = [character_edits(*pair) for pair in pairs]
        worst = sorted(range(len(pairs)), key=lambda k: -edits[k].rate)[:_WORST]
        shown = list(dict.fromkeys([*range(min(_PLAYED, len(pairs))), *worst]))
        paths, rate = _recordings(opened, len(pairs)), opened.spec.mel["sample_rate"]
        arrays = {f"sound_{k}": playable(read_wav(paths[k], rate)[0], rate) for k in shown} if paths else {}
        said, heard = (list(texts) for texts in zip(*pairs, strict=True))
        return {"arrays": arrays, "figures": asdict(Transcription(
            search=search, wer=pooled(word_edits(*pair) for pair in pairs).rate, said=said, heard=heard, shown=shown,
            curve=error_curve(edits, seed=request.seed), real_time_factor=took / _seconds(frames, opened.spec),
            nbest=request.nbest, oracle_wer=pooled(best).rate if request.nbest > 1 else None,
        ))}

    settings = {"search": search, "nbest": request.nbest, "lm_order": request.lm_order}
    settings |= {} if request.lm is None else {"lm": hashlib.sha256(located(request.lm).read_bytes()).hexdigest()}
    done = state.once("transcription", settings, compute)
    state.arrays |= done["arrays"]
    return TypeAdapter(Transcription).validate_python(done["figures"])


def _recogniser(request: Request, text: dict) -> tuple[Recogniser | None, str]:
    if text.get("form", "characters") != "characters":
        return None, "a recogniser writes words, and the texts of this model are phonemes"
    try:
        if request.recognizer is None:
            return PocketSphinx(), ""
        return TrainedRecogniser(request.recognizer, request.device, request.beam, request.trust), ""
    except InputError:
        raise
    except ValueError as error:
        return None, str(error)


def _heard(opened: Opened, batch: Batch) -> int:
    """The number of items that are recognised by default, at least two."""
    seconds = _seconds(batch.mask.sum((1, 2)), opened.spec)
    return max(2, int((seconds.cumsum(0) <= _HEARD).sum()))


def _seconds(frames, spec: DataSpec):
    """The duration of frames of a mel."""
    return frames * spec.mel["hop"] / spec.mel["sample_rate"]


def _texts(batch: Batch, text: dict) -> list[str]:
    """The text of each item in normal form."""
    symbols, form = Symbols(tuple(text["symbols"]), text["blanks"]), text.get("form", "characters")
    rows = zip(batch.cond.tokens, batch.cond.mask[:, 0], strict=True)
    return [ready(symbols.decode(tokens[valid].tolist()), form) for tokens, valid in rows]


def _options(opened: Opened) -> dict:
    """The options of synthesis."""
    request = opened.request
    warm = {} if request.temperature is None else {"temperature": request.temperature}
    return {"seed": request.seed, "weights": weights_of(request.ema), **warm, **opened.sampler_options()}


def _with_speakers(opened: Opened, batch: Batch, texts: Sequence[str]) -> list[tuple[str, str | None]]:
    """Each text with its speaker, by name."""
    numbers = [None] * len(texts) if batch.cond.speaker is None else batch.cond.speaker.tolist()
    return [(text, None if k is None else opened.spec.speakers[k]) for text, k in zip(texts, numbers, strict=True)]


def _synthesised(
    opened: Opened, batch: Batch, texts: Sequence[str], **given
) -> tuple[list[dict], list[float], list[Outcome]]:
    """The mel of each text, synthesised alone, with its seconds and its outcome; `given` are further options."""
    model, options, spoken = opened.model, _options(opened) | given, _with_speakers(opened, batch, texts)
    with as_input_errors():
        model.sample(1, spoken[0][1], text=texts[0], **options)  # a warm-up, which is not timed
    synthesised, seconds, outcomes = [], [], []
    for k, (text, speaker) in enumerate(progress_bar(spoken, desc=f"{model.family} synthesis", unit="text")):
        began = time.monotonic()
        drawn = model.sample(1, speaker, text=text, **options)
        seconds.append(time.monotonic() - began)
        frames = int(drawn.mask.sum())
        synthesised.append({"mel": drawn.x[0, :, :frames].cpu(), "durations": drawn.durations[0].cpu()})
        read = drawn.made.get("words_missing_repeated", [(0, 0)])[0]
        stopped = not drawn.made.get("not_stopped")
        outcomes.append(Outcome(WordFaults(*read), stopped, frames / int(batch.mask[k].sum())))
    return synthesised, seconds, outcomes


def _against_recordings(
    opened: Opened, batch: Batch, synthesised: Sequence[dict], seconds: Sequence[float], outcomes: Sequence[Outcome]
) -> SpeechFigures:
    """Metrics that need no recogniser."""
    model = opened.model
    distortion = [mcd_mel13(one["mel"], _recorded(batch, k)) for k, one in enumerate(synthesised)]
    sound = [_seconds(one["mel"].shape[1], opened.spec) for one in synthesised]
    found = SpeechFigures(
        utterances=len(synthesised), mcd_mel13=sum(distortion) / len(distortion), mcd_each=distortion,
        length_ratio=sum(o.length_ratio for o in outcomes) / len(outcomes), failures_per_100=failures_per_100(outcomes),
        real_time_factor=median(s / t for s, t in zip(seconds, sound, strict=True)), seconds=list(seconds), sound=sound,
    )
    if hasattr(model, "aligned"):
        aligned = model.aligned(batch.to(model.device), weights_of(opened.request.ema), opened.request.seed)
        predicted = torch.zeros_like(batch.cond.tokens)
        for row, one in zip(predicted, synthesised, strict=True):
            row[: len(one["durations"])] = one["durations"]
        error = duration_error(predicted, aligned.durations.cpu(), batch.cond.mask)
        found.duration_error = float(error.mean())
        if hasattr(model, "posterior"):
            posterior = model.posterior(batch.to(model.device), weights_of(opened.request.ema), opened.request.seed)
            whole = even_lengths(batch)
            found.alignment = alignment_shape(posterior.cpu(), aligned.durations.cpu(), whole.cond.mask, whole.mask)
    return found


def _recorded(batch: Batch, k: int) -> Tensor:
    """The valid frames of a recording's mel, (n_mels, T)."""
    return batch.x[k, :, : int(batch.mask[k].sum())]


def _vocoded(opened: Opened, batch: Batch, synthesised: Sequence[dict], count: int) -> dict[str, list[Tensor]]:
    """The sound of the first synthesised mels, and of the recordings' mels, by the same vocoder."""
    vocoder = GriffinLim(MelConfig(**opened.spec.mel))
    return {"model": [vocoder(one["mel"]) for one in synthesised[:count]],
            _VOCODED: [vocoder(_recorded(batch, k)) for k in range(min(count, len(batch)))]}


def _tracks(opened: Opened, waves: Sequence[Tensor]) -> list[np.ndarray]:
    """The pitch of every frame of sounds by `_vocoded`; a sound that is not finite has none."""
    config = MelConfig(**opened.spec.mel)
    finite = [torch.where(wave.isfinite().all(), wave, 0) for wave in progress_bar(waves, desc="pitch")]
    return [log_pitch(wave, config, config.frames(len(wave))) for wave in finite]


def _pitch(
    opened: Opened, batch: Batch, synthesised: Sequence[dict], waves: Sequence[Tensor], true: Sequence[np.ndarray]
) -> Pitch:
    """The pitch of synthesised texts against that of their vocoded recordings."""
    mels, recorded = [one["mel"] for one in synthesised], [_recorded(batch, k) for k in range(len(synthesised))]
    return compared_pitch(mels, recorded, _tracks(opened, waves), true)


def _first_audio(opened: Opened, batch: Batch, texts: Sequence[str]) -> tuple[float, bool]:
    """The median time in seconds from a text to its first sound by Griffin-Lim, and whether that came in chunks."""
    vocoder, options, latencies = GriffinLim(MelConfig(**opened.spec.mel)), _options(opened), []
    for text, speaker in _with_speakers(opened, batch, texts):
        began, pieces = time.monotonic(), None
        if vocoder.config.padding == "hifigan":
            with suppress(InputError):  # of models that make their mels whole
                pieces = stream_text(opened.model, text, cond=speaker, **options).pieces
        if pieces is None:
            vocoder(opened.model.sample(1, speaker, text=text, **options).x[0].cpu())
        else:
            next(stream_sound(vocoder, pieces, phases(opened.request.seed)))
        latencies.append(time.monotonic() - began)
    return median(latencies), pieces is not None


def spoken_at(state: EvaluationState, key: str) -> list[SpokenAt] | None:
    """Distortion, length and pitch of the synthesis at several values of `key`; None for an option it does not have."""
    opened, values = state.opened, {"temperature": _TEMPERATURES, "steps": _STEPS}[key]
    if not opened.model.generates or not opened.model.takes(key):
        return None
    if key == "steps" and hasattr(opened.model, "fewest_steps"):
        values = sorted({max(value, opened.model.fewest_steps(opened.request.sampler)) for value in values})
    audible = find_spec("librosa") is not None

    def compute() -> dict:
        whole = opened.evaluated(min(opened.items, _UTTERANCES))
        batch = whole.rows(slice(0, _heard(opened, whole)))
        texts, found, recorded = _texts(batch, opened.spec.text), [], None
        for value in values:
            synthesised, _, outcomes = _synthesised(opened, batch, texts, **{key: value})
            pitch = None
            if audible:
                sounds = _vocoded(opened, batch, synthesised, len(batch))
                recorded = _tracks(opened, sounds[_VOCODED]) if recorded is None else recorded
                pitch = _pitch(opened, batch, synthesised, sounds["model"], recorded)
            distortion = [mcd_mel13(one["mel"], _recorded(batch, k)) for k, one in enumerate(synthesised)]
            found.append(asdict(SpokenAt(
                key, value, len(batch), sum(distortion) / len(batch),
                sum(o.length_ratio for o in outcomes) / len(outcomes), pitch)))
        return {"found": found}

    done = state.once("spoken_at", {"key": key, "values": list(values), "pitch": audible,
                                    **state.sampling_settings()}, compute)
    return [SpokenAt(**one | {"pitch": one["pitch"] and Pitch(**one["pitch"])}) for one in done["found"]]


def _recognised(
    opened: Opened, texts: Sequence[str], sounds: dict[str, list[Tensor]], recogniser: Recogniser
) -> Recognition:
    """CER and WER of the model, with toplines: recordings, and their mels by the same vocoder."""
    rate, recordings = opened.spec.mel["sample_rate"], _recordings(opened, len(texts))
    if recordings is not None:
        sounds = sounds | {"recordings": [read_wav(path, rate)[0] for path in recordings]}
    heard = {name: [recogniser(wave, rate) if bool(wave.isfinite().all()) else ""  # a failed text ends no evaluation
                    for wave in progress_bar(waves, desc=f"heard: {name}")]
             for name, waves in sounds.items()}
    edits = {name: [character_edits(*pair) for pair in zip(texts, found, strict=True)] for name, found in heard.items()}
    own = edits.pop("model")
    words = {name: pooled(word_edits(*pair) for pair in zip(texts, found, strict=True)).rate
             for name, found in heard.items()}
    curve = error_curve(own, edits, seed=opened.request.seed)
    return Recognition(
        recogniser=getattr(recogniser, "name", type(recogniser).__name__), vocoder="Griffin-Lim", wer=words,
        curve=curve, heard=heard["model"],
        claimed={name: part.claimed for name, part in curve[-1].differences.items()}, bits={
            name: recogniser.bits(waves, rate, texts) for name, waves in sounds.items()
        } if isinstance(recogniser, TrainedRecogniser) else {},
    )  # fmt: skip


def _recordings(opened: Opened, count: int) -> list[Path] | None:
    """The sound files of the evaluated items; None if the data set has none."""
    from genmodels.data.clips import read_clips

    items = getattr(opened.datamodule.split(opened.request.split), "items", None)
    layout, root = (getattr(opened.datamodule, name, None) for name in ("layout", "root"))
    if items is None or layout is None:
        return None
    places = {clip.name: clip.path for clip in read_clips(layout, root, allow_partial=True)}
    paths = [places.get(item.name) for item in items[:count]]
    return None if None in paths else paths


def speech_notes(found: SpeechFigures) -> list[str]:
    """The metrics of a model in a few lines, for the notes below a table."""
    failures = ", ".join(f"{name} {value:.0f}" for name, value in found.failures_per_100.items())
    lines = [f"{found.utterances} texts synthesised: distortion {found.mcd_mel13:.2f} dB (mcd_mel13), length "
             f"{found.length_ratio:.2f} of the recordings', real-time factor {found.real_time_factor:.3f}"
             + ("" if found.duration_error is None else f", durations off by {found.duration_error:.2f} frames"),
             f"failures in 100: {failures}"]
    if found.first_audio is not None:
        lines.append(f"first audio after {found.first_audio:.2f} s, "
                     + ("in chunks of 64 frames" if found.streamed else "when the whole text is synthesised"))
    if isinstance(found.pitch, Skipped):
        lines.append(f"pitch was not measured: {found.pitch.skipped}")
    elif found.pitch is not None:
        lines.append(_pitch_note(found.pitch))
    if found.alignment is not None:
        shape = found.alignment
        lines.append(f"alignments: {100 * shape.off_diagonal:.1f} % of the text from the diagonal, entropy "
                     f"{shape.entropy:.2f} nats a frame; {shape.mean:.1f} +- {shape.std:.1f} frames a "
                     f"token, at most {shape.longest}, {100 * shape.single:.0f} % of one frame")
    heard = found.recognition
    if isinstance(heard, Skipped):
        return [*lines, f"CER was not measured: {heard.skipped}"]
    whole = heard.curve[-1]
    lines.append(f"CER of {whole.utterances} texts by {heard.recogniser} through {heard.vocoder}: "
                 f"{whole.rate}"
                 + "".join(f"; topline, {name}: {part}" for name, part in whole.toplines.items()))
    if heard.bits:
        lines.append("bits per character of the texts given the sound: " + ", ".join(
            f"{name} {'infinite' if value is None else f'{value:.3f}'}" for name, value in heard.bits.items()))
    return lines + [f"CER less that of {name}: {part}" + ("" if part.claimed else ", too little to claim")
                    for name, part in whole.differences.items()]


def _pitch_note(found: Pitch) -> str:
    """The pitch in words.

    Example:
        >>> _pitch_note(Pitch(1.5, 0.25, 2.0, 3.0))
        'log F0: RMSE 1.50 semitones, spread 2.00 (recordings 3.00); voiced unlike the recording in 25 % of pairs'
        >>> _pitch_note(Pitch(None, 0.5, None, 3.0))  # no pair is voiced on both sides
        'log F0: RMSE unknown, spread unknown (recordings 3.00); voiced unlike the recording in 50 % of pairs'
    """
    rmse = "unknown" if found.rmse is None else f"{found.rmse:.2f} semitones"
    spread, recorded = ("unknown" if value is None else f"{value:.2f}" for value in (found.spread, found.recorded))
    return (f"log F0: RMSE {rmse}, spread {spread} (recordings {recorded}); voiced unlike the recording in "
            f"{100 * found.voicing:.0f} % of pairs")


def spoken_at_notes(found: Sequence[SpokenAt]) -> list[str]:
    """The metrics at each value of an option, for the notes below a table."""
    return [f"{one.key} {one.value:g}, {one.utterances} texts: distortion {one.mcd_mel13:.2f} dB, length "
            f"{one.length_ratio:.2f}" + ("" if one.pitch is None else f", {_pitch_note(one.pitch)}") for one in found]


def transcription_note(found: Transcription) -> str:
    """The metrics of a recogniser in a line, for the notes below a table."""
    whole, (search, comma, language) = found.curve[-1], found.search.partition(", ")
    best = "" if found.oracle_wer is None else f" ({100 * found.oracle_wer:.1f} % of the best of {found.nbest} texts)"
    return (f"CER of {whole.utterances} recordings, {search} search{comma}{language}: {whole.rate}; WER "
            f"{100 * found.wer:.1f} %{best}; real-time factor {found.real_time_factor:.3f}")


def suspects(rows: list[Utterance]) -> list[Utterance]:
    """The utterances by the evidence for their texts, the least first; those without evidence last, in order."""
    return sorted(rows, key=lambda row: torch.inf if row.evidence is None else row.evidence)


def audit_notes(rows: list[Utterance]) -> list[str]:
    """The least likely utterances, and those with the least evidence for their texts, for the notes below a table.

    Example:
        >>> from genmodels.evaluation.report import Token
        >>> audit_notes([Utterance(rank=1, index=4, frames=90, nats_per_dim=1.5, z=2.25, name="a.wav", text="a cab",
        ...                        evidence=0.5, longest=Token("c", 2, 31))])[1]
        '  1. 1.500 nats/dim, z +2.25, 90 frames, longest "c" with 31, evidence +0.50: a.wav "a cab"'
    """
    scored = any(row.z is not None for row in rows)
    lines = [f"audit of {counted(len(rows), 'utterance')}, the least likely first"
             + (" (z: standard deviations above utterances of that length)" if scored else ""),
             *(_line(row.rank, row) for row in rows[:_LISTED])]
    if any(row.evidence is not None for row in rows):
        lines.append("the same by the evidence for their texts, nats a frame better than texts of other utterances: "
                     "near 0 or below it the text may be another's")
        lines += [_line(number, row) for number, row in enumerate(suspects(rows)[:_LISTED], 1)]
    elif all(row.durations is None and row.heard is None for row in rows):
        lines.append("no evidence for single texts: this model has no monotonic alignments to sum over")
    return lines


def _line(number: int, row: Utterance) -> str:
    score = "" if row.z is None else f", z {row.z:+.2f}"
    longest = "" if row.longest is None else f', longest "{row.longest.token}" with {row.longest.frames}'
    evidence = "" if row.evidence is None else f", evidence {row.evidence:+.2f}"
    what = f"item {row.index}" if row.name is None else f'{row.name} "{row.text}"'
    if row.heard is not None:
        return (f'  {number}. {row.nats_per_dim:.3f} nats/character{score}, {row.frames} characters: {what}, heard '
                f'"{row.heard}"')
    return f"  {number}. {row.nats_per_dim:.3f} nats/dim{score}, {row.frames} frames{longest}{evidence}: {what}"
