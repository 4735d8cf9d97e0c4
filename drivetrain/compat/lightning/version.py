"""Version of Lightning whose names are provided."""

from __future__ import annotations

VERSION = "2.6.6"
