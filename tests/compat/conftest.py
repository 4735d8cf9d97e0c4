"""What the tests of this folder may use."""

from __future__ import annotations

import pytest

from tests.compat.checking import Launches


@pytest.fixture(scope="session")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """The launches of this session."""
    return Launches(request, tmp_path_factory)
