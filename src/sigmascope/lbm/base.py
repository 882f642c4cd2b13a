"""Make the model that LBM training starts from: a text-to-image backbone, adapted to the LBM's shapes.

A fine-tuned LBM minus this base is what training changed, so a LoRA is extracted against it. The base has the
UNet and VAE weights of the backbone, without `add_embedding`, the embedding of sizes and pooled text.

LBM has no text: its cross attention attends to the hidden states. So its keys and values are as wide as these, while
the backbone's are as wide as its text encoders. Conditioning pictures and masks widen the first convolution. The first
convolution and the keys and values of both attentions are therefore cut, or filled up with zeros, to the new widths;
`num_iterations` is 0. Every other weight must fit unchanged, and none may be left over.

Either all files are written or none, after a check for room on the disk, and existing files are not lost on failure.
`check_base` proves that a base can be used: it loads the base, runs it once and checks the result.

The backbone may be a diffusers folder, a single-file checkpoint with SDXL's own names, or a repository of the Hugging
Face hub that is in its local cache.

Diffusers' own converter renames the tensors of a single file. It needs a state dict, and gets one that takes no memory:
each tensor is a single number, its position in the file, expanded to the tensor's shape. The converter's result shows
each number's new name, and its shape in diffusers' model.
"""

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from sigmascope.checkpoints import (
    Checkpoint,
    StreamingTorchWriter,
    StreamingWriter,
    TensorSpec,
    open_checkpoint,
)
from sigmascope.checkpoints.checkpoint import is_existing, is_folder
from sigmascope.checkpoints.hub import local_model
from sigmascope.checkpoints.torch_files import PICKLE_SUFFIXES
from sigmascope.errors import (
    CheckpointError,
    ConfigError,
    ModelMismatchError,
    NonFiniteError,
    SigmascopeError,
    WriteError,
)
from sigmascope.files import atomic_path, free_bytes, require_writable, temporary_name
from sigmascope.lbm.config import LbmConfig, load_config
from sigmascope.lbm.images import Size, image_to_tensor, psnr, tensor_to_image
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import build_lbm, is_finite, load_lbm
from sigmascope.lbm.pocket.scenes import make_scene, scene_source_light, shade
from sigmascope.progress import Progress, no_progress

__all__ = ["BaseReport", "adapt_weight", "create_base"]

_log = logging.getLogger(__name__)

Write = Callable[[str, Tensor], None]
"""(key, tensor): puts a tensor into one of the files."""
Shape = tuple[int, ...]
Change = Literal["cut", "zero-filled", "cut and zero-filled"]

ITERATIONS = "num_iterations"
"""The number of training steps: the only tensor of an LBM that no backbone has."""
DROPPED = "denoiser.add_embedding."
"""The UNet's embedding of sizes and pooled text: an LBM has none."""
_FIRST_OF_LEVEL = re.compile(r"denoiser\.down_blocks\.(\d+)\.resnets\.0\.conv1\.weight")
SUFFIXES = (".safetensors", ".ckpt")
"""Of the files that a base is written to."""
_HEADER_BYTES = 2 * 2**20
"""Room for headers and names, in bytes a file."""
SCENE = 4
"""The rendered scene that `check_base` translates."""
LATENT_SIDE = 32
"""Latent elements along a side of the picture: a quarter of what LBM works at, so that a CPU takes seconds."""
PREFIXES = {"unet": "denoiser.", "vae": "vae.vae_model."}
"""Of the LBM's keys, by the folder of a diffusers model."""
_FILE_SUFFIXES = (".safetensors", ".gguf", ".json", *PICKLE_SUFFIXES)
"""A signature with one of these is a file, and no repository."""
_WEIGHTS_STEM = "diffusion_pytorch_model"
"""What diffusers calls the files of weights."""
_EARLIER_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_EARLIER_NAME = re.compile(r"(mid_block\.attentions\.0\.)(query|key|value|proj_attn)(\.\w+)")
UNET: Final = "model.diffusion_model."
VAE: Final = "first_stage_model."
_VAE_LOSS: Final = "first_stage_model.loss."  # of the VAE's own training; some files carry it


