"""How fast, and how fast it could be: tokens, floating-point operations, and the part of the device's peak (MFU).

The operations are the model's own count, ``6 N + 12 L C T`` a token (forward and backward, without the extra forward of
activation checkpointing), so that MFU measures useful work. Peaks are what the makers' data sheets give for dense
matrix products with fp32 accumulation, without sparsity. A device that is not in the table has no MFU: better none than
a wrong one.

Sources: NVIDIA data sheets of the named products; Chowdhery et al., "PaLM", 2022, appendix B, for what MFU is.
"""

from __future__ import annotations

# Name as torch reports it contains the first column (first match counts); TFLOP/s of bf16, fp16, fp32 (without TF32).
_PEAKS: tuple[tuple[str, float | None, float, float], ...] = (
    ("B200", 2250.0, 2250.0, 75.0),
    ("H200", 989.4, 989.4, 66.9),
    ("H100 PCIe", 756.0, 756.0, 51.2),
    ("H100 NVL", 835.0, 835.0, 60.0),
    ("H100", 989.4, 989.4, 66.9),
    ("A100", 312.0, 312.0, 19.5),
    ("A800", 312.0, 312.0, 19.5),
    ("L40S", 362.0, 362.0, 91.6),
    ("L4", 121.0, 121.0, 30.3),
    ("A10G", 70.0, 70.0, 35.0),
    ("V100", None, 125.0, 15.7),
    ("T4", None, 65.0, 8.1),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Floating-point operations per second that one device can do; None when it is not known.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it.
        dtype: bf16, fp16 or fp32.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16")
        989400000000000.0
        >>> peak_flops("a CPU", "bf16") is None
        True
    """
    column = ("bf16", "fp16", "fp32").index(dtype) + 1
    for row in _PEAKS:
        if row[0] in device_name:
            tera = row[column]
            return None if tera is None else float(tera) * 1e12
    return None


def rates(tokens: int, seconds: float, flops_per_token: float, world_size: int, peak: float | None) -> dict[str, float]:
    """One step's speed.

    Args:
        tokens: of the step, over all ranks.
        seconds: that it took.
        flops_per_token: forward and backward.
        world_size: ranks, each on a device of its own.
        peak: one device's, per second; None leaves ``mfu`` out.

    Returns:
        ``tokens_per_second`` and ``tflops`` over all ranks, and ``mfu`` between 0 and 1.

    Example:
        >>> rates(1000, 0.5, 2e9, world_size=2, peak=1e13)
        {'tokens_per_second': 2000.0, 'tflops': 4.0, 'mfu': 0.2}
    """
    per_second = tokens / seconds
    result = {"tokens_per_second": per_second, "tflops": per_second * flops_per_token / 1e12}
    if peak is not None:
        result["mfu"] = per_second * flops_per_token / (world_size * peak)
    return result
