"""Every layer's change of a LoRA file as people have it arrives: in a folder, a single file, a live model, a converted file."""

import copy
from pathlib import Path

import pytest
import torch
from diffusers.loaders import lora_pipeline
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor

from sigmascope import (
    attach_lora,
    convert_lora,
    extract_lora,
    judge_lora,
    load_lora,
    merge_into_checkpoint,
    merge_into_model,
)
from sigmascope.checkpoints import open_checkpoint
from sigmascope.lora.extract import ExtractOptions
from sigmascope.lora.families import layout_of

from .layouts import LAYOUTS, NO_ORIGINAL, Layout, goes_back, merged_into_single_files
from .models import FAMILIES, layers, rows, single_file, tiny


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def folder_of(family: str, files: Path) -> Path:
    folder = files / family
    if not folder.exists():
        tiny(family).save_pretrained(folder)  # type: ignore[operator]
    return folder


def single_of(family: str, files: Path) -> Path:
    single = files / f"{family}.safetensors"
    if not single.exists():
        save_file(single_file(family), single)
    return single


def written(layout: Layout, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    tensors, truth = layout.build()
    file = folder / "lora.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
    assert len(truth) > 2
    return file, truth


def unlike(before: dict[str, Tensor], after: dict[str, Tensor], truth: dict[str, Tensor]) -> list[str]:
    """Layers whose weight did not become what it should, those that should be as they were included."""
    return [
        key
        for key, weight in before.items()
        if not close(after[key] - weight, truth.get(key.removesuffix(".weight"), torch.zeros_like(weight)))
    ]


def close(change: Tensor, wanted: Tensor) -> bool:
    return change.shape == wanted.shape and bool((change - wanted).norm() <= 1e-3 * wanted.norm())


def in_original(family: str, truth: dict[str, Tensor]) -> dict[str, Tensor]:
    shapes = layers(family)
    return {
        row.original: row.joined({part: truth.get(part, torch.zeros(shapes[part])) for part in row.parts})
        for row in rows(family)
        if any(part in truth for part in row.parts)
    }


def factors_of(file: Path) -> dict[str, Tensor]:
    """The changes of a PEFT file by diffusers' names."""
    tensors = load_file(file)
    changes = {}
    for key, down in tensors.items():
        name, end, _ = key.partition(".lora_A.weight")
        if end:
            up = tensors[f"{name}.lora_B.weight"]
            change = up.flatten(1) @ down.flatten(1)
            changes[name.partition(".")[2]] = change.view(len(up), *down.shape[1:])
    return changes


FAST = ("wan-half-flat", "hunyuan-i2v", "zimage-fused")  # all take seconds
UNETS = ("sd15", "sdxl")  # a hundred layers and more


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in LAYOUTS]
)
def test_every_layer_gets_its_change(name: str, files: Path, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    file, truth = written(layout, tmp_path)
    model, merged = tiny(layout.family), tmp_path / "merged.safetensors"
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    wrong = {}
    merge_into_checkpoint([file], folder_of(layout.family, files), merged)
    wrong["folder"] = unlike(before, load_file(merged), truth)
    if merged_into_single_files(layout):
        merge_into_checkpoint([file], single_of(layout.family, files), merged)
        wrong["single"] = unlike(
            single_file(layout.family), load_file(merged), in_original(layout.family, truth)
        )
    with merge_into_model(model, load_lora(file)):
        wrong["live"] = unlike(before, model.state_dict(), truth)
    assert not any(wrong.values()), wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_converted_to_peft_every_layer_has_its_change(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    file, truth = written(layout, tmp_path)
    convert_lora(
        file,
        tmp_path / "peft.safetensors",
        "peft",
        rank=9999 if layout.ends == "lokr" else None,
        family=layout.told,
    )
    changes = factors_of(tmp_path / "peft.safetensors")
    assert changes.keys() == truth.keys()
    assert [path for path, change in changes.items() if not close(change, truth[path])] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if goes_back(layout)])
