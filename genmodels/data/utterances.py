"""Batches of mels of different lengths: padded, masked, and grouped by length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from genmodels.core.data import Batch, TextCondition
from genmodels.core.errors import InputError
from genmodels.core.random import seed_of
from genmodels.data.clips import Recording
from genmodels.data.loading import ResumableBatchSampler, one_process
from genmodels.speech.audio import FLOOR

_MEMORY = 512 * 2**20  # bytes of mels up to which a split is held in memory
#: Batches are padded to a multiple of so many frames and tokens, because convolutions on the CPU are prepared for every
#: new length: with few lengths a step of Glow-TTS took 0.7 s instead of 2.3 s.
_FRAMES, _TOKENS = 64, 16
_PERTURBATION = 0.1  # relative width of the random perturbation of lengths before sorting


@dataclass(frozen=True)
class Utterance:
    """One item: a recording and its condition.

    Attributes:
        name: its name in messages.
        recording: the sound.
        tokens: its text as numbers, empty without text.
        text: the text in normal form.
        speaker, label: numbers, or None.
        split: given by its layout, or None.
    """

    name: str
    recording: Recording
    tokens: tuple[int, ...] = ()
    text: str = ""
    speaker: int | None = None
    label: int | None = None
    split: str | None = None


class Utterances(Dataset):
    """A split of mels.

    Arguments:
        items: the utterances.
        multiple: lengths are rounded up to a multiple of this by frames of silence, which count as data.
        length: frames of every batch; None for the longest item's, rounded up to a multiple of 64.

    Shapes: a batch has `x (B, n_mels, T)` and `mask (B, 1, T)`; `cond` is a `TextCondition`, or labels `(B,)`, or None.
    """

    #: Largest number of items in a batch for initialisation.
    most_at_once = 64

    def __init__(self, items: Sequence[Utterance], multiple: int = 1, length: int | None = None):
        self.items, self.multiple, self.length = list(items), multiple, length
        bands = self.items[0].recording.mel().shape[0] if self.items else 0
        size = 4 * bands * sum(item.recording.frames for item in self.items)
        self._held = [item.recording.mel() for item in self.items] if size <= _MEMORY else None

    def __len__(self) -> int:
        return len(self.items)

    def frames(self) -> Tensor:
        """(N,) lengths, rounded up to `multiple`."""
        frames = torch.tensor([item.recording.frames for item in self.items], dtype=torch.int64)
        return -(-frames // self.multiple) * self.multiple

    def __getitems__(self, positions: Sequence[int] | Tensor) -> Batch:
        index = torch.as_tensor(positions, dtype=torch.int64)
        chosen = index.tolist()
        items = [self.items[k] for k in chosen]
        mels = [self.items[k].recording.mel() if self._held is None else self._held[k] for k in chosen]
        lengths = torch.tensor([-(-mel.shape[1] // self.multiple) * self.multiple for mel in mels])
        x, mask = padded_mels(mels, lengths, self.length)
        return Batch(x, _condition(items), mask, index)


def _condition(items: list[Utterance]) -> TextCondition | Tensor | None:
    if items[0].label is not None:
        return torch.tensor([item.label for item in items])
    if not items[0].tokens:
        return None
    return text_condition([item.tokens for item in items], [item.speaker for item in items])


def _width(longest: int) -> int:
    """The padded length of a batch, from that of its longest item."""
    return -(-longest // _FRAMES) * _FRAMES


def default_multiple(layout: str | None) -> int:
    """The number of which lengths of `data=speech` are multiples, in frames: more for mels with classes, for U-Nets."""
    return 8 if layout == "folder" else 2


def multiple_of(data: dict) -> int | None:
    """The number of which all lengths are multiples, from the configuration of data; None for a user's own class.

    Example:
        >>> multiple_of({"_target_": "genmodels.data.speech.Speech"}), multiple_of({"_target_": "mine.Data"})
        (2, None)
    """
    ours = str(data.get("_target_", "")).startswith("genmodels.")
    return data.get("multiple") or (default_multiple(data.get("layout")) if ours else None)


def padded_mels(mels: Sequence[Tensor], lengths: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Mels (n_mels, .) as one tensor (B, n_mels, T), padded with silence, and its mask (B, 1, T).

    Arguments:
        mels: each at most as long as its length; missing frames are silence that counts as data.
        lengths: (B,) frames of each.
        width: T; None for the longest, rounded up to a multiple of 64.

    Example:
        >>> x, mask = padded_mels([torch.ones(2, 3), torch.ones(2, 5)], torch.tensor([4, 6]), width=8)
        >>> x.shape, mask.sum(-1).flatten()
        (torch.Size([2, 2, 8]), tensor([4, 6]))
    """
    width = width or _width(int(lengths.max()))
    x = torch.full((len(mels), mels[0].shape[0], width), FLOOR)
    for row, mel in zip(x, mels, strict=True):
        row[:, : mel.shape[1]] = mel
    return x, (torch.arange(width) < lengths[:, None])[:, None]


def text_condition(texts: Sequence[Sequence[int]], speakers: Sequence[int | None]) -> TextCondition:
    """Texts, padded to a multiple of 16 tokens, with their speakers if they have any."""
    tokens, mask = padded_tokens(texts)
    room = (0, -tokens.shape[1] % _TOKENS)
    return TextCondition(pad(tokens, room), pad(mask, room), None if speakers[0] is None else torch.tensor(speakers))


