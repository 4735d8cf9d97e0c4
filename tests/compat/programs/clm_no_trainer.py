"""What transformers' `run_clm_no_trainer` does: texts in blocks, accumulation, checkpoints, resume, perplexity."""

from __future__ import annotations

import math
import os
from itertools import chain

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DataLoaderConfiguration, set_seed
from made_here import folder, keep, language_model, report, tokenizer, words
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_scheduler

logger = get_logger(__name__)
BATCH = 3


def blocks(accelerator: Accelerator, encode, texts: list[str]):
    raw = datasets.Dataset.from_dict({"text": texts})
    with accelerator.main_process_first():
        encoded = raw.map(lambda rows: encode(rows["text"]), batched=True, remove_columns=["text"])

        def grouped(rows, size=12):
            joined = {name: list(chain(*each)) for name, each in rows.items()}
            total = len(joined["input_ids"]) // size * size
            cut = {name: [each[i : i + size] for i in range(0, total, size)] for name, each in joined.items()}
            return cut | {"labels": [list(each) for each in cut["input_ids"]]}

        return encoded.map(grouped, batched=True)


def train(resume: str | None = None) -> dict[str, float]:
    settings = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, project_dir=folder(), dataloader_config=settings)
    logger.info(accelerator.state, main_process_only=False)
    (datasets if accelerator.is_local_main_process else transformers).utils.logging.set_verbosity_error()
    set_seed(9)
    if accelerator.is_main_process:
        os.makedirs(f"{folder()}/final", exist_ok=True)
    accelerator.wait_for_everyone()
    encode, model = tokenizer(), language_model()
    model.resize_token_embeddings(32)
    loader = DataLoader(
        blocks(accelerator, encode, words(52)), shuffle=True, collate_fn=default_data_collator, batch_size=BATCH
    )
    held_out = DataLoader(
        blocks(accelerator, encode, words(64)[40:]), collate_fn=default_data_collator, batch_size=BATCH
    )
    decayed = [each for name, each in model.named_parameters() if "norm" not in name]
    others = [each for name, each in model.named_parameters() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    updates = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    schedule = get_scheduler(
        "linear",
        optimizer=optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=2 * updates * accelerator.num_processes,
    )
    model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)
    keep(model, loader, accelerator)
    updates = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    accelerator.init_trackers("clm_no_trainer", {"seed": 9})
    completed, first, skipped = 0, 0, None
    if resume is not None:
        accelerator.load_state(resume)
        skipped = int(os.path.basename(resume).removeprefix("step_")) * accelerator.gradient_accumulation_steps
        first, skipped = divmod(skipped, len(loader))
        completed = (first * len(loader) + skipped) // accelerator.gradient_accumulation_steps
    measured = {"updates": updates}
    for epoch in range(first, 2):
        model.train()
        total = torch.zeros(())
        resumed = resume is not None and epoch == first and skipped is not None
        for batch in accelerator.skip_first_batches(loader, skipped) if resumed else loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed += 1
                if completed == 2 and resume is None:
                    accelerator.save_state(f"{folder()}/step_{completed}")
        model.eval()
        losses = []
        for batch in held_out:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(BATCH)))
        losses = torch.cat(losses)
        accelerator.log({"perplexity": math.exp(losses.mean()), "step": completed}, step=completed)
        named = f"{('rest of ' if resumed else 'resumed: ') if resume else ''}epoch {epoch}"
        measured |= {
            f"{named} train": float(accelerator.reduce(total, "mean")),
            f"{named} perplexity": math.exp(losses.mean()),
            f"{named} rows": len(losses),
            f"{named} completed": completed,
            f"{named} lr": schedule.get_last_lr()[0],
        }
    accelerator.wait_for_everyone()
    whole = accelerator.unwrap_model(model)
    whole.save_pretrained(
        f"{folder()}/final", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.wait_for_everyone()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(f"{folder()}/final")
    measured[f"{'resumed: ' if resume else ''}saved"] = float(
        sum(each.detach().abs().sum() for each in loaded.parameters())
    )
    if resume:
        accelerator.end_training()
    return measured


def main() -> None:
    first = train()
    report(first | train(resume=f"{folder()}/step_2"))


main()
