"""`sigmascope ui`: the app in the browser. `serve_pages` is how any command serves pages."""

import threading
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.text import Text

from sigmascope.cli.console import Console, needs_extra, print_json, say

if TYPE_CHECKING:
    from sigmascope.records.prompts import PromptPrivacy
    from sigmascope.ui.app import Part
    from sigmascope.ui.server import Address

app = typer.Typer(rich_markup_mode="rich")


@app.command("ui", epilog="Example: sigmascope ui --open")
def ui(
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="The store of runs: a path, or an SQLAlchemy URL. By default the one that runs are kept in.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        str, typer.Option("--prompts", help="What pages show of prompts: full, hash or none.")
    ] = "hash",
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="Interface to bind to. Any other than loopback needs the token of the printed link.",
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes any free one.")] = 7861,
    open_browser: Annotated[
        bool, typer.Option("--open/--no_open", help="Open the page in the browser when it is ready.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the address as one line of JSON when it is ready.")
    ] = False,
) -> None:
    """Open the runs that were kept in the browser: one, two side by side, trends, runs in progress, and LoRA files.

    Nothing is sent elsewhere. Ctrl-C ends it.
    """
    from sigmascope.records.prompts import privacy_of

    privacy = privacy_of(prompts, f"--prompts {prompts}").name
    pages = Pages("the runs that were kept", own_parts(_store_named(store), privacy))
    serve_pages(lambda: pages, host, port, open_browser=open_browser, as_json=as_json)


class Pages(NamedTuple):
    """What to serve.

    Attributes:
        what: In words.
        parts: The pages; the first is shown first.
        facts: What `--json` prints beside the address.
    """

    what: str
    parts: "Sequence[Part]"
    facts: Mapping[str, Any] = MappingProxyType({})


def own_parts(url: str, prompts: "PromptPrivacy") -> "list[Part]":
    """The app's pages.

    Args:
        url: The store's.
        prompts: What they show of prompts.
    """
    with needs_extra("ui"):
        from sigmascope.ui.doctor_page import doctor_part
        from sigmascope.ui.live_pages import live_part
        from sigmascope.ui.lora_pages import lora_part
        from sigmascope.ui.runs_pages import runs_part
        from sigmascope.ui.trend_page import trend_part

    return [runs_part(url, prompts), live_part(url), trend_part(url), lora_part(), doctor_part()]


def _store_named(store: str | None) -> str:
    """The URL of the store that an option names; without one that of the environment."""
    from sigmascope.history.location import STORE, store_url

    return store_url({STORE: store}) if store else store_url()


def serve_pages(
    load: Callable[[], Pages],
    host: str,
    port: int,
    *,
    open_browser: bool,
    as_json: bool,
) -> None:
    """Take the port, make the pages, and serve them until Ctrl-C.

    Args:
        load: Makes the pages; may take long.
        host: Interface to bind to.
        port: To listen on.
        open_browser: Whether to open the first page.
        as_json: Whether the address is printed as JSON.

    Raises:
        ConfigError: The port is taken, or the host is none of this machine's.
    """
    with needs_extra("ui"):
        from sigmascope.ui.server import bind, serve

    with closing(bind(host, port)) as listening:
        pages = load()

        def on_ready(address: "Address") -> None:
            _announce(address, pages, as_json=as_json)
            if open_browser:
                # Its own thread: some browsers return only when they are closed.
                threading.Thread(target=_open, args=[address.url], daemon=True).start()

        serve(pages.parts, listening, host, on_ready)


def _announce(address: "Address", pages: Pages, *, as_json: bool) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if address.token is not None:
        console.print(
            Text.assemble(
                ("Warning: ", "bold yellow"),
                f"anyone with the link can use {pages.what}, and others on the network can read what is sent. ",
                "Bind to 127.0.0.1 and use an SSH tunnel to keep it to yourself.",
            )
        )
    if as_json:
        at = {"url": address.url, "host": address.host, "port": address.port, "token": address.token}
        print_json({**at, **pages.facts}, indent=None)
        return
    say(f"Serving {pages.what} at {address.url}")
    console.print(Text("Ctrl-C ends it.", style="dim"))


def _open(url: str) -> None:
    if not webbrowser.open(url):
        Console(stderr=True).print(Text(f"No browser could be opened; go to {url}", style="yellow"))
