"""LTX-2: LTX-Video with a second stream for sound. A LoRA of the picture's blocks alone has LTX-Video's names."""

from typing import Final

from sigmascope.lora.families.cross_attention import BLOCK, FEED_FORWARD, TEXT_AS_WIDE
from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Ratio, Reads

_ATTENTION: Final = (
    "attn1",
    "attn2",
    "audio_attn1",
    "audio_attn2",
    "audio_to_video_attn",
    "video_to_audio_attn",
)
_OF_SOUND: Final = "".join(
    f"transformer_blocks.#.{name}.{layer}\n"
    for name in _ATTENTION[2:]
    for layer in ("to_q", "to_k", "to_v", "to_out.0")
)
_OF_ATTENTION: Final = "".join(
    f"""
    transformer_blocks.#.{name}.to_gate_logits
    transformer_blocks.#.{name}.q_norm = transformer_blocks.#.{name}.norm_q
    transformer_blocks.#.{name}.k_norm = transformer_blocks.#.{name}.norm_k
    """
    for name in _ATTENTION
)
"""Gates are LTX-2.3's."""
_MODULATION: Final = {
    "adaln_single": "time_embed",
    "audio_adaln_single": "audio_time_embed",
    "prompt_adaln_single": "prompt_adaln",
    "audio_prompt_adaln_single": "audio_prompt_adaln",
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
}
_LAST: Final = ("emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2", "linear")
_OF_TIME: Final = "".join(
    f"{original}.{layer} = {name}.{layer}\n" for original, name in _MODULATION.items() for layer in _LAST
)

LTX2: Final = Family(
    name="ltx2",
    title="LTX-2",
    architecture="ltx-2",
    base_version="ltx2",
    also_called=("ltxv2", "ltx-video-2"),
    in_diffusers=InDiffusers(
        "LTX2VideoTransformer3DModel",
        "LTX2LoraLoaderMixin",
        {"gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True, "audio_cross_attn_mod": True},
    ),
    signatures={
        "diffusers": "proj_in.weight audio_proj_in.weight transformer_blocks.0.audio_attn1.to_q.weight",
        "original": "patchify_proj.weight audio_patchify_proj.weight transformer_blocks.0.audio_attn1.to_q.weight",
    },
    ratios=(
        *FEED_FORWARD,
        TEXT_AS_WIDE,
        Ratio(r"transformer_blocks\.\d+\.audio_ff\.net\.0\.proj", 4, 1),
        Ratio(r"transformer_blocks\.\d+\.audio_ff\.net\.2", 1, 4),
    ),
    most_blocks={"transformer_blocks": 48},
    widths=(4096,),
    else_="ltx_video",
    layers=BLOCK
    + _OF_SOUND
    + _OF_ATTENTION
    + _OF_TIME
    + """
        transformer_blocks.#.audio_ff.net.0.proj
        transformer_blocks.#.audio_ff.net.2
        patchify_proj = proj_in
        audio_patchify_proj = audio_proj_in
        caption_projection.linear_1
        caption_projection.linear_2
        audio_caption_projection.linear_1
        audio_caption_projection.linear_2
        proj_out
        audio_proj_out
    """,
    variant=r"(?:connectors\.)?(?:audio|video)_(?:embeddings_)?connector\..*",
    sometimes=r".*\.to_gate_logits",
    blocks="""
        patchify_proj = img_in
        proj_in = img_in
        audio_patchify_proj = audio_in
        audio_proj_in = audio_in
        caption_projection = txt_in
        audio_caption_projection = txt_in
        video_connector = txt_in
        audio_connector = txt_in
        video_embeddings_connector = txt_in
        audio_embeddings_connector = txt_in
    """
    + "".join(
        f"{name} = time_text_embed\n"
        for names in _MODULATION.items()
        for name in names
        if name not in {"time_embed", "adaln_single"}
    )
    + """
        adaln_single = time_text_embed
        time_embed.emb = time_text_embed
        time_embed.linear = time_text_embed
        transformer_blocks.#
        proj_out
        audio_proj_out = proj_out
    """,
    encoders={"text_encoder": ("gemma3_12b",)},
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "", "original"),
        Reads("diffusers", "transformer.", "diffusers", "A"),
        Reads("diffusers", "diffusion_model.", "original", "A"),
        Reads("diffusers", "diffusion_model.", "diffusers", "A"),
    ),
    in_comfyui_since="0.33",
)
