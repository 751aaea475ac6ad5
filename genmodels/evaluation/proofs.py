"""What can be proved of a model: a table of families and their laws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from genmodels.data.spec import Batch
from genmodels.errors import InputError
from genmodels.evaluation.families import is_diffusion, is_energy, is_flow
from genmodels.evaluation.findings import Findings, Options
from genmodels.evaluation.proofs_of_flows import prove_flow
from genmodels.evaluation.proofs_of_models import prove_diffusion, prove_energy, prove_field
from genmodels.models.base import GenerativeModel


@dataclass(frozen=True)
class Family:
    """A kind of model that something can be proved of.

    Arguments:
        name: what it is called in messages.
        fits: whether a model is of this kind.
        prove: `prove(model, fresh, batch, initial, options)`, see `prove`.
    """

    name: str
    fits: Callable[[GenerativeModel], bool]
    prove: Callable[..., Findings]


def prove(
    model: GenerativeModel, fresh: Callable[[], GenerativeModel], batch: Batch, initial: Batch | None, options: Options
) -> Findings:
    """Every law there is for a model.

    Arguments:
        model: the model; it may be changed.
        fresh: builds another one with the same options.
        batch: a few items with unlike conditions.
        initial: the batch on which training would initialise it; None for a trained model.
        options: how to go about it.

    Raises:
        InputError: for a family without laws.
    """
    for family in FAMILIES:
        if family.fits(model):
            return family.prove(model, fresh, batch, initial, options)
    raise InputError(f"there is nothing to verify for the family {model.family}: "
                     f"there are laws for {', '.join(family.name for family in FAMILIES)}")


#: Families in the order they are tried; a new one adds a line.
FAMILIES = [
    Family("normalizing flows (core.flow)", is_flow, prove_flow),
    Family("diffusion models (core.schedule)", is_diffusion, prove_diffusion),
    Family("energies (core.energy)", is_energy, prove_energy),
    Family("fields of scores (sigmas)", lambda model: hasattr(model, "sigmas"), prove_field),
]
