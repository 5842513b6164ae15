"""What a program declares about its modules before training: leaves, and parameters used outside their modules.

The declarations belong to the modules and live as long as they do, whatever engine they are given to. They stand on the
module itself, as DeepSpeed's do: a copy of a leaf is a leaf, and a copied model's modules use its own parameters.

Source: [DeepSpeed], ``utils/z3_leaf_module.py``, and ``register_external_parameter`` in ``partition_parameters.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

LEAF = "_z3_leaf"
"""The attribute of a module that is a leaf; DeepSpeed's."""
EXTERNAL = "_external_parameters"
"""The attribute of a module that uses parameters of others: their list."""


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Declare modules of these classes as leaves: ZeRO does not look below them. Call it before ``initialize``.

    A class is given as itself, by its name or by its full name (``package.file.Class``). Returns the modules found;
    raises a ValueError if there is none, unless ``raise_if_not_found`` is False.
    """
    given = list(leaf_module_classes)
    classes = tuple(c for c in given if isinstance(c, type))
    full = {module: f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()}
    found = [m for m in full if isinstance(m, classes) or type(m).__name__ in given or full[m] in given]
    if not found and raise_if_not_found:
        raise ValueError(f"the model has no module of {', '.join(getattr(c, '__name__', str(c)) for c in given)}")
    for module in found:
        module.__dict__[LEAF] = True
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The inverse of :func:`set_z3_leaf_modules`, before ``initialize``; returns those that were leaves."""
    leaves = [module for module in model.modules() if z3_leaf_module(module)]
    found = set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)
    for module in found:
        del module.__dict__[LEAF]
    return [module for module in leaves if module in found]


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether ``module`` has been declared a leaf."""
    # Not by getattr: what wraps a leaf (``torch.compile``) answers for it. DeepSpeed unsets a leaf by False.
    return module.__dict__.get(LEAF) is True


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """``module`` uses ``parameter``, which belongs to another module: fetch it with the module's own.

    Uses inside a forward pass are noticed without this; registering lets the fetch come earlier. As in DeepSpeed it is
    an attribute: a copy of the whole model uses its own parameter, and a copy or pickle of ``module`` alone takes one
    along. Raises a TypeError for what is not a module, or not a parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"register_external_parameter takes a module and a parameter, got {type(module).__name__} and "
            f"{type(parameter).__name__}"
        )
    known = external_parameters(module)
    if not any(p is parameter for p in known):
        module.__dict__[EXTERNAL] = [*known, parameter]  # a shallow copy of the module shares the list that was


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """The inverse of :func:`register_external_parameter`. Raises a ValueError if it was not registered."""
    known = external_parameters(module)
    if not any(p is parameter for p in known):
        raise ValueError("this parameter is not registered with this module")
    module.__dict__[EXTERNAL] = [p for p in known if p is not parameter]


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that are registered with ``module``."""
    return module.__dict__.get(EXTERNAL, [])
