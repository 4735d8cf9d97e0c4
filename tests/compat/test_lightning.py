"""Lightning's module paths and names: what they stand for, and what scripts written for Lightning do with them."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain
from drivetrain import ConfigurationError as MisconfigurationException
from drivetrain.compat import lightning
from drivetrain.compat.handed_on import AbsentNameError
from drivetrain.compat.lightning import pytorch as pl
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_only
from drivetrain.compat.lightning.pytorch.callbacks import ModelCheckpoint
from drivetrain.compat.lightning.pytorch.callbacks.checkpoint import Checkpoint
from drivetrain.compat.lightning.pytorch.core.saving import load_hparams_from_tags_csv, save_hparams_to_tags_csv
from drivetrain.compat.lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringModel,
    ManualOptimBoringModel,
)
from drivetrain.compat.lightning.pytorch.loggers.logger import Logger
from drivetrain.compat.lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from drivetrain.compat.lightning.pytorch.plugins.precision.amp import MixedPrecisionPlugin
from drivetrain.compat.lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from drivetrain.compat.lightning.pytorch.utilities import find_shared_parameters, grad_norm, set_shared_parameters
from drivetrain.compat.lightning.pytorch.utilities.compile import from_compiled, to_uncompiled
from drivetrain.compat.lightning.pytorch.utilities.data import extract_batch_size
from drivetrain.compat.lightning.pytorch.utilities.parsing import (
    clean_namespace,
    lightning_getattr,
    lightning_setattr,
    parse_class_init_keys,
)
from tests.compat.test_aliases import python

OURS = Path(str(lightning.__file__)).parent
MODULES = sorted(path.relative_to(OURS.parents[2]) for path in OURS.rglob("*.py"))

SHOW = """
import importlib.metadata, lightning, pytorch_lightning, lightning.pytorch.utilities.rank_zero
from pytorch_lightning.callbacks import ModelCheckpoint
from lightning.fabric import Fabric
import drivetrain
print(lightning.pytorch is pytorch_lightning, lightning.__version__, importlib.metadata.version("pytorch-lightning"))
print(issubclass(lightning.LightningModule, drivetrain.Task), issubclass(ModelCheckpoint, drivetrain.ModelCheckpoint))
"""
SHOWN = "True 2.6.6 2.6.6\nTrue True\n"


def quiet(**options: Any) -> Any:
    settings = {"max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(**{"accelerator": "cpu", "limit_train_batches": 2, "limit_val_batches": 1, **settings, **options})


def test_after_install_imports_and_version_gates_find_ours() -> None:
    ran = python("import drivetrain.compat; drivetrain.compat.install('lightning', 'pytorch_lightning')\n" + SHOW)
    assert (ran.stdout, ran.stderr, ran.returncode) == (SHOWN, "", 0)


@pytest.mark.compat
def test_a_process_with_the_stand_in_on_its_path_gets_ours_without_a_call() -> None:
    from drivetrain.compat.aliases import STAND_INS

    ran = python(SHOW, PYTHONPATH=str(STAND_INS / "lightning"))
    assert (ran.stdout, ran.stderr, ran.returncode) == (SHOWN, "", 0)


def test_every_module_imports() -> None:
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in MODULES]
    assert len(names) > 90
    for name in names:
        importlib.import_module(name)


def test_the_names_are_ours() -> None:
    assert issubclass(lightning.LightningModule, drivetrain.Task)
    assert issubclass(lightning.LightningDataModule, drivetrain.DataModule)
    assert issubclass(lightning.Trainer, drivetrain.Trainer)
    assert MisconfigurationException is drivetrain.ConfigurationError
    assert isinstance(ModelCheckpoint(), Checkpoint)
    assert isinstance(pl.strategies.DDPStrategy(find_unused_parameters=True), drivetrain.DDP)


def test_an_absent_name_can_be_inherited_from_and_raises_when_it_is_made() -> None:
    class Own(pl.loggers.neptune.NeptuneLogger):
        pass

    with pytest.raises(AbsentNameError, match=r"lightning's NeptuneLogger was called\. Give another logger"):
        Own()
    with pytest.raises(AttributeError, match="no attribute 'NeptunLogger'"):
        _ = pl.loggers.neptune.NeptunLogger


def test_a_callback_that_is_added_to_drivetrain_is_there_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.compat.handed_on import absent_names

    class LambdaCallback(drivetrain.Callback):
        pass

    monkeypatch.setattr(drivetrain.callbacks, "LambdaCallback", LambdaCallback, raising=False)
    get = absent_names("drivetrain.compat.lightning.x", ("why", ["LambdaCallback"]), room="drivetrain.callbacks")
    assert get("LambdaCallback") is LambdaCallback


def test_the_state_of_a_trainer_follows_its_verbs() -> None:
    seen: list[Any] = []

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((self.trainer.state.fn, self.trainer.state.stage, self.trainer.state.status))
            return super().training_step(batch, batch_idx)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            seen.append((self.trainer.state.fn, self.trainer.evaluating))

    trainer, model = quiet(limit_train_batches=1, limit_test_batches=1, enable_checkpointing=False), Model()
    assert (trainer.state.status, trainer.state.fn) == (TrainerStatus.INITIALIZING, None)
    trainer.fit(model, datamodule=BoringDataModule())
    assert seen.pop() == (TrainerFn.FITTING, RunningStage.TRAINING, TrainerStatus.RUNNING)
    assert trainer.state.finished
    assert trainer.lightning_module is model
    trainer.test(model, verbose=False)
    assert seen.pop() == (TrainerFn.TESTING, True)
    assert not trainer.evaluating


def test_optimizing_by_hand_trains() -> None:
    model = ManualOptimBoringModel()
    before = model.layer.weight.detach().clone()
    trainer = quiet(enable_checkpointing=False)
    trainer.fit(model)
    assert trainer.global_step == 2
    assert not torch.equal(before, model.layer.weight)


def test_the_default_logger_is_tensorboard_in_lightning_logs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is missing")
    trainer = quiet(logger=None, default_root_dir=tmp_path)
    trainer.fit(BoringModel())
    assert Path(trainer.log_dir) == tmp_path / "lightning_logs" / "version_0"
    assert trainer.logger.name == "lightning_logs"
    assert trainer.checkpoint_callback.best_model_path.startswith(trainer.log_dir)


def test_a_logger_that_a_script_defines_gets_values_hyper_parameters_and_the_end() -> None:
    class Own(Logger):
        def __init__(self) -> None:
            self.got: list[Any] = []

        name = version = property(lambda self: "own")  # type: ignore[assignment]

        @rank_zero_only
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.got.append(("metrics", sorted(metrics), step))

        @rank_zero_only
        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            self.got.append(("params", dict(params)))

        @rank_zero_only
        def finalize(self, status: str = "", message: str = "") -> None:
            self.got.append(("end", status))

    class Model(BoringModel):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", self.step(batch))
            return super().training_step(batch, batch_idx)

    logger = Own()
    quiet(logger=logger, log_every_n_steps=1, enable_checkpointing=False).fit(Model())
    assert logger.got[0] == ("params", {"width": 3})
    assert ("metrics", ["epoch", "loss"], 1) in logger.got  # the second step, counted from 0
    assert logger.got[-1][0] == "end"


def test_plugins_are_number_formats() -> None:
    assert quiet(plugins=[MixedPrecision("bf16-mixed", "cpu")]).precision == "bf16-mixed"
    with pytest.raises(MisconfigurationException, match=r"plugins=object\(\)\) is not taken"):
        quiet(plugins=object())
    with pytest.raises(MisconfigurationException, match="cluster_environment"):
        pl.strategies.DDPStrategy(cluster_environment=object())


def test_profilers_have_the_names_of_lightning() -> None:
    trainer = quiet(profiler="pytorch")
    assert isinstance(trainer.profiler, pl.profilers.PyTorchProfiler)
    assert trainer.profiler.prefix == "[pl]"
    trainer = quiet(profiler="simple", max_epochs=1)
    trainer.fit(BoringModel())
    measured = trainer.profiler.recorded_durations
    assert "[LightningModule]BoringModel.configure_optimizers" in measured
    assert "[Strategy]SingleDeviceStrategy.training_step" in measured


def test_seeding_returns_the_seed_and_shows_it(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        assert lightning.seed_everything() == 5
    assert "Seed set to 5" in caplog.text
    first = torch.rand(1)
    assert lightning.seed_everything(5, workers=True, verbose=False) == 5
    assert torch.equal(first, torch.rand(1))
    with pytest.raises(MisconfigurationException, match="must be from 0"):
        lightning.seed_everything(-1)


def test_small_tools() -> None:
    model = BoringModel()
    assert grad_norm(model, 2) == {}
    model(torch.ones(1, 32)).sum().backward()
    assert set(grad_norm(model, 2)) == {"grad_2.0_norm/layer.weight", "grad_2.0_norm/layer.bias", "grad_2.0_norm_total"}
    model.hparams["lr"] = 1
    lightning_setattr(model, "lr", 2)
    assert lightning_getattr(model, "lr") == 2
    assert rank_zero_only(lambda: 3)() == 3
    settings = {"lr": 0.1, "loss": lambda: None}
    clean_namespace(settings)
    assert settings == {"lr": 0.1}
    assert parse_class_init_keys(BoringModel) == ("self", None, None)


@pytest.mark.parametrize(
    ("variables", "rank"), [({}, 0), ({"LOCAL_RANK": "3"}, 3), ({"LOCAL_RANK": "3", "RANK": "0"}, 0)]
)
def test_a_variable_of_the_rank_is_enough(
    variables: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(rank_zero_only, "rank", raising=False)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert rank_zero_only(lambda: True, default=False)() is (rank == 0)


def test_an_attribute_is_that_of_the_data_module_where_it_has_one() -> None:
    model, trainer = BoringModel(), quiet()
    model.trainer, trainer.datamodule = trainer, BoringDataModule()
    model.batch_size, trainer.datamodule.hparams["batch_size"] = 1, 2
    assert lightning_getattr(model, "batch_size") == 2
    lightning_setattr(model, "batch_size", 4)
    assert (model.batch_size, trainer.datamodule.hparams["batch_size"]) == (4, 4)


def test_shared_parameters_are_found_and_shared_again() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    shared = find_shared_parameters(model)
    assert shared == [["0.weight", "1.weight"]]
    model[1].weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert set_shared_parameters(model, shared)[1].weight is model[0].weight


def test_the_size_of_a_batch_is_that_of_its_first_tensor() -> None:
    assert extract_batch_size({"x": [torch.zeros(3, 2)]}) == 3
    with pytest.warns(UserWarning, match="Trying to infer the `batch_size`"):
        assert extract_batch_size([torch.zeros(2), torch.zeros(5)]) == 2
    with pytest.raises(MisconfigurationException, match="could not infer the batch_size"):
        extract_batch_size("text")


def test_hyper_parameters_are_read_from_the_table_that_they_were_written_to(tmp_path: Path) -> None:
    save_hparams_to_tags_csv(tmp_path / "tags.csv", {"lr": 0.1, "name": "adam"})
    assert load_hparams_from_tags_csv(tmp_path / "tags.csv") == {"lr": 0.1, "name": "adam"}


def test_a_compiled_module_is_given_back_as_it_was() -> None:
    model = BoringModel()
    with pytest.raises(ValueError, match="required to be a compiled LightningModule"):
        to_uncompiled(model)
    found = from_compiled(torch.compile(model, backend="eager"))
    assert found is model
    assert "training_step" in vars(found)
    assert to_uncompiled(found) is model
    assert "training_step" not in vars(model)


def test_what_lightning_has_deprecated_warns() -> None:
    with pytest.deprecated_call(match="`MixedPrecisionPlugin` is deprecated"):
        assert MixedPrecisionPlugin("16-mixed", "cpu").precision == "16-mixed"
    with pytest.deprecated_call(match="to_torchscript` has been deprecated"):
        BoringModel().to_torchscript()


@pytest.mark.parametrize(
    ("plugin", "dtype"), [(HalfPrecision("bf16-true"), torch.bfloat16), (DoublePrecision(), torch.float64)]
)
def test_a_precision_plugin_converts_what_it_is_given(plugin: Any, dtype: torch.dtype) -> None:
    batch = plugin.convert_input({"x": torch.ones(2), "y": [torch.ones(2, dtype=torch.long)]})
    assert (batch["x"].dtype, batch["y"][0].dtype) == (dtype, torch.long)
    assert plugin.convert_output(batch)["x"].dtype == torch.float32
    assert plugin.convert_module(torch.nn.Linear(2, 2)).weight.dtype == dtype
    with plugin.forward_context():
        assert torch.zeros(1).dtype == dtype
    with plugin.module_init_context():
        assert torch.nn.Linear(2, 2).weight.dtype == dtype
    assert torch.get_default_dtype() == torch.float32


def test_a_mixed_precision_plugin_computes_in_lower_precision() -> None:
    layer = torch.nn.Linear(2, 2)
    with MixedPrecision("bf16-mixed", "cpu").forward_context():
        assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
    with pytest.raises(MisconfigurationException, match="must be '16-mixed' or 'bf16-mixed'"):
        MixedPrecision("bf16")
