"""Hooks on a model's modules, by which stage 3 learns what is needed next, without a change to the model.

Three kinds, each catching what the others cannot see:

forward hooks         before a module runs, its own parameters are fetched.
saved-tensor hooks    while a forward pass builds its graph, autograd saves weights, or views of them, for the backward
                      pass. In place of each it is given a :class:`SavedWeight`: which bucket, where, which strides.
                      When the backward pass asks for it, the bucket is fetched and the view is made anew. So the
                      graph holds no parameter memory, and the backward pass fetches exactly what it reads, when it
                      reads it: an embedding, whose backward pass needs no weight, is never fetched for it.
                      ``GatheredParameters`` pushes them too.
on demand             a use of a partitioned parameter outside its module (``F.linear(x, self.other.weight)``) reaches
                      ``PartitionedParameter.__torch_function__``, which asks here.

What runs *inside* a backward pass may be a forward pass: activation checkpointing runs blocks again. Their modules
fetch as usual. Non-reentrant checkpointing has saved-tensor hooks of its own there, which keep what they receive. Ours
take their place (``_pack_before``) and pass them views: a view that is kept keeps its buffer out of reuse, where a
parameter's object that is kept would lose its values ([Note: buffers and who still holds them] in ``buffer_pool.py``).

Leaf modules (:func:`set_z3_leaf_modules`) are fetched as one, for forward and backward alike, whatever of them runs:
that is what a mixture of experts needs, where each rank's tokens choose their own experts. A compiled module
(``torch.compile``) is fetched as one too: its hooks run outside the compiled code, and there are none inside.

Source: [DeepSpeed], ``setup_zero_stage3_hooks`` in ``parameter_offload.py``; ``utils/z3_leaf_module.py``. DeepSpeed
fetches for the backward pass at module boundaries, and replaces ``F.linear`` by a function that saves no view.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from deepzero.runtime.pytree import output_tensors
from deepzero.runtime.zero.module_registry import external_parameters, z3_leaf_module
from deepzero.runtime.zero.parameter_all_gather import ON_REQUEST
from deepzero.runtime.zero.partition_parameters import PartitionedParameter, ZeroParameter, buckets_of
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket, ZeroParamStatus
from deepzero.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator, in_backward, keys_of
from deepzero.utils.compile import is_compiled, never_compiled
from deepzero.utils.dispatch import hide_from_checkpointing
from deepzero.utils.saved_tensor import check_version, keep, kept

log = logging.getLogger(__name__)


class SavedWeight(NamedTuple):
    """A view of a gathered bucket that autograd saved, without its memory."""

    key: int
    generation: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements of ``dtype``."""
    source: ZeroParameter | None = None
    """The parameter, where it was saved inside ``GatheredParameters``: there it may be written."""
    version: int = 0


