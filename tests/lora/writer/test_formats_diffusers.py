"""Files of ours in diffusers' own loaders: real architectures, small, with outputs equal to merging by hand."""

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sigmascope.lora.adapters import DoraChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import ModelLayout
from sigmascope.lora.file import LoraFile
from sigmascope.lora.writer import save_lora

diffusers: Any = pytest.importorskip("diffusers")
peft: Any = pytest.importorskip("peft")

KINDS = (nn.Linear, nn.Conv2d, nn.Conv3d)
UNET: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 2,
    "cross_attention_dim": 12,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "sd15": lambda: diffusers.UNet2DConditionModel(
        **UNET,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "sdxl": lambda: diffusers.UNet2DConditionModel(
        **UNET,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=[1, 2],
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=2,
        projection_class_embeddings_input_dim=18,
    ),
    "sd3": lambda: diffusers.SD3Transformer2DModel(
        sample_size=8,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=6,
        caption_projection_dim=8,
        pooled_projection_dim=10,
        dual_attention_layers=(0,),
        pos_embed_max_size=8,
        in_channels=4,
        out_channels=4,
    ),
    "flux": lambda: diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=6,
        pooled_projection_dim=10,
        guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
    ),
    "wan": lambda: diffusers.WanTransformer3DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=6, freq_dim=8, ffn_dim=16,
    ),
    "qwen_image": lambda: diffusers.QwenImageTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=6, patch_size=1, axes_dims_rope=(2, 2, 4),
    ),
}  # fmt: skip
INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "sd15": lambda: {
        "sample": r(1, 4, 8, 8),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": r(1, 3, 12),
    },
    "sdxl": lambda: {
        "sample": r(1, 4, 8, 8),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": r(1, 3, 12),
        "added_cond_kwargs": {"text_embeds": r(1, 6), "time_ids": torch.ones(1, 6)},
    },
    "sd3": lambda: {
        "hidden_states": r(1, 4, 8, 8),
        "encoder_hidden_states": r(1, 3, 6),
        "pooled_projections": r(1, 10),
        "timestep": torch.tensor([5]),
    },
    "flux": lambda: {
        "hidden_states": r(1, 6, 4),
        "encoder_hidden_states": r(1, 3, 6),
        "pooled_projections": r(1, 10),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([1.0]),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(3, 3),
    },
    "wan": lambda: {
        "hidden_states": r(1, 4, 1, 4, 4),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": r(1, 3, 6),
    },
    "qwen_image": lambda: {
        "hidden_states": r(1, 4, 4),
        "encoder_hidden_states": r(1, 3, 6),
        "encoder_hidden_states_mask": torch.ones(1, 3, dtype=torch.bool),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 2, 2)]],
    },
}
PIPELINES = {
    "sd15": "StableDiffusionPipeline",
    "sdxl": "StableDiffusionXLPipeline",
    "flux": "FluxPipeline",
    "wan": "WanPipeline",
    "qwen_image": "QwenImagePipeline",
}


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@cache
def original(family: str) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers' own use of what it deprecates
        model = MODELS[family]().eval()
    for parameter in model.parameters():  # some begin as zeros, and would hide what a LoRA does behind them
        nn.init.normal_(parameter, std=0.3)
    return model


def output(model: nn.Module, family: str) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**INPUTS[family](), return_dict=False)[0]
    return result


def component(family: str) -> str:
    return "unet" if family in {"sd15", "sdxl"} else "transformer"


def random_lora(model: nn.Module, prefix: str) -> LoraFile:
    """For every Linear and convolution, of ranks 1 to 3 and scales other than 1."""
    generator = torch.Generator().manual_seed(1)
    modules = {}
    for index, (name, layer) in enumerate(model.named_modules()):
        if isinstance(layer, KINDS):
            shape, rank = tuple(layer.weight.shape), 1 + index % 3
            inner = int(torch.Size(shape[1:]).numel())
            up = torch.randn(shape[0], rank, generator=generator)
            down = torch.randn(rank, inner, generator=generator) / inner**0.5
            modules[prefix + name] = LoraFactors(up, down, 0.5 * rank, shape)
    return LoraFile(modules)


def merged(model: nn.Module, lora: LoraFile, prefix: str) -> nn.Module:
    changed = copy.deepcopy(model)
    layers = dict(changed.named_modules())
    for name, factors in lora.modules.items():
        weight = layers[name.removeprefix(prefix)].weight
        assert isinstance(weight, nn.Parameter)
        weight.data += factors.delta()
    return changed


def adapted_layers(model: nn.Module) -> int:
    return sum(isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer) for module in model.modules())


def layout(family: str) -> ModelLayout:
    return ModelLayout(family, "diffusers", {"denoiser": f"{component(family)}."})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lora.safetensors"


