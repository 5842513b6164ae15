"""What can be used without an engine, under the names that DeepSpeed's ``deepspeed.ops`` gives it."""

from deepzero.offload.cpu_adam import CPUAdam

__all__ = ["CPUAdam"]
