"""FSDP beside the numbers: what is sharded, what stays whole, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import FSDP, Accelerator, ConfigurationError, Trainer
from drivetrain.strategies.precision import Float16Mixed
from tests.pool import run_in_processes
from tests.shared_runs import SharedRuns
from tests.strategies.fsdp_models import (
    EXACT,
    ROWS,
    Net,
    Scaled,
    adamw,
    batches,
    gap,
    net,
    plain,
    prepared,
    train,
    trained,
    whole,
)

pytestmark = pytest.mark.sharded

runs = SharedRuns(__name__)


@runs
def follows_the_parameters() -> dict[str, Any]:
    """An optimizer that has stepped before: its groups, options and momentum go along."""
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=True, strategy=FSDP())
    model, twin = net(), net()
    optimizers = []
    for each in (model, twin):
        optimizer = torch.optim.SGD(
            [{"params": [each.head.weight], "lr": 0.5}, {"params": list(each.blocks.parameters())}],
            lr=0.1,
            momentum=0.9,
        )
        F.cross_entropy(each(batches(1)[0][0]), batches(1)[0][1]).backward()
        optimizer.step()
        optimizers.append(optimizer)
    own, reference = optimizers
    groups = own.param_groups
    model, optimizer = accelerator.prepare(model, own)
    train(accelerator, model, optimizer)
    for x, y in batches(3):
        reference.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        reference.step()
    names = {id(parameter) for parameter in model.parameters()}
    return {
        "same optimizer": optimizer.optimizer is own and own.param_groups is groups,
        "holds the model's": all(id(p) in names for group in groups for p in group["params"]),
        "sharded": all(isinstance(p, DTensor) for group in groups for p in group["params"]),
        "momentum": all(isinstance(s["momentum_buffer"], DTensor) for s in own.state.values()),
        "gap": gap(whole(accelerator, model), twin.state_dict()),
    }


def test_an_optimizer_made_before_goes_on_with_the_shards_of_its_parameters(here):
    found = here(follows_the_parameters)
    assert found.pop("gap") < EXACT
    assert all(found.values()), found


@runs
def divides_evenly() -> dict[str, Any]:
    accelerator, model, optimizer = prepared(net, FSDP())
    train(accelerator, model, optimizer)
    local = sum(p.to_local().numel() for p in model.parameters())
    moments = sum(
        s[k].to_local().numel() for s in optimizer.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")
    )
    return {"share": local / sum(p.numel() for p in net().parameters()), "moments per parameter": moments / local}


def test_each_process_holds_its_share_of_parameters_and_moments(here):
    found = here(divides_evenly)
    assert found["share"] == pytest.approx(0.5, abs=0.06)
    assert found["moments per parameter"] == 2


@runs
def trains_adapters() -> float:
    def make() -> nn.Module:
        model = net()
        model.requires_grad_(False)
        for block in model.blocks:
            block.linear.bias.requires_grad_(True)
        model.head.weight.requires_grad_(True)
        return model

    return gap(trained(make, FSDP()), plain(make))


def test_frozen_parameters_beside_trained_ones(here):
    assert here(trains_adapters) < EXACT


@runs
def ties_weights() -> float:
    return gap(trained(lambda: net(tied=True), FSDP()), plain(lambda: net(tied=True)))


def test_tied_weights_stay_tied(here):
    assert here(ties_weights) < EXACT


@runs
def ties_weights_across_units() -> dict[str, Any]:
    def make() -> nn.Module:
        model = net()
        model.blocks[2].linear.weight = model.blocks[0].linear.weight
        return model

    accelerator, model, optimizer = prepared(make, FSDP())
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    train(accelerator, model, optimizer)
    return {"units": units, "gap": gap(whole(accelerator, model), plain(make))}


def test_blocks_that_share_a_weight_are_divided_with_what_is_around_them(here):
    found = here(ties_weights_across_units)
    assert found["units"] == ["", "blocks.1"]
    assert found["gap"] < EXACT


@runs
def keeps_some_whole() -> dict[str, Any]:
    options = {"ignored_modules": ["net.head", "net.blocks.1"]}
    accelerator, model, optimizer = prepared(Scaled, FSDP(**options))
    kept = sorted(name for name, p in model.named_parameters() if not isinstance(p, DTensor))
    train(accelerator, model, optimizer)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9).item()
    return {"whole": kept, "gap": gap(whole(accelerator, model), plain(Scaled)), "norm": norm}


def test_ignored_modules_and_scalars_stay_whole_and_are_trained_all_the_same(here):
    found = here(keeps_some_whole)
    blocks = [f"net.blocks.1.{name}" for name in ("linear.bias", "linear.weight", "norm.bias", "norm.weight")]
    assert found["whole"] == [*blocks, "net.head.weight", "temperature"]
    assert found["gap"] < EXACT


@runs
def keeps_some_whole_in_windows() -> float:
    results = []
    for strategy in (FSDP(ignored_modules=["net.head"]), FSDP(ignored_modules=["net.head"], sync_each_batch=True)):
        accelerator, model, optimizer = prepared(Scaled, strategy, gradient_accumulation_steps=3)
        rank = accelerator.process_index
        for x, y in batches(3):
            with accelerator.accumulate(model):
                mine = slice(rank * ROWS, (rank + 1) * ROWS)
                accelerator.backward(F.cross_entropy(model(x[mine]), y[mine]))
                optimizer.step()
        results.append(whole(accelerator, model))
    reference = Scaled()
    optimizer = adamw(reference.parameters())
    for x, y in batches(3):
        (F.cross_entropy(reference(x), y) / 3).backward()
    optimizer.step()
    return max(gap(result, reference.state_dict()) for result in results)


def test_whole_parameters_in_accumulation_windows(here):
    assert here(keeps_some_whole_in_windows) < EXACT


@runs
def leaves_a_window_open() -> float:
    """A loop that is left within a window: nothing of it is in the next one, nor where the loader has no length."""
    accelerator, model, optimizer = prepared(net, FSDP(), gradient_accumulation_steps=4)

    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            for x, y in batches(3):
                yield from zip(x, y, strict=True)

    data = accelerator.prepare(DataLoader(Endless(), batch_size=ROWS))
    for attempt in range(2):
        for index, (x, y) in enumerate(data):
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
            if attempt == 0 and index == 1:
                break
    reference = net()
    reference_optimizer = adamw(reference.parameters())
    for x, y in batches(3):
        (F.cross_entropy(reference(x), y) / 3).backward()
    reference_optimizer.step()
    return gap(whole(accelerator, model), reference.state_dict())


def test_a_window_that_is_left_open_is_forgotten(here):
    assert here(leaves_a_window_open) < EXACT


@runs
def several_models() -> float:
    """Two models, each with an optimizer of its own, and one optimizer over both."""
    gaps = []
    for shared in (False, True):
        accelerator = Accelerator(cpu=True, strategy=FSDP())
        first, second = net(), net(tied=True)
        owned = [[*first.parameters(), *second.parameters()]] if shared else [first.parameters(), second.parameters()]
        first, second, *optimizers = accelerator.prepare(first, second, *(adamw(each) for each in owned))
        rank = accelerator.process_index
        twins = [net(), net(tied=True)]
        twin_optimizers = [adamw(twin.parameters()) for twin in twins]
        for x, y in batches(2):
            mine = slice(rank * ROWS, (rank + 1) * ROWS)
            loss = F.cross_entropy(first(x[mine]), y[mine]) + F.cross_entropy(second(x[mine]), y[mine])
            accelerator.backward(loss)
            (F.cross_entropy(twins[0](x), y) + F.cross_entropy(twins[1](x), y)).backward()
            for each in (*optimizers, *twin_optimizers):
                each.step()
                each.zero_grad()
        gaps += [gap(whole(accelerator, m), t.state_dict()) for m, t in zip((first, second), twins, strict=True)]
    return max(gaps)


def test_several_models_with_optimizers_of_their_own_or_one_over_both(here):
    assert here(several_models) < EXACT


@runs
def skips_together() -> dict[str, Any]:
    """Rank 1's shard alone overflows: no process steps, and both halve the scale."""
    precision = Float16Mixed(init_scale=8.0)
    accelerator = Accelerator(cpu=True, strategy=FSDP(), mixed_precision=precision)
    model = net()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    before = whole(accelerator, model)
    x, y = batches(1)[0]
    found = {}
    for step in ("overflow", "clean"):
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        if step == "overflow" and accelerator.process_index == 1:
            model.head.weight.grad.to_local().view(-1)[0] = float("inf")
        optimizer.step()
        found[step] = (optimizer.step_was_skipped, gap(whole(accelerator, model), before) > 0)
    precision.state_dict()
    return {**found, "scale": precision.scaler.get_scale()}


