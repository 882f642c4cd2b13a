"""Tiny models of diffusers' classes with real weights, and the names of their layers in the files that they were published in.

The names are written down here from the published files and the trainers' sources, not taken from the families' records:
what the tests expect does not come from what they test.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import diffusers
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Row:
    """A matrix of an original file.

    Attributes:
        original: Its layer.
        parts: Diffusers' layers, one below the other.
        swapped: Whether the halves of the rows are in the opposite order.
    """

    original: str
    parts: tuple[str, ...]
    swapped: bool = False

    def joined(self, tensors: dict[str, Tensor]) -> Tensor:
        """The original matrix or bias, from those of the parts."""
        whole = torch.cat([tensors[part] for part in self.parts])
        return whole.roll(len(whole) // 2, 0) if self.swapped else whole


@dataclass(frozen=True)
class Published:
    """A family of models.

    Attributes:
        make: A tiny model.
        names: One row a line, as `original = part, part`; `#` is a block's number. A name alone is the same in both,
            `~` before a part swaps its halves.
        parameters: Rows for whole keys, of parameters that no LoRA is for but by which a file is told.
        kohya: Whether kohya's files have `original` or `diffusers` names.
        pipeline: Diffusers' class that loads LoRAs of the family.
    """

    make: Callable[[], nn.Module]
    names: str
    parameters: str = ""
    kohya: str = "original"
    pipeline: str = ""


def _both(lists: str, lines: str) -> str:
    return "".join(lines.replace("LIST", name) for name in lists.split())


_DOUBLE: Final = """
    double_blocks.#.img_attn.qkv = transformer_blocks.#.attn.to_q, transformer_blocks.#.attn.to_k, transformer_blocks.#.attn.to_v
    double_blocks.#.txt_attn.qkv = transformer_blocks.#.attn.add_q_proj, transformer_blocks.#.attn.add_k_proj, transformer_blocks.#.attn.add_v_proj
    double_blocks.#.img_attn.proj = transformer_blocks.#.attn.to_out.0
    double_blocks.#.txt_attn.proj = transformer_blocks.#.attn.to_add_out
"""
_FEED_FORWARD: Final = """
    double_blocks.#.img_mlp.0 = transformer_blocks.#.ff.net.0.proj
    double_blocks.#.img_mlp.2 = transformer_blocks.#.ff.net.2
    double_blocks.#.txt_mlp.0 = transformer_blocks.#.ff_context.net.0.proj
    double_blocks.#.txt_mlp.2 = transformer_blocks.#.ff_context.net.2
    single_blocks.#.linear1 = single_transformer_blocks.#.attn.to_q, single_transformer_blocks.#.attn.to_k, single_transformer_blocks.#.attn.to_v, single_transformer_blocks.#.proj_mlp
    single_blocks.#.linear2 = single_transformer_blocks.#.proj_out
"""
_MODULATION: Final = """
    double_blocks.#.img_mod.lin = transformer_blocks.#.norm1.linear
    double_blocks.#.txt_mod.lin = transformer_blocks.#.norm1_context.linear
    single_blocks.#.modulation.lin = single_transformer_blocks.#.norm.linear
"""
_WAN: Final = """
    blocks.#.self_attn.q = blocks.#.attn1.to_q
    blocks.#.self_attn.k = blocks.#.attn1.to_k
    blocks.#.self_attn.v = blocks.#.attn1.to_v
    blocks.#.self_attn.o = blocks.#.attn1.to_out.0
    blocks.#.cross_attn.q = blocks.#.attn2.to_q
    blocks.#.cross_attn.k = blocks.#.attn2.to_k
    blocks.#.cross_attn.v = blocks.#.attn2.to_v
    blocks.#.cross_attn.o = blocks.#.attn2.to_out.0
    blocks.#.cross_attn.k_img = blocks.#.attn2.add_k_proj
    blocks.#.cross_attn.v_img = blocks.#.attn2.add_v_proj
    blocks.#.ffn.0 = blocks.#.ffn.net.0.proj
    blocks.#.ffn.2 = blocks.#.ffn.net.2
    patch_embedding
    time_embedding.0 = condition_embedder.time_embedder.linear_1
    time_embedding.2 = condition_embedder.time_embedder.linear_2
    time_projection.1 = condition_embedder.time_proj
    text_embedding.0 = condition_embedder.text_embedder.linear_1
    text_embedding.2 = condition_embedder.text_embedder.linear_2
    head.head = proj_out
