"""deepzero under DeepSpeed's name, for a process that finds this folder on its path."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("deepzero") is None:  # a checkout, which the parent process found in its own folder
    sys.path.append(str(Path(__file__).parents[3]))

from deepzero.compat import install

install()  # which puts another module in this one's place
