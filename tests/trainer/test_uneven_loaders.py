"""Processes whose loaders end at different points: an error on all, or what one process trains on, and no hang."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator, CombinedLoader, DataError, DataLoaderConfiguration, PartialState, Task
from tests.pool import run_in_processes
from tests.trainer.tasks import Weight, fitted, ones, quiet, stream

TRAINED = "The processes have different numbers of training batches: rank 0 has 3, rank 1 has 5."
ENDED = "The processes have different numbers of batches in this epoch: rank 0 has 3, rank 1 has more than 3."


def own_count() -> int:
    return (3, 5)[PartialState().process_index]


def trained(kind: str, options: dict[str, Any]) -> tuple[str, int]:
    """The error, and the steps taken."""
    count = own_count()
    loader: Any = ones(count) if kind == "map" else stream([1.0] * count)
    if kind == "list":
        loader = [loader, stream([1.0] * count)]
    trainer = quiet(max_epochs=2, **options)
    try:
        trainer.fit(Weight(), loader)
    except DataError as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


UNSHARDED = {"use_distributed_sampler": False}


@pytest.mark.parametrize("options", [UNSHARDED, {**UNSHARDED, "limit_train_batches": 4}], ids=["all", "limited"])
def test_lengths_are_compared_before_training(options: dict[str, Any]) -> None:
    for message, steps in run_in_processes(trained, 2, args=("map", options), timeout=30):
        assert message.startswith(TRAINED.replace("5", "4") if "limit_train_batches" in options else TRAINED)
        assert steps == 0


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["stream", "list"])
def test_a_stream_that_ends_before_others_ends_the_run_on_all(kind: str, accumulate: int) -> None:
    options = {**UNSHARDED, "accumulate_grad_batches": accumulate}
    for message, steps in run_in_processes(trained, 2, args=(kind, options), timeout=30):
        assert message.startswith(ENDED)
        assert steps == 2 // accumulate - (kind == "list")  # the combination reads one batch ahead


@pytest.mark.parametrize("kind", ["map", "stream", "list"])
def test_a_limit_that_all_reach_makes_lengths_equal(kind: str) -> None:
    options = {**UNSHARDED, "limit_train_batches": 3}
    assert run_in_processes(trained, 2, args=(kind, options), timeout=30) == [("", 6)] * 2


def one_or_none(rank_with_one: int) -> str:
    loader = stream([1.0] * (PartialState().process_index == rank_with_one))
    try:
        fitted(Weight(), loader, **UNSHARDED)
    except DataError as error:
        return str(error)
    return ""


def test_a_process_without_any_batch_is_found_too() -> None:
    for message in run_in_processes(one_or_none, 2, args=(0,), timeout=30):
        assert "rank 0 has 1, rank 1 has 0." in message


def read_by_all(rows: tuple[int, int]) -> str:
    config = DataLoaderConfiguration(dispatch_batches=False)
    loader = stream([1.0] * rows[PartialState().process_index], batch_size=2)
    try:
        fitted(Weight(), loader, accelerator=Accelerator(cpu=True, dataloader_config=config))
    except DataError as error:
        return str(error)
    return ""


def test_a_stream_that_all_read_must_be_the_same_on_all() -> None:
    for message in run_in_processes(read_by_all, 2, args=((4, 8),), timeout=30):
        assert message.startswith(
            "The processes have different numbers of batches in this epoch: rank 0 has 1, rank 1 has more than 1."
        )
    assert run_in_processes(read_by_all, 2, args=((8, 8),), timeout=30) == ["", ""]


class Layer(Weight):
    """A model that every evaluation step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.layer(batch[0].reshape(-1, 1)).mean() * 0.0 + 1.0)


def evaluated(strategy: str) -> Any:
    trainer = quiet(strategy=strategy, use_distributed_sampler=False)
    try:
        return trainer.validate(Layer(), ones(own_count()), verbose=False)
    except DataError as error:
        return str(error)


def test_an_evaluation_in_which_processes_do_not_need_each_other_may_differ() -> None:
    assert run_in_processes(evaluated, 2, args=("ddp",), timeout=30) == [[{"val_loss": 1.0}]] * 2


def test_lengths_are_compared_before_an_evaluation_in_which_processes_need_each_other() -> None:
    for message in run_in_processes(evaluated, 2, args=("fsdp",), timeout=30):
        assert message.startswith("The processes have different numbers of val batches: rank 0 has 3, rank 1 has 5.")


class Parts(Task):
    """Notes the parts of each batch that counts, and trains on their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[Any]] = [[], []]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [part for part in batch if part is not None]
        if not self.trainer.batch_info.is_padding:
            self.seen[self.trainer.current_epoch].append(plain(batch))
        total = sum(((self.weight - part) ** 2).sum() for part in parts)
        return {"loss": total, "weight": sum(len(part) for part in parts)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plain(batch: Any) -> list[Any]:
    return [None if part is None else part.tolist() for part in batch]


LENGTHS = [(4, 3), (3, 5), (6, 4), (5, 5), (1, 4), (7, 2)]
MODES = ["max_size", "max_size_cycle", "min_size"]


def side_by_side(mode: str, lengths: tuple[int, int], shuffle: bool) -> CombinedLoader:
    sets = [torch.arange(100.0 * n, 100.0 * n + 2 * length) / 100 for n, length in enumerate(lengths)]
    generators = [torch.Generator().manual_seed(n) for n in range(2)]
    loaders = [DataLoader(data, 2, shuffle, generator=g) for data, g in zip(sets, generators, strict=True)]
    return CombinedLoader(loaders, mode)


def epochs_of(mode: str, shuffle: bool) -> int:
    """One where the second one's order depends on whether a loader that was left before its end draws once more."""
    return 1 if mode == "min_size" and shuffle else 2


def trained_side_by_side() -> dict[Any, Any]:
    found = {}
    for mode, lengths, shuffle in itertools.product(MODES, LENGTHS, (False, True)):
        task = Parts()
        quiet(max_epochs=epochs_of(mode, shuffle)).fit(task, side_by_side(mode, lengths, shuffle))
        found[mode, lengths, shuffle] = task.seen, float(task.weight.detach())
    return found


@pytest.mark.parametrize("processes", [2, 3])
def test_parts_of_combined_loaders_come_together_as_in_one_process(processes: int) -> None:
    everyone = run_in_processes(trained_side_by_side, processes, timeout=120)
    for case in everyone[0]:
        loader, weight = side_by_side(*case), 0.0
        rows = [[plain(batch) for batch in loader] for _ in range(epochs_of(case[0], case[2]))]
        for epoch in rows:
            for start in range(0, len(epoch), processes):
                together = [part for row in epoch[start : start + processes] for part in row if part is not None]
                values = [value for part in together for value in part]
                weight -= 0.1 * sum(2 * (weight - value) for value in values) / len(values)
        for epoch, expected in enumerate(rows):
            steps = itertools.zip_longest(*(each[case][0][epoch] for each in everyone))
            assert [row for step in steps for row in step if row is not None] == expected, case
        for each in everyone:
            assert each[case][1] == pytest.approx(weight, abs=5e-6), case
