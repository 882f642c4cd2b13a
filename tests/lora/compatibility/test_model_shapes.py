from typing import Any

import pytest
import torch
from torch import nn

from sigmascope.errors import ModelMismatchError
from sigmascope.lora.compatibility import judge_lora, shapes_of
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import layout_of
from sigmascope.lora.file import LoraFile


def tree(**weights: tuple[int, ...]) -> nn.Module:
    """A module that has parameters of these shapes; `__` stands for a dot."""
    root = nn.Module()
    for name, shape in weights.items():
        *path, last = name.split("__")
        inner = root
        for part in path:
            if part not in dict(inner.named_children()):
                inner.add_module(part, nn.Module())
            inner = inner.get_submodule(part)
        inner.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    return root


UNET = tree(
    diffusion_model__input_blocks__0__0__weight=(8, 4, 3, 3),
    diffusion_model__time_embed__0__weight=(32, 8),
    diffusion_model__out__2__weight=(4, 8, 3, 3),
)
Q_PROJ = "transformer__text_model__encoder__layers__0__self_attn__q_proj__weight"
CLIP = tree(**{f"clip_l__{Q_PROJ}": (6, 6), f"clip_g__{Q_PROJ}": (10, 10)})


def test_comfyuis_model_and_clip_have_the_names_of_its_files() -> None:
    shapes = shapes_of({"model": UNET, "clip": CLIP})
    prefixes = layout_of(shapes).prefixes
    assert prefixes["denoiser"] == "diffusion_model."
    assert prefixes["text_encoder"] == "text_encoders.clip_l.transformer."
    assert prefixes["text_encoder_2"] == "text_encoders.clip_g.transformer."


def test_kohyas_names_find_comfyuis_encoders() -> None:
    def factors(size: int) -> LoraFactors:
        return LoraFactors(torch.randn(size, 2), torch.randn(2, size), 2.0, (size, size))

    name = "text_model_encoder_layers_0_self_attn_q_proj"
    lora = LoraFile({f"lora_te1_{name}": factors(6), f"lora_te2_{name}": factors(10)}, format="kohya")
    verdict = judge_lora(lora, {"model": UNET, "clip": CLIP})
    assert [module.layers[0].split(".")[1] for module in verdict.matched] == ["clip_l", "clip_g"]


def test_adapters_and_wrappers_do_not_show() -> None:
    peft: Any = pytest.importorskip("peft")
    model = nn.ModuleDict({"linear": nn.Linear(4, 6)})
    config = peft.LoraConfig(r=2, target_modules=["linear"])
    adapted = peft.inject_adapter_in_model(config, model)
    assert shapes_of(adapted) == {"linear.weight": (6, 4), "linear.bias": (6,)}
    assert shapes_of(torch.compile(adapted, backend="eager")) == shapes_of(adapted)


@pytest.mark.parametrize("model", [None, {}, object(), nn.Identity()])
def test_what_holds_no_weights_is_refused(model: Any) -> None:
    with pytest.raises(ModelMismatchError, match="no weights were found"):
        shapes_of(model)
