"""Make the model that LBM training starts from: a text-to-image backbone, adapted to the LBM's shapes.

A fine-tuned LBM minus this base is what training changed, so a LoRA is extracted against it. The rule
(SPEC section 7): UNet and VAE weights of the backbone, without `add_embedding`; the first convolution and the
keys and values of both attentions are brought to the new widths by cutting, or by filling with zeros;
`num_iterations` is 0. Everything else must fit as it is, and nothing else may be left over.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigmascope.checkpoints import StreamingTorchWriter, StreamingWriter, TensorSpec
from sigmascope.errors import NonFiniteError
from sigmascope.lbm.basing.adaptation import (
    DROPPED,
    ITERATIONS,
    Adaptation,
    Shape,
    adapt_weight,
    find_adaptations,
)
from sigmascope.lbm.basing.backbone import Backbone, BackboneWeight, open_backbone
from sigmascope.lbm.basing.targets import Targets, all_or_none, choose_targets, refuse_inputs, require_space
from sigmascope.lbm.config import LbmConfig, load_config
from sigmascope.lbm.loading import is_finite
from sigmascope.lbm.model import build_lbm
from sigmascope.progress import Progress, no_progress
from sigmascope.records.atomic import atomic_path

__all__ = ["BaseReport", "adapt_weight", "create_base"]

Write = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True)
class BaseReport:
    """What became of a backbone's weights.

    Attributes:
        paths: The files of weights, of equal content.
        config_path: The YAML that was written beside them; None when an equal one was there, or none asked for.
        backbone: The folder or file that the weights are from.
        dtypes: Number of the base's weights by dtype, without `num_iterations`.
        adapted: Weights whose shape changed, by the base's key.
        dropped: Shapes of the backbone's weights that an LBM has no use for, by the name that they would have.
        outside: Tensors of a single file that are neither UNet nor VAE, counted by the first part of their names.
        parameters: Of the denoiser.
        modules: Linear and Conv2d layers of the denoiser: what a LoRA can hold.
        nbytes: Of all tensors.
        seconds: That it took.
    """

    paths: tuple[Path, ...]
    config_path: Path | None
    backbone: Path
    dtypes: Mapping[str, int]
    adapted: Mapping[str, Adaptation]
    dropped: Mapping[str, Shape]
    outside: Mapping[str, int]
    parameters: int
    modules: int
    nbytes: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON has it; shapes as lists, files as texts."""
        return {
            "paths": [str(path) for path in self.paths],
            "config_path": None if self.config_path is None else str(self.config_path),
            "backbone": str(self.backbone),
            "dtypes": dict(self.dtypes),
            "adapted": {
                key: {"change": each.change, "from": list(each.had), "to": list(each.shape)}
                for key, each in self.adapted.items()
            },
            "dropped": {key: list(shape) for key, shape in self.dropped.items()},
            "outside": dict(self.outside),
            "parameters": self.parameters,
            "modules": self.modules,
            "bytes": self.nbytes,
            "seconds": self.seconds,
        }


