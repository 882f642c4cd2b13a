"""Make the model that LBM training starts from: a text-to-image backbone, adapted to the LBM's shapes.

A fine-tuned LBM minus this base is what training changed, so a LoRA is extracted against it. The rule
(SPEC section 7): UNet and VAE weights of the backbone, without `add_embedding`; the first convolution and the
keys and values of both attentions are brought to the new widths by cutting, or by filling with zeros;
`num_iterations` is 0. Everything else must fit as it is, and nothing else may be left over.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, StreamingWriter, open_checkpoint, save_torch
from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.model import build_lbm
from sigmascope.progress import Progress, no_progress

Change = Literal["cut", "zero-filled", "cut and zero-filled"]

DROPPED = "add_embedding."
"""The UNet's size and crop embedding: an LBM has none."""

_PREFIXES = {"denoiser.": "unet", "vae.vae_model.": "vae"}


@dataclass(frozen=True, slots=True)
class BaseReport:
    """What became of the backbone's weights: keys of the base by what was done, and keys left out."""

    path: Path
    backbone: Path
    adapted: dict[str, Change]
    dropped: tuple[str, ...]


def create_base(
    config: LbmConfig,
    save_path: Path,
    *,
    backbone: str | Path | None = None,
    progress: Progress = no_progress,
) -> BaseReport:
    """Write the exact base of an LBM, in the backbone's own dtypes.

    Args:
        config: Of the LBM.
        save_path: `.safetensors`, written a tensor at a time, or `.ckpt`, which holds the model in memory.
        backbone: A diffusers folder with `unet` and `vae`, or a repository of the Hugging Face hub; None is
            the config's `backbone_signature`.
        progress: Told after each tensor.

    Raises:
        ConfigError: The backbone cannot be had, or the target's name says no format.
        CheckpointError: The backbone cannot be read, or lacks a weight.
        ModelMismatchError: A weight cannot be adapted (named with both shapes) or has no place in the LBM.
        WriteError: The target cannot be written; it is as it was.
    """
    if save_path.suffix not in (".safetensors", ".ckpt"):
        raise ConfigError(
            f"{save_path}: a base is written as .safetensors or .ckpt.", hint="Choose one of these endings."
        )
    folder = _backbone_folder(str(backbone or config.backbone_signature))
    with ExitStack() as files:
        parts = {name: files.enter_context(open_checkpoint(folder / name)) for name in ("unet", "vae")}
        shapes = {
            key: tuple(value.shape) for key, value in build_lbm(config, device="meta").state_dict().items()
        }
        _refuse_leftovers(shapes, parts)
        adapted = {key: change for key, shape in shapes.items() if (change := _change(key, shape, parts))}
        if save_path.suffix == ".ckpt":
            save_torch(save_path, dict(_tensors(shapes, parts, progress)))
        else:
            writer = files.enter_context(StreamingWriter(save_path, {"format": "pt"}, expected=shapes))
            for key, tensor in _tensors(shapes, parts, progress):
                writer.write(key, tensor)
        dropped = tuple(key for key in parts["unet"].keys() if key.startswith(DROPPED))  # noqa: SIM118 - no dict
    return BaseReport(save_path, folder, adapted, dropped)


def adapt_weight(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Bring a weight to another shape: what is too long is cut at the end, what is too short filled with zeros.

    Raises:
        ModelMismatchError: The number of dimensions differs.
    """
    if weight.ndim != len(shape):
        raise ModelMismatchError(
            f"A weight of shape {list(weight.shape)} cannot become {list(shape)}.",
            hint="Use a backbone of the architecture that the config describes.",
        )
    common = tuple(slice(0, min(had, wanted)) for had, wanted in zip(weight.shape, shape, strict=True))
    adapted = torch.zeros(shape, dtype=weight.dtype)
    adapted[common] = weight[common]
    return adapted


def _tensors(
    shapes: dict[str, tuple[int, ...]], parts: dict[str, Checkpoint], progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    for done, (key, shape) in enumerate(shapes.items(), start=1):
        if key == "num_iterations":
            yield key, torch.zeros((), dtype=torch.float32)
        else:
            checkpoint, name = _origin(key, parts)
            tensor = checkpoint.tensor(name)
            yield key, tensor if tuple(tensor.shape) == shape else adapt_weight(tensor, shape)
        progress(done, len(shapes), key)


def _change(key: str, shape: tuple[int, ...], parts: dict[str, Checkpoint]) -> Change | None:
    """How a weight has to change; checked for all before the first is written."""
    if key == "num_iterations":
        return None
    checkpoint, name = _origin(key, parts)
    had = checkpoint.info(name).shape
    if tuple(had) == shape:
        return None
    if not _may_adapt(key) or len(had) != len(shape):
        raise ModelMismatchError(
            f"{checkpoint.path}: {name} is {list(had)}, and the LBM's {key} is {list(shape)}; "
            "only the first convolution and the attentions' keys and values can be adapted.",
            hint="Use a backbone of the architecture that the config describes.",
        )
    cut = any(h > w for h, w in zip(had, shape, strict=True))
    filled = any(h < w for h, w in zip(had, shape, strict=True))
    return "cut and zero-filled" if cut and filled else "cut" if cut else "zero-filled"


def _refuse_leftovers(shapes: dict[str, tuple[int, ...]], parts: dict[str, Checkpoint]) -> None:
    """Refuse a backbone that is larger than the LBM: what is left of it would be lost unseen."""
    for prefix, part in _PREFIXES.items():
        left = [key for key in parts[part] if prefix + key not in shapes and not key.startswith(DROPPED)]
        if left:
            raise ModelMismatchError(
                f"{parts[part].path}: the LBM has no place for {len(left)} weights, first {left[0]}.",
                hint="Use a backbone of the architecture that the config describes.",
            )


def _may_adapt(key: str) -> bool:
    attention = key.startswith("denoiser.") and (".attn1." in key or ".attn2." in key)
    return key == "denoiser.conv_in.weight" or (attention and key.endswith((".to_k.weight", ".to_v.weight")))


def _origin(key: str, parts: dict[str, Checkpoint]) -> tuple[Checkpoint, str]:
    prefix = next(prefix for prefix in _PREFIXES if key.startswith(prefix))
    return parts[_PREFIXES[prefix]], key.removeprefix(prefix)


def _backbone_folder(signature: str) -> Path:
    local = Path(signature)
    if local.is_dir():
        return local
    return _download(signature)


def _download(signature: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    fetch: Callable[..., str] = snapshot_download
    wanted = [
        f"{part}/{name}"
        for part in ("unet", "vae")
        for name in (
            "config.json",
            "diffusion_pytorch_model.safetensors*",
            "diffusion_pytorch_model-*.safetensors",
        )
    ]
    try:
        return Path(fetch(signature, allow_patterns=wanted))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(
            f"--backbone_signature {signature}: is no folder here, and cannot be fetched from the hub "
            f"({str(error).splitlines()[0]}).",
            hint="Give the folder of a diffusers model that holds unet and vae.",
        ) from error
