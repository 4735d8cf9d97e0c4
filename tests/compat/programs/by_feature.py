"""What the examples of Accelerate do, one feature each: `by_feature.py FEATURE`."""

from __future__ import annotations

import contextlib
import math

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs, PartialState
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ProfileKwargs,
    find_executable_batch_size,
    set_seed,
)
from made_here import classifier, folder, keep, language_model, loaders, options, report, sentences, tokenizer, words
from sklearn.metrics import accuracy_score, f1_score
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup


class Run:
    """A model, an optimizer, a schedule and loaders, prepared, and what was measured."""

    def __init__(self, accelerator: Accelerator, batch_size: int = 8, epochs: int = 2, make=torch.optim.AdamW) -> None:
        self.accelerator, self.measured = accelerator, {}
        set_seed(42)
        train, held_out = loaders(batch_size)
        model = classifier().to(accelerator.device)
        optimizer = make(model.parameters(), lr=1e-2)
        schedule = get_linear_schedule_with_warmup(optimizer, 2, len(train) * epochs)
        self.model, self.optimizer, self.train, self.held_out, self.schedule = accelerator.prepare(
            model, optimizer, train, held_out, schedule
        )
        keep(self)

    def update(self, batch) -> torch.Tensor:
        batch.to(self.accelerator.device)
        loss = self.model(**batch).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def epoch(self, number: int, each=None) -> None:
        self.model.train()
        losses = []
        for batch in self.train:
            with self.accelerator.accumulate(self.model):
                losses.append(self.update(batch))
            if each is not None and each(losses[-1]):
                break
        self.note(number, losses)

    def note(self, number: int, losses: list[torch.Tensor]) -> None:
        mean = self.accelerator.gather(torch.stack(losses)).mean()
        self.measured |= {f"loss {number}": float(mean), f"steps {number}": len(losses), **self.evaluate(number)}

    def evaluate(self, number: int) -> dict[str, float]:
        self.model.eval()
        seen, true = [], []
        total = torch.zeros(())
        for batch in self.held_out:
            with torch.no_grad():
                outputs = self.model(**batch)
            kept, labels = self.accelerator.gather_for_metrics((outputs.logits, batch["labels"]))
            seen += kept.argmax(-1).tolist()
            true += labels.tolist()
            total += torch.nn.functional.cross_entropy(kept, labels, reduction="sum")
        return {
            f"accuracy {number}": accuracy_score(true, seen),
            f"f1 {number}": f1_score(true, seen),
            f"rows {number}": len(true),
            f"evaluate {number}": float(total) / len(true),
            f"lr {number}": self.schedule.get_last_lr()[0],
        }


def nlp() -> dict[str, float]:
    run = Run(Accelerator())
    for number in range(2):
        run.epoch(number)
    return run.measured


def gradient_accumulation() -> dict[str, float]:
    run = Run(Accelerator(gradient_accumulation_steps=2), batch_size=4)
    for number in range(2):
        run.epoch(number)
    return run.measured


def checkpointing() -> dict[str, float]:
    """Saves each epoch and within one, and resumes from either: what is measured after that is the same again."""
    settings = DataLoaderConfiguration(use_seedable_sampler=True)
    run = Run(Accelerator(dataloader_config=settings), batch_size=4)
    for number in range(2):
        run.model.train()
        losses = []
        for step, batch in enumerate(run.train):
            losses.append(run.update(batch))
            if number == 1 and step == 2:
                run.accelerator.save_state(f"{folder()}/step")
        run.note(number, losses)
        run.accelerator.save_state(f"{folder()}/epoch_{number}")
    for name, skipped in (("epoch_0", 0), ("step", 3)):  # in both, the rest of epoch 1
        again = Run(Accelerator(dataloader_config=settings), batch_size=4)
        again.accelerator.load_state(f"{folder()}/{name}")
        again.model.train()
        active = again.accelerator.skip_first_batches(again.train, skipped) if skipped else again.train
        losses = [again.update(batch) for batch in active]
        run.measured |= {f"resumed from {name}: {key}": value for key, value in again.evaluate(1).items()}
    return run.measured


