"""gather_for_metrics drops exactly the rows that only pad a batch."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from drivetrain import Accelerator, DataError, DataLoaderConfiguration
from tests.pool import run_in_processes

BATCH = 4


class Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


class Growing:
    """Batches of 1, 2, 3, … samples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[list[int]]:
        start, size = 0, 1
        while start < self.samples:
            yield list(range(start, min(start + size, self.samples)))
            start, size = start + size, size % 4 + 1


LOADERS = {
    "map": lambda n: DataLoader(range(n), batch_size=BATCH),
    "stream": lambda n: DataLoader(Stream(n), batch_size=BATCH),
    "batch sampler": lambda n: DataLoader(range(n), batch_sampler=BatchSampler(range(n), BATCH, False)),
    "growing batches": lambda n: DataLoader(range(n), batch_sampler=Growing(n)),
    "list": lambda n: [torch.arange(i, min(i + BATCH, n)) for i in range(0, n, BATCH)],
}
CONFIGURATIONS = {
    "default": {},
    "dispatched": {"dispatch_batches": True},
    "not dispatched": {"dispatch_batches": False},
    "split": {"split_batches": True},
}
CASES = [
    ("map", "default"),
    ("map", "dispatched"),
    ("map", "split"),
    ("stream", "default"),
    ("stream", "not dispatched"),
    ("batch sampler", "default"),
    ("growing batches", "default"),
    ("list", "default"),
]


def gathered(cases: list[tuple[str, str]], sizes: list[int]) -> dict[Any, Any]:
    """What is gathered for each kind of loader and size, as tensors and as objects."""
    results = {}
    for kind, configuration in cases:
        options = dict(CONFIGURATIONS[configuration])
        if configuration == "split" and BATCH % Accelerator(cpu=True).num_processes:
            continue
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
        for size in sizes:
            loader = accelerator.prepare_data_loader(LOADERS[kind](size))
            tensors, objects = [], []
            for batch in loader:
                tensors += accelerator.gather_for_metrics(batch).tolist()
                objects += accelerator.gather_for_metrics([f"sample {i}" for i in batch.tolist()])
            results[kind, configuration, size] = (tensors, objects)
    return results


@pytest.mark.parametrize("processes", [2, 3])
def test_every_remainder_of_every_kind_of_loader(processes):
    sizes = [*range(1, 2 * BATCH * processes + 2)] if processes == 2 else [1, 5, 8, 11, 12, 13, 23, 24, 25]
    for results in run_in_processes(gathered, processes, args=(CASES, sizes), timeout=120):
        assert len(results) >= (len(CASES) - 1) * len(sizes)
        for (kind, configuration, size), (tensors, objects) in results.items():
            assert tensors == list(range(size)), (kind, configuration, size)
            assert objects == [f"sample {i}" for i in range(size)], (kind, configuration, size)


Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Outputs:
    logits: torch.Tensor
    names: list[str]
    made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.made += 1


def structures() -> dict[str, Any]:
    """Six samples on two processes in batches of 4: the last two rows of rank 1 are padding."""
    accelerator = Accelerator(cpu=True)
    [batch] = loader = accelerator.prepare(DataLoader(range(6), batch_size=4))
    for batch in loader:
        rows, rank = batch, accelerator.process_index
        names = [str(i) for i in batch.tolist()]
        gather = accelerator.gather_for_metrics
        return {
            "dict": gather({"x": rows, "deeper": {"twice": rows * 2}}),
            "tuple": gather((rows, rows + 1)),
            "named tuple": gather(Pair(rows, rows)),
            "list of tensors": gather([rows, rows]),
            "not per-sample": gather(torch.full((3,), rank)),
            "matrix": gather(rows[:, None].expand(-1, 2)),
            "without dimensions": gather(torch.tensor(rank)),
            "mixed": gather((rows, torch.tensor(rank), torch.zeros(5, 4))),
            "strings": gather(names),
            "tuple of strings": gather(tuple(names)),
            "tensors and strings": gather((rows, names)),
            "dict with strings": gather({"x": rows, "names": names, "rank": rank}),
            "dataclass": gather(Outputs(rows, names)),
            "one dict a sample": gather([{"name": name, "box": torch.ones(1 + int(name) % 3)} for name in names]),
            "tensors of different sizes": gather([torch.ones(1 + int(n) % 3) for n in names], use_gather_object=True),
            "tensor as objects": gather(rows, use_gather_object=True),
            "of a named loader": gather(rows, loader=loader),
            "floats keep their dtype": gather(rows.half()).dtype,
            "booleans": gather(rows > 2),
        }
    return {}


