"""Processes that step together and whose loaders end at different points: an error on all, not a hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain import Accelerator, DataLoaderConfiguration, PartialState
from drivetrain.runtime.errors import DataError
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