@dataclass(frozen=True, slots=True)
class Adaptation:
    """A weight whose shape changed, from `had` in the backbone to `shape` in the LBM."""

    change: Change
    had: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class BaseReport:
    """What became of a backbone's weights.

    Attributes:
        paths: The files of weights, of equal content.
        config_path: The YAML that was written beside them; None if an equal one was there, or none was asked for.
        backbone: The folder or file that the weights are from.
        dtypes: Number of the base's weights by dtype, without `num_iterations`.
        adapted: Weights whose shape changed, by the base's key.
        dropped: Shapes of the backbone's weights that an LBM does not use, by the name that they would have.
        outside: Tensors of a single file that are neither UNet nor VAE, counted by the first part of their names.
        parameters: Number of the denoiser's parameters.
        modules: Number of the denoiser's Linear and Conv2d layers: what a LoRA can hold.
        nbytes: Bytes of all tensors.
        seconds: How long it took.
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
                key: {"change": weight.change, "from": list(weight.had), "to": list(weight.shape)}
                for key, weight in self.adapted.items()
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
    download: bool = False,
    progress: Progress = no_progress,
) -> BaseReport:
    """Write the exact base of an LBM, with one tensor in memory at a time.

    Args:
        config: The LBM's config, or its YAML file, which is then copied unchanged.
        save_path: A `.safetensors` or `.ckpt` file; an existing one is replaced.
        backbone: A diffusers folder with `unet` and `vae`, a single-file checkpoint with SDXL's own names, or a
            repository of the Hugging Face hub that is in its local cache; None for the config's `backbone_signature`.
        variant: Variant of a folder's files, such as `fp16`; None for the plain ones, or else the most precise.
        dtype: Dtype of the base's weights; None keeps the backbone's. `num_iterations` is always float32.
        both: Also write the other format beside `save_path`, and the config where later commands find it.
        download: Download a repository that the hub's local cache does not have.
        progress: Called after each tensor.

    Raises:
        ConfigError: The config or the target's name is not valid, the backbone cannot be found or fetched, or a YAML of
            another model is in the way.
        CheckpointError: The backbone cannot be read.
        ModelMismatchError: Names every weight that is missing, cannot be adapted (with both shapes), or has no
            place in the LBM.
        NonFiniteError: A weight holds NaN or Inf, or would in `dtype`.
        WriteError: A target cannot be written. As after every error, all targets are as they were.
    """
    begin = time.perf_counter()
    if isinstance(config, LbmConfig):
        text = config.to_yaml()
    else:
        path_of_config, config = Path(config), load_config(config)
        text = path_of_config.read_text(encoding="utf-8")
    targets = choose_base_files(save_path, config, both=both)
    model = build_lbm(config, device="meta")
    shapes = _shapes(model)
    signature = config.backbone_signature if backbone is None else backbone
    with open_backbone(signature, config, variant, download=download) as source:
        _refuse_inputs(targets, source.files)
        adapted = find_adaptations(source, shapes)
        specs = {
            key: TensorSpec(torch.float32 if key == ITERATIONS else dtype or source.weights[key].dtype, shape)
            for key, shape in shapes.items()
        }
        nbytes = sum(spec.nbytes for spec in specs.values())
        _require_space(targets, nbytes)
        _write_files(targets, text, specs, source, progress)
        dropped = {key: info.shape for key, info in source.weights.items() if key.startswith(DROPPED)}
        path, outside = source.path, dict(source.outside)
    return BaseReport(
        paths=targets.weights,
        config_path=targets.config,
        backbone=path,
        dtypes=Counter(
            str(spec.dtype).removeprefix("torch.") for key, spec in specs.items() if key != ITERATIONS
        ),
        adapted=adapted,
        dropped=dropped,
        outside=outside,
        parameters=sum(weight.numel() for weight in model.denoiser.parameters()),
        modules=sum(isinstance(module, nn.Linear | nn.Conv2d) for module in model.denoiser.modules()),
        nbytes=nbytes,
        seconds=time.perf_counter() - begin,
    )


def check_backbone(config: LbmConfig) -> None:
    """Refuse a backbone that a base could not be made from; no weight is read.

    Raises:
        SigmascopeError: As of `create_base`.
    """
    with open_backbone(config.backbone_signature, config) as source:
        find_adaptations(source, _shapes(build_lbm(config, device="meta")))


def _shapes(model: nn.Module) -> dict[str, Shape]:
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


@dataclass(frozen=True, slots=True)
class BaseFiles:
    """Where a base goes.

    Attributes:
        weights: The files of weights, `.safetensors` first; one where only one was asked for.
        config: The YAML to write; None when one that says the same is there, or none was asked for.
    """

    weights: tuple[Path, ...]
    config: Path | None

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file that will be written."""
        return self.weights if self.config is None else (*self.weights, self.config)


