"""What a search finds, and that it changes nothing else."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import (
    BatchSizeFinder,
    ConfigurationError,
    DataModule,
    LearningRateFinder,
    LRFinder,
    Task,
    Trainer,
    Tuner,
    set_seed,
)
from tests.pool import run_in_processes
from tests.trainer.tasks import Shuffled

LR = 0.0123


def make_trainer(**options: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{"accelerator": "cpu", "max_epochs": 2, **quiet, **options})


class Normed(Shuffled):
    """Dropout, batch statistics, Adam, and a scheduler by steps whose rates come from the first one."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr=lr)
        self.net.insert(1, nn.BatchNorm1d(4))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4)
        return [optimizer], [{"scheduler": warmup, "interval": "step"}]


def state_of(task: Task) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in task.state_dict().items()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def fitted(searches: str, generator: bool) -> tuple[float, list[float], dict[str, Tensor], Tensor]:
    """A fit after a search, or one that begins with the rate that the search finds."""
    set_seed(7)
    task, loader = Normed(), Shuffled.data(generator)
    trainer = make_trainer(callbacks=[LearningRateFinder(num_training_steps=15)] if searches == "callback" else None)
    if searches == "tuner":
        Tuner(trainer).lr_find(task, loader, num_training=15)
    elif searches not in ("callback", "tuner"):
        task.hparams.lr = float(searches)
    task.losses.clear()
    trainer.fit(task, loader)
    return task.hparams.lr, task.losses[-12:], state_of(task), torch.rand(3)


@pytest.mark.parametrize("generator", [False, True], ids=["global-generator", "own-generator"])
@pytest.mark.parametrize("searches", ["tuner", "callback"])
def test_a_fit_after_a_search_is_bit_for_bit_one_at_that_rate(searches: str, generator: bool) -> None:
    rate, losses, state, drawn = fitted(searches, generator)
    assert rate != Normed().hparams.lr
    plain = fitted(repr(rate), generator)
    assert (rate, losses) == (plain[0], plain[1])
    assert_same(state, plain[2])
    assert torch.equal(drawn, plain[3])


