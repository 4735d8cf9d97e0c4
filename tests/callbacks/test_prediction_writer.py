from __future__ import annotations

import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drivetrain import ConfigurationError, DataError, Task, Trainer
from drivetrain.callbacks import BasePredictionWriter, PredictionWriter
from tests.callbacks.tasks import numbers
from tests.pool import run_in_processes

FORMATS = [
    "safetensors",
    pytest.param("parquet", marks=pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow")),
]


class Doubling(Task):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"double": 2 * batch[0][:, 0], "pair": torch.cat([batch[0], -batch[0]], dim=1)}


def predict(task: Task, callback: BasePredictionWriter, loaders: Any, **options: Any) -> None:
    trainer = Trainer(
        callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False, **options
    )
    trainer.predict(task, loaders, return_predictions=False)


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_predictions_are_read_in_the_order_of_the_data(interval: str, file_format: str, tmp_path: Path) -> None:
    predict(Doubling(), PredictionWriter(tmp_path, interval, file_format), numbers(10, 4))
    columns = PredictionWriter.read(tmp_path)
    assert columns["index"].tolist() == list(range(10))
    assert columns["double"].tolist() == [2.0 * row for row in range(10)]
    assert columns["pair"].tolist() == [[row, -row] for row in range(10)]
    names = {path.name for path in tmp_path.iterdir()}
    batches = {f"batch-{first:012d}.{file_format}" for first in (0, 4, 8)}
    whole = {f"predictions-00000-of-00001.{file_format}"}
    assert names == {"batch": batches, "epoch": whole, "batch_and_epoch": batches | whole}[interval]


def test_each_loader_has_a_directory_and_files_of_a_run_before_are_gone(tmp_path: Path) -> None:
    predict(Doubling(), PredictionWriter(tmp_path, "batch", "safetensors"), numbers(10, 2))
    predict(Doubling(), PredictionWriter(tmp_path, "epoch", "safetensors"), [numbers(3, 2), numbers(5, 2)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loader-0", "loader-1"]
    assert [len(PredictionWriter.read(tmp_path / f"loader-{n}")["index"]) for n in (0, 1)] == [3, 5]


def over_processes(folder: str, interval: str) -> list[Any]:
    seen: list[Any] = []

    class Watching(PredictionWriter):
        def write_on_batch_end(self, *given: Any) -> None:
            seen.append(given[3])
            super().write_on_batch_end(*given)

    predict(Doubling(), Watching(folder, interval, "safetensors"), numbers(11, 2))
    return seen


def test_processes_write_their_own_samples(tmp_path: Path) -> None:
    seen = run_in_processes(over_processes, 2, (str(tmp_path), "batch_and_epoch"))
    assert seen == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]
    columns = PredictionWriter.read(tmp_path)
    assert columns["double"].tolist() == [2.0 * row for row in range(11)]
    files = sorted(path.name for path in tmp_path.glob("predictions-*"))
    assert files == [f"predictions-0000{rank}-of-00002.safetensors" for rank in (0, 1)]


# Columns of every kind, with the values that are read for sample `row`.
KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[int], Any]]] = {
    "text": (lambda x: [f"id {int(row)}" for row in x], lambda row: f"id {row}"),
    "texts of numpy": (lambda x: np.array([f"ä{int(row)}" for row in x]), lambda row: f"ä{row}"),
    "tuple": (lambda x: [("patient", int(row)) for row in x], lambda row: ("patient", row)),
    "tuples of any length": (
        lambda x: [tuple("abc"[: int(row) % 3]) for row in x],
        lambda row: tuple("abc"[: row % 3]),
    ),
    "dict": (lambda x: tuple({"a": int(row)} for row in x), lambda row: {"a": row}),
    "none": (lambda x: [None for _ in x], lambda row: None),
    "uuid": (lambda x: [uuid.UUID(int=int(row)) for row in x], lambda row: str(uuid.UUID(int=row))),
    "boxes": (lambda x: [torch.full((int(row) % 3, 1), 7) for row in x], lambda row: ((7,),) * (row % 3)),
    "array": (lambda x: x.cpu().numpy() * 2, lambda row: 2.0 * row),
    "tensors of any shape": (lambda x: torch.zeros(len(x), int(x[0]) + 1, dtype=torch.int), None),  # type: ignore[dict-item]
    "index": (lambda x: [f"own {int(row)}" for row in x], lambda row: f"own {row}"),
}


class Kinds(Doubling):
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        columns = {name: make(batch[0][:, 0]) for name, (make, _) in KINDS.items()}
        return {**columns, "nested": {"deep": {"x": batch[0][:, 0]}}}


def write_kinds(folder: str, interval: str, file_format: str) -> None:
    predict(Kinds(), PredictionWriter(folder, interval, file_format), numbers(11, 2))


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize(("world_size", "interval"), [(1, "epoch"), (2, "batch"), (2, "epoch")])
def test_columns_may_hold_anything_with_one_item_per_sample(
    world_size: int, interval: str, file_format: str, tmp_path: Path
) -> None:
    run_in_processes(write_kinds, world_size, (str(tmp_path), interval, file_format))
    columns = PredictionWriter.read(tmp_path)
    assert columns["index"].tolist() == list(range(11))
    assert columns["nested.deep.x"].tolist() == list(range(11))
    for name, (_, expected) in KINDS.items():
        found = columns["output_index" if name == "index" else name]
        assert len(found) == 11
        if expected is not None:
            assert list(found) == [expected(row) for row in range(11)], name


def test_a_subclass_gets_what_it_writes() -> None:
    calls: list[Any] = []

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, task: Any, prediction: Any, *rest: Any) -> None:
            indices, _, batch_idx, dataloader_idx = rest
            calls.append((len(prediction["double"]), indices, batch_idx, dataloader_idx))

        def write_on_epoch_end(self, trainer: Any, task: Any, predictions: Any, batch_indices: Any) -> None:
            calls.append(([len(each["double"]) for each in predictions], batch_indices))

    predict(Doubling(), Writer("batch_and_epoch"), numbers(5, 3))
    expected = [(3, [0, 1, 2], 0, 0), (2, [3, 4], 1, 0), ([3, 2], [[[0, 1, 2], [3, 4]]])]
    assert calls == expected


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'epoch'"):
        BasePredictionWriter("epochs")
    with pytest.raises(ConfigurationError, match="'parquet' or 'safetensors'"):
        PredictionWriter(tmp_path, file_format="csv")
    with pytest.raises(DataError, match="There are no predictions"):
        PredictionWriter.read(tmp_path)

    class Mean(Doubling):
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return batch[0].mean()

    with pytest.raises(DataError, match="with a row, or a list with an item, for each sample"):
        predict(Mean(), PredictionWriter(tmp_path), numbers(4, 2))


@pytest.mark.skipif(find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_without_pyarrow_it_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r'pip install "drivetrain\[parquet\]"'):
        PredictionWriter(tmp_path, file_format="parquet")
