"""Muon for the hidden matrices and AdamW for the rest, as one optimizer; all arithmetic is torch's.

Muon orthogonalises the momentum of a matrix before it is added. It is made for matrices through which activations go:
embeddings, the output head, norms and biases are trained by AdamW beside it. :func:`muon_groups` tells the two apart.

Groups of matrices are declared per tensor, which is all that ZeRO has to know: :mod:`deepzero.runtime.per_tensor`.

Sources: [PyTorch], ``torch/optim/_muon.py``; [DeepSpeed], ``runtime/engine.py``: the names ``muon_lr``, ``adam_lr`` and
``use_muon``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from deepzero.runtime.per_tensor import PER_TENSOR

log = logging.getLogger(__name__)

USE_MUON = "use_muon"
HEADS = ("lm_head", "head", "embed_out", "output_embeddings")
"""Names by which models call the module that makes logits; Hugging Face's say which it is."""
TABLES = (nn.Embedding, nn.EmbeddingBag)


def muon_groups(model: nn.Module, params: Iterable[Any] | None = None) -> list[dict[str, Any]]:
    """Parameter groups for :class:`Muon`: the hidden matrices of each group, and what is left of it.

    A matrix has two dimensions, and belongs neither to an ``nn.Embedding`` nor, tied or not, to the output head: what
    the model's ``get_output_embeddings()`` gives, or a module whose own name is in :data:`HEADS`. A parameter's
    attribute ``use_muon``, as DeepSpeed's scripts set it, has the last word, and a group with that key stays as it is.
    ``params`` are parameters or groups of them; None: all that require a gradient.

    Example:
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
        >>> [(group["use_muon"], len(group["params"])) for group in muon_groups(model)]
        [(True, 1), (False, 2)]
    """
    named = [(name.rpartition(".")[2], module) for name, module in model.named_modules()]
    heads = {_head_of(module) for _, module in named}
    ends = [m for name, m in named if isinstance(m, TABLES) or name in HEADS or m in heads]
    at_ends = {id(param) for module in ends for param in module.parameters()}
    is_matrix = lambda p: bool(getattr(p, USE_MUON, p.dim() == 2 and id(p) not in at_ends))
    given = [p for p in model.parameters() if p.requires_grad] if params is None else params
    split: list[dict[str, Any]] = []
    for group in as_groups(given):
        for use_muon in (True, False):
            chosen = [p for p in group["params"] if bool(group.get(USE_MUON, is_matrix(p))) is use_muon]
            split.append({**group, "params": chosen, USE_MUON: use_muon})
    return [group for group in split if group["params"]]


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameters and groups of them, named or not, as groups whose parameters are listed; the loose ones are one."""
    listed = list(params)
    loose = {"params": [item for item in listed if not isinstance(item, Mapping)]}
    groups = [dict(group) for group in (loose, *(item for item in listed if isinstance(item, Mapping)))]
    for group in groups:
        inside = [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
        group["params"] = [p[1] if isinstance(p, tuple) else p for p in inside]
    return [group for group in groups if group["params"]]


def log_choice(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> None:
    """Say what Muon trains of ``model``, and warn of what may be a head that no rule knows."""
    names = {param: name for name, param in model.named_parameters()}
    matrices = [p for group in groups if group[USE_MUON] for p in group["params"] if p in names]
    log.info("Muon trains %d matrices of %d elements", len(matrices), sum(param.numel() for param in matrices))
    tables = [module.weight.shape for module in model.modules() if isinstance(module, TABLES)]
    alike = [param for param in matrices if param.shape in tables and not hasattr(param, USE_MUON)]
    if len(alike) == 1:  # several are a model's layers, which happen to have an embedding's shape
        log.warning(
            "parameter %r, of the shape of an embedding, is trained by Muon; if it is the output head, set its "
            "attribute use_muon to False, which leaves it to AdamW; else set it to True", names[alike[0]],
        )  # fmt: skip


def _head_of(module: nn.Module) -> nn.Module | None:
    """What a module of Hugging Face's says is its output head, if it has one."""
    try:
        head: nn.Module | None = getattr(module, "get_output_embeddings", lambda: None)()
    except (AttributeError, NotImplementedError):  # of parts of a model
        return None
    return head


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` on groups with ``use_muon=True``, ``torch.optim.AdamW`` on the others, bit for bit.

    Args:
        params: groups with the key ``use_muon``, from :func:`muon_groups` or made by hand.
        lr: learning rate of both.
        muon_lr: of the matrices, instead of ``lr``.
        adam_lr: of the rest, instead of ``lr``.
        weight_decay: decoupled, of both.
        momentum: Muon's.
        betas: AdamW's.
        eps: AdamW's.
        settings: ``nesterov``, ``ns_coefficients``, ``ns_steps``, ``adjust_lr_fn`` are ``torch.optim.Muon``'s, as is
            ``ns_eps``, its ``eps``; ``fused`` is AdamW's. A group may have any setting of its class itself.

    Raises:
        ValueError: a setting that torch's classes refuse; matrices of which no group says whose they are.
        RuntimeError: this torch has no Muon (2.9 is the first).

    Example:
        >>> weight = torch.ones(2, 3, requires_grad=True)
        >>> optimizer = Muon([{"params": [weight], "use_muon": True}], lr=0.1)
        >>> optimizer.param_groups[0]["per_tensor"], optimizer.param_groups[0]["ns_steps"]
        (True, 5)
    """

    switches: Mapping[str, Any] = {
        "nesterov": True, "ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_eps": 1e-7, "ns_steps": 5,
        "adjust_lr_fn": None, "fused": None,
    }  # fmt: skip
    """Settings besides the signature's, with their defaults."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        **settings: Any,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(f"torch {torch.__version__} has no Muon; 2.9 is the first that has")
        if unknown := [name for name in settings if name not in self.switches]:
            raise ValueError(f"Muon has no setting {unknown[0]!r}; it has {', '.join(self.switches)} and its arguments")
        kept = {**self.switches, **settings}
        fused, ns_eps = kept.pop("fused"), kept.pop("ns_eps")
        shared = {"weight_decay": weight_decay}
        matrices = {"lr": lr if muon_lr is None else muon_lr, "momentum": momentum, "eps": ns_eps, **kept, **shared}
        rest = {"lr": lr if adam_lr is None else adam_lr, "betas": betas, "eps": eps, "fused": fused, **shared}
        self._settings = {True: matrices, False: rest}
        super().__init__(as_groups(params), {"lr": lr})

    def __getstate__(self) -> dict[str, Any]:
        # torch copies and pickles what it knows of an optimizer.
        return {**super().__getstate__(), "_settings": self._settings}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's, with the settings of the class that steps on the group."""
        for group in as_groups([param_group]):
            if any(param.dim() >= 2 for param in group["params"]) and USE_MUON not in group:
                raise ValueError(
                    "Muon must be told which of its parameters are hidden matrices: give it "
                    "deepzero.ops.muon_groups(model), or groups with the key 'use_muon'"
                )
            group.setdefault(USE_MUON, False)
            # torch's own constructors look at the settings and add what is missing.
            defaults = self._settings[bool(group[USE_MUON])]
            own = {key: value for key, value in {**defaults, **group}.items() if key in defaults}
            group.update(inner_class(group)([group], **own).param_groups[0])
            group.setdefault(PER_TENSOR, group[USE_MUON])
            super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on the parameters that have a gradient; ``closure``, if given, computes the loss anew and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            inner = inner_class(group)([group])
            inner.state = self.state
            inner.step()
        return loss


def inner_class(group: Mapping[str, Any]) -> Any:
    """Torch's class that steps on a group."""
    return torch.optim.Muon if group[USE_MUON] else torch.optim.AdamW
