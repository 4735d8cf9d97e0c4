"""Accelerate's objects that a script makes, reads and assigns itself."""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import logging
import os
import pickle
import sys
import unittest
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from drivetrain.compat.accelerate import Accelerator, data_loader
from drivetrain.compat.accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from drivetrain.compat.accelerate.logging import get_logger
from drivetrain.compat.accelerate.parallelism_config import ParallelismConfig, TorchContextParallelConfig
from drivetrain.compat.accelerate.state import PartialState, is_initialized
from drivetrain.compat.accelerate.test_utils.testing import (
    AccelerateTestCase,
    MockingTestCase,
    SubprocessCallException,
    TempDirTestCase,
    run_command,
)
from drivetrain.compat.accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class
from drivetrain.compat.accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
)
from drivetrain.compat.accelerate.utils.environment import convert_dict_to_env_variables, purge_accelerate_environment
from drivetrain.compat.accelerate.utils.imports import package_available
from drivetrain.compat.accelerate.utils.operations import (
    CannotPadNestedTensorWarning,
    concatenate,
    convert_outputs_to_fp32,
    pad_across_processes,
    recursively_apply,
)
from drivetrain.compat.accelerate.utils.other import (
    clean_state_dict_for_safetensors,
    extract_model_from_parallel,
    without_wrappers,
)
from drivetrain.runtime.errors import ConfigurationError, DataError
from drivetrain.trackers import CSVLogger


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
    assert plugin.to_kwargs() == {"backend": "aot_eager", "mode": "max-autotune", "fullgraph": True}
    assert torch.compile(torch.nn.Linear(1, 1), **TorchDynamoPlugin().to_kwargs()) is not None


@pytest.mark.parametrize("kind", [Accelerator, PartialState])
def test_the_device_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "nosuchdevice:1")
    with pytest.raises(ConfigurationError, match="nosuchdevice"):
        kind()
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    assert kind().device == torch.device("cpu")


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


@pytest.mark.parametrize(
    ("sizes", "names", "shape"),
    [
        ({"dp_replicate_size": 4}, ("dp_replicate",), (4,)),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, ("dp_replicate", "dp_shard"), (2, 2)),
        ({"cp_size": 2, "tp_size": 2}, ("cp", "tp"), (2, 2)),
    ],
)
def test_a_mesh_has_a_dimension_for_each_size_above_one(
    sizes: dict[str, int], names: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        mesh = ParallelismConfig(**sizes).build_device_mesh("cpu")
        assert (mesh.mesh_dim_names, mesh.shape) == (names, shape)
    finally:
        dist.destroy_process_group()


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


# What an Accelerator has prepared, and its parts made by hand.


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


@pytest.mark.parametrize(
    ("data", "dispatch", "kind"),
    [
        ([1, 2], None, DataLoaderShard),
        ([1, 2], True, DataLoaderDispatcher),
        (Numbers(), None, DataLoaderDispatcher),
        (Numbers(), False, DataLoaderShard),
    ],
)
def test_the_class_of_a_prepared_loader_tells_who_reads_the_data(data: Any, dispatch: bool | None, kind: type) -> None:
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    loaders = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(data), DataLoader(data))
    by_hand = prepare_data_loader(DataLoader(data), dispatch_batches=dispatch)
    assert [type(each) for each in (*loaders, by_hand)] == [kind] * 3
    assert isinstance(by_hand, DataLoaderStateMixin)


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher, SkipDataLoader])
def test_the_users_loader_is_the_base_of_one_made_by_hand(kind: Any) -> None:
    assert type(kind(list(range(4)), batch_size=2).base_dataloader) is DataLoader


def shards(batches: Any, count: int, **options: Any) -> list[list[Any]]:
    return [list(BatchSamplerShard(batches, count, index, **options)) for index in range(count)]


@pytest.mark.parametrize(
    ("batches", "count", "expected"),
    [
        ([[0], [1, 2], [3, 4]], 2, [[[0], [3, 4]], [[1, 2], [0]]]),
        ([[0, 1]], 3, [[[0, 1]], [[0, 1]], [[0, 1]]]),
        ([], 2, [[], []]),
    ],
)
def test_batches_of_different_sizes_are_completed_with_whole_ones(batches: Any, count: int, expected: Any) -> None:
    assert shards(batches, count) == expected