"""
_LTX_BLOCK: Final = (
    "".join(
        f"transformer_blocks.#.{attention}.{layer}\n"
        for attention in ("attn1", "attn2")
        for layer in ("to_q", "to_k", "to_v", "to_out.0")
    )
    + "transformer_blocks.#.ff.net.0.proj\ntransformer_blocks.#.ff.net.2\n"
)


def _unet(levels: str, context: int, **words: Any) -> nn.Module:
    kinds = {"x": ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D"), "-": ("DownBlock2D", "UpBlock2D")}
    model: nn.Module = diffusers.UNet2DConditionModel(
        down_block_types=tuple(kinds[level][0] for level in levels),
        up_block_types=tuple(kinds[level][1] for level in reversed(levels)),
        block_out_channels=(8,) * len(levels), cross_attention_dim=context, attention_head_dim=2,
        norm_num_groups=2, sample_size=8, **words,
    )  # fmt: skip
    return model


def _unet_names(levels: str) -> str:
    """By CompVis' numbers: three entries a level, whose first is the resnet and whose second the transformer."""
    last = len(levels) - 1
    lines = [
        "middle_block.1 = mid_block.attentions.0",
        "middle_block.0 = mid_block.resnets.0",
        "middle_block.2 = mid_block.resnets.1",
    ]
    for level in range(len(levels)):
        lines += [
            f"input_blocks.{3 * level + 1 + layer}.0 = down_blocks.{level}.resnets.{layer}"
            for layer in (0, 1)
        ]
        lines += [
            f"input_blocks.{3 * level + 1 + layer}.1 = down_blocks.{level}.attentions.{layer}"
            for layer in (0, 1)
        ]
        lines += [
            f"output_blocks.{3 * level + layer}.0 = up_blocks.{level}.resnets.{layer}" for layer in (0, 1, 2)
        ]
        lines += [
            f"output_blocks.{3 * level + layer}.1 = up_blocks.{level}.attentions.{layer}"
            for layer in (0, 1, 2)
        ]
        if level < last:
            lines.append(f"input_blocks.{3 * level + 3}.0.op = down_blocks.{level}.downsamplers.0.conv")
            place = 2 if levels[last - level] == "x" else 1
            lines.append(f"output_blocks.{3 * level + 2}.{place}.conv = up_blocks.{level}.upsamplers.0.conv")
    lines += [
        "input_blocks.0.0 = conv_in",
        "out.2 = conv_out",
        "time_embed.0 = time_embedding.linear_1",
        "time_embed.2 = time_embedding.linear_2",
    ]
    return "\n".join(lines)


_IN_RESNET: Final = {
    "in_layers.2": "conv1", "emb_layers.1": "time_emb_proj", "out_layers.3": "conv2", "skip_connection": "conv_shortcut",
}  # fmt: skip