class Failing(Normed):
    """Fails in its fifth step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if len(self.losses) == 5:
            raise OSError("the disk is gone")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Normed, Failing], ids=["to the end", "until it fails"])
def test_a_search_leaves_everything_as_it_was(kind: type[Normed]) -> None:
    set_seed(1)
    task, loader, trainer = kind(), Shuffled.data(generator=True), make_trainer()
    before, drawn = state_of(task), torch.random.get_rng_state()
    generator = loader.generator.get_state()
    progress, callbacks, options = trainer.progress.state_dict(), list(trainer.callbacks), trainer.options
    if kind is Failing:
        with pytest.raises(OSError, match="the disk is gone"):
            Tuner(trainer).lr_find(task, loader, num_training=9, update_attr=False)
    else:
        Tuner(trainer).lr_find(task, loader, num_training=9, update_attr=False)
    assert_same(before, state_of(task))
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert torch.equal(generator, loader.generator.get_state())
    assert trainer.progress.state_dict() == progress
    assert (trainer.callbacks, trainer.options, trainer.stage) == (callbacks, options, None)
    assert trainer.callback_metrics == {}
    assert all(parameter.grad is None for parameter in task.parameters())


class AtSecondEpoch(LearningRateFinder):
    """Searches in the middle of a run, with optimizer state, logged values and a loader in use."""

    def on_fit_start(self, trainer: Any, task: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, task)


def test_a_search_between_two_epochs_changes_nothing_either() -> None:
    found = []
    for callbacks in ([], [AtSecondEpoch(num_training_steps=13, update_attr=False)]):
        set_seed(5)
        task = Normed()
        trainer = make_trainer(callbacks=callbacks, max_epochs=3)
        trainer.fit(task, Shuffled.data(generator=True))
        found.append((task.losses[-6:], state_of(task), trainer.global_step, float(trainer.callback_metrics["loss"])))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])
    assert found[0][2:] == found[1][2:]


def test_rates_rise_from_the_first_to_the_last_and_the_loss_is_watched(capsys: pytest.CaptureFixture[str]) -> None:
    set_seed(1)
    task = Normed()
    found = Tuner(make_trainer(enable_progress_bar=True)).lr_find(
        task, Shuffled.data(), min_lr=1e-4, max_lr=1e2, num_training=40
    )
    assert found is not None
    rates, losses = found.results["lr"], found.results["loss"]
    assert rates[0] == 1e-4
    assert rates == sorted(rates)
    assert len(rates) == len(losses) < 40  # it diverged before
    assert losses[-1] > 4 * min(losses)
    assert task.hparams.lr == found.suggestion() < rates[-1]
    said = capsys.readouterr().out
    assert f"Learning-rate search: {len(rates)} steps from 0.0001 to" in said
    assert "the loss exceeded 4 times the smallest one; lr is now" in said


def test_a_search_draws_its_data_once_as_a_run_does() -> None:
    class Draws(Normed):
        drawn: ClassVar[list[Tensor]] = []

        def train_dataloader(self) -> Any:
            self.drawn.append(torch.randn(12, 2))
            return DataLoader(TensorDataset(self.drawn[-1], torch.zeros(12, 1)), batch_size=4)

    set_seed(3)
    Tuner(make_trainer()).lr_find(Draws(), num_training=3)
    set_seed(3)
    Normed()
    assert torch.equal(torch.stack(Draws.drawn), torch.randn(1, 12, 2))


def searched_on_two(strategy: str) -> tuple[list[float], list[list[float]]]:
    """What a search finds, and the losses of a fit without it and with it."""
    smoothed, losses = [0.0], []
    for searches in (False, True):
        set_seed(3)
        task, trainer = Shuffled(), make_trainer(strategy=strategy, max_epochs=1)
        if searches:
            found = Tuner(trainer).lr_find(task, Shuffled.data(), num_training=14, update_attr=False)
            assert found is not None
            smoothed = found.results["loss"]
        task.losses.clear()
        trainer.fit(task, Shuffled.data())
        losses.append(task.losses)
    return smoothed, losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_processes_find_the_same_and_train_as_without_the_search(strategy: str) -> None:
    (smoothed, losses), (same, others) = run_in_processes(searched_on_two, args=[strategy])
    assert smoothed == same
    assert len(smoothed) == 14
    assert losses[0] == losses[1]
    assert others[0] == others[1] != losses[0]  # each process has its own batches


@pytest.mark.parametrize(
    ("losses", "skip_begin", "skip_end", "place"),
    [
        ([5.0, 5.0, 4.0, 1.0, 0.5, 9.0], 0, 1, 2),
        ([5.0, 1.0, 4.0, 3.9, 2.0, 1.5], 2, 0, 4),
        ([5.0, float("nan"), 4.0, float("inf"), 0.5, 9.0], 0, 1, 4),
        ([5.0, 4.0, 3.0], 1, 1, None),
        ([], 10, 1, None),
    ],
)
def test_the_suggestion_is_where_the_loss_falls_fastest(
    losses: list[float], skip_begin: int, skip_end: int, place: int | None
) -> None:
    finder = LRFinder("exponential", 1e-5, 1.0, 6)
    finder.results = {"lr": [10.0 ** (number - 5) for number in range(len(losses))], "loss": losses}
    expected = None if place is None else finder.results["lr"][place]
    assert finder.suggestion(skip_begin, skip_end) == expected


def test_the_plot_shows_the_losses_and_the_suggestion() -> None:
    finder = LRFinder("exponential", 1e-8, 1.0, 20)
    finder.results = {"lr": [2.0**-number for number in range(20, 0, -1)], "loss": [*[5.0] * 14, 4.0, 1.0, 1, 1, 2, 9]}
    axes = finder.plot(suggest=True).axes[0]
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "Learning rate", "Loss")
    curve, point = axes.lines
    assert list(curve.get_ydata()) == finder.results["loss"]
    assert list(point.get_xdata()) == [finder.suggestion()]


# batch sizes


class Sized(Task):
    """Loaders by `batch_size`, and a step that needs memory for each row.

    Args:
        bytes_per_row: What a row takes.
        batch_size: Rows of a batch.
    """

    def __init__(self, bytes_per_row: int = 0, batch_size: int = 3) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.bytes_per_row = bytes_per_row
        self.net = nn.Linear(1, 1)
        self.seen: list[int] = []

    def needed(self, batch: Any) -> int:
        return self.bytes_per_row * len(batch[0])

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        self.seen.append(len(batch[0]))
        torch.empty(self.needed(batch), dtype=torch.uint8)
        return self.net(batch[0]).square().mean()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.training_step(batch)

    test_step = validation_step = predict_step

    def loader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(100, 1)), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Capped:
    """Lets this process have only so much more memory than it has."""

    def __init__(self, more: int) -> None:
        self.more = more

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + self.more, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self.before)


MIB = 2**20


@pytest.mark.parametrize(
    ("mode", "margin", "least", "most"),
    [
        ("power", 0.05, 16, 16),
        # Each touches tens of gigabytes.
        pytest.param("binsearch", 0.0, 21, 31, marks=pytest.mark.slow),
        pytest.param("binsearch", 0.5, 10, 15, marks=pytest.mark.slow),
    ],
)
def test_real_lack_of_memory_ends_the_search(mode: str, margin: float, least: int, most: int) -> None:
    task, trainer = Sized(bytes_per_row=64 * MIB), make_trainer()
    Tuner(trainer).scale_batch_size(Sized(), max_trials=1)  # whatever is loaded on the way is there now
    with Capped(64 * MIB * 28):  # far from what 16 take and 32, since the process itself takes and gives back some
        found = Tuner(trainer).scale_batch_size(task, mode=mode, margin=margin)
    assert found == task.batch_size
    assert least <= task.batch_size <= most
    assert 32 in task.seen
    assert trainer.train_dataloader.batch_size == trainer.val_dataloaders.batch_size == found


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_evaluations_are_searched_too(method: str) -> None:
    task, trainer = Sized(), make_trainer(callbacks=[BatchSizeFinder(max_trials=4)])
    getattr(trainer, method)(task)
    assert task.batch_size == 16
    assert task.seen[-7:] == [16] * 6 + [4]  # what follows is the run, of all 100 rows
    assert trainer.global_step == 0


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"max_trials": 3}, 8),
        ({"max_trials": 1, "init_val": 5}, 5),
        ({"max_trials": 0}, 2),
        ({"max_val": 20}, 20),
        ({}, 100),
        ({"mode": "binsearch", "max_trials": 3}, 7),
    ],
    ids=str,
)
def test_a_search_ends_at_what_it_was_asked_for_or_at_all_the_data(options: dict[str, Any], found: int) -> None:
    task = Sized()
    assert Tuner(make_trainer()).scale_batch_size(task, **options) == task.batch_size == found


def test_the_run_after_a_search_has_the_size_of_the_data_module() -> None:
    class Data(DataModule):
        def __init__(self, rows: int = 2) -> None:
            self.save_hyperparameters()

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(TensorDataset(torch.ones(64, 1)), batch_size=self.hparams.rows)

    trainer = make_trainer(callbacks=[BatchSizeFinder(max_trials=3, batch_arg_name="rows")], max_epochs=1)
    data = Data()
    trainer.fit(Sized(), data)
    assert data.hparams.rows == 8
    assert trainer.global_step == 8


class LacksOnOne(Sized):
    """Memory for five rows on the last process, for many on the others."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        if self.global_rank == 1 and len(batch[0]) > 5:
            raise torch.OutOfMemoryError("sim:1 out of memory")
        return super().training_step(batch, batch_idx)


