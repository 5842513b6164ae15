"""What can be used without an engine, under the names that DeepSpeed's ``deepspeed.ops`` gives it."""

from deepzero.ops import adam
from deepzero.ops.adam import CPUAdam, FusedAdam

__all__ = ["CPUAdam", "FusedAdam", "adam"]
