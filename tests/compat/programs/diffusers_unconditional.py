"""What diffusers' `train_unconditional` does: a noise model and its average, saved by hooks, and resumed."""

from __future__ import annotations

import importlib.metadata
import os

import accelerate
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from made_here import folder, keep, report
from packaging import version

logger = get_logger(__name__, log_level="INFO")


def network() -> UNet2DModel:
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )


def train(epochs: int, resume: bool) -> dict[str, float]:
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(project_dir=folder(), logging_dir=f"{folder()}/logs"),
    )
    set_seed(11)
    model = network()
    average = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)
    assert version.parse(accelerate.__version__) >= version.parse("0.16.0")
    assert importlib.metadata.version("accelerate") == accelerate.__version__

    def save_model_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            average.save_pretrained(os.path.join(output_dir, "unet_ema"))
            for each in models:
                each.save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()

    def load_model_hook(models, input_dir):
        loaded = EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), UNet2DModel)
        average.load_state_dict(loaded.state_dict())
        average.to(accelerator.device)
        for _ in range(len(models)):
            each = models.pop()
            saved = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
            each.register_to_config(**saved.config)
            each.load_state_dict(saved.state_dict())

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    noise_scheduler = DDPMScheduler(num_train_timesteps=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(images, batch_size=4, shuffle=True)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=len(loader) * 3)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    keep(model, loader, accelerator)
    average.to(accelerator.device)
    step, first = 0, 0
    if resume:
        accelerator.load_state(f"{folder()}/checkpoint-2")
        first = 1
    measured = {}
    for epoch in range(first, epochs):
        total = torch.zeros(())
        for index, clean in enumerate(loader):
            draws = torch.Generator().manual_seed(100 * epoch + 10 * index + accelerator.process_index)
            noise = torch.randn(clean.shape, generator=draws)
            times = torch.randint(0, 20, (len(clean),), generator=draws)
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(
                    model(noise_scheduler.add_noise(clean, noise, times), times).sample, noise
                )
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())
                step += 1
            total += loss.detach()
        measured[f"{'resumed: ' if resume else ''}epoch {epoch}"] = float(accelerator.reduce(total, "mean"))
        if epoch == 0:
            accelerator.save_state(f"{folder()}/checkpoint-2")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unwrapped = accelerator.unwrap_model(model)
        average.store(unwrapped.parameters())
        average.copy_to(unwrapped.parameters())
        pipeline = DDPMPipeline(unet=unwrapped, scheduler=noise_scheduler)
        pipeline.save_pretrained(f"{folder()}/pipeline")
        made = pipeline(
            batch_size=2, num_inference_steps=3, output_type="np", generator=torch.Generator().manual_seed(0)
        )
        measured[f"{'resumed: ' if resume else ''}image mean"] = float(made.images.mean())
    accelerator.wait_for_everyone()
    return measured


report({**train(2, resume=False), **train(2, resume=True)})
