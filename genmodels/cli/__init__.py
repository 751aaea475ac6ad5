"""The commands and their configuration; nothing here imports torch before a configuration is valid."""
