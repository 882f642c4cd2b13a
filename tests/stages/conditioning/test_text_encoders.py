"""The width table of SPEC section 4 and every case in which the width misleads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sigmascope.stages.conditioning import (
    EncoderFacts,
    find_encoders,
    find_tokenizers,
    identify,
    variant_by_width,
)


@pytest.mark.parametrize(
    ("width", "variant"),
    [
        (768, "SD 1.5 CLIP"),
        (1024, "SD 2.1 CLIP"),
        (1280, "SDXL CLIP"),
        (2048, "SD 3 / WAN T5"),
        (999, "Unknown CLIP (999)"),
    ],
)
def test_the_table_by_width(width: int, variant: str) -> None:
    assert variant_by_width(width) == variant


@pytest.mark.parametrize(
    ("shape", "family", "evidence", "variant", "conflict"),
    [
        ((1, 77, 768), "CLIP-L", "token_count", "SD 1.5 CLIP", False),
        ((1, 154, 768), "CLIP-L", "token_count", "SD 1.5 CLIP", False),
        ((1, 77, 1024), "OpenCLIP-H", "token_count", "SD 2.1 CLIP", False),
        ((1, 77, 1280), "OpenCLIP-G", "token_count", "SDXL CLIP", False),
        ((1, 77, 2048), "CLIP-L + OpenCLIP-G", "token_count", "SDXL CLIP", True),
        ((2, 231, 2048), "CLIP-L + OpenCLIP-G", "token_count", "SDXL CLIP", True),
        ((1, 512, 2048), "T5-XL", "width", "SD 3 / WAN T5", False),
        ((1, 512, 4096), "T5-XXL", "width", "SD 3 / WAN T5", True),
        ((1, 154, 4096), "T5-XXL", "width", "SD 3 / WAN T5", True),
        ((1, 40, 3584), "Qwen2.5-VL", "width", "Qwen2.5-VL", True),
        ((1, 77, 999), "unknown", "none", "Unknown CLIP (999)", False),
        ((1, 50, 768), "CLIP-L", "width", "SD 1.5 CLIP", False),
        ((1, 768), "CLIP-L", "width", "SD 1.5 CLIP", False),
    ],
)
def test_a_bare_tensor(
    shape: tuple[int, ...], family: str, evidence: str, variant: str, conflict: bool
) -> None:
    found = identify(shape, [])
    assert (found["family"], found["evidence"], found["clip_variant"]) == (family, evidence, variant)
    assert (found["conflict"] is not None) == conflict


CLIP_L = EncoderFacts("CLIP-L", "CLIPTextModel", 768)
CLIP_G = EncoderFacts("OpenCLIP-G", "CLIPTextModelWithProjection", 1280)
T5 = EncoderFacts("T5-XXL", "T5EncoderModel", 4096)
UMT5 = EncoderFacts("UMT5-XXL", "UMT5EncoderModel", 4096)
QWEN_3B = EncoderFacts("Qwen2.5-VL", "Qwen2_5_VLTextModel", 2048)


@pytest.mark.parametrize(
    ("shape", "encoders", "family", "variant"),
    [
        ((1, 77, 768), [CLIP_L], "CLIP-L", "SD 1.5 CLIP"),
        ((1, 77, 2048), [CLIP_L, CLIP_G], "CLIP-L + OpenCLIP-G", "SDXL CLIP"),
        ((1, 512, 4096), [CLIP_L, T5], "T5-XXL", "SD 3 / WAN T5"),
        ((1, 333, 4096), [CLIP_L, CLIP_G, T5], "CLIP-L + OpenCLIP-G + T5-XXL", "SD 3 / WAN T5"),
        ((1, 512, 4096), [UMT5], "UMT5-XXL", "SD 3 / WAN T5"),
        ((1, 77, 2048), [QWEN_3B], "Qwen2.5-VL", "Qwen2.5-VL"),
        ((1, 77, 4096), [CLIP_L, CLIP_G], "CLIP-L + OpenCLIP-G", "SD 3 CLIP"),
        ((1, 77, 1024), [EncoderFacts("BERT", "BertModel", 1024)], "BERT", "BERT"),
    ],
)
def test_the_class_goes_before_the_shape(
    shape: tuple[int, ...], encoders: list[EncoderFacts], family: str, variant: str
) -> None:
    found = identify(shape, encoders)
    assert (found["family"], found["evidence"], found["clip_variant"]) == (family, "class", variant)


def test_a_conflict_says_both_sides() -> None:
    conflict = identify((1, 77, 2048), [CLIP_L, CLIP_G])["conflict"]
    assert conflict == "width 2048 alone says 'SD 3 / WAN T5', class says 'SDXL CLIP'"


def test_a_shape_that_contradicts_the_class_is_a_conflict() -> None:
    found = identify((1, 77, 768), [QWEN_3B])
    assert found["family"] == "Qwen2.5-VL"
    assert "the tensor's token_count suggests CLIP-L" in str(found["conflict"])


@pytest.mark.parametrize(
    ("shape", "one", "family", "evidence"),
    [
        ((1, 77, 2048), CLIP_L, "CLIP-L + OpenCLIP-G", "token_count"),  # SDXL
        ((1, 77, 2048), CLIP_G, "CLIP-L + OpenCLIP-G", "token_count"),
        ((1, 154, 4096), CLIP_L, "T5-XXL", "width"),  # SD 3
        ((1, 512, 4096), CLIP_L, "T5-XXL", "width"),  # FLUX
    ],
)
def test_one_encoder_of_several_does_not_decide(
    shape: tuple[int, ...], one: EncoderFacts, family: str, evidence: str
) -> None:
    found = identify(shape, [one])
    assert (found["family"], found["evidence"]) == (family, evidence)


def test_agreement_is_no_conflict() -> None:
    assert identify((1, 77, 768), [CLIP_L])["conflict"] is None


@pytest.mark.parametrize(
    ("width", "projection", "family"),
    [(768, False, "CLIP-L"), (1024, False, "OpenCLIP-H"), (1280, True, "OpenCLIP-G"), (32, False, "CLIP")],
)
def test_a_clip_model(make_clip: Any, width: int, projection: bool, family: str) -> None:
    (found,) = find_encoders(make_clip(width, projection=projection))
    assert (found.family, found.width) == (family, width)


@pytest.mark.parametrize(
    ("width", "umt5", "family"),
    [(4096, False, "T5-XXL"), (4096, True, "UMT5-XXL"), (2048, False, "T5-XL"), (32, True, "UMT5")],
)
def test_a_t5_model(make_t5: Any, width: int, umt5: bool, family: str) -> None:
    with torch.device("meta"):
        model = make_t5(width, umt5=umt5)
    (found,) = find_encoders(model)
    assert (found.family, found.width) == (family, width)


def test_a_qwen_text_model(qwen: nn.Module) -> None:
    assert [encoder.family for encoder in find_encoders(qwen)] == ["Qwen2.5-VL"]


def test_the_text_part_of_a_vision_model_counts() -> None:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(  # type: ignore[assignment]
        model_type="qwen2_5_vl", text_config=SimpleNamespace(model_type="qwen2_5_vl_text", hidden_size=3584)
    )
    (found,) = find_encoders(model)
    assert (found.family, found.width) == ("Qwen2.5-VL", 3584)


@pytest.mark.parametrize(
    ("model_type", "family"),
    [
        ("gemma2", "Gemma 2"),
        ("gemma3_text", "Gemma 3"),
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("bert", "BERT"),
        ("glm", "GLM"),
        ("t5gemma2", "T5Gemma"),
        ("blip", "unknown"),
    ],
)
def test_other_language_models(model_type: str, family: str) -> None:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(model_type=model_type, hidden_size=2304)  # type: ignore[assignment]
    assert find_encoders(model)[0].family == family


class ComfyT5(nn.Module):
    """ComfyUI's T5 as it lays its modules out: attention's table of distances comes before that of the tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.add_module("relative_attention_bias", nn.Embedding(32, heads))
        self.shared = nn.Embedding(64, width)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.shared


