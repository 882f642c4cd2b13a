"""What `sigmascope doctor` says of this machine, as a page."""

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sigmascope.installation import install_extra
from sigmascope.probes.doctor import DoctorReport, examine
from sigmascope.ui.app import Part, page_of
from sigmascope.units import UNKNOWN, counted, format_size


def doctor_part() -> Part:
    """The page on this machine."""
    return Part(title="Doctor", path="doctor", routes=(Route("/doctor", _doctor),))


async def _doctor(request: Request) -> Response:
    values = await run_in_threadpool(lambda: _view(examine()))
    return await page_of(request, "doctor.html.jinja", **values)


def _view(report: DoctorReport) -> dict[str, Any]:
    host, torch = report.host, report.torch
    ram = UNKNOWN if host.ram_total_bytes is None else format_size(host.ram_total_bytes)
    build = next((f"{kind} {torch[kind]}" for kind in ("cuda", "hip") if torch.get(kind)), "no CUDA or HIP")
    return {
        "machine": [
            ("System", host.os or UNKNOWN),
            ("Processor", f"{host.cpu_model or UNKNOWN}, {_threads(host.cpu_count_logical)}"),
            ("RAM", ram),
            ("Python", f"{host.python_version} ({report.python})"),
            ("PyTorch", f"{torch['version']} ({build}), {_threads(torch['threads'])}"),
        ],
        "libraries": [(name, version) for name, version in host.libraries.items() if name != "torch"],
        "devices": [
            {
                "device": device.device,
                "name": device.name or "unnamed",
                "total": UNKNOWN if device.total_bytes is None else format_size(device.total_bytes),
                "free": UNKNOWN if memory.free_bytes is None else format_size(memory.free_bytes),
                "driver": device.driver_version or UNKNOWN,
            }
            for device, memory in zip(host.accelerators, report.memory, strict=False)
        ],
        "no_devices": host.unavailable.get("accelerators", "none"),
        "measurements": report.measurements,
        "extras": [(extra.name, extra.missing, install_extra(extra.name)) for extra in report.extras],
        "settings": list(report.settings.items()),
        "advice": report.advice,
    }


def _threads(number: object) -> str:
    return counted(number, "thread") if isinstance(number, int) else f"{UNKNOWN} threads"
