"""A pipeline for a benchmark, from a folder or from the hub."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import torch

from sigmascope.errors import CheckpointError

Offload = Literal["none", "model", "sequential"]
_HUB_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def load_pipeline(source: str, *, dtype: torch.dtype, device: torch.device, offload: Offload = "none") -> Any:
    """Load a diffusers pipeline and put it on a device.

    Args:
        source: A folder that diffusers wrote, or a name on the Hugging Face hub.
        dtype: Of the weights.
        device: Where it runs.
        offload: Which of diffusers' offloadings keeps weights in RAM until they are needed.

    Returns:
        The pipeline, without its progress bar.

    Raises:
        CheckpointError: It is not there, is no pipeline, or cannot be loaded; says why.
    """
    from diffusers import DiffusionPipeline

    _check_source(source)
    try:
        with _bars_for_terminals_alone():
            pipeline = DiffusionPipeline.from_pretrained(source, **{_dtype_argument(): dtype})
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise CheckpointError(
            source, f"cannot be loaded as a pipeline ({_first_line(error)}).", hint=_hint(source)
        ) from error
    pipeline.set_progress_bar_config(disable=True)
    if offload == "model":
        pipeline.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipeline.enable_sequential_cpu_offload(device=device)
    else:
        pipeline.to(device)
    return pipeline


def _check_source(source: str) -> None:
    path = Path(source)
    if path.is_dir():
        if not (path / "model_index.json").is_file():
            raise CheckpointError(
                source, "holds no model_index.json.", hint="Name a folder written by save_pretrained."
            )
    elif path.exists():
        raise CheckpointError(
            source, "is no folder of a pipeline.", hint="Name a folder written by save_pretrained."
        )
    elif not _HUB_NAME.fullmatch(source):
        raise CheckpointError(
            source, "is neither a folder nor a name on the hub.", hint="Name a folder, owner/name, or pocket."
        )


@contextmanager
def _bars_for_terminals_alone() -> Iterator[None]:
    """Keep the libraries' progress bars out of what is no terminal; afterwards they are as they were."""
    import diffusers
    import transformers

    bars = [library.utils.logging for library in (diffusers, transformers)]
    hidden = [] if sys.stderr.isatty() else [one for one in bars if one.is_progress_bar_enabled()]
    for one in hidden:
        one.disable_progress_bar()
    try:
        yield
    finally:
        for one in hidden:
            one.enable_progress_bar()


def _dtype_argument() -> str:
    """Renamed by diffusers, whose later versions warn of the old name and whose earlier ones ignore the new one."""
    from diffusers.pipelines import pipeline_utils

    return "dtype" if hasattr(pipeline_utils, "_resolve_dtype") else "torch_dtype"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].partition(" (")[0].rstrip(".:") if lines else type(error).__name__


def _hint(source: str) -> str:
    if Path(source).is_dir():
        return "Load it with diffusers alone to see more."
    return "Check the name, the network, and that you may read it; or download it and name the folder."
