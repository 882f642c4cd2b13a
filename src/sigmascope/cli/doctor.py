"""`sigmascope doctor`: what is here, what will be measured, and what will not, and why."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from sigmascope import units
from sigmascope.cli.console import facts, plain, print_json
from sigmascope.cli.options import AsJson

if TYPE_CHECKING:
    from sigmascope.probes.doctor import DoctorReport, ExtraFacts


EPILOG = "Example: sigmascope doctor --json > machine.json"


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
        _print(Console(), report)


def _print(console: Console, report: "DoctorReport") -> None:
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
        console.print(
            mark.append(measurement.name).append(units.printable(f": {measurement.reason}"), style="dim")
        )
    console.print(_heading("Extras"))
    console.print(facts([(extra.name, _extra_line(extra)) for extra in report.extras]))
    if report.settings:
        console.print(_heading("Environment"))
        console.print(facts([(name, plain(value)) for name, value in report.settings.items()]))
    for line in report.advice:
        console.print(Text("Advice: ", style="bold yellow").append(units.printable(line)))


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
    return Text(f"{what}: pip install 'sigmascope[{extra.name}]'")


def _heading(text: str) -> Text:
    return Text(text, style="bold underline")
