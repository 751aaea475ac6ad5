"""`genmodels verify what=attention`: is every attention here, or one of your own, what it says it is?"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from genmodels.errors import InputError

_DIM, _HEADS = 8, 2


def every_mechanism(*, compiler: str | None, seed: int, progress: bool):
    """The verdicts on all mechanisms of the package."""
    from genmodels.evaluation.attention import LAWS
    from genmodels.evaluation.findings import counting
    from genmodels.evaluation.mechanisms import MECHANISMS, Survey

    findings = Survey()
    with counting(len(MECHANISMS) * len(LAWS.laws), progress) as watch:
        for name, mechanism in MECHANISMS.items():
            findings.wholes.append(mechanism.judge(name, compiler=compiler, seed=seed, watch=watch))
    return findings


def own(
    maker: Callable, what: str, capabilities: list[str], space: list[int] | None, options: dict,
    *, compiler: str | None, seed: int, progress: bool,
):  # fmt: skip
    """The verdicts on the module of a user's factory, `factory(dim, heads, ...)`."""
    import torch

    from genmodels.evaluation.attention import LAWS, check
    from genmodels.evaluation.findings import Findings, counting

    sizes = {"dim": _DIM, "heads": _HEADS, **options}
    dim, heads = sizes.pop("dim"), sizes.pop("heads")
    if space is not None and (len(space) != 2 or min(space) < 1):
        raise InputError(f"shape is that of a map here, as in shape=[2,3], got {space}")

    def make(**more):
        try:
            made = maker(dim, heads, **{**sizes, **more})
        except (TypeError, ValueError) as error:
            raise InputError(f"{what}: {error}") from error
        if not isinstance(made, torch.nn.Module):
            raise InputError(f"{what} makes a {type(made).__name__}, not a module (x, mask) -> y")
        return made

    fresh = None
    longest = inspect.signature(maker).parameters.get("max_len")
    if longest is not None:
        usual = sizes.get("max_len", longest.default)
        if isinstance(usual, int):

            def fresh():
                return make(max_len=2 * usual)

    torch.manual_seed(seed)
    module = make()
    with counting(len(LAWS.laws), progress) as watch:
        try:
            report = check(
                module, dim, capabilities=capabilities, space=None if space is None else tuple(space), fresh=fresh,
                compiler=compiler, seed=seed, watch=watch,
            )  # fmt: skip
        except ValueError as error:
            raise InputError(f"{what}: {error}") from error
    return Findings([report])
