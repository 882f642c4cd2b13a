"""Files of each kind for a matrix of 8×6, under the names that ComfyUI's loader knows."""

import torch
from tests.comfy_shapes.adapters import random
from torch import Tensor

State = dict[str, Tensor]

ALPHA = torch.tensor(1.0)
LORA: State = {
    "matrix.lora_up.weight": random(8, 2) * 0.1,
    "matrix.lora_down.weight": random(2, 6, seed=1),
    "matrix.alpha": ALPHA,
}
FILES: dict[str, State] = {
    "lora": LORA,
    "dora": {**LORA, "matrix.dora_scale": random(8, 1, seed=2).abs()},
    "loha": {f"matrix.hada_{name}": random(*shape, seed=3) for name, shape in (
        ("w1_a", (8, 2)), ("w1_b", (2, 6)), ("w2_a", (8, 2)), ("w2_b", (2, 6)))},
    "lokr": {"matrix.lokr_w1": random(2, 2), "matrix.lokr_w2_a": random(4, 2), "matrix.lokr_w2_b": random(2, 3)},
    "glora": {f"matrix.{name}.weight": random(*shape, seed=4) for name, shape in (
        ("a1", (6, 2)), ("a2", (2, 6)), ("b1", (8, 2)), ("b2", (2, 6)))},
    "oft": {"matrix.oft_blocks": random(2, 4, 4), "matrix.alpha": ALPHA},
    "boft": {"matrix.oft_blocks": random(2, 2, 4, 4), "matrix.alpha": ALPHA},
    "diff": {"matrix.diff": random(8, 6)},
    "set": {"matrix.set_weight": random(8, 6, seed=5)},
}  # fmt: skip
