"""CPUAdam: Adam and AdamW for parameters and state in the CPU's memory, one pass over it for each step.

ZeRO-Offload keeps the fp32 masters and both moments on the CPU: 12 bytes an element that the GPU does not hold. What
remains to be done there is one Adam step, and what enters and leaves is narrow: the reduced gradient comes in bf16,
the new parameter goes back in bf16. ``step(grads, out, scale)`` takes and gives them so; both casts and the division
by loss scale, ranks and clipping happen on the way through the cache::

    grad (bf16) --widen--> / scale --> exp_avg, exp_avg_sq, param (fp32, in place) --round--> out (bf16)

Everything else is torch's: state and its names, hooks, schedulers, GradScaler's attributes, state dicts that
``torch.optim.AdamW`` loads and writes. The arithmetic and what decides its bits are in
:mod:`deepzero.offload.adam_kernels`.

Sources: ZeRO-Offload (Ren et al. 2021), section 5, "Optimized CPU execution"; DeepSpeed's ``ops/adam/cpu_adam.py`` for
the arguments. Left out: AMSGrad, maximization, moments narrower than fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepzero.offload.adam_checks import (
    GRAD_DTYPES,
    PARAM_DTYPES,
    check_numbers,
    check_param,
    check_tensor,
    one_number,
    subset,
)
from deepzero.offload.adam_choice import KERNELS, choose_kernel
from deepzero.offload.adam_kernels import Kernel, Numbers, Segment, Variant, update_on_device
from deepzero.offload.arena import zeros_on_large_pages


@dataclass(frozen=True)
class _Target:
    """A parameter that this step updates, and how an error names it."""

    name: str
    group: dict[str, Any]
    param: torch.Tensor
    grad: torch.Tensor
    out: torch.Tensor | None


class CPUAdam(torch.optim.Optimizer):
    """Adam or AdamW over CPU tensors; a drop-in for ``torch.optim.AdamW`` and for ``DeepSpeedCPUAdam``.

    Args:
        params: contiguous tensors or parameter groups; fp32, or bf16 and fp16 standing alone, which are widened for the
            arithmetic and rounded back. Tensors on a GPU are stepped by torch's fused kernel.
        lr: learning rate.
        betas: decay of the running means of the gradient and of its square, each in [0, 1).
        eps: added to the denominator.
        weight_decay: decay rate.
        adamw_mode: AdamW's decay of the parameters; False: Adam's, added to the gradient.
        bias_correction: divide the means by what they lack in their first steps.
        amsgrad: only False, as DeepSpeed has it.
        fp32_optimizer_states: only True; both moments are fp32.
        kernel: ``compiled`` by a C++ compiler, by ``numba``, ``chunked``, or ``auto``: the first of them that is there,
            and chunked where there is too little to do. The bits of the first two are the same and differ from chunked
            in the last place, so a choice lasts as long as the optimizer; name one to have them on another machine.

    Raises:
        ValueError: a number out of range, an option that is not there, a parameter that is not contiguous.
        RuntimeError: from the first step, when the ``kernel`` that was asked for cannot be had.

    Example:
        >>> weight = torch.ones(3, requires_grad=True)
        >>> optimizer = CPUAdam([weight], lr=0.5)
        >>> copy = torch.empty(3, dtype=torch.bfloat16)
        >>> optimizer.step([torch.full((3,), 8.0, dtype=torch.bfloat16)], [copy], scale=4.0)
        >>> copy.tolist(), optimizer.kernel
        ([0.5, 0.5, 0.5], 'chunked')
    """

    # torch's contract with GradScaler, and OptimizerShard's: around a step they set the attributes grad_scale and
    # found_inf, and delete them. **They must not exist in between**, because GradScaler multiplies what it finds.
    _step_supports_amp_scaling = True

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
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        kernel: str = "auto",
    ) -> None:
        if kernel not in KERNELS:
            raise ValueError(f"CPUAdam(kernel={kernel!r}) must be one of {', '.join(KERNELS)}")
        if not fp32_optimizer_states:
            raise ValueError("CPUAdam(fp32_optimizer_states=False) is not implemented: both moments are kept in fp32")
        self._request, self._kernel, self._reason = kernel, None, ""
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bool(bias_correction),
            "amsgrad": amsgrad,
            # torch's name, so that AdamW's state dicts say the same thing in the same word.
            "decoupled_weight_decay": bool(adamw_mode),
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's, and everything that is wrong with the group's numbers and parameters is said at once."""
        if "adamw_mode" in param_group:
            param_group = {**param_group, "decoupled_weight_decay": bool(param_group["adamw_mode"])}
            del param_group["adamw_mode"]
        check_numbers({**self.defaults, **param_group}, f"param_groups[{len(self.param_groups)}]")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for i, param in enumerate(group["params"]):
                check_param(param, f"param_groups[{len(self.param_groups) - 1}]['params'][{i}]", placeholders=True)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    # ---- which kernel ------------------------------------------------------------------------------------------------

    _request: str
    _kernel: Kernel | None
    _reason: str

    @property
    def kernel(self) -> str:
        """``chunked``, ``compiled`` or ``numba``; ``auto`` until :meth:`prepare` or the first step has chosen."""
        return self._kernel.name if self._kernel is not None else self._request

    def prepare(
        self, grad_dtype: torch.dtype = torch.float32, out_dtype: torch.dtype | None = None, masters: int | None = None
    ) -> None:
        """Choose the kernel and compile it now, which takes some seconds, and not in the first step.

        Args:
            grad_dtype: of the gradients that are to come.
            out_dtype: of ``out``, None if there will be none.
            masters: so many fp32 elements on the CPU take the parameters' places before the first step. None: none do.

        Raises:
            RuntimeError: the ``kernel`` that was asked for cannot be had.
        """
        kinds = {
            (param.dtype if masters is None else torch.float32, grad_dtype, out_dtype, group["betas"][0] > 0.5)
            for group in self.param_groups
            for param in group["params"]
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
            params = [p for group in self.param_groups for p in group["params"] if p.device.type == "cpu"]
            numel = sum(param.numel() for param in params) if numel is None else numel
            self._kernel, self._reason = choose_kernel(self._request, numel, wanted)
        self._kernel.ready(wanted)
        return self._kernel

    def use(self, kernel: str, why: str) -> None:
        """Step with this kernel from now on: before the first step, where others have decided.

        Args:
            kernel: ``chunked``, ``compiled`` or ``numba``.
            why: for :meth:`describe`.
        """
        self._kernel = None
        self._request, request = kernel, self._request
        self._ready(())
        self._request, self._reason = request, why

    def twin(self) -> CPUAdam:
        """Another CPUAdam over the same parameters and the same state, with the settings of this moment."""
        # Schedules change numbers that are tensors where they are.
        groups = [
            {k: v.clone() if k != "params" and torch.is_tensor(v) else v for k, v in group.items()}
            for group in self.param_groups
        ]
        made = CPUAdam(groups, kernel=self._request)
        made.state, made._kernel, made._reason = self.state, self._kernel, self._reason
        return made

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
            closure: called first, with gradients enabled.
            only: the parameters that this step is about, and that ``grads`` and ``out`` are parallel to. None: all.

        Returns:
            What the closure returned.

        Raises:
            TypeError, ValueError: what, where, and what to do.
            RuntimeError: from the first step, when the ``kernel`` that was asked for cannot be had.
        """
        if callable(grads):
            if closure is not None:
                raise TypeError("CPUAdam.step() got two closures: as first argument and by name")
            grads, closure = None, grads
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        divisor = self._divisor(scale)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item() != 0:
            return loss
        targets = self._targets(grads, out, only)
        kinds = {
            (t.param.dtype, t.grad.dtype, None if t.out is None else t.out.dtype, t.group["betas"][0] > 0.5)
            for t in targets
            if t.param.device.type == "cpu"
        }
        kernel = self._ready(kinds) if kinds else None
        states = [self._state_of(target) for target in targets]
        for target, state in zip(targets, states, strict=True):
            state["step"] += 1
            segment = Segment(target.param, state["exp_avg"], state["exp_avg_sq"], target.grad, target.out)
            numbers = _numbers(target.group, float(state["step"]), divisor)
            if kernel is None or target.param.device.type != "cpu":
                update_on_device(segment, numbers)
            else:
                kernel.update(segment, numbers)
        return loss

    def _divisor(self, scale: float | torch.Tensor) -> float:
        value = one_number(scale, "scale")
        grad_scale = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            if value != 1.0:
                raise ValueError(f"CPUAdam.step(scale={value}): the attribute grad_scale is set too; use one of them")
            value = one_number(grad_scale, "grad_scale")
        return value

    def _targets(
        self,
        grads: Sequence[torch.Tensor | None] | None,
        out: Sequence[torch.Tensor | None] | None,
        only: Sequence[torch.Tensor] | None,
    ) -> list[_Target]:
        """The parameters that have a gradient, with all that belongs to them, checked."""
        places = {
            id(param): (f"param_groups[{g}]['params'][{i}]", group, param)
            for g, group in enumerate(self.param_groups)
            for i, param in enumerate(group["params"])
        }
        chosen = list(places.values()) if only is None else subset(list(only), places)
        whose = "of the optimizer" if only is None else "in only="
        for name, given in (("grads", grads), ("out", out)):
            if given is not None and not isinstance(given, (list, tuple)):
                raise TypeError(f"CPUAdam.step({name}=...) must be a list of tensors, not {type(given).__name__}")
            if given is not None and len(given) != len(chosen):
                text = f"CPUAdam.step({name}=...) has {len(given)} entries for the {len(chosen)} parameters {whose}"
                raise ValueError(f"{text}; give one entry for each, None for a parameter without")
        targets = []
        for i, (name, group, param) in enumerate(chosen):
            grad = param.grad if grads is None else grads[i]
            if grad is None:
                continue
            target = _Target(name, group, param, grad, None if out is None else out[i])
            check_param(param, name)
            check_tensor(grad, f"the gradient of {name}", param, GRAD_DTYPES)
            if target.out is not None:
                check_tensor(target.out, f"the output for {name}", param, PARAM_DTYPES)
            targets.append(target)
        for g, group in enumerate(self.param_groups):
            check_numbers(group, f"param_groups[{g}]")
        return targets

    # ---- state -------------------------------------------------------------------------------------------------------

    @staticmethod
    def initial_state(param: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the first step starts from, under torch's names: ``step`` on the CPU, both moments fp32 zeros."""
        exp_avg, exp_avg_sq = (
            torch.zeros(param.shape, dtype=torch.float32, device=param.device, requires_grad=False) for _ in range(2)
        )
        step = torch.zeros((), dtype=torch.float32, device="cpu")
        return {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def _state_of(self, target: _Target) -> dict[str, Any]:
        state = self.state[target.param]
        if not state:
            state.update(self.initial_state(target.param))
            if target.param.device.type == "cpu":
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = zeros_on_large_pages(target.param.shape, torch.float32)
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state or "step" not in state:
                raise ValueError(f"the state of {target.name} has {sorted(state)}: it needs step, exp_avg, exp_avg_sq")
            check_tensor(state[key], f"the state {key} of {target.name}", target.param, (torch.float32,))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch's, for state dicts of this class and of ``torch.optim.Adam`` and ``AdamW``.

        Torch casts moments to their parameter's dtype. Those of bf16 and fp16 parameters stay fp32 here.
        """
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params, strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                value = state_dict["state"].get(number, {}).get(key)
                if value is not None and param.dtype != torch.float32:
                    self.state[param][key] = value.to(dtype=torch.float32, device=param.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the optimizer keeps: torch's three attributes, and which kernel was asked for."""
        return {**super().__getstate__(), "_request": self._request}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by torch's ``load_state_dict``, with groups that another class may have written."""
        super().__setstate__(state)
        for name, value in (("_request", "auto"), ("_kernel", None), ("_reason", "")):
            self.__dict__.setdefault(name, value)
        for g, group in enumerate(self.param_groups):
            for name in ("bias_correction", "amsgrad", "decoupled_weight_decay"):
                group.setdefault(name, self.defaults[name])
            if group.get("maximize"):
                raise ValueError(f"param_groups[{g}]: maximize=True is not implemented by CPUAdam; negate the loss")
            check_numbers(group, f"param_groups[{g}]")
            for param in group["params"]:
                own = self.state.get(param)
                if own and "step" in own:
                    own["step"] = torch.tensor(float(own["step"]), dtype=torch.float32)


# ---- what is refused -------------------------------------------------------------------------------------------------


def _numbers(group: Mapping[str, Any], step: float, scale: float) -> Numbers:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return Numbers(
        step,
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=group["decoupled_weight_decay"],
        bias_correction=group["bias_correction"],
        scale=scale,
    )
