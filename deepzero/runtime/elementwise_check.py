"""May ZeRO cut this optimizer up? An experiment on the user's own object, which leaves no trace in it.

ZeRO gives each rank's optimizer 1-D fp32 tensors, the *masters*, each a slice of a parameter. That is right for every
optimizer that is **elementwise**: a new value depends on the old value, gradients and state at the same place and on
nothing else. SGD, Adam and their kin are. LAMB and LARS (norm of a whole layer), Adafactor (rows and columns), Muon
(matrices), Shampoo and L-BFGS are not, and would train *wrongly and silently* on slices. A list of names would not have
the next one, or the user's own, so :func:`check_elementwise` tries. What is declared *per tensor* gets whole tensors,
and is tried on such.

The trial must run *the user's object*, with its settings, and must not touch its parameters, its state, its counters,
its hooks or the random number generators. A copy will not do: ``copy.copy`` and ``copy.deepcopy`` of a torch optimizer
keep three attributes and drop all others (``Optimizer.__getstate__``), and a class whose ``__del__`` frees something
(DeepSpeedCPUAdam) frees it when the copy dies. So :func:`borrowed` puts other things into the object itself, and puts
everything back, also after an exception.

Source: [PyTorch], ``torch/optim/optimizer.py``, for what an optimizer consists of.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from deepzero.config.strict import ConfigError
from deepzero.config.zero import ZeroConfig
from deepzero.device import accelerator_of
from deepzero.runtime.per_tensor import is_per_tensor

SHAPE = (6, 8)
"""Of the matrix in the trial."""

CUT = 20
"""Where its 48 elements are cut in two: neither at a row nor at a power of two."""

STEPS, LR, TOLERANCE = 3, 0.05, 1e-6

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@contextlib.contextmanager
def borrowed(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """The same object, inside the block with no parameter groups, empty state, copied attributes and no hooks.

    Inside, set ``param_groups`` (see :func:`settings_of`) and step it. Afterwards each attribute is the object that it
    was before. An optimizer that wraps another one, which would step the real parameters, is refused.

    Example:
        >>> weight, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> settings = settings_of(optimizer.param_groups[0])
        >>> other.grad = torch.ones(1)
        >>> with borrowed(optimizer) as lent:
        ...     lent.param_groups = [{**settings, "params": [other]}]
        ...     lent.step()
        >>> other.item(), optimizer.param_groups[0]["params"][0] is weight
        (0.5, True)
    """
    real = dict(vars(optimizer))
    inner = [k for k, v in real.items() if isinstance(v, torch.optim.Optimizer) and v is not optimizer]
    if inner or "param_groups" not in real or "state" not in real:
        what = f"holds another optimizer in its attribute {inner[0]!r}" if inner else "keeps its groups elsewhere"
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} {what}. ZeRO replaces an optimizer's parameters by this rank's "
            "share of them, which it cannot do through a wrapper; pass the inner optimizer"
        )
    params = [p for group in real["param_groups"] for p in group["params"]]
    # References to the optimizer itself (a scheduler wraps ``step`` in a bound method) and to the real parameters stay
    # references; everything else that can be copied is.
    memo: dict[int, Any] = {id(optimizer): optimizer, **{id(p): p for p in params}}
    lent: dict[str, Any] = {name: OrderedDict() for name in _HOOKS if name in real}
    for name, value in real.items():
        if name not in ("param_groups", "state", *_HOOKS):
            lent[name] = value
            # A foreign __deepcopy__ may raise anything; modules, locks and C++ handles cannot be copied.
            with contextlib.suppress(Exception):
                lent[name] = copy.deepcopy(value, memo)
    devices = {p.device for p in params if accelerator_of(p.device).has_streams}
    generators = {device: accelerator_of(device).rng_state(device) for device in devices}
    vars(optimizer).update(lent, param_groups=[], state=defaultdict(dict))
    try:
        with torch.random.fork_rng(devices=()):
            yield optimizer
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(real)
        for device, state in generators.items():
            accelerator_of(device).set_rng_state(state, device)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's settings without its parameters, as copies: some optimizers count steps in there."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def is_per_element(name: str, value: Any, shape: torch.Size) -> bool:
    """Whether a parameter's state ``name`` has a value for each of its elements: of no dimensions, by the name."""
    if not torch.is_tensor(value) or value.numel() != shape.numel():
        return False
    return value.dim() > 0 or (not shape and name not in ("step", "mu_product", "eta", "mu"))


