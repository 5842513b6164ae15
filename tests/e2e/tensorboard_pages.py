"""TensorBoard's server on a free port, and headless Chromium that looks at its pages, with no network for either."""

import contextlib
import gzip
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browser import chromium, need_chromium

START_SECONDS = 40.0

CHARTS = "https://www.gstatic.com/charts/loader.js"
NO_CHARTS = """<script>
const anything = new Proxy(function () {}, {
  get: (_, key) => key === Symbol.toPrimitive ? () => 0 : key === "then" ? undefined : anything,
  apply: () => anything, construct: () => anything,
});
window.google = {charts: {load: () => Promise.resolve()}, visualization: anything};
function choose() {  // the view named in the address, from the second of the plugin's menus
  const menu = document.querySelectorAll("[role=button][aria-haspopup=listbox]")[1];
  if (!menu || !location.hash) return setTimeout(choose, 100);
  menu.dispatchEvent(new MouseEvent("mousedown", {bubbles: true}));
  setTimeout(() => document.querySelector(`li[data-value=${location.hash.slice(1)}]`).click(), 100);
}
choose();
</script>"""
"""torch-tb-profiler waits for a chart library from Google's servers before it shows anything; this one draws nothing.
And the view that the address names is chosen, as a hand would."""


def need_a_browser() -> None:
    need_chromium()
    if importlib.util.find_spec("torch_tb_profiler") is None:
        pytest.skip("torch-tb-profiler is not installed")


def _fetch(url: str) -> tuple[bytes, str]:
    """Unpacked content, and its type."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
        if answer.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        return body, answer.headers.get("Content-Type", "")


def get_json(url: str) -> Any:
    return json.loads(_fetch(url)[0])


@contextlib.contextmanager
def tensorboard(run_dir: Path) -> Iterator[str]:
    """``tensorboard --logdir RUN_DIR``; its address, with a slash at the end."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(run_dir), "--port", "0", "--host", "127.0.0.1"]
    with tempfile.TemporaryFile("w+") as said:
        server = subprocess.Popen(command, stdout=said, stderr=said, cwd=run_dir)
        try:
            end = time.monotonic() + START_SECONDS
            while True:
                said.seek(0)
                text = said.read()
                if found := re.search(r"TensorBoard .* at (http://[\d.]+:\d+/)", text):
                    break
                assert server.poll() is None and time.monotonic() < end, text
                time.sleep(0.1)
            yield found[1]
        finally:
            server.terminate()
            server.wait(20)


@contextlib.contextmanager
def without_charts(url: str) -> Iterator[str]:
    """The same server at another address, whose pages do not ask Google for a chart library."""

    class Relay(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                body, kind = _fetch(url + self.path.lstrip("/"))
            except urllib.error.HTTPError as error:  # /favicon.ico
                self.send_error(error.code)
                error.close()
                return
            if "text/html" in kind:
                page = body.decode("utf-8")
                body = re.sub(rf"<script[^>]*{re.escape(CHARTS)}[^>]*></script>", lambda _: NO_CHARTS, page).encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the browser has seen enough
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Relay)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def look(url: str, picture: Path) -> str:
    """Open a page, let its scripts run, take a picture; returns the page as the scripts have made it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        return chromium(["--window-size=1400,2600", f"--screenshot={picture}", url], Path(profile), 15)
