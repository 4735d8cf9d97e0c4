from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain import ConfigurationError, DataError, PartialState
from drivetrain.callbacks.evaluation_gather import Part, Samples, gather_samples, real_rows, write_samples, writer_for
from tests.pool import run_in_processes


def parts_of_rank(batches: list[list[list[int]]], rank: int, shard: int | None = None) -> list[Part]:
    """Rows of ``batches[loader][number]``; batch i goes to rank i modulo the world size."""
    world = PartialState().num_processes
    return [
        Part(
            loader, number // world, rank if shard is None else shard, (torch.tensor(rows), [f"t{row}" for row in rows])
        )
        for loader, of_loader in enumerate(batches)
        for number, rows in enumerate(of_loader)
        if number % world == rank
    ]


def collect(parts: list[Part]) -> list[Samples]:
    return gather_samples([parts[start : start + 64] for start in range(0, len(parts), 64)])


def collected(batches: list[list[list[int]]]) -> list[tuple[list[int], list[str]]]:
    state = PartialState()
    loaders = collect(parts_of_rank(batches, state.process_index))
    return [(samples.predictions.tolist(), samples.targets) for samples in loaders]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_samples_come_back_once_and_in_the_order_of_the_data(world_size: int) -> None:
    batches = [[[0, 1, 2], [3, 4, 5], [6, 7]], [[10], [11], [12], [13], []]]
    main, *others = run_in_processes(collected, world_size, args=(batches,))
    assert main == [
        (list(range(8)), [f"t{row}" for row in range(8)]),
        ([10, 11, 12, 13], ["t10", "t11", "t12", "t13"]),
    ]
    assert others == [[]] * (world_size - 1)


def test_more_batches_than_one_exchange_takes_come_back_complete() -> None:
    batches = [[[number] for number in range(150)]]
    assert run_in_processes(collected, args=(batches,))[0][0][0] == list(range(150))


def gathered_where_both_share_a_shard() -> list[int]:
    loaders = collect([Part(0, step, 0, (torch.tensor([step]), None)) for step in range(3)])
    return loaders[0].predictions.tolist() if loaders else []


def test_processes_that_share_a_shard_count_once() -> None:
    assert run_in_processes(gathered_where_both_share_a_shard) == [[0, 1, 2], []]


def test_rows_of_differing_shapes_stay_a_list() -> None:
    parts = [Part(0, step, 0, (torch.ones(2, step + 1), None)) for step in range(2)]
    (samples,) = collect(parts)
    assert [tuple(row.shape) for row in samples.predictions] == [(1,), (1,), (2,), (2,)]
    assert samples.targets is None


def test_only_real_rows_are_kept_without_the_batch_they_came_from() -> None:
    batch = torch.randn(8, 3, requires_grad=True)
    kept = real_rows(batch, rows=8, keep=5, what="predictions")
    assert torch.equal(kept, batch[:5])
    assert not kept.requires_grad
    assert kept.untyped_storage().nbytes() == 5 * 3 * 4
    assert real_rows(["a", "b"], 2, 1, "targets") == ["a"]
    assert real_rows(np.arange(3), 3, 2, "targets").tolist() == [0, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor(1.0), "without a dimension for the samples"),
        (torch.ones(3), "predictions with 3 rows for a batch of 4"),
        ({"a": 1}, "of type dict"),
    ],
)
def test_values_without_one_row_for_each_sample_are_refused(values: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        real_rows(values, rows=4, keep=4, what="predictions")


SAMPLES = Samples(torch.tensor([[0.5, 0.25], [1.0, 0.0]]), torch.tensor([1, 0]))


def test_pt_files_hold_the_tensors(tmp_path: Path) -> None:
    write_samples(SAMPLES, tmp_path / "new" / "out.pt")
    read = torch.load(tmp_path / "new" / "out.pt", weights_only=True)
    assert torch.equal(read["predictions"], SAMPLES.predictions)
    assert torch.equal(read["targets"], SAMPLES.targets)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.pt"]


def test_npz_files_hold_the_arrays(tmp_path: Path) -> None:
    write_samples(SAMPLES, tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as read:
        assert read["predictions"].tolist() == [[0.5, 0.25], [1.0, 0.0]]
        assert read["targets"].tolist() == [1, 0]


def test_csv_files_have_a_column_for_each_number(tmp_path: Path) -> None:
    write_samples(SAMPLES, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["index", "prediction_0", "prediction_1", "target"],
            ["0", "0.5", "0.25", "1"],
            ["1", "1.0", "0.0", "0"],
        ]


def test_jsonl_files_have_a_line_for_each_sample(tmp_path: Path) -> None:
    write_samples(Samples([{"label": "ä"}, {"label": "b"}], None), tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"index": 0, "prediction": {"label": "ä"}},
        {"index": 1, "prediction": {"label": "b"}},
    ]


@pytest.mark.parametrize("path", ["out.parquet", "out"])
def test_an_unknown_extension_is_refused_and_the_known_ones_named(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"\.pt, \.npz, \.csv, \.jsonl"):
        writer_for(path)
