"""The stages of ZeRO, floor 3."""
