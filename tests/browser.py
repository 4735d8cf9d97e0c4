"""Opens pages in Chromium, where this machine has it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


def opened(page: Path, folder: Path, dark: bool, size: tuple[int, int] = (1200, 1400)) -> tuple[Any, list[str]]:
    """A picture of a page, as an array of (height, width, 3) colours, and the addresses that it has asked for."""
    picture, net_log = folder / "page.png", folder / "net.json"
    command = [
        *(str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        *("--disable-component-update", "--no-first-run", f"--user-data-dir={folder / 'profile'}"),
        *(f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=3000"),
        *(f"--screenshot={picture}", f"--window-size={size[0]},{size[1]}", f"--log-net-log={net_log}", page.as_uri()),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    pixels = np.round(matplotlib.image.imread(picture)[:, :, :3] * 255).astype(int)
    return pixels, asked_for_by_pages(net_log)


def asked_for_by_pages(net_log: Path) -> list[str]:
    """The addresses that pages have asked for; what the browser asks for by itself has no origin."""
    events = json.loads(net_log.read_text())["events"]
    assert events
    requests = [event["params"] for event in events if "initiator" in event.get("params", {})]
    return [each["url"] for each in requests if each["initiator"] != "not an origin" and not is_inline(each["url"])]


def is_inline(url: str) -> bool:
    return url.startswith("data:")
