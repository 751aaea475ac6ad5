"""Any folder of images: resized, cropped, with classes from its sub-folders."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from genmodels.data.base import SPLITS, DataModule, check_choice, check_fractions, data_root, split_rows
from genmodels.data.image_files import SUFFIXES, FileData, find_problems, image_files, in_threads, try_decode
from genmodels.data.loading import BatchDataset, TensorData
from genmodels.data.spec import DataSpec
from genmodels.errors import InputError

_SPLIT_FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_MEMORY = 512 * 2**20  # bytes up to which decoded images are held in memory
_NAMED = 10  # how many bad files an error names


class ImageFolder(DataModule):
    """All images below a folder as (channels, size, size), 256 levels.

    If every image lies in a sub-folder and there are at least two of them, the sub-folders of the first level are the
    classes. If the sub-folders of the first level are train, val (valid, validation) and test, they are the splits, and
    classes lie one level deeper; a missing val or test is held out of train.

    Arguments:
        root: the folder.
        size: height and width of the images: the shorter side is resized to it, the longer one cropped at both ends.
        channels: 3 for colour, 1 for grey.
        val_fraction, test_fraction: share of the images held out for validation and test.
        skip_bad: leave out images that cannot be used (with a warning) instead of stopping.
        cache: "memory" decodes once and holds all images, "none" decodes in the workers at every epoch, "auto" is
            "memory" up to 512 MB.
        flip: mirror training images at random.
        batch_size, num_workers, seed: see `DataModule`.

    Errors: `InputError` for a missing or empty folder, and for images that are broken, empty, animated or of no known
    range, which are all found before training.
    """

    name = "image_folder"

    def __init__(
        self,
        *,
        root: str,
        size: int = 32,
        channels: Literal[1, 3] = 3,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        skip_bad: bool = False,
        cache: Literal["auto", "memory", "none"] = "auto",
        flip: bool = True,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
    ):
        super().__init__(batch_size=batch_size, num_workers=num_workers, seed=seed)
        if size < 1:
            raise InputError(f"data.size must be at least 1, got {size}")
        check_choice("channels", channels, (1, 3))
        check_choice("cache", cache, ("auto", "memory", "none"))
        check_fractions(val_fraction, test_fraction)
        self.root, self.size, self.channels = Path(data_root(root)), size, channels
        self.fractions = (1 - val_fraction - test_fraction, val_fraction, test_fraction)
        self.skip_bad, self.cache, self.flip = skip_bad, cache, flip

    def load(self):
        """Find all images and those that cannot be used, then split the rest."""
        files, images, bad = self._examine()
        if bad and not self.skip_bad:
            raise InputError(
                f"{len(bad)} of {len(files)} images in {self.root} cannot be used: {_listed(bad)}; "
                "repair or remove them, or set data.skip_bad=true to leave them out"
            )
        if bad:
            warnings.warn(f"left out {len(bad)} of {len(files)} images in {self.root}: {_listed(bad)}", stacklevel=2)
        files = [name for name in files if name not in bad]
        if not files:
            raise InputError(f"none of the images in {self.root} can be used")
        parts, classes, labels = _arrange(files)
        splits: dict[str, BatchDataset] = {}
        for split, rows in _split(parts, labels, len(files), self.fractions, self.seed).items():
            if images is not None:
                splits[split] = TensorData(images, labels, rows)
            else:
                chosen = [files[row] for row in rows.tolist()]
                splits[split] = FileData(
                    self.root, chosen, None if labels is None else labels[rows], self.size, self.channels
                )
        name = self.root.resolve().name or self.name
        shape = (self.channels, self.size, self.size)
        return DataSpec(name, shape, 256, len(classes) or None, classes), splits

    def problems(self) -> list[str]:
        """Every image that cannot be used, by name; else what the base class finds."""
        try:
            bad = self._examine()[2]
        except InputError as error:
            return [str(error)]
        return [f"{self.root / name}: {reason}" for name, reason in bad.items()] or super().problems()

    def _examine(self) -> tuple[list[str], Tensor | None, dict[str, str]]:
        """All files, the usable images where they are held in memory, and the others with the reason."""
        if not self.root.is_dir():
            what = "is not a folder" if self.root.exists() else "does not exist"
            raise InputError(f"data.root={self.root} {what}: give a folder of images")
        files = image_files(self.root)
        if not files:
            raise InputError(f"no images below data.root={self.root} (looked for {' '.join(sorted(SUFFIXES))})")
        small = len(files) * self.channels * self.size**2 <= _MEMORY
        if self.cache == "none" or (self.cache == "auto" and not small):
            return files, None, find_problems(self.root, files, self.size, self.channels)
        results = in_threads(lambda name: try_decode(self.root / name, self.size, self.channels), files)
        bad = {name: result for name, result in zip(files, results, strict=True) if isinstance(result, str)}
        images = [result for result in results if not isinstance(result, str)]
        return files, torch.stack(images) if images else None, bad


def _listed(bad: dict[str, str]) -> str:
    shown = [f"{name!r} ({reason})" for name, reason in list(bad.items())[:_NAMED]]
    return ", ".join(shown) + (f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else "")


def _arrange(files: Sequence[str]) -> tuple[list[str] | None, tuple[str, ...], Tensor | None]:
    """The split of each file (None: not given by folders), class names and labels."""
    parts = [Path(name).parts for name in files]
    tops = {part[0] for part in parts if len(part) > 1}
    given = "train" in tops and len(tops) > 1 and tops <= set(_SPLIT_FOLDERS) and all(len(part) > 1 for part in parts)
    splits = [_SPLIT_FOLDERS[part[0]] for part in parts] if given else None
    folders = [part[given:-1] for part in parts]
    names = sorted({folder[0] for folder in folders if folder})
    if len(names) < 2 or not all(folders):
        return splits, (), None
    return splits, tuple(names), torch.tensor([names.index(folder[0]) for folder in folders])


def _split(
    given: list[str] | None, labels: Tensor | None, size: int, fractions: tuple[float, float, float], seed: int
) -> dict[str, Tensor]:
    """Rows of each split: those given by folders, the others held out of train."""
    if given is None:
        return dict(zip(SPLITS, split_rows(labels, size, fractions, seed), strict=True))
    rows = {split: torch.tensor([i for i, g in enumerate(given) if g == split], dtype=torch.int64) for split in SPLITS}
    missing = [0.0 if len(rows[split]) else fraction for split, fraction in zip(SPLITS, fractions, strict=True)]
    train = rows["train"]
    held = split_rows(None if labels is None else labels[train], len(train), (0.0, missing[1], missing[2]), seed)
    rows["train"] = train[held[0]]
    for split, part in zip(SPLITS[1:], held[1:], strict=True):
        rows[split] = rows[split] if len(rows[split]) else train[part]
    return rows
