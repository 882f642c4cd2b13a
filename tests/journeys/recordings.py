"""What users record: real runs of small pipelines, and what reports must say of each.

A row of `RECORDINGS` is a recording. What is expected of it is counted by hand or worked out here with torch, never by
what reports.
"""

import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from tests.families import generate, make_pipeline
from tests.families.loras import State, lora_state, modules_of, parts_of, write
from tests.lbm.training.small_run import MODEL, write_small_run
from torch import nn

import sigmascope

STEPS: Final = 2
"""Of the families' calls."""
LAYERS: Final = "mid_block"
"""Of SD 1.5's U-Net: where the LoRAs are."""


@dataclass(frozen=True)
class Made:
    """A run, and what is known of it.

    Attributes:
        run: As users have it: a `Watch` or a `Run`.
        steps: How many it made.
        says: What it says first or finds, where it is read: in the terminal, HTML and Markdown.
        page: What the HTML page says besides.
    """

    run: Any
    steps: int
    says: str = ""
    page: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recording:
    """One kind of run; `make` records it in a folder."""

    name: str
    make: Callable[[Path], Made]


def _generated(family: str, folder: Path) -> Made:
    pipeline = make_pipeline(family)
    with sigmascope.watch(pipeline, name=family) as run:
        generate(pipeline, family)
    return Made(run, STEPS)


