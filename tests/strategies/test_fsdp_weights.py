"""Where the values of a sharded model come from and go to: made on a rank or on none, streamed, loaded, copied."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drivetrain import FSDP, Accelerator, ConfigurationError
from tests.pool import ProcessesFailed, run_in_processes
from tests.shared_runs import SharedRuns
from tests.strategies.fsdp_models import EXACT, WIDTH, adamw, batches, gap, net, plain, prepared, train, whole

pytestmark = pytest.mark.sharded

runs = SharedRuns(__name__)


@runs
def builds_without_values() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for init in ("meta", "rank0"):
        accelerator = Accelerator(cpu=True, strategy=FSDP(init=init))
        with accelerator.init_context():
            model = net()
        found[f"{init}: built"] = sum(p.numel() for p in model.parameters() if not p.is_meta)
        model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
        found[f"{init}: start"] = gap(whole(accelerator, model), net().state_dict())
        train(accelerator, model, optimizer)
        found[f"{init}: end"] = gap(whole(accelerator, model), plain(net))
        found[f"{init}: table"] = model.table.tolist() == list(range(WIDTH))
    return found


def test_a_model_built_without_values_starts_as_a_plain_one():
    for rank, found in enumerate(runs.of(builds_without_values)):
        assert found["meta: built"] == 0
        assert (found["rank0: built"] > 0) == (rank == 0)
        for init in ("meta", "rank0"):
            assert found[f"{init}: start"] == 0
            assert found[f"{init}: end"] < EXACT
            assert found[f"{init}: table"]


class Unheard(nn.Module):
    """Has a parameter, and no word on how it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


@runs
def refuses_to_guess_values() -> str:
    accelerator = Accelerator(cpu=True, strategy=FSDP(init="meta"))
    with accelerator.init_context():
        model = nn.Sequential(nn.Linear(4, 4), Unheard())
    try:
        accelerator.prepare(model)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_module_that_does_not_say_how_it_starts_is_named(here):
    assert "Unheard cannot initialize them" in here(refuses_to_guess_values)


class Holder(nn.Module):
    """The name that a task would give its model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(tied=True)


def weights_to_stream() -> dict[str, Tensor]:
    state = Holder().state_dict()
    generator = torch.Generator().manual_seed(9)
    made = {name: torch.randn(value.shape, generator=generator) for name, value in state.items()}
    made["net.head.weight"] = made["net.tokens.weight"]
    return made


def streams_weights(directory: str) -> dict[str, Any]:
    """Each process reads its shards of what is in the files."""
    found = {}
    for place in (directory,):
        accelerator = Accelerator(cpu=True, strategy=FSDP(weights=place))
        with accelerator.init_context():
            model = Holder()
        meta = all(p.is_meta for p in model.parameters())
        model = accelerator.prepare(model)
        found[place.removeprefix(directory)] = (meta, gap(whole(accelerator, model), weights_to_stream()))
    return found


def test_weights_are_streamed_from_files(tmp_path):
    state = weights_to_stream()
    names = sorted(set(state) - {"net.head.weight"})  # tied: one name is enough
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: state[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for each in run_in_processes(streams_weights, 2, args=(str(tmp_path),)):
        assert each == {"": (True, 0.0)}
    save_file({"net.tokens.weight": state["net.tokens.weight"]}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ProcessesFailed, match=r"do not match the model\. Missing"):
        run_in_processes(streams_weights, 2, args=(str(tmp_path),), timeout=30)


@runs
def copies() -> dict[str, Any]:
    """A deep copy is a sharded model of its own; an average of the weights follows them."""
    accelerator, model, optimizer = prepared(net, FSDP(activation_checkpointing=True))
    train(accelerator, model, optimizer, steps=1)
    twin = copy.deepcopy(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    reference, reference_average = net(), None
    reference.load_state_dict(whole(accelerator, model))
    reference_average = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    before = whole(accelerator, model)
    x, y = batches(1)[0]
    average.update_parameters(model)
    reference_average.update_parameters(reference)
    train(accelerator, model, optimizer, steps=2)
    reference.load_state_dict(whole(accelerator, model))
    average.update_parameters(model)
    reference_average.update_parameters(reference)
    with torch.no_grad():
        forward = (average(x) - reference_average(x)).abs().max().item()
    own = adamw(twin.parameters())
    average.load_state_dict(reference_average.state_dict())
    loaded = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in average.state_dict().items()}
    untouched = gap(whole(accelerator, twin), before)
    F.cross_entropy(twin(x), y).backward()
    own.step()
    return {
        "average": forward,
        "loaded": gap(loaded, reference_average.state_dict()),
        "untouched": untouched,
        "moved": gap(whole(accelerator, twin), before),
        "classes": [type(twin).__name__, type(twin.blocks[0]).__name__],
        "sharded": all(isinstance(p, DTensor) for p in twin.parameters()),
    }


@runs
def copies_in_low_precision() -> dict[str, list[Any]]:
    """Under a mixed precision a copy's forward is its own too, before and after a step, and with gradients held."""
    found = {}
    for precision in ("bf16", "bf16-true", "fp16"):
        accelerator, model, optimizer = prepared(net, FSDP(activation_checkpointing=True), mixed_precision=precision)
        x, y = batches(1)[0]
        found[precision] = []
        for moment in ("prepared", "within a window", "stepped"):
            if moment == "within a window":
                with accelerator.no_sync(model):
                    accelerator.backward(F.cross_entropy(model(x).float(), y))
            elif moment == "stepped":
                train(accelerator, model, optimizer, steps=1)
            twin = copy.deepcopy(model)
            with torch.no_grad():
                same = torch.equal(twin(x), model(x))
                for parameter in twin.parameters():
                    parameter.zero_()
                found[precision].append((same, float(twin(x).abs().max()), float(model(x).abs().max()) > 0))
    return found


