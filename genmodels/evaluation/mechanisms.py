"""Every attention of the package, with what it says of itself: one table that all laws run over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from genmodels.evaluation.attention import check
from genmodels.evaluation.findings import Findings, applied
from genmodels.evaluation.laws import FAILED, Report, table
from genmodels.nn.attention import (
    LSH,
    ALiBi,
    Attention,
    HardAttention,
    LocalDenseSynthesizer,
    LocalMonotonic,
    Location,
    MelPosition,
    MusicTransformer,
    Nystrom,
    Position,
    Rotary,
    Rotary2d,
    ScaledDot,
    Score,
    ScoredAttention,
    Shaw,
    Swin2d,
    T5Bias,
    TransformerXL,
)

Reach = tuple[int | None, int | None]


@dataclass(frozen=True)
class Mechanism:
    """An attention to be judged.

    Arguments:
        make: `make(dim, heads) -> module`.
        capabilities: what it says of itself.
        space: the maps it is tried on.
        reach: keys before and after a query that it may depend on.
    """

    make: Callable[[int, int], nn.Module]
    capabilities: tuple[str, ...]
    space: tuple[int, int] | None = None
    reach: Reach = (None, None)

    def judge(self, name: str, **options) -> Report:
        """The verdict of every law; the module has 8 channels and 2 heads."""
        return check(
            self.make(8, 2), 8, capabilities=self.capabilities, space=self.space, reach=self.reach, name=name,
            **options,
        )  # fmt: skip


def _core(
    position: Callable[[int, int], Position] | None,
    *said: str,
    space: tuple[int, int] | None = None,
    reach: Reach = (None, None),
    **options,
) -> Mechanism:
    """The core with a position; fused kernels have no second derivatives, so it is told that there will be some."""

    def make(dim: int, heads: int) -> nn.Module:
        chosen = None if position is None else position(dim, heads)
        return Attention(dim, heads, chosen, derivatives=2, **options)

    return Mechanism(make, (*said, "full", "derivatives"), space, reach)


def _scored(
    score: Callable[[int, int], Score] | None, *said: str, kind: type[ScoredAttention] = ScoredAttention
) -> Mechanism:
    """A score function, of a sequence to itself."""
    return Mechanism(lambda dim, heads: kind(dim, heads, score and score(dim, heads)), (*said, "full"))


def _mel(time: Callable[[int, int], Position]) -> Callable[[int, int], Position]:
    return lambda dim, heads: MelPosition(dim, heads, n_freq=2, time=time(dim, heads))


#: Name to mechanism.
MECHANISMS: dict[str, Mechanism] = {
    "content alone": _core(None, "unordered"),
    "content alone, causal": _core(None, "causal", "cache", causal=True),
    "content alone, window": _core(None, window=(2, 1), reach=(2, 1)),
    "Transformer-XL": _core(TransformerXL, "relative"),
    "Transformer-XL, causal": _core(TransformerXL, "relative", "causal", "cache", causal=True),
    "Transformer-XL, window": _core(
        TransformerXL, "relative", "causal", "cache", window=(2, 0), reach=(2, 0)
    ),
    "Shaw, clip": _core(lambda dim, heads: Shaw(dim, heads, K=2), "relative"),
    "Shaw, zero": _core(lambda dim, heads: Shaw(dim, heads, K=2, outside="zero", shared=True), "relative"),
    "Shaw, causal": _core(lambda dim, heads: Shaw(dim, heads, K=2), "relative", "causal", "cache", causal=True),
    "Music Transformer": _core(
        lambda dim, heads: MusicTransformer(dim, heads, max_len=8), "relative", "causal", "cache"
    ),
    "T5": _core(lambda dim, heads: T5Bias(dim, heads, buckets=8, max_distance=6), "relative"),
    "T5, causal": _core(
        lambda dim, heads: T5Bias(dim, heads, buckets=4, max_distance=6, bidirectional=False),
        "relative", "causal", "cache", causal=True,
    ),
    "ALiBi": _core(ALiBi, "relative", "symmetric"),
    "ALiBi, causal": _core(ALiBi, "relative", "causal", "cache", causal=True),
    "RoPE": _core(Rotary, "relative"),
    "RoPE, half": _core(lambda dim, heads: Rotary(dim, heads, layout="half"), "relative"),
    "RoPE, causal": _core(Rotary, "relative", "causal", "cache", causal=True),
    "Swin": _core(lambda dim, heads: Swin2d(dim, heads, size=(2, 3)), "relative", "2d", "resampled", space=(2, 3)),
    "axial RoPE": _core(Rotary2d, "relative", "2d", space=(2, 3)),
    "mel, RoPE": _core(_mel(Rotary), "relative", "2d", "rows", space=(2, 3)),
    "mel, Transformer-XL": _core(_mel(TransformerXL), "relative", "2d", "rows", space=(2, 3)),
    "additive": _scored(None, "unordered", "derivatives"),
    "location": _scored(lambda dim, heads: Location(dim, heads, channels=3, kernel=5), "derivatives"),
    "scaled dot": _scored(ScaledDot, "unordered", "derivatives"),
    "hard": _scored(None, "piecewise", kind=HardAttention),
    "local dense": Mechanism(
        lambda dim, heads: LocalDenseSynthesizer(dim, heads, c=3), ("relative", "derivatives"), reach=(1, 1)
    ),
    "local dense, even": Mechanism(
        lambda dim, heads: LocalDenseSynthesizer(dim, heads, c=4, boundary="zero"),
        ("relative", "derivatives", "unnormalised"), reach=(2, 1),
    ),
    "local monotonic": Mechanism(LocalMonotonic, ("unnormalised",)),
    "local monotonic, softmax": Mechanism(
        lambda dim, heads: LocalMonotonic(dim, heads, sigma=1.5, max_step=2.0, score="softmax"), ("unnormalised",)
    ),
    "Nystrom": Mechanism(lambda dim, heads: Nystrom(dim, heads, landmarks=3), ("derivatives", "unnormalised")),
    "Nystrom, exact": Mechanism(
        lambda dim, heads: Nystrom(dim, heads, landmarks=3, iterations=None), ("unnormalised",)
    ),
    "LSH, rotation": Mechanism(
        lambda dim, heads: LSH(dim, heads, buckets=4, chunk=3, rounds=2), ("piecewise",)
    ),
    "LSH, sign": Mechanism(
        lambda dim, heads: LSH(dim, heads, buckets=2, chunk=4, rounds=2, hash="sign"), ("piecewise",)
    ),
}  # fmt: skip


class Survey(Findings):
    """What was found of many mechanisms: a line for each, the laws that are broken in full."""

    def text(self, verbose: bool = False) -> str:
        """The verdict table; every law of every mechanism where that is asked for."""
        if verbose:
            return "\n\n".join(str(report) for report in self.wholes)
        rows = []
        for report in self.wholes:
            judged = [verdict for verdict in report.verdicts if verdict.error is not None]
            near = max((v for v in judged if v.tolerance > 0), key=lambda v: v.error / v.tolerance)
            verdict = f"{FAILED}: {', '.join(report.broken)}" if report.broken else f"{len(judged)} laws hold"
            rows.append([report.subject, verdict, f"{near.law} {near.error:.0e} of {near.tolerance:g}"])
        parts = [table(rows, ("mechanism", "verdict", "closest to its tolerance"))]
        parts += [applied(report, only_failures=True) for report in self.wholes if not report.passed]
        return "\n\n".join(parts)