@dataclass(frozen=True, slots=True)
class BackboneWeight:
    """One weight of a backbone, read when it is needed.

    Attributes:
        checkpoint: The open file that holds it.
        key: Its name there.
        shape: Its shape in diffusers' models. Single files store some Linear layers as 1×1 convolutions.
    """

    checkpoint: Checkpoint
    key: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """As it is read."""
        return self.checkpoint.info(self.key).dtype

    def read(self) -> Tensor:
        """Read it into memory of its own."""
        return self.checkpoint.tensor(self.key).reshape(self.shape)


@dataclass(frozen=True)
class Backbone:
    """An open backbone.

    Attributes:
        path: The diffusers folder or the single file.
        weights: By the key that each has, or would have, in the LBM.
        outside: How many tensors of a single file are neither UNet nor VAE, by the first part of their names.
    """

    path: Path
    weights: Mapping[str, BackboneWeight]
    outside: Mapping[str, int] = field(default_factory=dict)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that is read, each once."""
        checkpoints = {id(weight.checkpoint): weight.checkpoint for weight in self.weights.values()}
        return tuple(file for checkpoint in checkpoints.values() for file in checkpoint.files)


def _write_files(
    targets: BaseFiles,
    config: str,
    specs: Mapping[str, TensorSpec],
    backbone: Backbone,
    progress: Progress,
) -> None:
    """Write every target in one pass over the backbone."""
    with all_or_none(targets.all), ExitStack() as files:
        writers: list[Write] = []
        if targets.config is not None:
            files.enter_context(atomic_path(targets.config)).write_text(config, encoding="utf-8")
        for path in reversed(targets.weights):
            if path.suffix.lower() == ".safetensors":
                # With this header transformers and diffusers read the file, without it they refuse.
                stream = StreamingWriter(path, {"format": "pt"}, expected=specs)
                writers.append(files.enter_context(stream).write)
            else:  # as Lightning writes it, which is what LBM's own loader reads of a .ckpt
                prefixed = {f"model.{key}": spec for key, spec in specs.items()}
                lightning = files.enter_context(StreamingTorchWriter(path, prefixed, "state_dict"))
                writers.append(_under_model(lightning.write))
        for done, (key, spec) in enumerate(specs.items(), start=1):
            if key == ITERATIONS:
                tensor = torch.zeros(spec.shape, dtype=spec.dtype)
            else:
                tensor = _adapted_weight(backbone.weights[key], spec)
            for write in writers:
                write(key, tensor)
            progress(done, len(specs), key)


def _under_model(write: Write) -> Write:
    return lambda key, tensor: write(f"model.{key}", tensor)


def _adapted_weight(origin: BackboneWeight, spec: TensorSpec) -> Tensor:
    weight = origin.read()
    converted = weight.to(spec.dtype)
    if not is_finite(converted):
        path, name = origin.checkpoint.path, str(spec.dtype).removeprefix("torch.")
        if is_finite(weight):
            raise NonFiniteError(
                f"{path}: {origin.key} is too large for {name}.", hint="Use --torch_dtype bf16 or float32."
            )
        raise NonFiniteError(
            f"{path}: {origin.key} holds NaN or Inf.", hint="The backbone is damaged; download it again."
        )
    return converted if tuple(converted.shape) == spec.shape else adapt_weight(converted, spec.shape)


def find_adaptations(backbone: Backbone, shapes: Mapping[str, Shape]) -> dict[str, Adaptation]:
    """Find how to adapt each weight whose shape differs between the backbone and the LBM.

    Raises:
        ModelMismatchError: Names every weight that the backbone lacks, that has no place in the LBM, or whose
            shape cannot be adapted, with both shapes.
    """
    wanted = {key: shape for key, shape in shapes.items() if key != ITERATIONS}
    differing = {
        key: (backbone.weights[key].shape, shape)
        for key, shape in wanted.items()
        if key in backbone.weights and backbone.weights[key].shape != shape
    }
    # What does not fit is refused: a base made of the rest would be wrong unseen.
    wrong = {
        "the LBM needs and the backbone lacks": [
            f"{key} {list(shape)}" for key, shape in wanted.items() if key not in backbone.weights
        ],
        "the LBM has no place for": [
            weight.key
            for key, weight in backbone.weights.items()
            if key not in wanted and not key.startswith(DROPPED)
        ],
        "cannot be adapted, only the first convolution and the attentions' keys and values can be": [
            f"{key}: {list(had)} in the backbone, {list(shape)} in the LBM"
            for key, (had, shape) in differing.items()
            if not _may_change(key, had, shape)
        ],
    }
    if any(wrong.values()):
        lines = [f"{backbone.path}: does not fit the LBM."]
        # What a thousand misfits come from when the backbone is of another size: an SDXL refiner, say.
        levels = _widths({key: weight.shape for key, weight in backbone.weights.items()})
        wanted_levels = _widths(wanted)
        if levels != wanted_levels:
            lines.append(
                f"Its levels have {levels} channels, the config's have {wanted_levels} (denoiser.block_out_channels)."
            )
        for what, names in wrong.items():
            if names:
                lines.append("\n  ".join([f"Weights that {what} ({len(names)}):", *names]))
        raise ModelMismatchError(
            "\n".join(lines),
            hint="Use a backbone of the architecture that the config describes (--config_path).",
        )
    return {
        key: Adaptation(_kind_of_change(had, shape), had, shape) for key, (had, shape) in differing.items()
    }


def _widths(shapes: Mapping[str, Shape]) -> str:
    matches = ((_FIRST_OF_LEVEL.fullmatch(key), shape) for key, shape in shapes.items())
    widths = sorted((int(match[1]), shape[0]) for match, shape in matches if match)
    return ", ".join(str(width) for _, width in widths)


def _may_change(key: str, had: Shape, shape: Shape) -> bool:
    attention = key.startswith("denoiser.") and (".attn1." in key or ".attn2." in key)
    adaptable = key == "denoiser.conv_in.weight" or (
        attention and key.endswith((".to_k.weight", ".to_v.weight"))
    )
    return adaptable and len(had) == len(shape)


def _kind_of_change(had: Shape, shape: Shape) -> Change:
    cut = any(before > after for before, after in zip(had, shape, strict=True))
    filled = any(before < after for before, after in zip(had, shape, strict=True))
    return "cut and zero-filled" if cut and filled else "cut" if cut else "zero-filled"


def adapt_weight(weight: Tensor, shape: Shape) -> Tensor:
    """Cut or pad a weight to another shape: long axes are cut at the end, short ones filled with zeros.

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


