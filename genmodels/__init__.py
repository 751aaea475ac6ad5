"""Train, sample and judge normalizing flows, diffusion and energy models side by side.

Importing this package imports nothing heavy: torch is loaded by the rooms that need it.
"""

__version__ = "0.2.0"
