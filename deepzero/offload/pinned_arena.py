"""The arena: all that one rank keeps in host memory, in one exact, page-locked allocation.

A copy between a GPU and the host runs in the background only when the host's pages are locked. torch's own pinned
allocator rounds every request up to a power of two, so that 65 GiB of masters would lock 128; many separate requests
waste a part of each. The arena is planned first (:class:`Region`, pure numbers), then taken from the system in one
piece of exactly that size, locked by registration (``cudaHostRegister``), and carved. Every carved tensor has a storage
of its own, so that whoever counts storages counts each once.

On a machine without a GPU nothing is locked, and everything else is the same: what is in the arena is "host", what is
outside of it is "device", and copies go between the two.

Sources: [ZeRO-Offload], section 4, for what lives there; ``pin_memory`` of [DeepSpeed].
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepzero.device import accelerator_of
from deepzero.utils.formatting import binary_bytes
from deepzero.utils.storage import storage_ptr_of

ALIGN_BYTES = 256
"""Every region starts at a multiple: two pairs of cache lines, and what a GPU's copy engine likes."""
LARGE_BYTES = 4 << 20
"""Two large pages."""


class Region(NamedTuple):
    """One tensor of the arena, before there is memory for it; ``category`` is the ledger's word (``host_masters``)."""

    category: str
    numel: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of the tensor itself."""
        return self.numel * self.dtype.itemsize

    def padded_bytes(self, align: int) -> int:
        """With what follows it up to the next region, which starts at a multiple of ``align``."""
        return -(-self.bytes // align) * align


class HostMemoryError(RuntimeError):
    """The host cannot hold what offloading needs. Nothing was allocated."""


class PageLockError(HostMemoryError):
    """The memory is there, and the system refuses to lock its pages."""


def required_bytes(regions: Iterable[Region], align: int = ALIGN_BYTES) -> int:
    """The exact size of an arena; with another ``align``, of a file."""
    return sum(region.padded_bytes(align) for region in regions)


def describe_bytes(regions: Iterable[Region]) -> str:
    """Sizes by category, in words."""
    sums: dict[str, int] = {}
    for region in regions:
        sums[region.category] = sums.get(region.category, 0) + region.bytes
    listed = ", ".join(f"{name.removeprefix('host_')} {binary_bytes(size)}" for name, size in sums.items())
    return f"{binary_bytes(required_bytes(regions))} ({listed})" if sums else "0 B"


def check_host_memory(regions: Sequence[Region], ranks_of_host: int) -> None:
    """Raise a :class:`HostMemoryError` where this host cannot hold one arena of ``regions`` for each of its ranks."""
    available, needed = available_host_bytes(), required_bytes(regions) * ranks_of_host
    if available is not None and needed > available:
        raise HostMemoryError(
            f"offloading needs {binary_bytes(needed)} of host memory, {describe_bytes(regions)} for each of the "
            f"{ranks_of_host} ranks of this host, and {binary_bytes(available)} are available; use more hosts, lower "
            "zero.offload_optimizer.ratio, set grad_accum_dtype to bf16, or free memory"
        )


def available_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the system, and the container that this process runs in, can still give; None where neither says."""
    found = []
    with contextlib.suppress(OSError, ValueError, LookupError):
        fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
        found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
        limit, used = (int((cgroup / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        # Page cache counts as used, and is given up when memory is asked for.
        reclaimable = 0
        with contextlib.suppress(OSError, ValueError, LookupError):
            rows = (line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
            reclaimable = sum(int(row[1]) for row in rows if row[0] == "inactive_file")
        found.append(max(0, limit - used + reclaimable))
    return min(found) if found else None


class HostMemory:
    """Memory for ``regions``, which are known before there is any, carved in order: the arena, or a file.

    Every carved tensor has a storage of its own. ``device`` is the one whose host this is.
    """

    align = ALIGN_BYTES
    prefix = "host_"
    """In front of a category, it says in the ledger where that lies."""
    _memory: mmap.mmap

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        self.regions, self.nbytes, self.device = list(regions), required_bytes(regions, self.align), device
        self.broken: str | None = None
        """Why what lies here is half old, half new, if it is. Memory does not fail; files do."""
        self._carved: list[tuple[str, torch.Tensor]] = []
        self._starts: dict[int, int] = {}  # of each carved tensor's storage: where it begins
        self._next = self._offset = 0
        self._ends = contextlib.ExitStack()  # what :meth:`close` does

    def allocate(self, category: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next region of the plan, zero: a 1-D tensor of ``numel`` elements with a storage of its own."""
        wanted = Region(category, numel, dtype)
        planned = self.regions[self._next] if self._next < len(self.regions) else "nothing"
        if planned != wanted:
            raise RuntimeError(f"the plan has {planned} next, not {wanted}")
        self._next += 1
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        carved = self._carve(wanted, self._offset)
        self._starts[storage_ptr_of(carved)] = self._offset
        self._offset += wanted.padded_bytes(self.align)
        self._carved.append((category, carved))
        return carved

    def _carve(self, region: Region, start: int) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=region.dtype, count=region.numel, offset=start)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of one that was carved here."""
        return tensor.numel() > 0 and storage_ptr_of(tensor) in self._starts

    def tensors(self, category: str) -> list[torch.Tensor]:
        """What was carved under ``category``, for the ledger."""
        return [tensor for name, tensor in self._carved if name == category]

    def describe(self) -> str:
        """How much of what is here, in words, and how it is kept."""
        raise NotImplementedError

    def drop_pages(self) -> None:
        """Give host memory back that is not needed: none of the arena's."""

    def close(self) -> None:
        """Unlock the pages, end the threads. Memory, or the disk's space, goes back with the last carved tensor."""
        self._carved = []
        self._ends.close()


class WithoutValues(HostMemory):
    """Memory, or a file, that is not there: a dry run is about another host, and carves tensors without values."""

    def _reserve(self, *_: object) -> None:
        pass

    def _carve(self, region: Region, start: int) -> torch.Tensor:
        return torch.empty(region.numel, dtype=region.dtype, device=self.device)


class HostArena(HostMemory):
    """One allocation in host memory; its pages are locked with ``pin``, where ``device`` is a GPU.

    The host has to hold as much for each of its ``ranks`` (0: nobody looks), and ``beside`` it what is made elsewhere.
    A HostMemoryError: it is too small, or the system refuses the memory; a PageLockError: or refuses to lock it.
    """

    def __new__(cls, regions: Sequence[Region], device: torch.device, *_: object, **__: object) -> HostArena:
        """The kind of arena that belongs to ``device``."""
        return super().__new__({"meta": DryRunArena}.get(device.type, HostArena))

    def __init__(
        self, regions: Sequence[Region], device: torch.device, pin: bool, beside: Sequence[Region] = (), ranks: int = 0
    ) -> None:
        super().__init__(regions, device)
        self._unlock: weakref.finalize[Any, Any] | None = None
        self._reserve(pin, beside, ranks)

    @property
    def pinned(self) -> bool:
        """Whether the pages are locked."""
        return self._unlock is not None and self._unlock.alive

    def _reserve(self, pin: bool, beside: Sequence[Region], ranks: int) -> None:
        if ranks:
            check_host_memory([*self.regions, *beside], ranks)
        try:
            # A forked data worker must not make every page copy-on-write: locked pages would then be the wrong ones.
            self._memory = _anonymous(max(self.nbytes, 1), forked=False)
        except (OSError, ValueError, OverflowError) as error:
            sizes = describe_bytes(self.regions)
            raise HostMemoryError(f"the system refuses {sizes} of host memory: {error}") from None
        if pin and accelerator_of(self.device).has_streams and self.nbytes:
            self._lock()

    def _lock(self) -> None:
        accelerator = accelerator_of(self.device)
        address = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        try:
            accelerator.lock_pages(address, self.nbytes, self.device)
        except OSError as error:
            # No limit helps a device that cannot.
            limit = "" if error.errno == errno.ENOTSUP else "raise the limit of locked memory (ulimit -l), or "
            raise PageLockError(
                f"the system refuses to lock {describe_bytes(self.regions)} of host memory ({error.strerror}); "
                f"{limit}set pin_memory=false in zero.offload_optimizer and zero.offload_param"
            ) from None
        # Pages that are given back while they are registered would stay registered, for whoever gets them next.
        self._unlock = weakref.finalize(self, accelerator.unlock_pages, address, self.device)
        self._unlock.atexit = False  # the system takes all pages back, and CUDA may be gone by then
        self._ends.callback(self._unlock)

    def describe(self) -> str:
        """Sizes, and whether the pages are locked."""
        locked = "page-locked" if self.pinned else "not page-locked"
        return f"{describe_bytes(self.regions)} of host memory, {locked}"


class DryRunArena(WithoutValues, HostArena):
    """The arena of a dry run."""


def zeros_on_large_pages(shape: torch.Size) -> torch.Tensor:
    """fp32 zeros on the CPU; from a few megabytes on in large pages, where the system gives them when asked.

    A pass over such memory misses fewer translations of addresses: CPUAdam gains some percent.
    """
    if (nbytes := 4 * shape.numel()) < LARGE_BYTES:
        return torch.zeros(shape, dtype=torch.float32)
    return torch.frombuffer(_anonymous(nbytes), dtype=torch.float32).view(shape)


def _anonymous(nbytes: int, forked: bool = True) -> mmap.mmap:
    """Zero pages of this process alone, as large ones where the system has them: a step reads all of them in order."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", *(() if forked else ("MADV_DONTFORK",))):
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, advice))
    return memory
