"""Whole epochs of small but real work, beside the plain loop, the same loop tuned by hand, and other frameworks.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --only tabular --rounds 10 --json throughput.json

One process and one thread on the CPU. Every contender trains the same model from the same weights on the same samples
in the same order, with AdamW and gradients clipped to a norm of 1; its losses must be those of the plain loop. See
benchmarks/README.md.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import multiprocessing
import tempfile
import tokenize
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import click
import torch
from tables import as_table
from timing import Comparison, compare, quietly, without_garbage_collection
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

LEARNING_RATE, LARGEST_NORM = 1e-3, 1.0
TOLERANCE = 5e-6
EPOCHS_OF_A_PROCESS = 4
BARE = "plain loop"
FRAMEWORKS = ("lightning", "lightning.pytorch", "accelerate")


class Workload(NamedTuple):
    """What is trained.

    Attributes:
        make_model: Makes the model.
        make_dataset: Makes the samples.
        batch_size: Samples of a step.
        loss_of: The loss of a model on a batch.
        make_collator: Makes the collate function; torch's own if None.
        needs: Packages that must be installed.
    """

    make_model: Callable[[], nn.Module]
    make_dataset: Callable[[], Dataset[Any]]
    batch_size: int
    loss_of: Callable[[nn.Module, Any], Tensor]
    make_collator: Callable[[], Callable[[Any], Any]] | None = None
    needs: tuple[str, ...] = ()

    def make_loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        collator = None if self.make_collator is None else self.make_collator()
        options = {"shuffle": True, "generator": generator, "drop_last": True, "collate_fn": collator}
        return DataLoader(self.make_dataset(), self.batch_size, **options)

    def make_optimizer(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), LEARNING_RATE, **options)


# The workloads.


def samples(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_table() -> Dataset[Any]:
    x = samples(60_000, 32)
    return TensorDataset(x, (x @ samples(32, 10, seed=1)).argmax(1))


def make_perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


class Augmented(Dataset[Any]):
    """Images that are flipped and shifted at random."""

    def __init__(self, count: int) -> None:
        self.images, self.labels = samples(count, 3, 32, 32), torch.arange(count) % 10

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = F.pad(self.images[index], (4, 4, 4, 4))
        top, left, flips = torch.randint(9, (3,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        return image.flip(2) if flips % 2 else image, self.labels[index]


def make_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class Windows(Dataset[Any]):
    """Parts of a text, and the characters that follow: the source of Python's own tokenizer."""

    def __init__(self, count: int, length: int = 64) -> None:
        text = Path(tokenize.__file__).read_bytes()
        self.codes = torch.tensor(list(text[: count + length + 1])) % 128
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.codes[index : index + self.length + 1]
        return window[:-1], window[1:]


class CharacterModel(nn.Module):
    """A transformer of 0.8 million parameters."""

    def __init__(self, width: int = 128, layers: int = 4, length: int = 64) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(128, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, codes: Tensor) -> Tensor:
        x = self.characters(codes) + self.positions.weight
        return self.head(self.blocks(x, mask=self.mask, is_causal=True))


def make_autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 2, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 2, stride=2),
    )


WORDS = 2_000


def make_sentences() -> Any:
    """Lines of 4 to 40 words, and whether the first word is a rare one."""
    from datasets import Dataset as Table

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 41, (960,), generator=generator).tolist()
    lines = [torch.randint(2, WORDS, (length,), generator=generator).tolist() for length in lengths]
    labels = [int(line[0] > WORDS // 2) for line in lines]
    masks = [[1] * len(line) for line in lines]
    return Table.from_dict({"input_ids": lines, "attention_mask": masks, "labels": labels})


def make_padding() -> Callable[[Any], Any]:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return DataCollatorWithPadding(PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]"))


def make_classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    model: nn.Module = BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=2, **sizes))
    return model.train()


