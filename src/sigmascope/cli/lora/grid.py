"""`sigmascope lora grid`: several LoRAs at several scales on the same prompts and seed, as a picture and a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sigmascope.cli.bench import POCKET, call_values, cases_of, checked_offload, dtype_of
from sigmascope.cli.console import findings, needs_extra, plain, print_json, progress_bar, say, table, title
from sigmascope.cli.options import AsJson, option_groups
from sigmascope.errors import ConfigError, FileError

if TYPE_CHECKING:
    from PIL.Image import Image

    from sigmascope.pipeline.lora_grid import GridCell, LoraGrid

app = typer.Typer(rich_markup_mode="rich")
EPILOG = """Examples:

sigmascope lora grid ./my-pipeline --lora style.safetensors --prompt "a red fox" --scales 0.5,1,1.5

sigmascope lora grid owner/name --lora a.safetensors --lora b.safetensors --prompts prompts.txt --steps 20 -o ab.png

sigmascope lora grid pocket --lora my_lora.safetensors --images photos
"""
_LBM, _PIPELINE, _RUN = "LBM", "Diffusers pipeline", "How to run"


@dataclass(frozen=True, kw_only=True)
class GridRequest:
    """What `lora grid` takes."""

    model: Annotated[
        str,
        typer.Argument(
            help="A folder that diffusers wrote, a name on the hub, an LBM checkpoint, or pocket.",
            metavar="MODEL",
            show_default=False,
        ),
    ]
    lora: Annotated[
        list[Path], typer.Option("--lora", help="LoRA file of any format; repeatable.", show_default=False)
    ]
    scales: Annotated[
        str, typer.Option("--scales", help="Strengths, by comma; below 0 too.", metavar="<n,…>")
    ] = "0.5,1"
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="A .png or .html; the other and a folder .cells are made beside it."
        ),
    ] = Path("lora-grid.png")
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="A row of the grid; repeatable.", rich_help_panel=_PIPELINE),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="A text file with a prompt in each line.", rich_help_panel=_PIPELINE),
    ] = None
    guidance_scale: Annotated[
        float | None,
        typer.Option("--guidance_scale", help="Of the pipeline's call.", rich_help_panel=_PIPELINE),
    ] = None
    image: Annotated[
        Path | None,
        typer.Option(
            "--image", help="Picture to start from, for pipelines that take one.", rich_help_panel=_PIPELINE
        ),
    ] = None
    call: Annotated[
        list[str] | None,
        typer.Option(
            "--call",
            help="Another argument of the call, such as negative_prompt=blurry; repeatable.",
            rich_help_panel=_PIPELINE,
        ),
    ] = None
    offload: Annotated[
        str,
        typer.Option(
            "--offload",
            help="Keep weights in RAM until needed: none, model, sequential.",
            rich_help_panel=_PIPELINE,
        ),
    ] = "none"
    hide_prompts: Annotated[
        bool,
        typer.Option(
            "--hide_prompts", help="Write prompt 1, prompt 2, … on the grid.", rich_help_panel=_PIPELINE
        ),
    ] = False
    images: Annotated[
        list[Path] | None,
        typer.Option(
            "--images",
            help="A picture to translate, or a folder of them, in place of prompts; repeatable.",
            rich_help_panel=_LBM,
        ),
    ] = None
    config_path: Annotated[
        Path | None,
        typer.Option("--config_path", help="The model's YAML; else that beside it.", rich_help_panel=_LBM),
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="The same in every cell.", rich_help_panel=_RUN)] = 0
    steps: Annotated[
        int | None, typer.Option("--steps", help="Denoising steps.", min=1, rich_help_panel=_RUN)
    ] = None
    resolution: Annotated[
        str | None,
        typer.Option(
            "--resolution",
            help="WIDTHxHEIGHT, or the side of a square; of an LBM also bucket or keep.",
            rich_help_panel=_RUN,
        ),
    ] = None
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps, xpu.", rich_help_panel=_RUN)
    ] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="auto (bf16 on an accelerator, else float32), float32, bf16, fp16.",
            rich_help_panel=_RUN,
        ),
    ] = "auto"
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
    prompts = [] if is_lbm else _prompts(request)
    for path in request.lora:
        if not path.exists():
            raise FileError(path, "no such file.", hint="Check the path given with --lora.")
    targets = output_paths(request.output)
    pictures = _pictures(request.images or []) if is_lbm else {}
    _refuse_inputs(targets[:2], [*request.lora, *(request.images or []), request.image, request.prompts])
    settings = {} if is_lbm else _settings(request)
    with explain_out_of_memory("the model with its pictures", LESS_FOR_INFERENCE):
        with progress_bar("Loading") as progress:
            subject = _lbm(request, pictures, progress) if is_lbm else _pipeline(request)
        try:
            with progress_bar("Painting") as progress:
                made = lora_grid(
                    subject,
                    request.lora,
                    prompts,
                    output=request.output,
                    scales=scales,
                    seed=request.seed,
                    hide_prompts=request.hide_prompts,
                    progress=progress,
                    **settings,
                )
        except KeyboardInterrupt:
            say(f"Stopped. What was painted is kept in {targets[2]}; the same command goes on.", err=True)
            raise
    if request.as_json:
        print_json(made.as_dict() | {"picture": str(targets[0]), "page": str(targets[1])})
    else:
        print_grid(Console(), made, targets[:2], verbose=request.verbose)
    if made.idle:
        raise typer.Exit(1)


def _is_lbm(model: str) -> bool:
    """A file, and a folder that is no pipeline, are an LBM's."""
    path = Path(model)
    return model == POCKET or path.is_file() or (path.is_dir() and not (path / "model_index.json").is_file())


