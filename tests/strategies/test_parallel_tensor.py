"""Layers split over processes: plans, what they refuse, and what stays the same on all processes."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import Accelerator, Colwise, ConfigurationError, Parallel, Rowwise, SequenceParallel, Task
from tests.pool import device, run_in_processes
from tests.strategies.parallel_models import WIDTH, Attention, Block, Tied, heads_split, made
from tests.strategies.quiet import quiet_trainer

pytestmark = pytest.mark.sharded

TIED_PLAN = {"tokens": Rowwise(input_layouts=Replicate()), "head": Colwise(output_layouts=Replicate())}


def split(model: nn.Module, plan: Any, **options: Any) -> Any:
    """A prepared model and optimizer, in a world of two."""
    accelerator = Accelerator(cpu=True, strategy=Parallel(tp=2, tp_plan=plan, **options))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def refusals(cases: list[tuple[str, Any]]) -> list[str]:
    """What each plan is refused with."""
    messages = []
    for model, plan in cases:
        try:
            split(MODELS[model](), plan)
            messages.append("")
        except ConfigurationError as error:
            messages.append(str(error))
    return messages


MODELS: dict[str, Any] = {
    "block": lambda: made(Block),
    "three heads": lambda: _with_heads(3),
    "tied": lambda: made(Tied),
    "odd": lambda: nn.Sequential(nn.Linear(15, 30), nn.Linear(30, 15)),
    "odd embedding": lambda: nn.Sequential(nn.Embedding(11, 6)),
}


def _with_heads(heads: int) -> nn.Module:
    block = made(Block)
    block.attention.num_heads = heads
    return block


REFUSED: list[tuple[str, Any, str]] = [
    ("block", {"attention.wqq": Colwise()}, r"match no module of Block: 'attention.wqq'.*Did you mean 'attention.wq'"),
    ("tied", {"block.*.norm": SequenceParallel()}, r"match no module .*'block.*.norm'.*Its modules: .*blocks.\*.norm"),
    ("block", {"attention.wq": "colwize"}, r"tp_plan\['attention.wq'\] is 'colwize'. Allowed.*Did you mean 'colwise'"),
    ("block", {"attention.wq": Colwise}, r"tp_plan\['attention.wq'\] is <class .*ColwiseParallel"),
    ("odd", {"1": Colwise()}, r"'1' has out_features=15, which is not divisible by tp=2.*for example to 16"),
    ("odd", {"0": Rowwise()}, r"'0' has in_features=15, which is not divisible by tp=2"),
    ("odd embedding", {"0": Rowwise()}, r"'0' has num_embeddings=11, which is not divisible by tp=2"),
    ("three heads", {"attention.wq": Colwise()}, r"'attention' has num_heads=3, which is not divisible by tp=2"),
    ("block", {"attention": Colwise()}, r"ColwiseParallel splits nn.Linear and nn.Embedding, but 'attention' is a Att"),
    ("tied", {"head": Colwise()}, r"'tokens.weight' and 'head.weight' are one tied parameter.*a whole copy.*S\(0\)"),
    ("block", "auto", r"tp_plan='auto' uses a model's own plan, but neither Block nor its submodules have a tp_plan"),
]


def test_plans_that_cannot_be_are_refused():
    cases = [(model, plan) for model, plan, _ in REFUSED]
    for messages in run_in_processes(refusals, 2, args=(cases,)):
        for message, (_, _, expected) in zip(messages, REFUSED, strict=True):
            assert re.search(expected, message), message


def views_of_heads() -> dict[str, Any]:
    """How far attention with plain views is from that of one process, and where its parts are."""
    plain, x = made(Attention), torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    accelerator, model, optimizer = split(copy.deepcopy(plain), heads_split())
    y, expected = model(x), plain(x)
    y.square().sum().backward()
    expected.square().sum().backward()
    gradients = {name: p.grad for name, p in accelerator.unwrap_model(model).named_parameters()}
    gap = max((gradients[n].full_tensor() - p.grad).abs().max().item() for n, p in plain.named_parameters())
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {
        "output": (y - expected).abs().max().item(),
        "gradients": gap,
        "local": tuple(model.wq.weight.to_local().shape),
        "held": held == {id(parameter) for parameter in model.parameters()},
    }


def test_attention_may_reshape_by_its_number_of_heads():
    for each in run_in_processes(views_of_heads, 2):
        assert each["output"] < 1e-6
        assert each["gradients"] < 1e-5
        assert each["local"] == (WIDTH // 2, WIDTH)
        assert each["held"]


def tied_and_frozen() -> dict[str, Any]:
    """Two steps of a model with a tied head and a frozen block, dropout off."""
    plain = made(Tied).eval()
    tokens = torch.randint(12, (2, 6), generator=torch.Generator().manual_seed(1))
    plan = {**TIED_PLAN, **heads_split("blocks.*.attention."), "blocks.*.norm": "replicate"}
    accelerator, model, optimizer = split(copy.deepcopy(plain), plan)
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        for module, stepped, backward in (
            (model, optimizer, accelerator.backward),
            (plain, reference, torch.Tensor.backward),
        ):
            stepped.zero_grad()
            backward(F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()))
            stepped.step()
    state = accelerator.strategy.state.model(model)
    whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}
    bare = accelerator.unwrap_model(model)
    return {
        "gap": max((whole[name] - value).abs().max().item() for name, value in plain.state_dict().items()),
        "names": list(whole) == list(plain.state_dict()),
        "tied": bare.head.weight is bare.tokens.weight,
        "frozen": [p.requires_grad for p in bare.blocks[1].parameters()],
        "same copy": copy.deepcopy(bare).blocks[0].attention.wq.weight.to_local().shape,
    }


def test_tied_parameters_stay_tied_and_frozen_ones_frozen():
    for each in run_in_processes(tied_and_frozen, 2):
        assert each["gap"] < 1e-6
        assert each["names"]
        assert each["tied"]
        assert not any(each["frozen"])
        assert tuple(each["same copy"]) == (WIDTH // 2, WIDTH)


def steps_of_split_and_whole_parameters() -> list[Any]:
    """By optimizer and group, what is chosen: None where torch chooses."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    strategy = Parallel(tp=2, tp_plan={"0": Colwise(output_layouts=Replicate())})
    accelerator = Accelerator(device=device(), strategy=strategy)
    apart = [{"params": layer.parameters()} for layer in model]
    optimizers = [torch.optim.AdamW(apart), torch.optim.AdamW(model.parameters())]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    accelerator.backward(model(torch.ones(2, WIDTH, device=accelerator.device)).square().sum())
    for optimizer in optimizers:
        optimizer.step()
    return [[group["foreach"] for group in each.param_groups] for each in optimizers]


