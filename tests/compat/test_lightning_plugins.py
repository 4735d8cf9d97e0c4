"""What scripts give as `plugins`, and the other objects of Lightning's that a loop is handed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import ConfigurationError, LaunchError, ProcessEnvironment
from drivetrain.compat.lightning import Fabric
from drivetrain.compat.lightning.fabric.accelerators import ACCELERATOR_REGISTRY, CPUAccelerator, CUDAAccelerator
from drivetrain.compat.lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from drivetrain.compat.lightning.fabric.plugins import (
    DeepSpeedPrecision,
    DoublePrecision,
    FSDPPrecision,
    MixedPrecision,
)
from drivetrain.compat.lightning.fabric.plugins.collectives import SingleDeviceCollective, TorchCollective
from drivetrain.compat.lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    mpi,
)
from drivetrain.compat.lightning.pytorch import Trainer
from drivetrain.compat.lightning.pytorch.demos.boring_classes import BoringModel
from drivetrain.compat.lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from tests.pool import run_in_processes

STATED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets variables, after those of any launcher are gone; all are as before in the end."""
    for name in STATED:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def put(values: Mapping[str, str]) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_NODELIST": "gpu[03-05],other",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
TORCHRUN = {
    "MASTER_ADDR": "a",
    "MASTER_PORT": "5",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
}
ENVIRONMENTS: list[tuple[type[ClusterEnvironment], dict[str, str], tuple[Any, ...]]] = [
    (SLURMEnvironment, SLURM, ("gpu03", 16234, 4, 3, 1, 1)),
    (TorchElasticEnvironment, TORCHRUN, ("a", 5, 4, 3, 1, 1)),
    (KubeflowEnvironment, {**TORCHRUN, "WORLD_SIZE": "4"}, ("a", 5, 4, 3, 1, 3)),
    (LightningEnvironment, {"MASTER_ADDR": "a", "MASTER_PORT": "5", "LOCAL_RANK": "1"}, ("a", 5, 1, 0, 1, 0)),
]


@pytest.mark.parametrize(("kind", "given", "expected"), ENVIRONMENTS, ids=[case[0].__name__ for case in ENVIRONMENTS])
def test_an_environment_reads_its_schedulers_variables(kind: Any, given: Any, expected: Any, variables: Any) -> None:
    variables(given)
    found = kind()
    place = (found.world_size(), found.global_rank(), found.local_rank(), found.node_rank())
    assert (found.main_address, found.main_port, *place) == expected
    assert found.creates_processes_externally


