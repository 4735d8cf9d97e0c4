from __future__ import annotations

import pytest

from drivetrain.launch.interpreter import Invocation


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py --lr 1", Invocation("script", "train.py", ("--lr", "1"), ())),
        ("-W error -X dev train.py -m x", Invocation("script", "train.py", ("-m", "x"), ("-W", "error", "-X", "dev"))),
        ("-Werror train.py", Invocation("script", "train.py", (), ("-W", "error"))),
        ("-u -B -O train.py", Invocation("script", "train.py", (), ("-B", "-O"))),
        ("-m pkg.train -c 1", Invocation("module", "pkg.train", ("-c", "1"), ())),
        ("-OOm pkg.train", Invocation("module", "pkg.train", (), ("-O", "-O"))),
        ("-mpkg", Invocation("module", "pkg", (), ())),
        ("-c pass 1", Invocation("command", "pass", ("1",), ())),
        ("--check-hash-based-pycs never a.py", Invocation("script", "a.py", (), ("--check-hash-based-pycs", "never"))),
        ("- 1", Invocation("stdin", "", ("1",), ())),
        ("-i", Invocation("stdin", "", (), ())),
        ("", Invocation("stdin", "", (), ())),
    ],
)
def test_a_command_line_is_taken_apart_as_python_does(line: str, expected: Invocation) -> None:
    assert Invocation.parse(line.split()) == expected
