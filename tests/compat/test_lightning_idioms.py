"""What libraries built on Lightning read and give, beyond what its reference describes."""

from __future__ import annotations

import enum
import importlib.metadata
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from drivetrain.compat.aliases import STAND_INS, AliasFinder
from drivetrain.compat.handed_on import AbsentNameError
from drivetrain.compat.lightning.pytorch import LightningDataModule, LightningModule, Trainer
from drivetrain.compat.lightning.pytorch.trainer.arguments import ONLY_HERE, REMOVED
from drivetrain.compat.lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from drivetrain.runtime.errors import UnknownArgumentError
from tests.compat.test_lightning_trainer import quiet
from tests.pool import run_in_processes


def loader(samples: int = 12, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(samples))[:, None], batch_size=batch_size)  # type: ignore[arg-type]


class Layer(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(torch.ones(1, 1)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# while the optimizer is made


class Reads(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, Any] = {}

    def configure_optimizers(self) -> Any:
        trainer: Any = self.trainer
        self.read["validates"] = trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()
        self.read["trains"] = trainer.fit_loop._data_source.is_defined()
        self.read["before"] = trainer.train_dataloader, trainer.num_training_batches
        self.read["steps"] = trainer.estimated_stepping_batches
        self.read["after"] = trainer.num_training_batches
        return super().configure_optimizers()


class Trains(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


class Validates(Trains):
    def val_dataloader(self) -> Any:
        return loader()


@pytest.mark.parametrize(
    ("data", "validates"),
    [((loader(), loader()), True), ((loader(),), False), ((Trains(),), False), ((Validates(),), True)],
)
def test_whether_a_run_validates_is_known_while_the_optimizer_is_made(data: Any, validates: bool) -> None:
    task = Reads()
    quiet().fit(task, *data)
    assert (task.read["trains"], task.read["validates"]) == (True, validates)


def test_the_length_of_an_epoch_is_infinite_until_something_asks_for_it() -> None:
    task = Reads()
    trainer = quiet(max_epochs=2, limit_train_batches=1.0)
    assert trainer.num_training_batches == float("inf")
    trainer.fit(task, loader())
    assert (task.read["before"], task.read["steps"], task.read["after"]) == ((None, float("inf")), 6, 3)


class OneScheduler(Layer):
    def __init__(self, is_dict: bool) -> None:
        super().__init__()
        self.is_dict = is_dict

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], {"scheduler": scheduler, "monitor": "loss"} if self.is_dict else scheduler


@pytest.mark.parametrize("is_dict", [True, False])
def test_one_scheduler_may_stand_beside_a_list_of_optimizers(is_dict: bool) -> None:
    trainer = quiet(max_epochs=2)
    trainer.fit(OneScheduler(is_dict), loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


# the arguments of a Trainer


def test_the_signature_of_a_trainer_names_every_argument() -> None:
    parameters = inspect.signature(Trainer.__init__).parameters
    assert not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    assert {"accelerator", "devices", "max_epochs", "callbacks", "gradient_clip_val", "barebones"} <= set(parameters)
    assert len(set(parameters) - set(ONLY_HERE)) == 42  # `self`, and Lightning's 41


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"gpus": 2}, "Use accelerator='gpu', devices=2 instead."),
        ({"gpus": 0}, "Use accelerator='cpu' instead."),
        ({"resume_from_checkpoint": "a.ckpt"}, "Use fit(..., ckpt_path='a.ckpt') instead."),
        ({"progress_bar_refresh_rate": 5}, "Use callbacks=[TQDMProgressBar(refresh_rate=5)] instead."),
        ({"move_metrics_to_cpu": True}, "Leave it out."),
    ],
)
def test_an_argument_that_lightning_has_removed_names_what_takes_its_place(given: dict[str, Any], hint: str) -> None:
    name, value = next(iter(given.items()))
    with pytest.raises(UnknownArgumentError) as caught:
        Trainer(max_epochs=1, **given)
    assert str(caught.value) == f"Trainer({name}={value!r}): Lightning has removed this argument. {hint}"


def test_no_removed_argument_is_one_that_is_taken() -> None:
    assert not REMOVED.keys() & inspect.signature(Trainer.__init__).parameters.keys()


def test_a_misspelled_argument_names_the_right_one() -> None:
    with pytest.raises(UnknownArgumentError, match=r"'max_epoch'.*'max_epochs'"):
        Trainer(max_epoch=2)  # type: ignore[call-arg]


# private modules


def test_what_a_trainer_would_run_on_is_known_before_there_is_one() -> None:
    connector = _AcceleratorConnector(accelerator="cpu", devices="auto")
    assert (connector._accelerator_flag, connector._devices_flag) == ("cpu", 1)
    assert (connector.strategy.root_device, connector.is_distributed) == (torch.device("cpu"), False)
    assert _AcceleratorConnector(accelerator="cpu", devices=2).is_distributed


