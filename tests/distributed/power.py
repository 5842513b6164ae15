"""Power cuts: what a program does to a folder is recorded, and every disk that a power cut may leave is made of it.

**Recording** (:class:`Recorder`). The system's calls that change names or flush are wrapped; before each of them the
folder is looked through, so that files that are new or have other bytes are noted however they were written (past the
page cache, by Python's files, by a mapping). Several processes write into one record, in one order.

**Power cuts** (:class:`Disk`). At any instant of the record, what is certain is what was flushed: bytes of a file by a
flush of the file, names by a flush of the folder (a renaming, by that of either folder). Of everything later each name
may have changed or not, each for itself and in any order; a file whose bytes were not flushed may have all of them,
those of its last flush, none, zeros in their place, or some blocks only. This is more than one file system does: it is
what POSIX allows all of them.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import pickle
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BLOCK = 512
ROOT = 0
"""The folder that is looked at; it is on the disk from the beginning."""

Event = tuple[Any, ...]
"""``create`` folder name id is_folder | ``write`` id bytes | ``move`` folder name folder name id |
``remove`` folder name id | ``flush`` id site | ``mark`` anything."""
Damage = Callable[[bytes, bytes], bytes]
"""(bytes of the last flush, bytes that were written) → bytes on the disk."""
Tree = dict[str, Any]
"""Name → ``bytes``, or the tree of a folder."""


@dataclass
class World:
    """Names and bytes as the running system has them."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    bytes: dict[int, bytes] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        kind, *rest = event
        if kind == "write":
            self.bytes[rest[0]] = rest[1]
        elif kind in ("create", "move", "remove"):
            if kind == "create":
                self.folders.update({rest[2]: {}} if rest[3] else {})
            rename(self.folders, event)


def rename(folders: dict[int, dict[str, int]], event: Event) -> None:
    """What an event does to names; also where events before it have not happened."""
    kind, folder, name, *rest = event
    if kind == "create":
        folders.setdefault(folder, {})[name] = rest[0]
        return
    if folders.setdefault(folder, {}).get(name) == rest[-1]:
        del folders[folder][name]
    if kind == "move":
        folders.setdefault(rest[0], {})[rest[1]] = rest[2]


