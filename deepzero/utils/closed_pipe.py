"""``… | head -1``: a program that is read by another one ends quietly when the other has read enough; and on Ctrl-C.

Python turns the write that nobody will read into a ``BrokenPipeError`` with a traceback, and says one more line when it
flushes what is left at its own end. A shell's programs end without a word there, and so do deepzero's.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


class Interrupted(Exception):
    """A signal ended the run; ``signum`` says which. Its cause is what a rank had failed of before, if one had."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Call ``main`` and leave with its exit status; with SIGPIPE's, 141, where nobody reads standard output any more.

    Ctrl-C ends it with SIGINT's, 130, another signal that ended its ranks with its own; a full disk with 2.

    Raises:
        SystemExit: always, unless ``main`` raises another error, a ``BrokenPipeError`` of another pipe included.
    """
    status: int | str | None = 0
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as train.py has it during its imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Closed (``>&-``): Python has no stream for it, and the next file that is opened would get its number.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(opened := os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(opened, "r" if number == 0 else "w"))
    try:
        try:
            status = main()
        except SystemExit as ended:  # argparse's, after --help
            status = ended.code
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        except Interrupted as error:
            print(error, file=sys.stderr)
            status = 128 + error.signum
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:  # ``--help > FILE`` on a full disk
            _drop_stdout()
            print(f"cannot write to standard output: {error.strerror}", file=sys.stderr)
            status = status or 2
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        _drop_stdout()
        status = 128 + signal.SIGPIPE
    sys.exit(status)


def _drop_stdout() -> None:
    """What is left in the buffer has to go somewhere when the interpreter flushes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _nobody_reads() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # the other end's going away is always told
    return bool(poll.poll(0))