def classification(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def next_character(model: nn.Module, batch: Any) -> Tensor:
    codes, following = batch
    return F.cross_entropy(model(codes).flatten(0, 1), following.flatten())


def its_own_loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def reconstruction(model: nn.Module, batch: Any) -> Tensor:
    (images,) = batch
    return F.mse_loss(model(images), images)


WORKLOADS = {
    "tabular": Workload(make_perceptron, make_table, 256, classification),
    "images": Workload(make_convolutions, lambda: Augmented(2_048), 64, classification),
    "text": Workload(CharacterModel, lambda: Windows(640), 32, next_character),
    "autoencoder": Workload(make_autoencoder, lambda: TensorDataset(samples(4_096, 1, 28, 28)), 64, reconstruction),
    "sentences": Workload(
        make_classifier, make_sentences, 16, its_own_loss, make_padding, needs=("transformers", "datasets")
    ),
}


# The contenders: each trains an epoch, and returns its seconds and its losses.

Epoch = tuple[float, list[Tensor]]


def bare_loop(work: Workload) -> Epoch:
    return _loop(work, {}, {})


def tuned_loop(work: Workload) -> Epoch:
    return _loop(work, {"fused": True}, {"foreach": True})


def _loop(work: Workload, optimizer_options: dict[str, Any], clip_options: dict[str, Any]) -> Epoch:
    model, loader, losses = work.make_model(), work.make_loader(), []
    optimizer = work.make_optimizer(model, **optimizer_options)
    torch.manual_seed(2)
    start = perf_counter()
    for batch in loader:
        optimizer.zero_grad()
        loss = work.loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM, **clip_options)
        optimizer.step()
        losses.append(loss.detach())
    return perf_counter() - start, losses


def drivetrain_trainer(work: Workload) -> Epoch:
    import drivetrain

    return _trained(work, drivetrain.Task, drivetrain.Trainer, accelerator="cpu")


def lightning_trainer(work: Workload) -> Epoch:
    import lightning

    return _trained(work, lightning.LightningModule, lightning.Trainer, accelerator="cpu", devices=1)


