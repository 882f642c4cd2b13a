"""Pairs of real architectures, small, in the forms in which people have them."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sigmascope.errors import ModelMismatchError
from sigmascope.lora.families import Part
from sigmascope.lora.pairs import PairOptions, open_pair

State = dict[str, Tensor]
CPU = torch.device("cpu")


@cache
def model(name: str) -> nn.Module:
    import diffusers
    import transformers

    unet: dict[str, Any] = {
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    makers: dict[str, Callable[[], Any]] = {
        "sd15": lambda: diffusers.UNet2DConditionModel(**unet, cross_attention_dim=768),
        "sd2": lambda: diffusers.UNet2DConditionModel(
            **unet, cross_attention_dim=1024, use_linear_projection=True
        ),
        "sdxl": lambda: diffusers.UNet2DConditionModel(
            **unet,
            cross_attention_dim=2048,
            addition_embed_type="text_time",
            addition_time_embed_dim=4,
            projection_class_embeddings_input_dim=32,
        ),
        "sd3": lambda: diffusers.SD3Transformer2DModel(
            sample_size=4,
            num_layers=1,
            attention_head_dim=4,
            num_attention_heads=2,
            joint_attention_dim=8,
            caption_projection_dim=8,
            pooled_projection_dim=8,
            pos_embed_max_size=4,
        ),
        "flux": lambda: diffusers.FluxTransformer2DModel(
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=1,
            joint_attention_dim=8,
            pooled_projection_dim=8,
            in_channels=4,
            axes_dims_rope=(4, 6, 6),
        ),
        "wan": lambda: diffusers.WanTransformer3DModel(
            num_layers=1,
            attention_head_dim=12,
            num_attention_heads=1,
            text_dim=8,
            ffn_dim=16,
            freq_dim=8,
        ),
        "qwen_image": lambda: diffusers.QwenImageTransformer2DModel(
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=1,
            joint_attention_dim=8,
            in_channels=4,
            axes_dims_rope=(4, 6, 6),
        ),
        "vae": lambda: diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4),
        "wan_vae": lambda: diffusers.AutoencoderKLWan(base_dim=4, z_dim=4, num_res_blocks=1),
        "clip": lambda: transformers.CLIPTextModel(
            transformers.CLIPTextConfig(
                vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
            )
        ),
        "t5": lambda: transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
        ),
    }
    torch.manual_seed(0)
    made: nn.Module = makers[name]()
    return made


def state(name: str, prefix: str = "") -> State:
    return {
        prefix + key: tensor.detach().contiguous().clone() for key, tensor in model(name).state_dict().items()
    }


def tuned(base: State) -> State:
    generator = torch.Generator().manual_seed(1)
    return {
        key: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        if tensor.is_floating_point()
        else tensor
        for key, tensor in base.items()
    }


@pytest.fixture
def save(tmp_path: Path) -> Callable[[str, State], Path]:
    def write(name: str, tensors: State) -> Path:
        save_file(tensors, tmp_path / f"{name}.safetensors")
        return tmp_path / f"{name}.safetensors"

    return write


Save = Callable[[str, State], Path]


def modules_of(name: str) -> dict[str, tuple[int, ...]]:
    """The Linear and convolution layers as PyTorch itself tells them, with their shapes."""
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    return {
        path: tuple(module.weight.shape)
        for path, module in model(name).named_modules()
        if isinstance(module, kinds)
    }


@pytest.mark.parametrize(
    "name", ["sd15", "sd2", "sdxl", "sd3", "flux", "wan", "qwen_image", "vae", "wan_vae", "clip", "t5"]
)
def test_layers_are_the_linear_and_convolution_modules_of_the_model(name: str, save: Save) -> None:
    base = state(name)
    with open_pair(save("base", base), save("tuned", tuned(base))) as pair:
        assert {layer: pair.shape(layer) for layer in pair.layers} == modules_of(name)
        weights = {f"{layer}.weight" for layer in modules_of(name)}
        assert set(pair.others) == {key for key in base if key not in weights}
        assert pair.skipped == {}


@pytest.mark.parametrize("name", ["wan_vae", "clip"])
def test_changes_of_every_kind_of_tensor_are_formed(name: str, save: Save) -> None:
    base = state(name)
    after = tuned(base)
    with open_pair(save("base", base), save("tuned", after)) as pair:
        for key in (*pair.others, *(f"{layer}.weight" for layer in pair.layers)):
            assert torch.equal(pair.change(key, CPU).delta, after[key] - base[key])


def write_pipeline(folder: Path, components: dict[str, State]) -> Path:
    index = {name: ["diffusers", "Model"] for name in components}
    for name, tensors in components.items():
        (folder / name).mkdir(parents=True)
        save_file(tensors, folder / name / "diffusion_pytorch_model.safetensors")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Pipeline", **index}))
    return folder


@pytest.fixture
def pipelines(tmp_path: Path) -> tuple[Path, Path]:
    components = {"text_encoder": state("clip"), "transformer": state("flux"), "vae": state("vae")}
    changed = {name: tuned(tensors) for name, tensors in components.items()}
    return write_pipeline(tmp_path / "a", components), write_pipeline(tmp_path / "b", changed)


def test_two_diffusers_folders_are_paired_by_their_denoisers(pipelines: tuple[Path, Path]) -> None:
    with open_pair(*pipelines) as pair:
        assert set(pair.layers) == {f"transformer.{path}" for path in modules_of("flux")}
        assert pair.layout.family == "flux"
        assert all(key.startswith(("text_encoder.", "vae.")) for key in pair.outside)


def test_parts_of_diffusers_folders_are_compared_when_asked_for(pipelines: tuple[Path, Path]) -> None:
    parts: tuple[Part, ...] = ("text_encoder", "vae")
    with open_pair(*pipelines, PairOptions(parts=parts)) as pair:
        wanted = {f"text_encoder.{path}" for path in modules_of("clip")}
        assert set(pair.layers) == wanted | {f"vae.{path}" for path in modules_of("vae")}


def test_a_component_is_paired_with_the_same_component_of_a_folder(
    pipelines: tuple[Path, Path], tmp_path: Path
) -> None:
    with open_pair(pipelines[0], pipelines[1] / "transformer") as pair:
        assert set(pair.layers) == {f"transformer.{path}" for path in modules_of("flux")}
        with open_pair(*pipelines) as whole:
            for layer in pair.layers:
                key = f"{layer}.weight"
                assert torch.equal(pair.change(key, CPU).delta, whole.change(key, CPU).delta)


def test_the_same_weights_under_other_prefixes_are_found(save: Save) -> None:
    base = state("qwen_image")
    after = tuned(base)
    bare = save("base", base)
    single = save("tuned", {f"model.diffusion_model.{key}": tensor for key, tensor in after.items()})
    with open_pair(bare, single) as pair:
        assert set(pair.layers) == set(modules_of("qwen_image"))
        change = pair.change("img_in.weight", CPU)
        assert torch.equal(change.delta, after["img_in.weight"] - base["img_in.weight"])
        assert pair.tuned.files == (single,)


def test_a_tuned_file_of_a_few_layers_is_paired_with_the_whole_model(save: Save) -> None:
    base = state("sd15", "unet.")
    after = {key: tensor for key, tensor in tuned(base).items() if "attn1" in key}
    options = PairOptions(on_missing="skip")
    with open_pair(save("base", base), save("tuned", after), options) as pair:
        assert pair.layout.family == "sd15"
        assert set(pair.layers) == {f"unet.{path}" for path in modules_of("sd15") if "attn1" in path}


def test_an_unknown_model_is_paired_by_its_own_keys(save: Save) -> None:
    base = {"layers.0.fc.weight": torch.ones(4, 4), "layers.0.norm.weight": torch.ones(4)}
    with open_pair(save("base", base), save("tuned", tuned(base))) as pair:
        assert pair.layers == ("layers.0.fc",)
        assert pair.others == ("layers.0.norm.weight",)
        assert pair.layout.family == "unknown"


def test_two_families_are_not_one_pair(save: Save) -> None:
    with (
        pytest.raises(ModelMismatchError, match="qwen_image in diffusers naming"),
        open_pair(save("base", state("qwen_image")), save("tuned", state("wan"))),
    ):
        pass
