"""What hooks of Lightning's scripts are called with, in which order, and what they see of a checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import ConfigurationError
from drivetrain.compat.lightning.fabric.utilities import disable_possible_user_warnings
from drivetrain.compat.lightning.fabric.utilities.warnings import PossibleUserWarning
from drivetrain.compat.lightning.pytorch import Callback, Trainer, __version__
from drivetrain.compat.lightning.pytorch.callbacks import GradientAccumulationScheduler
from drivetrain.compat.lightning.pytorch.demos.boring_classes import BoringModel
from tests.pool import run_in_processes

OF_TASK = (
    *("setup", "teardown", "on_before_batch_transfer", "on_train_batch_start", "training_step", "optimizer_zero_grad"),
    *("backward", "clip_gradients", "configure_gradient_clipping", "optimizer_step", "lr_scheduler_step", "train"),
    *(
        "on_train_batch_end",
        "zero_grad",
        "on_validation_batch_start",
        "validation_step",
        "on_validation_batch_end",
        "on_validation_model_zero_grad",
    ),
)
OF_CALLBACK = ("setup", "on_train_batch_end", "on_validation_batch_start", "state_dict", "on_save_checkpoint")


def recorded(owner: Any, names: tuple[str, ...], calls: list[Any]) -> Any:
    """The owner, whose methods write down what they were called with once they are over."""

    def record(name: str, method: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            shown = [each for each in args if isinstance(each, int) or each is None]
            calls.append((name, *shown, *kwargs.items()))
            return result

        return run

    for name in names:
        setattr(owner, name, record(name, getattr(owner, name)))
    return owner


def trainer(folder: Path, *callbacks: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "num_sanity_val_steps": 0}
    limits = {"limit_train_batches": 1, "limit_val_batches": 1, "max_epochs": 1}
    return Trainer(default_root_dir=folder, accelerator="cpu", callbacks=[*callbacks], **quiet, **limits)


def test_hooks_are_called_as_lightning_calls_them(tmp_path: Path) -> None:
    calls: list[Any] = []
    callback = recorded(Callback(), OF_CALLBACK, calls)
    trainer(tmp_path, callback).fit(recorded(BoringModel(), OF_TASK, calls))
    unclipped = ("gradient_clip_val", None), ("gradient_clip_algorithm", None)
    assert calls == [
        ("setup", ("stage", "fit")),
        ("setup", ("stage", "fit")),
        ("zero_grad",),
        ("on_before_batch_transfer", 0),
        ("on_train_batch_start", 0),
        ("training_step", 0),
        ("optimizer_zero_grad", 0, 0),
        ("backward",),
        ("clip_gradients", *unclipped),
        ("configure_gradient_clipping", *unclipped),
        ("optimizer_step", 0, 0),
        ("lr_scheduler_step", None),
        ("on_train_batch_end", 0),
        ("on_train_batch_end", 0),
        ("zero_grad",),
        ("on_validation_model_zero_grad",),
        ("train", False),
        ("on_before_batch_transfer", 0),
        ("on_validation_batch_start", 0),
        ("on_validation_batch_start", 0),
        ("validation_step", 0),
        ("on_validation_batch_end", 0),
        ("state_dict",),
        ("on_save_checkpoint",),
        ("teardown", ("stage", "fit")),
    ]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_gradients_are_cleared_after_the_model_is_configured_and_before_its_data_is_loaded(
    verb: str, tmp_path: Path
) -> None:
    calls: list[Any] = []
    loader = f"{verb.replace('validate', 'val')}_dataloader"
    model = recorded(BoringModel(), ("setup", "configure_model", "zero_grad", loader), calls)
    getattr(trainer(tmp_path), verb)(model)
    assert [name for name, *_ in calls] == ["setup", "configure_model", "zero_grad", loader]


def test_hooks_see_a_checkpoint_by_lightnings_names_and_what_they_add_comes_back(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Notes(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            seen.append(set(checkpoint))
            checkpoint["note"] = torch.ones(1)

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            seen.append(set(checkpoint))
            seen.append((checkpoint.pop("note").item(), checkpoint["pytorch-lightning_version"]))

    names = {"callbacks", "epoch", "global_step", "lr_schedulers", "optimizer_states", "state_dict", "loops"}
    names |= {"pytorch-lightning_version"}
    first = trainer(tmp_path, Notes())
    first.fit(BoringModel())
    again = trainer(tmp_path, Notes())
    again.fit_loop.max_epochs = 2
    again.fit(BoringModel(), ckpt_path=first.checkpoint_callback.best_model_path)
    assert seen[:3] == [names, names | {"note"}, (1.0, __version__)]
    assert (again.current_epoch, again.global_step) == (2, 2)


class Starts(BoringModel):
    """Writes down where training starts, and each epoch of it."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[tuple[str, int]] = []

    def on_train_start(self) -> None:
        self.starts.append(("run", self.current_epoch))

    def on_train_epoch_start(self) -> None:
        self.starts.append(("epoch", self.current_epoch))


