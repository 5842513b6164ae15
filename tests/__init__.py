"""deepzero's tests: unit (no processes), distributed (the pool of ranks), configs, e2e (whole runs)."""
