"""What the tests of FSDP run on each of two processes: one function a behaviour, each returning what it saw."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import FSDP, Accelerator, Callback, ConfigurationError, Task, Trainer
from drivetrain.strategies.precision import Float16Mixed
from tests.strategies.quiet import quiet_trainer

WIDTH, CLASSES, ROWS = 8, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + F.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11 if tied else CLASSES, bias=False)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("table", torch.arange(WIDTH).float(), persistent=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) * self.scale + self.table
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def net(**options: Any) -> Net:
    torch.manual_seed(5)
    return Net(**options)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (count, 2 * ROWS, 5), generator=generator)
    return list(zip(tokens, torch.randint(0, CLASSES, (count, 2 * ROWS), generator=generator), strict=True))


def plain(make: Callable[[], nn.Module], steps: int = 3) -> dict[str, Tensor]:
    """Whole global batches in plain torch."""
    model = make()
    optimizer = adamw(model.parameters())
    for x, y in batches(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def prepared(make: Callable[[], nn.Module], strategy: FSDP, **options: Any) -> tuple[Any, Any, Any]:
    accelerator = Accelerator(cpu=True, strategy=strategy, **options)
    with accelerator.init_context():
        model = make()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    return accelerator, model, optimizer


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    rank = accelerator.process_index
    for x, y in batches(steps):
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x[mine]), y[mine]))
        optimizer.step()


def trained(make: Callable[[], nn.Module], strategy: FSDP) -> dict[str, Tensor]:
    """The same under FSDP, each process its half of the rows; whole tensors on every process."""
    accelerator, model, optimizer = prepared(make, strategy)
    train(accelerator, model, optimizer)
    return whole(accelerator, model)


def whole(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    state = accelerator.strategy.state.model(model)
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in state.items()}


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys(), set(one) ^ set(other)
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


# behaviours


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


def divides_evenly() -> dict[str, Any]:
    accelerator, model, optimizer = prepared(net, FSDP())
    train(accelerator, model, optimizer)
    local = sum(p.to_local().numel() for p in model.parameters())
    moments = sum(
        s[k].to_local().numel() for s in optimizer.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")
    )
    return {"share": local / sum(p.numel() for p in net().parameters()), "moments per parameter": moments / local}


def trains_adapters() -> float:
    def make() -> nn.Module:
        model = net()
        model.requires_grad_(False)
        for block in model.blocks:
            block.linear.bias.requires_grad_(True)
        model.head.weight.requires_grad_(True)
        return model

    return gap(trained(make, FSDP()), plain(make))


def ties_weights() -> float:
    return gap(trained(lambda: net(tied=True), FSDP()), plain(lambda: net(tied=True)))


def ties_weights_across_units() -> dict[str, Any]:
    def make() -> nn.Module:
        model = net()
        model.blocks[2].linear.weight = model.blocks[0].linear.weight
        return model

    accelerator, model, optimizer = prepared(make, FSDP())
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    train(accelerator, model, optimizer)
    return {"units": units, "gap": gap(whole(accelerator, model), plain(make))}


class Scaled(nn.Module):
    """A scalar parameter, which has no dimension to divide."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens) * self.temperature


def keeps_some_whole() -> dict[str, Any]:
    options = {"ignored_modules": ["net.head", "net.blocks.1"]}
    accelerator, model, optimizer = prepared(Scaled, FSDP(**options))
    kept = sorted(name for name, p in model.named_parameters() if not isinstance(p, DTensor))
    train(accelerator, model, optimizer)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9).item()
    return {"whole": kept, "gap": gap(whole(accelerator, model), plain(Scaled)), "norm": norm}


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


