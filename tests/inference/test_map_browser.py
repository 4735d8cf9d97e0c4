"""The page of a device map in a browser: its bars are drawn, in both colour schemes and on a narrow screen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import nn

from drivetrain import infer_auto_device_map, init_empty_weights
from tests.browser import needs_chromium, opened

pytestmark = needs_chromium

COLORS = {
    "light": ((255, 255, 255), (31, 111, 208), (122, 172, 234), (184, 106, 0)),
    "dark": ((20, 23, 26), (100, 168, 245), (47, 108, 179), (227, 171, 82)),
}
"""The colours of the page, of blocks in their two shades, and of the room to stream."""


def columns(pixels: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    """How many pixels of a colour each column of a picture has."""
    return (np.abs(pixels - color).sum(axis=2) <= 6).sum(axis=0)


@pytest.mark.parametrize("scheme", COLORS)
def test_bars_are_as_long_as_what_devices_have_and_nothing_is_fetched(tmp_path: Path, scheme: str) -> None:
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))  # 4 MiB each
    found = infer_auto_device_map(model, {0: "16MiB", 1: "8MiB", "cpu": "8MiB"})
    page = tmp_path / "map.html"
    page.write_text(found.html())
    pixels, asked_for = opened(page, tmp_path, dark=scheme == "dark", size=(500, 1000))
    paper, block, other, stream = COLORS[scheme]
    assert tuple(pixels[2, 2]) == paper
    assert tuple(pixels[2, -3]) == paper
    # 468 pixels are 16 MiB: three blocks and room for one on device 0, two blocks on device 1 and on the CPU.
    drawn = {color: columns(pixels, color) for color in (block, other, stream)}
    assert [int(drawn[block][100] > 100), int(drawn[other][200] > 60), int(drawn[stream][420] > 20)] == [1, 1, 1]
    assert drawn[block][420] == drawn[other][420] == 0
    assert asked_for == []
