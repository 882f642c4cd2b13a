"""`sigmascope lbm serve`: a page on which to try a model and its LoRA."""

import json
import threading
import webbrowser
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from sigmascope.cli import options
from sigmascope.cli.console import needs_extra, progress_bar, say

if TYPE_CHECKING:
    from sigmascope.ui.app import Address
    from sigmascope.ui.lbm_model import ModelOptions, ServedModel

EPILOG = (
    "Examples: sigmascope lbm serve --pocket\n\n"
    "sigmascope lbm serve --base_model_path base.safetensors --lora_path my_lora.safetensors --port 8080"
)

MODEL, ADDRESS, OUTPUT = "Model", "Address", "What to show"


def serve(
    base_model_path: Annotated[Path | None, options.base_model_path(MODEL)] = None,
    lora_path: Annotated[
        Path | None,
        typer.Option("--lora_path", help="A LoRA to compare with the base.", rich_help_panel=MODEL),
    ] = None,
    config_path: Annotated[Path | None, options.config_path(MODEL)] = None,
    pocket: Annotated[
        bool,
        typer.Option(
            "--pocket",
            help="Serve the small model that ships with Sigmascope, with a LoRA extracted at rank 8.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    torch_dtype: Annotated[str, options.torch_dtype(MODEL)] = "float32",
    device: Annotated[str, options.device(MODEL)] = "auto",
    tile_size: Annotated[int | None, options.tile_size(MODEL)] = None,
    resolution: Annotated[
        int | None,
        typer.Option(
            "--resolution",
            help="Side of the square bucket; by default the config's (256 with --pocket).",
            rich_help_panel=MODEL,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="Interface to bind to. Others than loopback let anyone in.",
            rich_help_panel=ADDRESS,
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="0 takes any that is free.", rich_help_panel=ADDRESS)
    ] = 7860,
    open_browser: Annotated[
        bool,
        typer.Option(
            "--open/--no_open", help="Open the page in the browser when it is ready.", rich_help_panel=OUTPUT
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the address as one line of JSON when it is ready.", rich_help_panel=OUTPUT
        ),
    ] = False,
) -> None:
    """Show a page to try a model and its LoRA on: base and result side by side, with what each took.

    Upload a picture, move the LoRA's strength, and see what changes. Pictures and
    results stay in memory; nothing is written to disk. Ctrl-C ends it.
    """
    with needs_extra("ui"):
        from sigmascope.ui.lbm_model import ModelOptions

    run_serve(
        ModelOptions(
            base_model_path=base_model_path,
            lora_path=lora_path,
            config_path=config_path,
            pocket=pocket,
            torch_dtype=torch_dtype,
            device=device,
            tile_size=tile_size,
            resolution=resolution,
        ),
        host=host,
        port=port,
        open_browser=open_browser,
        as_json=as_json,
    )


def run_serve(options: "ModelOptions", *, host: str, port: int, open_browser: bool, as_json: bool) -> None:
    """Serve until Ctrl-C.

    Raises:
        ConfigError: The options make no sense, or the port is taken.
        SigmascopeError: The model or the LoRA cannot be loaded.
        KeyboardInterrupt: Ctrl-C.
    """
    with needs_extra("ui"):
        from sigmascope.ui.app import bind
        from sigmascope.ui.app import serve as serve_model
        from sigmascope.ui.lbm_model import load_served

    options.check()
    with closing(bind(host, port)) as listening:
        with progress_bar("Loading") as progress:
            served = load_served(options, progress=progress)

        def on_ready(address: "Address") -> None:
            _announce(address, served, as_json=as_json)
            if open_browser:
                # Its own thread: some browsers return only when they are closed.
                threading.Thread(target=_open, args=[address.url], daemon=True).start()

        serve_model(served, listening, host, on_ready)


def _announce(address: "Address", served: "ServedModel", *, as_json: bool) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if not address.is_loopback:
        console.print(
            Text.assemble(
                ("Warning: ", "bold yellow"),
                f"whoever reaches port {address.port} of this machine can use the model; there is no password. ",
                "Bind to 127.0.0.1 and use an SSH tunnel to keep it to yourself.",
            )
        )
    if as_json:
        facts = {"url": address.url, "host": address.host, "port": address.port}
        typer.echo(json.dumps({**facts, "model": served.base_name, "lora": served.lora_name}))
        return
    what = served.base_name if served.lora_name is None else f"{served.base_name} + {served.lora_name}"
    say(f"Serving {what} at {address.url}")
    console.print(Text("Ctrl-C ends it.", style="dim"))


def _open(url: str) -> None:
    if not webbrowser.open(url):
        Console(stderr=True).print(Text(f"No browser could be opened; go to {url}", style="yellow"))