def test_groups_that_mix_split_and_whole_parameters_are_stepped_without_multi_tensor_steps():
    """Torch refuses them, and they are the default on a GPU."""
    assert run_in_processes(steps_of_split_and_whole_parameters, 2) == [[[None, None], [False]]] * 2


class CarriesPlan(nn.Module):
    """As models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
        self._tp_plan = {"inner.up": "colwise", "inner.down": "rowwise"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner["down"](self.inner["up"](x))


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = CarriesPlan()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def by_the_models_plan() -> list[Any]:
    plain = made(Holder)
    _, model, _ = split(copy.deepcopy(plain), "auto")
    x = torch.ones(1, 4)
    return [(model(x) - plain(x)).abs().max().item(), [str(p.placements) for p in model.parameters()]]


def test_a_model_may_carry_its_plan():
    for gap, placements in run_in_processes(by_the_models_plan, 2):
        assert gap < 1e-6
        assert placements == [str((place,)) for place in (Shard(0), Shard(0), Shard(1), Replicate())]


def with_dropout(own_generator: bool) -> Any:
    """A step with dropout, after drawing other random numbers on each process."""
    block = made(Block)
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    accelerator, model, optimizer = split(block, heads_split("attention."))
    if own_generator:
        torch.manual_seed(accelerator.process_index)
    x = torch.ones(2, 6, WIDTH)
    y = model(x)
    accelerator.backward(y.square().sum())
    try:
        optimizer.step()
    except ConfigurationError as error:
        return str(error)
    return accelerator.gather(y.detach()[None]), accelerator.gather(model.norm.weight.detach()[None])


def test_dropout_leaves_out_the_same_on_all_processes():
    for y, weight in run_in_processes(with_dropout, 2, args=(False,)):
        assert torch.equal(y[0], y[1])
        assert torch.equal(weight[0], weight[1])
        assert (y == 1.0).float().mean() > 0.2  # something was left out


def test_copies_that_would_drift_apart_are_told():
    for message in run_in_processes(with_dropout, 2, args=(True,)):
        assert "The gradients of attention.wo.bias differ between the 2 tensor-parallel processes" in message


class Counting(Task):
    """Computes its metrics itself: one whose state is a sum, one that keeps all rows, and one inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = made(Block)
        self.matrix = torchmetrics.ConfusionMatrix(task="binary")
        self.rows = torchmetrics.CatMetric()
        self.inner = torchmetrics.MetricCollection({"sum": torchmetrics.SumMetric()})
        self.own = torchmetrics.SumMetric(dist_sync_fn=lambda state, group: [state])
        self.found: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hits = (self.net(batch).mean(dim=(1, 2)) > 0).long()
        self.matrix.update(hits, hits)
        self.rows.update(batch[:, 0, 0])
        self.inner.update(torch.ones(len(batch)))
        self.own.update(torch.ones(len(batch)))

    def on_validation_epoch_end(self) -> None:
        rows = self.rows.compute()
        self.found = [float(self.matrix.compute().sum()), len(rows), float(self.inner.compute()["sum"])]
        self.found.append(float(self.own.compute()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def count_by_hand(sizes: dict[str, int]) -> tuple[list[float], bool]:
    task = Counting()
    plan = heads_split("net.attention.") if "tp" in sizes else None
    trainer = quiet_trainer(Parallel(**sizes, tp_plan=plan), num_sanity_val_steps=0, limit_train_batches=1)
    loader = DataLoader(torch.randn(6, 4, WIDTH), batch_size=1)  # type: ignore[arg-type]
    trainer.fit(task, loader, loader)
    return task.found, task.matrix.dist_sync_fn is None


@pytest.mark.parametrize(("sizes", "own"), [({"tp": 2}, 6.0), ({"dp_shard": 2}, 3.0), ({"tp": 2, "dp_shard": 2}, 3.0)])
def test_metrics_that_a_task_computes_itself_count_each_row_once(sizes: dict[str, int], own: float) -> None:
    world = math.prod(sizes.values())
    assert run_in_processes(count_by_hand, world, (sizes,)) == [([6.0, 6, 6.0, own], True)] * world
