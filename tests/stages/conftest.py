"""Real encoders at small size, with tokenizers trained here; and ComfyUI's CLIP as its code lays it out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.stages.lora_targets import apply, clip, unet
from tests.stages.vaes import encode_pixels, make_comfy_vae, make_vae
from torch import Tensor, nn

__all__ = ["apply", "clip", "encode_pixels", "make_comfy_vae", "make_vae", "unet"]  # fixtures

CORPUS = [
    "a red fox jumps over the lazy dog",
    "masterpiece, best quality, highly detailed portrait of a young woman",
    "a castle on a hill at sunset, dramatic lighting, 4k",
    "blurry, low quality, watermark, text",
]
VOCABULARY = 320


@pytest.fixture(scope="session")
def clip_tokenizer() -> Any:
    """A CLIP tokenizer of 77 tokens, with byte-level BPE trained on the corpus."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        end_of_word_suffix="</w>",
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|endoftext|>",
        special_tokens=[("<|startoftext|>", 0), ("<|endoftext|>", 1)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        model_max_length=77,
    )


@pytest.fixture(scope="session")
def t5_tokenizer() -> Any:
    """A T5 tokenizer of 512 tokens: Unigram, one end token, no start token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=512,
    )


MakeModel = Callable[..., nn.Module]


@pytest.fixture(scope="session")
def make_clip() -> MakeModel:
    """A CLIPTextModel, or one with projection, of one layer."""

    def make(width: int = 32, *, projection: bool = False) -> nn.Module:
        from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

        config = CLIPTextConfig(
            vocab_size=400,
            hidden_size=width,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            projection_dim=24,
            bos_token_id=0,
            eos_token_id=1,
        )
        torch.manual_seed(0)
        kind = CLIPTextModelWithProjection if projection else CLIPTextModel
        model: nn.Module = kind(config).eval()
        return model

    return make


@pytest.fixture(scope="session")
def make_t5() -> MakeModel:
    """A T5EncoderModel or UMT5EncoderModel of one layer."""

    def make(width: int = 32, *, umt5: bool = False) -> nn.Module:
        from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

        sizes = {"vocab_size": 400, "d_model": width, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        torch.manual_seed(0)
        model: nn.Module = (
            UMT5EncoderModel(UMT5Config(**sizes)) if umt5 else T5EncoderModel(T5Config(**sizes))
        )
        return model.eval()

    return make


@pytest.fixture(scope="session")
def qwen() -> nn.Module:
    """The text part of a Qwen2.5-VL of one layer."""
    from transformers.models.qwen2_5_vl import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    config = Qwen2_5_VLTextConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=0,
        eos_token_id=1,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3]},
    )
    torch.manual_seed(0)
    model: nn.Module = Qwen2_5_VLTextModel(config).eval()
    return model


class ComfyTokenizer:
    """ComfyUI's tokenizer of one prompt into chunks of 77 for each encoder: (token, weight, word)."""

    def __init__(self, words_a_chunk: int = 75) -> None:
        self.words_a_chunk = words_a_chunk

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False) -> dict[str, Any]:
        words = text.split()
        pieces = [words[i : i + self.words_a_chunk] for i in range(0, len(words), self.words_a_chunk)] or [[]]
        chunks = []
        for number, piece in enumerate(pieces):
            chunk = [(49406, 1.0, 0)]
            chunk += [(len(word), 1.0, number * 75 + i + 1) for i, word in enumerate(piece)]
            chunk += [(49407, 1.0, 0)] * (77 - len(chunk))
            chunks.append(chunk)
        return {"l": chunks, "g": chunks}


class ComfyEncoder(nn.Module):
    """ComfyUI's SDClipModel: the encoder itself is its `transformer`, without a config."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transformer = nn.Sequential(nn.Embedding(8, width))


class ComfyPatcher:
    """ComfyUI's ModelPatcher, as far as it tells its state."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.patches: dict[str, list[Any]] = {}
        self.patches_uuid = "uuid-1"


class ComfyClip:
    """ComfyUI's CLIP with named encoders."""

    def __init__(self, **encoders: int) -> None:
        self.cond_stage_model = nn.Module()
        for name, width in encoders.items():
            self.cond_stage_model.add_module(name, ComfyEncoder(width))
        self.patcher = ComfyPatcher(self.cond_stage_model)
        self.tokenizer = ComfyTokenizer()


@pytest.fixture
def make_comfy_clip() -> type[ComfyClip]:
    return ComfyClip


@pytest.fixture
def encode(clip_tokenizer: Any) -> Callable[[nn.Module, str], Any]:
    """Encode one prompt as pipelines do: padded to 77 tokens and cut there."""

    def run(model: nn.Module, prompt: str) -> Any:
        encoded = clip_tokenizer(
            prompt, padding="max_length", max_length=77, truncation=True, return_tensors="pt"
        )
        ids: Tensor = encoded["input_ids"]
        with torch.no_grad():
            return model(ids)

    return run
