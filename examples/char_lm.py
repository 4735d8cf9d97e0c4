"""Train a small GPT, letter by letter, on the sources of Python's standard library: one file under every strategy.

    python examples/char_lm.py --strategy single
    python examples/char_lm.py --strategy fsdp
    drivetrain launch --num_processes 4 examples/char_lm.py --strategy tp_fsdp

The global batch, its order and the first weights are the same under all of them, so the losses are too. The task knows
nothing of strategies: all that differs is what `make_strategy` returns.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import CSVLogger, ProcessEnvironment, Strategy, Task, Trainer

CHARACTERS = 1_000_000
VOCABULARY = 128  # ASCII
VALIDATION = 20_000  # of them
LENGTH = 96  # characters that the model sees at once
WIDTH, HEADS, LAYERS = 96, 4, 4
MICRO_BATCHES = 2  # in each step: the stages of a pipeline work on several at once

# Under each strategy, on how many processes it runs unless told otherwise.
PROCESSES = {"single": 1, "ddp": 2, "fsdp": 2, "tp_fsdp": 4, "pp": 2, "deepspeed": 2}


def make_strategy(name: str) -> str | Strategy:
    """What the Trainer is told."""
    if name == "tp_fsdp":  # two processes compute each layer together; parameters are sharded over two such pairs
        from drivetrain import Colwise, Parallel, Rowwise

        into = {
            f"blocks.*.{layer}": Colwise() for layer in ("attention.query", "attention.key", "attention.value", "up")
        }
        out = {f"blocks.*.{layer}": Rowwise() for layer in ("attention.output", "down")}
        return Parallel(tp=2, tp_plan={**into, **out})
    if name == "pp":  # half of the blocks on each of two processes
        from drivetrain import Parallel

        return Parallel(pp=2)
    if name == "deepspeed":  # ZeRO-2: gradients and optimizer state are sharded
        from drivetrain import DeepSpeed

        return DeepSpeed(stage=2)
    return name


class Windows(Dataset):
    """Stretches of a text, each with the same one character later: what is to be predicted."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * LENGTH : (index + 1) * LENGTH + 1].long()
        return window[:-1], window[1:]


def load_text() -> tuple[Tensor, Tensor]:
    """A million characters of the standard library, files up to 32 kB by name: the last ones are for validation."""
    files = sorted(path for path in Path(os.__file__).parent.glob("*.py") if path.stat().st_size <= 32 * 1024)
    text = "".join(path.read_text(encoding="utf-8") for path in files)[:CHARACTERS]
    encoded = torch.frombuffer(bytearray(text, "ascii", "replace"), dtype=torch.uint8)
    return encoded[:-VALIDATION], encoded[-VALIDATION:]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # -1: as many heads as this process has, under tensor parallelism not all.
        heads = (*x.shape[:2], -1, WIDTH // HEADS)
        query, key, value = (layer(x).view(heads).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits (rows, length, vocabulary) of the next character, for characters (rows, length)."""
        x = self.characters(characters) + self.positions(torch.arange(characters.shape[1], device=characters.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CharacterModel(Task):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        characters, next_characters = batch
        return F.cross_entropy(self.model(characters).flatten(0, 1), next_characters.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.01)


@torch.no_grad()
def write_text(weights: dict[str, Tensor], beginning: str, count: int) -> str:
    """Let a model with these weights go on with a text, character by character."""
    model = GPT()
    model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([list(beginning.encode("ascii"))])
    for _ in range(count):
        chances = (model(text[:, -LENGTH:])[0, -1] / 0.7).softmax(-1)  # a little more sure than it is
        text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)[None]], dim=1)
    return bytes(text[0].tolist()).decode("ascii")


@click.command()
@click.option("--strategy", type=click.Choice(list(PROCESSES)), default="single", show_default=True)
@click.option("--devices", type=int, help="Processes; by default 4 for tp_fsdp, 1 for single, 2 for the others.")
@click.option("--steps", default=250, show_default=True)
@click.option("--batch-size", default=16, show_default=True, help="Rows of each step, over all processes.")
@click.option("--lr", default=2e-3, show_default=True)
@click.option("--output", default="char_lm", show_default=True, type=click.Path(path_type=Path), help="Where to write.")
def main(strategy: str, devices: int | None, steps: int, batch_size: int, lr: float, output: Path) -> None:
    launched = ProcessEnvironment.detect().is_distributed  # by `drivetrain launch`, on as many as it says
    trainer = Trainer(
        strategy=make_strategy(strategy),
        devices=devices or ("auto" if launched else PROCESSES[strategy]),
        max_steps=steps,
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        val_check_interval=max(1, steps // 5) * MICRO_BATCHES,
        enable_checkpointing=False,
        logger=CSVLogger(output, name=strategy),
        default_root_dir=output,
        seed=0,
    )
    train, val = load_text()
    trainer.print(f"{len(train):,} characters to train on, {len(val):,} to validate")
    shards = trainer.strategy.topology.data_shard.count  # not the processes: some may work on the same rows together
    training = DataLoader(Windows(train), batch_size // MICRO_BATCHES // shards, shuffle=True)
    task = CharacterModel(lr)
    trainer.fit(task, training, DataLoader(Windows(val), 32 // shards))

    weights = trainer.accelerator.get_state_dict(trainer.model)  # whole, on the first process
    if trainer.is_global_zero:
        values = trainer.logged_metrics
        print(f"{strategy}: loss {values['loss']:.4f}, validation loss {values['val_loss']:.4f}")
        print(write_text(weights, "def ", 300))


if __name__ == "__main__":
    main()