def _trained(work: Workload, kind: Any, trainer: Any, **options: Any) -> Epoch:
    losses: list[Tensor] = []
    times: list[float] = []

    class Trained(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = work.make_model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = work.loss_of(self.model, batch)
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return work.make_optimizer(self.model)

        def on_train_start(self) -> None:
            torch.manual_seed(2)
            times.append(perf_counter())

        def on_train_end(self) -> None:
            times.append(perf_counter())

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
    trainer(max_epochs=1, gradient_clip_val=LARGEST_NORM, **off, **options).fit(Trained(), work.make_loader())
    return times[1] - times[0], losses


def drivetrain_accelerator(work: Workload) -> Epoch:
    from drivetrain import Accelerator

    return _accelerated(work, Accelerator(cpu=True))


def accelerate(work: Workload) -> Epoch:
    from accelerate import Accelerator

    return _accelerated(work, Accelerator(cpu=True))


def _accelerated(work: Workload, accelerator: Any) -> Epoch:
    model, losses = work.make_model(), []
    model, optimizer, loader = accelerator.prepare(model, work.make_optimizer(model), work.make_loader())
    torch.manual_seed(2)
    start = perf_counter()
    for batch in loader:
        optimizer.zero_grad()
        loss = work.loss_of(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        losses.append(loss.detach())
    return perf_counter() - start, losses


def transformers_trainer(work: Workload) -> Epoch:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    losses: list[Tensor] = []
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            torch.manual_seed(2)
            times.append(perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            times.append(perf_counter())

    class Same(Trainer):
        """On the same batches."""

        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(work.make_loader())

        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
            loss = work.loss_of(model, inputs)
            losses.append(loss.detach())
            return loss

    model = work.make_model()
    optimizer = work.make_optimizer(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, _one)
    with tempfile.TemporaryDirectory() as folder:
        off = {"report_to": "none", "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
        options = {"num_train_epochs": 1, "max_grad_norm": LARGEST_NORM, "use_cpu": True}
        options["accelerator_config"] = {"use_seedable_sampler": False}
        arguments = TrainingArguments(output_dir=folder, per_device_train_batch_size=work.batch_size, **options, **off)
        Same(
            model, arguments, train_dataset=work.make_dataset(), optimizers=(optimizer, constant), callbacks=[Clock()]
        ).train()
    return times[1] - times[0], losses


def _one(step: int) -> float:
    return 1.0


# name -> (what must be installed, what runs)
CONTENDERS: dict[str, tuple[str, Callable[[Workload], Epoch]]] = {
    "plain loop, tuned by hand": ("torch", tuned_loop),
    "drivetrain Trainer": ("drivetrain", drivetrain_trainer),
    "drivetrain Accelerator": ("drivetrain", drivetrain_accelerator),
    "Lightning Trainer": ("lightning", lightning_trainer),
    "Accelerate": ("accelerate", accelerate),
    "Transformers Trainer": ("transformers", transformers_trainer),
}


class Remote:
    """Trains epochs in a process of its own: what a framework changes in its process reaches no other contender.

    Where the tensors of a process happen to lie is worth some percent, as long as it lives: so it is replaced by a new
    one after some epochs.

    Args:
        workload: What is trained.
        contender: What trains it.
    """

    def __init__(self, workload: str, contender: str) -> None:
        self._trains = (workload, contender)
        self.losses: list[Tensor] = []
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=train_on_demand, args=(other, *self._trains), daemon=True)
        self._process.start()
        other.close()
        self._epochs = 0

    def measure(self) -> float:
        """Train an epoch: its seconds. The losses are left in `losses`."""
        if self._epochs == EPOCHS_OF_A_PROCESS:
            self.end()
            self._begin()
            self._train()  # the first epoch warms up
        return self._train()

    def _train(self) -> float:
        self._epochs += 1
        self._connection.send(True)
        seconds, losses = self._connection.recv()
        self.losses = [torch.tensor(loss) for loss in losses]
        return float(seconds)

    def end(self) -> None:
        """End the process."""
        self._connection.send(False)
        self._process.join()


def train_on_demand(connection: Any, workload: str, contender: str) -> None:
    """Train an epoch for each True that comes, and send its seconds and losses back."""
    torch.set_num_threads(1)
    for framework in FRAMEWORKS:
        logging.getLogger(framework).setLevel(logging.ERROR)
    work, run = WORKLOADS[workload], bare_loop if contender == BARE else CONTENDERS[contender][1]
    while connection.recv():
        torch.manual_seed(0)
        with quietly(), warnings.catch_warnings(), without_garbage_collection():
            warnings.simplefilter("ignore")
            seconds, losses = run(work)
        connection.send((seconds, [loss.item() for loss in losses]))


def largest_difference(losses: list[Tensor], expected: list[Tensor]) -> float:
    """Between two runs' losses."""
    return float((torch.stack(losses) - torch.stack(expected)).abs().max())


def measure_workload(name: str, rounds: int) -> tuple[list[Comparison], dict[str, float]]:
    """Compare all contenders that are installed on a workload; returns that, and how far their losses are apart."""
    chosen = [BARE]
    for contender, (module, _) in CONTENDERS.items():
        applies = module != "transformers" or module in WORKLOADS[name].needs
        if applies and importlib.util.find_spec(module) is not None:
            chosen.append(contender)
    remotes = {contender: Remote(name, contender) for contender in chosen}
    base = remotes.pop(BARE)
    results = compare(base.measure, {contender: remote.measure for contender, remote in remotes.items()}, rounds)
    apart = {contender: largest_difference(remote.losses, base.losses) for contender, remote in remotes.items()}
    for remote in (base, *remotes.values()):
        remote.end()
    return results, apart


@click.command()
@click.option("--rounds", default=7, show_default=True, help="How often each contender trains an epoch.")
@click.option(
    "--only", type=click.Choice(list(WORKLOADS)), multiple=True, help="A workload; can be given several times."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
def main(rounds: int, only: tuple[str, ...], json_file: Path | None) -> None:
    figures, far = {}, io.StringIO()
    rows: dict[str, dict[str, str]] = {}
    for name in only or WORKLOADS:
        missing = [package for package in WORKLOADS[name].needs if importlib.util.find_spec(package) is None]
        if missing:
            print(
                f"{name}: left out, {' and '.join(missing)} is not installed. `make bench` installs what is compared."
            )
            continue
        results, apart = measure_workload(name, rounds)
        for result in results:
            rows.setdefault(result.name, {})[name] = f"{result.ratio:.2f}"
            if not apart[result.name] <= TOLERANCE:
                print(f"{name}, {result.name}: losses differ by {apart[result.name]:.1e}", file=far)
        figures[name] = [{**result.as_dict(), "losses": apart[result.name]} for result in results]
    print(f"Times the plain loop, whole epochs, {rounds} rounds. torch {torch.__version__}.\n")
    print(
        as_table(
            ["", *(f"{name}:" for name in figures)],
            [[each, *(row.get(name, "") for name in figures)] for each, row in rows.items()],
        )
    )
    print(far.getvalue() or f"All losses are those of the plain loop to {TOLERANCE:.0e}.")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2))
    if far.getvalue():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
