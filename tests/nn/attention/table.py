"""One table of attentions that every law runs over: each position scheme, on the maps and lengths it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from genmodels.nn.attention import (
    ALiBi,
    Attention,
    MelPosition,
    MusicTransformer,
    Rotary,
    Rotary2d,
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