class Recorder:
    """Records what this process does below ``root``, into the folder ``log``; other processes may do the same."""

    def __init__(self, root: Path, log: Path) -> None:
        self.root, self.log = Path(os.path.realpath(root)), log
        self.world, self._seen = World(), 0
        log.mkdir(exist_ok=True)

    def mark(self, what: Any) -> None:
        """Note something that the program has been told by now."""
        with self._alone():
            self._look()
            self._note("mark", what)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Wrap the calls. Flushes are noted and not made: nobody cuts the power."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "fsync", "fdatasync"):
                call = getattr(os, name)
                wrapped = functools.partial(self._call, name, call)
                patch.setattr(os, name, wrapped)
                accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps its own references
                if accessor is not None and hasattr(accessor, name):
                    patch.setattr(accessor, name, staticmethod(wrapped))
            yield

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with self._alone():
            self._look()
            if name in ("fsync", "fdatasync"):
                handle = args[0] if isinstance(args[0], int) else args[0].fileno()
                _, what, known = self._place(os.readlink(f"/proc/self/fd/{handle}"))
                return self._noted("flush", known, f"{what} by {_site()}")
            result = call(*args, **options)
            first = self._place(self._path(args[0], options.get("dir_fd", options.get("src_dir_fd"))))
            if name == "mkdir":
                self._look()
            elif name in ("rename", "replace"):
                second = self._place(self._path(args[1], options.get("dst_dir_fd")))
                self._noted("move", first[0], first[1], second[0], second[1], first[2])
            else:
                self._noted("remove", *first)
            return result

    def _noted(self, kind: str, *rest: Any) -> None:
        if None not in rest:
            self._note(kind, *rest)

    def _note(self, *event: Any) -> None:
        self.world.apply(event)
        (self.log / f"{self._seen:06d}").write_bytes(pickle.dumps(event))
        self._seen += 1

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread or process of the record does anything meanwhile; what they did is known."""
        with open(self.log.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for event in read(self.log, self._seen):
                self.world.apply(event)
                self._seen += 1
            yield

    def _path(self, path: Any, folder: int | None) -> str:
        text = os.fspath(path)
        return text if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)

    def _place(self, path: str) -> tuple[int | None, str, int | None]:
        """(folder, name, id) as they are known; None outside of the root."""
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if Path(real) == self.root:
            return None, "", ROOT
        if not Path(real).is_relative_to(self.root):
            return None, "", None
        *above, name = Path(real).relative_to(self.root).parts
        at = ROOT
        for part in above:
            at = self.world.folders[at][part]
        return at, name, self.world.folders[at].get(name)

    def _look(self, at: int = ROOT, path: Path | None = None) -> None:
        """Note files and folders that are new, and bytes that have changed."""
        path = path or self.root
        there = sorted(os.listdir(path))
        assert set(self.world.folders[at]) <= set(there), f"names of {path} have gone by a call that is not recorded"
        for name in there:
            entry = path / name
            if name not in self.world.folders[at]:
                self._note("create", at, name, self._seen + 1, entry.is_dir())
            if (known := self.world.folders[at][name]) in self.world.folders:
                self._look(known, entry)
            elif (content := entry.read_bytes()) != self.world.bytes.get(known, b""):
                self._note("write", known, content)


def read(log: Path, start: int = 0) -> list[Event]:
    return [pickle.loads(file.read_bytes()) for file in sorted(log.iterdir())[start:]]


def _site() -> str:
    """The lines of the package that are being run."""
    return " < ".join(
        f"{Path(frame.filename).stem}.{frame.name}:{frame.lineno}"
        for frame in reversed(traceback.extract_stack())
        if "/deepzero/" in frame.filename
    )


class Disk:
    """The disk while a record is played: what is certain, and what is not yet. Nobody reads ``ignored`` names."""

    def __init__(self, ignored: Callable[[str], bool]) -> None:
        self.world, self.ignored = World(), ignored
        self.certain: dict[int, dict[str, int]] = {ROOT: {}}
        self.flushed: dict[int, bytes] = {}
        self.pending: list[Event] = []
        """Changes of names that no flush has made certain."""

    def play(self, event: Event) -> None:
        self.world.apply(event)
        kind, *rest = event
        if kind in ("create", "move", "remove"):
            self.pending.append(event)
        elif kind == "flush":
            if rest[0] in self.world.bytes:
                self.flushed[rest[0]] = self.world.bytes[rest[0]]
            touches = [rest[0] in (e[1], e[3] if e[0] == "move" else None) for e in self.pending]
            for happened, change in zip(touches, self.pending, strict=True):
                if happened:
                    rename(self.certain, change)
            self.pending = [e for happened, e in zip(touches, self.pending, strict=True) if not happened]

    def settle(self) -> None:
        """Everything so far is on the disk."""
        self.certain = {folder: dict(names) for folder, names in self.world.folders.items()}
        self.flushed, self.pending = dict(self.world.bytes), []

    def after_power_cuts(self, chance: random.Random | None, samples: int = 6) -> Iterator[Tree]:
        """Trees that a power cut at this instant may leave: all extremes, and some of what lies between."""
        everything = tuple(range(len(self.pending)))
        kept: list[tuple[int, ...]] = [everything[:stop] for stop in range(len(everything) + 1)]
        for one in everything:
            kept += [(one,), (*everything[:one], *everything[one + 1 :])]
        loose = any(self.flushed.get(known) != now for known, now in self.world.bytes.items())
        for happened in dict.fromkeys(kept):
            for damage in DAMAGES if loose else DAMAGES[:1]:
                yield self._tree(happened, damage)
        for _ in range(samples if chance is not None and everything else 0):
            happened = tuple(one for one in everything if chance.random() < 0.5)
            yield self._tree(happened, lambda was, now: chance.choice([*DAMAGES, _torn_by(chance)])(was, now))

    def _tree(self, happened: Sequence[int], damage: Damage) -> Tree:
        folders = {folder: dict(names) for folder, names in self.certain.items()}
        for one in happened:
            rename(folders, self.pending[one])

        def build(at: int) -> Tree:
            made: Tree = {}
            for name, known in sorted(folders.get(at, {}).items()):
                if known in self.world.folders:
                    made[name] = {} if self.ignored(name) else build(known)
                elif not self.ignored(name):
                    was, now = self.flushed.get(known, b""), self.world.bytes.get(known, b"")
                    # What was appended leaves what was there before as it is.
                    stays = len(was) if now.startswith(was) else 0
                    made[name] = now[:stays] + damage(was[stays:], now[stays:]) if was != now else now
            return made

        return build(ROOT)


def _torn_by(chance: random.Random) -> Damage:
    def torn(was: bytes, now: bytes) -> bytes:
        blocks = [now[start : start + BLOCK] for start in range(0, len(now), BLOCK)]
        return b"".join(block if chance.random() < 0.5 else bytes(len(block)) for block in blocks)

    return torn


@functools.lru_cache
def _zeros(was: bytes, now: bytes) -> bytes:
    return bytes(len(now))


@functools.lru_cache
def _half(was: bytes, now: bytes) -> bytes:
    half = len(now) // 2 // BLOCK * BLOCK
    return now[:half] + bytes(len(now) - half)


DAMAGES: tuple[Damage, ...] = (lambda was, now: now, lambda was, now: was, lambda was, now: b"", _zeros, _half)


def lay(tree: Tree, folder: Path, store: Path) -> None:
    """Make a tree's files and folders; equal files are one file, in ``store``."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            lay(content, folder / name, store)
        else:
            kept = store / digest(content)
            if not kept.exists():
                kept.write_bytes(content)
            os.link(kept, folder / name)


