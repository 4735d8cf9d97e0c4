"""Every callback under every strategy of the lane: it works there, or is refused where the manual says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import ConfigurationError, callbacks
from drivetrain.callbacks import Callback, EvaluationGather, ModelCheckpoint, PredictionWriter
from tests.conformance.language_model import LanguageTask, Run, Texts
from tests.conformance.strategies import ROWS, cases
from tests.pool import ROOT, run_in_processes
from tests.strategies.quiet import quiet_trainer

RUN = Run(layers=2, samples=8)
STRATEGIES = ("ddp", "fsdp", "tp", "cp", "pp", "zero-1", "zero-3")
BASES = {"Callback", "BaseFinetuning", "BasePredictionWriter"}
SEARCHES = {"BatchSizeFinder", "LearningRateFinder"}  # see tests/trainer/test_tuning.py

Make = Callable[[str], Callback]


def of(name: str, *args: Any, **kwargs: Any) -> Make:
    """Makes a callback whose arguments do not depend on the run's folder."""
    return lambda root: getattr(callbacks, name)(*args, **kwargs)


MAKE: dict[str, Make] = {
    "BackboneFinetuning": of("BackboneFinetuning", 1),
    "DeviceStatsMonitor": of("DeviceStatsMonitor"),
    "EMAWeightAveraging": of("EMAWeightAveraging"),
    "EarlyStopping": of("EarlyStopping", "evaluation_loss", restore_best_weights=True),
    "EvaluationGather": lambda root: EvaluationGather(
        path=f"{root}/{{stage}}.pt", select=lambda outputs, batch: (batch["labels"], batch["tokens"])
    ),
    "GradientAccumulationScheduler": of("GradientAccumulationScheduler", {1: 2}),
    "GradientNorm": of("GradientNorm"),
    "LambdaCallback": of("LambdaCallback", on_train_start=lambda trainer, task: None),
    "LearningRateMonitor": of("LearningRateMonitor"),
    "LossSpikeGuard": of("LossSpikeGuard"),
    "MemoryMonitor": of("MemoryMonitor"),
    "ModelCheckpoint": lambda root: ModelCheckpoint(f"{root}/saved", monitor="evaluation_loss"),
    "ModelPruning": of("ModelPruning", "l1_unstructured", amount=0.2),
    "ModelSummary": of("ModelSummary"),
    "NaNGuard": of("NaNGuard", check_gradients=True),
    "OnExceptionCheckpoint": lambda root: callbacks.OnExceptionCheckpoint(root),
    "PredictionWriter": lambda root: PredictionWriter(f"{root}/predicted", file_format="safetensors"),
    "RichModelSummary": of("RichModelSummary"),
    "RichProgressBar": of("RichProgressBar"),
    "RunReport": of("RunReport"),
    "SpeedMonitor": of("SpeedMonitor"),
    "StochasticWeightAveraging": of("StochasticWeightAveraging", 1e-3, swa_epoch_start=1),
    "StragglerMonitor": of("StragglerMonitor", every_n_steps=2, measured_steps=1),
    "TQDMProgressBar": of("TQDMProgressBar"),
    "ThroughputMonitor": of("ThroughputMonitor"),
    "Timer": of("Timer", "1 h"),
    "WeightAveraging": of("WeightAveraging"),
    "WeightHistograms": of("WeightHistograms", every_n_steps=1),
}


class Text(LanguageTask):
    """Gives its optimizer what is trained, and calls its layers what `BackboneFinetuning` freezes."""

    def __init__(self) -> None:
        super().__init__(layers=RUN.layers)

    @property
    def backbone(self) -> nn.Module:
        return self.model.layers

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=1e-2)


def outcome(strategy: str, name: str, root: str) -> str:
    """How a run with a callback ends: `"works"`, or why it is refused."""
    shows = "ProgressBar" in name or "Summary" in name
    trainer = quiet_trainer(
        ROWS[strategy].make(),
        max_epochs=2,
        callbacks=[MAKE[name](root)],
        logger="csv",
        log_every_n_steps=1,
        default_root_dir=root,
        enable_checkpointing="Checkpoint" in name,
        enable_run_report=name == "RunReport",
        enable_progress_bar=shows,
        enable_model_summary=shows,
    )
    rows = RUN.rows(trainer.strategy.topology.data_shard.count)
    task, evaluated = Text(), DataLoader(Texts(4), batch_size=2)
    try:
        trainer.fit(task, DataLoader(RUN.data(), batch_size=rows), evaluated)
        if name == "PredictionWriter":
            trainer.predict(task, evaluated, return_predictions=False)
    except ConfigurationError as error:
        return str(error)
    epochs, steps = trainer.current_epoch, trainer.global_step
    expected = (2, 3 if name == "GradientAccumulationScheduler" else 4)
    return "works" if (epochs, steps) == expected else f"ended after {epochs} epochs and {steps} steps"


def outcomes(strategy: str, root: str) -> dict[str, str]:
    torch.set_num_threads(1)
    return {name: outcome(strategy, name, f"{root}/{name}") for name in MAKE}


def refused_on_the_page() -> dict[str, set[str]]:
    """The strategies that the manual says each callback is refused under."""
    page = (ROOT / "docs" / "callbacks.md").read_text()
    table = page.partition("## Strategies")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", table, flags=re.MULTILINE)
    return {name: set(re.findall(r"`(.*?)`", where)) for names, where in rows for name in re.findall(r"`(.*?)`", names)}


# How the rows of the conformance tests are called there.
NAMES = {"tp": "Parallel(tp)", "cp": "Parallel(cp)", "pp": "Parallel(pp)", "zero-1": "DeepSpeed", "zero-3": "DeepSpeed"}


@pytest.mark.sharded
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", cases(*STRATEGIES))
def test_a_callback_works_or_is_refused_as_the_manual_says(strategy: str, tmp_path: Path) -> None:
    page, name = refused_on_the_page(), NAMES.get(strategy, strategy)
    for found in run_in_processes(outcomes, ROWS[strategy].processes, args=(strategy, str(tmp_path)), timeout=400):
        refused = {each: text for each, text in found.items() if text != "works"}
        assert set(refused) == {each for each, where in page.items() if name in where}, refused
        assert all(re.search(r"[Uu]se|[Ll]eave|[Tt]ake", text) for text in refused.values()), refused


def test_every_callback_is_tried() -> None:
    assert set(MAKE) == set(callbacks.__all__) - BASES - SEARCHES
    assert set(refused_on_the_page()) <= set(MAKE)
