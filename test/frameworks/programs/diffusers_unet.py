"""Training a diffusion model: https://huggingface.co/docs/diffusers/tutorials/basic_training."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--generate", action="store_true")
arguments = parser.parse_args()

model = UNet2DModel(
    sample_size=64,
    layers_per_block=2,
    block_out_channels=(64, 64, 128, 128),
    down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
)
noises = DDPMScheduler(num_train_timesteps=1000)

if arguments.generate:
    images = DDPMPipeline(unet=model, scheduler=noises).to("cuda")(batch_size=4, num_inference_steps=20).images
    for number, image in enumerate(images):
        image.save(f"{number}.png")
    raise SystemExit

accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = torch.utils.data.DataLoader([torch.rand(3, 64, 64) for _ in range(8192)], batch_size=4, shuffle=True)
scheduler = get_cosine_schedule_with_warmup(optimizer, 500, 2000)
average = EMAModel(model.parameters())
average.to(accelerator.device)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for step, clean in enumerate(loader):
    noise = torch.randn(clean.shape, device=clean.device)
    times = torch.randint(0, 1000, (clean.shape[0],), device=clean.device, dtype=torch.int64)
    noisy = noises.add_noise(clean, noise, times)
    with accelerator.accumulate(model):
        loss = functional.mse_loss(model(noisy, times, return_dict=False)[0], noise)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    average.step(model.parameters())
    accelerator.log({"loss": loss.detach().item()}, step=step)
if accelerator.is_main_process:
    DDPMPipeline(unet=accelerator.unwrap_model(model), scheduler=noises).save_pretrained("pipeline")
