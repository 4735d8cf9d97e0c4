"""A small GPT of megatron-core's layers, its data, and runs of it that all begin with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, MegatronTask, PartialState, Task, Trainer
from tests.strategies.quiet import quiet_trainer

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 48, 16, 32, 4, 4
ROWS, ACCUMULATE, STEPS = 4, 2, 4
MAX_NORM = 0.5


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens; with `ragged`, rows count in other numbers of positions each."""

    def __init__(self, samples: int = ROWS * ACCUMULATE * STEPS, ragged: bool = False, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
        self.labels = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
        keep = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
        self.mask = (torch.arange(LENGTH) < keep if ragged else torch.ones(samples, LENGTH)).float()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index], "labels": self.labels[index], "loss_mask": self.mask[index]}


def evaluation_texts() -> Texts:
    """Texts whose likeliest tokens differ clearly from the next ones, so that rounding does not choose between them."""
    return Texts(samples=9, seed=5)


class PlainNorm(torch.nn.LayerNorm):
    """In place of TransformerEngine's and Apex's norms: megatron-core has none of its own for sharded sequences."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # its gradient is summed over the parts


def layers_of(config: Any, vp_stage: int | None) -> Any:
    """Megatron-core's own layers, without fused kernels."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    spec = get_gpt_layer_local_spec()
    if not config.sequence_parallel:
        return spec
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = PlainNorm
    return TransformerBlockSubmodules([spec] * get_num_layers_to_build(config, vp_stage), PlainNorm)


class GPT(MegatronTask):
    """As a user would write it."""

    def __init__(self, optimizer: Any = None, vocabulary: int = VOCABULARY, tied: bool = False, **config: Any) -> None:
        super().__init__()
        self.config, self.vocabulary, self.tied = config, vocabulary, tied
        self.make_optimizer = optimizer or adamw

    def transformer_config(self) -> Any:
        from megatron.core.transformer import TransformerConfig

        chosen = {
            "num_layers": LAYERS,
            "hidden_size": WIDTH,
            "num_attention_heads": HEADS,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **self.config,
        }
        return TransformerConfig(**chosen)

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None
    ) -> Any:
        from megatron.core.models.gpt import GPTModel

        return GPTModel(
            config,
            layers_of(config, vp_stage),
            vocab_size=self.vocabulary,
            max_sequence_length=LENGTH,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            share_embeddings_and_output_weights=self.tied,
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_loss(batch, "val_")

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class WholeGPT(Task):
    """The same model in one part, as a task of any other strategy."""

    def __init__(self, optimizer: Any = None, **options: Any) -> None:
        super().__init__()
        PartialState(cpu=True)
        start_megatron()
        provider = GPT(**options)
        self.model = provider.model_provider(config=provider.transformer_config())
        self.make_optimizer = optimizer or adamw

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_with(self.model)(batch)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def held_gpt(complete: Callable[[Any], Any]) -> Any:
    """The same model for a raw loop, held under the name that it has in a task.

    Args:
        complete: Fills a `TransformerConfig` in.
    """
    from megatron.core.transformer.module import MegatronModule

    provider = GPT()
    config = complete(provider.transformer_config())

    class Holder(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.model = provider.model_provider(config=config)

        def forward(self, *args: Any, **options: Any) -> Tensor:
            return self.model(*args, **options)

    return Holder()


def loss_with(model: Any) -> Callable[[Any], Tensor]:
    """The mean over all positions of a batch."""

    def loss(batch: Any) -> Tensor:
        positions = torch.arange(LENGTH).expand_as(batch["tokens"])
        return model(batch["tokens"], positions, None, labels=batch["labels"]).mean()

    return loss


def start_megatron() -> None:
    """Let megatron-core's layers be built in a loop of plain torch, whole in each process."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(7)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01, eps=1e-4)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """Norms and biases without decay, and slower."""
    known = list(parameters)
    flat, rest = [p for p in known if p.dim() == 1], [p for p in known if p.dim() > 1]
    return torch.optim.AdamW([{"params": rest}, {"params": flat, "weight_decay": 0.0, "lr": 1e-3}], lr=3e-3, eps=1e-4)


@dataclass
class Outcome:
    """What a run leaves behind, whole and on the CPU; the parameters on rank 0 only."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    evaluation_loss: float = 0.0
    predictions: Tensor = field(default_factory=lambda: torch.zeros(0))
    trainer: Trainer | None = None


class Recorder(Callback):
    """Begins with the given weights; keeps each micro-batch's loss over all data, and each norm before clipping."""

    def __init__(self, outcome: Outcome, initial: dict[str, Tensor] | None) -> None:
        self.outcome, self.initial = outcome, initial

    def on_fit_start(self, trainer, task):
        if self.initial is not None:
            trainer.strategy.state.load_model(trainer.model, self.initial)

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        rows = float(trainer.batch_info.real_rows)
        loss, weight = outputs["loss"].double(), outputs.get("weight")
        pair = [loss * rows, loss.new_tensor(rows)] if weight is None else [loss * bool(rows), weight * bool(rows)]
        total, count = trainer.strategy.topology.sum(torch.stack([value.double() for value in pair])).tolist()
        self.outcome.losses.append(total / count)

    def on_before_optimizer_step(self, trainer, task, optimizer):
        self.outcome.norms.append(float(trainer.strategy.gradients.clip_norm(list(task.parameters()), float("inf"))))


def fit(
    strategy: Any,
    task: Task | None = None,
    data: Dataset[Any] | None = None,
    initial: dict[str, Tensor] | None = None,
    evaluate: bool = True,
    resume: str | Path | None = None,
    accumulate: int = ACCUMULATE,
    **options: Any,
) -> Outcome:
    """Train on this process among its peers, on global batches that are the same on any number of them."""
    outcome = Outcome()
    task = task or GPT()
    callbacks = [Recorder(outcome, initial), *options.pop("callbacks", [])]
    trainer = quiet_trainer(
        strategy,
        **{"accumulate_grad_batches": accumulate, "gradient_clip_val": MAX_NORM, "callbacks": callbacks, **options},
    )
    rows = ROWS // trainer.strategy.topology.data_shard.count
    trainer.fit(task, DataLoader(Texts() if data is None else data, batch_size=rows), resume=resume)
    outcome.parameters = trainer.strategy.state.model(trainer.model, full=True)
    if evaluate:
        loader = DataLoader(evaluation_texts(), batch_size=2)
        outcome.evaluation_loss = trainer.validate(task, loader, verbose=False)[0]["val_loss"]
        outcome.predictions = torch.cat([logits.argmax(-1) for logits in trainer.predict(task, loader)])
    outcome.trainer = trainer
    return outcome
