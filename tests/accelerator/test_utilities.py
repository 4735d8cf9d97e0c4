"""Process control, collectives, clipping, triggers, uneven inputs and letting go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, AutocastKwargs, ConfigurationError, DataLoaderConfiguration, GradScalerKwargs
from tests.pool import run_in_processes


def control() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    result: dict[str, Any] = {
        "who": (rank, accelerator.local_process_index, accelerator.num_processes, accelerator.use_distributed),
        "is": (accelerator.is_main_process, accelerator.is_local_main_process, accelerator.is_last_process),
        "device": str(accelerator.device),
        "type": accelerator.distributed_type.value,
        "on main": accelerator.on_main_process(lambda: rank)(),
        "on local main": accelerator.on_local_main_process(lambda: rank)(),
        "on last": accelerator.on_last_process(lambda: rank)(),
        "on 1": accelerator.on_process(lambda: rank, process_index=1)(),
        "on local 1": accelerator.on_local_process(local_process_index=1)(lambda: rank)(),
    }
    order = []
    with accelerator.main_process_first():
        order.append(rank)
    with accelerator.local_main_process_first():
        order.append(rank)
    accelerator.wait_for_everyone()
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as mine:
        result["split"] = mine
    accelerator.print("once")
    value = torch.tensor([float(rank + 1)])
    result["gather"] = accelerator.gather(value).tolist()
    result["reduce"] = [accelerator.reduce(value, how).item() for how in ("sum", "mean", "max", "min")]
    result["default"] = accelerator.reduce(value).item()
    result["scaled"] = accelerator.reduce(value, "sum", scale=0.5).item()
    try:
        accelerator.reduce(value, "summ")
    except ConfigurationError as error:
        result["unknown"] = str(error)
    padded = accelerator.pad_across_processes(torch.ones(rank + 1), pad_index=-1, pad_first=True)
    result["padded"] = padded.tolist()
    result["triggers"] = [accelerator.check_trigger()]
    if rank == 1:
        accelerator.set_trigger()
    result["triggers"] += [accelerator.check_trigger(), accelerator.check_trigger()]
    return result


def test_process_control_and_collectives(capsys):
    first, second = run_in_processes(control, 2)
    assert (first["who"], second["who"]) == ((0, 0, 2, True), (1, 1, 2, True))
    assert (first["is"], second["is"]) == ((True, True, False), (False, False, True))
    assert first["device"] == "cpu"
    assert first["type"] == "MULTI_CPU"
    for name, rank in [("on main", 0), ("on local main", 0), ("on last", 1), ("on 1", 1), ("on local 1", 1)]:
        assert [each[name] for each in (first, second)] == [0 if rank == 0 else None, 1 if rank == 1 else None], name
    assert (first["split"], second["split"]) == (["a", "b"], ["c", "c"])
    assert capsys.readouterr().out.count("once") == 1
    for each in (first, second):
        assert each["gather"] == [1, 2]
        assert each["reduce"] == [3, 1.5, 2, 1]
        assert each["default"] == 3
        assert each["scaled"] == 1.5
        assert "Did you mean 'sum'" in each["unknown"]
        assert each["triggers"] == [False, True, False]
    assert (first["padded"], second["padded"]) == ([-1, 1], [1, 1])


def test_alone_everything_is_here():
    [each] = run_in_processes(control, 1)
    assert each["gather"] == [1]
    assert each["on last"] == 0
    assert each["on 1"] is None
    assert each["triggers"] == [False, False, False]


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_clipping_sees_true_gradients_where_a_window_ends(precision):
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],
    )
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    norms = []
    for factor in (4.0, 2.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.5))
            accelerator.clip_grad_value_(model.parameters(), 1.0)
            assert (model.weight.grad.item() == 1.0) == accelerator.sync_gradients
    assert norms[0].item() == pytest.approx(2.0)
    assert norms[1].item() == pytest.approx(3.0, rel=1e-3)
    before = model.weight.item()
    optimizer.step()
    assert model.weight.item() == pytest.approx(before - 1.0)
    assert accelerator.clip_grad_norm_(next(model.parameters()), 0.5).item() == pytest.approx(1.0)


def test_gradients_can_be_unscaled_by_hand():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for call in (lambda: None, lambda: optimizer, lambda: [optimizer]):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).sum())
        assert model.weight.grad.item() == 256
        accelerator.unscale_gradients(call())
        accelerator.unscale_gradients(call())  # once is enough
        assert model.weight.grad.item() == 1
        optimizer.step()


def test_autocast_outside_of_a_model():
    x = torch.ones(2, 2)
    for precision, dtype in (("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        with accelerator.autocast():
            assert (x @ x).dtype == dtype
            with accelerator.autocast(AutocastKwargs(enabled=False)):
                assert (x @ x).dtype == torch.float32
        with accelerator.autocast(autocast_handler=AutocastKwargs(cache_enabled=False)):
            assert (x @ x).dtype == dtype
    with Accelerator(cpu=True, mixed_precision="64").autocast():
        assert torch.zeros(1).dtype == torch.float64


def without_sync() -> list[float]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1, bias=False)
    model = accelerator.prepare(model)
    x = torch.full((1, 1), float(accelerator.process_index))
    with accelerator.no_sync(model):
        accelerator.backward(model(x).sum())
    own = accelerator.unwrap_model(model).weight.grad.item()
    with accelerator.no_sync(None):
        accelerator.backward(model(x).sum())
    return [own, accelerator.unwrap_model(model).weight.grad.item()]


def test_no_sync_keeps_gradients_to_their_process():
    # Rank 1 holds 1 and adds 1, rank 0 nothing: the backward that reduces gives both the mean.
    assert run_in_processes(without_sync, 2) == [[0.0, 1.0], [1.0, 1.0]]


def uneven(samples: int, by_configuration: bool, steps: int) -> dict[str, Any]:
    config = DataLoaderConfiguration(even_batches=not by_configuration)
    accelerator = Accelerator(cpu=True, dataloader_config=config, gradient_accumulation_steps=steps)
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.arange(float(samples))[:, None])
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=1)
    )
    seen = []
    with accelerator.join_uneven_inputs([model], even_batches=None if by_configuration else False):
        for (x,) in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(model(x).square().mean())
                optimizer.step()
            seen.append(int(x))
    after = len(list(loader))
    weight = accelerator.unwrap_model(model).weight
    return {"seen": seen, "after": after, "same": len(set(accelerator.gather(weight).flatten().tolist())) == 1}


@pytest.mark.parametrize("by_configuration", [False, True])
@pytest.mark.parametrize("samples", [7, 4, 1])
def test_processes_with_different_numbers_of_batches_join(samples, by_configuration):
    found = run_in_processes(uneven, 2, args=(samples, by_configuration, 1), timeout=60)
    assert [each["seen"] for each in found] == [list(range(0, samples, 2)), list(range(1, samples, 2))]
    assert all(each["same"] for each in found)
    if not by_configuration:  # even batches are back after the context
        assert [each["after"] for each in found] == [-(-samples // 2)] * 2


def test_joining_alone_is_no_trouble():
    [found] = run_in_processes(uneven, 1, args=(5, False, 2))
    assert found["seen"] == list(range(5))


def let_go() -> list[bool]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(torch.ones(8, 4), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        break
    weight, made = weakref.ref(accelerator.unwrap_model(model).weight), weakref.ref(model)
    model, optimizer, scheduler, loader = accelerator.free_memory(model, optimizer, scheduler, loader)
    gc.collect()
    fresh = accelerator.prepare(nn.Linear(1, 1))
    assert accelerator.clear(fresh) == [None]
    return [weight() is None, made() is None, accelerator.active_loaders.innermost is None]


@pytest.mark.parametrize("processes", [1, 2])
def test_free_memory_lets_go_of_everything(processes):
    assert run_in_processes(let_go, processes) == [[True, True, True]] * processes


def left_group() -> bool:
    accelerator = Accelerator(cpu=True)
    accelerator.end_training()
    return not torch.distributed.is_initialized()


def test_end_training_leaves_the_group():
    assert run_in_processes(left_group, 2) == [True, True]
