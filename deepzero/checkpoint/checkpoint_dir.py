"""The folder that checkpoints lie in: which are complete, which is the newest, who may write, and how one is put there.

**Nothing lost.** A checkpoint is written into a folder of another name, flushed, marked complete (``COMMIT``), and
only then renamed to its tag; ``latest`` is replaced after that. At any instant either the old or the new one is there,
whole, also when the machine loses power: see :mod:`deepzero.durable`.

**One writer.** Rank 0 of a run holds a lock on the folder from its first save to its end. The system gives the lock
back when the process ends, however it ends; processes that it has forked (data workers) do not hold it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import socket
from pathlib import Path

from deepzero.checkpoint.errors import CheckpointError, NoCheckpoint
from deepzero.checkpoint.manifest import COMMIT, LATEST, MANIFEST, Manifest, check_sound
from deepzero.durable import flush_folder, write_whole
from deepzero.utils.formatting import listed, short_bytes

LOCK = ".lock"
SCRIPT = "zero_to_fp32.py"
"""Beside the checkpoints, perhaps before the first one is complete; see ``deepzero/compat/zero_to_fp32.py``."""
SAVING, REPLACED, DELETING = ".saving-", ".replaced-", ".deleting-"
MAX_TAG_BYTES = 200
"""Folders that are not complete yet have the tag in their names, and a little more; 255 bytes is what systems allow."""
RUN_CHECKPOINTS = "checkpoints"
"""Inside the folder of a run of ``train.py``."""


def check_tag(tag: str, otherwise: str = "") -> None:
    """Refuse a tag that is no name of a folder, or that ``latest`` would not give back as it is."""
    fits = len(tag.encode("utf-8", "replace")) <= MAX_TAG_BYTES and tag == tag.strip() != LATEST
    if not fits or re.fullmatch(r"(?!\.)[^/\\\x00-\x1f\x7f\ud800-\udfff]+", tag) is None:
        raise CheckpointError(
            otherwise
            or f"tag {tag!r} cannot name a checkpoint: it becomes a folder, so it must not be empty or long, not begin "
            f"with a dot, hold no slash or line break, no white space at its ends; and {LATEST!r} is taken"
        )


# ---- finding ---------------------------------------------------------------------------------------------------------


def is_complete(path: Path) -> bool:
    """Whether ``path`` is a checkpoint that was written to its end."""
    return (path / COMMIT).is_file()


def complete_tags(folder: Path) -> list[str]:
    """Tags of the complete checkpoints in ``folder``, oldest first (by the time of their commit)."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = [path for path in paths if not path.name.startswith(".") and is_complete(path)]
    return [path.name for path in sorted(found, key=lambda path: ((path / COMMIT).stat().st_mtime_ns, path.name))]


def latest_tag(folder: Path, name: str = LATEST) -> str | None:
    """What ``latest`` says, or another file of its kind; None when there is no such file."""
    try:
        return (folder / name).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error}") from None


def find(load_dir: str | Path, tag: str | None, whole: bool = True) -> Path:
    """The checkpoint that is meant; one that is ``whole``, or also one to look at.

    ``load_dir`` is the folder that checkpoints were saved to, or that of a run of ``train.py``. Without a ``tag`` it is
    the one that ``latest`` names, or ``load_dir`` itself. A CheckpointError: there is none, or it is not complete;
    :class:`NoCheckpoint`, where a run begins: no folder, or nothing but what an interrupted first save leaves.
    """
    folder, named = Path(os.path.expanduser(load_dir)), ""
    if not folder.is_dir():
        kind = CheckpointError if tag is not None or os.path.lexists(folder) else NoCheckpoint
        raise kind(f"{folder} is not a folder; give the folder that checkpoints were saved to")
    if (folder / RUN_CHECKPOINTS / LATEST).is_file() and not (folder / LATEST).exists() and not is_complete(folder):
        folder /= RUN_CHECKPOINTS
    if tag is None:
        if (folder / MANIFEST).exists() or is_complete(folder):
            return _complete(folder, whole)
        if (tag := latest_tag(folder)) is None:
            raise _no_latest(folder)
        check_tag(tag, f"{folder / LATEST} is damaged: {tag!r} cannot be the name of a checkpoint")
        named = f"{folder / LATEST} names {tag}, and "
    check_tag(tag)
    path = folder / tag
    if os.path.lexists(path):
        return _complete(path, whole)
    for left in sorted(folder.glob(f"{REPLACED}*")):
        # A kill between the two renames that replace a checkpoint of the same tag.
        if is_complete(left) and re.fullmatch(rf"{re.escape(REPLACED)}[0-9a-f]+-{re.escape(tag)}", left.name):
            return left
    known = complete_tags(folder)
    there = f"there are: {', '.join(known)}" if known else "there is no complete checkpoint in this folder"
    raise CheckpointError(f"{named}{path} does not exist; {there}")


