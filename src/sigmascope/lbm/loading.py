"""Fill a model with a checkpoint's tensors, one at a time, and say exactly what does not fit."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from sigmascope.checkpoints import Checkpoint
from sigmascope.checkpoints.paths import is_folder, is_regular_file, names_in
from sigmascope.checkpoints.weight_files import INDEX_SUFFIX, PICKLE_SUFFIXES
from sigmascope.errors import CheckpointError, ModelMismatchError, NonFiniteError
from sigmascope.lbm.config import LbmConfig, load_config
from sigmascope.progress import Progress, no_progress

NAMED = 5
"""How many keys of a kind an error names before it counts the rest."""


def find_config(checkpoint: str | Path) -> Path | None:
    """Look for the YAML that describes a checkpoint.

    Beside a file that is `<its name without suffix>.yaml`, then `config.yaml`; the name of a sharded one is
    what comes before `.safetensors.index.json`. In a folder it is `<folder's name>.yaml`, then that of the
    weights in it, then `config.yaml`.

    Raises:
        CheckpointError: The system refuses to look at the path.
    """
    checkpoint = Path(checkpoint)
    if is_folder(checkpoint):
        folder, weights = checkpoint, [name for name in names_in(checkpoint) if _is_weights(name)]
        stems = [checkpoint.absolute().name, *map(_stem, weights)]
    else:
        folder, stems = checkpoint.parent, [_stem(checkpoint.name)]
    for name in (*(f"{stem}.yaml" for stem in stems), "config.yaml"):
        if is_regular_file(folder / name):
            return folder / name
    return None


def _is_weights(name: str) -> bool:
    return name.endswith((INDEX_SUFFIX, ".safetensors", *PICKLE_SUFFIXES))


def _stem(name: str) -> str:
    return name.removesuffix(INDEX_SUFFIX) if name.endswith(INDEX_SUFFIX) else Path(name).stem


def config_for(checkpoint: str | Path) -> LbmConfig:
    """Read the config that lies beside a checkpoint; without one, the full-size default.

    Raises:
        ConfigError: The file found there does not describe an LBM model.
        CheckpointError: The system refuses to look at the path.
    """
    path = find_config(checkpoint)
    return LbmConfig() if path is None else load_config(path)


def assign_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    dtypes: Mapping[str, torch.dtype],
    device: str | torch.device,
    *,
    progress: Progress = no_progress,
) -> None:
    """Give every parameter and buffer of a model on the meta device its tensor from a checkpoint.

    Args:
        model: Its keys and shapes must be the checkpoint's.
        checkpoint: Open; tensors are read one at a time.
        dtypes: For each first part of a key ("denoiser", "vae", ...), the dtype that its tensors get.
        device: Where the tensors go.
        progress: Told after each tensor.

    Raises:
        ModelMismatchError: Keys are missing or unexpected, or shapes differ. Nothing was assigned.
        CheckpointError: A tensor cannot be read, or is not of a floating-point dtype.
        NonFiniteError: A tensor holds NaN or Inf.
    """
    expected = model.state_dict(keep_vars=True)
    _check_keys_and_shapes(expected, checkpoint)
    for done, (key, placeholder) in enumerate(expected.items(), start=1):
        tensor = checkpoint.tensor(key)
        _check_values(tensor, key, checkpoint.path)
        tensor = tensor.to(device=device, dtype=dtypes[key.partition(".")[0]])
        _set(model, key, tensor, is_parameter=isinstance(placeholder, nn.Parameter))
        progress(done, len(expected), key)


def compare_keys(model: nn.Module, checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Give the keys that a model has and a checkpoint lacks (missing), and the other way (unexpected)."""
    return _compare(model.state_dict(keep_vars=True), checkpoint)


def _compare(expected: Mapping[str, Tensor], checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    missing = [key for key in expected if key not in checkpoint]
    return missing, sorted(key for key in checkpoint if key not in expected)


def _check_keys_and_shapes(expected: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    wrong = []
    missing, unexpected = _compare(expected, checkpoint)
    if missing:
        wrong.append(f"{len(missing)} missing: {_listed(missing)}")
    if unexpected:
        wrong.append(f"{len(unexpected)} unexpected: {_listed(unexpected)}")
    misshaped = [
        f"{key} (expected {list(tensor.shape)}, found {list(checkpoint.info(key).shape)})"
        for key, tensor in expected.items()
        if key in checkpoint and tuple(checkpoint.info(key).shape) != tuple(tensor.shape)
    ]
    if misshaped:
        wrong.append(f"{len(misshaped)} of another shape: {_listed(misshaped)}")
    if wrong:
        raise ModelMismatchError(
            f"{checkpoint.path}: the weights do not fit the model that the config describes; {'; '.join(wrong)}.",
            hint="Pass the config that this checkpoint was made with (--config_path).",
        )


def _check_values(tensor: Tensor, key: str, path: Path) -> None:
    if not tensor.is_floating_point():
        raise CheckpointError(
            path,
            f"{key} holds {tensor.dtype}, expected a floating-point dtype.",
            hint="Convert quantised weights to bf16 first.",
        )
    if not is_finite(tensor):
        raise NonFiniteError(
            f"{path}: {key} holds NaN or Inf.", hint="The checkpoint is damaged; fetch or save it again."
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or Inf, from one pass over its smallest and largest (`aminmax` keeps NaN)."""
    if tensor.numel() == 0:
        return True
    lowest, highest = torch.aminmax(tensor if tensor.element_size() > 1 else tensor.float())
    return bool(torch.isfinite(lowest) & torch.isfinite(highest))


def _set(model: nn.Module, key: str, tensor: Tensor, *, is_parameter: bool) -> None:
    owner, _, name = key.rpartition(".")
    module = model.get_submodule(owner)
    setattr(module, name, nn.Parameter(tensor) if is_parameter else tensor)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"
