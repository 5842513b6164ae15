"""Before a run: what it will send, hold and wait for, read off the engine's own code while that runs without values."""
