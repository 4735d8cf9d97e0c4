"""A case as a plain loop, as drivetrain runs it, and what the comparison of the two says."""

from __future__ import annotations

import itertools
import math
import re
import traceback
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import (
    Accelerator,
    Callback,
    DataLoaderConfiguration,
    DrivetrainError,
    ModelCheckpoint,
    PartialState,
    Task,
    Trainer,
    gather_object,
)
from tests.fuzz.cases import (
    SCHEDULERS,
    STRATEGIES,
    Case,
    change_parameters,
    losses_of,
    make_loader,
    make_model,
    make_optimizer,
    make_optimizers_in_turns,
    rows_of,
    validation_loader,
)

TOLERANCE = {"32": 5e-6, "64-true": 1e-11}
MAX_NORM, MAX_VALUE = 0.5, 0.1
ROUNDING = 50  # how many times the change that the last bit of the first weights makes, for what amplifies rounding
KINDS = ("equal", "rounded", "saved", "refused", "different", "error")
WITHIN_EPOCHS = ("batch_end", "exception")
OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


@dataclass
class Trained:
    """What a run leaves: the weights and buffers, how many steps it took, and its last validation's loss."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    validation: float = math.nan


@dataclass
class Verdict:
    """What came of a case.

    Attributes:
        case: The case.
        kind: "equal", "rounded" (equal up to the rounding that the optimizer amplifies), "saved" (it goes on
            elsewhere), "refused" (with reason), "different" or "error".
        text: The error or the difference.
    """

    case: Case
    kind: str
    text: str = ""

    @property
    def fails(self) -> bool:
        """Whether it shows a fault."""
        return self.kind in ("different", "error")


class Broken(Exception):
    """Ends a run in its middle."""


def dtype_of(case: Case) -> torch.dtype:
    return torch.float64 if case.precision == "64-true" else torch.float32


# the plain loop


def plain(case: Case, nudged: bool = False) -> Trained:
    """Train in plain torch on one process: a micro-batch is what the processes have together.

    Args:
        case: The case.
        nudged: Whether the first weights differ in their last bit, which shows how the run amplifies rounding.
    """
    model = make_model(case).to(dtype_of(case))
    for parameter in model.parameters() if nudged else ():
        parameter.data.mul_(1 + torch.finfo(dtype_of(case)).eps)
    in_turns = make_optimizers_in_turns(case, model) if case.driver == "turns" else []
    optimizer = make_optimizer(case, model)
    interval, scheduler = _scheduler(case, optimizer)
    loader, trained = make_loader(case), Trained()
    world, moves = STRATEGIES[case.strategy][0], bool(case.then)
    torch.manual_seed(case.seed)
    for epoch in range(case.epochs):
        if epoch == 1:
            change_parameters(case, model, optimizer)
        model.train()
        batches = [rows_of(batch) for batch in loader]
        rounds = _together(case, batches, world)
        while window := list(itertools.islice(rounds, case.accumulate)):
            for each in in_turns or [optimizer]:
                if not _plain_step(case, model, each, window):
                    continue
                trained.steps += 1
                if interval == "step":
                    scheduler.step()
            if 0 < case.max_steps <= trained.steps:
                break
            if moves and case.save in WITHIN_EPOCHS and trained.steps >= case.save_at:
                done, moves = world * (window[-1][0] + 1), False
                world = STRATEGIES[case.then][0]
                rounds = _together(case, batches[done:], world)
        if moves and trained.steps >= case.save_at:
            world, moves = STRATEGIES[case.then][0], False
        if interval == "epoch":
            scheduler.step()
        if case.validate:
            model.eval()
            with torch.no_grad():
                losses = [losses_of(model, rows_of(batch).to(dtype_of(case))) for batch in validation_loader(case)]
            trained.validation = float(torch.cat(losses).mean())
        if 0 < case.max_steps <= trained.steps:
            break
    trained.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return trained


def _plain_step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, window: Sequence[Any]) -> bool:
    """Step on a window; returns whether there was a loss.

    A training step runs in the default dtype of its precision, and so do steps by hand within it: NAdam makes a part of
    its state of that dtype.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_of(case) if case.driver in ("manual", "turns") else before)
    try:
        return _plain_step_in(case, model, optimizer, window)
    finally:
        torch.set_default_dtype(before)


def _plain_step_in(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, window: Sequence[Any]) -> bool:
    def backward() -> Tensor:
        model.zero_grad()
        return _plain_backward(case, model, window)

    if case.optimizer == "lbfgs":
        optimizer.step(backward)
    elif backward() is None:
        return False
    else:
        _clip(case, optimizer)
        optimizer.step()
    return True


