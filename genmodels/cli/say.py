"""Text-to-speech for `genmodels sample` and for notebooks: synthesis of texts, at once or as a stream."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError, as_input_errors, check_number, counted, one_of
from genmodels.core.files import file_word, short_hash, write_text, write_whole
from genmodels.core.samples import SamplingOptions, check_companions
from genmodels.core.tensors import html_table
from genmodels.evaluation.samples import save_png
from genmodels.models.glow_tts import check_streams, stream_text
from genmodels.models.text_model import TextReader
from genmodels.plots.images import mel_with_tokens, show
from genmodels.speech.audio import MelConfig, write_wav
from genmodels.speech.streaming import Vocoder, collect, stream_sound
from genmodels.speech.text import LONGEST_PAUSE, phrases
from genmodels.speech.vocoder import FLOOR, VOCODERS, phases, sound_of, vocoder_of


def say(
    model, origin: dict, place: Path, options: dict, *, text_file: str | None, takes: int | None, out: str | None,
    chunk: int | None, item: dict | None = None, of_item: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Synthesise texts (by default the checkpoint's examples) and write the files; returns lines for the user.

    Arguments:
        model: a text-to-speech model.
        origin: the checkpoint, as files of samples name it.
        place: its path, next to which files are written by default.
        options: those of `SynthesisOptions`, with a file's name for durations.
        text_file: a file of texts, in place of those of the options.
        takes: of each text, one by default; of the examples, how many of them.
        out: the file or folder.
        chunk: frames of a chunk; None for all at once.
        item: what is done with an item of the test split, for the names of files: `inpaint`, `mask`, `edit`.
        of_item: the options that come from that item, and are not named.

    Raises:
        InputError: for texts that cannot be synthesised, or files that cannot be read.
    """
    if isinstance(options.get("durations"), str):
        options = options | {"durations": read_durations(Path(options["durations"]))}
    how = synthesis_options(model, options)
    if how.text is not None and text_file is not None:
        raise InputError("text and text_file: give only one of the two")
    texts = how.text
    if text_file is not None:
        texts = TextReader(model.spec, how.on_unknown).lines_of(text_file)
    if texts is None:
        texts, takes = examples_of(model.spec, takes), 1
    texts = [texts] if isinstance(texts, str) else list(texts)
    out = None if out is None else Path(out)
    silent = out is not None and out.suffix.lower() == ".npz"
    if silent and how.vocoder != SynthesisOptions().vocoder:
        raise InputError(f"out={out} holds mels, for which no vocoder is used: leave out vocoder, or write .wav")
    stem = _stem(place.stem, how, item, of_item)
    # Both before the synthesis, so that their errors do not come after minutes of it.
    which = {"takes": takes or 1, "start": how.start}
    places = targets(out, place.parent / "samples", stem, texts, range(how.start, how.start + which["takes"]))
    vocoder = None if silent else vocoder_of(how.vocoder, MelConfig(**model.spec.mel))
    begun = time.monotonic()
    if chunk is None:
        found, times = synthesise(model, texts, how, **which), []
    else:
        found, times = stream_texts(model, texts, how, vocoder, chunk=chunk, **which)
    hop, rate = model.spec.mel["hop"], model.spec.mel["sample_rate"]
    seconds, took = sum(one.mel.shape[1] for one in found) * hop / rate, time.monotonic() - begun
    what = "mels" if chunk is None or silent else "mels and sound"
    whose = f", by the first speaker, {model.spec.speakers[0]}" if model.spec.speakers and how.cond is None else ""
    factor = f"real-time factor {took / seconds:.3f}, {model.device}"
    lines = [f"{what} of {seconds:.2f} s in {took:.2f} s ({factor}){whose}"]
    return lines + times + [line for one, target in zip(found, places, strict=True)
                            for line in write_utterance(one, model.spec, target, how, origin, vocoder)]


def examples_of(spec: DataSpec, n: int | None) -> list[str]:
    """The first n example texts of a data set, or all; InputError for more than there are."""
    examples = spec.text["examples"]
    if n is not None and n > len(examples):
        raise InputError(f"n={n}: this model has {counted(len(examples), 'example text')}; with text= it is the number "
                         "of takes")
    return examples[:n]