def _refuse_flags(request: GridRequest, *, is_lbm: bool) -> None:
    """Refuse flags of the other kind of model.

    Raises:
        ConfigError: Names the first.
    """
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
        raise ConfigError(
            f"--scales: expected numbers, got {text!r}.", hint="Write several as 0.5,1,1.5."
        ) from None


def _prompts(request: GridRequest) -> list[str]:
    """Those of `--prompt`, then the lines of `--prompts`.

    Raises:
        ConfigError: There is none.
        FileError: The file cannot be read.
    """
    prompts = list(request.prompt or [])
    if request.prompts is not None:
        try:
            lines = request.prompts.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            hint = "Give --prompts a UTF-8 text file."
            raise FileError(request.prompts, f"cannot be read ({error}).", hint=hint) from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"--prompts {request.prompts} holds no prompt.", hint="Write one in each line.")
        prompts += found
    if not prompts:
        raise ConfigError("There is no prompt.", hint='Give --prompt "a red fox", or --prompts FILE.')
    return prompts


def _pictures(paths: Sequence[Path]) -> "dict[str, Image]":
    from sigmascope.lbm.images import find_images, load_image

    if not paths:
        raise ConfigError("There is no picture to translate.", hint="Give --images PICTURE or FOLDER.")
    files = [file for path in paths for file in (find_images(path)[0] if path.is_dir() else [path])]
    return {
        file.name if [f.name for f in files].count(file.name) == 1 else str(file): load_image(file)
        for file in files
    }


def _refuse_inputs(targets: Sequence[Path], inputs: Sequence[Path | None]) -> None:
    for target in targets:
        if any(
            path is not None and path.exists() and target.exists() and target.samefile(path)
            for path in inputs
        ):
            raise ConfigError(f"--output {target} is an input.", hint="Give the name of a new file.")


