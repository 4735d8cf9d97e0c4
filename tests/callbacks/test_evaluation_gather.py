from __future__ import annotations

import csv
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError, MetricCollection
from torchmetrics.classification import BinaryAUROC

from drivetrain import ConfigurationError, DataError, Trainer
from drivetrain.callbacks import Callback, EvaluationGather, ModelCheckpoint
from tests.callbacks.tasks import Scripted, fit, numbers
from tests.pool import ProcessesFailed, run_in_processes


class Doubling(Scripted):
    """Predicts twice what it gets; the target is what it gets."""

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        return {"predictions": 2 * batch[0][:, 0], "targets": batch[0][:, 0]}

    def test_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        return self.validation_step(batch, batch_idx)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return 2 * batch[0][:, 0]


def evaluator(root: Any, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        logger=False,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(root),
        **options,
    )


def read(path: Path) -> list[tuple[float, ...]]:
    with path.open(newline="") as file:
        return [tuple(map(float, row)) for row in list(csv.reader(file))[1:]]


def evaluate(root: str, sizes: list[int], batch_size: int) -> dict[str, float]:
    """Validate on one loader for each size; returns what was logged."""

    def rows(predictions: Tensor, targets: Tensor) -> int:
        return len(predictions)

    def digest(predictions: Tensor, targets: Tensor) -> float:
        assert torch.equal(predictions, 2 * targets)
        return float((targets * torch.arange(1, len(targets) + 1)).sum())  # depends on the order

    gather = EvaluationGather(metrics={"{stage}_rows": rows, "{stage}_digest": digest}, path="{stage}.csv")
    trainer = evaluator(root, gather)
    loaders: Any = [numbers(size, batch_size) for size in sizes]
    trainer.validate(Doubling(), loaders if len(loaders) > 1 else loaders[0], verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("size", "batch_size"), [(12, 2), (13, 2), (7, 3), (1, 4), (5, 1)])