def test_overflow_in_one_shard_skips_the_step_everywhere(here):
    assert here(skips_together) == {"overflow": (True, False), "clean": (False, True), "scale": 4.0}


@runs
def clips() -> dict[str, Any]:
    """By the norm over whole and sharded parameters together, in three norms, and by value."""
    found: dict[str, Any] = {}
    reference = Scaled()
    x, y = batches(1)[0]
    F.cross_entropy(reference(x), y).backward()
    for norm in (2.0, 1.0, float("inf")):
        accelerator, model, _ = prepared(Scaled, FSDP(ignored_modules=["net.head"]))
        mine = slice(accelerator.process_index * ROWS, (accelerator.process_index + 1) * ROWS)
        accelerator.backward(F.cross_entropy(model(x[mine]), y[mine]))
        twin = copy.deepcopy(reference)
        for p, q in zip(twin.parameters(), reference.parameters(), strict=True):
            p.grad = q.grad.clone()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.01, norm).item()
        given = accelerator.clip_grad_norm_(model.parameters(), 0.01, norm)
        accelerator.clip_grad_value_(model.parameters(), 0.001)
        nn.utils.clip_grad_value_(twin.parameters(), 0.001)
        grads = {n: p.grad.full_tensor() if isinstance(p, DTensor) else p.grad for n, p in model.named_parameters()}
        found[str(norm)] = (
            abs(given.item() - expected) / expected,
            gap(grads, {n: p.grad for n, p in twin.named_parameters()}),
            type(given).__name__,
        )
    return found


