"""Numbers that must not depend on how batches, windows and processes happen to divide."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset
from torchmetrics.classification import BinaryAUROC

from drivetrain import ConfigurationError, DrivetrainDeprecationWarning, PartialState, Task
from tests.pool import run_in_processes
from tests.trainer.tasks import Kept, Shuffled, Weight, fitted, ones, quiet, rows, stream

# gradients


@pytest.mark.parametrize("loader", [ones, lambda count: stream([1.0] * count)], ids=["map", "iterable"])
def test_a_short_accumulation_window_is_normalised_by_what_it_holds(loader: Any) -> None:
    task = Weight()
    fitted(task, loader(5), accumulate_grad_batches=4)
    assert task.gradients == [1.0, 1.0]


def test_a_window_that_a_limit_cuts_short_is_too() -> None:
    task = Weight()
    fitted(task, ones(8), accumulate_grad_batches=4, limit_train_batches=5)
    assert task.gradients == [1.0, 1.0]


def gradients_of(values: list[float], batch_size: int, accumulate: int) -> list[float]:
    task = Weight()
    fitted(task, rows(values, batch_size), accumulate_grad_batches=accumulate)
    return task.gradients


@pytest.fixture(scope="module")
def gradients_on_two_processes() -> list[list[list[float]]]:
    return run_in_processes(several_gradients, 2)


CASES = [([1.0] * 9, 1, 4), ([1.0] * 7, 4, 1), ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 2, 1), ([3.0], 4, 1)]


def several_gradients() -> list[list[float]]:
    return [gradients_of(*case) for case in CASES]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (0, [1.0, 1.0]),  # windows of 4 + 4 and 1 + 0 micro-batches
        (1, [1.0]),  # 4 + 3 rows
        (2, [2.5, 6.0]),  # the means of the global batches 1 2 3 4 and 5 6 7
        (3, [3.0]),  # one process has no row at all
    ],
)
def test_two_processes_have_the_gradient_of_the_global_batch(
    gradients_on_two_processes: list[list[list[float]]], case: int, expected: list[float]
) -> None:
    for of_rank in gradients_on_two_processes:
        assert of_rank[case] == pytest.approx(expected, abs=1e-6)


# means of logged values


class Logging(Weight):
    """Logs the mean of each batch, in all the ways that a mean can be asked for."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        self.log("mean", x.mean(), on_step=True, on_epoch=True)
        self.log("number", float(x.mean()), on_step=False, on_epoch=True)
        self.log("unweighted", x.mean(), on_step=False, on_epoch=True, batch_size=1)
        for name in ("sum", "max", "min"):
            self.log(name, getattr(x, name)(), on_step=False, on_epoch=True, reduce_fx=name)
        self.log("count", x.sum(), on_step=False, on_epoch=True, reduce_fx=torch.numel)
        self.log("last", x[-1, 0], on_step=False, on_epoch=True, reduce_fx=lambda values: values[-1])
        quantile = partial(torch.quantile, q=torch.tensor(0.5, dtype=torch.float64))
        self.log("median", x[0, 0], on_step=False, on_epoch=True, reduce_fx=quantile)
        self.log("largest", x.max(), on_step=True, on_epoch=True, reduce_fx=max)
        return self.w * x.mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_mean", batch[0].mean())


def logged_epoch(train: list[float], batch_size: int, val: list[float]) -> dict[str, float]:
    trainer = fitted(Logging(), rows(train, batch_size), rows(val, batch_size))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def several_logged_epochs() -> list[dict[str, float]]:
    return [logged_epoch([1.0] * 7, 4, [1.0] * 7), logged_epoch(EIGHT_AND_ONE, 2, [1.0, 2.0, 6.0])]


EIGHT_AND_ONE = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 18.0]


@pytest.fixture(scope="module", params=[1, 2, 3])
def logged_epochs(request: pytest.FixtureRequest) -> list[list[dict[str, float]]]:
    return run_in_processes(several_logged_epochs, request.param, timeout=15)


