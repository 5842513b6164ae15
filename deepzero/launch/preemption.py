"""SIGTERM and Ctrl-C as a request: a rank's program may ask for time to leave in order, with a checkpoint say.

A rank ends at once on either (:mod:`deepzero.launch.rank_process`) unless its program has called
:func:`on_stop_request`. This is a module of its own because a rank that the launcher has started runs ``rank_process``
as ``__main__``, and what the program imports under that name is a second copy of it; the request has to be one.
"""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGTERM, Signals
from typing import NamedTuple

MAX_GRACE_SECONDS = 25.0
"""The launcher and torchrun's agent kill a rank 30 seconds after SIGTERM."""

SAME_REQUEST_SECONDS = 1.0
"""Slurm signals every process of a job, and then the launcher or agent passes on what it got itself."""


class StopRequest(NamedTuple):
    """What a program wants to happen on SIGTERM and SIGINT."""

    callback: Callable[[], None]
    grace_seconds: float


_registered: StopRequest | None = None
_asked_by: Signals | None = None


def on_stop_request(callback: Callable[[], None] | None, grace_seconds: float = 20.0) -> None:
    """On SIGTERM or SIGINT do not end this rank at once: call ``callback``, and end it only if it is still there later.

    The callback is called once, from another thread than the program's, and has to be quick: it sets a flag that the
    program looks at between two steps. A second of these signals, and SIGHUP at any time, ends the rank at once. What
    comes within :data:`SAME_REQUEST_SECONDS` is not a second one.

    SIGTERM also comes when another rank has failed. The program need not tell this apart: its next collective raises.

    Args:
        callback: what to call; None: from now on these signals end this rank at once again.
        grace_seconds: how long the program may take from the signal to its end.

    Raises:
        ValueError: ``grace_seconds`` is negative or above :data:`MAX_GRACE_SECONDS`.
    """
    global _registered
    if not 0 <= grace_seconds <= MAX_GRACE_SECONDS:
        raise ValueError(
            f"grace_seconds={grace_seconds}: must lie between 0 and {MAX_GRACE_SECONDS:g}, "
            "because a rank is killed 30 s after SIGTERM"
        )
    _registered = None if callback is None else StopRequest(callback, grace_seconds)


def registered() -> StopRequest | None:
    """What the program has asked for, if anything."""
    return _registered


def ask(request: StopRequest, number: int) -> None:
    """Pass a signal on to the program."""
    global _asked_by
    _asked_by = Signals(number)
    request.callback()


def stop_signal() -> Signals:
    """The signal that this rank was asked to stop by; SIGTERM where another rank was asked."""
    return _asked_by or SIGTERM
