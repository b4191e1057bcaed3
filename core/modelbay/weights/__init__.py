"""Checkpoints: formats, which files, names as data, and an account of every tensor."""
