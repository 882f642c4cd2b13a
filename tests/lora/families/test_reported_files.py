"""LoRA files of public reports, in the naming that the reports show: each is merged into a small model of its family.

Sources: [ltx] Comfy-Org/ComfyUI pull 14349 (DiffSynth-Studio), huggingface/finetrainers 133; [hidream] Nerogar/OneTrainer 842,
Comfy-Org/ComfyUI 7792; [lumina2] Comfy-Org/ComfyUI 7502; [hunyuan] huggingface/diffusers 10562; [flux] bghira/SimpleTuner 779.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sigmascope import convert_lora, merge_into_checkpoint


def ltx(d: Any) -> Any:
    return d.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        num_layers=2, caption_channels=32,
    )  # fmt: skip


def hidream(d: Any) -> Any:
    return d.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
        num_attention_heads=4, caption_channels=[32, 16], text_emb_dim=64, axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32), llama_layers=(0, 1),
    )  # fmt: skip


def lumina2(d: Any) -> Any:
    return d.Lumina2Transformer2DModel(
        sample_size=16, in_channels=4, hidden_size=48, num_layers=2, num_refiner_layers=1, num_attention_heads=4,
        num_kv_heads=2, multiple_of=16, axes_dim_rope=[4, 4, 4], axes_lens=[32, 32, 32], cap_feat_dim=32,
    )  # fmt: skip


def hunyuan(d: Any) -> Any:
    return d.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=2,
        num_single_layers=2, num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip


def flux(d: Any) -> Any:
    return d.FluxTransformer2DModel(
        in_channels=8, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip


REPORTS: dict[str, tuple[Callable[[Any], Any], str, tuple[str, str], float | None]] = {
    "ltx-diffsynth": (ltx, "", ("lora_A.default.weight", "lora_B.default.weight"), None),
    "ltx-finetrainers": (ltx, "transformer.", ("lora_A.weight", "lora_B.weight"), None),
    "hidream-onetrainer": (hidream, "transformer.", ("lora_down.weight", "lora_up.weight"), 2.0),
    "hidream-lycoris": (hidream, "lycoris_", ("lokr_w2", "lokr_w1"), 9999999999.0),
    "lumina2-diffusers": (lumina2, "transformer.", ("lora_A.weight", "lora_B.weight"), None),
    "hunyuan-flat": (hunyuan, "lora_transformer_", ("lora_down.weight", "lora_up.weight"), 2.0),
    "flux-base-model": (flux, "transformer.base_model.model.", ("lora.down.weight", "lora.up.weight"), None),
}


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # diffusers' own use of it
@pytest.mark.parametrize("report", REPORTS)
def test_every_layer_of_a_reported_file_gets_its_change(report: str, tmp_path: Path) -> None:
    import diffusers

    make, prefix, (down_end, up_end), alpha = REPORTS[report]
    model = make(diffusers)
    model.save_pretrained(tmp_path / "model")
    before = load_file(tmp_path / "model" / "diffusion_pytorch_model.safetensors")
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    changes: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        is_block = path.startswith(("transformer_b", "single", "double", "layers", "noise_refiner"))
        if not (isinstance(module, nn.Linear) and is_block):
            continue
        name = prefix + (path.replace(".", "_") if prefix.endswith("_") else path)
        if down_end == "lokr_w2":
            first = torch.randn(2, 2, generator=generator)
            second = torch.randn(module.out_features // 2, module.in_features // 2, generator=generator)
            changes[path] = torch.kron(first, second)
        else:
            first = torch.randn(module.out_features, 4, generator=generator)
            second = torch.randn(4, module.in_features, generator=generator)
            changes[path] = first @ second * (1 if alpha is None else alpha / 4)
        tensors |= {f"{name}.{up_end}": first, f"{name}.{down_end}": second}
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
    save_file(tensors, tmp_path / "lora.safetensors")

    words: dict[str, Any] = {"rank": 9999} if down_end == "lokr_w2" else {}
    convert_lora(tmp_path / "lora.safetensors", tmp_path / "peft.safetensors", "peft", **words)
    for file in ("lora.safetensors", "peft.safetensors"):
        merged = merge_into_checkpoint([tmp_path / file], tmp_path / "model", tmp_path / f"merged_{file}")
        assert merged is not None
        after = load_file(tmp_path / f"merged_{file}")
        for path, change in changes.items():
            got = after[f"{path}.weight"] - before[f"{path}.weight"]
            torch.testing.assert_close(got, change, rtol=1e-3, atol=1e-3, msg=f"{file}: {path}")
