"""Training: run folders, checkpoint files, callbacks and loggers."""