def state_like(
    state: Mapping[str, Any], real: torch.Tensor, other: torch.Tensor, values: bool = True
) -> dict[str, Any]:
    """State for ``other`` as ``real`` had it from the optimizer's constructor (Adagrad's accumulators).

    Tensors of the parameter's extent are taken to hold one value everywhere, and their first one is used;
    ``values=False`` fills in zeros, where extents alone are asked for: the real tensors may have no values.
    """
    new: dict[str, Any] = {}
    for name, value in state.items():
        if is_per_element(name, value, real.shape):
            first = value.reshape(-1)[0].item() if values and value.numel() else 0.0
            new[name] = torch.full_like(other, first, dtype=value.dtype, requires_grad=False)
        else:
            new[name] = copy.deepcopy(value)
    return new


def steps_in_turn(zero: ZeroConfig, optimizer: torch.optim.Optimizer, world_size: int) -> bool:
    """Whether a rank's step may call the optimizer's several times, each time with a part of the gradients."""
    numels = [p.numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    # At most: parts of buckets, of which there are no more than parameters, are aligned; and one rank may have all
    # that is whole.
    whole = any(is_per_tensor(optimizer, group) for group in optimizer.param_groups)
    share = sum(numels) if whole else -(-sum(numels) // world_size) + zero.shard_align * len(numels)
    in_sub_groups = zero.stage == 3 and zero.sub_group_size < share
    return zero.overlap_param_gather or zero.offload_optimizer.device != "none" or in_sub_groups


def check_elementwise(optimizer: torch.optim.Optimizer, in_turn: bool = False, cut: bool = True) -> None:
    """Refuse an optimizer that cannot work on slices; with ``in_turn`` one that has to step on all of them at once.

    Without ``cut``, as in stage 0, parameters are whole and lose their shape alone: LAMB may have its norms.

    Three steps on a matrix, and the same numbers once more in two 1-D slices with nothing in common, as they would lie
    on two ranks; the second slice's gradients are thirty times larger, so that a norm over everything shows. The
    results must agree to 1e-6. A group that is declared per tensor (:mod:`deepzero.runtime.per_tensor`) steps on two
    whole tensors instead, together and each alone. Settings are those of ``optimizer``, except the learning rate, which
    may be 0 at the start of a schedule and would show nothing. Parameters, state and random numbers are left as they
    are. An optimizer that does not run on such tensors, with dense gradients and without a closure, is refused too.

    Example:
        >>> check_elementwise(torch.optim.AdamW([torch.zeros(2, 2, requires_grad=True)]))
    """
    tried: list[str] = []
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        whole, dims = is_per_tensor(optimizer, group), sorted({param.dim() for param in group["params"]})
        settings = repr((settings_of(group), dims if whole else ()))
        if not group["params"] or settings in tried:
            continue
        tried.append(settings)
        device = group["params"][0].device
        for trials in [_tensors(d, device) for d in dims] if whole else [_slices(device, cut)]:
            if (problem := _try_group(optimizer, group, trials, in_turn)) and whole:
                raise ConfigError(
                    f"a param group of {name} is declared per tensor, so each tensor's new value may depend on that "
                    f"tensor, its gradients and its state alone. {name} {problem}; ZeRO gives each tensor to one rank, "
                    "which has the others not"
                )
            if problem:
                raise ConfigError(
                    "ZeRO gives each rank a 1-D slice of the parameters, so the optimizer must be elementwise: each "
                    f"new value may depend on the value, gradients and state at the same place alone. {name} {problem};"
                    " use AdamW, Adam, SGD or another elementwise optimizer. One that needs whole tensors, each by "
                    "itself (Muon, Adafactor, LAMB, Shampoo), has to say so: 'per_tensor': True in its param groups"
                )


Trial = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""A tensor's values, and its gradients in each of the :data:`STEPS`."""


def _random(shape: Sequence[int], device: torch.device, seed: int, factor: float = 1.0) -> Trial:
    generator = torch.Generator().manual_seed(seed)  # on the CPU: all ranks come to one verdict
    start, *grads = (torch.randn(shape, generator=generator).to(device) for _ in range(1 + STEPS))
    return start, [grad * factor for grad in grads]


def _slices(device: torch.device, cut: bool) -> tuple[list[Trial], list[Trial]]:
    """A matrix, and what ranks would have of it."""
    start, grads = _random(SHAPE, device, 0)
    for grad in grads:
        grad.view(-1)[CUT:].mul_(30.0)
    cuts = (slice(0, CUT), slice(CUT, None)) if cut else (slice(None),)
    return [(start, grads)], [(start.view(-1)[one], [grad.view(-1)[one] for grad in grads]) for one in cuts]


def _tensors(dims: int, device: torch.device) -> tuple[list[Trial], list[Trial]]:
    """Two tensors of so many dimensions, wide and tall, together and apart."""
    shape = (*SHAPE, 2, 3, 2)[:dims]
    both = [_random(shape, device, 0), _random(shape[::-1], device, 1, 30.0)]
    return both, both


def _try_group(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], trials: tuple[list[Trial], list[Trial]], in_turn: bool
) -> str | None:
    """What speaks against the optimizer with the settings of ``group``; None: nothing.

    ``trials``: what it steps on at once, and the same elements in the pieces that ranks would have.
    """
    at_once, pieces = trials
    try:
        whole = _run(optimizer, group, at_once)
        apart = torch.cat([_run(optimizer, group, [piece]) for piece in pieces])
        turns = _run(optimizer, group, pieces, in_turn) if in_turn else apart
    except ConfigError:
        raise
    except Exception as error:  # a foreign step() may raise anything
        what = "slices" if pieces[0][0].dim() < at_once[0][0].dim() else "tensors"
        return f"failed in a trial on such {what} ({type(error).__name__}: {error})"
    if torch.equal(whole, torch.cat([start.reshape(-1) for start, _ in at_once])):
        return f"moved nothing in a trial of {STEPS} steps, so this cannot be tested"
    kind, all_of_it = ("slice", "the whole") if at_once is not pieces else ("tensor", "several at once")
    with_settings = "as with offload_optimizer, overlap_param_gather or sub_group_size"
    for found, what in (
        (apart, f"for {kind}s than for {all_of_it}"),
        (turns, f"when it stepped on one {kind} after another, {with_settings}"),
    ):
        difference = (whole - found).abs().max().item()
        if not difference <= TOLERANCE * max(1.0, whole.abs().max().item()):
            return f"gave other results {what}, by up to {difference:.3g}"
    return None


def _run(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], trials: Sequence[Trial], in_turn: bool = False
) -> torch.Tensor:
    """What the tensors become, end to end: all step at once, or in every step one after the other."""
    params, real = [start.clone().requires_grad_() for start, _ in trials], group["params"][0]
    settings, made = settings_of(group), optimizer.state.get(real)
    if "lr" in settings:
        settings["lr"] = torch.full_like(settings["lr"], LR) if torch.is_tensor(settings["lr"]) else LR
    with borrowed(optimizer) as lent:
        lent.param_groups = [{**settings, "params": params}]
        if made:
            lent.state.update((param, state_like(made, real, param)) for param in params)
        for step in range(STEPS):
            for turn in [[place] for place in range(len(params))] if in_turn else [range(len(params))]:
                for place in turn:
                    params[place].grad = trials[place][1][step].clone()
                lent.step()
                for param in params:
                    param.grad = None
    return torch.cat([param.detach().reshape(-1) for param in params])
