"""Stable Diffusion 3 and 3.5."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Lost, Ratio, Reads

SD3: Final = Family(
    name="sd3",
    title="Stable Diffusion 3",
    architecture="stable-diffusion-3",
    base_version="sd3",
    also_called=("stable-diffusion-v3",),  # OneTrainer
    in_diffusers=InDiffusers(
        "SD3Transformer2DModel", "SD3LoraLoaderMixin", {"dual_attention_layers": (0,), "qk_norm": "rms_norm"}
    ),
    signatures={
        "diffusers": "pos_embed.proj.weight context_embedder.weight transformer_blocks.0.norm1_context.linear.weight",
        "original": "x_embedder.proj.weight context_embedder.weight joint_blocks.0.x_block.attn.qkv.weight",
    },
    ratios=(
        Ratio(r"transformer_blocks\.\d+\.ff(?:_context)?\.net\.0\.proj", 4, 1),
        Ratio(r"transformer_blocks\.\d+\.ff(?:_context)?\.net\.2", 1, 4),
        Ratio(r"joint_blocks\.\d+\.(?:x|context)_block\.mlp\.fc1", 4, 1),
        Ratio(r"joint_blocks\.\d+\.(?:x|context)_block\.mlp\.fc2", 1, 4),
    ),
    widths=(1536, 2432),
    layers="""
        joint_blocks.#.x_block.attn.qkv = transformer_blocks.#.attn.to_q, transformer_blocks.#.attn.to_k, transformer_blocks.#.attn.to_v
        joint_blocks.#.x_block.attn2.qkv = transformer_blocks.#.attn2.to_q, transformer_blocks.#.attn2.to_k, transformer_blocks.#.attn2.to_v
        joint_blocks.#.context_block.attn.qkv = transformer_blocks.#.attn.add_q_proj, transformer_blocks.#.attn.add_k_proj, transformer_blocks.#.attn.add_v_proj
        joint_blocks.#.x_block.attn.proj = transformer_blocks.#.attn.to_out.0
        joint_blocks.#.x_block.attn2.proj = transformer_blocks.#.attn2.to_out.0
        joint_blocks.#.context_block.attn.proj = transformer_blocks.#.attn.to_add_out
        joint_blocks.#.x_block.mlp.fc1 = transformer_blocks.#.ff.net.0.proj
        joint_blocks.#.x_block.mlp.fc2 = transformer_blocks.#.ff.net.2
        joint_blocks.#.context_block.mlp.fc1 = transformer_blocks.#.ff_context.net.0.proj
        joint_blocks.#.context_block.mlp.fc2 = transformer_blocks.#.ff_context.net.2
        joint_blocks.#.x_block.adaLN_modulation.1 = transformer_blocks.#.norm1.linear
        joint_blocks.#.context_block.adaLN_modulation.1 = transformer_blocks.#.norm1_context.linear swapped
        context_embedder
        x_embedder.proj = pos_embed.proj
        t_embedder.mlp.0 = time_text_embed.timestep_embedder.linear_1
        t_embedder.mlp.2 = time_text_embed.timestep_embedder.linear_2
        y_embedder.mlp.0 = time_text_embed.text_embedder.linear_1
        y_embedder.mlp.2 = time_text_embed.text_embedder.linear_2
        final_layer.adaLN_modulation.1 = norm_out.linear swapped
        final_layer.linear = proj_out
    """,
    vectors="""
        joint_blocks.#.x_block.attn.ln_q = transformer_blocks.#.attn.norm_q
        joint_blocks.#.x_block.attn.ln_k = transformer_blocks.#.attn.norm_k
        joint_blocks.#.context_block.attn.ln_q = transformer_blocks.#.attn.norm_added_q
        joint_blocks.#.context_block.attn.ln_k = transformer_blocks.#.attn.norm_added_k
        joint_blocks.#.x_block.attn2.ln_q = transformer_blocks.#.attn2.norm_q
        joint_blocks.#.x_block.attn2.ln_k = transformer_blocks.#.attn2.norm_k
        pos_embed = pos_embed.pos_embed
    """,
    sometimes=r".*\.attn2\..*",
    blocks="""
        x_embedder = img_in
        pos_embed = img_in
        context_embedder = txt_in
        time_text_embed
        t_embedder = time_text_embed
        y_embedder = time_text_embed
        joint_blocks.# = transformer_blocks
        transformer_blocks.#
        norm_out
        final_layer.adaLN = norm_out
        proj_out
        final_layer.linear = proj_out
    """,
    encoders={"text_encoder": ("clip_l",), "text_encoder_2": ("clip_g",), "text_encoder_3": ("t5xxl",)},
    lost=(Lost("diffusers", "comfyui", or_refused=True), Lost("diffusers", "kohya")),
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "transformer.", "diffusers"),
        Reads("comfyui", "base_model.model.", "diffusers"),
        Reads("comfyui", "lora_transformer_", "diffusers"),
        Reads("comfyui", "lycoris_", "diffusers"),
        Reads("diffusers", "transformer.", "diffusers", "A lora.down"),
    ),
)