def padded_tokens(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Texts as one tensor (B, N), padded with zeros, and its mask (B, 1, N).

    Example:
        >>> padded_tokens([(5, 6), (7,)])
        (tensor([[5, 6],
                [7, 0]]), tensor([[[ True,  True]],
        <BLANKLINE>
                [[ True, False]]]))
    """
    longest = max(map(len, texts))
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])
    return tokens, (torch.arange(longest) < lengths[:, None])[:, None]


def joined(parts: Sequence[Tensor | TextCondition | None]) -> Tensor | TextCondition | None:
    """Several batches concatenated; shorter ones are padded, mels with silence, everything else with zeros.

    Example:
        >>> joined([torch.zeros(1, 2, 3), torch.ones(2, 2, 5)]).shape, joined([None, None])
        (torch.Size([3, 2, 5]), None)
    """
    if parts[0] is None:
        return None
    if isinstance(parts[0], TextCondition):
        return TextCondition(*(joined([getattr(p, name) for p in parts]) for name in ("tokens", "mask", "speaker")))
    parts = [part.cpu() for part in parts]
    if parts[0].dim() == 1 or len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(parts)
    longest = max(part.shape[-1] for part in parts)
    fill = FLOOR if parts[0].is_floating_point() else 0
    return torch.cat([pad(part, (0, longest - part.shape[-1]), value=fill) for part in parts])


class BucketedBatchSampler(ResumableBatchSampler):
    """Batches of items of similar length, each item once per epoch: a pure function of (order_seed, epoch).

    The lengths are perturbed by up to 5 %, sorted, divided into batches, and the batches shuffled. With `max_frames`
    only ties are randomised, so that a batch never has more frames than that, including padding. Several processes
    share each batch; items that cannot be shared evenly are left out of that epoch.

    Arguments:
        frames: (N,) length of every item.
        batch_size: largest number of items per batch, over all processes together.
        max_frames: largest number of frames per batch; None for no limit.
        order_seed, processes: see `ResumableBatchSampler`.
        width: frames of every item in a batch where they are the same; None for those of its longest item.

    Errors: InputError if an item is longer than `max_frames`.

    Example:
        >>> sampler = BucketedBatchSampler(torch.tensor([5, 90, 6, 100]), 2)
        >>> sorted(sorted(positions.tolist()) for _, positions in sampler)
        [[0, 2], [1, 3]]
    """

    def __init__(
        self, frames: Tensor, batch_size: int, max_frames: int | None = None, order_seed: int = 0,
        processes: Callable[[], tuple[int, int]] = one_process, width: int | None = None,
    ):
        super().__init__(len(frames), batch_size, order_seed, processes)
        self.frames, self.max_frames, self.width = frames.double(), max_frames, width
        if max_frames is not None and (longest := self._width(int(frames.max()))) > max_frames:
            raise InputError(f"data.max_frames={max_frames} is less than the {longest} frames of a batch of the "
                             "longest item: raise it, or leave long items out by data.max_seconds")
        self.cuts = self._cuts()

    def _width(self, longest: int) -> int:
        return _width(longest) if self.width is None else self.width

    def _cuts(self) -> list[int]:
        """Sizes of the batches, from the shortest items to the longest."""
        if self.max_frames is None:
            whole, rest = divmod(self.size, self.batch_size)
            return [self.batch_size] * whole + [rest] * bool(rest)
        sizes, count = [], 0
        for length in self.frames.sort().values.tolist():
            if count == self.batch_size or (count + 1) * self._width(int(length)) > self.max_frames:
                sizes.append(count)
                count = 0
            count += 1
        return [*sizes, count]

    def __len__(self) -> int:
        return len(self.cuts)

    def batches(self, epoch: int) -> list[Tensor]:
        """The positions of every batch of an epoch."""
        generator = torch.Generator().manual_seed(seed_of(self.order_seed, "order", epoch))
        ties = torch.randperm(self.size, generator=generator)
        perturbed = self.frames
        if self.max_frames is None:
            perturbed = perturbed * (1 + _PERTURBATION * (torch.rand(self.size, generator=generator) - 0.5))
        order = ties[perturbed[ties].argsort(stable=True)]
        batches = order.split(self.cuts)
        return [batches[k] for k in torch.randperm(len(batches), generator=generator).tolist()]

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        epoch, first = self.begin()
        rank, world = self.processes()
        for positions in self.batches(epoch)[first:]:
            shared = positions[: len(positions) - len(positions) % world]
            if len(shared) == 0:
                raise InputError(f"a batch of {len(positions)} items cannot be shared by {world} processes: set "
                                 "data.batch_size so that the last batch is larger, or data.max_frames higher")
            yield epoch, shared[rank::world]


def characters(batch: Batch) -> tuple[Tensor, Tensor]:
    """The texts of a batch as classes `(B, N)`, 0 beyond their ends, and their lengths `(B,)`.

    Padding and blanks of the table of symbols are left out: class k is symbol k + 1, and class 0 is the blank of CTC.

    Example:
        >>> from genmodels.core.data import TextCondition
        >>> said = TextCondition(torch.tensor([[1, 5, 1, 3, 1], [1, 7, 1, 0, 0]]), torch.ones(2, 1, 5).bool())
        >>> characters(Batch(torch.zeros(2, 1, 1), said))
        (tensor([[4, 2],
                [6, 0]]), tensor([2, 1]))
    """
    tokens = batch.cond.tokens
    said = (tokens > 1) & batch.cond.mask[:, 0]
    counts = said.sum(1)
    order = (~said).long().argsort(dim=1, stable=True)[:, : int(counts.max())]
    beyond = torch.arange(order.shape[1], device=tokens.device) >= counts[:, None]
    return (tokens.gather(1, order) - 1).masked_fill(beyond, 0), counts