def _complete(path: Path, whole: bool) -> Path:
    if is_complete(path) or (path.is_dir() and not whole):
        return path
    problem = f"not complete ({COMMIT} is missing): the save was interrupted, or files are lost"
    if any(path.glob("*mp_rank_*")):
        problem = "a checkpoint of DeepSpeed's own format, which engine.load_checkpoint reads, and this does not"
    raise CheckpointError(f"{path} is {problem}")


def _no_latest(folder: Path) -> CheckpointError:
    if known := complete_tags(folder):
        there = f"there are {', '.join(known)}"
        return CheckpointError(f"{folder / LATEST} is missing; name the checkpoint with tag=: {there}")
    names = sorted(path.name for path in folder.iterdir())
    # No name of a checkpoint begins with a dot, but that of one that was being replaced.
    if held := [name for name in names if name != SCRIPT and (name[0] != "." or name.startswith(REPLACED))]:
        return CheckpointError(
            f"{folder} holds no checkpoint that is complete, and {LATEST} is missing; it holds {listed(held)}: give "
            "the folder that checkpoints were saved to, and with tag= the one that is meant; where nothing was saved "
            "yet, do not load"
        )
    if any(name.startswith(SAVING) for name in names):
        return NoCheckpoint(f"{folder} holds no complete checkpoint: its only save was interrupted")
    return NoCheckpoint(f"{folder} holds no checkpoint ({LATEST} is missing)")


def others(load_dir: str | Path, tag: str | None) -> list[Path]:
    """The complete checkpoints beside the one that :func:`find` was asked for, newest first; none for a wrong tag."""
    folder = Path(os.path.expanduser(load_dir))
    if tag is None and (is_complete(folder) or (folder / MANIFEST).exists()):
        folder, tag = folder.absolute().parent, folder.absolute().name
    elif (folder / RUN_CHECKPOINTS).is_dir() and not (folder / LATEST).exists():
        folder /= RUN_CHECKPOINTS
    if tag is not None and not os.path.lexists(folder / tag):
        return []
    damaged = tag
    with contextlib.suppress(CheckpointError):
        damaged = tag or latest_tag(folder)
    return [folder / known for known in reversed(complete_tags(folder)) if known != damaged]


def complete_beside(load_dir: str | Path, tag: str | None) -> Path | None:
    """The newest of :func:`others` whose manifest and sizes are right; its bytes are not read, which takes long."""
    with contextlib.suppress(OSError):  # the folder may change meanwhile
        for path in others(load_dir, tag):
            # A manifest with the right hash may still hold anything.
            with contextlib.suppress(CheckpointError, OSError, ValueError, RecursionError):
                read_manifest(path)
                return path
    return None


