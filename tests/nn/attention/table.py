"""One table of attentions that every check runs over: each position scheme, on the maps and lengths it is for."""

from __future__ import annotations

import copy
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
    """A position scheme; for maps, the space it is tried on."""

    name: str
    position: Callable | None
    space: tuple[int, int] | None = None

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
    Case("none", None),
    Case("xl", TransformerXL),
    Case("shaw clip", lambda D, H: Shaw(D, H, K=2)),
    Case("shaw zero", lambda D, H: Shaw(D, H, K=2, outside="zero", shared=True)),
    Case("shaw keys", lambda D, H: Shaw(D, H, K=2, values=False)),
    Case("music", lambda D, H: MusicTransformer(D, H, max_len=16)),
    Case("music shared", lambda D, H: MusicTransformer(D, H, max_len=4, shared=True)),
    Case("music short", lambda D, H: MusicTransformer(D, H, max_len=3)),
    Case("t5", lambda D, H: T5Bias(D, H, buckets=8, max_distance=6)),
    Case("t5 one way", lambda D, H: T5Bias(D, H, buckets=4, max_distance=6, bidirectional=False)),
    Case("alibi", ALiBi),
    Case("alibi one way", lambda D, H: ALiBi(D, H, symmetric=False)),
    Case("rotary", Rotary),
    Case("rotary half", lambda D, H: Rotary(D, H, layout="half")),
    Case("swin", lambda D, H: Swin2d(D, H, size=(2, 3)), (2, 3)),
    Case("swin resampled", lambda D, H: Swin2d(D, H, size=(3, 2)), (2, 4)),
    Case("rotary 2d", Rotary2d, (2, 3)),
    Case("mel", mel(), (2, 3)),
    Case("mel xl", mel(TransformerXL), (2, 3)),
    Case("mel shaw", mel(Shaw, K=1), (2, 3)),
    Case("mel alibi", mel(ALiBi), (2, 3)),
    Case("mel rotary", mel(Rotary), (2, 3)),
]
BY_NAME = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Mechanism:
    """A mechanism outside the core.

    cross: takes a memory; pairs: takes full masks; carries: can go on step by step along a memory; sums: the weights of
    a query sum to 1; equivariant: to permutations.
    """

    name: str
    make: Callable
    cross: bool = True
    pairs: bool = False
    carries: bool = False
    sums: bool = True
    equivariant: bool = False

    def build(self, *, seed: int = 0, dtype=torch.float64, replaced: Callable | None = None, **options):
        """A module with every parameter random; `replaced` stands in for its class."""
        torch.manual_seed(seed)
        return randomised(self.make(replaced, **options), seed).to(dtype)


def scored(score, default=ScoredAttention):
    return lambda kind, **options: (kind or default)(DIM, HEADS, score(), **options)


def module(default, **fixed):
    return lambda kind, **options: (kind or default)(DIM, HEADS, **fixed | options)


STEPS = {"pairs": True, "carries": True}
LONE = {"cross": False}
ROUGH = {"sums": False}  # weights that only approach those of a mean
MECHANISMS = [
    Mechanism("additive", scored(lambda: Additive(DIM, HEADS, hidden=3)), equivariant=True, **STEPS),
    Mechanism("location", scored(lambda: Location(DIM, HEADS, channels=2, kernel=3)), **STEPS),
    Mechanism("location previous", scored(lambda: Location(DIM, HEADS, channels=2, kernel=3, cumulative=False)),
              **STEPS),
    Mechanism("scaled dot", scored(lambda: ScaledDot(DIM, HEADS)), equivariant=True, **STEPS),
    Mechanism("hard", scored(lambda: Additive(DIM, HEADS), HardAttention), equivariant=True, **STEPS),
    Mechanism("local dense", module(LocalDenseSynthesizer, c=3), **LONE),
    Mechanism("local dense even", module(LocalDenseSynthesizer, c=4), **LONE),
    Mechanism("local dense zero", module(LocalDenseSynthesizer, c=4, boundary="zero"), sums=False, **LONE),
    Mechanism("local dense wide", module(LocalDenseSynthesizer, c=9), **LONE),
    Mechanism("monotonic", module(LocalMonotonic, sigma=1.0), carries=True, **ROUGH),
    Mechanism("monotonic bounded", module(LocalMonotonic, sigma=0.7, max_step=1.5, score="softmax"), carries=True,
              **ROUGH),
    Mechanism("nystrom", module(Nystrom, landmarks=3), **ROUGH),
    Mechanism("nystrom exact", module(Nystrom, landmarks=3, iterations=None), **ROUGH),
    Mechanism("nystrom full", module(Nystrom, landmarks=16, iterations=None), equivariant=True),
    Mechanism("lsh rotation", module(LSH, buckets=4, chunk=2, rounds=2), **LONE),
    Mechanism("lsh sign", module(LSH, buckets=4, chunk=3, rounds=3, hash="sign"), **LONE),
    Mechanism("lsh one bucket", module(LSH, buckets=1, chunk=16, rounds=2), equivariant=True, **LONE),
]  # fmt: skip
MECHANISM = {mechanism.name: mechanism for mechanism in MECHANISMS}

REACHES = [{}, {"causal": True}, {"window": (2, 1)}, {"window": (1, None)}, {"chunk": (2, 1)},
           {"chunk": (3, None), "causal": True}]  # fmt: skip
DOUBLE = torch.float64


def draw(*shape, seed=1, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def worst(a, b):
    return float((a - b).detach().abs().max())


def half_error(attention, x, **given):
    """Error under autocast, over the change that parameters and inputs rounded to bfloat16 make in single precision.

    No computation in half precision can do much better than 1, whatever the condition of the module.
    """
    rounded = copy.deepcopy(attention)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
        whole, inevitable = attention(x, **given)[0], rounded(x.bfloat16().float(), **given)[0]
        with torch.autocast("cpu", torch.bfloat16):
            y, a = attention(x, **given)[0], attention.weights(x, **given)
    assert y.dtype == x.dtype and a.dtype == torch.float32
    return worst(y, whole) / worst(inevitable, whole)


def kinds(case):
    """The paths that exist for a case."""
    position = None if case.position is None else case.position(8, 2)
    return ["explicit"] if position is not None and position.adds_values else ["sdpa", "explicit"]


def lengths(mask):
    """Padding (B, 1, L) from a list of lists of 0 and 1."""
    return torch.tensor(mask, dtype=torch.bool)[:, None]


#: Of six positions: all, the first three, and some here and there.
PADDING = lengths([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 1]])
