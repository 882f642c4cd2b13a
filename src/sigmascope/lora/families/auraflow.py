"""AuraFlow. Original files call the text's layers `w1`, the picture's `w2`; single blocks have `w1` alone."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Reads

AURAFLOW: Final = Family(
    name="auraflow",
    title="AuraFlow",
    architecture="auraflow",
    base_version="auraflow",
    also_called=("aura-flow", "pony-v7"),
    in_diffusers=InDiffusers("AuraFlowTransformer2DModel", "AuraFlowLoraLoaderMixin"),
    signatures={
        "diffusers": "pos_embed.proj.weight context_embedder.weight joint_transformer_blocks.0.attn.to_q.weight",
        "original": "init_x_linear.weight cond_seq_linear.weight double_layers.0.attn.w1q.weight",
    },
    most_blocks={
        "double_layers": 4,
        "single_layers": 32,
        "joint_transformer_blocks": 4,
        "single_transformer_blocks": 32,
    },
    widths=(3072,),
    else_="flux",
    layers="""
        double_layers.#.attn.w2q = joint_transformer_blocks.#.attn.to_q
        double_layers.#.attn.w2k = joint_transformer_blocks.#.attn.to_k
        double_layers.#.attn.w2v = joint_transformer_blocks.#.attn.to_v
        double_layers.#.attn.w2o = joint_transformer_blocks.#.attn.to_out.0
        double_layers.#.attn.w1q = joint_transformer_blocks.#.attn.add_q_proj
        double_layers.#.attn.w1k = joint_transformer_blocks.#.attn.add_k_proj
        double_layers.#.attn.w1v = joint_transformer_blocks.#.attn.add_v_proj
        double_layers.#.attn.w1o = joint_transformer_blocks.#.attn.to_add_out
        double_layers.#.mlpX.c_fc1 = joint_transformer_blocks.#.ff.linear_1
        double_layers.#.mlpX.c_fc2 = joint_transformer_blocks.#.ff.linear_2
        double_layers.#.mlpX.c_proj = joint_transformer_blocks.#.ff.out_projection
        double_layers.#.mlpC.c_fc1 = joint_transformer_blocks.#.ff_context.linear_1
        double_layers.#.mlpC.c_fc2 = joint_transformer_blocks.#.ff_context.linear_2
        double_layers.#.mlpC.c_proj = joint_transformer_blocks.#.ff_context.out_projection
        double_layers.#.modX.1 = joint_transformer_blocks.#.norm1.linear
        double_layers.#.modC.1 = joint_transformer_blocks.#.norm1_context.linear
        single_layers.#.attn.w1q = single_transformer_blocks.#.attn.to_q
        single_layers.#.attn.w1k = single_transformer_blocks.#.attn.to_k
        single_layers.#.attn.w1v = single_transformer_blocks.#.attn.to_v
        single_layers.#.attn.w1o = single_transformer_blocks.#.attn.to_out.0
        single_layers.#.mlp.c_fc1 = single_transformer_blocks.#.ff.linear_1
        single_layers.#.mlp.c_fc2 = single_transformer_blocks.#.ff.linear_2
        single_layers.#.mlp.c_proj = single_transformer_blocks.#.ff.out_projection
        single_layers.#.modCX.1 = single_transformer_blocks.#.norm1.linear
        init_x_linear = pos_embed.proj
        positional_encoding = pos_embed.pos_embed
        cond_seq_linear = context_embedder
        register_tokens
        t_embedder.mlp.0 = time_step_proj.linear_1
        t_embedder.mlp.2 = time_step_proj.linear_2
        modF.1 = norm_out.linear swapped
        final_linear = proj_out
    """,
    blocks="""
        init_x_linear = img_in
        pos_embed = img_in
        positional_encoding = img_in
        cond_seq_linear = txt_in
        context_embedder = txt_in
        register_tokens = txt_in
        t_embedder = time_text_embed
        time_step_proj = time_text_embed
        double_layers.# = joint_transformer_blocks
        joint_transformer_blocks.#
        single_layers.# = single_transformer_blocks
        single_transformer_blocks.#
        norm_out
        modF = norm_out
        proj_out
        final_linear = proj_out
    """,
    around=r"\.mlp[XC]\.",
    encoders={"text_encoder": ("pile_t5xl",)},
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "transformer.", "diffusers"),
        Reads("diffusers", "transformer.", "diffusers", "A"),
    ),
)
