"""Ownership: a parameter belongs to one engine, and stays where that engine has put it.

An engine's parameters are views of its flat buffers (stages 0-2) or placeholders without elements (stage 3). Two
engines over one model would both reduce its gradients, and ``model.half()`` would take the parameters out of the
buffers that all-gathers write. Both are refused before anything is changed, with the parameter's name.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from deepzero.config.strict import ConfigError

log = logging.getLogger(__name__)

_OWNED: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""Parameters of engines, by id."""

_LOST: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""Parameters, by id, of models that were being moved when an exception came: some may have lost their values."""

ANEW = "Build model and optimizer anew"
STAY = (
    "Device and dtype of a model's parameters are settled by deepzero.initialize (precision, the rank's device): move "
    "or cast the model before it, or after engine.destroy()"
)
_APPLY = nn.Module._apply


def check_unclaimed(names: Mapping[nn.Parameter, str]) -> None:
    """Raise a :class:`ConfigError` when any of these parameters belongs to an engine, or was lost on the way to one."""
    for param, name in names.items():
        if id(param) in _OWNED:
            raise ConfigError(f"parameter {name!r} belongs to another engine; call engine.destroy() on that one first")
        if id(param) in _LOST:
            raise ConfigError(
                f"parameter {name!r} is of a model that an earlier deepzero.initialize left in pieces, as it broke off "
                f"while it moved the parameters. {ANEW}"
            )


def register_owner(param: nn.Parameter, name: str) -> None:
    """Let the parameter belong to an engine. Raises a :class:`ConfigError` if it belongs to one already."""
    check_unclaimed({param: name})
    _OWNED[id(param)] = param
    nn.Module._apply = _apply  # type: ignore[method-assign]


def unregister_owner(param: nn.Parameter) -> None:
    """Let the parameter belong to no engine."""
    _OWNED.pop(id(param), None)


@contextlib.contextmanager
def lost_on_error(model: nn.Module) -> Iterator[None]:
    """Mark the model as lost when an exception comes while its parameters are being moved: no engine takes it then."""
    try:
        yield
    except BaseException as error:
        for param in model.parameters():
            unregister_owner(param)
            _LOST[id(param)] = param
        text = f"deepzero.initialize broke off while it moved the model's parameters, which it leaves in pieces. {ANEW}"
        getattr(error, "add_note", log.error)(text)  # Python 3.10 has no notes
        raise


def _apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Replace ``nn.Module._apply``, on which ``to``, ``half``, ``cuda`` and their like rest, in every module.

    A call that leaves an engine's parameters as they are (``to`` the device where they lie) goes on with everything
    else; one that would move or cast any of them raises a :class:`RuntimeError` that names the first.
    """
    staying: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for prefix, part in module.named_modules() if recurse else [("", module)]:
        for key, param in part._parameters.items():
            if param is not None and id(param) in _OWNED:
                staying.append((part._parameters, key, param))
                # What ``fn`` does to a tensor without elements, it would do to the parameter.
                probe = torch.empty([0] * param.dim(), dtype=param.dtype, device=param.device)
                shared = probe.is_shared()
                moved = fn(probe)
                if moved is not probe or probe.is_shared() != shared:
                    name = f"{prefix}.{key}" if prefix else key
                    raise RuntimeError(
                        f"parameter {name!r}, {param.dtype} on {param.device}, belongs to an engine: model.to(), "
                        f".half() and their like would make it {moved.dtype} on {moved.device}, outside of ZeRO's "
                        f"buffers. {STAY}"
                    )
    try:
        for params, key, _ in staying:
            params[key] = None
        return _APPLY(module, fn, recurse)
    finally:
        for params, key, param in staying:
            params[key] = param