def _stem(name: str, how: SynthesisOptions, item: dict | None = None, unnamed: Collection[str] = ()) -> str:
    """A file name with all options, so that no other samples are overwritten."""
    given = {key: value for key, value in (item or {}).items() if value is not None}
    given |= {key: value for key, value in how.given().items() if key not in (*_UNNAMED, *unnamed)}
    given |= {key: value for key, value in (("pause", how.pause), ("vocoder", how.vocoder))
              if value != getattr(SynthesisOptions(), key)}
    return "_".join([name, *(file_word(f"{key}-{value}") for key, value in given.items()), f"seed{how.seed}"])


def synthesis_options(model, options: dict) -> SynthesisOptions:
    """Options of synthesis, checked against those that a model has.

    Raises:
        InputError: for one that it does not have.
    """
    how = SynthesisOptions(**options)
    model.require_options(how.given(), ("pause", "vocoder"))
    return how


_BATCH = 16  # sentences per batch
_UNNAMED = ("text", "seed", "start", "known", "keep")  # options that are not in the names of files, or in other words
#: Sampling options recorded in files.
_MADE = ("sampler", "steps", "spacing", "eta", "churn", "diffusion", "temperature", "rounds", "kept", "strength")
_OF_HOW = ("cond", "weights", "pause", "seconds", "max_frames", "on_unknown")  # recorded too


@dataclass(frozen=True, kw_only=True)
class SynthesisOptions(SamplingOptions):
    """Options of synthesis: those of sampling, where `cond` is the speaker and `seconds` make a text one sentence.

    Arguments:
        pause: seconds of silence between sentences, at most a minute, unless a mark `[pause=0.3]` sets it.
        vocoder: one of `genmodels.speech.vocoder.VOCODERS`.

    Raises:
        InputError: for a pause out of range, an unknown vocoder, or a speed with durations or a total time.
    """

    pause: float = 0.2
    vocoder: str = "griffin_lim"

    def __post_init__(self):
        super().__post_init__()
        check_number("pause", self.pause, 0, LONGEST_PAUSE)
        one_of("vocoder", self.vocoder, VOCODERS)
        for key in ("durations", "seconds"):
            if getattr(self, key) is not None and self.speed != 1:
                raise InputError(f"{key} already says how long the text takes: leave out speed, or {key}")

    @property
    def of_model(self) -> dict:
        """The arguments of a model's `sample`, without the texts."""
        return {key: value for key, value in self.given().items() if key not in ("n", "start", "text")}


@dataclass
class SynthesisedText:
    """The synthesis of one text.

    Attributes:
        text: as written.
        parts: for each sentence its normal form, tokens, durations and mel (n_mels, T).
        gaps: frames of silence before each of them.
        mel: the mel of the whole text with pauses, (n_mels, T).
        wave: the sound (N,), None before vocoding.
        made: how the mel was sampled: sampler, steps, temperature.
    """

    text: str
    parts: list[tuple[str, list[int], list[int], Tensor]] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    mel: Tensor | None = None
    wave: Tensor | None = None
    made: dict = field(default_factory=dict)


def in_parts(texts: Sequence[str], how: SynthesisOptions, mel: dict) -> list[list[tuple[str, int]]]:
    """The sentences of each text with the frames of silence before each; with a total time, a text is one sentence.

    Raises:
        InputError: for an empty text, invalid marks, or durations of another number of sentences.
    """
    marked = [phrases(text, how.pause) for text in texts]
    if how.seconds is not None:
        if how.pause != SynthesisOptions().pause or any("[pause=" in text for text in texts):
            raise InputError("a text of a given time is one sentence: leave out pause, or seconds, inpaint and edit")
        marked = [[(text, 0.0)] for text in texts]
    split = [[(part, round(gap * mel["sample_rate"] / mel["hop"])) for part, gap in parts] for parts in marked]
    count = sum(map(len, split))
    if not count or not all(split):
        empty = "" if not count else f": text {[not parts for parts in split].index(True) + 1} is empty"
        raise InputError(f"there is no text to synthesise{empty}")
    if how.durations is not None and len(how.durations) != count:
        raise InputError(f"durations has {len(how.durations)} sentences, the text has {count}")
    return split


