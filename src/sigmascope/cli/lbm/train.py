"""`sigmascope lbm train` and `lbm make-shards`: train a LoRA or every weight, and the shards to train on."""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sigmascope.cli import options
from sigmascope.cli.console import Console, needs_extra, print_json, progress_bar, say, stdout_for_results
from sigmascope.errors import ConfigError
from sigmascope.units import counted, parse_size

if TYPE_CHECKING:
    from sigmascope.lbm.make_shards import SkippedFile, WrittenShard
    from sigmascope.lbm.training.metrics import Listeners, StepLog, Validation
    from sigmascope.lbm.training.settings import TrainSettings
    from sigmascope.lbm.training.train import DryRun, TrainReport


app = typer.Typer(rich_markup_mode="rich")
EPILOG = (
    "Example: sigmascope lbm train --path_config lora_relight.yaml --dry_run, then without --dry_run. "
    "Several GPUs: accelerate launch -m sigmascope lbm train --path_config lora_relight.yaml"
)
RUNNING, OUTPUT = "How to run", "What to show"
_MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `lbm train` takes."""

    path_config: Annotated[
        Path,
        options.flag(
            "--path_config", "YAML with the settings of the training and the model.", show_default=False
        ),
    ]
    resume: Annotated[
        bool | None,
        options.flag(
            "--resume/--no_resume",
            "Continue from the newest checkpoint, or start over and move existing files aside. By default as the YAML says.",
            RUNNING,
        ),
    ] = None
    max_steps: Annotated[
        int | None,
        options.flag("--max_steps", "Total optimizer steps, instead of the YAML's.", RUNNING, min=1),
    ] = None
    device: Annotated[
        str | None, options.device(RUNNING, "auto, cpu, cuda, cuda:1, mps or xpu. By default the YAML's.")
    ] = None
    allow_pipe: Annotated[
        bool,
        options.flag("--allow_pipe", "Allow shards named pipe:COMMAND, and run their commands.", RUNNING),
    ] = False
    max_member: Annotated[
        str | None,
        options.flag(
            "--max_member",
            "Largest picture file in a shard, such as 2GB. By default the YAML's, SIGMASCOPE_MAX_MEMBER, or 256MB.",
            RUNNING,
        ),
    ] = None
    dry_run: Annotated[
        bool,
        options.flag(
            "--dry_run",
            "Check settings, base and data, and show what would be trained and how much memory it takes.",
            RUNNING,
        ),
    ] = False
    live: Annotated[
        bool | None,
        options.flag(
            "--live/--no_live",
            "Show a progress bar, or a line every log_interval steps. By default a bar if stderr is a terminal.",
            OUTPUT,
        ),
    ] = None
    as_json: Annotated[bool, options.as_json(OUTPUT)] = False


@app.command("train", no_args_is_help=True, epilog=EPILOG)
@options.option_groups
def train(options: TrainOptions) -> None:
    """Train on pairs of pictures in WebDataset shards, and write LoRA files.

    Ctrl-C and SIGTERM save a checkpoint and end the training; the same command
    continues it. After a kill, it continues from the last saved checkpoint.
    """
    with needs_extra("train"):
        from sigmascope.lbm.devices import resolve_device
        from sigmascope.lbm.training.train import EXIT_CODES, dry_run
        from sigmascope.lbm.training.train import train as train_lbm

    settings = _settings(options)
    console = Console(stderr=True, highlight=False)
    if options.dry_run:
        with stdout_for_results():
            planned = dry_run(settings, resume=options.resume)
        if _is_main_process():
            print_dry_run(planned, settings, as_json=options.as_json)
        return
    if options.device is not None:
        resolve_device(options.device)  # training's own error would name the YAML's key
    # DeepSpeed is imported, and may compile, while training begins.
    with stdout_for_results(), _train_listeners(options, console) as listeners, _warnings(console):
        report = train_lbm(settings, resume=options.resume, progress=listeners.progress, listeners=listeners)
    if _is_main_process():
        print_report(report, settings, as_json=options.as_json)
    if report.stopped_by is not None:
        raise typer.Exit(EXIT_CODES[report.stopped_by])


def _settings(options: TrainOptions) -> "TrainSettings":
    """The YAML's settings, overridden by those of the command line."""
    from sigmascope.lbm.training.settings import load_train_settings

    settings = load_train_settings(options.path_config, allow_pipe=options.allow_pipe)
    given = {
        "max_steps": options.max_steps,
        "device": options.device,
        "max_member": None if options.max_member is None else parse_size(options.max_member, "--max_member"),
    }
    changed = {key: value for key, value in given.items() if value is not None}
    return settings.model_copy(update=changed)


