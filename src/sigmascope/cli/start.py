"""Commands for a first look.

`demo` does the main job on the pocket model that ships with the package; `watch` runs a script and watches it from
outside; `doctor` says what this machine has, what can be measured, and what cannot, and why.
"""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from sigmascope import units
from sigmascope.cli.console import Console, facts, needs_extra, plain, print_json, progress_bar, say
from sigmascope.cli.options import AsJson, Full, NoKeep
from sigmascope.errors import ConfigError, WriteError
from sigmascope.files import SEPARATORS, require_writable
from sigmascope.installation import install_extra
from sigmascope.plain_text import printable
from sigmascope.records.run import KEEP_GENERATIONS

if TYPE_CHECKING:
    from sigmascope.lbm.pocket.demo import DemoResult
    from sigmascope.probes.doctor import DoctorReport, ExtraFacts

app = typer.Typer(rich_markup_mode="rich")


@app.command(
    "watch",
    context_settings={"allow_interspersed_args": False},  # all that follows the script's name is its own
    epilog="Example: sigmascope watch --output run.json generate.py --steps 4",
)
def watch(
    script: Annotated[
        str | None,
        typer.Argument(
            metavar="SCRIPT",
            help="The script, or - for stdin. With -m a module, with -c code.",
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS", help="Arguments of the script.", show_default=False),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
    code: Annotated[bool, typer.Option("-c", help="Run code, as python -c does.")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="File or folder for the record. By default a new file in this folder.",
        ),
    ] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="Also write a trace for Perfetto.")
    ] = None,
    prompts: Annotated[
        str, typer.Option("--prompts", help="What to keep of prompts: full, hash or none.")
    ] = "full",
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the run. By default the script's.")
    ] = None,
    sample_hz: Annotated[
        float, typer.Option("--sample_hz", help="How many times a second to read memory, at most 10.")
    ] = 10.0,
    keep_generations: Annotated[
        int,
        typer.Option(
            "--keep_generations",
            min=1,
            help="Keep this many of the last generations in full, and only the sums of earlier ones.",
        ),
    ] = KEEP_GENERATIONS,
    step_memory: Annotated[
        bool,
        typer.Option("--step_memory/--no_step_memory", help="Also read memory at the end of each step."),
    ] = True,
    thumbnails: Annotated[
        bool,
        typer.Option(
            "--thumbnails", help="Keep a small copy of each generation's first picture, for reports."
        ),
    ] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Find lines of the script that take time while no step runs.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no summary.")] = False,
    full: Full = False,
    no_keep: NoKeep = False,
    install: Annotated[
        bool,
        typer.Option(
            "--install", help="From now on, SIGMASCOPE=1 watches any Python process of this environment."
        ),
    ] = False,
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Undo --install.")] = False,
) -> None:
    """Run a script unchanged and see where its time and memory go.

    Every diffusers pipeline in it is watched, and so is every stage that the
    script names. The script's output, exit code and signals stay its own. The
    summary goes to stderr at the end.
    """
    if install or uninstall:
        _startup_file(install=install, uninstall=uninstall, script=script)
        return
    _check_script(script, module=module, code=code, sample_hz=sample_hz)
    from sigmascope.integrations.launch import launch
    from sigmascope.integrations.watch_settings import Settings
    from sigmascope.records.prompts import privacy_of

    privacy_of(prompts, f"--prompts {prompts}")
    settings = Settings(
        output=_writable(output, may_be_folder=True),
        trace=_writable(trace),
        prompts=prompts,
        name=name,
        sample_hz=str(sample_hz),
        keep_generations=str(keep_generations),
        step_memory=None if step_memory else "0",
        thumbnails="1" if thumbnails else None,
        stacks="1" if stacks else None,
        quiet="1" if quiet else None,
        full="1" if full else None,
        launched="1",
        keep="0" if no_keep else None,
    )
    how = ["-m"] if module else ["-c"] if code else []
    launch([*how, script or "", *(arguments or [])], settings)


