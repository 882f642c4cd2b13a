"""Fetch a backbone's UNet and VAE from the Hugging Face hub, and nothing else of it."""

from collections.abc import Callable
from pathlib import Path

from sigmascope.errors import ConfigError

_STEM = "diffusion_pytorch_model"


def download(signature: str, variant: str | None) -> Path:
    """Fetch a repository's `unet` and `vae` in one variant, or find them in the local cache.

    Args:
        signature: Such as `stabilityai/stable-diffusion-xl-base-1.0`.
        variant: Such as `fp16`; None for the plain files.

    Returns:
        The local folder.

    Raises:
        ConfigError: The repository cannot be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    fetch: Callable[..., str] = snapshot_download
    try:
        return Path(fetch(signature, allow_patterns=wanted_files(variant)))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(
            f"--backbone_signature {signature}: is no folder or file here, and cannot be fetched from the hub "
            f"({str(error).splitlines()[0]}).",
            hint="Give a diffusers folder that holds unet and vae, or a single-file checkpoint.",
        ) from error


def wanted_files(variant: str | None) -> list[str]:
    """Patterns of the files that a base is made from; those of other variants are gigabytes nobody reads."""
    dotted = "" if variant is None else f".{variant}"
    names = (
        "config.json",
        f"{_STEM}{dotted}.safetensors",
        f"{_STEM}.safetensors.index{dotted}.json",
        f"{_STEM}{dotted}-*-of-*.safetensors",
        f"{_STEM}-*-of-*{dotted}.safetensors",
    )
    return [f"{part}/{name}" for part in ("unet", "vae") for name in names]
