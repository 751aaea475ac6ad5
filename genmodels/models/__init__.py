"""Models with the hooks of a LightningModule, one file per family, over one base class."""
