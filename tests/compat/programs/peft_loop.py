"""The loop of peft's examples: a model with adapters, trained and evaluated with an Accelerator."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from made_here import folder, language_model, report, tokenizer, words
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(5)
    encode = tokenizer()
    rows = [torch.tensor(encode(text)["input_ids"]) for text in words(50)]
    model = get_peft_model(
        language_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(rows[:32], batch_size=4, shuffle=True)
    held_out = DataLoader(rows[32:42], batch_size=4)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 2 * len(loader))
    model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)
    measured = {}
    for epoch in range(2):
        model.train()
        total = torch.zeros(())
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            total += loss.detach()
        measured[f"train {epoch}"] = float(accelerator.reduce(total, "mean"))
        model.eval()
        losses = []
        for batch in held_out:
            with torch.no_grad():
                logits = model(input_ids=batch).logits[:, :-1]
            each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(1)
            losses.append(accelerator.gather_for_metrics(each))
        measured[f"evaluate {epoch}"] = float(torch.cat(losses).mean())
        measured["rows"] = len(torch.cat(losses))
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        f"{folder()}/adapter", state_dict=accelerator.get_state_dict(model), is_main_process=accelerator.is_main_process
    )
    accelerator.wait_for_everyone()
    again = PeftModel.from_pretrained(language_model(), f"{folder()}/adapter").eval()
    with torch.no_grad():
        measured["loaded"] = float(again(input_ids=rows[0][None], labels=rows[0][None]).loss)
    report(measured)


main()
