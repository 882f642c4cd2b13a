"""The verdict on the LoRA's file and the models that it is for."""

from pathlib import Path

from torch import nn

from sigmascope.lora.verdict import LoraVerdict, judge_lora
from sigmascope.probes.reading import Reading
from sigmascope.stages.host_reading import read_host
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


def touched_keys(verdict: LoraVerdict | None) -> frozenset[str]:
    """Names of the weights that the matched modules change, as the verdict's models name them."""
    return frozenset(name for module in verdict.matched for name in module.layers) if verdict else frozenset()


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
