"""How fast, and how fast it could be: tokens, floating-point operations, and the part of the device's peak (MFU).

The operations are the model's own count, ``6 N + 12 L C T`` a token (forward and backward, without the extra forward of
activation checkpointing), so that MFU measures useful work. Peaks are what the makers' data sheets give for dense
matrix products with fp32 accumulation, without sparsity. A device that is not in the table has no MFU: better none than
a wrong one.

Sources: [data sheets] of the named products; [PaLM], appendix B, for what MFU is.
"""

from __future__ import annotations

import re

# torch's name of it has the first column's words (first match counts); TFLOP/s of bf16, fp16, fp32 (without TF32).
_PEAKS: tuple[tuple[str, float | None, float, float], ...] = (
    ("GB200", 2500.0, 2500.0, 80.0),
    ("B200", 2250.0, 2250.0, 75.0),
    ("GH200", 989.4, 989.4, 66.9),
    ("H200 NVL", 835.0, 835.0, 60.0),
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
    ("V100S", None, 130.0, 16.4),
    ("T4", None, 65.0, 8.1),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Operations per second that one device can do in bf16, fp16 or fp32; None: not known, as of a MIG slice."""
    column = ("bf16", "fp16", "fp32").index(dtype)
    # Whole words: an RTX A1000 is no A100, and an L40 no L4.
    known = (peaks[column] for name, *peaks in _PEAKS if re.search(rf"\b{name}\b", device_name))
    tera = None if " MIG " in device_name else next(known, None)
    return None if tera is None else tera * 1e12


def rates(tokens: int, seconds: float, flops_per_token: float, world_size: int, peak: float | None) -> dict[str, float]:
    """``tokens_per_second`` and ``tflops`` of a step over all ranks and, given a device's peak, ``mfu`` from 0 to 1.

    ``tokens`` are those of all ranks, ``flops_per_token`` of forward and backward; each rank has a device of its own.

    Example:
        >>> rates(1000, 0.5, 2e9, world_size=2, peak=1e13)
        {'tokens_per_second': 2000.0, 'tflops': 4.0, 'mfu': 0.2}
    """
    flops = tokens / seconds * flops_per_token
    result = {"tokens_per_second": tokens / seconds, "tflops": flops / 1e12}
    return result if peak is None else {**result, "mfu": flops / (world_size * peak)}
