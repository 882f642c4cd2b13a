"""`sigmascope lora grid`: several LoRAs at several scales on the same prompts and seed, as a picture and a page."""

from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from sigmascope.cli import options
from sigmascope.cli.bench import POCKET, call_values, checked_offload, dtype_of, parse_size
from sigmascope.cli.console import (
    Console,
    findings,
    needs_extra,
    plain,
    print_json,
    progress_bar,
    table,
    title,
)
from sigmascope.cli.options import AsJson, flag, numbers_in, prompts_in
from sigmascope.errors import ConfigError

if TYPE_CHECKING:
    from sigmascope.pipeline.lora_grid import LoraGrid

app = typer.Typer(rich_markup_mode="rich")
EPILOG = """Examples:

sigmascope lora grid ./my-pipeline --lora style.safetensors --prompt "a red fox" --scales 0.5,1,1.5

sigmascope lora grid owner/name --lora a.safetensors --lora b.safetensors --prompts prompts.txt --steps 20 -o ab.png

sigmascope lora grid pocket --lora my_lora.safetensors --images photos
"""
_LBM, _PIPELINE, _RUN = "LBMs", "Diffusers pipelines", "How to run"
_MODEL_HELP = "A folder that diffusers wrote, a name on the hub, an LBM checkpoint, or pocket."
_OUTPUT_HELP = "A .png or .html file. The other one and a folder .cells are written beside it."
_LORA_HELP = "LoRA file of any format. Repeatable."
_PROMPTS_HELP = "A text file with a prompt on each line."
_IMAGES_HELP = "A picture to translate instead of a prompt, or a folder of pictures. Repeatable."
_RESOLUTION_HELP = "WIDTHxHEIGHT, or the side of a square. For an LBM also bucket or keep."


@app.command("grid", epilog=EPILOG)
def grid(
    model: Annotated[str, typer.Argument(help=_MODEL_HELP, metavar="MODEL", show_default=False)],
    lora: Annotated[list[Path], flag("--lora", _LORA_HELP, show_default=False, exists=True)],
    scales: Annotated[str, flag("--scales", "Strengths, also negative ones.", metavar="<n,…>")] = "0.5,1",
    output: Annotated[Path, typer.Option("--output", "-o", help=_OUTPUT_HELP)] = Path("lora-grid.png"),
    prompt: Annotated[list[str] | None, flag("--prompt", "Prompt of a row. Repeatable.", _PIPELINE)] = None,
    prompts: Annotated[Path | None, flag("--prompts", _PROMPTS_HELP, _PIPELINE, exists=True)] = None,
    guidance_scale: Annotated[float | None, flag("--guidance_scale", "Guidance scale.", _PIPELINE)] = None,
    image: Annotated[Path | None, options.start_image(_PIPELINE)] = None,
    call: Annotated[list[str] | None, options.call(_PIPELINE)] = None,
    offload: Annotated[str, options.offload(_PIPELINE)] = "none",
    hide_prompts: Annotated[bool, flag("--hide_prompts", "Number prompts instead.", _PIPELINE)] = False,
    images: Annotated[list[Path] | None, flag("--images", _IMAGES_HELP, _LBM)] = None,
    config_path: Annotated[Path | None, options.config_path(_LBM)] = None,
    seed: Annotated[int, flag("--seed", "Seed of every cell.", _RUN)] = 0,
    steps: Annotated[int | None, flag("--steps", "Denoising steps.", _RUN, min=1)] = None,
    resolution: Annotated[str | None, flag("--resolution", _RESOLUTION_HELP, _RUN)] = None,
    device: Annotated[str, options.device(_RUN)] = "auto",
    dtype: Annotated[str, options.dtype(_RUN)] = "auto",
    as_json: AsJson = False,
) -> None:
    """Paint prompts without a LoRA and with each LoRA at each scale, side by side.

    Every cell has the same seed and shows how far it is from the picture without
    a LoRA: mean difference and PSNR. Cells are kept as they are painted, so the
    same command goes on after a stop. The exit code is 1 if a LoRA changes no picture.
    """
    with needs_extra("lbm"):
        from sigmascope.checkpoints.hub import local_model
        from sigmascope.lbm.devices import LESS_FOR_INFERENCE, explain_out_of_memory, resolve_device
        from sigmascope.lbm.images import load_image
        from sigmascope.lora.file import refuse_files
        from sigmascope.pipeline.bench import load_pipeline
        from sigmascope.pipeline.lora_grid import lora_grid, output_paths
        from sigmascope.probes.reading import attempt

    settings: dict[str, Any] = {"output": output, "scales": numbers_in("--scales", scales), "seed": seed}
    sheet, page, folder = output_paths(output)
    inputs = [path for path in (*lora, *(images or []), image, prompts) if path is not None]
    refuse_files(sheet, inputs, "--output")
    refuse_files(page, inputs, "--output")
    torch_device = resolve_device(device)
    placed: dict[str, Any] = {"dtype": dtype_of(dtype, torch_device), "device": torch_device}
    path = attempt(partial(local_model, model)).value or Path(model)  # diffusers looks for a pipeline itself
    is_pipeline = model != POCKET and ((path / "model_index.json").is_file() or not path.exists())
    foreign: dict[str, object] = {"images": images, "config_path": config_path}
    if not is_pipeline:
        foreign = {"prompt": prompt, "prompts": prompts, "image": image, "call": call}
        foreign |= {"hide_prompts": hide_prompts, "offload": offload != "none"}
        foreign["guidance_scale"] = guidance_scale is not None
    others = _LBM if is_pipeline else _PIPELINE
    for name, is_given in foreign.items():
        if is_given:
            raise ConfigError(f"--{name} is for {others}, and {model} is not one.", hint="Leave it out.")
    with explain_out_of_memory("the model with its pictures", LESS_FOR_INFERENCE):
        with progress_bar("Loading") as progress:
            if is_pipeline:
                texts = [*(prompt or []), *(prompts_in(prompts) if prompts else [])]
                if not texts:
                    raise ConfigError("There is no prompt.", hint="Give --prompt or --prompts FILE.")
                given: dict[str, Any] = {"num_inference_steps": steps, "guidance_scale": guidance_scale}
                given["image"] = load_image(image) if image else None
                given["width"], given["height"] = parse_size(resolution) if resolution else (None, None)
                arguments = {name: value for name, value in given.items() if value is not None}
                settings |= {"prompts": texts, "call": call_values(call or []) | arguments}
                subject = load_pipeline(str(path), offload=checked_offload(offload, torch_device), **placed)
            else:
                placed["progress"] = progress
                subject = _lbm(path, config_path, images or [], steps or 1, resolution or "bucket", **placed)
        try:
            with progress_bar("Painting") as progress:
                made = lora_grid(subject, lora, **settings, hide_prompts=hide_prompts, progress=progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"Stopped by Ctrl-C. What was painted is kept in {folder}; the same command goes on."
            ) from None
    if as_json:
        print_json(made.as_dict() | {"picture": str(sheet), "page": str(page)})
    else:
        print_grid(Console(), made)
        Console().print(title("Picture", sheet), title("Page", page), sep="\n")
    if made.idle:
        raise typer.Exit(1)


