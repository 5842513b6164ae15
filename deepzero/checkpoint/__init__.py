"""Checkpoints: plain, verifiable files that any stage and any number of ranks can load. See ``manifest.py``."""