class ComfyBert(nn.Module):
    """Its BERT is called `hydit_clip`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.position_embeddings = nn.Embedding(512, width)
        self.word_embeddings = nn.Embedding(8, width)


BertModel = type("BertModel", (ComfyBert,), {})

# The widths that the models' authors publish; heads are what the table of distances is wide.
T5_KIN = [
    ("t5xxl", 4096, 64, "T5-XXL"),
    ("umt5xxl", 4096, 64, "UMT5-XXL"),
    ("t5xxl", 1024, 128, "T5"),  # T5-11B, in Cosmos
    ("pile_t5xl", 2048, 32, "T5-XL"),
    ("mt5xl", 2048, 32, "mT5-XL"),
    ("umt5base", 768, 12, "UMT5-Base"),
    ("t5base", 768, 12, "T5-Base"),
    ("byt5_small", 1472, 6, "ByT5"),
]


def comfy_clip(name: str, transformer: nn.Module) -> SimpleNamespace:
    root = nn.Module()
    root.add_module(name, nn.Module())
    root.get_submodule(name).add_module("transformer", transformer)
    return SimpleNamespace(cond_stage_model=root)


@pytest.mark.parametrize(("name", "width", "heads", "family"), T5_KIN)
def test_the_width_of_t5_is_that_of_its_tokens(name: str, width: int, heads: int, family: str) -> None:
    (found,) = find_encoders(comfy_clip(name, ComfyT5(width, heads)))
    assert (found.family, found.width) == (family, width)


def test_bert_is_no_clip_whatever_it_is_called() -> None:
    (found,) = find_encoders(comfy_clip("hydit_clip", BertModel(1024)))
    assert (found.family, found.width) == ("BERT", 1024)


def test_without_a_method_that_names_it_the_largest_table_is_the_tokens() -> None:
    model = nn.ModuleList([nn.Embedding(32, 64), nn.Embedding(77, 24), nn.Embedding(49408, 24)])
    assert find_encoders(model)[0].width == 24


def test_a_method_that_raises_loses_nothing() -> None:
    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(64, 24)

        def get_input_embeddings(self) -> nn.Embedding:
            raise NotImplementedError

    assert find_encoders(Unusual())[0].width == 24


@pytest.mark.parametrize(
    ("encoders", "families"),
    [
        ({"clip_l": 768}, ["CLIP-L"]),
        ({"clip_l": 768, "clip_g": 1280}, ["CLIP-L", "OpenCLIP-G"]),
        ({"clip_l": 768, "t5xxl": 4096}, ["CLIP-L", "T5-XXL"]),
        ({"umt5xxl": 4096}, ["UMT5-XXL"]),
        ({"qwen25_7b": 3584}, ["Qwen2.5-VL"]),
        ({"gemma2_2b": 2304}, ["Gemma 2"]),
    ],
)
def test_encoders_of_comfyui(make_comfy_clip: Any, encoders: dict[str, int], families: list[str]) -> None:
    assert [encoder.family for encoder in find_encoders(make_comfy_clip(**encoders))] == families


def test_a_pipeline_holds_its_encoders_and_tokenizers(make_clip: Any, clip_tokenizer: Any) -> None:
    parts = {
        "text_encoder": make_clip(768),
        "text_encoder_2": make_clip(1280, projection=True),
        "unet": nn.Linear(2, 2),
        "tokenizer": clip_tokenizer,
        "tokenizer_2": clip_tokenizer,
    }
    pipeline = SimpleNamespace(components=parts)
    assert [encoder.family for encoder in find_encoders(pipeline)] == ["CLIP-L", "OpenCLIP-G"]
    assert list(find_tokenizers(pipeline)) == ["tokenizer", "tokenizer_2"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it first compiles
@pytest.mark.parametrize("wrap", [pytest.param(torch.compile, marks=pytest.mark.slow), nn.DataParallel])
def test_a_wrapped_model_is_seen_through(make_clip: Any, wrap: Any) -> None:
    for clip in (wrap(make_clip(768)), {"text_encoder": wrap(make_clip(768))}):
        assert [encoder.family for encoder in find_encoders(clip)] == ["CLIP-L"]


def test_something_else_has_no_encoders() -> None:
    assert find_encoders(object()) == []
    assert find_encoders(None) == []
    assert find_tokenizers(None) == {}
