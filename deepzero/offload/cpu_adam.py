"""CPUAdam: Adam and AdamW for parameters and state in the CPU's memory, one pass over it for each step.

ZeRO-Offload keeps the fp32 masters and both moments on the CPU: 12 bytes an element that the GPU does not hold. What
remains to be done there is one Adam step, and what enters and leaves is narrow: the reduced gradient comes in fp32
or bf16, the new parameter goes back in bf16. Casts and the division by loss scale, ranks and clipping happen on the way
through the cache (:mod:`deepzero.offload.adam_kernels`)::

    grad (bf16) --widen--> / scale --> exp_avg, exp_avg_sq, param (fp32, in place) --round--> out (bf16)

Everything else is torch's: state and its names, hooks, schedulers, GradScaler's attributes, state dicts that
``torch.optim.AdamW`` loads and writes.

Sources: [ZeRO-Offload], section 5, "Optimized CPU execution"; ``ops/adam/cpu_adam.py`` in [DeepSpeed] for the
arguments. Left out: AMSGrad, maximization, moments narrower than fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from deepzero.offload.adam_kernels import KERNELS, Kernel, Numbers, Segment, Variant, choose_kernel, update_on_device
from deepzero.offload.pinned_arena import zeros_on_large_pages

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # and of what is written into ``out``
GRAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MOMENTS = ("exp_avg", "exp_avg_sq")


class _Place(NamedTuple):
    """A parameter, its group, and how an error names it."""

    name: str
    group: dict[str, Any]
    param: torch.Tensor


class CPUAdam(torch.optim.Optimizer):
    """Adam or AdamW over CPU tensors; a drop-in for ``torch.optim.AdamW`` and for ``DeepSpeedCPUAdam``.

    Args:
        params: tensors or parameter groups; fp32, or bf16 and fp16 standing alone, which are widened for the arithmetic
            and rounded back; contiguous when it steps on them. Tensors on a GPU are stepped by torch's fused kernel.
        lr: learning rate.
        betas: decay of the running means of the gradient and of its square, each in [0, 1).
        eps: added to the denominator.
        weight_decay: decay rate.
        adamw_mode: AdamW's decay of the parameters; False: Adam's, added to the gradient.
        bias_correction: divide the means by what they lack in their first steps.
        kernel: ``compiled`` by a C++ compiler, ``chunked``, or ``auto``: compiled where there is a compiler, and enough
            to do, else chunked. Their bits differ in the last place, so a choice lasts as long as the optimizer; name
            one to have the same bits on another machine.
        switches: DeepSpeed's :attr:`switches`, with the values that they have there.

    Raises:
        ValueError: a number out of range, an option that is not there.
        RuntimeError: from the first step, when the ``kernel`` that was asked for cannot be had.

    Example:
        >>> weight = torch.ones(3, requires_grad=True)
        >>> optimizer = CPUAdam([weight], lr=0.5)
        >>> copy = torch.empty(3, dtype=torch.bfloat16)
        >>> optimizer.step([torch.full((3,), 8.0, dtype=torch.bfloat16)], [copy], scale=4.0)
        >>> copy.tolist(), optimizer.kernel
        ([0.5, 0.5, 0.5], 'chunked')
    """

    switches: ClassVar[dict[str, bool]] = {"amsgrad": False, "fp32_optimizer_states": True}
    """Arguments of DeepSpeedCPUAdam that have one value here: both moments are fp32, and there is no third."""

    # torch's contract with GradScaler, and OptimizerShard's: around a step they set the attributes grad_scale and
    # found_inf, and delete them. **They must not exist in between**, because GradScaler multiplies what it finds.
    _step_supports_amp_scaling = True

    # Of the class as well: what torch unpickles and copies has no other attributes than its own and ``_request``.
    _request = "auto"
    device_types: tuple[str, ...] = ("cpu", "cuda")  # of parameters that it steps on; a dry run's has others
    _kernel: Kernel | None = None
    _reason = ""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        bias_correction: bool = True,
        *,
        kernel: str = "auto",
        **switches: bool,
    ) -> None:
        if unknown := switches.keys() - self.switches:
            raise TypeError(f"CPUAdam() got an unexpected keyword argument {min(unknown)!r}")
        if kernel not in KERNELS:
            raise ValueError(f"CPUAdam(kernel={kernel!r}) must be one of {', '.join(KERNELS)}")
        if not switches.get("fp32_optimizer_states", True):
            raise ValueError("CPUAdam(fp32_optimizer_states=False) is not implemented: both moments are kept in fp32")
        self._request = kernel
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        # torch's names, so that AdamW's state dicts say the same thing in the same words.
        defaults |= {"bias_correction": bool(bias_correction), "amsgrad": switches.get("amsgrad", False)}
        super().__init__(params, {**defaults, "decoupled_weight_decay": bool(adamw_mode)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's, and everything that is wrong with the group's numbers and parameters is said at once."""
        if "adamw_mode" in param_group:
            param_group = {**param_group, "decoupled_weight_decay": bool(param_group["adamw_mode"])}
            del param_group["adamw_mode"]
        where = f"param_groups[{len(self.param_groups)}]"
        check_numbers({**self.defaults, **param_group}, where)
        super().add_param_group(param_group)
        try:
            for i, param in enumerate(self.param_groups[-1]["params"]):
                check_param(param, f"{where}['params'][{i}]", self.device_types, steps=False)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _places(self) -> list[_Place]:
        return [
            _Place(f"param_groups[{g}]['params'][{i}]", group, param)
            for g, group in enumerate(self.param_groups)
            for i, param in enumerate(group["params"])
        ]

    # ---- which kernel ------------------------------------------------------------------------------------------------

    @property
    def kernel(self) -> str:
        """``chunked`` or ``compiled``; ``auto`` until :meth:`prepare` or the first step has chosen."""
        return self._kernel.name if self._kernel is not None else self._request

    def prepare(
        self, grad_dtype: torch.dtype = torch.float32, out_dtype: torch.dtype | None = None, masters: int | None = None
    ) -> None:
        """Choose the kernel and compile it now, which takes some seconds, and not in the first step.

        ``out_dtype`` None: there will be no ``out``. ``masters``: so many fp32 elements on the CPU take the parameters'
        places before the first step; None: none do.
        """
        kinds = {
            (param.dtype if masters is None else torch.float32, grad_dtype, out_dtype, float(group["betas"][0]) > 0.5)
            for _, group, param in self._places()
            if param.device.type == "cpu" or masters
        }
        self._ready(kinds, masters)

    def describe(self) -> str:
        """One line: the kernel, and why this one."""
        if self._kernel is None:
            return f"CPUAdam: kernel {self._request}, chosen at the first step"
        return f"CPUAdam: {self._kernel.name} kernel, {self._reason}"

    def _ready(self, kinds: Iterable[Variant], numel: int | None = None) -> Kernel:
        wanted = sorted(kinds, key=str)
        if self._kernel is None:
            if numel is None:
                numel = sum(param.numel() for *_, param in self._places() if param.device.type == "cpu")
            self._kernel, self._reason = choose_kernel(self._request, numel, wanted)
        self._kernel.ready(wanted)
        return self._kernel

    def use(self, kernel: str, why: str) -> None:
        """Step with this kernel (no longer ``auto``) from now on, before the first step; ``why``: see describe()."""
        self._kernel, self._reason = choose_kernel(kernel, 0, ())[0], why

    def twin(self) -> CPUAdam:
        """Another CPUAdam over the same parameters and the same state, with the settings of this moment."""
        # Schedules change numbers that are tensors where they are.
        groups = [
            {k: v.clone() if k != "params" and torch.is_tensor(v) else v for k, v in group.items()}
            for group in self.param_groups
        ]
        made = self._over(groups)
        made.state, made._kernel, made._reason = self.state, self._kernel, self._reason
        return made

    def _over(self, groups: list[dict[str, Any]]) -> CPUAdam:
        return CPUAdam(groups, kernel=self._request)

    # ---- a step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        grads: Sequence[torch.Tensor | None] | Callable[[], Any] | None = None,
        out: Sequence[torch.Tensor | None] | None = None,
        scale: float | torch.Tensor = 1.0,
        *,
        closure: Callable[[], Any] | None = None,
        only: Sequence[torch.Tensor] | None = None,
    ) -> Any:
        """Update parameters and moments. Whatever is wrong with the arguments is found before anything is written.

        Args:
            grads: one for each parameter, in the order of the groups, of its shape and on its device, in bf16, fp16,
                fp32 or fp64; None entries are passed over. They are only read. None: each parameter's ``.grad``. A
                callable is a closure, as in torch.
            out: like ``grads``: what each new parameter is also written to, in bf16, fp16 or fp32. ``out`` may be wider
                or narrower than the parameter; it gets ``param.to(dtype)``.
            scale: gradients are divided by it, in fp32. A number or a one-element tensor. Instead of it torch's
                attribute ``grad_scale`` may be set, which gives the same bits; when ``found_inf`` is set and not 0,
                nothing happens.
            closure: called first, with gradients enabled; what it returns is returned.
            only: the parameters that this step is about, and that ``grads`` and ``out`` are parallel to. None: all.
        """
        if callable(grads):
            if closure is not None:
                raise TypeError("CPUAdam.step() got two closures: as first argument and by name")
            grads, closure = None, grads
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        divisor, grad_scale = one_number(scale, "scale"), getattr(self, "grad_scale", None)
        if grad_scale is not None:
            if divisor != 1.0:
                raise ValueError(f"CPUAdam.step(scale={divisor}): the attribute grad_scale is set too; use one of them")
            divisor = one_number(grad_scale, "grad_scale")
        if (found_inf := getattr(self, "found_inf", None)) is not None and found_inf.item() != 0:
            return loss
        targets = self._targets(grads, out, only)
        kinds = {
            (param.dtype, grad.dtype, None if written is None else written.dtype, float(group["betas"][0]) > 0.5)
            for (_, group, param), grad, written in targets
            if param.device.type == "cpu"
        }
        kernel = self._ready(kinds) if kinds else None
        states = [self._state_of(place) for place, *_ in targets]  # all are checked before one is written
        for (place, grad, written), state in zip(targets, states, strict=True):
            state["step"] += 1
            on_cpu = place.param.device.type == "cpu"
            update = kernel.update if kernel is not None and on_cpu else update_on_device
            segment = Segment(place.param, state["exp_avg"], state["exp_avg_sq"], grad, written)
            update(segment, Numbers.of(place.group, float(state["step"]), divisor))
        return loss

    def _targets(
        self,
        grads: Sequence[torch.Tensor | None] | None,
        out: Sequence[torch.Tensor | None] | None,
        only: Sequence[torch.Tensor] | None,
    ) -> list[tuple[_Place, torch.Tensor, torch.Tensor | None]]:
        """The parameters that have a gradient, with that and their output, checked."""
        chosen = self._places()
        if only is not None:
            only = list(only)
            places = {id(place.param): place for place in chosen}
            for i, param in enumerate(only):
                if id(param) not in places:
                    raise ValueError(f"CPUAdam.step(only=...): only[{i}] is not a parameter of this optimizer")
            chosen = [places[id(param)] for param in only]
            if len({id(param) for param in only}) != len(chosen):
                raise ValueError("CPUAdam.step(only=...) names a parameter twice, which would be stepped twice")
        for name, given in (("grads", grads), ("out", out)):
            if given is not None and not isinstance(given, (list, tuple)):
                raise TypeError(f"CPUAdam.step({name}=...) must be a list of tensors, not {type(given).__name__}")
            if given is not None and len(given) != len(chosen):
                raise ValueError(
                    f"CPUAdam.step({name}=...) has {len(given)} entries for the {len(chosen)} parameters "
                    f"{'of the optimizer' if only is None else 'in only='}; give one entry for each, None for a "
                    "parameter without"
                )
        targets = []
        for i, place in enumerate(chosen):
            grad, written = place.param.grad if grads is None else grads[i], None if out is None else out[i]
            if grad is None:
                continue
            check_param(place.param, place.name, self.device_types)
            check_tensor(grad, f"the gradient of {place.name}", place.param, GRAD_DTYPES)
            if written is not None:
                check_tensor(written, f"the output for {place.name}", place.param, PARAM_DTYPES)
            targets.append((place, grad, written))
        for g, group in enumerate(self.param_groups):
            check_numbers(group, f"param_groups[{g}]")
        return targets

    # ---- state -------------------------------------------------------------------------------------------------------

    @staticmethod
    def initial_state(param: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the first step starts from, under torch's names: ``step`` on the CPU, both moments fp32 zeros."""
        step = torch.zeros((), dtype=torch.float32, device="cpu")
        zeros = {key: torch.zeros(param.shape, dtype=torch.float32, device=param.device) for key in MOMENTS}
        return {"step": step, **zeros}

    def _state_of(self, place: _Place) -> dict[str, Any]:
        state, param = self.state[place.param], place.param
        if not state:
            state.update(self.initial_state(param))
            if param.device.type == "cpu":
                state.update({key: zeros_on_large_pages(param.shape) for key in MOMENTS})
        if not state.keys() >= {"step", *MOMENTS}:
            raise ValueError(f"the state of {place.name} has {sorted(state)}: it needs step, exp_avg, exp_avg_sq")
        for key in MOMENTS:
            check_tensor(state[key], f"the state {key} of {place.name}", param, (torch.float32,))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch's, for state dicts of this class and of ``torch.optim.Adam`` and ``AdamW``."""
        super().load_state_dict(state_dict)
        # Torch casts moments to their parameter's dtype. Those of bf16 and fp16 parameters stay fp32 here.
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, (*_, param) in zip(saved, self._places(), strict=True):
            for key in MOMENTS:
                value = state_dict["state"].get(number, {}).get(key)
                if value is not None and param.dtype != torch.float32:
                    self.state[param][key] = value.to(dtype=torch.float32, device=param.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the optimizer keeps: torch's three attributes, and which kernel was asked for."""
        return {**super().__getstate__(), "_request": self._request}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by torch's ``load_state_dict``, with groups that another class may have written."""
        super().__setstate__(state)
        for g, group in enumerate(self.param_groups):
            for name in ("bias_correction", "amsgrad", "decoupled_weight_decay"):
                group.setdefault(name, self.defaults[name])
            if group.get("maximize"):
                raise ValueError(f"param_groups[{g}]: maximize=True is not implemented by CPUAdam; negate the loss")
            check_numbers(group, f"param_groups[{g}]")
            for own in filter(None, map(self.state.get, group["params"])):
                if "step" in own:
                    own["step"] = torch.tensor(float(own["step"]), dtype=torch.float32)


# ---- what is refused, before anything is written ---------------------------------------------------------------------


def one_number(value: float | torch.Tensor, name: str) -> float:
    """As fp32 holds it."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"CPUAdam.step(): {name} has shape {list(value.shape)}; give a number or a one-element tensor")
    try:
        number = torch.tensor(float(value), dtype=torch.float32).item()
    except (TypeError, ValueError) as error:
        raise TypeError(f"CPUAdam.step(): {name}={value!r} is not a number") from error
    if not 0.0 < number < math.inf:
        problem = "gradients are divided by it: it must be positive and finite in fp32"
        raise ValueError(f"CPUAdam.step(): {name}={float(value)}, but {problem}")
    return number


def check_numbers(group: Mapping[str, Any], where: str) -> None:
    """Refuse hyper-parameters that a step could not use."""
    if group.get("amsgrad"):
        raise ValueError(f"{where}: amsgrad=True is not implemented by CPUAdam; torch.optim.AdamW has it")
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{where}: betas={betas!r} must be two numbers")
    for i, beta in enumerate(betas):
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"{where}: betas[{i}]={float(beta)} must be at least 0 and below 1")
    for name in ("lr", "eps", "weight_decay"):
        if not 0.0 <= float(group[name]) < math.inf:
            raise ValueError(f"{where}: {name}={float(group[name])} must be finite and not negative")


def check_param(param: torch.Tensor, name: str, device_types: Sequence[str], steps: bool = True) -> None:
    """Refuse a parameter that a step could not update; before the first one another may lie in its master's place."""
    if param.dtype not in PARAM_DTYPES:
        raise ValueError(f"{name} has dtype {param.dtype}; CPUAdam takes {_listed(PARAM_DTYPES)}")
    with torch._C.DisableTorchFunctionSubclass():  # what zero.Init leaves is refused these questions
        fits = param.layout == torch.strided and (not steps or param.is_contiguous())
    if not fits:
        raise ValueError(f"{name} of shape {list(param.shape)} is not contiguous; give CPUAdam param.contiguous()")
    if param.device.type not in device_types:
        raise ValueError(f"{name} lies on {param.device}; CPUAdam steps parameters on cpu and cuda")


def check_tensor(tensor: Any, what: str, param: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse a gradient, output or moment that does not fit its parameter."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} is {type(tensor).__name__}, not a tensor")
    problem = ""
    if tensor.layout != torch.strided:
        problem = f"is sparse ({tensor.layout}); CPUAdam needs it dense: to_dense()"
    elif tensor.dtype not in dtypes:
        problem = f"has dtype {tensor.dtype}; CPUAdam takes {_listed(dtypes)}"
    elif tensor.shape != param.shape:
        problem = f"has shape {list(tensor.shape)}, the parameter has {list(param.shape)}"
    elif tensor.device != param.device:
        problem = f"lies on {tensor.device}, the parameter on {param.device}; copy it there first"
    elif not tensor.is_contiguous():
        problem = f"of shape {list(tensor.shape)} is not contiguous; pass a contiguous tensor"
    if problem:
        raise ValueError(f"{what} {problem}")


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
