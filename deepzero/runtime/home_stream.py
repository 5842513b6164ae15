"""The stream of a backward pass's gradients, in programs that compute on several."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepzero.device import accelerator_of


def weakly(method: Any) -> Callable[[nn.Parameter], None]:
    """A parameter's hook, which stays and does nothing once its object is gone: collectors see no cycle through C++."""
    of, function = weakref.ref(method.__self__), method.__func__
    return lambda param: function(its, param) if (its := of()) is not None else None


class HomeStream:
    """One stream for all that is done with a backward pass's gradients, wherever autograd calls the hooks.

    Autograd calls a parameter's hooks on the stream on which the parameter was first used; a program may compute on
    several. Home is the stream on which the last forward pass was begun (:meth:`set_to_current`). On a device without
    streams hooks stay what they are.
    """

    def __init__(self, d: torch.device) -> None:
        self._accelerator, self._device = accelerator_of(d), d
        self.set_to_current()

    def set_to_current(self) -> None:
        """Let the current stream be home."""
        self._home = self._accelerator.current_stream(self._device)

    def hook(self, function: Callable[..., None], of_param: bool = False) -> Callable[..., None]:
        """``function`` at home, behind what was issued where it is called; ``of_param``: with ``.grad`` as home's."""

        def called(*given: Any) -> None:
            if self._home.current_key() == self._home.key:  # nearly always
                function(*given)
                return
            with self._entered(given[0] if of_param else None):
                function(*given)

        return called if self._accelerator.has_streams else function

    @contextlib.contextmanager
    def _entered(self, param: nn.Parameter | None) -> Iterator[None]:
        grad, event = None, self._accelerator.event
        there, back = event(self._device), event(self._device)
        there.record()
        with self._home.running():
            there.wait()
            with torch._C.DisableTorchFunctionSubclass():
                if param is not None and param.grad is not None:
                    grad, param.grad = param.grad, param.grad.clone()
            yield
            back.record()
        back.wait()
        del grad  # not before: it is the other stream's memory, which goes on with it
