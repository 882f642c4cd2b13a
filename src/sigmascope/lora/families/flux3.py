"""FLUX.3. Its picture, its reference pictures and its text have blocks of their own, before the joint ones."""

from typing import Final

from sigmascope.lora.families.family import Family, InDiffusers, Ratio, Reads

_LISTS: Final = {
    "content_mode_blocks.image.#": "mode_blocks.image.#",
    "content_mode_blocks.image_cond.#": "mode_blocks.image_cond.#",
    "txt_mode_blocks.#": "txt_mode_blocks.#",
    "single_blocks.#": "single_transformer_blocks.#",
}
_BLOCK: Final = """
    FROM.q_proj = TO.attn.to_q
    FROM.k_proj = TO.attn.to_k
    FROM.v_proj = TO.attn.to_v
    FROM.attn_out = TO.attn.to_out.0
    FROM.mlp_in = TO.ff.linear_in
    FROM.mlp_out = TO.ff.linear_out
"""
_NORMS: Final = """
    FROM.norm.query_norm = TO.attn.norm_q
    FROM.norm.key_norm = TO.attn.norm_k
"""
_PARTS: Final = ("image", "image_cond", "txt")


def _of_lists(lines: str) -> str:
    return "".join(lines.replace("FROM", original).replace("TO", own) for original, own in _LISTS.items())


FLUX3: Final = Family(
    name="flux3",
    title="FLUX.3",
    architecture="flux-3",
    base_version="flux3",
    in_diffusers=InDiffusers("Flux3Transformer2DModel", "Flux3LoraLoaderMixin", {"flow_map": True}),
    signatures={
        "diffusers": "x_embedders.image.weight context_embedder.weight mode_blocks.image.0.attn.to_q.weight",
        "original": "emb_in.image.weight txt_in.weight content_mode_blocks.image.0.q_proj.weight",
    },
    ratios=(
        Ratio(r"(?:content_mode|txt_mode|single)_blocks\..*\.(?:[qkv]_proj|attn_out)", 1, 1),
        Ratio(r"(?:content_mode|txt_mode|single)_blocks\..*\.mlp_in", 6, 1),
        Ratio(r"(?:content_mode|txt_mode|single)_blocks\..*\.mlp_out", 1, 3),
    ),
    widths=(3072,),
    else_="flux",
    layers=_of_lists(_BLOCK)
    + "".join(
        f"{place}_stream_modulations.{part}.lin = {place}_stream_modulations.{part}.linear\n"
        for place in ("early", "single")
        for part in _PARTS
    )
    + """
        emb_in.image = x_embedders.image
        emb_in.image_cond = x_embedders.image_cond
        txt_in = context_embedder
        time_in.in_layer = timestep_embedder.linear_1
        time_in.out_layer = timestep_embedder.linear_2
        ref_time_in.in_layer = target_timestep_embedder.linear_1
        ref_time_in.out_layer = target_timestep_embedder.linear_2
        final_layer.image.adaLN_modulation.1 = norm_out.linear swapped
        final_layer.image.linear = proj_out
    """,
    vectors=_of_lists(_NORMS),
    blocks="""
        emb_in = img_in
        x_embedders = img_in
        txt_in
        context_embedder = txt_in
        time_in = time_text_embed
        timestep_embedder = time_text_embed
        ref_time_in = time_text_embed
        target_timestep_embedder = time_text_embed
        early_stream_modulations
        content_mode_blocks.image.# = image_mode_blocks
        mode_blocks.image.# = image_mode_blocks
        content_mode_blocks.image_cond.# = image_cond_mode_blocks
        mode_blocks.image_cond.# = image_cond_mode_blocks
        txt_mode_blocks.#
        single_stream_modulations
        single_blocks.# = single_transformer_blocks
        single_transformer_blocks.#
        norm_out
        final_layer.image.adaLN = norm_out
        proj_out
        final_layer.image.linear = proj_out
    """,
    attention=r"(?:content_mode|txt_mode|single)_blocks\..*\.(?:[qkv]_proj|attn_out)",
    around=r"\.mlp_(?:in|out)$",
    reads=(
        Reads("diffusers", "transformer.", "diffusers", "A"),
        Reads("diffusers", "diffusion_model.", "diffusers", "A"),
        Reads(
            "diffusers",
            "diffusion_model.",
            "original",
            "A",
            leaves_out=r"(?:emb_in|txt_in|time_in|ref_time_in|final_layer|early_stream|single_stream).*",
        ),
    ),
)
