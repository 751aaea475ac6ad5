"""Normalizing flows: bijections with exact log-determinants, and the flows made of them."""
