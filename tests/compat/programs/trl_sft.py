"""`trl.SFTTrainer` on texts and a model made in place; with `peft`, adapters alone are trained."""

from __future__ import annotations

from datasets import Dataset
from made_here import folder, language_model, options, report, tokenizer, words
from transformers import set_seed
from trl import SFTConfig, SFTTrainer


def main() -> None:
    set_seed(3)
    adapters = None
    if "peft" in options():
        from peft import LoraConfig

        adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        language_model(),
        args=SFTConfig(
            folder(),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            max_steps=4,
            logging_steps=1,
            max_length=16,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"text": words(32)}),
        eval_dataset=Dataset.from_dict({"text": words(10)}),
        processing_class=tokenizer(),
        peft_config=adapters,
    )
    trainer.train()
    measured = {f"loss {entry['step']}": entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    measured["evaluate"] = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder()}/final")
    report(measured)


main()
