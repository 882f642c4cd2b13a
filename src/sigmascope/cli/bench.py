"""`sigmascope bench`: how fast a pipeline is, and how much memory it takes, repeatably."""

import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from sigmascope import units
from sigmascope.cli import options
from sigmascope.cli.console import Console, facts, needs_extra, plain, print_json, progress_bar, say, table
from sigmascope.cli.options import AsJson, NoKeep, option_groups
from sigmascope.errors import ConfigError
from sigmascope.history.keeper import keep_all
from sigmascope.records.performance import BenchCase

if TYPE_CHECKING:
    import torch

    from sigmascope.analysis.run_figures import BenchSummary, Latency
    from sigmascope.pipeline.bench import CaseResult, Offload, Subject
    from sigmascope.records.run import Finding, Run

app = typer.Typer(rich_markup_mode="rich")
EPILOG = """Examples:

sigmascope bench pocket --repeat 20

sigmascope bench ./my-pipeline --steps 4,20 --resolution 512,1024x768 --batch 1,4

sigmascope bench owner/name --output before; sigmascope compare after --baseline before
"""

_SIZE_PATTERN = re.compile(r"(\d+)(?:[x×](\d+))?")
POCKET = "pocket"
_DEFAULT_FOLDER = Path("sigmascope-bench")


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What `bench` takes."""

    pipeline: Annotated[
        str,
        typer.Argument(
            help="A diffusers folder, a name on the hub, or pocket: the small model that ships with Sigmascope.",
            metavar="PIPELINE",
            show_default=False,
        ),
    ]
    steps: Annotated[
        str | None,
        typer.Option("--steps", help="Denoising steps. Separate several by commas.", metavar="<n,…>"),
    ] = None
    resolution: Annotated[
        str | None,
        typer.Option(
            "--resolution",
            help="WIDTHxHEIGHT, or the side of a square. Separate several by commas.",
            metavar="<size,…>",
        ),
    ] = None
    batch: Annotated[
        str,
        typer.Option("--batch", help="Pictures per generation. Separate several by commas.", metavar="<n,…>"),
    ] = "1"
    repeat: Annotated[int, typer.Option("--repeat", help="Measured generations of each case.")] = 10
    warmup: Annotated[
        int, typer.Option("--warmup", help="Warm-up generations of each case before the measured ones.")
    ] = 1
    frames: Annotated[int | None, typer.Option("--frames", help="Frames of a video.")] = None
    prompt: Annotated[str | None, typer.Option("--prompt", help="Prompt for every generation.")] = None
    image: Annotated[Path | None, options.start_image()] = None
    call: Annotated[list[str] | None, options.call()] = None
    seed: Annotated[int, typer.Option("--seed", help="Seed of the noise, the same for every repeat.")] = 0
    device: Annotated[str, options.device()] = "auto"
    dtype: Annotated[str, options.dtype()] = "auto"
    offload: Annotated[str, options.offload()] = "none"
    target: Annotated[float | None, typer.Option("--target", help="Seconds that a generation may take.")] = (
        None
    )
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for the runs. By default a new one.", show_default=False),
    ] = None
    no_keep: NoKeep = False
    as_json: AsJson = False


@app.command("bench", epilog=EPILOG)
@option_groups
def bench(request: BenchRequest) -> None:
    """Measure a pipeline: warm-up, repeats, percentiles, throughput and peak memory.

    Every combination of steps, resolution and batch is a case. Each repeat is
    saved as a run, for sigmascope check and sigmascope compare. The exit code is
    1 if a case could not be measured.
    """
    with needs_extra("lbm"):
        from sigmascope.pipeline.bench import DEFAULT_TARGET, BenchOptions, RunFiles, run_benchmark

    target = DEFAULT_TARGET if request.target is None else request.target
    bench_options = BenchOptions(request.repeat, request.warmup, request.seed, target)
    cases = cases_of(request.steps, request.resolution, request.batch, request.frames)
    output = request.output or _DEFAULT_FOLDER / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    RunFiles(output).tidy()  # refused now rather than after loading
    subject, load_seconds = _load(request)
    # The tables show for all generations what a monitor would log for each.
    logging.getLogger("sigmascope.monitor").addHandler(logging.NullHandler())
    try:
        with progress_bar("Measuring") as progress:
            results = run_benchmark(
                subject, cases, bench_options, output=output, load_seconds=load_seconds, progress=progress
            )
    except KeyboardInterrupt:
        saved = len(list(output.glob("*.json")))
        raise KeyboardInterrupt(
            f"Stopped by Ctrl-C. {units.counted(saved, 'run')} so far: {output}" if saved else ""
        ) from None
    if not request.no_keep:
        keep_all([run for result in results for run in result.runs], "bench", _tell)
    if request.as_json:
        print_json(
            {
                "pipeline": request.pipeline,
                "name": subject.name,
                "device": str(subject.device),
                "load_seconds": load_seconds,
                "repeat": request.repeat,
                "warm_up": request.warmup,
                "output": str(output),
                "cases": [result.as_dict() for result in results],
            }
        )
    else:
        print_bench(Console(), subject.name, load_seconds, results, output, target=request.target)
    if not all(result.failure is None for result in results):
        raise typer.Exit(1)


def _tell(line: str) -> None:
    say(f"Sigmascope: {line}", err=True)


def cases_of(
    steps: str | None, resolution: str | None, batch: str, frames: int | None
) -> tuple[BenchCase, ...]:
    """Every combination of what the options list.

    Args:
        steps: Numbers separated by commas; None for the pipeline's own.
        resolution: Sizes separated by commas, each WIDTHxHEIGHT or the side of a square; None for the pipeline's own.
        batch: Numbers separated by commas.
        frames: Number of frames of a video.

    Raises:
        ConfigError: A value is not a number above 0, or not a size.
    """
    if frames is not None and frames < 1:
        raise ConfigError(f"--frames is {frames}.", hint="Give 1 or more.")
    sizes = [None] if resolution is None else [parse_size(part) for part in _split_list(resolution)]
    counts = [None] if steps is None else [_parse_number(part, "--steps") for part in _split_list(steps)]
    batches = [_parse_number(part, "--batch") for part in _split_list(batch)]
    return tuple(
        BenchCase(None if size is None else size[0], None if size is None else size[1], many, count, frames)
        for size, many, count in product(sizes, batches, counts)
    )


def parse_size(text: str) -> tuple[int, int]:
    """Read `1024x768`, or `512` for a square.

    Raises:
        ConfigError: It is not a size.
    """
    match = _SIZE_PATTERN.fullmatch(text.lower())
    if match is None or int(match[1]) * int(match[2] or 1) == 0:
        raise ConfigError(
            f"--resolution: expected WIDTHxHEIGHT or one side, got {text!r}.",
            hint="For example 512 or 1024x768.",
        )
    return int(match[1]), int(match[2] or match[1])


def _split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _parse_number(text: str, flag: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{flag}: expected numbers from 1 on, got {text!r}.", hint="Write several as 1,4,8."
        )
    return int(text)


def _load(request: BenchRequest) -> "tuple[Subject, float]":
    """The pipeline, and the seconds that it took to load."""
    with needs_extra("lbm"):
        from sigmascope.lbm.devices import resolve_device
        from sigmascope.lbm.images import load_image
        from sigmascope.lbm.pocket.demo import PocketSubject
        from sigmascope.pipeline.bench import PROMPT, DiffusersSubject, load_pipeline
        from sigmascope.pipeline.model_state import wait_for

    started = time.perf_counter()
    device = resolve_device(request.device)
    dtype = dtype_of(request.dtype, device)
    if request.pipeline == POCKET:
        _refuse_for_pocket(request)
        pocket = PocketSubject.load(dtype=dtype, device=device)
        return pocket, time.perf_counter() - started
    arguments = call_values(request.call or [])
    if request.image is not None:
        arguments["image"] = load_image(request.image)
    offload = checked_offload(request.offload, device)
    pipeline = load_pipeline(request.pipeline, dtype=dtype, device=device, offload=offload)
    wait_for(device)
    name = Path(request.pipeline).name if Path(request.pipeline).is_dir() else request.pipeline
    subject = DiffusersSubject(name, pipeline, device, request.prompt or PROMPT, arguments)
    return subject, time.perf_counter() - started


def dtype_of(name: str, device: "torch.device") -> "torch.dtype":
    """The dtype that `--dtype` names.

    Raises:
        ConfigError: There is none of that name.
    """
    import torch

    from sigmascope.lbm.devices import resolve_dtype

    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return resolve_dtype(name, "--dtype")


def _refuse_for_pocket(request: BenchRequest) -> None:
    given = {"--prompt": request.prompt, "--image": request.image, "--call": request.call}
    for flag, value in given.items():
        if value:
            raise ConfigError(f"{flag}: the pocket model relights its own scene.", hint="Leave it out.")
    if request.offload != "none":
        raise ConfigError("--offload: the pocket model fits on any device.", hint="Leave it out.")


def call_values(entries: Sequence[str]) -> dict[str, Any]:
    """Read entries such as `guidance_scale=1.0`: the value is JSON, or else the text itself.

    Raises:
        ConfigError: An entry is not NAME=VALUE.
    """
    values: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not name.isidentifier() or not equals:
            raise ConfigError(
                f"--call: expected NAME=VALUE, got {entry!r}.", hint="For example guidance_scale=1.0."
            )
        values[name] = _parse_value(text)
    return values


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def checked_offload(text: str, device: "torch.device") -> "Offload":
    """The offloading of that name.

    Raises:
        ConfigError: The name is unknown, or the device is the CPU, which has nothing to offload from.
    """
    if text not in ("none", "model", "sequential"):
        raise ConfigError(f"--offload is {text!r}.", hint="Use none, model or sequential.")
    if text != "none" and device.type == "cpu":
        raise ConfigError(
            f"--offload {text}: on the CPU, the pipeline is in RAM anyway.", hint="Leave it out."
        )
    return text  # type: ignore[return-value]  # one of the three


def print_bench(
    console: Console,
    name: str,
    load_seconds: float,
    results: "Sequence[CaseResult]",
    output: Path,
    *,
    target: float | None,
) -> None:
    """Print all results.

    Args:
        console: Where to print.
        name: The pipeline's name.
        load_seconds: How long loading took.
        results: Results of every case.
        output: Folder of the runs.
        target: Seconds that a generation may take; None for no target.
    """
    measured = [result for result in results if result.summary is not None]
    console.print(facts(_header(name, load_seconds, measured)))
    if measured:
        console.print(_case_table(measured))
    if len(results) == 1 and results[0].summary is not None:
        console.print(_stage_table(results[0].summary))
    _print_remarks(console, [(_case_name(result), _remarks(result, target)) for result in results])
    if any(result.files for result in results):
        console.print(Text(f"Runs: {output}"), soft_wrap=True)


def _header(name: str, load_seconds: float, measured: "list[CaseResult]") -> list[tuple[str, Text | None]]:
    run = measured[0].runs[0] if measured else None
    first = measured[0].summary.first_seconds if measured and measured[0].summary else None
    return [
        ("Pipeline", plain(name)),
        ("On", None if run is None else plain(_where(run))),
        ("Loaded in", Text(units.seconds(load_seconds))),
        ("First generation", None if first is None else Text(f"{units.seconds(first)} (not counted)")),
    ]


def _where(run: "Run") -> str:
    noted = run.facts.get("benchmark", {})
    device, threads = noted.get("device"), noted.get("threads")
    host = run.host
    if host is None:
        return str(device)
    accelerator = next(
        (candidate for candidate in host.accelerators if candidate.device.startswith(str(device))), None
    )
    if accelerator is not None:
        return f"{device}: {accelerator.name or 'unnamed'}, {units.mib(accelerator.total_bytes)} MB"
    return f"{device}: {host.cpu_model or 'unknown'}, {threads} of {host.cpu_count_logical or '-'} threads"


def _case_table(measured: "list[CaseResult]") -> Table:
    devices = sorted({name for result in measured for name in _peaks(result) if name != "process"})
    made = table(
        "Case",
        "p50",
        "p90",
        "p99",
        "Step\np50",
        "Samples\n/ s",
        "RAM\nMB",
        *(f"{device}\nMB" for device in devices),
    )
    for result in measured:
        summary = result.summary
        if summary is None:
            continue
        latency, step, peaks = summary.generation, summary.step, summary.peak_bytes
        made.add_row(
            plain(_case_name(result)),
            *(units.seconds(value) for value in (latency.p50, latency.p90, latency.p99)),
            units.seconds(None if step is None else step.p50),
            f"{summary.samples_per_second:.3g}",
            *(units.mib(peaks.get(name)) for name in ("process", *devices)),
        )
    return made


def _peaks(result: "CaseResult") -> list[str]:
    return [] if result.summary is None else list(result.summary.peak_bytes)


def _case_name(result: "CaseResult") -> str:
    """The label, with the actual size if none was asked for."""
    made, label = result.made, result.case.label
    if result.case.width is None and made is not None and made.width is not None:
        return f"{made.width}x{made.height}-{label}"
    return label


def _stage_table(summary: "BenchSummary") -> Table:
    made = table("Stage", "p50", "p90", "p99", "Share", "Varies by")
    rows = dict(summary.stages)
    if summary.step is not None:
        rows["each step"] = summary.step
    for name, latency in rows.items():
        share = units.percent(latency.mean, summary.generation.mean) if name != "each step" else ""
        made.add_row(
            plain(name),
            *(units.seconds(value) for value in (latency.p50, latency.p90, latency.p99)),
            share,
            _spread(latency),
        )
    return made


def _spread(latency: "Latency") -> str:
    return units.UNKNOWN if latency.spread is None else f"{100 * latency.spread:.1f} %"


def _print_remarks(console: Console, remarks: "list[tuple[str, list[Text]]]") -> None:
    """Print a line for each remark, after its case's name; a remark on all cases is printed once, without a name."""
    common = (
        [remark for remark in remarks[0][1] if all(remark in others for _, others in remarks)]
        if remarks
        else []
    )
    for name, lines in remarks:
        for line in lines:
            if line not in common or len(remarks) == 1:
                console.print(plain(name, style="bold").append(": ").append_text(line))
    if len(remarks) > 1:
        for line in common:
            console.print(line)


def _remarks(result: "CaseResult", target: float | None) -> list[Text]:
    """What went wrong, whether the target was met, and other remarks."""
    remarks = []
    if result.failure is not None:
        remarks.append(Text("✗ ", style="bold red").append_text(plain(result.failure, style="red")))
    if result.summary is None:
        return remarks
    case, made = result.case, result.made
    if case.width is not None and made is not None and made.width not in (None, case.width):
        remarks.append(Text(f"the pictures are {made.width}x{made.height}.", style="yellow"))
    if target is not None:
        met = sum(seconds <= target for seconds in _generation_seconds(result))
        style = "green" if met == len(result.runs) else "yellow"
        remarks.append(Text(f"{met} of {len(result.runs)} within {units.seconds(target)}.", style=style))
    remarks += [plain(note, style="dim") for note in result.summary.notes]
    return remarks + [_finding(finding) for finding in result.findings()]


def _generation_seconds(result: "CaseResult") -> list[float]:
    return [stage.seconds for run in result.runs for stage in run.stages if stage.name == "generation"]


def _finding(finding: "Finding") -> Text:
    text = Text(units.printable(finding.message))
    return (
        text if finding.advice is None else text.append(f" {units.printable(finding.advice)}", style="cyan")
    )
