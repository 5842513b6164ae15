"""Python values as JSON and back: what ``client_state``, schedules and optimizers keep besides big tensors.

JSON has no tuples, no keys but strings, no NaN and no tensors. Here a value that JSON has stands for itself, and any
other is an object with one key that begins with ``$``. Tensors and numpy arrays go into a shard, under the key
``client``, and the JSON says where. A numpy number comes back as Python's, an object of a subclass (a named tuple) as
one of the class. Nothing is ever pickled: what has no such form is refused with its place.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deepzero.checkpoint.errors import CheckpointError

log = logging.getLogger(__name__)

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""torch's dtypes by safetensors' names."""
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
ITEMSIZE = {name: dtype.itemsize for dtype, name in DTYPES.items()}
"""Bytes of an element."""

FACTORIES = {kind.__name__: kind for kind in (int, float, list, dict, set, str, bool)}
"""What may give a defaultdict its values, by name."""
SEQUENCES = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A value that :mod:`json` can write, ``where`` its name; the tensors found in it go into ``tensors``.

    Example:
        >>> encode({"a": (1, 2.5), 3: float("inf")}, "client_state", {})
        {'$dict': [['a', {'$tuple': [1, 2.5]}], [3, {'$float': 'inf'}]]}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _encode_tensor(value, where, tensors)
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encode(item, f"{where}[{place}]", tensors) for place, item in enumerate(value)]
        return next(({name: items} for name, kind in SEQUENCES.items() if isinstance(value, kind)), items)
    if type(value) is Namespace:  # a program's arguments
        return {"$namespace": encode(vars(value), where, tensors)}
    if type(value) is Counter:  # torch's MultiStepLR keeps its milestones in one
        return {"$counter": encode(dict(value), where, tensors)}
    factory = getattr(value, "default_factory", None)
    if isinstance(value, dict) and factory is not None:  # a defaultdict, or what ``compat`` has in its place
        if factory in FACTORIES.values():
            return {"$defaultdict": [factory.__name__, encode(dict(value), where, tensors)]}
        log.warning("%s is a defaultdict of %r, and is kept as a plain dict", where, factory)
    if isinstance(value, Mapping):
        pairs = [(key, encode(item, f"{where}[{key!r}]", tensors)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[encode(key, f"a key of {where}", tensors), item] for key, item in pairs]}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: numbers, "
        "strings, lists, tuples, dictionaries, tensors and arrays can be saved, other objects cannot (nothing is "
        "pickled); save what is needed to make it again"
    )


def _encode_tensor(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    array = isinstance(value, np.ndarray)
    try:
        tensor = torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape) if array else value.detach()
    except TypeError as error:
        raise CheckpointError(f"{where}: {error}") from None
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{where} is a tensor of {tensor.dtype}, which a checkpoint cannot hold")
    # Two keys of a dictionary may have the same words: tensors have, and NaNs.
    name = where if where not in tensors else f"{where} ({len(tensors)})"
    tensors[name] = tensor.cpu().contiguous().reshape(-1)
    return {"$array" if array else "$tensor": name, "shape": list(tensor.shape)}


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of :func:`encode`; ``tensors`` are 1-D, by name.

    Example:
        >>> decode({'$dict': [['a', {'$tuple': [1, 2.5]}], [3, {'$float': 'inf'}]]}, {})
        {'a': (1, 2.5), 3: inf}
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    if kind in SEQUENCES:
        return SEQUENCES[kind](decode(value[kind], tensors))
    makers: dict[str, Any] = {
        "$float": float,
        "$bytes": bytes.fromhex,
        "$dtype": lambda name: {key: kind for key, kind in vars(torch).items() if isinstance(kind, torch.dtype)}[name],
        "$tensor": lambda name: tensors[name].reshape(value["shape"]),
        "$array": lambda name: tensors[name].reshape(value["shape"]).numpy(),
        "$namespace": lambda named: _namespace(decode(named, tensors)),
        "$counter": lambda counts: Counter(decode(counts, tensors)),
        "$defaultdict": lambda pair: defaultdict(FACTORIES[pair[0]], decode(pair[1], tensors)),
        "$dict": lambda pairs: dict(decode(pairs, tensors)),
    }
    return makers[kind](value[kind])


def _namespace(named: dict[str, Any]) -> Namespace:
    made = Namespace()
    vars(made).update(named)  # an attribute may be called ``self``, which its constructor does not take
    return made


def tensor_names(value: Any) -> dict[str, list[int]]:
    """Names and shapes of the tensors that an encoded value refers to."""
    if not isinstance(value, (list, dict)):
        return {}
    if isinstance(value, dict):
        for kind in ("$tensor", "$array"):
            if kind in value:
                return {value[kind]: value["shape"]}
    items = value.values() if isinstance(value, dict) else value
    return {name: shape for item in items for name, shape in tensor_names(item).items()}
