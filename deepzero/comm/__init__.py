"""Communication: collectives over ranks, counted in the ledger. It imports nothing that launches or watches ranks."""
