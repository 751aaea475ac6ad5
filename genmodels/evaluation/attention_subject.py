"""An attention module made ready for its laws: copied, in float64, with parameters that hide nothing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

#: What a module may say of itself; each names laws that are then judged.
CAPABILITIES = {
    "relative": "positions enter as distances: a shift of everything changes nothing, past and future differ",
    "symmetric": "past and future at the same distance are alike",
    "unordered": "no positions at all: a permutation of the input permutes the output",
    "causal": "nothing depends on what comes later",
    "cache": "module(x, cache=...) goes on where the last call ended; module.empty_cache(x) begins",
    "2d": "the positions are those of a map, row by row; module(x, mask, space=(height, width))",
    "full": "the mask may say for each query which keys it may attend to, (L, L)",
    "derivatives": "the output can be differentiated twice, and in forward mode",
    "rows": "the rows of maps are absolute, the columns relative",
    "resampled": "the positions of a map are resampled for its size",
    "unnormalised": "weights need not be positive, nor sum to one",
    "piecewise": "buckets or a maximum decide: finite differences and rounding may cross a border",
}

DOUBLE = torch.float64


@dataclass
class AttentionSubject:
    """A module under judgement, and how it is called.

    Arguments:
        module: the module, in float64 and evaluation mode.
        dim: width D of its inputs.
        capabilities: what it says of itself, names of `CAPABILITIES`.
        space: height and width of the maps it is tried on; None for sequences.
        reach: keys before and after a query that it may depend on, None = unbounded.
        reference: `reference(module, x, mask, space) -> y` by other means, slow and plain.
        fresh: makes the module again with another longest length, if it has one.
        compiler: backend of torch.compile, None for none.
        seed: seed of everything drawn.
    """

    module: nn.Module
    dim: int
    capabilities: frozenset[str]
    space: tuple[int, int] | None = None
    reach: tuple[int | None, int | None] = (None, None)
    reference: Callable[..., Tensor] | None = None
    fresh: Callable[[], nn.Module] | None = None
    compiler: str | None = "eager"
    seed: int = 0
    _taken: dict[int, bool] = field(default_factory=dict)

    @cached_property
    def length(self) -> int:
        """The number of positions on which most laws are tried: the first of a few that the module takes."""
        if self.space is not None:
            return self.space[0] * self.space[1]
        return next((n for n in (7, 8, 12, 16, 32, 64) if self.takes(n)), 7)

    @torch.no_grad()
    def takes(self, length: int) -> bool:
        """Whether the module takes sequences of that length at all, which is the business of one law alone."""
        if self.space is None and length not in self._taken:
            try:
                self._taken[length] = self.run(self.draw(1, length)) is not None
            except Exception:
                self._taken[length] = False
        return self.space is not None or self._taken[length]

    def draw(self, batch: int = 2, length: int | None = None, name: int = 0) -> Tensor:
        """Random input `(batch, length, D)`."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + name)
        length = self.length if length is None else length
        return torch.randn(batch, length, self.dim, generator=generator, dtype=DOUBLE)

    def sizes(self) -> list:
        """Lengths or maps, short, odd, prime and long."""
        if self.space is None:
            return [1, 2, 3, 5, 11, 64, 700]
        maps = [(1, 1), (1, 5), (3, 2), (4, 7), (13, 11)]
        return [(self.space[0], width) for _, width in maps] if self.says("rows") else maps

    def run(self, x: Tensor, mask: Tensor | None = None, *, module: nn.Module | None = None, space=None, **more):
        """The output y alone."""
        result = self.full_result(x, mask, module=module, space=space, **more)
        return result[0] if isinstance(result, tuple) else result

    def full_result(self, x: Tensor, mask: Tensor | None = None, *, module=None, space=None, **more):
        """Whatever a call returns; masks and maps are passed under the names that the module's forward has for them."""
        module = self.module if module is None else module
        given = {} if mask is None else {"mask": mask}
        if self.space is not None:
            given["space"] = self.space if space is None else space
        names = inspect.signature(module.forward).parameters
        if mask is not None and "mask" not in names:
            return module(x, given.pop("mask"), **given, **more)
        return module(x, **given, **more)

    def masks(self, lengths: Iterable[int]) -> Tensor:
        """Padding `(B, 1, L)`: the first positions of each sequence; of a map, the first columns of each row."""
        counts = torch.tensor(list(lengths))[:, None]
        if self.space is None:
            return (torch.arange(self.length) < counts)[:, None]
        return (torch.arange(self.length) % self.space[1] < counts)[:, None]

    def crop(self, x: Tensor, length: int) -> tuple[Tensor, tuple[int, int] | None]:
        """One example without what `masks` hides of it, and its space."""
        if self.space is None:
            return x[:, :length], None
        height, width = self.space
        return x.unflatten(1, (height, width))[:, :, :length].flatten(1, 2), (height, length)

    def lengths(self) -> list[int]:
        """Unequal lengths for a batch of three; of those that it takes alone, where there are any."""
        full = self.length if self.space is None else self.space[1]
        shorter = [n for n in (full // 2, full // 4, 1) if n and self.takes(n)] or [max(full // 2, 1)]
        return [full, shorter[0], shorter[-1]]

    def says(self, name: str) -> bool:
        """Whether the module claims a capability."""
        return name in self.capabilities


def prepare(module: nn.Module, seed: int, randomise: bool) -> nn.Module:
    """A copy in float64 and evaluation mode; parameters random, also those that begin at zero."""
    module = copy.deepcopy(module).cpu().double().eval()
    if randomise:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=DOUBLE) * 0.5)
    return module


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors; infinite where one is not finite."""
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).detach().abs().nan_to_num(float("inf")).max()) if a.numel() else 0.0
