"""Models on devices where `Module.to` makes new parameters: optimizers hold the model's, whenever they were made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator, ConfigurationError, Task
from tests.pool import run_in_processes
from tests.simulated.devices import simulated as simulated
from tests.simulated.devices import start
from tests.strategies.quiet import quiet_trainer

pytestmark = pytest.mark.usefixtures("simulated")

STEPS = 12


class Tied(Task):
    """Two layers of one weight; its optimizer is made before a run, or when it is asked for."""

    def __init__(self, made_before: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("shift", torch.ones(4))
        self.first.bias.note = "kept"  # type: ignore[attr-defined]
        self.optimizer = self.make() if made_before else None

    def make(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        for parameter in self.parameters():  # as an optimizer that has been loaded has it
            state = {"step": torch.tensor(3.0), "exp_avg": torch.ones_like(parameter)}
            optimizer.state[parameter] = {**state, "exp_avg_sq": torch.ones_like(parameter)}
        return optimizer

    def forward(self, rows: Tensor) -> Tensor:
        return (self.last(torch.tanh(self.first(rows))) - self.shift).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer or self.make()


def data() -> Tensor:
    return torch.randn(STEPS * 2, 4, generator=torch.Generator().manual_seed(1))


def fit(device: str, made_before: bool) -> Tied:
    task = Tied(made_before)
    quiet_trainer("single", accelerator=device).fit(task, DataLoader(data(), batch_size=2))  # type: ignore[arg-type]
    return task


def loop(device: str, together: bool) -> Tied:
    accelerator = Accelerator(cpu=device == "cpu")
    task = Tied()
    optimizer: Any = task.make()
    if together:
        model, optimizer = accelerator.prepare(task, optimizer)
    else:
        model = accelerator.prepare(task)
        optimizer = accelerator.prepare(optimizer)
    for rows in data().split(2):
        accelerator.backward(model(rows.to(accelerator.device)))
        optimizer.step()
        optimizer.zero_grad()
    return task


RUNS: dict[str, Callable[[str], Tied]] = {
    "fit": lambda device: fit(device, made_before=False),
    "fit with an optimizer that was there": lambda device: fit(device, made_before=True),
    "prepared together": lambda device: loop(device, together=True),
    "prepared one by one": lambda device: loop(device, together=False),
}


def outcome(device: str) -> dict[str, Any]:
    if device == "sim":
        start(1)
    found: dict[str, Any] = {}
    for name, run in RUNS.items():
        task = run(device)
        tied, note = task.last.weight is task.first.weight, getattr(task.first.bias, "note", None)
        found[name] = [{key: value.cpu() for key, value in task.state_dict().items()}, task.first.bias.device.type]
        found[name] += [tied, note]
    return found


def test_weights_that_are_trained_are_those_of_the_cpu() -> None:
    expected, found = (run_in_processes(outcome, 1, (device,))[0] for device in ("cpu", "sim"))
    before = Tied().state_dict()
    for name, (weights, _, tied, _) in expected.items():
        assert all(not torch.equal(value, before[key]) for key, value in weights.items() if key != "shift")
        assert tied
        assert found[name][1:] == ["sim", True, "kept"]
        for key, value in weights.items():
            torch.testing.assert_close(found[name][0][key], value, atol=5e-6, rtol=0, msg=f"{name}: {key}")


def converted() -> list[str]:
    """Errors of runs whose conversion makes new parameters, as torch does where it is asked to."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    found = []
    for precision in ("32", "bf16-true"):
        task = Tied(made_before=True)
        try:
            quiet_trainer("single", precision=precision).fit(task, DataLoader(data(), batch_size=2))  # type: ignore[arg-type]
            found.append("trained" if not torch.equal(task.first.bias, Tied().first.bias) else "as it was")
        except ConfigurationError as error:
            found.append(str(error))
    return found


def test_an_optimizer_over_parameters_that_placing_has_replaced_is_refused_by_name() -> None:
    trained, message = run_in_processes(converted, 1)[0]
    assert trained == "trained"
    assert "AdamW holds the old parameter first.weight, which was replaced" in message
