"""Find the text encoders and tokenizers in what a host calls its CLIP, and tell their family.

Everything is known by names and configs, so that neither transformers nor ComfyUI is imported.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from sigmascope.probes.walking import modules_in
from sigmascope.stages.text.encoders import UNKNOWN_FAMILY, EncoderFacts

_SIZES = {
    "CLIP": {768: "CLIP-L", 1024: "OpenCLIP-H", 1280: "OpenCLIP-G"},
    "T5": {512: "T5-Small", 768: "T5-Base", 1024: "T5-Large", 2048: "T5-XL", 4096: "T5-XXL"},
    "UMT5": {512: "UMT5-Small", 768: "UMT5-Base", 2048: "UMT5-XL", 4096: "UMT5-XXL"},
}
"""The usual name of a family's sizes; another width goes by the family's own name."""

_MODEL_TYPES = (
    ("clip", "CLIP"),
    ("umt5", "UMT5"),
    ("mt5", "mT5"),
    ("t5", "T5"),
    ("qwen2_5_vl", "Qwen2.5-VL"),
    ("qwen2_vl", "Qwen2-VL"),
    ("qwen3_vl", "Qwen3-VL"),
    ("qwen3", "Qwen3"),
    ("qwen2", "Qwen2"),
    ("gemma3", "Gemma 3"),
    ("gemma2", "Gemma 2"),
    ("gemma", "Gemma"),
    ("mistral", "Mistral"),
    ("llama", "Llama"),
    ("llava", "Llama"),
    ("chatglm", "ChatGLM"),
    ("phi3", "Phi 3"),
)
"""transformers' `model_type`, by its beginning."""

_CLASS_NAMES = (
    ("byt5", "ByT5"),
    ("umt5", "UMT5"),
    ("t5", "T5"),
    ("qwen25", "Qwen2.5-VL"),
    ("qwen2_5_vl", "Qwen2.5-VL"),
    ("qwen2vl", "Qwen2-VL"),
    ("qwen3", "Qwen3"),
    ("gemma3", "Gemma 3"),
    ("gemma2", "Gemma 2"),
    ("gemma", "Gemma"),
    ("mistral", "Mistral"),
    ("llama", "Llama"),
    ("llava", "Llama"),
    ("chatglm", "ChatGLM"),
    ("clip", "CLIP"),
)
"""What a class or attribute name holds, where there is no config: ComfyUI's `t5xxl`, `Gemma2_2BModel`, `clip_l`."""

_COMFYUI_ENCODER = "transformer"
_PIPELINE_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
_PIPELINE_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3", "tokenizer_4")
_WIDTHS = ("hidden_size", "d_model", "n_embd")


def find_encoders(clip: object) -> list[EncoderFacts]:
    """The text encoders in a transformers model, a pipeline, a mapping of these or a ComfyUI CLIP.

    Raises:
        AttributeError, TypeError, RuntimeError: An object of the host's cannot be read.
    """
    return [_facts(name, module) for name, module in _encoders(clip)]


def find_tokenizers(clip: object) -> dict[str, Any]:
    """The tokenizers that a pipeline, a mapping or a ComfyUI CLIP holds, by name."""
    parts = _parts(clip)
    if not parts and callable(getattr(clip, "tokenize_with_weights", None)):
        return {"tokenizer": clip}
    held = {name: parts.get(name, getattr(clip, name, None)) for name in _PIPELINE_TOKENIZERS}
    known = {name: tokenizer for name, tokenizer in held.items() if _is_tokenizer(tokenizer)}
    if not known and _is_tokenizer(clip):
        return {"tokenizer": clip}
    return known


def named_tokenizers(tokenizer: object) -> dict[str, Any]:
    """What a caller gives as its tokenizer: one, several, a mapping, or whatever holds them."""
    if isinstance(tokenizer, Mapping) and all(_is_tokenizer(one) for one in tokenizer.values()):
        return {str(name): one for name, one in tokenizer.items()}
    if isinstance(tokenizer, list | tuple):
        return dict(zip(_PIPELINE_TOKENIZERS, tokenizer, strict=False))
    return find_tokenizers(tokenizer)


def _is_tokenizer(thing: object) -> bool:
    """Whether it turns text into tokens; a module that can be called does not."""
    if thing is None or isinstance(thing, nn.Module | Mapping):
        return False
    if callable(getattr(thing, "tokenize_with_weights", None)):
        return True
    return callable(thing) and hasattr(thing, "tokenize")


def _parts(thing: object) -> Mapping[str, object]:
    if isinstance(thing, Mapping):
        return thing
    components = None if isinstance(thing, nn.Module) else getattr(thing, "components", None)
    return components if isinstance(components, Mapping) else {}


def _encoders(clip: object) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each encoder."""
    parts = _parts(clip)
    if parts:
        for name, part in parts.items():
            if isinstance(part, nn.Module) and (
                not hasattr(clip, "components") or name in _PIPELINE_ENCODERS
            ):
                yield str(name), _unwrapped(part)
        return
    root = clip if isinstance(clip, nn.Module) else getattr(clip, "cond_stage_model", None)
    if not isinstance(root, nn.Module):
        return
    root = _unwrapped(root)
    inner = [(name, child) for name, child in root.named_children() if _is_comfyui_encoder(child)]
    if inner:
        yield from inner
    else:
        yield "", root


def _unwrapped(module: nn.Module) -> nn.Module:
    """What torch.compile, DataParallel or DistributedDataParallel wrap."""
    while True:
        wraps = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
        inner = getattr(module, "module" if wraps else "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def _is_comfyui_encoder(module: nn.Module) -> bool:
    """ComfyUI's wrapper of one encoder keeps it as `transformer`."""
    return isinstance(getattr(module, _COMFYUI_ENCODER, None), nn.Module)


def _facts(name: str, module: nn.Module) -> EncoderFacts:
    inner = getattr(module, _COMFYUI_ENCODER, None) if _is_comfyui_encoder(module) else module
    config = getattr(inner, "config", None)
    config = getattr(config, "text_config", None) or config
    family = _family_of_config(config)
    width = _width(config, inner)
    if family is None:
        names = (name, type(module).__name__, type(inner).__name__)
        family = next((found for one in names if (found := _by_name(one))), None)
    sized = _SIZES.get(family or "", {}).get(width or 0, family or UNKNOWN_FAMILY)
    return EncoderFacts(sized, type(inner).__name__, width, name)


def _family_of_config(config: object) -> str | None:
    kind = getattr(config, "model_type", None)
    if not isinstance(kind, str):
        return None
    return next((family for prefix, family in _MODEL_TYPES if kind.startswith(prefix)), None)


def _by_name(name: str) -> str | None:
    lowered = name.lower()
    return next((family for part, family in _CLASS_NAMES if part in lowered), None)


def _width(config: object, module: object) -> int | None:
    """Width of the embeddings: what the config says, else that of the first embedding table."""
    for name in _WIDTHS:
        width = getattr(config, name, None)
        if isinstance(width, int):
            return width
    if not isinstance(module, nn.Module):
        return None
    tables = (part for part in modules_in(module) if isinstance(part, nn.Embedding))
    return next((table.embedding_dim for table in tables), None)
