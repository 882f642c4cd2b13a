"""What video and image transformers share whose blocks have attention to themselves (`attn1`) and to the text (`attn2`)."""

from typing import Final

from sigmascope.lora.families.family import Ratio

BLOCK: Final = """
    transformer_blocks.#.attn1.to_q
    transformer_blocks.#.attn1.to_k
    transformer_blocks.#.attn1.to_v
    transformer_blocks.#.attn1.to_out.0
    transformer_blocks.#.attn2.to_q
    transformer_blocks.#.attn2.to_k
    transformer_blocks.#.attn2.to_v
    transformer_blocks.#.attn2.to_out.0
    transformer_blocks.#.ff.net.0.proj
    transformer_blocks.#.ff.net.2
"""
"""Layers with the same names in both namings: LTX' models."""
FEED_FORWARD: Final = (
    Ratio(r"transformer_blocks\.\d+\.ff\.net\.0\.proj", 4, 1),
    Ratio(r"transformer_blocks\.\d+\.ff\.net\.2", 1, 4),
)
TEXT_AS_WIDE: Final = Ratio(r"transformer_blocks\.\d+\.attn2\.to_[kv]", 1, 1)
"""The text has been made as wide as the blocks before they read it."""
FUSED_BLOCK: Final = """
    blocks.#.attn.qkv = transformer_blocks.#.attn1.to_q, transformer_blocks.#.attn1.to_k, transformer_blocks.#.attn1.to_v
    blocks.#.attn.proj = transformer_blocks.#.attn1.to_out.0
    blocks.#.cross_attn.q_linear = transformer_blocks.#.attn2.to_q
    blocks.#.cross_attn.kv_linear = transformer_blocks.#.attn2.to_k, transformer_blocks.#.attn2.to_v
    blocks.#.cross_attn.proj = transformer_blocks.#.attn2.to_out.0
"""
"""Attention of PixArt and Sana, which descends from it."""
FUSED_RATIOS: Final = (
    TEXT_AS_WIDE,
    Ratio(r"blocks\.\d+\.attn\.qkv", 3, 1),
    Ratio(r"blocks\.\d+\.cross_attn\.kv_linear", 2, 1),
)