def synthesise(
    model, texts: Sequence[str], how: SynthesisOptions, *, takes: int = 1, start: int = 0
) -> list[SynthesisedText]:
    """Mels of texts, each `takes` times, long ones sentence by sentence; in the order of takes, then of texts.

    A sentence has the same mel in any text, batch or process, because its noise is keyed by the seed, the sentence and
    the number of the take.

    Raises:
        InputError: for texts that cannot be synthesised.
    """
    reader = TextReader(model.spec, how.on_unknown)
    split = in_parts(texts, how, model.spec.mel)
    flat = [sentence for parts in split for sentence, _ in parts]
    options, found = how.of_model, []
    for take in range(start, start + takes):
        mels = []
        for first in range(0, len(flat), _BATCH):
            count = min(_BATCH, len(flat) - first)
            with as_input_errors():
                drawn = model.sample(count, start=take * len(flat) + first, text=flat, **options)
            if not bool(drawn.x.isfinite().all()):
                raise RunError("a mel is not finite: lower temperature, or ema=true")
            for k in range(count):
                frames, tokens = int(drawn.mask[k].sum()), int(drawn.cond.mask[k].sum())
                mels.append((reader.normal_form(flat[first + k]), drawn.cond.tokens[k, :tokens].tolist(),
                             drawn.durations[k, :tokens].tolist(), drawn.x[k, :, :frames].cpu()))
        for text, parts in zip(texts, split, strict=True):
            own, mels = mels[: len(parts)], mels[len(parts) :]
            gaps = [gap for _, gap in parts]
            pieces = [piece for part, gap in zip(own, gaps, strict=True) for piece in (silence(part[3], gap), part[3])]
            made = {key: drawn.made[key] for key in _MADE if key in drawn.made} | {"take": take}
            found.append(SynthesisedText(text, own, gaps, torch.cat(pieces, 1), made=made))
    return found


def silence(like: Tensor, frames: int) -> Tensor:
    """A mel (n_mels, frames) of silence."""
    return like.new_full((like.shape[0], frames), FLOOR)


