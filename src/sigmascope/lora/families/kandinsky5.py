"""Kandinsky 5. Original files and diffusers use the same names."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Ratio, Reads

_ATTENTION: Final = """
    LIST.#.NAME.to_query
    LIST.#.NAME.to_key
    LIST.#.NAME.to_value
    LIST.#.NAME.query_norm
    LIST.#.NAME.key_norm
    LIST.#.NAME.out_layer
"""
_FEED_FORWARD: Final = """
    LIST.#.feed_forward.in_layer
    LIST.#.feed_forward.out_layer
"""
_TEXT: Final = (_ATTENTION.replace("NAME", "self_attention") + _FEED_FORWARD).replace(
    "LIST", "text_transformer_blocks"
)
_VISUAL: Final = (
    _ATTENTION.replace("NAME", "self_attention")
    + _ATTENTION.replace("NAME", "cross_attention")
    + _FEED_FORWARD
).replace("LIST", "visual_transformer_blocks")

KANDINSKY5: Final = Family(
    name="kandinsky5",
    title="Kandinsky 5",
    architecture="Kandinsky-5",
    base_version="kandinsky5",
    in_diffusers=InDiffusers("Kandinsky5Transformer3DModel", "KandinskyLoraLoaderMixin"),
    signatures={
        "diffusers": "visual_embeddings.in_layer.weight text_embeddings.in_layer.weight visual_transformer_blocks.0.cross_attention.to_query.weight"
    },
    ratios=(Ratio(r"(?:text|visual)_transformer_blocks\.\d+\.(?:self|cross)_attention\.\w+", 1, 1),),
    widths=(1792, 2048, 2560, 4096),
    layers=_TEXT
    + _VISUAL
    + """
        text_transformer_blocks.#.text_modulation.out_layer
        visual_transformer_blocks.#.visual_modulation.out_layer
        visual_embeddings.in_layer
        text_embeddings.in_layer
        text_embeddings.norm
        pooled_text_embeddings.in_layer
        pooled_text_embeddings.norm
        time_embeddings.in_layer
        time_embeddings.out_layer
        out_layer.modulation.out_layer
        out_layer.out_layer
    """,
    blocks="""
        visual_embeddings = img_in
        text_embeddings = txt_in
        pooled_text_embeddings = time_text_embed
        time_embeddings = time_text_embed
        text_transformer_blocks.#
        visual_transformer_blocks.#
        out_layer.modulation = norm_out
        out_layer.out_layer = proj_out
    """,
    attention=r"transformer_blocks\.\d+\.(?:self|cross)_attention\.",
    around=r"\.feed_forward\.",
    encoders={"text_encoder": ("qwen25_7b",), "text_encoder_2": ("clip_l",)},
    kohya_naming="diffusers",
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "", "diffusers"),
        Reads("comfyui", "transformer.", "diffusers"),
        Reads("diffusers", "transformer.", "diffusers", "A"),
    ),
    in_comfyui_since="0.33",
)
