"""Trains one small model in plain torch, through the Trainer and through the Accelerator, and keeps what to compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import DDP, Accelerator, Callback, Strategy, Task, Trainer
from drivetrain.strategies.precision import Float16Mixed
from tests.pool import device

FEATURES, CLASSES = 12, 5
STEPS = 6
LOCAL_ROWS = 4
EVALUATION_SAMPLES = 37
MAX_NORM = 0.5


@dataclass
class Outcome:
    """What a training run leaves behind, all of it whole and on the CPU."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluation_loss: float = 0.0
    predictions: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, CLASSES))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.01)


def training_set(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (samples,), generator=generator))


def evaluation_set() -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(EVALUATION_SAMPLES, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (EVALUATION_SAMPLES,), generator=generator))


def context_of(precision: str) -> Any:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def dtype_of(precision: str) -> torch.dtype:
    dtypes = {"64": torch.float64, "bf16-true": torch.bfloat16, "fp16-true": torch.float16}
    return dtypes.get(precision, torch.float32)


def wide(logits: torch.Tensor) -> torch.Tensor:
    """At least 32 bits, for the loss."""
    return logits if logits.dtype == torch.float64 else logits.float()


def train_plain(precision: str, accumulate: int, world: int, samples: int | None = None) -> Outcome:
    """One process, plain torch, whole global batches: what everything else is held against."""
    dtype = dtype_of(precision)
    model = make_model().to(dtype)
    optimizer = make_optimizer(model.parameters())
    rows = LOCAL_ROWS * world
    data = training_set(samples or rows * accumulate * STEPS)
    micro_batches = list(DataLoader(data, batch_size=rows))
    outcome = Outcome()
    while micro_batches:
        window, micro_batches = micro_batches[:accumulate], micro_batches[accumulate:]
        optimizer.zero_grad()
        for x, y in window:
            with context_of(precision):
                loss = F.cross_entropy(wide(model(x.to(dtype))), y)
            outcome.losses.append(loss.item())
            (loss / len(window)).backward()
        outcome.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    outcome.parameters = {name: value.detach().clone() for name, value in model.state_dict().items()}
    x, y = evaluation_set().tensors
    with torch.no_grad(), context_of(precision):
        logits = wide(model(x.to(dtype)))
    outcome.predictions = logits.argmax(-1)
    outcome.evaluation_loss = F.cross_entropy(logits, y).item()
    return outcome


class ConformanceTask(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(wide(self.net(x)), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = wide(self.net(x))
        self.log("evaluation_loss", F.cross_entropy(logits, y))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return wide(self.net(batch[0])).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.net.parameters())


def on_host(value: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; what another process holds stays on the meta device."""
    return value.clone() if value.is_meta else value.detach().to("cpu", copy=True)


class Recorder(Callback):
    """Keeps each micro-batch's loss over all processes, and each step's gradient norm before clipping."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        info = trainer.batch_info
        weighed = torch.stack(
            [outputs["loss"].double() * info.real_rows, outputs["loss"].new_tensor(info.real_rows).double()]
        )
        total, rows = trainer.accelerator.reduce(weighed, "sum").tolist()
        self.outcome.losses.append(total / rows)

    def on_before_optimizer_step(self, trainer, task, optimizer):
        self.outcome.norms.append(trainer.strategy.gradients.clip_norm(list(task.parameters()), float("inf")).item())


def train_with_trainer(
    strategy: str | Strategy, precision: Any, accumulate: int, world: int, samples: int | None = None
) -> Outcome:
    """The same through the Trainer, on however many processes this is one of."""
    outcome = Outcome()
    task = ConformanceTask()
    trainer = Trainer(
        accelerator=device(),
        strategy=strategy,
        precision=precision,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=MAX_NORM,
        max_epochs=1,
        callbacks=[Recorder(outcome)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = LOCAL_ROWS * world // trainer.strategy.topology.data_shard.count
    data = training_set(samples or LOCAL_ROWS * world * accumulate * STEPS)
    trainer.fit(task, DataLoader(data, batch_size=rows))
    outcome.parameters = {
        name.removeprefix("net."): on_host(value) for name, value in trainer.strategy.state.model(trainer.model).items()
    }
    evaluation = DataLoader(evaluation_set(), batch_size=5)
    outcome.evaluation_loss = trainer.validate(task, evaluation, verbose=False)[0]["evaluation_loss"]
    outcome.predictions = torch.cat(trainer.predict(task, evaluation)).cpu()
    return outcome


def train_with_accelerator(
    strategy: str | Strategy, precision: Any, accumulate: int, world: int, samples: int | None = None
) -> Outcome:
    """The same through the raw Accelerator."""
    outcome = Outcome()
    accelerator = Accelerator(
        device=device(), strategy=strategy, mixed_precision=precision, gradient_accumulation_steps=accumulate
    )
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    rows = LOCAL_ROWS * world // accelerator.num_processes
    data = training_set(samples or LOCAL_ROWS * world * accumulate * STEPS)
    loader, evaluation = DataLoader(data, batch_size=rows), DataLoader(evaluation_set(), batch_size=5)
    loader, optimizer, model, evaluation = accelerator.prepare(loader, optimizer, model, evaluation)
    for x, y in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            loss = F.cross_entropy(wide(model(x)), y)
            outcome.losses.append(accelerator.reduce(loss.detach().double(), "mean").item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                outcome.norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
    outcome.parameters = {name: on_host(value) for name, value in accelerator.strategy.state.model(model).items()}
    predictions, losses = [], []
    with torch.no_grad():
        for x, y in evaluation:
            logits = wide(model(x))
            each = F.cross_entropy(logits, y, reduction="none")
            logits, each = accelerator.gather_for_metrics((logits, each))
            predictions.append(logits.argmax(-1))
            losses.append(each)
    outcome.predictions = torch.cat(predictions).cpu()
    outcome.evaluation_loss = torch.cat(losses).mean().item()
    return outcome


DRIVERS = {"trainer": train_with_trainer, "accelerator": train_with_accelerator}

FULL_RANK = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 10_000, "min_compression_rate": 0}

STRATEGIES: dict[str, Any] = {
    "single": lambda: "single",
    "ddp": lambda: "ddp",
    "ddp-static": lambda: DDP(static_graph=True),
    "ddp-unused": lambda: DDP(find_unused_parameters=True, gradient_as_bucket_view=False),
    "ddp-small-buckets": lambda: DDP(bucket_cap_mb=0.001),
    "ddp-fp16-hook": lambda: DDP(comm_hook="fp16"),
    "ddp-bf16-hook": lambda: DDP(comm_hook="bf16"),
    # Factors of full rank, from the third reduction on: what is sent is exact but for rounding.
    "ddp-powersgd": lambda: DDP(comm_hook="powersgd", comm_hook_options=FULL_RANK),
    "ddp-batched-powersgd": lambda: DDP(comm_hook="batched_powersgd", comm_hook_options=FULL_RANK),
}


def train(
    driver: str, strategy: str, precision: str, accumulate: int, world: int, samples: int | None = None
) -> Outcome:
    """One run, in whatever process it is called."""
    torch.set_num_threads(1)
    # A first scale that does not overflow: a skipped step is another test's matter.
    chosen = Float16Mixed(init_scale=1024.0) if precision == "fp16" else precision
    return DRIVERS[driver](STRATEGIES[strategy](), chosen, accumulate, world, samples)
