from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drivetrain import ConfigurationError, Trainer
from drivetrain.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from tests.callbacks.guarded import Regression, rows, train
from tests.pool import run_in_processes


class Normed(Regression):
    """With a batch norm, whose statistics are averaged as well."""

    def __init__(self) -> None:
        super().__init__({})
        self.norm = nn.BatchNorm1d(3)
        self.validated: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layer(self.norm(batch[0])), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(self.layer.weight.detach().clone())


def averaged_by_hand(batches: int = 6, epochs: int = 2, skip: int = 0, **options: Any) -> tuple[Normed, AveragedModel]:
    """The same training in a plain loop, with torch's average of it."""
    task = Normed()
    average = AveragedModel(task, use_buffers=True, **options)
    configured = task.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    step = 0
    for _ in range(epochs):
        for index, batch in enumerate(rows(batches)):
            optimizer.zero_grad()
            task.training_step(batch, index).backward()
            optimizer.step()
            scheduler.step()
            if step >= skip:
                average.update_parameters(task)
            step += 1
    return task, average


def gap(task: nn.Module, other: nn.Module) -> float:
    here, there = task.state_dict(), other.state_dict()
    assert here.keys() == there.keys()
    return max(float((here[name].cpu().double() - there[name].cpu().double()).abs().max()) for name in here)


