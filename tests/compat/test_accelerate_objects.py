"""Accelerate's objects that a script makes, reads and assigns itself."""

from __future__ import annotations

import os
import unittest
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.compat.accelerate import Accelerator
from drivetrain.compat.accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from drivetrain.compat.accelerate.parallelism_config import ParallelismConfig, TorchContextParallelConfig
from drivetrain.compat.accelerate.test_utils.testing import (
    AccelerateTestCase,
    MockingTestCase,
    SubprocessCallException,
    TempDirTestCase,
    run_command,
)
from drivetrain.compat.accelerate.tracking import GeneralTracker
from drivetrain.compat.accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from drivetrain.runtime.errors import ConfigurationError


class Kept(GeneralTracker):
    name = "kept"
    requires_logging_directory = False

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.log_dir = folder
        self.rows: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.rows

    def store_init_configuration(self, values: Any) -> None:
        self.rows.append(values)

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.rows.append((step, values))


def test_a_tracker_may_set_its_folder_itself() -> None:
    tracker = Kept("runs")
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project", {"lr": 1})
    accelerator.log({"loss": 2.0}, step=3)
    assert tracker.rows == [{"lr": 1}, (3, {"loss": 2.0})]
    assert tracker.log_dir == "runs"


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_a_loader_made_by_hand_gives_all_batches_and_knows_the_last_one(kind: Any) -> None:
    loader = kind(list(range(16)), batch_size=4)
    assert isinstance(loader, DataLoader)
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False, False, False, True]


def test_a_loader_made_by_hand_moves_batches_to_its_device() -> None:
    loader = DataLoaderShard(list(range(4)), device=torch.device("meta"), batch_size=2)
    assert [batch.device.type for batch in loader] == ["meta", "meta"]
    assert loader.device == torch.device("meta")


def test_a_skipping_loader_made_by_hand_leaves_out_its_first_batches() -> None:
    loader = SkipDataLoader(list(range(16)), batch_size=4, skip_batches=2)
    assert [batch.tolist() for batch in loader] == [[8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize("name", ["_dataloaders", "_optimizers", "_schedulers", "_models"])
def test_the_lists_of_prepared_objects_may_be_assigned(name: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    accelerator.prepare(model, optimizer, scheduler, DataLoader(TensorDataset(torch.ones(4, 2))))
    assert len(getattr(accelerator, name)) == 1
    setattr(accelerator, name, [])
    assert len(getattr(accelerator, name)) == 0


def test_options_of_compiling_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    plugin = TorchDynamoPlugin(mode="max-autotune")
    assert plugin.to_dict()["backend"] == "aot_eager"
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic) == ("max-autotune", True, None)


def test_options_of_fsdp_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Block, Head")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    plugin = FullyShardedDataParallelPlugin(cpu_offload=False)
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.cpu_offload) == (2, False, False)
    assert plugin.transformer_cls_names_to_wrap == ["Block", "Head"]


def test_sizes_of_the_mesh_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    config = ParallelismConfig(dp_shard_size=2, cp_size=2)
    assert (config.dp_shard_size, config.tp_size, config.total_size) == (2, 2, 8)
    assert config.cp_handler.cp_comm_strategy == "alltoall"
    assert config.active_mesh_dims == ["dp_shard", "tp", "cp"]
    with pytest.raises(ConfigurationError, match="Invalid cp_comm_strategy: star"):
        TorchContextParallelConfig("star")


def test_no_mesh_is_made_where_every_size_is_one() -> None:
    assert ParallelismConfig().build_device_mesh("cpu") is None


def test_cases_to_inherit_from_share_an_empty_folder_and_undo_their_mocks() -> None:
    seen: list[Any] = []

    class Case(AccelerateTestCase, MockingTestCase, TempDirTestCase):
        def setUp(self) -> None:
            super().setUp()
            self.add_mocks(mock.patch.dict(os.environ, {"OF_THE_CASE": "1"}))

        def test_one(self) -> None:
            seen.append((os.environ["OF_THE_CASE"], self.tmpdir, list(self.tmpdir.iterdir())))
            (self.tmpdir / "file").touch()

        test_two = test_one

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
    assert (result.errors, result.failures) == ([], [])
    folder = seen[0][1]
    assert seen == [("1", folder, [])] * 2
    assert "OF_THE_CASE" not in os.environ
    assert not folder.exists()


def test_a_command_that_fails_raises_with_its_output() -> None:
    assert run_command(["echo", "hello"], return_stdout=True) == "hello\n"
    with pytest.raises(SubprocessCallException, match="no-such-file"):
        run_command(["ls", "no-such-file"])