def print_dry_run(planned: "DryRun", settings: "TrainSettings", *, as_json: bool) -> None:
    """Show what would be trained, the data and the memory, as a table or as JSON."""
    if as_json:
        paths = {name: _text(getattr(planned, name)) for name in ("base", "folder", "resumes")}
        facts = {**asdict(planned), **paths}
        facts["memory"]["total"] = planned.memory.total
        print_json(facts)
        return
    console = Console(highlight=False)
    for name, text in _five_facts(planned, settings).items():
        console.print(Text(f"{name:<8}{text}"), soft_wrap=True)
    console.print(_dry_run_table(planned))
    for name, text in _dry_run_details(planned).items():
        console.print(Text(f"{name:<18}{text}"), soft_wrap=True)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _five_facts(planned: "DryRun", settings: "TrainSettings") -> dict[str, str]:
    """What decides whether to start: what is trained, on what, how long, in how much, and where it goes."""
    layers = sum(row.modules for row in planned.rows)
    trained = sum(row.trained_modules for row in planned.rows)
    share = planned.trained_parameters / max(1, planned.trained_parameters + planned.frozen_parameters)
    base = f"{planned.base}" + (f", to be made from {planned.backbone}" if planned.backbone else "")
    pairs = "an unknown number of pairs" if planned.samples is None else counted(planned.samples, "pair")
    first = "not read: a dry run runs no commands"
    if planned.picture_size is not None:
        first = "first batch {}×{}".format(*planned.picture_size)
    batch, accumulated, processes = planned.step_samples
    steps = "an unknown number" if planned.total_steps is None else str(planned.total_steps)
    all_at_once = batch * accumulated * processes
    each = f"batch {batch} × {accumulated} accumulated × {counted(processes, 'process', 'processes')}"
    time = f"unknown ({planned.seconds_reason})"
    if planned.seconds_left is not None:
        time = f"about {_clock(planned.seconds_left)} for the steps to come"
    plan = f"{steps} in {_epochs(planned, all_at_once)}: {each} = {counted(all_at_once, 'pair')} a step"
    if planned.reached:
        plan = _nothing_left(planned.done_steps, planned.reached, settings)
    begins = "begins anew" if planned.resumes is None else f"resumes from {planned.resumes.name}"
    return {
        "Trains": f"{planned.trains} on {base}: {planned.trained_parameters:,} values ({share:.2%}) in "
        f"{trained} of {layers} layers",
        "Data": f"{pairs} in {counted(len(planned.shards), 'shard')}, {first}",
        "Steps": plan,
        "Needs": f"about {planned.memory.total / _MIB:,.1f} MiB of memory a process; time {time}",
        "Writes": f"to {planned.folder}, {begins}",
    }


def _nothing_left(done: int, reached: Sequence[str], settings: "TrainSettings") -> str:
    """That a finished training is not trained further, and how it would be."""
    from sigmascope.lbm.training.session import follows_length

    limits = " and ".join(f"{name} ({getattr(settings, name)})" for name in reached)
    raised = f"Raise {' and '.join(reached)} to train on."
    if follows_length(settings):
        raised = (
            f"{raised[:-1]}, with --no_resume: lr_scheduler {settings.lr_scheduler} ends at the last step."
        )
    return (
        f"Nothing is left to train: {_steps(done)} {'was' if done == 1 else 'were'} trained before, "
        f"and {limits} {'is' if len(reached) == 1 else 'are'} reached. {raised}"
    )


def _epochs(planned: "DryRun", step_samples: int) -> str:
    """How often the data are gone through; `max_steps` may end it within an epoch."""
    epochs: float | None = planned.epochs
    if planned.samples and planned.total_steps is not None:
        gone_through = planned.total_steps * step_samples / planned.samples
        epochs = gone_through if epochs is None else min(epochs, gone_through)
    if epochs is None:
        return "an unknown number of epochs"
    return "1 epoch" if epochs == 1 else f"{epochs:.3g} epochs"


