"""Written text as a model's condition: by the symbols that its checkpoint carries, with speakers by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genmodels.data.spec import DataSpec, TextCondition
from genmodels.data.utterances import padded_tokens
from genmodels.errors import InputError
from genmodels.random import seed_of
from genmodels.speech.pace import factors_of, without_marks
from genmodels.speech.phonemes import in_form
from genmodels.speech.text import Symbols

_WORD = 2**32 - 1  # indices of keyed noise lie below


def noise_rows(said: TextCondition, takes: Sequence[int]) -> Tensor:
    """Indices (B,) of keyed noise for texts: they depend on a text and on which of its takes it is, on nothing else.

    Example:
        >>> said = TextCondition(torch.tensor([[2, 3, 0], [2, 3, 4]]), torch.tensor([[[1, 1, 0]], [[1, 1, 1]]]).bool())
        >>> rows = noise_rows(said, [0, 0])
        >>> bool(rows[0] != rows[1]), bool(noise_rows(said, [1, 0])[0] != rows[0])
        (True, True)
    """
    each = zip(said.tokens, said.mask[:, 0], takes, strict=True)
    return torch.tensor([seed_of(tokens[valid].tolist(), take) % _WORD for tokens, valid, take in each])


def given_durations(said: TextCondition, durations: Sequence[Sequence[int]], which: Sequence[int]) -> Tensor:
    """Frames (B, N) of every token, as a user has listed them for each text; `which` text an item is.

    Raises:
        InputError: for lists of another length than the text, or with anything but whole numbers from 1 on.
    """
    found = torch.zeros_like(said.tokens)
    for row, valid, k in zip(found, said.mask[:, 0], which, strict=True):
        own, tokens = durations[k % len(durations)], int(valid.sum())
        if len(own) != tokens:
            raise InputError(f"durations: text {k} has {tokens} tokens and needs as many numbers of frames, got "
                             f"{len(own)}")
        wrong = next((i for i, d in enumerate(own) if not (isinstance(d, int) and d >= 1)), None)
        if wrong is not None:
            raise InputError(f"durations: token {wrong} of text {k} lasts {own[wrong]!r} frames; it needs a whole "
                             "number from 1 on")
        row[:tokens] = torch.tensor(own)
    return found


class TextReader:
    """The way from text to tokens that a model was trained with.

    Arguments:
        spec: the data the model was built for.
        on_unknown: `error` for characters without a symbol, or `drop` them.

    Errors: InputError for text that is empty or has unknown symbols, and for a speaker that nobody knows.

    Example:
        >>> from genmodels.speech.text import CHARACTERS
        >>> spec = DataSpec("speech", (80, 9), mel={}, text={"symbols": CHARACTERS, "blanks": False, "language": "en"})
        >>> TextReader(spec)(["A cab"]).tokens
        tensor([[ 2, 28,  4,  2,  3]])
    """

    def __init__(self, spec: DataSpec, on_unknown: Literal["error", "drop"] = "error"):
        if spec.text is None:
            raise InputError(f"a model of {spec.name} was trained without texts: leave text out")
        self.spec, self.language = spec, spec.text["language"]
        self.form = spec.text.get("form", "characters")  # checkpoints of before have no other
        self.symbols = Symbols(tuple(spec.text["symbols"]), spec.text["blanks"], on_unknown)

    def normal_form(self, text: str) -> str:
        """The text as the model is told it, for people to read, without marks."""
        try:
            found = in_form(without_marks(text), self.form, self.language)
        except ValueError as error:
            raise InputError(str(error)) from error
        if self.symbols.on_unknown == "drop":
            unknown = self.symbols.unknown(found)
            found = " ".join("".join(c for c in found if c not in unknown).split())
        return found

    def tokens(self, text: str) -> list[int]:
        """The numbers of a text's symbols."""
        try:
            return self.symbols.encode(self.normal_form(text))
        except InputError:
            raise
        except ValueError as error:
            raise InputError(str(error)) from error

    def pace(self, texts: Sequence[str]) -> Tensor | None:
        """By how much longer each token is to last, (B, N), as marks `[slow]...[/slow]` say; None where there are none.

        A blank goes with the symbol behind it.
        """
        try:
            rows = [factors_of(text, self.normal_form) for text in texts]
        except InputError:
            raise
        except ValueError as error:
            raise InputError(str(error)) from error
        if all(factor == 1 for row in rows for factor in row):
            return None
        if self.symbols.blanks:
            rows = [[*(factor for factor in row for _ in (0, 1)), row[-1]] for row in rows]
        found = torch.ones(len(rows), max(map(len, rows)))
        for line, row in zip(found, rows, strict=True):
            line[: len(row)] = torch.tensor(row)
        return found

    def __call__(self, texts: Sequence[str], speaker: int | str | None = None) -> TextCondition:
        """The condition of these texts, all by one speaker."""
        tokens, mask = padded_tokens([self.tokens(text) for text in texts])
        number = self.speaker(speaker)
        return TextCondition(tokens, mask, None if number is None else torch.full((len(texts),), number))

    def speaker(self, wanted: int | str | None) -> int | None:
        """The number of a speaker, the first where nobody says; None for a model without speakers."""
        names = list(self.spec.speakers)
        if not names:
            if wanted is not None:
                raise InputError(f"this model has one voice: leave cond={wanted} out")
            return None
        if wanted is None:
            return 0
        if isinstance(wanted, str) and wanted in names:
            return names.index(wanted)
        if isinstance(wanted, int) and 0 <= wanted < len(names):
            return wanted
        raise InputError(f"cond={wanted!r} is no speaker of this model: there are {', '.join(names)}")


