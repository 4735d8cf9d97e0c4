"""Short batches filled up to one shape, their rows counted as padding."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from drivetrain.data import DataShard, prepare_loader


def test_a_short_batch_is_filled_up_with_its_own_rows_in_turn() -> None:
    data = torch.arange(7.0)[:, None]
    loader = prepare_loader(DataLoader(data, batch_size=5), shard=DataShard(), fill=True)
    seen = []
    for batch in loader:
        info = loader.current
        assert info is not None
        seen.append((batch[:, 0].tolist(), info.rows, info.padding, info.real_rows))
    assert seen == [([0, 1, 2, 3, 4], 5, 0, 5), ([5, 6, 5, 6, 5], 5, 3, 2)]


def test_batches_of_a_loader_without_a_size_are_filled_up_to_the_largest_so_far() -> None:
    batches = [{"x": torch.ones(rows, 2), "names": ["a"] * rows} for rows in (2, 4, 3)]
    loader = prepare_loader(batches, shard=DataShard(), fill=True)
    assert [(len(batch["x"]), len(batch["names"])) for batch in loader] == [(2, 2), (4, 4), (4, 4)]


def test_nothing_is_filled_up_unless_asked() -> None:
    loader = prepare_loader(DataLoader(torch.arange(7.0), batch_size=5), shard=DataShard())
    assert [len(batch) for batch in loader] == [5, 2]
    assert loader.consumed_batches == 0


def test_the_position_counts_real_samples() -> None:
    loader = prepare_loader(DataLoader(torch.arange(7.0), batch_size=5), shard=DataShard(), fill=True)
    for _ in loader:
        state = loader.state_dict()
    assert state["consumed"] == 7