@pytest.mark.parametrize("family", MODELS)
def test_peft_files_act_on_every_layer_as_merging_does(family: str, file: Path) -> None:
    prefix = f"{component(family)}."
    lora = random_lora(original(family), prefix)
    save_lora(file, lora, format="peft", layout=layout(family))
    model: Any = copy.deepcopy(original(family))
    model.load_lora_adapter(str(file), prefix=component(family))
    assert adapted_layers(model) == len(lora)
    expected = output(merged(original(family), lora, prefix), family)
    torch.testing.assert_close(output(model, family), expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(expected, output(original(family), family), rtol=1e-2, atol=1e-2)


def test_peft_files_without_a_prefix_load_with_none(file: Path) -> None:
    lora = random_lora(original("sd15"), "")
    save_lora(file, lora, format="peft", layout=ModelLayout("unknown", "diffusers", {}))
    model: Any = copy.deepcopy(original("sd15"))
    model.load_lora_adapter(str(file), prefix=None)
    assert adapted_layers(model) == len(lora)


KOHYA: dict[str, Callable[[str], bool]] = {
    "sd15": lambda name: True,
    "sdxl": lambda name: True,
    # Fused rows of single blocks are divided at FLUX' own width only, and layers outside of blocks are lost
    "flux": lambda name: (
        "blocks." in name and ("single" not in name or name.endswith((".proj_out", "norm.linear")))
    ),
    "wan": lambda name: "blocks." in name,
    "qwen_image": lambda name: True,
}


@pytest.mark.parametrize("family", KOHYA)
def test_kohya_files_act_through_a_pipelines_loader_as_merging_does(family: str, file: Path) -> None:
    prefix, pipeline = f"{component(family)}.", getattr(diffusers, PIPELINES[family])
    whole = random_lora(original(family), prefix)
    lora = LoraFile({name: factors for name, factors in whole.modules.items() if KOHYA[family](name)})
    save_lora(file, lora, format="kohya", layout=layout(family), model_layers=whole.modules)
    model: Any = copy.deepcopy(original(family))
    if component(family) == "unet":
        state, alphas = pipeline.lora_state_dict(str(file), unet_config=model.config)
        pipeline.load_lora_into_unet(state, network_alphas=alphas, unet=model)
    else:
        alphas = {"network_alphas": None} if family == "flux" else {}
        pipeline.load_lora_into_transformer(pipeline.lora_state_dict(str(file)), transformer=model, **alphas)
    assert adapted_layers(model) == len(lora)
    expected = output(merged(original(family), lora, prefix), family)
    torch.testing.assert_close(output(model, family), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("format", ["peft", "kohya"])
def test_text_encoder_files_act_as_merging_does(format: str, file: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=20
    )
    encoder = transformers.CLIPTextModel(config).eval()
    lora = random_lora(encoder, "text_encoder.")
    place = ModelLayout("sdxl", "diffusers", {"denoiser": "unet.", "text_encoder": "text_encoder."})
    equal = LoraFile(
        {
            name: LoraFactors(factors.up[:, :1], factors.down[:1], 0.5, factors.weight_shape)
            for name, factors in lora.modules.items()
        }
    )
    save_lora(file, equal, format=format, layout=place)
    pipeline, model = diffusers.StableDiffusionXLPipeline, copy.deepcopy(encoder)
    state, alphas = pipeline.lora_state_dict(str(file))
    pipeline.load_lora_into_text_encoder(state, alphas, text_encoder=model, prefix="text_encoder")
    assert adapted_layers(model) == len(lora)
    tokens = torch.arange(5)[None]
    expected = merged(encoder, equal, "text_encoder.")(tokens).last_hidden_state
    torch.testing.assert_close(model(tokens).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


def test_a_dora_in_peft_format_acts_as_its_changes_do(file: Path) -> None:
    lora = random_lora(original("sd15"), "unet.")
    layers = dict(original("sd15").named_modules())
    changes: dict[str, Any] = {}
    for name, factors in lora.modules.items():
        norms = layers[name.removeprefix("unet.")].weight.flatten(1).norm(dim=1).detach()
        changes[name] = DoraChange(factors, norms * torch.linspace(0.5, 1.5, len(norms)))
    save_lora(file, LoraFile({}, changes=changes), format="peft", layout=layout("sd15"))
    model: Any = copy.deepcopy(original("sd15"))
    model.load_lora_adapter(str(file), prefix="unet")
    assert adapted_layers(model) == len(lora)
    changed = copy.deepcopy(original("sd15"))
    own = dict(changed.named_modules())
    for name, change in changes.items():
        weight = own[name.removeprefix("unet.")].weight
        assert isinstance(weight, nn.Parameter)
        weight.data += change.delta(weight.data)
    torch.testing.assert_close(output(model, "sd15"), output(changed, "sd15"), rtol=1e-3, atol=1e-3)
