"""`genmodels verify what=package.module:Class` for what is no bijection: known by what it has.

Noise schedules have `log_snr`, energies `energy`, denoisers a `schedule`; samplers are steps, of a denoiser first.
"""

from __future__ import annotations

from collections.abc import Callable

from genmodels.errors import InputError

_HAS = ("log_snr", "energy", "schedule", "at_log_snr")


def own(
    maker: Callable, what: str, shape: list[int] | None, options: dict, condition: Callable | None, seed: int
):
    """The verdicts on a user's noise schedule, energy, denoiser or sampler; None for what is none of them.

    Arguments:
        maker: a class, a function that makes one, or a sampler that is a function.
        what, shape, options: as they were given to the command.
        condition: makes conditions of a few rows, for a denoiser; None for none.
        seed: of everything drawn.

    Raises:
        InputError: when it cannot be made, or a shape is missing or of no use.
    """
    from genmodels.evaluation.findings import Findings
    from genmodels.evaluation.laws_of_samplers import check_sampler, is_sampler

    if is_sampler(maker):
        _without("a sampler", shape, condition)
        return Findings([check_sampler(_made(maker, what, options, seed) if isinstance(maker, type) else maker)])
    if isinstance(maker, type) and not any(hasattr(maker, name) for name in _HAS):
        return None
    made = _made(maker, what, options, seed)
    if is_sampler(made):
        _without("a sampler", shape, condition)
        return Findings([check_sampler(made)])
    if not any(hasattr(made, name) for name in _HAS):
        return None
    import torch

    if not isinstance(made, torch.nn.Module):
        raise InputError(f"{what} makes a {type(made).__name__}, not a torch module")
    if hasattr(made, "log_snr"):
        from genmodels.evaluation.laws_of_schedules import check_schedule

        _without("a noise schedule", shape, condition)
        return Findings([check_schedule(made)])
    if not shape or min(shape) < 1:
        raise InputError("shape is missing, the event shape of x: add for example shape=[2]")
    if hasattr(made, "schedule"):
        from genmodels.evaluation.laws_of_denoisers import check_denoiser

        return Findings([check_denoiser(made, shape, cond=None if condition is None else condition(), seed=seed)])
    from genmodels.evaluation.laws_of_energies import check_energy

    _without("an energy", None, condition)
    return Findings([check_energy(made, shape, seed=seed)])


def _made(maker: Callable, what: str, options: dict, seed: int):
    import torch

    torch.manual_seed(seed)
    try:
        return maker(**options)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what}: {error}") from error


def _without(kind: str, shape: list[int] | None, condition: Callable | None) -> None:
    if shape:
        raise InputError(f"{kind} has no shape: leave shape={shape} out")
    if condition is not None:
        raise InputError(f"{kind} is judged without a condition: leave cond out")
