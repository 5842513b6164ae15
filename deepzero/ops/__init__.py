"""What can be used without an engine, under the names that DeepSpeed's ``deepspeed.ops`` gives it."""

from deepzero.ops import adam
from deepzero.ops.adam import CPUAdam, FusedAdam
from deepzero.runtime.muon import Muon, muon_groups

__all__ = ["CPUAdam", "FusedAdam", "Muon", "adam", "muon_groups"]
