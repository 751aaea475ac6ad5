"""Mutants, each with the checks that must notice it: so that no check of attention is empty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from genmodels.nn.attention import Attention, Position, TransformerXL
from genmodels.verification.attention import check
from genmodels.verification.check import Report
from tests.mutants import attention_core as softmaxes
from tests.mutants import attention_mechanisms as mechanisms
from tests.mutants import attention_positions as positions

DIM, HEADS = 8, 2


@dataclass(frozen=True)
class AttentionMutant:
    """A broken module, what it says of itself, and exactly those checks that must fail; none for a sound one.

    Arguments:
        make: makes the module.
        failing: names of the checks.
        capabilities, space, reach: as in `check`.
        longer: makes the module with another longest length.
    """

    make: Callable[[], nn.Module]
    failing: frozenset[str]
    capabilities: tuple[str, ...] = ()
    space: tuple[int, int] | None = None
    reach: tuple[int | None, int | None] = (None, None)
    longer: Callable[[], nn.Module] | None = None

    def run(self, **options) -> Report:
        """The result of every check; it is compiled where that is the error."""
        options.setdefault("compiler", "eager" if "compiled" in self.failing else None)
        return check(self.make(), DIM, capabilities=self.capabilities, space=self.space, reach=self.reach,
                     fresh=self.longer, **options)  # fmt: skip


def _core(
    position: Callable[..., Position],
    *checks: str,
    claimed: tuple[str, ...] = ("relative",),
    space: tuple[int, int] | None = None,
    kind: type[Attention] = Attention,
    **options,
) -> AttentionMutant:
    """An error in a position scheme of the core, by the explicit path."""

    def make(**longest) -> nn.Module:
        return kind(DIM, HEADS, position(DIM, HEADS, **longest), backend="explicit", **options)

    longer = (lambda: make(max_len=64)) if "longest length" in checks else None
    return AttentionMutant(make, frozenset(checks), claimed, space, longer=longer)


def _own(kind: Callable[..., nn.Module], *checks: str, claimed: tuple[str, ...] = (), reach=(None, None), **options):
    """An error in a module of its own."""
    return AttentionMutant(lambda: kind(DIM, HEADS, **options), frozenset(checks), claimed, reach=reach)


_PAST = ("relative", "causal", "cache")
_MAP = ("relative", "2d", "resampled")

#: Sound modules (nothing may fail), then one mutant after the other.
MUTANTS: dict[str, AttentionMutant] = {
    "nothing (distances)": _core(positions.Encoded),
    "nothing (explicit)": _own(softmaxes.Explicit, claimed=("unordered", "full", "derivatives")),
    "nothing (explicit, causal window)": _own(
        softmaxes.Explicit, claimed=("causal", "full", "derivatives"), causal=True, left=2, reach=(2, 0)
    ),
    "nothing (dropout on weights)": _own(softmaxes.DroppedWeights, claimed=("unordered", "full")),
    "nothing (layer of dropout)": _own(softmaxes.DropoutLayer, claimed=("unordered", "full")),
    "nothing (dropout by another name)": _own(softmaxes.OtherDropout, claimed=("unordered", "full")),
    "nothing (batch statistics)": _own(softmaxes.Normalised),
    "nothing (segment means)": _own(mechanisms.SegmentMeans),
    "nothing (predicted centre)": _own(mechanisms.PredictedCentre),
    "nothing (windows)": _own(mechanisms.OwnWindows, claimed=("derivatives",), c=4, reach=(2, 1)),
    "+d and -d share a row": _core(positions.SharedSign, "double loop", "sign"),
    "table cut from the middle": _core(positions.CentredTable, "double loop", "distance zero", "longest length"),
    "absolute index called distance": _core(positions.AbsoluteKey, "double loop", "distance zero", "shift"),
    "shift for causal models in both directions": _core(
        positions.CausalShift, "double loop", "padded = alone", "shift"
    ),
    "positions where there are said to be none": _core(TransformerXL, "permutation", claimed=("unordered",)),
    "fused where second derivatives are said to exist": AttentionMutant(
        lambda: Attention(DIM, HEADS, backend="sdpa"), frozenset({"second derivatives"}), ("derivatives",)
    ),
    "detached positions": _core(positions.DetachedPosition, "gradients"),
    "shift keeps as many columns as queries": _core(positions.KeptColumns, "cache", claimed=_PAST, causal=True),
    "shift left out": _core(
        positions.ShiftLeftOut, "double loop", "padded = alone", "distance zero", "cache", claimed=_PAST, causal=True
    ),
    "query not moved on with the cache": _core(
        TransformerXL, "cache", claimed=_PAST, causal=True, kind=positions.UnmovedQuery
    ),
    "clipped one too early": _core(lambda d, h: positions.ClippedEarly(d, h, K=2), "double loop"),
    "skew without a mask": _core(
        lambda d, h: positions.UnmaskedSkew(d, h, max_len=16),
        "double loop", "causality", "padded = alone", "shift", "cache", claimed=_PAST,
    ),
    "row stride of a map": _core(
        lambda d, h: positions.RowStride(d, h, size=(2, 3)), "double loop", "resolution", claimed=_MAP, space=(2, 3)
    ),
    "height and width exchanged": _core(
        lambda d, h: positions.SwappedSides(d, h, size=(2, 3)),
        "double loop", "shift", "resolution", claimed=_MAP, space=(2, 3),
    ),
    "not renormalised": AttentionMutant(
        lambda: softmaxes.Unnormalised(DIM, HEADS, window=(3, 3), backend="explicit"),
        frozenset({"double loop", "paths", "row sums"}),
    ),
    "zeros counted in the softmax": _own(softmaxes.ZerosCounted, "padded = alone"),
    "mask ignored": _own(softmaxes.IgnoredMask, "padding", "padded = alone", "empty rows"),
    "filled with the lowest number": _own(softmaxes.LowestFill, "empty rows", claimed=("full",)),
    "filled with minus infinity": _own(softmaxes.InfiniteFill, "empty rows", claimed=("full",)),
    "padding weighted with zero": _own(softmaxes.PoisonedPadding, "padding"),
    "numbers as a mask": _own(softmaxes.NumericMask, "boolean masks"),
    "scaled by the batch": _own(softmaxes.BatchScale, "batch = single", "padded = alone"),
    "output in half precision": _own(softmaxes.HalfOutput, "bfloat16"),
    "softmax in half precision": AttentionMutant(
        lambda: softmaxes.HalfSoftmax(DIM, HEADS, backend="explicit"), frozenset({"bfloat16"}), ("unordered",)
    ),
    "graph break": _own(softmaxes.GraphBreak, "compiled"),
    "one key of the future": _own(softmaxes.SeesTheFuture, "causality", claimed=("causal",)),
    "window one too short": _own(softmaxes.WindowOff, "locality", left=2, causal=True, reach=(2, 0)),
    "window one too long": _own(softmaxes.WindowWide, "locality", left=2, reach=(2, 0)),
    "table of all pairs in the state": _own(softmaxes.PairTable, "state"),
    "longest length fatal": _own(softmaxes.LongestLength, "any length"),
    "buffer of the last length": _own(softmaxes.LengthBuffer, "state"),
    "mask ignored in training": _own(softmaxes.UnmaskedInTraining, "training mode"),
    "detached in training": _own(softmaxes.DetachedInTraining, "training mode"),
    "queries and keys of a mask exchanged": _own(softmaxes.TransposedMask, "masks of pairs", claimed=("full",)),
    "only rows without a key are masked": _own(softmaxes.EmptyRowsAlone, "masks of pairs", claimed=("full",)),
    "a mask taken for a length": _own(softmaxes.LengthForMask, "padding"),
    "padding cleared in place": _own(softmaxes.PaddingInPlace, "state"),
    "past spoiled by its continuation": _core(
        TransformerXL, "cache", claimed=_PAST, causal=True, kind=positions.SpoiledPast
    ),
    "dropout on the output": _own(softmaxes.DroppedOutput, "dropout"),
    "padding counted in the means": _own(mechanisms.PaddedMeans, "padded = alone"),
    "length a multiple of the landmarks": _own(mechanisms.MultipleOfLandmarks, "any length"),
    "neighbours in padding": _own(mechanisms.IgnoredNeighbours, "double loop", "padded = alone", c=3),
    "even window rounded the other way": _own(mechanisms.EvenMiddle, "double loop", c=4),
    "hidden layers of heads mixed": _own(mechanisms.MixedHeads, "double loop", c=3),
    "two ways that differ at the ends": _own(mechanisms.TwoWays, "double loop", "padded = alone", c=3),
    "place never moved on": _own(mechanisms.StandingStill, "double loop", claimed=("unnormalised",)),
    "Gaussian at whole numbers": _own(mechanisms.WholePlaces, "double loop", claimed=("unnormalised",)),
    "step without tanh": _own(mechanisms.WithoutTanh, "double loop", claimed=("unnormalised",)),
    "one place for the batch": _own(mechanisms.OnePlace, "batch = single", "padded = alone", claimed=("unnormalised",)),
    "length a multiple of two chunks": _own(mechanisms.MultipleOfChunks, "any length", claimed=("piecewise",), chunk=2),
    "fewer buckets than said": _own(mechanisms.FewerBuckets, "double loop", claimed=("piecewise",), buckets=4, chunk=8),
    "padding in the buckets": _own(
        mechanisms.HashedPadding, "double loop", "padded = alone", "row sums", claimed=("piecewise",), buckets=2,
        chunk=8,
    ),
    "one centre for the batch": _own(mechanisms.OneCentre, "batch = single", "padded = alone"),
}
