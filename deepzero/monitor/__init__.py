"""Seeing a run: terminal, metrics.jsonl, summary.json, W&B, TensorBoard. Knows nothing of ZeRO."""
