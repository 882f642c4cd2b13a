"""What tools write into headers, and how they name text encoders.

Values are those of sd-scripts (`library/sai_model_spec.py`, `MODEL_VERSION_*`), musubi-tuner (`utils/sai_model_spec.py`,
`dataset/architectures.py`), AI Toolkit (`get_base_model_version`) and OneTrainer (`resources/sd_model_spec/*-lora.json`,
`lora_text_encoders` of `modules/model/`).
"""

import pytest
import torch

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import FAMILIES, ModelLayout, Part, layout_of
from sigmascope.lora.file import LoraFile, family_in
from sigmascope.lora.formats import format_named
from sigmascope.lora.module_names import parse_names

ARCHITECTURES = {
    "stable-diffusion-v1": "sd15",  # sd-scripts
    "stable-diffusion-v2-768-v": "sd2",
    "stable-diffusion-xl-v1-base": "sdxl",
    "stable-diffusion-3-5-large": "sd3",
    "flux-1-dev": "flux",
    "chroma": "chroma",
    "lumina-2": "lumina2",
    "hunyuan-image-2.1": None,
    "hunyuan-video": "hunyuan_video",  # musubi-tuner
    "hunyuan-video-1.5": "hunyuan_video15",
    "Kandinsky-5": "kandinsky5",
    "wan2.1": "wan",
    "framepack": "hunyuan_video",
    "Flux.1-dev": "flux",
    "Flux.2-dev": "flux2",
    "Flux.2-klein-4b": "flux2",
    "Qwen-Image-Edit-2511": "qwen_image",
    "Z-Image": "z_image",
    "HiDream-O1-Image": None,
    "Chroma1": "chroma",  # OneTrainer
    "Flux.2": "flux2",
    "Flux.3": "flux3",
    "Flux.1-fill-dev": "flux",
    "hidream-i1": "hidream",
    "stable-diffusion-v3-medium": "sd3",
    "stable-diffusion-v3.5": "sd3",
    "sana": "sana",
    "pixart-alpha": "pixart",
    "pixart-sigma": "pixart",
    "Anima": "cosmos",
}
BASE_VERSIONS = {
    "flux1": "flux",  # sd-scripts
    "chroma": "chroma",
    "lumina2": "lumina2",
    "sdxl_base_v1-0": "sdxl",
    "hunyuan_video": "hunyuan_video",  # musubi-tuner
    "hunyuan_video_1_5": "hunyuan_video15",
    "flux_kontext": "flux",
    "flux_2_dev": "flux2",
    "flux_2_klein_9b": "flux2",
    "qwen_image_edit": "qwen_image",
    "z_image": "z_image",
    "hidream_o1_image": None,
    "flux.1_kontext": "flux",  # AI Toolkit
    "flux2_klein_4b": "flux2",
    "hidream_i1": "hidream",
    "wan_2.2_14b": "wan",
    "zimage": "z_image",
    "ltx2": "ltx2",
    "anima": "cosmos",
    "zeta_chroma": None,
    "sd_1.5": "sd15",
    "sd_2.1": "sd2",
    "sdxl_1.0": "sdxl",
}


@pytest.mark.parametrize("value", ARCHITECTURES)
def test_an_architecture_is_told_in_any_spelling(value: str) -> None:
    assert family_in({"modelspec.architecture": f"{value}/lora"}) == ARCHITECTURES[value]


@pytest.mark.parametrize("value", BASE_VERSIONS)
def test_a_base_version_is_told_in_any_spelling(value: str) -> None:
    assert family_in({"ss_base_model_version": value}) == BASE_VERSIONS[value]


