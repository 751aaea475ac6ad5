"""`genmodels verify what=package.module:Class` for noise schedules and energies: known by what they have."""

from __future__ import annotations

from collections.abc import Callable

from genmodels.errors import InputError


def own(maker: Callable, what: str, shape: list[int] | None, options: dict, seed: int):
    """The verdicts on a user's noise schedule or energy; None for what is neither.

    Raises:
        InputError: when it cannot be made, or an energy is given no shape.
    """
    if not any(hasattr(maker, name) for name in ("log_snr", "energy")):
        return None
    import torch

    from genmodels.evaluation.findings import Findings
    from genmodels.evaluation.laws_of_energies import check_energy
    from genmodels.evaluation.laws_of_schedules import check_schedule

    torch.manual_seed(seed)
    try:
        made = maker(**options)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what}: {error}") from error
    if not isinstance(made, torch.nn.Module):
        raise InputError(f"{what} makes a {type(made).__name__}, not a torch module")
    if hasattr(made, "log_snr"):
        if shape:
            raise InputError(f"a noise schedule has no shape: leave shape={shape} out")
        return Findings([check_schedule(made)])
    if not shape or min(shape) < 1:
        raise InputError("shape is missing, the event shape of x: add for example shape=[2]")
    return Findings([check_energy(made, shape, seed=seed)])
