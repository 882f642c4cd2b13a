"""`sigmascope lora statistics`: what a model does with its weights, for extractions that keep the picture."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from sigmascope.cli import options
from sigmascope.cli.console import facts, needs_extra, percent, print_json, print_written, progress_bar, title
from sigmascope.cli.options import AsJson, SaveTo
from sigmascope.errors import ConfigError

if TYPE_CHECKING:
    from sigmascope.lora.statistics import ModelStatistics

_INPUTS = "What it is run on"
_MODEL = "Model"
EPILOG = """Examples:

sigmascope lora statistics lbm.safetensors --images photos --save_to stats.safetensors

sigmascope lora statistics sdxl-folder --prompts prompts.txt --num_inference_steps 20 --save_to stats.safetensors

sigmascope lora extract --base_model_path base.safetensors --tuned_model_path lbm.safetensors
--save_to small.safetensors --max_size 20MB --statistics stats.safetensors
"""


def statistics(
    *,
    model: Annotated[
        Path, typer.Argument(help="LBM checkpoint, or a diffusers folder. The base or the tuned model.")
    ],
    save_to: SaveTo,
    images: Annotated[
        Path | None,
        typer.Option("--images", help="Folder of pictures, for an LBM.", rich_help_panel=_INPUTS),
    ] = None,
    noise: Annotated[
        int | None,
        typer.Option(
            "--noise", help="So many pictures of blurred noise, for an LBM.", rich_help_panel=_INPUTS
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", help="Text file, a prompt on each line, for a pipeline.", rich_help_panel=_INPUTS
        ),
    ] = None,
    num_inference_steps: Annotated[
        int | None,
        typer.Option(
            "--num_inference_steps",
            help="As the LoRA will be used; 1 for an LBM, the pipeline's own for others.",
            show_default=False,
            rich_help_panel=_INPUTS,
        ),
    ] = None,
    guidance_scale: Annotated[
        float | None,
        typer.Option("--guidance_scale", help="Of a pipeline.", show_default=False, rich_help_panel=_INPUTS),
    ] = None,
    through: Annotated[
        Literal["sampling", "calls"] | None,
        typer.Option(
            "--through",
            help="Of a pipeline. sampling: an error counts as it arrives in the picture. calls: as it shows in its step's "
            "output, for schedulers that let no gradient through.  [default: sampling]",
            show_default=False,
            rich_help_panel=_INPUTS,
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--size", help="WIDTHxHEIGHT.", show_default=False, rich_help_panel=_INPUTS),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Of noise and projections.", rich_help_panel=_INPUTS)
    ] = 0,
    probes: Annotated[
        int,
        typer.Option("--probes", help="Random projections of each output.", rich_help_panel=_INPUTS),
    ] = 1,
    config_path: Annotated[Path | None, options.config_path(_MODEL)] = None,
    torch_dtype: Annotated[str, options.torch_dtype(_MODEL)] = "float32",
    device: Annotated[str, options.device(_MODEL)] = "auto",
    full_up_to: Annotated[
        int,
        typer.Option(
            "--full_up_to",
            help="Layers up to this width keep all their moments, wider ones a diagonal and --rank directions.",
            rich_help_panel=_MODEL,
        ),
    ] = 1024,
    rank: Annotated[
        int, typer.Option("--rank", help="Directions kept of wider layers.", rich_help_panel=_MODEL)
    ] = 128,
    as_json: AsJson = False,
) -> None:
    """Run a model on a few inputs and keep what its layers do, for extract --statistics.

    The model is called as always, and once more with gradients. For each
    layer the second moments of what the picture feels of its weight are
    kept. Eight inputs are enough for an LBM; a pipeline gains by more.
    """
    from sigmascope.checkpoints import open_checkpoint
    from sigmascope.lora.file import check_target, refuse_inputs

    check_target(save_to)
    if sum(given is not None for given in (images, noise, prompts)) != 1:
        raise ConfigError(
            "statistics need one kind of input.",
            hint="Give --images FOLDER or --noise 4 for an LBM, --prompts FILE for a pipeline.",
        )
    with open_checkpoint(model) as checkpoint:
        refuse_inputs(save_to, checkpoint)
    common: dict[str, object] = {"probes": probes, "full_up_to": full_up_to, "rank": rank, "seed": seed}
    with needs_extra("lbm"):
        from sigmascope.lbm.devices import resolve_device, resolve_dtype

        common |= {"dtype": resolve_dtype(torch_dtype), "device": resolve_device(device)}
    if prompts is not None:
        common["through"] = through or "sampling"
        found = _of_pipeline(model, prompts, _call(num_inference_steps, guidance_scale, size), common)
    else:
        for flag, given in (("--guidance_scale", guidance_scale), ("--through", through)):
            if given is not None:
                raise ConfigError(f"{flag} is for --prompts.", hint="Leave it out for an LBM.")
        found = _of_lbm(model, images, noise, config_path, num_inference_steps or 1, size, common)
    found.save(save_to)
    if as_json:
        print_json(_as_dict(found))
    else:
        _print(Console(), save_to, found)


def _call(steps: int | None, guidance: float | None, size: str | None) -> dict[str, object]:
    call: dict[str, object] = {"num_inference_steps": steps, "guidance_scale": guidance}
    if size is not None:
        width, cross, height = size.partition("x")
        if not (cross and width.isdigit() and height.isdigit()):
            raise ConfigError(f"--size {size} is no size.", hint="Write it as 512x512.")
        call |= {"width": int(width), "height": int(height)}
    return {name: value for name, value in call.items() if value is not None}


def _of_pipeline(
    model: Path, prompts: Path, call: dict[str, object], common: dict[str, object]
) -> "ModelStatistics":
    try:
        lines = [line.strip() for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts {prompts}: {error}", hint="Name a text file.") from error
    from sigmascope.pipeline.calibration import saved_pipeline_statistics

    with progress_bar("Running") as progress:
        return saved_pipeline_statistics(model, lines, call=call, progress=progress, **common)  # type: ignore[arg-type]


def _of_lbm(
    model: Path,
    images: Path | None,
    noise: int | None,
    config_path: Path | None,
    steps: int,
    size: str | None,
    common: dict[str, object],
) -> "ModelStatistics":
    with needs_extra("lbm"):
        from sigmascope.lbm.calibration import lbm_statistics, noise_pictures
        from sigmascope.lbm.images import find_images, load_image, parse_size
    if images is not None:
        pictures = [load_image(path) for path in find_images(images)[0]]
    else:
        pictures = noise_pictures(noise or 0, seed=int(str(common["seed"])))
    with progress_bar("Running") as progress:
        return lbm_statistics(
            model,
            pictures,
            config_path=config_path,
            num_inference_steps=steps,
            size=parse_size(size or "bucket"),
            progress=progress,
            **common,  # type: ignore[arg-type]
        )


def _as_dict(found: "ModelStatistics") -> dict[str, object]:
    return {
        "layers": len(found),
        "unmet": list(found.unmet),
        "captured": found.captured,
        "fingerprint": found.fingerprint,
        **found.facts,
    }


def _print(console: Console, path: Path, found: "ModelStatistics") -> None:
    console.print(title("Statistics", path.name))
    rows = [
        ("Layers", f"{len(found)}, and {len(found.unmet)} without statistics"),
        ("Calls of the model", str(found.facts["calls"])),
        ("Kept, least of a layer", percent(found.captured)),
    ]
    console.print(facts(rows))
    print_written(console, path, path.stat().st_size)
    following = f"Next: sigmascope lora plan BASE TUNED --statistics {shlex.quote(str(path))}"
    console.print(following, markup=False, soft_wrap=True)
