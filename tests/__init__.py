"""deepzero's tests: unit (no processes), distributed (the pool of ranks), configs, e2e (whole runs)."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Of the repository."""
