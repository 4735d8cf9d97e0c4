"""How long it takes until the first step of a compiled run is done: cold, and resumed in the same folder.

Beside it: how many graphs a whole epoch compiles, how many of them again, and how many came from the cache. The last
batch of the epoch is a short one, and it is validated.

    python benchmarks/compiling.py
    python benchmarks/compiling.py --compile blocks --layers 8

Each run is a fresh interpreter. The cold one begins with an empty `compile_cache`; the warm one resumes its checkpoint
in the same folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from tables import as_table

CHILD = """
import json, sys, time
import torch
from torch import nn
from drivetrain import Callback, Task, Trainer

class Language(Task):
    def __init__(self, width, layers):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def training_step(self, batch, batch_idx):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)

class FirstStep(Callback):
    seconds = None

    def on_train_start(self, trainer, task):
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer, *rest):
        if self.seconds is None:
            self.seconds = time.perf_counter() - self.start

given, folder, width, layers, resume = json.loads(sys.argv[1])
torch.manual_seed(0)
first = FirstStep()
trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1 + resume, compile=given, default_root_dir=folder,
    callbacks=first, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    num_sanity_val_steps=0)
data = torch.utils.data.DataLoader(torch.randint(0, 256, (28, 64)), batch_size=8)
path = folder + "/first"
trainer.fit(Language(width, layers), data, data, resume=path if resume else None)
if not resume:
    trainer.save_checkpoint(path)
figures = {"seconds": first.seconds, "graphs": 0, "again": 0, "from the cache": 0}
if given:
    from torch._dynamo import utils
    forwards = [each for each in utils.get_compilation_metrics()
        if each.is_forward is not False and getattr(each, "has_guarded_code", True)]
    figures["graphs"] = len(forwards)
    figures["again"] = sum(bool(each.recompile_reason) for each in forwards)
    figures["from the cache"] = utils.counters["aot_autograd"]["autograd_cache_hit"]
print(json.dumps(figures))
"""


def first_step(compiled: bool | str, folder: str, width: int, layers: int, resume: bool) -> dict[str, float]:
    """An epoch in a fresh interpreter: seconds from the start of training to the end of its first step, and graphs."""
    settings = json.dumps([compiled, folder, width, layers, resume])
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, settings], capture_output=True, text=True, env=environment
    )
    if done.returncode != 0:
        raise click.ClickException(done.stderr)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


@click.command()
@click.option("--compile", "given", type=click.Choice(["whole", "blocks"]), default="whole", show_default=True)
@click.option("--width", default=128, show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
def main(given: str, width: int, layers: int, json_file: Path | None) -> None:
    compiled: bool | str = True if given == "whole" else "blocks"
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        figures["not compiled"] = first_step(False, folder, width, layers, resume=False)
        figures["compiled, cold"] = first_step(compiled, folder, width, layers, resume=False)
        figures["compiled, resumed"] = first_step(compiled, folder, width, layers, resume=True)
    columns = ("graphs", "again", "from the cache")
    rows = [[name, f"{each['seconds']:.2f}", *(f"{each[key]:g}" for key in columns)] for name, each in figures.items()]
    print(as_table(["time to the first step", "s:", *(f"{key}:" for key in columns)], rows))
    if json_file is not None:
        json_file.write_text(json.dumps({"results": figures, "compile": given}, indent=2))


if __name__ == "__main__":
    main()