@pytest.mark.parametrize("format", ["kohya", "comfyui"])
def test_converted_there_and_back_nothing_is_lost(name: str, format: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    file, truth = written(layout, tmp_path)
    convert_lora(file, tmp_path / "there.safetensors", format, family=layout.told)
    convert_lora(tmp_path / "there.safetensors", tmp_path / "peft.safetensors", "peft", family=layout.told)
    naming = FAMILIES[layout.family].kohya if format == "kohya" else "original"
    paths = in_original(layout.family, truth) if naming == "original" else truth
    start = {"kohya": "lora_unet_", "comfyui": "diffusion_model."}[format]
    named = {start + (path.replace(".", "_") if format == "kohya" else path) for path in paths}
    there = load_file(tmp_path / "there.safetensors")
    names = {key.partition(".lora_")[0] for key in there if ".lora_" in key}
    assert names == named or layout.family in NO_ORIGINAL
    changes = factors_of(tmp_path / "peft.safetensors")
    lost = {path for path, change in truth.items() if path not in changes or not close(changes[path], change)}
    assert lost == set()


WRAPPED = {
    "sd15-kohya": "module.",
    "sdxl-onetrainer": "module.model.diffusion_model.",
    "flux-aitoolkit": "pipe.dit.",
    "flux2-bfl": "_orig_mod.",
    "wan-musubi": "net.",
    "zimage-aitoolkit": "transformer._orig_mod.",
    "qwen-musubi": "model.diffusion_model.",
}
"""A wrapper around the keys of a model file, by the LoRA that is for it."""


@pytest.mark.parametrize(
    ("name", "wrapper"),
    [
        pytest.param(name, start, marks=pytest.mark.slow if LAYOUTS[name].family in UNETS else ())
        for name, start in WRAPPED.items()
    ],
)
def test_what_a_wrapper_put_before_a_models_own_keys_is_taken_off(
    name: str, wrapper: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    file, truth = written(layout, tmp_path)
    plain, model = single_file(layout.family), tmp_path / "model.safetensors"
    averaged = {f"ema.{key}": torch.zeros_like(tensor) for key, tensor in plain.items()}
    save_file({wrapper + key: tensor for key, tensor in plain.items()} | averaged, model)
    convert_lora(file, tmp_path / "peft.safetensors", "peft", model=model)
    changes = factors_of(tmp_path / "peft.safetensors")
    assert {path for path, change in changes.items() if close(change, truth[path])} == truth.keys()
    with open_checkpoint(model) as opened:
        verdict = judge_lora(file, opened)
    assert (verdict.error, verdict.reasons) == (None, {})
    assert len(verdict.matched) == len(verdict.modules)
    tuned = tmp_path / "tuned.safetensors"
    merge_into_checkpoint([file], model, tuned)
    after = {key.removeprefix(wrapper): tensor for key, tensor in load_file(tuned).items()}
    assert unlike(plain, after, in_original(layout.family, truth)) == []
    base = tmp_path / "base.safetensors"
    save_file(plain, base)
    options = ExtractOptions(rank=12, format="peft", save_precision="float")
    extract_lora(base, tuned, tmp_path / "lora.safetensors", options)
    changes = factors_of(tmp_path / "lora.safetensors")
    assert {path for path, change in changes.items() if close(change, truth[path])} == truth.keys()


def test_a_file_with_two_wrapped_models_is_of_no_known_family() -> None:
    shapes = {key: tuple(tensor.shape) for key, tensor in single_file("wan").items()}
    two = {f"{start}.{key}": shape for start in ("high", "low") for key, shape in shapes.items()}
    assert layout_of(two).family == "unknown"
    assert layout_of({f"high.{key}": shape for key, shape in shapes.items()}).prefixes == {
        "denoiser": "high."
    }


LOADERS = {
    "sd3": "SD3",
    "flux": "Flux",
    "flux2": "Flux2",
    "chroma": "Flux",
    "qwen": "QwenImage",
    "wan": "Wan",
    "wani2v": "Wan",
    "zimage": "ZImage",
    "lumina2": "Lumina2",
    "hunyuan": "HunyuanVideo",
    "ltx": "LTXVideo",
    "hidream": "HiDreamImage",
    "sana": "Sana",
    "cogvideox": "CogVideoX",
    "mochi": "Mochi1",
    "auraflow": "AuraFlow",
    "cosmos": "Cosmos",
    "ltx2": "LTX2",
    "kandinsky5": "Kandinsky",
    "krea2": "Krea2",
    "ideogram4": "Ideogram4",
}
"""The class of diffusers that loads LoRAs of the family, without `LoraLoaderMixin`. PixArt has none."""


@pytest.mark.slow
@pytest.mark.parametrize("family", LOADERS)
def test_every_layer_gives_what_it_gives_with_diffusers_own_loading(family: str, tmp_path: Path) -> None:
    layout = Layout(family, "diffusers' save_lora_weights", "transformer.", only="blocks|layers|refiner")
    file, truth = written(layout, tmp_path)
    loader = getattr(lora_pipeline, f"{LOADERS[family]}LoraLoaderMixin")
    theirs, ours = copy.deepcopy(tiny(family)), tiny(family)
    more = {"network_alphas": None} if LOADERS[family] == "Flux" else {}
    loader.load_lora_into_transformer(loader.lora_state_dict(load_file(file)), transformer=theirs, **more)
    tuned = {name: layer for name, layer in theirs.named_modules() if isinstance(layer, BaseTunerLayer)}
    assert tuned.keys() == truth.keys()
    with attach_lora(ours, file), torch.no_grad():
        for name, layer in tuned.items():
            inputs = torch.randn(layers(family)[name][1])
            if isinstance(layer.get_base_layer(), torch.nn.Conv2d):
                inputs = torch.randn(1, layer.get_base_layer().in_channels, 4, 4)
            wanted = layer(inputs)
            torch.testing.assert_close(ours.get_submodule(name)(inputs), wanted, atol=1e-5, rtol=1e-5)
            assert not torch.allclose(layer.get_base_layer()(inputs), wanted, atol=1e-3)


def test_dora_and_loha_merge_into_a_live_model(tmp_path: Path) -> None:
    layer, torch_model = "blocks.0.attn1.to_q", tiny("wan")
    weight = torch_model.state_dict()[f"{layer}.weight"].clone()
    down, up, magnitude = torch.randn(2, 24), torch.randn(24, 2), torch.rand(24, 1) + 0.5
    hada = {f"blocks.0.attn1.to_k.hada_{name}": torch.randn(24, 2) for name in ("w1_a", "w2_a")}
    hada |= {f"blocks.0.attn1.to_k.hada_{name}": torch.randn(2, 24) for name in ("w1_b", "w2_b")}
    dora = {"lora_down.weight": down, "lora_up.weight": up, "dora_scale": magnitude}
    save_file(
        {f"{layer}.{end}": tensor for end, tensor in dora.items()} | hada, tmp_path / "lora.safetensors"
    )
    key = torch_model.state_dict()["blocks.0.attn1.to_k.weight"].clone()
    with merge_into_model(torch_model, load_lora(tmp_path / "lora.safetensors"), scale=0.5):
        after = {name: tensor.clone() for name, tensor in torch_model.state_dict().items()}
    direction = weight + up @ down
    wanted = magnitude * direction / direction.norm(dim=1, keepdim=True)
    torch.testing.assert_close(after[f"{layer}.weight"], weight + 0.5 * (wanted - weight))
    first, second, third, fourth = (
        hada[f"blocks.0.attn1.to_k.hada_{n}"] for n in ("w1_a", "w1_b", "w2_a", "w2_b")
    )
    torch.testing.assert_close(
        after["blocks.0.attn1.to_k.weight"], key + 0.5 * (first @ second) * (third @ fourth)
    )
    assert torch.equal(torch_model.state_dict()[f"{layer}.weight"], weight)


def test_layers_that_only_another_variant_has_are_named_so(tmp_path: Path) -> None:
    file, truth = written(
        LAYOUTS["wan-i2v-lightx2v"], tmp_path
    )  # of WAN 2.1 I2V, on a model without image attention
    verdict = judge_lora(file, tiny("wan"))
    lacking = sum("add_" in path for path in truth)
    assert verdict.reasons == {"layer_missing": lacking}
    assert len(verdict.matched) == len(truth) - lacking


@pytest.mark.parametrize("start", ["diffusion_model.", "lora_unet_"])
def test_animas_adapter_is_no_layer_of_its_denoiser(start: str, tmp_path: Path) -> None:
    """invoke-ai/InvokeAI 9264: norms beside factors, and the adapter's blocks are called as the denoiser's are."""

    def shown(path: str) -> str:
        return start + (path.replace(".", "_") if start.endswith("_") else path)

    own, beside = "blocks.0.self_attn.q_proj", "llm_adapter.blocks.0.self_attn.q_proj"
    norm, model = "blocks.0.self_attn.q_norm", tiny("cosmos")
    width, head = layers("cosmos")["transformer_blocks.0.attn1.to_q"][0], 16
    tensors = {f"{shown(norm)}.diff": torch.ones(head)}
    for path in (own, beside):
        tensors |= {f"{shown(path)}.lora_down.weight": torch.ones(1, width)}
        tensors |= {f"{shown(path)}.lora_up.weight": torch.ones(width, 1)}
    save_file(tensors, tmp_path / "lora.safetensors")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with merge_into_model(model, load_lora(tmp_path / "lora.safetensors")) as merged:
        assert merged.not_in_variant == (shown(beside),)
        truth = {
            "transformer_blocks.0.attn1.to_q": torch.ones(width, width),
            "transformer_blocks.0.attn1.norm_q": torch.ones(head),
        }
        assert unlike(before, model.state_dict(), truth) == []


def test_dora_of_joint_projections_is_cut_exactly(files: Path, tmp_path: Path) -> None:
    """Comfy-Org/ComfyUI 16234: LoKr with DoRA of query, key and value together, which are of different sizes."""
    generator = torch.Generator().manual_seed(2)
    path = "text_fusion.layerwise_blocks.0.attn"
    weights = [tiny("krea2").state_dict()[f"{path}.to_{name}.weight"] for name in "qkv"]
    weight = torch.cat(weights)
    first = torch.randn(2, 2, generator=generator)
    second = torch.randn(len(weight) // 2, weight.shape[1] // 2, generator=generator)
    magnitude = torch.rand(len(weight), 1, generator=generator) + 1.0
    ends = {"lokr_w1": first, "lokr_w2": second, "dora_scale": magnitude, "alpha": torch.tensor(1e10)}
    name = f"lycoris_{path}_to_qkv".replace(".", "_")
    save_file({f"{name}.{end}": tensor for end, tensor in ends.items()}, tmp_path / "lora.safetensors")
    merge_into_checkpoint(
        [tmp_path / "lora.safetensors"], folder_of("krea2", files), tmp_path / "m.safetensors"
    )
    merged = load_file(tmp_path / "m.safetensors")
    direction = weight + torch.kron(first, second)
    wanted = magnitude * direction / direction.norm(dim=1, keepdim=True)
    torch.testing.assert_close(torch.cat([merged[f"{path}.to_{name}.weight"] for name in "qkv"]), wanted)