FAMILIES: Final[dict[str, Published]] = {
    "sd15": Published(lambda: _unet("xxx-", 768), _unet_names("xxx-"), kohya="diffusers", pipeline="StableDiffusionPipeline"),
    "sdxl": Published(
        lambda: _unet("-xx", 2048, use_linear_projection=True, addition_embed_type="text_time",
                      addition_time_embed_dim=2, projection_class_embeddings_input_dim=16),
        _unet_names("-xx") + "\nlabel_emb.0.0 = add_embedding.linear_1\nlabel_emb.0.2 = add_embedding.linear_2",
        pipeline="StableDiffusionXLPipeline",
    ),
    "sd3": Published(
        lambda: diffusers.SD3Transformer2DModel(
            sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=4, num_attention_heads=2,
            joint_attention_dim=12, caption_projection_dim=8, pooled_projection_dim=10, out_channels=4,
            pos_embed_max_size=4, dual_attention_layers=(0,), qk_norm="rms_norm",
        ),
        """
        joint_blocks.#.x_block.attn.qkv = transformer_blocks.#.attn.to_q, transformer_blocks.#.attn.to_k, transformer_blocks.#.attn.to_v
        joint_blocks.#.context_block.attn.qkv = transformer_blocks.#.attn.add_q_proj, transformer_blocks.#.attn.add_k_proj, transformer_blocks.#.attn.add_v_proj
        joint_blocks.#.x_block.attn2.qkv = transformer_blocks.#.attn2.to_q, transformer_blocks.#.attn2.to_k, transformer_blocks.#.attn2.to_v
        joint_blocks.#.x_block.attn.proj = transformer_blocks.#.attn.to_out.0
        joint_blocks.#.x_block.attn2.proj = transformer_blocks.#.attn2.to_out.0
        joint_blocks.#.context_block.attn.proj = transformer_blocks.#.attn.to_add_out
        joint_blocks.#.x_block.mlp.fc1 = transformer_blocks.#.ff.net.0.proj
        joint_blocks.#.x_block.mlp.fc2 = transformer_blocks.#.ff.net.2
        joint_blocks.#.context_block.mlp.fc1 = transformer_blocks.#.ff_context.net.0.proj
        joint_blocks.#.context_block.mlp.fc2 = transformer_blocks.#.ff_context.net.2
        joint_blocks.#.x_block.adaLN_modulation.1 = transformer_blocks.#.norm1.linear
        joint_blocks.0.context_block.adaLN_modulation.1 = transformer_blocks.0.norm1_context.linear
        joint_blocks.1.context_block.adaLN_modulation.1 = ~transformer_blocks.1.norm1_context.linear
        context_embedder
        x_embedder.proj = pos_embed.proj
        """,
        pipeline="StableDiffusion3Pipeline",
    ),
    "flux": Published(
        lambda: diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=6, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=20, pooled_projection_dim=12, axes_dims_rope=(2, 2, 4), guidance_embeds=True,
        ),
        _DOUBLE + _FEED_FORWARD + _MODULATION + """
        img_in = x_embedder
        txt_in = context_embedder
        vector_in.in_layer = time_text_embed.text_embedder.linear_1
        vector_in.out_layer = time_text_embed.text_embedder.linear_2
        time_in.in_layer = time_text_embed.timestep_embedder.linear_1
        guidance_in.in_layer = time_text_embed.guidance_embedder.linear_1
        final_layer.linear = proj_out
        """,
        pipeline="FluxPipeline",
    ),
    "flux2": Published(
        lambda: diffusers.Flux2Transformer2DModel(
            patch_size=1, in_channels=6, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=20, timestep_guidance_channels=8, axes_dims_rope=(2, 2, 2, 2),
        ),
        _DOUBLE + """
        double_blocks.#.img_mlp.0 = transformer_blocks.#.ff.linear_in
        double_blocks.#.img_mlp.2 = transformer_blocks.#.ff.linear_out
        double_blocks.#.txt_mlp.0 = transformer_blocks.#.ff_context.linear_in
        double_blocks.#.txt_mlp.2 = transformer_blocks.#.ff_context.linear_out
        single_blocks.#.linear1 = single_transformer_blocks.#.attn.to_qkv_mlp_proj
        single_blocks.#.linear2 = single_transformer_blocks.#.attn.to_out
        img_in = x_embedder
        txt_in = context_embedder
        """,
        pipeline="Flux2Pipeline",
    ),
    "flux3": Published(
        lambda: diffusers.Flux3Transformer2DModel(
            in_channels=6, cond_in_channels=6, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=20, timestep_channels=8, axes_dims_rope=(2, 2, 2, 2),
        ),
        "".join(
            f"{original}.#.{first} = {name}.#.{second}\n"
            for original, name in (
                ("content_mode_blocks.image", "mode_blocks.image"), ("content_mode_blocks.image_cond", "mode_blocks.image_cond"),
                ("txt_mode_blocks", "txt_mode_blocks"), ("single_blocks", "single_transformer_blocks"),
            )
            for first, second in (
                ("q_proj", "attn.to_q"), ("k_proj", "attn.to_k"), ("v_proj", "attn.to_v"), ("attn_out", "attn.to_out.0"),
                ("mlp_in", "ff.linear_in"), ("mlp_out", "ff.linear_out"),
            )
        ) + """
        early_stream_modulations.txt.lin = early_stream_modulations.txt.linear
        single_stream_modulations.image.lin = single_stream_modulations.image.linear
        emb_in.image = x_embedders.image
        emb_in.image_cond = x_embedders.image_cond
        txt_in = context_embedder
        time_in.in_layer = timestep_embedder.linear_1
        final_layer.image.adaLN_modulation.1 = ~norm_out.linear
        final_layer.image.linear = proj_out
        """,
    ),
    "chroma": Published(
        lambda: diffusers.ChromaTransformer2DModel(
            patch_size=1, in_channels=6, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=20, axes_dims_rope=(2, 2, 4), approximator_num_channels=4, approximator_hidden_dim=8,
            approximator_layers=1,
        ),
        _DOUBLE + _FEED_FORWARD + """
        img_in = x_embedder
        txt_in = context_embedder
        distilled_guidance_layer.in_proj
        final_layer.linear = proj_out
        """,
        pipeline="ChromaPipeline",
    ),
    "hunyuan": Published(
        lambda: diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=2,
            num_single_layers=2, num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True,
            text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
        ),
        _DOUBLE + _FEED_FORWARD + _MODULATION + """
        img_in.proj = x_embedder.proj
        txt_in.input_embedder = context_embedder.proj_in
        txt_in.individual_token_refiner.blocks.#.self_attn.qkv = context_embedder.token_refiner.refiner_blocks.#.attn.to_q, context_embedder.token_refiner.refiner_blocks.#.attn.to_k, context_embedder.token_refiner.refiner_blocks.#.attn.to_v
        txt_in.individual_token_refiner.blocks.#.self_attn.proj = context_embedder.token_refiner.refiner_blocks.#.attn.to_out.0
        vector_in.in_layer = time_text_embed.text_embedder.linear_1
        """,
        pipeline="HunyuanVideoPipeline",
    ),
    "qwen": Published(
        lambda: diffusers.QwenImageTransformer2DModel(
            patch_size=2, in_channels=8, out_channels=2, num_layers=2, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=20, axes_dims_rope=(2, 2, 4),
        ),
        "".join(
            f"transformer_blocks.#.{layer}\n"
            for layer in ("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj",
                          "attn.to_out.0", "attn.to_add_out", "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj",
                          "txt_mlp.net.2", "img_mod.1", "txt_mod.1")
        ) + "img_in\ntxt_in\nproj_out\n",
        parameters="txt_norm.weight",
        kohya="diffusers",
        pipeline="QwenImagePipeline",
    ),
    "wan": Published(
        lambda: diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
            text_dim=20, freq_dim=8, ffn_dim=40, num_layers=2, rope_max_seq_len=8,
        ),
        _WAN, "head.modulation = scale_shift_table", pipeline="WanPipeline",
    ),
    "wani2v": Published(
        lambda: diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=9, out_channels=4,
            text_dim=20, freq_dim=8, ffn_dim=40, num_layers=2, rope_max_seq_len=8, image_dim=14, added_kv_proj_dim=24,
        ),
        _WAN + """
        img_emb.proj.1 = condition_embedder.image_embedder.ff.net.0.proj
        img_emb.proj.3 = condition_embedder.image_embedder.ff.net.2
        """,
        "head.modulation = scale_shift_table", pipeline="WanImageToVideoPipeline",
    ),
    "animate": Published(
        lambda: diffusers.WanAnimateTransformer3DModel(
            num_attention_heads=4, attention_head_dim=12, in_channels=12, latent_channels=4, out_channels=4, text_dim=20,
            freq_dim=8, ffn_dim=40, num_layers=4, inject_face_latents_blocks=2, image_dim=16, added_kv_proj_dim=48,
            motion_encoder_channel_sizes={"4": 8, "8": 8}, motion_encoder_size=8, motion_style_dim=8, motion_dim=4,
            motion_encoder_dim=12, face_encoder_hidden_dim=16, face_encoder_num_heads=2, rope_max_seq_len=16,
        ),
        _WAN + """
        pose_patch_embedding
        face_adapter.fuser_blocks.#.linear1_q = face_adapter.#.to_q
        face_adapter.fuser_blocks.#.linear1_kv = face_adapter.#.to_k, face_adapter.#.to_v
        face_adapter.fuser_blocks.#.linear2 = face_adapter.#.to_out
        """,
    ),
    "zimage": Published(
        lambda: diffusers.ZImageTransformer2DModel(
            all_patch_size=(2,), all_f_patch_size=(1,), in_channels=4, dim=24, n_layers=2, n_refiner_layers=1, n_heads=3,
            n_kv_heads=3, cap_feat_dim=12, axes_dims=[4, 2, 2], axes_lens=[8, 8, 8],
        ),
        _both("layers noise_refiner context_refiner", """
        LIST.#.attention.qkv = LIST.#.attention.to_q, LIST.#.attention.to_k, LIST.#.attention.to_v
        LIST.#.attention.out = LIST.#.attention.to_out.0
        LIST.#.feed_forward.w1
        LIST.#.feed_forward.w2
        LIST.#.feed_forward.w3
        LIST.#.adaLN_modulation.0
        """) + "cap_embedder.1\nx_embedder = all_x_embedder.2-1\n",
        pipeline="ZImagePipeline",
    ),
    "lumina2": Published(
        lambda: diffusers.Lumina2Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1,
            num_attention_heads=4, num_kv_heads=2, multiple_of=8, axes_dim_rope=(2, 2, 2), axes_lens=(8, 8, 8), cap_feat_dim=12,
        ),
        _both("layers noise_refiner context_refiner", """
        LIST.#.attention.qkv = LIST.#.attn.to_q, LIST.#.attn.to_k, LIST.#.attn.to_v
        LIST.#.attention.out = LIST.#.attn.to_out.0
        LIST.#.feed_forward.w1 = LIST.#.feed_forward.linear_1
        LIST.#.feed_forward.w2 = LIST.#.feed_forward.linear_2
        LIST.#.feed_forward.w3 = LIST.#.feed_forward.linear_3
        LIST.#.adaLN_modulation.1 = LIST.#.norm1.linear
        """) + "x_embedder\ncap_embedder.1 = time_caption_embed.caption_embedder.1\n",
        pipeline="Lumina2Pipeline",
    ),
    "ltx": Published(
        lambda: diffusers.LTXVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
            num_layers=2, caption_channels=12,
        ),
        _LTX_BLOCK + "patchify_proj = proj_in\nadaln_single.linear = time_embed.linear\nproj_out\n",
        pipeline="LTXPipeline",
    ),
    "hidream": Published(
        lambda: diffusers.HiDreamImageTransformer2DModel(
            patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
            num_attention_heads=2, caption_channels=[12, 10], text_emb_dim=6, num_routed_experts=4,
            num_activated_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(8, 8), llama_layers=(0, 1),
        ),
        _both("double_stream_blocks single_stream_blocks", """
        LIST.#.block.attn1.to_q
        LIST.#.block.attn1.to_k
        LIST.#.block.attn1.to_v
        LIST.#.block.attn1.to_out
        LIST.#.block.ff_i.shared_experts.w1
        LIST.#.block.ff_i.experts.1.w2
        LIST.#.block.adaLN_modulation.1
        """) + """
        double_stream_blocks.#.block.attn1.to_q_t
        double_stream_blocks.#.block.ff_t.w1
        caption_projection.0.linear
        x_embedder.proj
        """,
        kohya="diffusers", pipeline="HiDreamImagePipeline",
    ),
    "pixart": Published(
        lambda: diffusers.PixArtTransformer2DModel(
            num_layers=2, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, caption_channels=12,
            sample_size=8,
        ),
        """
        blocks.#.attn.qkv = transformer_blocks.#.attn1.to_q, transformer_blocks.#.attn1.to_k, transformer_blocks.#.attn1.to_v
        blocks.#.attn.proj = transformer_blocks.#.attn1.to_out.0
        blocks.#.cross_attn.q_linear = transformer_blocks.#.attn2.to_q
        blocks.#.cross_attn.kv_linear = transformer_blocks.#.attn2.to_k, transformer_blocks.#.attn2.to_v
        blocks.#.cross_attn.proj = transformer_blocks.#.attn2.to_out.0
        blocks.#.mlp.fc1 = transformer_blocks.#.ff.net.0.proj
        blocks.#.mlp.fc2 = transformer_blocks.#.ff.net.2
        x_embedder.proj = pos_embed.proj
        y_embedder.y_proj.fc1 = caption_projection.linear_1
        t_block.1 = adaln_single.linear
        """,
    ),
    "sana": Published(
        lambda: diffusers.SanaTransformer2DModel(
            num_layers=2, num_attention_heads=2, attention_head_dim=8, num_cross_attention_heads=2,
            cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=12, sample_size=8,
        ),
        """
        blocks.#.attn.qkv = transformer_blocks.#.attn1.to_q, transformer_blocks.#.attn1.to_k, transformer_blocks.#.attn1.to_v
        blocks.#.attn.proj = transformer_blocks.#.attn1.to_out.0
        blocks.#.cross_attn.q_linear = transformer_blocks.#.attn2.to_q
        blocks.#.cross_attn.kv_linear = transformer_blocks.#.attn2.to_k, transformer_blocks.#.attn2.to_v
        blocks.#.cross_attn.proj = transformer_blocks.#.attn2.to_out.0
        blocks.#.mlp.inverted_conv.conv = transformer_blocks.#.ff.conv_inverted
        blocks.#.mlp.point_conv.conv = transformer_blocks.#.ff.conv_point
        x_embedder.proj = patch_embed.proj
        y_embedder.y_proj.fc1 = caption_projection.linear_1
        t_block.1 = time_embed.linear
        """,
        parameters="attention_y_norm.weight = caption_norm.weight",
        pipeline="SanaPipeline",
    ),
    "cogvideox": Published(
        lambda: diffusers.CogVideoXTransformer3DModel(
            num_layers=2, num_attention_heads=2, attention_head_dim=8, text_embed_dim=12, time_embed_dim=4,
            sample_width=8, sample_height=8, sample_frames=5, in_channels=4, out_channels=4,
        ),
        """
        transformer_blocks.#.attn1.to_q
        transformer_blocks.#.attn1.to_k
        transformer_blocks.#.attn1.to_v
        transformer_blocks.#.attn1.to_out.0
        transformer_blocks.#.ff.net.0.proj
        transformer_blocks.#.ff.net.2
        """,
        pipeline="CogVideoXPipeline",
    ),
    "mochi": Published(
        lambda: diffusers.MochiTransformer3DModel(
            num_layers=2, num_attention_heads=3, attention_head_dim=8, pooled_projection_dim=12, in_channels=4,
            text_embed_dim=10, time_embed_dim=8,
        ),
        """
        blocks.#.attn.qkv_x = transformer_blocks.#.attn1.to_q, transformer_blocks.#.attn1.to_k, transformer_blocks.#.attn1.to_v
        blocks.#.attn.qkv_y = transformer_blocks.#.attn1.add_q_proj, transformer_blocks.#.attn1.add_k_proj, transformer_blocks.#.attn1.add_v_proj
        blocks.#.attn.proj_x = transformer_blocks.#.attn1.to_out.0
        blocks.#.attn.proj_y = transformer_blocks.#.attn1.to_add_out
        blocks.#.mlp_x.w1 = ~transformer_blocks.#.ff.net.0.proj
        blocks.#.mlp_x.w2 = transformer_blocks.#.ff.net.2
        blocks.#.mod_x = transformer_blocks.#.norm1.linear
        x_embedder.proj = patch_embed.proj
        t5_yproj = time_embed.caption_proj
        """,
        pipeline="MochiPipeline",
    ),
    "auraflow": Published(
        lambda: diffusers.AuraFlowTransformer2DModel(
            num_mmdit_layers=2, num_single_dit_layers=2, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=12, caption_projection_dim=16, pos_embed_max_size=4, sample_size=2,
        ),
        """
        double_layers.#.attn.w2q = joint_transformer_blocks.#.attn.to_q
        double_layers.#.attn.w2k = joint_transformer_blocks.#.attn.to_k
        double_layers.#.attn.w2v = joint_transformer_blocks.#.attn.to_v
        double_layers.#.attn.w2o = joint_transformer_blocks.#.attn.to_out.0
        double_layers.#.attn.w1q = joint_transformer_blocks.#.attn.add_q_proj
        double_layers.#.mlpX.c_fc1 = joint_transformer_blocks.#.ff.linear_1
        double_layers.#.modX.1 = joint_transformer_blocks.#.norm1.linear
        single_layers.#.attn.w1q = single_transformer_blocks.#.attn.to_q
        single_layers.#.attn.w1k = single_transformer_blocks.#.attn.to_k
        single_layers.#.attn.w1v = single_transformer_blocks.#.attn.to_v
        single_layers.#.mlp.c_fc1 = single_transformer_blocks.#.ff.linear_1
        init_x_linear = pos_embed.proj
        cond_seq_linear = context_embedder
        """,
        pipeline="AuraFlowPipeline",
    ),
    "cosmos": Published(
        lambda: diffusers.CosmosTransformer3DModel(
            num_layers=2, num_attention_heads=2, attention_head_dim=16, text_embed_dim=16, adaln_lora_dim=4,
            max_size=(2, 4, 4), in_channels=4, out_channels=4, extra_pos_embed_type=None,
        ),
        """
        blocks.#.self_attn.q_proj = transformer_blocks.#.attn1.to_q
        blocks.#.self_attn.k_proj = transformer_blocks.#.attn1.to_k
        blocks.#.self_attn.v_proj = transformer_blocks.#.attn1.to_v
        blocks.#.self_attn.output_proj = transformer_blocks.#.attn1.to_out.0
        blocks.#.cross_attn.q_proj = transformer_blocks.#.attn2.to_q
        blocks.#.cross_attn.k_proj = transformer_blocks.#.attn2.to_k
        blocks.#.cross_attn.v_proj = transformer_blocks.#.attn2.to_v
        blocks.#.cross_attn.output_proj = transformer_blocks.#.attn2.to_out.0
        blocks.#.mlp.layer1 = transformer_blocks.#.ff.net.0.proj
        blocks.#.mlp.layer2 = transformer_blocks.#.ff.net.2
        blocks.#.adaln_modulation_self_attn.1 = transformer_blocks.#.norm1.linear_1
        x_embedder.proj.1 = patch_embed.proj
        """,
        parameters="t_embedding_norm.weight = time_embed.norm.weight",
    ),
    "ltx2": Published(
        lambda: diffusers.LTX2VideoTransformer3DModel(
            in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
            audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4,
            audio_cross_attention_dim=8, caption_channels=12,
        ),
        "".join(
            f"transformer_blocks.#.{attention}.{layer}\n"
            for attention in ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
            for layer in ("to_q", "to_k", "to_v", "to_out.0")
        ) + """
        transformer_blocks.#.ff.net.0.proj
        transformer_blocks.#.ff.net.2
        transformer_blocks.#.audio_ff.net.0.proj
        transformer_blocks.#.audio_ff.net.2
        patchify_proj = proj_in
        audio_patchify_proj = audio_proj_in
        adaln_single.linear = time_embed.linear
        proj_out
        """,
        pipeline="LTX2Pipeline",
    ),
    "krea2": Published(
        lambda: diffusers.Krea2Transformer2DModel(
            in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, timestep_embed_dim=8, text_hidden_dim=24, num_text_layers=3, text_num_attention_heads=3,
            text_num_key_value_heads=3, text_intermediate_size=40, axes_dims_rope=(4, 2, 2),
        ),
        "".join(
            f"{original}.#.{first} = {name}.#.{second}\n"
            for original, name in (
                ("blocks", "transformer_blocks"),
                ("txtfusion.layerwise_blocks", "text_fusion.layerwise_blocks"),
                ("txtfusion.refiner_blocks", "text_fusion.refiner_blocks"),
            )
            for first, second in (
                ("attn.wq", "attn.to_q"), ("attn.wk", "attn.to_k"), ("attn.wv", "attn.to_v"), ("attn.wo", "attn.to_out.0"),
                ("attn.gate", "attn.to_gate"), ("mlp.gate", "ff.gate"), ("mlp.up", "ff.up"), ("mlp.down", "ff.down"),
            )
        ) + """
        first = img_in
        txtfusion.projector = text_fusion.projector
        txtmlp.1 = txt_in.linear_1
        tmlp.0 = time_embed.linear_1
        tproj.1 = time_mod_proj
        last.linear = final_layer.linear
        """,
        pipeline="Krea2Pipeline",
    ),
    "ideogram4": Published(
        lambda: diffusers.Ideogram4Transformer2DModel(
            in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2, intermediate_size=40, adaln_dim=12,
            llm_features_dim=24, mrope_section=(2, 1, 1),
        ),
        """
        layers.#.attention.qkv = layers.#.attention.to_q, layers.#.attention.to_k, layers.#.attention.to_v
        layers.#.attention.o = layers.#.attention.to_out.0
        layers.#.feed_forward.w1
        layers.#.feed_forward.w2
        layers.#.feed_forward.w3
        layers.#.adaln_modulation
        input_proj
        llm_cond_proj
        adaln_proj
        """,
        pipeline="Ideogram4Pipeline",
    ),
    "kandinsky5": Published(
        lambda: diffusers.Kandinsky5Transformer3DModel(
            in_text_dim=12, in_text_dim2=10, time_dim=8, model_dim=16, ff_dim=40, num_text_blocks=2, num_visual_blocks=2,
            axes_dims=(2, 2, 4),
        ),
        _both("text_transformer_blocks visual_transformer_blocks", """
        LIST.#.self_attention.to_query
        LIST.#.self_attention.to_key
        LIST.#.self_attention.to_value
        LIST.#.self_attention.out_layer
        LIST.#.feed_forward.in_layer
        LIST.#.feed_forward.out_layer
        """) + """
        visual_transformer_blocks.#.cross_attention.to_query
        visual_transformer_blocks.#.cross_attention.to_key
        visual_transformer_blocks.#.cross_attention.to_value
        visual_transformer_blocks.#.cross_attention.out_layer
        visual_embeddings.in_layer
        text_embeddings.in_layer
        """,
        kohya="diffusers", pipeline="Kandinsky5T2VPipeline",
    ),
}  # fmt: skip


