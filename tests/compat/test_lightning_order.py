"""Data on several processes as scripts of Lightning read them: for training every n-th sample, shuffled by the seed."""

from __future__ import annotations

import os
from collections import namedtuple
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from drivetrain.compat.lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from drivetrain.compat.lightning.pytorch.trainer.conventions import interleaved, with_batch_for_each
from drivetrain.data import DataShard
from tests.pool import run_in_processes

SAMPLES, SEED = 11, 7


class Reads(LightningModule):
    def __init__(self, shuffle: bool, sampler: Any = None) -> None:
        super().__init__()
        self.sampler = sampler
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.shuffle = shuffle
        self.read: list[list[int]] = []
        self.drawn = 0.0

    def on_fit_start(self) -> None:
        self.drawn = torch.rand(()).item()

    def train_dataloader(self) -> Any:
        return DataLoader(range(SAMPLES), batch_size=2, shuffle=self.shuffle, sampler=self.sampler)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.read.append(batch.tolist())
        return self.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Drawn(Sampler[int]):
    """The order of a generator of its own, from the last sample down in its first epoch."""

    def __init__(self, seed: int) -> None:
        self.numbers, self.order = np.random.default_rng(seed), [*reversed(range(SAMPLES))]

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        drawn = [*self.order]
        self.numbers.shuffle(self.order)
        return iter(drawn)


class Predicts(Reads):
    """Its predictions are of a class that no other process has."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return namedtuple("Prediction", "samples")(batch)


class Stream(IterableDataset[int]):
    """Each process reads all of it."""

    def __iter__(self) -> Any:
        return iter(range(6))


class Streams(Reads):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=2)


def trainer(folder: str, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(default_root_dir=folder, accelerator="cpu", devices=2, max_epochs=2, **quiet, **options)


def orders(folder: str) -> dict[str, Any]:
    """What this process has read, by case, and what it drew first."""
    found: dict[str, Any] = {}
    path = f"{folder}/middle.ckpt"

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(path)

    for name, shuffle, options, resumed in (
        ("not shuffled by its loader", False, {}, None),
        ("in order", False, {"overfit_batches": 2}, None),
        ("each all", False, {"use_distributed_sampler": False}, None),
        ("shuffled", True, {"callbacks": [Saves()]}, None),
        ("resumed", True, {}, path),
        ("by a sampler", None, {}, None),
        ("by a sampler of each", None, {}, None),
    ):
        seed_everything(SEED, verbose=False)
        rank = int(os.environ["RANK"])
        task = Reads(bool(shuffle), Drawn(rank * (name == "by a sampler of each")) if shuffle is None else None)
        torch.rand(3)
        trainer(folder, **options).fit(task, ckpt_path=resumed)
        found[name] = task.read
    found["drawn"] = [task.drawn]
    stream = Streams(False)
    trainer(folder).fit(stream)
    found["weight"] = [round(stream.weight.item(), 4)]
    predicted = trainer(folder).predict(Predicts(False), DataLoader(range(5), batch_size=2))  # type: ignore[arg-type]
    found["predicted"] = [each.samples.tolist() for each in predicted]
    return found


def expected(rank: int, shuffle: bool, drawn: Any = range(SAMPLES)) -> list[list[int]]:
    sampler: Any = DistributedSampler(range(SAMPLES), 2, rank, shuffle=shuffle, seed=SEED)  # type: ignore[arg-type]
    read = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        read += [each.tolist() for each in DataLoader(list(drawn), 2, sampler=sampler)]  # type: ignore[arg-type]
    return read


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[list[int]]]]:
    return run_in_processes(orders, 2, args=(str(tmp_path_factory.mktemp("order")),))


def test_each_process_takes_every_second_sample_shuffled_unless_it_is_to_overfit(found: Any) -> None:
    for rank, read in enumerate(found):
        assert read["in order"] == 2 * expected(rank, shuffle=False)[:2]
        assert read["not shuffled by its loader"] == expected(rank, shuffle=True)
        assert read["shuffled"] == expected(rank, shuffle=True)


def test_a_sampler_of_the_script_is_shared_out_by_samples_too(found: Any) -> None:
    for rank, read in enumerate(found):
        assert read["by a sampler"] == expected(rank, shuffle=True, drawn=Drawn(0))


def test_a_sampler_that_draws_otherwise_on_each_process_neither_repeats_nor_omits_samples(found: Any) -> None:
    for rank, read in enumerate(found):
        assert read["by a sampler of each"] == expected(rank, shuffle=True, drawn=Drawn(0))


def test_processes_draw_from_the_seed_whatever_was_drawn_before(found: Any) -> None:
    torch.manual_seed(SEED)
    first = torch.rand(()).item()
    assert [read["drawn"] for read in found] == [[first], [first]]


def test_each_process_takes_all_samples_without_the_sampler(found: Any) -> None:
    assert [[*chain(*read["each all"])] for read in found] == 2 * [[*range(SAMPLES), *range(SAMPLES)]]


def test_gradients_of_streams_that_each_process_reads_for_itself_are_averaged(found: Any) -> None:
    assert [read["weight"] for read in found] == [[-0.6], [-0.6]]  # 6 steps of 0.1 times a gradient of 1


def test_each_process_gets_the_predictions_of_its_own_batches_of_any_class(found: Any) -> None:
    assert [read["predicted"] for read in found] == [[[0, 1], [4]], [[2, 3]]]


def test_a_resumed_run_reads_the_rest_of_the_order(found: Any) -> None:
    for rank, read in enumerate(found):
        assert read["resumed"] == expected(rank, shuffle=True)[4:]


class OwnLoader(DataLoader[Any]):
    """A library's own, made with other arguments."""

    def __init__(self, data: Any, **options: Any) -> None:
        super().__init__(data, collate_fn=list, **options)


