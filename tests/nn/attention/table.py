"""One table of attentions that every check runs over: each position scheme, on the maps and lengths it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from genmodels.nn.attention import (
    LSH,
    Additive,
    ALiBi,
    Attention,
    HardAttention,
    LocalDenseSynthesizer,
    LocalMonotonic,
    Location,
    MelPosition,
    MusicTransformer,
    Nystrom,
    Rotary,
    Rotary2d,
    ScaledDot,
    ScoredAttention,
    Shaw,
    Swin2d,
    T5Bias,
    TransformerXL,
)

DIM, HEADS = 8, 2


@dataclass(frozen=True)
class Case:
    """A position scheme, its capabilities by the names of the kit; for maps, the space it is tried on."""

    name: str
    position: Callable | None
    claims: str = "relative"
    space: tuple[int, int] | None = None

    def plain(self, dim: int, heads: int, **options) -> Attention:
        """An attention as it is built."""
        return Attention(dim, heads, self.position and self.position(dim, heads), **options)

    def build(self, *, seed: int = 0, dtype=torch.float64, replaced: Callable | None = None, cross=False, **options):
        """An attention with every parameter random (also those that begin at zero)."""
        torch.manual_seed(seed)
        position = None if self.position is None else (replaced or self.position)(DIM, HEADS)
        if cross and position is not None:
            position.cross = True
        return randomised(Attention(DIM, HEADS, position, **options), seed).to(dtype)

    @property
    def length(self) -> int:
        return 6 if self.space is None else self.space[0] * self.space[1]


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = values.to(parameter.dtype) * 0.5
    return module.eval()


def mel(time=None, **options):
    return lambda D, H: MelPosition(D, H, n_freq=2, time=time and time(D, H, **options))


CASES = [
    Case("none", None, "unordered"),
    Case("xl", TransformerXL),
    Case("shaw clip", lambda D, H: Shaw(D, H, K=2)),
    Case("shaw zero", lambda D, H: Shaw(D, H, K=2, outside="zero", shared=True)),
    Case("shaw keys", lambda D, H: Shaw(D, H, K=2, values=False)),
    Case("music", lambda D, H: MusicTransformer(D, H, max_len=16), "relative causal cache"),
    Case("music shared", lambda D, H: MusicTransformer(D, H, max_len=4, shared=True), "relative causal cache"),
    Case("music short", lambda D, H: MusicTransformer(D, H, max_len=3), "relative causal cache"),
    Case("t5", lambda D, H: T5Bias(D, H, buckets=8, max_distance=6)),
    Case("t5 one way", lambda D, H: T5Bias(D, H, buckets=4, max_distance=6, bidirectional=False)),
    Case("alibi", ALiBi, "relative symmetric"),
    Case("alibi one way", lambda D, H: ALiBi(D, H, symmetric=False)),
    Case("rotary", Rotary),
    Case("rotary half", lambda D, H: Rotary(D, H, layout="half")),
    Case("swin", lambda D, H: Swin2d(D, H, size=(2, 3)), "relative 2d resampled", (2, 3)),
    Case("swin resampled", lambda D, H: Swin2d(D, H, size=(3, 2)), "relative 2d resampled", (2, 4)),
    Case("rotary 2d", Rotary2d, "relative 2d", (2, 3)),
    Case("mel", mel(), "relative 2d rows symmetric", (2, 3)),
    Case("mel xl", mel(TransformerXL), "relative 2d rows", (2, 3)),
    Case("mel shaw", mel(Shaw, K=1), "relative 2d rows", (2, 3)),
    Case("mel alibi", mel(ALiBi), "relative 2d rows symmetric", (2, 3)),
    Case("mel rotary", mel(Rotary), "relative 2d rows", (2, 3)),
]
BY_NAME = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Mechanism:
    """A mechanism outside the core.

    claims: its capabilities by the names of the kit; cross: takes a memory; pairs: takes full masks; carries: can go on
    step by step along a memory; reach: neighbours before and after.
    """

    name: str
    make: Callable
    claims: str = ""
    cross: bool = True
    pairs: bool = False
    carries: bool = False
    reach: tuple[int | None, int | None] = (None, None)

    def build(self, *, seed: int = 0, dtype=torch.float64, replaced: Callable | None = None, **options):
        """A module with every parameter random; `replaced` stands in for its class."""
        torch.manual_seed(seed)
        return randomised(self.make(replaced, **options), seed).to(dtype)


def scored(score, default=ScoredAttention):
    return lambda kind, **options: (kind or default)(DIM, HEADS, score(), **options)


def module(default, **fixed):
    return lambda kind, **options: (kind or default)(DIM, HEADS, **fixed | options)


STEPS = {"pairs": True, "carries": True}
MECHANISMS = [
    Mechanism("additive", scored(lambda: Additive(DIM, HEADS, hidden=3)), "unordered", **STEPS),
    Mechanism("location", scored(lambda: Location(DIM, HEADS, channels=2, kernel=3)), **STEPS),
    Mechanism("location previous", scored(lambda: Location(DIM, HEADS, channels=2, kernel=3, cumulative=False)),
              **STEPS),
    Mechanism("scaled dot", scored(lambda: ScaledDot(DIM, HEADS)), "unordered", **STEPS),
    Mechanism("hard", scored(lambda: Additive(DIM, HEADS), HardAttention), "unordered piecewise", **STEPS),
    Mechanism("local dense", module(LocalDenseSynthesizer, c=3), "relative", cross=False, reach=(1, 1)),
    Mechanism("local dense alone", module(LocalDenseSynthesizer, c=1), cross=False, reach=(0, 0)),
    Mechanism("local dense pair", module(LocalDenseSynthesizer, c=2), "relative", cross=False, reach=(1, 0)),
    Mechanism("local dense even", module(LocalDenseSynthesizer, c=4), "relative", cross=False, reach=(2, 1)),
    Mechanism("local dense zero", module(LocalDenseSynthesizer, c=4, boundary="zero"), "relative unnormalised",
              cross=False, reach=(2, 1)),
    Mechanism("local dense wide", module(LocalDenseSynthesizer, c=9), "relative", cross=False, reach=(4, 4)),
    Mechanism("monotonic", module(LocalMonotonic, sigma=1.0), "unnormalised", carries=True),
    Mechanism("monotonic bounded", module(LocalMonotonic, sigma=0.7, max_step=1.5, score="softmax"), "unnormalised",
              carries=True),
    Mechanism("nystrom", module(Nystrom, landmarks=3), "unnormalised"),
    Mechanism("nystrom exact", module(Nystrom, landmarks=3, iterations=None), "unnormalised"),
    Mechanism("nystrom full", module(Nystrom, landmarks=16, iterations=None), "unordered"),
    Mechanism("lsh rotation", module(LSH, buckets=4, chunk=2, rounds=2), "piecewise", cross=False),
    Mechanism("lsh sign", module(LSH, buckets=4, chunk=3, rounds=3, hash="sign"), "piecewise", cross=False),
    Mechanism("lsh one bucket", module(LSH, buckets=1, chunk=16, rounds=2), "unordered", cross=False),
]  # fmt: skip
MECHANISM = {mechanism.name: mechanism for mechanism in MECHANISMS}

REACHES = [{}, {"causal": True}, {"window": (2, 1)}, {"window": (1, None)}, {"chunk": (2, 1)},
           {"chunk": (3, None), "causal": True}]  # fmt: skip
DOUBLE = torch.float64


def draw(*shape, seed=1, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def worst(a, b):
    return float((a - b).detach().abs().max())


def kinds(case):
    """The paths that exist for a case."""
    position = None if case.position is None else case.position(8, 2)
    return ["explicit"] if position is not None and position.adds_values else ["sdpa", "explicit"]


def lengths(mask):
    """Padding (B, 1, L) from a list of lists of 0 and 1."""
    return torch.tensor(mask, dtype=torch.bool)[:, None]


#: Of six positions: all, the first three, and some here and there.
PADDING = lengths([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 1]])