class Asked(NamedTuple):
    """Texts that a model is to speak, one for each sample.

    Attributes:
        said: tokens and speakers.
        index: numbers of the samples, (n,).
        rows: what their noise is keyed by, (n,); see `noise_rows`.
        which: the text that each sample is of.
        pace: by how much longer each token is to last, (n, N), as the texts say; None where they say nothing.
    """

    said: TextCondition
    index: Tensor
    rows: Tensor
    which: list[int]
    pace: Tensor | None = None

    def to(self, device: torch.device | str) -> Asked:
        """The same on a device."""
        return Asked(self.said.to(device), self.index.to(device), self.rows.to(device), self.which,
                     None if self.pace is None else self.pace.to(device))

    def speed(self, speed: float) -> float | Tensor:
        """A speed for all, and where texts say so another one for each token, (n, N)."""
        return speed if self.pace is None else speed / self.pace

    def durations(self, listed: Sequence[Sequence[int]] | None) -> Tensor | None:
        """Frames (n, N) of every token as a user has listed them for each text; None for None."""
        return None if listed is None else given_durations(self.said, listed, self.which)


def ask(
    spec: DataSpec, n: int, *, start: int = 0, text: str | Sequence[str] | None = None,
    speaker: int | str | None = None, on_unknown: Literal["error", "drop"] = "error",
) -> Asked:  # fmt: skip
    """The texts of samples `start` .. `start + n - 1`, taken in turn; those that the data came with, if none are given.

    Raises:
        ValueError: for n below 1.
        InputError: for texts that cannot be spoken, and where there are none.

    Example:
        >>> from genmodels.speech.text import CHARACTERS
        >>> text = {"symbols": CHARACTERS, "blanks": False, "language": "en", "examples": ["a cab"]}
        >>> found = ask(DataSpec("speech", (80, 9), mel={}, text=text), 3, start=1, text=["so", "ha"])
        >>> found.index, found.which, bool(found.rows[0] == found.rows[2])
        (tensor([1, 2, 3]), [1, 0, 1], False)
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    texts = [text] if isinstance(text, str) else list(text or spec.text["examples"])
    if not texts:
        raise InputError("this checkpoint carries no examples: give text=")
    numbers = range(start, start + n)
    which = [k % len(texts) for k in numbers]
    reader, spoken = TextReader(spec, on_unknown), [texts[k] for k in which]
    said = reader(spoken, speaker)
    rows = noise_rows(said, [k // len(texts) for k in numbers])
    return Asked(said, torch.tensor(numbers), rows, which, reader.pace(spoken))
