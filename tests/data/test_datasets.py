"""Datasets of the package `datasets`: the batches are torch's own, and what is divided already stays so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator, PartialState
from drivetrain.data import DataLoaderConfiguration, DataShard, prepare_loader
from tests.pool import device, run_in_processes

pytestmark = pytest.mark.compat
datasets = pytest.importorskip("datasets", reason="datasets is missing: pip install datasets")

ROWS = 11


def made(**columns: list[Any]) -> Any:
    numbers = {"x": [[n, n + 1] for n in range(ROWS)], "y": list(range(ROWS))}
    return datasets.Dataset.from_dict({**numbers, **columns}).with_format("torch")


def assert_read_as_by_torch(dataset: Any) -> None:
    def batches(prepared: bool, workers: int) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        loader: Any = DataLoader(dataset, 4, shuffle=True, generator=generator, num_workers=workers)
        return list(prepare_loader(loader, shard=DataShard()) if prepared else loader)

    for workers in (0, 1):
        for ours, theirs in zip(batches(True, workers), batches(False, 0), strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value


def test_a_transform_that_draws_is_seeded_for_each_sample() -> None:
    def noise(rows: Any) -> Any:
        return {"y": [torch.rand(2) for _ in rows["y"]]}

    def batches(size: int) -> list[Any]:
        loader = prepare_loader(DataLoader(made().with_transform(noise), size), shard=DataShard(), seed=1)
        return torch.cat([batch["y"] for batch in loader]).tolist()

    assert batches(4) == batches(3)


@pytest.mark.parametrize("columns", [{"text": ["a"] * ROWS}, {"floats": [n / 2 for n in range(ROWS)]}])
def test_other_columns_are_collated_as_torch_does(columns: dict[str, list[Any]]) -> None:
    assert_read_as_by_torch(made(**columns))


def test_a_transform_of_the_users_is_run_for_each_sample() -> None:
    dataset = made().with_transform(lambda rows: {"y": [2 * each for each in rows["y"]]})
    assert_read_as_by_torch(dataset)


def seen_of_parts(kind: str, dispatch: bool | None) -> list[int]:
    """What this process reads of a table or stream that `split_dataset_by_node` has divided."""
    from datasets.distributed import split_dataset_by_node

    state = PartialState(device=device())
    table = datasets.Dataset.from_dict({"x": list(range(16))})
    whole = table.to_iterable_dataset(num_shards=4) if kind == "stream" else table
    part = split_dataset_by_node(whole, state.process_index, state.num_processes).with_format("torch")
    accelerator = Accelerator(device=device(), dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    return [n for batch in accelerator.prepare(DataLoader(part, 2)) for n in batch["x"].tolist()]


@pytest.mark.parametrize("dispatch", [None, False])
@pytest.mark.parametrize("kind", ["stream", "table"])
def test_what_is_divided_already_is_not_shared_out_again(kind: str, dispatch: bool | None) -> None:
    first, second = run_in_processes(seen_of_parts, 2, (kind, dispatch))
    assert sorted(first + second) == list(range(16))
    assert len(first) == len(second) == 8