def read_manifest(path: Path) -> Manifest:
    """The manifest of a complete checkpoint, after its hash and the sizes of all files have been compared.

    A CheckpointError names the file that is missing, shortened or changed.
    """
    where = path / MANIFEST
    try:
        raw, commit = where.read_bytes(), (path / COMMIT).read_bytes().decode("ascii", "replace").strip()
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}; the checkpoint is damaged") from None
    if not re.fullmatch(r"[0-9a-f]{64}", commit):
        raise CheckpointError(f"{path / COMMIT} is damaged: it should hold one SHA-256")
    if hashlib.sha256(raw).hexdigest() != commit:
        raise CheckpointError(f"{where} is not what was written: its SHA-256 differs from the one in {path / COMMIT}")
    manifest = Manifest.from_json(raw, str(where))
    check_sound(manifest, str(where))
    for name, info in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; the checkpoint is damaged")
        if (size := file.stat().st_size) != info.bytes:
            raise CheckpointError(f"{file} has {size} bytes and should have {info.bytes}; the checkpoint is damaged")
    return manifest


# ---- writing ---------------------------------------------------------------------------------------------------------


def commit(folder: Path, temporary: Path, manifest: Manifest, save_latest: bool) -> None:
    """Make the shards in ``temporary``, a folder in ``folder``, the checkpoint of their manifest's tag."""
    raw = manifest.to_json().encode()
    check_sound(Manifest.from_json(raw, MANIFEST), MANIFEST)  # what could not be loaded replaces nothing
    write_whole(temporary / MANIFEST, raw)
    mark = temporary / COMMIT
    write_whole(mark, hashlib.sha256(raw).hexdigest().encode() + b"\n")
    for newest in complete_tags(folder)[-1:]:
        before = (folder / newest / COMMIT).stat().st_mtime_ns
        if before >= mark.stat().st_mtime_ns:  # a clock that was put back must not make this one older
            with contextlib.suppress(OSError):  # some mounts let nobody set times
                os.utime(mark, ns=(before + 10**9, before + 10**9))
    flush_folder(temporary)  # what is in it, before it has a name that somebody reads
    final, aside = folder / manifest.tag, folder / f"{REPLACED}{manifest.id}-{manifest.tag}"
    if final.exists():
        final.replace(aside)
    try:
        temporary.replace(final)
        flush_folder(folder)  # before ``latest`` names it, and before what it takes the place of is removed
        if save_latest:
            write_whole(folder / LATEST, final.name.encode())  # no line break, as DeepSpeed's
    except Exception:  # a save that fails leaves everything as it was
        if not temporary.exists():
            final.replace(temporary)
        if aside.exists():
            aside.replace(final)
        raise
    if save_latest:
        flush_folder(folder)
    shutil.rmtree(aside, ignore_errors=True)


def point_latest(path: Path) -> None:
    """Let ``latest`` name a checkpoint."""
    write_whole(path.with_name(LATEST), path.name.encode())
    flush_folder(path.parent)


def prune(folder: Path, tag: str, keep_last: int) -> None:
    """Remove old checkpoints: of those whose tags differ from ``tag`` by digits only, the newest stay.

    The one that ``latest`` names stays, too: a run may save without touching ``latest``.
    """
    form = re.compile("".join(r"\d+" if part.isdigit() else re.escape(part) for part in re.split(r"(\d+)", tag)))
    alike = [known for known in complete_tags(folder) if form.fullmatch(known) and known != tag]
    named = latest_tag(folder)
    gone = [known for known in alike[: max(0, len(alike) - (keep_last - 1))] if known != named]
    for old in gone:
        (folder / old).replace(folder / f"{DELETING}{old}")
    if gone:
        flush_folder(folder)  # first out of sight: half of a checkpoint must not be found
    for old in gone:
        shutil.rmtree(folder / f"{DELETING}{old}", ignore_errors=True)


def check_replaceable(path: Path) -> None:
    """Refuse to put a checkpoint in the place of something that is none, or where one of their files belongs."""
    if path.name in (MANIFEST, COMMIT, SCRIPT):
        raise CheckpointError(f"tag {path.name!r} is the name of a file that belongs to checkpoints; choose another")
    folder = path.is_dir() and not path.is_symlink()
    ours = folder and (is_complete(path) or (path / MANIFEST).exists() or not any(path.iterdir()))
    if os.path.lexists(path) and not ours:
        what = f"{path} is there and is no checkpoint of deepzero, so it is not replaced"
        raise CheckpointError(f"{what}; save under another tag, or remove it")