def read_durations(path: Path) -> list[list[int]]:
    """The durations in a file written by `write_utterance`, or in a plain list.

    Raises:
        InputError: for a file without durations in whole numbers.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [part["durations"] for part in found["sentences"]] if isinstance(found, dict) else found
        rows = [rows] if isinstance(rows, list) and all(isinstance(d, int) for d in rows) else rows
        valid = rows and all(isinstance(row, list) and row and all(isinstance(d, int) for d in row) for row in rows)
    except OSError as error:
        raise InputError(f"durations={path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):  # no JSON, or JSON of another form
        valid = False
    if not valid:
        raise InputError(f"durations={path} holds no durations in whole numbers of frames: it must be a .json written "
                         "by sample.py, or [[3, 5, 2]]")
    return rows


def write_utterance(
    found: SynthesisedText, spec, target: Path, how: SynthesisOptions, made: dict, vocoder: Vocoder | None = None
) -> list[str]:
    """Write one text as .wav with .png and .json next to it, or as .npz; returns lines for the user.

    Arguments:
        vocoder: the loaded vocoder of `how`, None to load it; used if the text has no sound yet.
    """
    config = MelConfig(**spec.mel)
    about = {"text": found.text, "seed": how.seed, **found.made, "speed": how.speed, "vocoder": how.vocoder,
             **{key: value for key in _OF_HOW if (value := getattr(how, key)) is not None}, **made}
    tokens, durations = _joined(found)
    if target.suffix.lower() == ".npz":
        arrays = {"mel": found.mel.numpy(), "tokens": np.array(tokens), "durations": np.array(durations),
                  "made": json.dumps(about, default=str)}
        write_whole(target, lambda file: np.savez_compressed(file, **arrays))
        return [f"mel {tuple(found.mel.shape)}: {target}"]
    took = ""
    if found.wave is None:
        start = time.monotonic()
        found.wave = sound_of(found.mel, vocoder or vocoder_of(how.vocoder, config), how.seed, how.seconds)
        took = f" ({VOCODERS[how.vocoder]} took {time.monotonic() - start:.1f} s)"
    if not bool(found.wave.isfinite().all()):
        raise RunError(f"the mel of this text goes up to {float(found.mel.max()):.4g} in log units, louder than "
                       f"any sound: train longer, or lower temperature=; out={target.with_suffix('.npz')} keeps it")
    held = io.BytesIO()
    factor = write_wav(held, found.wave, config.sample_rate)
    seconds = len(found.wave) / config.sample_rate
    lines = [f"{seconds:.2f} s of sound{took}: {target}"]
    if factor < 1:
        lines.append(f"the sound was beyond full scale and was multiplied by {factor:.2g}")
    plain = about | {"sample_rate": config.sample_rate, "hop": config.hop, "sentences": [
        {"text": text, "tokens": [spec.text["symbols"][t] for t in tokens], "durations": durations}
        for text, tokens, durations, _ in found.parts
    ]}
    write_text(target.with_suffix(".json"), json.dumps(plain, indent=1, default=str) + "\n")
    write_whole(target, lambda file: file.write(held.getvalue()))  # after its record, which says that it is ours
    save_png(mel_with_tokens(found.mel, spec, tokens, durations, found.text[:120]), target.with_suffix(".png"), about)
    return [*lines, f"mel with tokens: {target.with_suffix('.png')}; durations: {target.with_suffix('.json')}"]


def _joined(found: SynthesisedText) -> tuple[list[int], list[int]]:
    """Tokens and frames of the whole text, each pause as padding."""
    tokens, durations = [], []
    for (_, own, frames, _), gap in zip(found.parts, found.gaps, strict=True):
        if gap:
            tokens, durations = [*tokens, 0], [*durations, gap]
        tokens, durations = tokens + own, durations + frames
    return tokens, durations


def targets(out: Path | None, folder: Path, stem: str, texts: Sequence[str], takes: Sequence[int]) -> list[Path]:
    """A file for each take and text: `out` for one, files in the folder `out` for several, else files of the run.

    Raises:
        InputError: for one file and several texts, or an unsupported file type.
    """
    if out is not None and out.suffix.lower() in (".wav", ".npz"):
        if (count := len(texts) * len(takes)) > 1:
            raise InputError(f"out={out} is one file, and {count} texts are synthesised: give a folder")
        return [out]
    if out is not None and out.suffix:
        raise InputError(f"out={out}: end it in .wav (with .png and .json next to it), .npz, or nothing (a folder)")
    return [(out or folder) / f"{stem}_{k}{f'_take{take}' * (take > 0)}_{_words(text)}.wav"
            for take in takes for k, text in enumerate(texts)]


def _words(text: str) -> str:
    """The beginning of a text for a file name; unless it is words and a full stop, a hash of the whole.

    Example:
        >>> _words("Turn right."), _words("Turn right, at 130 Prospect Street!")
        ('turn-right', 'turn-right-at-130-prospect-83d68f8d')
    """
    kept = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    name = "-".join(kept[:5])[:40] or "text"
    return name if f"{name.replace('-', ' ')}." == text.lower() else f"{name}-{short_hash(text)}"


def stream_texts(
    model, texts: Sequence[str], how: SynthesisOptions, vocoder: Vocoder | None, *, chunk: int = 64, takes: int = 1,
    start: int = 0, clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[SynthesisedText], list[str]]:  # fmt: skip
    """The result of `synthesise` in chunks, with its sound if there is a vocoder; and a line with its latency.

    A sentence starts after the previous one, so that the first chunk waits only for the first sentence.

    Raises:
        InputError: for texts or models that cannot be streamed.
    """
    check_streams(model)
    if vocoder is not None and vocoder.config.padding != "hifigan":
        raise InputError(f"mels with data.mel.padding={vocoder.config.padding} are not streamed: leave stream out")
    split = in_parts(texts, how, model.spec.mel)
    listed = iter(how.durations or [None] * sum(map(len, split)))
    durations = [[next(listed) for _ in parts] for parts in split]
    found, lines = [], []
    for take in range(start, start + takes):
        for text, parts, own in zip(texts, split, durations, strict=True):
            one, kept, began = SynthesisedText(text), [], clock()
            pieces = _timed(_mels(model, one, list(zip(parts, own, strict=True)), how, take, chunk), kept, clock)
            if vocoder is None:
                whole = collect(pieces, clock)
            else:
                whole = collect(stream_sound(vocoder, pieces, phases(how.seed)), clock)
                cut = None if how.seconds is None else round(how.seconds * vocoder.config.sample_rate)
                one.wave = whole.whole[:cut]
            one.mel = torch.cat([piece for _, piece in kept], 1)
            found.append(one)
            sound = "" if vocoder is None else f", first audio after {whole.first_packet:.3f} s"
            lines.append(f"first chunk of the mel ({counted(kept[0][1].shape[1], 'frame')}) after "
                         f"{kept[0][0] - began:.3f} s{sound}, the last after {whole.seconds:.3f} s")
    return found, lines


def _mels(
    model, found: SynthesisedText, sentences: list[tuple[tuple[str, int], list[int] | None]], how: SynthesisOptions,
    take: int, chunk: int,
) -> Iterator[Tensor]:  # fmt: skip
    """The chunks of a text's mel with the pauses between sentences; its parts are recorded in `found`."""
    reader = TextReader(model.spec, how.on_unknown)
    for (sentence, gap), durations in sentences:
        if gap:
            yield torch.full((model.spec.event_shape[0], gap), FLOOR)
        own = how.of_model | {"durations": None if durations is None else [durations]}
        stream = stream_text(model, sentence, start=take, chunk=chunk, **own)
        pieces = []
        for piece in stream.pieces:
            pieces.append(piece.cpu())
            yield pieces[-1]
        found.gaps.append(gap)
        found.made = stream.made | {"take": take}
        found.parts.append((reader.normal_form(sentence), stream.tokens, stream.durations, torch.cat(pieces, 1)))


