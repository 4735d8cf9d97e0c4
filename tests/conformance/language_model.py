"""A small GPT in plain torch, through the Trainer and through the Accelerator, for strategies that split models.

Beside means over equal batches it has labels that are left out, in other numbers in each row: averaging the means of
micro-batches is then visibly wrong, and only a token-exact mean agrees with one process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator, Callback, Strategy, Task, Trainer
from drivetrain.strategies.precision import Float16Mixed
from tests.conformance.harness import MAX_NORM, Outcome, context_of, dtype_of, wide
from tests.pool import device

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 48, 16, 32, 4, 4
STEPS = 4
LOCAL_ROWS = 2
EVALUATION_SAMPLES = 9
IGNORED = -100


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        # As many heads as this process has: -1 holds for tensor parallel too.
        q, k, v = (w(x).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(rows, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.w2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.ffn_norm = nn.LayerNorm(WIDTH)
        self.ffn = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class GPT(nn.Module):
    """Tokens and their positions, both (rows, length), to logits (rows, length, vocabulary)."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_model(layers: int = LAYERS) -> GPT:
    torch.manual_seed(11)
    return GPT(layers)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    # With the usual eps of 1e-8 a gradient of that size, which is rounding, moves its parameter by all of lr.
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01, eps=1e-4)


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens; with `ragged`, row i has from 1 to all of its labels, in no order."""

    def __init__(self, samples: int, ragged: bool = False, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
        self.labels = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
        if ragged:
            keep = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
            self.labels[torch.arange(LENGTH) >= keep] = IGNORED

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index], "positions": torch.arange(LENGTH), "labels": self.labels[index]}


def loss_of(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(wide(logits).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


@dataclass(frozen=True)
class Run:
    """What is trained.

    Attributes:
        precision: in which number formats.
        accumulate: micro-batches in a step.
        world: processes that a global batch is made for, whatever number there is.
        ragged: whether labels are left out, and the task says how many tokens each loss is the sum of.
        samples: of the training set; whole global batches if None.
        layers: of the model.
        device: the kind of device.
    """

    precision: str = "32"
    accumulate: int = 1
    world: int = 2
    ragged: bool = False
    samples: int | None = None
    layers: int = LAYERS
    device: str = field(default_factory=device)

    def data(self) -> Texts:
        return Texts(self.samples or LOCAL_ROWS * self.world * self.accumulate * STEPS, self.ragged)

    def rows(self, shards: int) -> int:
        """Rows of a batch where the data is shared by so many."""
        return LOCAL_ROWS * self.world // shards


def train_plain(run: Run) -> Outcome:
    """One process, plain torch, whole global batches: what everything else is held against."""
    dtype = dtype_of(run.precision)
    model = make_model(run.layers).to(dtype)
    optimizer = make_optimizer(model.parameters())
    micro_batches = list(DataLoader(run.data(), batch_size=run.rows(1)))
    outcome = Outcome()
    while micro_batches:
        window, micro_batches = micro_batches[: run.accumulate], micro_batches[run.accumulate :]
        tokens = sum(int((batch["labels"] != IGNORED).sum()) for batch in window)
        optimizer.zero_grad()
        for batch in window:
            with context_of(run.precision):
                logits = model(batch["tokens"], batch["positions"])
                loss = loss_of(logits, batch["labels"], "sum" if run.ragged else "mean")
            count = int((batch["labels"] != IGNORED).sum())
            outcome.losses.append(loss.item() / count if run.ragged else loss.item())
            (loss / (tokens if run.ragged else len(window))).backward()
        outcome.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    outcome.parameters = {name: value.detach().clone() for name, value in model.state_dict().items()}
    evaluation = next(iter(DataLoader(Texts(EVALUATION_SAMPLES, seed=4), batch_size=EVALUATION_SAMPLES)))
    with torch.no_grad(), context_of(run.precision):
        logits = wide(model(evaluation["tokens"], evaluation["positions"]))
    outcome.predictions = logits.argmax(-1)
    outcome.evaluation_loss = loss_of(logits, evaluation["labels"]).item()
    return outcome


class LanguageTask(Task):
    """The task as any user would write it: nothing in it knows the strategy."""

    def __init__(self, ragged: bool = False, layers: int = LAYERS) -> None:
        super().__init__()
        self.ragged = ragged
        self.model = make_model(layers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["tokens"], batch["positions"])
        if self.ragged:
            tokens = (batch["labels"] != IGNORED).sum()
            return {"loss": loss_of(logits, batch["labels"], "sum"), "weight": tokens}
        loss = loss_of(logits, batch["labels"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch["tokens"], batch["positions"])
        self.log("evaluation_loss", loss_of(logits, batch["labels"]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return wide(self.model(batch["tokens"], batch["positions"])).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model.parameters())


class Recorder(Callback):
    """Keeps each micro-batch's loss over all processes, and each step's gradient norm before clipping."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        rows = float(trainer.batch_info.real_rows)
        loss = outputs["loss"].double()
        weight = outputs.get("weight")
        # A mean weighs as many rows as it is of; a sum, where any of them is real, by what the task says.
        pair = [loss * rows, loss.new_tensor(rows)] if weight is None else [loss * bool(rows), weight * bool(rows)]
        total, count = trainer.accelerator.reduce(torch.stack([value.double() for value in pair]), "sum").tolist()
        self.outcome.losses.append(total / count)

    def on_before_optimizer_step(self, trainer, task, optimizer):
        self.outcome.norms.append(trainer.strategy.gradients.clip_norm(list(task.parameters()), float("inf")).item())