def sized_on_two() -> tuple[int | None, int]:
    task = LacksOnOne()
    found = Tuner(make_trainer(strategy="ddp", limit_val_batches=0)).scale_batch_size(task, mode="binsearch", margin=0)
    return found, task.batch_size


def test_memory_that_lacks_on_one_process_lacks_on_all() -> None:
    assert run_in_processes(sized_on_two) == [(5, 5), (5, 5)]


def told_on_two() -> tuple[int | None, list[int], list[int]]:
    class Data(DataModule):
        rows = 2

        def __init__(self) -> None:
            self.told: list[int] = []

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(TensorDataset(torch.ones(100, 1)), batch_size=self.rows)

        def on_batch_size_too_large(self, batch_size: int) -> None:
            self.told.append(batch_size)

    class Told(LacksOnOne):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[int] = []

        def on_batch_size_too_large(self, batch_size: int) -> None:
            self.told.append(batch_size)

    task, data = Told(), Data()
    tuner = Tuner(make_trainer(strategy="ddp", limit_val_batches=0))
    found = tuner.scale_batch_size(task, datamodule=data, mode="binsearch", margin=0, batch_arg_name="rows")
    return found, task.told, data.told


def test_task_and_data_module_are_told_on_all_processes_that_a_size_is_too_large() -> None:
    assert run_in_processes(told_on_two) == [(5, [8, 6], [8, 6])] * 2


