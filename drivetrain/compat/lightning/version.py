"""The version of Lightning whose names these are."""

from __future__ import annotations

VERSION = "2.6.6"
