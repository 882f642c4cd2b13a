"""The header of a LoRA file: the fields by which other tools know what it is.

`ss_*` are the fields of kohya's tools, which web UIs read too; `networks.lora` is their name for plain up/down
factors. `modelspec.*` is the model metadata standard of Stability AI. A hash of the tensors (`sshs_*`) is left out:
tools that want one calculate it, and a stale one is worse than none.
"""

import json
from collections.abc import Mapping
from typing import Final

_ARCHITECTURES: Final = {
    "lbm": "lbm",
    "sd15": "stable-diffusion-v1",
    "sd2": "stable-diffusion-v2",
    "sdxl": "stable-diffusion-xl-v1-base",
    "sd3": "stable-diffusion-3",
    "flux": "flux-1",
    "wan": "wan",
    "qwen_image": "qwen-image",
}
FAMILIES: Final = tuple(_ARCHITECTURES)
"""The families of models that are known by name."""

_BASE_VERSIONS: Final = {
    "lbm": "lbm",
    "sd15": "sd_v1",
    "sd2": "sd_v2",
    "sdxl": "sdxl_base_v1-0",
    "sd3": "sd3",
    "flux": "flux1",
    "wan": "wan",
    "qwen_image": "qwen_image",
}
_STALE: Final = (
    "lbm_native_naming",
    "lora_adapter_metadata",
    "sshs_model_hash",
    "sshs_legacy_hash",
    "modelspec.hash_sha256",
    "ss_network_module",
    "ss_network_dim",
    "ss_network_alpha",
    "ss_network_args",
)


VARYING: Final = "Dynamic"
"""What kohya's tools write for the rank where it differs from layer to layer."""


def lora_header(
    format_name: str,
    family: str,
    rank: int | str | None,
    conv_rank: int | None,
    *,
    module: str = "networks.lora",
) -> dict[str, str]:
    """Give the header for a LoRA of these ranks.

    Args:
        format_name: Of the file that is written.
        family: Of the model that the LoRA is for.
        rank: Of its Linear layers, or `VARYING`; None without any.
        conv_rank: Of its convolutions; None without any.
        module: kohya's name for the kind of network.
    """
    first = rank if rank is not None else conv_rank
    header = {
        "ss_network_module": module,
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.implementation": "sigmascope",
    }
    if first is not None:
        header |= {"ss_network_dim": str(first), "ss_network_alpha": str(first)}
    if format_name == "native":
        header["lbm_native_naming"] = "true"
    if family in _ARCHITECTURES:
        header["ss_base_model_version"] = _BASE_VERSIONS[family]
        header["modelspec.architecture"] = f"{_ARCHITECTURES[family]}/lora"
    if conv_rank is not None:
        header["ss_network_args"] = json.dumps({"conv_dim": str(conv_rank), "conv_alpha": str(conv_rank)})
    return header


def kept_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """What of a file's header is still true once its LoRA is in another file."""
    return {key: value for key, value in metadata.items() if key not in _STALE}


def family_in(metadata: Mapping[str, str]) -> str | None:
    """The family that a header names; None where it names none that is known."""
    architecture = metadata.get("modelspec.architecture", "").partition("/")[0]
    for family, name in sorted(_ARCHITECTURES.items(), key=lambda item: -len(item[1])):
        if architecture.startswith(name):
            return family
    version = metadata.get("ss_base_model_version", "")
    for family, name in sorted(_BASE_VERSIONS.items(), key=lambda item: -len(item[1])):
        if version.startswith(name):
            return family
    return None