class Unheard(nn.Module):
    """Has a parameter, and no word on how it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


def refuses_to_guess_values() -> str:
    accelerator = Accelerator(cpu=True, strategy=FSDP(init="meta"))
    with accelerator.init_context():
        model = nn.Sequential(nn.Linear(4, 4), Unheard())
    try:
        accelerator.prepare(model)
    except ConfigurationError as error:
        return str(error)
    return ""


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


def recomputes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {
        "kept": {},
        "recomputed": {"activation_checkpointing": True},
        "offloaded": {"activation_checkpointing": "Block", "activation_offload": True},
    }.items():
        accelerator, model, optimizer = prepared(net, FSDP(**options))
        train(accelerator, model, optimizer)
        calls = sum(block.calls for block in model.blocks)
        found[name] = (calls, gap(whole(accelerator, model), plain(net)))
    return found


def compiles() -> dict[str, Any]:
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    class Quiet(Net):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.__class__ = QuietBlock

    def make() -> nn.Module:
        torch.manual_seed(5)
        return Quiet()

    found = gap(trained(make, FSDP(compile={"backend": backend}, activation_checkpointing=True)), plain(make))
    return {"gap": found, "graphs": len(seen)}


class QuietBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


def copies() -> dict[str, Any]:
    """A deep copy is a divided model of its own; an average of the weights follows them."""
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


def clips() -> dict[str, Any]:
    """By the norm over whole and divided parameters together, in three norms, and by value."""
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


def summons() -> dict[str, Any]:
    accelerator, model, _ = prepared(net, FSDP())
    strategy = accelerator.strategy
    with strategy.summoned(model) as bare:
        read = gap({n: p.detach().clone() for n, p in bare.named_parameters()}, dict(net().named_parameters()))
        with torch.no_grad():
            bare.head.weight.add_(1.0)
    kept = gap(whole(accelerator, model), net().state_dict())
    with strategy.summoned(model, writeback=True) as bare, torch.no_grad():
        bare.head.weight.add_(1.0)
    changed = whole(accelerator, model)["head.weight"] - net().head.weight
    with torch.no_grad():
        model(batches(1)[0][0])
    return {"read": read, "not written": kept, "written": float((changed - 1).abs().max())}


def loads_whole_tensors() -> dict[str, Any]:
    """`load_state_dict`, of the model or a part of it, takes whole tensors."""
    accelerator, model, _ = prepared(net, FSDP())
    other = {name: value + 1.0 for name, value in net().state_dict().items()}
    model.load_state_dict(other)
    found = gap(whole(accelerator, model), other)
    model.blocks[1].load_state_dict(net().blocks[1].state_dict())
    part = whole(accelerator, model)["blocks.1.linear.weight"] - net().blocks[1].linear.weight
    return {"model": found, "block": float(part.abs().max())}


def evaluates_first() -> dict[str, Any]:
    """Inference before the first step; its parameters are shards right after; then training is exact."""
    accelerator, model, optimizer = prepared(net, FSDP())
    with torch.inference_mode():
        model(batches(1)[0][0])
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    train(accelerator, model, optimizer)
    return {"sharded": sharded, "gap": gap(whole(accelerator, model), plain(net))}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(x)


def reduces_unused() -> float:
    """Each process goes another way, and the gradients are those of the mean all the same."""
    accelerator, model, _ = prepared(Branches, FSDP(reduce_unused=True))
    x = torch.ones(2, 4)
    accelerator.backward(model(x, ("left", "right")[accelerator.process_index]).square().mean())
    reference = Branches()
    ((reference(x, "left").square().mean() + reference(x, "right").square().mean()) / 2).backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return gap(gradients, {name: p.grad for name, p in reference.named_parameters()})


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


def refuses_to_join() -> str:
    accelerator, model, _ = prepared(net, FSDP())
    try:
        with accelerator.join_uneven_inputs([model]):
            return ""
    except ConfigurationError as error:
        return str(error)


class NetTask(Task):
    def __init__(self, skipped: int | None = None) -> None:
        super().__init__()
        self.net = net()
        self.extra = nn.Parameter(torch.ones(CLASSES))
        self.skipped = skipped

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens) * self.extra

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.trainer.global_rank == self.skipped:
            return None
        return F.cross_entropy(self.net(batch[0]) * self.extra, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self.net(batch[0]) * self.extra, batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


def loader(rows: int = ROWS) -> DataLoader[Any]:
    tokens, labels = zip(*batches(3), strict=True)
    return DataLoader(TensorDataset(torch.cat(tokens), torch.cat(labels)), batch_size=rows)


def plain_task(epochs: int) -> dict[str, Tensor]:
    task = NetTask()
    optimizer = adamw(task.parameters())
    for _ in range(epochs):
        for x, y in loader(2 * ROWS):
            optimizer.zero_grad()
            F.cross_entropy(task(x), y).backward()
            optimizer.step()
    return {name: value.detach().clone() for name, value in task.state_dict().items()}


class Average(Callback):
    """Keeps an exponential average of the task's weights, and validates with it."""

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        self.average = AveragedModel(task, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(task)

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        self._swap(task)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        self._swap(task)

    def _swap(self, task: Task) -> None:
        with torch.no_grad():
            for own, averaged in zip(task.parameters(), self.average.module.parameters(), strict=True):
                kept = own.clone()
                own.copy_(averaged)
                averaged.copy_(kept)


def averages_in_the_trainer() -> dict[str, Any]:
    callback = Average()
    task = NetTask()
    trainer = quiet_trainer("fsdp", callbacks=[callback])
    trainer.fit(task, loader(), loader())
    averaged = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in callback.average.state_dict().items()}
    reference = NetTask()
    optimizer = adamw(reference.parameters())
    average = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for x, y in loader(2 * ROWS):
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
        average.update_parameters(reference)
    expected = average.state_dict()
    x, y = next(iter(loader()))
    with torch.no_grad():
        forward = float((callback.average(x) - average(x)).abs().max())
        losses = [F.cross_entropy(average(x), y) for x, y in loader(2 * ROWS)]
    twin = copy.deepcopy(trainer.model)
    return {
        "copy of what is called": gap(whole(trainer, twin), reference.state_dict()),
        "average": gap(averaged, expected),
        "forward": forward,
        "validated": abs(float(trainer.callback_metrics["loss"]) - float(sum(losses)) / len(losses)),
        "task": gap(whole(trainer, trainer.model), reference.state_dict()),
    }


