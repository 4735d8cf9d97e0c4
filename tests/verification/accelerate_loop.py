"""A script for Accelerate, sound or with one planted mistake: `verify --as accelerate accelerate_loop.py CASE`."""

from __future__ import annotations

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

CASE = sys.argv[1]


def collate(samples):
    longest = max(len(tokens) for tokens, _ in samples)
    return {
        "input_ids": torch.stack([F.pad(tokens, (0, longest - len(tokens))) for tokens, _ in samples]),
        "labels": torch.tensor([label for _, label in samples]),
    }


class Printer(GeneralTracker):
    name = "printer"
    requires_logging_directory = False

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **options):
        print(step, values)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids, labels):
        mask = (input_ids != 0).unsqueeze(-1)
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.head(F.dropout(mean, 0.1, self.training))
        return F.cross_entropy(logits, labels), logits


def main() -> None:
    steps = 2 if CASE == "accumulation" else 1
    accelerator = Accelerator(
        gradient_accumulation_steps=steps, mixed_precision="bf16" if CASE == "bf16" else None, log_with=Printer()
    )
    set_seed(int(os.environ.get("VERIFY_SEED", "7")))
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 20, (160,), generator=generator).tolist()
    data = [(torch.randint(1, 50, (n,), generator=generator), n % 3) for n in lengths]
    train = DataLoader(data[: 16 if CASE == "epochs" else 128], 4, shuffle=True, collate_fn=collate)
    test = DataLoader(data[128:155], 4, collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    total = len(train) // accelerator.num_processes if CASE == "schedule_of_processes" else 64
    scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    accelerator.register_for_checkpointing(scheduler)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for _ in range(2):
        model.train()
        for number, batch in enumerate(train):
            with accelerator.accumulate(model):
                used = accelerator.unwrap_model(model) if CASE == "unwrapped" else model
                loss, _ = used(**batch)
                accelerator.backward(loss * accelerator.num_processes if CASE == "times_processes" else loss)
                if accelerator.sync_gradients and CASE != "no_clipping":
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if number == 3:
                break
        model.eval()
        right = count = 0
        for batch in test:
            with torch.no_grad():
                _, logits = model(**batch)
            if CASE == "padding_counted":
                found, labels = accelerator.gather((logits.argmax(1), batch["labels"]))
            elif CASE == "metric_of_a_rank":
                found, labels = logits.argmax(1), batch["labels"]
            else:
                found, labels = accelerator.gather_for_metrics((logits.argmax(1), batch["labels"]))
            right, count = right + (found == labels).sum().item(), count + len(labels)
        accelerator.init_trackers("run")
        accelerator.log({"accuracy": right / count, "rows": count}, step=0)


if __name__ == "__main__":
    main()
