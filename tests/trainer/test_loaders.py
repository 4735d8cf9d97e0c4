"""Where batches come from: loaders, several of them, data modules, and what happens on the way to the device."""

from __future__ import annotations

import gc
import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain import Accelerator, CombinedLoader, DataLoaderConfiguration, DataModule, Task
from tests.pool import run_in_processes
from tests.trainer.tasks import Weight, fitted, ones, quiet, rows

# several loaders to evaluate on


class Several(Weight):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((dataloader_idx, batch_idx))
        self.log("mean", batch[0].mean())
        self.log(f"only_{dataloader_idx}", float(dataloader_idx), add_dataloader_idx=False)

    test_step = validation_step


def several() -> tuple[Any, Any]:
    trainer = quiet()
    loaders = [rows([1.0, 2.0, 6.0]), rows([4.0])]
    results = trainer.validate(Several(), loaders, verbose=False)
    fit = fitted(Several(), ones(2), {"first": loaders[0], "second": loaders[1]})
    return results, {name: float(value) for name, value in fit.callback_metrics.items()}


@pytest.mark.parametrize("processes", [1, 2])
def test_values_of_several_loaders_are_told_apart_by_name(processes: int) -> None:
    for results, metrics in run_in_processes(several, processes):
        assert results == [{"mean/dataloader_idx_0": 3.0, "only_0": 0.0}, {"mean/dataloader_idx_1": 4.0, "only_1": 1.0}]
        assert metrics == {"mean/dataloader_idx_0": 3.0, "only_0": 0.0, "mean/dataloader_idx_1": 4.0, "only_1": 1.0}


def test_several_loaders_run_one_after_the_other() -> None:
    task = Several()
    quiet().test(task, [ones(2), ones(1)], verbose=False)
    assert task.seen == [(0, 0), (0, 1), (1, 0)]


def test_one_name_for_two_loaders_is_refused() -> None:
    class Same(Weight):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("same", 1.0, add_dataloader_idx=False)

    with pytest.raises(ValueError, match=r"'same' is logged for two loaders.*add_dataloader_idx=True"):
        quiet().validate(Same(), [ones(1), ones(1)])


