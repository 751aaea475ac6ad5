"""`genmodels transcribe`: the texts of recordings, by a trained recogniser."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from genmodels.core.checkpoint import verify
from genmodels.core.data import Batch
from genmodels.core.errors import InputError, an, check_number, printable
from genmodels.core.files import located
from genmodels.data.utterances import padded_mels
from genmodels.models.base import GenerativeModel
from genmodels.models.checkpoint import load_model, weights_of
from genmodels.models.transcription import SearchOptions, length_multiple, search_of, with_silence
from genmodels.speech.audio import AudioError, MelConfig, log_mel, read_wav, resample


@dataclass(frozen=True, kw_only=True)
class TranscriptionOptions(SearchOptions):
    """Options of recognition.

    Arguments:
        nbest: texts for each file, the most probable first, with their log-probabilities; at most `beam`.
        times: also when every word begins and ends, in seconds; for models with CTC.
        batch_size: recordings that are recognised together; 1 for hours of sound in each.
    """

    nbest: int = 1
    times: bool = False
    batch_size: int = 16

    def __post_init__(self):
        check_number("batch_size", self.batch_size, 1, 10_000)
        super().__post_init__()


class Transcript(NamedTuple):
    """A recognised text.

    Attributes:
        file: the recording.
        text: its transcript.
        score: its log-probability, with those of a language model and the length normalisation.
        words: each word with the seconds at which it begins and ends, with `times`.
    """

    file: str
    text: str
    score: float
    words: list[tuple[str, float, float]]


def run(
    *,
    ckpt: str,
    files: list[str] | None = None,
    stream: bool = False,
    ema: bool | float = True,
    device: str = "auto",
    trust: list[str] | None = None,
    **options: TranscriptionOptions,
) -> None:
    """Transcribe recordings.

    Arguments:
        ckpt: a checkpoint, a run folder, an exported .safetensors, or hf://user/name.
        files: recordings (.wav) of any rate; on the command line simply their names.
        stream: print the text so far after every chunk of sound; for models with CTC and an attention to chunks.
        ema: averaged weights (true), raw ones (false), or the average with one decay.
        device: auto, cpu, cuda, ...
        trust: further packages whose classes the checkpoint may name.
        options: options of recognition.
    """
    if not files or "" in files:
        raise InputError("name the recordings: genmodels transcribe ckpt=... a.wav b.wav")
    usual = {field.name: field.default for field in fields(TranscriptionOptions)}
    others = [key for key, value in options.items() if key != "batch_size" and value != usual[key]]
    if stream and others:
        raise InputError(f"stream takes the best path as it comes: leave {', '.join(others)} out")
    how = TranscriptionOptions(**options)
    path = located(ckpt)
    verify(path)
    model, header = load_model(path, device=device, trust=trust or [])
    unreadable: list[str] = []
    mels = recordings(model, header, files, unreadable)
    if stream:
        for name, mel, _ in mels:
            for text in model.stream(mel, weights=weights_of(ema)):
                print(f"{printable(name)}: {text}", flush=True)
    else:
        for found in heard(model, mels, how, weights_of(ema), trust or []):
            score = "" if how.nbest == 1 else f" {found.score:.2f}"
            print(f"{printable(found.file)}:{score} {found.text}")
            for word, begin, end in found.words:
                print(f"  {begin:7.2f} {end:7.2f} {word}")
    if unreadable:
        raise InputError("; ".join(unreadable))


def heard(
    model: GenerativeModel, mels: list[tuple[str, Batch, float]], how: TranscriptionOptions, weights: str | float,
    trust: list[str],
) -> Iterator[Transcript]:
    """The texts of recordings, `how.nbest` for each.

    Raises:
        InputError: for an option that the model does not have.
    """
    search = search_of(model, how, trust)
    for first in range(0, len(mels), how.batch_size):
        part = mels[first : first + how.batch_size]
        x, mask = padded_mels([mel.x[0] for _, mel, _ in part], torch.tensor([mel.x.shape[-1] for _, mel, _ in part]))
        batch = Batch(x, mask=mask).to(model.device)
        for (name, mel, seconds), found in zip(part, model.transcribe(batch, search, weights=weights), strict=True):
            for one in found[: how.nbest]:
                try:
                    spoken = model.times(mel, one, weights=weights) if how.times else []
                except InputError:
                    raise
                except ValueError as error:  # a text that the alignment has no path for
                    print(f"{printable(name)}: no times: {error}", file=sys.stderr)
                    spoken = []
                spoken = [(word, min(begin, seconds), min(end, seconds)) for word, begin, end in spoken]
                yield Transcript(name, model.written(one), one.score, spoken)


def recordings(
    model: GenerativeModel, header: dict, files: list[str], unreadable: list[str] | None = None
) -> list[tuple[str, Batch, float]]:
    """The name of each recording, its mel with the silence that follows in training, and its seconds without.

    Arguments:
        model: the recogniser.
        header: of its checkpoint.
        files: wav files.
        unreadable: receives the errors of files that cannot be read; None to raise the first.

    Raises:
        InputError: for another kind of model, or a file that cannot be read.
    """
    if not hasattr(model, "transcribe"):
        raise InputError(f"the checkpoint holds {an(model.family)}: transcribe is for model=recognizer")
    multiple, found = length_multiple(header), []
    for name in files:
        try:
            mel = recorded(name, model.spec.mel)
            seconds = mel.shape[1] * model.spec.mel["hop"] / model.spec.mel["sample_rate"]
            found.append((name, Batch(with_silence(mel, multiple)[None]).to(model.device), seconds))
        except InputError as error:
            if unreadable is None:
                raise
            unreadable.append(str(error))
    return found


def recorded(name: str, mel: dict) -> Tensor:
    """The mel (n_mels, T) of a sound file; a warning for a rate that leaves its upper bands empty.

    Raises:
        InputError: for a file that cannot be read, or is shorter than a frame.
    """
    config = MelConfig(**mel)
    try:
        wave, rate = read_wav(name)
        if rate / 2 < 0.9 * config.f_max:
            warnings.warn(f"{name} has {rate:,} samples a second and no sound above {rate // 2:,} Hz, which the "
                          f"recogniser hears up to {config.f_max:,.0f} Hz", stacklevel=2)
        heard = resample(wave, rate, config.sample_rate)
        if len(heard) < config.shortest:
            raise InputError(f"{name}: {len(wave) / rate:.3f} s of sound are too short, a mel takes "
                             f"{config.shortest / config.sample_rate:.3f} s")
        return log_mel(heard, config).float()
    except (AudioError, ValueError) as error:
        raise InputError(f"{error}" if name in str(error) else f"{name}: {error}") from error
