"""`sigmascope lora statistics` and `lora fit`: run a model on a few inputs, to make LoRAs whose pictures come closer."""

import shlex
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sigmascope.cli import options
from sigmascope.cli.console import (
    Console,
    facts,
    needs_extra,
    number,
    percent,
    print_json,
    print_written,
    progress_bar,
    title,
)
from sigmascope.cli.options import AsJson, SaveTo, found_model, option_groups, prompts_in
from sigmascope.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

    from sigmascope.lora.fit import FittedLora
    from sigmascope.lora.statistics import ModelStatistics

_INPUTS = "Inputs"
_MODEL = "Model"
app = typer.Typer(rich_markup_mode="rich")
EPILOG = """Examples:

sigmascope lora statistics lbm.safetensors --images photos --save_to stats.safetensors

sigmascope lora statistics sdxl-folder --prompts prompts.txt --guidance_scale 5 --save_to stats.safetensors

sigmascope lora extract --base_model_path base.safetensors --tuned_model_path lbm.safetensors
--save_to small.safetensors --max_size 20MB --statistics stats.safetensors
"""
FIT_EPILOG = """Examples:

sigmascope lora fit small.safetensors --base_model_path base.safetensors --tuned_model_path tuned.safetensors
--images photos --save_to fitted.safetensors

sigmascope lora fit small.safetensors --base_model_path sdxl-base --tuned_model_path sdxl-tuned --prompts prompts.txt
--num_inference_steps 20 --guidance_scale 5 --torch_dtype bf16 --gradient_checkpointing --save_to fitted.safetensors
"""


@dataclass(frozen=True)
class CalibrationFlags:
    """The inputs that a model runs on, and how it runs."""

    images: Annotated[
        Path | None,
        typer.Option("--images", help="For an LBM: a folder of pictures.", rich_help_panel=_INPUTS),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="For a pipeline: a text file with a prompt on each line.",
            rich_help_panel=_INPUTS,
        ),
    ] = None
    noise: Annotated[
        int | None,
        typer.Option(
            "--noise",
            help="Use this many pictures of blurred noise, or prompts of random words, instead.",
            rich_help_panel=_INPUTS,
        ),
    ] = None
    num_inference_steps: Annotated[
        int | None,
        typer.Option(
            "--num_inference_steps",
            help="Default: 1 for an LBM; for a pipeline 3 in statistics, or its own default with --through calls. For a fit, "
            "use as many as with the finished LoRA.",
            show_default=False,
            rich_help_panel=_INPUTS,
        ),
    ] = None
    guidance_scale: Annotated[
        float | None,
        typer.Option(
            "--guidance_scale",
            help="Guidance scale of a pipeline.",
            show_default=False,
            rich_help_panel=_INPUTS,
        ),
    ] = None
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            help="Size of the pictures, as WIDTHxHEIGHT.",
            show_default=False,
            rich_help_panel=_INPUTS,
        ),
    ] = None
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of all random choices.", rich_help_panel=_INPUTS)
    ] = 0
    config_path: Annotated[Path | None, options.config_path(_MODEL)] = None
    torch_dtype: Annotated[str, options.torch_dtype(_MODEL)] = "float32"
    device: Annotated[str, options.device(_MODEL)] = "auto"
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient_checkpointing",
            help="Save memory by computing each block twice.",
            rich_help_panel=_MODEL,
        ),
    ] = False

    def require_one(self) -> None:
        """Raise a ConfigError unless exactly one kind of input is given."""
        if sum(given is not None for given in (self.images, self.noise, self.prompts)) != 1:
            raise ConfigError(
                "Give one kind of input.",
                hint="Give --images FOLDER for an LBM, --prompts FILE for a pipeline, or --noise 16.",
            )

    def is_for_pipeline(self, model: Path) -> bool:
        """Whether the model is a diffusers folder, judged by the kind of input or by the folder."""
        if self.noise is None:
            return self.prompts is not None
        return (model / "model_index.json").is_file()

    def refuse(self, **of_pipeline: object) -> None:
        """Raise a ConfigError for a flag that an LBM does not have."""
        for flag, given in {"guidance_scale": self.guidance_scale, **of_pipeline}.items():
            if given is not None:
                raise ConfigError(f"--{flag} is for a pipeline, and this is an LBM.", hint="Leave it out.")

    @property
    def place(self) -> dict[str, Any]:
        """Dtype, device, and whether to checkpoint gradients."""
        with needs_extra("lbm"):
            from sigmascope.lbm.devices import resolve_device, resolve_dtype

            return {
                "dtype": resolve_dtype(self.torch_dtype),
                "device": resolve_device(self.device),
                "gradient_checkpointing": self.gradient_checkpointing,
            }

    def explained(self) -> AbstractContextManager[None]:
        """What says, when memory runs out in the block, which of these flags take less."""
        with needs_extra("lbm"):
            from sigmascope.lbm.devices import LESS_FOR_GRADIENTS, explain_out_of_memory
        return explain_out_of_memory("the model with its gradients", LESS_FOR_GRADIENTS)

    @property
    def texts(self) -> list[str] | int:
        """The prompts, or the number of random ones to make."""
        return self.noise or 0 if self.prompts is None else prompts_in(self.prompts)

    @property
    def call(self) -> dict[str, object]:
        """Arguments of the pipeline's call."""
        call: dict[str, object] = {
            "num_inference_steps": self.num_inference_steps,
            "guidance_scale": self.guidance_scale,
        }
        if self.size is not None:
            width, cross, height = self.size.partition("x")
            if not (cross and width.isdigit() and height.isdigit()):
                raise ConfigError(f"--size {self.size} is not a size.", hint="Write it as 512x512.")
            call |= {"width": int(width), "height": int(height)}
        return {name: value for name, value in call.items() if value is not None}

    @property
    def pictures(self) -> "list[Image]":
        """The pictures that an LBM translates."""
        with needs_extra("lbm"):
            from sigmascope.lbm.images import find_images, load_image
            from sigmascope.lbm.lbm_statistics import noise_pictures
        if self.images is not None:
            return [load_image(path) for path in find_images(self.images)[0]]
        return noise_pictures(self.noise or 0, seed=self.seed)

    @property
    def translation(self) -> dict[str, Any]:
        """How an LBM translates."""
        from sigmascope.lbm.images import parse_size

        return {
            "config_path": self.config_path,
            "num_inference_steps": self.num_inference_steps or 1,
            "size": parse_size(self.size or "bucket"),
        }


