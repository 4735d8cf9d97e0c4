"""Flags for installed optional packages, under the names that examples use."""

from __future__ import annotations

from importlib.util import find_spec

_OMEGACONF_AVAILABLE = find_spec("omegaconf") is not None
_RICH_AVAILABLE = find_spec("rich") is not None
_TORCHVISION_AVAILABLE = find_spec("torchvision") is not None
