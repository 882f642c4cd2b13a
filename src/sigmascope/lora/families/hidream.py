"""HiDream-I1. Its own names are diffusers'."""

from sigmascope.lora.families.family import Family

_ATTENTION = "".join(
    f"LIST.#.block.attn1.{layer}\n"
    for layer in ("to_q", "to_k", "to_v", "to_out", "to_q_t", "to_k_t", "to_v_t", "to_out_t")
)
_FEED = "".join(
    f"LIST.#.block.{net}.w{number}\n"
    for net in ("ff_t", "ff_i.shared_experts", *(f"ff_i.experts.{expert}" for expert in range(4)))
    for number in (1, 2, 3)
)
_BLOCK = _ATTENTION + _FEED + "LIST.#.block.adaLN_modulation.1\n"
HIDREAM = Family(
    name="hidream",
    title="HiDream",
    architecture="hidream-i1",
    base_version="hidream_i1",
    signatures={
        "diffusers": "x_embedder.proj.weight caption_projection.0.linear.weight double_stream_blocks.0.block.attn1.to_q.weight"
    },
    widths=(2560,),
    layers="".join(_BLOCK.replace("LIST", name) for name in ("double_stream_blocks", "single_stream_blocks"))
    + "".join(f"caption_projection.{number}.linear\n" for number in range(50))
    + """
        x_embedder.proj
        t_embedder.timestep_embedder.linear_1
        t_embedder.timestep_embedder.linear_2
        p_embedder.pooled_embedder.linear_1
        p_embedder.pooled_embedder.linear_2
        final_layer.linear
        final_layer.adaLN_modulation.1
    """,
    blocks="""
        x_embedder = img_in
        caption_projection = txt_in
        t_embedder = time_text_embed
        p_embedder = time_text_embed
        double_stream_blocks.#
        single_stream_blocks.#
        final_layer.adaLN = norm_out
        final_layer.linear = proj_out
    """,
    encoders={
        "text_encoder": ("clip_l",),
        "text_encoder_2": ("clip_g",),
        "text_encoder_3": ("t5xxl",),
        "text_encoder_4": ("llama",),
    },
    kohya_naming="diffusers",
)