@app.command("statistics", epilog=EPILOG)
@option_groups
def statistics(
    *,
    model: Annotated[
        Path,
        typer.Argument(
            help="The base or the tuned model: an LBM checkpoint or a diffusers folder.", callback=found_model
        ),
    ],
    save_to: SaveTo,
    inputs: CalibrationFlags,
    through: Annotated[
        Literal["sampling", "calls"] | None,
        typer.Option(
            "--through",
            help="For a pipeline, where an error is measured. sampling: in the finished picture. calls: in the output of its "
            "step, for schedulers without gradients.  [default: sampling]",
            show_default=False,
            rich_help_panel=_INPUTS,
        ),
    ] = None,
    probes: Annotated[
        int,
        typer.Option("--probes", help="Random projections of each output.", rich_help_panel=_INPUTS),
    ] = 1,
    full_up_to: Annotated[
        int,
        typer.Option(
            "--full_up_to",
            help="Layers up to this width keep all moments. Wider ones keep the diagonal and --rank directions.",
            rich_help_panel=_MODEL,
        ),
    ] = 256,
    rank: Annotated[
        int,
        typer.Option("--rank", help="Number of directions that wider layers keep.", rich_help_panel=_MODEL),
    ] = 32,
    as_json: AsJson = False,
) -> None:
    """Run a model on a few inputs and measure how its layers affect the picture, for extract --statistics.

    The model runs as usual, then once more with gradients. The file holds
    second moments of each layer's inputs and gradients. Eight pictures are
    enough for an LBM; give a pipeline 64 prompts. If a run is killed, the same
    command continues it.
    """
    from sigmascope.checkpoints import open_checkpoint
    from sigmascope.lora.file import check_target, refuse_inputs

    check_target(save_to)
    inputs.require_one()
    with open_checkpoint(model) as checkpoint:
        refuse_inputs(save_to, checkpoint)
    common = {
        "probes": probes,
        "full_up_to": full_up_to,
        "rank": rank,
        "seed": inputs.seed,
        "save_to": save_to,
        **inputs.place,
    }
    if inputs.is_for_pipeline(model):
        from sigmascope.pipeline.pipeline_statistics import saved_pipeline_statistics

        with inputs.explained(), progress_bar("Running") as progress:
            layer_statistics = saved_pipeline_statistics(
                model,
                inputs.texts,
                call=inputs.call,
                through=through or "sampling",
                progress=progress,
                **common,
            )
    else:
        inputs.refuse(through=through)
        pictures = inputs.pictures
        from sigmascope.lbm.lbm_statistics import lbm_statistics

        with inputs.explained(), progress_bar("Running") as progress:
            layer_statistics = lbm_statistics(
                model, pictures, progress=progress, **inputs.translation, **common
            )
    if as_json:
        print_json(_as_dict(layer_statistics))
    else:
        _print(Console(), save_to, layer_statistics)


def _as_dict(measured: "ModelStatistics") -> dict[str, object]:
    return {
        "layers": len(measured),
        "unmet": list(measured.unmet),
        "captured": measured.captured,
        "fingerprint": measured.fingerprint,
        **measured.facts,
    }