def test_every_sample_comes_once_and_in_the_order_of_the_data(
    world_size: int, size: int, batch_size: int, tmp_path: Path
) -> None:
    results = run_in_processes(evaluate, world_size, args=(str(tmp_path), [size], batch_size))
    expected = {"val_rows": size, "val_digest": sum(n * (n + 1) for n in range(size))}
    for result in results:
        assert {name: result[name] for name in expected} == expected
    assert read(tmp_path / "val.csv") == [(n, 2 * n, n) for n in range(size)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_several_loaders_stay_apart(world_size: int, tmp_path: Path) -> None:
    for result in run_in_processes(evaluate, world_size, args=(str(tmp_path), [5, 3], 2)):
        assert result["val_rows/dataloader_idx_0"] == 5
        assert result["val_rows/dataloader_idx_1"] == 3
    assert len(read(tmp_path / "val-dataloader_idx_0.csv")) == 5
    assert len(read(tmp_path / "val-dataloader_idx_1.csv")) == 3


def auroc(root: str) -> tuple[float, float]:
    class Scores(Scripted):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
            x = batch[0][:, 0]
            return {"scores": torch.sin(x * 7), "labels": (x % 3 == 0).long()}

    metrics = MetricCollection({"val_auroc": BinaryAUROC(), "val_mae": MeanAbsoluteError()})
    gather = EvaluationGather("scores", "labels", metrics=metrics)
    trainer = evaluator(root, gather)
    trainer.validate(Scores(), numbers(23, 4), verbose=False)
    return float(trainer.callback_metrics["val_auroc"]), float(trainer.callback_metrics["val_mae"])


def test_torchmetrics_have_the_value_of_all_samples_together(tmp_path: Path) -> None:
    x = torch.arange(23, dtype=torch.float32)
    scores, labels = torch.sin(x * 7), (x % 3 == 0).long()
    expected = (float(BinaryAUROC()(scores, labels)), float(MeanAbsoluteError()(scores, labels)))
    for world_size in (1, 2):
        for result in run_in_processes(auroc, world_size, args=(str(tmp_path),)):
            assert result == pytest.approx(expected)


def test_a_gathered_metric_can_be_monitored_in_fit(tmp_path: Path) -> None:
    class Improving(Doubling):
        def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
            x = batch[0][:, 0]
            return {"predictions": x + [3, 1, 2][self.current_epoch], "targets": x}

    gather = EvaluationGather(metrics={"val_mae": MeanAbsoluteError()})
    best = ModelCheckpoint(tmp_path / "ckpt", "{epoch}-{val_mae}", monitor="val_mae")
    fit(Improving(), tmp_path, 3, [gather, best], num_sanity_val_steps=1)
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == ["epoch=1-val_mae=1.0.ckpt"]


def predict(root: str) -> None:
    gather = EvaluationGather(path="{stage}.pt")
    evaluator(root, gather).predict(Doubling(), numbers(11, 2))


@pytest.mark.parametrize("world_size", [1, 2])
def test_predictions_can_be_written_without_targets(world_size: int, tmp_path: Path) -> None:
    run_in_processes(predict, world_size, args=(str(tmp_path),))
    assert torch.load(tmp_path / "predict.pt", weights_only=True).keys() == {"predictions"}
    assert torch.load(tmp_path / "predict.pt", weights_only=True)["predictions"].tolist() == [2 * n for n in range(11)]


def predict_with_ids(root: str) -> None:
    class Named(Doubling):
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
            x = batch[0][:, 0]
            ids = [f"id {int(each)}" for each in x]
            pair = torch.stack([x, -x], dim=1)
            return {"predictions": 2 * x, "id": ids, "pair": pair, "index": x + 100, "loss": x.mean(), "note": "x"}

    for extension in ("csv", "jsonl", "npz", "pt"):
        gather = EvaluationGather(path=f"{{stage}}.{extension}")
        evaluator(root, gather).predict(Named(), numbers(11, 2))


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_else_a_step_returns_for_each_sample_is_in_the_file(
    world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in_processes(predict_with_ids, world_size, args=(str(tmp_path),))
    assert "omits 'note' from the file" in "".join(capsys.readouterr())
    with (tmp_path / "predict.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["index", "prediction", "id", "pair_0", "pair_1", "output_index"]
    assert [(row["id"], float(row["pair_1"]), float(row["output_index"])) for row in table] == [
        (f"id {n}", -n, n + 100) for n in range(11)
    ]
    lines = [json.loads(line) for line in (tmp_path / "predict.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["index"], line["prediction"], line["pair"]) for line in lines] == [
        (n, 2 * n, [n, -n]) for n in range(11)
    ]
    tensors = torch.load(tmp_path / "predict.pt", weights_only=True)
    assert tensors.keys() == {"predictions", "id", "pair", "output_index"}
    assert tensors["pair"].shape == (11, 2)
    with np.load(tmp_path / "predict.npz") as arrays:
        assert arrays["id"].tolist() == [f"id {n}" for n in range(11)]


def predict_with_ids_of_any_kind(root: str) -> None:
    class Named(Doubling):
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
            x = batch[0][:, 0]
            rows = [int(each) for each in x]
            return {
                "predictions": 2 * x,
                "id": np.array([f"id {row}" for row in rows]),
                "key": [("a", row) if row % 2 else ("b",) for row in rows],
                "boxes": [torch.full((row % 3,), row) for row in rows],
                "uuid": [uuid.UUID(int=row) for row in rows],
                "scores": {"top": x, "all": {"pair": torch.stack([x, -x], dim=1)}},
            }

    for extension in ("csv", "jsonl", "npz", "pt"):
        gather = EvaluationGather(path=f"{{stage}}.{extension}")
        evaluator(root, gather).predict(Named(), numbers(11, 2))


@pytest.mark.parametrize("world_size", [1, 2])
def test_ids_may_be_anything_and_a_dict_in_the_dict_has_columns_too(world_size: int, tmp_path: Path) -> None:
    run_in_processes(predict_with_ids_of_any_kind, world_size, args=(str(tmp_path),))
    keys = [("a", row) if row % 2 else ("b",) for row in range(11)]
    lines = [json.loads(line) for line in (tmp_path / "predict.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["id"] for line in lines] == [f"id {row}" for row in range(11)]
    assert [tuple(line["key"]) for line in lines] == keys
    assert [line["boxes"] for line in lines] == [[row] * (row % 3) for row in range(11)]
    assert [line["uuid"] for line in lines] == [str(uuid.UUID(int=row)) for row in range(11)]
    assert [line["scores.all.pair"] for line in lines] == [[row, -row] for row in range(11)]
    with (tmp_path / "predict.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["key_0"], row["key_1"]) for row in table] == [
        ("a", str(row)) if row % 2 else ("b", "") for row in range(11)
    ]
    assert [float(row["scores.top"]) for row in table] == list(range(11))
    assert [row["boxes_1"] for row in table] == [str(row) if row % 3 == 2 else "" for row in range(11)]
    with np.load(tmp_path / "predict.npz", allow_pickle=True) as arrays:
        assert list(map(tuple, arrays["key"])) == keys
    tensors = torch.load(tmp_path / "predict.pt", weights_only=False)
    assert tensors["key"] == keys


def test_test_results_are_named_after_the_stage_and_other_stages_can_be_left_out(tmp_path: Path) -> None:
    both = EvaluationGather(metrics={"{stage}_mae": MeanAbsoluteError()})
    only = EvaluationGather(path="only-{stage}.npz", stages=["test"])
    trainer = evaluator(tmp_path, both, only)
    trainer.validate(Doubling(), numbers(4, 2), verbose=False)
    assert "val_mae" in trainer.callback_metrics
    trainer.test(Doubling(), numbers(4, 2), verbose=False)
    assert float(trainer.callback_metrics["test_mae"]) == 1.5
    assert [path.name for path in tmp_path.glob("*.npz")] == ["only-test.npz"]


def test_select_takes_what_the_steps_do_not_return_as_a_dict(tmp_path: Path) -> None:
    class Bare(Scripted):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return batch[0][:, 0] + 1

    gather = EvaluationGather(
        metrics={"val_mae": MeanAbsoluteError()}, select=lambda outputs, batch: (outputs, batch[0][:, 0])
    )
    trainer = evaluator(tmp_path, gather)
    trainer.validate(Bare(), numbers(5, 2), verbose=False)
    assert float(trainer.callback_metrics["val_mae"]) == 1.0


class Returning(Scripted):
    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.outputs


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (None, "predictions, but validation_step returned None. Return a dict such as"),
        ({"prediction": torch.ones(2)}, "did not return this key, but only: 'prediction'. Did you mean 'prediction'"),
        ({"predictions": torch.ones(2)}, "the outputs contain no targets"),
        ({"predictions": torch.ones(3), "targets": torch.ones(3)}, "3 rows for a batch of 2"),
        ({"predictions": torch.tensor(0.5), "targets": torch.ones(2)}, "without a dimension for the samples"),
    ],
)
def test_outputs_that_cannot_be_gathered_are_refused(outputs: Any, message: str, tmp_path: Path) -> None:
    gather = EvaluationGather(metrics={"mae": MeanAbsoluteError()})
    with pytest.raises(DataError, match=message):
        evaluator(tmp_path, gather).validate(Returning(outputs), numbers(2, 2), verbose=False)


def test_a_metric_that_is_no_single_number_is_refused(tmp_path: Path) -> None:
    gather = EvaluationGather(metrics={"errors": lambda predictions, targets: predictions - targets})
    with pytest.raises(DataError, match=r"'errors' is a tensor of shape \(4,\)"):
        evaluator(tmp_path, gather).validate(Doubling(), numbers(4, 2), verbose=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has nothing to do"),
        ({"path": "out.xlsx"}, "the file extension '.xlsx' is not supported"),
        ({"path": "out.pt", "stages": ["val"]}, "there is no stage 'val'"),
        ({"metrics": lambda a, b: 0}, "must be a dict of names and metrics"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EvaluationGather(**options)


def broken_metric(root: str) -> None:
    def broken(predictions: Tensor, targets: Tensor) -> float:
        raise ValueError("cannot be computed")

    trainer = evaluator(root, EvaluationGather(metrics={"broken": broken}))
    with pytest.raises(Exception, match="cannot be computed"):
        trainer.validate(Doubling(), numbers(4, 2), verbose=False)


def test_a_metric_that_fails_fails_on_all_processes(tmp_path: Path) -> None:
    run_in_processes(broken_metric, args=(str(tmp_path),))


class FailingOnce(Doubling):
    """Fails on one rank, in the third batch of the first pass."""

    passes = 0

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self.rank = rank

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        if batch_idx == 2 and self.passes == 0 and self.trainer.global_rank == self.rank:
            raise ValueError("this batch is broken")
        return super().validation_step(batch, batch_idx)


def validate_broken(root: str) -> None:
    gather = EvaluationGather(path="{stage}.csv")
    evaluator(root, gather).validate(FailingOnce(1), numbers(12, 2), verbose=False)


def test_a_step_that_fails_on_one_process_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    with pytest.raises(ProcessesFailed) as failed:
        run_in_processes(validate_broken, args=(str(tmp_path),), timeout=60)
    assert not failed.value.hung
    assert "this batch is broken" in failed.value.tracebacks[1]
    assert "CollectiveError" in failed.value.tracebacks[0]


def validate_again(root: str) -> None:
    """A pass that all processes leave, and one that they finish."""
    gather = EvaluationGather(path="{stage}.csv")
    trainer = evaluator(root, gather)

    class Failing(FailingOnce):
        def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
            self.rank = self.trainer.global_rank
            return super().validation_step(batch, batch_idx)

    task = Failing(None)
    with pytest.raises(ValueError, match="this batch is broken"):
        trainer.validate(task, numbers(12, 2), verbose=False)
    task.passes += 1
    trainer.validate(task, numbers(13, 2), verbose=False)


def test_a_pass_after_one_that_failed_has_its_own_samples(tmp_path: Path) -> None:
    run_in_processes(validate_again, args=(str(tmp_path),))
    assert read(tmp_path / "val.csv") == [(n, 2 * n, n) for n in range(13)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_more_batches_than_a_block_holds_come_complete(world_size: int, tmp_path: Path) -> None:
    results = run_in_processes(evaluate, world_size, args=(str(tmp_path), [135], 1))
    for result in results:
        assert result["val_rows"] == 135
    assert read(tmp_path / "val.csv") == [(n, 2 * n, n) for n in range(135)]


def test_loaders_without_a_length_are_gathered_as_well(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return ([torch.tensor([float(n)])] for n in range(7))

    gather = EvaluationGather(path="{stage}.csv")
    evaluator(tmp_path, gather).validate(Doubling(), DataLoader(Stream(), batch_size=3), verbose=False)
    assert read(tmp_path / "val.csv") == [(n, 2 * n, n) for n in range(7)]
