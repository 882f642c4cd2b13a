"""What the loaders of the field do with a file that is right in itself (diffusers 0.42 and ComfyUI 0.3 to 0.18)."""

from collections.abc import Iterator, Sequence
from typing import Final

from sigmascope.lora.names.layer_paths import UNET_FAMILIES
from sigmascope.lora.verdict.file_family import title_of
from sigmascope.lora.verdict.lora_verdict import LoraVerdict
from sigmascope.records.finding import Finding

_DIFFERENCES: Final = (".diff", ".diff_b", ".set_weight", ".w_norm", ".b_norm")
_UP_BIAS: Final = (".lora_B.bias", ".lora_up.bias")


def loader_findings(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    """What to know before the file is given to diffusers or ComfyUI.

    Args:
        verdict: With its modules.
        keys: Of the file.
    """
    yield from _ignored_alphas(verdict, keys)
    yield from _kohya_names(verdict)
    yield from _comfyui_names(verdict, keys)
    yield from _differences(verdict, keys)
    yield from _half_of_attention(verdict)
    yield from _prefix(verdict)
    yield from _some_biases(verdict, keys)
    yield from _rotations(verdict)


def _ignored_alphas(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    alphas = [key for key in keys if key.endswith(".alpha")]
    if verdict.format != "peft" or not alphas:
        return
    scaled = [module for module in verdict.modules if module.scale not in (None, 1.0)]
    told = f", so that {len(scaled)} modules act with another strength there" if scaled else ""
    yield Finding(
        "lora_alpha_ignored",
        "warning" if scaled else "info",
        f"diffusers ignores the {len(alphas)} .alpha tensors beside lora_A and lora_B{told}.",
        {"alphas": len(alphas), "scaled": len(scaled), "first_scale": scaled[0].scale if scaled else None},
        "Convert the file (sigmascope lora convert): the scale is then in the factors." if scaled else None,
    )


def _kohya_names(verdict: LoraVerdict) -> Iterator[Finding]:
    if verdict.format == "kohya":
        yield Finding(
            "lora_kohya_names",
            "info",
            "The file has kohya's names: diffusers reads them through a pipeline's load_lora_weights, not through "
            "a model's load_lora_adapter.",
            {"format": verdict.format},
            "Load it with the pipeline, or convert it to PEFT's format (sigmascope lora convert).",
        )


def _comfyui_names(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    """Diffusers renames `diffusion_model.` for most newer families; for these it finds nothing under that name."""
    as_peft = any(".lora_A." in key for key in keys)
    lost = verdict.model_family in UNET_FAMILIES | {"sd3"} or (verdict.model_family == "flux" and as_peft)
    if verdict.format == "comfyui" and verdict.matched and lost:
        yield Finding(
            "lora_comfyui_names",
            "warning",
            f"diffusers loads nothing of names that begin with diffusion_model. into {title_of(verdict.model_family)}, "
            "and returns normally.",
            {"modules": len(verdict.matched), "first": verdict.matched[0].name},
            "For diffusers, convert the file to PEFT's format (sigmascope lora convert).",
        )


def _differences(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    found = [key for key in keys if key.endswith(_DIFFERENCES)]
    if not found:
        return
    fate = "drops them without a word" if verdict.format == "peft" else "refuses the file because of them"
    yield Finding(
        "lora_whole_differences",
        "warning",
        f"{len(found)} keys hold whole differences, such as {found[0]}: diffusers {fate}.",
        {"keys": len(found), "first": found[0]},
        "Load the file in ComfyUI, or merge it into the checkpoint (sigmascope lora merge).",
    )


def _half_of_attention(verdict: LoraVerdict) -> Iterator[Finding]:
    """ComfyUI finds 234 of SDXL's 794 layers by such names; those of attention are lost."""
    lost = [
        module
        for module in verdict.matched
        if module.name.startswith("unet.") and ".attn" in module.name and ".to_" in module.name
    ]
    if verdict.format == "peft" and verdict.model_family in UNET_FAMILIES and lost:
        yield Finding(
            "lora_comfyui_loses_attention",
            "warning",
            f"ComfyUI does not find {len(lost)} of the {len(verdict.modules)} modules by these names: all "
            "projections of attention, with warnings in its log only.",
            {"modules": len(lost), "of": len(verdict.modules), "first": lost[0].name},
            "For ComfyUI, convert the file to kohya's or ComfyUI's format (sigmascope lora convert).",
        )


def _prefix(verdict: LoraVerdict) -> Iterator[Finding]:
    """The default prefix of `load_lora_adapter` is transformer: with any other, nothing is loaded, with a warning."""
    if verdict.format != "peft" or not verdict.modules:
        return
    starts = {module.name.partition(".")[0] for module in verdict.modules if module.part == "denoiser"}
    if starts and "transformer" not in starts:
        known = sorted(starts & {"unet", "denoiser", "diffusion_model"})
        said = f'prefix="{known[0]}"' if known else "prefix=None"
        yield Finding(
            "lora_prefix",
            "info",
            f"diffusers' load_lora_adapter loads nothing of this file with its default prefix: it needs {said}.",
            {"prefix": known[0] if known else None},
            f"Load it with the pipeline's load_lora_weights, or give load_lora_adapter {said}.",
        )


def _some_biases(verdict: LoraVerdict, keys: Sequence[str]) -> Iterator[Finding]:
    biases = sum(key.endswith(_UP_BIAS) for key in keys)
    modules = sum(not module.name.endswith(".bias") for module in verdict.modules)
    if biases and biases != modules:
        yield Finding(
            "lora_some_biases",
            "warning",
            f"{biases} of {modules} modules have a bias of lora_B: diffusers takes them for all modules or for none.",
            {"biases": biases, "modules": modules},
            "Train or convert without biases of lora_B, or with one in every module.",
        )


def _rotations(verdict: LoraVerdict) -> Iterator[Finding]:
    kinds = sorted({module.kind for module in verdict.modules} & {"oft", "boft", "glora"})
    if kinds:
        named = " and ".join({"oft": "OFT", "boft": "BOFT", "glora": "GLoRA"}[kind] for kind in kinds)
        yield Finding(
            "lora_comfyui_only",
            "warning",
            f"The file holds {named}, which ComfyUI applies and diffusers' LoRA loaders do not.",
            {"kinds": ", ".join(kinds)},
            "Load it in ComfyUI, or convert it to plain LoRA factors with the tool that made it.",
        )