def _print(console: Console, path: Path, measured: "ModelStatistics") -> None:
    console.print(title("Statistics", path.name))
    rows = [
        ("Layers", f"{len(measured)}, and {len(measured.unmet)} without statistics"),
        ("Calls of the model", str(measured.facts["calls"])),
        ("Kept of a layer, at least", percent(measured.captured)),
    ]
    console.print(facts(rows))
    print_written(console, path, path.stat().st_size)
    following = f"Next: sigmascope lora plan BASE TUNED --statistics {shlex.quote(str(path))}"
    console.print(following, markup=False, soft_wrap=True)


@app.command("fit", epilog=FIT_EPILOG)
@option_groups
def fit(
    *,
    lora: Annotated[
        Path, typer.Argument(help="The LoRA to fit, with up and down factors, as extract makes it.")
    ],
    base_model_path: Annotated[
        Path,
        typer.Option(
            "--base_model_path",
            help="The base model: an LBM checkpoint or a diffusers folder.",
            callback=found_model,
        ),
    ],
    tuned_model_path: Annotated[
        Path,
        typer.Option(
            "--tuned_model_path",
            help="The tuned model, whose pictures the LoRA should reproduce.",
            callback=found_model,
        ),
    ],
    save_to: SaveTo,
    inputs: CalibrationFlags,
    steps: Annotated[int, typer.Option("--steps", help="Steps of the optimizer.")] = 400,
    learning_rate: Annotated[
        float,
        typer.Option(
            "--learning_rate", help="Learning rate, as a share of each factor's size. It falls to 0."
        ),
    ] = 0.01,
    batch_size: Annotated[int, typer.Option("--batch_size", help="Prompts per call of a pipeline.")] = 1,
    gradient_accumulation_steps: Annotated[
        int, typer.Option("--gradient_accumulation_steps", help="Calls per step of the optimizer.")
    ] = 4,
    as_json: AsJson = False,
) -> None:
    """Fit a LoRA to the tuned model's outputs: closer pictures from the same bytes.

    The tuned model runs on a few inputs, and all factors of the LoRA learn
    together to reproduce its outputs. Ranks, names and size stay. Some inputs
    are held out as a test; if the LoRA does no better on them, it stays as it is.
    """
    from sigmascope.lora.file import check_target, refuse_files
    from sigmascope.lora.fit import FitOptions

    check_target(save_to)
    refuse_files(save_to, [lora, base_model_path, tuned_model_path])
    inputs.require_one()
    how = FitOptions(steps, learning_rate, gradient_accumulation_steps, inputs.seed)
    place = inputs.place
    if inputs.is_for_pipeline(tuned_model_path):
        from sigmascope.pipeline.pipeline_statistics import fit_saved_pipeline_lora

        with inputs.explained(), progress_bar("Fitting") as progress:
            fitted = fit_saved_pipeline_lora(
                base_model_path,
                tuned_model_path,
                lora,
                save_to,
                inputs.texts,
                how,
                call=inputs.call,
                batch_size=batch_size,
                progress=progress,
                **place,
            )
    else:
        inputs.refuse(batch_size=None if batch_size == 1 else batch_size)
        pictures = inputs.pictures
        from sigmascope.lbm.lbm_statistics import fit_lbm_lora

        with inputs.explained(), progress_bar("Fitting") as progress:
            fitted = fit_lbm_lora(
                base_model_path,
                tuned_model_path,
                lora,
                save_to,
                pictures,
                how,
                progress=progress,
                **inputs.translation,
                **place,
            )
    if as_json:
        print_json(_fitted_as_dict(fitted))
    else:
        _print_fitted(Console(), save_to, fitted)


def _fitted_as_dict(fitted: "FittedLora") -> dict[str, object]:
    return {
        "is_nearer": fitted.is_nearer,
        "error_before": fitted.before,
        "error_after": fitted.after,
        "calls": fitted.calls,
        "held_out": fitted.held_out,
        "steps": fitted.steps,
        "seconds": fitted.seconds,
    }


def _print_fitted(console: Console, path: Path, fitted: "FittedLora") -> None:
    console.print(title("Fit", path.name))
    every = fitted.calls + fitted.held_out
    where = (
        f"{fitted.held_out} of {every} calls, held out"
        if fitted.held_out
        else "the calls it was fitted to: one input"
    )
    console.print(
        facts(
            [
                ("Error before", f"{percent(fitted.before)} of what tuning changes in the outputs"),
                ("Error after", percent(fitted.after)),
                ("Measured on", where),
                (
                    "Fitted to",
                    f"{fitted.calls} of {every} calls, {fitted.steps} steps, {number(fitted.seconds)} s",
                ),
            ]
        )
    )
    if not fitted.is_nearer:
        advice = "The fit brought it no nearer, so the factors are unchanged. Give more inputs, or a smaller --learning_rate."
        console.print(advice, markup=False, soft_wrap=True)
    if fitted.before > 1.0:
        advice = (
            "The LoRA was farther from the tuned model than the base is: was it made for these two models?"
        )
        console.print(advice, markup=False, soft_wrap=True)
    print_written(console, path, path.stat().st_size)
