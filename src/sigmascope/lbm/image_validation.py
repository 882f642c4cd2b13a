"""Prove a LoRA on pictures: how far the base's results are from the tuned model's, with and without the LoRA.

Weights say how much of a fine-tuning a LoRA holds; pictures say how much of it is seen. The tuned model runs
first and its results are kept on disk. Then the base takes its place in memory and runs twice.
"""

import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.lbm.image_errors import ImageReport, Output, OutputError, PictureErrors, output_error
from sigmascope.lbm.images import load_image
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import LbmModel, load_lbm, resolve_config
from sigmascope.lbm.picture_folder import find_pictures
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.opening import open_lora
from sigmascope.lora.models.layout import layout_of
from sigmascope.lora.names.changed_keys import changed_keys, formed
from sigmascope.progress import Progress, no_progress


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How pictures are translated; the same for all three models.

    Attributes:
        num_inference_steps: Euler steps along the bridge.
        seed: Of the bridge noise.
        resolution: Side of the square bucket; None is the config's.
        dtype: Of the models' weights.
        device: Where they run.
    """

    num_inference_steps: int = 1
    seed: int = 0
    resolution: int | None = None
    dtype: torch.dtype = torch.float32
    device: str | torch.device = "cpu"


def validate_images(
    base: str | Path,
    tuned: str | Path,
    lora: str | Path,
    folder: str | Path,
    options: ImageOptions | None = None,
    *,
    config: str | Path | None = None,
    progress: Progress = no_progress,
) -> ImageReport:
    """Translate the pictures of a folder with base, base + LoRA and tuned model, and compare the results.

    The LoRA is merged into the base's weights, each sum rounded once to the models' dtype.

    Args:
        base: LBM checkpoint that the LoRA is put on.
        tuned: LBM checkpoint that it should reproduce.
        lora: LoRA file of any format.
        folder: Its own pictures are translated, not those of folders in it.
        options: How.
        config: YAML of both models; None looks beside each.
        progress: Told before each picture of each model.

    Raises:
        ConfigError: There is no picture that can be read, or the model needs more than a source picture.
        SigmascopeError: Whatever is wrong with the models, the LoRA or the options.
    """
    started = time.perf_counter()
    options = options or ImageOptions()
    require_source_only((base, tuned), config)
    pictures, unreadable = find_pictures(folder)
    with tempfile.TemporaryDirectory(prefix="sigmascope-") as place:
        runs = _Runs(pictures, options, config, Path(place), progress)
        runs.keep_tuned(tuned)
        without, with_lora, not_applied = runs.compare(base, lora)
    return ImageReport(
        tuple(map(PictureErrors, (path.name for path in pictures), without, with_lora)),
        tuple(unreadable),
        not_applied,
        options.num_inference_steps,
        options.seed,
        time.perf_counter() - started,
    )


def add_lora(model: LbmModel, lora: LoraFile) -> tuple[str, ...]:
    """Add a LoRA to the weights of a model that is nobody else's; there is no way back.

    Returns:
        Names of the LoRA's modules that no weight fits.

    Raises:
        LoraFormatError: A module's tensors do not fit together.
        NonFiniteError: They hold NaN or Inf.
    """
    state = model.state_dict(keep_vars=True)
    targets = changed_keys(lora, state, layout_of({key: tuple(value.shape) for key, value in state.items()}))
    not_applied = list(targets.unmatched)
    for key, name in targets.names.items():
        weight = state[key].data
        wide = weight.float()
        try:
            weight.copy_(wide + formed(targets.change(key), wide.cpu()).to(weight.device))
        except ModelMismatchError:
            not_applied.append(name)
    return tuple(not_applied)


@dataclass(frozen=True, slots=True)
class _Runs:
    """The three runs over the pictures; results of the first lie in `place`, one file a picture."""

    pictures: Sequence[Path]
    options: ImageOptions
    config: str | Path | None
    place: Path
    progress: Progress

    def keep_tuned(self, tuned: str | Path) -> None:
        """Run the tuned model. It is gone from memory afterwards."""
        for index, output in enumerate(self._outputs(self._load(tuned), "tuned")):
            np.savez(self._kept(index), pixels=output.pixels, latent=output.latent)

    def compare(
        self, base: str | Path, lora: str | Path
    ) -> tuple[list[OutputError], list[OutputError], tuple[str, ...]]:
        """Run the base without and with the LoRA; also gives the LoRA's modules that fit nothing."""
        gc.collect()  # a model holds itself in cycles: the tuned one must be gone first
        model = self._load(base)
        without = self._errors(model, "base")
        with open_lora(lora) as file:
            not_applied = add_lora(model, file)
        return without, self._errors(model, "base + LoRA"), not_applied

    def _errors(self, model: LbmModel, what: str) -> list[OutputError]:
        errors = []
        for index, output in enumerate(self._outputs(model, what)):
            with np.load(self._kept(index)) as kept:
                errors.append(output_error(output, Output(kept["pixels"], kept["latent"])))
        return errors

    def _outputs(self, model: LbmModel, what: str) -> Iterator[Output]:
        turn = ("tuned", "base", "base + LoRA").index(what)
        for index, path in enumerate(self.pictures):
            done = turn * len(self.pictures) + index
            self.progress(done, 3 * len(self.pictures), f"{what}: {path.name}")
            latents: list[Tensor] = []
            result = translate_image(
                model,
                load_image(path),
                num_inference_steps=self.options.num_inference_steps,
                seed=self.options.seed,
                resolution=self.options.resolution,
                on_latent=latents.append,
            )
            yield Output(np.asarray(result), latents[0].cpu().numpy())

    def _load(self, path: str | Path) -> LbmModel:
        return load_lbm(path, self.config, dtype=self.options.dtype, device=self.options.device)

    def _kept(self, index: int) -> Path:
        return self.place / f"{index}.npz"


def require_source_only(checkpoints: Sequence[str | Path], config: str | Path | None) -> None:
    """Refuse models that need conditioning, which a folder of source pictures does not hold.

    Raises:
        ConfigError: A model needs more than a source picture, or its config is not valid.
    """
    for checkpoint in checkpoints:
        known = resolve_config(checkpoint, config)
        keys = [*known.conditioning_images_keys, *known.conditioning_masks_keys]
        if keys:
            raise ConfigError(
                f"--images: {checkpoint} needs more than a source picture ({', '.join(keys)}).",
                hint="Compare single pictures with sigmascope lbm infer and --conditioning.",
            )