def _dry_run_table(planned: "DryRun") -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("Block and kind", overflow="fold")
    for name in ("Layers", "Trained", "Rank", "Values trained", "Values frozen"):
        table.add_column(name, justify="right")
    for row in planned.rows:
        table.add_row(
            f"{row.block} {row.kind}",
            str(row.modules),
            str(row.trained_modules),
            row.rank_text,
            f"{row.trained_parameters:,}",
            f"{row.frozen_parameters:,}",
            style=None if row.trained_parameters else "dim",
        )
    return table


def _dry_run_details(planned: "DryRun") -> dict[str, str]:
    memory, validated = planned.memory, planned.validation_samples
    parts = ", ".join(
        f"{name} {getattr(memory, name) / _MIB:,.1f}"
        for name in ("weights", "gradients", "optimizer", "average", "activations")
        if getattr(memory, name)
    )
    return {
        "Validation": "not read"
        if validated is None
        else counted(validated, "sample")
        if validated
        else "none",
        "Memory in MiB": parts,
    }


@contextmanager
def _train_listeners(options: TrainOptions, console: Console) -> "Iterator[Listeners]":
    """A bar on a terminal; elsewhere, such as in a log file, a line now and then."""
    from sigmascope.lbm.training.metrics import Listeners

    live = console.is_terminal if options.live is None else options.live

    def on_validation(validation: "Validation", sheet: Path) -> None:
        values = ", ".join(f"{_steps(count)} {value:.2f} dB" for count, value in validation.psnr.items())
        console.print(Text(f"step {validation.step}  validation: {values}  ({sheet})"), soft_wrap=True)

    total_steps = 0

    def on_progress(done: int, total: int, what: str) -> None:
        nonlocal total_steps
        total_steps = total

    def on_log(log: "StepLog") -> None:
        total, left = "", ""
        if total_steps:
            total = f"/{total_steps}"
            left = f", {_clock(log.step_seconds * (total_steps - log.step))} left"
        loss = "none" if log.loss is None else f"{log.loss:.4g}"
        text = f"step {log.step}{total}  loss {loss}  lr {log.learning_rate:.3g}  "
        console.print(Text(f"{text}{log.step_seconds:.3g} s/step{left}"))

    if not _is_main_process():
        yield Listeners()
    elif live:
        with progress_bar("Training") as progress:
            yield Listeners(progress=progress, on_validation=on_validation)
    else:
        yield Listeners(progress=on_progress, on_log=on_log, on_validation=on_validation)


def _steps(count: int) -> str:
    return counted(count, "step")


def _is_main_process() -> bool:
    """Whether this process prints, of all that a launcher started."""
    return int(os.environ.get("RANK", "0")) == 0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def _warnings(console: Console) -> Iterator[None]:
    """Show warnings while training runs, such as a damaged checkpoint or samples left out."""
    handler = _ConsoleHandler(console)
    logger = logging.getLogger("sigmascope")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        self._console.print(f"Note: {record.getMessage()}", style="yellow", markup=False, soft_wrap=True)


def print_report(report: "TrainReport", settings: "TrainSettings", *, as_json: bool) -> None:
    """Show how a training ended: JSON on stdout, or a few lines."""
    if as_json:
        print_json(_report_values(report, settings))
        return
    err = Console(stderr=True, highlight=False)
    for finding in report.run.findings:
        err.print(Text(f"{finding.message} {finding.advice or ''}".rstrip(), style="yellow"), soft_wrap=True)
    if report.skipped.count:
        what = counted(report.skipped.count, "sample was", "samples were")
        text = f"{what} left out, first {report.skipped.first[0]}"
        err.print(Text(text, style="yellow"), soft_wrap=True)
    if report.stopped_by is not None:
        where = report.checkpoint or "no checkpoint yet"
        say(f"Stopped by {report.stopped_by} after step {report.step}: {where}")
        say("Next: the same command goes on from there.")
        return
    if report.reached:
        say(_nothing_left(report.step, report.reached, settings))
    else:
        before = report.resumed_from or 0
        in_all = f" ({report.step} in all)" if before else ""
        seconds = _clock(report.run.seconds)
        say(f"Trained {_steps(report.step - before)}{in_all} in {seconds}{_gained(report)}")
    for file in report.files:
        say(f"Wrote {file}")
        if file in report.loads:
            say(f"Loads: {report.loads[file].in_words}")


