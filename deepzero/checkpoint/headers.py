"""The header of any safetensors file, ours or somebody else's: read, and believed only when it describes the file.

A file is eight bytes of length, a JSON object, and the tensors' bytes without holes. Whoever reads tensors by these
offsets reads garbage when one is wrong, so everything is compared: extents with shapes, ends with the file's size.
Nothing is allocated by a number that a damaged file gives.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepzero.checkpoint.manifest import HEAD_ALIGN, ITEMSIZE, CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
METADATA = "__metadata__"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    dtype: str
    """safetensors' name of it."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    metadata: dict[str, str]
    tensors: tuple[StoredTensor, ...]
    """In the order of their bytes."""
    nbytes: int
    """Of the length and the header, where the data begins."""


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The first bytes of a file, data aligned.

    Args:
        tensors: (name, dtype, shape), in the order in which their bytes follow.
        metadata: strings for ``__metadata__``.
    """
    header: dict[str, Any] = {METADATA: metadata}
    cursor = 0
    for name, dtype, shape in tensors:
        end = cursor + math.prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [cursor, end]}
        cursor = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEAD_ALIGN)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> Header:
    """Read and check a header.

    Args:
        path: a safetensors file.

    Raises:
        CheckpointError: with the file's name: it cannot be read, is shortened, is no safetensors file, has a dtype that
            is not supported, or its tensors do not lie in it one after the other.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path} is no safetensors file, or is truncated: it has {size} bytes and announces a header of "
                    f"{length}"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not JSON ({error}); it is damaged") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: its header is a {type(content).__name__} and not an object; it is damaged")
    metadata = content.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: the header's {METADATA} is not made of strings; it is damaged")
    tensors = sorted((_tensor(path, n, v, 8 + length) for n, v in content.items()), key=lambda t: (t.offset, t.nbytes))
    cursor = 8 + length
    for tensor in tensors:
        if tensor.offset != cursor:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} begins at byte {tensor.offset}, and the one before it ends at "
                f"{cursor}: the header is damaged"
            )
        cursor += tensor.nbytes
    if cursor != size:
        wrong = "it is truncated" if cursor > size else "something was appended"
        raise CheckpointError(f"{path} has {size} bytes, and its header describes {cursor}: {wrong}")
    return Header(metadata, tuple(tensors), 8 + length)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _tensor(path: Path, name: str, value: Any, base: int) -> StoredTensor:
    """One entry of the header, its extent compared with its shape."""
    try:
        dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, start, end]
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers) or not isinstance(dtype, str):
            raise ValueError(f"dtype {dtype!r}, shape {shape!r}, data_offsets {[start, end]!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the header's entry of {name!r} is damaged ({type(error).__name__}: {error})"
        ) from None
    if dtype not in ITEMSIZE:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype}; known are {', '.join(sorted(ITEMSIZE))}")
    tensor = StoredTensor(name, dtype, tuple(shape), base + start)
    if tensor.nbytes != end - start:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {list(shape)} in {dtype} needs {tensor.nbytes} bytes, and the header "
            f"gives it {end - start}; it is damaged"
        )
    return tensor
