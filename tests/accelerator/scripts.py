"""Scripts as Accelerate's documentation writes them. Only the import is changed to run them here.

Each sets `result`, a dict of lists of numbers.
"""

from __future__ import annotations

import re
from typing import Any

HEAD = """
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
held_out = TensorDataset(torch.randn(13, 6), torch.arange(13))
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
training_dataloader = DataLoader(data, batch_size=4)
eval_dataloader = DataLoader(held_out, batch_size=4)
loss_function = torch.nn.CrossEntropyLoss()
"""

TAIL = """
result["parameters"] = torch.cat([p.detach().float().flatten() for p in model.parameters()]).tolist()
"""

BODIES: dict[str, str] = {
    "four lines": """
from accelerate import Accelerator
accelerator = Accelerator()

model, optimizer, training_dataloader, scheduler = accelerator.prepare(
    model, optimizer, training_dataloader, scheduler
)

losses = []
for batch in training_dataloader:
    optimizer.zero_grad()
    inputs, targets = batch
    outputs = model(inputs)
    loss = loss_function(outputs, targets)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())
result = {"losses": losses, "rates": scheduler.get_last_lr()}
""",
    "without a scheduler": """
from accelerate import Accelerator
accelerator = Accelerator()
device = accelerator.device
model.to(device)

model, optimizer, training_dataloader = accelerator.prepare(model, optimizer, training_dataloader)

model.train()
for epoch in range(2):
    for inputs, targets in training_dataloader:
        optimizer.zero_grad()
        loss = loss_function(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
result = {}
""",
    "accumulate": """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, training_dataloader, scheduler = accelerator.prepare(
    model, optimizer, training_dataloader, scheduler
)
synced = []
for batch in training_dataloader:
    with accelerator.accumulate(model):
        inputs, targets = batch
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        synced.append(int(accelerator.sync_gradients))
result = {"synced": synced, "rates": scheduler.get_last_lr()}
""",
    "accumulate, clearing first": """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=4)
model, optimizer, training_dataloader, scheduler = accelerator.prepare(
    model, optimizer, training_dataloader, scheduler
)
for index, batch in enumerate(training_dataloader):
    with accelerator.accumulate(model):
        optimizer.zero_grad()
        inputs, targets = batch
        loss = loss_function(model(inputs), targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
result = {"rates": scheduler.get_last_lr()}
""",
    "clip": """
from accelerate import Accelerator
accelerator = Accelerator()
model, optimizer, training_dataloader = accelerator.prepare(model, optimizer, training_dataloader)
norms = []
for inputs, targets in training_dataloader:
    optimizer.zero_grad()
    accelerator.backward(loss_function(model(inputs), targets))
    norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm=0.1).item())
    accelerator.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
result = {"norms": norms}
""",
    "no_sync": """
from accelerate import Accelerator
accelerator = Accelerator()
model, optimizer, training_dataloader = accelerator.prepare(model, optimizer, training_dataloader)
for index, (inputs, targets) in enumerate(training_dataloader):
    if index % 2 == 0:
        with accelerator.no_sync(model):
            accelerator.backward(loss_function(model(inputs), targets))
    else:
        accelerator.backward(loss_function(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
result = {}
""",
    "evaluate": """
from accelerate import Accelerator
accelerator = Accelerator()
model, eval_dataloader = accelerator.prepare(model, eval_dataloader)
model.eval()
numbers, sums = [], []
for inputs, targets in eval_dataloader:
    with torch.no_grad():
        predictions = model(inputs).sum(-1)
    all_predictions, all_targets = accelerator.gather_for_metrics((predictions, targets))
    numbers += all_targets.tolist()
    sums += all_predictions.tolist()
result = {"numbers": numbers, "sums": sums}
""",
    "bf16": """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="bf16")
model, optimizer, training_dataloader = accelerator.prepare(model, optimizer, training_dataloader)
losses = []
for inputs, targets in training_dataloader:
    optimizer.zero_grad()
    outputs = model(inputs)
    assert outputs.dtype == torch.float32
    with accelerator.autocast():
        inner = torch.mm(outputs, outputs.t())
    assert inner.dtype == torch.bfloat16
    loss = loss_function(outputs, targets)
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())
result = {"losses": losses}
""",
    "handlers and utilities": """
from accelerate import Accelerator, DistributedDataParallelKwargs, DataLoaderConfiguration
from accelerate.utils import set_seed, ProjectConfiguration, GradientAccumulationPlugin, InitProcessGroupKwargs
from datetime import timedelta
set_seed(7)
accelerator = Accelerator(
    dataloader_config=DataLoaderConfiguration(split_batches=True),
    gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=True),
    kwargs_handlers=[
        DistributedDataParallelKwargs(find_unused_parameters=True),
        InitProcessGroupKwargs(timeout=timedelta(seconds=60)),
    ],
    project_dir="somewhere",
    rng_types=["generator"],
    step_scheduler_with_optimizer=True,
)
model, optimizer, training_dataloader, scheduler = accelerator.prepare(
    model, optimizer, training_dataloader, scheduler
)
for inputs, targets in training_dataloader:
    with accelerator.accumulate(model):
        accelerator.backward(loss_function(model(inputs), targets))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
accelerator.wait_for_everyone()
unwrapped = accelerator.unwrap_model(model)
assert type(unwrapped) is torch.nn.Sequential
if accelerator.is_main_process:
    accelerator.print("done")
total = accelerator.reduce(torch.tensor([1.0]), reduction="sum") / accelerator.num_processes
padded = accelerator.pad_across_processes(torch.ones(2), dim=0)
result = {"total": total.tolist(), "padded": padded.tolist(), "rates": scheduler.get_last_lr()}
model = unwrapped
""",
    "save and load": """
import os, tempfile
from accelerate import Accelerator
accelerator = Accelerator()
model, optimizer, training_dataloader, scheduler = accelerator.prepare(
    model, optimizer, training_dataloader, scheduler
)
accelerator.register_for_checkpointing(scheduler)
directory = os.path.join(FOLDER, "state")

def train():
    for inputs, targets in training_dataloader:
        optimizer.zero_grad()
        accelerator.backward(loss_function(F.dropout(model(inputs), 0.1), targets))
        optimizer.step()
        scheduler.step()

train()
accelerator.save_state(directory)
first = next(model.parameters()).detach().clone()
train()
accelerator.load_state(directory)
assert torch.equal(first, next(model.parameters()))
train()
result = {"rates": scheduler.get_last_lr()}
""",
}


def source(name: str) -> str:
    """The whole script, as Accelerate runs it."""
    return HEAD + BODIES[name] + TAIL


def moved(name: str) -> str:
    """The same with its import changed."""
    text = re.sub(r"^from accelerate(\.utils)? import", "from drivetrain import", source(name), flags=re.MULTILINE)
    assert "accelerate import" not in text
    return text


def run(name: str, folder: str, text: str | None = None) -> dict[str, list[float]]:
    """Run a script and return its result."""
    namespace: dict[str, Any] = {"FOLDER": folder}
    exec(compile(moved(name) if text is None else text, f"<{name}>", "exec"), namespace)
    result: dict[str, list[float]] = namespace["result"]
    return result


def run_all(folder: str) -> dict[str, dict[str, list[float]]]:
    """Run every script in this process, each with a fresh state."""
    from drivetrain import PartialState

    results = {}
    for name in BODIES:
        results[name] = run(name, folder)
        PartialState().destroy_process_group()
        PartialState._reset_state()
    return results