def test_seven_ones_have_the_mean_one_whoever_holds_four_of_them(logged_epochs: list[list[dict[str, float]]]) -> None:
    for ones_logged, _ in logged_epochs:
        assert ones_logged["mean_epoch"] == ones_logged["number"] == ones_logged["val_mean"] == 1.0


def test_epoch_means_weigh_each_batch_by_its_real_rows(logged_epochs: list[list[dict[str, float]]]) -> None:
    for _, values in logged_epochs:
        assert values["mean_epoch"] == values["number"] == pytest.approx(sum(EIGHT_AND_ONE) / 9, rel=1e-12)
        assert values["val_mean"] == 3.0


def test_a_batch_size_of_ones_own_weighs_instead(logged_epochs: list[list[dict[str, float]]]) -> None:
    for _, values in logged_epochs:
        assert values["unweighted"] == pytest.approx((1.5 + 3.5 + 5.5 + 7.5 + 18) / 5)


def test_sums_and_extremes_cover_all_processes_once(logged_epochs: list[list[dict[str, float]]]) -> None:
    for _, values in logged_epochs:
        assert (values["sum"], values["max"], values["min"]) == (54.0, 18.0, 1.0)


def test_a_reduction_of_ones_own_sees_each_real_batch_once(logged_epochs: list[list[dict[str, float]]]) -> None:
    for _, values in logged_epochs:
        assert values["count"] == 5
        assert (values["last"], values["median"], values["largest_epoch"]) == (18.0, 5.0, 18.0)


def test_two_functions_under_one_name_are_refused() -> None:
    class Two(Weight):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.log("value", 1.0, on_epoch=True, reduce_fx=torch.amax if batch_idx else torch.amin)
            return self.w * 1.0

    with pytest.raises(ConfigurationError, match="'value' is logged with two meanings"):
        fitted(Two(), ones(2))


class LoggingAtTheEnd(Weight):
    """Logs the number of batches in hooks around the step, where a stand-in must not count either."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("started", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("ended", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")


def validated_after_a_stand_in(accumulate: int) -> dict[str, float]:
    task = LoggingAtTheEnd()
    every: dict[str, Any] = {"val_check_interval": 2, "max_epochs": 2, "accumulate_grad_batches": accumulate}
    trainer = fitted(task, rows([1.0, 2.0, 3.0]), rows([1.0, 2.0]), **every)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stand_in_mutes_its_own_batch_only(accumulate: int) -> None:
    for values in run_in_processes(validated_after_a_stand_in, 2, args=(accumulate,)):
        assert values == {"val_loss": 1.5, "started": 3.0, "ended": 3.0}


def test_a_mean_of_many_steps_keeps_its_digits() -> None:
    class Tiny(Weight):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.log("value", torch.tensor(0.1), on_step=False, on_epoch=True)
            return self.w * 1.0

    trainer = fitted(Tiny(), ones(1000))
    assert float(trainer.callback_metrics["value"]) == pytest.approx(float(torch.tensor(0.1)), rel=1e-12)


def test_a_value_that_is_changed_in_place_afterwards_is_logged_as_it_was() -> None:
    class InPlace(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.total = torch.zeros(())

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.total += 1
            self.log("total", self.total, on_step=False, on_epoch=True)
            return self.w * 1.0

    assert float(fitted(InPlace(), ones(3)).callback_metrics["total"]) == 2.0


class OnlySome(Weight):
    """Logs a name on one rank only, and another on every rank but with rank-wise values."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        rank = self.global_rank
        if rank == 1:
            self.log("only_one", 5.0)
            self.log("only_one_max", float(batch_idx), reduce_fx="max")
        self.log("everywhere", float(rank))
        self.log("mine", float(rank), sync_dist=False)
        self.log("main", float(rank), rank_zero_only=True)