def _startup_file(*, install: bool, uninstall: bool, script: str | None) -> None:
    from sigmascope.integrations import launch

    if script is not None or (install and uninstall):
        raise ConfigError(
            "--install and --uninstall take no script, and cannot be used together.",
            hint="Give one of them alone.",
        )
    if install:
        path = launch.install()
        say(f"Wrote {path}: SIGMASCOPE=1 now watches any Python process of this environment.")
    elif launch.uninstall():
        say(f"Removed {launch.startup_file()}.")
    else:
        say("Nothing was installed.")


def _check_script(script: str | None, *, module: bool, code: bool, sample_hz: float) -> None:
    if not script:
        raise ConfigError("No script is named.", hint="Write: sigmascope watch SCRIPT [ARGUMENTS]")
    if module and code:
        raise ConfigError("-m and -c cannot be used together.", hint="Give one of them.")
    if not (module or code or script == "-") and not Path(script).exists():
        raise ConfigError(
            f"The script {script} does not exist.", hint="Check the path. To run a module, add -m."
        )
    if not 0 < sample_hz < float("inf"):
        raise ConfigError(
            f"--sample_hz must be finite and above 0, got {sample_hz:g}.", hint="Choose one from 0.1 to 10."
        )


def _writable(path: str | None, *, may_be_folder: bool = False) -> str | None:
    """The absolute path; a bad one is refused now, not when the script has run."""
    if path is None:
        return None
    if not (may_be_folder and os.path.isdir(path)):  # noqa: PTH112 - False of a name that is too long, where `Path` raises
        if path.endswith(SEPARATORS):
            raise WriteError(path, "is not a folder.", hint="Create it, or name a file.")
        require_writable(path)
    return str(Path(path).absolute())


@app.command("doctor", epilog="Example: sigmascope doctor --json > machine.json")
def doctor(as_json: AsJson = False) -> None:
    """Examine this machine: versions, devices, optional packages, and what can be measured.

    Nothing is changed, and no device is initialised. Send the output along with
    a bug report; it names no user, file or prompt.
    """
    from sigmascope.probes.doctor import examine

    report = examine()
    if as_json:
        print_json(report.as_dict())
    else:
        _print_doctor(Console(), report)


def _print_doctor(console: Console, report: "DoctorReport") -> None:
    host, torch = report.host, report.torch
    libraries = {
        name: version for name, version in host.libraries.items() if name not in ("sigmascope", "torch")
    }
    console.print(_heading("Machine"))
    console.print(
        facts(
            [
                ("System", plain(host.os or "-")),
                ("Processor", plain(f"{host.cpu_model or '-'}, {host.cpu_count_logical or '-'} threads")),
                ("RAM", f"{units.mib(host.ram_total_bytes)} MB"),
                ("Python", plain(f"{host.python_version} ({report.python})")),
                ("Sigmascope", plain(host.libraries.get("sigmascope", "-"))),
                ("PyTorch", plain(_torch_line(torch))),
                ("Libraries", plain(", ".join(f"{name} {version}" for name, version in libraries.items()))),
            ]
        )
    )
    console.print(_heading("Devices"))
    _print_devices(console, report)
    console.print(_heading("Measured"))
    for measurement in report.measurements:
        mark = Text("yes  ", style="green") if measurement.works else Text("no   ", style="yellow")
        console.print(mark.append(measurement.name).append(printable(f": {measurement.reason}"), style="dim"))
    console.print(_heading("Extras"))
    console.print(facts([(extra.name, _extra_line(extra)) for extra in report.extras]))
    if report.settings:
        console.print(_heading("Environment"))
        console.print(facts([(name, plain(value)) for name, value in report.settings.items()]))
    for line in report.advice:
        console.print(Text("Advice: ", style="bold yellow").append(printable(line)))


def _heading(text: str) -> Text:
    return Text(text, style="bold underline")


