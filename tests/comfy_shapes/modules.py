"""Small models named as ComfyUI names them, made of layers that cast, as its `comfy.ops` layers do."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Casting:
    """What `CastWeightBiasOp` gives a layer: its weights may pass through functions in each forward pass."""

    comfy_cast_weights: bool = False
    weight_function: Any
    bias_function: Any

    def cast(self, name: str) -> Tensor | None:
        tensor: Tensor | None = getattr(self, name)
        held = getattr(self, f"{name}_function")
        functions = held if isinstance(held, list) else [held] if held is not None else []
        for function in functions:
            assert tensor is not None
            tensor = function(tensor.detach().clone())
        return tensor


class Linear(_Casting, nn.Linear):
    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.weight_function = []
        self.bias_function = []

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.cast("weight"), self.cast("bias")
        assert weight is not None
        return functional.linear(x, weight, bias)


class Conv2d(_Casting, nn.Conv2d):
    def __init__(self, width: int, out: int, size: int) -> None:
        super().__init__(width, out, size, padding=size // 2)
        self.weight_function = []
        self.bias_function = []

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.cast("weight"), self.cast("bias")
        assert weight is not None
        return functional.conv2d(x, weight, bias, padding=self.kernel_size[0] // 2)


class DiffusionModel(nn.Module):
    """A few layers under the names of an SD1.5 U-Net in its original naming."""

    def __init__(self) -> None:
        super().__init__()
        self.input_blocks = nn.ModuleList([nn.ModuleList([Conv2d(4, 8, 3)])])
        self.middle_block = nn.ModuleList([nn.ModuleDict({"to_q": Linear(8, 8), "to_out": Linear(8, 6)})])
        self.out = nn.ModuleList([nn.GroupNorm(2, 6)])  # a layer that does not cast
        self.scale = nn.Parameter(torch.ones(6))  # a weight beside layers, as class and register tokens are

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.input_blocks[0][0](x).mean((-2, -1))  # type: ignore[index]
        for layer in self.middle_block[0].values():  # type: ignore[operator]
            hidden = layer(hidden)
        return self.out[0](hidden) * self.scale  # type: ignore[no-any-return]


class BaseModel(nn.Module):
    """What a `ModelPatcher` of a diffusion model holds."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.diffusion_model = DiffusionModel()
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.diffusion_model(x)  # type: ignore[no-any-return]


class SDClipModel(nn.Module):
    """What the patcher of a `CLIP` holds."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layer = nn.ModuleDict({"q_proj": Linear(8, 8), "out_proj": Linear(8, 8)})
        self.clip_l = nn.ModuleDict({"transformer": nn.ModuleDict({"self_attn": layer})})
        self.requires_grad_(False)


Q = "diffusion_model.middle_block.0.to_q.weight"
OUT = "diffusion_model.middle_block.0.to_out.weight"
CONV = "diffusion_model.input_blocks.0.0.weight"
NORM = "diffusion_model.out.0.weight"
LOOSE = "diffusion_model.scale"
CLIP_Q = "clip_l.transformer.self_attn.q_proj.weight"
"""Names of weights: (8, 8), (6, 8), (8, 4, 3, 3), (6,), (6,) and (8, 8)."""
