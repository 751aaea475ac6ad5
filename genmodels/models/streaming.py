"""A text spoken by a model piece by piece: what `sample` gives, cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genmodels.errors import InputError
from genmodels.models.base import GenerativeModel
from genmodels.models.glow_tts import GlowTTS
from genmodels.random import FrameKeyedGenerator
from genmodels.speech.streaming import reach, stream_latent


class StreamedText(NamedTuple):
    """A text on its way: tokens and their frames, which are known at once, and the pieces `(n_mels, chunk)` of its mel.

    A piece is computed when it is asked for; `made` says how, as of `Samples`.
    """

    tokens: list[int]
    durations: list[int]
    pieces: Iterator[Tensor]
    made: dict


def check_streams(model: GenerativeModel) -> None:
    """Raise an InputError for a model whose mels are not made piece by piece."""
    if not isinstance(model, GlowTTS):
        raise InputError(f"stream: a {model.family} has no mel to give before it is whole; model=glow_tts has")


@torch.no_grad()
def stream_text(
    model: GlowTTS,
    text: str,
    cond: int | str | None = None,
    temperature: float = 0.667,
    seed: int = 0,
    *,
    take: int = 0,
    speed: float = 1.0,
    seconds: float | None = None,
    durations: list[int] | None = None,
    weights: str | float = "ema",
    on_unknown: Literal["error", "drop"] = "error",
    chunk: int = 64,
) -> StreamedText:
    """One text by `model.sample` with the same options, its mel in pieces.

    Arguments:
        model: one whose decoder looks a bounded number of frames far.
        take: which of the text's samples.
        durations: frames of its tokens.
        chunk: frames of a piece; the last one may be shorter.

    Raises:
        InputError: for a model that cannot be streamed, a chunk below 1, and what `sample` refuses.

    Example:
        >>> from genmodels.data.spec import DataSpec
        >>> from genmodels.speech.text import CHARACTERS
        >>> text = {"symbols": list(CHARACTERS), "blanks": True, "language": "en", "examples": ["hello"]}
        >>> spec = DataSpec("speech", (4, 40), mel={"hop": 256, "sample_rate": 22050},
        ...                 statistics={"mean": -5.0, "std": 2.0}, text=text)
        >>> model = GlowTTS(spec, encoder={"channels": 8, "depth": 1, "hidden": 8}, steps=1, hidden=8, depth=1).eval()
        >>> found = stream_text(model, "hello", durations=[2] * 11, chunk=8)
        >>> [piece.shape[1] for piece in found.pieces]
        [8, 8, 6]
    """
    check_streams(model)
    if chunk < 1:
        raise InputError(f"chunk is a number of frames, at least 1, got {chunk}")
    asked = model.asked(1, take, text, cond, on_unknown)
    frames, given = model.frames_of(seconds, asked, None if durations is None else [durations])
    noise, said, core = FrameKeyedGenerator(seed, asked.rows, "sample"), asked.said, model.weights(weights)
    voice = core.voice(said)
    with model.speakable(said, seconds):
        reach(core.tts.decoder)
        drawn = core.tts.latent(said.tokens, None, voice, generator=noise, temperature=temperature,
                                speed=asked.speed(speed), frames=frames, durations=given)
    pieces = (model.units.inverse(piece) for piece in stream_latent(core.tts, drawn, voice, chunk=chunk))
    made = {"sampler": "inverse", "temperature": temperature}
    return StreamedText(said.tokens[0].tolist(), drawn.durations[0].tolist(), pieces, made)