def _edited(folder: Path) -> Made:
    """Half of six steps."""
    from diffusers import StableDiffusionImg2ImgPipeline

    parts = make_pipeline("sd15").components
    pipeline = StableDiffusionImg2ImgPipeline(**parts, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    with sigmascope.watch(pipeline) as run:
        pipeline("a red fox", image=Image.new("RGB", (32, 32), "red"), strength=0.5, num_inference_steps=6)
    return Made(run, 3)


def _with_lora(folder: Path, state: State, says: str = "", *page: str) -> Made:
    """SD 1.5, and a LoRA that is loaded inside the watch."""
    pipeline, path = make_pipeline("sd15"), write(state, folder / "style.safetensors")
    with sigmascope.watch() as run:
        pipeline.load_lora_weights(path)
        generate(pipeline, "sd15")
    return Made(run, STEPS, says, page)


def _lora() -> State:
    return lora_state(make_pipeline("sd15"), ["unet"], only=LAYERS)


def _acting_lora(folder: Path) -> Made:
    state, unet = _lora(), make_pipeline("sd15").unet
    changes, weights = [], []
    for name in modules_of(state):
        up, down = (state[f"{name}.lora_{side}.weight"].double() for side in "BA")
        changes.append((up.flatten(1) @ down.flatten(1)).square().sum())
        weights.append(unet.get_parameter(f"{name.removeprefix('unet.')}.weight").double().square().sum())
    change = torch.sqrt(sum(changes) / sum(weights))
    count = len(modules_of(state))
    return _with_lora(folder, state, "", f"{count} of {count} modules", f">{100 * change:.2g} %</td>")


def _lora_of_zeros(folder: Path) -> Made:
    state = {name: torch.zeros_like(tensor) for name, tensor in _lora().items()}
    count = len(modules_of(state))
    says = f"The LoRA changes nothing: all its changes are zero, in {count} "
    return _with_lora(
        folder, state, says, "load_lora_weights changed nothing.", f"{count} of {count} modules"
    )


def _lora_for_flux(folder: Path) -> Made:
    state = lora_state(make_pipeline("flux"), parts_of("flux", encoders=False))
    count = len(modules_of(state))
    says = f"None of the {count} modules changes a weight of the model"
    return _with_lora(folder, state, says, f"0 of {count} modules", "load_lora_weights changed nothing.")


def _lora_with_nan(folder: Path) -> Made:
    state = _lora()
    first = next(iter(state))
    state[first] = torch.full_like(state[first], torch.nan)
    return _with_lora(folder, state, "the LoRA's change of 1 weight holds NaN or Inf")


def _failing(pipeline: Any, *steps_and_says: Any, kind: type[BaseException], **call: Any) -> Made:
    run = sigmascope.watch(pipeline)
    with suppress(kind), run:
        generate(pipeline, "sd15", **call)
    return Made(run, *steps_and_says)


def _failing_text_encoding(folder: Path) -> Made:
    """A tokenizer with more words than the encoder has."""
    pipeline = make_pipeline("sd15")
    pipeline.text_encoder.set_input_embeddings(nn.Embedding(4, 16))
    return _failing(pipeline, 0, "text_encoder failed after", kind=IndexError)


def _failing_vae(folder: Path) -> Made:
    pipeline = make_pipeline("sd15")
    pipeline.vae.double()
    return _failing(pipeline, STEPS, "latent_decoding failed after", kind=RuntimeError)


def _interrupted(folder: Path) -> Made:
    """Ctrl-C after the first step."""

    def interrupt(_pipeline: object, _step: int, _time: object, values: dict[str, Any]) -> dict[str, Any]:
        signal.raise_signal(signal.SIGINT)
        return values

    says, pipeline = "denoising was interrupted after", make_pipeline("sd15")
    return _failing(pipeline, 1, says, kind=KeyboardInterrupt, callback_on_step_end=interrupt)


def _of_1000_steps(folder: Path) -> Made:
    """As many as a DDPM makes unless it is told otherwise."""
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    unet = UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        norm_num_groups=4,
        add_attention=False,
    )
    pipeline = DDPMPipeline(unet, DDPMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    with sigmascope.watch(pipeline) as run:
        pipeline(output_type="np")
    return Made(run, 1000)


def _training(folder: Path) -> Made:
    from sigmascope.lbm.training.train import train

    return Made(train(write_small_run(folder).settings(max_steps=3)).run, 3)


def _lbm(folder: Path) -> Made:
    from sigmascope.lbm.config import parse_config
    from sigmascope.lbm.infer import translate_image
    from sigmascope.lbm.model import build_lbm

    model = build_lbm(parse_config(MODEL)).eval()
    with sigmascope.Recorder("lbm") as recorder:
        translate_image(model, Image.new("RGB", (32, 32), "red"), num_inference_steps=4, seed=0)
    return Made(recorder.run(), 4)


def _bench(folder: Path) -> Made:
    from sigmascope.pipeline.bench import BenchOptions, DiffusersSubject, run_benchmark
    from sigmascope.records.performance import BenchCase

    subject = DiffusersSubject("sd15", make_pipeline("sd15"), torch.device("cpu"))
    (result,) = run_benchmark(subject, [BenchCase(32, 32, 1, 5)], BenchOptions(1, 0))
    return Made(result.runs[0], 5)


def _own_loop(folder: Path) -> Made:
    """A loop of one's own, its stages named as ComfyUI's nodes would."""
    pipeline, latent = make_pipeline("sd15"), torch.zeros(1, 4, 16, 16)
    monitor = sigmascope.WorkflowMonitor("own loop", verbose=False)
    monitor.start_monitoring("denoising")
    with torch.no_grad():
        for time in range(7):
            with monitor.recorder.step():
                latent = pipeline.unet(latent, time, torch.zeros(1, 77, 16)).sample
    monitor.end_monitoring("denoising", pipeline.unet, "UNet")
    return Made(monitor.run(), 7)


RECORDINGS: Final = (
    Recording("SD 1.5", lambda folder: _generated("sd15", folder)),
    Recording("SDXL", lambda folder: _generated("sdxl", folder)),
    Recording("FLUX", lambda folder: _generated("flux", folder)),
    Recording("WAN video", lambda folder: _generated("wan", folder)),
    Recording("image to image", _edited),
    Recording("a LoRA that acts", _acting_lora),
    Recording("a LoRA of zeros", _lora_of_zeros),
    Recording("a LoRA for another model", _lora_for_flux),
    Recording("a LoRA with NaN", _lora_with_nan),
    Recording("a failure in text encoding", _failing_text_encoding),
    Recording("a failure in the VAE", _failing_vae),
    Recording("Ctrl-C", _interrupted),
    Recording("1,000 steps", _of_1000_steps),
    Recording("training", _training),
    Recording("LBM", _lbm),
    Recording("bench", _bench),
    Recording("an own loop", _own_loop),
)
