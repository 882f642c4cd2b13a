"""What is left of a prompt in the errors of hosts, in spellings that no search for the prompt would find."""

import base64
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from urllib.parse import quote

from rich.console import Console

from sigmascope.records.run import Run

SECRET = "Kestrel Vorpal gliding over a marsh"
FRAGMENTS: dict[str, str] = {
    "a prefix": SECRET[:12],
    "another case": SECRET.upper(),
    "one word": SECRET.split()[1],
    "a hex dump": SECRET.encode().hex(),
    "percent-encoded": quote(SECRET),
    "a list of tokens": repr([byte * 257 for byte in SECRET.encode()]),
    "base64": base64.b64encode(SECRET.encode()).decode(),
}


class QuotingError(Exception):
    """An error of a host, which has notes and a cause that quote the prompt as well."""


def raise_quoting(fragment: str) -> None:
    """Raise an error that quotes the fragment in its message, argument, note, cause, context and key."""
    try:
        try:
            dict[str, int]()[fragment]
        except KeyError as missing:
            raise ValueError(f"cannot encode {fragment!r}") from missing
    except ValueError:
        error = QuotingError({"prompt": fragment}, fragment)
        error.add_note(f"The prompt was {fragment}.")
        raise error  # noqa: B904 - its context quotes it too


def host_calling(fragment: str) -> Callable[..., None]:
    """A function of a script whose line of source quotes the fragment, as `pipe("a red fox")` does."""
    import linecache

    name = f"<script {abs(hash(fragment))}>"
    source = f"def encode(*_, **__):\n    raise_quoting({fragment!r})\n"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Callable[..., None]] = {"raise_quoting": raise_quoting}
    exec(compile(source, name, "exec"), names)
    return names["encode"]


def told(run: Run, folder: Path) -> str:
    """Everything that leaves with a run: file, repr, console, traces."""
    run.save(folder / "run.json")
    run.to_trace(folder / "hash.json")
    run.to_trace(folder / "full.json", prompts="full")
    console = Console(file=StringIO(), width=400)
    run.print(console)
    files = [(folder / name).read_text() for name in ("run.json", "hash.json", "full.json")]
    return "\n".join([*files, repr(run), console.file.getvalue()])  # type: ignore[attr-defined]
