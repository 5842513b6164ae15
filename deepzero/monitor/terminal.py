"""The run as a person sees it: a bar on a terminal, plain lines anywhere else, a table at the end.

Where standard output goes to a disk that is full, or to a program that has ended, that is said once on standard error,
and training goes on.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from deepzero.comm.ledger import side_of
from deepzero.monitor.async_logger import Kind
from deepzero.utils.formatting import short_bytes, short_number

Row = tuple[str, float | None, float, str]  # of the ledger: what, bytes predicted and measured, a note
NOTES = {
    "gathered": "the most at any time of a step",
    "activations": "residual of the peak",
    "snapshot": "of asynchronous saves, host memory",
    "host_states": "of offload_states",
    "host_activations": "of cpu_checkpointing",
}
"""On memory categories that are not what is held after a backward pass, or that nobody predicts."""


def say(text: str, stream: TextIO | None = None) -> None:
    """Print ``text``, if there is any, to ``stream`` or standard error, which may be full or closed."""
    stream = stream if stream is not None else sys.stderr
    if text:
        try:
            print(text, file=stream, flush=True)
        except OSError:  # what is left in the buffer must not become the process's exit status
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Terminal:
    """Prints steps and validations: to a terminal a bar, to a pipe or a file a line every ``log_every`` steps."""

    def __init__(self, total_steps: int, log_every: int = 1, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._total, self._log_every = total_steps, log_every
        self._bar: Any = None
        self._lost = False  # standard output has failed, and it was said
        if isinstance(self._stream, io.TextIOWrapper):
            # A sample may hold characters that this stream's encoding has not; that must not end a run. Nor must what
            # an earlier print has left in the buffer of a full disk: the first line says so.
            with contextlib.suppress(OSError):
                self._stream.reconfigure(errors="replace")

    def line(self, text: str) -> None:
        """Print ``text`` without disturbing the bar."""
        with self._said_once():
            if self._bar is not None:
                self._bar.write(text, file=self._stream)
            else:
                print(text, file=self._stream, flush=True)

    def write(self, kind: Kind, entry: Mapping[str, Any]) -> None:
        """Of a step move the bar, or print a line; of a validation print the loss."""
        step = entry["step"]
        place = f"step {step:>{len(str(self._total))}}/{self._total}"
        if kind == "validation":
            bits = entry["val_bits_per_byte"]
            in_bits = f"  ({bits:.3f} bits per byte)" if bits is not None else ""
            self.line(f"{place}  validation loss {entry['val_loss']:.4f}{in_bits}")
            return
        if self._bar is None and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, initial=step - 1, file=self._stream, unit="step", dynamic_ncols=True)
        if self._bar is not None:
            with self._said_once():
                self._bar.set_postfix_str(_step_text(entry, short=True), refresh=False)
                self._bar.update(1)
            if entry["skipped"]:
                self.line(f"step {step}: overflow, skipped; loss scale was {entry['loss_scale']:g}")
        elif step % self._log_every == 0 or step == self._total or entry["skipped"]:
            self.line(f"{place}  {_step_text(entry, short=False)}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            with self._said_once():
                self._bar.close()
            self._bar = None

    @contextlib.contextmanager
    def _said_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._lost:
                self._lost = True
                with contextlib.suppress(OSError):  # both may go to one file
                    print(f"standard output: {error}; training goes on without it", file=sys.stderr, flush=True)


def _step_text(entry: Mapping[str, Any], short: bool) -> str:
    parts = [f"loss {entry['loss']:.4f}"]
    if not short:
        parts += [f"lr {entry['lr']:.2e}", f"grad norm {entry['grad_norm']:.3f}"]
        if entry["grad_norm_clipped"] != entry["grad_norm"]:
            parts[-1] += f" -> {entry['grad_norm_clipped']:.3f}"
        if entry["loss_scale"] != 1:
            parts.append(f"loss scale {entry['loss_scale']:g}")
    parts += [f"{short_number(entry['tokens_per_second'])} tokens/s", f"{entry['tflops']:.3g} TFLOP/s"]
    if "mfu" in entry:
        parts.append(f"MFU {entry['mfu']:.1%}")
    if not short:
        parts.append(f"{entry['step_seconds'] * 1000:.0f} ms")
    if entry["skipped"]:
        parts.append("overflow: step skipped")
    return "  ".join(parts)


def printable(text: str) -> str:
    r"""Without control characters: an untrained model writes escape sequences that would turn a terminal upside down.

    Example:
        >>> printable("a\x1b[31m\n")
        'a?[31m\n'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def ledger_table(report: Mapping[str, Any]) -> str:
    """Predicted beside measured, as text: bytes held by one rank, bytes sent by one rank in one optimizer step.

    ``report`` is the ledger's: ``{"memory": {category: {"predicted", "measured"}}, "communication": {kind: …}}``.
    """
    held, sent = report["memory"].items(), report["communication"].values()
    told = lambda name, v: NOTES.get(name, "") if v["measured"] else ""
    rows: list[Row] = [(k, v["predicted"], v["measured"], told(k, v)) for k, v in held if v["predicted"] is not None]
    files = [row for row in rows if side_of(row[0]) == "file"]
    rows = [row for row in rows if row not in files]
    rows += [("all of these", sum(row[1] or 0 for row in rows), sum(row[2] for row in rows), ""), *files]
    rows += [(name, None, v["measured"], NOTES.get(name, "")) for name, v in held if v["predicted"] is None]
    lines = _section("held by one rank after a backward pass", rows)
    rows = []
    for kind, values in report["communication"].items():
        measured, padding = values["measured"], values["measured"]["padding_elements"]
        note = f"{measured['calls']:g} call{'s' * (measured['calls'] != 1)}, {measured['elements']:,.0f} elements"
        note += f" + {padding:,.0f} padding" if padding else ""
        rows.append((kind, (values["predicted"] or {}).get("bytes"), measured["bytes"], note))
    between = [
        sum(side.get("between_node_bytes", 0) for side in sides)
        for sides in ([v["predicted"] or v["measured"] for v in sent], [v["measured"] for v in sent])
    ]
    if any(between):
        rows.append(("of these, between nodes", *between, ""))
    return "\n".join([*lines, *_section("sent by one rank in one step", rows)])


def _section(title: str, rows: list[Row]) -> list[str]:
    width = max([36, *(len(row[0]) for row in rows)])
    lines = [f"{title:<{width + 2}}{'predicted':>14}{'measured':>14}{'ratio':>9}"]
    for name, predicted, measured, note in rows:
        ratio = f"{measured / predicted:.4f}" if predicted else ("inf" if measured and predicted == 0 else "-")
        expected = "-" if predicted is None else short_bytes(predicted)
        lines.append(f"  {name:<{width}}{expected:>14}{short_bytes(measured):>14}{ratio:>9}   {note}".rstrip())
    return lines
