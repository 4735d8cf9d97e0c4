"""The page "Add your own" keeps what it promises: short examples, few files, and they work."""

from __future__ import annotations

import re

import pytest

from tests.pool import ROOT, run_in_processes

PAGE = ROOT / "docs" / "extending.md"
KINDS = {"A strategy", "A precision", "A callback", "A tracker", "A checkpoint format", "A command"}
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def code_of(kind: str) -> str:
    [code] = re.findall(r"^```python\n(.*?)^```", SECTIONS[kind], re.MULTILINE | re.DOTALL)
    return code


def test_every_kind_has_an_example() -> None:
    assert SECTIONS.keys() == KINDS


@pytest.mark.parametrize("kind", SECTIONS)
def test_an_example_has_at_most_thirty_lines(kind: str) -> None:
    assert len([line for line in code_of(kind).splitlines() if line.strip()]) <= 30


@pytest.mark.parametrize("kind", SECTIONS)
def test_it_touches_a_new_file_and_one_that_is_there(kind: str) -> None:
    [named] = re.findall(r"^Files: (.*)", SECTIONS[kind], re.MULTILINE)
    new, changed = re.findall(r"`(.*?)`", named)
    assert not (ROOT / new).exists()
    assert (ROOT / new).parent.is_dir()
    assert (ROOT / changed).is_file()


TRAINING = """
import os

import pytest
from drivetrain import gather

with pytest.raises(ConfigurationError, match="no common loss scale"):
    Accelerator(cpu=True, strategy="local_sgd", mixed_precision="fp16")

torch.manual_seed(int(os.environ["RANK"]))
accelerator = Accelerator(cpu=True, strategy="local_sgd")
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
spread = []
for _ in range(8):
    loss = model(torch.randn(2, 4)).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    spread.append(gather(model.weight.detach()[None]).std(0).max().item())
assert spread[6] > 1e-3 and spread[7] < 1e-6, spread
"""


def run_strategy(path: str) -> None:
    with open(path) as file:
        exec(compile(file.read(), path, "exec"), {"__name__": "__main__"})


def test_the_strategy_averages_over_processes(tmp_path) -> None:
    path = tmp_path / "local_sgd.py"
    path.write_text(code_of("A strategy") + TRAINING)
    run_in_processes(run_strategy, 2, args=(str(path),), timeout=60)
