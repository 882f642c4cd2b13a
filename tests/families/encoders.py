"""The text encoders of transformers at small size. Each width is its own, so that none stands in for another."""

from typing import Any

from tests.families.tokenizers import IS_TRANSFORMERS_5, VOCABULARY, clip_tokenizer
from tests.families.weights import built, copied
from torch import nn

T5_WIDTH, QWEN_WIDTH = 24, 32


@copied
def clip(width: int = 16, *, projection: int | None = None, layers: int = 2) -> nn.Module:
    """A CLIPTextModel, or one with a projection."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokens = clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        projection_dim=projection or width,
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    kind: Any = CLIPTextModel if projection is None else CLIPTextModelWithProjection
    return built(lambda: kind(config))


@copied
def t5(width: int = T5_WIDTH, *, umt5: bool = False) -> nn.Module:
    """A T5EncoderModel or UMT5EncoderModel."""
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": width,
        "d_kv": 4,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
    }
    return built(lambda: UMT5EncoderModel(UMT5Config(**sizes)) if umt5 else T5EncoderModel(T5Config(**sizes)))


@copied
def qwen() -> nn.Module:
    """A Qwen2.5-VL, with the vision tower that Qwen-Image's text encoder has too."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": QWEN_WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "rope_parameters" if IS_TRANSFORMERS_5 else "rope_scaling": rope,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return built(lambda: Qwen2_5_VLForConditionalGeneration(config))
