"""Models that replace a module while they train, such as the target network of a Q-network, save and resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator, CheckpointError, Task
from tests.pool import run_in_processes
from tests.trainer.tasks import quiet


class WithTarget(Task):
    """The optimizer holds the first target network, which a copy of the online network replaces in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online, self.target = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.online(batch) - self.target(batch) - 1).square().mean()

    def on_train_epoch_end(self) -> None:
        self.target = copy.deepcopy(self.online)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def saved(folder: str, strategy: str) -> list[list[str]]:
    data = DataLoader(torch.ones(8, 2), batch_size=2)  # type: ignore[arg-type]
    task = WithTarget()
    trainer = quiet(max_epochs=2, strategy=strategy)
    trainer.fit(task, data)
    trainer.save_checkpoint(folder)
    again = WithTarget()
    resumed = quiet(max_epochs=2, strategy=strategy)
    resumed.fit(again, data, resume=folder)
    assert resumed.global_step == trainer.global_step
    assert all(map(torch.equal, task.parameters(), again.parameters()))
    state = trainer.accelerator.run_state.engine()["optimizers"][0]
    return [sorted(state["state"]), state["param_groups"][0]["params"]]


NAMES = ["online.bias", "online.weight", "target.bias", "target.weight"]


@pytest.mark.parametrize(("strategy", "processes"), [("auto", 1), ("ddp_find_unused_parameters_true", 2)])
def test_the_state_of_replaced_parameters_keeps_their_names(tmp_path: Path, strategy: str, processes: int) -> None:
    for state, held in run_in_processes(saved, processes, args=(str(tmp_path / "saved"), strategy), timeout=60):
        assert state == NAMES
        assert sorted(held) == NAMES


def test_a_parameter_that_was_never_in_the_model_is_still_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    layer, alone = torch.nn.Linear(2, 1), torch.nn.Parameter(torch.zeros(3))
    layer, optimizer = accelerator.prepare(layer, torch.optim.SGD([*layer.parameters(), alone], lr=0.1))
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match="does not belong to the model"):
        accelerator.save_state(tmp_path / "state")