@functools.lru_cache(maxsize=4096)
def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def key(tree: Tree) -> Any:
    """Equal for equal trees."""
    return tuple((n, key(c) if isinstance(c, dict) else digest(c)) for n, c in sorted(tree.items()))


Look = Callable[[Tree], Any]
"""What is found on a disk; a text that begins with "broken" where that must not be."""


def losses(
    events: Sequence[Event], look: Look, lost: Callable[[Any, Any], bool], ignored: Callable[[str], bool], *,
    first: int = 0, settled: int = 0, chance: random.Random | None = None,
) -> Iterator[str]:  # fmt: skip
    """Everything that power cuts lose: whatever ``look`` finds on a disk that ``lost(last mark, found)`` calls a loss.

    Nobody reads names that are ``ignored``; before the instant ``first`` nothing matters, and what was recorded before
    ``settled`` is on the disk, however it came there. ``chance`` draws what lies between the extremes.
    """
    disk, told, seen = Disk(ignored), None, set()
    for number, event in enumerate(events):
        if event[0] == "mark":
            told = event[1]
        disk.play(event)
        if number < settled:
            disk.settle()
        if number < max(first, settled):
            continue
        for tree in disk.after_power_cuts(chance):
            state = key(tree)
            if (state, repr(told)) in seen:
                continue
            seen.add((state, repr(told)))
            found = look(tree)
            if lost(told, found):
                yield f"after event {number} {str(event)[:120]}, told {told}: {found}"


def idle_flushes(events: Sequence[Event], search: Callable[..., Iterator[str]]) -> set[str]:
    """What is flushed, and where, for nothing; ``search(events, first)`` is :func:`losses` from that instant on."""
    flushes = [(number, event[2]) for number, event in enumerate(events) if event[0] == "flush"]
    needed: set[str] = set()
    for number, site in flushes:
        lacking = [*events[:number], *events[number + 1 :]]
        if site not in needed and any(search(lacking, first=number)):
            needed.add(site)
    assert flushes
    return {site for _, site in flushes} - needed