def choose_base_files(save_path: Path, config: LbmConfig, *, both: bool) -> BaseFiles:
    """Choose the files and refuse those that cannot be written, before any work is done.

    Raises:
        ConfigError: The ending is not one of the two, a YAML of another model is where later commands would find it, or
            two of the targets are links to the same file.
        WriteError: A target cannot be written.
    """
    suffix = save_path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(
            f"{save_path}: a base is written as .safetensors or .ckpt.", hint="Choose one of these endings."
        )
    paths = tuple(save_path.with_suffix(ending) if ending != suffix else save_path for ending in SUFFIXES)
    targets = BaseFiles(paths, config_target(save_path, config)) if both else BaseFiles((save_path,), None)
    by_place: dict[Path, Path] = {}
    for path in targets.all:
        require_writable(path)
        # Of two links to one file, the second would replace the first.
        other = by_place.setdefault(path.resolve(), path)
        if other is not path:
            raise ConfigError(
                f"--save_path: {other} and {path} are links to the same file, {path.resolve()}.",
                hint="Remove one of the links, or write the base under another name.",
            )
    return targets


def config_target(save_path: Path, config: LbmConfig) -> Path | None:
    """Choose where to write the config so that later commands find it and no other model's config is lost.

    Returns:
        `config.yaml` in the same folder; if that describes another model, `<name>.yaml`, which takes precedence. None
        if an equal config is there already.

    Raises:
        ConfigError: `<name>.yaml` is there and describes another model.
    """
    own, shared = save_path.with_suffix(".yaml"), save_path.parent / "config.yaml"
    if own.exists():
        if _describes(own, config):
            return None
        raise ConfigError(
            f"{own}: describes a different model, and later commands would read it.",
            hint="Choose another --save_path, or move that file away.",
        )
    if not shared.exists():
        return shared
    return None if _describes(shared, config) else own