def tracking() -> dict[str, float]:
    from accelerate.tracking import GeneralTracker, on_main_process

    class Memory(GeneralTracker):
        name = "memory"
        requires_logging_directory = False
        main_process_only = True

        @on_main_process
        def __init__(self) -> None:
            super().__init__()
            self.kept = {}

        @property
        def tracker(self):
            return self.kept

        @on_main_process
        def store_init_configuration(self, values):
            self.kept |= values

        @on_main_process
        def log(self, values, step=None, **others):
            self.kept |= {f"{name} at {step}": value for name, value in values.items()}

    PartialState(cpu=True)  # before the tracker asks which process this is
    accelerator = Accelerator(log_with=Memory(), project_dir=folder())
    accelerator.init_trackers("example", {"lr": 1e-2})
    run = Run(accelerator)
    for number in range(2):
        run.epoch(number)
        accelerator.log({"loss": run.measured[f"loss {number}"], "epoch": number}, step=number)
    accelerator.end_training()
    kept = accelerator.get_tracker("memory", unwrap=True) if accelerator.is_main_process else {}
    return run.measured | kept


def complete_nlp() -> dict[str, float]:
    """Tracks with whatever is installed, saves each epoch, and resumes from the first."""

    def begin() -> Run:
        settings = DataLoaderConfiguration(use_seedable_sampler=True)
        accelerator = Accelerator(log_with="all", project_dir=folder(), dataloader_config=settings)
        accelerator.init_trackers("complete_nlp", {"lr": 1e-2, "epochs": 2})
        return Run(accelerator)

    run = begin()
    for number in range(2):
        run.epoch(number)
        run.accelerator.log({"loss": run.measured[f"loss {number}"], "epoch": number}, step=number)
        run.accelerator.save_state(f"{folder()}/epoch_{number}")
    again = begin()
    again.accelerator.load_state(f"{folder()}/epoch_0")
    again.epoch(1)
    again.accelerator.end_training()
    return run.measured | {f"resumed: {name}": value for name, value in again.measured.items()}


def early_stopping() -> dict[str, float]:
    run = Run(Accelerator(), batch_size=4)

    def each(loss) -> bool:
        if run.accelerator.is_main_process and float(loss) < 0.66:
            run.accelerator.set_trigger()
        return run.accelerator.check_trigger()

    for number in range(2):
        run.epoch(number, each)
    return run.measured


def _with_batch_size(accumulates: bool) -> dict[str, float]:
    accelerator = Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def inner(batch_size):
        tried.append(batch_size)
        accelerator.free_memory()
        if accumulates:
            accelerator.gradient_accumulation_steps = 16 // batch_size
        run = Run(accelerator, batch_size=batch_size)
        if batch_size > 4:
            raise RuntimeError("CUDA out of memory.")
        for number in range(2):
            run.epoch(number)
        return run.measured

    return inner() | {"tries": len(tried), "batch size": tried[-1]}


def memory() -> dict[str, float]:
    return _with_batch_size(accumulates=False)


def automatic_gradient_accumulation() -> dict[str, float]:
    return _with_batch_size(accumulates=True)


def local_sgd() -> dict[str, float]:
    run = Run(Accelerator(gradient_accumulation_steps=1), batch_size=4)
    for number in range(2):
        run.model.train()
        losses = []
        with LocalSGD(run.accelerator, run.model, local_sgd_steps=2, enabled=True) as local:
            for batch in run.train:
                with run.accelerator.accumulate(run.model):
                    losses.append(run.update(batch))
                    local.step()
        run.note(number, losses)
    return run.measured


def ddp_comm_hook() -> dict[str, float]:
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    run = Run(Accelerator(kwargs_handlers=[hook]))
    for number in range(2):
        run.epoch(number)
    return run.measured


def profiler() -> dict[str, float]:
    handler = ProfileKwargs(record_shapes=True, profile_memory=True, output_trace_dir=f"{folder()}/trace")
    run = Run(Accelerator(kwargs_handlers=[handler]))
    with run.accelerator.profile() as profile:
        run.epoch(0, each=lambda loss: True)
    assert "aten::addmm" in profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=-1)
    run.epoch(1)
    return run.measured


