"""Loading that is watched: the stage `model_loading` of the current recorder."""

from pathlib import Path

import torch

from sigmascope.checkpoints import open_checkpoint
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.loading import compare_keys
from sigmascope.lbm.model import LbmModel, build_lbm, fill_lbm, resolve_config
from sigmascope.monitor import stage
from sigmascope.progress import Progress, no_progress


def load_watched(
    path: str | Path,
    config: LbmConfig | str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    progress: Progress = no_progress,
) -> LbmModel:
    """Load a checkpoint as `load_lbm` does, as a stage of the current recorder (SPEC section 2).

    The stage holds file, format ("safetensors" or "pickle"), bytes of all files, parameters, dtype, device,
    and missing and unexpected keys, these even when loading fails over them. Its duration is the load time.
    Without a recorder nothing is kept.

    Args:
        path: Any layout that `open_checkpoint` reads.
        config: Of the model, or its YAML file; None looks beside the checkpoint.
        dtype: Of the weights.
        device: Where the weights go.
        progress: Told after each tensor.

    Returns:
        The model in evaluation mode.

    Raises:
        ConfigError: The config is not valid.
        CheckpointError: The file is missing, damaged, or refused.
        ModelMismatchError: Names keys that are missing, unexpected or of another shape.
        NonFiniteError: Names the first tensor with NaN or Inf.
    """
    with stage("model_loading") as recorded:
        recorded.fact("file", str(path))
        recorded.fact("dtype", str(dtype).removeprefix("torch."))
        recorded.fact("device", str(device))
        config = resolve_config(path, config)
        with open_checkpoint(path) as checkpoint:
            recorded.fact("format", checkpoint.format)
            recorded.fact("file_bytes", sum(file.stat().st_size for file in checkpoint.files))
            model = build_lbm(config, device="meta")
            missing, unexpected = compare_keys(model, checkpoint)
            recorded.fact("missing_keys", missing)
            recorded.fact("unexpected_keys", unexpected)
            fill_lbm(model, checkpoint, dtype=dtype, device=device, progress=progress)
        recorded.fact("parameters", sum(parameter.numel() for parameter in model.parameters()))
        recorded.module("denoiser", model.denoiser)
        recorded.module("vae", model.vae)
    return model
