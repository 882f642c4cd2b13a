"""Models of diffusers of which no record is kept: what is extracted of a folder is loaded whole by diffusers' own loader."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import lora_pipeline
from safetensors.torch import load_file
from torch import nn

from sigmascope import convert_lora, extract_lora, merge_into_checkpoint
from sigmascope.lora.extract import ExtractOptions
from sigmascope.lora.families import layout_of

MODELS: dict[str, Callable[[], Any]] = {
    "ErnieImage": lambda: diffusers.ErnieImageTransformer2DModel(
        hidden_size=16, num_attention_heads=2, num_layers=2, ffn_hidden_size=40, in_channels=4, out_channels=4, text_in_dim=24,
        rope_axes_dim=(2, 2, 4),
    ),
    "BriaFibo2": lambda: diffusers.BriaFibo2Transformer2DModel(
        in_channels=4, dim=32, n_layers=3, n_refiner_layers=1, n_heads=2, cap_feat_dim=24, injection_layer_ids=(1,),
        perceiver_num_layers=1, axes_dims=(4, 6, 6), axes_lens=(16, 16, 16),
    ),
    "QwenImage": lambda: diffusers.QwenImage21Transformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2, context_in_dim=24,
        axes_dims_rope=(2, 2, 4),
    ),
    "Sana": lambda: diffusers.SanaVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, num_cross_attention_heads=2,
        cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=20, sample_size=8,
    ),
    "MiniMaxH3": lambda: diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=12, hidden_size=24, num_layers=2, num_refiner_layers=1, ffn_dim=40, in_channels=4,
        audio_in_channels=4, text_dim=20, freq_dim=8, time_embed_hidden_dim=16, time_embed_dim=12, rope_freq_dim=2,
    ),
    "AceStep": lambda: diffusers.AceStepTransformer1DModel(
        hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        in_channels=12, audio_acoustic_hidden_dim=4,
    ),
}  # fmt: skip
"""A tiny model, by the name of what loads LoRAs of it."""


def tuned(model: nn.Module) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model with changes of rank 2 in its first blocks, and these."""
    after, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    changes: dict[str, torch.Tensor] = {}
    for path, layer in after.named_modules():
        if isinstance(layer, nn.Linear) and ".0." in path:
            up, down = (
                torch.randn(size, generator=generator) * 0.1
                for size in ((layer.out_features, 2), (2, layer.in_features))
            )
            changes[path] = up @ down
            layer.weight.data += changes[path]
    return after, changes


@pytest.mark.parametrize(
    "name",
    ["ErnieImage", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "ErnieImage")],
)
def test_what_is_extracted_is_loaded_merged_and_converted(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = MODELS[name]()
    before = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    assert layout_of({key: tuple(tensor.shape) for key, tensor in before.items()}).family == "unknown"
    after, changes = tuned(base)
    base.save_pretrained(tmp_path / "base")
    after.save_pretrained(tmp_path / "tuned")
    lora = tmp_path / "lora.safetensors"
    extract_lora(tmp_path / "base", tmp_path / "tuned", lora, ExtractOptions(rank=4, save_precision="float"))
    convert_lora(lora, tmp_path / "again.safetensors", "peft", model=tmp_path / "base")
    loader = getattr(lora_pipeline, f"{name}LoraLoaderMixin")
    wanted = after.state_dict()
    for file in (lora, tmp_path / "again.safetensors"):
        merge_into_checkpoint([file], tmp_path / "base", tmp_path / "merged.safetensors")
        for key, weight in load_file(tmp_path / "merged.safetensors").items():
            torch.testing.assert_close(weight, wanted[key], atol=1e-5, rtol=1e-4)
        host = copy.deepcopy(base)
        loader.load_lora_into_transformer(loader.lora_state_dict(load_file(file)), transformer=host)
        host.fuse_lora()
        host.unload_lora()
        got = host.state_dict()
        assert len(changes) > 5
        for path in changes:
            torch.testing.assert_close(got[f"{path}.weight"], wanted[f"{path}.weight"], atol=1e-5, rtol=1e-4)
