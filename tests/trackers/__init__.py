import pytest

pytest.register_assert_rewrite("tests.trackers.package_contract")
