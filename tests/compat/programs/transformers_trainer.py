"""`transformers.Trainer`: train, evaluate, predict, save, and resume from the middle, on a model made in place."""

from __future__ import annotations

import numpy as np
import torch
from made_here import folder, keep, language_model, options, report, tokenizer, words
from transformers import Trainer, TrainingArguments, set_seed


class Texts(torch.utils.data.Dataset):
    def __init__(self, texts):
        encode = tokenizer()
        self.rows = [torch.tensor(encode(text)["input_ids"]) for text in texts]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def arguments(output: str, **changes):
    settings = {
        "output_dir": output,
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_steps": 6,
        "logging_steps": 1,
        "save_steps": 3,
        "save_strategy": "steps",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 7,
    }
    chosen = options()
    if "bf16" in chosen:
        settings["bf16"] = True
    if "fsdp" in chosen:
        settings["fsdp"] = "full_shard auto_wrap"
        settings["fsdp_config"] = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "version": 2}
    if "deepspeed" in chosen:
        settings["deepspeed"] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        }
    return TrainingArguments(**{**settings, **changes})


def losses(trainer) -> dict[str, float]:
    return {f"loss {entry['step']}": entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def main() -> None:
    train, held_out = Texts(words(50)), Texts(words(64)[50:])
    set_seed(7)
    trainer = Trainer(language_model(), arguments(f"{folder()}/run"), train_dataset=train, eval_dataset=held_out)
    trainer.train()
    measured = losses(trainer)
    measured["evaluate"] = trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(held_out)
    measured["predict"] = float(np.abs(predicted.predictions).mean())
    measured["predicted rows"] = len(predicted.predictions)
    trainer.save_model(f"{folder()}/final")
    keep(trainer)

    set_seed(8)
    again = Trainer(language_model(1), arguments(f"{folder()}/again"), train_dataset=train, eval_dataset=held_out)
    again.train(resume_from_checkpoint=f"{folder()}/run/checkpoint-3")
    measured.update({f"resumed {name}": value for name, value in losses(again).items() if int(name.split()[1]) > 3})
    report(measured)


main()