CONNECTORS = {
    "callback_connector": "_CallbackConnector",
    "checkpoint_connector": "_CheckpointConnector",
    "data_connector": "_DataConnector",
    "logger_connector": "_LoggerConnector",
    "logger_connector.logger_connector": "_LoggerConnector",
    "logger_connector.result": "_ResultCollection",
    "signal_connector": "_SignalConnector",
}


def test_the_other_connectors_can_be_imported_but_not_made() -> None:
    finder = AliasFinder("lightning", "drivetrain.compat.lightning")
    for module, name in CONNECTORS.items():
        spec = finder.find_spec(f"lightning.pytorch.trainer.connectors.{module}")
        assert spec is not None
        assert spec.loader is not None
        made = spec.loader.create_module(spec)
        assert made is not None
        spec.loader.exec_module(made)
        with pytest.raises(AbsentNameError, match="machinery"):
            getattr(made, name)()
        assert (spec.submodule_search_locations is not None) is (module == "logger_connector")


@pytest.mark.parametrize(
    ("folder", "package", "owner"),
    [("accelerate", "accelerate", "huggingface"), ("lightning", "lightning", "Lightning-AI")],
)
def test_a_stand_in_names_the_owner_of_the_package(folder: str, package: str, owner: str) -> None:
    (info,) = (STAND_INS / folder).glob(f"{package}-*.dist-info")
    assert owner in importlib.metadata.PathDistribution(info).metadata["Home-page"]


# checkpoints


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_weights_are_saved_after_a_run_that_did_not_train(verb: str, tmp_path: Path) -> None:
    trainer, task = quiet(), Layer()
    getattr(trainer, verb)(task, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    found = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert torch.equal(found["state_dict"]["layer.weight"], task.layer.weight)


class Kind(enum.Enum):
    WIDE = "wide"


@dataclass
class Settings:
    lr: float = 0.1


class WithObjects(Layer):
    def __init__(self, kind: Kind = Kind.WIDE, settings: Any = Settings(0.2), act: Any = nn.Tanh) -> None:  # noqa: B008
        super().__init__()
        self.save_hyperparameters()


def test_objects_among_the_hyper_parameters_come_back_as_they_were(tmp_path: Path) -> None:
    trainer = quiet()
    trainer.fit(WithObjects(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    found = WithObjects.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert dict(found.hparams) == {"kind": Kind.WIDE, "settings": Settings(0.2), "act": nn.Tanh}


# values


class Computes(Metric):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, batch: Any) -> None:
        self.count += 1

    def compute(self) -> Any:
        return self.result


@pytest.mark.parametrize(("result", "shown"), [(None, None), (1.5, 1.5), ({"a": torch.tensor(1.0)}, None)])
def test_a_metric_without_a_number_is_left_out_of_the_logs(result: Any, shown: float | None) -> None:
    class Logs(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.metric = Computes(result)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.metric.update(batch)
            self.log("metric", self.metric, on_epoch=True)
            self.log("other", 1.0)

    trainer = quiet()
    trainer.fit(Logs(), loader(), loader())
    assert trainer.callback_metrics.get("metric") == shown
    assert trainer.callback_metrics["other"] == 1


@dataclass
class Images:
    image: Tensor
    mask: Any = None
    path: Any = None


@pytest.mark.parametrize("with_paths", [False, True])
def test_batches_that_are_dataclasses_weigh_by_their_samples(with_paths: bool) -> None:
    class Logs(Layer):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("third", float(batch_idx == 2), on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    def collate(samples: list[Tensor]) -> Images:
        return Images(torch.stack(samples), path=["a"] * len(samples) if with_paths else None)

    trainer = quiet(limit_train_batches=1.0)
    samples: Any = torch.arange(10.0)[:, None]
    trainer.fit(Logs(), DataLoader(samples, batch_size=4, collate_fn=collate))
    assert trainer.callback_metrics["third"] == pytest.approx(0.2)


def test_what_a_validation_in_fit_has_cached_can_be_trained_with() -> None:
    class Caches(Layer):
        cache: Any = None

        def forward(self, batch: Any) -> Tensor:
            if self.cache is None:
                self.cache = torch.full((1,), 2.0)
            out: Tensor = self.layer(batch) * self.cache
            return out

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not torch.is_grad_enabled()
            self(batch)

    task = Caches()
    quiet(num_sanity_val_steps=1).fit(task, loader(), loader())
    assert not task.cache.is_inference()


def draws_of_a_rank() -> list[float]:
    class Draws(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.drawn: list[float] = []

        def on_fit_start(self) -> None:
            torch.manual_seed(100 + self.global_rank)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.drawn.append(torch.rand(()).item())
            return super().training_step(batch, batch_idx)

    task = Draws()
    quiet(max_epochs=2, devices=2, strategy="ddp", num_sanity_val_steps=0).fit(task, loader(), loader())
    return task.drawn


def test_a_rank_keeps_a_random_state_of_its_own_over_a_validation() -> None:
    first, second = run_in_processes(draws_of_a_rank, world_size=2, timeout=60)
    assert len(first) == len(second) == 4
    assert not set(first) & set(second)