class ModuleHooks:
    """The hooks of one model, whose partitioned parameters lie in the coordinator's buckets, until :meth:`remove`.

    ``leaf_done`` is called with the parameters of a leaf module when its backward pass is over.
    """

    def __init__(
        self,
        model: nn.Module,
        coordinator: PartitionedParameterCoordinator,
        leaf_done: Callable[[Sequence[nn.Parameter]], None],
    ) -> None:
        self.coordinator, self._leaf_done = coordinator, leaf_done
        self._names = {module: name or type(module).__name__ for name, module in model.named_modules()}
        # How often each leaf ran in forward passes whose backward passes are to come.
        self._leaf_calls: dict[nn.Module, int] = {}
        self._warned_autocast = False
        self._pack_hook = self.pack  # one object, by which our own hook is known: each ``self.pack`` is a new one
        # Modules under way, outermost first (None: an operation outside of all), and whether each has pushed hooks.
        self._stack: list[tuple[nn.Module | None, bool]] = []
        self._handles: list[Any] = []
        # All parameters of leaf modules, persistent ones too: the reducer counts their gradients by calls.
        self.leaf_params: set[nn.Parameter] = set()
        # Injected, so that a parameter can ask for its bucket: its file cannot import this one.
        for bucket in coordinator.buckets:
            bucket.hooks = self
        self._install(model, set())

    def _install(self, module: nn.Module, seen: set[nn.Module]) -> None:
        """On this module and those below it; below a leaf, or in compiled code, there are none."""
        # A module may be registered in several places (tied blocks); twice hooked, it would be entered twice.
        if module in seen:
            return
        seen.add(module)
        declared = z3_leaf_module(module)
        leaf = declared or is_compiled(module)
        params = [p for p in module.parameters(recurse=leaf) if isinstance(p, ZeroParameter)]
        if declared:
            self.leaf_params.update(module.parameters())
        # Before every other pre-hook, since those may read weights (weight norm does); always_call, because an
        # exception in the module must not leave it on the stack, with its weights gathered.
        before = self._pre_forward_hook(module, params, counted=declared)
        after = self._post_forward_hook(module, params, as_one=leaf)
        self._handles += [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=declared),
            module.register_forward_hook(after, always_call=True),
        ]
        if not leaf:
            for child in module.children():
                self._install(child, seen)

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for bucket in self.coordinator.buckets:
            bucket.hooks = None

    # ---- forward: hooks are plain functions, as dynamo can step around those, not around an object -------------------

    # Most modules find their bucket gathered. The hooks are then all that stage 3 costs them, so they check that first.

    def _pre_forward_hook(self, hooked: nn.Module, params: list[ZeroParameter], counted: bool) -> Callable[..., None]:
        coordinator, own, name = self.coordinator, keys_of(params), self._names[hooked]

        @never_compiled
        def pre_forward(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            """1 fetch: the module's parameters are gathered before it runs."""
            # copy.deepcopy takes hooks along, to a module whose parameters are its own, or another engine's.
            if module is not hooked and not any(map(coordinator.has, buckets_of(module.parameters()))):
                return
            if not self._stack:  # this is the outermost module, and a forward pass begins
                coordinator.begin_forward()
            # On the stack before the fetch: only a module that is under way may show values.
            self._stack.append((module, self.push_saved_tensor_hooks()))
            external = external_parameters(module)  # they may change
            keys = self._keys_with(params, external) if external else own
            for key in keys:  # is one not gathered, or not shown?
                if key not in coordinator.current or not coordinator.buckets[key].shown:
                    # Selective checkpointing numbers a block's operations, and ours differ when it runs again.
                    with hide_from_checkpointing():
                        coordinator.fetch_sub_module(keys, name)
                    break
            if counted:
                self._count_leaf_call(module, args, kwargs)

        return pre_forward

    def _post_forward_hook(self, hooked: nn.Module, params: list[ZeroParameter], as_one: bool) -> Callable[..., None]:
        recorder, name = self.coordinator.comm.flight_recorder, self._names[hooked]
        after = (f"forward, after {name}", f"backward, after {name}")

        @never_compiled
        def post_forward(module: nn.Module, args: Any, output: Any) -> None:
            """The module is over, or has raised. What it used is released by the next fetch."""
            # Nothing to leave where our pre-hook did not run, as another pre-hook raised before it.
            if not self._stack or self._stack[-1][0] is not module:
                return
            if as_one:
                self._fetch_for_backward(self._keys_with(params, external_parameters(module)), name, output)
            recorder.position = after[in_backward()]  # for the messages of ranks that fall apart
            self._leave()

        return post_forward

    def _keys_with(self, params: list[ZeroParameter], external: list[nn.Parameter]) -> tuple[int, ...]:
        """The buckets of a module's own parameters, and of those registered for it."""
        return keys_of([*params, *(p for p in external if isinstance(p, ZeroParameter))])

    def _leave(self, broken_off: bool = False) -> None:
        _, pushed = self._stack.pop()
        if pushed:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        # **Parameters show their values inside modules only**: outside, no hooks of ours see who saves one.
        if not self._stack:
            with hide_from_checkpointing():
                self.coordinator.hide_all()
                self.coordinator.end_forward(broken_off)

    def _count_leaf_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A leaf module: its gradients are complete, whatever of it ran, when its input has its gradient."""
        if not torch.is_grad_enabled():
            return
        # Non-reentrant checkpointing runs it again: the first run has been counted.
        if in_backward() and torch._C._autograd._top_saved_tensors_default_hooks(True)[0] is not self._pack_hook:
            return
        # One input is enough: autograd computes its gradient after those of everything between it and the output.
        for tensor in output_tensors((args, kwargs)):
            if tensor.requires_grad:
                self._leaf_calls[module] = self._leaf_calls.get(module, 0) + 1
                tensor.register_hook(lambda _: self._one_call_done(module))
                break

    def _one_call_done(self, module: nn.Module) -> None:
        """The backward pass is through one call of a leaf; with the last one its gradients are complete."""
        self._leaf_calls[module] = self._leaf_calls.get(module, 0) - 1
        if self._leaf_calls[module] <= 0:
            self._leaf_done(list(module.parameters()))

    def end_of_backward(self) -> None:
        """Forget calls of leaves that this backward pass did not reach; the next one counts those that it reaches."""
        self._leaf_calls.clear()

    def _fetch_for_backward(self, keys: tuple[int, ...], where: str, output: Any) -> None:
        """A leaf module is fetched as one for its backward pass too: when its output gets its gradient."""
        for tensor in output_tensors(output):
            if tensor.requires_grad and not tensor.is_leaf:
                # Not shown: no module is under way, and the backward pass reads views, which ``unpack`` makes.
                tensor.register_hook(lambda _: self.coordinator.fetch_sub_module(keys, where, show_params=False))

    def reset(self) -> None:
        """After an exception in a forward pass, should a hook have been skipped."""
        while self._stack:
            self._leave(broken_off=True)

    @contextmanager
    def unwinding(self) -> Iterator[None]:
        """Around a forward pass: Ctrl-C skips a module's hooks, also those that torch always calls."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    # ---- what autograd saves -----------------------------------------------------------------------------------------

    def push_saved_tensor_hooks(self) -> bool:
        """What autograd saves from now on passes :meth:`pack` first. Returns whether there is something to pop."""
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        # torch runs only the innermost pair of hooks. Where a module calls another, ours are there already.
        if outer is not None and outer[0] is self._pack_hook:
            return False
        # Autograd saves nothing now, and hooks cost time: generation under no_grad calls thousands of modules.
        if outer is None and not torch.is_grad_enabled():
            return False
        # Ours stand in front of others' (``_pack_before``).
        if outer is not None and getattr(getattr(outer[0], "func", None), "__self__", None) is self:
            return False
        # Any callable may be one: a functools.partial has no name.
        name = getattr(outer[0], "__qualname__", "") if outer is not None else ""
        # Non-reentrant checkpointing keeps nothing in the forward pass.
        if name.startswith("_checkpoint_hook"):
            return False
        if not self._warned_autocast and torch.is_autocast_enabled(self.coordinator.comm.device_type):
            self._warned_autocast = True
            log.warning(
                "torch.autocast under stage 3: autograd keeps the casts of all weights for the backward pass, whole on "
                "every rank; use precision=bf16 instead (said once)"
            )
        if outer is None:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack_hook, self.unpack)
            return True
        # Ours replace the others, and are popped by whoever has pushed those. Without gradients too: a custom autograd
        # function runs so, and what it saves is saved when it has ended.
        recomputes = in_backward() or name.startswith("_recomputation_hook")
        torch._C._autograd._pop_saved_tensors_default_hooks()
        torch._C._autograd._push_saved_tensors_default_hooks(
            partial(self._pack_before, outer[0], recomputes), partial(self._unpack_before, outer[1])
        )
        return False

    @never_compiled
    def _pack_before(self, pack: Callable[..., Any], recomputes: bool, tensor: torch.Tensor) -> Any:
        """For autograd, in front of hooks that were there before.

        ``recomputes``: they are non-reentrant checkpointing's, which keep what a block saves while it is run again
        until the block's backward pass. They are given views, as a parameter's object does not keep its values. Other
        hooks (``save_on_cpu``) go on working for everything that is not a parameter.
        """
        # A tuple marks what is ours: theirs may return anything, a SavedWeight of an outer engine too.
        packed = tensor if recomputes else self.pack(tensor)
        return (packed,) if isinstance(packed, SavedWeight) else pack(self.view_of(tensor))

    @never_compiled
    def _unpack_before(self, unpack: Callable[..., torch.Tensor], packed: Any) -> torch.Tensor:
        if isinstance(packed, tuple) and len(packed) == 1 and isinstance(packed[0], SavedWeight):
            return self.unpack(packed[0])
        return unpack(packed)

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        """For autograd: a record of where a weight, or a view of one, lies; anything else is kept."""
        if type(tensor) is PartitionedParameter:
            # The object itself: a custom autograd function saves what it was given, and is not intercepted.
            record = tensor._record
            bucket, slot = record.placed()
            if not self.coordinator.has(bucket):
                return keep(tensor)
            start = slot.offset - bucket.in_layout.offset
            return SavedWeight(bucket.key, bucket.generation, tensor.dtype, record.shape, record.stride, start)
        # By storage pointer: a transposed or sliced weight has its bucket's. A released bucket's counts until it is
        # overwritten, or what is saved as a weight would depend on when that is. No call: all that is saved comes here.
        try:
            storage = tensor.untyped_storage()
            found = self.coordinator.pool.contents.get(storage.data_ptr() or storage._cdata)  # as storage_ptr_of has it
        except RuntimeError:  # a sparse tensor's, or one's whose function is being traced
            found = None
        if found is None or found[0].generation != found[1]:
            return keep(tensor)
        owner: PartitionedBucket = found[0]
        # Shape, strides and offset say which view it was: autograd saves the transposed weight of a linear layer.
        offset = int(tensor.storage_offset())
        saved = SavedWeight(owner.key, owner.generation, tensor.dtype, tensor.size(), tensor.stride(), offset)
        if owner.gather_refs:  # a parameter and its views have one version
            source = tensor if isinstance(tensor, ZeroParameter) else tensor._base
            if isinstance(source, ZeroParameter):
                return saved._replace(source=source, version=source._version)
            if not self._stack:  # detached values are the program's, as they are, and keep the buffer
                return keep(tensor)
        return saved

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the values in place of a parameter's object, which loses them when its bucket is released."""
        if isinstance(tensor, PartitionedParameter):
            bucket, _ = tensor._record.placed()
            if not self.coordinator.has(bucket):
                return tensor
            with self._one_operation([bucket], f"kept view of {tensor._record.name}"), hide_from_checkpointing():
                return bucket.value(tensor)
        return tensor.detach() if isinstance(tensor, ZeroParameter) else tensor

    @never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        """1 fetch, for the backward pass: in place of what was saved its view of the bucket, gathered again."""
        if type(packed) is tuple:  # no weight: it stays where it is, and must be as it was
            return kept(packed)
        bucket = self.coordinator.buckets[packed.key]
        # The graph of a double backward pass would save the view that is made here, whose values go with the bucket.
        # Inside ``GatheredParameters`` our hooks see it.
        if torch.is_grad_enabled() and not bucket.gather_refs:
            raise RuntimeError(
                f"a double backward pass (create_graph=True) through {bucket.label} is not possible under ZeRO stage "
                "3: its weights are released and fetched again in between. Use stage 2 for gradient penalties"
            )
        # A bucket's generation grows with every write. Plain autograd compares version counters of the saved tensor;
        # here no tensor was saved, so this is that check.
        if bucket.generation != packed.generation:
            raise RuntimeError(
                f"this backward pass goes through a forward pass that saw older values of {bucket.label}: they were "
                "changed in between (engine.step(), a write, the end of GatheredParameters with a modifier_rank). Run "
                "the forward pass again, or call engine.backward inside of the context"
            )
        # Inside a context, a write makes a new generation only at its end; until then the version tells.
        if packed.source is not None and bucket.gather_refs:
            check_version(packed.version, packed.source)
        # What a context holds needs no fetch: a rank may differentiate there alone.
        held = bucket.gather_refs and bucket.status is ZeroParamStatus.AVAILABLE
        if packed.key not in self.coordinator.current and not held:
            self.coordinator.fetch_sub_module((packed.key,), bucket.params[0]._record.name, show_params=False)
        # The same elements with the same strides, in whatever buffer the bucket was gathered into this time. The dtype
        # differs where a program has saved a weight's bits under another one (view(torch.int16)).
        flat = bucket.gathered
        if packed.dtype != flat.dtype:
            flat = flat.view(packed.dtype)
        view = flat.as_strided(packed.shape, packed.stride, packed.offset)
        # A context shows unquantised values, and so was this one when it was saved; passes go on with quantised ones.
        if packed.source is not None and bucket.gathered_by.quantizes:
            bucket.gather_again(ON_REQUEST, may_quantize=False)
            view = view.clone()
            bucket.gather_again(ON_REQUEST, may_quantize=True)
        return view

    # ---- on demand ---------------------------------------------------------------------------------------------------

    def fetch_on_demand(self, buckets: list[PartitionedBucket], what: str) -> AbstractContextManager[None] | None:
        """A use outside the parameter's module: permitted inside a forward or backward pass, for one operation."""
        return self._one_operation(buckets, what) if self._stack or in_backward() else None

    @contextmanager
    def _one_operation(self, buckets: list[PartitionedBucket], what: str) -> Iterator[None]:
        module = self._stack[-1][0] if self._stack else None
        where = self._names.get(module, "?") if module is not None else "backward"
        keys = tuple(bucket.key for bucket in buckets)
        # Inside a module a use may go unnoticed, as the values may be shown; outside of all modules nothing is shown.
        on_demand = bool(self._stack)
        self._stack.append((module, self.push_saved_tensor_hooks()))
        try:
            with hide_from_checkpointing():
                self.coordinator.fetch_sub_module(keys, f"{where} ({what})", on_demand)
            yield
        finally:
            self._leave()
