"""FSDP under a Trainer: fitted again, optimized by hand, averaged by a callback."""

from __future__ import annotations

import copy
import os
import tempfile
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Colwise, ModelCheckpoint, Parallel, Rowwise, Task, Trainer, broadcast_object_list
from tests.pool import ProcessesFailed, run_in_processes
from tests.shared_runs import SharedRuns
from tests.strategies.fsdp_models import EXACT, ROWS, NetTask, adamw, gap, loader, plain_task, whole
from tests.strategies.quiet import quiet_trainer

pytestmark = pytest.mark.sharded

runs = SharedRuns(__name__)


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


@runs
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


def test_a_callback_that_averages_the_task_and_validates_with_it(here):
    found = here(averages_in_the_trainer)
    assert max(found.values()) < 5e-6, found


@runs
def fits_again() -> dict[str, Any]:
    """A task may be fitted twice by one trainer, and validated by another."""
    task = NetTask()
    trainer = quiet_trainer("fsdp")
    trainer.fit(task, loader(), loader())
    trainer.loop = None
    again = quiet_trainer("fsdp")
    loss = again.validate(task, loader(), verbose=False)[0]["loss"]
    reference = NetTask()
    reference.load_state_dict(plain_task(1))
    expected = sum(F.cross_entropy(reference(x), y).item() for x, y in loader(2 * ROWS)) / 3
    return {"gap": gap(whole(again, again.model), plain_task(1)), "loss": abs(loss - expected)}


def test_a_task_is_fitted_by_one_trainer_and_validated_by_another(here):
    found = here(fits_again)
    assert max(found.values()) < 5e-6, found


HOOKS = ("on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end")


class SavesAtHooks(Callback):
    def __init__(self, folder: str) -> None:
        for hook in HOOKS:
            setattr(self, hook, lambda trainer, *_, path=f"{folder}/{hook}": trainer.save_checkpoint(path))


class TwoLayers(Task):
    fails = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.second(self.first(batch).tanh()).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))
        if self.fails and self.global_step:
            raise ValueError("on purpose")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


class FailsInValidation(TwoLayers):
    fails = True


@runs
def saves_within_validation() -> dict[str, float]:
    """In hooks of a validation, and where it fails; under FSDP and with a tensor that is divided over processes."""
    found = {}
    rows = DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(2)), batch_size=4)
    layers = {"first": Colwise(), "second": Rowwise()}
    for name, strategy in (("fsdp", lambda: "fsdp"), ("tp", lambda: Parallel(tp=2, tp_plan=layers))):
        folder = broadcast_object_list([tempfile.mkdtemp()])[0]
        trainer = quiet_trainer(strategy(), callbacks=[SavesAtHooks(folder)])
        trainer.fit(TwoLayers(), rows, rows)
        trained = whole(trainer, trainer.model)
        for hook in HOOKS:
            found[f"{name} {hook}"] = gap(TwoLayers.load_from_checkpoint(f"{folder}/{hook}").state_dict(), trained)
        saving = ModelCheckpoint(dirpath=folder, filename="failed", every_n_epochs=9, save_on_exception=True)
        trainer = quiet_trainer(strategy(), callbacks=[saving], enable_checkpointing=True)
        with suppress(ValueError):
            trainer.fit(FailsInValidation(), rows, rows)
        path = f"{folder}/{next(each for each in sorted(os.listdir(folder)) if each not in HOOKS)}"
        found[f"{name} failed"] = gap(TwoLayers.load_from_checkpoint(path).state_dict(), trained)
    return found


def test_a_save_within_a_validation_holds_what_is_trained(here):
    found = here(saves_within_validation)
    assert len(found) == 10
    assert max(found.values()) == 0.0, found


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


@runs
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


def test_optimizing_by_hand_with_two_backwards_in_a_step(here):
    assert here(optimizes_by_hand) < EXACT


def fit_with_a_step_left_out() -> None:
    quiet_trainer("fsdp").fit(NetTask(skipped=0), loader())


def test_a_step_left_out_on_one_process_is_refused():
    with pytest.raises(ProcessesFailed, match=r"NetTask.training_step returned None on rank 0"):
        run_in_processes(fit_with_a_step_left_out, 2, timeout=30)


def test_one_process_is_enough():
    trainer = quiet_trainer("fsdp")
    task = NetTask()
    trainer.fit(task, loader(8))
    state = trainer.strategy.state.model(trainer.model, full=True)
    assert gap(state, plain_task(1)) < EXACT
    assert torch.equal(state["net.scale"], torch.tensor([2.0]))
