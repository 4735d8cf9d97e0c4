"""What is frozen, unfrozen or added during a run is trained as in one plain process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from drivetrain import DDP, FSDP, Accelerator, CollectiveError, Task
from tests.pool import run_in_processes
from tests.strategies.quiet import quiet_trainer

STEPS, ROWS = 14, 4
Change = Callable[["Net", torch.optim.Optimizer, int], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.back, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.later: nn.Module | None = None
        self.beside: Tensor | None = None

    def loss(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.back(rows)) * self.scale
        hidden = hidden if self.later is None else self.later(hidden)
        hidden = hidden if self.beside is None else hidden * self.beside
        return (self.head(hidden) - rows.sum(1, keepdim=True)).square().mean()

    def forward(self, rows: Tensor) -> Tensor:
        return self.loss(rows)


def unfrozen(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    net.back.requires_grad_(step >= 3)
    net.scale.requires_grad_(step >= 4)


def frozen(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    net.back.requires_grad_(step < 12)


def in_turn(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    net.back.requires_grad_(step % 2 == 0)
    net.head.requires_grad_(step % 3 == 0 or step % 2 == 1)


def added(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    net.back.requires_grad_(step >= 3)
    if step < 0:
        del optimizer.param_groups[1]
    if step == 3:
        optimizer.add_param_group({"params": net.back.parameters(), "lr": 0.02})


def new_layer(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    net.back.requires_grad_(step < 5)
    if step == 3:
        torch.manual_seed(1)
        net.later = nn.Linear(4, 4)
        optimizer.add_param_group({"params": net.later.parameters()})


def beside_the_model(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 3:
        net.__dict__["beside"] = torch.ones(4, requires_grad=True)
        optimizer.add_param_group({"params": [net.beside]})


CHANGES: dict[str, Change] = {
    each.__name__: each for each in (unfrozen, frozen, in_turn, added, new_layer, beside_the_model)
}


def make(change: Change) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    groups = [{"params": [net.scale, *net.head.parameters()]}, {"params": net.back.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    change(net, optimizer, -1)
    return net, optimizer


def data(accumulate: int = 1) -> Tensor:
    return torch.randn(STEPS * accumulate * ROWS, 3, generator=torch.Generator().manual_seed(2))


def weights(net: Net) -> dict[str, Tensor]:
    state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in net.state_dict().items()
    }
    found = {name: value.detach().clone() for name, value in state.items()}
    return found if net.beside is None else {**found, "beside": net.beside.detach().clone()}


def plain(kind: str, accumulate: int, lasts: int) -> dict[str, Tensor]:
    """Train in one process; `lasts` is how many micro-batches there are from one change to the next."""
    change = CHANGES[kind]
    net, optimizer = make(change)
    for number, rows in enumerate(data(accumulate).split(ROWS)):
        if number % lasts == 0:
            change(net, optimizer, number // lasts)
        (net(rows) / accumulate).backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(net)


def with_accelerator(kind: str, accumulate: int, lasts: int, strategy: Any) -> dict[str, Tensor]:
    change = CHANGES[kind]
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=accumulate)
    net, bare = make(change)
    model, optimizer = accelerator.prepare(net, bare)
    mine = slice(2 * accelerator.process_index, 2 * accelerator.process_index + 2)
    for number, rows in enumerate(data(accumulate).split(ROWS)):
        if number % lasts == 0:
            change(net, bare, number // lasts)
        with accelerator.accumulate(model):
            accelerator.backward(model(rows[mine]))
            accelerator.clip_grad_norm_([p for group in bare.param_groups for p in group["params"]], 100.0)
            optimizer.step()
            optimizer.zero_grad()
    return weights(net)


class Changing(Task):
    def __init__(self, kind: str, accumulate: int, lasts: int) -> None:
        super().__init__()
        self.change, self.accumulate, self.lasts = CHANGES[kind], accumulate, lasts
        self.net, self.optimizer = make(self.change)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx % self.lasts == 0 and self.automatic_optimization:
            self.change(self.net, self.optimizer, batch_idx // self.lasts)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


class ByHand(Changing):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        if batch_idx % self.lasts == 0:
            self.change(self.net, self.optimizer, batch_idx // self.lasts)
        self.manual_backward(self.net.loss(batch) / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def with_trainer(kind: str, accumulate: int, lasts: int, strategy: Any, by_hand: bool = False) -> dict[str, Tensor]:
    task = (ByHand if by_hand else Changing)(kind, accumulate, lasts)
    windows = {} if by_hand else {"accumulate_grad_batches": accumulate}
    quiet_trainer(strategy, **windows).fit(task, DataLoader(data(accumulate), batch_size=2))  # type: ignore[arg-type]
    return weights(task.net)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDP,
    "static": lambda: DDP(static_graph=True),
    "unused": lambda: DDP(find_unused_parameters=True),
    "auto": lambda: DDP(find_unused_parameters="auto"),
    "hook": lambda: DDP(
        gradient_as_bucket_view=False, comm_hook="powersgd", comm_hook_options={"start_powerSGD_iter": 100}
    ),
    "fsdp": lambda: FSDP(wrap=nn.Linear),
}


def differences(strategies: list[str], accumulate: int, lasts: int) -> list[str]:
    """The runs whose weights differ from those of one plain process, and by how much."""
    torch.set_num_threads(1)
    found = []
    for kind in CHANGES:
        expected = plain(kind, accumulate, lasts)
        for name in strategies:
            runs = {"accelerator": with_accelerator, "trainer": with_trainer}
            if name in ("ddp", "static"):
                runs["by hand"] = partial(with_trainer, by_hand=True)
            for driver, run in runs.items():
                own = run(kind, accumulate, lasts, STRATEGIES[name]())
                gap = max(float((own[key] - value).abs().max()) for key, value in expected.items())
                if not gap <= 5e-6:
                    found.append(f"{kind} {name} {driver}: {gap:.2g}")
    return found


@pytest.mark.parametrize(
    ("strategies", "accumulate", "lasts"),
    [(["ddp", "static", "unused", "auto", "hook"], 1, 1), (["ddp", "unused"], 2, 2), (["ddp", "unused"], 2, 1)],
)
def test_ddp_trains_what_one_process_would(strategies: list[str], accumulate: int, lasts: int) -> None:
    assert run_in_processes(differences, 2, (strategies, accumulate, lasts), timeout=120) == [[], []]


@pytest.mark.sharded
@pytest.mark.parametrize(("accumulate", "lasts"), [(1, 1), (2, 2), (2, 1)])
def test_fsdp_trains_what_one_process_would(accumulate: int, lasts: int) -> None:
    assert run_in_processes(differences, 2, (["fsdp"], accumulate, lasts), timeout=120) == [[], []]


def disagree() -> str:
    accelerator = Accelerator(cpu=True)
    net, bare = make(unfrozen)
    model, _ = accelerator.prepare(net, bare)
    (net.back.weight if accelerator.is_main_process else net.back.bias).requires_grad_(True)
    with pytest.raises(CollectiveError) as refused:
        model(data()[:2])
    return str(refused.value)


def test_processes_that_train_other_parameters_are_refused_by_name() -> None:
    for message in run_in_processes(disagree, 2, timeout=60):
        assert "rank 0: requires_grad(True: back.weight, False: None)" in message
        assert "rank 1: requires_grad(True: back.bias, False: None)" in message


class Adversaries(nn.Module):
    """Both sides of a GAN, each frozen while the other learns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(3, 3), nn.Linear(3, 1)


