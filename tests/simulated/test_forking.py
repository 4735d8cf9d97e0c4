"""Processes that are forked from one that uses a device, or from one that does not use it yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.launch.launching import Ended, run, write_script
from tests.pool import DEVICE, run_in_processes
from tests.simulated.devices import simulated as simulated
from tests.simulated.devices import start

pytestmark = pytest.mark.usefixtures("simulated")

SCRIPT = """
import os, sys
sys.path.insert(0, {root!r})
import torch
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import LaunchError, Task, Trainer
from drivetrain.launch import notebook_launcher
from tests.simulated.devices import start

start(2)

class Learns(Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def loader():
    return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)

def trained(**options):
    trainer = Trainer(max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
                      default_root_dir={folder!r}, **options)
    task = Learns()
    trainer.fit(task, loader())
    return trainer, task

def train():
    trainer, task = trained()
    device, ranks = str(task.layer.weight.device), trainer.world_size
    return device, ranks, os.path.exists(trainer.checkpoint_callback.newest_model_path)

if __name__ == "__main__":
    {body}
"""


def ran(folder: Path, body: str, **variables: str) -> Ended:
    root = str(Path(__file__).parents[2])
    body = "\n    ".join(body.strip().splitlines())
    write_script(folder, SCRIPT.format(root=root, folder=str(folder), body=body))
    return run("script.py", cwd=folder, timeout=150, **variables)


USED = "torch.ones(1, device='sim:0')\n"
LAUNCHES = {
    "notebook_launcher": "notebook_launcher(train, num_processes=2, start_method='fork')",
    "notebook_launcher, by default": "notebook_launcher(train, num_processes=2)",
    "ddp_fork": "trained(strategy='ddp_fork', devices=2, accelerator='sim')",
    "ddp_notebook": "trained(strategy='ddp_notebook', devices=2, accelerator='sim')",
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_launcher_does_not_fork_after_a_device_was_started(launch: str, tmp_path: Path) -> None:
    ended = ran(tmp_path, USED + LAUNCHES[launch])
    assert ended.code == 1
    assert "LaunchError: sim is already in use in this process, and its state does not survive a fork" in ended.err
    assert "ddp_spawn" in ended.err


@pytest.mark.parametrize("launch", ["notebook_launcher", "ddp_fork"])
def test_a_kind_may_forbid_to_fork(launch: str, tmp_path: Path) -> None:
    forbids = "from drivetrain.runtime.devices import get_device_kind\nget_device_kind('sim').forks = False\n"
    ended = ran(tmp_path, forbids + LAUNCHES[launch])
    assert ended.code == 1
    assert "LaunchError: sim devices cannot be used in forked processes: start new interpreters" in ended.err


def test_new_interpreters_use_a_device_that_was_started_here(tmp_path: Path) -> None:
    spawns = "print(notebook_launcher(train, num_processes=2, start_method='spawn'))"
    ended = ran(tmp_path, USED + spawns)
    assert ended.out.splitlines()[-1:] == ["('sim:0', 2, True)"], ended.err


def test_without_a_start_method_new_interpreters_are_used_where_forking_is_forbidden(tmp_path: Path) -> None:
    body = "get_device_kind('sim').forks = False\nprint(notebook_launcher(train, num_processes=2))"
    ended = ran(tmp_path, f"from drivetrain.runtime.devices import get_device_kind\n{USED}{body}")
    assert ended.out.splitlines()[-1:] == ["('sim:0', 2, True)"], ended.err


def test_forked_processes_start_the_devices_themselves(tmp_path: Path) -> None:
    ended = ran(tmp_path, "print(notebook_launcher(train))\nprint(torch.sim.is_initialized())")
    assert ended.out.splitlines()[-2:] == ["('sim:0', 2, True)", "False"], ended.err


def test_a_run_on_the_cpu_forks_although_a_device_was_started(tmp_path: Path) -> None:
    ended = ran(tmp_path, USED + "print(notebook_launcher(train, num_processes=2, cpu=True))")
    assert ended.out.splitlines()[-1:] == ["('cpu', 2, True)"], ended.err


@pytest.mark.parametrize("variable", ["DRIVETRAIN_USE_CPU", "ACCELERATE_USE_CPU"])
def test_processes_are_counted_for_the_cpu_where_the_environment_asks_for_it(variable: str, tmp_path: Path) -> None:
    body = "print(notebook_launcher(train))\nprint(trained(devices='auto')[0].world_size)"
    ended = ran(tmp_path, body, **{variable: "1"})
    lines = ended.out.splitlines()
    assert "('cpu', 1, True)" in lines, ended.err
    assert lines[-1] == "1", ended.err


class Devices(torch.utils.data.Dataset[torch.Tensor]):
    """Dataset whose samples are on the CPU, or on a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index), device=self.device)


def read_by_workers() -> tuple[list[float], str]:
    start(1)
    torch.ones(1, device="sim:0")

    def read(device: str) -> list[float]:
        workers = {"num_workers": 1, "multiprocessing_context": "fork"}
        return [float(batch.sum()) for batch in torch.utils.data.DataLoader(Devices(device), batch_size=2, **workers)]

    with pytest.raises(RuntimeError) as raised:
        read("sim:0")
    return read("cpu"), str(raised.value)


def test_workers_of_a_loader_are_forked_and_may_not_use_the_device() -> None:
    [(found, said)] = run_in_processes(read_by_workers, 1, env={DEVICE: "sim"}, timeout=120)
    assert found == [2.0, 10.0]
    assert "sim:0 out of memory: tried to allocate 8 bytes" in said