def _describes(path: Path, config: LbmConfig) -> bool:
    try:
        return load_config(path) == config
    except SigmascopeError:
        return False


def _refuse_inputs(targets: BaseFiles, inputs: Iterable[Path]) -> None:
    """Refuse to replace a file of the backbone by the base that is made from it."""
    read = {path.resolve() for path in inputs}
    for path in targets.weights:
        if path.resolve() in read:
            raise ConfigError(
                f"--save_path: {path} would be replaced, and it belongs to the backbone.",
                hint="Write the base under another name.",
            )


def _require_space(targets: BaseFiles, nbytes: int) -> None:
    """Refuse to begin what would fill the disk; files that are replaced stay until the new ones are whole."""
    needed = len(targets.weights) * (nbytes + _HEADER_BYTES)
    free = free_bytes(targets.weights[0].resolve().parent)
    if free is not None and needed > free:
        raise WriteError(
            targets.weights[0],
            f"the disk is too full: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free.",
            hint="Free some space or choose another disk.",
        )


@contextmanager
def all_or_none(targets: Iterable[Path]) -> Iterator[None]:
    """Put every target back as it was when the block fails, even if some were replaced already.

    Each file by itself appears whole or not at all; this covers failures between the first and the last of them. Until
    then a second link keeps the old files, which takes no room.
    """
    before = {path.resolve(): _linked(path.resolve()) for path in targets}
    try:
        yield
    except BaseException:
        for path, link in before.items():
            _put_back(path, link)
        raise
    finally:
        for link in before.values():
            if isinstance(link, Path):
                link.unlink(missing_ok=True)


def _linked(path: Path) -> Path | bool:
    """A second link to what is at `path`; whether there is something if it cannot be linked."""
    if not path.exists():
        return False
    link = path.with_name(temporary_name(path))
    try:
        os.link(path, link)
    except OSError as error:  # a file system without hard links
        _log.debug("%s cannot be kept by a second link: %s", path, error)
        return True
    return link


