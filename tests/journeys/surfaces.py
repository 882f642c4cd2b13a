"""Where users look at a run, as they do it: a row of `SURFACES` is a surface, with what must be seen there.

A surface gives a text, and the parts that it must have. They are regular expressions, since what is around a figure is
laid out in columns or tags.
"""

import html
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.journeys.recordings import Made
from typer.testing import CliRunner

import sigmascope
from sigmascope.cli.root import app
from sigmascope.errors import SigmascopeError
from sigmascope.integrations.asgi import PerformanceMonitoringMiddleware
from sigmascope.records.merge import is_rank
from sigmascope.records.run import Run

WIDE: Final = {"COLUMNS": "400"}


class Kept(NamedTuple):
    """A recording, its record as it was saved, and what a server's metrics say of it."""

    made: Made
    path: Path
    metrics: str

    @property
    def run(self) -> Run:
        return sigmascope.load_run(self.path)


class Seen(NamedTuple):
    """What a surface shows, and what of it was expected."""

    text: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Surface:
    """One way to look at a recording; the second is another one, to compare it with."""

    name: str
    look: Callable[[Kept, Kept, Path], Seen]


def served(make: Callable[[], Made]) -> tuple[Made, str]:
    """What is recorded while a request is answered with two bytes, and the metrics of that server afterwards."""
    made: list[Made] = []

    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        made.append(make())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    server = PerformanceMonitoringMiddleware(answer, metrics_path="/metrics")
    asked = [_run(_asked(server, path)) for path in ("/draw", "/metrics")]
    return made[0], asked[1]


def _run(coroutine: Coroutine[Any, Any, str]) -> str:
    """What it returns; it waits for nothing. A loop would take Ctrl-C for itself."""
    try:
        coroutine.send(None)
    except StopIteration as returned:
        return str(returned.value)
    raise AssertionError("it waits")


async def _asked(server: Any, path: str) -> str:
    body = b""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: dict[str, Any]) -> None:
        nonlocal body
        body += message.get("body", b"")

    await server({"type": "http", "method": "GET", "path": path, "headers": []}, receive, send)
    return body.decode()


def _peak(run: Run) -> str:
    """The figure of every verdict: the highest memory of any stage, as MiB with four digits."""
    highest = max(stage.peak.rss_bytes or 0 for stage in run.walk() if stage.peak is not None)
    return f"Peak of memory: {highest / 2**20:.4g} MB" if highest < 1000 * 2**20 else "Peak of memory: "


def _verdict(kept: Kept) -> tuple[str, ...]:
    return re.escape(_peak(kept.run)), re.escape(kept.made.says)


def _steps(kept: Kept) -> str:
    """The count as tables give it, before the time of each; rows below half a per cent of the time are not shown."""
    run, count = kept.run, kept.made.steps
    in_steps = sum(seconds or 0.0 for stage in run.walk() for seconds in stage.steps.seconds)
    return rf"\b{count:,} × \d" if count > 1 and in_steps > 0.01 * run.seconds else ""


