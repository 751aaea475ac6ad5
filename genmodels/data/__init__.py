"""Data sets with the hooks of a LightningDataModule: a batch is data in its own units."""
