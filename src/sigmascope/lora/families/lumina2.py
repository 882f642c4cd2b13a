"""Lumina 2: grouped attention, whose queries are as wide as the model and whose keys and values are narrower."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, KOHYA_ENCODERS, Family, InDiffusers, Reads

_LISTS: Final = ("noise_refiner", "context_refiner", "layers")
_BLOCK: Final = """
    LIST.#.attention.qkv = LIST.#.attn.to_q, LIST.#.attn.to_k, LIST.#.attn.to_v grouped
    LIST.#.attention.out = LIST.#.attn.to_out.0
    LIST.#.attention.q_norm = LIST.#.attn.norm_q
    LIST.#.attention.k_norm = LIST.#.attn.norm_k
    LIST.#.feed_forward.w1 = LIST.#.feed_forward.linear_1
    LIST.#.feed_forward.w2 = LIST.#.feed_forward.linear_2
    LIST.#.feed_forward.w3 = LIST.#.feed_forward.linear_3
"""
_MODULATION: Final = """
    noise_refiner.#.adaLN_modulation.1 = noise_refiner.#.norm1.linear
    layers.#.adaLN_modulation.1 = layers.#.norm1.linear
"""
LUMINA2: Final = Family(
    name="lumina2",
    title="Lumina 2",
    architecture="lumina-2",
    base_version="lumina2",
    in_diffusers=InDiffusers("Lumina2Transformer2DModel", "Lumina2LoraLoaderMixin"),
    signatures={
        "diffusers": "x_embedder.weight time_caption_embed.caption_embedder.1.weight layers.0.attn.to_q.weight",
        "original": "x_embedder.weight cap_embedder.1.weight layers.0.attention.qkv.weight layers.0.adaLN_modulation.1.weight",
    },
    widths=(2304,),
    else_="z_image",
    layers="".join(_BLOCK.replace("LIST", name) for name in _LISTS)
    + _MODULATION
    + """
    x_embedder
    cap_embedder.0 = time_caption_embed.caption_embedder.0
    cap_embedder.1 = time_caption_embed.caption_embedder.1
    t_embedder.mlp.0 = time_caption_embed.timestep_embedder.linear_1
    t_embedder.mlp.2 = time_caption_embed.timestep_embedder.linear_2
    final_layer.adaLN_modulation.1 = norm_out.linear_1
    final_layer.linear = norm_out.linear_2
    """,
    vectors="""
        noise_refiner.#.attention_norm1 = noise_refiner.#.norm1.norm
        noise_refiner.#.attention_norm2 = noise_refiner.#.norm2
        context_refiner.#.attention_norm1 = context_refiner.#.norm1
        context_refiner.#.attention_norm2 = context_refiner.#.norm2
        layers.#.attention_norm1 = layers.#.norm1.norm
        layers.#.attention_norm2 = layers.#.norm2
    """,
    blocks="""
        x_embedder = img_in
        cap_embedder = txt_in
        time_caption_embed.caption_embedder = txt_in
        t_embedder = time_text_embed
        time_caption_embed.timestep_embedder = time_text_embed
        noise_refiner.#
        context_refiner.#
        layers.#
        norm_out
        final_layer.linear = proj_out
    """,
    attention=r"(?:layers|refiner)\.\d+\.attention\.",
    around=r"\.feed_forward\.",
    kohya_encoders={**KOHYA_ENCODERS, "text_encoder": "lora_te_"},
    encoders={"text_encoder": ("gemma2_2b",)},
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "", "original", known=False),
        Reads("comfyui", "", "diffusers", known=False),
        Reads("comfyui", "transformer.", "original", known=False),
        Reads("comfyui", "transformer.", "diffusers", known=False),
        Reads("comfyui", "lycoris_", "original", known=False),
        Reads("comfyui", "lycoris_", "diffusers", known=False),
        Reads("diffusers", "transformer.", "diffusers", "A lora.down"),
        Reads("diffusers", "diffusion_model.", "original", known=False),
    ),
)