@cache
def tiny(family: str) -> nn.Module:
    """The family's model, made once, with no bias of zeros."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of diffusers' own use of `FluxPosEmbed`
        return FAMILIES[family].make()


@cache
def layers(family: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that a LoRA can be for."""
    kinds = nn.Linear | nn.Conv2d | nn.Conv3d
    return {
        path: tuple(layer.weight.shape)
        for path, layer in tiny(family).named_modules()
        if isinstance(layer, kinds)
    }


def _lines(text: str) -> Iterator[Row]:
    for line in filter(None, map(str.strip, text.splitlines())):
        original, _, right = line.partition(" = ")
        parts = (right or original).split(", ")
        yield Row(original, tuple(part.removeprefix("~") for part in parts), parts[0].startswith("~"))


@cache
def rows(family: str) -> tuple[Row, ...]:
    """Every matrix of the family's original file."""
    shapes, found = layers(family), []
    for line in _lines(FAMILIES[family].names):
        for number in "0123456789" if "#" in line.original else "0":
            row = Row(
                line.original.replace("#", number),
                tuple(part.replace("#", number) for part in line.parts),
                line.swapped,
            )
            if all(part in shapes for part in row.parts):
                found.append(row)
    return tuple(found) if not _is_unet(family) else tuple(_unet_rows(family))


