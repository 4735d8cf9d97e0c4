"""Members that scripts written for Accelerate use beside the loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import (
    DDP,
    FSDP,
    Accelerator,
    AcceleratorState,
    ConfigurationError,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    GradientAccumulationPlugin,
    GradientState,
    GradScalerKwargs,
    ParallelismConfig,
    PartialState,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from tests.pool import run_in_processes


def test_the_state_shows_what_the_engine_was_made_with():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    state = accelerator.state
    assert isinstance(state, PartialState)
    assert (state.mixed_precision, state.distributed_type, state.num_processes) == ("bf16", DistributedType.NO, 1)
    assert (state.fsdp_plugin, state.deepspeed_plugin, state.parallelism_config) == (None, None, None)
    assert AcceleratorState().mixed_precision == "bf16"
    other = Accelerator(cpu=True)
    assert (state.mixed_precision, other.state.mixed_precision, AcceleratorState().mixed_precision) == (
        "bf16",
        "no",
        "no",
    )
    with pytest.raises(ConfigurationError, match=r"mixed_precision='no'.*'fp16'"):
        AcceleratorState(mixed_precision="fp16")
    AcceleratorState._reset_state()
    assert AcceleratorState(mixed_precision="fp16").mixed_precision == "fp16"
    AcceleratorState._reset_state()


def kinds() -> list[str]:
    return [
        Accelerator(cpu=True).distributed_type.value,
        Accelerator(cpu=True, strategy=FSDP()).distributed_type.value,
        PartialState().distributed_type.value,
    ]


def test_sharded_runs_have_their_own_distributed_type():
    assert run_in_processes(kinds, 2) == [["MULTI_CPU", "FSDP", "MULTI_CPU"]] * 2


def test_the_gradient_state_follows_the_window_and_the_loader():
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2))
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    state, found = GradientState(), []
    for _ in loader:
        with accelerator.accumulate():
            found.append((state.sync_gradients, state.end_of_dataloader, state.remainder))
            assert state.active_dataloader is loader
    assert found == [(False, False, -1), (True, False, -1), (True, True, 1)]
    assert not state.in_dataloader
    assert (state.num_steps, accelerator.gradient_state.num_steps) == (2, 2)
    accelerator.gradient_state._set_sync_gradients(False)
    assert not accelerator.sync_gradients


def test_a_prepared_loader_is_a_torch_loader():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(6), batch_size=2, num_workers=0))
    assert isinstance(loader, DataLoader)
    assert isinstance(accelerator.skip_first_batches(loader, 1), DataLoader)
    assert (loader.batch_size, len(loader.dataset), loader.multiprocessing_context) == (2, 6, None)
    assert isinstance(accelerator.prepare_data_loader([torch.ones(2)]), DataLoader)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_the_norm_is_returned_at_every_micro_batch(precision):
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],
    )
    model = nn.Linear(1, 1, bias=False)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    norms = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            if not accelerator.sync_gradients:
                assert float(model.weight.grad) in (2.0, 2.0 * 256)
    assert norms == [2.0, 4.0]
    assert float(model.weight.grad) == pytest.approx(1.0)


@pytest.mark.slow  # imports torch's compiler
def test_a_compiled_model_is_unwrapped_as_one_or_not():
    accelerator = Accelerator(cpu=True)
    bare = nn.Linear(2, 1)
    compiled = torch.compile(bare, backend="eager")
    model = accelerator.prepare(compiled)
    assert accelerator.unwrap_model(model) is compiled
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is bare
    plain = accelerator.prepare(nn.Linear(2, 1))
    assert accelerator.unwrap_model(plain) is plain


@pytest.mark.slow  # imports torch's compiler
@pytest.mark.parametrize("regional", [False, True])
def test_models_are_compiled_in_place(regional):
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    bare = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    bare.forward = lambda x: bare[0][1](bare[0][0](x))
    model = accelerator.prepare_model(bare)
    compiled = [name for name, module in bare.named_modules() if module._compiled_call_impl is not None]
    assert compiled == (["0.0", "0.1"] if regional else [""])
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert accelerator.state.dynamo_plugin.backend is DynamoBackend.EAGER
    assert list(accelerator.get_state_dict(model)) == ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"]


@pytest.mark.slow  # imports torch's compiler
def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigurationError, match="Did you mean 'inductor'"):
        Accelerator(cpu=True, dynamo_backend="induktor")
    with pytest.raises(ConfigurationError, match="only one of them"):
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())


def test_the_profiler_records_and_writes_its_trace(tmp_path: Path):
    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    with accelerator.profile() as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert any("mm" in event.key for event in profiler.key_averages())
    assert json.loads((tmp_path / "profile_0.json").read_text())["traceEvents"]
    with pytest.raises(ConfigurationError, match="cpu"), accelerator.profile(ProfileKwargs(activities=["gpu"])):
        pass


def test_objects_are_written_once(tmp_path: Path):
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(save_on_each_node=True))
    weight = torch.arange(4.0)
    accelerator.save({"a": weight, "n": 3}, tmp_path / "plain.bin")
    assert torch.load(tmp_path / "plain.bin")["n"] == 3
    accelerator.save(
        {"a": weight, "tied": weight, "t": weight[::2]}, tmp_path / "x.safetensors", safe_serialization=True
    )
    assert {name: value.tolist() for name, value in load_file(tmp_path / "x.safetensors").items()} == {
        "a": [0, 1, 2, 3],
        "t": [0, 2],
    }
    with pytest.raises(ConfigurationError, match="dict of tensors"):
        accelerator.save([1], tmp_path / "y.safetensors", safe_serialization=True)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(4))


def synchronised() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model = accelerator.prepare(model)
    x = torch.full((1, 1), float(accelerator.process_index + 1))
    with accelerator.no_sync(model):
        first, second = model(x).sum(), model(x).sum()
    accelerator.backward(first)
    own = float(model.module.weight.grad)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    whole = float(model.module.weight.grad)
    accelerator.prepare(DataLoader(Stream(), batch_size=1))
    with (
        pytest.warns(UserWarning, match="iterable datasets"),
        accelerator.join_uneven_inputs([model], even_batches=False),
    ):
        pass
    return {"own": own, "whole": whole}


def test_a_backward_reduces_what_ran_without_and_joins_warn():
    assert run_in_processes(synchronised, 2) == [{"own": 1.0, "whole": 3.0}, {"own": 2.0, "whole": 3.0}]


def hooked() -> dict[str, float]:
    found = {}
    for hook, wrapper in (
        ("no", "no"),
        ("fp16", "no"),
        ("power_sgd", "bf16"),
        ("bf16", "fp16"),
    ):
        handler = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        torch.manual_seed(0)
        model = accelerator.prepare(nn.Linear(4, 4))
        for _ in range(3):
            model.zero_grad()
            accelerator.backward(model(torch.full((1, 4), float(accelerator.process_index))).sum())
        found[f"{hook} {wrapper}"] = float(model.module.weight.grad.sum())
    return found


def test_communication_hooks_with_wrappers_reduce_the_mean():
    for found in run_in_processes(hooked, 2):
        assert len(found) == 4
        assert all(value == pytest.approx(8.0, rel=0.02) for value in found.values()), found
    with pytest.raises(ConfigurationError, match="comm_wrapper"):
        DDP(comm_wrapper="fp16")


def test_sizes_are_taken_as_a_dict_and_ulysses_is_refused():
    config = ParallelismConfig(tp_size=2, cp_size=2, dp_shard_size=2, sp_size=1)
    assert (config.total_size, config.tp_enabled, config.dp_replicate_enabled) == (8, True, False)
    with pytest.raises(ConfigurationError, match="cp_size=2"):
        ParallelismConfig(sp_size=2)
    assert Accelerator(cpu=True, parallelism_config={"dp_shard_size": 1}).parallelism_config.dp_shard_size == 1


def test_members_that_only_report():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    assert not accelerator.verify_device_map(model)
    model.hf_device_map = {"a": 0, "b": 1}
    assert accelerator.verify_device_map(nn.Sequential(model))
    assert (accelerator.tensor_parallel_rank, accelerator.data_parallel_rank, accelerator.fp8_backend) == (0, 0, None)
    assert (accelerator.use_stateful_dataloader, accelerator.dispatch_batches, accelerator.non_blocking) == (
        False,
        None,
        False,
    )
    with pytest.raises(ConfigurationError, match="lomo"):
        accelerator.lomo_backward(torch.ones(()), 0.1)
    assert accelerator.on_main_process()(lambda: 3)() == 3