def train_with_trainer(strategy: str | Strategy, run: Run) -> Outcome:
    """The same through the Trainer, on however many processes this is one of."""
    outcome = Outcome()
    task = LanguageTask(run.ragged, run.layers)
    trainer = Trainer(
        accelerator=run.device,
        strategy=strategy,
        precision=precision_of(run),
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=MAX_NORM,
        max_epochs=1,
        callbacks=[Recorder(outcome)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, DataLoader(run.data(), batch_size=run.rows(trainer.strategy.topology.data_shard.count)))
    whole = trainer.strategy.state.model(trainer.model, full=True)
    outcome.parameters = {name.removeprefix("model."): value.clone() for name, value in whole.items()}
    evaluation = DataLoader(Texts(EVALUATION_SAMPLES, seed=4), batch_size=2)
    outcome.evaluation_loss = trainer.validate(task, evaluation, verbose=False)[0]["evaluation_loss"]
    outcome.predictions = torch.cat(trainer.predict(task, evaluation))
    return outcome


def train_with_accelerator(strategy: str | Strategy, run: Run) -> Outcome:
    """The same through the raw Accelerator."""
    outcome = Outcome()
    accelerator = Accelerator(
        device=run.device,
        strategy=strategy,
        mixed_precision=precision_of(run),
        gradient_accumulation_steps=run.accumulate,
    )
    model = make_model(run.layers)
    optimizer = make_optimizer(model.parameters())
    rows = run.rows(accelerator.strategy.topology.data_shard.count)
    loader = DataLoader(run.data(), batch_size=rows)
    evaluation = DataLoader(Texts(EVALUATION_SAMPLES, seed=4), batch_size=2)
    loader, optimizer, model, evaluation = accelerator.prepare(loader, optimizer, model, evaluation)
    for batch in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            logits = model(batch["tokens"], batch["positions"])
            loss = loss_of(logits, batch["labels"], "sum" if run.ragged else "mean")
            count = (batch["labels"] != IGNORED).sum()
            pair = torch.stack(
                [loss.detach().double(), count.double() if run.ragged else torch.ones_like(loss).double()]
            )
            total, weight = accelerator.reduce(pair, "sum").tolist()
            outcome.losses.append(total / weight)
            accelerator.backward(loss, weight=count if run.ragged else None)
            if accelerator.sync_gradients:
                outcome.norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
    outcome.parameters = dict(accelerator.get_state_dict(model))
    predictions, losses = [], []
    with torch.no_grad():
        for batch in evaluation:
            logits = wide(model(batch["tokens"], batch["positions"]))
            each = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none").mean(-1)
            found, each = accelerator.gather_for_metrics((logits.argmax(-1), each))
            predictions.append(found)
            losses.append(each)
    outcome.predictions = torch.cat(predictions).cpu()
    outcome.evaluation_loss = torch.cat(losses).mean().item()
    return outcome


def precision_of(run: Run) -> Any:
    # A first scale that does not overflow: a skipped step is another test's matter.
    return Float16Mixed(init_scale=1024.0) if run.precision == "fp16" else run.precision


DRIVERS = {"trainer": train_with_trainer, "accelerator": train_with_accelerator}


def check(outcome: Outcome, expected: Outcome, tolerance: float, rank: int = 0) -> None:
    """Raise where a run differs from plain torch; the parameters are whole on rank 0 only."""
    name = f"rank {rank}"
    assert len(outcome.losses) == len(expected.losses), name
    assert _gap(outcome.losses, expected.losses) <= tolerance, f"{name} losses {outcome.losses} {expected.losses}"
    assert _gap(outcome.norms, expected.norms) <= tolerance * max(1.0, *expected.norms), f"{name} {outcome.norms}"
    if rank == 0:
        assert outcome.parameters.keys() == expected.parameters.keys()
        for key, value in expected.parameters.items():
            torch.testing.assert_close(
                outcome.parameters[key], value, atol=tolerance, rtol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
            )
    assert abs(outcome.evaluation_loss - expected.evaluation_loss) <= tolerance, name
    assert outcome.predictions.shape == expected.predictions.shape, name
    same = (outcome.predictions == expected.predictions).float().mean()
    assert same == 1.0 if tolerance <= 5e-6 else same > 0.9, f"{name}: {same:.3f} of the predictions are the same"


def _gap(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
