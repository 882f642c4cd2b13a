"""WAN 2.1 and 2.2, and the variants that read a picture, a video (VACE), a face (Animate) or sound as well."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Reads

_OUTSIDE: Final = r"(?!blocks\.).*"
_BLOCK: Final = "self_attn.q self_attn.k self_attn.v self_attn.o cross_attn.q cross_attn.k cross_attn.v cross_attn.o ffn.0 ffn.2"

_CONVERTIBLE: Final = r"(?s)(?=.*\bblocks\.)(?:(?!.*[kv]_img)|(?=.*k_img)(?=.*v_img))"
"""diffusers counts a file's blocks, and reads the picture's keys and values only together."""

_BLOCK_ROWS: Final = """
    LIST.#.self_attn.q = LIST.#.attn1.to_q
    LIST.#.self_attn.k = LIST.#.attn1.to_k
    LIST.#.self_attn.v = LIST.#.attn1.to_v
    LIST.#.self_attn.o = LIST.#.attn1.to_out.0
    LIST.#.self_attn.norm_q = LIST.#.attn1.norm_q
    LIST.#.self_attn.norm_k = LIST.#.attn1.norm_k
    LIST.#.cross_attn.q = LIST.#.attn2.to_q
    LIST.#.cross_attn.k = LIST.#.attn2.to_k
    LIST.#.cross_attn.v = LIST.#.attn2.to_v
    LIST.#.cross_attn.o = LIST.#.attn2.to_out.0
    LIST.#.cross_attn.k_img = LIST.#.attn2.add_k_proj
    LIST.#.cross_attn.v_img = LIST.#.attn2.add_v_proj
    LIST.#.cross_attn.norm_q = LIST.#.attn2.norm_q
    LIST.#.cross_attn.norm_k = LIST.#.attn2.norm_k
    LIST.#.cross_attn.norm_k_img = LIST.#.attn2.norm_added_k
    LIST.#.norm3 = LIST.#.norm2
    LIST.#.ffn.0 = LIST.#.ffn.net.0.proj
    LIST.#.ffn.2 = LIST.#.ffn.net.2
    LIST.#.modulation = LIST.#.scale_shift_table
"""
_ANIMATE: Final = """
    pose_patch_embedding
    face_encoder.conv1_local.conv = face_encoder.conv1_local
    face_encoder.conv2.conv = face_encoder.conv2
    face_encoder.conv3.conv = face_encoder.conv3
    face_encoder.out_proj
    face_adapter.fuser_blocks.#.linear1_q = face_adapter.#.to_q
    face_adapter.fuser_blocks.#.linear1_kv = face_adapter.#.to_k, face_adapter.#.to_v
    face_adapter.fuser_blocks.#.linear2 = face_adapter.#.to_out
"""
_ANIMATE_NORMS: Final = """
    face_adapter.fuser_blocks.#.q_norm = face_adapter.#.norm_q
    face_adapter.fuser_blocks.#.k_norm = face_adapter.#.norm_k
"""
_VACE: Final = """
    vace_blocks.#.before_proj = vace_blocks.#.proj_in
    vace_blocks.#.after_proj = vace_blocks.#.proj_out
    vace_patch_embedding
"""

WAN: Final = Family(
    name="wan",
    title="WAN",
    architecture="wan",
    base_version="wan",
    in_diffusers=InDiffusers(
        "WanTransformer3DModel", "WanLoraLoaderMixin", {"image_dim": 1280, "added_kv_proj_dim": 5120}
    ),
    signatures={
        "diffusers": "patch_embedding.weight condition_embedder.time_embedder.linear_1.weight blocks.0.attn1.to_q.weight",
        "original": "patch_embedding.weight head.modulation blocks.0.self_attn.q.weight",
    },
    widths=(1536, 3072, 5120),
    layers="".join(_BLOCK_ROWS.replace("LIST", name) for name in ("blocks", "vace_blocks"))
    + _VACE
    + _ANIMATE
    + """
        patch_embedding
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
    vectors=_ANIMATE_NORMS,
    variant=r"(?:audio_injector|casual_audio_encoder|frame_packer|cond_encoder|trainable_cond_mask).*|.*(?:before_proj|after_proj)",
    sometimes=r".*\.(?:cross_attn\.(?:[kv]|norm_k)_img|attn2\.(?:add_[kv]_proj|norm_added_k)|norm[23])",
    twin="vace_",
    blocks="""
        patch_embedding
        vace_patch_embedding
        pose_patch_embedding
        face_encoder
        text_embedding
        condition_embedder.text_embedder = text_embedding
        img_emb
        condition_embedder.image_embedder = img_emb
        time_embedding
        condition_embedder.time_embedder = time_embedding
        time_projection
        condition_embedder.time_proj = time_projection
        vace_blocks.#
        blocks.#
        face_adapter.fuser_blocks.# = face_adapter
        face_adapter.#
        proj_out
        scale_shift_table = proj_out
        head = proj_out
    """,
    extra_blocks=("audio_injector", "casual_audio_encoder"),
    encoders={"text_encoder": ("umt5xxl",)},
    reads=(
        *COMFYUI_READS,
        Reads(
            "diffusers",
            "lora_unet_",
            "original",
            "down+alpha",
            refuses=_OUTSIDE,
            whole_blocks=(_BLOCK, f"{_BLOCK} cross_attn.k_img cross_attn.v_img"),
        ),
        Reads(
            "diffusers",
            "diffusion_model.",
            "original",
            "A down",
            refuses=r"patch_embedding|vace_.*|pose_.*|face_.*",
            requires=_CONVERTIBLE,
        ),
        Reads(
            "diffusers",
            "diffusion_model.",
            "original",
            "A+alpha down+alpha",
            refuses=_OUTSIDE,
            requires=_CONVERTIBLE,
        ),
        Reads("diffusers", "transformer.", "diffusers", "A lora.down"),
    ),
)
