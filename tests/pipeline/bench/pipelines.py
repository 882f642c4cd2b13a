"""Pipelines small enough to reckon by hand, called as diffusers' are."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class TinyVae(nn.Module):
    def encode(self, pixels: Tensor) -> Tensor:
        return pixels / 2

    def decode(self, latent: Tensor) -> Tensor:
        return latent * 2


class TinyPipeline:
    """Encodes a prompt, denoises twice a step as guidance does, decodes."""

    def __init__(self, denoiser: nn.Module | None = None, **others: object) -> None:
        self.transformer = denoiser or nn.Linear(4, 4)
        self.vae = TinyVae()
        self.others = others

    @property
    def components(self) -> Mapping[str, object]:
        return {"transformer": self.transformer, "vae": self.vae, **self.others}

    def encode_prompt(self, prompt: str, again: bool = True) -> Tensor:
        return self.encode_prompt(prompt, again=False) if again else torch.full((1, 4), float(len(prompt)))

    def __call__(
        self,
        prompt: str = "",
        height: int = 2,
        width: int = 2,
        num_inference_steps: int = 3,
        callback_on_step_end: Callable[..., dict[str, Any]] | None = None,
        generator: torch.Generator | None = None,
    ) -> list[Tensor]:
        latent = self.encode_prompt(prompt) + torch.rand(1, 4, generator=generator)
        for step in range(num_inference_steps):
            latent = latent - self.transformer(latent) - self.transformer(latent)
            if callback_on_step_end is not None:
                latent = callback_on_step_end(self, step, step, {"latents": latent})["latents"]
        return [self.vae.decode(latent).reshape(1, 1, height, width)]


class WithoutCallback(TinyPipeline):
    """Calls its denoiser once a step, and takes no callback."""

    def __call__(self, prompt: str = "", num_inference_steps: int = 3) -> list[Tensor]:  # type: ignore[override]
        latent = self.encode_prompt(prompt)
        for _ in range(num_inference_steps):
            latent = latent - self.transformer(latent)
        return [self.vae.decode(latent).reshape(1, 1, 2, 2)]
