"""Text as bytes: a file cut into sequences of equal length, for models of integers."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, as_input_errors, counted, none_or_at_least
from genmodels.core.files import write_whole
from genmodels.data.base import SPLITS, DataModule, data_root, split_fractions
from genmodels.data.loading import TensorData
from genmodels.speech.text import in_form


def to_text(x: Tensor) -> str:
    """The text of bytes (1, L); invalid UTF-8, as at the ends of a sequence, becomes the replacement character.

    Example:
        >>> to_text(to_bytes("to be"))
        'to be'
    """
    return bytes(x.flatten().tolist()).decode("utf-8", errors="replace")


def to_bytes(text: str) -> Tensor:
    """The bytes (1, L) of a text in UTF-8.

    Example:
        >>> to_bytes("to be")
        tensor([[116, 111,  32,  98, 101]], dtype=torch.uint8)
    """
    return torch.from_numpy(np.frombuffer(text.encode("utf-8"), dtype=np.uint8).copy())[None]


class TextFile(DataModule):
    """The bytes of a text file, uint8 (1, length) with 256 levels: its beginning for training, its end held out.

    The splits follow one another in the file, without a byte in common: train, val, test. Held-out sequences do not
    overlap; those of training begin every `stride` bytes. Bytes that fill no sequence at the end of a split are left
    out.

    Arguments:
        file: a text in UTF-8.
        length: bytes of a sequence.
        stride: bytes from the beginning of one training sequence to that of the next; None for `length`.
        spoken: read each line in the normal form of speech (lower case, numbers in words) without those that have no
            letter, for language models of recognisers.
        val_fraction, test_fraction: shares of the file.
        batch_size, num_workers, seed: see `DataModule`; the splits do not depend on `seed`.

    Errors: InputError for a file that cannot be read, or too short for a sequence in every split.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        ...     _ = file.write("to be or not to be " * 10), file.flush()
        ...     data = TextFile(file=file.name, length=8).prepare()
        >>> [len(data.split(name)) for name in ("train", "val", "test")]
        [19, 2, 2]
        >>> data.spec.event_shape, to_text(data.split("train").__getitems__([1]).x[0])
        ((1, 8), ' not to ')
    """

    name = "text"

    def __init__(
        self,
        *,
        file: str,
        length: int = 256,
        stride: int | None = None,
        spoken: bool = False,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        batch_size: int = 32,
        **shared,
    ):
        super().__init__(batch_size=batch_size, **shared)
        none_or_at_least(1, **{"data.length": length, "data.stride": stride})
        self.file, self.length, self.stride, self.spoken = Path(data_root(file)), length, stride or length, spoken
        self.fractions = split_fractions(val_fraction, test_fraction)
        self._foreign: str | None = None

    def load(self):
        """Read the file and cut it."""
        try:
            read = np.fromfile(self.file, dtype=np.uint8)
        except OSError as error:
            raise InputError(f"data.file={self.file} cannot be read ({error.strerror}): name a text file") from None
        try:
            read.tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            self._foreign = f"data.file={self.file} is not UTF-8 (byte {error.start})"
            if self.spoken:
                raise InputError(f"{self._foreign}: convert it, for example with iconv") from None
        read = read[3:] if read[:3].tobytes() == codecs.BOM_UTF8 else read
        if self.spoken:
            read = np.frombuffer(self._normal(read.tobytes()), dtype=np.uint8).copy()
        held_out = [round(fraction * len(read)) for fraction in self.fractions[1:]]
        sizes = [len(read) - sum(held_out), *held_out]
        least = min(size for size, fraction in zip(sizes, self.fractions, strict=True) if fraction)
        if least < self.length:
            raise InputError(f"data.file={self.file} has {len(read):,} bytes, its smallest split {least:,}: too few "
                             f"for sequences of data.length={self.length}; lower it, or give a longer text")
        splits = {}
        for name, part in zip(SPLITS, torch.from_numpy(read).split(sizes), strict=True):
            step = self.stride if name == "train" else self.length
            x = part.unfold(0, self.length, step) if len(part) >= self.length else part[:0].view(0, self.length)
            splits[name] = TensorData(x[:, None])
        encoding = "ascii" if read.max() < 128 else "utf-8"
        fingerprint = f"{len(read):,} bytes, {hashlib.sha256(read).hexdigest()[:12]}"
        return DataSpec("text", (1, self.length), levels=256, encoding=encoding, fingerprint=fingerprint), splits

    def notes(self) -> list[str]:
        """Whether the bytes are no text."""
        foreign = [] if self._foreign is None else [f"{self._foreign}: its bytes are modelled as they are"]
        return foreign + super().notes()

    def _normal(self, read: bytes) -> bytes:
        lines = re.split(r"\r\n?|\n", read.decode("utf-8"))  # `splitlines` also cuts at U+2028 within a text
        with as_input_errors():
            normal = [in_form(line, "characters", "en") for line in lines if any(c.isalpha() for c in line)]
        return "".join(f"{line}\n" for line in normal).encode()


def spans_of(folder: Path) -> dict[Path, range]:
    """The numbers of the texts that the records in a folder are of."""
    found = {file: re.fullmatch(r"made_(\d+)-(\d+)", file.stem) for file in folder.glob("made_*.json")}
    return {file: range(int(name[1]), int(name[2]) + 1) for file, name in found.items() if name}


def write_texts(samples, target: Path) -> list[str]:
    """Samples of text in one .txt, headed by their numbers, or in one .txt each; how they were made in a .json."""
    texts, span = [to_text(x) for x in samples.x], f"{int(samples.index[0])}-{int(samples.index[-1])}"
    if target.suffix:
        headed = [f"--- {number} ---\n{text}\n" for number, text in zip(samples.index.tolist(), texts, strict=True)]
        files, about = {target: "\n".join(headed)}, target.with_suffix(".json")
    else:
        files = {target / f"{k:06d}.txt": text for k, text in zip(samples.index.tolist(), texts, strict=True)}
        about = target / f"made_{span}.json"
        for record, numbers in spans_of(target).items():
            if numbers and int(samples.index[0]) <= numbers[0] and numbers[-1] <= int(samples.index[-1]):
                record.unlink()  # its texts are replaced
    for path, text in files.items():
        write_whole(path, lambda file, text=text: file.write(text.encode("utf-8")))
    made = samples.made | {"index": span}
    write_whole(about, lambda file: json.dump(made, file, indent=1), mode="w")
    return [f"{counted(len(texts), 'sample')} of text: {target} (how they were made: {about.name})"]
