"""Train, sample, evaluate and compare normalizing flows, diffusion models and energy-based models.

Importing this package is cheap: what it offers, `genmodels.api` and the subpackages, is imported at its first use.

Example:
    >>> import genmodels as gm
    >>> gm.load.__module__, gm.flows.Flow.__name__
    ('genmodels.api', 'Flow')
"""

__version__ = "0.2.0"
_API = ("Model", "Samples", "Speech", "evaluate", "load", "train")
_SUBPACKAGES = ("core", "data", "diffusion", "energy", "evaluation", "flows", "models", "nn", "plots", "report",
                "speech", "training", "verification")  # fmt: skip


def __getattr__(name: str):
    from importlib import import_module

    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.api"), name)
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_API, *_SUBPACKAGES])
