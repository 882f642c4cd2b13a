"""The pocket model at work: the main job on it (`run_demo`), and the model as the subject of a benchmark.

The demo extracts a LoRA, proves it, applies it and watches the inference. Then it checks the documentation's promises
on the pictures that it made.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from sigmascope.errors import ConfigError, WriteError
from sigmascope.files import reason_of
from sigmascope.lbm.bridge import bridge_sigmas
from sigmascope.lbm.images import contact_sheet, load_image, psnr, save_image
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH, EXAMPLE_SCENE, TUNED_PATH
from sigmascope.lbm.pocket.scenes import COOL, relighting_pair
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.extract import ExtractionReport, ExtractOptions, extract_lora
from sigmascope.lora.file import LoraFile
from sigmascope.lora.layer_names import write_layer_names
from sigmascope.lora.linalg import FULL_RANK
from sigmascope.lora.live_merge import merge_into_model
from sigmascope.lora.reader import load_lora
from sigmascope.lora.validate import ValidationReport, validate_lora
from sigmascope.monitor import Recorder
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.progress import Progress, no_progress
from sigmascope.records.performance import BenchCase, Made
from sigmascope.records.run import Run

SCALES = (0.0, 0.5, 1.0)
"""Of the LoRA, a picture at each."""
PHOTO_RESOLUTION = 512
"""Working size of a user's picture. The model knows 128, where a photograph has no detail left."""
PARTS = ("extract", "validate", "infer", "check", "save")
"""For the progress."""
FULL_RANK_ERROR = 0.005
"""Largest relative error of a layer at full rank: storage in 16 bits leaves less than this."""
STEPS = 2
"""Of a benchmark's case that names none."""


@dataclass(frozen=True)
class Check:
    """One thing that was proved, with what was measured."""

    claim: str
    measured: str
    passed: bool


@dataclass(frozen=True)
class DemoResult:
    """The demo's results. `psnr` is against the rendered truth; it is empty for a user's own picture."""

    run: Run
    extraction: ExtractionReport
    validation: ValidationReport
    full_rank: ValidationReport
    pictures: dict[str, Image.Image]
    psnr: dict[str, float]
    checks: tuple[Check, ...]
    files: dict[str, Path]


def run_demo(
    output: Path,
    *,
    source_image: Path | None = None,
    rank: int = 16,
    conv_rank: int = 16,
    num_inference_steps: int = 2,
    seed: int = 0,
    progress: Progress = no_progress,
) -> DemoResult:
    """Extract, validate, apply and watch a LoRA on the pocket model.

    Args:
        output: Folder for the LoRA, the pictures and run.json; made when it is not there.
        source_image: A picture to relight; a held-out rendered scene by default.
        rank: Of the LoRA's Linear layers.
        conv_rank: Of its Conv2d layers.
        num_inference_steps: Of the bridge.
        seed: Of the bridge noise.
        progress: Told before each of the demo's parts.

    Raises:
        FileError: A picture cannot be read or the folder cannot be written.
    """
    ExtractOptions(rank, conv_rank)  # refuses what makes no sense, before anything is written
    bridge_sigmas(num_inference_steps)
    truth: Image.Image | None = None
    if source_image is not None:  # first, so that a wrong path leaves no folder behind
        source = load_image(source_image)
    else:
        source, truth = (Image.fromarray(pixels) for pixels in relighting_pair(EXAMPLE_SCENE, COOL))
    try:
        output.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise WriteError(
            output, f"cannot be created ({reason_of(error)}).", hint="Choose another --output."
        ) from error
    recorder = Recorder(name="demo", sample_hz=10.0)
    pictures: dict[str, Image.Image] = {}

    def extract(target: Path, rank: int, conv_rank: int) -> ExtractionReport:
        with recorder.stage("lora_extraction") as stage:
            report = extract_lora(BASE_PATH, TUNED_PATH, target, ExtractOptions(rank, conv_rank))
            stage.fact("rank", rank)
            stage.fact("modules", report.total_lora_modules)
            stage.fact("relative_error", report.relative_error)
        return report

    def relight(model: LbmModel) -> Image.Image:
        return translate_image(
            model,
            source,
            num_inference_steps=num_inference_steps,
            seed=seed,
            resolution=PHOTO_RESOLUTION if truth is None else None,
        )

    with recorder:
        progress(0, len(PARTS), "extracting the LoRA")
        extraction = extract(output / "pocket_lora.safetensors", rank, conv_rank)
        with tempfile.TemporaryDirectory() as folder:
            whole = extract(Path(folder) / "full_rank.safetensors", FULL_RANK, FULL_RANK)
            progress(1, len(PARTS), "proving it")
            full_rank = validate_lora(BASE_PATH, TUNED_PATH, whole.lora)
        with recorder.stage("lora_validation") as stage:
            validation = validate_lora(BASE_PATH, TUNED_PATH, extraction.lora)
            stage.fact("success_rate", validation.success_rate)
            stage.fact("relative_error", validation.relative_error)
        write_layer_names(output / "lora_layer_names.txt", validation.layer_names)
        progress(2, len(PARTS), "relighting")
        lora = load_lora(extraction.lora)
        base = load_lbm(BASE_PATH, CONFIG_PATH)
        with recorder.stage("base"):
            pictures["base"] = relight(base)
        for scale in SCALES:
            name = f"base + LoRA at {scale:g}"
            with recorder.stage("lora_application") as stage:
                stage.fact("scale", scale)
                attached = attach_lora(base, lora, scale)
                stage.fact("applied_modules", len(attached.applied))
            with attached, recorder.stage(name):
                pictures[name] = relight(base)
        tuned = load_lbm(TUNED_PATH, CONFIG_PATH)
        with recorder.stage("tuned"):
            pictures["tuned"] = relight(tuned)
    progress(3, len(PARTS), "checking")
    checks = check_promises(relight, pictures, lora, full_rank)
    progress(4, len(PARTS), "saving")
    run = recorder.run()
    shown = [("source", source), *pictures.items()]
    if truth is not None:
        shown.append(("rendered truth", truth))
    files = {
        "sheet": output / "side_by_side.png",
        "run": output / "run.json",
        "lora": extraction.lora,
        "result": output / "base_plus_lora.png",
    }
    save_image(contact_sheet(shown), files["sheet"])
    save_image(pictures["base + LoRA at 1"], files["result"])
    run.save(files["run"])
    progress(len(PARTS), len(PARTS), "done")
    quality = {} if truth is None else {name: psnr(picture, truth) for name, picture in pictures.items()}
    return DemoResult(run, extraction, validation, full_rank, pictures, quality, checks, files)


