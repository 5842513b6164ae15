"""The quantizers of a run, one for weights and one for gradients, each with its kernel chosen before training."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from deepzero.comm.collectives import Communicator
from deepzero.comm.process_group import raise_on_all_ranks
from deepzero.comm.quantization import Format, Quantizer
from deepzero.config.strict import ConfigError
from deepzero.config.zero import QuantizationConfig

log = logging.getLogger(__name__)


def build_quantizer(
    what: str, bits: int, settings: QuantizationConfig, numel: int, dtypes: Iterable[torch.dtype], comm: Communicator
) -> Quantizer:
    """A quantizer that is ready. A collective; rank 0 logs its kernel.

    All kernels decode to the same bits, so ranks need not have the same one.

    Args:
        what: ``weights`` or ``gradients``, for messages.
        bits: of an element.
        settings: block size, and which kernel.
        numel: elements packed and unpacked in a step, together.
        dtypes: of the values.
        comm: the ranks.

    Raises:
        ConfigError: on every rank; ``kernel=compiled`` cannot be had on one.
    """
    quantizer, problem = Quantizer(Format(bits, settings.block_size), settings.kernel), None
    try:
        quantizer.prepare(numel, dtypes, comm.device)
    except RuntimeError as error:
        problem = str(error)
    if settings.kernel == "compiled":
        raise_on_all_ranks(problem, lambda text: ConfigError(f"zero.quantization.kernel='compiled': {text}"))
    if comm.rank == 0:
        log.info("%s: %s", what, quantizer.describe())
    return quantizer
