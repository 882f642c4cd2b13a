"""Cosmos Predict 1 and 2, and Anima, whose denoiser is Predict 2's; each has its own original names."""

from typing import Final

from sigmascope.lora.families.cross_attention import FEED_FORWARD
from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Ratio, Reads

_FIRST: Final = """
    blocks.block#.blocks.0.block.attn.to_q.0 = transformer_blocks.#.attn1.to_q
    blocks.block#.blocks.0.block.attn.to_k.0 = transformer_blocks.#.attn1.to_k
    blocks.block#.blocks.0.block.attn.to_v.0 = transformer_blocks.#.attn1.to_v
    blocks.block#.blocks.0.block.attn.to_out.0 = transformer_blocks.#.attn1.to_out.0
    blocks.block#.blocks.0.block.attn.to_q.1 = transformer_blocks.#.attn1.norm_q
    blocks.block#.blocks.0.block.attn.to_k.1 = transformer_blocks.#.attn1.norm_k
    blocks.block#.blocks.1.block.attn.to_q.0 = transformer_blocks.#.attn2.to_q
    blocks.block#.blocks.1.block.attn.to_k.0 = transformer_blocks.#.attn2.to_k
    blocks.block#.blocks.1.block.attn.to_v.0 = transformer_blocks.#.attn2.to_v
    blocks.block#.blocks.1.block.attn.to_out.0 = transformer_blocks.#.attn2.to_out.0
    blocks.block#.blocks.1.block.attn.to_q.1 = transformer_blocks.#.attn2.norm_q
    blocks.block#.blocks.1.block.attn.to_k.1 = transformer_blocks.#.attn2.norm_k
    blocks.block#.blocks.2.block.layer1 = transformer_blocks.#.ff.net.0.proj
    blocks.block#.blocks.2.block.layer2 = transformer_blocks.#.ff.net.2
    blocks.block#.blocks.0.adaLN_modulation.1 = transformer_blocks.#.norm1.linear_1
    blocks.block#.blocks.0.adaLN_modulation.2 = transformer_blocks.#.norm1.linear_2
    blocks.block#.blocks.1.adaLN_modulation.1 = transformer_blocks.#.norm2.linear_1
    blocks.block#.blocks.1.adaLN_modulation.2 = transformer_blocks.#.norm2.linear_2
    blocks.block#.blocks.2.adaLN_modulation.1 = transformer_blocks.#.norm3.linear_1
    blocks.block#.blocks.2.adaLN_modulation.2 = transformer_blocks.#.norm3.linear_2
    final_layer.adaLN_modulation.1 = norm_out.linear_1
    final_layer.adaLN_modulation.2 = norm_out.linear_2
    affline_norm = time_embed.norm
"""
_SECOND: Final = """
    blocks.#.self_attn.q_proj = transformer_blocks.#.attn1.to_q
    blocks.#.self_attn.k_proj = transformer_blocks.#.attn1.to_k
    blocks.#.self_attn.v_proj = transformer_blocks.#.attn1.to_v
    blocks.#.self_attn.output_proj = transformer_blocks.#.attn1.to_out.0
    blocks.#.self_attn.q_norm = transformer_blocks.#.attn1.norm_q
    blocks.#.self_attn.k_norm = transformer_blocks.#.attn1.norm_k
    blocks.#.cross_attn.q_proj = transformer_blocks.#.attn2.to_q
    blocks.#.cross_attn.k_proj = transformer_blocks.#.attn2.to_k
    blocks.#.cross_attn.v_proj = transformer_blocks.#.attn2.to_v
    blocks.#.cross_attn.output_proj = transformer_blocks.#.attn2.to_out.0
    blocks.#.cross_attn.q_norm = transformer_blocks.#.attn2.norm_q
    blocks.#.cross_attn.k_norm = transformer_blocks.#.attn2.norm_k
    blocks.#.mlp.layer1 = transformer_blocks.#.ff.net.0.proj
    blocks.#.mlp.layer2 = transformer_blocks.#.ff.net.2
    blocks.#.adaln_modulation_self_attn.1 = transformer_blocks.#.norm1.linear_1
    blocks.#.adaln_modulation_self_attn.2 = transformer_blocks.#.norm1.linear_2
    blocks.#.adaln_modulation_cross_attn.1 = transformer_blocks.#.norm2.linear_1
    blocks.#.adaln_modulation_cross_attn.2 = transformer_blocks.#.norm2.linear_2
    blocks.#.adaln_modulation_mlp.1 = transformer_blocks.#.norm3.linear_1
    blocks.#.adaln_modulation_mlp.2 = transformer_blocks.#.norm3.linear_2
    final_layer.adaln_modulation.1 = norm_out.linear_1
    final_layer.adaln_modulation.2 = norm_out.linear_2
    t_embedding_norm = time_embed.norm
"""
_READS_TEXT: Final = r"transformer_blocks\.\d+\.attn2\.to_[kv]|blocks\.\d+\.cross_attn\.[kv]_proj"
_TIMES: Final = (2, 4, 5)
"""How many times as wide as the text the blocks are: of the models with 2, 7 and 14 billion parameters."""

