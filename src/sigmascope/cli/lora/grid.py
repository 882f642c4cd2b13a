"""`sigmascope lora grid`: several LoRAs at several scales on the same prompts and seed, as a picture and a page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from sigmascope.cli.bench import POCKET, call_values, cases_of, checked_offload, dtype_of
from sigmascope.cli.console import findings, needs_extra, plain, print_json, progress_bar, say, table, title
from sigmascope.cli.options import AsJson, flag, option_groups
from sigmascope.errors import ConfigError, FileError
from sigmascope.progress import Progress

if TYPE_CHECKING:
    from sigmascope.pipeline.lora_grid import GridCell, LoraGrid

app = typer.Typer(rich_markup_mode="rich")
EPILOG = """Examples:

sigmascope lora grid ./my-pipeline --lora style.safetensors --prompt "a red fox" --scales 0.5,1,1.5

sigmascope lora grid owner/name --lora a.safetensors --lora b.safetensors --prompts prompts.txt --steps 20 -o ab.png

sigmascope lora grid pocket --lora my_lora.safetensors --images photos
"""
_LBM, _PIPELINE, _RUN = "LBM", "Diffusers pipeline", "How to run"
_MODEL_HELP = "A folder that diffusers wrote, a name on the hub, an LBM checkpoint, or pocket."
_OUTPUT_HELP = "A .png or .html; the other and a folder .cells are made beside it."
_IMAGE_HELP = "Picture to start from, for pipelines that take one."
_CALL_HELP = "Another argument of the call, such as negative_prompt=blurry; repeatable."
_OFFLOAD_HELP = "Keep weights in RAM until needed: none, model, sequential."
_HIDE_HELP = "Write prompt 1, prompt 2, … on the grid."
_IMAGES_HELP = "A picture to translate, or a folder of them, in place of prompts; repeatable."
_RESOLUTION_HELP = "WIDTHxHEIGHT, or the side of a square; of an LBM also bucket or keep."
_DTYPE_HELP = "auto (bf16 on an accelerator, else float32), float32, bf16, fp16."
_Loader = Callable[[Progress], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class GridRequest:
    """What `lora grid` takes."""

    model: Annotated[str, typer.Argument(help=_MODEL_HELP, metavar="MODEL", show_default=False)]
    lora: Annotated[list[Path], flag("--lora", "LoRA file of any format; repeatable.", show_default=False)]
    scales: Annotated[str, flag("--scales", "Strengths, by comma; below 0 too.", metavar="<n,…>")] = "0.5,1"
    output: Annotated[Path, typer.Option("--output", "-o", help=_OUTPUT_HELP)] = Path("lora-grid.png")
    prompt: Annotated[list[str] | None, flag("--prompt", "A row of the grid; repeatable.", _PIPELINE)] = None
    prompts: Annotated[
        Path | None, flag("--prompts", "A text file with a prompt in each line.", _PIPELINE)
    ] = None
    guidance_scale: Annotated[
        float | None, flag("--guidance_scale", "Of the pipeline's call.", _PIPELINE)
    ] = None
    image: Annotated[Path | None, flag("--image", _IMAGE_HELP, _PIPELINE)] = None
    call: Annotated[list[str] | None, flag("--call", _CALL_HELP, _PIPELINE)] = None
    offload: Annotated[str, flag("--offload", _OFFLOAD_HELP, _PIPELINE)] = "none"
    hide_prompts: Annotated[bool, flag("--hide_prompts", _HIDE_HELP, _PIPELINE)] = False
    images: Annotated[list[Path] | None, flag("--images", _IMAGES_HELP, _LBM)] = None
    config_path: Annotated[
        Path | None, flag("--config_path", "The model's YAML; else that beside it.", _LBM)
    ] = None
    seed: Annotated[int, flag("--seed", "The same in every cell.", _RUN)] = 0
    steps: Annotated[int | None, flag("--steps", "Denoising steps.", _RUN, min=1)] = None
    resolution: Annotated[str | None, flag("--resolution", _RESOLUTION_HELP, _RUN)] = None
    device: Annotated[str, flag("--device", "auto, cpu, cuda, cuda:1, mps, xpu.", _RUN)] = "auto"
    dtype: Annotated[str, flag("--dtype", _DTYPE_HELP, _RUN)] = "auto"
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every cell.")] = False
    as_json: AsJson = False


@app.command("grid", epilog=EPILOG)
@option_groups
def grid(request: GridRequest) -> None:
    """Paint prompts without a LoRA and with each LoRA at each scale, side by side.

    Every cell has the same seed, and says how far it is from the picture without
    a LoRA: the mean difference of all values, and PSNR. Cells are kept as they
    are painted; stopped or changed, the same command paints only what is
    missing. The exit code is 1 when a LoRA changes no picture.
    """
    with needs_extra("lbm"):
        from sigmascope.lbm.devices import LESS_FOR_INFERENCE, explain_out_of_memory
        from sigmascope.pipeline.lora_grid import lora_grid, output_paths

    is_lbm = _is_lbm(request.model)
    _refuse_flags(request, is_lbm=is_lbm)
    scales = _scales(request.scales)
    sheet, page, folder = output_paths(request.output)
    inputs = [*request.lora, *(request.images or []), request.image, request.prompts]
    for path in request.lora:
        if not path.exists():
            raise FileError(path, "no such file.", hint="Check the path given with --lora.")
    for target in (sheet, page):
        if target.exists() and any(path and path.exists() and target.samefile(path) for path in inputs):
            raise ConfigError(f"--output {target} is an input.", hint="Give the name of a new file.")
    prepared = _lbm(request) if is_lbm else _pipeline(request)
    with explain_out_of_memory("the model with its pictures", LESS_FOR_INFERENCE):
        with progress_bar("Loading") as progress:
            arguments = prepared(progress)
        try:
            with progress_bar("Painting") as progress:
                made = lora_grid(
                    loras=request.lora,
                    output=request.output,
                    scales=scales,
                    seed=request.seed,
                    hide_prompts=request.hide_prompts,
                    progress=progress,
                    **arguments,
                )
        except KeyboardInterrupt:
            say(f"Stopped. What was painted is kept in {folder}; the same command goes on.", err=True)
            raise
    if request.as_json:
        print_json(made.as_dict() | {"picture": str(sheet), "page": str(page)})
    else:
        print_grid(Console(), made, verbose=request.verbose)
        for what, path in (("Picture", sheet), ("Page", page)):
            Console().print(title(what, path))
    if made.idle:
        raise typer.Exit(1)


def _is_lbm(model: str) -> bool:
    """A file, and a folder that is no pipeline, are an LBM's."""
    path = Path(model)
    return model == POCKET or path.is_file() or (path.is_dir() and not (path / "model_index.json").is_file())


