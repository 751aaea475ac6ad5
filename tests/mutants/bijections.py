"""Mutants, each with the checks that must notice it: so that no check of bijections is empty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from genmodels.flows.bijection import Bijection
from genmodels.verification.bijections import check_bijection
from genmodels.verification.check import Report
from tests.mutants import bijections_couplings as couplings
from tests.mutants import bijections_layers as layers


@dataclass(frozen=True)
class Mutant:
    """A broken layer and the checks that fail with it.

    Arguments:
        make: makes the layer.
        shape: event shape on which it is checked.
        failing: names of exactly those checks that must fail; empty for a sound layer.
        cond: number of features of the condition, 0 for none.
        starts_as_identity: whether it says that it starts as the identity.
    """

    make: Callable[[], Bijection]
    shape: tuple[int, ...]
    failing: frozenset[str] = field(default=frozenset())
    cond: int = 0
    starts_as_identity: bool = False

    def run(self, **options) -> Report:
        """The result of every check; it is compiled where that is the error."""
        options.setdefault("compiler", "eager" if "compiled" in self.failing else None)
        cond = torch.arange(3.0 * self.cond).reshape(3, -1) / 4 if self.cond else None
        return check_bijection(
            self.make(), self.shape, cond=cond, starts_as_identity=self.starts_as_identity, **options
        )


def _mutant(
    make: Callable[[], Bijection], shape: tuple[int, ...], *failing: str, cond: int = 0, identity: bool = False
) -> Mutant:
    return Mutant(make, shape, frozenset(failing), cond, identity)


_BOTH = ("log-det forward", "log-det inverse")
_IMAGE, _SEQUENCE, _VECTOR, _PLANE = (3, 4, 4), (3, 8), (4,), (2,)

#: Sound layers (nothing may fail), then one mutant after the other.
MUTANTS: dict[str, Mutant] = {
    "nothing (images)": _mutant(lambda: layers.Stretch(3), _IMAGE, identity=True),
    "nothing (sequences)": _mutant(couplings.Neighbours, _SEQUENCE),
    "nothing (plane)": _mutant(lambda: layers.Stretch(2), _PLANE),
    "nothing (coupling)": _mutant(couplings.Couple, _VECTOR),
    "nothing (conditional coupling)": _mutant(lambda: couplings.Couple(cond=2), _VECTOR, cond=2),
    "nothing (spline)": _mutant(couplings.Bend, _VECTOR),
    "nothing (condition at a kink)": _mutant(lambda: couplings.KinkedCondition(cond=2), _VECTOR, cond=2),
    "nothing (inverse kept while evaluating)": _mutant(lambda: layers.KeptInverse(3), _IMAGE),
    "sign of the inverse's log-det": _mutant(
        lambda: layers.FlippedSign(3), _IMAGE, "log-det inverse", "log-dets cancel"
    ),
    "sign of both log-dets": _mutant(lambda: layers.FlippedSigns(3), _IMAGE, *_BOTH),
    "log-det without H W": _mutant(lambda: layers.MissingPositions(3), _IMAGE, *_BOTH),
    "log-det with T for the valid length": _mutant(
        lambda: layers.FullLength(3), _SEQUENCE, "masked log-det", "masked gradients"
    ),
    "scalar log-det": _mutant(lambda: layers.ScalarLogDet(3), _IMAGE, "shapes and dtypes"),
    "log-det off by 1e-4": _mutant(lambda: layers.Offset(3), _IMAGE, *_BOTH),
    "factor 2 in the log-det": _mutant(lambda: layers.TwiceTheVolume(2), _PLANE, *_BOTH, "integrates to one"),
    "log-det summed in float16": _mutant(lambda: layers.HalfPrecisionSum(3, start=3.0), _IMAGE, "float32"),
    "shift before scaling in one direction": _mutant(lambda: layers.ShiftFirst(3), _IMAGE, "round trip"),
    "input changed in place": _mutant(lambda: layers.InPlace(3), _IMAGE, "nothing modified"),
    "padding cleared in place": _mutant(lambda: layers.ClearedInPlace(3), _SEQUENCE, "nothing modified"),
    "mask changed in place": _mutant(lambda: layers.MaskInPlace(3), _SEQUENCE, "nothing modified"),
    "input clamped in place": _mutant(lambda: layers.ClampedInput(0.5), _IMAGE, "nothing modified"),
    "cached inverse survives a load": _mutant(lambda: layers.StaleInverse(3), _IMAGE, "save and load"),
    "flag not a buffer": _mutant(lambda: layers.PlainFlag(3), _IMAGE, "save and load"),
    "initialised from padding": _mutant(lambda: layers.UnmaskedStart(3), _SEQUENCE, "masked start"),
    "dead parameter": _mutant(lambda: layers.DeadParameter(3), _IMAGE, "dead parameters"),
    "graph break": _mutant(lambda: layers.GraphBreak(3), _IMAGE, "compiled"),
    "running statistics": _mutant(lambda: layers.RunningMean(3), _IMAGE, "nothing modified"),
    "clamp at 8": _mutant(lambda: layers.ClampedFarOut(3), _IMAGE, "round trip"),
    "fold at 10": _mutant(lambda: layers.FoldedFarOut(3), _IMAGE, "round trip"),
    "log-det wrong beyond 6": _mutant(lambda: layers.WrongFarOut(3), _IMAGE, *_BOTH),
    "log-det doubled in training": _mutant(lambda: layers.TwiceInTraining(3), _IMAGE, "training mode"),
    "noise in training": _mutant(lambda: layers.NoisyInTraining(3), _IMAGE, "training mode"),
    "log-det detached in training": _mutant(lambda: layers.DetachedInTraining(3), _IMAGE, "training mode"),
    "log-det detached under a mask": _mutant(lambda: layers.DetachedUnderMasks(3), _SEQUENCE, "masked gradients"),
    "batch mean in training": _mutant(lambda: layers.CentredInTraining(3), _IMAGE, "training mode"),
    "nothing (dropout in the network)": _mutant(couplings.Dropped, _VECTOR),
    "batch statistics": _mutant(couplings.BatchStatistics, _VECTOR, "rows independent"),
    "condition dropped in the inverse": _mutant(
        lambda: couplings.ConditionDropped(cond=2), _VECTOR, "round trip", "log-dets cancel", "condition", cond=2
    ),
    "network sees what it changes": _mutant(
        couplings.WrongMask, _VECTOR, "round trip", "log-dets cancel", "log-det forward"
    ),
    "spline evaluated before the clamp": _mutant(couplings.Unclamped, _VECTOR, "extreme inputs"),
    "gradient cut off": _mutant(couplings.ForgottenGradient, _VECTOR, "gradients"),
    "no gradient by the condition": _mutant(lambda: couplings.DetachedCondition(cond=2), _VECTOR, "gradients", cond=2),
    "no gradient by the parameters on the way back": _mutant(couplings.DetachedInverse, _VECTOR, "gradients"),
    "scale rounded to bfloat16": _mutant(couplings.RoundedScale, _VECTOR, "gradients"),
    "nothing (plain scale)": _mutant(couplings.Plain, _VECTOR),
    "sign of a plain scale lost on the way back": _mutant(couplings.SignLost, _VECTOR, "round trip"),
    "log-det of another floor than the scale's": _mutant(couplings.FlooredDeterminant, _VECTOR, *_BOTH),
    "kept part rounded": _mutant(couplings.PerhapsChanged, _VECTOR, "kept part"),
    "log-det said to be constant": _mutant(couplings.FalseConstant, _VECTOR, "constant log-det"),
    "padding seen": _mutant(couplings.PaddingSeen, _SEQUENCE, "masked content", "padding", "masked gradients"),
    "length halved without masks": _mutant(couplings.MasksForgotten, _SEQUENCE, "masked content"),
    "mean over all frames": _mutant(couplings.MeanOfAllFrames, _SEQUENCE, "padding", "masked gradients"),
    "log-det in bfloat16": _mutant(lambda: layers.HalfPrecisionVolume(3), _IMAGE, "bf16 autocast"),
    "map in bfloat16": _mutant(lambda: layers.HalfPrecisionMap(4), _VECTOR, "bf16 autocast"),
    "order reversed": _mutant(couplings.Forwards, _VECTOR, "triangular Jacobian"),
    "layer skipped": _mutant(
        lambda: layers.LayerSkipped([layers.Stretch(3) for _ in range(3)], _IMAGE), _IMAGE, "sum of layers"
    ),
    "no identity at the start": _mutant(
        lambda: layers.Stretch(3, start=0.1), _IMAGE, "identity at start", identity=True
    ),
}
