"""`check`: is this attention what it says it is? Proofs against two loops, finite differences and itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from torch import Tensor, nn

from genmodels.errors import nearest
from genmodels.evaluation import laws_of_attention, laws_of_attention_code, laws_of_positions
from genmodels.evaluation.attention_oracle import attention_oracle
from genmodels.evaluation.attention_subject import CAPABILITIES, AttentionSubject, prepare
from genmodels.evaluation.laws import Law, Laws, Report
from genmodels.evaluation.mechanism_oracles import ORACLES, mechanism_oracle
from genmodels.nn.attention import Attention

#: Every law of attention, in the order of reports.
LAWS = Laws()
for _part in (laws_of_attention.LAWS, laws_of_attention_code.LAWS, laws_of_positions.LAWS):
    LAWS.laws.update(_part.laws)


def _by_loops(module: Attention, x: Tensor, mask: Tensor | None, space: tuple[int, int] | None) -> Tensor:
    return attention_oracle(module, x, mask=mask, space=space)[0]


def _beside(module: nn.Module, x: Tensor, mask: Tensor | None, space: tuple[int, int] | None) -> Tensor:
    return mechanism_oracle(module, x, mask=mask)


#: Modules whose equation is known; a module of one's own is checked by passing its reference.
REFERENCES: dict[type, Callable[..., Tensor]] = {Attention: _by_loops, **dict.fromkeys(ORACLES, _beside)}


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
    watch: Callable[[Law], None] | None = None,
    name: str | None = None,
) -> Report:
    """The verdict of every law on an attention module; the module itself is not touched.

    It is copied, made float64, and its parameters are drawn at random: what begins at zero hides errors.

    Arguments:
        module: `module(x (B, L, D), mask)` gives y, or y and more; mask is bool `(B, 1, L)`, True = valid.
        dim: width D.
        capabilities: names of `CAPABILITIES`, each for laws that are then judged too.
        space: height and width of the maps it is tried on, for modules of maps.
        reach: keys before and after a query that it may depend on, None = unbounded.
        reference: the same function by slow and plain means, `(module, x, mask, space) -> y`; that of the attention of
            this package is known.
        fresh: makes the module with another longest length, for modules that have one.
        randomise: whether the parameters are drawn at random.
        compiler: backend of torch.compile; None leaves compilation out.
        only, without: names of laws to judge, or to leave out.
        tolerances: tolerances by name of law, in place of the usual ones.
        seed: seed of inputs and parameters.
        watch: called before each law.
        name: the subject's name in the report.

    Raises:
        ValueError: for a law or a capability that does not exist, for maps without a space.

    Example:
        >>> from genmodels.nn.attention import ALiBi
        >>> module = Attention(8, 2, ALiBi(8, 2), causal=True)
        >>> report = check(module, 8, capabilities=["relative", "symmetric", "causal", "cache"], compiler=None)
        >>> report.passed, report["cache"].status
        (True, 'passed')
    """
    laws, limits = LAWS.choose(only, without), dict(tolerances or {})
    LAWS.choose(limits)
    said = frozenset(capabilities)
    for capability in sorted(said - set(CAPABILITIES)):
        near = nearest(capability, CAPABILITIES)
        raise ValueError(f"there is no capability {capability!r}:{f' did you mean {near!r}?' if near else ''} "
                         f"they are {', '.join(CAPABILITIES)}")  # fmt: skip
    if ("2d" in said) != (space is not None):
        raise ValueError("a module of maps says 2d and is tried on a space, (height, width); others neither")
    subject = AttentionSubject(
        prepare(module, seed, randomise), dim, said, space, reach,
        reference if reference is not None else reference_of(module), fresh, compiler, seed,
    )  # fmt: skip
    return Report(name or type(module).__name__, tuple(LAWS.judge(subject, laws, limits, watch)))


def reference_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """The equation of a module that is known, by the nearest class that has one."""
    return next((REFERENCES[kind] for kind in type(module).__mro__ if kind in REFERENCES), None)