def _plain_backward(case: Case, model: nn.Module, window: Sequence[tuple[int, list[Tensor]]]) -> Tensor | None:
    used = [(index, parts) for index, parts in window if case.loss != "some" or index % 3 != 2]
    weight = sum(len(part) for _, parts in window for part in parts)
    for index, parts in used:
        losses = losses_of(model, torch.cat(parts).to(dtype_of(case)), index)
        if case.loss == "weighted":
            loss = losses.sum() / weight
        else:
            loss = sum(each.mean() for each in losses.split([len(part) for part in parts])) / len(parts) / len(window)
        loss.backward()
    return loss if used else None


def _together(case: Case, batches: Sequence[Tensor], world: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Number the rounds of batches, one batch for each process, and give the parts of each that count alike."""
    rounds_only = case.drop_last and case.data not in ("own", "batches")
    whole = len(batches) - len(batches) % world if rounds_only else len(batches)
    completes = case.driver == "accelerator" and world > 1
    for number, start in enumerate(range(0, whole, world)[: case.limit]):
        parts = list(batches[start : start + world])
        if completes and case.data == "batches":  # whole batches, each of which counts as much as another
            yield number, [*parts, *itertools.islice(itertools.cycle(batches), world - len(parts))]
            continue
        rows, size = torch.cat(parts), len(batches[0]) if case.data == "own" else case.batch_size
        missing = size * world - len(rows)
        if completes and missing:  # completed by the epoch's first rows
            epoch = torch.cat(list(batches))
            rows = torch.cat([rows, *itertools.repeat(epoch, missing // len(epoch) + 1)])[: size * world]
        yield number, [rows]


def _scheduler(case: Case, optimizer: torch.optim.Optimizer) -> tuple[str, Any]:
    if case.scheduler == "none":
        return "never", None
    interval, make = SCHEDULERS[case.scheduler]
    return interval, make(optimizer)


def stepped_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _clip(case: Case, optimizer: torch.optim.Optimizer) -> None:
    if case.clip == "norm":
        nn.utils.clip_grad_norm_(stepped_by(optimizer), MAX_NORM)
    elif case.clip == "value":
        nn.utils.clip_grad_value_(stepped_by(optimizer), MAX_VALUE)


# the Trainer


class FuzzTask(Task):
    """The case as a task.

    Args:
        case: The case.
        breaks: Whether a micro-batch after `save_at` steps raises.
    """

    def __init__(self, case: Case, breaks: bool = False) -> None:
        super().__init__()
        self.case, self.breaks, self.is_changed = case, breaks, False
        self.net = make_model(case)
        self.automatic_optimization = case.driver not in ("manual", "turns")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.breaks and self.trainer.global_step >= self.case.save_at:
            raise Broken
        if self.case.loss == "some" and batch_idx % 3 == 2:
            return None
        if self.case.driver == "turns":
            return self.optimize_in_turns(batch, batch_idx)
        losses = losses_of(self.net, rows_of(batch).to(dtype_of(self.case)), batch_idx)
        if self.case.driver == "manual":
            return self.optimize_by_hand(losses.mean(), batch_idx)
        if self.case.loss == "weighted":
            return {"loss": losses.sum(), "weight": len(losses)}
        return losses.mean()

    def optimize_by_hand(self, loss: Tensor, batch_idx: int) -> None:
        optimizer, place = self.optimizers(), batch_idx % self.case.accumulate
        window = min(self.case.accumulate, self.trainer.num_training_batches - batch_idx + place)
        if place == 0:
            optimizer.zero_grad()
        self.manual_backward(loss / window)
        if place == window - 1:
            optimizer.step()
            schedulers = self.lr_schedulers()
            if self.case.scheduler != "none" and SCHEDULERS[self.case.scheduler][0] == "step":
                schedulers.step()

    def optimize_in_turns(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(losses_of(self.net, rows_of(batch).to(dtype_of(self.case)), batch_idx).mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch >= 1 and not self.is_changed:  # in a resumed run too, which no checkpoint does
            self.is_changed = True
            change_parameters(self.case, self.net, self.trainer.optimizers[0])

    def on_train_epoch_end(self) -> None:
        if self.case.driver == "manual" and self.case.scheduler == "per_epoch":
            self.lr_schedulers().step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", losses_of(self.net, rows_of(batch).to(dtype_of(self.case))).mean())

    def configure_optimizers(self) -> Any:
        if self.case.driver == "turns":
            return make_optimizers_in_turns(self.case, self.net)
        optimizer = make_optimizer(self.case, self.net)
        interval, scheduler = _scheduler(self.case, optimizer)
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


class SaveAndBreak(Callback):
    """Saves a checkpoint and ends the run, at the case's moment."""

    def __init__(self, case: Case, path: str) -> None:
        self.case, self.path = case, path

    def _now(self, moment: str, trainer: Trainer) -> None:
        if self.case.save == moment and trainer.global_step >= self.case.save_at:
            trainer.save_checkpoint(self.path)
            raise Broken

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self._now("batch_end", trainer)

    def on_train_epoch_end(self, trainer, task):
        self._now("train_epoch_end", trainer)

    def on_validation_start(self, trainer, task):
        self._now("validation_start", trainer)

    def on_validation_batch_end(self, trainer, task, outputs, batch, batch_idx, dataloader_idx=0):
        self._now("validation_batch_end", trainer)

    def on_validation_end(self, trainer, task):
        self._now("validation_end", trainer)


def begin(case: Case, folder: str) -> Trained | None:
    """Train with the Trainer until the case is broken off; returns None then."""
    path, on_exception = str(Path(folder, "saved")), case.save == "exception"
    callback = ModelCheckpoint(dirpath=path, save_on_exception=True) if on_exception else SaveAndBreak(case, path)
    try:
        return _fit(case, case.strategy, [callback], None, breaks=on_exception)
    except Broken:
        return None


def finish(case: Case, folder: str) -> Trained:
    """Train with the Trainer from where the case was broken off."""
    found = [Path(folder, "saved")]
    if case.save == "exception":
        found = sorted(found[0].glob("*"), key=lambda each: int(re.findall(r"step=(\d+)", each.name)[-1]))
    return _fit(case, case.then or case.strategy, [], str(found[-1]))


def with_trainer(case: Case, folder: str) -> Trained:
    """Train with the Trainer, in two runs if the case is broken off."""
    if case.save == "never":
        return _fit(case, case.strategy, [], None)
    return begin(case, folder) or finish(case, folder)


def _fit(case: Case, strategy: str, callbacks: list[Any], path: str | None, breaks: bool = False) -> Trained:
    task = FuzzTask(case, breaks)
    by_hand = case.driver == "manual"
    trainer = Trainer(
        **OPTIONS,
        strategy=STRATEGIES[strategy][1](),
        precision=case.precision,
        max_epochs=case.epochs,
        max_steps=case.max_steps,
        accumulate_grad_batches=1 if by_hand else case.accumulate,
        limit_train_batches=case.limit,
        limit_val_batches=1.0 if case.validate else 0,
        gradient_clip_val=None if case.clip == "none" else MAX_NORM if case.clip == "norm" else MAX_VALUE,
        gradient_clip_algorithm=None if case.clip == "none" else case.clip,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
    )
    loader = make_loader(case)
    torch.manual_seed(case.seed)
    trainer.fit(task, loader, validation_loader(case) if case.validate else None, ckpt_path=path)
    weights = {name.removeprefix("net."): value for name, value in whole(trainer.accelerator, trainer.model).items()}
    validation = trainer.callback_metrics.get("validation", math.nan)
    return Trained(weights, trainer.global_step, float(validation))


# the raw loop


def with_accelerator(case: Case, folder: str) -> Trained:
    """Train in a loop of one's own, in two runs if the case is broken off."""
    path = str(Path(folder, "saved"))
    try:
        return _loop(case, path, resume=False)
    except Broken:
        return _loop(case, path, resume=True)


@dataclass
class Progress:
    """Where a loop of one's own is."""

    epoch: int = 0
    steps: int = 0
    batches: int = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def _loop(case: Case, path: str, resume: bool) -> Trained:
    accelerator = Accelerator(
        cpu=True,
        strategy=STRATEGIES[case.strategy][1](),
        mixed_precision=case.precision,
        gradient_accumulation_steps=case.accumulate,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        step_scheduler_per_process=False,
    )
    model = make_model(case).to(dtype_of(case))
    optimizer = make_optimizer(case, model)
    interval, scheduler = _scheduler(case, optimizer)
    loader, progress = make_loader(case), Progress()
    torch.manual_seed(case.seed)
    bare = model
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare_data_loader(loader)  # an unknown object is left as it is by `prepare`
    if scheduler is not None:
        scheduler = accelerator.prepare(scheduler)
    accelerator.register_for_checkpointing(progress)
    if resume:
        accelerator.load_state(path)
        if progress.epoch > 0:
            change_parameters(case, bare, optimizer)  # which no checkpoint does
    changed, first = progress.epoch > 0, progress.epoch
    if case.seed % 2 and interval != "epoch" and loader.epoch > progress.epoch:  # all of that epoch was trained on
        first, progress.batches = loader.epoch, 0
    for epoch in range(first, case.epochs):
        progress.epoch = epoch
        loader.set_epoch(epoch)
        if epoch == 1 and not changed:
            change_parameters(case, bare, optimizer)
        for batch in loader:
            with accelerator.accumulate(model):
                losses = losses_of(model, rows_of(batch).to(dtype_of(case)), progress.batches)
                accelerator.backward(losses.mean())
                if accelerator.sync_gradients and case.clip == "norm":
                    accelerator.clip_grad_norm_(stepped_by(optimizer), MAX_NORM)
                elif accelerator.sync_gradients and case.clip == "value":
                    accelerator.clip_grad_value_(stepped_by(optimizer), MAX_VALUE)
                optimizer.step()
                if interval == "step":
                    scheduler.step()
                optimizer.zero_grad()
            progress.batches += 1
            if accelerator.sync_gradients:
                progress.steps += 1
                if progress.steps == case.max_steps:
                    break
                if case.save != "never" and not resume and progress.steps >= case.save_at:
                    accelerator.save_state(path)
                    raise Broken
        progress.batches = 0
        if interval == "epoch":
            scheduler.step()
        if progress.steps == case.max_steps:
            break
    return Trained(whole(accelerator, model), progress.steps)


def whole(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights and buffers, whole; where only the main process has them, nothing on the others."""
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


# judging


def judge(case: Case, part: str, folder: str) -> Verdict:
    """Run a case, or the part of it before or after the break, on these processes; compare it with the plain loop."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = plain(case)
        except Exception as error:
            return Verdict(case, "refused", f"by torch, also in the plain loop: {error}")
        try:
            run = with_accelerator if case.driver == "accelerator" else with_trainer
            found = {"first": begin, "second": finish, "whole": run}[part](case, folder)
            return Verdict(case, "saved") if found is None else compare(case, expected, found)
        except DrivetrainError as error:
            return Verdict(case, "refused", f"{type(error).__name__}: {error}")
        except Exception:
            return Verdict(case, "error", traceback.format_exc())


def compare(case: Case, expected: Trained, found: Trained) -> Verdict:
    """Return whether steps, weights and the validation's loss are those of the plain loop."""
    if found.steps != expected.steps:
        return Verdict(case, "different", f"{found.steps} steps for {expected.steps}")
    allowed, kind = _allowed(case, expected), "equal"
    for name, value in expected.weights.items() if found.weights or PartialState().is_main_process else ():
        gap, size = _gap(found.weights[name], value), max(1.0, float(value.abs().max()))
        if not gap <= allowed * size:
            return Verdict(case, "different", f"{name} by {gap:.2g} after {found.steps} steps")
        if gap > TOLERANCE[case.precision] * size:
            kind = "rounded"
    # A run without batches, or one that max_steps ends in mid-epoch, does not validate.
    finished = found.steps and (found.steps < case.max_steps or case.max_steps < 0)
    precise = max(1e-5, allowed)
    if case.validate and finished and not math.isclose(found.validation, expected.validation, rel_tol=precise):
        return Verdict(case, "different", f"validation {found.validation} for {expected.validation}")
    return Verdict(case, kind)


def _allowed(case: Case, expected: Trained) -> float:
    """Return how far weights may be off; L-BFGS divides by differences of gradients, which amplifies their rounding."""
    if case.optimizer != "lbfgs":
        return TOLERANCE[case.precision]
    nudged = plain(case, nudged=True)
    change = max(_gap(nudged.weights[name], value) for name, value in expected.weights.items())
    return max(TOLERANCE[case.precision], ROUNDING * change)


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) if other.numel() else 0.0


def judge_all(cases: Sequence[Case], part: str, root: str) -> list[Verdict]:
    """Run cases, or parts of them, one after another in these processes; a verdict is the worst of the ranks'."""
    verdicts = []
    for case in cases:
        folder = Path(root, str(zlib.crc32(repr(case).encode())))
        folder.mkdir(exist_ok=True)
        everyone: list[Verdict] = gather_object([judge(case, part, str(folder))])
        verdicts.append(max(everyone, key=lambda each: KINDS.index(each.kind)))
    return verdicts