def test_any_structure():
    for found in run_in_processes(structures, 2):
        six = list(range(6))
        assert found["dict"]["x"].tolist() == six
        assert found["dict"]["deeper"]["twice"].tolist() == [0, 2, 4, 6, 8, 10]
        assert [each.tolist() for each in found["tuple"]] == [six, [i + 1 for i in six]]
        assert isinstance(found["named tuple"], Pair)
        assert found["named tuple"].second.tolist() == six
        assert [each.tolist() for each in found["list of tensors"]] == [six, six]
        assert found["not per-sample"].tolist() == [0, 0, 0, 1, 1, 1]
        assert found["matrix"].tolist() == [[i, i] for i in six]
        assert found["without dimensions"].tolist() == [0, 1]
        assert [list(each.shape) for each in found["mixed"]] == [[6], [2], [10, 4]]
        names = [str(i) for i in six]
        assert found["strings"] == found["tuple of strings"] == names
        assert found["tensors and strings"][0].tolist() == six
        assert found["tensors and strings"][1] == names
        assert found["dict with strings"]["x"].tolist() == six
        assert found["dict with strings"]["names"] == names
        assert found["dict with strings"]["rank"] == [0, 1]
        assert found["dataclass"].logits.tolist() == six
        assert found["dataclass"].names == names
        assert found["dataclass"].made == [1, 1]  # it is not made again
        assert [each["name"] for each in found["one dict a sample"]] == names
        assert [len(each) for each in found["tensors of different sizes"]] == [1, 2, 3, 1, 2, 3]
        assert [int(each) for each in found["tensor as objects"]] == six
        assert found["of a named loader"].tolist() == six
        assert found["floats keep their dtype"] == torch.float16
        assert found["booleans"].tolist() == [i > 2 for i in six]


def loops() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    results: dict[str, Any] = {}
    prepare = accelerator.prepare

    first, second = prepare(DataLoader(range(10), batch_size=4), DataLoader(range(100, 110), batch_size=4))
    results["zip of the same"] = []
    for a, b in zip(first, second, strict=True):
        a, b = accelerator.gather_for_metrics((a, b))
        results["zip of the same"] += [a.tolist(), b.tolist()]

    longer, shorter = prepare(DataLoader(range(12), batch_size=4), DataLoader(range(10), batch_size=4))
    results["zip of different"] = []
    for a, b in zip(longer, shorter, strict=True):
        try:
            accelerator.gather_for_metrics(a)
        except DataError as error:
            results["refused"] = str(error)
        results["zip of different"].append(
            (
                accelerator.gather_for_metrics(a, loader=longer).tolist(),
                accelerator.gather_for_metrics(b, loader=shorter).tolist(),
            )
        )

    outer, inner = prepare(DataLoader(range(6), batch_size=4), DataLoader(range(100, 105), batch_size=3))
    results["nested"] = []
    for batch in outer:
        for part in inner:
            results["nested"] += accelerator.gather_for_metrics(part).tolist()
        results["nested"] += accelerator.gather_for_metrics(batch).tolist()

    loader = prepare(DataLoader(range(14), batch_size=4))
    results["left early"] = []
    for batch in loader:
        results["left early"].append(accelerator.gather_for_metrics(batch).tolist())
        break
    results["after it"] = accelerator.gather_for_metrics(batch).tolist()
    results["again"] = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]

    resumed = accelerator.skip_first_batches(loader, 1)
    results["skipped"] = [accelerator.gather_for_metrics(batch, loader=resumed).tolist() for batch in resumed]

    collected = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
    results["outside of loops"] = len(accelerator.gather_for_metrics(collected))
    return results


def test_several_loaders_and_loops_that_are_left():
    for found in run_in_processes(loops, 2):
        assert found["zip of the same"] == [[*range(8)], [*range(100, 108)], [8, 9], [108, 109]]
        assert found["zip of different"] == [([*range(8)], [*range(8)]), ([*range(8, 12)], [8, 9])]
        assert found["nested"] == [*range(100, 105), *range(6)]
        assert found["left early"] == [[*range(8)]]
        assert found["after it"] == [*range(8)]
        assert found["again"] == [[*range(8)], [*range(8, 14)]]
        assert found["skipped"] == [[*range(8, 14)]]
        assert found["outside of loops"] == 28


def test_two_loaders_in_turn_whose_padding_differs_must_be_named():
    for each in run_in_processes(loops, 2):  # also where a process could tell by itself: all raise, so none waits
        assert "loader=" in each["refused"]


def uneven() -> list[Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare(DataLoader(range(15), batch_size=4))
    tensors, sums = [], []
    for batch in loader:  # 4 + 4, then 4 + 3
        tensors += accelerator.gather_for_metrics(batch).tolist()
        sums += accelerator.gather_for_metrics(batch.sum()).tolist()
    return [tensors, sums]


def test_short_batches_without_padding_are_gathered_whole():
    for tensors, sums in run_in_processes(uneven, 2):
        assert tensors == list(range(15))
        assert sums == [6, 22, 38, 39]


def test_in_one_process_nothing_is_changed():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(6), batch_size=4))
    for batch in loader:
        assert accelerator.gather_for_metrics(batch) is batch


def repeated_losses(even_batches: bool, within_training: bool) -> list[Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even_batches))
    loader, training = accelerator.prepare(DataLoader(range(13), batch_size=4), DataLoader(range(32), batch_size=4))
    outer = iter(training)
    if within_training:
        next(outer)
    losses, objects = [], []
    for batch in loader:
        value = batch.float().mean()
        losses += accelerator.gather_for_metrics(value.repeat(4)).tolist()
        objects.append(accelerator.gather_for_metrics({"loss": value.repeat(4), "name": "loss"})["name"])
    return [losses, objects]


@pytest.mark.parametrize("within_training", [False, True])
@pytest.mark.parametrize(("processes", "even_batches"), [(1, True), (2, True), (2, False)])
def test_a_loss_repeated_by_the_batch_size_counts_for_the_real_rows(processes, even_batches, within_training):
    for losses, objects in run_in_processes(repeated_losses, processes, args=(even_batches, within_training)):
        assert len(losses) == 13
        assert losses[:12] == [value for value in (1.5, 5.5, 9.5) for _ in range(4)]
        assert objects[-1] == ("loss" if processes == 1 else ["loss"] * processes)
