"""`check_bijection`: is this layer what it says it is? Proofs against autograd, not against stored numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor, nn

from genmodels.evaluation import laws_of_code, laws_of_jacobians, laws_of_maps, laws_of_masks, laws_of_mass
from genmodels.evaluation.laws import Law, Laws, Report
from genmodels.evaluation.subject import Range, knots_of, prepare

#: Every law of bijections, in the order of reports.
LAWS = Laws()
for _part in (laws_of_maps, laws_of_jacobians, laws_of_mass, laws_of_masks, laws_of_code):
    LAWS.laws.update(_part.LAWS.laws)

#: Tolerances of maps whose inverse is an iteration: its last step is worth this much.
ITERATIVE = {"round trip": 1e-8, "log-dets cancel": 1e-8, "log-det inverse": 1e-7, "rows independent": 1e-8,
             "masked content": 1e-8, "padding": 1e-8, "masked log-det": 1e-8}


def check_bijection(
    layer: nn.Module,
    shape: Sequence[int],
    *,
    x: Tensor | None = None,
    z: Tensor | None = None,
    cond: Tensor | None = None,
    batch: int = 3,
    randomise: bool = True,
    initial: tuple[Tensor, Tensor | None] | None = None,
    x_range: Range | None = None,
    z_range: Range | None = None,
    masks: bool = True,
    knots: Sequence[float] | None = None,
    starts_as_identity: bool = False,
    fresh: Callable[[], nn.Module] | None = None,
    max_dims: int = 256,
    patience: float = 60.0,
    compiler: Literal["aot_eager", "eager", "inductor"] | None = "aot_eager",
    only: Iterable[str] | None = None,
    without: Iterable[str] = (),
    tolerances: Mapping[str, float] | None = None,
    seed: int = 0,
    watch: Callable[[Law], None] | None = None,
    name: str | None = None,
) -> Report:
    """The verdict of every law on a bijection; the layer itself is not touched.

    It is copied, made float64, its parameters moved at random (zeros and identities at the start of training hide
    errors), and initialised on random data if it waits for data. Round trips alone prove nothing of a log-determinant,
    and cancelling log-determinants are blind to an error made in both directions: the truth is autograd's Jacobian.

    Arguments:
        layer: a `Bijection`, or any module with `forward(x, cond, mask) -> (z, logdet)` and `inverse(z, cond, mask) ->
            (x, logdet)`; one that takes neither cond nor mask will do.
        shape: event shape of x; for sequences (C, T) masks are tried too.
        x, z: inputs of the two directions, drawn at random by default.
        cond: the condition of each row, at least two unlike ones; needed by layers that use one.
        batch: number of examples where none are given.
        randomise: whether parameters are moved; false judges them as they are.
        initial: data and condition for a layer that waits for data.
        x_range, z_range: where the layer is defined, if not everywhere.
        masks: whether the layer takes masks.
        knots: inputs at which it might stumble; ends and knots of its splines by default.
        starts_as_identity: whether it must be the identity as given.
        fresh: makes another instance with the same options, into which the layer's state is loaded.
        max_dims: largest event of which a Jacobian is made of every row; of a larger one (at most 4096 values) it is
            made of one row, or of a part of the event where the layer takes it and the whole takes long.
        patience: seconds that one Jacobian of a larger event may take. What is too large for any is `NOT PROVEN`.
        compiler: backend of torch.compile; None leaves compilation out.
        only, without: names of laws to judge, or to leave out.
        tolerances: tolerances by name of law, in place of the usual ones.
        seed: seed of inputs and of the perturbation.
        watch: called before each law.
        name: the subject's name in the report.

    Raises:
        ValueError: for a shape the layer does not take, a missing condition, or a law that does not exist.

    Example:
        >>> from genmodels.flows.actnorm import ActNorm
        >>> report = check_bijection(ActNorm(2), (2, 3, 3), compiler=None)
        >>> report.passed, report["log-det forward"].status
        (True, 'passed')
    """
    laws = LAWS.choose(only, without)
    limits = dict(tolerances or {})
    LAWS.choose(limits)
    if not getattr(layer, "exact_inverse", True):
        limits = {**ITERATIVE, **limits}
    subject = prepare(
        layer, shape, x=x, z=z, cond=cond, batch=batch, randomise=randomise, initial=initial, x_range=x_range,
        z_range=z_range, seed=seed, masks=masks, knots=knots_of(layer) if knots is None else knots, max_dims=max_dims,
        patience=patience, starts_as_identity=starts_as_identity, compiler=compiler, fresh=fresh,
    )
    judged = tuple(LAWS.judge(subject, laws, limits, watch))
    return Report(name or f"{type(layer).__name__} {show_shape(shape)}", judged)


def show_shape(shape: Sequence[int]) -> str:
    """An event shape as one writes it.

    Example:
        >>> show_shape([3]), show_shape([3, 8, 8])
        ('(3,)', '(3, 8, 8)')
    """
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
