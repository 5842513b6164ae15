"""Tests that need a CUDA device: ``pytest -m gpu``. They have not run yet on the project's own machines."""
