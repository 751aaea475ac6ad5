"""LightningDataModules: a batch is data in its own units."""
