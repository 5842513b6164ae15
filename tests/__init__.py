"""deepzero's tests: unit (no processes), distributed (the pool of ranks), numerics, configs, e2e (whole runs)."""