T5 = "encoder.block.0.layer.0.SelfAttention.q"
CLIP = "text_model.encoder.layers.0.self_attn.q_proj"
LLAMA = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("family", "name", "layer"),
    [
        ("flux", "lora_te1", f"text_encoder.{CLIP}"),
        ("flux", "lora_te3", f"text_encoder_2.{T5}"),  # sd-scripts
        ("flux", "lora_te2", f"text_encoder_2.{T5}"),  # OneTrainer
        ("sd3", "lora_te3", f"text_encoder_3.{T5}"),
        ("chroma", "lora_te1", f"text_encoder.{T5}"),
        ("chroma", "lora_te", f"text_encoder.{T5}"),
        ("chroma", "lora_te3", f"text_encoder.{T5}"),
        ("hunyuan_video", "lora_te2", f"text_encoder_2.{CLIP}"),
        ("hidream", "lora_te3", f"text_encoder_3.{T5}"),
        ("flux", "text_encoders.t5xxl.transformer", f"text_encoder_2.{T5}"),
        ("chroma", "text_encoders.t5xxl.transformer", f"text_encoder.{T5}"),
        ("hidream", "text_encoders.t5xxl.transformer", f"text_encoder_3.{T5}"),
        ("hunyuan_video", "text_encoders.clip_l.transformer", f"text_encoder_2.{CLIP}"),
        ("hunyuan_video", "text_encoders.llama.transformer", f"text_encoder.{LLAMA}"),
        ("hidream", "text_encoders.llama.transformer", f"text_encoder_4.{LLAMA}"),
        ("lumina2", "text_encoders.gemma2_2b.transformer", f"text_encoder.{LLAMA}"),
        ("z_image", "text_encoders.qwen3_4b.transformer", f"text_encoder.{LLAMA}"),
        ("flux2", "text_encoders.qwen3_8b.transformer", f"text_encoder.{LLAMA}"),
        ("flux2", "text_encoders.mistral3_24b.transformer", f"text_encoder.{LLAMA}"),
        ("cosmos", "text_encoders.qwen3_06b.transformer", f"text_encoder.{LLAMA}"),
        ("cosmos", "lora_te", "text_encoder.layers.6.mlp.gate_proj"),  # Anima, Comfy-Org/ComfyUI 13747
        ("lumina2", "lora_te", f"text_encoder.{LLAMA}"),
        ("qwen_image", "lora_te1", "text_encoder.model.language_model.layers.0.self_attn.o_proj"),
        ("kandinsky5", "text_encoders.clip_l.transformer", f"text_encoder_2.{CLIP}"),
        ("auraflow", "text_encoders.pile_t5xl.transformer", f"text_encoder.{T5}"),
        ("mochi", "text_encoders.t5xxl.transformer", f"text_encoder.{T5}"),
        ("krea2", "text_encoders.qwen3vl_4b.transformer", f"text_encoder.{LLAMA}"),
        ("ideogram4", "text_encoders.qwen3vl_8b.transformer", f"text_encoder.{LLAMA}"),
        ("ltx2", "text_encoders.gemma3_12b.transformer", f"text_encoder.{LLAMA}"),
    ],
)
def test_a_name_is_of_the_encoder_that_its_family_counts_it_as(family: str, name: str, layer: str) -> None:
    path = layer.partition(".")[2]
    module = f"{name}.{path}" if "." in name else f"{name}_{path.replace('.', '_')}"
    factors = LoraFactors(torch.zeros(4, 1), torch.zeros(1, 4), 1.0, (4, 4))
    lora = LoraFile({module: factors}, format="comfyui" if "." in name else "kohya")
    assert parse_names(lora, family).layers == {module: layer}


@pytest.mark.parametrize(
    ("family", "part", "comfyui", "kohya"),
    [
        ("hidream", "text_encoder_4", "text_encoders.llama.transformer", "lora_te4"),
        ("hunyuan_video", "text_encoder", "text_encoders.llama.transformer", "lora_te1"),
        ("hunyuan_video", "text_encoder_2", "text_encoders.clip_l.transformer", "lora_te2"),
        ("chroma", "text_encoder", "text_encoders.t5xxl.transformer", "lora_te1"),
        ("lumina2", "text_encoder", "text_encoders.gemma2_2b.transformer", "lora_te"),
        ("flux", "text_encoder_2", "text_encoders.t5xxl.transformer", "lora_te3"),
    ],
)
def test_an_encoder_is_named_as_its_hosts_name_it(family: str, part: Part, comfyui: str, kohya: str) -> None:
    layout = ModelLayout(family, "diffusers", {part: "encoder."})
    assert format_named("comfyui").name_for(f"encoder.{T5}", layout) == f"{comfyui}.{T5}"
    assert format_named("kohya").name_for(f"encoder.{T5}", layout) == f"{kohya}_{T5.replace('.', '_')}"


def test_a_checkpoint_says_which_of_its_family_s_encoders_it_has() -> None:
    """FLUX.2 [klein] has Qwen3 where [dev] has Mistral."""
    signature = FAMILIES["flux2"].signatures["original"].split()
    shapes = {f"model.diffusion_model.{key}": (36, 4) for key in signature}
    key = f"text_encoders.qwen3_8b.transformer.{LLAMA}"
    layout = layout_of(shapes | {f"{key}.weight": (4, 4)})
    assert layout.prefixes["text_encoder"] == "text_encoders.qwen3_8b.transformer."
    assert format_named("comfyui").name_for(key, layout) == key
