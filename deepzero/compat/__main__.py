"""Run a script, or with ``-m`` a module, in which ``deepspeed`` is deepzero: ``python -m deepzero.compat SCRIPT …``.

``torchrun … -m deepzero.compat train.py --deepspeed ds.json`` starts ranks of it. What the program starts itself finds
deepzero as well: ``python -m deepzero.compat -m accelerate.commands.launch …`` launches unmodified scripts.
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from typing import Any

from deepzero.compat import STAND_IN, install

USAGE = "usage: python -m deepzero.compat [SCRIPT | -m MODULE] [ARGUMENT …]\n       python -m deepzero.compat --path"


def main() -> None:
    """Become the program that ``sys.argv`` names. Its exit status and tracebacks are those of plain Python."""
    arguments = sys.argv[1:]
    if arguments in (["-h"], ["--help"], ["--path"]):
        print(STAND_IN if arguments == ["--path"] else USAGE)
        return
    module = arguments[:1] == ["-m"]
    del arguments[: int(module)]
    if not arguments or (arguments[0].startswith("-") and not module):
        sys.exit(USAGE)
    if not getattr(sys.flags, "safe_path", False):  # what Python puts first: a script's folder, for a module this one
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(arguments[0]))
    sys.argv[:] = arguments
    sys.excepthook = _without_us
    install()
    if module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def _without_us(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> Any:
    """Print a traceback that begins in the program."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        inner = inner.tb_next
    sys.__excepthook__(kind, error.with_traceback(inner or trace), inner or trace)


if __name__ == "__main__":
    main()
