"""HiDream-I1. Original files and diffusers use the same names."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Reads

_OF_PICTURE: Final = """
    LIST.#.block.attn1.to_q
    LIST.#.block.attn1.to_k
    LIST.#.block.attn1.to_v
    LIST.#.block.attn1.to_out
    LIST.#.block.ff_i.shared_experts.w1
    LIST.#.block.ff_i.shared_experts.w2
    LIST.#.block.ff_i.shared_experts.w3
    LIST.#.block.ff_i.experts.0.w1
    LIST.#.block.ff_i.experts.0.w2
    LIST.#.block.ff_i.experts.0.w3
    LIST.#.block.ff_i.experts.1.w1
    LIST.#.block.ff_i.experts.1.w2
    LIST.#.block.ff_i.experts.1.w3
    LIST.#.block.ff_i.experts.2.w1
    LIST.#.block.ff_i.experts.2.w2
    LIST.#.block.ff_i.experts.2.w3
    LIST.#.block.ff_i.experts.3.w1
    LIST.#.block.ff_i.experts.3.w2
    LIST.#.block.ff_i.experts.3.w3
    LIST.#.block.adaLN_modulation.1
"""
_OF_TEXT: Final = """
    double_stream_blocks.#.block.attn1.to_q_t
    double_stream_blocks.#.block.attn1.to_k_t
    double_stream_blocks.#.block.attn1.to_v_t
    double_stream_blocks.#.block.attn1.to_out_t
    double_stream_blocks.#.block.ff_t.w1
    double_stream_blocks.#.block.ff_t.w2
    double_stream_blocks.#.block.ff_t.w3
"""
_CAPTION_MATRICES: Final = 49
"""Matrices of `caption_projection`: one for each of the 48 blocks, which read a layer of Llama each, and one for T5."""
HIDREAM: Final = Family(
    name="hidream",
    title="HiDream",
    architecture="hidream-i1",
    base_version="hidream_i1",
    in_diffusers=InDiffusers(
        "HiDreamImageTransformer2DModel",
        "HiDreamImageLoraLoaderMixin",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 128,
            "num_attention_heads": 20,
            "caption_channels": (4096, 4096),
            "num_routed_experts": 4,
            "num_activated_experts": 2,
            "llama_layers": (0, 1),
        },
    ),
    signatures={
        "diffusers": "x_embedder.proj.weight caption_projection.0.linear.weight double_stream_blocks.0.block.attn1.to_q.weight"
    },
    widths=(2560,),
    layers="".join(
        _OF_PICTURE.replace("LIST", name) for name in ("double_stream_blocks", "single_stream_blocks")
    )
    + _OF_TEXT
    + "".join(f"caption_projection.{number}.linear\n" for number in range(_CAPTION_MATRICES))
    + """
        x_embedder.proj
        t_embedder.timestep_embedder.linear_1
        t_embedder.timestep_embedder.linear_2
        p_embedder.pooled_embedder.linear_1
        p_embedder.pooled_embedder.linear_2
        final_layer.linear
        final_layer.adaLN_modulation.1
    """,
    blocks="""
        x_embedder = img_in
        caption_projection = txt_in
        t_embedder = time_text_embed
        p_embedder = time_text_embed
        double_stream_blocks.#
        single_stream_blocks.#
        final_layer.adaLN = norm_out
        final_layer.linear = proj_out
    """,
    encoders={
        "text_encoder": ("clip_l",),
        "text_encoder_2": ("clip_g",),
        "text_encoder_3": ("t5xxl",),
        "text_encoder_4": ("llama",),
    },
    kohya_naming="diffusers",
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "transformer.", "diffusers"),
        Reads("comfyui", "lycoris_", "diffusers"),
        Reads("diffusers", "diffusion_model.", "diffusers", "A"),
        Reads("diffusers", "transformer.", "diffusers", "A lora.down"),
    ),
)
