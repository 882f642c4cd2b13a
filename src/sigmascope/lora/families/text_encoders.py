"""Layers of text encoders that single files and transformers name differently or fuse; as in `Family.layers`."""

from typing import Final

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
ENCODERS: Final[dict[str, tuple[Row, ...]]] = {"open_clip": parsed_rows(OPEN_CLIP), "t5": parsed_rows(T5)}
