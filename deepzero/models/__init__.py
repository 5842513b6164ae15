"""Models to train: floor 4. They know nothing of ZeRO, of ranks, or of communication."""
