"""The pytest fixture `verify`. To use it, write `pytest_plugins = ["drivetrain.verification.pytest_fixture"]`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.verification.page import page
from drivetrain.verification.run import VerificationResult
from drivetrain.verification.run import verify as run


@pytest.fixture
def verify(tmp_path: Path) -> Callable[..., VerificationResult]:
    """Return a function that fails the test if `drivetrain.verify` finds that a script trains differently.

    The function takes the arguments of `drivetrain.verify`. It writes a page about each comparison into `tmp_path`.
    """

    def check(script: str, *args: object, **named: object) -> VerificationResult:
        result = run(script, *args, **named)  # type: ignore[arg-type]
        tmp_path.joinpath(f"{Path(script).stem}.html").write_bytes(page(result, script))
        result.assert_same()
        return result

    return check