def _report_values(report: "TrainReport", settings: "TrainSettings") -> Mapping[str, Any]:
    return {
        "step": report.step,
        "resumed_from": report.resumed_from,
        "stopped_by": report.stopped_by,
        "seconds": report.run.seconds,
        "logs": [asdict(log) for log in report.logs],
        "validations": [
            {"step": validation.step, "psnr": dict(validation.psnr)} for validation in report.validations
        ],
        "checkpoint": None if report.checkpoint is None else str(report.checkpoint),
        "files": [str(file) for file in report.files],
        "loads": {str(file): loads.as_dict() for file, loads in report.loads.items()},
        "set_aside": None if report.set_aside is None else str(report.set_aside),
        "reached": list(report.reached),
        "skipped_samples": report.skipped.count,
        "findings": [asdict(finding) for finding in report.run.findings],
        "run_path": str(settings.save_ckpt_path / "run.json"),
    }


def _gained(report: "TrainReport") -> str:
    """How validation changed over the session."""
    if not report.validations:
        return ""
    first, last = report.validations[0], report.validations[-1]
    count = next(iter(last.psnr))
    if first is last:
        return f": {last.psnr[count]:.2f} dB at step {last.step}"
    return f": {first.psnr[count]:.2f} dB at step {first.step}, {last.psnr[count]:.2f} dB at step {last.step}"


SHARDS_EPILOG = """Examples:

sigmascope lbm make-shards my_pairs shards

sigmascope lbm make-shards my_pairs shards --keys source,target,mask --shard_size 500

sigmascope lbm make-shards shards --pocket_scenes 1000-1255 --light cool
"""
WHAT, WHERE = "What goes in", "Where it goes"
SHOWN = 10
"""How many files left out the console names; --json names all."""


@dataclass(frozen=True, kw_only=True)
class MakeShardsOptions:
    """What `lbm make-shards` takes."""

    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[FOLDER] OUT",
            help="The folder with the pairs (none with --pocket_scenes), and the folder for the shards.",
            show_default=False,
        ),
    ]
    keys: Annotated[
        str | None,
        options.flag(
            "--keys",
            "Keys that every pair must have. By default source,target, and mask if there are masks.",
            WHAT,
        ),
    ] = None
    pocket_scenes: Annotated[
        str | None,
        options.flag(
            "--pocket_scenes",
            (
                "Render these scenes of the pocket model instead, for example 1000-1255. Those below 1000 are "
                "held out for validation."
            ),
            WHAT,
        ),
    ] = None
    light: Annotated[
        str | None, options.flag("--light", "With --pocket_scenes: light of the targets, cool or warm.", WHAT)
    ] = None
    shard_size: Annotated[
        int | None,
        options.flag(
            "--shard_size", "Pairs in each shard. By default 1000, or 128 with --pocket_scenes.", WHERE
        ),
    ] = None
    prefix: Annotated[
        str, options.flag("--prefix", "Shards are named PREFIX-000000.tar and so on.", WHERE)
    ] = "train"
    overwrite: Annotated[
        bool, options.flag("--overwrite", "Replace all existing shards with this prefix.", WHERE)
    ] = False
    as_json: options.AsJson = False


@app.command("make-shards", no_args_is_help=True, epilog=SHARDS_EPILOG)
@options.option_groups
def make_shards(options: MakeShardsOptions) -> None:
    """Make WebDataset shards from pairs of pictures.

    Two layouts work: [bold]a_source.png[/bold] beside [bold]a_target.png[/bold], or
    [bold]source/a.png[/bold] and [bold]target/a.png[/bold]. Each picture
    is decoded once as a check, and stored unchanged. Files without a pair are listed.
    """
    made = _make_from_folder(options) if options.pocket_scenes is None else _make_from_scenes(options)
    if options.as_json:
        print_json(made.as_dict())
    else:
        _print_made(made)


@dataclass(frozen=True)
class Made:
    """The shards, and the files that were left out."""

    shards: "list[WrittenShard]"
    left_out: "list[SkippedFile]"

    def as_dict(self) -> dict[str, object]:
        """As JSON values."""
        from sigmascope.lbm.make_shards import shard_pattern

        return {
            "train_shards": shard_pattern(self.shards),
            "samples": sum(shard.samples for shard in self.shards),
            "shards": [
                {"path": str(shard.path), "samples": shard.samples, "bytes": shard.nbytes}
                for shard in self.shards
            ],
            "left_out": [asdict(item) for item in self.left_out],
        }