@pytest.mark.parametrize(
    ("make", "options", "skip"),
    [
        (lambda: EMAWeightAveraging(decay=0.9), {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, 0),
        (
            lambda: EMAWeightAveraging(decay=0.5, update_starting_at_step=3),
            {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
            3,
        ),
        (WeightAveraging, {}, 0),
        (lambda: WeightAveraging(device="cpu"), {}, 0),
        (lambda: WeightAveraging(avg_fn=_halfway), {"avg_fn": lambda *given: _halfway(*given)}, 0),
    ],
)
def test_the_model_ends_as_torchs_own_average_of_a_plain_loop(
    make: Callable[[], WeightAveraging], options: dict[str, Any], skip: int, tmp_path: Path
) -> None:
    task = Normed()
    callback = make()
    train(task, tmp_path, [callback], enable_checkpointing=False)
    trained, average = averaged_by_hand(skip=skip, **options)
    assert gap(task, average.module) < 1e-6
    assert gap(task, trained) > 1e-3
    assert callback.n_averaged == 12 - skip


def _halfway(average: Tensor, value: Tensor, count: Tensor) -> Tensor:
    assert isinstance(count, Tensor)
    return (average + value) / 2


def test_buffers_can_be_left_to_the_model(tmp_path: Path) -> None:
    task = Normed()
    train(task, tmp_path, [EMAWeightAveraging(decay=0.9, use_buffers=False)], enable_checkpointing=False)
    trained, _ = averaged_by_hand()
    assert torch.equal(task.norm.running_mean.cpu(), trained.norm.running_mean)  # type: ignore[arg-type]


def test_validation_sees_the_average_and_training_does_not(tmp_path: Path) -> None:
    task = Normed()
    trainer = Trainer(
        max_epochs=3,
        callbacks=[EMAWeightAveraging(decay=0.9)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(task, rows(6), rows(1))
    by_epoch = [averaged_by_hand(epochs=n, multi_avg_fn=get_ema_multi_avg_fn(0.9))[1].module for n in (1, 2, 3)]
    seen = task.validated[1:]  # the first is the sanity check's
    assert torch.equal(task.validated[0].cpu(), Normed().layer.weight)
    for weight, expected in zip(seen, by_epoch, strict=True):
        assert torch.allclose(weight.cpu(), expected.layer.weight, atol=1e-6)  # type: ignore[arg-type, union-attr]


def test_a_checkpoint_has_both_and_a_resumed_run_continues_exactly(tmp_path: Path) -> None:
    def fit(resume: Any = None) -> tuple[Normed, EMAWeightAveraging]:
        task, callback = Normed(), EMAWeightAveraging(decay=0.9, update_every_n_steps=2)
        saving = ModelCheckpoint(tmp_path, every_n_train_steps=7, save_top_k=-1, filename="{step}")
        train(task, tmp_path, [callback, saving], ckpt_path=resume, enable_checkpointing=True)
        return task, callback

    path = tmp_path / "step=7.ckpt"
    (task, callback), (resumed, again) = fit(), fit(path)
    assert gap(task, resumed) == 0.0
    assert callback.n_averaged == again.n_averaged == 6
    # for evaluation it holds the average, also where no callback asks for it
    plain = Normed()
    quiet = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    quiet.validate(plain, rows(1), ckpt_path=path, verbose=False)
    expected, _ = averaged_at(7)
    assert torch.allclose(plain.layer.weight.cpu(), expected, atol=1e-6)


def averaged_at(steps: int) -> tuple[Tensor, int]:
    """The weight's average after so many steps, every second of which counts."""
    task = Normed()
    configured = task.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    average, count = torch.empty(0), 0
    batches = [*rows(6), *rows(6)]
    for step in range(steps):
        optimizer.zero_grad()
        task.training_step(batches[step], step).backward()
        optimizer.step()
        scheduler.step()
        if step % 2 == 0:
            weight = task.layer.weight.detach()
            average = weight.clone() if count == 0 else average * 0.9 + weight * 0.1
            count += 1
    return average, count


def test_weights_alone_are_saved_as_the_average(tmp_path: Path) -> None:
    task = Normed()
    trainer = train(task, tmp_path, [EMAWeightAveraging(decay=0.9)], enable_checkpointing=False)
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    again = Normed()
    trainer.validate(again, rows(1), ckpt_path=tmp_path / "weights", verbose=False)
    assert gap(again, task) == 0.0


def test_an_exception_in_a_validation_leaves_the_weights_that_are_trained(tmp_path: Path) -> None:
    class Failing(Normed):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            if not self.trainer.sanity_checking:
                raise RuntimeError("in validation")

    task = Failing()
    callback = EMAWeightAveraging(decay=0.9)
    trainer = Trainer(
        max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    with pytest.raises(RuntimeError, match="in validation"):
        trainer.fit(task, rows(6), rows(1))
    trained, _ = averaged_by_hand(epochs=1)
    assert torch.allclose(task.layer.weight.cpu(), trained.layer.weight)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="from 0 to 1"):
        EMAWeightAveraging(decay=1.5)
    with pytest.raises(ConfigurationError, match="an integer of at least 1"):
        EMAWeightAveraging(update_every_n_steps=0)
    with pytest.raises(ConfigurationError, match="pass only one of these"):
        WeightAveraging(avg_fn=_halfway, multi_avg_fn=get_ema_multi_avg_fn())


def fit_over_processes(strategy: str, folder: str, resume: str | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    task = Regression({})
    saving = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    callbacks = [EMAWeightAveraging(decay=0.9), saving]
    trainer = train(task, folder, callbacks, ckpt_path=resume, strategy=strategy, enable_checkpointing=True)
    assert trainer.model is not None
    return trainer.strategy.state.model(trainer.model, full=True)


@pytest.mark.sharded
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_shards_are_averaged_where_they_are(strategy: str, tmp_path: Path) -> None:
    whole = run_in_processes(fit_over_processes, 2, (strategy, str(tmp_path / "a"), None))[0]
    resumed = run_in_processes(fit_over_processes, 2, (strategy, str(tmp_path / "b"), str(tmp_path / "a/step=4.ckpt")))
    task = Regression({})
    configured = task.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    average = AveragedModel(task, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    batches = list(rows(6, world=2))
    for _ in range(2):
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            inputs, targets = (torch.cat(pair) for pair in zip(first, second, strict=True))
            nn.functional.mse_loss(task.layer(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(task)
    for name, value in average.module.state_dict().items():  # type: ignore[union-attr]
        assert torch.allclose(whole[name], value, atol=1e-6), name
        assert torch.equal(resumed[0][name], whole[name]), name


def refused() -> str:
    from drivetrain import DeepSpeed

    with pytest.raises(ConfigurationError, match="keeps the trained weights in its engine") as caught:
        train(Regression({}), ".", [EMAWeightAveraging()], strategy=DeepSpeed(stage=1), enable_checkpointing=False)
    return str(caught.value)


@pytest.mark.sharded
@pytest.mark.cpu("DeepSpeed knows no device of this kind")
def test_deepspeed_is_refused() -> None:
    assert "fsdp" in run_in_processes(refused, 1, timeout=120)[0]


def test_a_migration_reaches_the_weights_that_are_trained_and_their_average(tmp_path: Path) -> None:
    class Migrated(Normed):
        """Has weights in other units from this version on."""

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint.pop("added") == 1
            checkpoint["state_dict"]["layer.weight"] = checkpoint["state_dict"]["layer.weight"] * 10

    class Old(Normed):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["added"] = 1

    class Sees(EMAWeightAveraging):
        seen: dict[str, Tensor]

        def on_load_checkpoint(self, trainer: Any, task: Any, checkpoint: dict[str, Any]) -> None:
            names = {"average": "state_dict", "trained": "current_model_state"}
            self.seen = {name: checkpoint[entry]["layer.weight"].clone() for name, entry in names.items()}
            super().on_load_checkpoint(trainer, task, checkpoint)

    path, callbacks = tmp_path / "saved", [Sees(decay=0.9), Sees(decay=0.9)]
    train(Old(), tmp_path, [EMAWeightAveraging(decay=0.9)], enable_checkpointing=False).save_checkpoint(path)
    for task, callback in zip((Normed(), Migrated()), callbacks, strict=True):
        train(task, tmp_path, [callback], enable_checkpointing=False, ckpt_path=path)
    for name, weight in callbacks[0].seen.items():
        assert torch.equal(callbacks[1].seen[name], weight * 10), name
