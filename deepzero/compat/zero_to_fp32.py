"""A checkpoint's weights in fp32, as one state dict or as files of a model: DeepSpeed's module of this name.

Checkpoints may be deepzero's or DeepSpeed's own. The script ``zero_to_fp32.py`` beside them calls :func:`main`.

Source: ``utils/zero_to_fp32.py`` of [DeepSpeed].
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from deepzero.checkpoint.checkpoint_dir import SCRIPT, is_complete
from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.export import DEFAULT_MAX_SHARD, INDEX_SUFFIX, MODEL_FILE, Exported, export, saying
from deepzero.checkpoint.manifest import Entry
from deepzero.checkpoint.reader import CheckpointReader, read_own
from deepzero.compat import deepspeed_checkpoint
from deepzero.compat.utilities import logger
from deepzero.config.deepspeed_json import DTYPE_NAMES
from deepzero.durable import flush_folder, write_whole
from deepzero.runtime.zero.partition_parameters import GatheredParameters, PartitionedParameter, ZeroParameter
from deepzero.utils.formatting import listed

log = logging.getLogger(__name__)

_TEXT = '''#!/usr/bin/env python
"""fp32 weights of a checkpoint beside this file: python zero_to_fp32.py . OUTPUT_FOLDER; --help says more."""
from deepzero.compat.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''
_PART = r"(-\d{5,}-of-\d{5,})?"
_OF_A_MODEL = re.compile(rf"(pytorch_model{_PART}\.bin|model{_PART}\.safetensors)(\.index\.json)?")
"""What :func:`convert_zero_checkpoint_to_state_dict` may have written, or Hugging Face's ``save_pretrained``."""


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor that :meth:`contiguous` reads; ``dtype`` is that of what is read, fp32 for floating ones."""

    reader: CheckpointReader
    key: str
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def contiguous(self) -> torch.Tensor:
        """The values, on the CPU."""
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.reader.read([Entry(self.key, self.name, 0, values.view(-1))])
        return values


def _open(checkpoint_dir: str | Path, tag: str | None, trained_only: bool = False) -> CheckpointReader:
    folder = Path(os.path.expanduser(checkpoint_dir))
    reader = deepspeed_checkpoint.read(folder, tag, weights=True) or read_own(folder, tag)
    for file in reader.manifest.files if reader.checks_files else ():
        reader.check(file, ())
    infos = reader.manifest.parameters.items()
    chosen = {name: info for name, info in infos if info.trained or not trained_only}
    reader.manifest = dataclasses.replace(reader.manifest, parameters=chosen)
    return reader


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The state dict of a checkpoint's model: parameters and buffers on the CPU, floating ones in fp32. No collective.

    Args:
        checkpoint_dir: the folder that checkpoints were saved to.
        tag: which one; None: the one that ``latest`` names.
        exclude_frozen_parameters: leave out what was not trained. What was not saved is missing in any case.
        lazy_mode: give a :class:`LazyTensor` for each, so that one at a time can be read.
    """
    reader, found = _open(checkpoint_dir, tag, exclude_frozen_parameters), dict[str, Any]()
    for key, name, _, shape, aliases in reader.model_tensors():
        _, stored = reader.extent(key, name) or (0, torch.float32 if 0 in shape else None)
        if stored is not None:
            dtype = torch.float32 if stored.is_floating_point else stored
            lazy = LazyTensor(reader, key, name, torch.Size(shape), dtype)
            found |= dict.fromkeys((name, *aliases), lazy if lazy_mode else lazy.contiguous())
    return found


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Fill a model as far as names fit; a warning says which do not. One without parameters of stage 3 goes to the CPU.

    Every rank fills its own part of stage 3's parameters; those that the program has gathered take rank 0's values.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    params = [param for param in model.parameters() if isinstance(param, ZeroParameter)]
    gathered = [param for param in params if not isinstance(param, PartitionedParameter)]
    with GatheredParameters(gathered, modifier_rank=0):
        missing, unexpected = (model if params else model.cpu()).load_state_dict(state, strict=False)
    if missing or unexpected:
        log.warning("%s: not there: %s; not in the model: %s", checkpoint_dir, listed(missing), listed(unexpected))
    return model


