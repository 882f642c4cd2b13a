"""`sigmascope lbm infer` and `lbm serve`: translate a picture, here or on a page in the browser."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from sigmascope.cli import options
from sigmascope.cli.console import Console, needs_extra, print_json, progress_bar, say
from sigmascope.cli.ui import Pages, own_parts, serve_pages
from sigmascope.errors import ConfigError, SigmascopeError, WriteError
from sigmascope.files import require_writable
from sigmascope.history.location import store_url
from sigmascope.records.memory import mib
from sigmascope.units import counted

if TYPE_CHECKING:
    from PIL import Image

    from sigmascope.lbm.model import LbmModel
    from sigmascope.lora.apply import AttachedLora
    from sigmascope.lora.live_merge import MergedLora
    from sigmascope.monitor.recorder import Recorder
    from sigmascope.records.run import Run


app = typer.Typer(rich_markup_mode="rich")
EPILOG = (
    "Example: sigmascope lbm infer --base_model_path base.safetensors --lora_path my_lora.safetensors "
    "--source_image in.jpg --output_path out.png --lora_scale 1.0 --verbose"
)
FILES, MODEL = "Files", "How to run"
OUTPUT = "What to show"
LORA_SCALES = (0.0, 2.0)
"""Range of --lora_scale."""
_log = logging.getLogger(__name__)
NAMED = 3
"""How many modules a warning names."""


@dataclass(frozen=True, kw_only=True)
class InferOptions:
    """What `lbm infer` takes."""

    base_model_path: Annotated[Path, options.base_model_path(FILES)]
    source_image: Annotated[
        Path, options.flag("--source_image", "The picture to translate.", FILES, show_default=False)
    ]
    output_path: Annotated[
        Path,
        options.flag("--output_path", "The .png, .jpg or .webp file to write.", FILES, show_default=False),
    ]
    lora_path: Annotated[Path | None, options.flag("--lora_path", "A LoRA to apply.", FILES)] = None
    config_path: Annotated[Path | None, options.config_path(FILES)] = None
    conditioning: Annotated[
        list[str] | None,
        options.flag(
            "--conditioning", "KEY=PICTURE for each conditioning key of the config. Repeatable.", FILES
        ),
    ] = None
    lora_scale: Annotated[float, options.flag("--lora_scale", "Strength of the LoRA, 0.0 to 2.0.", MODEL)] = (
        1.0
    )
    merge: Annotated[
        bool,
        options.flag(
            "--merge/--hot",
            "Merge the LoRA into the weights in memory, or compute it separately in each layer.",
            MODEL,
        ),
    ] = False
    num_inference_steps: Annotated[
        int, options.flag("--num_inference_steps", "Steps along the bridge.", MODEL)
    ] = 1
    torch_dtype: Annotated[str, options.torch_dtype(MODEL)] = "float32"
    device: Annotated[str, options.device(MODEL)] = "auto"
    size: Annotated[
        str,
        options.flag(
            "--size",
            "Working size: bucket (nearest aspect bucket), keep (the picture's own size), or WIDTHxHEIGHT.",
            MODEL,
        ),
    ] = "bucket"
    resolution: Annotated[
        int | None,
        options.flag(
            "--resolution", "With --size bucket: side of the square bucket. By default the config's.", MODEL
        ),
    ] = None
    tile_size: Annotated[int | None, options.tile_size(MODEL)] = None
    decode_tiles: Annotated[
        int | None,
        options.flag(
            "--decode_tiles",
            "Decode in tiles of this many latent elements, such as 128. Saves memory.",
            MODEL,
        ),
    ] = None
    seed: Annotated[
        int | None,
        options.flag(
            "--seed", "Seed of the noise between steps. Without it, a seed is drawn and recorded.", MODEL
        ),
    ] = None
    run_path: Annotated[
        Path | None, options.flag("--run_path", "Save the record in this .json file.", OUTPUT)
    ] = None
    as_json: Annotated[bool, options.as_json(OUTPUT)] = False
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show time and memory of every stage.", rich_help_panel=OUTPUT),
    ] = False


@app.command("infer", no_args_is_help=True, epilog=EPILOG)
@options.option_groups
def infer(options: InferOptions) -> None:
    """Translate a picture, with or without a LoRA, and record every stage.

    The result has the picture's own size.
    """
    with needs_extra("lbm"):
        from sigmascope.lbm.devices import (
            LESS_FOR_INFERENCE,
            explain_out_of_memory,
            resolve_device,
            resolve_dtype,
        )
        from sigmascope.lbm.images import load_image, parse_size, save_image
        from sigmascope.lbm.infer import translate_image
        from sigmascope.lbm.model import load_lbm
        from sigmascope.monitor.recorder import Recorder

    conditioning_paths = conditioning_paths_of(options.conditioning or [])
    check_options(options)
    check_files(options, conditioning_paths)
    picture = load_image(options.source_image)
    conditioning = {key: load_image(path) for key, path in conditioning_paths.items()}
    recorder = Recorder(name="lbm infer", sample_hz=10.0)
    try:
        with explain_out_of_memory("the model with this picture", LESS_FOR_INFERENCE), recorder:
            with progress_bar("Loading") as progress:
                model = load_lbm(
                    options.base_model_path,
                    options.config_path,
                    dtype=resolve_dtype(options.torch_dtype),
                    device=resolve_device(options.device),
                    progress=progress,
                )
            applied = _apply_lora(options, model, recorder)
            with progress_bar("Translating") as progress:
                result = translate_image(
                    model,
                    picture,
                    num_inference_steps=options.num_inference_steps,
                    seed=options.seed,
                    size=parse_size(options.size),
                    resolution=options.resolution,
                    tile_size=options.tile_size,
                    decode_tiles=options.decode_tiles,
                    conditioning=conditioning,
                    progress=progress,
                )
            save_image(result, options.output_path)
    except BaseException:
        _save_failed_run(recorder, options.run_path)
        raise
    run = recorder.run()
    if options.run_path is not None:
        run.save(options.run_path)
    report(run, _summary(options, result, applied), as_json=options.as_json, verbose=options.verbose)


def conditioning_paths_of(entries: list[str]) -> dict[str, Path]:
    """The pictures of `--conditioning KEY=PICTURE` by key.

    Raises:
        ConfigError: An entry is not of that form.
    """
    paths = {}
    for entry in entries:
        key, _, path = entry.partition("=")
        if not key or not path:
            raise ConfigError(
                f"--conditioning: expected KEY=PICTURE, got {entry!r}.", hint="For example depth=depth.png."
            )
        paths[key] = Path(path)
    return paths


def _apply_lora(
    options: InferOptions, model: "LbmModel", recorder: "Recorder"
) -> "AttachedLora | MergedLora | None":
    if options.lora_path is None:
        return None
    from sigmascope.lora.apply import attach_lora
    from sigmascope.lora.live_merge import merge_into_model
    from sigmascope.lora.reader import load_lora

    with recorder.stage("lora_application") as stage:
        lora = load_lora(options.lora_path)
        stage.fact("file", str(options.lora_path))
        stage.fact("modules", len(lora))
        stage.fact("ranks", {str(rank): count for rank, count in lora.ranks.items()})
        stage.fact("scale", options.lora_scale)
        stage.fact("mode", "merged" if options.merge else "hot")
        apply = merge_into_model if options.merge else attach_lora
        applied = apply(model, lora, options.lora_scale)
        stage.fact("applied_modules", len(applied.applied))
    return applied


def _save_failed_run(recorder: "Recorder", path: Path | None) -> None:
    """Save the record of a failure. If that fails too, the user must still see the first failure.

    A record that is there already may be of a run that went well: then this one goes beside it.
    """
    if path is None:
        return
    try:
        beside = path.with_name(f"{path.stem}-failed{path.suffix}")
        recorder.run().save(beside if path.is_file() else path)
    except (SigmascopeError, OSError) as error:
        _log.warning("The record of the failed run was not saved: %s", error)


def _summary(
    options: InferOptions, result: "Image.Image", applied: "AttachedLora | MergedLora | None"
) -> dict[str, Any]:
    from sigmascope.lora.apply import AttachedLora

    summary: dict[str, Any] = {
        "output_path": str(options.output_path),
        "width": result.width,
        "height": result.height,
        "run_path": None if options.run_path is None else str(options.run_path),
        "lora": None,
    }
    if applied is not None:
        summary["lora"] = {
            "path": str(options.lora_path),
            "mode": "merged" if options.merge else "hot",
            "scale": options.lora_scale,
            "applied_modules": len(applied.applied),
            # The user should know that these had no effect.
            "dormant_modules": list(applied.dormant) if isinstance(applied, AttachedLora) else [],
        }
    return summary


def check_options(options: InferOptions) -> None:
    """Refuse options that cannot work, before minutes are spent on them."""
    from sigmascope.lbm.bridge import bridge_sigmas
    from sigmascope.lbm.devices import resolve_device, resolve_dtype
    from sigmascope.lbm.images import check_resolution, image_format, parse_size

    low, high = LORA_SCALES
    if not low <= options.lora_scale <= high:
        raise ConfigError(
            f"--lora_scale: expected {low} to {high}, got {options.lora_scale}.",
            hint="1.0 applies the LoRA as it was made.",
        )
    bridge_sigmas(options.num_inference_steps)
    check_resolution(options.resolution, parse_size(options.size))
    resolve_dtype(options.torch_dtype)
    resolve_device(options.device)
    image_format(options.output_path)


def check_files(options: InferOptions, conditioning: dict[str, Path]) -> None:
    """Before anything is read, refuse a target that would replace an input or cannot be written.

    Raises:
        ConfigError: A target is an input or the other target; names both flags.
        WriteError: The target is not a regular file, it or its folder is write-protected, or the folder cannot be
            created.
    """
    from sigmascope.lbm.config import find_config

    taken = [("--base_model_path", path) for path in model_files(options.base_model_path)]
    taken.append(("--source_image", options.source_image))
    taken += [(f"--conditioning {key}", path) for key, path in conditioning.items()]
    if options.lora_path is not None:
        taken.append(("--lora_path", options.lora_path))
    config = options.config_path or find_config(options.base_model_path)
    if config is not None:
        taken.append(("--config_path" if options.config_path else "the model's config", config))
    for flag, target in (("--output_path", options.output_path), ("--run_path", options.run_path)):
        if target is None:
            continue
        for name, path in taken:
            if _same_file(target, path):
                raise ConfigError(f"{flag}: {target} is also {name}.", hint="Write to another file.")
        require_writable(target)
        if not os.access(target.resolve().parent, os.W_OK):
            raise WriteError(target, "its folder is write-protected.", hint="Choose another folder.")
        taken.append((flag, target))


def model_files(checkpoint: Path) -> list[Path]:
    """Every file that may be read for a checkpoint: the file itself, or the weights in its folder."""
    from sigmascope.checkpoints.reader import INDEX_SUFFIX
    from sigmascope.checkpoints.torch_files import PICKLE_SUFFIXES

    weights = (INDEX_SUFFIX, ".safetensors", *PICKLE_SUFFIXES)
    try:
        if checkpoint.is_dir():
            folder = checkpoint
        elif checkpoint.name.endswith(".json"):  # an index names files beside it
            folder = checkpoint.parent
        else:
            return [checkpoint]
        return [checkpoint, *(path for path in folder.iterdir() if path.name.endswith(weights))]
    except (OSError, ValueError):  # opening it gives a better error
        return [checkpoint]


def _same_file(first: Path, second: Path) -> bool:
    try:
        return first.resolve() == second.resolve() or first.samefile(second)
    except (OSError, ValueError, RuntimeError):  # one of them is missing or cannot be read
        return False


def report(run: "Run", summary: Mapping[str, Any], *, as_json: bool, verbose: bool) -> None:
    """Print the outcome: JSON on stdout, or a line on stdout and, if verbose, the stages on stderr."""
    if as_json:
        stages = [
            {
                "name": stage.name,
                "seconds": stage.seconds,
                "step_seconds": list(stage.steps.seconds),
                "peak_rss_mb": None if stage.peak is None else mib(stage.peak.rss_bytes),
                "facts": dict(stage.facts),
            }
            for stage in run.walk()
        ]
        print_json({**summary, "seconds": run.seconds, "stages": stages})
        return
    console = Console(stderr=True)
    if verbose:
        from sigmascope.reports import print_run

        print_run(run, console)
    dormant = summary["lora"]["dormant_modules"] if summary["lora"] else []
    if dormant:
        names = ", ".join(dormant[:NAMED])
        console.print(
            Text(
                f"{counted(len(dormant), 'LoRA module')} never ran and had no effect: {names}", style="yellow"
            )
        )
    size = f"{summary['width']}×{summary['height']}"
    say(f"Wrote {summary['output_path']} ({size}) in {run.seconds:.1f} s")


SERVE_EPILOG = (
    "Examples: sigmascope lbm serve --pocket\n\n"
    "sigmascope lbm serve --base_model_path base.safetensors --lora_path my_lora.safetensors --port 8080"
)
SERVED, ADDRESS = "Model", "Address"


@app.command("serve", no_args_is_help=True, epilog=SERVE_EPILOG)
def serve(
    base_model_path: Annotated[Path | None, options.base_model_path(SERVED)] = None,
    lora_path: Annotated[
        Path | None, options.flag("--lora_path", "A LoRA to compare with the base.", SERVED)
    ] = None,
    config_path: Annotated[Path | None, options.config_path(SERVED)] = None,
    pocket: Annotated[
        bool,
        options.flag(
            "--pocket",
            "Serve the small model that ships with Sigmascope, with a LoRA extracted at rank 8.",
            SERVED,
        ),
    ] = False,
    torch_dtype: Annotated[str, options.torch_dtype(SERVED)] = "float32",
    device: Annotated[str, options.device(SERVED)] = "auto",
    tile_size: Annotated[int | None, options.tile_size(SERVED)] = None,
    resolution: Annotated[
        int | None,
        options.flag(
            "--resolution",
            "Side of the square bucket. By default the config's, or 256 with --pocket.",
            SERVED,
        ),
    ] = None,
    host: Annotated[
        str,
        options.flag(
            "--host",
            "Interface to bind to. Any other than loopback needs the token of the printed link.",
            ADDRESS,
        ),
    ] = "127.0.0.1",
    port: Annotated[int, options.flag("--port", "Port to listen on; 0 takes any free one.", ADDRESS)] = 7860,
    open_browser: Annotated[
        bool, options.flag("--open/--no_open", "Open the page in the browser when it is ready.", OUTPUT)
    ] = False,
    as_json: Annotated[
        bool, options.flag("--json", "Print the address as one line of JSON when it is ready.", OUTPUT)
    ] = False,
) -> None:
    """Serve a page to try a model and its LoRA: base and result side by side, with time and memory.

    Upload a picture, move the LoRA's strength, and see what changes. Pictures and
    results stay in memory; nothing is written to disk. On loopback the pages of
    sigmascope ui are there, too. Ctrl-C ends it.
    """
    with needs_extra("ui"):
        from sigmascope.ui.lbm_model import ModelOptions, load_served
        from sigmascope.ui.lbm_page import lbm_part
        from sigmascope.ui.security import is_loopback

    model = ModelOptions(
        base_model_path=base_model_path,
        lora_path=lora_path,
        config_path=config_path,
        pocket=pocket,
        torch_dtype=torch_dtype,
        device=device,
        tile_size=tile_size,
        resolution=resolution,
    )
    model.check()

    def load() -> Pages:
        with progress_bar("Loading") as progress:
            served = load_served(model, progress=progress)
        what = served.base_name if served.lora_name is None else f"{served.base_name} + {served.lora_name}"
        # Who may use the model from elsewhere has not been shown the runs of this machine.
        others = own_parts(store_url(), "hash") if is_loopback(host) else []
        return Pages(what, [lbm_part(served), *others], {"model": served.base_name, "lora": served.lora_name})

    serve_pages(load, host, port, open_browser=open_browser, as_json=as_json)