class OwnOrder(OwnLoader):
    def __iter__(self) -> Any:
        return iter([[0]])


def test_a_loader_of_a_derived_class_is_read_in_that_order_too_unless_it_iterates_by_itself() -> None:
    shard = DataShard(1, 2)
    assert list(interleaved(OwnLoader(range(SAMPLES), batch_size=2), shard, shuffle=False))[:2] == [[1, 3], [5, 7]]
    own = OwnOrder(range(SAMPLES), batch_size=2)
    assert interleaved(own, shard, shuffle=False) is own


class Evaluates(LightningModule):
    """Concatenates what this process has evaluated, as many modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.read.append(batch)
        self.log("mean", batch.float().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch

    def on_validation_epoch_end(self) -> None:
        self.read = torch.cat(self.read).tolist()

    on_test_epoch_end = on_validation_epoch_end


def few(folder: str, samples: int, batch_size: int, options: dict[str, Any]) -> list[Any]:
    """What this process has evaluated by each verb, and the mean of all samples."""

    def loader() -> Any:
        return DataLoader(range(samples), batch_size=batch_size)  # type: ignore[arg-type]

    found: list[Any] = []
    for verb in ("validate", "test"):
        task = Evaluates()
        [logged] = getattr(trainer(folder, **options), verb)(task, loader(), verbose=False)
        found.append((task.read, logged["mean"]))
    predicted = trainer(folder, **options).predict(Evaluates(), loader())
    return [*found, torch.cat(list(predicted)).tolist()]


@pytest.mark.parametrize(
    ("samples", "batch_size", "parts"),
    [(2, 4, ([0], [1])), (3, 4, ([0, 1], [2])), (5, 8, ([0, 1, 2], [3, 4])), (5, 4, ([0, 1, 2, 3], [4]))],
)
def test_each_process_evaluates_a_sample_of_a_loader_with_fewer_batches_than_processes(
    tmp_path: Any, samples: int, batch_size: int, parts: tuple[list[int], list[int]]
) -> None:
    mean = (samples - 1) / 2
    found = run_in_processes(few, 2, args=(str(tmp_path), samples, batch_size, {}))
    assert found == [[(part, mean), (part, mean), part] for part in parts]


@pytest.mark.parametrize(("samples", "count", "sizes"), [(5, 4, [1] * 5), (6, 3, [2, 2, 2]), (2, 3, [1, 1])])
def test_batches_become_no_smaller_than_needed(samples: int, count: int, sizes: list[int]) -> None:
    made = with_batch_for_each(DataLoader(range(samples), batch_size=64), DataShard(0, count))  # type: ignore[arg-type]
    assert [len(batch) for batch in made] == sizes


def test_loaders_with_batches_of_their_own_are_left_alone() -> None:
    plain: Any = range(4)
    for loader in (
        DataLoader(plain, batch_size=2),
        DataLoader(plain, batch_size=8, drop_last=True),
        DataLoader(plain, batch_sampler=[[0, 1, 2, 3]]),
        DataLoader(plain, batch_size=None),
        DataLoader(Stream(), batch_size=8),
        [torch.zeros(4)],
    ):
        assert with_batch_for_each(loader, DataShard(0, 2)) is loader


class Draws(Reads):
    """Draws a number in each step, on loaders that are made anew for every epoch."""

    def on_fit_start(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.read.append([*batch.tolist(), torch.rand(()).item()])
        return self.weight.sum()


def test_numbers_drawn_after_a_loader_was_reloaded_are_those_of_lightning() -> None:
    torch.manual_seed(SEED)
    expected = []
    for epoch in range(3):
        loader = Draws(shuffle=True).train_dataloader()
        if epoch:  # Lightning iterates over it when it is loaded, and again when the epoch begins
            iter(loader)
        expected += [[*batch.tolist(), torch.rand(()).item()] for batch in loader]
    torch.manual_seed(SEED)
    task = Draws(shuffle=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_epochs=3, accelerator="cpu", reload_dataloaders_every_n_epochs=1, **quiet).fit(task)
    assert task.read == expected


class Ready:
    """Finished batches, in a loader that is not torch's."""

    def __iter__(self) -> Any:
        return iter(torch.arange(6).split(2))

    def __len__(self) -> int:
        return 3


def read_ready(folder: str) -> list[Any]:
    task = Reads(False)
    trainer(folder).fit(task, Ready())
    evaluated = Evaluates()
    trainer(folder).validate(evaluated, Ready(), verbose=False)
    return [task.read, evaluated.read]


def test_each_process_reads_all_of_an_iterable_that_is_no_loader_of_torch(tmp_path: Any) -> None:
    found = run_in_processes(read_ready, 2, args=(str(tmp_path),))
    assert found == [[2 * [[0, 1], [2, 3], [4, 5]], list(range(6))]] * 2


class Samples(Draws):
    """Its forward pass draws random numbers, also the one that measures an example input for the model summary."""

    def __init__(self) -> None:
        super().__init__(shuffle=False)
        self.example_input_array = torch.zeros(1)

    def forward(self, inputs: Any) -> Any:
        return inputs + torch.rand(1)


def drawn_after_summary(folder: str) -> list[float]:
    seed_everything(SEED, verbose=False)
    task = Samples()
    trainer(folder).fit(task)
    return [step[-1] for step in task.read]


def test_the_forward_pass_of_the_summary_draws_alike_on_all_processes(tmp_path: Any) -> None:
    first, second = run_in_processes(drawn_after_summary, 2, args=(str(tmp_path),))
    assert first == second
