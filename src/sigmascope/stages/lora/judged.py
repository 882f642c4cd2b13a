"""The verdicts on the LoRA's file: whether it is for the models, and what of it is on them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from sigmascope.lora.verdict.applied_verdict import AppliedVerdict
from sigmascope.lora.verdict.judging import judge_lora
from sigmascope.lora.verdict.judging_applied import judge_applied
from sigmascope.lora.verdict.lora_verdict import LoraVerdict
from sigmascope.lora.verdict.model_shapes import shapes_of
from sigmascope.probes.adapters.comfyui import is_comfyui
from sigmascope.probes.reading import Reading
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.lora.applied import Applied
from sigmascope.stages.lora.parts import module_of, parts_of


def judged(path: object, unet: object, clip: object) -> Reading[LoraVerdict]:
    """Match the modules of a LoRA file with the layers of both models. Never raises.

    Args:
        path: The file; None if it was not given.
        unet: The denoiser, in any form that `parts_of` knows.
        clip: The text encoders.
    """
    if path is None:
        return Reading(None, "no file was given")
    modules = read_host(lambda: _named_modules(unet, clip))
    if not modules.value:
        return Reading(None, modules.reason or "no model was given")
    found = modules.value
    return read_host(lambda: judge_lora(Path(path), found))  # type: ignore[arg-type]


def judged_applied(
    path: object, unet: object, clip: object, on_unet: Applied, on_clip: Applied
) -> Reading[AppliedVerdict]:
    """Find the modules of a LoRA file among the changes that are on both models. Never raises.

    Args:
        path: The file; None if it was not given.
        unet: The denoiser.
        clip: The text encoders.
        on_unet: The changes on the denoiser.
        on_clip: Those on the text encoders.
    """
    if path is None:
        return Reading(None, "no file was given")
    return read_host(lambda: _judge_applied(Path(path), unet, clip, on_unet, on_clip))  # type: ignore[arg-type]


def touched_keys(verdict: LoraVerdict | None) -> frozenset[str]:
    """Names of the weights that the matched modules change, as the verdict's models name them."""
    return frozenset(name for module in verdict.matched for name in module.layers) if verdict else frozenset()


def host_of(*models: object) -> str:
    """`comfyui` if one of the models is its, else `diffusers`."""
    found = any(read_host(lambda m=model: is_comfyui(m)).value for model in models)  # type: ignore[misc]
    return "comfyui" if found else "diffusers"


def _judge_applied(
    path: Path, unet: object, clip: object, on_unet: Applied, on_clip: Applied
) -> AppliedVerdict:
    modules = _named_modules(unet, clip)
    names = names_of_all(unet, clip)
    patches = [
        patch if names[side](patch.key) == patch.key else replace(patch, key=names[side](patch.key))
        for side, applied in enumerate((on_unet, on_clip))
        for patch in applied.patches
    ]
    return judge_applied(path, patches, modules or None)


def names_of_all(unet: object, clip: object) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """The names that weights of the denoiser, and of the text encoders, have among those of all models together."""
    modules = _named_modules(unet, clip)
    names = shapes_of(modules) if modules else {}
    starts = [f"{name}." for name in modules]

    def named(key: str, own: list[str]) -> str:
        candidates = (key, *(start + key for start in (*own, "text_encoders.")))
        return next((name for name in candidates if name in names), key)

    return partial(named, own=starts[:1]), partial(named, own=starts[-1:])


def _named_modules(unet: object, clip: object) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for model, model_type, usual in ((unet, "UNet", "unet"), (clip, "CLIP", "text_encoder")):
        for prefix, part in parts_of(model, model_type).items():
            module = module_of(part)
            if module is not None:
                found[prefix.rstrip(".") or _name_of(module, usual)] = module
    return found


def _name_of(module: nn.Module, usual: str) -> str:
    is_transformer = usual == "unet" and "Transformer" in type(module).__name__
    return "transformer" if is_transformer else usual
