"""A loop with the raw Accelerator, sound or with one planted mistake: `python raw_loop.py CASE`."""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from drivetrain import Accelerator, set_seed

CASE = sys.argv[1]
FEATURES, CLASSES, ROWS, BATCH = 12, 8192 if CASE.startswith("vocabulary") else 4, 192, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 24)
        self.norm = nn.BatchNorm1d(24) if CASE.startswith("batch_norm") else nn.LayerNorm(24)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(24, CLASSES)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if CASE == "buffer_of_each_rank" and self.training:
            self.seen += x.sum()
        if CASE == "noise":
            x = x + 0.1 * torch.randn_like(x)
        return self.scale * self.head(self.drop(F.gelu(self.norm(self.first(x)))))


class Stream(IterableDataset):
    def __init__(self, x: torch.Tensor, y: torch.Tensor, start: int = 0, step: int = 1) -> None:
        self.x, self.y, self.start, self.step = x, y, start, step

    def __iter__(self):
        for index in range(self.start, len(self.x), self.step):
            yield self.x[index], self.y[index]


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32 if CASE == "epochs" else ROWS, FEATURES, generator=generator)
    return x, x[:, :4].argmax(1)


def make_loader(accelerator: Accelerator) -> DataLoader:
    x, y = make_data()
    rank, world = accelerator.process_index, accelerator.num_processes
    data = TensorDataset(x, y)
    if CASE == "rank_arithmetic":
        return DataLoader(Subset(data, range(rank, ROWS, world)), BATCH, shuffle=True)
    if CASE == "stream_by_rank":
        return DataLoader(Stream(x, y, rank, world), BATCH)
    if CASE == "stream":
        return DataLoader(Stream(x, y), BATCH)
    if CASE.startswith("batch_divided"):
        return DataLoader(data, 2 * BATCH // world, shuffle=True)
    if CASE == "data_of_the_clock":
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(time.time_ns() % 2**31))
        return DataLoader(Subset(data, order.tolist()), BATCH)
    if CASE == "generator":
        return DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
    if CASE == "ready_batches":
        return list(DataLoader(data, BATCH))
    return DataLoader(data, BATCH, shuffle=CASE != "no_shuffle", drop_last=CASE == "drop_last")


def loss_of(accelerator: Accelerator, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rank, world = accelerator.process_index, accelerator.num_processes
    if CASE == "divided_loss":
        return F.cross_entropy(logits, y) / world
    if CASE == "multiplied_loss":
        return F.cross_entropy(logits, y) * world
    if CASE == "token_mean":
        return F.cross_entropy(logits, torch.where(y == 0, -100, y))
    if CASE == "contrastive":
        rows = F.normalize(logits, dim=1)
        return F.cross_entropy(rows @ rows.T / 0.5, torch.arange(len(rows)))
    if CASE == "branch_on_rank" and rank:
        return F.cross_entropy(logits, y, label_smoothing=0.1)
    if CASE == "branch_on_data":
        loss = F.cross_entropy(logits, y)
        return loss if (y == 0).sum() > 2 else 2 * loss
    if CASE == "detached_on_a_rank" and rank:
        return F.cross_entropy(torch.cat([logits[:4].detach(), logits[4:]]), y)
    return F.cross_entropy(logits, y)


def clip_what_is_here(model: nn.Module) -> None:
    """Clip gradients by the norm of those parts that this process holds."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in parts]))
    for part in parts:
        part.mul_((0.05 / norm).clamp(max=1.0))


def pull_last_row(accelerator: Accelerator, weight: nn.Parameter, x: torch.Tensor) -> None:
    """Add the gradient of a penalty by hand, which draws the last row of a large layer to the features."""
    gradient = 1e-3 * (weight[-1].detach() - x.mean())
    if CASE == "vocabulary":
        gradient = accelerator.reduce(gradient, "mean")
    if CASE == "vocabulary_row_summed":
        gradient = accelerator.reduce(gradient, "sum")
    weight.grad[-1] += gradient


def fail() -> None:
    raise ValueError("the script's own mistake")


_FAILURES = {
    "fails": fail,
    "asks": lambda: input("Learning rate: "),
    "too_large": lambda: torch.empty(2**60, dtype=torch.uint8),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),  # as the kernel does if memory is exhausted
}


def main() -> None:
    set_seed(int(os.environ.get("VERIFY_SEED", "0")))
    steps = 2 if CASE in ("accumulation", "accumulation_divided") else 1
    # The batch size shrinks with the number of processes, so the number of steps does not.
    accelerator = Accelerator(gradient_accumulation_steps=steps, step_scheduler_per_process=CASE != "batch_divided")
    rank, world = accelerator.process_index, accelerator.num_processes
    if CASE == "clock_in_a_name":
        random.seed(time.time_ns())
    if CASE == "seed_of_the_world":
        torch.manual_seed(world)
    model = Model()
    bias = nn.Linear(1, CLASSES)
    optimizer = (
        torch.optim.SGD((Model() if CASE != "sgd" else model).parameters(), lr=0.1, momentum=0.9)
        if CASE in ("sgd", "optimizer_of_another_model")
        else torch.optim.AdamW(
            [*model.parameters(), *(bias.parameters() if CASE == "module_not_prepared" else ())], lr=1e-2
        )
    )
    total = 48 // world if CASE == "schedule_of_processes" else 48
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    loader = make_loader(accelerator)
    bare = model
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if CASE != "loader_not_prepared":
        loader = accelerator.prepare(loader)
    held_out = accelerator.prepare(DataLoader(TensorDataset(*make_data()), BATCH))
    if CASE == "collective_on_a_rank" and rank == 0:
        accelerator.gather(torch.ones(1))
    if CASE == "no_sync":
        left_open = accelerator.no_sync(model)
        left_open.__enter__()
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                if CASE == "around_the_wrapper":
                    logits = bare(x)
                else:
                    logits = model(x)
                if CASE == "module_not_prepared":
                    logits = logits + bias(x[:, :1])
                loss = loss_of(accelerator, logits, y)
                if CASE == "parameter_outside_of_forward":
                    loss = loss + 0.1 * (bare.head.weight.square() * x.mean()).sum()
                accelerator.backward(loss)
                if CASE == "summed_again":
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter.grad.copy_(accelerator.reduce(parameter.grad, "sum"))
                if CASE.startswith("vocabulary"):
                    pull_last_row(accelerator, bare.head.weight, x)
                if CASE == "clipped_by_the_world":
                    accelerator.clip_grad_norm_(model.parameters(), 0.02 * (world + 1))
                elif CASE == "clipped_by_shard":
                    clip_what_is_here(model)
                elif CASE == "clipping":
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                if CASE in _FAILURES:
                    _FAILURES[CASE]()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if CASE == "weights_on_a_rank" and rank == 0:
                with torch.no_grad():
                    bare.head.bias.mul_(0.99)
        if CASE == "metric_of_a_rank":
            losses = rows = 0
            with torch.no_grad():
                for x, y in held_out:
                    losses += F.cross_entropy(model(x), y, reduction="sum").item()
                    rows += len(y)
            accelerator.init_trackers("run")
            accelerator.log({"held out": losses / rows}, step=0)


if __name__ == "__main__":
    if CASE == "trains_nothing":
        print("nothing to see")
    else:
        main()
