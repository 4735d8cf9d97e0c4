"""Make the pictures of the Start pages that are screenshots: `python docs/hooks/start_pictures.py NAME PAGE HEIGHT`.

PAGE is a report or another HTML file, NAME the picture below docs/images/start. Needs Chromium and Pillow. A file of
text becomes a picture of a terminal.
"""

from __future__ import annotations

import html
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURES = Path(__file__).parent.parent / "images" / "start"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LIMIT = 60_000  # bytes of a picture
TERMINAL = """<style>body { margin: 0; background: #1f2530; } pre { color: #dfe5ec; margin: 0; padding: 18px 22px;
font: 15px/1.5 "DejaVu Sans Mono", monospace; white-space: pre; }</style><pre>"""


def screenshot(name: str, page: Path, height: int, width: int = 1080) -> Path:
    """Write the picture of a page, with as many colours as fit into the limit."""
    if BROWSER is None:
        sys.exit("Pictures of pages need Chromium, and this machine has none.")
    picture = PICTURES / f"{name}.png"
    with tempfile.TemporaryDirectory() as folder:
        if page.suffix == ".txt":
            text = page.read_text()
            page = Path(folder, "terminal.html")
            page.write_text(TERMINAL + html.escape(text) + "</pre>")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
        options += ["--blink-settings=preferredColorScheme=1", f"--user-data-dir={folder}/profile"]
        options += [f"--window-size={width},{height}", f"--screenshot={picture}", page.absolute().as_uri()]
        subprocess.run([BROWSER, *options], check=True, capture_output=True, timeout=120)
    whole = Image.open(picture).convert("RGB")
    for colours in (256, 128, 64, 32, 16):
        whole.quantize(colours, dither=Image.Dither.NONE).save(picture, optimize=True)
        if picture.stat().st_size <= LIMIT:
            return picture
    sys.exit(f"{picture} has {picture.stat().st_size} bytes with 16 colours: make it smaller.")


if __name__ == "__main__":
    made = screenshot(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *map(int, sys.argv[4:]))
    print(f"wrote {made}: {made.stat().st_size:,} bytes")
