"""`sigmascope lora grid`: several LoRAs at several scales on the same prompts and seed, as a picture and a page."""

from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from sigmascope.cli.bench import POCKET, call_values, cases_of, checked_offload, dtype_of
from sigmascope.cli.console import (
    Console,
    findings,
    needs_extra,
    plain,
    print_json,
    progress_bar,
    say,
    table,
    title,
)
from sigmascope.cli.options import AsJson, flag
from sigmascope.errors import ConfigError

if TYPE_CHECKING:
    from sigmascope.pipeline.lora_grid import LoraGrid

app = typer.Typer(rich_markup_mode="rich")
EPILOG = """Examples:

sigmascope lora grid ./my-pipeline --lora style.safetensors --prompt "a red fox" --scales 0.5,1,1.5

sigmascope lora grid owner/name --lora a.safetensors --lora b.safetensors --prompts prompts.txt --steps 20 -o ab.png

sigmascope lora grid pocket --lora my_lora.safetensors --images photos
"""
_LBM, _PIPELINE, _RUN = "LBM", "Diffusers pipeline", "How to run"
_MODEL_HELP = "A folder that diffusers wrote, a name on the hub, an LBM checkpoint, or pocket."
_OUTPUT_HELP = "A .png or .html; the other and a folder .cells are made beside it."
_LORA_HELP = "LoRA file of any format; repeatable."
_PROMPTS_HELP = "A text file with a prompt in each line."
_GUIDANCE_HELP = "Of the pipeline's call."
_IMAGE_HELP = "Picture to start from, for pipelines that take one."
_CALL_HELP = "Another argument of the call, such as negative_prompt=blurry; repeatable."
_OFFLOAD_HELP = "Keep weights in RAM until needed: none, model, sequential."
_HIDE_HELP = "Write prompt 1, prompt 2, … on the grid."
_IMAGES_HELP = "A picture to translate, or a folder of them, in place of prompts; repeatable."
_CONFIG_HELP = "The model's YAML; else that beside it."
_RESOLUTION_HELP = "WIDTHxHEIGHT, or the side of a square; of an LBM also bucket or keep."
_DTYPE_HELP = "auto (bf16 on an accelerator, else float32), float32, bf16, fp16."


