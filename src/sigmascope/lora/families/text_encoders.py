"""Text encoders: layers that single files and transformers name differently or fuse, and the names that hosts read.

Layers are written as in `Family.layers`.
"""

from typing import Final, Literal, NamedTuple

from sigmascope.lora.families.family import Row, parsed_rows

OPEN_CLIP: Final = """
        transformer.resblocks.#.attn.in_proj_weight = encoder.layers.#.self_attn.q_proj, encoder.layers.#.self_attn.k_proj, encoder.layers.#.self_attn.v_proj
        transformer.resblocks.#.attn.out_proj = encoder.layers.#.self_attn.out_proj
        transformer.resblocks.#.mlp.c_fc = encoder.layers.#.mlp.fc1
        transformer.resblocks.#.mlp.c_proj = encoder.layers.#.mlp.fc2
        transformer.resblocks.#.ln_1 = encoder.layers.#.layer_norm1
        transformer.resblocks.#.ln_2 = encoder.layers.#.layer_norm2
        token_embedding = embeddings.token_embedding
        ln_final = final_layer_norm
"""
T5: Final = """
        encoder.block.#.layer.0.SelfAttention.q
        encoder.block.#.layer.0.SelfAttention.k
        encoder.block.#.layer.0.SelfAttention.v
        encoder.block.#.layer.0.SelfAttention.o
        encoder.block.#.layer.1.DenseReluDense.wi
        encoder.block.#.layer.1.DenseReluDense.wi_0
        encoder.block.#.layer.1.DenseReluDense.wi_1
        encoder.block.#.layer.1.DenseReluDense.wo
"""
LLAMA: Final = "".join(
    f"{start}layers.#.{layer}\n"
    for start in ("", "model.", "model.language_model.")
    for layer in (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
)
"""Llama, Qwen, Gemma and Mistral, with what stands before their layers in the models that hold them."""
ENCODERS: Final[dict[str, tuple[Row, ...]]] = {
    "open_clip": parsed_rows(OPEN_CLIP),
    "t5": parsed_rows(T5),
    "llama": parsed_rows(LLAMA),
}


class EncoderReads(NamedTuple):
    """Names of text encoders' modules that a host's loader reads.

    Attributes:
        host: As in `Reads.host`.
        families: The model families whose files are concerned, separated by spaces.
        starts: What names begin with, separated by spaces; `{}` is ComfyUI's name of the encoder.
        encoders: ComfyUI's names of the encoders, separated by spaces.
        layers: A regular expression for the paths, with underscores for dots.
        endings: As in `Reads.endings`.
    """

    host: Literal["diffusers", "comfyui"]
    families: str
    starts: str
    encoders: str
    layers: str = ".*"
    endings: str = ""


_CLIP: Final = r"text_model_encoder_layers_\d+_(?:self_attn_(?:q|k|v|out)_proj|mlp_fc[12])"
_LAYERS: Final = rf"{_CLIP}|{_CLIP.removeprefix('text_model_')}"
_WITH_PROJECTION: Final = f"{_LAYERS}|text_projection"
_T5: Final = r"encoder_block_\d+_layer_\d_(?:SelfAttention|DenseReluDense)_\w+"
_WITH_CLIP: Final = "sd15 sd2 sdxl sd3 flux hidream hunyuan_video"
ENCODER_READS: Final = (
    EncoderReads(
        "comfyui",
        f"{_WITH_CLIP} chroma ltx_video",
        "text_encoders.{}.transformer.",
        "clip_l clip_g clip_h t5xxl",
    ),
    EncoderReads("comfyui", _WITH_CLIP, "lora_te_ lora_te1_ text_encoder.", "clip_l clip_h", _CLIP),
    EncoderReads("comfyui", "sdxl sd3 hidream", "lora_te2_ text_encoder_2.", "clip_g", _CLIP),
    EncoderReads("comfyui", "sdxl sd3 hidream", "lora_te1_", "clip_l", "text_projection"),
    EncoderReads("comfyui", "sdxl sd3 hidream", "lora_te2_", "clip_g", "text_projection"),
    EncoderReads("comfyui", "flux sd3 hidream", "lora_te3_", "t5xxl", _T5),
    EncoderReads("comfyui", "flux", "lora_te2_", "t5xxl", _T5),
    EncoderReads("comfyui", "chroma ltx_video", "lora_te1_", "t5xxl", _T5),
    *(
        EncoderReads("diffusers", families, starts, encoders, layers, endings)
        for families, starts, encoders, layers, endings in (
            ("sd15 sd2 sdxl flux", "lora_te_ lora_te1_", "clip_l clip_h", _LAYERS, "down down+alpha"),
            ("sdxl", "lora_te2_", "clip_g", _WITH_PROJECTION, "down down+alpha"),
            ("flux", "text_encoders.{}.transformer.", "clip_l", _LAYERS, "down down+alpha"),
            ("flux", "text_encoder.", "clip_l", _LAYERS, "A A+alpha"),
            ("sd15 sd2 sdxl", "text_encoder.", "clip_l clip_h", _LAYERS, "A"),
            ("sd3", "text_encoder.", "clip_l", _WITH_PROJECTION, "A"),
            ("sdxl sd3", "text_encoder_2.", "clip_g", _WITH_PROJECTION, "A"),
        )
    ),
)
"""As measured of the hosts' loaders; other encoders than those of these rows' `encoders` were not."""


class InTransformers(NamedTuple):
    """A text encoder's class in transformers.

    Attributes:
        model: Its name.
        config: Its configuration's.
        layers: How many it has in diffusers' pipelines.
    """

    model: str
    config: str
    layers: int


_WITHOUT_PROJECTION: Final = {
    "clip_l": InTransformers("CLIPTextModel", "CLIPTextConfig", 12),
    "clip_h": InTransformers("CLIPTextModel", "CLIPTextConfig", 23),
}
_PROJECTED: Final = {
    "clip_l": InTransformers("CLIPTextModelWithProjection", "CLIPTextConfig", 12),
    "clip_g": InTransformers("CLIPTextModelWithProjection", "CLIPTextConfig", 32),
}


def in_transformers(encoder: str, family: str) -> InTransformers | None:
    """The class that a family's pipelines in diffusers have for a text encoder; None where no loader puts a LoRA on it.

    Args:
        encoder: ComfyUI's name.
        family: The model family.
    """
    if family == "sd3":
        return _PROJECTED.get(encoder)
    return _WITHOUT_PROJECTION.get(encoder) or _PROJECTED.get(encoder)