def fits_again() -> dict[str, Any]:
    """A task may be fitted twice by one trainer, and validated by another."""
    task = NetTask()
    trainer = quiet_trainer("fsdp")
    trainer.fit(task, loader(), loader())
    trainer.fit_loop = None
    again = quiet_trainer("fsdp")
    loss = again.validate(task, loader(), verbose=False)[0]["loss"]
    reference = NetTask()
    reference.load_state_dict(plain_task(1))
    expected = sum(F.cross_entropy(reference(x), y).item() for x, y in loader(2 * ROWS)) / 3
    return {"gap": gap(whole(again, again.model), plain_task(1)), "loss": abs(loss - expected)}


class Adversaries(Task):
    """Optimizes by hand: each side's step has a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(5)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch[0][:, :4], batch[0][:, 4:]
        first, second = self.optimizers()
        with first.toggle_model():
            loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
        with second.toggle_model():
            both = torch.cat([real, self.generator(noise).detach()])
            sign = torch.cat([-torch.ones(len(real)), torch.ones(len(real))])[:, None]
            loss = F.softplus(sign * self.discriminator(both)).mean()
            second.zero_grad()
            self.manual_backward(loss)
            second.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (self.generator, self.discriminator)]


def optimizes_by_hand() -> float:
    data = TensorDataset(torch.randn(24, 10, generator=torch.Generator().manual_seed(2)))
    task = Adversaries()
    trainer = quiet_trainer("fsdp")
    trainer.fit(task, DataLoader(data, batch_size=4))
    reference = Adversaries()
    first, second = reference.configure_optimizers()
    g, d = reference.generator, reference.discriminator
    for (rows,) in DataLoader(data, batch_size=8):
        noise, real = rows[:, :4], rows[:, 4:]
        first.zero_grad()
        F.softplus(-d(g(noise))).mean().backward()
        first.step()
        second.zero_grad()
        both = torch.cat([real, g(noise).detach()])
        sign = torch.cat([-torch.ones(len(real)), torch.ones(len(real))])[:, None]
        F.softplus(sign * d(both)).mean().backward()
        second.step()
    return gap(whole(trainer, trainer.model), reference.state_dict())


RUNS: dict[str, Callable[..., Any]] = {
    run.__name__: run
    for run in (
        follows_the_parameters,
        divides_evenly,
        trains_adapters,
        ties_weights,
        ties_weights_across_units,
        keeps_some_whole,
        keeps_some_whole_in_windows,
        leaves_a_window_open,
        several_models,
        builds_without_values,
        refuses_to_guess_values,
        recomputes,
        compiles,
        copies,
        skips_together,
        clips,
        summons,
        loads_whole_tensors,
        evaluates_first,
        reduces_unused,
        refuses_stale_parameters,
        calls_other_methods,
        refuses_to_join,
        averages_in_the_trainer,
        fits_again,
        optimizes_by_hand,
    )
}


def run_all(names: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: RUNS[name]() for name in names}