def create_base(
    config: LbmConfig | str | Path,
    save_path: Path,
    *,
    backbone: str | Path | None = None,
    variant: str | None = None,
    dtype: torch.dtype | None = None,
    both: bool = True,
    progress: Progress = no_progress,
) -> BaseReport:
    """Write the exact base of an LBM, a tensor at a time: memory holds one, whatever the model's size.

    Args:
        config: Of the LBM, or its YAML file, which is then copied as it is.
        save_path: `.safetensors` or `.ckpt`. Replaced when there.
        backbone: A diffusers folder with `unet` and `vae`, a single-file checkpoint with SDXL's own names, or a
            repository of the Hugging Face hub; None is the config's `backbone_signature`.
        variant: Of a folder's files, such as `fp16`; None takes the plain ones, else those that lost least.
        dtype: Of the base's weights; None keeps the backbone's. `num_iterations` is float32 always.
        both: Write the other format beside `save_path` too, and the config where later commands find it.
        progress: Told after each tensor.

    Raises:
        ConfigError: The config or the target's name is not valid, the backbone cannot be had, or a YAML of
            another model is in the way.
        CheckpointError: The backbone cannot be read.
        ModelMismatchError: Names every weight that is missing, cannot be adapted (with both shapes), or has no
            place in the LBM.
        NonFiniteError: A weight holds NaN or Inf, or would in `dtype`.
        WriteError: A target cannot be written. All are as they were, as after every error.
    """
    begin = time.perf_counter()
    text, config = _read(config)
    targets = choose_targets(save_path, config, both=both)
    model = build_lbm(config, device="meta")
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    signature = config.backbone_signature if backbone is None else backbone
    with open_backbone(signature, config, variant) as source:
        refuse_inputs(targets, source.files)
        adapted = find_adaptations(source, shapes)
        specs = _specs(shapes, source, dtype)
        nbytes = sum(spec.nbytes for spec in specs.values())
        require_space(targets, nbytes)
        _write(targets, text, specs, _tensors(source, specs, progress))
        dropped = {key: found.shape for key, found in source.weights.items() if key.startswith(DROPPED)}
        path, outside = source.path, dict(source.outside)
    return BaseReport(
        paths=targets.weights,
        config_path=targets.config,
        backbone=path,
        dtypes=_counted(specs),
        adapted=adapted,
        dropped=dropped,
        outside=outside,
        parameters=sum(weight.numel() for weight in model.denoiser.parameters()),
        modules=sum(isinstance(module, nn.Linear | nn.Conv2d) for module in model.denoiser.modules()),
        nbytes=nbytes,
        seconds=time.perf_counter() - begin,
    )


def _read(config: LbmConfig | str | Path) -> tuple[str, LbmConfig]:
    if isinstance(config, LbmConfig):
        return config.to_yaml(), config
    loaded = load_config(config)
    return Path(config).read_text(encoding="utf-8"), loaded


def _specs(
    shapes: Mapping[str, Shape], backbone: Backbone, dtype: torch.dtype | None
) -> dict[str, TensorSpec]:
    return {
        key: TensorSpec(torch.float32 if key == ITERATIONS else dtype or backbone.weights[key].dtype, shape)
        for key, shape in shapes.items()
    }


def _write(
    targets: Targets, config: str, specs: Mapping[str, TensorSpec], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """Write every target in one pass over the backbone."""
    with all_or_none(targets.all), ExitStack() as files:
        writers: list[Write] = []
        if targets.config is not None:
            files.enter_context(atomic_path(targets.config)).write_text(config, encoding="utf-8")
        if targets.ckpt is not None:
            writers.append(files.enter_context(StreamingTorchWriter(targets.ckpt, specs)).write)
        if targets.safetensors is not None:
            metadata = {
                "format": "pt"
            }  # with it transformers and diffusers read the file, without it they refuse
            stream = StreamingWriter(targets.safetensors, metadata, expected=specs)
            writers.append(files.enter_context(stream).write)
        for key, tensor in tensors:
            for write in writers:
                write(key, tensor)


def _tensors(
    backbone: Backbone, specs: Mapping[str, TensorSpec], progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    for done, (key, spec) in enumerate(specs.items(), start=1):
        if key == ITERATIONS:
            yield key, torch.zeros(spec.shape, dtype=spec.dtype)
        else:
            yield key, _weight(backbone.weights[key], key, spec)
        progress(done, len(specs), key)


def _weight(origin: BackboneWeight, key: str, spec: TensorSpec) -> Tensor:
    weight = origin.read()
    converted = weight.to(spec.dtype)
    if not is_finite(converted):
        path, name = origin.checkpoint.path, str(spec.dtype).removeprefix("torch.")
        if is_finite(weight):
            raise NonFiniteError(
                f"{path}: {origin.key} is too large for {name}.", hint="Use --torch_dtype bf16 or float32."
            )
        raise NonFiniteError(
            f"{path}: {origin.key} holds NaN or Inf.", hint="The backbone is damaged; fetch it again."
        )
    return converted if tuple(converted.shape) == spec.shape else adapt_weight(converted, spec.shape)


def _counted(specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for key, spec in specs.items():
        if key != ITERATIONS:
            name = str(spec.dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + 1
    return counts
