"""Under DDP every gradient that an optimizer steps with is averaged over processes, or refused before the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import DDP, Accelerator, ConfigurationError, Task
from tests.pool import run_in_processes
from tests.strategies.quiet import quiet_trainer


def data() -> Tensor:
    return torch.randn(24, 4, generator=torch.Generator().manual_seed(1))


class OneLoss(Task):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def losses(self, batch: Tensor) -> dict[str, Tensor]:
        target = batch.sum(1, keepdim=True)
        return {"a": (self.a(batch) - target).square().mean(), "b": (self.b(batch) + target).square().mean()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return sum(self.losses(batch).values())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Named(OneLoss):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.losses(batch)

    def configure_optimizers(self) -> Any:
        return {name: torch.optim.SGD(getattr(self, name).parameters(), lr=0.05) for name in "ab"}


class ByHand(OneLoss):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for loss in self.losses(batch).values():
            self.manual_backward(loss)
        optimizer.step()


class InTurn(ByHand):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for name, optimizer in zip("ab", optimizers, strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.losses(batch)[name])
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(getattr(self, name).parameters(), lr=0.05) for name in "ab"]


class Closure(ByHand):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def compute() -> Tensor:
            optimizer.zero_grad()
            loss = sum(self.losses(batch).values())
            self.manual_backward(loss)  # type: ignore[arg-type]
            return loss  # type: ignore[return-value]

        optimizer.step(closure=compute)


class Searching(OneLoss):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")


class SearchingByHand(Closure):
    configure_optimizers = Searching.configure_optimizers


def searched(task: OneLoss) -> OneLoss:
    optimizer = task.configure_optimizers()
    for batch in data().split(4):

        def compute(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = sum(task.losses(batch).values())
            loss.backward()  # type: ignore[union-attr]
            return loss  # type: ignore[return-value]

        optimizer.step(compute)
    return task


def stepped(task: OneLoss) -> OneLoss:
    optimizer = OneLoss.configure_optimizers(task)
    for batch in data().split(4):
        optimizer.zero_grad()
        sum(task.losses(batch).values()).backward()  # type: ignore[union-attr]
        optimizer.step()
    return task


def loop(strategy: DDP, search: bool = False, toggles: bool = False) -> OneLoss:
    """A raw loop: over L-BFGS, with one optimizer, or with two that take turns."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    task = Searching() if search else InTurn() if toggles else OneLoss()
    made = task.configure_optimizers()
    made = made if isinstance(made, list) else [made]
    model, *optimizers = accelerator.prepare(task, *made)
    task.forward = lambda batch: task.losses(batch)  # type: ignore[method-assign]
    for batch in data().split(4):
        rows = batch[2 * accelerator.process_index :][:2]
        for number, optimizer in enumerate(optimizers):

            def compute(number: int = number, optimizer: Any = optimizer, rows: Tensor = rows) -> Tensor:
                optimizer.zero_grad()
                losses = model(rows)
                loss = losses["ab"[number]] if toggles else sum(losses.values())
                accelerator.backward(loss)
                return loss

            if toggles:
                with optimizer.toggle_model():
                    compute()
                optimizer.step()
            elif search:
                optimizer.step(compute)
            else:
                compute()
                optimizer.step()
    return task


def gaps(static: bool) -> Iterator[tuple[str, float]]:
    plain, search = stepped(OneLoss()), searched(Searching())
    for kind in (OneLoss, Named, ByHand, InTurn, Closure, Searching, SearchingByHand):
        task = kind()
        quiet_trainer(DDP(static_graph=static)).fit(task, DataLoader(data(), batch_size=2))  # type: ignore[arg-type]
        yield kind.__name__, _gap(task, search if "Searching" in kind.__name__ else plain)
    for name, options in (("loop", {}), ("search", {"search": True}), ("turns", {"toggles": True})):
        yield name, _gap(loop(DDP(static_graph=static), **options), search if name == "search" else plain)


def _gap(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((mine - its).abs().max()) for mine, its in pairs)


def differences(static: bool) -> list[tuple[str, float]]:
    torch.set_num_threads(1)
    return [(name, gap) for name, gap in gaps(static) if not gap <= 5e-6]


@pytest.mark.parametrize("static", [False, True])
def test_all_ways_of_optimizing_give_the_weights_of_one_process(static: bool) -> None:
    assert run_in_processes(differences, 2, (static,), timeout=120) == [[], []]


# what is refused


class Alone(ByHand):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        sum(self.losses(batch).values()).backward()  # type: ignore[union-attr]
        optimizer.step()


class PartlyAlone(ByHand):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        losses = self.losses(batch)
        self.manual_backward(losses["a"])
        losses["b"].backward()
        optimizer.step()


class AloneInClosure(Closure):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def fit(kind: type[Task]) -> nn.Module:
    task = kind()
    quiet_trainer("ddp").fit(task, DataLoader(data(), batch_size=2))  # type: ignore[arg-type]
    return task


def backward_twice() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net := nn.Linear(4, 1), torch.optim.SGD(net.parameters(), lr=0.1))
    loss = model(data()[2 * accelerator.process_index :][:2]).square().mean()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss * 2)
    optimizer.step()


def bare_module() -> None:
    """The user's own module in the place of the prepared one."""
    accelerator = Accelerator(cpu=True)
    _, optimizer = accelerator.prepare(net := nn.Linear(4, 1), torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(net(data()[2 * accelerator.process_index :][:2]).square().mean())
    optimizer.step()


UNREDUCED: dict[str, tuple[Callable[[], Any], str]] = {
    "a backward by hand": (lambda: fit(Alone), "a.weight"),
    "one of two backwards by hand": (lambda: fit(PartlyAlone), "b.weight"),
    "a backward by hand in a closure": (lambda: fit(AloneInClosure), "a.weight"),
    "two backwards of one forward": (backward_twice, "weight"),
    "a forward past DDP": (bare_module, "weight"),
}


def refusals() -> dict[str, str]:
    found = {}
    for name, (run, _) in UNREDUCED.items():
        with pytest.raises(ConfigurationError) as refused:
            run()
        found[name] = str(refused.value)
    return found


def test_gradients_that_are_not_averaged_are_refused_by_name() -> None:
    for found in run_in_processes(refusals, 2, timeout=60):
        for name, (_, parameter) in UNREDUCED.items():
            assert f"The gradient of {parameter} on rank 1 differs from rank 0" in found[name], name
            assert "self.manual_backward(loss)" in found[name]


# drift


class Drifting(OneLoss):
    """Rank 1 changes a weight once some steps are done."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and self.trainer.global_rank == 1:
            with torch.no_grad():
                self.b.weight += 1e-3


def drift(every: int, saves: str | None) -> tuple[str, int]:
    task = Drifting()
    trainer = quiet_trainer(DDP(check_copies_every=every))
    try:
        trainer.fit(task, DataLoader(data(), batch_size=2))  # type: ignore[arg-type]
        if saves is not None:
            trainer.save_checkpoint(saves)
    except ConfigurationError as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


@pytest.mark.parametrize(("every", "saves", "step"), [(5, False, 5), (1000, True, 6), (0, True, 6), (1000, False, 6)])
def test_copies_are_compared_at_an_interval_and_at_saves(tmp_path: Any, every: int, saves: bool, step: int) -> None:
    for message, ended in run_in_processes(drift, 2, (every, str(tmp_path / "saved") if saves else None)):
        assert ended == step
        is_found = every == 5 or (every and saves)
        assert ("The value of b.weight on rank 1 differs from rank 0" in message) == bool(is_found)
