"""New locations of classes that older checkpoints and configurations name by their former module."""

from __future__ import annotations

#: Former module to current module, for classes that a configuration can name.
MOVED = {
    "genmodels.data.digits": "genmodels.data.vision",
    "genmodels.nn.deep_kernel": "genmodels.nn.energy_nets",
    "genmodels.nn.mlp": "genmodels.nn.perceptron",
    "genmodels.nn.noise_conditional": "genmodels.models.score",
    "genmodels.nn.unet_energy": "genmodels.nn.energy_nets",
}


def present_name(name: str) -> str:
    """The current dotted name of a class.

    Example:
        >>> present_name("genmodels.data.digits.Digits"), present_name("genmodels.models.ddpm.DDPM")
        ('genmodels.data.vision.Digits', 'genmodels.models.ddpm.DDPM')
    """
    module, _, attribute = name.rpartition(".")
    return f"{MOVED[module]}.{attribute}" if module in MOVED else name