def _is_unet(family: str) -> bool:
    return isinstance(tiny(family), diffusers.UNet2DConditionModel)


def _unet_rows(family: str) -> Iterator[Row]:
    starts = {line.parts[0]: line.original for line in _lines(FAMILIES[family].names)}
    own = {name: original for original, name in _IN_RESNET.items()}
    for path in layers(family):
        start = next((start for start in starts if path == start or path.startswith(f"{start}.")), None)
        if start is not None:
            rest = path.removeprefix(start).removeprefix(".")
            rest = own[rest] if ".resnets." in start else rest
            yield Row(f"{starts[start]}.{rest}" if rest else starts[start], (path,))


_JOINT: Final = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_kv": ("to_k", "to_v"),
}
"""What diffusers' `fuse_qkv_projections` joins: all three of self-attention, and two where the other input is the text's."""


def _joint(own: tuple[Row, ...]) -> Iterator[Row]:
    """Diffusers' layers with the projections of each attention joined."""
    paths = {row.original for row in own}
    taken: set[str] = set()
    for path in sorted(paths):
        for end, parts in _JOINT.items():
            start, crosses = path.removesuffix(parts[0]), "attn2" in path or "cross" in path
            whole = tuple(start + part for part in parts)
            if path.endswith(f".{parts[0]}") and crosses is (end == "to_kv") and paths.issuperset(whole):
                taken.update(whole)
                yield Row(start + end, whole)
    yield from (row for row in own if row.original not in taken)


@cache
def single_file(family: str) -> dict[str, Tensor]:
    """The weights of the tiny model under the names of an original file."""
    state = tiny(family).state_dict()
    tensors = {}
    for row in rows(family):
        for end in (".weight", ".bias"):
            if row.parts[0] + end in state:
                tensors[row.original + end] = row.joined({part: state[part + end] for part in row.parts})
    for row in _lines(FAMILIES[family].parameters):
        tensors[row.original] = state[row.parts[0]]
    return {key: tensor.clone().contiguous() for key, tensor in tensors.items()}


def matching(pattern: str, family: str, naming: str) -> tuple[Row, ...]:
    """The rows whose names match, in a naming; those of `diffusers` are never fused, those of `joint` as it fuses them itself."""
    own = rows(family)
    if naming != "original":
        own = tuple(Row(part, (part,)) for row in own for part in row.parts)
    if naming == "joint":
        own = tuple(_joint(own))
    return tuple(row for row in own if re.search(pattern, row.original))