def _make_from_folder(options: MakeShardsOptions) -> Made:
    with needs_extra("train"):
        from sigmascope.lbm.make_shards import (
            SHARD_SIZE,
            ShardTarget,
            check_target,
            encode_pairs,
            find_pairs,
            write_shards,
        )

    if len(options.paths) != 2:
        raise ConfigError(
            f"make-shards: expected FOLDER and OUT, got {counted(len(options.paths), 'path')}.",
            hint="For example: sigmascope lbm make-shards my_pairs shards",
        )
    if options.light is not None:
        raise ConfigError("--light has no effect without --pocket_scenes.", hint="Leave it out.")
    folder, out = options.paths
    target = ShardTarget(
        out,
        options.prefix,
        SHARD_SIZE if options.shard_size is None else options.shard_size,
        options.overwrite,
    )
    check_target(target)
    keys, optional = _keys(options.keys)
    pairs, left_out = find_pairs(folder, keys, optional)
    unusable: list[SkippedFile] = []
    with progress_bar("Reading pairs") as progress:
        written = write_shards(encode_pairs(pairs, unusable, progress), target)
    if not written:
        first = unusable[0]
        raise ConfigError(
            f"{folder}: no pair can be used, of {len(pairs)} (the first, {first.name}: {first.reason}).",
            hint="Check the pictures.",
        )
    return Made(written, [*left_out, *unusable])


def _keys(text: str | None) -> tuple[list[str], list[str]]:
    if text is None:
        return ["source", "target"], ["mask"]
    keys = [key.strip() for key in text.split(",")]
    if len(keys) < 2:
        raise ConfigError(
            f"--keys: expected at least two, joined by commas, got {text!r}.",
            hint="For example --keys source,target,mask.",
        )
    return keys, []


def _make_from_scenes(options: MakeShardsOptions) -> Made:
    with needs_extra("train"):
        from sigmascope.lbm.make_shards import LIGHTS, POCKET_SHARD_SIZE, write_pocket_shards

    if len(options.paths) != 1:
        raise ConfigError(
            f"--pocket_scenes: expected OUT alone, got {counted(len(options.paths), 'path')}.",
            hint="For example: sigmascope lbm make-shards shards --pocket_scenes 1000-1255",
        )
    if options.keys is not None:
        raise ConfigError(
            "--keys has no effect with --pocket_scenes.",
            hint="Leave it out: the scenes have source and target.",
        )
    light = options.light or "cool"
    if light not in LIGHTS:
        raise ConfigError(f"--light: expected {' or '.join(LIGHTS)}, got {light!r}.", hint="Use cool.")
    numbers = _scene_numbers(options.pocket_scenes or "")
    with progress_bar("Rendering") as progress:
        written = write_pocket_shards(
            options.paths[0],
            numbers,
            LIGHTS[light],
            shard_size=POCKET_SHARD_SIZE if options.shard_size is None else options.shard_size,
            prefix=options.prefix,
            overwrite=options.overwrite,
            progress=progress,
        )
    return Made(written, [])


def _scene_numbers(text: str) -> range:
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
    if last < first:
        raise ConfigError(
            f"--pocket_scenes: expected FIRST-LAST, got {text!r}.", hint="For example 1000-1255."
        )
    return range(first, last + 1)


def _print_made(made: Made) -> None:
    from sigmascope.lbm.make_shards import shard_pattern

    warnings = Console(stderr=True, highlight=False, soft_wrap=True)
    for item in made.left_out[:SHOWN]:
        warnings.print(f"[yellow]Left out:[/yellow] {escape(item.name)} {escape(item.reason)}")
    if len(made.left_out) > SHOWN:
        warnings.print(f"[yellow]and {len(made.left_out) - SHOWN} more[/yellow] (--json names all)")
    samples = sum(shard.samples for shard in made.shards)
    mb = sum(shard.nbytes for shard in made.shards) / 1024**2
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{counted(samples, 'pair')} in {counted(len(made.shards), 'shard')}, {mb:.1f} MB")
    console.print(f"train_shards: {escape(shard_pattern(made.shards))}")