def _put_back(path: Path, link: Path | bool) -> None:
    with suppress(OSError):  # the failure that led here is what the user must see
        if isinstance(link, Path):
            link.replace(path)
        elif not link:
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class BaseCheck:
    """What one run of a base showed. A base is untrained: its picture need not resemble the source.

    Attributes:
        path: The file that was loaded.
        compared: Tensors that were found equal, bit for bit, in every file written.
        size: Size of the picture, (width, height).
        dtype: Dtype that the weights were loaded in.
        device: Device that it ran on.
        vae_psnr: PSNR in dB of the source after encoding and decoding: whether the VAE is sound.
        source_psnr: PSNR in dB of the base's picture against the source.
        load_seconds: Time to load the model.
        inference_seconds: Time to translate the picture in one step.
    """

    path: Path
    compared: int
    size: Size
    dtype: str
    device: str
    vae_psnr: float
    source_psnr: float
    load_seconds: float
    inference_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON has it."""
        return {**asdict(self), "path": str(self.path), "size": list(self.size)}


def check_base(
    paths: tuple[Path, ...],
    config: LbmConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = no_progress,
) -> BaseCheck:
    """Load a base, translate one generated picture in one step, and compare the files that were written.

    Args:
        paths: Every file of the base; the first is loaded.
        config: Of the LBM.
        dtype: To run in.
        device: To run on.
        progress: Told after each tensor that is compared, then after each that is loaded.

    Raises:
        CheckpointError: The files differ.
        NonFiniteError: The weights, the latents or the picture hold NaN or Inf.
        ModelMismatchError: The file is not the config's model.
    """
    compared = compare_files(paths, progress)
    begin = time.perf_counter()
    model = load_lbm(paths[0], config, dtype=dtype, device=device, progress=progress)
    loaded = time.perf_counter()
    side = max(LATENT_SIDE // config.denoiser.factor, 1) * config.factor
    picture = Image.fromarray(shade(make_scene(SCENE, side), scene_source_light(SCENE)))
    conditioning = dict.fromkeys(config.conditioning_images_keys, picture)
    conditioning |= dict.fromkeys(config.conditioning_masks_keys, Image.new("L", picture.size, 255))
    result = translate_image(model, picture, seed=0, size=picture.size, conditioning=conditioning)
    done = time.perf_counter()
    with torch.inference_mode():
        pixels = image_to_tensor(picture).to(next(model.parameters()).device)
        decoded = model.vae.decode(model.vae.encode(pixels)).float().cpu().clamp(-1, 1)
    return BaseCheck(
        path=paths[0],
        compared=compared,
        size=picture.size,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        vae_psnr=psnr(tensor_to_image(decoded), picture),
        source_psnr=psnr(result, picture),
        load_seconds=loaded - begin,
        inference_seconds=done - loaded,
    )


def compare_files(paths: tuple[Path, ...], progress: Progress = no_progress) -> int:
    """Compare the tensors of all files with those of the first, bit for bit.

    Returns:
        How many tensors each file holds.

    Raises:
        CheckpointError: Names the first file and tensor that differ.
    """
    with open_checkpoint(paths[0]) as first:
        for path in paths[1:]:
            with open_checkpoint(path) as second:
                if set(first) != set(second):
                    raise CheckpointError(
                        path, f"has different tensors than {paths[0]}.", hint="Make it again."
                    )
                for done, key in enumerate(first, start=1):
                    tensor, other = first.tensor(key), second.tensor(key)
                    same_kind = (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
                    bits = (each.reshape(-1).view(torch.uint8) for each in (tensor, other))
                    if not same_kind or not torch.equal(*bits):
                        raise CheckpointError(path, f"{key} differs from {paths[0]}.", hint="Make it again.")
                    progress(done, len(first), key)
        return len(first)


@contextmanager
def open_backbone(
    signature: str | Path, config: LbmConfig, variant: str | None = None, *, download: bool = False
) -> Iterator[Backbone]:
    """Open a backbone for as long as the block runs; headers are read, tensors are not.

    Args:
        signature: A diffusers folder with `unet` and `vae`, a single-file checkpoint with SDXL's own names
            (`model.diffusion_model.*`, `first_stage_model.*`), or a repository of the Hugging Face hub.
        config: Of the LBM; it tells how many layers a block of a single file has.
        variant: Of a folder or repository, such as `fp16` for `*.fp16.safetensors`.
        download: Download a repository that the hub's local cache does not have.

    Raises:
        ConfigError: It does not exist, or a variant is given for a single file.
        CheckpointError: It is not in the hub's local cache, cannot be read, or lacks the UNet or the VAE.
    """
    path = _locate(str(signature), variant, download=download)
    with ExitStack() as files:
        if is_folder(path):
            yield _from_folder(path, variant, files)
        elif variant is not None:
            raise ConfigError(
                f"--variant {variant}: {path} is a single file, which has no variants.", hint="Leave it out."
            )
        else:
            yield name_single_file(files.enter_context(open_checkpoint(path)), config)


def _locate(signature: str, variant: str | None, *, download: bool) -> Path:
    if not signature.strip():
        raise ConfigError(
            "--backbone_signature is empty.", hint="Leave it out to take the config's, or name a backbone."
        )
    local = Path(signature)
    if is_existing(local):
        return local
    if local.is_absolute() or signature.startswith(".") or signature.lower().endswith(_FILE_SUFFIXES):
        raise ConfigError(
            f"--backbone_signature {signature} does not exist.",
            hint="Give a diffusers folder, a single-file checkpoint or the name of a repository.",
        )
    dotted = "" if variant is None else f".{variant}"
    names = ["config.json", f"{_WEIGHTS_STEM}{dotted}.safetensors"]
    if download:  # or of shards, which a hint need not name
        names.append(f"{_WEIGHTS_STEM}.safetensors.index{dotted}.json")
        shards = "-?????-of-?????"
        names += [
            f"{_WEIGHTS_STEM}{dotted}{shards}.safetensors",
            f"{_WEIGHTS_STEM}{shards}{dotted}.safetensors",
        ]
    files = [f"{part}/{name}" for part in ("unet", "vae") for name in names]
    return local_model(local, files, download=download)


def _from_folder(folder: Path, variant: str | None, files: ExitStack) -> Backbone:
    weights: dict[str, BackboneWeight] = {}
    for part, prefix in PREFIXES.items():
        if not is_folder(folder / part):
            raise CheckpointError(
                folder,
                f"has no folder {part}.",
                hint="Give a diffusers folder that holds unet and vae, or a single-file checkpoint.",
            )
        checkpoint = files.enter_context(open_checkpoint(folder / part, variant=variant))
        for key in checkpoint.keys():  # noqa: SIM118 - no dict
            name = _EARLIER_NAME.sub(_renamed, key) if part == "vae" else key
            weights[prefix + name] = BackboneWeight(checkpoint, key, checkpoint.info(key).shape)
    return Backbone(folder, weights)


def _renamed(match: re.Match[str]) -> str:
    """Diffusers' present name of a VAE's attention: folders saved before it are still about."""
    return f"{match[1]}{_EARLIER_ATTENTION[match[2]]}{match[3]}"


def name_single_file(checkpoint: Checkpoint, config: LbmConfig) -> Backbone:
    """Name the UNet's and the VAE's tensors as diffusers does; tensors that its converter does not know keep their
    names.

    Raises:
        CheckpointError: There is no UNet or no VAE under SDXL's names.
        ConfigError: The config's blocks have different numbers of layers, which such files cannot represent.
    """
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint, convert_ldm_vae_checkpoint

    keys = checkpoint.keys()
    parts = {
        "unet": [key for key in keys if key.startswith(UNET)],
        "vae": [key for key in keys if key.startswith(VAE) and not key.startswith(_VAE_LOSS)],
    }
    for part, prefix in (("unet", UNET), ("vae", VAE)):
        if not parts[part]:
            raise CheckpointError(
                checkpoint.path,
                f"holds no tensors named {prefix}*, so it has no {part} of a single-file checkpoint.",
                hint="Give a whole SDXL checkpoint, or a diffusers folder that holds unet and vae.",
            )
    layers = config.denoiser.layers_per_block
    counts = {layers} if isinstance(layers, int) else set(layers)
    if len(counts) > 1:
        raise ConfigError(
            f"denoiser.layers_per_block: a single-file backbone has the same number in every block, got {layers}.",
            hint="Give the backbone as a diffusers folder.",
        )
    has_added_embedding = any(key.startswith(f"{UNET}label_emb.") for key in parts["unet"])
    unet = {
        "layers_per_block": counts.pop(),
        "addition_embed_type": "text_time" if has_added_embedding else None,
    }
    blocks = len(config.vae.block_out_channels)
    vae = {
        "down_block_types": ["DownEncoderBlock2D"] * blocks,
        "up_block_types": ["UpDecoderBlock2D"] * blocks,
    }
    weights = {
        **_converted(checkpoint, parts["unet"], UNET, PREFIXES["unet"], convert_ldm_unet_checkpoint, unet),
        **_converted(checkpoint, parts["vae"], VAE, PREFIXES["vae"], convert_ldm_vae_checkpoint, vae),
    }
    inside = {*parts["unet"], *parts["vae"]}
    outside = Counter(key.partition(".")[0] for key in keys if key not in inside)
    return Backbone(checkpoint.path, weights, outside)


def _converted(
    checkpoint: Checkpoint,
    keys: list[str],
    prefix: str,
    own_prefix: str,
    convert: Callable[..., dict[str, Tensor]],
    config: dict[str, Any],
) -> dict[str, BackboneWeight]:
    placeholders = {
        key: torch.tensor(number).expand(checkpoint.info(key).shape) for number, key in enumerate(keys)
    }
    weights: dict[str, BackboneWeight] = {}
    for name, placeholder in convert(dict(placeholders), config).items():
        key = keys[int(placeholder.flatten()[0])]
        if placeholder.numel() == placeholders[key].numel():  # the whole tensor, and not a slice of it
            weights[own_prefix + name] = BackboneWeight(checkpoint, key, tuple(placeholder.shape))
    converted = {weight.key for weight in weights.values()}
    for key in keys:  # what is left over must not be lost unseen
        if key not in converted:
            name = own_prefix + key.removeprefix(prefix)
            weights[name] = BackboneWeight(checkpoint, key, checkpoint.info(key).shape)
    return weights
