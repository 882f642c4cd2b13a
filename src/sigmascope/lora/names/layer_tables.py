"""Tables of layer names: the original model's on the left, diffusers' or transformers' on the right.

# is the number of a block. Several names on the right are rows of one fused matrix on the left, in that order.
`swapped`: the two halves of the rows lie the other way round, where the layer gives (shift, scale) only.
"""

from typing import Final

TABLES: Final[dict[str, str]] = {
    "flux": """
        double_blocks.#.img_attn.qkv = transformer_blocks.#.attn.to_q, transformer_blocks.#.attn.to_k, transformer_blocks.#.attn.to_v
        double_blocks.#.txt_attn.qkv = transformer_blocks.#.attn.add_q_proj, transformer_blocks.#.attn.add_k_proj, transformer_blocks.#.attn.add_v_proj
        double_blocks.#.img_attn.proj = transformer_blocks.#.attn.to_out.0
        double_blocks.#.txt_attn.proj = transformer_blocks.#.attn.to_add_out
        double_blocks.#.img_mlp.0 = transformer_blocks.#.ff.net.0.proj
        double_blocks.#.img_mlp.2 = transformer_blocks.#.ff.net.2
        double_blocks.#.txt_mlp.0 = transformer_blocks.#.ff_context.net.0.proj
        double_blocks.#.txt_mlp.2 = transformer_blocks.#.ff_context.net.2
        double_blocks.#.img_mod.lin = transformer_blocks.#.norm1.linear
        double_blocks.#.txt_mod.lin = transformer_blocks.#.norm1_context.linear
        single_blocks.#.linear1 = single_transformer_blocks.#.attn.to_q, single_transformer_blocks.#.attn.to_k, single_transformer_blocks.#.attn.to_v, single_transformer_blocks.#.proj_mlp
        single_blocks.#.linear2 = single_transformer_blocks.#.proj_out
        single_blocks.#.modulation.lin = single_transformer_blocks.#.norm.linear
        img_in = x_embedder
        txt_in = context_embedder
        time_in.in_layer = time_text_embed.timestep_embedder.linear_1
        time_in.out_layer = time_text_embed.timestep_embedder.linear_2
        vector_in.in_layer = time_text_embed.text_embedder.linear_1
        vector_in.out_layer = time_text_embed.text_embedder.linear_2
        guidance_in.in_layer = time_text_embed.guidance_embedder.linear_1
        guidance_in.out_layer = time_text_embed.guidance_embedder.linear_2
        final_layer.adaLN_modulation.1 = norm_out.linear swapped
        final_layer.linear = proj_out
    """,
    "sd3": """
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
        context_embedder = context_embedder
        x_embedder.proj = pos_embed.proj
        t_embedder.mlp.0 = time_text_embed.timestep_embedder.linear_1
        t_embedder.mlp.2 = time_text_embed.timestep_embedder.linear_2
        y_embedder.mlp.0 = time_text_embed.text_embedder.linear_1
        y_embedder.mlp.2 = time_text_embed.text_embedder.linear_2
        final_layer.adaLN_modulation.1 = norm_out.linear swapped
        final_layer.linear = proj_out
    """,
    "wan": """
        blocks.#.self_attn.q = blocks.#.attn1.to_q
        blocks.#.self_attn.k = blocks.#.attn1.to_k
        blocks.#.self_attn.v = blocks.#.attn1.to_v
        blocks.#.self_attn.o = blocks.#.attn1.to_out.0
        blocks.#.self_attn.norm_q = blocks.#.attn1.norm_q
        blocks.#.self_attn.norm_k = blocks.#.attn1.norm_k
        blocks.#.cross_attn.q = blocks.#.attn2.to_q
        blocks.#.cross_attn.k = blocks.#.attn2.to_k
        blocks.#.cross_attn.v = blocks.#.attn2.to_v
        blocks.#.cross_attn.o = blocks.#.attn2.to_out.0
        blocks.#.cross_attn.k_img = blocks.#.attn2.add_k_proj
        blocks.#.cross_attn.v_img = blocks.#.attn2.add_v_proj
        blocks.#.cross_attn.norm_q = blocks.#.attn2.norm_q
        blocks.#.cross_attn.norm_k = blocks.#.attn2.norm_k
        blocks.#.cross_attn.norm_k_img = blocks.#.attn2.norm_added_k
        blocks.#.norm3 = blocks.#.norm2
        blocks.#.ffn.0 = blocks.#.ffn.net.0.proj
        blocks.#.ffn.2 = blocks.#.ffn.net.2
        blocks.#.modulation = blocks.#.scale_shift_table
        patch_embedding = patch_embedding
        text_embedding.0 = condition_embedder.text_embedder.linear_1
        text_embedding.2 = condition_embedder.text_embedder.linear_2
        time_embedding.0 = condition_embedder.time_embedder.linear_1
        time_embedding.2 = condition_embedder.time_embedder.linear_2
        time_projection.1 = condition_embedder.time_proj
        img_emb.proj.0 = condition_embedder.image_embedder.norm1
        img_emb.proj.1 = condition_embedder.image_embedder.ff.net.0.proj
        img_emb.proj.3 = condition_embedder.image_embedder.ff.net.2
        img_emb.proj.4 = condition_embedder.image_embedder.norm2
        head.head = proj_out
        head.modulation = scale_shift_table
    """,
    "qwen_image": """
        transformer_blocks.#.attn.to_q = transformer_blocks.#.attn.to_q
        transformer_blocks.#.attn.to_k = transformer_blocks.#.attn.to_k
        transformer_blocks.#.attn.to_v = transformer_blocks.#.attn.to_v
        transformer_blocks.#.attn.add_q_proj = transformer_blocks.#.attn.add_q_proj
        transformer_blocks.#.attn.add_k_proj = transformer_blocks.#.attn.add_k_proj
        transformer_blocks.#.attn.add_v_proj = transformer_blocks.#.attn.add_v_proj
        transformer_blocks.#.attn.to_out.0 = transformer_blocks.#.attn.to_out.0
        transformer_blocks.#.attn.to_add_out = transformer_blocks.#.attn.to_add_out
        transformer_blocks.#.img_mlp.net.0.proj = transformer_blocks.#.img_mlp.net.0.proj
        transformer_blocks.#.img_mlp.net.2 = transformer_blocks.#.img_mlp.net.2
        transformer_blocks.#.txt_mlp.net.0.proj = transformer_blocks.#.txt_mlp.net.0.proj
        transformer_blocks.#.txt_mlp.net.2 = transformer_blocks.#.txt_mlp.net.2
        transformer_blocks.#.img_mod.1 = transformer_blocks.#.img_mod.1
        transformer_blocks.#.txt_mod.1 = transformer_blocks.#.txt_mod.1
        img_in = img_in
        txt_in = txt_in
        time_text_embed.timestep_embedder.linear_1 = time_text_embed.timestep_embedder.linear_1
        time_text_embed.timestep_embedder.linear_2 = time_text_embed.timestep_embedder.linear_2
        norm_out.linear = norm_out.linear
        proj_out = proj_out
    """,
    "open_clip": """
        transformer.resblocks.#.attn.in_proj_weight = encoder.layers.#.self_attn.q_proj, encoder.layers.#.self_attn.k_proj, encoder.layers.#.self_attn.v_proj
        transformer.resblocks.#.attn.out_proj = encoder.layers.#.self_attn.out_proj
        transformer.resblocks.#.mlp.c_fc = encoder.layers.#.mlp.fc1
        transformer.resblocks.#.mlp.c_proj = encoder.layers.#.mlp.fc2
        transformer.resblocks.#.ln_1 = encoder.layers.#.layer_norm1
        transformer.resblocks.#.ln_2 = encoder.layers.#.layer_norm2
        token_embedding = embeddings.token_embedding
        ln_final = final_layer_norm
    """,
    "t5": """
        encoder.block.#.layer.0.SelfAttention.q = encoder.block.#.layer.0.SelfAttention.q
        encoder.block.#.layer.0.SelfAttention.k = encoder.block.#.layer.0.SelfAttention.k
        encoder.block.#.layer.0.SelfAttention.v = encoder.block.#.layer.0.SelfAttention.v
        encoder.block.#.layer.0.SelfAttention.o = encoder.block.#.layer.0.SelfAttention.o
        encoder.block.#.layer.1.DenseReluDense.wi = encoder.block.#.layer.1.DenseReluDense.wi
        encoder.block.#.layer.1.DenseReluDense.wi_0 = encoder.block.#.layer.1.DenseReluDense.wi_0
        encoder.block.#.layer.1.DenseReluDense.wi_1 = encoder.block.#.layer.1.DenseReluDense.wi_1
        encoder.block.#.layer.1.DenseReluDense.wo = encoder.block.#.layer.1.DenseReluDense.wo
    """,
}
