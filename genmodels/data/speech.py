"""Speech data sets as log-mel-spectrograms, with a text or a class for each clip."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import torch

from genmodels.core.data import DataSpec
from genmodels.core.errors import (
    InputError,
    as_input_errors,
    counted,
    none_or_at_least,
    one_of,
    progress_bar,
    require_known,
)
from genmodels.data.base import SPLITS, DataModule, data_root, split_fractions, split_rows
from genmodels.data.clips import LAYOUTS, MISSING, Clip, MelFiles, read_clips
from genmodels.data.loading import BatchDataset
from genmodels.data.utterances import BucketedBatchSampler, Utterance, Utterances, default_multiple
from genmodels.speech.audio import AudioError, MelConfig
from genmodels.speech.text import FORMS, Symbols, TextForm, UnknownSymbol, in_form, ready, table_of

_SILENT = -60.0  # dB of full scale
_CLIPPED = 1e-3
_SLOW = 60  # frames per token


@dataclass(frozen=True)
class Finding:
    """An error or a warning about one item.

    Attributes:
        where: the item.
        reason: what is wrong.
        is_error: whether the item cannot be used.

    Example:
        >>> str(Finding("a.wav (list.txt, line 3)", "the text is empty"))
        'a.wav (list.txt, line 3): the text is empty'
    """

    where: str
    reason: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def amount_of(findings: list[Finding]) -> str:
    """How many items some findings are about.

    Example:
        >>> amount_of([Finding("a.wav", "clipped"), Finding("a.wav", "silent")])
        '1 item'
    """
    return counted(len({finding.where for finding in findings}), "item")


def read_utterance(
    clip: Clip, files: MelFiles, symbols: Symbols, speakers: list[str], labels: list[str], *,
    rate: int | None = None, max_seconds: float | None = None, language: str = "en",
    form: TextForm = "characters",
) -> tuple[Utterance | None, list[Finding]]:
    """An item (None if it cannot be used) and the findings about it.

    Arguments:
        clip: the recording and its text.
        files: the mels.
        symbols: of the texts.
        speakers, labels: all of them, in the order of their numbers.
        rate, max_seconds: required sample rate, largest duration.
        language: in which numbers are read.
        form: kind of symbols in texts, see `in_form`.
    """
    found: list[Finding] = []

    def note(reason: str, is_error: bool = True) -> None:
        found.append(Finding(clip.where, reason, is_error))

    if clip.problem is not None:
        return None, [Finding(clip.where, clip.problem)]
    try:
        recording = files.read(clip.path)
    except AudioError as error:
        reason = str(error)
        note(reason.removeprefix(f"{clip.path}: ") if clip.where.startswith(clip.path.name) else reason)
        return None, found
    if rate is not None and recording.rate != rate:
        note(f"{recording.rate} samples a second, declared are {rate}")
    if recording.frames == 0:
        note(f"{recording.samples} samples are too few, a clip has {files.config.shortest} at "
             f"{files.config.sample_rate} Hz at least")
    if max_seconds is not None and recording.seconds > max_seconds:
        note(f"{recording.seconds:.1f} s are more than max_seconds={max_seconds:g}")
    if recording.level < _SILENT:
        note(f"silent: {recording.level:.0f} dB of full scale", False)
    if recording.clipped > _CLIPPED:
        note(f"clipped: {recording.clipped:.1%} of the samples at full scale", False)
    text, tokens = "", ()
    if clip.label is None:
        text, tokens = _read_text(clip, symbols, form, language, note)
        if tokens and recording.frames and len(tokens) > recording.frames:
            note(f"too fast: {len(tokens)} tokens{' with blanks' * symbols.blanks} in {recording.frames} frames; drop "
                 "the item, or set data.blanks=false")
        elif tokens and recording.frames > _SLOW * len(tokens):
            note(f"slow: {recording.frames} frames for {len(tokens)} tokens", False)
    speaker = None
    if speakers and clip.label is None:
        if clip.speaker in speakers:
            speaker = speakers.index(clip.speaker)
        else:
            note(f"unknown speaker {clip.speaker!r}, known are {', '.join(speakers)}")
    label = None if clip.label is None else labels.index(clip.label)
    if any(finding.is_error for finding in found):
        return None, found
    return Utterance(clip.name, recording, tuple(tokens), text, speaker, label, clip.split), found


def _read_text(clip: Clip, symbols: Symbols, form: TextForm, language: str, note) -> tuple[str, list[int]]:
    if not (clip.text or "").strip():
        note("the text is empty")
        return "", []
    try:
        text = in_form(clip.text, form, language)
        unknown = symbols.unknown(text)
        if unknown and symbols.on_unknown == "drop":
            note("characters without a symbol are left out: " + ", ".join(f"{c!r} x {n}" for c, n in unknown.items()),
                 False)
            text = " ".join("".join(c for c in text if c not in unknown).split())
            if not any(c.isalpha() for c in text):
                note("no letter of its text has a symbol")
                return "", []
        return text, symbols.encode(text)
    except UnknownSymbol as error:
        note(str(error).replace("on_unknown", "data.on_unknown"))
    except ValueError as error:
        note(str(error))
    return "", []


def findings_between(items: list[Utterance], split_of: dict[int, str]) -> list[Finding]:
    """Findings about pairs of items: the same sound twice, the same text in two splits."""
    found = []
    by_sound, by_text = defaultdict(list), defaultdict(list)
    for k, item in enumerate(items):
        by_sound[item.recording.digest].append(k)
        if item.text:
            by_text[item.text].append(k)
    for rows in by_sound.values():
        for k in rows[1:]:
            found.append(Finding(items[k].name, f"the same sound as {items[rows[0]].name}", False))
    for rows in by_text.values():
        first = rows[0]
        for k in rows[1:]:
            if split_of.get(k) != split_of.get(first):
                found.append(Finding(items[k].name, f"the same text as {items[first].name}, in {split_of[k]} and "
                                                    f"{split_of[first]}", False))
    return found


_NAMED = 5  # unusable items named by an error
_EXAMPLES = 8  # example texts stored in a checkpoint


class Speech(DataModule):
    """Recordings as mels (n_mels, T) of different lengths; `cond` is a `TextCondition` or a class label.

    Every item is read, and its mel computed and cached, before training; unusable items are reported then. Equal texts
    are kept in the same split.

    Arguments:
        root: the folder of the recordings, or the file of a manifest.
        layout: `embedded` (16 clips of LJSpeech in the source tree), `ljspeech` (metadata.csv and wavs/), `manifest`
            (lines path|text or path|text|speaker), `folder` (one folder per class, or the Free Spoken Digits),
            `asterisk` (prompts with a list of texts).
        mel: settings of the mels that differ from those of HiFi-GAN: sample_rate, n_fft, hop, n_mels, f_min, f_max,
            padding. Recordings of another rate are resampled.
        rate: samples per second that every recording must have; null for any.
        symbols: the symbols of the texts: `characters`; `phonemes` by espeak (which must be installed, with the extra
            `phonemes`); or `ipa`, if the transcripts are phonemes already.
        language: in which numbers are read, and that of espeak.
        blanks: put a blank before, between and after the symbols of a text.
        on_unknown: characters without a symbol are left out (`drop`, counted) or an `error`.
        speakers: names of the speakers of a manifest, in the order of their numbers; null for all in the manifest.
        statistics: mean and standard deviation over all cells (`global`), or for each `band`.
        multiple: lengths are rounded up to a multiple of this by frames of silence, which count as data; null for 2
            with texts, 8 with classes.
        max_seconds: longer recordings are an error.
        val_fraction, test_fraction: share of the items (of the texts) held out if the layout has no splits.
        allow_partial: leave out rows of a list whose recording is missing instead of stopping; `skip_bad` includes it.
        skip_bad: leave out items that cannot be used instead of stopping.
        max_frames: largest number of frames per training batch, including padding; null for no limit.
        batch_size, num_workers, seed: see `DataModule`.

    Errors: `InputError` naming the first unusable items: missing, unreadable, empty, not finite, of another rate than
    declared, shorter than a window, longer than allowed, without text, with more tokens than frames, by an unknown
    speaker.

    Example:
        >>> data = Speech(batch_size=4).prepare()
        >>> [len(data.split(name)) for name in ("train", "val", "test")], data.spec.event_shape[0]
        ([10, 2, 4], 80)
    """

    name = "speech"

    def __init__(
        self,
        *,
        root: str | None = None,
        layout: Literal["embedded", "ljspeech", "manifest", "folder", "asterisk"] = "embedded",
        mel: dict | None = None,
        rate: int | None = None,
        symbols: Literal["characters", "ipa", "phonemes"] = "characters",
        language: str = "en",
        blanks: bool = True,
        on_unknown: Literal["drop", "error"] = "drop",
        speakers: list[str] | None = None,
        statistics: Literal["global", "band"] = "global",
        multiple: int | None = None,
        max_seconds: float | None = None,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        allow_partial: bool = False,
        skip_bad: bool = False,
        max_frames: int | None = None,
        batch_size: int = 16,
        **shared,
    ):
        super().__init__(batch_size=batch_size, **shared)
        one_of("data.layout", layout, LAYOUTS)
        one_of("data.on_unknown", on_unknown, ("drop", "error"))
        one_of("data.symbols", symbols, FORMS)
        one_of("data.statistics", statistics, ("global", "band"))
        none_or_at_least(1, **{"data.rate": rate, "data.multiple": multiple, "data.max_frames": max_frames})
        if max_seconds is not None and not max_seconds > 0:
            raise InputError(f"data.max_seconds must be above 0, got {max_seconds}")
        self.root = None if root is None else Path(data_root(root))
        self.layout, self.mel, self.rate, self.language = layout, mel_config(mel or {}), rate, language
        self.form, self.symbols = symbols, Symbols(table_of(symbols), blanks=blanks, on_unknown=on_unknown)
        if speakers is not None and len(set(speakers)) != len(speakers):
            raise InputError(f"data.speakers names a speaker twice: {', '.join(map(str, speakers))}")
        self.speakers, self.statistics, self.max_seconds = speakers, statistics, max_seconds
        self.multiple = default_multiple(layout) if multiple is None else multiple
        self.fractions = split_fractions(val_fraction, test_fraction)
        self.allow_partial, self.skip_bad, self.max_frames = allow_partial, skip_bad, max_frames
        self._findings: list[Finding] | None = None

    def examine(self, *, stop: bool = False) -> tuple[list[Utterance], list[Finding]]:
        """All usable items and the findings about all items; missing mels are computed.

        Arguments:
            stop: raise an error if the list alone shows items that cannot be used, before any recording is read.

        Raises:
            InputError: for problems of the whole data set.
        """
        clips = read_clips(self.layout, self.root, allow_partial=self.allow_partial)
        wrong = [Finding(clip.where, clip.problem) for clip in clips if clip.problem is not None]
        if wrong and stop:
            raise self._unusable(wrong, " (by its list alone, no recording was read)")
        named = {clip.speaker for clip in clips if clip.speaker is not None and clip.label is None}
        self.speakers = sorted(named) if self.speakers is None else list(self.speakers)
        labels = sorted({clip.label for clip in clips if clip.label is not None})
        if not labels:
            with as_input_errors():
                in_form("a", self.form, self.language)  # a missing program is no fault of the items
        files, usable, findings = MelFiles(self.mel), [], []
        limits = {"rate": self.rate, "max_seconds": self.max_seconds, "language": self.language, "form": self.form}
        for clip in progress_bar(clips, desc="mels", unit="clip", disable=len(clips) <= 50):
            item, found = read_utterance(clip, files, self.symbols, self.speakers, labels, **limits)
            findings += found
            if item is not None:
                usable.append(item)
        self._classes = tuple(labels)
        return usable, findings

    @property
    def _source(self) -> str:
        return "the embedded clips" if self.root is None else str(self.root)

    def _unusable(self, errors: list[Finding], how: str = "") -> InputError:
        listed = "; ".join(map(str, errors[:_NAMED]))
        more = f"; and {len(errors) - _NAMED} more" if len(errors) > _NAMED else ""
        partial = ", data.allow_partial=true those without a file" * any(e.reason == MISSING for e in errors)
        return InputError(f"{amount_of(errors)} of {self._source} cannot be used{how}: "
                          f"{listed}{more}. `genmodels doctor data=...` lists all, data.skip_bad=true leaves them out"
                          f"{partial}")

    def load(self):
        """Read all items, stop at unusable ones (unless `skip_bad`), split the rest."""
        items, findings = self.examine(stop=not self.skip_bad)
        errors = [finding for finding in findings if finding.is_error]
        if errors and not (self.skip_bad and items):
            raise self._unusable(errors)
        if errors:
            warnings.warn(f"left out {amount_of(errors)} of {self._source}, such as {errors[0]}", stacklevel=2)
        rows = _split(items, self.fractions, self.seed)
        longest = int(max(-(-item.recording.frames // self.multiple) for item in items)) * self.multiple
        length = longest if self._classes else None
        splits: dict[str, BatchDataset] = {
            name: Utterances([items[k] for k in rows[name]], self.multiple, length) for name in SPLITS
        }
        recordings = [items[k].recording for k in rows["train"]]
        statistics = MelFiles(self.mel).statistics(recordings, self.statistics) if recordings else {}
        median = sorted(recording.frames for recording in recordings)[len(recordings) // 2] if recordings else 1
        statistics |= {"frames": -(-median // self.multiple) * self.multiple, "multiple": self.multiple}
        name = self.name if self.root is None else self.root.resolve().name if self.root.is_dir() else self.root.stem
        content = json.dumps({name: [[items[k].name, items[k].recording.digest, items[k].text] for k in rows[name]]
                              for name in SPLITS})  # fmt: skip
        sizes = ", ".join(f"{len(rows[name])} {name}" for name in SPLITS)
        spec = DataSpec(
            name, (self.mel.n_mels, longest), None, len(self._classes) or None, self._classes, mel=asdict(self.mel),
            statistics=statistics, text=None if self._classes else self._text([items[k] for k in rows["test"]]),
            speakers=tuple(self.speakers),
            fingerprint=f"{sizes}, clips {hashlib.sha256(content.encode()).hexdigest()[:12]}",
        )
        return spec, splits

    def _text(self, held_out: list[Utterance]) -> dict:
        """Symbols, language and examples of the texts, as stored in checkpoints."""
        examples = [ready(item.text, self.form) for item in held_out[:_EXAMPLES]]
        return {"symbols": list(self.symbols.table), "blanks": self.symbols.blanks, "language": self.language,
                "form": self.form, "examples": examples}

    def training_batches(self, data: Utterances) -> BucketedBatchSampler:
        """Batches of items of about the same length."""
        frames = data.frames() if data.length is None else torch.full((len(data),), data.length)
        return BucketedBatchSampler(frames, self.batch_size, self.max_frames, self.order_seed, self._processes,
                                    data.length)

    def findings(self) -> list[Finding]:
        """All errors and warnings about these data, item by item.

        Raises:
            InputError: for problems of the whole data set.
        """
        if self._findings is None:
            items, found = self.examine()
            rows = _split(items, self.fractions, self.seed) if items else {}
            split_of = {k: name for name, chosen in rows.items() for k in chosen}
            self._findings = found + findings_between(items, split_of)
        return self._findings

    def problems(self) -> list[str]:
        """One line for each item that cannot be used."""
        try:
            return [str(finding) for finding in self.findings() if finding.is_error] or super().problems()
        except InputError as error:
            return [str(error)]

    def warnings(self) -> list[str]:
        """One line for each usable item that should be checked."""
        try:
            return [str(finding) for finding in self.findings() if not finding.is_error]
        except InputError:  # one of the problems
            return []


def mel_config(given: dict) -> MelConfig:
    """The settings of mels from a configuration.

    Raises:
        InputError: for an unknown key, or inconsistent values.

    Example:
        >>> mel_config({"n_mels": 40}).n_mels
        40
    """
    require_known("data.mel", given, [field.name for field in fields(MelConfig)])
    numbers = {key: value for key, value in given.items() if key != "padding"}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"data.mel.{key}={value!r} must be a number")
        if not key.startswith("f_"):
            if not float(value).is_integer():
                raise InputError(f"data.mel.{key}={value} must be a whole number")
            numbers[key] = int(value)
    try:
        return MelConfig(**given | numbers)
    except (ValueError, TypeError) as error:
        raise InputError(f"data.mel: {error}") from error


def _split(items: list[Utterance], fractions: tuple[float, float, float], seed: int) -> dict[str, list[int]]:
    """Rows of each split: those given by the layout, the others at random, equal texts in the same split."""
    rows: dict[str, list[int]] = {name: [k for k, item in enumerate(items) if item.split == name] for name in SPLITS}
    free = [k for k, item in enumerate(items) if item.split is None]
    groups: dict = {}
    for k in free:
        groups.setdefault(items[k].text or k, []).append(k)
    keys = list(groups)
    if not keys:
        return rows
    # A split with a positive fraction has at least one item.
    wanted = [0.0 if rows[name] else max(f, 1 / len(keys)) * (f > 0) for name, f in zip(SPLITS, fractions, strict=True)]
    if sum(wanted[1:]) > 1:  # one item for two splits: it stays in train, and the empty split is reported
        wanted = [0.0, 0.0, 0.0]
    labels = [items[groups[key][0]].label for key in keys]
    classes = None if None in labels else torch.tensor(labels)
    parts = split_rows(classes, len(keys), (0.0, *wanted[1:]), seed)
    for name, part in zip(SPLITS, parts, strict=True):
        rows[name] = sorted(rows[name] + [k for g in part.tolist() for k in groups[keys[g]]])
    return rows
