"""Typed, frozen settings: floor 0, the one source of defaults."""