@pytest.mark.parametrize("norm", ["2.0", "1.0", "inf"])
def test_the_norm_is_that_of_whole_and_divided_gradients_together(here, norm):
    off, gap, kind = here(clips)[norm]
    assert off < 1e-5
    assert gap < EXACT
    assert kind == "Tensor"


@runs
def evaluates_first() -> dict[str, Any]:
    """Inference before the first step; its parameters are shards right after; then training is exact."""
    accelerator, model, optimizer = prepared(net, FSDP())
    with torch.inference_mode():
        model(batches(1)[0][0])
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    train(accelerator, model, optimizer)
    return {"sharded": sharded, "gap": gap(whole(accelerator, model), plain(net))}


def test_inference_before_the_first_step_changes_nothing(here):
    found = here(evaluates_first)
    assert found["sharded"]
    assert found["gap"] < EXACT


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(x)


@runs
def reduces_unused() -> float:
    """Each process goes another way, and the gradients are those of the mean all the same."""
    accelerator, model, _ = prepared(Branches, FSDP(reduce_unused=True))
    x = torch.ones(2, 4)
    accelerator.backward(model(x, ("left", "right")[accelerator.process_index]).square().mean())
    reference = Branches()
    ((reference(x, "left").square().mean() + reference(x, "right").square().mean()) / 2).backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return gap(gradients, {name: p.grad for name, p in reference.named_parameters()})


def test_parameters_that_others_use_are_reduced_where_asked(here):
    assert here(reduces_unused) < EXACT


@runs
def calls_other_methods() -> float:
    class Encoder(Net):
        def encode(self, tokens: Tensor) -> Tensor:
            return self.tokens(tokens)

    def make() -> Encoder:
        torch.manual_seed(5)
        return Encoder()

    _, model, _ = prepared(make, FSDP(forward_methods=["encode"]))
    tokens = batches(1)[0][0]
    with torch.no_grad():
        return float((model.encode(tokens) - make().encode(tokens)).abs().max())


def test_other_methods_than_forward_gather_too(here):
    assert here(calls_other_methods) == 0