def _shown(*arguments: object) -> str:
    """What a command prints, or how it refuses."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env=WIDE)
    if isinstance(done.exception, SigmascopeError):
        return str(done.exception)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def _printed(kept: Kept, other: Kept, folder: Path) -> Seen:
    return Seen(_shown("show", kept.path), (*_verdict(kept), _steps(kept)))


def _in_full(kept: Kept, other: Kept, folder: Path) -> Seen:
    count = rf"✓? .*\b{kept.made.steps} × \d" if kept.made.steps else ""
    return Seen(_shown("show", kept.path, "--full"), (*_verdict(kept), count))


def _page(kept: Kept, other: Kept, folder: Path) -> Seen:
    """As the watch itself writes it, before it is saved."""
    kept.made.run.to_html(folder / "page.html")
    text = html.unescape((folder / "page.html").read_text(encoding="utf-8"))
    return Seen(text, (*_verdict(kept), _steps(kept), *map(re.escape, kept.made.page)))


def _markdown(kept: Kept, other: Kept, folder: Path) -> Seen:
    text = _shown("show", kept.path, "--markdown")
    return Seen(re.sub(r"\\(.)", r"\1", text), _verdict(kept))


def _in_notebook(kept: Kept, other: Kept, folder: Path) -> Seen:
    return Seen(html.unescape(kept.made.run._repr_html_()), (re.escape(_peak(kept.run)), _steps(kept)))


def _trace(kept: Kept, other: Kept, folder: Path) -> Seen:
    _shown("show", kept.path, "--trace", folder / "trace.json")
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    steps = sum(event.get("cat") == "step" for event in events)
    return Seen(f"{steps} steps", (f"^{kept.made.steps} steps$",))


def _json_and_back(kept: Kept, other: Kept, folder: Path) -> Seen:
    kept.run.save(folder / "again.json")
    assert (folder / "again.json").read_bytes() == kept.path.read_bytes()
    (told,) = json.loads(_shown("show", folder / "again.json", "--json"))
    plain = json.loads((folder / "again.json").read_text(encoding="utf-8"))["run"]
    steps = sum(len(stage["steps"]["seconds"]) for stage in _stages(plain["stages"]))
    text = f"{steps} steps; {told['headline']} {told['findings']}"
    return Seen(text, (f"^{kept.made.steps} steps", *_verdict(kept)))


def _stages(stages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for stage in stages:
        yield stage
        yield from _stages(stage["children"])


def _with_itself(kept: Kept, other: Kept, folder: Path) -> Seen:
    replace(kept.run, id="twin").save(folder / "twin.json")
    says = "Nothing differs" if kept.run.complete else "1 of 1 broke off and was left out"
    return Seen(_shown("compare", kept.path, folder / "twin.json"), (says,))


def _with_another(kept: Kept, other: Kept, folder: Path) -> Seen:
    _shown("show", kept.path, other.path, "--html", folder / "both.html")
    text = html.unescape((folder / "both.html").read_text(encoding="utf-8"))
    broken_off = "" if kept.run.complete else "The earlier run broke off. Times and outputs are not compared."
    return Seen(text, (*_verdict(kept), *_verdict(other), _steps(kept), _steps(other), broken_off))


def _metrics(kept: Kept, other: Kept, folder: Path) -> Seen:
    counted = ('requests_total{method="GET",route="unknown",status="200"} 1.0', "response_bytes_total 2.0")
    generations = "sigmascope_generation_seconds_count" in kept.metrics
    assert generations == ("performance" in _names_of_facts(kept.run)), "the server missed a generation"
    return Seen(kept.metrics, tuple(re.escape(f"sigmascope_{line}") for line in counted))


def _metrics_file(kept: Kept, other: Kept, folder: Path) -> Seen:
    """Each stage that is no process is counted once."""
    _shown("show", kept.path, "--prometheus", folder / "runs.prom")
    counted = re.findall(
        r"^sigmascope_stage_seconds_count\{.*\} ([0-9.]+)$",
        (folder / "runs.prom").read_text("utf-8"),
        re.MULTILINE,
    )
    stages = sum(not is_rank(stage) for stage in kept.run.walk())
    return Seen(f"{sum(map(float, counted)):.0f} stages", (f"^{stages} stages$",))


def _names_of_facts(run: Run) -> set[str]:
    return {name for stage in run.walk() for name in stage.facts}


SURFACES: Final = (
    Surface("print", _printed),
    Surface("print in full", _in_full),
    Surface("HTML", _page),
    Surface("Markdown", _markdown),
    Surface("notebook", _in_notebook),
    Surface("trace", _trace),
    Surface("JSON and back", _json_and_back),
    Surface("compared with itself", _with_itself),
    Surface("compared with another", _with_another),
    Surface("Prometheus", _metrics),
    Surface("Prometheus file", _metrics_file),
)
