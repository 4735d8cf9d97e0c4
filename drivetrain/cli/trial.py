"""Checks that `drivetrain test` runs in each process."""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.accelerator import Accelerator
from drivetrain.runtime import collectives
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.seeds import set_seed
from drivetrain.runtime.state import PartialState

ROWS, WIDTH, CLASSES = 4, 16, 4
STEPS = 4
TOLERANCES = {"no": 5e-6, "32": 5e-6, "64": 5e-6, "fp8": 2e-2}
"""Allowed difference of losses from a float32 run on one process, by precision."""
LOW_PRECISION = 1e-2


@dataclass(frozen=True)
class Finding:
    """Outcome of one check that `drivetrain test` runs: whether the check passed, and a message.

    Attributes:
        name: Name of the check.
        ok: True if the check passed.
        text: Result in words.
    """

    name: str
    ok: bool
    text: str


class CheckFailed(Exception):
    """Raised if a check of `drivetrain test` fails."""


class Block(nn.Module):
    """Residual block of the network that `drivetrain test` trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return residual


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Trial:
    def __init__(self, accelerator: Accelerator, processes: int | None) -> None:
        self.accelerator, self.processes = accelerator, processes
        shard = accelerator.strategy.topology.data_shard
        self.shards = shard.count
        set_seed(0)
        self.network = Network()
        rows = ROWS * self.shards * STEPS * accelerator.gradient_accumulation_steps
        made = torch.Generator().manual_seed(1)
        inputs = torch.randn(rows, WIDTH, generator=made)
        labels = inputs[:, :CLASSES].argmax(1)
        self.data = TensorDataset(inputs, labels)
        self.model: nn.Module | None = None
        self.optimizer: Any = None

    def checks(self) -> dict[str, Callable[[], str]]:
        # Later checks rely on earlier ones.
        return {
            "processes": self.check_processes,
            "devices": self.check_devices,
            "collectives": self.check_collectives,
            "data": self.check_data,
            "training": self.check_training,
            "weights": self.check_weights,
            "checkpoint": self.check_checkpoint,
        }

    def check_processes(self) -> str:
        state = self.accelerator.state
        ranks = sorted(collectives.gather_object([state.process_index]))
        if ranks != list(range(state.num_processes)):
            raise CheckFailed(f"The ranks are {ranks}, but must be 0 to {state.num_processes - 1}, each exactly once.")
        if self.processes is not None and state.num_processes != self.processes:
            raise CheckFailed(f"There are {state.num_processes} processes, but {self.processes} were requested.")
        return f"{state.num_processes}, on {state.kind.name}, strategy {self.accelerator.strategy.name!r}"

    def check_devices(self) -> str:
        state = self.accelerator.state
        places = collectives.gather_object([(socket.gethostname(), str(state.device))])
        shared = sorted({place for place in places if places.count(place) > 1})
        if state.kind.name != "cpu" and shared:
            ranks = [rank for rank, place in enumerate(places) if place in shared]
            raise CheckFailed(f"Ranks {ranks} share {shared[0][1]}, but each rank needs a separate device.")
        # Fails at once if the device's driver or libraries do not work.
        torch.ones(8, 8, device=state.device).mm(torch.ones(8, 8, device=state.device)).sum().item()
        return ", ".join(sorted({device for _, device in places}))

    def check_collectives(self) -> str:
        state = self.accelerator.state
        rank, count = state.process_index, state.num_processes
        mine = torch.full((3,), float(rank + 1), device=state.device)
        expected = {
            "The sum over all ranks": (collectives.reduce(mine, "sum"), torch.full((3,), count * (count + 1) / 2)),
            "The gathered tensor": (
                collectives.gather(mine),
                torch.arange(1.0, count + 1).repeat_interleave(3),
            ),
            "The tensor of the last rank": (
                collectives.broadcast(mine.clone(), count - 1),
                torch.full((3,), float(count)),
            ),
        }
        for name, (found, wanted) in expected.items():
            if not torch.equal(found.cpu(), wanted):
                raise CheckFailed(f"{name} is {found.tolist()}, but must be {wanted.tolist()}.")
        return "sum, gather and broadcast are exact"

    def check_data(self) -> str:
        rows = 3 * ROWS * self.shards + 1  # makes the last batch shorter
        plain = DataLoader(TensorDataset(torch.arange(rows)), ROWS, shuffle=True, generator=_generator())
        expected = [int(value) for (batch,) in plain for value in batch]
        mine = DataLoader(TensorDataset(torch.arange(rows)), ROWS, shuffle=True, generator=_generator())
        found: list[int] = []
        for (batch,) in self.accelerator.prepare(mine):
            found += self.accelerator.gather_for_metrics(batch).tolist()
        if sorted(found) != sorted(expected):
            missing, twice = set(expected) - set(found), {one for one in found if found.count(one) > 1}
            raise CheckFailed(f"{len(missing)} of {rows} samples are missing, and {len(twice)} occur more than once.")
        if found != expected:
            raise CheckFailed("Each sample occurs once, but the order differs from the order of a run in one process.")
        return f"each of {rows} samples once, in the order of one process"

    def check_training(self) -> str:
        expected = list(self.plain_losses())
        found = list(self.losses())
        precision = str(self.accelerator.mixed_precision)
        tolerance = TOLERANCES.get(precision, LOW_PRECISION)
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            if not abs(one - other) <= tolerance:  # true for NaN, unlike `>`
                raise CheckFailed(
                    f"The loss of step {step} is {one:.6f}, but a run in one process has {other:.6f}. In precision "
                    f"{precision!r} they may differ by at most {tolerance:g}."
                )
        largest = max(abs(one - other) for one, other in zip(found, expected, strict=True))
        return f"{len(found)} steps in precision {precision!r}, losses within {largest:.1g} of one process"

    def check_weights(self) -> str:
        assert self.model is not None
        self.model.eval()
        probe = torch.linspace(-1, 1, WIDTH, device=self.accelerator.device).expand(ROWS, WIDTH)
        with torch.no_grad():
            output = self.model(probe).float().sum(0)
        everyone = collectives.gather_object([output.tolist()])
        different = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
        if different:
            raise CheckFailed(f"The model of rank(s) {different} has other outputs than the model of rank 0.")
        return "the same outputs on every process"

    def check_checkpoint(self) -> str:
        state = self.accelerator.state
        if state.num_processes != state.environment.local_world_size:
            return "skipped: needs a folder that all machines share"
        before = self._outputs()
        with _shared_folder(state) as folder:
            self.accelerator.save_state(folder)
            for _ in self.losses(steps=1):
                pass
            changed = self._outputs()
            self.accelerator.load_state(folder)
        if torch.equal(before, changed):
            raise CheckFailed("Another training step did not change the model.")
        if not torch.equal(before, self._outputs()):
            raise CheckFailed("The loaded model differs from the saved model.")
        return "saved and loaded"

    def _outputs(self) -> torch.Tensor:
        assert self.model is not None
        probe = self.data.tensors[0][:ROWS].to(self.accelerator.device)
        with torch.no_grad():
            outputs: torch.Tensor = self.model(probe)
        return outputs.float()

    def losses(self, steps: int = STEPS) -> Iterator[float]:
        accelerator = self.accelerator
        loader = DataLoader(self.data, ROWS)
        if self.model is None:
            network = copy.deepcopy(self.network)
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
            # A later call continues with this model, so it must be prepared only once.
            self.model, self.optimizer, loader = accelerator.prepare(network, optimizer, loader)
        else:
            loader = accelerator.prepare(loader)
        self.model.train()
        window: list[torch.Tensor] = []
        taken = 0
        for inputs, labels in loader:
            with accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(inputs).float(), labels)
                accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            window.append(collectives.reduce(loss.detach().float(), "mean"))
            if len(window) == accelerator.gradient_accumulation_steps:
                yield torch.stack(window).mean().item()
                window, taken = [], taken + 1
                if taken == steps:
                    return

    def plain_losses(self) -> Iterator[float]:
        # Training in plain PyTorch, as the reference for the losses that the accelerator gives.
        device = self.accelerator.device
        network = copy.deepcopy(self.network).to(device)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        count = self.accelerator.gradient_accumulation_steps
        window: list[torch.Tensor] = []
        for inputs, labels in DataLoader(self.data, ROWS * self.shards):
            loss = F.cross_entropy(network(inputs.to(device)), labels.to(device))
            torch.autograd.backward(loss / count)
            window.append(loss.detach())
            if len(window) == count:
                optimizer.step()
                optimizer.zero_grad()
                yield torch.stack(window).mean().item()
                window = []


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


@contextmanager
def _shared_folder(state: PartialState) -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="drivetrain_test_") if state.is_main_process else ""
    name: str = collectives.broadcast_object_list([made])[0]
    try:
        yield os.path.join(name, "checkpoint")
    finally:
        state.wait_for_everyone()
        if state.is_main_process:
            shutil.rmtree(name, ignore_errors=True)


def examine(
    processes: int | None = None,
    make: Callable[[], Accelerator] = Accelerator,
    begin: Callable[[str], None] = lambda name: None,
) -> list[Finding]:
    # `make` creates the Accelerator to check, and `begin` receives the name of each check before it runs.
    begin("start")
    trial = Trial(make(), processes)
    findings = []
    for name, check in trial.checks().items():
        begin(name)
        text, failure = "", ""
        try:
            text = check()
        except CheckFailed as wrong:
            failure = str(wrong)
        except Exception as error:  # any error of the setup is a finding
            failure = f"{type(error).__name__}: {error}"
        failures = collectives.gather_object([failure])
        failed = [f"rank {rank}: {each}" for rank, each in enumerate(failures) if each]
        if len(failed) == len(failures) and len(set(failures)) == 1:
            failed = [failures[0]]
        findings.append(Finding(name, not failed, "; ".join(failed) or text))
        if failed:
            break
    return findings


def main() -> None:
    """Run the checks of `drivetrain test`, and write their results to a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", required=True)
    parser.add_argument("--processes", type=int)
    given = parser.parse_args()
    is_writer = ProcessEnvironment.detect().local_rank == 0

    def write(**entry: object) -> None:
        if is_writer:
            with Path(given.results).open("a") as file:
                file.write(json.dumps(entry) + "\n")

    for finding in examine(given.processes, begin=lambda name: write(began=name)):
        write(finding=asdict(finding))


if __name__ == "__main__":
    main()
