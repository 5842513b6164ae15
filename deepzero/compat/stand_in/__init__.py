"""A folder for ``PYTHONPATH``: with it ``import deepspeed`` means deepzero, without a word in the script.

``deepspeed.py`` is imported, the folder beside it answers ``importlib.metadata.version("deepspeed")``, by which
libraries decide whether DeepSpeed is there, and which. ``python -m deepzero.compat --path`` prints where this is.
"""
