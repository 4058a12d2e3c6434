"""A real browser for tests: headless Chromium from the command line, one process a look."""

import base64
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NARROWEST = 500
"""Headless Chromium opens no narrower window."""

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=3000",
)


def chromium() -> str:
    """Path of the browser. Skips the test where none is installed."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs a headless browser: apt-get install chromium")
    return found


def url_of(place: str | Path) -> str:
    """A URL of a URL or a local path."""
    return str(place) if "://" in str(place) else Path(place).resolve().as_uri()


def browse(place: str | Path, *more: str, width: int = 1200, height: int = 900, dark: bool = False) -> str:
    """Opens a page in a browser of its own and returns what it prints. Raises where the browser fails."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        window = [f"--user-data-dir={profile}", f"--window-size={max(width, NARROWEST)},{height}"]
        command = [chromium(), *FLAGS, *scheme, *window, *more, url_of(place)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def screenshot(place: str | Path, out_png: Path, width: int, height: int, dark: bool = False) -> Path:
    """A picture of the page in a window of that size; narrower than Chromium's least, in a frame of that width."""
    with tempfile.TemporaryDirectory() as folder:
        if width < NARROWEST:
            framed = Path(folder, "frame.html")
            style = f"position:absolute;left:0;top:0;border:0;width:{width}px;height:{height}px"
            framed.write_text(f'<!doctype html><body><iframe style="{style}" src="{url_of(place)}"></iframe>')
            place = framed
        browse(place, f"--screenshot={out_png.resolve()}", width=width, height=height, dark=dark)
    if not out_png.is_file():
        raise RuntimeError(f"Chromium wrote no picture of {place}")
    return out_png


def dump_dom(place: str | Path, width: int = 1200, height: int = 900) -> str:
    """The document as HTML after it was loaded and its scripts have run."""
    return browse(place, "--dump-dom", width=width, height=height)


def measure(page: str, script: str, width: int, height: int = 900) -> str:
    """Runs an expression over `page` (HTML text) laid out at `width` and returns its value as text.

    The page stands in a frame of that width; `view` is its window and `doc` its document.
    """
    code = base64.b64encode(page.encode()).decode()
    with tempfile.TemporaryDirectory() as folder:
        outer = Path(folder, "measure.html")
        outer.write_text(
            f"""<!doctype html><meta charset="utf-8"><pre id="found"></pre>
<iframe id="frame" style="border:0;width:{width}px;height:{height}px"></iframe>
<script>
const frame = document.getElementById("frame");
const bytes = Uint8Array.from(atob("{code}"), c => c.charCodeAt(0));
frame.onload = () => {{
  const view = frame.contentWindow, doc = frame.contentDocument;
  document.getElementById("found").textContent = "[[" + String({script}) + "]]";
  frame.remove();
}};
frame.srcdoc = new TextDecoder().decode(bytes);
</script>"""
        )
        dom = dump_dom(outer, width + 100, height)
    shown = dom[dom.index('id="found"') :]
    if "[[" not in shown.partition("</pre>")[0]:
        raise RuntimeError("the page did not load, or the expression raised")
    return shown[shown.index("[[") + 2 : shown.index("]]")]