def _settings(request: GridRequest) -> dict[str, Any]:
    """The settings of a pipeline's call."""
    from sigmascope.lbm.images import load_image

    cases = cases_of(None, request.resolution, "1", None)
    if len(cases) > 1:
        raise ConfigError("--resolution names several sizes.", hint="Give one.")
    width, height = cases[0].width, cases[0].height
    call: Mapping[str, Any] = call_values(request.call or [])
    if request.image is not None:
        call = {**call, "image": load_image(request.image)}
    return {
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance_scale,
        "size": None if width is None else (width, height),
        "call": call,
    }


def _pipeline(request: GridRequest) -> Any:
    from sigmascope.lbm.devices import resolve_device
    from sigmascope.pipeline.bench import load_pipeline

    device = resolve_device(request.device)
    return load_pipeline(
        request.model,
        dtype=dtype_of(request.dtype, device),
        device=device,
        offload=checked_offload(request.offload, device),
    )


def _lbm(request: GridRequest, pictures: "Mapping[str, Image]", progress: Any) -> Any:
    from sigmascope.lbm.devices import resolve_device
    from sigmascope.lbm.images import parse_size
    from sigmascope.lbm.infer import PictureRows
    from sigmascope.lbm.model import load_lbm
    from sigmascope.lbm.pocket import BASE_PATH

    device = resolve_device(request.device)
    side = request.resolution or "bucket"
    path = BASE_PATH if request.model == POCKET else Path(request.model)
    model = load_lbm(
        path, request.config_path, dtype=dtype_of(request.dtype, device), device=device, progress=progress
    )
    return PictureRows(
        model,
        pictures,
        num_inference_steps=request.steps or 1,
        picture_size=parse_size(f"{side}x{side}" if side.isdecimal() else side),
        name=path.name if request.model != POCKET else "pocket LBM",
    )


def print_grid(console: Console, grid: "LoraGrid", files: Sequence[Path], *, verbose: bool) -> None:
    """Show how far each LoRA at each scale is from no LoRA, on average or in each cell; and what is wrong."""
    reused = sum(cell.reused for cell in grid.cells)
    console.print(title("LoRA grid", f"{len(grid.cells)} cells, {reused} of them kept from before"))
    console.print(_cells(grid) if verbose else _averages(grid))
    console.print(findings(grid.findings()))
    for what, path in zip(("Picture", "Page"), files, strict=True):
        console.print(title(what, path))


def _averages(grid: "LoraGrid") -> Table:
    made = table("LoRA", "Scale", "Difference", "PSNR", "Layers run")
    for index, lora in enumerate(grid.loras):
        for scale in grid.scales:
            own = [cell for cell in grid.cells if cell.lora == index and cell.scale == scale]
            ran = min(cell.layers_run or 0 for cell in own)
            made.add_row(plain(lora.label), f"{scale:g}", *_figures(own), f"{ran} of {lora.modules}")
    return made


def _cells(grid: "LoraGrid") -> Table:
    made = table(grid.kind.capitalize(), "LoRA", "Scale", "Difference", "PSNR", "Seconds", left=("LoRA",))
    for cell in grid.cells:
        label, scale = ("-", "-") if cell.lora is None else (grid.loras[cell.lora].label, f"{cell.scale:g}")
        name = plain(grid.rows[cell.row], limit=40)
        made.add_row(name, plain(label), scale, *_figures([cell]), f"{cell.seconds:.2f}")
    return made


def _figures(cells: "Sequence[GridCell]") -> tuple[Text | str, str]:
    """Mean difference and PSNR, averaged; PSNR over the pictures that differ."""
    known = [cell.mean_difference for cell in cells if cell.mean_difference is not None]
    if not known:
        return "-", "-"
    if all(cell.is_idle for cell in cells):
        return Text("nothing changes", style="bold red"), "-"
    ratios = [cell.change.psnr_db for cell in cells if cell.change and cell.change.psnr_db is not None]
    psnr = f"{sum(ratios) / len(ratios):.1f} dB" if ratios else "-"
    return f"{100 * sum(known) / len(known):.3g} %", psnr