def _timed(pieces: Iterator[Tensor], kept: list[tuple[float, Tensor]], clock: Callable[[], float]) -> Iterator[Tensor]:
    """The same chunks, each recorded with its time."""
    for piece in pieces:
        kept.append((clock(), piece))
        yield piece


class Speech:
    """Synthesised texts: a player in notebooks, a .wav by `save`.

    Attributes:
        texts: a list of `SynthesisedText`, with `mel` and, once it was needed, `wave`.
        spec: the data.
    """

    def __init__(self, texts: list[SynthesisedText], spec: DataSpec, how: SynthesisOptions, made: dict):
        self.texts, self.spec, self._how, self._made = texts, spec, how, made

    def save(self, out: str | Path) -> list[Path]:
        """Write a .wav (with the mel as .png and the durations as .json next to it), a .npz, or a folder of these.

        Raises:
            InputError: for one file and several texts.
        """
        out = Path(out).expanduser()
        takes = list(dict.fromkeys(one.made["take"] for one in self.texts))
        texts = [one.text for one in self.texts[: len(self.texts) // len(takes)]]
        places = targets(out, out, _stem("speech", self._how), texts, takes)
        for place in places:
            check_companions(place)
        for one, place in zip(self.texts, places, strict=True):
            write_utterance(one, self.spec, place, self._how, self._made)
        return places

    @property
    def waves(self) -> list[Tensor]:
        """The sound of each text, (N,), from -1 to 1 at `spec.mel["sample_rate"]`."""
        vocoder = vocoder_of(self._how.vocoder, MelConfig(**self.spec.mel))
        for one in self.texts:
            if one.wave is None:
                one.wave = sound_of(one.mel, vocoder, self._how.seed, self._how.seconds)
        return [one.wave for one in self.texts]

    def show(self) -> None:
        """Show players in a notebook, else print what was synthesised."""
        show(self)

    def __repr__(self) -> str:
        return f"speech: {', '.join(repr(one.text) for one in self.texts)}"

    def _repr_html_(self) -> str:
        players = {}
        for number, (one, wave) in enumerate(zip(self.texts, self.waves, strict=True), 1):
            write_wav(held := io.BytesIO(), wave, self.spec.mel["sample_rate"])
            sound = f"data:audio/wav;base64,{base64.b64encode(held.getvalue()).decode()}"
            name = one.text if one.text not in players else f"{one.text} ({number})"
            players[name] = Markup(f'<audio controls src="{sound}"></audio>')
        return html_table("speech", players)
