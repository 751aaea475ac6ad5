"""Texts spoken piece by piece, as one who waits for them hears them, and how long that one waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from genmodels.evaluation.sounding import FLOOR, phases
from genmodels.evaluation.speaking import Manner, Spoken, in_parts
from genmodels.models.streaming import check_streams, stream_text
from genmodels.models.texts import TextReader
from genmodels.speech.streaming import Vocoder, collect, stream_sound


def speak_streamed(
    model, texts: Sequence[str], manner: Manner, vocoder: Vocoder | None, *, chunk: int = 64, takes: int = 1,
    start: int = 0, clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Spoken], list[str]]:  # fmt: skip
    """What `speak` gives, and its sound where there is a vocoder, made in pieces; and the times of each, in words.

    A sentence is begun when the one before it is over: the first piece waits for the text of the first one alone.

    Raises:
        InputError: for texts or models that cannot be streamed.
    """
    check_streams(model)
    split = in_parts(texts, manner, model.spec.mel)
    listed = iter(manner.durations or [None] * sum(map(len, split)))
    durations = [[next(listed) for _ in parts] for parts in split]
    found, lines = [], []
    for take in range(start, start + takes):
        for text, parts, own in zip(texts, split, durations, strict=True):
            told, kept, began = Spoken(text), [], clock()
            pieces = _noted(_mels(model, told, list(zip(parts, own, strict=True)), manner, take, chunk), kept, clock)
            if vocoder is None:
                whole = collect(pieces, clock)
            else:
                whole = collect(stream_sound(vocoder, pieces, phases(manner.seed)), clock)
                cut = None if manner.seconds is None else round(manner.seconds * vocoder.config.sample_rate)
                told.wave = whole.whole[:cut]
            told.mel = torch.cat([piece for _, piece in kept], 1)
            found.append(told)
            sound = "" if vocoder is None else f", of its sound after {whole.first_packet:.3f} s"
            waited, size = kept[0][0] - began, kept[0][1].shape[1]
            lines.append(f"first packet of the mel ({size} frames) after {waited:.3f} s{sound}, the last after "
                         f"{whole.seconds:.3f} s")
    return found, lines


def _mels(
    model, told: Spoken, sentences: list[tuple[tuple[str, int], list[int] | None]], manner: Manner, take: int,
    chunk: int,
) -> Iterator[Tensor]:  # fmt: skip
    """The pieces of a text's mel with the pauses between sentences; what was spoken is noted in `told`."""
    reader = TextReader(model.spec, manner.on_unknown)
    for (sentence, gap), durations in sentences:
        if gap:
            yield torch.full((model.spec.event_shape[0], gap), FLOOR)
        said = stream_text(model, sentence, manner.speaker, take=take, chunk=chunk,
                           **manner.of_model | {"durations": durations})
        pieces = []
        for piece in said.pieces:
            pieces.append(piece.cpu())
            yield pieces[-1]
        told.gaps.append(gap)
        told.made = said.made
        told.parts.append((reader.normal_form(sentence), said.tokens, said.durations, torch.cat(pieces, 1)))


def _noted(pieces: Iterator[Tensor], kept: list[tuple[float, Tensor]], clock: Callable[[], float]) -> Iterator[Tensor]:
    """The same pieces, each kept with the time at which it was there."""
    for piece in pieces:
        kept.append((clock(), piece))
        yield piece