def test_lsf_finds_the_machines_in_its_file(variables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="LSB_DJOB_RANKFILE"):
        LSFEnvironment()
    (tmp_path / "ranks").write_text("batch\none\none\ntwo\n")
    variables({"LSB_DJOB_RANKFILE": str(tmp_path / "ranks"), "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "2"})
    with pytest.raises(ValueError, match="LSB_JOBID"):
        LSFEnvironment()
    variables({"LSB_JOBID": "98765", "JSM_NAMESPACE_LOCAL_RANK": "0"})
    monkeypatch.setattr("socket.gethostname", lambda: "two")
    found = LSFEnvironment()
    assert (found.main_address, found.main_port, found.node_rank(), found.global_rank()) == ("one", 10765, 1, 2)
    assert LSFEnvironment.detect()


def test_mpi_numbers_machines_in_the_order_of_their_first_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    split = SimpleNamespace(Get_rank=lambda: 1)
    world = SimpleNamespace(
        Get_size=lambda: 3,
        Get_rank=lambda: 2,
        gather=lambda name, root: ["a", "b", "b"],
        bcast=lambda value, root: value,
        Split=lambda color: split,
    )
    monkeypatch.setattr(mpi, "_world", lambda: world)
    monkeypatch.setattr("socket.gethostname", lambda: "b")
    found = mpi.MPIEnvironment()
    assert (found.world_size(), found.global_rank(), found.node_rank(), found.local_rank()) == (3, 2, 1, 1)


def test_settings_that_the_scheduler_contradicts_are_refused(variables: Any) -> None:
    variables(SLURM)
    slurm = SLURMEnvironment()
    slurm.validate_settings(num_devices=2, num_nodes=2)
    with pytest.raises(ConfigurationError, match="number of nodes configured in SLURM"):
        slurm.validate_settings(num_devices=2, num_nodes=1)
    variables(TORCHRUN)
    with pytest.raises(ConfigurationError, match=r"2 \* 3\) does not match the world size \(4\)"):
        TorchElasticEnvironment().validate_settings(num_devices=2, num_nodes=3)


def test_slurm_needs_to_know_how_many_processes_a_machine_has(variables: Any) -> None:
    variables({"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train"})
    with pytest.raises(LaunchError, match="--ntasks-per-node=2"):
        SLURMEnvironment()


class Own(ClusterEnvironment):
    """A script's own environment."""

    creates_processes_externally = True  # type: ignore[assignment]
    main_address = "there"  # type: ignore[assignment]
    main_port = 77  # type: ignore[assignment]

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return 4

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return 3

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return 1

    def node_rank(self) -> int:
        return 1


def test_an_environment_of_a_script_says_which_process_this_is(variables: Any) -> None:
    Own().publish("auto", num_nodes=2)
    found = ProcessEnvironment.detect()
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert (found.main_address, found.main_port) == ("there", 77)


def test_trainer_and_fabric_take_an_environment(variables: Any) -> None:
    assert Trainer(accelerator="cpu", plugins=[LightningEnvironment()], logger=False).world_size == 1
    assert Fabric(accelerator="cpu", plugins=SLURMEnvironment(auto_requeue=False)).world_size == 1


def test_what_processes_do_together_alone() -> None:
    tensor = torch.ones(2)
    strategy = SingleDeviceStrategy("cuda:1")
    assert strategy.root_device == torch.device("cuda", 1)
    trainer = Trainer(accelerator="cpu", logger=False)
    assert isinstance(trainer.strategy, SingleDeviceStrategy)
    for each in (trainer.strategy, Fabric(accelerator="cpu").strategy):
        assert each.root_device == torch.device("cpu")
        assert (each.world_size, each.global_rank, each.local_rank, each.node_rank) == (1, 0, 0, 0)
        assert each.broadcast("text") == "text"
        assert each.all_gather(tensor) is tensor
        assert each.reduce(3) == 3
        assert each.reduce_boolean_decision(True)
        assert not each.reduce_boolean_decision(False, all=False)
        assert each.batch_to_device({"a": tensor})["a"].device.type == "cpu"


def test_a_registered_strategy_is_made_by_its_name() -> None:
    assert StrategyRegistry["ddp_spawn"]["init_params"] == {"start_method": "spawn"}
    StrategyRegistry.register("mine", DDPStrategy, "With an option", bucket_cap_mb=3)
    try:
        trainer = Trainer(accelerator="cpu", strategy="mine", logger=False)
        assert isinstance(trainer.strategy, DDPStrategy)
        assert isinstance(StrategyRegistry.get("mine"), DDPStrategy)
    finally:
        StrategyRegistry.remove("mine")
    with pytest.raises(KeyError, match="not in the registry"):
        StrategyRegistry.get("mine")
    assert ACCELERATOR_REGISTRY.available_accelerators() == {"cpu", "cuda", "mps", "tpu"}


def test_kinds_of_devices_parse_what_a_trainer_takes() -> None:
    assert CPUAccelerator.get_parallel_devices("3") == [torch.device("cpu")] * 3
    assert CUDAAccelerator.get_parallel_devices("3,1") == [torch.device("cuda", 3), torch.device("cuda", 1)]
    with pytest.raises(ValueError, match="Device should be CUDA"):
        CUDAAccelerator().setup_device(torch.device("cpu"))


class Scaler:
    """Records what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        self.asked.append("scale")
        return loss * 2

    def step(self, optimizer: Any, **kwargs: Any) -> None:
        self.asked.append("step")

    def update(self) -> None:
        self.asked.append("update")


def test_number_formats_scale_losses_that_scripts_give_them() -> None:
    scaler = Scaler()
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision.backward(model(torch.ones(1)).sum(), model)
    precision.optimizer_step(optimizer)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 2
    assert scaler.asked == ["scale", "step", "update"]
    precision.clip_gradients(optimizer, 0.5, "value")
    assert model.weight.grad.item() == 0.5
    with pytest.raises(ValueError, match="does not use a scaler"):
        MixedPrecision("bf16-mixed", "cpu", scaler)
    for kind in (FSDPPrecision, DeepSpeedPrecision):
        with pytest.raises(ValueError, match="is not supported in"):
            kind("64-true")
    assert FSDPPrecision("bf16-mixed").mixed_precision_config.param_dtype == torch.bfloat16


def test_a_strategy_brings_its_number_format() -> None:
    strategy = SingleDeviceStrategy("cpu", precision_plugin=MixedPrecision("bf16-mixed", "cpu"))
    assert Trainer(accelerator="cpu", strategy=strategy, logger=False).precision == "bf16-mixed"
    with SingleDeviceStrategy("cpu", precision=DoublePrecision()).module_init_context(empty_init=True):
        assert nn.Linear(1, 1).weight.dtype == torch.float64
    with Fabric(accelerator="cpu", precision="bf16-true").init_tensor():
        assert torch.ones(1).dtype == torch.bfloat16
    with pytest.warns(UserWarning, match="bf16-mixed"):
        assert Fabric(accelerator="cpu", precision="16-mixed").accelerator.precision.name == "bf16"
    with pytest.warns(UserWarning, match="bf16-mixed"):
        assert Trainer(accelerator="cpu", precision="16-mixed", logger=False).precision == "bf16-mixed"
    given = MixedPrecision("16-mixed", "cpu")
    assert Trainer(accelerator="cpu", plugins=[given], logger=False).precision == "16-mixed"


def test_a_sharded_strategy_takes_torchs_options() -> None:
    from torch.distributed.fsdp import CPUOffload, ShardingStrategy
    from torch.distributed.fsdp import MixedPrecision as Dtypes

    dtypes = Dtypes(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    given: Any = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 4), "mixed_precision": dtypes}
    strategy = FSDPStrategy(**given, cpu_offload=CPUOffload(offload_params=True))
    found = strategy.options
    assert (found.replicate_size, found.cpu_offload, found.gather_dtype) == (2, True, torch.bfloat16)
    assert strategy.sharding_strategy is ShardingStrategy.HYBRID_SHARD
    assert strategy.cpu_offload.offload_params
    with pytest.raises(ConfigurationError, match="what is sharded"):
        FSDPStrategy(sharding_strategy="HYBRID_SHARD")
    assert FSDPStrategy(sharding_strategy="no_shard").sharding_strategy is ShardingStrategy.NO_SHARD
    with pytest.raises(ConfigurationError, match="Did you mean 'NO_SHARD'"):
        FSDPStrategy(sharding_strategy="NOSHARD")


def copies_of_a_sharded_model(sharding: str) -> tuple[int, tuple[int, ...]]:
    strategy = FSDPStrategy(sharding_strategy=sharding, auto_wrap_policy={nn.Linear})
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(strategy=strategy, devices=2, max_steps=1, limit_val_batches=0, **settings)
    trainer.fit(task := BoringModel())
    return strategy.options.replicate_size, tuple(task.layer.weight.to_local().shape)


@pytest.mark.sharded
@pytest.mark.parametrize(("sharding", "copies", "rows"), [("NO_SHARD", 2, 2), ("HYBRID_SHARD", 1, 1)])
def test_copies_of_a_sharded_model_follow_from_the_processes(sharding: str, copies: int, rows: int) -> None:
    found = run_in_processes(copies_of_a_sharded_model, 2, args=[sharding], timeout=60)
    assert found == [(copies, (rows, 32))] * 2


@pytest.mark.sharded
def test_a_deepspeed_configuration_counts_as_it_was_given() -> None:
    from drivetrain.compat.lightning.pytorch.strategies import DeepSpeedStrategy

    plain = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    strategy = DeepSpeedStrategy(config=plain)
    assert (strategy.config, strategy.stage) == (plain, 0)
    partial = {**plain, "zero_optimization": {"overlap_comm": True}}
    assert (DeepSpeedStrategy(config=partial).config, DeepSpeedStrategy(config=partial).stage) == (partial, 0)
    whole = {**plain, "zero_optimization": {"stage": 3}}
    assert (DeepSpeedStrategy(config=whole).config, DeepSpeedStrategy(config=whole).stage) == (whole, 3)
    assert DeepSpeedStrategy().stage == 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_backward_past_fabric_is_refused_where_the_number_format_needs_it(precision: str) -> None:
    fabric = Fabric(accelerator="cpu", precision=precision)
    model = fabric.setup(nn.Linear(1, 1))
    fabric.backward(model(torch.ones(1)).sum())
    loss = model(torch.ones(1)).sum()
    if precision == "32-true":
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match=r"requires you to call `fabric.backward\(loss\)`"):
            loss.backward()


def test_a_group_of_processes_is_made_and_ended(variables: Any) -> None:
    group = TorchCollective().setup(main_address="127.0.0.1", main_port=0, rank=0, world_size=1, backend="gloo")
    assert TorchCollective.is_initialized()
    assert (group.rank, group.world_size) == (0, 1)
    assert group.all_reduce(torch.tensor(3), op="max") == 3
    with pytest.raises(ValueError, match="is not a member"):
        group.all_reduce(torch.tensor(3), op="middle")
    group.teardown()
    assert not TorchCollective.is_initialized()
    alone = SingleDeviceCollective()
    with pytest.raises(RuntimeError, match="does not own a group"):
        alone.teardown()
    assert alone.create_group().all_gather([], torch.ones(1)) == [torch.ones(1)]


def test_fabrics_loggers_call_their_directory_root_dir(tmp_path: Path) -> None:
    for kind, options in ((CSVLogger, {}), (TensorBoardLogger, {"sub_dir": "inner"})):
        logger: Any = kind(root_dir=tmp_path, name=kind.__name__, **options)
        logger.log_metrics({"a": 1.0}, 0)
        logger.save()
        assert logger.root_dir == str(tmp_path)
        assert Path(logger.log_dir) == Path(tmp_path, kind.__name__, "version_0", *options.values())
        assert list(Path(logger.log_dir).iterdir())
        logger.finish()
