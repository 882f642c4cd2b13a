"""Krea 2. Its original files have short names of their own."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Lost, Ratio, Reads

_BLOCK: Final = """
    FROM.#.attn.wq = TO.#.attn.to_q
    FROM.#.attn.wk = TO.#.attn.to_k
    FROM.#.attn.wv = TO.#.attn.to_v
    FROM.#.attn.gate = TO.#.attn.to_gate
    FROM.#.attn.wo = TO.#.attn.to_out.0
    FROM.#.mlp.gate = TO.#.ff.gate
    FROM.#.mlp.up = TO.#.ff.up
    FROM.#.mlp.down = TO.#.ff.down
"""
_LISTS: Final = {
    "blocks": "transformer_blocks",
    "txtfusion.layerwise_blocks": "text_fusion.layerwise_blocks",
    "txtfusion.refiner_blocks": "text_fusion.refiner_blocks",
}

KREA2: Final = Family(
    name="krea2",
    title="Krea 2",
    architecture="krea-2",
    base_version="krea2",
    in_diffusers=InDiffusers("Krea2Transformer2DModel", "Krea2LoraLoaderMixin"),
    signatures={
        "diffusers": "img_in.weight time_mod_proj.weight text_fusion.projector.weight transformer_blocks.0.attn.to_gate.weight",
        "original": "first.weight txtfusion.projector.weight blocks.0.attn.wq.weight",
    },
    ratios=(Ratio(r"(?:blocks|transformer_blocks)\.\d+\.attn\.(?:wq|gate|wo|to_q|to_gate|to_out\.0)", 1, 1),),
    widths=(6144,),
    layers="".join(_BLOCK.replace("FROM", one).replace("TO", other) for one, other in _LISTS.items())
    + """
        first = img_in
        tmlp.0 = time_embed.linear_1
        tmlp.2 = time_embed.linear_2
        tproj.1 = time_mod_proj
        txtfusion.projector = text_fusion.projector
        txtmlp.1 = txt_in.linear_1
        txtmlp.3 = txt_in.linear_2
        last.linear = final_layer.linear
    """,
    blocks="""
        first = img_in
        img_in
        txtfusion = txt_in
        text_fusion = txt_in
        txtmlp = txt_in
        txt_in
        tmlp = time_text_embed
        time_embed.linear_1 = time_text_embed
        time_embed.linear_2 = time_text_embed
        tproj = time_text_embed
        time_mod_proj = time_text_embed
        blocks.# = transformer_blocks
        transformer_blocks.#
        last = proj_out
        final_layer.linear = proj_out
    """,
    encoders={"text_encoder": ("qwen3vl_4b",)},
    lost=(Lost("diffusers", "comfyui", down="lora_down", or_refused=True),),
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "diffusion_model.", "diffusers"),
        Reads("comfyui", "transformer.", "diffusers"),
        Reads("comfyui", "lycoris_", "diffusers"),
        Reads("comfyui", "", "diffusers"),
        Reads("diffusers", "diffusion_model.", "original", "A"),
        Reads("diffusers", "base_model.model.", "original", "A"),
        Reads("diffusers", "transformer.", "diffusers", "A"),
    ),
    in_comfyui_since="0.33",
)