def test_copies_in_low_precision_compute_with_their_own_weights(here):
    assert here(copies_in_low_precision) == dict.fromkeys(("bf16", "bf16-true", "fp16"), [(True, 0.0, True)] * 3)


def test_copies_are_divided_models_of_their_own_and_averages_follow(here):
    found = here(copies)
    assert found["average"] < EXACT
    assert found["loaded"] == 0
    assert found["untouched"] == 0
    assert found["moved"] > 0
    assert found["classes"] == ["FSDPNet", "FSDPBlock"]
    assert found["sharded"]


@runs
def summons() -> dict[str, Any]:
    accelerator, model, _ = prepared(net, FSDP())
    state = accelerator.strategy.state
    with state.summoned(model) as bare:
        read = gap({n: p.detach().clone() for n, p in bare.named_parameters()}, dict(net().named_parameters()))
        with torch.no_grad():
            bare.head.weight.add_(1.0)
    kept = gap(whole(accelerator, model), net().state_dict())
    with state.summoned(model, writeback=True) as bare, torch.no_grad():
        bare.head.weight.add_(1.0)
    changed = whole(accelerator, model)["head.weight"] - net().head.weight
    with torch.no_grad():
        model(batches(1)[0][0])
    return {"read": read, "not written": kept, "written": float((changed - 1).abs().max())}


def test_summoned_parameters_are_whole_and_written_back_where_asked(here):
    found = here(summons)
    assert found["read"] == 0
    assert found["not written"] == 0
    assert found["written"] < EXACT


@runs
def loads_whole_tensors() -> dict[str, Any]:
    """`load_state_dict`, of the model or a part of it, takes whole tensors."""
    accelerator, model, _ = prepared(net, FSDP())
    other = {name: value + 1.0 for name, value in net().state_dict().items()}
    model.load_state_dict(other)
    found = gap(whole(accelerator, model), other)
    model.blocks[1].load_state_dict(net().blocks[1].state_dict())
    part = whole(accelerator, model)["blocks.1.linear.weight"] - net().blocks[1].linear.weight
    return {"model": found, "block": float(part.abs().max())}


def test_load_state_dict_takes_whole_tensors(here):
    assert here(loads_whole_tensors) == {"model": 0, "block": 0}
