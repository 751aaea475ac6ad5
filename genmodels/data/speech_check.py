"""What can be wrong with an item of speech: found by reading it once, named by its file and line."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from genmodels.data.clips import Clip
from genmodels.data.mel_files import MelFiles
from genmodels.data.utterances import Utterance
from genmodels.speech.audio import AudioError
from genmodels.speech.phonemes import TextForm, in_form
from genmodels.speech.text import Symbols, UnknownSymbol

_SILENT = -60.0  # dB of full scale
_CLIPPED = 1e-3
_SLOW = 60  # frames for each token


@dataclass(frozen=True)
class Finding:
    """One thing about one item.

    Attributes:
        where: the item.
        reason: what is wrong.
        is_error: whether it cannot be used as it is.

    Example:
        >>> str(Finding("a.wav (list.txt, line 3)", "the text is empty"))
        'a.wav (list.txt, line 3): the text is empty'
    """

    where: str
    reason: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def read_utterance(
    clip: Clip, files: MelFiles, symbols: Symbols, speakers: list[str], labels: list[str], *,
    rate: int | None = None, max_seconds: float | None = None, language: str = "en",
    form: TextForm = "characters",
) -> tuple[Utterance | None, list[Finding]]:
    """An item, or None where it cannot be used, and all that is to be said of it.

    Arguments:
        clip: where it is and what is said.
        files: the mels.
        symbols: of the texts.
        speakers, labels: all there are, in the order of their numbers.
        rate, max_seconds: what recordings must be like.
        language: in which numbers are read.
        form: what texts are made of, see `in_form`.
    """
    found: list[Finding] = []

    def note(reason: str, is_error: bool = True) -> None:
        found.append(Finding(clip.where, reason, is_error))

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
    return Utterance(clip.where.split(" (")[0], recording, tuple(tokens), text, speaker, label, clip.split), found


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
        return text, symbols.encode(text)
    except UnknownSymbol as error:
        note(str(error).replace("on_unknown", "data.on_unknown"))
    except ValueError as error:
        note(str(error))
    return "", []


def findings_between(items: list[Utterance], split_of: dict[int, str]) -> list[Finding]:
    """What only shows between items: the same sound twice, the same text in two splits."""
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
