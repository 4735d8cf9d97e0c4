"""Packages import what a public name is in when it is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.runtime.exports import load_export


def test_a_name_is_imported_once_and_kept() -> None:
    namespace: dict[str, Any] = {"__name__": "package"}
    assert load_export("sqrt", {"sqrt": "math"}, namespace)(4) == 2
    assert "sqrt" in namespace


def test_an_unknown_name_is_an_attribute_error_of_the_package() -> None:
    with pytest.raises(AttributeError, match="module 'package' has no attribute 'sqr'"):
        load_export("sqr", {"sqrt": "math"}, {"__name__": "package"})