def _print_devices(console: Console, report: "DoctorReport") -> None:
    if not report.host.accelerators:
        console.print(plain(report.host.unavailable.get("accelerators", "none"), style="yellow"))
    for device, memory in zip(report.host.accelerators, report.memory, strict=False):
        parts = [device.name or "unnamed", f"{units.mib(device.total_bytes)} MB"]
        if memory.free_bytes is not None:
            parts.append(f"{units.mib(memory.free_bytes)} MB free")
        if device.driver_version is not None:
            parts.append(f"driver {device.driver_version}")
        if device.compute_capability is not None:
            parts.append(f"capability {device.compute_capability}")
        console.print(Text(f"{device.device}: ", style="bold").append_text(plain(", ".join(parts))))


def _torch_line(torch: dict[str, str | int | bool | None]) -> str:
    build = next((f"{kind} {torch[kind]}" for kind in ("cuda", "hip") if torch.get(kind)), "no CUDA or HIP")
    allocator = f", allocator {torch['allocator']}" if torch.get("allocator") else ""
    return (
        f"{torch['version']} ({build}{allocator}), {torch['threads']} threads, "
        f"float32 matmul {torch['float32_matmul_precision']}"
    )


def _extra_line(extra: "ExtraFacts") -> Text:
    if not extra.missing:
        return Text("installed", style="green")
    have = len(extra.versions) - len(extra.missing)
    what = f"missing {', '.join(extra.missing)}" + (f" ({have} others are there)" if have else "")
    return Text(f"{what}: {install_extra(extra.name)}")


@app.command("demo", epilog="Example: sigmascope demo --source-image my.jpg --output relit")
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the LoRA, the pictures and run.json.")
    ] = Path("sigmascope-demo"),
    source_image: Annotated[
        Path | None,
        typer.Option("--source_image", help="Relight this picture instead of a rendered scene."),
    ] = None,
    rank: Annotated[int, typer.Option("--rank", help="Rank of Linear layers.")] = 16,
    conv_rank: Annotated[int, typer.Option("--conv_rank", help="Rank of Conv2d layers.")] = 16,
    num_inference_steps: Annotated[
        int, typer.Option("--num_inference_steps", help="Steps along the bridge.")
    ] = 2,
    as_json: AsJson = False,
) -> None:
    """Make, prove, apply and watch a LoRA on a small trained model, in seconds.

    A LoRA is extracted from the pocket model that ships with Sigmascope,
    validated layer by layer and applied at three strengths, and every stage is
    recorded. The exit code is 1 when a check does not hold.
    """
    with needs_extra("lbm"):
        from sigmascope.lbm.pocket.demo import run_demo

    with progress_bar("Demo") as progress:
        result = run_demo(
            output,
            source_image=source_image,
            rank=rank,
            conv_rank=conv_rank,
            num_inference_steps=num_inference_steps,
            progress=progress,
        )
    if as_json:
        print_json(
            {
                "validation": result.validation.as_dict(),
                "psnr_db": result.psnr,
                "checks": [asdict(check) for check in result.checks],
                "files": {name: str(path) for name, path in result.files.items()},
            }
        )
    else:
        _print_demo(result, Console())
    if not all(check.passed for check in result.checks):
        raise typer.Exit(1)


def _print_demo(result: "DemoResult", console: Console) -> None:
    from sigmascope.cli.lora.validate import print_validation
    from sigmascope.reports import print_run

    print_validation(console, result.validation, verbose=False)
    print_run(result.run, console)
    if result.psnr:
        console.print(_quality_table(result.psnr))
    for check in result.checks:
        mark = ("✓ ", "green") if check.passed else ("✗ ", "bold red")
        console.print(Text.assemble(mark, f"{check.claim}: {check.measured}."))
    for what, path in (
        ("Pictures", result.files["sheet"]),
        ("Record", result.files["run"]),
        ("LoRA", result.files["lora"]),
    ):
        console.print(Text(f"{what}: {path}"), soft_wrap=True)


def _quality_table(psnr: dict[str, float]) -> Table:
    table = Table(title="\nAgainst the rendered truth", title_justify="left", box=None, pad_edge=False)
    table.add_column("Picture")
    table.add_column("PSNR, dB", justify="right")
    for name, value in psnr.items():
        table.add_row(Text(name), f"{value:.1f}")
    return table
