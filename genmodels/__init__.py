"""Train, sample, evaluate and compare normalizing flows, diffusion models and energy-based models.

Importing this package is cheap: torch is imported only by the subpackages that need it.
"""

__version__ = "0.2.0"
