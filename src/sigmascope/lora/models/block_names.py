"""The block of a model that a LoRA module belongs to, read off its name in any format."""

import re
from typing import Final

_TEXT_ENCODER: Final = re.compile(
    r"(?:^|[._])(?:te(\d?)|text_encoders?[._](?:clip_l|clip_g|t5xxl|umt5xxl)|text_encoder(?:[._](\d))?|text_model)(?=[._])"
)
_NUMBERED: Final = re.compile(
    r"(?:^|[._])((?:down|up|input|output|double|single|joint|single_transformer|transformer)_blocks|blocks)[._](\d+)"
)
_SINGLE: Final = re.compile(
    r"(?:^|[._])(mid_block|middle_block|conv_in|conv_out|time_embedding|time_embed|time_in|vector_in|img_in|txt_in"
    r"|add_embedding|label_emb|x_embedder|context_embedder|time_text_embed|condition_embedder|patch_embedding"
    r"|final_layer|proj_out|norm_out|head|out)(?=[._]|$)"
)
_LAYER: Final = re.compile(r"(?:layers?|block)[._](\d+)")
_VAE: Final = re.compile(r"^(?:vae(?:[._]vae_model)?|first_stage_model|lora_vae)[._](encoder|decoder)?")


def block_of_module(name: str) -> str:
    """Name the block, such as `down_blocks.0`, `mid_block` or `text_encoder.3`.

    Args:
        name: Path of a module with dots (native, PEFT, ComfyUI) or flattened by underscores (kohya).

    Returns:
        A name that is the same in every format; the first part of the path where no block is known.
    """
    vae = _VAE.match(name)
    if vae is not None:
        return ".".join(filter(None, ("vae", vae[1], _block_in(name[vae.end() :].lstrip("._")))))
    encoder = _TEXT_ENCODER.search(name)
    if encoder is not None:
        return _encoder_block(name, encoder)
    return _block_in(name)


def _block_in(name: str) -> str:
    numbered = _NUMBERED.search(name)
    single = _SINGLE.search(name)
    if numbered is not None and (single is None or numbered.start() <= single.start()):
        return f"{numbered[1]}.{numbered[2]}"
    if single is not None:
        return single[1]
    layer = _LAYER.search(name)
    if layer is not None:
        return f"{layer[0][: -len(layer[1]) - 1]}.{layer[1]}"
    return re.split(r"[._]", name.removeprefix("lora_unet_").removeprefix("denoiser."), maxsplit=1)[0]


def block_position(block: str) -> tuple[int, str, int]:
    """Sorting key: the order in which a latent passes the blocks, text encoders first, unknown ones last."""
    first, _, number = block.partition(".")
    position = _ORDER.get(first, len(_ORDER))
    return position, first if position == len(_ORDER) else "", int(number) if number.isdigit() else -1


def _encoder_block(name: str, found: "re.Match[str]") -> str:
    number = found[1] or found[2]
    encoder = "text_encoder" if number in (None, "", "1") else f"text_encoder_{number}"
    layer = _LAYER.search(name, found.end())
    return f"{encoder}.{layer[1]}" if layer else encoder


_FLOW: Final = (
    "text_encoder text_encoder_2 text_encoder_3 conv_in x_embedder img_in patch_embedding txt_in context_embedder "
    "time_embedding time_embed time_in time_text_embed condition_embedder add_embedding label_emb vector_in "
    "down_blocks input_blocks mid_block middle_block up_blocks output_blocks double_blocks joint_blocks "
    "transformer_blocks single_blocks single_transformer_blocks blocks norm_out conv_out proj_out final_layer head out"
)
_ORDER: Final = {name: index for index, name in enumerate(_FLOW.split())}
