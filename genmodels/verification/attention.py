"""Checks of attention against plain loops and finite differences, and a table of the mechanisms of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from genmodels.core.errors import hint
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
from genmodels.verification.attention_masks import CAPABILITIES, AttentionSubject, prepare
from genmodels.verification.attention_masks import CHECKS as MASK_CHECKS
from genmodels.verification.attention_positions import CHECKS as POSITION_CHECKS
from genmodels.verification.attention_positions import CODE_CHECKS
from genmodels.verification.attention_reference import reference_attention
from genmodels.verification.check import CheckSet, CheckSpec, Findings, Report, applied, summary, table
from genmodels.verification.mechanism_references import MECHANISM_REFERENCES, reference_mechanism

#: Every check of attention, in the order of reports.
CHECKS = CheckSet(MASK_CHECKS, CODE_CHECKS, POSITION_CHECKS)


def check(
    module: nn.Module,
    dim: int,
    *,
    capabilities: Iterable[str] = (),
    space: tuple[int, int] | None = None,
    reach: tuple[int | None, int | None] = (None, None),
    reference: Callable[..., Tensor] | None = None,
    fresh: Callable[[], nn.Module] | None = None,
    randomise: bool = True,
    compiler: Literal["aot_eager", "eager", "inductor"] | None = "eager",
    only: Iterable[str] | None = None,
    without: Iterable[str] = (),
    tolerances: Mapping[str, float] | None = None,
    seed: int = 0,
    watch: Callable[[CheckSpec], None] | None = None,
    name: str | None = None,
) -> Report:
    """The result of every check of an attention module; the module itself is not touched.

    It is copied, converted to float64, and its parameters are drawn at random, since zeros hide errors.

    Arguments:
        module: `module(x (B, L, D), mask)` gives y, or y and more; mask is bool `(B, 1, L)`, True = valid.
        dim: width D.
        capabilities: names of `CAPABILITIES`, each of which adds checks.
        space: height and width of the input, for modules of maps.
        reach: keys before and after a query that it may depend on, None = unbounded.
        reference: a reference implementation `(module, x, mask, space) -> y`; known for the modules of this package.
        fresh: makes the module with another longest length, for modules that have one.
        randomise: whether the parameters are drawn at random.
        seed: seed of inputs and parameters.
        compiler, only, without, tolerances, watch, name: see `check_bijection`.

    Raises:
        ValueError: for a check or a capability that does not exist, for maps without a space.

    Example:
        >>> from genmodels.nn.attention import ALiBi
        >>> module = Attention(8, 2, ALiBi(8, 2), causal=True)
        >>> report = check(module, 8, capabilities=["relative", "symmetric", "causal", "cache"], compiler=None)
        >>> report.passed, report["cache"].status
        (True, 'passed')
    """
    specs, limits = CHECKS.choose(only, without), dict(tolerances or {})
    CHECKS.require(limits)
    claimed = frozenset(capabilities)
    for capability in sorted(claimed - set(CAPABILITIES)):
        raise ValueError(f"there is no capability {capability!r}:{hint(capability, CAPABILITIES, '')} "
                         f"they are {', '.join(CAPABILITIES)}")  # fmt: skip
    if ("2d" in claimed) != (space is not None):
        raise ValueError("capability 2d and space=(height, width) go together: give both for a module of maps")
    subject = AttentionSubject(
        prepare(module, seed, randomise), dim, claimed, space, reach,
        reference if reference is not None else reference_of(module), fresh, compiler, seed,
    )  # fmt: skip
    return Report(name or type(module).__name__, tuple(CHECKS.run(subject, specs, limits, watch)))


def reference_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """The reference implementation `(module, x, mask, space) -> y` of a module of this package."""
    if isinstance(module, Attention):
        return lambda module, x, mask, space: reference_attention(module, x, mask=mask, space=space)[0]
    if isinstance(module, tuple(MECHANISM_REFERENCES)):
        return lambda module, x, mask, space: reference_mechanism(module, x, mask=mask)
    return None


Reach = tuple[int | None, int | None]


@dataclass(frozen=True)
class Mechanism:
    """An attention mechanism to check.

    Arguments:
        make: `make(dim, heads) -> module`.
        capabilities, space, reach: as for `check`.
    """

    make: Callable[[int, int], nn.Module]
    capabilities: tuple[str, ...]
    space: tuple[int, int] | None = None
    reach: Reach = (None, None)

    def check(self, name: str, **options) -> Report:
        """The result of every check; the module has 8 channels and 2 heads."""
        return check(
            self.make(8, 2), 8, capabilities=self.capabilities, space=self.space, reach=self.reach, name=name,
            **options,
        )  # fmt: skip


def _core(
    position: Callable[[int, int], Position] | None, *claimed: str, space: tuple[int, int] | None = None,
    reach: Reach = (None, None), **options,
) -> Mechanism:  # fmt: skip
    """Attention with a position, built for second derivatives, which fused kernels do not have."""

    def make(dim: int, heads: int) -> nn.Module:
        chosen = None if position is None else position(dim, heads)
        return Attention(dim, heads, chosen, derivatives=2, **options)

    return Mechanism(make, (*claimed, "full", "derivatives"), space, reach)


def _scored(
    score: Callable[[int, int], Score] | None, *claimed: str, kind: type[ScoredAttention] = ScoredAttention
) -> Mechanism:
    """Self-attention with a score function."""
    return Mechanism(lambda dim, heads: kind(dim, heads, score and score(dim, heads)), (*claimed, "full"))


def _mel(time: Callable[[int, int], Position]) -> Callable[[int, int], Position]:
    return lambda dim, heads: MelPosition(dim, heads, n_freq=2, time=time(dim, heads))


#: Name to mechanism.
MECHANISMS: dict[str, Mechanism] = {
    "content alone": _core(None, "unordered"),
    "content alone, causal": _core(None, "causal", "cache", causal=True),
    "content alone, window": _core(None, window=(2, 1), reach=(2, 1)),
    "Transformer-XL": _core(TransformerXL, "relative"),
    "Transformer-XL, causal": _core(TransformerXL, "relative", "causal", "cache", causal=True),
    "Transformer-XL, window": _core(TransformerXL, "relative", "causal", "cache", window=(2, 0), reach=(2, 0)),
    "Transformer-XL, chunks": _core(TransformerXL, "cache", chunk=(2, 1)),
    "Shaw, clip": _core(lambda dim, heads: Shaw(dim, heads, K=2), "relative"),
    "Shaw, zero": _core(lambda dim, heads: Shaw(dim, heads, K=2, outside="zero", shared=True), "relative"),
    "Shaw, causal": _core(lambda dim, heads: Shaw(dim, heads, K=2), "relative", "causal", "cache", causal=True),
    "Music Transformer": _core(
        lambda dim, heads: MusicTransformer(dim, heads, max_len=8), "relative", "causal", "cache"
    ),
    "Music Transformer, shared": _core(
        lambda dim, heads: MusicTransformer(dim, heads, max_len=4, shared=True), "relative", "causal", "cache"
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
    "location, previous": _scored(
        lambda dim, heads: Location(dim, heads, channels=3, kernel=5, cumulative=False), "derivatives"
    ),
    "scaled dot": _scored(ScaledDot, "unordered", "derivatives"),
    "hard": _scored(None, "piecewise", kind=HardAttention),
    "local dense": Mechanism(
        lambda dim, heads: LocalDenseSynthesizer(dim, heads, c=3), ("relative", "derivatives"), reach=(1, 1)
    ),
    "local dense, even": Mechanism(
        lambda dim, heads: LocalDenseSynthesizer(dim, heads, c=4, boundary="zero"),
        ("relative", "derivatives", "unnormalised"), reach=(2, 1),
    ),
    "local monotonic": Mechanism(LocalMonotonic, ("unnormalised", "sensitive")),
    "local monotonic, softmax": Mechanism(
        lambda dim, heads: LocalMonotonic(dim, heads, sigma=1.5, max_step=2.0, score="softmax"),
        ("unnormalised", "sensitive"),
    ),
    "Nystrom": Mechanism(lambda dim, heads: Nystrom(dim, heads, landmarks=3), ("derivatives", "unnormalised")),
    "Nystrom, exact": Mechanism(
        lambda dim, heads: Nystrom(dim, heads, landmarks=3, iterations=None), ("unnormalised", "sensitive")
    ),
    "LSH, rotation": Mechanism(lambda dim, heads: LSH(dim, heads, buckets=4, chunk=3, rounds=2), ("piecewise",)),
    "LSH, sign": Mechanism(
        lambda dim, heads: LSH(dim, heads, buckets=2, chunk=4, rounds=2, hash="sign"), ("piecewise",)
    ),
}  # fmt: skip


class Survey(Findings):
    """The reports on many mechanisms: a line for each, failed checks in full."""

    def text(self, verbose: bool = False) -> str:
        """The table; every check of every mechanism if `verbose`."""
        if verbose:
            return "\n\n".join(str(report) for report in self.wholes)
        rows = [[report.subject, *summary([report])] for report in self.wholes]
        parts = [table(rows, ("mechanism", "result", "closest to its tolerance"))]
        parts += [applied(report, only_failures=True) for report in self.wholes if not report.passed]
        return "\n\n".join(parts)