def resumed(folder: Path, task: Any, **first: Any) -> Any:
    """Save as the first of two epochs ends, and resume from there."""
    limits = {"limit_train_batches": 4, "limit_val_batches": 0, "max_epochs": 2}
    options = {**limits, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    begun = Trainer(default_root_dir=folder, accelerator="cpu", **{**options, **first})
    begun.fit(BoringModel())
    schedule = GradientAccumulationScheduler({0: 2})
    again = Trainer(default_root_dir=folder, accelerator="cpu", callbacks=[schedule], **options)
    again.fit(task, ckpt_path=begun.checkpoint_callback.best_model_path)
    return again


def test_the_start_of_an_epoch_is_not_repeated_where_a_run_resumes_within_it(tmp_path: Path) -> None:
    task = Starts()
    trainer = resumed(tmp_path, task, max_steps=2)
    assert task.starts == [("run", 0), ("epoch", 1)]
    assert trainer.global_step == 2 + 1 + 2  # what the callback sets when an epoch starts holds


def test_an_epoch_that_a_checkpoint_was_the_end_of_counts_from_the_start_of_a_run(tmp_path: Path) -> None:
    task = Starts()
    resumed(tmp_path, task, max_epochs=1)
    assert task.starts == [("run", 1), ("epoch", 1)]


def test_a_key_that_no_schedule_has_is_warned_of(tmp_path: Path) -> None:
    class Extra(BoringModel):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "note": 1}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    with pytest.warns(RuntimeWarning, match="unsupported keys in the lr scheduler dict: {'note'}"):
        trainer(tmp_path).fit(Extra())


def test_a_checkpoint_from_after_the_last_epoch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"current_epoch=3, but you have set Trainer\(max_epochs=2\)"):
        resumed(tmp_path, BoringModel(), max_epochs=3)


def test_a_module_has_no_mesh_before_a_trainer_runs_it() -> None:
    assert BoringModel().device_mesh is None


def test_a_run_that_is_asked_to_stop_within_an_epoch_validates_first(tmp_path: Path) -> None:
    validated: list[int] = []

    class Stops(BoringModel):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = batch_idx == 1

        def on_validation_epoch_start(self) -> None:
            validated.append(self.global_step)

    limits = {"limit_train_batches": 4, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    run = Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_progress_bar=False, **limits)
    run.fit(Stops())
    assert (validated, run.global_step) == ([2], 2)


def test_a_batch_that_is_none_is_left_out_with_a_warning(tmp_path: Path) -> None:
    made = iter([None, torch.ones(1, 32)])
    batches = torch.utils.data.DataLoader([0, 1], collate_fn=lambda samples: next(made))  # type: ignore[arg-type]
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 1}
    run = Trainer(default_root_dir=tmp_path, limit_val_batches=0, **options)
    with pytest.warns(UserWarning, match="train_dataloader yielded None"):
        run.fit(BoringModel(), batches)
    assert run.global_step == 1


def test_steps_are_what_a_bar_counts_where_they_alone_end_a_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "max_epochs": -1, "max_steps": 3}
    run = Trainer(default_root_dir=tmp_path, limit_val_batches=0, **options)
    totals: list[float] = []

    class Reads(BoringModel):
        def on_train_start(self) -> None:
            totals.append(run.progress_bar_callback.total_train_batches)

    run.fit(Reads(), iter([torch.ones(1, 32)] * 4))
    assert totals == [3]


def test_the_bar_keeps_the_last_step_of_an_evaluation(tmp_path: Path) -> None:
    class Logs(BoringModel):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("shown", 3.0, prog_bar=True, on_step=True, on_epoch=False)

    run = trainer(tmp_path)
    run.fit(Logs())
    assert run.progress_bar_metrics["shown"] == 3


def test_the_bar_shows_what_the_end_of_an_epoch_logs_in_place_of_a_step(tmp_path: Path) -> None:
    class Logs(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("shown", 1.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *args: Any) -> None:
            assert self.trainer.progress_bar_metrics["shown"] == 1

        def on_train_epoch_end(self) -> None:
            self.log("shown", 2.0, prog_bar=True)

    run = trainer(tmp_path)
    run.fit(Logs())
    assert (run.progress_bar_metrics["shown"], run.callback_metrics["shown"]) == (2, 2)


@pytest.mark.parametrize("verb", ["fit", "test"])
def test_what_configure_model_makes_has_the_number_format_of_the_run(verb: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Made(BoringModel):
        def configure_model(self) -> None:
            self.made = torch.nn.Linear(1, 1)
            seen.append(self.made.weight.dtype)

    run = Trainer(default_root_dir=tmp_path, accelerator="cpu", precision="bf16-true", fast_dev_run=1)
    getattr(run, verb)(Made())
    assert seen == [torch.bfloat16]


def test_warnings_of_what_may_be_a_mistake_can_be_turned_off() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disable_possible_user_warnings()
        warnings.warn("perhaps", PossibleUserWarning, stacklevel=1)


def states_around_validation(folder: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The torch generator of this rank before each validation within fit, and in its first step."""
    states: list[torch.Tensor] = []

    class Draws(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.rand(self.trainer.global_rank + 1)  # as dropout over batches of different shapes
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            states.append(torch.get_rng_state())

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            states.append(torch.get_rng_state())

    torch.manual_seed(0)
    one = trainer(Path(folder))
    one.limit_epochs(2)
    one.fit(Draws())
    return list(zip(states[::2], states[1::2], strict=True))


def test_every_rank_draws_the_seed_of_its_validation_loader(tmp_path: Path) -> None:
    for of_rank in run_in_processes(states_around_validation, 2, args=[str(tmp_path)], timeout=120):
        assert len(of_rank) == 2
        for before, after in of_rank:
            torch.set_rng_state(before)
            torch.empty((), dtype=torch.int64).random_()
            assert torch.equal(torch.get_rng_state(), after)
