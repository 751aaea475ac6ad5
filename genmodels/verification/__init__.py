"""Numerical checks of bijections, diffusion, energies and attention."""
