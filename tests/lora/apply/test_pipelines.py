"""What users give: one model of a pipeline and a file with changes of several, or the whole pipeline."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, generate, make_pipeline
from tests.lora.pipeline_loras import SaveLora, factors_for
from torch import Tensor, nn
from torch.nn import functional

from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.file import LoraFile
from sigmascope.lora.live_merge import merge_into_model
from sigmascope.lora.reader import load_lora

GetPipeline = Callable[[str], Any]
FORMATS = ["native", "peft", "kohya", "comfyui"]


def encoded(encoder: nn.Module) -> Tensor:
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        result: Tensor = encoder(ids).last_hidden_state
    return result


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_gets_the_modules_that_are_for_it(
    pipelines: GetPipeline, save: SaveLora, format: str
) -> None:
    pipeline = pipelines("sdxl")
    lora = load_lora(save(pipeline, "unet", "text_encoder", "text_encoder_2", format=format))
    layers = {
        part: sum(isinstance(m, nn.Linear | nn.Conv2d) for m in getattr(pipeline, part).modules())
        for part in ("unet", "text_encoder", "text_encoder_2")
    }
    for part, count in layers.items():
        with attach_lora(getattr(pipeline, part), lora) as attached:
            assert len(attached.applied) == count
            assert len(attached.left_out) == sum(layers.values()) - count
    with attach_lora(pipeline, lora) as attached:
        assert len(attached.applied) == sum(layers.values())
        assert attached.left_out == ()


def test_text_encoders_give_what_they_give_with_diffusers_own_loading(
    pipelines: GetPipeline, save: SaveLora
) -> None:
    pipeline = copy.deepcopy(pipelines("sdxl"))
    file = save(pipeline, "unet", "text_encoder", "text_encoder_2", only="q_proj")
    lora = load_lora(file)
    parts = ("text_encoder", "text_encoder_2")
    plain = {part: encoded(getattr(pipeline, part)) for part in parts}
    alone = {}
    for part in parts:
        with attach_lora(getattr(pipeline, part), lora):
            alone[part] = encoded(getattr(pipeline, part))
    with attach_lora(pipeline, lora):
        together = {part: encoded(getattr(pipeline, part)) for part in parts}
    with merge_into_model(pipeline, lora):
        merged = {part: encoded(getattr(pipeline, part)) for part in parts}
    pipeline.load_lora_weights(file)
    for part in parts:
        expected = encoded(getattr(pipeline, part))
        assert not torch.allclose(expected, plain[part], atol=1e-2)
        for ours in (alone, together, merged):
            torch.testing.assert_close(ours[part], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_pipeline_gives_what_it_gives_with_diffusers_own_loading(family: str, save: SaveLora) -> None:
    pipeline = make_pipeline(family)
    denoiser = "unet" if hasattr(pipeline, "unet") else "transformer"
    file = save(pipeline, denoiser, only="to_q")
    plain = generate(pipeline, family)
    with attach_lora(pipeline, file):
        ours = generate(pipeline, family)
    pipeline.load_lora_weights(str(file))
    wanted = generate(pipeline, family)
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(plain, wanted, atol=1e-3)


def test_what_does_not_fit_is_counted_without_what_fits(pipelines: GetPipeline, save: SaveLora) -> None:
    pipeline = pipelines("sdxl")
    lora = load_lora(save(pipeline, "unet", "text_encoder", format="kohya"))
    odd = {"lora_unet_conv_inn": factors_for((4, 4)), "lora_unet_conv_outt": factors_for((4, 4))}
    mixed = LoraFile(dict(lora.modules) | odd, format="kohya")
    unet_modules = sum(name.startswith("lora_unet") for name in mixed.modules)
    with pytest.raises(ModelMismatchError, match=f"2 of {unet_modules} modules") as caught:
        attach_lora(pipeline.unet, mixed)
    assert "lora_unet_conv_inn" in str(caught.value)


def test_a_file_for_two_encoders_that_are_alike_asks_for_the_pipeline(pipelines: GetPipeline) -> None:
    encoder = pipelines("sd15").text_encoder
    layer = next(name for name, module in encoder.named_modules() if name.endswith("q_proj"))
    factors = factors_for(tuple(encoder.get_submodule(layer).weight.shape))
    lora = LoraFile({f"{part}.{layer}": factors for part in ("text_encoder", "text_encoder_2")})
    with pytest.raises(ModelMismatchError, match="text_encoder and those for text_encoder_2 both fit"):
        attach_lora(encoder, lora)


def test_the_patch_embedding_of_a_video_model_is_changed(pipelines: GetPipeline) -> None:
    transformer = pipelines("wan").transformer
    layer = transformer.patch_embedding
    assert isinstance(layer, nn.Conv3d)
    factors = factors_for(tuple(layer.weight.shape))
    x = torch.randn(1, layer.in_channels, 3, 6, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        change = functional.conv3d(x, factors.delta(), stride=layer.stride)
        expected = layer(x) + change
        with attach_lora(transformer, LoraFile({"transformer.patch_embedding": factors})):
            torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)


def test_what_is_left_out_is_logged(
    pipelines: GetPipeline, save: SaveLora, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = pipelines("sd15")
    lora = load_lora(save(pipeline, "unet", "text_encoder", only="to_q"))
    attach_lora(pipeline.unet, lora).detach()
    assert not caplog.records
    lora = load_lora(save(pipeline, "unet", "text_encoder", only="q", name="both"))
    attach_lora(pipeline.unet, lora).detach()
    assert "are for other models than this UNet2DConditionModel" in caplog.text


@pytest.mark.parametrize("family", ["wan", "qwen_image"])
def test_a_transformers_lora_is_attached(pipelines: GetPipeline, save: SaveLora, family: str) -> None:
    pipeline = pipelines(family)
    for format in FORMATS:
        lora = load_lora(save(pipeline, "transformer", format=format, name=format))
        with attach_lora(pipeline.transformer, lora) as attached:
            assert attached.left_out == ()
            assert len(attached.applied) == len(lora)


def test_a_language_model_that_encodes_text_takes_its_part(pipelines: GetPipeline) -> None:
    """Qwen-Image's, whose names are under `model.language_model`."""
    pipeline = pipelines("qwen_image")
    encoder, name = pipeline.text_encoder, "model.language_model.layers.0.self_attn.q_proj"
    factors = factors_for(tuple(encoder.get_submodule(name).weight.shape))
    other = factors_for(tuple(pipeline.transformer.transformer_blocks[0].attn.to_q.weight.shape))
    lora = LoraFile(
        {f"text_encoder.{name}": factors, "transformer.transformer_blocks.0.attn.to_q": other}, format="peft"
    )
    with attach_lora(encoder, lora) as attached:
        assert [len(attached.applied), len(attached.left_out)] == [1, 1]
    before = encoder.get_submodule(name).weight.detach().clone()
    with merge_into_model(encoder, lora):
        changed = encoder.get_submodule(name).weight - before
    torch.testing.assert_close(changed, factors.delta(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv1d(3, 4, 3, stride=2, padding=1), (9,)),
        (nn.Conv3d(3, 4, (1, 2, 2), stride=(1, 2, 2)), (3, 6, 8)),
        (nn.Conv3d(3, 4, 3, padding=1, padding_mode="replicate"), (3, 5, 7)),
    ],
)
def test_convolutions_in_time_and_space_are_those_of_the_changed_weight(
    layer: nn.Conv1d | nn.Conv3d, size: tuple[int, ...]
) -> None:
    factors = factors_for(tuple(layer.weight.shape))
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    changed = copy.deepcopy(layer)
    with torch.no_grad():
        changed.weight += (factors.up @ factors.down).mul(0.5).reshape(layer.weight.shape)
        expected = changed(x)
        with attach_lora(nn.ModuleDict({"conv": layer}), LoraFile({"conv": factors}), scale=0.5):
            torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
        with merge_into_model(nn.ModuleDict({"conv": layer}), LoraFile({"conv": factors}), scale=0.5):
            torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


def test_a_convolution_that_pads_its_input_itself_is_refused_hot_and_merged_cold(
    pipelines: GetPipeline,
) -> None:
    vae = copy.deepcopy(pipelines("wan").vae)
    name = next(name for name, module in vae.named_modules() if isinstance(module, nn.Conv3d))
    shape = tuple(vae.get_submodule(name).weight.shape)
    lora = LoraFile({name: factors_for(shape)})
    with pytest.raises(ModelMismatchError, match="pads its own input"):
        attach_lora(vae, lora)
    with merge_into_model(vae, lora) as merged:
        assert merged.applied == (name,)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither a module nor a pipeline"):
        attach_lora("sdxl", LoraFile({"conv": factors_for((4, 4))}))
