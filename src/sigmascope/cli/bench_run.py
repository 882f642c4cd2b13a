"""The work of `sigmascope bench`: check, load, measure, show. torch is loaded only when it runs."""

import json
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from sigmascope.cli.bench_options import call_values, cases_of, checked_offload
from sigmascope.cli.bench_tables import print_bench
from sigmascope.cli.extras import needs_extra
from sigmascope.cli.progress import progress_bar
from sigmascope.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from sigmascope.pipeline.bench import CaseResult
    from sigmascope.pipeline.benching.subject import Subject

POCKET = "pocket"
_FOLDER = Path("sigmascope-bench")


@dataclass(frozen=True)
class BenchRequest:
    """The command's options, one field each."""

    pipeline: str
    steps: str | None = None
    resolution: str | None = None
    batch: str = "1"
    repeat: int = 10
    warmup: int = 1
    frames: int | None = None
    prompt: str | None = None
    image: Path | None = None
    call: tuple[str, ...] = ()
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    offload: str = "none"
    target: float | None = None
    output: Path | None = None
    as_json: bool = False


def run_bench(request: BenchRequest) -> bool:
    """Measure what was asked for, and print it.

    Returns:
        Whether every case could be measured.

    Raises:
        SigmascopeError: Whatever is wrong with the options, the pipeline or the folder.
    """
    with needs_extra("lbm"):
        from sigmascope.pipeline.bench import DEFAULT_TARGET, BenchOptions, run_benchmark
        from sigmascope.pipeline.benching.run_files import RunFiles

    target = DEFAULT_TARGET if request.target is None else request.target
    options = BenchOptions(request.repeat, request.warmup, request.seed, target)
    cases = cases_of(request.steps, request.resolution, request.batch, request.frames)
    output = request.output or _FOLDER / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    RunFiles(output).tidy()  # refused now rather than after loading
    subject, load_seconds = _load(request)
    # What a monitor logs of each generation, the tables say of all of them.
    logging.getLogger("sigmascope.monitor").addHandler(logging.NullHandler())
    with progress_bar("Measuring") as progress:
        results = run_benchmark(
            subject, cases, options, output=output, load_seconds=load_seconds, progress=progress
        )
    if request.as_json:
        _print_json(request, subject, load_seconds, results, output)
    else:
        print_bench(Console(), subject.name, load_seconds, results, output, target=request.target)
    return all(result.failure is None for result in results)


def _print_json(
    request: BenchRequest,
    subject: "Subject",
    load_seconds: float,
    results: "tuple[CaseResult, ...]",
    output: Path,
) -> None:
    """Print everything as JSON."""
    found: dict[str, Any] = {
        "pipeline": request.pipeline,
        "name": subject.name,
        "device": str(subject.device),
        "load_seconds": load_seconds,
        "repeat": request.repeat,
        "warm_up": request.warmup,
        "output": str(output),
        "cases": [result.as_dict() for result in results],
    }
    typer.echo(json.dumps(found, indent=2))


def _load(request: BenchRequest) -> "tuple[Subject, float]":
    """The pipeline, and the seconds that it took to load."""
    with needs_extra("lbm"):
        from sigmascope.lbm.devices import resolve_device
        from sigmascope.lbm.images import load_image
        from sigmascope.lbm.pocket.bench import PocketSubject
        from sigmascope.pipeline.benching.diffusers_subject import PROMPT, DiffusersSubject
        from sigmascope.pipeline.benching.loading import load_pipeline
        from sigmascope.pipeline.benching.waiting import waiter

    started = time.perf_counter()
    device = resolve_device(request.device)
    dtype = _dtype(request.dtype, device)
    if request.pipeline == POCKET:
        _refuse_for_pocket(request)
        pocket = PocketSubject.load(dtype=dtype, device=device)
        return pocket, time.perf_counter() - started
    arguments = call_values(request.call)
    if request.image is not None:
        arguments["image"] = load_image(request.image)
    offload = checked_offload(request.offload, device)
    pipeline = load_pipeline(request.pipeline, dtype=dtype, device=device, offload=offload)
    waiter(device)()
    name = Path(request.pipeline).name if Path(request.pipeline).is_dir() else request.pipeline
    subject = DiffusersSubject(name, pipeline, device, request.prompt or PROMPT, arguments)
    return subject, time.perf_counter() - started


def _refuse_for_pocket(request: BenchRequest) -> None:
    given = {"--prompt": request.prompt, "--image": request.image, "--call": request.call}
    for flag, value in given.items():
        if value:
            raise ConfigError(f"{flag}: the pocket model relights its own scene.", hint="Leave it out.")
    if request.offload != "none":
        raise ConfigError("--offload: the pocket model fits anywhere.", hint="Leave it out.")


def _dtype(name: str, device: "torch.device") -> "torch.dtype":
    import torch

    from sigmascope.lbm.devices import resolve_dtype

    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return resolve_dtype(name, "--dtype")
