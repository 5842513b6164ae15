"""Pages in a real browser: headless Chromium, without network, at any width."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip
TIMEOUT_SECONDS = 60


def need_chromium() -> str:
    """Its path; skips the test where there is none. Asked late: .ci/run installs it while other tests run."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium on this machine")
    return found


_PROBE = """
<script>
addEventListener("load", () => {
  const root = document.documentElement, box = e => e.getBoundingClientRect();
  const loaded = performance.getEntriesByType("resource").map(entry => entry.name);
  const outside = [...document.querySelectorAll("body *")].filter(e => box(e).right > innerWidth + 1)
    .filter(e => !e.closest(".table") && !e.closest("svg")).map(e => e.tagName + " " + e.className);
  const charts = [...document.querySelectorAll("svg.chart")].map(e => ({
    name: e.getAttribute("aria-labelledby").split("-t ")[0], width: box(e).width, height: box(e).height,
    letters: Math.min(...[...e.querySelectorAll("text")].map(t => box(t).height)), x: box(e).x}));
  const folded = [...document.querySelectorAll("details:not([open])")];
  folded.forEach(e => e.open = true);
  const cut = [...document.querySelectorAll(".table")].filter(e => e.scrollWidth > e.clientWidth + 1)
    .map(e => e.textContent.slice(0, 60));
  folded.forEach(e => e.open = false);
  const style = getComputedStyle(document.body);
  parent.postMessage(JSON.stringify({width: innerWidth, scroll: root.scrollWidth, charts, loaded, outside, cut,
    paper: style.backgroundColor, ink: style.color}), "*");
});
</script>"""
_COLLECT = """
<pre id="found"></pre>
<script>
const found = [];
addEventListener("message", m => { found.push(JSON.parse(m.data));
  document.getElementById("found").textContent = JSON.stringify(found); });
</script>"""


def chromium(arguments: list[str], profile: Path, seconds: float) -> str:
    """The page as its scripts have made it, after so many seconds of the browser's own clock."""
    place = [f"--user-data-dir={profile}", f"--virtual-time-budget={seconds * 1000:.0f}", "--dump-dom"]
    command = [need_chromium(), *QUIET, *place, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def measure(page: Path, widths: tuple[int, ...], scratch: Path, dark: bool = False) -> dict[int, dict[str, Any]]:
    """Lay a page out at several widths at once, each in a frame of its own, and let it say what came of it.

    A copy of the page gets a script, and loses its policy, which would forbid that. A window cannot be narrower than
    500 pixels of CSS, a frame can. ``scratch`` is an empty folder.
    """
    html = re.sub(r"<meta http-equiv=.Content-Security-Policy[^>]*>", "", page.read_text(encoding="utf-8"))
    inner = html.replace("</body>", f"{_PROBE}</body>")
    frames = "".join(
        f'<iframe srcdoc="{escape(inner)}" style="width:{width}px;height:900px;border:0"></iframe>' for width in widths
    )
    (scratch / "frames.html").write_text(f"<!DOCTYPE html><body>{_COLLECT}{frames}</body>", encoding="utf-8")
    scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    shown = chromium([*scheme, "--window-size=1400,1000", f"file://{scratch / 'frames.html'}"], scratch / "profile", 5)
    found = re.search(r'<pre id="found">(.*?)</pre>', shown, re.S)
    assert found is not None, shown[-2000:]
    said = {entry["width"]: entry for entry in json.loads(unescape(found[1]))}
    assert sorted(said) == sorted(widths)
    return said