def multi_process_metrics() -> dict[str, float]:
    """Cuts what repeats in the last batch by counting, as was done before `gather_for_metrics`."""
    run = Run(Accelerator())
    run.epoch(0)
    seen, true, samples = [], [], 0
    for step, batch in enumerate(run.held_out):
        with torch.no_grad():
            logits = run.model(**batch).logits
        predicted, labels = run.accelerator.gather((logits.argmax(-1), batch["labels"]))
        if run.accelerator.use_distributed:
            if step == len(run.held_out) - 1:
                predicted = predicted[: len(run.held_out.dataset) - samples]
                labels = labels[: len(run.held_out.dataset) - samples]
            else:
                samples += labels.shape[0]
        seen += predicted.tolist()
        true += labels.tolist()
    return run.measured | {"counted": accuracy_score(true, seen), "counted rows": len(true)}


def cross_validation() -> dict[str, float]:
    import numpy as np
    from sklearn.model_selection import StratifiedKFold

    accelerator = Accelerator()
    rows = sentences(0, 30)
    encode, measured, averaged = tokenizer(), {}, []
    set_seed(3)
    test = DataLoader(sentences(30, 40), batch_size=4, collate_fn=lambda each: encode.pad(each, return_tensors="pt"))
    test = accelerator.prepare(test)
    folds = StratifiedKFold(n_splits=2).split(np.zeros(len(rows)), [row["labels"] for row in rows])
    for fold, (train, _) in enumerate(folds):
        run = Run(accelerator, epochs=1)
        picked = [rows[index] for index in train]
        run.train = accelerator.prepare(
            DataLoader(picked, 4, shuffle=True, collate_fn=lambda each: encode.pad(each, return_tensors="pt"))
        )
        run.epoch(fold)
        measured |= run.measured
        logits = []
        for batch in test:
            with torch.no_grad():
                logits.append(accelerator.gather_for_metrics(run.model(**batch).logits))
        averaged.append(torch.cat(logits))
    return measured | {"averaged": float(torch.stack(averaged).mean(0).abs().sum()), "rows": len(averaged[0])}


def autoregressive() -> dict[str, float]:
    """Accumulates sums over tokens, and divides by the tokens of all processes."""
    steps = 2
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    set_seed(4)
    encode = tokenizer()

    def collate(texts):
        batch = encode(texts, padding="longest", return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}

    texts = [" ".join(text.split()[: 4 + index % 5]) for index, text in enumerate(words(30))]
    loader = DataLoader(texts[:24], batch_size=3, shuffle=True, collate_fn=collate)
    held_out = DataLoader(texts[24:], batch_size=4, collate_fn=collate)
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    measured = {}
    for epoch in range(2):
        model.train()
        batches = iter(loader)
        for update in range(math.ceil(len(loader) / steps)):
            window = [next(batches) for _ in range(min(steps, len(loader) - steps * update))]
            count = int(accelerator.gather(sum(each["labels"].ne(-100).sum() for each in window)).sum())
            total = torch.zeros(())
            for index, batch in enumerate(window):
                quiet = index < len(window) - 1 and accelerator.num_processes > 1
                with model.no_sync() if quiet else contextlib.nullcontext():
                    loss = model(**batch, use_cache=False, num_items_in_batch=count).loss
                    loss = loss * steps * accelerator.num_processes
                    accelerator.backward(loss)
                total += loss.detach()
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            measured[f"norm {epoch} {update}"] = float(norm)
            measured[f"loss {epoch} {update}"] = float(accelerator.gather(total).sum()) / steps
        model.eval()
        losses = []
        for batch in held_out:
            with torch.no_grad():
                loss = model(**batch, use_cache=False).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(4)))
        measured[f"perplexity {epoch}"] = math.exp(torch.cat(losses).mean())
    return measured


def deepspeed() -> dict[str, float]:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    run = Run(Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)))
    for number in range(2):
        run.epoch(number)
    return run.measured


def fsdp() -> dict[str, float]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["BertLayer"]
    )
    run = Run(Accelerator(fsdp_plugin=plugin))
    for number in range(2):
        run.epoch(number)
    return run.measured


def schedule_free() -> dict[str, float]:
    from schedulefree import AdamWScheduleFree

    run = Run(Accelerator(), make=AdamWScheduleFree)
    for number in range(2):
        run.optimizer.train()
        run.model.train()
        losses = [run.update(batch) for batch in run.train]
        run.optimizer.eval()
        run.note(number, losses)
    return run.measured


def main() -> None:
    (feature,) = options()
    report(globals()[feature]())


main()
