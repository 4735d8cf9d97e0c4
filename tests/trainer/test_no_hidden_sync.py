"""A training step never waits for the device: nothing is read from it until something is shown or written."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain import Accelerator, Callback, CSVLogger, Task, TQDMProgressBar, Trainer
from tests.pool import run_in_processes
from tests.trainer.tasks import quiet, rows

READS = {
    Tensor.tolist: "tolist",
    Tensor.numpy: "numpy",
    Tensor.cpu: "cpu",
    Tensor.__array__: "__array__",
}


class HostReads:
    """Counts what would make the host wait for the device, were the tensors on one.

    Two modes, since on the CPU some of it (`tolist`, `numpy`) never reaches the dispatcher. `item()`, `float()`,
    `int()`, `bool()` and `is_nonzero()` all do, as `aten::_local_scalar_dense`.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        counts = self.counts

        class Dispatched(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                name = func.overloadpacket.__name__
                if name == "_local_scalar_dense" or is_copy_to_host(name, args, kwargs or {}):
                    counts[name] += 1
                return func(*args, **(kwargs or {}))

        class Called(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func in READS:
                    counts[READS[func]] += 1
                return func(*args, **(kwargs or {}))

        self._modes = (Called(), Dispatched())

    def __enter__(self) -> HostReads:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


def is_copy_to_host(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name == "_to_copy":
        wanted = kwargs.get("device")
        return wanted is not None and torch.device(wanted).type == "cpu" and args[0].device.type != "cpu"
    return name == "copy_" and args[0].device.type == "cpu" and args[1].device.type != "cpu"


class Watch(Callback):
    """Notes for which batches something was read, from each one's start to the next one's or to the last one's end."""

    def __init__(self, reads: HostReads) -> None:
        self.reads = reads
        self.begun = False
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        if self.reads.counts and self.begun:
            self.steps.append(batch_idx - 1)
        self.begun = True
        self.reads.counts.clear()

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == trainer.num_training_batches and self.reads.counts:
            self.steps.append(batch_idx)


class Busy(Task):
    """Logs in all ways that an ordinary training step does."""

    def __init__(self, read: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.read = read

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("largest", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("number", batch_idx, on_epoch=True)
        if self.read is not None:
            self.read(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"}]


def steps_with_reads(task: Task, root: Path, **options: Any) -> list[int]:
    """The batches in which something was read, of 150 with everything on that a user has by default."""
    with HostReads() as reads:
        watch = Watch(reads)
        trainer = quiet(
            [watch, TQDMProgressBar()],
            logger=CSVLogger(root),
            enable_progress_bar=True,
            enable_checkpointing=True,
            log_every_n_steps=1000,
            **options,
        )
        trainer.fit(task, rows([0.5] * 150))
    assert watch.begun
    return watch.steps


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 4},
        {"gradient_clip_val": 1.0},
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        {"max_steps": 150},
        {"precision": "bf16"},
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()) or "plain",
)
def test_steps_in_which_nothing_is_shown_or_written_read_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    assert steps_with_reads(Busy(), tmp_path, **options) == []


@pytest.mark.parametrize(
    "read",
    [
        Tensor.item,
        float,
        bool,
        torch.is_nonzero,
        lambda loss: loss.tolist(),
        lambda loss: loss.numpy(),
        lambda loss: loss.cpu(),
        lambda loss: loss > 0 or None,
    ],
    ids=["item", "float", "bool", "is_nonzero", "tolist", "numpy", "cpu", "comparison"],
)
def test_each_way_of_reading_would_be_found(read: Callable[[Tensor], Any], tmp_path: Path) -> None:
    assert steps_with_reads(Busy(read), tmp_path) == list(range(150))


class SeveralLayers(Task):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(8)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("norm", {"_foreach_norm": 3, "linalg_vector_norm": 3, "_foreach_mul_": 3}),
        ("value", {"_foreach_clamp_min_": 3, "_foreach_clamp_max_": 3}),
    ],
)
def test_clipping_takes_all_gradients_of_a_step_at_once(algorithm: str, expected: dict[str, int]) -> None:
    calls: Counter[str] = Counter()

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    with Recorded():
        quiet(gradient_clip_val=1e-3, gradient_clip_algorithm=algorithm).fit(SeveralLayers(), rows([0.5] * 3))
    clips = {name: count for name, count in calls.items() if any(each in name for each in ("foreach", "norm", "clamp"))}
    clips.pop("clamp", None)  # of the factor
    assert clips == expected


def test_a_value_that_is_written_is_read_in_that_step_alone(tmp_path: Path) -> None:
    with HostReads() as reads:
        watch = Watch(reads)
        quiet(watch, logger=CSVLogger(tmp_path), log_every_n_steps=50).fit(Busy(), rows([0.5] * 149))
    assert watch.steps == [49, 99]


def test_a_copy_to_the_host_would_be_found() -> None:
    meta = torch.empty(2, device="meta")
    assert is_copy_to_host("_to_copy", (meta,), {"device": "cpu"})
    assert is_copy_to_host("copy_", (torch.empty(2), meta), {})
    assert not is_copy_to_host("_to_copy", (torch.empty(2),), {"device": "cpu"})


def reads_in_processes(root: str, options: dict[str, Any]) -> tuple[list[int], float]:
    started = time.monotonic()
    return steps_with_reads(Busy(), Path(root), **options), time.monotonic() - started


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ddp"},
        {"strategy": "fsdp", "gradient_clip_val": 1.0},
        {"strategy": "fsdp", "gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_processes_exchange_nothing_in_a_step_but_gradients_and_once_a_second_whether_to_stop(
    options: dict[str, Any], tmp_path: Path
) -> None:
    for steps, seconds in run_in_processes(reads_in_processes, 2, args=(str(tmp_path), options)):
        assert len(steps) <= 2 + seconds, steps


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_clipping_in_a_raw_loop_reads_nothing_also_within_a_window(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    layer = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.01))
    norms = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            with HostReads() as reads:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e-3))
                if precision == "no":
                    accelerator.clip_grad_value_(model.parameters(), 1e-3)
            assert reads.counts == {}
            optimizer.step()
    assert [round(float(norm), 4) for norm in norms] == [0.7071, 1.4142]  # half of it, and all
