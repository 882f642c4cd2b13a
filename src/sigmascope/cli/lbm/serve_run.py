"""The work of `sigmascope lbm serve`: take the port, load, serve, tell the address."""

import json
import threading
import webbrowser
from contextlib import closing
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from sigmascope.cli.extras import needs_extra
from sigmascope.cli.progress import progress_bar

if TYPE_CHECKING:
    from sigmascope.lbm.serving.models import ModelOptions, ServedModel
    from sigmascope.lbm.serving.server import Address


def run_serve(options: "ModelOptions", *, host: str, port: int, open_browser: bool, as_json: bool) -> None:
    """Serve until Ctrl-C.

    Raises:
        ConfigError: The options make no sense, or the port is taken.
        SigmascopeError: The model or the LoRA cannot be loaded.
        KeyboardInterrupt: Ctrl-C.
    """
    with needs_extra("ui"):
        from sigmascope.lbm.serving.models import load_served
        from sigmascope.lbm.serving.server import bind
        from sigmascope.lbm.serving.server import serve as serve_model

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
        told = {"url": address.url, "host": address.host, "port": address.port}
        typer.echo(json.dumps({**told, "model": served.base_name, "lora": served.lora_name}))
        return
    what = served.base_name if served.lora_name is None else f"{served.base_name} + {served.lora_name}"
    typer.echo(f"Serving {what} at {address.url}")
    console.print(Text("Ctrl-C ends it.", style="dim"))


def _open(url: str) -> None:
    if not webbrowser.open(url):
        Console(stderr=True).print(Text(f"No browser could be opened; go to {url}", style="yellow"))