@app.command("grid", epilog=EPILOG)
def grid(
    model: Annotated[str, typer.Argument(help=_MODEL_HELP, metavar="MODEL", show_default=False)],
    lora: Annotated[list[Path], flag("--lora", _LORA_HELP, show_default=False, exists=True)],
    scales: Annotated[str, flag("--scales", "Strengths, by comma; below 0 too.", metavar="<n,…>")] = "0.5,1",
    output: Annotated[Path, typer.Option("--output", "-o", help=_OUTPUT_HELP)] = Path("lora-grid.png"),
    prompt: Annotated[list[str] | None, flag("--prompt", "A row of the grid; repeatable.", _PIPELINE)] = None,
    prompts: Annotated[Path | None, flag("--prompts", _PROMPTS_HELP, _PIPELINE, exists=True)] = None,
    guidance_scale: Annotated[float | None, flag("--guidance_scale", _GUIDANCE_HELP, _PIPELINE)] = None,
    image: Annotated[Path | None, flag("--image", _IMAGE_HELP, _PIPELINE)] = None,
    call: Annotated[list[str] | None, flag("--call", _CALL_HELP, _PIPELINE)] = None,
    offload: Annotated[str, flag("--offload", _OFFLOAD_HELP, _PIPELINE)] = "none",
    hide_prompts: Annotated[bool, flag("--hide_prompts", _HIDE_HELP, _PIPELINE)] = False,
    images: Annotated[list[Path] | None, flag("--images", _IMAGES_HELP, _LBM)] = None,
    config_path: Annotated[Path | None, flag("--config_path", _CONFIG_HELP, _LBM)] = None,
    seed: Annotated[int, flag("--seed", "The same in every cell.", _RUN)] = 0,
    steps: Annotated[int | None, flag("--steps", "Denoising steps.", _RUN, min=1)] = None,
    resolution: Annotated[str | None, flag("--resolution", _RESOLUTION_HELP, _RUN)] = None,
    device: Annotated[str, flag("--device", "auto, cpu, cuda, cuda:1, mps, xpu.", _RUN)] = "auto",
    dtype: Annotated[str, flag("--dtype", _DTYPE_HELP, _RUN)] = "auto",
    as_json: AsJson = False,
) -> None:
    """Paint prompts without a LoRA and with each LoRA at each scale, side by side.

    Every cell has the same seed, and says how far it is from the picture without
    a LoRA: the mean difference of all values, and PSNR. Cells are kept as they
    are painted; stopped or changed, the same command paints only what is
    missing. The exit code is 1 when a LoRA changes no picture.
    """
    with needs_extra("lbm"):
        from sigmascope.lbm.devices import LESS_FOR_INFERENCE, explain_out_of_memory, resolve_device
        from sigmascope.lbm.images import load_image
        from sigmascope.pipeline.bench import load_pipeline
        from sigmascope.pipeline.lora_grid import lora_grid, output_paths

    try:
        strengths = [float(part) for part in scales.split(",")]
    except ValueError:
        hint = "Write several as 0.5,1,1.5."
        raise ConfigError(f"--scales: expected numbers, got {scales!r}.", hint=hint) from None
    sheet, page, folder = output_paths(output)
    inputs = [path for path in (*lora, *(images or []), image, prompts) if path and path.exists()]
    for target in (sheet, page):
        if target.exists() and any(map(target.samefile, inputs)):
            raise ConfigError(f"--output {target} is an input.", hint="Give the name of a new file.")
    torch_device = resolve_device(device)
    placed: dict[str, Any] = {"dtype": dtype_of(dtype, torch_device), "device": torch_device}
    path = Path(model)
    is_pipeline = model != POCKET and ((path / "model_index.json").is_file() or not path.exists())
    of_pipelines = {"prompt": prompt, "prompts": prompts, "guidance_scale": guidance_scale, "image": image}
    of_pipelines |= {"call": call, "hide_prompts": hide_prompts, "offload": offload != "none"}
    foreign = {"images": images, "config_path": config_path} if is_pipeline else of_pipelines
    for name, given in foreign.items():
        if given:
            others, hint = ("LBMs", "Give --prompt.") if is_pipeline else ("pipelines", "Give --images.")
            raise ConfigError(f"--{name} is for {others}, and {model} is none.", hint=hint)
    with explain_out_of_memory("the model with its pictures", LESS_FOR_INFERENCE):
        settings: dict[str, Any] = {}
        with progress_bar("Loading") as progress:
            if is_pipeline:
                size = cases_of(None, resolution, "1", None)
                if len(size) > 1:
                    raise ConfigError("--resolution names several sizes.", hint="Give one.")
                settings = {
                    "prompts": [*(prompt or []), *_lines(prompts)],
                    "num_inference_steps": steps,
                    "guidance_scale": guidance_scale,
                    "size": resolution and (size[0].width, size[0].height),
                    "call": call_values(call or []) | ({"image": load_image(image)} if image else {}),
                }
                if not settings["prompts"]:
                    hint = 'Give --prompt "a red fox", or --prompts FILE with one in each line.'
                    raise ConfigError("There is no prompt.", hint=hint)
                subject = load_pipeline(model, offload=checked_offload(offload, torch_device), **placed)
            else:
                placed["progress"] = progress
                subject = _lbm(model, config_path, images or [], steps or 1, resolution or "bucket", **placed)
        settings |= {"output": output, "scales": strengths, "seed": seed, "hide_prompts": hide_prompts}
        try:
            with progress_bar("Painting") as progress:
                made = lora_grid(subject, lora, **settings, progress=progress)
        except KeyboardInterrupt:
            say(f"Stopped. What was painted is kept in {folder}; the same command goes on.", err=True)
            raise
    if as_json:
        print_json(made.as_dict() | {"picture": str(sheet), "page": str(page)})
    else:
        print_grid(Console(), made)
        Console().print(title("Picture", sheet), title("Page", page), sep="\n")
    if made.idle:
        raise typer.Exit(1)


def _lines(path: Path | None) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines() if path else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts {path} cannot be read ({error}).", hint="Give a UTF-8 file.") from error
    return [line.strip() for line in lines if line.strip()]


def _lbm(model: str, config: Path | None, images: list[Path], steps: int, side: str, **loading: Any) -> Any:
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
    path, name = (BASE_PATH, "pocket LBM") if model == POCKET else (Path(model), Path(model).name)
    return PictureRows(load_lbm(path, config, **loading), pictures, steps, picture_size=size, name=name)


def print_grid(console: Console, grid: "LoraGrid") -> None:
    """Show how far each LoRA at each scale is from no LoRA, on average; and what is wrong."""
    reused = sum(cell.reused for cell in grid.cells)
    console.print(title("LoRA grid", f"{len(grid.cells)} cells, {reused} of them kept from before"))
    shown = table("LoRA", "Scale", "Difference", "PSNR", left=("LoRA",))
    for (index, lora), scale in product(enumerate(grid.loras), grid.scales):
        cells = [cell for cell in grid.cells if (cell.lora, cell.scale) == (index, scale)]
        known = [cell.mean_difference for cell in cells if cell.mean_difference is not None]
        ratios = [
            cell.psnr_db for cell in cells if cell.psnr_db is not None
        ]  # none where pictures are identical
        difference = Text(f"{100 * fmean(known):.3g} %" if known else "-")
        if known and all(cell.is_idle for cell in cells):
            difference = Text("nothing changes", style="bold red")
        psnr = f"{fmean(ratios):.1f} dB" if ratios else "-"
        shown.add_row(plain(lora.label), f"{scale:g}", difference, psnr)
    console.print(shown, findings(grid.findings()))
