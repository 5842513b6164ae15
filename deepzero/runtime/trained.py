"""What trains, as it stood when the engine was built, and what the program has made of it since.

Masters, gradients and optimizer states exist for the parameters that trained at ``deepzero.initialize``. One that is
frozen afterwards would go on moving by its momentum and weight decay; one that is unfrozen or added would never move,
and might have other values on every rank. So each optimizer step looks whether the same parameters train. Between two
steps a program may freeze and unfreeze as it likes, as it does where two models train in turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_

import torch
from torch import nn

from deepzero.runtime.zero.sharded_step import ParamGroup

ADVICE = "call engine.destroy(), then deepzero.initialize with the model as it is to be trained"


class TrainedParameters:
    """The parameters that an engine trains, and the model that they must stay in.

    Args:
        model: as it is now.
        groups: of the trained parameters.
    """

    def __init__(self, model: nn.Module, groups: Iterable[ParamGroup]) -> None:
        self._model = model
        names = {param: name for name, param in model.named_parameters()}
        grouped = {param for group in groups for param in group.params}
        self._trained = {param: name for param, name in names.items() if param in grouped}
        # With whether it may require grad all the same: it is in no group of the optimizer, and that has been said.
        self._untrained = [(param, name, param.requires_grad) for param, name in names.items() if param not in grouped]
        self._remember()

    def _remember(self) -> None:
        """The model's tree: the step compares it, object by object, instead of naming all parameters anew."""
        self._tree = [(m, list(m._parameters.values()), list(m._modules.values())) for m in self._model.modules()]

    def _same_tree(self) -> bool:
        return all(
            len(module._parameters) == len(params)
            and len(module._modules) == len(children)
            and all(map(is_, module._parameters.values(), params))
            and all(map(is_, module._modules.values(), children))
            for module, params, children in self._tree
        )

    def check(self) -> None:
        """Raise a :class:`RuntimeError` when other parameters train than did when the engine was built."""
        with torch._C.DisableTorchFunctionSubclass():  # flags need no values, and no detour through Python
            for param, name in self._trained.items():
                if not param.requires_grad:
                    raise RuntimeError(
                        f"parameter {name!r} was frozen (requires_grad=False) after deepzero.initialize: its momentum "
                        "and weight decay would go on moving it. Let it train again, or give it a param group of its "
                        f"own from the start and set that group's lr to 0; or {ADVICE}"
                    )
                if param.grad is not None:
                    raise RuntimeError(
                        f"parameter {name!r} has a .grad that was assigned by hand: engine.step() takes what backward "
                        "passes have left, and would ignore it. Use deepzero.utils.safe_set_full_grad, or set it to "
                        "None"
                    )
            for param, name, trainable in self._untrained:
                if param.requires_grad and not trainable:
                    raise RuntimeError(
                        f"parameter {name!r} was unfrozen (requires_grad=True) after deepzero.initialize: ZeRO has no "
                        f"master and no optimizer state for it, and it would never change. Freeze it again; or {ADVICE}"
                    )
            if not self._same_tree():
                self._check_tree()

    def _check_tree(self) -> None:
        now = {param: name for name, param in self._model.named_parameters()}
        gone = [name for param, name in self._trained.items() if param not in now]
        if gone:
            raise RuntimeError(
                f"parameter {gone[0]!r} has been replaced or removed since deepzero.initialize, and the optimizer "
                f"would go on training the old one. Put it back; or {ADVICE}"
            )
        known = {*self._trained, *(param for param, *_ in self._untrained)}
        added = [name for param, name in now.items() if param.requires_grad and param not in known]
        if added:
            raise RuntimeError(
                f"parameter {added[0]!r} has been added since deepzero.initialize: the optimizer does not know it, and "
                f"every rank has its own values of it. Freeze it (requires_grad_(False)); or {ADVICE}"
            )
        self._remember()
