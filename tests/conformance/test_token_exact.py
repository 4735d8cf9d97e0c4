"""`{"loss": sum, "weight": tokens}`: the gradient of the mean over all tokens of a step, however they are divided."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from drivetrain import Accelerator, Colwise, ConfigurationError, Parallel, Rowwise, Task, Trainer
from tests.conformance.language_model import DRIVERS, LOCAL_ROWS, Run, check, train_plain
from tests.pool import device, run_in_processes

WHOLE = [Run(ragged=True, accumulate=accumulate) for accumulate in (1, 3)]
# Three global batches and a bit: processes then hold batches of different sizes, or none.
SHORT = [replace(run, samples=3 * 2 * LOCAL_ROWS * run.accumulate + left) for run in WHOLE for left in (1, 3)]
HALF = [replace(run, precision=precision) for run in WHOLE for precision in ("bf16", "fp16")]


TP_PLAN = {
    **{f"layers.*.attention.{name}": Colwise() for name in ("wq", "wk", "wv")},
    "layers.*.attention.wo": Rowwise(),
    "layers.*.ffn.w1": Colwise(),
    "layers.*.ffn.w2": Rowwise(),
}
STRATEGIES: dict[str, Any] = {
    "single": lambda: "single",
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "tp": lambda: Parallel(tp=2, tp_plan=TP_PLAN),
    "cp": lambda: Parallel(cp=2),
    "pp": lambda: Parallel(pp=2),
}


# Every rank, strategy and driver is held against the same few plain runs.
plain = functools.cache(train_plain)


def train_each(driver: str, strategy: str, runs: list[Run]) -> list[Any]:
    torch.set_num_threads(1)
    return [DRIVERS[driver](STRATEGIES[strategy](), run) for run in runs]


@pytest.mark.parametrize("driver", ["trainer", "accelerator"])
@pytest.mark.parametrize(("strategy", "processes"), [("single", 1), ("ddp", 2)])
def test_the_gradient_is_that_of_the_mean_over_all_tokens(driver, strategy, processes):
    # At the ragged end the Accelerator completes batches with the first rows of the epoch, as Accelerate does.
    runs = WHOLE + HALF + (SHORT if driver == "trainer" else [])
    everyone = run_in_processes(train_each, processes, args=(driver, strategy, runs), timeout=120)
    for rank, outcomes in enumerate(everyone):
        for run, outcome in zip(runs, outcomes, strict=True):
            check(outcome, plain(run), 5e-6 if run.precision == "32" else 3e-3, rank)


@pytest.mark.sharded
@pytest.mark.parametrize("strategy", ["fsdp", "tp", "cp", "pp"])
def test_the_same_where_the_model_or_the_sequences_are_divided(strategy):
    """DeepSpeed's is in test_deepspeed.py."""
    runs = [WHOLE[0], SHORT[-1], HALF[0]]
    for rank, outcomes in enumerate(run_in_processes(train_each, 2, args=("trainer", strategy, runs), timeout=120)):
        for run, outcome in zip(runs, outcomes, strict=True):
            check(outcome, plain(run), 5e-6 if run.precision == "32" else 3e-3, rank)


@pytest.mark.parametrize("run", WHOLE)
def test_averaging_means_would_be_visibly_wrong(run):
    """Else the test above would show nothing."""
    import tests.conformance.language_model as lm

    exact = plain(run)
    task = lm.LanguageTask()
    norms: list[float] = []

    class Norms(lm.Callback):
        def on_before_optimizer_step(self, trainer, task, optimizer):
            norms.append(trainer.strategy.gradients.clip_norm(list(task.parameters()), float("inf")).item())

    Trainer(
        accelerator=device(),
        accumulate_grad_batches=2 * run.accumulate,  # the global batch in halves, as two processes would have it
        max_epochs=1,
        callbacks=[Norms()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(task, lm.DataLoader(run.data(), batch_size=LOCAL_ROWS))
    assert abs(norms[0] - exact.norms[0]) > 1e-3


class TwoWeights(Task):
    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.outputs = outputs

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).sum()
        return self.outputs[batch_idx](loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(outputs: list[Any]) -> TwoWeights:
    torch.manual_seed(0)
    task = TwoWeights(outputs)
    Trainer(
        accelerator=device(),
        max_epochs=1,
        accumulate_grad_batches=len(outputs),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(task, [torch.ones(2, 1) for _ in outputs])
    return task


def test_a_batch_left_out_weighs_nothing():
    weighed = fit([lambda loss: {"loss": loss, "weight": 2}, lambda loss: None])
    plain = fit([lambda loss: loss / 2])
    torch.testing.assert_close(weighed.layer.weight, plain.layer.weight)


def test_no_tokens_at_all_change_nothing():
    task = fit([lambda loss: {"loss": loss * 0, "weight": 0}])
    before = fit([lambda loss: None])
    torch.testing.assert_close(task.layer.weight, before.layer.weight)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([lambda loss: {"loss": loss, "weight": torch.ones(3)}], "shape \\(3,\\)"),
        ([lambda loss: {"loss": loss, "weight": "many"}], "'many'"),
        ([lambda loss: {"loss": loss, "weight": loss}], "detach"),
        ([lambda loss: {"loss": loss, "weight": 2}, lambda loss: loss], "without a weight"),
        ([lambda loss: loss, lambda loss: {"loss": loss, "weight": 2}], "with a weight"),
    ],
)
def test_weights_that_mean_nothing_are_refused(outputs, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(outputs)


def test_the_accelerator_refuses_to_mix_losses_with_and_without_weight():
    accelerator = Accelerator(device=device(), gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1, device=accelerator.device)).sum(), weight=3)
    with accelerator.accumulate(model), pytest.raises(ConfigurationError, match="others do not"):
        accelerator.backward(model(torch.ones(1, 1, device=accelerator.device)).sum())
