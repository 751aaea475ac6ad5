"""Samples, mels and densities as pictures."""