def clear_remains(folder: Path) -> None:
    """Remove what interrupted saves have left, but for what this process writes to. Only who holds the lock may."""
    remains = [path for path in folder.iterdir() if path.name.startswith((SAVING, DELETING, REPLACED))]
    if remains := [path for path in remains if path.name not in _OF_THIS_PROCESS.written_to]:
        flush_folder(folder)  # who was killed may have had no time for it, and what is removed stands for what is named
    for path in remains:
        original = folder / path.name.removeprefix(REPLACED).partition("-")[2]
        if path.name.startswith(REPLACED) and not original.exists():
            path.replace(original)
        else:
            shutil.rmtree(path, ignore_errors=True)


def room_for(folder: Path, what: str, needed_bytes: int, advice: str) -> None:
    """Raise a :class:`CheckpointError` when something cannot fit."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        sizes = f"needs {short_bytes(needed_bytes)} and the disk has {short_bytes(free)} left"
        raise CheckpointError(f"{folder}: {what} {sizes}; make room, or {advice}")


# ---- the lock --------------------------------------------------------------------------------------------------------


class FolderLocks:
    """The right to write in folders, as often as somebody of this process has taken it; and what is written.

    A lock belongs to an open file, however many handles there are of it: each holder has one, and the last ends the
    lock.
    """

    def __init__(self) -> None:
        self._held: dict[int, str] = {}  # handle → the folder's real path
        self.written_to: set[str] = set()  # names of what saves of any engine write to: each has the save's id in it
        os.register_at_fork(after_in_child=self._close_all)

    def holds(self, folder: Path) -> bool:
        """Whether this process has the right to write in ``folder``: not in one that has come in a held one's place."""
        return self._current(folder) is not None

    def _current(self, folder: Path) -> int | None:
        """A handle of the lock that lies in the folder now."""
        real = os.path.realpath(folder)
        for handle, held in self._held.items():
            with contextlib.suppress(OSError):
                if held == real and os.path.samestat(os.fstat(handle), (folder / LOCK).stat()):
                    return handle
        return None

    def acquire(self, folder: Path) -> None:
        """Make the folder, and take the right to write in it; a CheckpointError where this process cannot have it."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (held := self._current(folder)) is not None:
                self._held[os.dup(held)] = self._held[held]
                return
            try:
                handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            except PermissionError:
                if not os.access(folder / LOCK, os.R_OK):
                    raise
                # Another user's, in a folder of a group: who holds a lock need not write.
                handle = os.open(folder / LOCK, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"cannot write to {folder}: {error.strerror}; choose another folder") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode("utf-8", "replace").strip() or "unknown"
            os.close(handle)
            raise CheckpointError(
                f"another run writes to {folder} ({holder}); stop it, or let this one save to another folder"
            ) from None
        except OSError:
            pass  # a file system without locks: writing goes on as it would without this check
        try:
            if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except OSError:  # no room for the words: nothing of us stays
            (folder / LOCK).unlink(missing_ok=True)
            os.close(handle)
            raise
        self._held[handle] = os.path.realpath(folder)

    def release(self, folder: Path) -> None:
        """Give the right back, once for each :meth:`acquire`."""
        real = os.path.realpath(folder)
        if (handle := next((handle for handle, held in self._held.items() if held == real), None)) is not None:
            del self._held[handle]
            os.close(handle)

    def _close_all(self) -> None:
        """In a forked child: the lock is the open file's, so that the child would keep it when its parent is gone."""
        for handle in self._held:
            os.close(handle)
        self._held.clear()


_OF_THIS_PROCESS = FolderLocks()
acquire, release, holds = _OF_THIS_PROCESS.acquire, _OF_THIS_PROCESS.release, _OF_THIS_PROCESS.holds
written_to = _OF_THIS_PROCESS.written_to