def check_promises(
    relight: Callable[[LbmModel], Image.Image],
    pictures: Mapping[str, Image.Image],
    lora: LoraFile,
    full_rank: ValidationReport,
) -> tuple[Check, ...]:
    """Prove what the documentation promises.

    Args:
        relight: Makes the demo's picture with a model.
        pictures: What was made, by name.
        lora: What was applied.
        full_rank: Of the LoRA of full rank.
    """
    base = load_lbm(BASE_PATH, CONFIG_PATH)
    unwatched = relight(base)
    with merge_into_model(base, lora):
        merged = relight(base)
    restored = relight(base)
    worst = max((module.relative_error or 0.0 for module in full_rank.modules), default=1.0)
    exact = full_rank.success_rate == 100 and worst <= FULL_RANK_ERROR
    difference = _largest_difference(merged, pictures["base + LoRA at 1"])
    zero = _largest_difference(pictures["base"], pictures["base + LoRA at 0"])
    watched = _largest_difference(unwatched, pictures["base"])
    back = _largest_difference(restored, unwatched)
    return (
        Check("At full rank the LoRA is the fine-tuning", f"worst layer {100 * worst:.2f} % off", exact),
        Check("A LoRA at scale 0 changes nothing", _levels(zero), zero == 0),
        Check("Merged and hot-applied pictures agree", _levels(difference), difference <= 1),
        Check("Unmerging gives the base back", _levels(back), back == 0),
        Check("Watching does not change the picture", _levels(watched), watched == 0),
    )


def _largest_difference(first: Image.Image, second: Image.Image) -> int:
    a, b = (np.asarray(image.convert("RGB"), np.int16) for image in (first, second))
    return int(np.abs(a - b).max())


def _levels(difference: int) -> str:
    return "identical pixels" if difference == 0 else f"at most {difference} of 255 levels apart"


@dataclass(frozen=True)
class PocketSubject:
    """The tuned pocket model, which relights a rendered scene.

    Attributes:
        model: As loaded.
        picture: What it relights, resized to each case.
        name: What it is called in records and tables.
    """

    model: LbmModel
    picture: Image.Image
    name: str = "pocket LBM"

    @classmethod
    def load(cls, *, dtype: torch.dtype, device: torch.device) -> "PocketSubject":
        """Load the model from the package, and render its scene."""
        source, _ = relighting_pair(EXAMPLE_SCENE, COOL)
        return cls(load_lbm(TUNED_PATH, CONFIG_PATH, dtype=dtype, device=device), Image.fromarray(source))

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next(self.model.parameters()).device

    def check(self, case: BenchCase) -> None:
        """Refuse batches, videos, and no steps.

        Raises:
            ConfigError: Says which.
        """
        if case.batch != 1:
            raise ConfigError("--batch: the pocket model makes one picture at a time.", hint="Leave it out.")
        if case.frames is not None:
            raise ConfigError("--frames: the pocket model makes pictures, not videos.", hint="Leave it out.")
        bridge_sigmas(STEPS if case.steps is None else case.steps)

    def generate(self, case: BenchCase, seed: int, monitor: PerformanceMonitor) -> Made:
        """Relight the scene at the case's size; `translate_image` knows its own stages and steps."""
        picture = self.picture
        if case.width is not None and case.height is not None:
            picture = picture.resize((case.width, case.height))
        result = translate_image(
            self.model,
            picture,
            num_inference_steps=STEPS if case.steps is None else case.steps,
            seed=seed,
            size="keep",
        )
        return Made(1, result.width, result.height)
