from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from drivetrain import ConfigurationError
from drivetrain.callbacks import LearningRateMonitor
from tests.callbacks.tasks import Scripted, fit
from tests.trackers.test_registry import ListTracker

Configure = Callable[[torch.nn.Module], Any]


def logged(root: Path, configure: Configure, monitor: LearningRateMonitor, **options: Any) -> list[tuple[Any, Any]]:
    """(step, values) of all that was logged about learning rates."""

    class Configured(Scripted):
        def configure_optimizers(self) -> Any:
            return configure(self)

    tracker = ListTracker()
    fit(Configured([1] * 9), root, 2, [monitor], logger=tracker, **{"log_every_n_steps": 1, **options})
    rows = [
        (step, {key: value for key, value in row.items() if key.startswith(("lr", "mine"))})
        for step, row in tracker.rows
    ]
    return [(step, row) for step, row in rows if row]


def one(task: torch.nn.Module) -> Any:
    return SGD(task.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)


def halved_each_epoch(task: torch.nn.Module) -> Any:
    optimizer = Adam(task.parameters(), lr=0.5)
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, gamma=0.5)}


def halved_each_step(task: torch.nn.Module) -> Any:
    optimizer = SGD(task.parameters(), lr=0.5)
    scheduler = {"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "step", "name": "mine"}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


def groups(task: torch.nn.Module) -> Any:
    weight, bias = task.parameters()
    return Adam([{"params": [weight], "lr": 0.25}, {"params": [bias], "lr": 0.5}])


def named_groups(task: torch.nn.Module) -> Any:
    weight, bias = task.parameters()
    return SGD([{"params": [weight], "lr": 0.25, "name": "w"}, {"params": [bias], "lr": 0.5, "name": "b"}])


def several(task: torch.nn.Module) -> Any:
    weight, bias = task.parameters()
    return [SGD([weight], lr=0.25), SGD([bias], lr=0.5)]


@pytest.mark.parametrize(
    ("configure", "options", "expected"),
    [
        (one, {}, [(step, {"lr-SGD": 0.5}) for step in (0, 1, 2, 2, 3, 4)]),
        (one, {"logging_interval": "epoch"}, [(0, {"lr-SGD": 0.5}), (2, {"lr-SGD": 0.5})]),
        (halved_each_epoch, {}, [(0, {"lr-Adam": 0.5}), (2, {"lr-Adam": 0.25})]),
        (
            halved_each_epoch,
            {"logging_interval": "step"},
            [(1, {"lr-Adam": 0.5}), (2, {"lr-Adam": 0.5}), (3, {"lr-Adam": 0.25}), (4, {"lr-Adam": 0.25})],
        ),
        (halved_each_step, {}, [(1, {"mine": 0.5}), (2, {"mine": 0.25}), (3, {"mine": 0.125}), (4, {"mine": 0.0625})]),
        (groups, {"logging_interval": "epoch"}, [(step, {"lr-Adam/pg1": 0.25, "lr-Adam/pg2": 0.5}) for step in (0, 2)]),
        (named_groups, {"logging_interval": "epoch"}, [(step, {"lr-SGD/w": 0.25, "lr-SGD/b": 0.5}) for step in (0, 2)]),
        (several, {"logging_interval": "epoch"}, [(step, {"lr-SGD": 0.25, "lr-SGD-1": 0.5}) for step in (0, 2)]),
        (
            one,
            {"logging_interval": "epoch", "log_momentum": True, "log_weight_decay": True},
            [(step, {"lr-SGD": 0.5, "lr-SGD-momentum": 0.9, "lr-SGD-weight_decay": 0.01}) for step in (0, 2)],
        ),
    ],
)
def test_rates_are_logged_under_their_names(
    configure: Configure, options: dict[str, Any], expected: list[Any], tmp_path: Path
) -> None:
    assert logged(tmp_path, configure, LearningRateMonitor(**options)) == expected


def test_by_step_means_as_often_as_the_trainer_logs(tmp_path: Path) -> None:
    rows = logged(tmp_path, one, LearningRateMonitor("step"), log_every_n_steps=3)
    assert [step for step, _ in rows] == [3]


def test_with_accumulation_each_step_is_logged_once(tmp_path: Path) -> None:
    rows = logged(tmp_path, one, LearningRateMonitor("step"), accumulate_grad_batches=2)
    assert [step for step, _ in rows] == [1, 2]


def test_without_a_logger_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="`Trainer` that has no logger"):
        fit(Scripted([1]), tmp_path, 1, [LearningRateMonitor()], logger=False)


def test_two_schedulers_of_one_name_are_refused(tmp_path: Path) -> None:
    def twins(task: torch.nn.Module) -> Any:
        optimizers = [SGD([parameter], lr=0.5) for parameter in task.parameters()]
        return [
            {"optimizer": each, "lr_scheduler": {"scheduler": StepLR(each, 1), "name": "mine"}} for each in optimizers
        ]

    with pytest.raises(ConfigurationError, match="Two learning-rate schedulers have the name 'mine'"):
        logged(tmp_path, twins, LearningRateMonitor())


def test_an_unknown_interval_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"should be `step`, `epoch` or `None`\. Did you mean 'epoch'"):
        LearningRateMonitor("epochs")


def test_two_groups_of_one_name_are_refused(tmp_path: Path) -> None:
    def twins(task: torch.nn.Module) -> Any:
        return SGD([{"params": [parameter], "name": "mine"} for parameter in task.parameters()], lr=0.5)

    with pytest.raises(ConfigurationError, match="multiple parameter groups with identical names"):
        logged(tmp_path, twins, LearningRateMonitor())


def test_all_rates_stay_readable_under_a_prefix_and_can_be_monitored(tmp_path: Path) -> None:
    monitor = LearningRateMonitor("epoch", log_momentum=True, log_key_prefix="optim/")

    class Configured(Scripted):
        def configure_optimizers(self) -> Any:
            return halved_each_epoch(self)

    trainer = fit(Configured([1] * 9), tmp_path, 3, [monitor], logger=ListTracker())
    assert monitor.lrs == {"optim/lr-Adam": [0.5, 0.25, 0.125]}
    assert monitor.last_momentum_values == {"optim/lr-Adam-momentum": 0.9}
    assert monitor.last_weight_decay_values == {"optim/lr-Adam-weight_decay": None}
    assert float(trainer.callback_metrics["optim/lr-Adam"]) == 0.125


def test_rates_keep_their_values_where_a_group_is_added(tmp_path: Path) -> None:
    monitor = LearningRateMonitor("epoch")

    class Growing(Scripted):
        def configure_optimizers(self) -> Any:
            return SGD([next(self.parameters())], lr=0.5)

        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 1:
                self.trainer.optimizers[0].add_param_group({"params": list(self.parameters())[1:], "lr": 0.25})

    fit(Growing([1] * 9), tmp_path, 3, [monitor], logger=ListTracker())
    assert monitor.lrs == {"lr-SGD/pg1": [0.5, 0.5, 0.5], "lr-SGD/pg2": [0.25]}


def test_missing_momentum_is_warned_of(tmp_path: Path) -> None:
    def without(task: torch.nn.Module) -> Any:
        return torch.optim.ASGD(task.parameters(), lr=0.5)

    with pytest.warns(RuntimeWarning, match="some optimizers do not have momentum"):
        logged(tmp_path, without, LearningRateMonitor("epoch", log_momentum=True))