@runs
def refuses_stale_parameters() -> str:
    """The optimizer was prepared apart from its model."""
    accelerator = Accelerator(cpu=True, strategy=FSDP())
    model = net()
    optimizer = accelerator.prepare(adamw(model.parameters()))
    model = accelerator.prepare(model)
    try:
        train(accelerator, model, optimizer)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_an_optimizer_prepared_apart_from_its_model_is_refused(here):
    assert "AdamW holds the parameters from before the model was sharded" in here(refuses_stale_parameters)


@runs
def refuses_to_join() -> str:
    accelerator, model, _ = prepared(net, FSDP())
    try:
        with accelerator.join_uneven_inputs([model]):
            return ""
    except ConfigurationError as error:
        return str(error)


def test_uneven_inputs_are_refused(here):
    assert "all need the same number of batches" in here(refuses_to_join)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"replicate_size": 0}, "replicate_size must be a whole number of at least 1, got 0"),
        ({"init": "rank"}, "init must be one of 'rank0', 'meta', got 'rank'. Did you mean 'rank0'?"),
        ({"activation_offload": True}, "requires activation_checkpointing"),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward must be"),
        ({"compile": "inductor"}, "compile must be True, False or a dict"),
    ],
)
def test_options_that_cannot_be(options, says):
    with pytest.raises(ConfigurationError, match=says.replace("?", r"\?")):
        FSDP(**options)


def test_copies_that_do_not_divide_the_processes():
    with pytest.raises(ConfigurationError, match="replicate_size=2 does not divide the 1 processes of this run"):
        Trainer(accelerator="cpu", strategy=FSDP(replicate_size=2), logger=False)


class TwoDtypes(nn.Module):
    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16().requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.last(x.bfloat16()).float()


def odd_layout(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 4)]
    model = nn.Sequential(*layers)
    if kind == "channels_last":
        return model.to(memory_format=torch.channels_last)
    if kind == "transposed":
        model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return model


def trained_layout(kind: str, strategy: Any = None) -> dict[str, Tensor]:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = odd_layout(kind)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 3, 4, 4)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def layouts_and_dtypes() -> list[Any]:
    accelerator = Accelerator(cpu=True, strategy=FSDP())
    with pytest.raises(ConfigurationError) as refused:
        accelerator.prepare(TwoDtypes())
    for model, options in ((TwoDtypes(trained=False), {}), (TwoDtypes(), {"wrap": nn.Linear})):
        prepared = Accelerator(cpu=True, strategy=FSDP(**options)).prepare(model)
        prepared(torch.ones(2, 4)).sum().backward()
    accelerator = Accelerator(cpu=True, strategy=FSDP())
    late = TwoDtypes(trained=False)
    model = accelerator.prepare(late)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    late.last.requires_grad_(True)
    with pytest.raises(ConfigurationError) as unfrozen:
        accelerator.backward(model(torch.ones(2, 4)).sum())
    assert str(unfrozen.value) == str(refused.value)
    gaps = []
    for kind in ("channels_last", "transposed"):
        own = trained_layout(kind, FSDP())
        if accelerator.is_main_process:
            plain = odd_layout(kind)
            optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
            for _ in range(3):
                plain(torch.ones(2, 3, 4, 4)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            gaps += [float((own[name] - value).abs().max()) for name, value in plain.state_dict().items()]
    return [str(refused.value), gaps]


def optimizers_of_whole_parameters() -> list[str]:
    found = []
    for make in (torch.optim.LBFGS, lambda p: torch.optim.SGD(p, lr=0.1, fused=True)):
        accelerator, model = Accelerator(cpu=True, strategy=FSDP()), nn.Linear(2, 1)
        with pytest.raises(ConfigurationError) as refused:
            accelerator.prepare(model, make(model.parameters()))
        found.append(str(refused.value))
    return found


def test_optimizers_that_step_whole_parameters_are_refused_by_name():
    for first, second in run_in_processes(optimizers_of_whole_parameters, 2, timeout=60):
        assert "LBFGS does not support sharded parameters" in first
        assert "SGD(fused=True) does not support sharded parameters" in second


def test_units_may_have_any_layout_and_one_dtype():
    (message, gaps), (other, _) = run_in_processes(layouts_and_dtypes, 2, timeout=60)
    assert message == other
    assert "torch.float32: first.weight, first.bias; torch.bfloat16: last.weight, last.bias" in message
    assert max(gaps) <= 5e-6
