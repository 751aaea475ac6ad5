"""LightningModules, one file per family, over one base class."""