def _lbm(model: Path, config: Path | None, images: list[Path], steps: int, side: str, **loading: Any) -> Any:
    from sigmascope.checkpoints.hub import model_name
    from sigmascope.lbm.images import find_images, load_image, parse_size
    from sigmascope.lbm.infer import PictureRows
    from sigmascope.lbm.model import load_lbm
    from sigmascope.lbm.pocket import BASE_PATH

    if not images:
        raise ConfigError("There is no picture to translate.", hint="Give --images PICTURE or FOLDER.")
    files = [file for path in images for file in (find_images(path)[0] if path.is_dir() else [path])]
    names = [file.name for file in files]
    pictures = {file.name if names.count(file.name) == 1 else str(file): load_image(file) for file in files}
    size = parse_size(f"{side}x{side}" if side.isdecimal() else side)
    path, name = (BASE_PATH, "pocket LBM") if str(model) == POCKET else (model, model_name(model))
    return PictureRows(load_lbm(path, config, **loading), pictures, steps, picture_size=size, name=name)


def print_grid(console: Console, grid: "LoraGrid") -> None:
    """Show the average distance of each LoRA at each scale from the pictures without a LoRA, and findings."""
    reused = sum(cell.reused for cell in grid.cells)
    console.print(title("LoRA grid", f"{len(grid.cells)} cells, {reused} of them kept from before"))
    shown = table("LoRA", "Scale", "Mean difference", left=("LoRA",))
    for (index, lora), scale in product(enumerate(grid.loras), grid.scales):
        cells = [cell for cell in grid.cells if (cell.lora, cell.scale) == (index, scale)]
        shares = [cell.mean_difference for cell in cells if cell.mean_difference is not None]
        difference = Text(f"{100 * fmean(shares):.3g} %" if shares else "-")
        if shares and all(cell.is_idle for cell in cells):
            difference = Text("nothing changes", style="bold red")
        shown.add_row(plain(lora.label), f"{scale:g}", difference)
    console.print(shown, findings(grid.findings()))