def logged_on_some_ranks() -> dict[str, float]:
    trainer = fitted(OnlySome(), ones(4), ones(4, 2))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_names_that_only_some_ranks_log_are_known_to_all() -> None:
    for rank, values in enumerate(run_in_processes(logged_on_some_ranks, 2)):
        assert values == {"only_one": 5.0, "only_one_max": 0.0, "everywhere": 0.5, "mine": rank, "main": 0.0}


class StepSync(Weight):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("synced", float(self.global_rank), sync_dist=True)
        self.log("own", float(self.global_rank))
        return self.w * batch[0].mean()


def written_step_values(directory: str) -> list[dict[str, float]]:
    tracker = Kept()
    fitted(StepSync(), ones(4), logger=tracker, log_every_n_steps=1, default_root_dir=directory)
    return tracker.lines


def test_step_values_are_reduced_when_they_are_written_if_that_was_asked_for(tmp_path: Any) -> None:
    main, other = run_in_processes(written_step_values, 2, args=(str(tmp_path),))
    assert main == [{"epoch": 0, "synced": 0.5, "own": 0.0, "step": step} for step in (1, 2)]
    assert other == []


class SumOfRanks(StepSync):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("rows", float(self.global_rank + 1), sync_dist=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def values_after_an_epoch() -> dict[str, float]:
    trainer = fitted(SumOfRanks(), ones(4))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_step_values_are_reduced_at_the_end_of_an_epoch_if_that_was_asked_for() -> None:
    for rank, values in enumerate(run_in_processes(values_after_an_epoch, 2)):
        assert values == {"synced": 0.5, "own": float(rank), "rows": 3.0}


# torchmetrics objects


class Measured(Task):
    """Classifies x > 0.5, and knows each row's right answer; everything is logged as a metric object."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.train_accuracy = torchmetrics.Accuracy(task="binary")
        self.step_accuracy = torchmetrics.Accuracy(task="binary")
        self.val_accuracy = torchmetrics.Accuracy(task="binary")
        self.auroc = BinaryAUROC()
        self.collection = torchmetrics.MetricCollection(
            {"precision": torchmetrics.Precision(task="binary"), "recall": torchmetrics.Recall(task="binary")},
            prefix="val_",
        )
        self.history: list[dict[str, float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.train_accuracy(x, y)
        self.log("accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.step_accuracy(x, y)
        self.log("step_only", self.step_accuracy, on_step=True, on_epoch=False)
        return self.w * x.mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.val_accuracy.update(x, y)
        self.log("val_accuracy", self.val_accuracy)
        self.auroc.update(x, y)
        self.log("val_auroc", self.auroc)
        self.collection.update(x, y)
        self.log_dict(self.collection)

    def on_train_epoch_end(self) -> None:
        self.history.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


SCORES = torch.tensor([0.9, 0.8, 0.3, 0.6, 0.1, 0.4, 0.7, 0.2, 0.55])
ANSWERS = torch.tensor([1, 0, 1, 0, 0, 0, 1, 0, 1])


def measured_data(batch_size: int, count: int = 9) -> DataLoader[Any]:
    return DataLoader(TensorDataset(SCORES[:count], ANSWERS[:count]), batch_size=batch_size)


def measured_epochs(batch_size: int, count: int) -> list[dict[str, float]]:
    task = Measured()
    fitted(task, measured_data(batch_size), measured_data(batch_size, count), max_epochs=2)
    assert int(task.step_accuracy.tp + task.step_accuracy.fn) == 0  # reset at the end of the epoch as well
    return task.history


def several_measured_epochs() -> list[list[dict[str, float]]]:
    return [measured_epochs(2, 9), measured_epochs(3, 3), measured_epochs(16, 9)]


@pytest.fixture(scope="module", params=[1, 2, 3])
def measured(request: pytest.FixtureRequest) -> list[list[list[dict[str, float]]]]:
    return run_in_processes(several_measured_epochs, request.param, timeout=15)


@pytest.mark.parametrize(("run", "count"), [(0, 9), (1, 3), (2, 9)])
def test_metric_objects_are_exact_in_every_epoch_also_for_a_rank_without_a_batch(
    measured: list[list[list[dict[str, float]]]], run: int, count: int
) -> None:
    x, y = SCORES[:count], ANSWERS[:count]
    for of_rank in measured:
        for epoch in of_rank[run]:
            assert epoch["accuracy_epoch"] == pytest.approx(float(((SCORES > 0.5) == ANSWERS).float().mean()))
            assert epoch["val_accuracy"] == pytest.approx(float(((x > 0.5) == y).float().mean()))
            assert epoch["val_auroc"] == pytest.approx(float(torchmetrics.functional.auroc(x, y, task="binary")))
            assert epoch["val_recall"] == pytest.approx(float(((x > 0.5) & (y == 1)).sum() / y.sum()))
            assert epoch["val_precision"] == pytest.approx(float(((x > 0.5) & (y == 1)).sum() / (x > 0.5).sum()))


def test_the_step_value_of_a_metric_object_is_that_of_its_batch() -> None:
    task = Measured()
    trainer = fitted(task, measured_data(2, 4))
    assert float(trainer.callback_metrics["accuracy_step"]) == 0.0  # the last batch: both wrong
    assert float(trainer.callback_metrics["accuracy_epoch"]) == 0.25


# samplers


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count


class Growing(BatchSampler):
    """A batch sampler of the user's own, whose batches have 1, 2 and 3 rows."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([5], [4, 3], [2, 1, 0])

    def __len__(self) -> int:
        return 3


class Seen(Weight):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.trainer.batch_info.real_rows:
            self.seen.append(batch[0].flatten().tolist())
        return self.w * batch[0].mean()


def seen_through(kind: str) -> tuple[list[list[float]], str, str]:
    data = TensorDataset(torch.arange(6.0)[:, None])
    loader: DataLoader[Any] = (
        DataLoader(data, batch_size=2, sampler=Backwards(6))
        if kind == "sampler"
        else DataLoader(data, batch_sampler=Growing())
    )
    task = Seen()
    trainer = quiet()
    trainer.fit(task, loader)
    assert trainer.loop is not None
    prepared = trainer.loop.loader
    return task.seen, type(prepared.sampler).__name__, type(prepared.batch_sampler).__name__


def seen_through_both() -> list[Any]:
    return [PartialState().process_index, seen_through("sampler"), seen_through("batch_sampler")]


def test_a_sampler_of_ones_own_is_sharded_and_never_replaced() -> None:
    for rank, sampled, batched in run_in_processes(seen_through_both, 2):
        assert sampled == ([[[5, 4], [1, 0]], [[3, 2]]][rank], "Backwards", "BatchSampler")
        assert batched[0] == [[[5], [2, 1, 0]], [[4, 3]]][rank]
        assert batched[2] == "Growing"


# options that are taken without effect


def losses_of(**options: Any) -> list[float]:
    trainer = quiet(seed=7, max_epochs=2, **options)
    task = Shuffled()
    trainer.fit(task, Shuffled.data())
    return task.losses


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"optimizer_in_backward": True}, "Results are the same without it"),
        ({"advise": True}, "Run drivetrain tune script.py"),
        ({"num_workers": "auto"}, "Each loader keeps its own number"),
        ({"optimizer_in_backward": True, "accumulate_grad_batches": 2}, "Results are the same without it"),
    ],
    ids=str,
)
def test_an_option_without_effect_warns_and_trains_with_the_same_losses(options: dict[str, Any], hint: str) -> None:
    (name, value), *others = options.items()
    with pytest.warns(DrivetrainDeprecationWarning, match=rf"Trainer\({name}={value!r}\) has no effect .*{hint}"):
        given = losses_of(**options)
    assert given == losses_of(**dict(others))