def _refuse_flags(request: GridRequest, *, is_lbm: bool) -> None:
    """Refuse flags of the other kind of model."""
    of_pipelines = ("prompt", "prompts", "guidance_scale", "image", "call", "hide_prompts")
    for name in of_pipelines if is_lbm else ("images", "config_path"):
        if getattr(request, name):
            kind, others = ("an LBM", "pipelines") if is_lbm else ("a diffusers pipeline", "LBMs")
            hint = "Give --images." if is_lbm else "Give --prompt, and --image for a picture to start from."
            raise ConfigError(f"--{name} is for {others}, and {request.model} is {kind}.", hint=hint)
    if is_lbm and request.offload != "none":
        raise ConfigError("--offload is for pipelines.", hint="Leave it out.")


def _scales(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        wrong = f"--scales: expected numbers, got {text!r}."
        raise ConfigError(wrong, hint="Write several as 0.5,1,1.5.") from None


def _pipeline(request: GridRequest) -> _Loader:
    """Check the flags of a pipeline; what is returned loads it, and gives the arguments of `lora_grid`."""
    from sigmascope.lbm.devices import resolve_device
    from sigmascope.lbm.images import load_image
    from sigmascope.pipeline.bench import load_pipeline

    prompts = [*(request.prompt or []), *_lines(request.prompts)]
    if not prompts:
        raise ConfigError("There is no prompt.", hint='Give --prompt "a red fox", or --prompts FILE.')
    cases = cases_of(None, request.resolution, "1", None)
    if len(cases) > 1:
        raise ConfigError("--resolution names several sizes.", hint="Give one.")
    width, height = cases[0].width, cases[0].height
    image = {} if request.image is None else {"image": load_image(request.image)}
    settings = {
        "prompts": prompts,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance_scale,
        "size": None if width is None else (width, height),
        "call": call_values(request.call or []) | image,
    }
    device = resolve_device(request.device)
    dtype, offload = dtype_of(request.dtype, device), checked_offload(request.offload, device)
    return lambda progress: {
        "subject": load_pipeline(request.model, dtype=dtype, device=device, offload=offload),
        **settings,
    }


def _lines(path: Path | None) -> list[str]:
    """The prompts of a file."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            path, f"cannot be read ({error}).", hint="Give --prompts a UTF-8 text file."
        ) from error
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise ConfigError(f"--prompts {path} holds no prompt.", hint="Write one in each line.")
    return found


def _lbm(request: GridRequest) -> _Loader:
    """The same for an LBM."""
    from sigmascope.lbm.devices import resolve_device
    from sigmascope.lbm.images import find_images, load_image, parse_size
    from sigmascope.lbm.infer import PictureRows
    from sigmascope.lbm.model import load_lbm
    from sigmascope.lbm.pocket import BASE_PATH

    if not request.images:
        raise ConfigError("There is no picture to translate.", hint="Give --images PICTURE or FOLDER.")
    files = [file for path in request.images for file in (find_images(path)[0] if path.is_dir() else [path])]
    names = [file.name for file in files]
    pictures = {file.name if names.count(file.name) == 1 else str(file): load_image(file) for file in files}
    side, steps, device = request.resolution or "bucket", request.steps or 1, resolve_device(request.device)
    size, dtype = parse_size(f"{side}x{side}" if side.isdecimal() else side), dtype_of(request.dtype, device)
    is_pocket = request.model == POCKET
    path, name = (BASE_PATH, "pocket LBM") if is_pocket else (Path(request.model), Path(request.model).name)

    def load(progress: Progress) -> dict[str, Any]:
        model = load_lbm(path, request.config_path, dtype=dtype, device=device, progress=progress)
        return {"subject": PictureRows(model, pictures, steps, picture_size=size, name=name)}

    return load


def print_grid(console: Console, grid: "LoraGrid", *, verbose: bool) -> None:
    """Show how far each LoRA at each scale is from no LoRA, on average or in each cell; and what is wrong."""
    reused = sum(cell.reused for cell in grid.cells)
    console.print(title("LoRA grid", f"{len(grid.cells)} cells, {reused} of them kept from before"))
    columns = ("LoRA", "Scale", "Difference", "PSNR")
    if verbose:
        made = table(grid.kind.capitalize(), *columns, "Seconds", left=("LoRA",))
        for cell in grid.cells:
            label = "-" if cell.lora is None else grid.loras[cell.lora].label
            strength = "-" if cell.scale is None else f"{cell.scale:g}"
            row = plain(grid.rows[cell.row], limit=40)
            made.add_row(row, plain(label), strength, *_figures([cell]), f"{cell.seconds:.2f}")
    else:
        made = table(*columns, "Layers run")
        for (index, lora), scale in product(enumerate(grid.loras), grid.scales):
            own = [cell for cell in grid.cells if (cell.lora, cell.scale) == (index, scale)]
            ran = min(cell.layers_run or 0 for cell in own)
            made.add_row(plain(lora.label), f"{scale:g}", *_figures(own), f"{ran} of {lora.modules}")
    console.print(made, findings(grid.findings()))


def _figures(cells: "Sequence[GridCell]") -> tuple[Text | str, str]:
    """Mean difference and PSNR, averaged; PSNR over the pictures that differ."""
    known = [cell.mean_difference for cell in cells if cell.mean_difference is not None]
    ratios = [cell.psnr_db for cell in cells if cell.psnr_db is not None]
    if known and all(cell.is_idle for cell in cells):
        return Text("nothing changes", style="bold red"), "-"
    return f"{100 * fmean(known):.3g} %" if known else "-", f"{fmean(ratios):.1f} dB" if ratios else "-"