@pytest.mark.parametrize("dataloader_idx", ["missing", "optional", "required"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_may_take_the_loaders_number_or_not(dataloader_idx: str, count: int) -> None:
    seen: list[Any] = []

    class Missing(Weight):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(None)

    class Optional(Weight):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 7) -> None:
            seen.append(dataloader_idx)

    class Required(Weight):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            seen.append(dataloader_idx)

    task = {"missing": Missing, "optional": Optional, "required": Required}[dataloader_idx]()
    quiet().validate(task, [ones(1)] * count, verbose=False)
    expected = {"missing": [None, None], "optional": [0, 1], "required": [0, 1]}[dataloader_idx][:count]
    assert seen == ([7] if (dataloader_idx, count) == ("optional", 1) else expected)


# several loaders to train on


class Combined(Weight):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def first(item: Any) -> Any:
            if isinstance(item, list) and isinstance(item[0], list):
                return [first(each) for each in item]
            return None if item is None else float(item[0].flatten()[0])

        if isinstance(batch, dict):
            self.seen.append({name: first(item) for name, item in batch.items()})
        elif isinstance(batch[0], Tensor):
            self.seen.append(first(batch))
        else:
            self.seen.append([first(item) for item in batch])
        return self.w * 1.0


LONG, SHORT = rows([1.0, 2.0, 3.0]), rows([10.0, 20.0])
COMBINED: list[tuple[Any, list[Any]]] = [
    ([LONG, SHORT], [[1, 10], [2, 20], [3, 10]]),
    ({"a": LONG, "b": SHORT}, [{"a": 1, "b": 10}, {"a": 2, "b": 20}, {"a": 3, "b": 10}]),
    ({"a": LONG, "b": [SHORT, SHORT]}, [{"a": 1, "b": [10, 10]}, {"a": 2, "b": [20, 20]}, {"a": 3, "b": [10, 10]}]),
    (CombinedLoader([LONG, SHORT], "min_size"), [[1, 10], [2, 20]]),
    (CombinedLoader([LONG, SHORT], "max_size"), [[1, 10], [2, 20], [3, None]]),
    (CombinedLoader([LONG, SHORT], "sequential"), [1, 2, 3, 10, 20]),
]


@pytest.mark.parametrize(
    ("loaders", "seen"), COMBINED, ids=["list", "dict", "nested", "min_size", "max_size", "sequential"]
)
def test_several_loaders_are_combined_for_training(loaders: Any, seen: list[Any]) -> None:
    task = Combined()
    trainer = fitted(task, loaders)
    assert task.seen == seen
    assert trainer.num_training_batches == len(seen)


def test_combined_loaders_are_evaluated_as_one_unless_they_come_one_after_the_other() -> None:
    class Evaluated(Combined):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.training_step(batch, batch_idx)

    task, trainer = Evaluated(), quiet()
    trainer.validate(task, CombinedLoader({"a": LONG, "b": SHORT}, "max_size"))
    assert task.seen == [{"a": 1, "b": 10}, {"a": 2, "b": 20}, {"a": 3, "b": None}]
    assert trainer.num_val_batches == [3]
    assert [len(each) for each in trainer.predict(task, CombinedLoader([LONG, SHORT], "sequential"))] == [3, 2]
    task.seen.clear()
    fitted(task, LONG, CombinedLoader([LONG, SHORT], "min_size"), num_sanity_val_steps=1)
    assert task.seen == [[1, 10], 1, 2, 3, [1, 10], [2, 20]]


def combined_on_two() -> list[Any]:
    task = Combined()
    trainer = fitted(task, [rows([1.0, 2.0, 3.0, 4.0]), rows([10.0, 20.0])], max_epochs=2)
    return [task.seen, trainer.global_step]


def test_combined_loaders_are_sharded_one_by_one() -> None:
    first, second = run_in_processes(combined_on_two, 2)
    assert first == [[[1, 10], [3, 10]] * 2, 4]
    assert second == [[[2, 20], [4, 20]] * 2, 4]


def test_a_list_of_batches_is_a_loader_too() -> None:
    task = Weight()
    fitted(task, [torch.tensor([[1.0]]), torch.tensor([[2.0]])])
    assert task.gradients == [1.0, 2.0]


# data modules, and loaders that the task makes


class Module(DataModule):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        self.calls.append("train")
        return ones(2)

    def val_dataloader(self) -> Any:
        self.calls.append("val")
        return rows([2.0])

    def test_dataloader(self) -> Any:
        return rows([3.0])

    def predict_dataloader(self) -> Any:
        return rows([4.0])


class Everything(Weight):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_mean", batch[0].mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return float(batch[0])


def test_a_data_module_serves_all_four_verbs() -> None:
    module, task, trainer = Module(), Everything(), quiet()
    trainer.fit(task, datamodule=module)
    assert module.calls == ["prepare", "setup fit", "train", "val", "teardown fit"]
    assert module.trainer is trainer
    assert trainer.validate(task, module, verbose=False) == [{"val_loss": 2.0}]
    assert trainer.test(task, datamodule=module, verbose=False) == [{"test_mean": 3.0}]
    assert trainer.predict(task, module) == [4.0]
    assert trainer.test(verbose=False) == [{"test_mean": 3.0}]  # the task and the data of before


def test_a_data_module_may_stand_where_the_training_loader_does() -> None:
    trainer = quiet()
    trainer.fit(Weight(), Module())
    assert trainer.global_step == 2


def test_a_task_may_make_its_own_loaders() -> None:
    class Own(Weight):
        def train_dataloader(self) -> Any:
            return ones(3)

        def val_dataloader(self) -> Any:
            return rows([5.0])

    trainer = quiet()
    trainer.fit(Own())
    assert (trainer.global_step, float(trainer.callback_metrics["val_loss"])) == (3, 5.0)


def prepared_on() -> list[str]:
    class Preparing(Module):
        def setup(self, stage: str) -> None:
            self.calls.append("setup")

    module = Preparing()
    quiet().fit(Weight(), datamodule=module)
    return module.calls[:2]


def test_data_is_prepared_on_the_first_process_of_a_machine_alone_and_set_up_on_all() -> None:
    assert run_in_processes(prepared_on, 2) == [["prepare", "setup"], ["setup", "train"]]


@pytest.mark.parametrize(("every", "made"), [(0, 1), (1, 4), (2, 2), (3, 2)])
def test_loaders_are_made_anew_every_so_many_epochs(every: int, made: int) -> None:
    module = Module()
    quiet(max_epochs=4, reload_dataloaders_every_n_epochs=every).fit(Weight(), datamodule=module)
    assert (module.calls.count("train"), module.calls.count("val")) == (made, made)


def test_loaders_of_validation_are_made_anew_once_however_often_an_epoch_validates() -> None:
    module = Module()
    quiet(max_epochs=3, reload_dataloaders_every_n_epochs=1, val_check_interval=1).fit(Weight(), datamodule=module)
    assert module.calls.count("val") == 3


# the way to the device


class Transferring:
    """Transfer hooks that change the values, so that the order of them shows."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        assert device.type == "cpu"
        return [batch[0] * 10]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.5 + dataloader_idx]


class TransferringTask(Transferring, Everything):
    pass


class TransferringModule(Transferring, Module):
    pass


def test_transfer_hooks_of_the_task_change_every_batch() -> None:
    task = TransferringTask()
    trainer = fitted(task, rows([1.0]), rows([2.0]))
    assert task.gradients == [20.5]
    assert float(trainer.callback_metrics["val_loss"]) == 30.5
    assert trainer.predict(task, [rows([1.0]), rows([1.0])]) == [[20.5], [21.5]]


def test_transfer_hooks_of_the_data_module_win_over_the_tasks() -> None:
    class Other(Everything):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            raise AssertionError("the data module has this hook")

    assert quiet().predict(Other(), TransferringModule()) == [50.5]


def test_batches_are_in_the_precision_that_parameters_are_in() -> None:
    class Dtypes(Weight):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            seen.append((batch[0].dtype, self.w.dtype, self.dtype))
            return self.w * batch[0].mean()

    seen: list[Any] = []
    fitted(Dtypes(), ones(1), precision="64-true")
    fitted(Dtypes(), ones(1), precision="bf16-true")
    assert seen == [(torch.float64,) * 3, (torch.bfloat16,) * 3]


# an engine of one's own


def test_a_trainer_runs_on_the_accelerator_that_it_is_given() -> None:
    engine = Accelerator(cpu=True, mixed_precision="bf16")
    trainer = quiet(accelerator=engine)
    trainer.fit(Weight(), ones(2))
    assert trainer.accelerator is engine
    assert trainer.precision == "bf16"
    assert trainer.strategy is engine.strategy


def test_the_trainers_accelerator_is_live_in_a_step() -> None:
    class Raw(Task):
        """Drives its own loop's step through the engine."""

        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            accelerator, optimizer = self.trainer.accelerator, self.optimizers()
            with accelerator.autocast():
                loss = (self.w - batch[0].mean()).square()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_([self.w], 1.0)
            optimizer.step()
            optimizer.zero_grad()
            self.log("everyone", accelerator.gather(loss.detach()).mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    task = Raw()
    trainer = fitted(task, ones(2))
    assert float(task.w.detach()) == pytest.approx(1.0)
    assert trainer.global_step == 2


def split_batches() -> list[float]:
    engine = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    task = Weight()
    fitted(task, rows([1.0, 2.0, 3.0, 4.0], 4), accelerator=engine)
    return [*task.gradients, task.batches[0][2]]


def test_the_accelerators_options_hold_for_the_trainers_loaders() -> None:
    assert run_in_processes(split_batches, 2) == [[2.5, 1.0], [2.5, 3.0]]


def test_the_workers_of_an_epoch_that_is_broken_off_end_with_it() -> None:
    class Breaks(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    loader = DataLoader(torch.ones(8, 1), num_workers=1)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        quiet().fit(Breaks(), loader)
    assert multiprocessing.active_children() == []


class Watching(Weight):
    """Counts the workers that are there in each training epoch, and may fail or stop in a step of one of the loops."""

    def __init__(self, ends: str) -> None:
        super().__init__()
        self.ends, self.workers = ends, set[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.workers.add(len(multiprocessing.active_children()))
        if self.current_epoch and self.ends == "failing step":
            raise ZeroDivisionError
        if self.current_epoch and self.ends == "stop":
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.ends == f"failing {'sanity check' if self.trainer.sanity_checking else 'validation'}":
            raise ZeroDivisionError

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


def workers_left(ends: str, stay: bool) -> tuple[set[int], int]:
    def loader(size: int) -> DataLoader[Any]:
        return DataLoader(torch.ones(size, 1), num_workers=1, persistent_workers=stay)  # type: ignore[arg-type]

    task, trainer = Watching(ends), quiet(max_epochs=2, limit_val_batches=2, limit_test_batches=2)
    gc.collect()
    gc.disable()  # what nothing but the collector ends is found
    try:
        if ends in ("validate", "test", "predict"):
            getattr(trainer, ends)(task, loader(8))
        else:
            trainer.fit(task, loader(4), loader(8))
    except ZeroDivisionError:
        pass
    finally:
        gc.enable()
    return task.workers, len(multiprocessing.active_children())


@pytest.mark.parametrize("stay", [False, True])
def test_workers_end_with_the_run_and_those_of_a_validation_with_it_unless_they_stay(stay: bool) -> None:
    ends = ["end", "stop", "failing step", "failing validation", "failing sanity check", "validate", "test", "predict"]
    for name in ends:
        [(workers, left)] = run_in_processes(workers_left, 1, args=(name, stay))
        assert left == 0, name
        assert stay or workers <= {0, 1}, name  # of training alone


def rank_draws() -> list[float]:
    class Noisy(Weight):
        def on_fit_start(self) -> None:
            torch.manual_seed(100 + self.global_rank)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            drawn.append(torch.randn(()).item())
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    drawn: list[float] = []
    loaders = [rows(range(8), 2, shuffle=True) for _ in range(2)]
    fitted(Noisy(), *loaders, max_epochs=3, num_sanity_val_steps=1, val_check_interval=0.5, strategy="ddp")
    return drawn


def test_a_random_state_that_is_a_ranks_own_stays_so_through_validation() -> None:
    _, drawn = run_in_processes(rank_draws, 2)
    torch.manual_seed(101)
    assert drawn == [torch.randn(()).item() for _ in range(6)]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_a_method_that_makes_no_loader_is_refused_by_its_name(verb: str) -> None:
    name = {"validate": "val", "test": "test", "predict": "predict"}[verb]
    task = type("Empty", (Weight,), {f"{name}_dataloader": lambda self: None, "test_step": Weight.validation_step})()
    with pytest.raises(TypeError, match=rf"returned from `Empty.{name}_dataloader\(\)`: it is None"):
        getattr(quiet(), verb)(task)


def test_a_training_batch_that_is_none_is_left_out_with_a_warning() -> None:
    class Counts(Task):
        seen = 0

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += len(batch)
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    task, loader = Counts(), DataLoader([0, 1, 2], collate_fn=lambda items: torch.ones(2, 1) if items != [1] else None)
    with pytest.warns(UserWarning, match="yielded None"):
        quiet(max_epochs=1).fit(task, loader)
    assert task.seen == 4