@pytest.mark.parametrize(
    ("size", "even", "drop", "expected"),
    [
        (6, True, False, [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]),
        (7, True, False, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        (5, True, False, [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]),
        (7, False, False, [[[0, 1], [4, 5]], [[2, 3], [6]]]),
        (5, False, False, [[[0, 1], [4]], [[2, 3]]]),
        (7, True, True, [[[0, 1]], [[2, 3]]]),
    ],
)
def test_batches_of_one_size_are_completed_with_samples(size: int, even: bool, drop: bool, expected: Any) -> None:
    batches = BatchSampler(range(size), 2, drop)
    assert shards(batches, 2, even_batches=even) == expected
    lengths = [len(BatchSamplerShard(batches, 2, index, even_batches=even)) for index in range(2)]
    assert lengths == [len(each) for each in expected]


@pytest.mark.parametrize(
    ("even", "expected"), [(True, [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]), (False, [[[0, 1], [4, 5]], [[2, 3]]])]
)
def test_each_batch_is_split(even: bool, expected: Any) -> None:
    assert shards(BatchSampler(range(6), 4, False), 2, split_batches=True, even_batches=even) == expected


@pytest.mark.parametrize("batches", [[[0, 1], [2, 3]], BatchSampler(range(9), 3, False)])
def test_batches_that_cannot_be_split_are_refused(batches: Any) -> None:
    with pytest.raises(ConfigurationError, match="round multiple"):
        BatchSamplerShard(batches, 2, 0, split_batches=True)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("compile_first", [True, False])
@pytest.mark.parametrize("of", ["accelerator", "no accelerator"])
def test_wrappers_of_the_scripts_own_are_removed(keep: bool, compile_first: bool, of: str) -> None:
    model = torch.nn.Linear(2, 2)
    wraps: list[Any] = [torch.compile, torch.nn.DataParallel]
    wrapped: Any = model
    for wrap in wraps if compile_first else reversed(wraps):
        wrapped = wrap(wrapped)
    if of == "accelerator":
        found = Accelerator(cpu=True).unwrap_model(wrapped, keep_torch_compile=keep)
    else:
        found = without_wrappers(wrapped, keep_fp32_wrapper=True, keep_torch_compile=keep)
    assert (getattr(found, "_orig_mod", None) if keep else found) is model


# Helpers of tests and of saving.


def test_variables_are_afterwards_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_KEPT", "1")
    monkeypatch.delenv("ACCELERATE_NEW", raising=False)

    @purge_accelerate_environment
    class Base:
        def test_first(self) -> None: ...

    class Derived(Base):
        def test_second(self) -> None:
            os.environ.update(ACCELERATE_KEPT="2", ACCELERATE_NEW="3")

    Derived().test_second()
    assert os.environ["ACCELERATE_KEPT"] == "1"
    assert "ACCELERATE_NEW" not in os.environ


def test_a_class_keeps_what_it_does_when_it_is_inherited_from() -> None:
    made: list[tuple[str, bool]] = []

    @purge_accelerate_environment
    class Base:
        def __init_subclass__(cls, *, slow: bool = False) -> None:
            made.append((cls.__name__, slow))

    class Derived(Base, slow=True): ...

    assert made == [(Derived.__name__, True)]


def test_variables_that_would_break_a_line_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert convert_dict_to_env_variables({"GOOD": "1", "BAD": "<1"}) == ["GOOD=1\n"]
    assert "BAD" in caplog.text


def test_tensors_that_share_memory_are_saved_once_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    shared = torch.ones(2)
    assert list(clean_state_dict_for_safetensors({"a": shared, "b": shared})) == ["a"]
    assert "Removed shared tensor" in caplog.text
    assert "'b'" in caplog.text


# Classes of trackers.


@pytest.fixture
def names() -> Iterator[None]:
    """The names of trackers, which are put back."""
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


class Named(Kept):
    name = "named"

    def __init__(self, run_name: str, **options: Any) -> None:
        super().__init__(run_name)
        self.options = options


@pytest.mark.usefixtures("names")
def test_a_registered_class_is_found_by_its_name_and_gets_its_options() -> None:
    register_tracker_class(Named)
    accelerator = Accelerator(cpu=True, log_with="named")
    accelerator.init_trackers("project", init_kwargs={"named": {"tags": ["one"]}})
    tracker = accelerator.trackers[0]
    assert isinstance(tracker, Named)
    assert (tracker.log_dir, tracker.options) == ("project", {"tags": ["one"]})
    accelerator.end_training()


@pytest.mark.usefixtures("names")
def test_a_class_takes_the_place_of_one_with_its_name_with_a_warning() -> None:
    register_tracker_class(Named)
    other = type("Other", (Named,), {})
    with pytest.warns(UserWarning, match="named"):
        register_tracker_class(other)
    assert LOGGER_TYPE_TO_CLASS["named"] is other


@pytest.mark.parametrize(
    "kind",
    [
        dict,
        type("Nameless", (GeneralTracker,), {"requires_logging_directory": False}),
        type("Flagless", (GeneralTracker,), {"name": "x"}),
    ],
)
def test_what_is_no_class_of_a_tracker_is_not_registered(kind: Any) -> None:
    with pytest.raises(ConfigurationError):
        register_tracker_class(kind)
    assert "x" not in LOGGER_TYPE_TO_CLASS


def test_trackers_of_drivetrain_are_among_the_classes() -> None:
    assert LOGGER_TYPE_TO_CLASS["csv"] is CSVLogger
    assert len(LOGGER_TYPE_TO_CLASS) == len(list(LOGGER_TYPE_TO_CLASS))
    with pytest.raises(KeyError):
        LOGGER_TYPE_TO_CLASS["none_of_them"]


# Operations on nested structures.


def test_one_item_is_concatenated_whatever_it_holds() -> None:
    batch = {"x": torch.ones(2, 1), "name": "a"}
    found = concatenate([batch])
    assert found["name"] == "a"
    assert torch.equal(found["x"], batch["x"])
    assert torch.equal(concatenate([torch.ones(1), torch.zeros(2)]), torch.tensor([1.0, 0.0, 0.0]))


@pytest.mark.parametrize("kind", [DataError, TypeError])
def test_values_that_are_no_tensors_are_a_type_error(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="str"):
        concatenate(["a", "b"])
    with pytest.raises(kind, match="str"):
        recursively_apply(torch.neg, ["a"], error_on_other_type=True)
    assert recursively_apply(torch.neg, [torch.ones(1), "a"]) == [-torch.ones(1), "a"]


def test_a_nested_tensor_is_not_padded_and_the_script_is_warned() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    dense = torch.ones(2, 3)
    with pytest.warns(CannotPadNestedTensorWarning):
        found = pad_across_processes([nested, dense])
    assert found[0] is nested
    assert found[1] is dense


# Models, loggers, trackers.


class Squares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x * x


@pytest.mark.parametrize("of", ["accelerator", "no accelerator"])
def test_a_forward_method_that_the_script_converted_is_restored(of: str) -> None:
    model: Any = Squares()
    model._original_forward = model.forward
    model.forward = convert_outputs_to_fp32(model.forward)
    accelerator = Accelerator(cpu=True) if of == "accelerator" else None
    assert extract_model_from_parallel(model) is model
    assert "forward" in vars(model)
    assert extract_model_from_parallel(model, keep_fp32_wrapper=False) is model
    assert accelerator is None or accelerator.unwrap_model(model) is model
    found = pickle.loads(pickle.dumps(model))
    assert torch.equal(found(torch.tensor([3.0])), torch.tensor([9.0]))


def test_an_accelerator_that_the_script_drops_is_freed_with_its_models() -> None:
    accelerator = Accelerator(cpu=True)
    held = weakref.ref(accelerator.prepare(torch.nn.Linear(1, 1)))
    assert is_initialized()
    del accelerator
    gc.collect()
    assert held() is None
    assert is_initialized()


class Above(logging.LoggerAdapter):  # type: ignore[type-arg]
    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        self.logger.log(level, msg, *args, **{**kwargs, "stacklevel": 3})


def test_loggers_report_the_line_of_their_caller(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("program")
    above: Any = Above(logger, {})  # type: ignore[arg-type]
    logger.warning("plain")
    logger.log(logging.WARNING, "level")
    logger.warning_once("once")
    above.warning("wrapped")
    found = [(each.getMessage(), each.funcName) for each in caplog.records]
    name = test_loggers_report_the_line_of_their_caller.__name__
    assert found == [(text, name) for text in ("plain", "level", "once", "wrapped")]


def test_tensorboards_files_are_directly_in_the_folder_of_the_project(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("project", {"lr": 1}, init_kwargs={"tensorboard": {"flush_secs": 1}})
    accelerator.log({"loss": 2.0}, step=3)
    accelerator.end_training()
    assert [each for each in (tmp_path / "project").iterdir() if each.name.startswith("events.")]


@pytest.fixture
def stateful_loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """torchdata's class, or another with its name if torchdata is not installed."""
    if importlib.util.find_spec("torchdata") is None:
        package, module = ModuleType("torchdata"), ModuleType("torchdata.stateful_dataloader")
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, None)
        monkeypatch.setitem(sys.modules, "torchdata", package)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(module, "StatefulDataLoader", type("StatefulDataLoader", (DataLoader,), {}), raising=False)
    for cached in (package_available, data_loader._stateful_kinds):
        cached.cache_clear()
    yield importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    for cached in (package_available, data_loader._stateful_kinds):
        cached.cache_clear()


@pytest.mark.parametrize("stateful", [True, False])
def test_stateful_loaders_are_instances_of_torchdatas_class(stateful_loader: type, stateful: bool) -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    prepared = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    options: Any = {"batch_size": 2, "use_stateful_dataloader": stateful}
    own = [DataLoaderShard(range(8), **options), DataLoaderDispatcher(range(8), **options)]
    skipping = [SkipDataLoader(range(8), skip_batches=0, **options), skip_first_batches(prepared, 0)]
    for loader in [prepared, *own, *skipping]:
        assert isinstance(loader, stateful_loader) is stateful
        batches = iter(loader)
        seen = [next(batches).tolist()]
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert seen + [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_all_objects_without_a_state_are_named() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match=r"index 0 \(int\), Item at index 2 \(str\) cannot"):
        accelerator.register_for_checkpointing(3, torch.nn.Linear(1, 1), "text")
    accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
    assert len(accelerator._custom_objects) == 1


@pytest.mark.parametrize("dispatch", [True, False])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copied_loader_has_the_class_and_the_position_of_its_original(dispatch: bool, copied: Any) -> None:
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    next(iter(loader))
    found = copied(loader)
    assert type(found) is type(loader)
    assert found.device == loader.device
    assert [batch.tolist() for batch in found] == [[2, 3], [4, 5], [6, 7]]


def test_a_pickled_accelerator_has_its_loaders() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]
    accelerator.prepare(loader, skip_first_batches(accelerator.prepare(loader), 1))
    found = pickle.loads(pickle.dumps(accelerator))
    assert found.gradient_accumulation_steps == 2
    assert [list(map(len, each)) for each in found._dataloaders] == [
        list(map(len, each)) for each in accelerator._dataloaders
    ]
    assert len(found._dataloaders) == len(accelerator._dataloaders) > 1


class Run:
    """A run that also trains parameters of no model, with an optimizer of their own and with the model's."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.accelerator = Accelerator(cpu=True)
        self.beside, self.free = torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2))
        layer = torch.nn.Linear(2, 1)
        first, second = torch.optim.AdamW([*layer.parameters(), self.beside]), torch.optim.AdamW([self.free])
        self.layer, *self.optimizers = self.accelerator.prepare(layer, first, second)
        self.seen: list[list[str]] = []
        self.accelerator.register_save_state_pre_hook(lambda models, weights, folder: self.hook(models))
        self.accelerator.register_load_state_pre_hook(lambda models, folder: self.hook(models))

    def hook(self, models: list[torch.nn.Module]) -> None:
        self.seen.append([type(each).__name__ for each in models])

    def step(self) -> list[torch.Tensor]:
        loss = self.layer(torch.ones(1, 2)).sum() + self.beside.square().sum() + self.free.square().sum()
        self.accelerator.backward(loss)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach().clone() for each in (self.layer.weight, self.beside, self.free)]


def test_parameters_of_no_model_are_saved_with_their_optimizers_state(tmp_path: Path) -> None:
    run, resumed = Run(0), Run(1)
    run.step()
    run.accelerator.save_state(tmp_path / "state")
    resumed.accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(one, other) for one, other in zip(run.step(), resumed.step(), strict=True))
    assert run.seen == resumed.seen == [["Linear"]]
    assert len(run.accelerator._models) == 1
