"""DeepSpeed's ``deepspeed.ops.adam``: the CPU Adam under the name that it has there."""

from deepzero.offload.cpu_adam import CPUAdam

DeepSpeedCPUAdam = CPUAdam

__all__ = ["CPUAdam", "DeepSpeedCPUAdam"]