def test_a_batch_of_one_that_does_not_fit_is_an_error_and_the_size_is_as_before() -> None:
    class Never(Sized):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            raise torch.OutOfMemoryError("sim:0 out of memory")

    task = Never()
    with pytest.raises(RuntimeError, match="not enough memory for any batch size, not even for 1") as caught:
        Tuner(make_trainer()).scale_batch_size(task)
    assert "sim:0 out of memory" in str(caught.value.__cause__)
    assert task.batch_size == 3


# refusals


def test_several_loaders_of_an_evaluation_are_refused_before_a_missing_attribute() -> None:
    class Several(Shuffled):
        def val_dataloader(self) -> Any:
            return [self.data(), self.data()]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    with pytest.raises(ConfigurationError, match="cannot be used with multiple val dataloaders: there are 2"):
        Tuner(make_trainer()).scale_batch_size(Several(), method="validate")


class TwoOptimizers(Sized):
    automatic_optimization = False
    lr = 0.1

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


LOADER = Sized().loader()


@pytest.mark.parametrize(
    ("search", "options", "message"),
    [
        ("lr_find", {"method": "test"}, "only method='fit' uses a learning rate"),
        ("lr_find", {"mode": "cubic"}, "mode='cubic' is not valid: mode should be either of"),
        ("lr_find", {"min_lr": 0}, "min_lr=0 is not valid. Use a positive learning rate"),
        ("lr_find", {}, "should have one of these fields, but have none: lr, learning_rate"),
        ("lr_find", {"attr_name": "batchsize"}, "Did you mean 'batch_size'"),
        ("lr_find", {"model": TwoOptimizers()}, "only works with single optimizer"),
        ("scale_batch_size", {"mode": "double"}, "mode='double' is not valid: mode should be either of"),
        ("scale_batch_size", {"margin": 1.0}, "margin=1.0 is not valid. Use a fraction"),
        ("scale_batch_size", {"method": "prediction"}, "method 'prediction' is invalid"),
        ("scale_batch_size", {"method": "test", "train_dataloaders": LOADER}, "setting `dataloaders` instead"),
        ("scale_batch_size", {"dataloaders": LOADER}, "setting `train_dataloaders` and `val_dataloaders` instead"),
        ("scale_batch_size", {"train_dataloaders": LOADER}, "cannot be used with dataloaders passed directly to fit"),
        ("scale_batch_size", {"batch_arg_name": "rows"}, "should have one of these fields, but have none: rows"),
    ],
)
def test_what_cannot_be_searched_is_refused(search: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        getattr(Tuner(make_trainer()), search)(**{"model": Sized(), **options})


@pytest.mark.parametrize(
    ("search", "callback"), [("lr_find", LearningRateFinder()), ("scale_batch_size", BatchSizeFinder())]
)
def test_a_search_of_a_callback_and_of_a_tuner_are_one_too_many(search: str, callback: Any) -> None:
    tuner = Tuner(make_trainer(callbacks=callback))
    with pytest.raises(ConfigurationError, match=f"already configured with a `{type(callback).__name__}` callback"):
        getattr(tuner, search)(Sized())


@pytest.mark.parametrize("search", ["lr_find", "scale_batch_size"])
def test_a_run_for_development_searches_nothing(search: str) -> None:
    with pytest.warns(UserWarning, match="Skipping .* since `fast_dev_run` is enabled"):
        assert getattr(Tuner(make_trainer(fast_dev_run=True)), search)(Sized()) is None