def _remove_older(out: Path, new: set[str]) -> None:
    """Remove what is of another model that was in the folder: readers would open its files before the new ones."""
    older = [path for path in out.iterdir() if _OF_A_MODEL.fullmatch(path.name) and path.name not in new]
    for path in sorted(older, reverse=True):  # an index before its parts
        path.unlink()


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = DEFAULT_MAX_SHARD,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's model in ``dtype``: as ``pytorch_model.bin``, by ``torch.save``, or as safetensors.

    Args:
        checkpoint_dir: the folder that checkpoints were saved to.
        output_dir: made if it is not there; a model that is there is replaced, of whichever format it is.
        dtype: of floating tensors: torch's, or ``fp32``, ``bf16``, ``fp16``, ``float32`` …
        max_shard_size: a larger model is divided among several files and an index; None: never.
        safe_serialization: write safetensors.
        tag: which checkpoint; None: the one that ``latest`` names.
        exclude_frozen_parameters: leave out what was not trained.
    """
    if (word := str(dtype).removeprefix("torch.")) not in DTYPE_NAMES:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_NAMES)}")
    write = partial(
        export, checkpoint_dir, dtype=DTYPE_NAMES[word], tag=tag, max_shard_size=max_shard_size or 1 << 62, force=True,
        partial=True, read=lambda folder, name: _open(folder, name, exclude_frozen_parameters),
    )  # fmt: skip
    out = Path(os.path.expanduser(output_dir))
    if safe_serialization:
        files = write(out).files
        _remove_older(out, {*files, MODEL_FILE + INDEX_SUFFIX} if len(files) > 1 else {*files})
        return
    with saying(lambda error: f"{error.filename or out}: {error.strerror}"):
        _write_by_torch(out, write)


def _write_by_torch(out: Path, write: Callable[[Path], Exported]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as hidden:
        source, made = Path(hidden), dict[str, str]()
        written = write(source / "safetensors")
        for file in written.files:
            with safe_open(written.folder / file, "pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                tensors |= {tied: tensors[name] for tied, name in opened.metadata().items() if name in tensors}
            made |= dict.fromkeys(tensors, name := f"pytorch_{file.removesuffix('.safetensors')}.bin")
            write_whole(source / name, partial(torch.save, tensors))
        if len(written.files) > 1:
            index = {"metadata": {"total_size": written.bytes}, "weight_map": made}
            write_whole(source / "pytorch_model.bin.index.json", json.dumps(index, indent=2).encode() + b"\n")
        new = sorted(source.glob("pytorch_model*"))  # the index, which is opened first, comes last
        for path in new:
            path.replace(out / path.name)
        flush_folder(out)
    _remove_older(out, {path.name for path in new})


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path, output_dir: str | Path, *args: Any, **kwargs: Any
) -> None:
    """:func:`convert_zero_checkpoint_to_state_dict` in fp32, with its other arguments."""
    convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, torch.float32, *args, **kwargs)


def convert_to_universal(args: argparse.Namespace) -> None:
    """``main`` of DeepSpeed's ``ds_to_universal``: a checkpoint under a second name, as each is universal already.

    The file ``latest_universal`` beside ``args.output_folder`` then names that.
    """
    source, target = Path(os.path.expanduser(args.input_folder)), Path(os.path.expanduser(args.output_folder))
    if not is_complete(source):
        raise CheckpointError(f"{source} is no checkpoint of deepzero's; DeepSpeed's own needs no conversion: load it")
    if target.exists():
        raise CheckpointError(f"{target} is there already; remove it, or choose another folder")
    shutil.copytree(source, target)
    target.with_name(deepspeed_checkpoint.LATEST_UNIVERSAL).write_text(target.name, encoding="utf-8")


def leave_script(folder: Path) -> None:
    """Put the script beside the checkpoints, unless it is there; a failure is a warning, as the checkpoint is whole."""
    path, text = folder / SCRIPT, _TEXT.encode()
    try:
        if not path.is_file() or path.read_bytes() != text:  # DeepSpeed's own would not read what was saved here
            write_whole(path, text)
            make_executable(path)
    except OSError as error:
        log.warning("%s could not be written (%s); the checkpoint is not concerned", path, error.strerror)


def make_executable(path: str | Path) -> None:
    """Let a script be run by its name; a line says why not, as on network shares that know no permissions."""
    try:
        Path(path).chmod(0o755)
    except OSError as error:
        logger.info("%s is not executable (%s): start it by python", path, error.strerror)


def main(arguments: list[str] | None = None) -> None:
    """The command: ``python zero_to_fp32.py CHECKPOINTS OUTPUT_FOLDER``."""
    parser = argparse.ArgumentParser(description="Write the fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder that checkpoints were saved to")
    parser.add_argument("output_dir", help="the folder that the model's files go to")
    parser.add_argument("--max_shard_size", default=DEFAULT_MAX_SHARD, help="of one file (%(default)s)")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of torch.save")
    parser.add_argument("-t", "--tag", help="which checkpoint; else the one that latest names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    convert_zero_checkpoint_to_fp32_state_dict(**vars(parser.parse_args(arguments)))