def play(accelerator: Accelerator | None) -> list[Tensor]:
    pair = Adversaries()
    maker: Any = pair.maker
    judge: Any = pair.judge
    optimizers: list[Any] = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (maker, judge)]
    backward: Callable[[Tensor], Any] = Tensor.backward
    mine = slice(None)
    if accelerator is not None:
        maker, judge, *optimizers = accelerator.prepare(maker, judge, *optimizers)
        backward, mine = accelerator.backward, slice(2 * accelerator.process_index, 2 * accelerator.process_index + 2)
    for rows in data().split(ROWS)[:6]:
        pair.judge.requires_grad_(False)
        backward(judge(maker(rows[mine])).square().mean())
        optimizers[0].step()
        optimizers[0].zero_grad()
        pair.judge.requires_grad_(True)
        pair.maker.requires_grad_(False)
        backward((judge(maker(rows[mine])) - judge(rows[mine])).sigmoid().mean())
        optimizers[1].step()
        optimizers[1].zero_grad()
        pair.maker.requires_grad_(True)
    return [parameter.detach() for parameter in pair.parameters()]


def play_on_two() -> list[float]:
    own = play(Accelerator(cpu=True))
    return [float((one - other).abs().max()) for one, other in zip(own, play(None), strict=True)]


def test_a_model_may_be_frozen_as_a_whole_while_another_learns_through_it() -> None:
    for gaps in run_in_processes(play_on_two, 2, timeout=60):
        assert max(gaps) <= 5e-6


def unfrozen_after_nothing_was_trained() -> float:
    accelerator = Accelerator(cpu=True)
    net, other = (nn.Linear(3, 1, bias=False) for _ in range(2))
    for each in (net, other):
        nn.init.ones_(each.weight)
    net.requires_grad_(False)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    net.requires_grad_(True)
    rows = data()[:ROWS]
    accelerator.backward(model(rows[2 * accelerator.process_index :][:2]).square().mean())
    optimizer.step()
    other(rows).square().mean().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    return float((net.weight - other.weight).abs().max())


def test_a_model_that_was_frozen_as_a_whole_when_it_was_prepared_can_be_trained_later() -> None:
    assert max(run_in_processes(unfrozen_after_nothing_was_trained, 2)) <= 5e-6
