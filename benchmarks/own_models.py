"""Models of benchmarks/families.py that need more than a Hugging Face configuration: a diffusion U-Net, LoRA, CLIP, wav2vec 2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention, silu

import anyfit

CHANNELS, LEVELS, SIDE = 320, (1, 2, 4), 64  # of the U-Net, and of its images
RANK = 16  # of LoRA
SOUND = 16000 * 4  # samples: four seconds
QWEN3 = {"num_hidden_layers": 28, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 6144}
QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}


def job_of(model: Any, loss: Any, sample: Any, batch: int) -> anyfit.Job:
    return anyfit.Job(
        model=model, loss=loss, optimizer=lambda made: torch.optim.AdamW(made.parameters()), sample=sample, batch_size=batch,
        precision="bf16",
    )  # fmt: skip


# ---------------------------------------------------------------------- a diffusion U-Net


class Residual(nn.Module):
    def __init__(self, into: int, out: int, time_width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, into), nn.SiLU(), nn.Conv2d(into, out, 3, padding=1))
        self.time = nn.Linear(time_width, out)
        self.second = nn.Sequential(nn.GroupNorm(32, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1))
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(image) + self.time(silu(time))[:, :, None, None]
        out: Tensor = self.skip(image) + self.second(hidden)
        return out


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.norm = width // 64, nn.GroupNorm(32, width)
        self.into_heads, self.out_of_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, image: Tensor) -> Tensor:
        batch, width, height, breadth = image.shape
        flat = self.norm(image).flatten(2).transpose(1, 2)
        parts = self.into_heads(flat).view(batch, -1, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(parts[0], parts[1], parts[2]).transpose(1, 2).reshape(batch, -1, width)
        return image + self.out_of_heads(mixed).transpose(1, 2).reshape(batch, width, height, breadth)


class UNet(nn.Module):
    """Two residual blocks a level on the way down and three on the way up, with skips across."""

    def __init__(self) -> None:
        super().__init__()
        widths, self.time_width = [CHANNELS * each for each in LEVELS], 4 * CHANNELS
        self.time = nn.Sequential(nn.Linear(CHANNELS, self.time_width), nn.SiLU(), nn.Linear(self.time_width, self.time_width))
        self.into = nn.Conv2d(4, CHANNELS, 3, padding=1)
        self.down, self.up, width, skips = nn.ModuleList(), nn.ModuleList(), CHANNELS, [CHANNELS]
        for level, out in enumerate(widths):
            for _ in range(2):
                self.down.append(
                    nn.ModuleList([Residual(width, out, self.time_width), Attention(out) if level else nn.Identity()])
                )
                width = out
                skips.append(width)
            if level < len(widths) - 1:
                self.down.append(nn.ModuleList([nn.Conv2d(width, width, 3, stride=2, padding=1)]))
                skips.append(width)
        self.middle = nn.ModuleList(
            [Residual(width, width, self.time_width), Attention(width), Residual(width, width, self.time_width)]
        )
        for level, out in reversed(list(enumerate(widths))):
            for number in range(3):
                parts = [Residual(width + skips.pop(), out, self.time_width), Attention(out) if level else nn.Identity()]
                width = out
                if level and number == 2:
                    parts.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1)))
                self.up.append(nn.ModuleList(parts))
        self.out = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1))

    def forward(self, image: Tensor, times: Tensor) -> Tensor:
        powers = torch.exp(-math.log(10000) * torch.arange(CHANNELS // 2, device=image.device) / (CHANNELS // 2))
        angles = times[:, None].float() * powers
        time = self.time(torch.cat([angles.cos(), angles.sin()], 1).to(image.dtype))
        hidden = self.into(image)
        skips = [hidden]
        for parts in self.down:
            hidden = parts[0](hidden) if len(parts) == 1 else parts[1](parts[0](hidden, time))
            skips.append(hidden)
        hidden = self.middle[2](self.middle[1](self.middle[0](hidden, time)), time)
        for parts in self.up:
            hidden = parts[1](parts[0](torch.cat([hidden, skips.pop()], 1), time))
            hidden = parts[2](hidden) if len(parts) > 2 else hidden
        made: Tensor = self.out(hidden)
        return made


def denoising(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return mse_loss(model(batch["image"], batch["times"]).float(), batch["noise"].float())


def unet_job(batch: int) -> anyfit.Job:
    image = torch.zeros(batch, 4, SIDE, SIDE)
    return job_of(UNet, denoising, {"image": image, "noise": image, "times": torch.zeros(batch, dtype=torch.long)}, batch)


# ---------------------------------------------------------------------- LoRA


class Adapted(nn.Module):
    """A frozen linear layer, and a product of two small ones that is added to it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down, self.up = nn.Linear(linear.in_features, RANK, bias=False), nn.Linear(RANK, linear.out_features, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.linear(hidden) + self.up(self.down(hidden))
        return out


def lora_job(batch: int) -> anyfit.Job:
    from transformers import AutoConfig

    whole = anyfit.Job.from_huggingface(AutoConfig.for_model("qwen3", **QWEN3), batch_size=batch, length=1024, precision="bf16")

    def build() -> nn.Module:
        model = whole.build().requires_grad_(False)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if name in ("q_proj", "v_proj") and isinstance(child, nn.Linear):
                    setattr(module, name, Adapted(child))
        return model

    return anyfit.Job(**{**vars(whole), "model": build})


# ---------------------------------------------------------------------- two towers, and sound


def contrast(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Every image with every text of the batch, which therefore is not cut."""
    value: Tensor = model(**batch, return_loss=True).loss
    return value


def clip_job(batch: int) -> anyfit.Job:
    from transformers import CLIPConfig, CLIPModel

    towers = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    config = CLIPConfig(
        vision_config={**towers, "patch_size": 14, "image_size": 224}, text_config={**towers, "hidden_size": 1024}
    )
    tokens = torch.zeros(batch, 77, dtype=torch.long)
    sample = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": torch.zeros(batch, 3, 224, 224)}
    return job_of(lambda: CLIPModel(config), contrast, sample, batch)


def classified(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    value: Tensor = model(**batch).loss
    return value


def wav2vec2_job(batch: int) -> anyfit.Job:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_labels=2, layerdrop=0.0,
        apply_spec_augment=False,
    )  # fmt: skip
    sample = {"input_values": torch.zeros(batch, SOUND), "labels": torch.zeros(batch, dtype=torch.long)}
    return job_of(lambda: Wav2Vec2ForSequenceClassification(config), classified, sample, batch)
