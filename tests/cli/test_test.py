"""`drivetrain test`: a sound setup passes, and what is wrong with another is reported in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import DDP, Accelerator, Single
from drivetrain.cli import trial
from tests.launch.launching import run
from tests.pool import run_in_processes


class Unsynchronised(DDP):
    """Leaves each process its own gradients, and does not compare them."""

    def __init__(self) -> None:
        super().__init__(check_copies_every=0)

    def setup(self, state: Any) -> None:
        super().setup(state)
        self.gradients.finish = lambda optimizers: None

    def prepare(self, model: Any, optimizers: Any, precision: Any, move: bool = True) -> Any:
        return Single.prepare(self, model, optimizers, precision, move)


def unsynchronised() -> Accelerator:
    return Accelerator(strategy=Unsynchronised())


def skewed() -> Accelerator:
    """Learns as it must, but one process ends with another model."""
    accelerator = Accelerator()
    prepare = accelerator.prepare

    def skew(*objects: Any, **options: Any) -> Any:
        prepared = prepare(*objects, **options)
        if accelerator.process_index == 1 and len(objects) == 3:
            scale = torch.nn.Parameter(torch.zeros(()))
            prepared[0].register_forward_hook(
                lambda module, inputs, output: output if module.training else output + 1 + scale
            )
        return prepared

    accelerator.prepare = skew  # type: ignore[method-assign]
    return accelerator


def repeating() -> Accelerator:
    """Each process sees all data."""
    accelerator = Accelerator()
    accelerator.prepare_data_loader = lambda loader: loader  # type: ignore[method-assign]
    prepare = accelerator.prepare
    accelerator.prepare = lambda *objects: objects[0] if len(objects) == 1 else prepare(*objects)  # type: ignore
    return accelerator


def sound() -> Accelerator:
    return Accelerator()


def examined(make: Callable[[], Accelerator], processes: int) -> dict[str, trial.Finding]:
    return {finding.name: finding for finding in trial.examine(processes, make)}


def test_a_sound_setup_passes_every_check() -> None:
    first, second = run_in_processes(examined, 2, args=(sound, 2))
    assert first == second
    assert list(first) == ["processes", "devices", "collectives", "data", "training", "weights", "checkpoint"]
    assert all(finding.ok for finding in first.values())


@pytest.mark.parametrize(
    ("make", "processes", "failing", "named"),
    [
        (sound, 3, "processes", "There are 2 processes, but 3 were requested"),
        (repeating, 2, "data", "occur more than once"),
        (unsynchronised, 2, "training", "in one process"),
        (skewed, 2, "weights", "rank(s) [1]"),
    ],
    ids=["processes", "data", "training", "weights"],
)
def test_what_is_wrong_is_named(make: Callable[[], Accelerator], processes: int, failing: str, named: str) -> None:
    first, second = run_in_processes(examined, 2, args=(make, processes))
    assert first == second
    assert [name for name, finding in first.items() if not finding.ok] == [failing]
    assert named in first[failing].text
    assert list(first)[-1] == failing  # what relies on it is not tried


@pytest.mark.sharded
def test_the_command_trains_in_the_processes_asked_for(tmp_path: Path) -> None:
    flags = ("--num_processes", "2", "--cpu", "--mixed-precision", "bf16", "--gradient_accumulation_steps", "2")
    ended = run("-m", "drivetrain", "test", *flags, cwd=tmp_path, timeout=120)
    assert ended.code == 0, ended.err
    assert ended.out.count("  ok  ") == 7
    assert "2, on cpu, strategy 'ddp'" in ended.out
    assert "4 steps in precision 'bf16'" in ended.out
    assert "trains correctly and agrees with a single process" in ended.out


@pytest.mark.sharded
def test_a_configuration_file_is_what_is_tested(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("num_processes: 2\nuse_cpu: true\ndistributed_type: FSDP\nfsdp_config: {}\n")
    ended = run("-m", "drivetrain", "test", "--config_file", "config.yaml", cwd=tmp_path, timeout=120)
    assert ended.code == 0, ended.err
    assert "2, on cpu, strategy 'fsdp'" in ended.out
    assert "trains correctly and agrees with a single process" in ended.out
    shown = run("-m", "drivetrain", "test", "--config_file", "config.yaml", "--dry_run", cwd=tmp_path)
    assert "config.yaml" in shown.out
    assert "trains" not in shown.out


@pytest.mark.crash
def test_processes_that_end_are_reported_with_the_check_they_were_in(tmp_path: Path) -> None:
    # The process fails as it starts: alone, it cannot split layers over two.
    flags = ("--cpu", "--use_parallelism_config", "--parallelism_config_tp_size", "2")
    ended = run("-m", "drivetrain", "test", *flags, cwd=tmp_path)
    assert ended.code != 0
    assert "tp=2" in ended.err
    assert "WRONG  start" in ended.out
    assert "does not train correctly" in ended.out


def test_a_script_is_refused(tmp_path: Path) -> None:
    ended = run("-m", "drivetrain", "test", "train.py", cwd=tmp_path)
    assert ended.code == 2
    assert "'train.py'" in ended.err