COSMOS: Final = Family(
    name="cosmos",
    title="Cosmos",
    architecture="cosmos-predict2",
    base_version="cosmos_predict2",
    also_called=("cosmos", "anima"),
    in_diffusers=InDiffusers(
        "CosmosTransformer3DModel",
        "CosmosLoraLoaderMixin",
        {"use_crossattn_projection": True, "img_context_dim_in": 24, "extra_pos_embed_type": None},
    ),
    signatures={
        "diffusers": "patch_embed.proj.weight time_embed.t_embedder.linear_1.weight transformer_blocks.0.norm1.linear_1.weight",
        "original": "x_embedder.proj.1.weight t_embedding_norm.weight blocks.0.self_attn.q_proj.weight",
    },
    ratios=(
        *FEED_FORWARD,
        Ratio(r"blocks\.\d+\.mlp\.layer1", 4, 1),
        Ratio(r"blocks\.\d+\.mlp\.layer2", 1, 4),
        *(Ratio(_READS_TEXT, times, 1) for times in _TIMES),
    ),
    most_blocks={"blocks": 36, "transformer_blocks": 36},
    widths=(2048, 4096, 5120),
    layers=_FIRST
    + _SECOND
    + """
        x_embedder.proj.1 = patch_embed.proj
        t_embedder.1.linear_1 = time_embed.t_embedder.linear_1
        t_embedder.1.linear_2 = time_embed.t_embedder.linear_2
        crossattn_proj.0
        img_context_proj.0
        final_layer.linear = proj_out
    """,
    variant=r"llm_adapter\..*|text_conditioner\..*|.*\.attn2\.[qkv]_img",
    blocks="""
        x_embedder = img_in
        patch_embed.proj = img_in
        llm_adapter = txt_in
        text_conditioner = txt_in
        crossattn_proj = txt_in
        img_context_proj = img_emb
        t_embedder = time_text_embed
        t_embedding_norm = time_text_embed
        affline_norm = time_text_embed
        time_embed.t_embedder = time_text_embed
        time_embed.norm = time_text_embed
        blocks.# = transformer_blocks
        transformer_blocks.#
        norm_out
        final_layer.adaLN = norm_out
        final_layer.adaln = norm_out
        proj_out
        final_layer.linear = proj_out
    """,
    around=r"\.blocks\.2\.block\.",
    encoders={"text_encoder": ("t5xxl", "qwen3_06b")},
    reads=(
        *COMFYUI_READS,
        Reads("diffusers", "transformer.", "diffusers", "A"),
        Reads("diffusers", "diffusion_model.", "original", known=False),
    ),
)
