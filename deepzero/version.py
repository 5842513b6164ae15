"""The package's version, for whoever needs it without importing the package."""

__version__ = "0.1.0"
