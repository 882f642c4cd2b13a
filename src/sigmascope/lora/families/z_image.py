"""Z-Image. Lumina 2, which it descends from, shares most names; its blocks have another modulation."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Lost, Ratio, Reads

_LISTS: Final = ("noise_refiner", "context_refiner", "layers")
_BLOCK: Final = """
    LIST.#.attention.qkv = LIST.#.attention.to_q, LIST.#.attention.to_k, LIST.#.attention.to_v
    LIST.#.attention.out = LIST.#.attention.to_out.0
    LIST.#.attention.q_norm = LIST.#.attention.norm_q
    LIST.#.attention.k_norm = LIST.#.attention.norm_k
    LIST.#.feed_forward.w1
    LIST.#.feed_forward.w2
    LIST.#.feed_forward.w3
    LIST.#.attention_norm1
    LIST.#.attention_norm2
    LIST.#.ffn_norm1
    LIST.#.ffn_norm2
"""

_FUSED: Final = r".*\.attention\.qkv|x_embedder|final_layer\..*"
_FUSED_OR_OUT: Final = rf".*\.attention\.out|{_FUSED}"

Z_IMAGE: Final = Family(
    name="z_image",
    title="Z-Image",
    architecture="z-image",
    base_version="zimage",
    in_diffusers=InDiffusers("ZImageTransformer2DModel", "ZImageLoraLoaderMixin"),
    signatures={
        "diffusers": "all_x_embedder.2-1.weight cap_embedder.1.weight layers.0.attention.to_q.weight",
        "original": "x_embedder.weight cap_embedder.1.weight layers.0.attention.qkv.weight layers.0.adaLN_modulation.0.weight",
    },
    ratios=(
        Ratio(r"(?:layers|noise_refiner|context_refiner)\.\d+\.attention\.qkv", 3, 1),
    ),  # Lumina 2: 5 to 3
    widths=(3840,),
    layers="".join(_BLOCK.replace("LIST", name) for name in _LISTS)
    + """
    noise_refiner.#.adaLN_modulation.0
    layers.#.adaLN_modulation.0
    x_embedder = all_x_embedder.2-1
    cap_embedder.0
    cap_embedder.1
    t_embedder.mlp.0
    t_embedder.mlp.2
    final_layer.adaLN_modulation.1 = all_final_layer.2-1.adaLN_modulation.1
    final_layer.linear = all_final_layer.2-1.linear
    """,
    blocks="""
        img_in
        x_embedder = img_in
        all_x_embedder = img_in
        txt_in
        cap_embedder = txt_in
        t_embedder = time_text_embed
        noise_refiner.#
        context_refiner.#
        layers.#
        final_layer.adaLN = norm_out
        all_final_layer.2-1.adaLN = norm_out
        final_layer.linear = proj_out
        all_final_layer.2-1.linear = proj_out
    """,
    attention=r"(?:layers|refiner)\.\d+\.attention\.",
    around=r"\.feed_forward\.",
    encoders={"text_encoder": ("qwen3_4b",)},
    lost=(
        Lost("diffusers", "comfyui", _FUSED),
        Lost("diffusers", "comfyui", _FUSED_OR_OUT, down="lora_A"),
        Lost("diffusers", "kohya", r"x_embedder|final_layer_.*"),
    ),
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "diffusion_model.", "diffusers"),
        Reads("comfyui", "transformer.", "diffusers"),
        Reads("comfyui", "lycoris_", "diffusers"),
        Reads("comfyui", "", "diffusers"),
        Reads("diffusers", "lora_unet_", "original", "down down+alpha"),
        Reads("diffusers", "lora_unet_", "diffusers", "down down+alpha"),
        Reads(
            "diffusers",
            "diffusion_model.",
            "diffusers",
            "A A+alpha down down+alpha lokr lokr+alpha A.default A.default+alpha",
        ),
        Reads("diffusers", "diffusion_model.", "original", "A lokr lokr+alpha", leaves_out=_FUSED_OR_OUT),
        Reads("diffusers", "diffusion_model.", "original", "down down+alpha", leaves_out=_FUSED),
        Reads("diffusers", "diffusion_model.", "original", "A.default A.default+alpha", known=False),
        *(
            Reads("diffusers", start, naming, "lora.down lora.down+alpha", known=False)
            for start in ("diffusion_model.", "lora_unet_")
            for naming in ("diffusers", "original")
        ),
        Reads("diffusers", "transformer.", "diffusers", "A lora.down lokr"),
        Reads("diffusers", "transformer.", "original", "A lora.down lokr", leaves_out=_FUSED_OR_OUT),
        Reads("diffusers", "", "diffusers", "A+alpha down+alpha lokr+alpha A.default A.default+alpha"),
        Reads("diffusers", "", "original", "down+alpha", leaves_out=_FUSED),
        Reads("diffusers", "", "original", "lokr+alpha", leaves_out=_FUSED_OR_OUT),
        Reads("diffusers", "", "original", "A A+alpha A.default A.default+alpha lokr", known=False),
    ),
    in_comfyui_since="0.33",
)
