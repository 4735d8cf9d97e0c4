"""Prediction gives every sample's result once, in the order of the data, on any number of processes."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain import Callback, DataError, Task, Trainer
from drivetrain.runtime.memory import HostBlocks
from drivetrain.trainer.loops import evaluation_loop
from tests.pool import run_in_processes
from tests.trainer.tasks import quiet, rows, stream


class Doubling(Task):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(2.0))
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, batch: list[Tensor]) -> Tensor:
        self.modes.append((self.training, torch.is_inference_mode_enabled()))
        return self.w * (batch[0] if isinstance(batch, list) else batch)


class Structured(Doubling):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"double": self(batch).flatten(), "where": (batch_idx, dataloader_idx)}


def flat(batches: list[Tensor]) -> list[float]:
    return [float(value) for batch in batches for value in batch.flatten()]


def predictions() -> dict[str, Any]:
    trainer = quiet()
    return {
        "seven": flat(trainer.predict(Doubling(), rows(range(7), 2))),
        "one": flat(trainer.predict(Doubling(), rows([5.0], 2))),
        "stream": flat(trainer.predict(Doubling(), stream(range(5), 2))),
        "limited": flat(quiet(limit_predict_batches=1).predict(Doubling(), rows(range(8), 2))),
        "several": [flat(each) for each in trainer.predict(Doubling(), [rows(range(3)), rows(range(2))])],
        "nothing kept": trainer.predict(Doubling(), rows(range(3)), return_predictions=False),
        "structured": [
            (each["double"].tolist(), each["where"]) for each in trainer.predict(Structured(), rows(range(3), 2))
        ],
    }


@pytest.fixture(scope="module", params=[1, 2, 3])
def predicted(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    return request.param, run_in_processes(predictions, request.param)


def test_every_process_gets_all_predictions_in_the_order_of_the_data(predicted: tuple[int, list[Any]]) -> None:
    for found in predicted[1]:
        assert found["seven"] == [0, 2, 4, 6, 8, 10, 12]
        assert found["one"] == [10]
        assert found["stream"] == [0, 2, 4, 6, 8]
        assert found["several"] == [[0, 2, 4], [0, 2]]
        assert found["nothing kept"] == []
        assert [double for double, _ in found["structured"]] == [[0, 2], [4]]


def test_a_limit_counts_each_processes_batches(predicted: tuple[int, list[Any]]) -> None:
    processes, everyone = predicted
    for found in everyone:
        assert found["limited"] == [2.0 * value for value in range(2 * processes)]


class OwnClass(Doubling):
    """Its predictions are of a class that no other process has."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return namedtuple("Prediction", "double")(self(batch))


def predicts_an_own_class() -> tuple[int, int, str]:
    nothing = quiet().predict(OwnClass(), rows(range(3)), return_predictions=False)
    own = quiet().predict(OwnClass(), rows(range(3)), gather=False)
    with pytest.raises(DataError) as refused:
        quiet().predict(OwnClass(), rows(range(3)))
    return len(nothing), len(own), str(refused.value)


def test_predictions_that_cannot_be_sent_to_other_processes_are_refused_with_what_to_do() -> None:
    found = run_in_processes(predicts_an_own_class, 2)
    assert sum(own for _, own, _ in found) == 3  # those of its own batches, where they are not gathered
    for kept, _, said in found:
        assert kept == 0
        assert "those of OwnClass cannot be sent" in said
        assert "predict(return_predictions=False)" in said


@pytest.mark.parametrize("inference_mode", [True, False])
def test_predicting_evaluates_and_leaves_no_trace(inference_mode: bool) -> None:
    task = Doubling()
    quiet(inference_mode=inference_mode).predict(task, rows([1.0]))
    assert task.modes == [(False, inference_mode)]
    assert task.training


def test_predictions_leave_the_device_several_batches_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []

    class Counted(HostBlocks):
        def take(self) -> list[Any]:
            left.append(len(taken := super().take()))
            return taken

    monkeypatch.setattr(evaluation_loop, "HostBlocks", Counted)
    assert flat(quiet().predict(Doubling(), rows(range(70), 1))) == [2.0 * each for each in range(70)]
    assert left == [32, 32, 6]


def test_callbacks_see_each_batch_and_its_prediction() -> None:
    class Writer(Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_predict_batch_end(
            self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            self.seen.append((flat([outputs]), flat(batch), batch_idx, dataloader_idx, trainer.predicting))

    writer = Writer()
    quiet(writer).predict(Doubling(), rows([1.0, 2.0, 3.0], 2), return_predictions=False)
    assert writer.seen == [([2, 4], [1, 2], 0, 0, True), ([6], [3], 1, 0, True)]


def test_logging_makes_no_sense_where_nothing_is_measured() -> None:
    class Logging(Doubling):
        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self.log("value", 1.0)

    with pytest.raises(ValueError, match="in predict"):
        quiet().predict(Logging(), rows([1.0]))
